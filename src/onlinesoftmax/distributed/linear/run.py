"""Cross-entropy of a head whose classes are sharded over processes.

torch.compile calls these functions without tracing them: its graph breaks there.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.call import Settings
from ...core.options import PLAIN
from ...linear import rows, run
from ...linear.formulas import LossCall, divided, needs_whole_rows, with_divisor
from ...linear.tokens import Rows
from ...torch.loss_arguments import count_of
from ..collective_eager import NUMBERS, general_way
from ..fast_path import run_chunk_if_possible
from ..losses import loss_rows, weight_of_mean
from ..shards import Operands, ShardSignature
from .team import Team

Tensor = torch.Tensor

# With `sharing`, the functions of whole classes are those of sharded classes.
token_logprobs, token_loss = torch.compiler.disable(run.token_logprobs), torch.compiler.disable(run.token_loss)


@torch.compiler.disable
def cross_entropy(
    tensors: run.Tensors, numbers: tuple[Any, ...], weight: Any, token_weight: Any, dtype: Any, team: Team,
    memory: Any, acc_dtype: Any,
) -> Tensor:  # fmt: skip
    """Compute `linear_cross_entropy` of arguments that are not checked; `numbers` has those of `checked_loss`."""
    call = run.checked_loss(tensors, numbers, weight, token_weight, dtype, memory, acc_dtype, team.shards.total)
    head, loss, dtype = call.head, call.loss, call.dtype
    weight = weight_of_mean(head.input, head.target, weight, loss, team.token_groups)
    mean = loss.reduction == "mean"
    count = team.over_tokens(count_of(head.target, weight, loss, call.factor.dtype)) if mean else None
    factor, divisor = with_divisor(call.factor, count, head.input.dtype)
    of_chunk, whole_rows = _loss_rows(call, weight, team), needs_whole_rows(loss, head.target, weight, False)
    y = run.losses(call._replace(factor=factor), weight, of_chunk, whole_rows, team.sharing)[0]
    if loss.reduction == "none":
        return y.reshape(head.shape).to(dtype)
    y = divided(team.over_tokens(y), divisor)
    y = y if count is None else y.masked_fill(count == 0, torch.nan)
    return y.to(dtype)


def _loss_rows(call: LossCall, weight: Tensor | None, team: Team) -> Rows:
    """The function of a chunk that exchanges the states of its tokens, and gives losses and gradient."""
    target, dtype, options = call.head.target, call.factor.dtype, call.loss.options or PLAIN
    settings = Settings(1, dtype, choice=rows.CHOICE)
    loss = call.loss._replace(settings=settings, reduction="none", options=None)
    signature = ShardSignature(1, team.shards, options, rows.CHOICE, loss, ("y",), dtype)
    weight = None if weight is None else weight.detach().resolve_neg().contiguous()

    def of_chunk(z: Tensor, part: slice, factor: Tensor | None) -> tuple[tuple[Tensor, ...], Any]:
        operands, wants = Operands(z, None, target[part], weight), factor is not None
        if not len(z):
            return (z.new_empty(0, dtype=dtype),), z
        found = run_chunk_if_possible(signature, operands, team.groups, factor)
        if found is not None:
            return found[:1], found[1]
        way = general_way(signature, operands)
        numbers, saved = way.forward(operands, team.groups)
        leaves = [None if t is None else t.detach().requires_grad_(wants) for t in numbers]
        with torch.set_grad_enabled(wants):
            y = loss_rows(dict(zip(NUMBERS, leaves, strict=True)), operands.target, weight, loss, team.shards)
        if factor is None:
            return (y,), None
        given = [t for t in leaves if t is not None]
        dys = iter(torch.autograd.grad(y, given, factor, allow_unused=True))
        return (y.detach(),), way.backward(z, saved, tuple(None if t is None else next(dys) for t in leaves), z)

    return of_chunk
