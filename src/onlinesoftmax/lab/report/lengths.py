"""The row lengths of the picker, and the cliffs between them: lengths from which another strategy is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TypeVar

from ..bench.tune_shapes import CLASSES

LONGEST = 1 << 30
"""Longest row of the picker, in elements."""

STEP = 8
"""Rows of a multiple of STEP elements of 16 or 32 bits all start on 16 bytes.  Cliffs are searched in these steps."""

T = TypeVar("T")


KINDS = ("aligned", "even", "odd")
"""Kinds of rows by their length: a multiple of STEP or less than STEP, another even number, an odd number.

Rows of these kinds begin on other addresses, so a length says little about a neighbour of another kind.
"""

VOCABULARIES = (30522, 50304, 65024, 100277, 129280, 152064, 262208)
"""More vocabularies: BERT, GPT-2 padded, ChatGLM, GPT-4, DeepSeek-V3, Qwen2.5, Gemma 3.  CLASSES has others."""

EVERY = 16
"""Up to this length, every length is planned for."""

LONGEST_EVEN = 1 << 18
"""Longest row of the kind "even" that is planned for: about the largest vocabulary."""


def kind_of(cols: int) -> str:
    """The kind of rows of a length.

    >>> kind_of(3), kind_of(50257), kind_of(30522), kind_of(50304)
    ('aligned', 'odd', 'even', 'aligned')
    """
    if cols < STEP or cols % STEP == 0:
        return "aligned"
    return "odd" if cols % 2 else "even"


def lengths(kind: str = "aligned") -> tuple[int, ...]:
    """The row lengths of a kind that every combination is planned for.

    They are every length up to EVERY, powers of two, 3 times powers of two, and vocabularies; of rows that are not
    aligned, one or two elements more than powers of two and vocabularies, too.

    Example:
        >>> lengths()[:10], lengths("odd")[:6], lengths("even")[:5], lengths()[-1]
        ((1, 2, 3, 4, 5, 6, 7, 8, 16, 24), (9, 11, 13, 15, 17, 33), (10, 12, 14, 18, 34), 1073741824)
    """
    powers = {1 << k for k in range(LONGEST.bit_length())}
    named = {*powers, *CLASSES}
    found = {*range(1, EVERY), *named, *VOCABULARIES, *(3 << k for k in range(3, LONGEST.bit_length() - 2))}
    found |= {n + 1 for n in named if STEP <= n < LONGEST} | {n + 2 for n in named if STEP <= n <= LONGEST_EVEN}
    return tuple(sorted(n for n in found if kind_of(n) == kind))


def cliffs(listed: Iterable[int], kind: Callable[[int], T]) -> list[tuple[int, int]]:
    """The cliffs between neighbours of a list of lengths, each as the last length before it and the first behind it.

    Bisection in steps of STEP elements finds the changes between two listed lengths of different kinds.  A kind that
    comes and goes between two lengths of the same kind is not found.

    Args:
        listed: Row lengths in rising order.
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
    """Two lengths at most a step apart between two of different kinds: the last of the lower kind, and the next one."""
    before = kind(low)
    while high - low > STEP:
        middle = low + max((high - low) // (2 * STEP), 1) * STEP
        if kind(middle) == before:
            low = middle
        else:
            high = middle
    return low, high
