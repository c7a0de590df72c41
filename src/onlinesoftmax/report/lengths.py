"""The row lengths of the picker, and the cliffs between them: lengths from which another strategy is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TypeVar

from ..bench.grid import CLASSES

LONGEST = 1 << 30
"""Longest row of the picker, in elements."""

STEP = 8
"""Rows of a multiple of STEP elements of 16 or 32 bits all start on 16 bytes.  Cliffs are searched in these steps."""

T = TypeVar("T")


def lengths(unaligned: bool = False) -> tuple[int, ...]:
    """The row lengths that every combination is planned for: powers of two, 3 times powers of two, and vocabularies.

    Args:
        unaligned: True for one element more than the powers of two from STEP on and the vocabularies.

    Example:
        >>> lengths()[:8], lengths(unaligned=True)[:4], lengths()[-1]
        ((1, 2, 4, 8, 16, 24, 32, 48), (9, 17, 33, 65), 1073741824)
    """
    found = {1 << k for k in range(LONGEST.bit_length())} | set(CLASSES)
    if unaligned:
        return tuple(n + 1 for n in sorted(found) if STEP <= n < LONGEST)
    return tuple(sorted(found | {3 << k for k in range(3, LONGEST.bit_length() - 2)}))


def cliffs(listed: Iterable[int], kind: Callable[[int], T]) -> list[tuple[int, int]]:
    """The cliffs between neighbours of a list of lengths, each as the last length before it and the first behind it.

    Bisection in steps of STEP elements finds the changes between two listed lengths of different kinds.  A kind that
    comes and goes between two lengths of the same kind is not found.

    Args:
        listed: Row lengths in rising order; neighbours from STEP on differ by multiples of STEP.
        kind: The kind of plan for a length.

    Example:
        >>> cliffs([8, 64, 128], lambda n: (n > 66) + (n > 100))
        [(64, 72), (96, 104)]
    """
    found = []
    for low, above in pairwise(listed):
        # A third kind may lie between two others, so the search goes on behind each cliff.
        begin = low
        while kind(begin) != kind(above):
            found.append(_first_change(begin, above, kind))
            begin = found[-1][1]
    return found


def _first_change(low: int, high: int, kind: Callable[[int], T]) -> tuple[int, int]:
    """Two lengths one step apart between two of different kinds: the last of the lower kind, and the next one."""
    before = kind(low)
    while high - low > STEP:
        middle = low + (high - low) // (2 * STEP) * STEP
        if kind(middle) == before:
            low = middle
        else:
            high = middle
    return low, high
