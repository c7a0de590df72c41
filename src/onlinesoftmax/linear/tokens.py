"""Plans `stored` and `tokens` of losses: the logits of a chunk of tokens, and their gradient in the same memory.

The last columns of a first chunk may lie in the memory of the gradient of the weight, which is not written yet.

Where the gradient of each loss is known in the forward pass, as for a mean, the gradients follow at once.  Where it has
to wait, the backward pass makes the logits of each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from ..torch.autograd import has_saved_tensor_hooks, keeps_graph
from ..torch.formulas import accumulator_of
from ..torch.small_kernels import scale_gradient
from .arguments import check_gradients
from .plans import LinearPlan
from .products import add_input_gradient, add_weight_gradient, input_gradient, logits_memory, logits_of, zeroed
from .sharing import Sharing

Tensor = torch.Tensor

Rows = Callable[..., tuple[tuple[Tensor, ...], Any]]
"""Function (logits, slice of tokens, factor) of a chunk: its outputs for each token, and the gradient in the logits.

The factor has the gradient of each token's first output; None where no gradient is wanted.  With a plan whose last
columns lie apart, the function takes them as a fourth argument, and overwrites both tensors with the gradient.
"""


class Gradients(NamedTuple):
    """Gradients of input, weight and bias; None where not wanted.  Those of weight and bias may be wider than these."""

    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Work(NamedTuple):
    """What to compute.

    Attributes:
        plan: How the tokens are cut.
        rows: What to compute of the logits of a chunk.
        skipped: True for the tokens that count for nothing, whose input may hold NaN; None where all count.
        sharing: The other processes that have classes; None where this one has all.
        sum_dtype: Dtype in which several chunks add up the gradient of the weight; None for float32 or float64.
        reads: Tensors of the caller that `rows` reads.  Like the inputs, they must not change before the backward pass.
    """

    plan: LinearPlan
    rows: Rows
    skipped: Tensor | None
    sharing: Sharing | None = None
    sum_dtype: torch.dtype | None = None
    reads: tuple[Tensor | None, ...] = ()


def run(
    work: Work, x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, wanted: tuple[bool, bool, bool]
) -> tuple[tuple[Tensor, ...], Gradients]:
    """The outputs for each token, and with a factor the wanted gradients of the sum of factor · first output.

    Args:
        work: What to compute.
        x, weight, bias: The tensors, (tokens, hidden), (classes, hidden) and (classes,).
        factor: Gradient of each token's first output; None for no gradients.
        wanted: Whether the gradients of input, weight and bias are wanted.
    """
    plan, rows, skipped, sharing, sum_dtype, _ = work
    tokens, (classes, hidden) = len(x), weight.shape
    of_input, of_weight, of_bias = (one and factor is not None for one in wanted)
    wide = accumulator_of(x.dtype, x.dtype)
    sum_dtype = sum_dtype_of(plan, weight.dtype, sum_dtype)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if of_input else None
    dw = torch.empty(classes, hidden, dtype=sum_dtype, device=x.device) if of_weight else None
    db = torch.zeros(classes, dtype=wide, device=x.device) if of_bias else None
    memory, own = _memory(plan, tokens, classes, x)
    found, finish = [], cast(Callable[[], Any], _nothing)
    for part in _parts(plan, tokens):
        if own is not None and not part.start:
            assert factor is not None
            sums = Gradients(None if dx is None else dx[part], dw, db)
            found.append(_run_in_two(work, x[part], weight, bias, factor[part], sums, own))
            continue
        z = logits_of(x[part], weight, bias, memory[: part.stop - part.start])
        # The gradient of the chunk before has travelled during two products.
        finish()
        outputs, dz = rows(z, part, None if factor is None else factor[part])
        found.append(outputs)
        if dx is not None and sharing is not None:
            total = torch.empty(len(dz), hidden, dtype=wide, device=x.device)
            add_input_gradient(total, dz, weight, True)
            finish = sharing.summed(total, dx[part])
        of_part = Gradients(None if dx is None or sharing is not None else dx[part], dw, db)
        add_gradients(of_part, dz, x[part], weight, None if skipped is None else skipped[part], not part.start)
    finish()
    if not found:
        return rows(memory, slice(0, 0), factor)[0], Gradients(dx, None if dw is None else dw.zero_(), db)
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True)), Gradients(dx, dw, db)


def sum_dtype_of(plan: LinearPlan | None, dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Dtype in which the gradient of a weight of some dtype is added up; `asked` is as `sum_dtype` of Work."""
    # One product is rounded once by itself; in float16 a sum over all tokens could be infinite.
    once = plan is not None and plan.name == "stored" and dtype != torch.float16
    return dtype if once else asked or accumulator_of(dtype, dtype)


def add_gradients(
    sums: Gradients, dz: Tensor, x: Tensor, weight: Tensor, skipped: Tensor | None, first: bool
) -> None:  # fmt: skip
    """Add the gradients of a chunk of tokens to those of weight and bias, and write that of its input.

    Args:
        sums: The gradient of the chunk's input, and the sums of all chunks.
        dz: Gradient of the logits of the chunk.
        x, weight: Its input, and the weight.
        skipped: True for its tokens that count for nothing; None where all count.
        first: True for the first chunk, which writes the gradient of the weight.
    """
    if sums.weight is not None:
        # The gradient of a skipped token is 0, but its input may be NaN.  The gradient of the input comes last, so its
        # memory can hold the input until then.
        add_weight_gradient(sums.weight, dz, zeroed(x, skipped, sums.input), first)
    if sums.input is not None:
        input_gradient(dz, weight, sums.input)
    if sums.bias is not None:
        sums.bias.add_(dz.sum(0, dtype=sums.bias.dtype))


def _parts(plan: LinearPlan, tokens: int) -> list[slice]:
    """The tokens of each chunk."""
    first = plan.first or plan.chunk
    begins = [0, *range(first, tokens, plan.chunk)] if tokens else []
    return [slice(begin, min(begin + plan.chunk if begin else first, tokens)) for begin in begins]


def _memory(plan: LinearPlan, tokens: int, classes: int, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Memory of the logits of a chunk, and in the same place that of a first chunk's columns that do not lie apart."""
    if not plan.apart:
        return logits_memory(min(plan.chunk, tokens), classes, x), None
    first, rows, own = plan.first or tokens, plan.chunk if plan.first else 0, classes - plan.apart
    memory = x.new_empty(max(first * own, rows * classes))
    return memory[: rows * classes].view(rows, classes), memory[: first * own].view(first, own)


def _run_in_two(
    work: Work, x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor, sums: Gradients, first: Tensor
) -> tuple[Tensor, ...]:
    """Run the loss of a first chunk with the last columns of its logits in the memory of the gradient of the weight.

    Args:
        work: What to compute.
        x, weight, bias: The input of the chunk, and the tensors of the head.
        factor: Gradient of the first output of each token of the chunk.
        sums: The gradients to write; that of the bias has zeros.
        first: Memory of the other columns.
    """
    tokens, own, dw = len(x), first.shape[1], sums.weight
    assert dw is not None
    # The place of the first classes, whose products come last.
    last = dw.view(-1).view(x.dtype)[: tokens * (len(weight) - own)].view(tokens, -1)
    logits = [(slice(0, own), first), (slice(own, len(weight)), last)]
    for part, z in logits:
        logits_of(x, weight[part], None if bias is None else bias[part], z)
    outputs, _ = work.rows(first, slice(0, tokens), factor, last)
    total = (
        None if sums.input is None else torch.empty(x.shape, dtype=accumulator_of(x.dtype, x.dtype), device=x.device)
    )
    for part, dz in logits:
        if total is not None:
            add_input_gradient(total, dz, weight[part], part.start == 0)
        if sums.bias is not None:
            sums.bias[part] = dz.sum(0, dtype=sums.bias.dtype)
    valid = zeroed(x, None if work.skipped is None else work.skipped[:tokens], sums.input)
    for part, dz in reversed(logits):
        add_weight_gradient(dw[part], dz, valid, True)
    if sums.input is not None and total is not None:
        sums.input.copy_(total)
    return outputs


def _nothing() -> None:
    """Nothing is on its way."""


Compute = Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]]
"""Function (input, weight, bias, factor, wanted) that returns what `run` of this module does."""


class KnownFactor(torch.autograd.Function):
    """(total, outputs for each token): total is the sum of factor · first output, whose gradients forward computes.

    `recorded` is True where autograd records the call, so that gradients are wanted.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor, compute: Compute, recorded: bool
    ) -> Any:  # fmt: skip
        outputs, ctx.gradients = compute(x, weight, bias, factor if recorded else None, ctx.needs_input_grad[:3])
        ctx.hooked = has_saved_tensor_hooks()
        if ctx.hooked:
            ctx.save_for_backward(*ctx.gradients)
            ctx.gradients = None
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*outputs)
        ctx.set_materialize_grads(False)
        return ((outputs[0] * factor).sum(), *outputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        check_gradients(dy)
        if dy is None:
            return (None,) * 6
        gradients, keeps = ctx.saved_tensors if ctx.hooked else ctx.gradients, keeps_graph()
        if gradients is None:
            raise RuntimeError("an earlier backward pass has taken the gradients: give it retain_graph=True")
        if not keeps:
            ctx.gradients = None
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return (*[None if g is None else _scaled(g, dy, dtype, keeps) for g, dtype in pairs], None, None, None)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype, keeps: bool) -> Tensor:
    """The product in a dtype; in the memory of the gradient where it has this dtype and nobody needs it again."""
    if not gradient.numel():
        return gradient.to(dtype)
    return scale_gradient(gradient, factor, dtype, in_place=not keeps)


class LaterFactor(torch.autograd.Function):
    """The outputs for each token; backward alone knows the gradient of each output, so it makes the logits again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, work: Work) -> Any:
        ctx.work = work
        ctx.save_for_backward(x, weight, bias, *work.reads)
        outputs, _ = run(work, x, weight, bias, None, (False, False, False))
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        check_gradients(dy)
        if dy is None:
            return (None,) * 4
        x, weight, bias, *_ = ctx.saved_tensors
        _, gradients = run(ctx.work, x, weight, bias, dy, ctx.needs_input_grad[:3])
        found = [None if g is None else g.to(x.dtype) for g in gradients]
        return (*found, None)
