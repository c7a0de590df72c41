"""The head as custom operators of PyTorch: opaque to torch.compile, with fake implementations and gradients.

    linear_token_logprobs            the statistics of each token, lse in float64, and all logits where they are kept;
                                     `after` is not read: a compiler computes it before the logits exist
    linear_token_logprobs_backward   gradients of input, weight and bias from those of the statistics
    linear_cross_entropy             the losses; with a factor of each loss also the gradients of their sum
    linear_gradients                 gradients of a chunk of tokens from those of the statistics, in place of the logits
    linear_known_gradients           a number, whose gradients the forward pass has computed

Only traced calls use these operators: an eager call saves the host time of PyTorch's C++ dispatcher.  An operator makes
its plan when it runs, so that a program does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..core.arrays import dtype_name
from ..core.call import Settings
from ..core.options import ScoreOptions
from ..core.task import ANY
from ..torch.formulas import accumulator_of
from ..torch.gradients import is_traced
from ..torch.loss_arguments import Loss, counted, is_class
from ..torch.namespace import NAMESPACE
from . import columns, formulas, plans, rows, tokens
from .arguments import check_gradients, noted
from .columns import Way, gradients_of, statistics_of
from .plans import LinearPlan, plan_of
from .problem import problem_of
from .products import logits_memory
from .rows import Statistics

Tensor = torch.Tensor

Tensors = tuple[Tensor, ...]

HEAD = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? scale"

OPTIONS = "float number, float? softcap, int? memory, bool of_input, bool of_weight, bool of_bias"
"""A scale that is a number, the softcap, the bytes of buffers, and which gradients are wanted.

`torch.jit.trace` takes no list of bools.
"""


UNBOUNDED = 1 << 62
"""Bytes in which every plan fits."""


def _options(scale: Tensor | None, number: float, softcap: float | None) -> ScoreOptions | None:
    options = ScoreOptions(number if scale is None else scale, softcap)
    return None if options.is_plain() else options


def _plan(name: str, x: Tensor, weight: Tensor, memory: int | None, wanted: Sequence[bool], **how: bool) -> LinearPlan:
    sizes, dtype = (len(x), x.shape[1], len(weight)), dtype_name(x.dtype)
    plan = plan_of(problem_of(name, sizes, dtype, (wanted[0], wanted[1], wanted[2]), **how), memory)
    return noted(name, x, weight, plan)


@contextmanager
def _derivatives() -> Iterator[None]:
    """Let autograd record, as it does outside of an operator."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded & torch._C._after_autograd_keyset):
        yield


def _given(tensors: Sequence[Tensor | None], x: Tensor) -> Tensors:
    """The tensors, and an empty one for each that is None: an operator has a fixed number of results."""
    return tuple([x.new_empty(0) if t is None else t for t in tensors])


def _statistics(*arguments: Any) -> Tensors:
    x, weight, bias, target, scale, number, softcap, memory, *wanted, keeps, _ = arguments
    # The logits that the caller keeps fit, and so do a few vectors beside them.
    plan = _plan("linear_token_logprobs", x, weight, UNBOUNDED if keeps else memory, wanted)
    way = Way(plan, _options(scale, number, softcap))
    found, logits = statistics_of(way, (x, weight, bias), target)
    return _given((*found, logits if keeps else x.new_empty(0, len(weight))), x)


def _fake_statistics(x: Tensor, weight: Tensor, *arguments: Any) -> Tensors:
    keeps = arguments[-2]
    wide = accumulator_of(x.dtype, x.dtype)
    found = [x.new_empty(x.shape[:1], dtype=dtype) for dtype in (wide, wide, torch.float64)]
    return (*found, logits_memory(x.shape[0], weight.shape[0], x) if keeps else x.new_empty(0, weight.shape[0]))


def _gradients_of_statistics(*arguments: Any) -> Tensors:
    (x, weight, bias, target, scale), (*known, logits), dys = arguments[:5], arguments[5:9], arguments[9:12]
    number, softcap, memory, *wanted = arguments[12:]
    kept, dlse = logits if logits.numel() else None, dys[2] if dys[2] is None else dys[2].to(known[0].dtype)
    if kept is None:
        plan = _plan("linear_token_logprobs", x, weight, memory, wanted)
    else:
        # An operator must not write to its operands, so chunks of the logits are copied.
        chunk = max(plans.COLUMN_BYTES // (len(x) * x.itemsize), plans.FEWEST_COLUMNS)
        plan = LinearPlan("columns", chunk, -(-len(weight) // chunk), 3, 0, True, "")
    way, of_all = Way(plan, _options(scale, number, softcap)), (wanted[0], wanted[1], wanted[2])
    found = gradients_of(way, (x, weight, bias), target, Statistics(*known), (*dys[:2], dlse), of_all, kept)
    return _given(found, x)


def _fake_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensors:
    tensors = [t if one else None for t, one in zip((x, weight, bias), arguments[-3:], strict=True)]
    contiguous = torch.contiguous_format
    return _given([t if t is None else torch.empty_like(t, memory_format=contiguous) for t in tensors], x)


def _losses(*arguments: Any) -> Tensors:
    x, weight, bias, target, scale, class_weight, factor, *numbers = arguments
    ignore_index, smoothing, z_loss, stats, acc_dtype, dtype, number, softcap, memory, *wanted = numbers
    wide, options, soft = accumulator_of(x.dtype, x.dtype), _options(scale, number, softcap), target.is_floating_point()
    loss = Loss(Settings(1, dtype, False, ANY), ignore_index, "none", smoothing, z_loss, options)
    whole_rows = formulas.needs_whole_rows(loss, target, class_weight, stats)
    in_place = acc_dtype.itemsize < wide.itemsize
    plan = _plan("linear_cross_entropy", x, weight, memory, wanted, whole_rows=whole_rows, in_place=in_place)
    with _derivatives(), torch.no_grad():
        if plan.name == "columns":
            assert factor is not None
            way, of_statistics = Way(plan, options, entropy=False), formulas.loss_of_statistics(target, loss)
            given = factor if any(wanted) else None
            (losses,), found = columns.run(way, target, of_statistics, x, weight, bias, given, tuple(wanted))
            return _given(((losses * factor).sum(), None, None, None, *found), x)
        skipped = None if soft else ~counted(target, loss)
        of_chunk = formulas.loss_rows(target, class_weight, loss, stats)
        work = tokens.Work(plan, of_chunk, skipped, sum_dtype=acc_dtype)
        given, of_all = factor if any(wanted) else None, (wanted[0], wanted[1], wanted[2])
        (losses, *more), of_sum = tokens.run(work, x, weight, bias, given, of_all)
        gradients = [None if g is None else g.to(x.dtype) for g in of_sum]
        result = losses if factor is None else (losses * factor).sum()
        return _given((result, *(more or (None,) * 3), *gradients), x)


def _fake_losses(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensors:
    factor, stats, wanted = arguments[3], arguments[7], arguments[-3:]
    wide, rows = accumulator_of(x.dtype, x.dtype), x.shape[:1]
    result = x.new_empty(rows if factor is None else (), dtype=wide)
    statistics = [x.new_empty(rows, dtype=dtype) if stats else None for dtype in (wide, wide, torch.int64)]
    of_sum = [one and factor is not None for one in wanted]
    return (result, *_given(statistics, x), *_fake_gradients(x, weight, bias, *of_sum))


def _add_gradients(*arguments: Any) -> Tensor:
    x, weight, target, scale, *known, logits, dlogprob, dentropy, dlse, dw, db = arguments[:13]
    number, softcap, of_input, first = arguments[13:]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if of_input else None
    skipped = (dlogprob == 0) & (dlse == 0) & (dentropy == 0)
    local = target.where(is_class(target, len(weight)), -1)
    beside = rows.incoming(Statistics(*known), dlogprob, dentropy)
    dz = rows.gradient(logits, local, dlse, beside, _options(scale, number, softcap))
    sums = tokens.Gradients(dx, dw if dw.numel() else None, db if db.numel() else None)
    tokens.add_gradients(sums, dz, x, weight, skipped, first)
    return x.new_empty(0) if dx is None else dx


def _save_statistics(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *tensors, ctx.number, ctx.softcap, ctx.memory, _, _, _, _, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)


def _backward_of_statistics(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
    given = [dy for dy in dys[:3] if dy is not None]
    found: Sequence[Tensor | None] = (None,) * 3
    if given:
        _check(given)
        wanted = ctx.needs_input_grad[:3]
        numbers = ctx.number, ctx.softcap, ctx.memory, *wanted
        gradients = _operators().linear_token_logprobs_backward(*ctx.saved_tensors, *dys[:3], *numbers)
        found = [g if one else None for g, one in zip(gradients, wanted, strict=True)]
    return (*found, *(None,) * 10)


def _save_losses(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *tensors, factor = inputs[:7]
    ctx.known, ctx.numbers = factor is not None, inputs[7:]
    ctx.save_for_backward(*(output[4:] if ctx.known else tensors))
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_of_losses(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    found: Sequence[Tensor | None] = (None,) * 3
    if dy is not None:
        _check([dy])
        numbers, wanted = ctx.numbers[:-3], ctx.numbers[-3:]
        if ctx.known:
            if any(need and not one for need, one in zip(ctx.needs_input_grad, wanted, strict=False)):
                raise RuntimeError("this program was traced without a gradient that is wanted now; trace it again")
            found = [g * dy if one else None for g, one in zip(ctx.saved_tensors, wanted, strict=True)]
        else:
            wanted = ctx.needs_input_grad[:3]
            gradients = _operators().linear_cross_entropy(*ctx.saved_tensors, dy, *numbers, *wanted)[4:]
            found = [g if one else None for g, one in zip(gradients, wanted, strict=True)]
    return (*found, *(None,) * 16)


def _save_known(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[1].dtype
    ctx.save_for_backward(*inputs[4:])


def _backward_of_known(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    _check([dy])
    wanted = ctx.needs_input_grad[1:4]
    found = [(g * dy).to(ctx.dtype) if one else None for g, one in zip(ctx.saved_tensors, wanted, strict=True)]
    return (None, *found, *(None,) * 3)


def _check(dys: list[Tensor]) -> None:
    if not is_traced(dys[0]):
        check_gradients(*dys)


def _operators() -> Any:
    return getattr(torch.ops, NAMESPACE)


def _define(name: str, schema: str, kernel: Any, fake: Any, *gradient: Any, changes: Sequence[str] = ()) -> None:
    operator = torch.library.custom_op(f"{NAMESPACE}::{name}", kernel, mutates_args=changes, schema=schema)
    operator.register_fake(fake)
    if gradient:
        backward, setup_context = gradient
        operator.register_autograd(backward, setup_context=setup_context)


_define(
    "linear_token_logprobs",
    f"({HEAD}, {OPTIONS}, bool keeps, Tensor? after) -> (Tensor, Tensor, Tensor, Tensor)",
    _statistics, _fake_statistics, _backward_of_statistics, _save_statistics,
)  # fmt: skip
_define(
    "linear_token_logprobs_backward",
    f"({HEAD}, Tensor logprob, Tensor entropy, Tensor lse, Tensor logits, Tensor? dlogprob, Tensor? dentropy, "
    f"Tensor? dlse, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _gradients_of_statistics, _fake_gradients,
)  # fmt: skip
_define(
    "linear_cross_entropy",
    f"({HEAD}, Tensor? class_weight, Tensor? factor, int ignore_index, float smoothing, float z_loss, bool stats, "
    f"ScalarType acc_dtype, ScalarType dtype, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _losses, _fake_losses, _backward_of_losses, _save_losses,
)  # fmt: skip
_define(
    "linear_gradients",
    "(Tensor x, Tensor weight, Tensor target, Tensor? scale, Tensor logprob, Tensor entropy, Tensor lse, "
    "Tensor(a!) logits, Tensor dlogprob, Tensor dentropy, Tensor dlse, Tensor(b!) dw, Tensor(c!) db, float number, "
    "float? softcap, bool of_input, bool first) -> Tensor",
    _add_gradients, lambda x, *arguments: x.new_empty(x.shape if arguments[-2] else 0),
    changes=("logits", "dw", "db"),
)  # fmt: skip
_define(
    "linear_known_gradients",
    "(Tensor total, Tensor x, Tensor weight, Tensor? bias, Tensor dx, Tensor dw, Tensor db) -> Tensor",
    lambda total, *_: total.clone(), lambda total, *_: torch.empty_like(total), _backward_of_known, _save_known,
)  # fmt: skip
