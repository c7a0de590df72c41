"""The form of a measured table: every field of its document, before any is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .variant import Variant

FORMAT = 2
"""Version of a table's document; it is raised when the form changes."""

LARGEST = 1 << 62
"""The largest number of rows or columns, and of microseconds."""


def check_table(document: dict[str, Any]) -> None:
    """Check the document of a table (`Table.as_json`).

    Raises:
        ValueError: a field is missing or has another form; the message names it.
    """
    if (version := document.get("format")) != FORMAT:
        raise ValueError(f"field format: this version of onlinesoftmax reads {FORMAT}, and the file has {version!r}")
    for name, kind in (("device", str), ("source", str), ("every_variant", bool), ("plans", list), ("cells", list)):
        _require(isinstance(document.get(name), kind), name)
    _require(_is_positive(document.get("bandwidth")), "bandwidth")
    backends = [_backend(i, plan) for i, plan in enumerate(document["plans"])]
    for i, cell in enumerate(document["cells"]):
        _require(isinstance(cell, list) and _is_cell(cell, backends), f"cells[{i}]")


def _require(right: bool, field: str) -> None:
    if not right:
        raise ValueError(f"field {field}: it is missing, or is not as onlinesoftmax tune writes it")


def _backend(i: int, plan: Any) -> str:
    """The backend of a plan: [backend, strategy, variant]."""
    right = isinstance(plan, list) and len(plan) == 3 and all(isinstance(text, str) for text in plan)
    _require(right, f"plans[{i}]")
    try:
        Variant.parse(plan[2])
    except ValueError as error:
        raise ValueError(f"field plans[{i}]: {error}") from None
    backend: str = plan[0]
    return backend


_CELL = [str, bool, int, bool, int, int, list]
"""Types of the first values of a cell: operation, elements, itemsize, unaligned, rows, columns, timings."""


def _is_cell(cell: list[Any], backends: Sequence[str]) -> bool:
    """True for the values of _CELL and the names of the backends that were measured, at least one."""
    if [type(value) for value in cell[: len(_CELL)]] != _CELL:
        return False
    _, _, itemsize, _, rows, cols, timings, *measured = cell
    right = itemsize in (2, 4) and 0 < rows < LARGEST and 0 < cols < LARGEST
    right = right and bool(measured) and all(type(name) is str for name in measured)
    return right and _are_timings(timings, backends, measured)


def _are_timings(timings: list[Any], backends: Sequence[str], measured: Sequence[str]) -> bool:
    """True for a list of [place of the plan, microseconds], the fastest first, of the backends that were measured."""
    if any(type(timing) is not list or len(timing) != 2 for timing in timings):
        return False
    right = all(
        type(place) is int and 0 <= place < len(backends) and backends[place] in measured and _is_positive(us)
        for place, us in timings
    )
    times = [us for _, us in timings]
    return right and times == sorted(times)


def _is_positive(number: Any) -> bool:
    return type(number) in (int, float) and 0 < number < LARGEST and math.isfinite(number)
