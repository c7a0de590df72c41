"""Our plan for a case, as `explain` tells it: the plan that runs, and that the analysis of its time reads."""

from __future__ import annotations

from typing import Any

from ...core.device import known
from ...core.operations import Operation
from ...core.problem import Problem
from ...core.task import Choice, Flags, Task, contiguous_spec, row_spec, task_of
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
    if case.declaration.has_target and ours.framework == "torch":
        return _of_target(case, inputs, ours)
    if case.declaration.has_target and case.with_gradient and case.reduces_rows:
        return _of_scalar_in_jax(case, ours)
    writer = case.gradient if case.with_gradient else case
    tensors = dict(zip(case.tensors, inputs, strict=True))
    options: dict[str, Any] = case.option_values | {name: tensors[name] for name in case.option_tensors}
    forced: dict[str, Any] = {"operation": writer.operation, "backend": ours.backend, "strategy": ours.strategy}
    if ours.framework == "torch":
        return explain(inputs[0], case.dim, **forced, **options)
    # JAX makes arrays of these tensors, so only their shapes count.
    options |= {name: tuple(tensors[name].shape) for name in case.option_tensors}
    device = "cpu" if ours.device_type == "cpu" else None
    return explain(case.shape, case.dim, dtype=case.dtype, device=device, framework="jax", **forced, **options)


def _of_scalar_in_jax(case: Case, ours: Ours) -> Explanation:
    """The plan of the kernel that writes the losses and the gradient of a scalar loss in JAX."""
    from ...jax import plans
    from ...jax.device import from_jax

    x = plans.ArraySpec((*case.row_shape, case.shape[case.dim]), case.dtype)
    device, choice = known("cpu") if ours.device_type == "cpu" else from_jax(), Choice(ours.backend, ours.strategy)
    task = plans.task_for(case.operation, plans.outputs_of(case.operation, gradient=True), x, {})
    planner = plans.planner_for(device, choice, case.dtype)
    return Explanation(task, Problem.of(task), planner.device, planner.plan(task, choice), ())


def _of_target(case: Case, inputs: Inputs, ours: Ours) -> Explanation:
    """The plan of an operation with a target, for the outputs that its public function asks for.

    `explain` plans for the outputs that every call writes.
    """
    from ...torch.device import from_torch
    from ...torch.losses import why_not_kernels
    from ...torch.plans import planner_for

    choice, where = Choice(ours.backend, ours.strategy), inputs[0].device
    if ours.backend == "eager" or why_not_kernels(inputs[0], inputs[1], None, ours.backend) is not None:
        # PyTorch's operations run.
        return explain(inputs[0], case.dim, operation=case.operation, backend=ours.backend, strategy=ours.strategy)
    operation = case.declaration
    outputs: tuple[str, ...] = operation.always
    if case.with_gradient and case.reduces_rows:
        # One kernel writes the losses and their gradient.
        outputs = (*outputs, "y")
    elif case.with_gradient:
        case = case.gradient
        operation, outputs = case.declaration, case.declaration.always
    elif statistics := STATISTICS.get(case.operation):
        outputs = (*operation.kept_outputs, "lse", *statistics)
    task = _task(case, operation, outputs)
    planner = planner_for(from_torch(where.type, where.index or 0), choice)
    return Explanation(task, Problem.of(task), planner.device, planner.plan(task, choice), ())


def _task(case: Case, operation: Operation, outputs: tuple[str, ...]) -> Task:
    """The task of contiguous tensors; optional operands have a value per row at most, and change no plan."""
    tensors = {
        operand.name: contiguous_spec(case.shape, case.dtype_of(operand.name)) if operand.kind == "element"
        else row_spec(case.shape, case.dim, case.dtype_of(operand.name))
        for operand in operation.operands
        if not operand.optional
    }  # fmt: skip
    flags = Flags(wide=case.dtype in ("float32", "float64"))
    written = tuple(output.name for output in operation.written(outputs))
    return task_of(operation, written, case.shape, case.dim, tensors, flags)
