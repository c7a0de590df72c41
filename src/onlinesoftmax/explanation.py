"""Why this plan?  The plan that would run, in words and numbers, and what the others would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .core.device import Device, known
from .core.layout import contiguous_strides, rows_of, strides_of_rows
from .core.operations import OPERATIONS
from .core.problem import Problem
from .jax.device import from_jax
from .kernels import registry
from .kernels.report import Kernel
from .kernels.request import Request
from .planner import measured as tuning
from .planner.plan import Plan, Refusal, Strategies, alternatives, plan
from .planner.strategies import FOR_JAX, TABLE
from .torch.device import from_torch, here


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; `str()` of it is meant to be read.

    Attributes:
        problem, device: What was asked.
        plan: The plan that would run.
        others: The plans that lost, fastest first, and the strategies that cannot run.
    """

    problem: Problem
    device: Device
    plan: Plan
    others: tuple[Plan | Refusal, ...]

    def why_not(self, other: Plan | Refusal) -> str:
        """Why another strategy was not chosen, in one sentence."""
        if isinstance(other, Refusal):
            return f"cannot: {other.reason}"
        slower = other.estimate_us / self.plan.estimate_us
        return f"{slower:.2f} times as long: {other.reason}"

    def compile(self) -> list[Kernel]:
        """The plan's kernels, compiled for the device, present or not: registers, spills, listings.

        Returns:
            A record for each launch; nothing for the eager backend, which has no kernels of ours.

        Raises:
            RuntimeError: the backend's compiler is missing, or Triton's interpreter is on.
        """
        if self.plan.backend == "eager":
            return []
        if self.plan.backend == "pallas":
            raise RuntimeError("XLA compiles Pallas kernels, where the GPU is and when they are called")
        problem, out = self.problem, self.problem.out_dtype or self.problem.dtype
        dim, shape = 1, (problem.rows // problem.adjacent, problem.cols, problem.adjacent)
        strides = contiguous_strides(shape)
        more = _tensors_beside(problem.operation, shape, dim)
        layout = rows_of(shape, dim, strides, _output_strides(shape, dim, problem.operation), more)
        dtypes = {"x": problem.dtype, "y": out} | dict.fromkeys(more, problem.dtype)
        request = Request(problem.operation, self.plan, layout, dtypes, frozenset(dtypes))
        kernels: list[Kernel] = registry.load(self.plan.backend).compile_request(request, self.device)
        return kernels

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "problem": vars(self.problem),
            "device": self.device.as_dict(),
            "plan": self.plan.as_dict(),
            "others": [
                {**(other.as_dict() if isinstance(other, Plan) else vars(other)), "why_not": self.why_not(other)}
                for other in self.others
            ],
        }

    def __str__(self) -> str:
        p, q = self.plan, self.problem
        lines = [
            f"{q.operation} of {q.rows} x {q.cols} {q.dtype} on {self.device.name}",
            f"  {p.backend}/{p.strategy}: {p.reason}",
            f"  {p.bytes_moved / 1e6:.1f} MB moved; floor {p.floor_us:.1f} us, estimate {p.estimate_us:.1f} us",
        ]
        lines += [f"  not {other.backend}/{other.strategy}: {self.why_not(other)}" for other in self.others]
        return "\n".join(lines)


def explain(
    x: Any,
    dim: int = -1,
    *,
    operation: str = "softmax",
    dtype: str | None = None,
    device: str | None = None,
    backend: str | None = None,
    strategy: str | None = None,
    framework: str | None = None,
) -> Explanation:
    """The plan for a tensor, an array or a shape, and why.

    Args:
        x: A torch tensor, a JAX array, or a shape: a tuple of sizes of a contiguous tensor.
        dim: The softmax dimension.
        operation: "softmax", "log_softmax" or "logsumexp"; or one of these with "_backward", its gradient.
        dtype: Dtype name for a shape ("float32" by default); that of the tensor otherwise.
        device: Name of a known device ("h200", "a100", …); by default that of the tensor, or this
            machine's GPU, or its CPU.
        backend, strategy: Force a plan, as in `softmax`.
        framework: "torch" or "jax": whose array a shape is of; "torch" by default.

    Raises:
        PlanError: what was forced cannot run; the message lists every reason.
        ValueError: unknown device, dtype, operation or framework.
        IndexError: dim is out of range.

    Example:
        >>> plan = explain((4096, 1024), dtype="bfloat16", device="h200").plan
        >>> print(f"{plan.backend}/{plan.strategy}, {plan.bytes_moved} bytes")
        cuda/row, 16777216 bytes
    """
    if framework not in (None, "torch", "jax"):
        raise ValueError(f"unknown framework {framework!r}; there are: torch, jax")
    in_jax = framework == "jax" or (hasattr(x, "shape") and not hasattr(x, "stride"))
    if isinstance(x, tuple | list):
        shape = tuple(int(size) for size in x)
        if not shape or min(shape) < 1:
            raise ValueError(f"shape must have sizes of at least 1, got {shape}")
        strides = contiguous_strides(shape)
        name = dtype or "float32"
    else:
        shape = tuple(x.shape) or (1,)
        strides = contiguous_strides(shape) if in_jax else tuple(x.stride()) or (1,)
        name = dtype or str(x.dtype).removeprefix("torch.")
    if not -len(shape) <= dim < len(shape):
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-len(shape)}, {len(shape) - 1}], but got {dim})"
        )
    axis = dim % len(shape)
    if in_jax:
        # XLA brings the axis to the end.
        shape = (*shape[:axis], *shape[axis + 1 :], shape[axis])
        axis, strides = len(shape) - 1, contiguous_strides(shape)
    more = _tensors_beside(operation, shape, axis)
    layout = rows_of(shape, axis, strides, _output_strides(shape, axis, operation), more)
    problem = Problem(
        operation, layout.rows, layout.cols, name,
        contiguous=layout.x_col == 1, adjacent=layout.adjacent, unit=layout.unit, peelable=layout.congruent,
    )  # fmt: skip
    if in_jax:
        machine = known(device) if device else _device_of_jax()
        return _of_problem(problem, machine, backend, strategy, strategies=FOR_JAX)
    machine = known(device) if device else _this_device(x)
    # For a GPU of the table every backend counts, whether or not it is installed here.
    missing = () if device else registry.missing()
    return _of_problem(problem, machine, backend, strategy, missing, tuning.table_for(machine))


def _of_problem(
    problem: Problem, machine: Device, backend: str | None = None, strategy: str | None = None,
    unavailable: Sequence[tuple[str, str]] = (), table: tuning.Table | None = None, strategies: Strategies = TABLE,
) -> Explanation:  # fmt: skip
    """The plan for a problem, and why.  Arguments and errors as for `plan`."""
    chosen = plan(problem, machine, backend, strategy, unavailable, table=table, strategies=strategies)
    every = alternatives(problem, machine, unavailable=unavailable, table=table, strategies=strategies)
    others = [option for option in every if _pair(option) != _pair(chosen)]
    others.sort(key=lambda o: o.estimate_us if isinstance(o, Plan) else float("inf"))
    return Explanation(problem, machine, chosen, tuple(others))


def _pair(option: Plan | Refusal) -> tuple[str, str]:
    return option.backend, option.strategy


def _output_strides(shape: tuple[int, ...], axis: int, operation: str) -> tuple[int, ...]:
    """Those of the contiguous output, 0 along an axis that the operation reduces to one number."""
    if operation not in OPERATIONS or not OPERATIONS[operation].per_row:
        return contiguous_strides(shape)
    return strides_of_rows(contiguous_strides((*shape[:axis], *shape[axis + 1 :])), axis)


def _tensors_beside(operation: str, shape: tuple[int, ...], axis: int) -> dict[str, tuple[int, ...]]:
    """What a gradient reads beside its first tensor, all of it contiguous."""
    if operation not in OPERATIONS or not OPERATIONS[operation].backward:
        return {}
    if OPERATIONS[operation].reduces:
        return {"dy": contiguous_strides(shape)}
    per_row = strides_of_rows(contiguous_strides((*shape[:axis], *shape[axis + 1 :])), axis)
    return {"dy": per_row, "lse": per_row}


def _device_of_jax() -> Device:
    return from_jax() if registry.module_missing("jax", "jax") is None else known("cpu")


def _this_device(x: Any) -> Device:
    if hasattr(x, "device"):
        return from_torch(x.device.type, x.device.index or 0)
    return here()
