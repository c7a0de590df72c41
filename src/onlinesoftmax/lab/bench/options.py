"""The values of the score options in the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.options import ScoreOptions
from .cases import Case

SCALE, SOFTCAP = 0.125, 30.0
"""1 / sqrt(64), as in attention, and a bound that the outliers of the input reach."""

VALUES: dict[str, Any] = {"scale": SCALE, "softcap": SOFTCAP, "causal": True}
"""The score options that are no tensors, by name."""


def option_values(case: Case) -> dict[str, Any]:
    """The score options of a case that are no tensors, by the name of the argument."""
    return {name: VALUES[name] for name in case.fused if name in VALUES}


def score_options(case: Case, tensors: Mapping[str, Any]) -> ScoreOptions:
    """All score options of a case, for the array formula; `tensors` holds the bias and the mask by name."""
    given = {name: tensors[name] for name in case.option_tensors if name in tensors}
    return ScoreOptions(**option_values(case), **given)
