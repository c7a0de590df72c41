"""The plan that a call on rows would run, and why; and the task of a call, from tensors and arrays or their shapes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..core.arrays import array_kind, broadcasts, dtype_name
from ..core.declaration import Operation
from ..core.device import Device
from ..core.options import SCORE_OPTIONS, ScoreOptions, check_one_per_row
from ..core.problem import Problem
from ..core.task import ANY, ITEMSIZE, Choice, Flags, Task, one_row_as_many, operand_views, task_of
from ..core.view import View, contiguous_strides, contiguous_view
from ..core.wrong_calls import unknown
from ..jax import plans as jax_plans
from ..kernels import registry
from ..kernels.report import Kernel
from ..kernels.request import Request
from ..planner.facts import lacks_memory
from ..planner.plan import Plan, Planner, Refusal, best


class Shape:
    """A contiguous tensor that is known by its shape alone."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.shape, self.dtype = sizes_of("bias or mask", sizes), None


def sizes_of(name: str, sizes: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of a shape as integers."""
    try:
        return tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise TypeError(f"{name}: a shape has integers, got {tuple(sizes)}") from None


def framework_of(x: Any, framework: str | None) -> str:
    """The framework of an input; a shape and a NumPy array have the framework that is asked for."""
    kind = array_kind(x)
    if kind is None and not isinstance(x, (tuple, list)):
        raise TypeError(f"x must be a tensor, an array or a shape, not {type(x).__name__}")
    if kind in (None, "numpy"):
        return framework or "torch"
    if framework not in (None, kind):
        raise ValueError(f"framework={framework!r}, but x is an array of {kind}")
    return str(kind)


def check_taken(function: Operation, in_jax: bool, options: ScoreOptions, batch_invariant: bool) -> None:
    """Check that a public function has the options that are given.

    Raises:
        ValueError: the function does not have one of them.
    """
    if in_jax:
        # The argument `where` of the functions for JAX is a mask.
        taken = {"scale", "softcap", "mask"} | (set() if function.has_target else {"bias"})
    else:
        taken = {*function.options, "batch_invariant"} | ({"fully_masked"} if "bias" in function.options else set())
    given = {*options.given, *(("fully_masked",) if options.zero else ())}
    if more := sorted((given | ({"batch_invariant"} if batch_invariant else set())) - taken):
        raise ValueError(f"{function.name}() {'for JAX ' if in_jax else ''}has no {', '.join(more)}")


def _to_end(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """A shape with the axis moved to the end."""
    return (*shape[:axis], *shape[axis + 1 :], shape[axis])


def described(x: Any, dtype: Any) -> tuple[tuple[int, ...], View]:
    """(shape, description) of the input."""
    dtype = None if dtype is None else dtype_name(dtype)
    if isinstance(x, (tuple, list)):
        shape = sizes_of("x", x)
        if not shape or min(shape) < 1:
            raise ValueError(f"shape must have sizes of at least 1, got {shape}")
        if dtype is not None and dtype not in ITEMSIZE:
            raise ValueError(unknown("dtype", dtype, ITEMSIZE))
        return shape, contiguous_view(shape, dtype or "float32")
    if array_kind(x) == "torch" and str(x.layout) != "torch.strided":
        raise TypeError(f"x must be a strided tensor, not one of layout {x.layout}")
    shape, name = tuple(x.shape) or (1,), _dtype_of("x", x)
    if dtype not in (None, name):
        raise ValueError(f"dtype={dtype!r} is for a shape, and x has dtype {name}")
    if array_kind(x) == "torch":
        return shape, View(tuple(x.stride()) or (1,), name, x.data_ptr() % 16 == 0)
    return shape, contiguous_view(shape, name)


def _dtype_of(argument: str, t: Any) -> str:
    """Name of the dtype of an array.

    Raises:
        ValueError: it is none of the dtypes that can be planned for.
    """
    name = str(t.dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise ValueError(f"{argument} has dtype {name}; dtypes: {', '.join(ITEMSIZE)}")
    return name


def torch_task(
    declaration: Operation, shape: tuple[int, ...], axis: int, x: View, options: ScoreOptions,
    batch_invariant: bool, outputs: tuple[str, ...],
) -> Task:  # fmt: skip
    """The task of a call on torch tensors.

    All tensors beside x are taken as contiguous, except those of the score options.
    """
    tensors = {"x": x, **operand_views(declaration, shape, axis, x.dtype, outputs=outputs)}
    if batch_invariant:
        # A call copies tensors whose rows are not contiguous.
        rows_first = contiguous_strides(_to_end(shape, axis))
        strides = (*rows_first[:axis], rows_first[-1], *rows_first[axis:-1])
        tensors |= {name: View(strides, tensors[name].dtype) for name in declaration.element_operands}
    tensors |= _option_views(options, shape, axis, x.dtype)
    if options.softcap is not None and not declaration.scores:
        # The slope of the softcap is taken at the logits, which the input is not.
        tensors["logits"] = contiguous_view(shape, x.dtype)
    numbers = frozenset(name for name in options.given if name in ("scale", "softcap")) - tensors.keys()
    flags = Flags(numbers, options.causal, options.zero, x.dtype in ("float32", "float64"))
    task = task_of(declaration, outputs, shape, axis, tensors, flags)
    return one_row_as_many(task) if batch_invariant else task


def task_in_jax(
    declaration: Operation, shape: tuple[int, ...], axis: int, dtype: str, options: ScoreOptions,
    outputs: tuple[str, ...] | None,
) -> Task:  # fmt: skip
    """The task of a call on JAX arrays.  XLA moves the axis to the end."""
    name = declaration.name
    # The other gradients are those in the scores; XLA computes the gradients in the logits from them.
    given = options.given if declaration.scores else ()
    arrays = {}
    for option in given:
        t = getattr(options, option)
        if not hasattr(t, "dtype"):
            continue
        own = _to_end(_whole(option, tuple(t.shape), shape, axis), axis)
        arrays[option] = jax_plans.array_view(own, _dtype_of_option(option, t, dtype))
    numbers = frozenset(given) & {"scale", "softcap"} - arrays.keys()
    written = outputs or jax_plans.outputs_of(name)
    return jax_plans.task_for(name, written, _to_end(shape, axis), dtype, arrays, numbers)


def _option_views(options: ScoreOptions, shape: tuple[int, ...], axis: int, dtype: str) -> dict[str, View]:
    """The tensors among the score options."""
    found = {}
    for name in options.given:
        t = getattr(options, name)
        if not hasattr(t, "dtype"):
            continue
        whole = _whole(name, tuple(t.shape), shape, axis)
        if array_kind(t) == "torch":
            strides, is_aligned = tuple(t.expand(shape).stride()), t.data_ptr() % 16 == 0
        else:
            steps = contiguous_strides(whole)
            strides, is_aligned = tuple(0 if n == 1 else step for n, step in zip(whole, steps, strict=True)), True
        found[name] = View(strides, _dtype_of_option(name, t, dtype), is_aligned)
    return found


def _whole(name: str, own: tuple[int, ...], shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of a score option with as many dimensions as the input.

    Raises:
        ValueError: it does not broadcast to the input's shape, or must have one number per row and has more.
    """
    if not broadcasts(own, shape):
        raise ValueError(f"{name} of shape {own} does not broadcast to x's {shape}")
    if SCORE_OPTIONS[name].kind == "row":
        check_one_per_row("explain()", name, own, shape, (axis,), ValueError)
    return (*(1,) * (len(shape) - len(own)), *own)


def _dtype_of_option(name: str, t: Any, dtype: str) -> str:
    """Dtype of a mask or a bias; a bias that is known by its shape has the dtype of the input."""
    if name == "mask":
        if t.dtype is not None and str(t.dtype).removeprefix("torch.") != "bool":
            raise ValueError(f"mask must be boolean, got {t.dtype}")
        return "bool"
    return dtype if t.dtype is None else _dtype_of(name, t)


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str()` of it is a text to read.

    Attributes:
        task: What was asked: a call without its data.
        problem: The part of the task that the plan depends on.
        device: The device that was planned for.  A plan for an interpreter, on a CPU, is made for an H200.
        plan: The plan that would run.
        others: The other plans, shortest estimate first, and the strategies that cannot run.  If the caller forces a
            plan, another plan can be faster.
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
        guess = "" if other.measured_on and self.plan.measured_on else " by estimate"
        forced = ", but another plan is forced" if slower < 1 else ""
        return f"{slower:.2f} times as long{guess}{forced}: {other.reason}"

    def compile(self) -> list[Kernel]:
        """The plan's kernels, compiled for the device, which this machine need not have: registers, spills, listings.

        Returns:
            A record for each launch; an empty list for the eager backend, which has no kernels of ours.

        Raises:
            RuntimeError: the backend's compiler is missing, Triton's interpreter is on, or the backend is Pallas.
        """
        if self.plan.backend == "eager":
            return []
        if self.plan.backend == "pallas":
            raise RuntimeError("XLA compiles Pallas kernels, where the GPU is and when they are called")
        request = Request(self.task, self.plan)
        kernels: list[Kernel] = registry.load(self.plan.backend).compile_request(request, self.device)
        return kernels

    def as_dict(self) -> dict[str, Any]:
        """The problem, the device and all plans, for JSON."""
        return {
            "problem": asdict(self.problem),
            "device": vars(self.device),
            "lacks_memory": lacks_memory(self.problem, self.device),
            "plan": self.plan.as_dict(),
            "others": [
                {**(other.as_dict() if isinstance(other, Plan) else vars(other)), "why_not": self.why_not(other)}
                for other in self.others
            ],
        }

    @property
    def _asked(self) -> str:
        q = self.problem
        outputs = f" ({', '.join(q.outputs)})" if q.outputs != q.declaration.always else ""
        return f"{q.operation}{outputs} of {q.rows} x {q.cols} {q.dtype} on {self.device.name}"

    def __repr__(self) -> str:
        return f"<Explanation {self._asked}: {self.plan.backend}/{self.plan.strategy}, {self.plan.estimate_us:.1f} us>"

    def __str__(self) -> str:
        p, small = self.plan, lacks_memory(self.problem, self.device)
        lines = [
            self._asked,
            *([f"  memory {small}"] if small else []),
            f"  {p.backend}/{p.strategy}: {p.reason}",
            f"  {p.bytes_moved / 1e6:.1f} MB moved; floor {p.floor_us:.1f} us, estimate {p.estimate_us:.1f} us",
        ]
        lines += [f"  not {other.backend}/{other.strategy}: {self.why_not(other)}" for other in self.others]
        return "\n".join(lines)


def explain_task(task: Task, planner: Planner, choice: Choice) -> Explanation:
    """The plan for a task, and why."""
    problem = Problem.of(task, choice.batch_invariant)
    every = {_name_of(o): o for o in planner.alternatives(problem, Choice(batch_invariant=choice.batch_invariant))}
    plans = [option for option in every.values() if isinstance(option, Plan)]
    # Without a forced choice, the plan is among the alternatives, and need not be made twice.
    chosen = best(plans) if choice == ANY and plans else planner.plan(problem, choice)
    if choice != ANY:
        # A plan that the choice allows was compared with the chosen one by times of the allowed backends alone.
        every |= {_name_of(o): o for o in planner.alternatives(problem, choice) if isinstance(o, Plan)}
    del every[_name_of(chosen)]
    others = sorted(every.values(), key=lambda o: o.estimate_us if isinstance(o, Plan) else float("inf"))
    return Explanation(task, problem, planner.device, chosen, tuple(others))


def _name_of(option: Plan | Refusal) -> tuple[str, str]:
    return option.backend, option.strategy
