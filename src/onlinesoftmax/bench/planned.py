"""Our plan for a case, as `explain` tells it: the plan that runs, and that the analysis of its time reads."""

from __future__ import annotations

from typing import Any

from ..explanation import Explanation, explain
from .cases import Case
from .exact import Inputs
from .options import option_values
from .peers import Ours


def planned(case: Case, inputs: Inputs, ours: Ours) -> Explanation:
    """The plan that our library will run.

    Raises:
        PlanError: what was forced cannot run.
    """
    tensors = dict(zip(case.tensors, inputs, strict=True))
    options: dict[str, Any] = option_values(case) | {name: tensors[name] for name in case.option_tensors}
    forced: dict[str, Any] = {"operation": case.operation, "backend": ours.backend, "strategy": ours.strategy}
    if ours.framework == "torch":
        return explain(inputs[0], case.dim, **forced, **options)
    # JAX makes arrays of these tensors, so only their shapes count.
    options |= {name: tuple(tensors[name].shape) for name in case.option_tensors}
    device = "cpu" if ours.device_type == "cpu" else None
    return explain(case.shape, case.dim, dtype=case.dtype, device=device, framework="jax", **forced, **options)
