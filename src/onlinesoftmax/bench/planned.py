"""Our plan for a case: what runs, and what the analysis of its time is based on."""

from __future__ import annotations

from typing import Any

from ..explanation import Explanation, explain
from .cases import Case
from .inputs import Inputs
from .peers import Ours, option_values


def planned(case: Case, inputs: Inputs, ours: Ours) -> Explanation:
    """The plan that our library will run, as `explain` tells it.

    Raises:
        PlanError: what was forced cannot run.
    """
    beside: dict[str, Any] = dict(
        zip([name for name in case.fused if name in ("bias", "mask")], inputs[1:], strict=False)
    )
    forced: dict[str, Any] = {"backend": ours.backend, "strategy": ours.strategy}
    if ours.framework == "jax":
        shapes: dict[str, Any] = {name: tuple(t.shape) for name, t in beside.items()}
        device = "cpu" if ours.device_type == "cpu" else None
        return explain(
            case.shape, case.dim, operation=case.operation, dtype=case.dtype, device=device, framework="jax",
            **option_values(case), **shapes, **forced,
        )  # fmt: skip
    return explain(inputs[0], case.dim, operation=case.operation, **option_values(case), **beside, **forced)
