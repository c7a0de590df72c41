"""Qualities: the part of copy bandwidth that each strategy was measured to reach, from tables/quality.json."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources


@cache
def _table() -> dict[str, dict[str, float]]:
    text = resources.files(__package__).joinpath("tables").joinpath("quality.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, float]] = json.loads(text)["quality"]
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
    of_backend = _table()[backend]
    return of_backend.get(f"{strategy} {case}", of_backend[strategy])
