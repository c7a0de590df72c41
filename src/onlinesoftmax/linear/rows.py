"""What happens to the logits of a chunk: losses or statistics of its rows, and the gradient in the logits' place.

Kernels read and write the chunk in place.  Where they cannot run, PyTorch's operations compute the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.call import Call, Settings
from ..core.options import ScoreOptions
from ..core.task import ANY
from ..ops import OPERATIONS, TOKEN_LOGPROBS
from ..torch import custom_op_eager, loss_eager
from ..torch.formulas import accumulator_of
from ..torch.gradients import outputs_of
from ..torch.loss_arguments import Loss, counted, is_class
from ..torch.loss_kernels import loss_call
from ..torch.loss_run import run_loss, why_not_kernels
from ..torch.prepare import run_in_two, runs_in_two, whole_of

Tensor = torch.Tensor


CHOICE = ANY
"""The plan of the kernels that read a chunk, which tests force."""


class Statistics(NamedTuple):
    """Numbers of each row in float32 or wider, (rows,) tensors; logprob is NaN where the target is no column.

    lse is float64: rounded to float32, it would put one error into every probability of the backward pass.  The entropy
    is None where nobody wants it.
    """

    logprob: Tensor
    entropy: Tensor | None
    lse: Tensor


def of_part(options: ScoreOptions | None, part: slice) -> ScoreOptions | None:
    """The options of a chunk of tokens."""
    if options is None or not isinstance(options.scale, Tensor) or not options.scale.dim():
        return options
    return options._replace(scale=options.scale[part])


def _statistics_of(asked: bool) -> tuple[str, ...]:
    return ("lse", "entropy", "largest") if asked else ()


def losses_in_two(
    z: Tensor, rest: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, factor: Tensor, stats: bool
) -> tuple[Tensor, ...]:
    """The outputs of `losses` for logits whose last columns are `rest`; the gradient overwrites both tensors."""
    call, outputs = _call_in_two(z, z.shape[1] + rest.shape[1], target, weight, loss, factor, stats)
    found = run_in_two(call, outputs, z, rest)
    return found[0], *found[2:]


def are_in_two(x: Tensor, head: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> bool:
    """True where `losses_in_two` has a kernel for the logits x · headᵀ."""
    if not _kernels_run(x, target, weight, loss.ignore_index):
        return False
    factor = torch.empty(len(target), dtype=accumulator_of(x.dtype, x.dtype), device=x.device)
    call, outputs = _call_in_two(x, len(head), target, weight, loss, factor, False)
    return runs_in_two(call, outputs, x.device)


def _call_in_two(
    z: Tensor, classes: int, target: Tensor, weight: Tensor | None, loss: Loss, factor: Tensor, stats: bool
) -> tuple[Call, tuple[str, ...]]:
    call = loss_call(whole_of(z, classes), target, weight, _for_kernels(loss, z, stats), factor)
    return call, ("loss", "y", *_statistics_of(stats))


def _for_kernels(loss: Loss, z: Tensor, stats: bool) -> Loss:
    """The loss as kernels compute it: statistics have the digits of their float32, a loss those of the result.

    On an H200 after heavy products, whose power lowers its clock, 8192 rows of 128256 bfloat16 logits took 1.56 ms with
    the exponentials of float32 results, 1.10 ms with those of 16 bits, and a copy 0.99 ms.
    """
    dtype = accumulator_of(z.dtype, z.dtype) if stats else loss.settings.dtype
    return loss.with_settings(dtype=dtype, choice=CHOICE)


def losses(
    z: Tensor, target: Tensor, weight: Tensor | None, loss: Loss, factor: Tensor | None, stats: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(outputs, gradient of the sum of factor · loss in the logits); without a factor, no gradient.

    The outputs are the loss of each row, and with `stats` its lse, entropy and largest class.  Where kernels run, the
    gradient is in the memory of the logits.
    """
    more = _statistics_of(stats)
    if _kernels_run(z, target, weight, loss.ignore_index):
        call = loss_call(z, target, weight, _for_kernels(loss, z, stats), factor)
        if factor is None:
            return outputs_of(call, ("loss", *more)), None
        rows, dz, *others = outputs_of(call.with_operands(y=z), ("loss", "y", *more))
        return (rows, *others), dz
    loss = loss.with_settings(dtype=accumulator_of(z.dtype, z.dtype))
    wrong = None
    if not target.is_floating_point():
        # PyTorch raises an error for a target that is no class, and a kernel gives NaN.
        wrong = counted(target, loss) & ~is_class(target, z.shape[1])
        target = target.masked_fill(wrong, loss.ignore_index)
    found = run_loss(z, target, weight, tuple(loss), True)[1][:4] if stats else ()
    if wrong is not None:
        # PyTorch's gradient of an ignored row is NaN where the row has NaN; that of a kernel is 0.
        z = z.masked_fill(~counted(target, loss).unsqueeze(1), 0.0)
    leaf = z.detach().requires_grad_(factor is not None)
    with torch.set_grad_enabled(factor is not None):
        rows = run_loss(leaf, target, weight, tuple(loss), False)
    # The statistics of cross_entropy have z_loss in the second place.
    losses = rows.detach() if wrong is None else rows.detach().masked_fill(wrong, torch.nan)
    outputs = (losses, *found[:1], *found[2:])
    return outputs, None if factor is None else torch.autograd.grad(rows, leaf, factor.to(rows.dtype))[0]


def statistics(z: Tensor, target: Tensor, options: ScoreOptions | None) -> Statistics:
    """The statistics of the rows of some logits."""
    return finished(read(z, target, options))


class Read(NamedTuple):
    """What one read of rows finds: (rows,) tensors, of which `finished` makes statistics.

    The sum of a row is l · exp(m).
    """

    logprob: Tensor
    m: Tensor
    l: Tensor
    entropy: Tensor | None = None


def read(z: Tensor, target: Tensor, options: ScoreOptions | None, entropy: bool = True) -> Read:
    """The logarithms of the targets and the sums of the rows of some logits, by one launch where kernels run.

    The entropy, if it is wanted, needs sums with more digits than 16-bit logits do.
    """
    call = Call(TOKEN_LOGPROBS, z, Settings(1, None, False, CHOICE), options, None, {"target": target})
    more = ("entropy",) if entropy else ()
    if not _kernels_run(z, target):
        logprob, lse, *others = loss_eager.log_probabilities(call, ("y", "lse", *more), torch.float64)
        return Read(logprob, lse, torch.ones_like(lse), *others)
    return Read(*outputs_of(call, ("y", "m", "l", *more)))


def finished(found: Read) -> Statistics:
    """The statistics of rows, or of several slices of each: tensors of any one shape."""
    return Statistics(found.logprob, found.entropy, found.m + found.l.double().log())


def incoming(known: Statistics, dlogprob: Tensor, dentropy: Tensor | None) -> dict[str, Tensor]:
    """What every chunk of columns reads to make its gradient.

    Args:
        known: Statistics of whole rows.
        dlogprob: Gradient of the target's logarithm; read where the target is in the chunk.
        dentropy: Gradient of the entropy.
    """
    m = known.lse.to(dlogprob.dtype)
    beside = {"dy": dlogprob, "m": m, "l": (known.lse - m).exp().to(m.dtype)}
    if dentropy is None or known.entropy is None:
        return beside
    return {**beside, "entropy": known.entropy, "dentropy": dentropy}


def gradient(
    z: Tensor, target: Tensor, dlse: Tensor, beside: dict[str, Tensor], options: ScoreOptions | None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient in the logits of a chunk, in their place or in `out` where kernels run.

    Args:
        z: Logits of some columns of each row.
        target: Column of the target in the chunk; -1 where it is in none of its columns.
        dlse: Factor of the softmax: the gradient of lse, less that of logprob where the target lies in another chunk.
        beside: What `incoming` returns.
        options: Scale and softcap.
    """
    beside = {**beside, "target": target, "dlse": dlse}
    operation, settings = OPERATIONS[TOKEN_LOGPROBS.gradient_name], Settings(1, None, False, CHOICE)
    call = Call(operation, z, settings, options, None, beside)
    if _kernels_run(z, target):
        return outputs_of(call._replace(out=z if out is None else out), ("y",))[0]
    (dz,) = custom_op_eager.outputs_of(call, ("y",))
    # The formula multiplies NaN by 0 in a row without gradients; a kernel does not.
    nothing = (beside["dy"] == 0) & (dlse == 0) & ("dentropy" not in beside or beside["dentropy"] == 0)
    return dz.masked_fill(nothing.unsqueeze(1), 0.0)


def _kernels_run(z: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> bool:
    return z.numel() > 0 and why_not_kernels(z, target, weight, None, ignore_index) is None
