"""The head without logits on DTensors: sharded classes, sharded tokens, or both, on a mesh of any dimensions.

    input         linear_weight   processes along a mesh dimension
    Replicate     Shard(0)        share the classes (run.py)
    Shard(token)  Replicate       share the tokens: the gradient of the weight is Partial
    Shard(token)  Shard(0)        share the classes, once the input is gathered
    Replicate     Replicate       compute the same

A loss is over the tokens of all processes.  This module has the function names of linear/run.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ...core.call import LossStatistics, Settings, TokenLogprobs
from ...linear import run
from ...linear.arguments import autocast_dtype, check_head, check_per_token, check_tensors, is_autocast
from ...linear.formulas import divided, with_divisor
from ...ops.cross_entropy.arguments import checked_numbers
from ...torch.arguments import TORCH, check_dtype, check_weight
from ...torch.formulas import accumulator_of
from ...torch.loss_arguments import Loss, count_of, signed
from ..layout import MeshLayout, compare, layout_of, local_of, without_partial_sums
from ..losses import weight_of_mean
from . import run as sharded_classes
from .team import Team

Tensor = torch.Tensor


NUMBERS = ("reduction", "ignore_index", "label_smoothing", "z_loss", "scale", "softcap")


class LocalHead(NamedTuple):
    """The tensors of a head on this process.

    Attributes:
        tensors: input, linear_weight, target and linear_bias.
        layout: Layout of the input, whose rows are the tokens.
        team: The processes that compute a loss together.
    """

    tensors: run.Tensors
    layout: MeshLayout
    team: Team


@torch.compiler.disable
def cross_entropy(
    tensors: run.Tensors, numbers: tuple[Any, ...], weight: Any, token_weight: Any, dtype: Any, return_stats: bool,
    memory: Any, acc_dtype: Any,
) -> Any:  # fmt: skip
    """As `linear_cross_entropy`; `numbers` has reduction, ignore_index, label_smoothing, z_loss, scale and softcap."""
    name, reduction = "linear_cross_entropy", numbers[0]
    bounds = {"memory": memory, "acc_dtype": acc_dtype}
    more = {"weight": weight, "token_weight": token_weight, "dtype": dtype, "return_stats": return_stats, **bounds}
    given = dict(zip(NUMBERS, numbers, strict=True)) | more
    here = _local(name, tensors, True, given, reduction != "none")
    numbers = (*numbers[:4], _own_scale(name, here, numbers[4]), numbers[5])
    weight, stats = here.layout.whole("weight", weight), None
    if token_weight is not None:
        check_per_token(name, "token_weight", token_weight, here.layout.shape[:-1], tensors[0].device)
        token_weight = here.layout.per_row("token_weight", token_weight)
    if here.team.groups:
        soft = here.tensors[2].is_floating_point()
        for what, asked in {"return_stats": return_stats, "target with class probabilities": soft}.items():
            if asked:
                raise NotImplementedError(f"{name}(): {what} is not available if linear_weight is sharded")
        y = sharded_classes.cross_entropy(here.tensors, numbers, weight, token_weight, dtype, here.team, **bounds)
    else:
        rest = numbers, weight, token_weight, dtype, return_stats, memory, acc_dtype
        over_tokens = reduction != "none" and here.team.token_groups
        y = _over_tokens(here, *rest) if over_tokens else run.cross_entropy(here.tensors, *rest)
        y, stats = y if return_stats else (y, None)
    y = here.layout.rows(y) if reduction == "none" else here.layout.number(y)
    return y if stats is None else (y, LossStatistics(*map(here.layout.rows, stats)))


def _over_tokens(
    here: LocalHead, numbers: tuple[Any, ...], weight: Any, token_weight: Any, dtype: Any, *given: Any
) -> Any:
    """The loss over the tokens of all processes, each of which has all classes.

    The divisor of a mean is a factor of each token, so it reaches the gradients before they are rounded.
    """
    (x, linear_weight, target, _), team, (reduction, *index, scale, softcap) = here.tensors, here.team, numbers
    name, wide, soft = "linear_cross_entropy()", accumulator_of(x.dtype, x.dtype), target.is_floating_point()
    check_weight(name, weight, x, len(linear_weight))
    check_dtype(name, dtype)
    ignore_index, smoothing, z_loss = checked_numbers(TORCH, reduction, tuple(index), "linear_cross_entropy")
    loss = Loss(Settings(1), ignore_index, reduction, smoothing, z_loss)
    flat = target if soft else signed(target).long().flatten()
    weight = weight_of_mean(x, flat, weight, loss, team.token_groups)
    factor = torch.ones(x.shape[:-1], dtype=wide, device=x.device)
    factor = factor if token_weight is None else token_weight.to(wide)
    count = None
    if reduction == "mean":
        count = factor.new_full((), factor.numel()) if soft else count_of(flat, weight, loss, wide)
        count = team.over_tokens(count)
    factor, divisor = with_divisor(factor, count, autocast_dtype(x))
    found = run.cross_entropy(here.tensors, ("sum", *index, scale, softcap), weight, factor, wide, *given)
    y, *stats = found if isinstance(found, tuple) else (found,)
    y = divided(team.over_tokens(y), divisor)
    y = y if count is None else y.masked_fill(count == 0, torch.nan)
    y = y.to(dtype or (wide if is_autocast(x) else x.dtype))
    return (y, *stats) if stats else y


@torch.compiler.disable
def token_logprobs(
    tensors: run.Tensors, ignore_index: int | None, scale: Any, softcap: Any, memory: Any, support: Any = None
) -> TokenLogprobs:
    """As `linear_token_logprobs`."""
    if support is not None:
        raise NotImplementedError("linear_token_logprobs(): support is not available for DTensors")
    given = {"ignore_index": ignore_index, "scale": scale, "softcap": softcap, "memory": memory}
    here = _local("linear_token_logprobs", tensors, False, given, False)
    sharing = here.team.sharing if here.team.groups else None
    scale = _own_scale("linear_token_logprobs", here, scale)
    found = run.token_logprobs(here.tensors, ignore_index, scale, softcap, memory, sharing)
    return TokenLogprobs(*map(here.layout.rows, found))


@torch.compiler.disable
def token_loss(
    tensors: run.Tensors, loss: Callable[..., Any], per_token: tuple[Any, ...], numbers: tuple[Any, ...],
    memory: Any, acc_dtype: Any = None,
) -> Tensor:  # fmt: skip
    """As `linear_token_loss`; `numbers` has reduction, ignore_index, scale and softcap."""
    name = "linear_token_loss"
    reduction, ignore_index, scale, softcap = numbers
    given = {"reduction": reduction, "ignore_index": ignore_index, "scale": scale, "softcap": softcap}
    given |= {"memory": memory, "acc_dtype": acc_dtype}
    given |= {f"per_token[{i}]": t for i, t in enumerate(per_token)}
    here = _local(name, tensors, False, given, True)
    for i, t in enumerate(per_token):
        check_per_token(name, f"per_token[{i}]", t, tuple(here.layout.shape[:-1]), tensors[0].device)
    beside = tuple(here.layout.per_row(f"per_token[{i}]", t) for i, t in enumerate(per_token))
    numbers = reduction, ignore_index, _own_scale(name, here, scale), softcap
    sharing = here.team.sharing if here.team.groups or here.team.token_groups else None
    return here.layout.number(run.token_loss(here.tensors, loss, beside, numbers, memory, sharing, acc_dtype))


def _own_scale(name: str, here: LocalHead, scale: Any) -> Any:
    """The scale of each token of this process; a number as it is."""
    if not isinstance(scale, Tensor) or not scale.dim():
        return here.layout.whole("scale", scale)
    check_per_token(name, "scale", scale, here.layout.shape[:-1], here.tensors[0].device)
    return here.layout.per_row("scale", scale)


def _local(
    name: str, tensors: run.Tensors, soft: bool, more: dict[str, Any], reduces: bool
) -> LocalHead:  # fmt: skip
    """The tensors of a head on this process, after a comparison of the calls if they exchange something.

    Args:
        name: Name of the public function.
        tensors: input, linear_weight, target and linear_bias.
        soft: True where the target may hold class probabilities.
        more: The other arguments by name.
        reduces: True where the result is a sum over all tokens.
    """
    check_tensors(name, *tensors, dtensors=True)
    probabilities = check_head(name, *tensors, soft)
    (x, weight), (target, bias) = tensors[:2], tensors[2:]
    mesh = (x if isinstance(x, DTensor) else weight).device_mesh
    copies = [Replicate()] * mesh.ndim
    x, weight = (
        t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, copies, run_check=False) for t in (x, weight)
    )
    if weight.device_mesh != mesh:
        raise ValueError(f"{name}(): linear_weight is on the mesh {weight.device_mesh}, and input on {mesh}")
    layout, classes = layout_of(name, x, (x.dim() - 1,)), layout_of(name, weight, (0,), "linear_weight")
    for argument, sharded in {"input": layout.softmax_groups, "linear_weight": classes.row_groups}.items():
        if sharded:
            raise NotImplementedError(
                f"{name}(): {argument} is sharded along its last dimension, hidden; redistribute() it first"
            )
    given = {"linear_weight": weight, "target": target, "linear_bias": bias, **more}
    compare(name, x, layout, given, reduces)
    compare(name, weight, classes, {"input": x, **given}, argument="linear_weight")
    # Processes that share the classes need the same tokens.
    placements = tuple(
        Replicate() if shared.is_shard() else own
        for shared, own in zip(classes.placements, layout.placements, strict=True)
    )
    layout = layout._replace(placements=placements)
    gradients = tuple(
        Partial() if own.is_shard() else shared for shared, own in zip(classes.placements, placements, strict=True)
    )
    local = (
        local_of(without_partial_sums(x, layout), placements),
        local_of(without_partial_sums(weight, classes), gradients),
        layout.local("target", target, placements, placements) if probabilities else layout.per_row("target", target),
        None if bias is None else classes.local("linear_bias", bias, classes.placements, gradients),
    )
    largest = weight.shape[0]
    for i, placement in enumerate(classes.placements):
        largest = -(-largest // mesh.size(i)) if placement.is_shard() else largest
    return LocalHead(local, layout, Team(classes.softmax_groups, classes.shards, largest, layout.row_groups))
