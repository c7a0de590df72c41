"""Which way a call on NumPy arrays goes: after the checks, all run on eager/row.  There are no gradients.

No framework is imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.arguments import check_options, checked_dims
from ..core.arrays import quiet
from ..core.call import Call, LossStatistics, Settings, TokenLogprobs
from ..core.declaration import Operation
from ..core.options import ScoreOptions
from ..core.task import Choice
from ..ops import TOKEN_LOGPROBS
from ..ops.support import excluding, truncated
from . import eager
from .arguments import (
    NUMPY,
    check_call,
    check_choice,
    check_tokens,
    checked_loss,
    checked_tokens,
    dtype_of_loss,
    int64_support,
)

__all__ = ["check_targets", "check_tokens", "run", "run_loss", "run_plain", "run_tokens"]

check_targets = checked_loss
"""Check the arguments and the range of every target that counts, as every call on NumPy arrays does."""


def run_plain(operation: Operation, x: Any, dim: Any, keepdim: bool, out: Any, choice: tuple[Any, ...]) -> Any:
    """A call without score options, dtype and batch invariance."""
    return run(Call(operation, x, Settings(dim, None, keepdim, Choice(*choice)), None, out))


@quiet
def run(call: Call) -> Any:
    """The operation on a NumPy array."""
    check_call(call)
    operation, options, settings, x = call.operation, call.options, call.settings, np.asarray(call.x)
    result, dims = np.dtype(settings.dtype or x.dtype), checked_dims(operation.name, settings.dim, x.ndim)
    if x.dtype.kind in "biu":
        x = x.astype(result)
    x = x.astype(np.float64 if max(x.dtype.itemsize, result.itemsize) >= 8 else np.float32, copy=False)
    z = x if options is None else eager.scores_of(x, options, dims)
    y = eager.result(operation, z, dims, settings.keepdim)
    if options is not None and options.zero and not operation.per_row:
        y = np.where(np.all(z == -np.inf, dims if x.ndim else None, keepdims=True), 0.0, y)
    return y.astype(result, copy=False)


@quiet
def run_loss(x: Any, target: Any, weight: Any, fields: tuple[Any, ...], return_stats: bool) -> Any:
    """The loss, or (loss, LossStatistics): the implementation of `onlinesoftmax.cross_entropy` on NumPy arrays.

    Args:
        x, target, weight: The arrays.
        fields: The fields of `Loss` in torch/loss_arguments.py.
        return_stats: Return the statistics too.
    """
    loss = checked_loss(x, target, weight, fields)
    dtype = dtype_of_loss(fields[0].dtype, loss.x)
    wide = np.float64 if max(loss.x.dtype.itemsize, dtype.itemsize) >= 8 else np.float32
    outputs = ("loss", *(("lse", "entropy") if return_stats or loss.z_loss else ()))
    rows = {name: np.zeros(loss.counts.shape) for name in outputs}
    largest = np.full(loss.counts.shape, -1)
    for element_index, row_index in eager.cuts(loss.x.shape, loss.axis):
        z = eager.float64_scores(loss.x, element_index, loss.options)
        for name, values in eager.losses(loss, element_index, row_index, z, outputs).items():
            rows[name][row_index] = values
        if return_stats:
            # A softcap makes large scores equal, and keeps their order.
            uncapped = loss.options and loss.options._replace(softcap=None)
            largest[row_index] = np.argmax(eager.float64_scores(loss.x, element_index, uncapped), loss.axis)
    if not loss.x.shape[loss.axis] and "lse" in rows:
        rows["lse"][...] = -np.inf
    losses = np.where(loss.counts, rows["loss"], 0.0)
    penalties = np.where(loss.counts, loss.z_loss * rows["lse"] ** 2, 0.0) if loss.z_loss else np.zeros_like(losses)
    y = np.asarray(eager.reduced(loss, losses, penalties)).astype(dtype)
    if not return_stats:
        return y
    classes = loss.target
    if loss.of_classes:
        classes = loss.target.argmax(loss.axis) if loss.x.shape[loss.axis] else largest
    lse, penalty, entropy = (t.astype(wide) for t in (rows["lse"], penalties, rows["entropy"]))
    return y, LossStatistics(lse, penalty, entropy, largest, np.asarray((largest == classes) & loss.counts))


@quiet
def run_tokens(
    x: Any, index: Any, dim: Any, options: ScoreOptions | None, entropy: bool, choice: Any, ignore_index: Any = None,
    support: Any = None,
) -> TokenLogprobs:  # fmt: skip
    """The log-probabilities of one token or several of each row."""
    tokens = checked_tokens(x, index, dim, ignore_index)
    check_choice(TOKEN_LOGPROBS.name, choice)
    x, axis = np.asarray(x), tokens.axis
    check_options(NUMPY, Call(TOKEN_LOGPROBS, x, Settings(axis), options))
    if support is not None:
        kept = int64_support(x, axis, support)
        call = truncated(np, np.take_along_axis, x, np.asarray(index), axis, options, *kept)
        found = run_tokens(call.x, call.index, axis, call.options, entropy, choice)
        logprob = excluding(np, found.logprob, found.lse, call.outside, axis)
        return found._replace(logprob=np.where(tokens.ignored, logprob.dtype.type(0), logprob))
    row_shape = *x.shape[:axis], *x.shape[axis + 1 :]
    rows = {"lse": np.full(row_shape, -np.inf), **({"entropy": np.zeros(row_shape)} if entropy else {})}
    logprob = np.full(tokens.columns.shape, np.nan)
    for element_index, row_index in eager.cuts(x.shape, axis):
        z, target = eager.float64_scores(x, element_index, options), tokens.columns[element_index]
        values, _ = eager.outputs_of(TOKEN_LOGPROBS.name, z, axis, {}, ("y", *rows), target)
        logprob[element_index] = values["y"]
        for name, result in rows.items():
            result[row_index] = values[name].squeeze(axis)
    logprob = np.where(tokens.ignored, 0.0, logprob.reshape(tokens.ignored.shape))
    wide = np.float64 if x.dtype.itemsize >= 8 else np.float32
    return TokenLogprobs(
        logprob.astype(wide), rows["entropy"].astype(wide) if entropy else None, rows["lse"].astype(wide)
    )
