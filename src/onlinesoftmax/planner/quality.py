"""Numbers, measured once on an H200, that rank proposals where no table has times: tables/quality.json."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def _table(name: str) -> dict[str, Any]:
    text = resources.files(__package__).joinpath("tables").joinpath("quality.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)[name]
    return found


def quality(backend: str, strategy: str, case: str = "") -> float:
    """Part of copy bandwidth that a strategy reaches when the device is full.

    Args:
        backend, strategy: The strategy.
        case: Name of a case that has a number of its own in the file: "alone" for one block on a multiprocessor, so
            that nothing loads while it computes; "spilled" where its row takes more registers than there are.

    >>> quality("triton", "row") > quality("triton", "row", "alone")
    True
    """
    of_backend: dict[str, float] = _table("quality")[backend]
    return of_backend.get(f"{strategy} {case}", of_backend[strategy])


def padded_from(column_bytes: int) -> int:
    """Row length from which Pallas `row` pads a short row to one power of two, not to a sum of two.

    Args:
        column_bytes: Bytes of a column of all inputs.
    """
    found: dict[str, int] = _table("padded_from")
    return found.get(str(column_bytes), 1)


def narrow(load_bytes: int) -> float:
    """Part of the bandwidth that loads of 16, 8, 4 or 2 bytes reach.

    >>> narrow(16) >= narrow(4) > narrow(2)
    True
    """
    found: dict[str, float] = _table("narrow")
    return found[str(load_bytes)]


def exchange_wait_us(writes_elements: bool) -> float:
    """Microseconds by which a round of rows takes longer if it waits for the states of another GPU of the host.

    >>> exchange_wait_us(True) < exchange_wait_us(False)
    True
    """
    found: dict[str, float] = _table("exchange_us")
    return found["written" if writes_elements else "read"]


def served_by_l2(l2: int, between: int) -> float:
    """Part of repeated reads that L2 serves.

    Args:
        l2: Bytes of L2.
        between: Bytes that are read between two reads of the same data.
    """
    found: dict[str, float] = _table("l2")
    return min(found["most"], found["share"] * l2 / max(between, 1))
