"""The ways of traced calls, by the operators of operators.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch.autograd import has_saved_tensor_hooks
from ..torch.loss_arguments import is_class, with_constants
from ..torch.namespace import NAMESPACE
from .arguments import Head, constant, plan_for, records, wanted_of
from .formulas import READS_A_GRADIENT, LossCall, checked_losses, loss_of, needs_whole_rows
from .plans import CHUNK_BYTES, LinearPlan
from .rows import of_part
from .tokens import sum_dtype_of

Tensor = torch.Tensor

MOST_CHUNKS = 16
"""Most chunks of `token_loss`: a graph has the loss and its derivative once for each chunk."""

Bounds = tuple[int | None, torch.dtype]
"""The arguments `memory` and `acc_dtype`."""


def losses(call: LossCall, weight: Tensor | None, stats: bool) -> tuple[Tensor, Any]:
    """The losses of a traced call, in the form in which `losses` of run.py gives them.

    The gradient of a mean over many tokens is too small for float16, so there it waits for the factor of a scaler.
    """
    head, loss, factor = call.head, call.loss, call.factor
    each, target = loss.reduction == "none", head.target
    known = not each and head.input.dtype != torch.float16
    if not known and not needs_whole_rows(loss, target, weight, stats):
        y, found = loss_of(statistics(head, loss.options, call.memory), target, loss) * factor, ()
        return y if each else y.sum(), found
    loss = with_constants(loss) if torch.compiler.is_dynamo_compiling() else loss
    scale, options = _scale_and_options(head, loss.options, call.memory)
    numbers = loss.ignore_index, loss.smoothing, loss.z_loss, stats, call.sum_dtype, loss.settings.dtype
    y, *found = _operators().linear_cross_entropy(
        head.input, head.weight, head.bias, target, scale, weight, factor if known else None, *numbers, *options
    )
    y = y if known else y * factor
    return y if known or each else y.sum(), found[:3]


def statistics(head: Head, options: Any, memory: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, lse) by an operator, which keeps the logits where they take the usual memory."""
    x, weight = head.input, head.weight
    scale, given = _scale_and_options(head, options, memory)
    keeps = memory is None and records(head) and x.shape[0] * len(weight) * x.itemsize <= CHUNK_BYTES
    found: Any = _operators().linear_token_logprobs(x, weight, head.bias, head.target, scale, *given, keeps, None)
    return found[0], found[1], found[2].to(found[0].dtype)


def token_loss(
    head: Head, options: Any, bounds: Bounds, factor: Tensor, loss: Callable[..., Any], beside: list[Tensor],
    ignored: Tensor,
) -> Tensor:  # fmt: skip
    """The sum of factor · loss.

    Args:
        head: The tensors.
        options: Scale and softcap, or None.
        bounds: The arguments `memory` and `acc_dtype`.
        factor: Factor of the loss of each token.
        loss: The function of the caller, `loss(logprob, entropy, lse, *beside)`.
        beside: Its other tensors, (tokens,) each.
        ignored: True for the tokens without loss and gradient, (tokens,).
    """
    plan = _plan_in_graph(head, bounds, factor.dtype)
    if plan is not None:
        return _token_loss_in_chunks(plan, head, options, bounds[1], factor, (loss, *beside), ignored)
    found = statistics(head, options, bounds[0])
    # An ignored token has no gradient, whatever the loss makes of it.
    y = loss(*[t.masked_fill(ignored, 0.0) for t in found], *beside)
    return (checked_losses("linear_token_loss", y, factor).masked_fill(ignored, 0.0) * factor).sum()


def _plan_in_graph(head: Head, bounds: Bounds, wide: torch.dtype) -> LinearPlan | None:
    """The plan of `linear_token_loss` whose chunks a graph of torch.compile can have; None where it has none.

    A graph for any number of tokens has no number of chunks, and torch.func.vjp refuses hooks of saved tensors.
    """
    if not torch.compiler.is_dynamo_compiling() or not records(head) or _has_hooks():
        return None
    from torch.fx.experimental.symbolic_shapes import has_static_value

    (tokens, hidden), classes, (memory, sum_dtype) = head.input.shape, len(head.weight), bounds
    if not all(map(has_static_value, (tokens, hidden, classes))) or not tokens:
        return None
    in_place = sum_dtype.itemsize < wide.itemsize
    plan = plan_for("linear_token_loss", head, memory, whole_rows=True, in_place=in_place)
    return plan if plan.chunks <= MOST_CHUNKS else None


def _has_hooks() -> bool:
    """True where the trace is inside a checkpoint, or inside hooks of saved tensors."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None and "checkpoint" not in str(tracer.source_target):
        tracer = tracer.parent
    return tracer is not None or has_saved_tensor_hooks()


_has_hooks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs when Dynamo traces, as a constant


def _token_loss_in_chunks(
    plan: LinearPlan, head: Head, options: Any, acc_dtype: torch.dtype, factor: Tensor, function: tuple[Any, ...],
    ignored: Tensor,
) -> Tensor:  # fmt: skip
    """The sum of `token_loss`, whose gradients the forward pass computes; `function` is the loss, then its tensors."""
    x, weight, bias, of_target, _ = head
    (of_input, of_weight, of_bias), (loss, *beside), ops = wanted_of(head), function, _operators()
    rows, w, b = x.detach(), weight.detach(), None if bias is None else bias.detach()
    dw = w.new_empty(w.shape if of_weight else 0, dtype=sum_dtype_of(plan, w.dtype, acc_dtype))
    db = w.new_zeros(len(w) if of_bias else 0, dtype=factor.dtype)
    dx: list[Tensor] = []
    total = factor.new_zeros(())
    for first in range(0, len(x), plan.chunk):
        part = slice(first, min(first + plan.chunk, len(x)))
        target, skipped, given = of_target[part], ignored[part], [t[part] for t in beside]
        scale, (number, softcap, *_) = _scale_and_options(head, of_part(options, part), None)
        # Else a compiler may compute the losses of several chunks in one kernel, for which all their logits must exist.
        after = None if not dx else dx[-1] if of_input else dw
        nothing = None, False, False, False
        *known, z = ops.linear_token_logprobs(rows[part], w, b, target, scale, number, softcap, *nothing, True, after)
        leaves = known[0].masked_fill(skipped, 0.0), known[1], known[2].to(known[0].dtype)
        y, derivative = torch.func.vjp(lambda *numbers, given=given: loss(*numbers, *given), *leaves)
        if checked_losses("linear_token_loss", y, leaves[0]).requires_grad:
            raise RuntimeError(f"linear_token_loss(): {READS_A_GRADIENT}")
        total = total + (y.masked_fill(skipped, 0.0).to(factor.dtype) * factor[part]).sum()
        # A token that is ignored has no gradient, whatever the loss makes of it.
        dlogprob, *others = (dy.masked_fill(skipped, 0.0) for dy in derivative(factor[part].to(y.dtype)))
        dys = dlogprob.where(is_class(target, len(w)), 0.0), *others
        tensors = rows[part], w, target, scale, *known, z, *dys, dw, db
        dx.append(ops.linear_gradients(*tensors, number, softcap, of_input, first == 0))
    return ops.linear_known_gradients(total, x, weight, bias, torch.cat(dx), dw, db)


def _scale_and_options(head: Head, options: Any, memory: int | None) -> tuple[Tensor | None, tuple[Any, ...]]:
    """The scale where it is a tensor, and the numbers that operators take (`OPTIONS`)."""
    scale, softcap = (1.0, None) if options is None else (options.scale, options.softcap)
    tensor = scale if isinstance(scale, Tensor) else None
    number = constant(scale) if tensor is None else 1.0
    softcap = None if softcap is None else constant(softcap)
    return tensor, (number, softcap, memory, *wanted_of(head))


def _operators() -> Any:
    return getattr(torch.ops, NAMESPACE)
