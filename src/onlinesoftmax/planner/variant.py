"""The variant of a proposal: the key under which a measured table remembers it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One choice of blocks among those of a strategy, in numbers that do not depend on the length of a row.

    A strategy sets the fields that tell its proposals apart and leaves the others at their defaults.  A table of one
    shape can so name the blocks for another shape: the same variant there.

    Attributes:
        threads: Threads of a block.
        lanes: Threads that share a row.
        blocks: Blocks of a cluster.
        chunks: 16-byte chunks of a row that a thread keeps in registers.
        depth: As in Blocks.
        tile: Elements of a program's tile, at least for rows that are kept whole, at most for rows that are streamed.
        elements: Elements of the tile that one thread holds.
        stages: As in Blocks.
        team: "all" where one team of blocks takes a row after the other, "teams" where several share the device.
        shared: True where shared memory holds a part of a row.
        terms: As in Threads.
        padded: True where a row is padded to one power of two.

    Example:
        >>> print(Variant(threads=512, chunks=4, team="all"))
        threads=512 chunks=4 team=all
        >>> Variant.parse("lanes=32 threads=128 terms") == Variant(threads=128, lanes=32, terms=True)
        True
    """

    threads: int = 0
    lanes: int = 0
    blocks: int = 0
    chunks: int = 0
    depth: int = 0
    tile: int = 0
    elements: int = 0
    stages: int = 0
    team: str = ""
    shared: bool = False
    terms: bool = False
    padded: bool = False

    def __str__(self) -> str:
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value:
                words.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant of a canonical text, as `str` writes it.

        Raises:
            ValueError: the text names a field that a variant does not have.
        """
        kinds: dict[str, type] = {field.name: type(field.default) for field in fields(cls)}
        values: dict[str, Any] = {}
        for word in text.split():
            name, _, value = word.partition("=")
            if name not in kinds or bool(value) == (kinds[name] is bool):
                raise ValueError(f"{word!r} is no field of a variant; fields: {', '.join(kinds)}")
            values[name] = True if kinds[name] is bool else kinds[name](value)
        return cls(**values)


ONLY = Variant()
"""The variant of a strategy with one proposal."""
