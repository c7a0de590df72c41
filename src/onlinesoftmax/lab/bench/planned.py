"""Our plan for a case, as `explain` tells it: the plan that runs, and that the analysis of its time reads."""

from __future__ import annotations

from typing import Any

from ...explanation import Explanation, explain
from ...planner.plan import PlanError
from .cases import STATISTICS, Case
from .exact import Inputs
from .peers import Ours


def planned(case: Case, inputs: Inputs, ours: Ours) -> Explanation:
    """The plan that our library will run; with a gradient, the plan of the launch that writes the gradient.

    Raises:
        PlanError: what was forced cannot run, or only in JAX's interpreter, whose times mean nothing.
    """
    if ours.framework == "jax" and ours.device_type == "cpu" and ours.backend == "pallas":
        raise PlanError("Pallas kernels need an NVIDIA GPU; on a CPU, an interpreter runs them")
    declaration, names = case.declaration, case.option_tensors
    options = dict(zip(names, inputs[len(inputs) - len(names) :], strict=True))
    one_kernel = case.with_gradient and case.reduces_rows
    writer = case.gradient if case.with_gradient and not one_kernel else case
    statistics = STATISTICS[case.operation] if ours.framework == "torch" and writer is case else ()
    asked: dict[str, Any] = {"operation": writer.operation, "backend": ours.backend, "strategy": ours.strategy}
    asked |= case.option_values | options
    if one_kernel:
        # One kernel writes the losses and their gradient; in JAX also the states.
        kept = declaration.kept_outputs if ours.framework == "jax" else ()
        asked["outputs"] = tuple(dict.fromkeys((*declaration.always, "y", *kept)))
    elif statistics:
        asked["outputs"] = tuple(dict.fromkeys((*declaration.kept_outputs, "lse", *statistics)))
    if ours.framework == "torch":
        found = explain(inputs[0], case.dim, **asked)
        # PyTorch's operations write nothing beside the result.
        plain = declaration.has_target and found.plan.backend == "eager"
        return (
            explain(inputs[0], case.dim, **asked | {"operation": case.operation, "outputs": None}) if plain else found
        )
    # JAX makes arrays of these tensors, so only their shapes count.
    asked |= {name: tuple(t.shape) for name, t in options.items()}
    device = "cpu" if ours.device_type == "cpu" else None
    return explain(case.shape, case.dim, dtype=case.dtype, device=device, framework="jax", **asked)
