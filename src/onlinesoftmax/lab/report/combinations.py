"""The choices of the picker: everything that a plan depends on, the row lengths, and the cliffs between them.

A cliff is a length from which another strategy is chosen.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from ...core.device import KNOWN
from ...core.options import SCORE_OPTIONS
from ...core.task import ITEMSIZE
from ...explanation import Explanation, explain
from ...ops import FORWARD, OPERATIONS
from ..bench.tune_shapes import CLASSES
from ..names import MOST_ELEMENTS, check_names

FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "torch": tuple(SCORE_OPTIONS),
    "jax": tuple(name for name in SCORE_OPTIONS if name != "causal"),
}
"""The frameworks, and the score options that our functions for each framework take."""

PLAIN = "none"
"""The choice of no score option."""


class Combination(NamedTuple):
    """One choice of everything but the row length.

    Attributes:
        framework: "torch" or "jax".
        gpu: Name of a known GPU.
        operation: Name in OPERATIONS.
        option: A score option, or PLAIN.
        dtype: Dtype of the input.
        rows: Number of rows.
    """

    framework: str
    gpu: str
    operation: str
    option: str
    dtype: str
    rows: int

    def explain(self, cols: int) -> Explanation:
        """The plan for rows of a length: what `onlinesoftmax explain` prints.  A bias and a mask have x's shape."""
        shape = (self.rows, cols)
        given: dict[str, Any] = {}
        if self.option != PLAIN:
            values = {"call": 0.5, "row": 0.5, "element": shape, "flag": True}
            given[self.option] = values[SCORE_OPTIONS[self.option].kind]
        return explain(
            shape, operation=self.operation, dtype=self.dtype, device=self.gpu, framework=self.framework, **given
        )

    def problems(self) -> tuple[Any, ...]:
        """What the planner knows of two lengths: combinations of the same framework and GPU that agree plan alike."""
        return self.framework, self.gpu, self.explain(64).problem, self.explain(65).problem


@dataclass(frozen=True)
class Choices:
    """The choices that the picker offers.

    Attributes:
        gpus: Names of known GPUs.
        operations: Names in OPERATIONS.
        with_options: The operations that are also planned with each score option of their declaration.
        dtypes: Names of dtypes.
        rows: Numbers of rows.
        frameworks: Names in FRAMEWORKS.

    Raises:
        ValueError: a name is unknown, or a number of rows is not positive, or too large.
    """

    gpus: Sequence[str] = ("h200", "h100", "a100")
    operations: Sequence[str] = (*FORWARD, OPERATIONS[FORWARD[0]].gradient_name)
    with_options: Sequence[str] = FORWARD[:1]
    dtypes: Sequence[str] = ("bfloat16", "float32")
    rows: Sequence[int] = (1, 64, 4096, 65536)
    frameworks: Sequence[str] = tuple(FRAMEWORKS)

    def __post_init__(self) -> None:
        check_names("GPU", self.gpus, [name for name, device in KNOWN.items() if device.kind == "cuda"])
        check_names("operation", self.operations, OPERATIONS)
        check_names("dtype", self.dtypes, ITEMSIZE)
        check_names("framework", self.frameworks, FRAMEWORKS)
        if min(self.rows, default=1) < 1:
            raise ValueError(f"a number of rows must be at least 1, got {min(self.rows)}")
        if max(self.rows, default=1) >= MOST_ELEMENTS:
            raise ValueError(f"a number of rows must be less than 2^60, got {max(self.rows)}")

    def combinations(self) -> list[Combination]:
        """Every combination of the choices that our functions can be called with."""
        return [
            Combination(framework, gpu, operation, option, dtype, rows)
            for framework, gpu, operation in itertools.product(self.frameworks, self.gpus, self.operations)
            for option in (PLAIN, *(self._options(operation, framework)))
            for dtype, rows in itertools.product(self.dtypes, sorted(set(self.rows)))
        ]

    def _options(self, operation: str, framework: str) -> list[str]:
        """The score options that our functions for a framework take for an operation; none where none is planned."""
        offered = {*OPERATIONS[operation].options} & {*FRAMEWORKS[framework]}
        return [name for name in SCORE_OPTIONS if operation in self.with_options and name in offered]


LONGEST = 1 << 30
"""Longest row of the picker, in elements."""

STEP = 8
"""Rows of a multiple of STEP elements of 16 or 32 bits all start on 16 bytes.  The shortest step of the bisection."""

STEPS = 64
"""A cliff is located to STEP elements, or to one part in STEPS of its length where that is more: a pixel of the chart.
"""

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

    Bisection in the steps of `step_at` finds the changes between two listed lengths of different kinds.  A kind that
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


def step_at(cols: int) -> int:
    """The step of the bisection above a length: a power of two, so that rows on cache lines stay on cache lines.

    >>> step_at(64), step_at(4096), step_at(1 << 20)
    (8, 64, 16384)
    """
    return max(STEP, 1 << (cols // STEPS).bit_length() >> 1)


def _first_change(low: int, high: int, kind: Callable[[int], T]) -> tuple[int, int]:
    """Two lengths at most a step apart between two of different kinds: the last of the lower kind, and the next one."""
    before, between = kind(low), range(low + step_at(low), high, step_at(low))
    first = bisect_left(between, True, key=lambda cols: kind(cols) != before)
    return between[first - 1] if first else low, between[first] if first < len(between) else high
