"""Why this plan?  The plan that a call would run, in words and numbers, and what the others would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .core.device import Device, known
from .core.operations import OPERATIONS
from .core.options import ScoreOptions, checked_options
from .core.problem import Problem
from .core.task import ANY, ITEMSIZE, Choice, Flags, Task, TensorSpec, contiguous_spec, row_spec, task_of
from .jax.device import from_jax
from .kernels import registry
from .kernels.report import Kernel
from .kernels.request import Request
from .planner import measured
from .planner.plan import Plan, Refusal, alternatives, best, plan
from .planner.strategies import FOR_JAX, TABLE
from .torch.device import from_torch, here


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str()` of it is a text to read.

    Attributes:
        task: What was asked: a call without its data.
        problem: The part of the task that the plan depends on.
        device: The device that was planned for.
        plan: The plan that would run.
        others: The plans that lost, fastest first, and the strategies that cannot run.
    """

    task: Task
    problem: Problem
    device: Device
    plan: Plan
    others: tuple[Plan | Refusal, ...]

    def why_not(self, other: Plan | Refusal) -> str:
        """Why another strategy was not chosen, in one sentence."""
        if isinstance(other, Refusal):
            return f"cannot: {other.reason}"
        slower = other.estimate_us / self.plan.estimate_us
        guess = "" if other.price.measured else " by estimate"
        return f"{slower:.2f} times as long{guess}: {other.reason}"

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
        request = Request(self.task, self.plan)
        kernels: list[Kernel] = registry.load(self.plan.backend).compile_request(request, self.device)
        return kernels

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "problem": asdict(self.problem),
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
    scale: Any = 1.0,
    mask: Any = None,
    bias: Any = None,
    causal: bool = False,
    softcap: float | None = None,
    fully_masked: str = "nan",
    batch_invariant: bool = False,
    device: str | None = None,
    backend: str | None = None,
    strategy: str | None = None,
    framework: str | None = None,
) -> Explanation:
    """The plan that a call would run, and why.

    Args:
        x: A torch tensor, a JAX array, or a shape: a tuple of sizes of a contiguous tensor.
        dim: The softmax dimension.
        operation: "softmax", "log_softmax", "logsumexp", "cross_entropy" or "token_logprobs"; or one of these with
            "_backward", its gradient.
        dtype: Dtype name for a shape ("float32" by default); that of the tensor otherwise.
        scale, causal, softcap, fully_masked, batch_invariant: As in `softmax`.
        mask: As in `softmax`, or a shape that broadcasts to that of x.
        bias: As in `softmax`, or a shape that broadcasts to that of x; the bias then has the dtype of x.
        device: Name of a known device ("h200", "a100", …); by default that of the tensor, or this
            machine's GPU, or its CPU.
        backend, strategy: Force a plan, as in `softmax`.
        framework: "torch" or "jax": whose array a shape is of; "torch" by default.

    Raises:
        PlanError: the forced backend or strategy cannot run; the message lists every reason.
        TypeError: an argument has the wrong type.
        ValueError: unknown device, dtype, operation or framework, or a mask or bias that does not broadcast.
        IndexError: dim is out of range.

    Example:
        >>> plan = explain((4096, 1024), dtype="bfloat16", device="h200").plan
        >>> print(f"{plan.backend}/{plan.strategy}, {plan.bytes_moved} bytes")
        cuda/row, 16777216 bytes
        >>> explain((4096, 1024), dtype="bfloat16", device="h200", mask=(4096, 1024)).plan.bytes_moved
        20971520
    """
    if framework not in (None, "torch", "jax"):
        raise ValueError(f"unknown framework {framework!r}; there are: torch, jax")
    if operation not in OPERATIONS:
        raise ValueError(f"unknown operation {operation!r}; operations: {', '.join(OPERATIONS)}")
    in_jax = framework == "jax" or (hasattr(x, "shape") and not hasattr(x, "stride"))
    shape, like = _input(x, dtype, in_jax)
    if not -len(shape) <= dim < len(shape):
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-len(shape)}, {len(shape) - 1}], but got {dim})"
        )
    given = {name: _Shape(t) if isinstance(t, tuple | list) else t for name, t in (("bias", bias), ("mask", mask))}
    options = checked_options(operation, scale, softcap, given["bias"], given["mask"], causal, fully_masked)
    options = (options or ScoreOptions()).of(OPERATIONS[operation].options)
    axis = dim % len(shape)
    if in_jax:
        # XLA moves the axis to the end.
        moved = {name: t if t is None else _Shape(_to_end(tuple(t.shape), shape, axis)) for name, t in given.items()}
        options = options._replace(bias=moved["bias"], mask=moved["mask"])
        shape = _to_end(shape, shape, axis)
        axis, like = len(shape) - 1, contiguous_spec(shape, like.dtype)
    task = _task(operation, shape, axis, like, options)
    choice = Choice(backend, strategy, batch_invariant)
    if in_jax:
        machine = known(device) if device else _device_of_jax()
        return _of_task(task, machine, choice, (), FOR_JAX)
    machine = known(device) if device else _this_device(x)
    # For a GPU of the table every backend counts, whether or not it is installed here.
    return _of_task(task, machine, choice, () if device else registry.missing(), TABLE)


class _Shape:
    """A contiguous tensor that is known by its shape alone."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.shape, self.dtype = tuple(int(size) for size in sizes), None


def _to_end(shape: tuple[int, ...], like: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """A shape that broadcasts to `like`, with the axis moved to the end."""
    whole = (*(1,) * (len(like) - len(shape)), *shape)
    return (*whole[:axis], *whole[axis + 1 :], whole[axis])


def _input(x: Any, dtype: str | None, in_jax: bool) -> tuple[tuple[int, ...], TensorSpec]:
    """(shape, description) of the input."""
    if isinstance(x, tuple | list):
        shape = tuple(int(size) for size in x)
        if not shape or min(shape) < 1:
            raise ValueError(f"shape must have sizes of at least 1, got {shape}")
        if dtype is not None and dtype not in ITEMSIZE:
            raise ValueError(f"unknown dtype {dtype!r}; dtypes: {', '.join(ITEMSIZE)}")
        return shape, contiguous_spec(shape, dtype or "float32")
    shape = tuple(x.shape) or (1,)
    name = dtype or str(x.dtype).removeprefix("torch.")
    if in_jax:
        return shape, contiguous_spec(shape, name)
    return shape, TensorSpec(tuple(x.stride()) or (1,), name, x.data_ptr() % 16 == 0)


def _task(operation: str, shape: tuple[int, ...], axis: int, like: TensorSpec, options: ScoreOptions) -> Task:
    """The task of an operation on an input; all that is read and written besides it is contiguous, but the options."""
    declaration = OPERATIONS[operation]
    contiguous, wide = contiguous_spec(shape, like.dtype), "float64" if like.dtype == "float64" else "float32"
    tensors = {"x": like}
    for output in declaration.written(declaration.always):
        dtype = wide if output.dtype == "accumulator" else like.dtype
        tensors[output.name] = contiguous if output.kind == "element" else row_spec(shape, axis, dtype)
    for operand in declaration.operands[1:]:
        if operand.optional:
            continue
        dtype = wide if declaration.has_accumulator_dtype(operand.name) else like.dtype
        dtype = "int64" if operand.dtype == "integer" else dtype
        tensors[operand.name] = contiguous if operand.kind == "element" else row_spec(shape, axis, dtype)
    tensors |= _option_specs(options, shape, like.dtype)
    if options.softcap is not None and declaration.backward:
        # The slope of the softcap is taken at the logits.
        tensors["logits"] = contiguous
    numbers = frozenset(name for name in options.given if name in ("scale", "softcap")) - tensors.keys()
    flags = Flags(numbers, options.causal, options.zero, like.dtype in ("float32", "float64"))
    return task_of(declaration, declaration.always, shape, axis, tensors, flags)


def _option_specs(options: ScoreOptions, shape: tuple[int, ...], dtype: str) -> Mapping[str, TensorSpec]:
    """The tensors among the score options."""
    found = {}
    if hasattr(options.scale, "dtype"):
        found["scale"] = TensorSpec((), str(options.scale.dtype).removeprefix("torch."))
    for name in ("bias", "mask"):
        t = getattr(options, name)
        if t is None:
            continue
        own = tuple(t.shape)
        whole = (*(1,) * (len(shape) - len(own)), *own)
        if len(own) > len(shape) or any(size not in (1, full) for size, full in zip(whole, shape, strict=True)):
            raise ValueError(f"{name} of shape {own} does not broadcast to x's {shape}")
        if hasattr(t, "stride"):
            strides, is_aligned = tuple(t.expand(shape).stride()), t.data_ptr() % 16 == 0
        else:
            steps = contiguous_spec(whole, dtype).strides
            strides = tuple(0 if size == 1 else step for size, step in zip(whole, steps, strict=True))
            is_aligned = True
        own_dtype = "bool" if name == "mask" else str(t.dtype or dtype).removeprefix("torch.")
        found[name] = TensorSpec(strides, own_dtype, is_aligned)
    return found


def _of_task(
    task: Task, machine: Device, choice: Choice, unavailable: Sequence[tuple[str, str]], strategies: Any
) -> Explanation:
    """The plan for a task, and why."""
    problem = Problem.of(task, choice.batch_invariant)
    table = measured.table_for(machine)
    every = alternatives(problem, machine, unavailable=unavailable, table=table, strategies=strategies)
    plans = [option for option in every if isinstance(option, Plan)]
    # Without a forced choice, the plan is among the alternatives, and need not be made twice.
    among = choice == ANY and plans
    chosen = best(plans) if among else plan(problem, machine, choice, unavailable, table, strategies)
    others = [option for option in every if _pair(option) != _pair(chosen)]
    others.sort(key=lambda o: o.estimate_us if isinstance(o, Plan) else float("inf"))
    return Explanation(task, problem, machine, chosen, tuple(others))


def _pair(option: Plan | Refusal) -> tuple[str, str]:
    return option.backend, option.strategy


def _device_of_jax() -> Device:
    return from_jax() if registry.module_missing("jax", "jax") is None else known("cpu")


def _this_device(x: Any) -> Device:
    if hasattr(x, "device"):
        return from_torch(x.device.type, x.device.index or 0)
    return here()
