"""The local passes over a shard: the states of its rows, and the gradient from the states of whole rows.

Our kernels run where they can, PyTorch's operations elsewhere.  No pass needs another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..core.arrays import namespace
from ..core.call import NOTHING, Call, Settings
from ..core.declaration import Operation
from ..core.options import PLAIN, ScoreOptions, softcap_slope
from ..core.task import ANY, Choice, ColumnRange
from ..ops import OPERATIONS, TOKEN_LOGPROBS
from ..planner.plan import PlanError
from ..torch import eager
from ..torch.autograd import launch
from ..torch.formulas import accumulator_of
from ..torch.reasons import why_pytorch
from ..torch.run import with_autocast
from .exchange import RowStates, Saved
from .shards import Operands, ShardSignature

Tensor = torch.Tensor

_WITHOUT_TARGET, _BACKWARD = OPERATIONS["logsumexp"], OPERATIONS[TOKEN_LOGPROBS.gradient_name]

XP = namespace(torch.empty(0))
"""PyTorch's functions for the formulas.  torch.compile cannot trace how they are found."""


class Shard(NamedTuple):
    """The local part of the rows of one call.

    Attributes:
        x: Local logits.
        dim: The softmax dimension.
        options: Scale, softcap and mask of the scores; PLAIN where there is none.
        target: Target column of each row, counted from the first local column; None without a target.
        weight: Weight of each local class, for the sum of weighted scores; None where all weights are 1.
        choice: What the caller forces of the local plan.
    """

    x: Tensor
    dim: int
    options: ScoreOptions = PLAIN
    target: Tensor | None = None
    weight: Tensor | None = None
    choice: Choice = ANY

    @classmethod
    def of(cls, signature: ShardSignature, operands: Operands, target: Tensor | None) -> Shard:
        """The local part of a call; its targets are counted from the first local column."""
        (first, cols, _), weight = signature.shards, operands.weight
        # The weights of the targets are applied to the statistics; smoothing needs those of the local columns.
        weight = None if weight is None or not signature.smoothed else weight[first : first + cols]
        options = signature.options._replace(mask=operands.mask)
        return cls(operands.x, signature.dim, options, target, weight, signature.choice)

    @property
    def owned(self) -> Tensor:
        """True for the rows whose target is a local column."""
        assert self.target is not None
        return (self.target >= 0) & (self.target < self.x.shape[self.dim])

    @property
    def weights(self) -> Any:
        """The weights in a shape that broadcasts to x; 1.0 without weights."""
        return 1.0 if self.weight is None else self.weight.view(-1, *[1] * (self.x.dim() - 1 - self.dim))


def autocast_dtype(name: str, x: Tensor) -> torch.dtype:
    """The dtype of the result of an operation on x: that of x, or the one that autocast gives PyTorch's function."""
    call = with_autocast(Call(OPERATIONS[name], x, Settings(-1)))
    return call.settings.dtype or x.dtype


def runs_kernels(shard: Shard) -> bool:
    """True where our kernels take the shard.

    Raises:
        PlanError: kernels are forced, and cannot run.
    """
    backend, strategy = shard.choice.backend, shard.choice.strategy
    if backend == "eager" or not shard.x.numel():
        return False
    reason = why_pytorch(shard.x, None, backend)
    if shard.target is None and torch.compiler.is_compiling():
        reason = "torch.compile makes the code of a sharded softmax from PyTorch's operations"
    if reason is not None and (backend is not None or strategy is not None):
        raise PlanError(f"backend={backend!r}, strategy={strategy!r}: {reason}")
    return reason is None


def states(shard: Shard, kernels: bool, entropy: bool = False, weighted: bool = False) -> RowStates:
    """The states of the local rows, in float32, or in float64 if the logits are float64.

    Args:
        shard: The local part.
        kernels: Run our kernels; the result of `runs_kernels`.
        entropy: Compute the entropy, too.
        weighted: Compute the sum of the weighted scores, too.
    """
    numbers = _numbers_by_kernel(shard, entropy) if kernels else _numbers_by_pytorch(shard, entropy)
    return RowStates(**numbers, weighted=_weighted_sum(shard) if weighted else None)


def _numbers_by_kernel(shard: Shard, entropy: bool) -> dict[str, Tensor]:
    # For 16-bit logits, the operation with a target sums only as exactly as they need, and is faster.  logsumexp always
    # sums to float32 accuracy.
    if shard.target is None:
        return dict(zip(("m", "l"), launch(call_of(_WITHOUT_TARGET, shard), ("m", "l")), strict=True))
    more = ("entropy",) if entropy else ()
    numbers = launch(call_of(TOKEN_LOGPROBS, shard, {"target": shard.target}), ("y", "m", "l", *more))
    return dict(zip(("logprob", "m", "l", *more), numbers, strict=True))


def call_of(
    operation: Operation, shard: Shard, operands: Mapping[str, Any] = NOTHING, columns: ColumnRange | None = None,
    out: Tensor | None = None,
) -> Call:  # fmt: skip
    """The call of an operation on a shard.

    Args:
        operation: Its declaration.
        shard: The local part.
        operands: The operands besides the input: numbers, "weight", and tensors with one value per row or per call.
        columns: The position of the shard, if kernels exchange states.
        out: Tensor that receives the result; None for a new one.
    """
    x, dim = shard.x, shard.dim
    beside = {name: t.unsqueeze(dim) if isinstance(t, Tensor) and t.dim() else t for name, t in operands.items()}
    if "weight" in operands:
        beside["weight"] = operands["weight"].view(-1, *[1] * (x.dim() - 1 - dim))
    settings = Settings(dim, x.dtype if operation.backward else None, choice=shard.choice, part=columns)
    return Call(operation, x, settings, None if shard.options.is_plain() else shard.options, out, beside)


def _numbers_by_pytorch(shard: Shard, entropy: bool) -> dict[str, Tensor]:
    dim, z = shard.dim, _scores(shard)
    if not z.shape[dim]:
        # A shard without columns has the state of one column that is masked.
        z = z.new_full((*z.shape[:dim], 1, *z.shape[dim + 1 :]), -torch.inf)
    limits = torch.finfo(z.dtype)
    m = z.amax(dim, keepdim=True).clamp(limits.min, limits.max)
    terms = (z - m).exp()
    numbers = {"m": m.squeeze(dim), "l": terms.sum(dim)}
    log_l = numbers["l"].log()
    if shard.target is not None:
        chosen = z.gather(dim, shard.target.clamp(0, z.shape[dim] - 1).unsqueeze(dim)).squeeze(dim)
        numbers["logprob"] = (chosen - numbers["m"] - log_l).where(shard.owned, torch.nan)
    if entropy:
        below = (z - m).clamp(min=limits.min)
        numbers["entropy"] = log_l - (below * terms).where(terms != 0, 0.0).sum(dim) / numbers["l"]
    return numbers


def _weighted_sum(shard: Shard) -> Tensor:
    """The sum of the weighted scores; a weight of 0 leaves out its class, even if the score is infinite."""
    x, dim, options = shard.x, shard.dim, shard.options
    if shard.weight is None and options.softcap is None and options.mask is None:
        # One read of the shard, and no copy in another dtype.
        return x.sum(dim, dtype=accumulator_of(x.dtype, x.dtype)) * options.scale
    return (shard.weights * _scores(shard)).where(torch.as_tensor(shard.weights != 0), 0.0).sum(dim)


def _scores(shard: Shard) -> Tensor:
    wide = accumulator_of(shard.x.dtype, shard.x.dtype)
    return eager.scores_of(shard.x, shard.dim, shard.options, wide)[0]


def gradient(
    shard: Shard, kernels: bool, saved: Saved, dys: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    weight_sum: Any, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient with respect to the local logits.

    Let p = exp(z - m) / l, c the column, t the target, H the entropy of the row, and dlogprob, dlse, dentropy and
    dspread the incoming gradients.  The gradient with respect to the scores is

        dlogprob * ([c == t] - p) + dlse * p - dentropy * p * (log(p) + H) + dspread * (weight_sum * p - weight)

    It is multiplied by the derivative of the scores with respect to the logits.

    Args:
        shard: The local part.
        kernels: Run our kernels.  Forward asks `runs_kernels`, because torch.compile cannot trace it in backward.
        saved: The states of whole rows, m and l, and the entropy of each row.
        dys: Incoming gradients of logprob, lse, entropy and `weight_sum * lse - sum(weight * z)`, with one value per
            row.  That of logprob is zeros where it is absent, the others are None.
        weight_sum: Sum of the weights of all classes; the number of classes if no weights are given.
        out: Tensor to which kernels write the gradient; None for a new one.
    """
    dy, dlse, dentropy, dspread = dys
    assert shard.target is not None
    if dspread is not None:
        dlse = weight_sum * dspread if dlse is None else dlse + weight_sum * dspread
    # If another process owns the target, the formula treats the target as invalid and omits -dlogprob * p.  Subtracting
    # dlogprob from dlse adds that term again.
    dlse = (0.0 if dlse is None else dlse) - dy.masked_fill(shard.owned, 0.0)
    given = {"target": shard.target, "dy": dy, "m": saved.m, "l": saved.l, "dlse": dlse}
    if dentropy is not None:
        given |= {"entropy": saved.entropy, "dentropy": dentropy}
    if not kernels or (dspread is not None and shard.options.softcap is not None):
        return _gradient_by_pytorch(shard, given, dspread)
    dx = _gradient_by_kernel(shard, given, out)
    if dspread is None:
        return dx
    # The kernel does not know the term -dspread * weight: in place, so that nothing of the size of the shard is made.
    flat = (dspread * shard.options.scale).unsqueeze(shard.dim)
    return dx.sub_(flat) if shard.weight is None else dx.addcmul_(flat, shard.weights.to(flat.dtype), value=-1)


def probabilities(shard: Shard, m: Tensor, l: Tensor) -> Tensor:
    """exp(x - m) / l of every local element by a kernel, in the dtype of x, from the states of whole rows.

    This is the gradient of lse with the incoming gradient 1.  A target of -1 is no column, so nothing is added to it.
    """
    target = torch.full_like(m, -1, dtype=torch.int64)
    given = {"target": target, "dy": torch.zeros_like(m), "m": m, "l": l, "dlse": torch.ones_like(m)}
    return _gradient_by_kernel(shard, given)


def _gradient_by_kernel(shard: Shard, given: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
    """The gradient with respect to the local logits, from these operands with one value per row."""
    operands = {name: t.contiguous() for name, t in given.items()}
    (dx,) = launch(call_of(_BACKWARD, shard, operands, out=out), ("y",))
    return dx


def _gradient_by_pytorch(shard: Shard, given: Mapping[str, Tensor], dspread: Tensor | None) -> Tensor:
    dim, options, z = shard.dim, shard.options, _scores(shard)
    rows = {name: t.unsqueeze(dim) for name, t in given.items()}
    dz = _BACKWARD.formula.outputs["y"](XP, x=z, columns=XP.arange(z, dim), cols=z.shape[dim], **rows)
    if dspread is not None:
        rows["dspread"] = dspread.unsqueeze(dim)
        dz = dz - rows["dspread"] * shard.weights
    # If all incoming gradients of a row are 0, its gradient is 0, even if its logits hold NaN.
    none = torch.stack([rows[name] == 0 for name in ("dy", "dlse", "dentropy", "dspread") if name in rows]).all(0)
    slope = softcap_slope(eager.FUNCTIONS, shard.x.to(z.dtype), options) if options.softcap else 1.0
    dx = (dz * (options.scale * slope)).masked_fill(none, 0.0)
    if options.mask is not None:
        dx = dx.masked_fill(~options.mask, 0.0)
    return dx.to(shard.x.dtype)
