"""The public functions of jax/linear/__init__.py: each checks its arguments, and computes a chunk at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...core.arguments import check_flags, checked_memory
from ...core.arrays import Array, accumulator
from ...core.call import LossStatistics
from ...core.wrong_calls import check_loss
from ...linear.problem import FEWEST_CLASSES
from .. import array_types
from ..exchange import local_target
from ..loss_run import TokenLogprobs
from ..prepare import checked_dtype, checked_integer
from ..signature import Values
from . import rows
from .arguments import (
    Head,
    checked_acc_dtype,
    checked_constant,
    checked_head,
    checked_numbers,
    checked_reduction,
    constant,
)
from .call import CONSTANT, HeadCall, takes_columns
from .chunks import pad_classes
from .gradients import Inputs, known_factor, later_factor, log_probabilities

MULTIPLE = 64
"""Classes are padded to a multiple of this number, so that two, four or eight devices have aligned shares."""

Arrays = tuple[Any, Any, Any, Any]
"""The arguments input, linear_weight, target and linear_bias."""


def cross_entropy(
    arrays: Arrays, options: tuple[Any, ...], numbers: tuple[Any, ...], weights: tuple[Any, Any], dtype: Any,
    return_stats: bool, how: tuple[Any, Any, Any],
) -> Any:  # fmt: skip
    """As `linear_cross_entropy`.

    Args:
        arrays: input, linear_weight, target, linear_bias.
        options: scale, softcap.
        numbers: reduction, ignore_index, label_smoothing, z_loss.
        weights: weight, token_weight.
        dtype, return_stats: As for the public function.
        how: memory, acc_dtype, axis_name.
    """
    name, (reduction, ignore_index, smoothing, z_loss) = "linear_cross_entropy", numbers
    head = checked_head(name, arrays, options, True, how[2])
    reduction = checked_reduction(name, reduction, "none", "mean", "sum")
    check_flags(name, return_stats=return_stats)
    statistics = rows.STATISTICS if return_stats else ()
    numbers, outputs = checked_numbers(name, smoothing, z_loss), ("loss", *statistics)
    call = _call(name, head, how, numbers, outputs, weighted=weights[0] is not None)
    counts = _counted(head, checked_integer(name, "ignore_index", -100 if ignore_index is None else ignore_index))
    class_weight, token_weight = weights
    if class_weight is not None:
        class_weight = checked_constant(name, "weight", class_weight, head.weight.shape[:1])
        class_weight = class_weight.astype(accumulator(head.x))
    if token_weight is not None:
        token_weight = checked_constant(name, "token_weight", token_weight, head.x.shape[:-1])
    dtype = head.x.dtype if dtype is None else checked_dtype(name, "dtype", dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name}: dtype must be floating point, got {dtype}")

    divisor, class_weight = _divisor(head, counts, class_weight, call) if reduction == "mean" else (None, class_weight)
    rest = {"q": head.target, **_scale(head)} if head.soft else _of_column(head)
    rest |= {} if class_weight is None else {"class_weight": class_weight}
    factor = _factor(head, counts, token_weight)
    whole_rows = head.soft or bool(call.number("smoothing")) or class_weight is not None or return_stats
    found: Values = {}
    if not whole_rows and takes_columns(call, {"x": head.x, "weight": head.weight}, reduction == "none"):
        y = _loss_of(log_probabilities(call, _inputs(head, call), _of_column(head)), counts, call.number("z_loss"))
        y = jnp.where(factor == 0, 0, y * factor)
        y = y if reduction == "none" else jnp.sum(y)
        y = _divided(y, divisor)
    elif reduction == "none":
        found = later_factor(call, _inputs(head, call), rest)
        y = jnp.where(factor == 0, 0, found["loss"] * factor)
    else:
        y, found = _total(call, head, factor, divisor, rest)
    y = y.astype(dtype)
    return (y, _statistics(head, counts, call.number("z_loss"), found)) if return_stats else y


def token_logprobs(
    arrays: Arrays, ignore_index: Any, options: tuple[Any, ...], how: tuple[Any, Any, Any]
) -> TokenLogprobs:
    """As `linear_token_logprobs`; the tuples are those of `cross_entropy`."""
    name = "linear_token_logprobs"
    head = checked_head(name, arrays, options, False, how[2])
    call = _call(name, head, how)
    logprob, entropy, lse = log_probabilities(call, _inputs(head, call), _of_column(head))
    if ignore_index is not None:
        logprob = jnp.where(_counted(head, checked_integer(name, "ignore_index", ignore_index)), logprob, 0)
    return TokenLogprobs(logprob, entropy, lse)


def token_loss(
    arrays: Arrays, loss: Callable[..., Any], per_token: tuple[Any, ...], numbers: tuple[Any, Any],
    options: tuple[Any, ...], how: tuple[Any, Any, Any],
) -> Array:  # fmt: skip
    """As `linear_token_loss`; `numbers` has reduction and ignore_index; the other tuples are as for `cross_entropy`."""
    name, (reduction, ignore_index) = "linear_token_loss", numbers
    head = checked_head(name, arrays, options, False, how[2])
    if not callable(loss):
        raise TypeError(f"{name}: loss must be a function, not {type(loss).__name__}")
    check_loss(name, loss, len(per_token))
    reduction = checked_reduction(name, reduction, "mean", "sum")
    counts = _counted(head, checked_integer(name, "ignore_index", ignore_index))
    shape, wide = head.x.shape[:-1], accumulator(head.x)
    beside = {
        f"per_token{i}": checked_constant(name, f"per_token[{i}]", t, shape) for i, t in enumerate(per_token)
    }  # fmt: skip
    every = frozenset().union(*(array_types.varying(t) for t in (head.x, *beside.values()))) - set(head.names)
    of_token = [jnp.zeros((), dtype) for dtype in (*[wide] * 3, *(t.dtype for t in beside.values()))]
    with array_types.without_mesh():
        traced, result = jax.make_jaxpr(loss, return_shape=True)(*[array_types.vary(t, every) for t in of_token])
    if not isinstance(result, jax.ShapeDtypeStruct) or result.shape or not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(f"{name}: loss must return one floating-point number for each token, got {result}")
    constants = {f"{CONSTANT}{i}": _closed_over(name, t) for i, t in enumerate(traced.consts)}
    call = _call(name, head, how, loss=traced.jaxpr)
    divisor = _divisor(head, counts, None, call)[0] if reduction == "mean" else None
    rest = {**_of_column(head), **beside, **constants}
    return _total(call, head, _factor(head, counts, None), divisor, rest)[0]


def _call(
    name: str, head: Head, how: tuple[Any, Any, Any], numbers: Any = (), outputs: tuple[str, ...] = ("loss",),
    loss: Any = None, weighted: bool = False,
) -> HeadCall:  # fmt: skip
    """A call of losses, `weighted` where classes have weights.

    `log_probabilities` does not read the outputs, the numbers and the loss.
    """
    summed = () if array_types.checks_varying() else head.names
    # A class of probability 0 has a smoothed loss that is infinite.
    keeps_classes = weighted or head.soft or "smoothing" in dict(numbers)
    return HeadCall(
        "losses", outputs, head.options, numbers, checked_memory(name, how[0]), head.names, summed, loss,
        dtype=head.x.dtype.name,
        acc_dtype=checked_acc_dtype(name, how[1], head.x),
        padding=0 if keeps_classes else _padding(head),
    )  # fmt: skip


def _padding(head: Head) -> int:
    """The number of classes of probability 0 that make the products fast.

    cuBLAS has fast products of 16-bit matrices only if their rows are multiples of 16 bytes.  XLA copies all logits and
    their gradients to such rows.  With padding, the weight and its gradient are copied, which are smaller: 4096 tokens,
    768 hidden and 50257 classes took 1.6 ms on an H100 instead of 3.3.
    """
    classes, scale = head.weight.shape[0], head.options.scale
    # With a softcap, or a scale that is not above 0 in float32, the score of a logit of -inf is not -inf.
    plain = head.options.softcap is None and isinstance(scale, float) and scale >= jnp.finfo(jnp.float32).tiny
    if head.x.dtype.itemsize > 2 or head.names or not plain or not isinstance(classes, int):
        return 0
    return 0 if classes < FEWEST_CLASSES or classes % 8 == 0 else -classes % MULTIPLE


def _inputs(head: Head, call: HeadCall) -> Inputs:
    """Input, weight and bias, the last two with the padding of the call."""
    if not call.padding:
        return head.x, head.weight, head.bias
    bias = None if head.bias is None else pad_classes(head.bias, call.padding)
    return head.x, pad_classes(head.weight, call.padding), bias


def _scale(head: Head) -> Values:
    return {} if head.scale is None else {"scale": head.scale}


def _of_column(head: Head) -> Values:
    """The arrays that all functions read beside the inputs."""
    return {"target": head.column, **_scale(head)}


def _closed_over(name: str, t: Any) -> Array:
    """An array that a loss uses and that is none of its arguments."""
    t = jnp.asarray(t)
    return constant(f"{name}: an array outside of loss", t) if jnp.issubdtype(t.dtype, jnp.floating) else t


def _counted(head: Head, ignore_index: int) -> Array:
    """True for the tokens that count."""
    target = head.target
    if head.soft or not jnp.iinfo(target.dtype).min <= ignore_index <= jnp.iinfo(target.dtype).max:
        return jnp.ones(head.x.shape[:-1], bool)
    return target != ignore_index


def _divisor(head: Head, counts: Array, weight: Array | None, call: HeadCall) -> tuple[Array, Array | None]:
    """The divisor of a mean, and the weights of the classes.

    With z_loss, the weights are scaled so that the divisor is the number of tokens: the mean of the weighted losses
    stays the same, and the mean of z_loss * lse² is that of these tokens.
    """
    wide = accumulator(head.x)
    if head.soft:
        return jnp.asarray(math.prod(head.x.shape[:-1]), wide), weight
    number = jnp.sum(counts, dtype=jnp.int32).astype(wide)
    if weight is None:
        return number, None
    column, cols = head.column, len(weight)
    local = local_target(column, cols, head.names) if head.names else column
    of_token = jnp.where(counts & (local >= 0) & (local < cols), weight[jnp.clip(local, 0, cols - 1)], 0)
    total = jnp.sum(jax.lax.psum(of_token, head.names) if head.names else of_token)
    if not call.number("z_loss"):
        return total, weight
    # If no token counts, or only classes of weight 0, the mean is NaN and its gradients are 0.
    return jnp.where(total == 0, 0, number), weight * (number * _reciprocal(total))


def _factor(head: Head, counts: Array, token_weight: Array | None) -> Array:
    """The factor of the loss of each token, 0 for one that counts for nothing."""
    wide = accumulator(head.x)
    return jnp.where(counts, jnp.ones((), wide) if token_weight is None else token_weight.astype(wide), 0)


def _total(call: HeadCall, head: Head, factor: Array, divisor: Array | None, rest: Values) -> tuple[Array, Values]:
    """The sum of the losses, divided, and the results of each token."""
    # In float16, a gradient divided by the number of tokens would underflow.  If the sum is divided afterwards, the
    # factor of a scaled loss is multiplied in float32 before the gradient becomes float16.
    late = head.x.dtype == jnp.float16
    if divisor is not None and not late:
        factor = factor * _reciprocal(divisor)
    total, found = known_factor(call, _inputs(head, call), {**rest, "factor": factor})
    if divisor is None:
        return total, found
    return _divided(total, divisor) if late else total + _nan_of_none(divisor), found


def _reciprocal(divisor: Array) -> Array:
    return jnp.where(divisor == 0, 0, 1 / jnp.where(divisor == 0, 1, divisor))


def _nan_of_none(divisor: Array) -> Array:
    """The mean of no tokens, which is NaN and has no gradient; 0 where there are some."""
    return jnp.where(divisor == 0, jnp.nan, jnp.zeros_like(divisor))


def _divided(y: Array, divisor: Array | None) -> Array:
    return y if divisor is None else y * _reciprocal(divisor) + _nan_of_none(divisor)


def _loss_of(found: tuple[Array, Array, Array], counts: Array, z_loss: float) -> Array:
    """The loss of each token from its log-probability and its lse."""
    logprob, _, lse = found
    y = -jnp.where(counts, logprob, 0)
    if z_loss:
        # An ignored token may hold NaN, and the derivative of its square would be 0 · NaN.
        y = y + z_loss * jnp.where(counts & (logprob == logprob), lse, 0) ** 2
    return y


def _statistics(head: Head, counts: Array, z_loss: float, found: Values) -> LossStatistics:
    """The statistics of each token that the caller of a loss gets, without derivatives."""
    lse, entropy, largest = (jax.lax.stop_gradient(found[name]) for name in rows.STATISTICS)
    classes = rows.largest(head.target, head.names) if head.soft else head.target
    penalty = jnp.where(counts, z_loss * lse * lse, 0) if z_loss else jnp.zeros_like(lse)
    return LossStatistics(lse, penalty, entropy, largest, (largest == classes) & counts)
