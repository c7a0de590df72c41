"""Our plan for a case: what runs, and what the analysis of its time is based on."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..core.device import Device
from ..core.options import Fused
from ..core.problem import Problem
from ..explanation import explain
from ..planner.plan import Plan, plan
from ..planner.strategies import FOR_JAX
from .cases import Case
from .inputs import SCALE, SOFTCAP, Inputs
from .peers import Ours


class Planned(NamedTuple):
    """A plan, the problem it solves and the device it is for."""

    plan: Plan
    problem: Problem
    device: Device


def planned(case: Case, inputs: Inputs, ours: Ours) -> Planned:
    """What our library will run.

    Raises:
        PlanError: what was forced cannot run.
    """
    x = inputs[0]
    if ours.framework == "jax":
        return _planned_in_jax(case, ours)
    found = explain(x, case.dim, operation=case.operation, backend=ours.backend, strategy=ours.strategy)
    by_pytorch = ours.backend == "eager" or (ours.backend is None and ours.strategy is None and x.device.type == "cpu")
    if not case.fused or by_pytorch:
        return Planned(found.plan, found.problem, found.device)
    more = case.read_bytes - case.tensor_bytes
    return Planned(_fused_plan(case, inputs, ours), replace(found.problem, more_bytes=more), found.device)


def _planned_in_jax(case: Case, ours: Ours) -> Planned:
    device = "cpu" if ours.device_type == "cpu" else None
    found = explain(case.shape, case.dim, operation=case.operation, dtype=case.dtype, device=device, framework="jax")
    problem = found.problem
    if case.fused:
        problem = replace(problem, fused=True, more_bytes=case.read_bytes - case.tensor_bytes)
    return Planned(plan(problem, found.device, ours.backend, ours.strategy, strategies=FOR_JAX), problem, found.device)


def _fused_plan(case: Case, inputs: Inputs, ours: Ours) -> Plan:
    """With the strides and the bytes of what is beside the input, which `explain` is not told."""
    from ..core.layout import contiguous_strides
    from ..torch import prepare as prepared

    x, more = inputs[0], iter(inputs[1:])
    fused = Fused(
        SCALE if "scale" in case.fused else 1.0,
        SOFTCAP if "softcap" in case.fused else None,
        next(more) if "bias" in case.fused else None,
        next(more) if "mask" in case.fused else None,
        "causal" in case.fused,
    )
    sides = prepared.sides_of(fused, x.shape)
    options = prepared.options_of(fused, False, ours.backend, ours.strategy)
    layout = prepared.layout_for(
        case.operation, x.shape, x.stride(), case.dim, False, contiguous_strides(x.shape), sides, options
    )
    return prepared.make_plan(case.operation, layout, x.dtype, x.dtype, x.device, prepared.aligned(x), options, sides)
