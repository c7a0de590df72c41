"""The executable specification: the softmax family in NumPy float64, as short as the maths.

Softmax three ways, `naive`, `two_pass` and `online`; the rest of the family; every gradient.
Nothing here is fast.  It is what every kernel is measured against, and the place to read first.

Every input is widened to float64 and every result is float64.  A 0-d input is treated as shape (1,)
and comes back 0-d.  The edges are PyTorch's: a row with NaN gives NaN; an all -inf row, or one with
+inf, has no softmax (NaN) but has a logsumexp (-inf, +inf); an empty row has the logsumexp -inf.
No function warns of inf or NaN, which are values here, except `naive`, whose overflow is the lesson.
An axis out of range raises numpy.exceptions.AxisError.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]

_quiet = np.errstate(all="ignore")


def naive(x: ArrayLike, axis: int = -1) -> Float64:
    """Softmax as the textbook writes it, exp(x) / sum(exp(x)); any shape, same shape out.

    Right for small numbers only: exp overflows past 709 (float64) and inf / inf is NaN; it
    underflows below -745 and 0 / 0 is NaN.  NumPy's RuntimeWarning of that is let through.

    >>> naive([0.0, 0.0]), two_pass([1000.0, 1000.0])
    (array([0.5, 0.5]), array([0.5, 0.5]))
    >>> with np.errstate(all="ignore"): naive([1000.0, 1000.0])
    array([nan, nan])
    """
    wide, shape = _widen(x)
    e = np.exp(wide)
    return (e / np.sum(e, axis, keepdims=True)).reshape(shape)


@_quiet
def two_pass(x: ArrayLike, axis: int = -1) -> Float64:
    """Softmax with the maximum subtracted, so that no exponent is above 0; any shape, same shape out.

    One pass for m, one for l, and one more to normalise: three reads and one write of the row.

    >>> two_pass([1000.0, 1000.0, -np.inf])
    array([0.5, 0.5, 0. ])
    """
    wide, shape = _widen(x)
    e = np.exp(wide - _max(wide, axis))
    return (e / np.sum(e, axis, keepdims=True)).reshape(shape)


@_quiet
def online(x: ArrayLike, axis: int = -1, block: int = 1) -> Float64:
    """Softmax with m and l found together in one pass over blocks of the row; any shape, same shape out.

    When the maximum rises from m to m_new, the old sum is corrected by exp(m - m_new).  One pass for
    the state, one to normalise: two reads and one write of the row.

    Args:
        x: Numbers of any shape.
        axis: The axis that each softmax runs along.
        block: How many elements along `axis` are taken in at a time; 1 is the paper's algorithm 3.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    >>> online([1000.0, 1000.0, -np.inf])
    array([0.5, 0.5, 0. ])
    """
    wide, shape = _widen(x)
    m = np.full_like(_max(wide, axis), -np.inf)
    l = np.zeros_like(m)
    for part in np.split(wide, range(block, wide.shape[axis], block), axis):
        m_new = np.maximum(m, _max(part, axis))
        # While all is -inf there is nothing to scale, and -inf - -inf would be NaN.
        shift = np.where(m_new == -np.inf, 0.0, m_new)
        l = l * np.exp(m - shift) + np.sum(np.exp(part - shift), axis, keepdims=True)
        m = m_new
    return (np.exp(wide - m) / l).reshape(shape)


@_quiet
def log_softmax(x: ArrayLike, axis: int = -1) -> Float64:
    """The log of softmax, x - m - log(l), right where softmax itself underflows; any shape, same shape out.

    >>> log_softmax([1000.0, 0.0])
    array([    0., -1000.])
    """
    wide, shape = _widen(x)
    centred = wide - _max(wide, axis)
    return (centred - np.log(np.sum(np.exp(centred), axis, keepdims=True))).reshape(shape)


@_quiet
def logsumexp(x: ArrayLike, axis: int = -1) -> Float64:
    """log(sum(exp(x))) = m + log(l); the shape of x without `axis`.

    >>> logsumexp([[1000.0, 1000.0], [-np.inf, -np.inf]]).round(3)
    array([1000.693,     -inf])
    """
    wide, _ = _widen(x)
    m = _max(wide, axis)
    shift = np.where(np.isinf(m), 0.0, m)
    lse = np.asarray(shift + np.log(np.sum(np.exp(wide - shift), axis, keepdims=True)))
    return lse.squeeze(axis)


@_quiet
def softmax_backward(dy: ArrayLike, y: ArrayLike, axis: int = -1) -> Float64:
    """The gradient in x of y = softmax(x): dx = y * (dy - sum(dy * y)).  dy, y and dx share one shape.

    >>> softmax_backward([1.0, 0.0], [0.5, 0.5])
    array([ 0.25, -0.25])
    """
    (dy, shape), (y, _) = _widen(dy), _widen(y)
    return (y * (dy - np.sum(dy * y, axis, keepdims=True))).reshape(shape)


@_quiet
def log_softmax_backward(dy: ArrayLike, y: ArrayLike, axis: int = -1) -> Float64:
    """The gradient in x of y = log_softmax(x): dx = dy - exp(y) * sum(dy).  dy, y and dx share one shape.

    >>> log_softmax_backward([1.0, 0.0], np.log([0.5, 0.5])).round(15)
    array([ 0.5, -0.5])
    """
    (dy, shape), (y, _) = _widen(dy), _widen(y)
    return (dy - np.exp(y) * np.sum(dy, axis, keepdims=True)).reshape(shape)


@_quiet
def logsumexp_backward(dlse: ArrayLike, x: ArrayLike, lse: ArrayLike, axis: int = -1) -> Float64:
    """The gradient in x of lse = logsumexp(x): dx = dlse * exp(x - lse), the softmax scaled.

    dlse and lse have the shape of x without `axis`; dx has the shape of x.

    >>> logsumexp_backward(2.0, [3.0, 3.0], logsumexp([3.0, 3.0])).round(15)
    array([1., 1.])
    """
    wide, shape = _widen(x)
    dlse, lse = (np.expand_dims(np.asarray(a).astype(np.float64), axis) for a in (dlse, lse))
    return (dlse * np.exp(wide - lse)).reshape(shape)


def _widen(x: ArrayLike) -> tuple[Float64, tuple[int, ...]]:
    """Return x as float64 with at least one dimension, and the shape to give back."""
    # astype, not dtype=: it also knows ml_dtypes' bfloat16 and float8.
    wide: Any = np.asarray(x).astype(np.float64)
    return np.atleast_1d(wide), wide.shape


def _max(x: Float64, axis: int) -> Float64:
    """The maximum along `axis`, kept with size 1; -inf where there is nothing."""
    return np.asarray(np.max(x, axis, keepdims=True, initial=-np.inf))
