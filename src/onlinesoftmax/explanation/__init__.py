"""Why this plan?  The plan that a call would run, in words and numbers, and what the others would cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from ..core.arguments import checked_memory
from ..core.arrays import array_kind
from ..core.device import Device, known
from ..core.options import PLAIN, checked_options, is_number
from ..core.state import dim_from_end
from ..core.task import Choice
from ..core.wrong_calls import unknown
from ..jax import plans as jax_plans
from ..jax.device import from_jax, is_on
from ..kernels import registry
from ..linear.problem import FUNCTIONS
from ..ops import OPERATIONS
from ..torch import device as torch_device
from ..torch.device import from_torch, here
from .heads import HeadExplanation, adds_in_place, described_head, explain_head, wanted_gradients
from .routing import ROUTE, RouteExplanation, explain_route
from .rows import Explanation, Shape, check_taken, described, explain_task, framework_of, task_in_jax, torch_task
from .sampling import FILTERS, SAMPLE, SampleExplanation, described_sample, explain_sample, sample_in_jax
from .verification import VERIFY, VerifyExplanation, described_verify, explain_verify, verify_in_jax

__all__ = [
    "Explanation", "HeadExplanation", "RouteExplanation", "SampleExplanation", "VerifyExplanation", "explain",
]  # fmt: skip


@overload
def explain(
    x: Any, dim: int = -1, *, operation: str = "softmax", dtype: Any = None, outputs: Sequence[str] | None = None,
    scale: Any = 1.0, mask: Any = None, bias: Any = None, causal: bool = False, softcap: float | None = None,
    fully_masked: str = "nan", batch_invariant: bool = False, device: str | None = None, backend: str | None = None,
    strategy: str | None = None, framework: str | None = None,
) -> Explanation: ...  # fmt: skip


@overload
def explain(
    x: Any, *, operation: str, linear_weight: Any, linear_bias: Any = None, dtype: Any = None,
    reduction: str | None = None, gradients: Sequence[str] | None = None, whole_rows: bool = False,
    scale: float = 1.0, softcap: float | None = None, memory: int | None = None, acc_dtype: Any = None,
    device: str | None = None,
) -> HeadExplanation: ...  # fmt: skip


@overload
def explain(
    x: Any, dim: int = -1, *, operation: Literal["sample"], dtype: Any = None, top_k: Any = None, top_p: Any = None,
    min_p: Any = None, top_logprobs: int = 0, mask: Any = None, bias: Any = None, softcap: float | None = None,
    device: str | None = None,
) -> SampleExplanation: ...  # fmt: skip


@overload
def explain(
    x: Any, *, operation: Literal["verify"], dtype: Any = None, top_k: Any = None, top_p: Any = None,
    min_p: Any = None, draft_logits: bool = False, device: str | None = None, framework: str | None = None,
) -> VerifyExplanation: ...  # fmt: skip


@overload
def explain(
    x: Any, *, operation: Literal["route"], k: int, dtype: Any = None, score: str = "softmax",
    order: str = "score_first", bias: Any = None, groups: int | None = None, group_k: int | None = None,
    group_score: str | int = "top2_sum", renormalize: bool = True, prob_sums: bool = False, device: str | None = None,
) -> RouteExplanation: ...  # fmt: skip


def explain(
    x: Any,
    dim: int = -1,
    *,
    operation: str = "softmax",
    dtype: Any = None,
    outputs: Sequence[str] | None = None,
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
    linear_weight: Any = None,
    linear_bias: Any = None,
    reduction: str | None = None,
    gradients: Sequence[str] | None = None,
    whole_rows: bool = False,
    memory: int | None = None,
    acc_dtype: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    top_logprobs: int = 0,
    draft_logits: bool = False,
    k: int | None = None,
    score: str = "softmax",
    order: str = "score_first",
    groups: int | None = None,
    group_k: int | None = None,
    group_score: str | int = "top2_sum",
    renormalize: bool = True,
    prob_sums: bool = False,
) -> Explanation | HeadExplanation | SampleExplanation | VerifyExplanation | RouteExplanation:
    """The plan that a call would run, and why.

    Args:
        x: A torch tensor, a JAX array, or a shape: a tuple of sizes of a contiguous tensor.  A NumPy array counts as
            its shape and dtype.
        dim: The softmax dimension.
        operation: Name of a function, as "softmax"; or with "_backward", its gradient, which takes the options of the
            function.  Or name of a function with a head, as "linear_cross_entropy", of an input (..., hidden); or
            "sample", "verify" (x is the logits of the target model) or "route".
        dtype: Dtype, or its name, for a shape ("float32" by default); that of the tensor otherwise.
        outputs: Names of the outputs that the kernel writes, where it is not the result alone: ("loss", "y") for the
            losses with their gradient, ("mean_loss", "y") for their mean with its gradient.
        scale: Factor of the logits of the call, a number or a tensor.
        mask: Boolean mask of the call, True for elements that count; or a shape that broadcasts to that of x.
        bias: Tensor that the call adds to the logits, or a shape that broadcasts to that of x and stands for a bias of
            its dtype.  Of `route`: one number for each expert, or the shape (E,).
        causal: True for a call that masks the future positions of attention scores.
        softcap: Soft bound on the magnitude of the logits of the call; None without one.
        fully_masked: "nan" or "zero", the result of the call for a row without an element that counts.
        batch_invariant: True for a call whose rows have the same bits in every batch.
        device: Name of a known device ("h200", "a100", …); by default that of the tensor, or this
            machine's GPU, or its CPU.
        backend: Backend that the planner has to choose: "cuda", "triton" or "eager"; for JAX "pallas", "cuda" or
            "eager".
        strategy: Strategy that the planner has to choose, such as "row" or "cluster".
        framework: "torch" or "jax", if x is a shape: the framework of the call; "torch" by default.
        linear_weight: Of a head: its weight, or the shape (classes, hidden).
        linear_bias: Of a head: its bias, or the shape (classes,).
        reduction: Of a head: "mean", "sum" or "none"; None for "mean", or for a function without this argument.
        memory: Of a head: most bytes of logits and sums that exist at a time; None for the default of the function.
        acc_dtype: Of a head: dtype in which chunks of tokens add up the gradient of the weight; None for float32.
        gradients: Of a head: names of the tensors whose gradients are wanted, "input", "linear_weight" and
            "linear_bias".  By default those that require one, and all that are shapes.
        top_k: Of `sample` and `verify`: number of tokens to keep, or one for each row; None without this filter.
        top_p: Of `sample` and `verify`: part of the probability to keep, or one for each row; None without this filter.
        min_p: Of `sample` and `verify`: smallest probability to keep, as a part of the largest; None without this
            filter.
        top_logprobs: Of `sample`: number of the largest log-probabilities that the call returns.
        draft_logits: Of `verify`: True for a call with the logits of the draft model.
        k: Of `route`: number of experts of a token; required there.
        score: Of `route`: "softmax", "sigmoid", "sqrtsoftplus" or "identity".
        order: Of `route`: "score_first", or "topk_first" for a choice by logits.
        groups: Of `route`: number of groups of experts; None without groups.
        group_k: Of `route`: number of groups that a token chooses from.
        group_score: Of `route`: "top2_sum", "max", or the number of scores of a group that are added up.
        renormalize: Of `route`: True where the weights of a token are divided by their sum.
        prob_sums: Of `route`: True where the call returns the summed probability of each expert.
        whole_rows: Of a head: True for a call with label smoothing, class weights, class probabilities or statistics.

    Returns:
        An `Explanation`; for a function with a head, a `HeadExplanation`; for `sample`, a `SampleExplanation`; for
        `verify`, a `VerifyExplanation`; for `route`, a `RouteExplanation`.

    Raises:
        PlanError: the forced backend or strategy cannot run; the message lists every reason.
        TypeError: an argument has the wrong type.
        ValueError: unknown device, dtype, operation, output or framework, a dtype or framework that is not that of x,
            a mask or bias that does not broadcast, or an option that the function does not have.
        IndexError: dim is out of range.

    Example:
        >>> plan = explain((4096, 1024), dtype="bfloat16", device="h200").plan
        >>> print(f"{plan.backend}/{plan.strategy}, {plan.bytes_moved} bytes")
        cuda/row, 16777216 bytes
        >>> explain((4096, 1024), dtype="bfloat16", device="h200", mask=(4096, 1024)).plan.bytes_moved
        20971520
        >>> head = {"operation": "linear_cross_entropy", "linear_weight": (128256, 4096), "dtype": "bfloat16"}
        >>> plan = explain((8192, 4096), **head, memory=600_000_000, device="h200").plan
        >>> print(f"{plan.name}, {plan.chunks} chunks of {plan.chunk}, {plan.products:.1f} products")
        columns, 9 chunks of 16000, 3.5 products
    """
    _check_place(framework, device)
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "draft_logits": draft_logits}
    of_rows = {
        "outputs": outputs, "causal": causal, "fully_masked": fully_masked != "nan",
        "batch_invariant": batch_invariant, "backend": backend, "strategy": strategy,
    }  # fmt: skip
    of_heads = {
        "linear_weight": linear_weight, "linear_bias": linear_bias, "reduction": reduction, "gradients": gradients,
        "whole_rows": whole_rows, "memory": memory, "acc_dtype": acc_dtype,
    }  # fmt: skip
    of_gates = {
        "k": k, "score": score, "order": order, "groups": groups, "group_k": group_k, "group_score": group_score,
        "renormalize": renormalize, "prob_sums": prob_sums,
    }  # fmt: skip
    scaled, listed = not (is_number(scale) and scale == 1), {"top_logprobs": top_logprobs != 0}
    others = {"dim": dim != -1, "scale": scaled, "softcap": softcap, "mask": mask, **listed}
    if operation == ROUTE:
        _check_not_given(ROUTE, None, None, **of_rows, **of_heads, **others, **filters)
        machine = _machine(device, x, framework)
        return explain_route(x, dtype, bias, of_gates, framework_of(x, framework), machine, device is not None)
    _check_not_given(operation, None, None, **{name: of_gates[name] != value for name, value in NO_GATE.items()})
    if operation == SAMPLE:
        _check_not_given(SAMPLE, None, None, **of_rows, **of_heads, scale=scaled, draft_logits=draft_logits)
        describe = sample_in_jax if framework_of(x, framework) == "jax" else described_sample
        given = {"softcap": softcap, "bias": bias, "mask": mask}
        problem = describe(x, dim, dtype, {**filters, "top_logprobs": top_logprobs}, given)
        return explain_sample(problem, _machine(device, x, framework), device is not None)
    if operation == VERIFY:
        _check_not_given(VERIFY, None, None, **of_rows, **of_heads, **others, bias=bias)
        drafts = (verify_in_jax if framework_of(x, framework) == "jax" else described_verify)(x, dtype, filters)
        return explain_verify(drafts, _machine(device, x, framework), device is not None)
    _check_not_given(operation, None, None, **filters, **listed)
    if isinstance(operation, str) and operation in FUNCTIONS:
        _check_not_given(operation, x, framework, dim=dim != -1, mask=mask, bias=bias, **of_rows)
        head = described_head(operation, x, linear_weight, linear_bias, dtype, reduction)
        wanted = wanted_gradients(gradients, x, linear_weight, linear_bias)
        machine = _machine(device, x, framework)
        options = checked_options(operation, scale, softcap, None, None, False, "nan") or PLAIN
        in_place = adds_in_place(head, acc_dtype)
        asked = {"wanted": wanted, "each": reduction == "none", "whole_rows": whole_rows, "in_place": in_place}
        return explain_head(head, asked, checked_memory("explain()", memory), options, machine, device is not None)
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise ValueError(unknown("operation", operation, (*OPERATIONS, *FUNCTIONS, SAMPLE, VERIFY, ROUTE)))
    _check_not_given(operation, None, None, **of_heads)
    in_jax = framework_of(x, framework) == "jax"
    shape, like = described(x, dtype)
    axis, declaration = dim_from_end(dim, len(shape)) % len(shape), OPERATIONS[operation]
    written = None if outputs is None else declaration.named(outputs)
    given = {name: Shape(t) if isinstance(t, (tuple, list)) else t for name, t in (("bias", bias), ("mask", mask))}
    options = checked_options(operation, scale, softcap, given["bias"], given["mask"], causal, fully_masked) or PLAIN
    choice, machine = Choice(backend, strategy, batch_invariant), _machine(device, x, framework)
    check_taken(declaration.forward, in_jax, options, batch_invariant)
    if in_jax:
        task = task_in_jax(declaration, shape, axis, like.dtype, options, written)
        # For a named device, plan with every backend, installed here or not.
        how, moved = (machine, choice, task, like.dtype, device is not None), jax_plans.needs_move(shape, (axis,))
        return explain_task(task, jax_plans.planner_for(*how, moved=moved), choice)
    own = options.of(declaration.options)
    task = torch_task(declaration, shape, axis, like, own, batch_invariant, written or declaration.always)
    return explain_task(task, torch_device.planner_for(machine, choice, device is not None), choice)


NO_GATE: dict[str, Any] = {
    "k": None, "score": "softmax", "order": "score_first", "groups": None, "group_k": None, "group_score": "top2_sum",
    "renormalize": True, "prob_sums": False,
}  # fmt: skip
"""The arguments of `route` where they are not given."""


OF_HEADS = ("linear_weight", "linear_bias", "reduction", "gradients", "whole_rows", "memory", "acc_dtype")

OWNERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(FILTERS, (SAMPLE, VERIFY)),
    "top_logprobs": (SAMPLE,),
    "draft_logits": (VERIFY,),
    **dict.fromkeys(NO_GATE, (ROUTE,)),
    **dict.fromkeys(OF_HEADS, tuple(FUNCTIONS)),
}
"""The operations that an argument belongs to, if not all operations of rows have it."""


class NotTakenError(ValueError):
    """Arguments of `explain` that the operation does not have.

    Attributes:
        operation: Name of the operation.
        names: Names of the arguments.
    """

    def __init__(self, operation: str, names: list[str]) -> None:
        self.operation, self.names = operation, names
        owners = [f"{name} is an argument of {' and '.join(OWNERS[name])}" for name in names if name in OWNERS]
        super().__init__("; ".join([f"{operation}() has no {', '.join(names)} here", *owners]))


def _check_place(framework: Any, device: Any) -> None:
    """Raise an error for a framework or a device that has no name."""
    if framework not in (None, "torch", "jax"):
        raise ValueError(unknown("framework", framework, ("torch", "jax")))
    if device is not None and not isinstance(device, str):
        raise TypeError(f"device must be the name of a known device, not {type(device).__name__}")


def _check_not_given(operation: str, x: Any, framework: str | None, **given: Any) -> None:
    """Raise an error that names the arguments that are neither None nor False, which the operation does not have.

    With an input x, JAX is one of them.
    """
    names = [name for name, value in given.items() if value is not None and value is not False]
    names += ["framework='jax'"] if x is not None and framework_of(x, framework) == "jax" else []
    if names:
        raise NotTakenError(operation, names)


def _machine(device: str | None, x: Any, framework: str | None) -> Device:
    """The device with a name, or that of the input."""
    if device is not None:
        return known(device)
    if framework_of(x, framework) == "jax":
        no_gpu = registry.module_missing("jax", "jax") is not None or (array_kind(x) == "jax" and is_on("cpu", x))
        return known("cpu") if no_gpu else from_jax()
    return from_torch(x.device.type, x.device.index or 0) if array_kind(x) == "torch" else here()
