"""The entries of a benchmark suite: shapes, operations and score options, and the functions that list them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

from ...ops import FORWARD
from ..names import Shape

Measures = Literal[
    "device time",
    "host time",
    "first calls",
    "sharded time",
    "head time",
    "token time",
    "gate time",
    "step time",
    "decoding time",
]
"""Kinds of measurements.

`result.FORMS` has the fields that each records, `tables.KINDS` its table, `kinds.KINDS` how it is measured if not by
`measure.run`.
"""

QUICK_MS = 50
"""Milliseconds for each measurement with --quick."""


Fields = dict[str, Any]
"""The fields of a case of a suite by name, without its dtype."""


@dataclass(frozen=True)
class Suite:
    """A list of entries, with the dtypes that they are measured in.

    Attributes:
        description: The purpose of the suite.
        entries: The cases, without their dtypes.
        few: The cases of --quick: each kind of entry, small enough for a CPU.
        dtypes: Every entry is measured in each of these dtypes.
        repeat_ms: Milliseconds for each measurement.
        measures: The kind of measurement.
        sentences: True where a sentence of analysis about each case stands below the table.
        excluded: Names of the options of the command line that the suite has no use for.
    """

    description: str
    entries: tuple[Fields, ...]
    few: tuple[Fields, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    repeat_ms: int = 100
    measures: Measures = "device time"
    sentences: bool = False
    excluded: tuple[str, ...] = ()

    @property
    def quick(self) -> Suite:
        """The suite of --quick: few cases and short repeats."""
        return replace(self, entries=self.few, repeat_ms=min(QUICK_MS, self.repeat_ms))


def each(operations: str | Sequence[str], *shapes: Shape, **fields: Any) -> tuple[Fields, ...]:
    """The fields of cases over the last dimension of these shapes, for each operation and each value in a list.

    Example:
        >>> [(case["shape"], case["layers"]) for case in each("softmax", (4, 8), (2, 8), layers=[1, 2])]
        [((4, 8), 1), ((4, 8), 2), ((2, 8), 1), ((2, 8), 2)]
    """
    values = [value if isinstance(value, list) else [value] for value in fields.values()]
    return tuple(
        {"operation": name, "shape": shape, "dim": len(shape) - 1, **dict(zip(fields, chosen, strict=True))}
        for name in ([operations] if isinstance(operations, str) else operations)
        for shape in shapes for chosen in product(*values)
    )  # fmt: skip


rows = partial(each, FORWARD[0])
"""The fields of cases of softmax."""


def with_options(*shapes: Shape, causal: Shape) -> tuple[Fields, ...]:
    """Shapes without score options and with those that models use, and a shape with a causal mask."""
    options: list[tuple[str, ...]] = [(), ("scale",), ("mask",), ("bias",), ("scale", "mask")]
    plain = [entry for fused in options for entry in rows(*shapes, fused=fused)]
    return (*plain, *rows(causal, fused=("causal",)))


def powers(rows: int, first: int, last: int, step: int = 1) -> list[Shape]:
    """Shapes of this number of rows, of 2^first, 2^(first + step), … 2^last columns."""
    return [(rows, 1 << k) for k in range(first, last + 1, step)]
