"""A cell of the check: one backend, strategy, operation and dtype, with the largest errors over all inputs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...ops import OPERATIONS
from ...planner.plan import PlanError
from . import functions
from .exact import Exact, Outcome, wide
from .inputs import Case


@dataclass
class Cell:
    """The check of one backend, strategy, operation and dtype: what was run, and the largest errors.

    Attributes:
        backend, strategy, operation, dtype: The combination that is checked.
        cases: Number of inputs that were run.
        refused: Number of inputs that the planner refused, which is no failure.
        error, pytorch_error: Largest absolute error of a finite output, ours and PyTorch's, on the same inputs.
        ulps, pytorch_ulps: The same errors in ulps of the output dtype, at the element with the largest error.
        of_allowed: Largest ratio of an error to the error that the contract allows; a result is right up to 1.
        slack: Number of units that the contract adds to PyTorch's largest error.
        failures: One sentence for each input that failed.
        reason: The reason why nothing was run; None when something was.
    """

    backend: str
    strategy: str
    operation: str
    dtype: str
    cases: int = 0
    refused: int = 0
    error: float = 0.0
    pytorch_error: float = 0.0
    ulps: float = 0.0
    pytorch_ulps: float = 0.0
    of_allowed: float = 0.0
    slack: int = 1
    failures: list[str] = field(default_factory=list)
    reason: str | None = None

    @property
    def result(self) -> str:
        """Either "pass" or "fail"; "skipped" where nothing was run."""
        if self.failures:
            return "fail"
        return "pass" if self.cases else "skipped"

    def add(self, case: Case, oracle: Exact) -> None:
        """Run one input and keep the largest errors."""
        try:
            function = functions.ours(self.backend, OPERATIONS[self.operation].forward)
            ours = oracle.outcome(function, backend=self.backend, strategy=self.strategy)
        except PlanError as error:
            self.refused += 1
            self.reason = self.reason if self.cases else _last_line(error)
            return
        except Exception as error:  # an error in a kernel is a failure to report, not the end of the check
            self.cases, self.reason = self.cases + 1, None
            self.failures.append(f"{case.name}: {type(error).__name__}: {_last_line(error)}")
            return
        self.cases, self.reason = self.cases + 1, None
        if failure := self._compare(ours, oracle):
            self.failures.append(f"{case.name}: {failure}")

    def _compare(self, outcome: Outcome, oracle: Exact) -> str | None:
        ours, theirs, finite = outcome.result, oracle.theirs.result, oracle.finite
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"gives {tuple(ours.shape)} {ours.dtype}; PyTorch gives {tuple(theirs.shape)} {theirs.dtype}"
        if not oracle.x.equal(oracle.before) and not oracle.x.nan_to_num(nan=3.0).equal(
            oracle.before.nan_to_num(nan=3.0)
        ):
            return "the input was changed"
        ours_wide = wide(ours)
        self._keep_worst("pytorch_error", "pytorch_ulps", oracle.theirs_wide, oracle.theirs, finite)
        special = (ours_wide == oracle.theirs_wide) | np.isnan(ours_wide) & np.isnan(oracle.theirs_wide)
        wrong = np.where(finite, ~np.isfinite(ours_wide), ~special)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            there = f"{float(ours_wide[first])} at {first}, where PyTorch has {float(oracle.theirs_wide[first])}"
            return f"{there}: {int(wrong.sum())} of {ours_wide.size} outputs are wrong"
        error = self._keep_worst("error", "ulps", ours_wide, outcome, finite)
        part = float(np.max(error / (oracle.allowed + self.slack * outcome.unit[finite]), initial=0))
        self.of_allowed = max(self.of_allowed, part)
        # Unlike `part > 1`, this is also true for NaN.
        if not part <= 1:
            return f"error {float(np.max(error)):.2e}; PyTorch's own {oracle.allowed:.2e}"
        return None

    def _keep_worst(
        self, name: str, ulps_name: str, result: np.ndarray, outcome: Outcome, finite: np.ndarray
    ) -> np.ndarray:
        """The errors of finite elements; the largest is kept under these names."""
        error: np.ndarray = np.abs(result - outcome.exact)[finite]
        if error.size:
            worst = int(np.argmax(error))
            found = {name: error[worst], ulps_name: error[worst] / outcome.unit[finite][worst]}
            for key, value in found.items():
                setattr(self, key, max(getattr(self, key), float(value)))
        return error

    def as_dict(self) -> dict[str, Any]:
        """All attributes and the result, for JSON."""
        return {**vars(self), "result": self.result}


def _last_line(error: Exception) -> str:
    """The planner's reason for the strategy that was asked for, or the last line of another error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Each line of the planner begins with the strategy, which the reader knows.
    return re.sub(r"^\s*\w+/\w+: ", "", lines[-1]).strip()
