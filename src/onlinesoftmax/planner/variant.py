"""The variant of a proposal: the key under which a measured table remembers it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

FIELDS: dict[str, type] = {
    "threads": int,
    "lanes": int,
    "blocks": int,
    "chunks": int,
    "depth": int,
    "tile": int,
    "elements": int,
    "stages": int,
    "team": str,
    "shared": bool,
    "terms": bool,
    "padded": bool,
}
"""The type of each number or word of a variant, in the order of its text.

threads: threads of a block.  lanes: threads that share a row.  blocks: blocks of a cluster.  chunks: 16-byte chunks of
a row that a thread keeps in registers.  depth, stages: as in Blocks.  tile: elements of a program's tile, at least for
rows that are kept whole, at most for rows that are streamed.  elements: elements of the tile that one thread holds.
team: "all" where one team of blocks takes one row after another, "teams" where several teams share the device.
shared: shared memory holds a part of a row.  terms: as in Threads.  padded: a row is padded to one power of two.
"""


class Variant:
    """One choice of blocks among those of a strategy, in numbers that do not depend on the length of a row.

    A strategy sets the fields that tell its proposals apart and leaves the others out.  So a table of one shape can
    name the blocks for another shape: those of the same variant.  Equal variants are one object, because a plan
    compares thousands of them.

    Args:
        **values: Fields by name, as FIELDS describes them; 0, "" and False are the same as no field.

    Raises:
        ValueError: a field is not in FIELDS, or has another type.

    Example:
        >>> print(Variant(threads=512, chunks=4, team="all"))
        threads=512 chunks=4 team=all
        >>> Variant.parse("lanes=32 threads=128 terms") is Variant(threads=128, lanes=32, terms=True)
        True
    """

    __slots__ = ("_text",)

    _text: str

    def __new__(cls, **values: int | str) -> Variant:
        text = _text_of(**values)
        if (known := _KNOWN.get(text)) is not None:
            return known
        made = super().__new__(cls)
        made._text = text
        return _KNOWN.setdefault(text, made)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Variant({self._text!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Variant.parse, (self._text,)

    def with_terms(self) -> Variant:
        """The same blocks, whose threads hold the terms of a row."""
        return _with_terms(self)

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant of a text, as `str` writes it.

        Raises:
            ValueError: the text names a field that a variant does not have.
        """
        values: dict[str, int | str] = {}
        for word in text.split():
            name, _, value = word.partition("=")
            kind = FIELDS.get(name)
            if kind is None or bool(value) == (kind is bool):
                raise ValueError(f"{word!r} is no field of a variant; fields: {', '.join(FIELDS)}")
            values[name] = True if kind is bool else kind(value)
        return cls(**values)


_KNOWN: dict[str, Variant] = {}
"""The variants by their texts."""


@lru_cache(maxsize=4096, typed=True)
def _text_of(**values: int | str) -> str:
    """The text of a variant with these fields."""
    for name, value in values.items():
        if type(value) is not FIELDS.get(name):
            raise ValueError(f"{name}={value!r} is no field of a variant; fields: {', '.join(FIELDS)}")
    given = [(name, values[name]) for name in FIELDS if values.get(name)]
    return " ".join(name if value is True else f"{name}={value}" for name, value in given)


@lru_cache(maxsize=4096)
def _with_terms(variant: Variant) -> Variant:
    return Variant.parse(" ".join(dict.fromkeys([*str(variant).split(), "terms"])))


ONLY = Variant()
"""The variant of a strategy with one proposal."""
