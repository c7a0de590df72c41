"""Cross-entropy of a head whose classes are sharded over processes.

torch.compile calls these functions without tracing them: its graph breaks there.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.call import Settings
from ...core.options import PLAIN
from ...linear import rows, run
from ...linear.arguments import (
    Head,
    checked_acc_dtype,
    checked_head,
    checked_memory,
    checked_options_of,
    checked_per_token,
    is_autocast,
)
from ...linear.columns import LogProbabilities
from ...linear.tokens import KnownFactor, LaterFactor, Rows, Work
from ...ops.cross_entropy.arguments import checked_numbers
from ...torch.arguments import TORCH, check_dtype, check_weight
from ...torch.formulas import accumulator_of
from ...torch.loss_arguments import Loss, count_of, ignored, signed
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
    """As `linear_cross_entropy`; `numbers` has reduction, ignore_index, label_smoothing, z_loss, scale and softcap."""
    name, (reduction, *given, scale, softcap) = "linear_cross_entropy", numbers
    head = checked_head(name, *tensors, soft=False, part=True)
    options = checked_options_of(name, scale, softcap)
    ignore_index, smoothing, z_loss = checked_numbers(TORCH, reduction, tuple(given), name)
    loss = Loss(Settings(1), ignore_index, reduction, smoothing, z_loss)
    check_weight(f"{name}()", weight, head.input, team.shards.total)
    check_dtype(f"{name}()", dtype)
    wide = accumulator_of(head.input.dtype, head.input.dtype)
    dtype = dtype or (wide if is_autocast(head.input) else head.input.dtype)
    target = signed(head.target).long()
    head = head._replace(target=target)
    weight = weight_of_mean(head.input, target, weight, loss, team.token_groups)
    count = team.over_tokens(count_of(target, weight, loss, wide)) if reduction == "mean" else None
    factor = torch.ones(len(target), dtype=wide, device=target.device)
    if token_weight is not None:
        factor = checked_per_token(name, "token_weight", token_weight, head).to(wide)
    factor, divisor = run.with_divisor(factor, count, head.input.dtype)
    of_row = loss._replace(settings=Settings(1, wide, choice=rows.CHOICE), reduction="none")
    whole_rows, sharing = bool(loss.smoothing) or weight is not None, team.sharing
    sum_dtype, memory = checked_acc_dtype(name, acc_dtype, head.input.dtype), checked_memory(name, memory)
    in_place = sum_dtype.itemsize < wide.itemsize
    plan = run.plan_for(name, head, memory, reduction == "none", whole_rows, sharing, in_place)
    inputs = head.input, head.weight, head.bias
    if plan.name == "columns" or plan.keeps:
        found = LogProbabilities.apply(*inputs, target, plan, options, sharing)
        y = run.loss_of(found, target, loss) * factor
        y = y if reduction == "none" else y.sum()
    else:
        of_chunk = _loss_rows(head, weight, of_row, options or PLAIN, team)
        work = Work(plan, of_chunk, ignored(target, loss), run.records(head), sharing, sum_dtype, (target, weight))
        if reduction == "none":
            y = LaterFactor.apply(*inputs, work)[0] * factor
        else:
            y = KnownFactor.apply(*inputs, factor, work)[0]
    if reduction == "none":
        return y.reshape(head.shape).to(dtype)
    y = run.divided(team.over_tokens(y), divisor)
    y = y if count is None else y + torch.where(count == 0, torch.nan, 0.0)
    return y.to(dtype)


def _loss_rows(head: Head, weight: Tensor | None, loss: Loss, options: Any, team: Team) -> Rows:
    """The function of a chunk that exchanges the states of its tokens, and gives losses and gradient."""
    dtype: Any = loss.settings.dtype
    signature = ShardSignature(1, team.shards, options, rows.CHOICE, loss, ("y",), dtype)
    weight = None if weight is None else weight.detach().resolve_neg().contiguous()

    def of_chunk(z: Tensor, part: slice, factor: Tensor | None) -> tuple[tuple[Tensor, ...], Any]:
        operands, wants = Operands(z, None, head.target[part], weight), factor is not None
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
