"""The entries of a benchmark suite: shapes, operations and score options, and the functions that list them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ...ops import FORWARD
from ..names import Shape
from .routing.cases import ROUTE
from .sampling.cases import ASKED, SAMPLE

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
"""Kinds of measurements; `result.FORMS` has what is recorded, `tables.KINDS` the table, `kinds.KINDS` own ways."""

QUICK_MS = 50
"""Milliseconds for each measurement with --quick."""


class Entry(NamedTuple):
    """A case of a suite, without its dtype."""

    shape: Shape
    dim: int
    operation: str = FORWARD[0]
    fused: tuple[str, ...] = ()
    with_gradient: bool = False
    reduction: str = ""
    more: tuple[tuple[str, Any], ...] = ()
    """Further fields of the case and their values."""

    def fields(self) -> dict[str, Any]:
        """The fields of the case."""
        found = self._asdict()
        return found | dict(found.pop("more"))


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
    entries: tuple[Entry, ...]
    few: tuple[Entry, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    repeat_ms: int = 100
    measures: Measures = "device time"
    sentences: bool = False
    excluded: tuple[str, ...] = ()

    @property
    def quick(self) -> Suite:
        """The suite of --quick: few cases and short repeats."""
        return replace(self, entries=self.few, repeat_ms=min(QUICK_MS, self.repeat_ms))


def rows(*shapes: Shape, **kind: Any) -> tuple[Entry, ...]:
    """Entries of these shapes over the last dimension; `kind` has the other fields of Entry."""
    return tuple(Entry(shape, len(shape) - 1, **kind) for shape in shapes)


def each(operations: Iterable[str], *shapes: Shape, **kind: Any) -> tuple[Entry, ...]:
    """Entries of these shapes for each operation."""
    return tuple(entry for operation in operations for entry in rows(*shapes, operation=operation, **kind))


def with_options(*shapes: Shape, causal: Shape) -> tuple[Entry, ...]:
    """Shapes without score options and with those that models use, and a shape with a causal mask."""
    options: list[tuple[str, ...]] = [(), ("scale",), ("mask",), ("bias",), ("scale", "mask")]
    plain = [entry for fused in options for entry in rows(*shapes, fused=fused)]
    return (*plain, *rows(causal, fused=("causal",)))


def powers(rows: int, first: int, last: int, step: int = 1) -> list[Shape]:
    """Shapes of this number of rows, of 2^first, 2^(first + step), … 2^last columns."""
    return [(rows, 1 << k) for k in range(first, last + 1, step)]


def tokens(operation: str, kinds: Iterable[str], *shapes: Shape) -> tuple[Entry, ...]:
    """Entries of these shapes for each kind of logits and for everything that is asked of a function of logits."""
    return tuple(
        Entry(shape, len(shape) - 1, operation, more=(("logits", kind), ("asked", asked)))
        for shape in shapes for asked in ASKED[operation] for kind in kinds
    )  # fmt: skip


def heads(operation: str, *shapes: Shape) -> tuple[Entry, ...]:
    """Heads of these tokens, hidden sizes and classes, with the gradients of input and weight."""
    return rows(*shapes, operation=operation, with_gradient=True)


def steps(operation: str, layers: int, *shapes: Shape) -> tuple[Entry, ...]:
    """Training steps with this loss of decoders of so many layers."""
    return rows(*shapes, operation=operation, with_gradient=True, more=(("layers", layers),))


def decoding(hidden: int, layers: int, *shapes: Shape, asked: Iterable[str]) -> tuple[Entry, ...]:
    """Steps of a decoder of this width and so many layers, for each of what is asked of `sample`."""
    return tuple(
        Entry(shape, 1, SAMPLE, more=(("asked", name), ("hidden", hidden), ("layers", layers)))
        for shape in shapes for name in asked
    )  # fmt: skip


def gates(gate: str, *shapes: Shape) -> tuple[Entry, ...]:
    """Entries of these shapes for a gate, alone and with a gradient."""
    return tuple(
        Entry(shape, 1, ROUTE, with_gradient=gradient, more=(("gate", gate),))
        for shape in shapes for gradient in (False, True)
    )  # fmt: skip
