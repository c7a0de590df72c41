"""The combinations of the picker: everything that a plan depends on except the row length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.device import KNOWN
from ...core.options import SCORE_OPTIONS
from ...core.task import ITEMSIZE
from ...explanation import Explanation, explain
from ...ops import FORWARD, OPERATIONS
from ..names import check_names

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
        ValueError: a name is unknown, or a number of rows is not positive.
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
