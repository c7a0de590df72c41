"""The plan that a call of a function with a head would run (linear/), and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from ..core.arrays import array_kind, dtype_name
from ..core.device import Device
from ..core.options import ScoreOptions
from ..core.task import ANY, Choice
from ..core.units import duration, size
from ..core.view import contiguous_view
from ..linear.forecast import Forecast, forecast, sources
from ..linear.plans import LinearPlan, plans_of
from ..linear.problem import FUNCTIONS, STATISTICS, LinearProblem, problem_of
from ..ops import OPERATIONS
from ..planner.plan import PlanError
from ..torch import device as torch_device
from .rows import Explanation, described, explain_task, sizes_of, torch_task

GRADIENTS = ("input", "linear_weight", "linear_bias")
"""The tensors of a head that may have a gradient."""


class Head(NamedTuple):
    """A function with a head, its sizes (tokens, hidden, classes), and the name of the dtype of its logits."""

    function: str
    sizes: tuple[int, int, int]
    dtype: str


class OtherHeadPlan(NamedTuple):
    """A plan that was not chosen.

    Attributes:
        name: "stored", "tokens" or "columns".
        plan: The plan; None where the call has none of this name.
        forecast: Its time; None where there is no plan, or the rate of the device is not known.
        reason: One sentence: why it was not chosen.
    """

    name: str
    plan: LinearPlan | None
    forecast: Forecast | None
    reason: str

    @property
    def why_not(self) -> str:
        """The reason why the plan was not chosen, with its cost."""
        if self.plan is None:
            return self.reason
        time = f", {self.forecast}" if self.forecast else ""
        return f"{self.reason} ({self.plan.cut}, {self.plan.counted}, {size(self.plan.bytes)}{time})"


@dataclass(frozen=True)
class HeadExplanation:
    """The result of `explain` for a function with a head; `str()` of it is a text to read.

    Attributes:
        function: Name of the public function.
        problem: What the plan depends on.
        device: The device that was planned for.
        plan: The plan that would run.
        kernels: The kernels that read one chunk of logits, in their order.
        forecast: The time; None where the rate of products of the device is not known, as for a CPU.
        others: The other plans, with the reasons why they were not chosen.
    """

    function: str
    problem: LinearProblem
    device: Device
    plan: LinearPlan
    kernels: tuple[Explanation, ...]
    forecast: Forecast | None
    others: tuple[OtherHeadPlan, ...]

    def as_dict(self) -> dict[str, Any]:
        """The problem, the device, all plans and the kernels, for JSON."""
        return {
            "function": self.function,
            "problem": self.problem._asdict(),
            "device": asdict(self.device),
            "plan": self.plan._asdict(),
            "forecast": _numbers(self.forecast),
            "kernels": [{"operation": k.problem.operation, **k.plan.as_dict()} for k in self.kernels],
            "others": [
                {**other._asdict(), "plan": other.plan and other.plan._asdict(), "forecast": _numbers(other.forecast)}
                for other in self.others
            ],
        }

    @property
    def asked(self) -> str:
        """The call in one line."""
        q = self.problem
        wanted = [name for name, one in zip(GRADIENTS, (q.of_input, q.of_weight), strict=False) if one]
        gradients = f"gradients of {' and '.join(wanted)}" if wanted else "no gradient of input or weight"
        sizes = f"{q.tokens} x {q.hidden} -> {q.classes} {q.dtype}"
        return f"{self.function} of {sizes} on {self.device.name}, {gradients}"

    def facts(self) -> list[tuple[str, str]]:
        """Names and values of the plan's numbers, in reading order."""
        return [
            ("plan", f"{self.plan.name}: {self.plan.reason}"),
            ("chunks", self.plan.cut),
            ("products", _products(self.problem, self.plan)),
            ("buffers", _buffers(self.problem, self.plan)),
            *(("kernel", _kernel(kernel)) for kernel in self.kernels),
            ("forecast", str(self.forecast or f"none: the rate of products on {self.device.name} is not known")),
            *(("figures", text) for text in filter(None, [sources(self.problem, self.device)])),
        ]

    def __repr__(self) -> str:
        return f"<HeadExplanation {self.asked}: {self.plan.name}, {self.plan.cut}>"

    def __str__(self) -> str:
        lines = [self.asked, *(f"  {name:<10}{value}" for name, value in self.facts())]
        return "\n".join([*lines, *(f"  not {other.name}: {other.why_not}" for other in self.others)])


def explain_head(
    head: Head, asked: dict[str, Any], memory: int | None, options: ScoreOptions, device: Device, named: bool
) -> HeadExplanation:
    """The plan of a function with a head, and why.

    Args:
        head: The head.
        asked: The other arguments of `problem_of`, by name.
        memory: As in the function.
        options: Scale and softcap.
        device: The device.
        named: True for a device that this machine need not have.

    Raises:
        ValueError: no plan fits `memory`.
    """
    function, sizes, dtype = head
    planner = torch_device.planner_for(device, ANY, named)
    problem = problem_of(function, sizes, dtype, **asked)
    problem = problem._replace(in_two=_in_two(problem, FUNCTIONS[function].loss, options, device, named))
    plan, others = plans_of(problem, memory)

    def kernels_of(each: LinearPlan) -> tuple[Explanation, ...]:
        shape = (problem.tokens, each.chunk) if each.name == "columns" else (each.chunk, problem.classes)
        view, found = contiguous_view(shape, dtype), []
        for operation, outputs in passes_of(function, problem, each):
            declaration = OPERATIONS[operation]
            task = torch_task(declaration, shape, 1, view, options.of(declaration.options), False, outputs)
            found.append(explain_task(task, planner, ANY))
        return tuple(found)

    def forecast_of(each: LinearPlan, kernels: Sequence[Explanation]) -> Forecast | None:
        # The last chunk may be smaller.
        chunks = (problem.classes if each.name == "columns" else problem.tokens) / each.chunk
        return forecast(problem, each, chunks * sum(kernel.plan.estimate_us for kernel in kernels), device)

    kernels = kernels_of(plan)
    rejected = [
        OtherHeadPlan(name, other, other and forecast_of(other, kernels_of(other)), reason)
        for name, other, reason in others
    ]
    return HeadExplanation(function, problem, device, plan, kernels, forecast_of(plan, kernels), tuple(rejected))


def _in_two(problem: LinearProblem, loss: str | None, options: ScoreOptions, device: Device, named: bool) -> bool:
    """True where a kernel of a loss takes rows whose last columns lie in another tensor."""
    if loss is None or problem.travels or problem.classes * problem.itemsize % 16:
        return False
    shape, choice, declaration = (problem.tokens, problem.classes), Choice("cuda", "cluster"), OPERATIONS[loss]
    view = contiguous_view(shape, problem.dtype)
    task = torch_task(declaration, shape, 1, view, options.of(declaration.options), False, ("loss", "y"))
    try:
        torch_device.planner_for(device, choice, named).plan(task, choice)
    except PlanError:
        return False
    return True


def passes_of(function: str, problem: LinearProblem, plan: LinearPlan) -> list[tuple[str, tuple[str, ...]]]:
    """Operation and outputs of each kernel that reads a chunk of logits, forward and backward."""
    loss = FUNCTIONS[function].loss
    if loss is None or plan.name == "columns" or plan.keeps:
        statistics = OPERATIONS[STATISTICS]
        backward = OPERATIONS[statistics.gradient_name]
        forward = (STATISTICS, ("y", "m", "l", *(("entropy",) if loss is None else ())))
        return [forward, (backward.name, backward.always)] if problem.recorded else [forward]
    alone, both = (loss, ("loss",)), (loss, ("loss", "y"))
    if not problem.recorded:
        return [alone]
    return [alone, both] if problem.waits else [both]


def described_head(
    function: str, x: Any, linear_weight: Any, linear_bias: Any, dtype: Any, reduction: str | None
) -> Head:
    """The head of an input, a weight and a bias, which may be tensors or shapes.

    Raises:
        TypeError: one of them is neither.
        ValueError: they do not fit together, or the function has no such reduction.
    """
    if linear_weight is None:
        raise ValueError(f"{function}() needs linear_weight: a tensor, or a shape (classes, hidden)")
    if reduction not in (None, *FUNCTIONS[function].reductions):
        raise ValueError(f"{function}() has no reduction {reduction!r}")
    shape, like = described(x, dtype)
    weight = _shape_of("linear_weight", linear_weight, like.dtype)
    if len(weight) != 2 or weight[1] != shape[-1] or weight[0] < 1:
        raise ValueError(f"linear_weight must have shape (classes, {shape[-1]}) for x of shape {shape}, got {weight}")
    if linear_bias is not None and _shape_of("linear_bias", linear_bias, like.dtype) != weight[:1]:
        raise ValueError(f"linear_bias must have shape ({weight[0]},)")
    return Head(function, (prod(shape[:-1]), shape[-1], weight[0]), like.dtype)


def _shape_of(name: str, t: Any, dtype: str) -> tuple[int, ...]:
    if isinstance(t, (tuple, list)):
        return sizes_of(name, t)
    if array_kind(t) is None:
        raise TypeError(f"{name} must be a tensor or a shape, not {type(t).__name__}")
    theirs = str(t.dtype).removeprefix("torch.")
    if theirs != dtype:
        raise ValueError(f"{name} has dtype {theirs}, and x {dtype}")
    return tuple(t.shape)


def wanted_gradients(gradients: Sequence[str] | None, *tensors: Any) -> tuple[bool, bool, bool]:
    """True for each gradient that is wanted: of input, weight and bias.

    Args:
        gradients: Their names; None for those that the tensors require.  A shape requires one.
        tensors: Input, weight and bias: tensors, shapes or None.

    Raises:
        ValueError: a name is unknown.
    """
    if gradients is None:
        input, weight, bias = (isinstance(t, (tuple, list)) or getattr(t, "requires_grad", False) for t in tensors)
        return input, weight, bias
    given = (gradients,) if isinstance(gradients, str) else tuple(gradients)
    if unknown := [name for name in given if name not in GRADIENTS]:
        raise ValueError(f"unknown gradient {unknown[0]!r}; there are: {', '.join(GRADIENTS)}")
    return GRADIENTS[0] in given, GRADIENTS[1] in given, GRADIENTS[2] in given


def adds_in_place(head: Head, acc_dtype: Any) -> bool:
    """True where the gradient of the weight is added up in a 16-bit dtype, so in its own memory.

    Raises:
        ValueError: the function has no such dtype, as in `linear_cross_entropy`.
    """
    if acc_dtype is None:
        return False
    found, wide = dtype_name(acc_dtype), "float64" if head.dtype == "float64" else "float32"
    if "tokens" not in FUNCTIONS[head.function].cuts:
        raise ValueError(f"{head.function}() has no acc_dtype here")
    if found == "float16" or found not in (head.dtype, wide):
        raise ValueError(f"acc_dtype must be {wide} or the dtype of a bfloat16 weight, got {found}")
    return found != wide


def _buffers(problem: LinearProblem, plan: LinearPlan) -> str:
    text = f"{size(plan.bytes)} beside results and gradients"
    if plan.name != "tokens" or not problem.weight_sum_bytes:
        return text
    return f"{text}; the gradient of the weight, {size(problem.result_bytes)}, comes when the last chunk is gone"


def _products(problem: LinearProblem, plan: LinearPlan) -> str:
    operations = 2 * problem.tokens * problem.hidden * problem.classes * plan.products / 1e12
    again = ""
    if plan.products > problem.products:
        part = f" of {problem.classes - plan.apart} columns" if plan.apart else ""
        again = f", of which one makes the logits{part} again"
    return f"{plan.products:.3g}{again}: {operations:.1f} tera-operations"


def _kernel(kernel: Explanation) -> str:
    q, p = kernel.problem, kernel.plan
    outputs = ", ".join(q.outputs)
    return f"{p.backend}/{p.strategy} for {q.operation} ({outputs}) of a chunk, estimate {duration(p.estimate_us)}"


def _numbers(found: Forecast | None) -> dict[str, float] | None:
    return None if found is None else {"us": found.us, **found._asdict()}
