"""Tables of what was measured: which blocks were fastest for shapes near the one at hand, and how fast.

`onlinesoftmax tune` makes a table for the GPU at hand; tables of some GPUs come with the package.  The planner
reads them.  A GPU without one borrows another's, which is a better guess than an estimate.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from ..core.cache import cache_folder
from ..core.device import Device
from ..core.operations import OPERATIONS
from ..core.problem import Problem


def stand_in(problem: Problem) -> str:
    """The operation whose measured times stand for a problem's: the first that moves the same tensors.

    >>> stand_in(Problem("log_softmax", 1, 1)), stand_in(Problem("logsumexp_backward", 1, 1))
    ('softmax', 'softmax')
    """
    traffic = problem.inputs, problem.writes_elements
    return next(
        operation.name
        for operation in OPERATIONS.values()
        if (operation.inputs, not operation.per_row) == traffic and operation.reduces
    )


class Key(NamedTuple):
    """What no measurement of another problem can stand for.

    Attributes:
        operation: Name of the operation that was measured (`stand_in`).
        itemsize: Bytes of an element.
        cut: Whether rows begin anywhere.
    """

    operation: str
    itemsize: int
    cut: bool


class Timing(NamedTuple):
    """The fastest blocks of a strategy for a shape, and their microseconds."""

    backend: str
    strategy: str
    variant: str
    us: float


@dataclass(frozen=True)
class Cell:
    """One shape that was measured."""

    rows: int
    cols: int
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Table:
    """All shapes that were measured on a device.

    Attributes:
        device: Its name.
        source: When and with what it was measured.
        bandwidth: Its bandwidth, as in Device: times for another GPU are scaled by it.
    """

    device: str
    source: str
    bandwidth: float
    cells: dict[Key, list[Cell]] = field(repr=False, hash=False, compare=False)

    def nearest(self, problem: Problem) -> Cell | None:
        """The measured shape nearest to a problem's, sizes compared by their logarithms; None if there is no like."""
        if not problem.contiguous:
            # What was measured were rows whose elements are neighbours.
            return None
        like = self.cells.get(key_of(problem)) or self.cells.get(key_of(problem)._replace(cut=False), [])
        rows, cols = math.log2(max(problem.rows, 1)), math.log2(max(problem.cols, 1))
        # What fits on chip depends on the columns alone.
        return min(
            like,
            key=lambda cell: 2 * abs(math.log2(cell.cols) - cols) + abs(math.log2(cell.rows) - rows),
            default=None,
        )

    def as_json(self) -> dict[str, Any]:
        """A document that `from_json` reads: names once, and a line of numbers for each shape."""
        names = sorted({t[:3] for cells in self.cells.values() for cell in cells for t in cell.timings})
        index = {name: i for i, name in enumerate(names)}
        return {
            "device": self.device,
            "source": self.source,
            "bandwidth": self.bandwidth,
            "plans": [list(name) for name in names],
            "cells": [
                [*key, cell.rows, cell.cols, [[index[t[:3]], round(t.us, 2)] for t in cell.timings]]
                for key, cells in self.cells.items()
                for cell in cells
            ],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Table:
        cells: dict[Key, list[Cell]] = {}
        plans = document["plans"]
        for operation, itemsize, cut, rows, cols, timings in document["cells"]:
            found = tuple(Timing._make((*plans[i], us)) for i, us in timings)
            cells.setdefault(Key(operation, itemsize, cut), []).append(Cell(rows, cols, found))
        return cls(document["device"], document["source"], document["bandwidth"], cells)


def key_of(problem: Problem) -> Key:
    """Where a problem's like are."""
    return Key(stand_in(problem), min(problem.itemsize, 4), problem.aligned_bytes < 16)


def slug(name: str) -> str:
    """A device's name as a file's: "NVIDIA H200" is "nvidia-h200"."""
    return "-".join(name.lower().split())


ELSEWHERE = "nvidia-h200.json"
"""The table for a GPU that has none: its times are scaled by bandwidth, and what was faster there is likely to be."""


@cache
def table_for(device: Device) -> Table | None:
    """The table of this GPU, made here or shipped, or else ELSEWHERE; None for a CPU."""
    if device.kind != "cuda":
        return None
    file_name = f"{slug(device.name)}.json"
    own = cache_folder() / file_name
    shipped = resources.files(__package__).joinpath("tables")
    for place in (own, shipped.joinpath(file_name), shipped.joinpath(ELSEWHERE)):
        if place.is_file():
            return Table.from_json(json.loads(place.read_text(encoding="utf-8")))
    return None
