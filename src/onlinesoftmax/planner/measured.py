"""Measured tables: which variants of which strategies were fast for a grid of shapes, and their microseconds.

`onlinesoftmax tune` makes a table for the GPU at hand; tables of some GPUs come with the package.  The planner reads
them (fastest.py).  A GPU without a table borrows another's, which is a better guess than an estimate.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from ..core.cache import load_document, with_checksum
from ..core.declaration import Operation
from ..core.device import Device
from ..core.problem import Problem
from ..ops import OPERATIONS
from .table_check import FORMAT, check_table
from .variant import Variant

KEPT_RATIO = 1.5
"""A cell keeps the variants that took at most KEPT_RATIO times as long as the fastest variant of their backend.

A variant that a cell does not name is therefore forecast to take KEPT_RATIO times as long as the fastest.  Some tables
keep only the fastest variant of each strategy (`Table.every_variant`), and have another ratio (UNMEASURED_RATIO).
"""


def optional_operands(operation: Operation, writes_elements: bool) -> tuple[str, ...]:
    """Names of the optional operands of a measured call: those per row, which only a gradient reads."""
    return tuple(o.name for o in operation.operands if o.optional and o.kind == "row" and writes_elements)


class Key(NamedTuple):
    """The properties of a problem that measurements of another problem cannot stand for.

    Attributes:
        operation: Name of the operation that was measured.
        elements: True where one of the outputs had a value for each element.
        itemsize: Bytes of an element: 2 or 4.  For elements of 8 bytes, times of 4 bytes are scaled by the bytes moved.
        unaligned: True where rows are planned as unaligned ones (`Problem.unaligned`).
    """

    operation: str
    elements: bool
    itemsize: int
    unaligned: bool

    def problem(self, rows: int, cols: int, dtype: str) -> Problem:
        """A problem of this operation that writes the same kinds of outputs."""
        operation = OPERATIONS[self.operation]
        outputs = tuple(o.name for o in operation.outputs if self.elements and o.kind == "element")
        return Problem(
            self.operation, rows, cols, dtype, outputs=tuple(dict.fromkeys((*operation.always, *outputs))),
            given=optional_operands(operation, self.elements),
        )  # fmt: skip


class Timing(NamedTuple):
    """One variant of a strategy, and its microseconds for a shape."""

    backend: str
    strategy: str
    variant: Variant
    us: float


@dataclass(frozen=True)
class Cell:
    """One shape that was measured.

    Attributes:
        rows, cols: The shape.
        timings: The variants that took at most KEPT_RATIO times as long as the fastest of their backend, the fastest
            first.
        backends: Backends that were measured.
    """

    rows: int
    cols: int
    timings: tuple[Timing, ...]
    backends: tuple[str, ...] = ("cuda",)
    _found: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_backends(self, backends: frozenset[str]) -> Cell:
        """The cell with the timings of these backends alone.  It is kept, as the times are: most plans repeat it."""
        if backends not in self._found:
            timings = tuple(timing for timing in self.timings if timing.backend in backends)
            self._found[backends] = replace(self, timings=timings)
        found: Cell = self._found[backends]
        return found

    def times(self, backend: str, strategy: str) -> tuple[dict[Variant, float], float]:
        """Microseconds of the variants of a strategy, and of the fastest of its backend, or of all if it has none."""
        if (backend, strategy) not in self._found:
            of_backend = [timing for timing in self.timings if timing.backend == backend]
            times = {timing.variant: timing.us for timing in of_backend if timing.strategy == strategy}
            self._found[backend, strategy] = times, min(timing.us for timing in of_backend or self.timings)
        found: tuple[dict[Variant, float], float] = self._found[backend, strategy]
        return found

    def merged(self, other: Cell) -> Cell:
        """The timings of two cells of the same shape; the other cell's timings replace those of the same backend."""
        own = [timing for timing in self.timings if timing.backend not in other.backends]
        timings = sorted([*own, *other.timings], key=lambda timing: timing.us)
        return Cell(self.rows, self.cols, tuple(timings), tuple(sorted({*self.backends, *other.backends})))


@dataclass(frozen=True)
class Table:
    """All shapes that were measured on a device.

    Attributes:
        device: Its name.
        source: When and with what it was measured.
        bandwidth: Its bandwidth, as in Device: times for another GPU are scaled by it.
        every_variant: True where a cell names every variant that took at most KEPT_RATIO times the fastest of its
            backend; False where it names the fastest of each strategy alone.
    """

    device: str
    source: str
    bandwidth: float
    cells: Mapping[Key, list[Cell]] = field(repr=False, hash=False, compare=False)
    every_variant: bool = True
    _lengths: dict[Any, dict[int, list[Cell]]] = field(
        default_factory=dict, init=False, repr=False, hash=False, compare=False
    )

    def lengths(self, key: Key, backends: Collection[str]) -> dict[int, list[Cell]]:
        """The cells under a key that have times of these backends, by their columns."""
        asked = key, frozenset(backends)
        if asked not in self._lengths:
            lengths: dict[int, list[Cell]] = {}
            for cell in self.cells.get(key, []):
                if any(timing.backend in backends for timing in cell.timings):
                    lengths.setdefault(cell.cols, []).append(cell)
            self._lengths[asked] = lengths
        return self._lengths[asked]

    def with_cell(self, key: Key, cell: Cell) -> Table:
        """The table with one more cell, merged into the cell of the same shape where there is one."""
        cells = list(self.cells.get(key, []))
        for i, old in enumerate(cells):
            if (old.rows, old.cols) == (cell.rows, cell.cols):
                cells[i] = old.merged(cell)
                break
        else:
            cells.append(cell)
        return replace(self, cells={**self.cells, key: cells})

    def as_json(self) -> dict[str, Any]:
        """A document that `from_json` reads, with its checksum: names once, and a line of numbers for each shape."""
        names = sorted(
            {t[:3] for cells in self.cells.values() for cell in cells for t in cell.timings},
            key=lambda name: (*name[:2], str(name[2])),
        )
        index = {name: i for i, name in enumerate(names)}
        return with_checksum({
            "format": FORMAT,
            "device": self.device,
            "source": self.source,
            "bandwidth": self.bandwidth,
            "every_variant": self.every_variant,
            "plans": [[backend, strategy, str(variant)] for backend, strategy, variant in names],
            "cells": [
                [*key, cell.rows, cell.cols, [[index[t[:3]], round(t.us, 2)] for t in cell.timings], *cell.backends]
                for key, cells in self.cells.items()
                for cell in cells
            ],
        })  # fmt: skip

    @classmethod
    def checked(cls, document: dict[str, Any]) -> Table:
        """The table of a document from outside the package; ValueError if a field has another form."""
        check_table(document)
        return cls.from_json(document)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Table:
        """The table of a document that has the form of `check_table`."""
        lines: dict[Key, list[list[Any]]] = {}
        plans = [(backend, strategy, Variant.parse(text)) for backend, strategy, text in document["plans"]]
        for operation, elements, itemsize, unaligned, *line in document["cells"]:
            lines.setdefault(Key(operation, elements, itemsize, unaligned), []).append(line)
        cells = _Cells(lines, plans)
        return cls(document["device"], document["source"], document["bandwidth"], cells, document["every_variant"])


class _Cells(Mapping[Key, list[Cell]]):
    """The cells of a document, made when they are looked up: a process plans for few of a table's operations."""

    def __init__(self, lines: dict[Key, list[list[Any]]], plans: list[tuple[str, str, Variant]]) -> None:
        self._lines, self._plans = lines, plans
        self._made: dict[Key, list[Cell]] = {}

    def __getitem__(self, key: Key) -> list[Cell]:
        if key not in self._made:
            self._made[key] = [self._cell(*line) for line in self._lines[key]]
        return self._made[key]

    def _cell(self, rows: int, cols: int, timings: list[tuple[int, float]], *backends: str) -> Cell:
        return Cell(rows, cols, tuple(Timing._make((*self._plans[i], us)) for i, us in timings), backends)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


def key_of(problem: Problem, operation: str = "", aligned: bool = False) -> Key:
    """The key of the cells of a problem's rows: as they are or `aligned`, of its own operation or of another."""
    unaligned = problem.unaligned and not aligned
    return Key(operation or problem.operation, problem.writes_elements, min(problem.itemsize, 4), unaligned)


def slug(name: str) -> str:
    """A device's name as a file's: "NVIDIA H200" is "nvidia-h200"."""
    return "-".join(name.lower().split())


def model_word(name: str) -> str | None:
    """The model in the file name of a table: its first word with a digit; None where no word has one.

    >>> model_word("nvidia-h100-80gb-hbm3.json"), model_word("nvidia-geforce-rtx-4090.json"), model_word("quality.json")
    ('h100', '4090', None)
    """
    words = name.removesuffix(".json").split("-")
    return next((word for word in words if any(letter.isdigit() for letter in word)), None)


FALLBACK_TABLE = "nvidia-h200.json"
"""The table that a GPU without one borrows: its times are scaled by bandwidth, and their order is likely the same."""


@cache
def table_for(device: Device) -> Table | None:
    """The table of this GPU, made here or shipped, or that of its model, or else FALLBACK_TABLE; None for a CPU."""
    if device.kind != "cuda":
        return None
    if own := tuned_table(device):
        return own
    file_name = f"{slug(device.name)}.json"
    model = model_word(file_name)
    shipped = resources.files(__package__).joinpath("tables")
    # The driver's names of one model differ by memory and socket, so the table of another name of it serves too.
    of_model = sorted(place.name for place in shipped.iterdir() if model and model_word(place.name) == model)
    for name in (file_name, *of_model, FALLBACK_TABLE):
        if (place := shipped.joinpath(name)).is_file():
            return _read(place)
    return None


def tuned_table(device: Device) -> Table | None:
    """The table that `onlinesoftmax tune` has made for a GPU in the cache folder; None where there is no valid one."""

    def checked(document: dict[str, Any]) -> Table:
        table = Table.checked(document)
        if slug(table.device) != slug(device.name):
            raise ValueError(f"field device: it is a table of {table.device}")
        return table

    return load_document(f"{slug(device.name)}.json", checked)


def _read(place: Any) -> Table:
    """A table of the package."""
    return Table.from_json(json.loads(place.read_text(encoding="utf-8")))
