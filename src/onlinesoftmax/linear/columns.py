"""Plan `columns`, and plan `stored` of token log-probabilities, whose gradient is known only in the backward pass.

A first sweep merges the statistics of chunks of columns; a second one makes each chunk again.  So each slice of the
gradient of the weight is one product, rounded once.  Where all logits fit, they are one chunk, which is kept.

The first chunks stay in the memory of the gradient of the weight if one call makes both sweeps, as that of a mean does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..core.options import ScoreOptions
from ..torch.autograd import has_saved_tensor_hooks
from ..torch.formulas import accumulator_of
from ..torch.loss_arguments import is_class
from .arguments import check_gradients
from .plans import LinearPlan
from .products import add_input_gradient, add_weight_gradient, input_gradient, logits_memory, logits_of, zeroed
from .rows import Read, Statistics, finished, gradient, incoming, read
from .sharing import Sharing

Tensor = torch.Tensor

Inputs = tuple[Tensor, Tensor, Tensor | None]
"""Input, weight and bias of a head."""


class Way(NamedTuple):
    """How the log-probabilities of a head are computed.

    Attributes:
        plan: How the columns are cut.
        options: Scale and softcap.
        sharing: The other processes that have classes; None where this one has all.
        entropy: True where the entropies are wanted.
    """

    plan: LinearPlan
    options: ScoreOptions | None
    sharing: Sharing | None = None
    entropy: bool = True


AT_ONCE = 16
"""Number of chunks whose targets are found, and whose statistics are merged, by one set of launches."""


def _merged(found: list[Read], inside: list[Tensor]) -> Statistics:
    """The statistics of rows from what was read of their slices.

    With the parts w of the whole sum, the entropy is the sum of w · (entropy of the slice - log w).

    Args:
        found: What was read of each slice.
        inside: For each slice, True where it has the target of the row.  The logarithm of a row without one is NaN.
    """
    read_of = [torch.stack(parts) for parts in zip(*found, strict=True) if parts[0] is not None]
    slices, has_target = finished(Read(*read_of)), torch.stack(inside)
    lse = slices.lse.logsumexp(0)
    log_w, entropy = torch.where(slices.lse == lse, 0.0, slices.lse - lse), None
    if slices.entropy is not None:
        w = log_w.exp()
        # A slice of -inf has no entropy, and no part of the sum.
        entropy = torch.where(w == 0, 0.0, w * (slices.entropy - log_w)).sum(0)
    # A slice of -inf has no softmax of its own, but its classes have the probability 0 in a row that has one.
    logprob = torch.where(slices.lse == -torch.inf, log_w, slices.logprob + log_w)
    logprob = torch.where(has_target, logprob, 0.0).sum(0).masked_fill(~has_target.any(0), torch.nan)
    return Statistics(logprob, entropy, lse)


def _as_read(found: Statistics) -> Read:
    return Read(found.logprob, found.lse, torch.ones_like(found.lse), found.entropy)


def _nothing_read(like: Tensor, dtype: torch.dtype, entropy: bool) -> Read:
    """What is read of rows without columns."""
    zeros = torch.zeros(like.shape, dtype=dtype, device=like.device)
    return Read(zeros + torch.nan, zeros.double() - torch.inf, zeros + 1, zeros if entropy else None)


class Part(NamedTuple):
    """A chunk of columns.

    Attributes:
        columns: The columns.
        inside: True where a target is one of them.
        target: The target counted from the first of them; -1 elsewhere.
    """

    columns: slice
    inside: Tensor
    target: Tensor


class Chunks(NamedTuple):
    """The chunks of columns of a call, and where the targets lie.

    Attributes:
        parts: Columns of each chunk; one chunk without columns where there are no classes.
        size: Most columns of a chunk.
        chunk, column: Chunk of each target, -1 if it is no class, and its column in the chunk.
    """

    parts: list[slice]
    size: int
    chunk: Tensor
    column: Tensor

    def each(self) -> Iterator[Part]:
        """The chunks, whose targets are found for AT_ONCE at a time: a launch takes longer than its work."""
        for begin in range(0, len(self.parts), AT_ONCE):
            parts = self.parts[begin : begin + AT_ONCE]
            numbers = torch.arange(begin, begin + len(parts), device=self.chunk.device)
            inside = self.chunk == numbers.view(-1, *[1] * self.chunk.dim())
            yield from map(Part, parts, inside, self.column.where(inside, -1))


def chunks_of(plan: LinearPlan, classes: int, target: Tensor) -> Chunks:
    """The chunks of a plan for some classes, of which `target` has numbers from 0 on, or others for no class."""
    size = min(plan.chunk, classes) if plan.name == "columns" else classes
    step = max(size, 1)
    parts = [slice(first, min(first + step, classes)) for first in range(0, max(classes, 1), step)]
    chunk = torch.where(is_class(target, classes), target // step, -1)
    return Chunks(parts, size, chunk, target % step)


def held_logits(dw: Tensor, part: slice, tokens: int) -> Tensor:
    """The logits of a chunk in the memory of the gradient of the weight, which is written later, in ascending order.

    With tokens >= hidden, the slice of the gradient of a chunk ends where the logits of this chunk end, or before: it
    overlaps only logits that have been read.  With fewer tokens, the logits of each chunk lie in its own slice.
    """
    begin, columns = part.start * max(tokens, dw.shape[1]), part.stop - part.start
    return dw.view(-1)[begin : begin + tokens * columns].view(tokens, columns)


def statistics_of(
    way: Way, inputs: Inputs, target: Tensor, dw: Tensor | None = None
) -> tuple[Statistics, Tensor]:  # fmt: skip
    """The statistics of each token, and the logits of the last chunk, which are all logits with the plan `stored`.

    Args:
        way, inputs, target: The call.
        dw: Memory of the gradient of the weight, where the logits of the plan's columns `apart` stay.
    """
    (plan, options, sharing, entropy), (x, weight, bias) = way, inputs
    whole_target, wide = target, accumulator_of(x.dtype, x.dtype)
    chunks = chunks_of(plan, len(weight), target if sharing is None else sharing.local(target))
    z, slices, inside = logits_memory(len(x), chunks.size, x), [], []
    memory = z
    for part, has_target, local in chunks.each():
        z = memory[:, : part.stop - part.start]
        if dw is not None and part.stop <= plan.apart:
            z = held_logits(dw, part, len(x))
        logits_of(x, weight[part], None if bias is None else bias[part], z)
        slices.append(read(z, local, options, entropy) if len(weight) else _nothing_read(local, wide, entropy))
        inside.append(has_target)
        if len(slices) == AT_ONCE and part.stop < len(weight):
            slices, inside = [_as_read(_merged(slices, inside))], [torch.stack(inside).any(0)]
    found = finished(slices[0]) if len(slices) == 1 and sharing is None else _merged(slices, inside)
    wide_entropy = None if found.entropy is None else found.entropy.to(wide)
    found = Statistics(found.logprob.to(wide), wide_entropy, found.lse)
    if sharing is not None:
        found = sharing.merged(found, whole_target)
    # Rounding can put a logarithm above 0.  A row whose sum is 0 or infinite has no probabilities.
    logprob = found.logprob.clamp(max=0.0).masked_fill(found.lse.isinf(), torch.nan)
    return Statistics(logprob.to(wide), found.entropy, found.lse), z


def gradients_of(
    way: Way, inputs: Inputs, target: Tensor, known: Statistics, dys: tuple[Tensor | None, ...],
    wanted: tuple[bool, bool, bool], logits: Tensor | None, dw: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of input, weight and bias, from those of logprob, entropy and lse.

    Args:
        way, inputs, target: As in the forward pass.
        known: Its statistics.
        dys: Gradients of the statistics; None for no gradient.
        wanted: Whether the gradients of input, weight and bias are wanted.
        logits: All logits, if they are kept.  With the plan `stored` their gradient takes their place.
        dw: Memory of the gradient of the weight with the logits that `statistics_of` has left there.
    """
    (plan, options, sharing, _), (x, weight, bias) = way, inputs
    nothing = torch.zeros_like(known.logprob)
    dlogprob, dentropy, dlse = dys
    dlogprob, dlse = nothing if dlogprob is None else dlogprob, nothing if dlse is None else dlse
    # A target that is no class has no gradient of its logarithm.
    dlogprob = dlogprob.where(is_class(target, len(weight) if sharing is None else sharing.total), 0.0)
    target = target if sharing is None else sharing.local(target)
    # The logits of a token without gradients may be NaN, and so may its input: 0 · NaN would be NaN.
    skipped = (dlogprob == 0) & (dlse == 0) & (True if dentropy is None else dentropy == 0)
    # A row whose sum is 0 or infinite has no probabilities, so its gradient is NaN in every slice.
    known = Statistics(known.logprob, known.entropy, known.lse.masked_fill(known.lse.isinf(), torch.nan))
    chunks, in_place = chunks_of(plan, len(weight), target), logits is not None and plan.name == "stored"
    of_others, beside = dlse - dlogprob, incoming(known, dlogprob, dentropy)

    def of_chunk(part: Part, z: Tensor) -> Tensor:
        columns, inside, local = part
        of_part = local, torch.where(inside, dlse, of_others), beside, options
        if dw is not None and columns.stop <= plan.apart:
            return gradient(held_logits(dw, columns, len(x)), *of_part, out=z)
        if logits is None:
            logits_of(x, weight[columns], None if bias is None else bias[columns], z)
        elif not in_place:
            z.copy_(logits[:, columns])
        return gradient(z, *of_part)

    return products_of(way, inputs, wanted, chunks, skipped, of_chunk, logits if in_place else None, dw)


OfChunk = Callable[[Part, Tensor], Tensor]
"""Function (chunk, memory of its logits) that returns their gradient, in this memory."""


def products_of(
    way: Way, inputs: Inputs, wanted: tuple[bool, bool, bool], chunks: Chunks, skipped: Tensor, of_chunk: OfChunk,
    memory: Tensor | None = None, dw: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of input, weight and bias from those of the logits, in chunks of columns.

    Args:
        way, inputs, wanted: As for `gradients_of`.
        chunks: The chunks.
        skipped: True for the tokens whose logits have no gradient.
        of_chunk: The gradient of a chunk.
        memory, dw: Memory of the logits, and of the gradient of the weight; None for new memory.
    """
    (plan, _, sharing, _), (x, weight, _), (of_input, of_weight, of_bias) = way, inputs, wanted
    wide, classes = accumulator_of(x.dtype, x.dtype), len(weight)
    one_product = plan.chunks == 1 and sharing is None
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if of_input and sharing is None else None
    sums_apart = result is not None and not one_product and wide != x.dtype
    dx = torch.empty(x.shape, dtype=wide, device=x.device) if of_input and (sums_apart or result is None) else result
    # The input without NaN: the input's gradient lends its memory until the last product of the weight's, unless it has
    # the sum.  Only the GPU knows whether a token is skipped, so the input is always copied.
    valid = zeroed(x, skipped, result if one_product or sums_apart else None) if of_weight else x
    if of_weight and dw is None:
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    db = torch.empty(classes, dtype=wide, device=x.device) if of_bias else None
    memory = logits_memory(len(x), chunks.size, x) if memory is None else memory
    finish = None if dx is None or classes else _in_dtype(dx.zero_(), x, sharing, result)
    for chunk in chunks.each() if classes else ():
        part = chunk.columns
        dz = of_chunk(chunk, memory[:, : part.stop - part.start])
        if dx is not None and not one_product:
            add_input_gradient(dx, dz, weight[part], part.start == 0)
        if dx is not None and part.stop == classes:
            # A sum over processes travels during the last product.
            finish = _in_dtype(dx, x, sharing, result)
        if dw is not None:
            add_weight_gradient(dw[part], dz, valid, True)
        if dx is not None and one_product:
            input_gradient(dz, weight, dx)
        if db is not None:
            torch.sum(dz, 0, dtype=wide, out=db[part])
    return None if finish is None else finish(), dw, None if db is None else db.to(weight.dtype)


def _in_dtype(dx: Tensor, x: Tensor, sharing: Sharing | None, result: Tensor | None) -> Callable[[], Tensor]:
    """The function that returns the gradient of the input in its dtype, added up over the processes."""
    if sharing is None:
        return lambda: dx if result is None or dx is result else result.copy_(dx)
    return sharing.summed(dx, torch.empty(x.shape, dtype=x.dtype, device=x.device))


OfStatistics = Callable[[Statistics, Tensor | None], tuple[Tensor, tuple[Tensor | None, ...]]]
"""Function (statistics, factor) that returns the loss of each token, and the gradients of the sum of factor · loss in
logprob, entropy and lse; none without a factor."""


def run(
    way: Way, target: Tensor, losses: OfStatistics, x: Tensor, weight: Tensor, bias: Tensor | None,
    factor: Tensor | None, wanted: tuple[bool, bool, bool],
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:  # fmt: skip
    """The losses, and with a factor the wanted gradients of the sum of factor · loss (`tokens.Compute`)."""
    of_weight = factor is not None and wanted[1]
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else None
    known = statistics_of(way, (x, weight, bias), target, dw)[0]
    y, dys = losses(known, factor)
    if factor is None:
        return (y,), (None,) * 3
    return (y,), gradients_of(way, (x, weight, bias), target, known, dys, wanted, None, dw)


class LogProbabilities(torch.autograd.Function):
    """(logprob, entropy, lse) of each token, each with derivatives in input, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, way: Way
    ) -> Any:  # fmt: skip
        ctx.way = way
        found, logits = statistics_of(way, (x, weight, bias), target)
        kept = logits if way.plan.name == "stored" and any(ctx.needs_input_grad) else None
        # Backward writes over the logits that it has alone; hooks, as those of a checkpoint, get them as saved tensors.
        ctx.logits, ctx.hooked = (None, True) if has_saved_tensor_hooks() else (kept, False)
        ctx.save_for_backward(x, weight, bias, target, *found, kept if ctx.hooked else None)
        ctx.set_materialize_grads(False)
        # The caller may change the results in place; what is saved must stay.
        entropy = None if found.entropy is None else found.entropy.clone()
        return found.logprob.clone(), entropy, found.lse.to(found.logprob.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        check_gradients(*dys)
        nothing = (None,) * 2
        if all(dy is None for dy in dys):
            return (None, None, None, *nothing)
        x, weight, bias, target, *known, saved = ctx.saved_tensors
        logits, ctx.logits, ctx.hooked = saved if ctx.hooked else ctx.logits, None, False
        wanted: Any = ctx.needs_input_grad[:3]
        found = gradients_of(ctx.way, (x, weight, bias), target, Statistics(*known), dys, wanted, logits)
        return (*found, *nothing)
