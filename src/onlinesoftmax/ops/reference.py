"""The executable specification: the softmax family in NumPy float64, as short as the maths.

Softmax is written in three ways, `naive`, `two_pass` and `online`.  The formula of every operation stands once, in
its room, and serves every array library: the functions of the family here apply it to NumPy's float64, the
verification to long double, and the benchmark to torch's float64, a piece of a row at a time.

Nothing here is fast.  Every kernel is tested against these functions; read them first.

The public functions widen every input to float64, and every result is float64.  A 0-d input is treated as an array of
shape (1,), and its result is 0-d.  The edge cases are those of PyTorch: a row with NaN gives NaN; a row of -inf alone
and a row with +inf have no softmax (NaN) but have a logsumexp (-inf and +inf); an empty row has the logsumexp -inf.
Only `naive` lets NumPy warn, except about underflow: its overflow is what it demonstrates.
An axis out of range raises numpy.exceptions.AxisError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..core.arrays import Array, namespace, quiet
from ..core.formulas import picked
from . import OPERATIONS

Float64 = NDArray[np.float64]


@quiet
def with_sums(operation: str, xp: Any, values: Mapping[str, Array], axis: int, *outputs: str) -> dict[str, Array]:
    """The values, with the maximum and the sums of each row that outputs need.

    Args:
        operation: Name in OPERATIONS.
        xp: Functions of the array library.
        values: Every operand by name, as a `Part` of a formula takes them.  "m" is computed where it is not given.
        axis: The softmax dimension.
        outputs: Names of the outputs; the main output if there are none.
    """
    found, declaration = dict(values), OPERATIONS[operation]
    sums = declaration.summed(outputs or ("y",), values.keys())
    cols = found["x"].shape[axis]
    found |= {"cols": cols, "columns": xp.arange(found["x"], axis), "axis": axis}
    found |= picked(xp, found, found["columns"], lambda t: xp.sum(t, axis))
    if "m" not in found and any(accumulator.rescaled for accumulator in sums):
        found["m"] = xp.max(found["x"], axis)
    for accumulator in sums:
        terms = declaration.formula.sums[accumulator.name](xp, **found)
        found[accumulator.name] = accumulator.kind.of_row(xp, terms, found["columns"], axis)
    return found


@quiet
def evaluate(operation: str, xp: Any, values: Mapping[str, Array], axis: int, output: str = "y") -> Array:
    """One output of an operation: of size 1 along the axis with one value per row, 0-d with one value per call.

    Arguments are those of `with_sums`.

    >>> dy, y = np.array([1.0, 0.0]), np.array([0.5, 0.5])
    >>> evaluate("softmax_backward", namespace(y), {"x": y, "dy": dy}, 0)
    array([ 0.25, -0.25])
    """
    return OPERATIONS[operation].formula.outputs[output](xp, **with_sums(operation, xp, values, axis, output))


@quiet
def size_of_terms(operation: str, xp: Any, values: Mapping[str, Array]) -> Array | None:
    """The size of the larger of the two terms whose difference is the main output; None where there are none.

    Args:
        operation: Name in OPERATIONS.
        xp: Functions of the array library.
        values: The result of `with_sums`.
    """
    terms = OPERATIONS[operation].formula.terms
    if terms is None:
        return None
    minuend, subtrahend = terms(xp, **values)
    return xp.maximum(abs(minuend), abs(subtrahend))


def naive(x: ArrayLike, axis: int = -1) -> Float64:
    """Softmax as textbooks write it, exp(x) / sum(exp(x)); any shape, same shape out.

    It is right for small numbers only.  In float64 exp overflows above 709, and inf / inf is NaN; it underflows
    below -745, and 0 / 0 is NaN.  NumPy's RuntimeWarning is not suppressed.

    >>> naive([0.0, 0.0]), two_pass([1000.0, 1000.0])
    (array([0.5, 0.5]), array([0.5, 0.5]))
    >>> with np.errstate(all="ignore"): naive([1000.0, 1000.0])
    array([nan, nan])
    """
    wide, shape = _widen(x)
    with np.errstate(under="ignore"):
        e = np.exp(wide)
        return (e / np.sum(e, axis, keepdims=True)).reshape(shape)


@quiet
def two_pass(x: ArrayLike, axis: int = -1) -> Float64:
    """Softmax with the maximum subtracted, so that no exponent is above 0; any shape, same shape out.

    The first pass finds m, the second finds l, and a third normalises: three reads and one write of the row.

    >>> two_pass([1000.0, 1000.0, -np.inf])
    array([0.5, 0.5, 0. ])
    """
    wide, shape = _widen(x)
    e = np.exp(wide - _max(wide, axis))
    return (e / np.sum(e, axis, keepdims=True)).reshape(shape)


@quiet
def online(x: ArrayLike, axis: int = -1, block: int = 1) -> Float64:
    """Softmax with m and l found together in one pass over blocks of the row; any shape, same shape out.

    When the maximum rises from m to m_new, the old sum is corrected by exp(m - m_new).  The first pass finds the
    state, the second normalises: two reads and one write of the row.

    Args:
        x: Numbers of any shape.
        axis: The softmax dimension.
        block: Number of elements along `axis` that are read at a time; 1 gives the paper's algorithm 3.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    >>> online([1000.0, 1000.0, -np.inf])
    array([0.5, 0.5, 0. ])
    """
    wide, shape = _widen(x)
    m = np.full_like(_max(wide, axis), -np.inf)
    l = np.zeros_like(m)
    for part in np.split(wide, range(block, wide.shape[axis], block), axis):
        m_new = np.maximum(m, _max(part, axis))
        # While every element so far is -inf there is no sum to correct, and -inf - -inf would be NaN.
        s = np.where(m_new == -np.inf, 0.0, m_new)
        l = l * np.exp(m - s) + np.sum(np.exp(part - s), axis, keepdims=True)
        m = m_new
    return (np.exp(wide - m) / l).reshape(shape)


@quiet
def log_softmax(x: ArrayLike, axis: int = -1) -> Float64:
    """The logarithm of softmax, x - m - log(l), exact even where softmax underflows; any shape, same shape out.

    >>> log_softmax([1000.0, 0.0])
    array([    0., -1000.])
    """
    wide, shape = _widen(x)
    return _evaluate("log_softmax", axis, x=wide, m=_max(wide, axis)).reshape(shape)


@quiet
def logsumexp(x: ArrayLike, axis: int = -1) -> Float64:
    """log(sum(exp(x))) = m + log(l); the shape of x without `axis`.

    >>> logsumexp([[1000.0, 1000.0], [-np.inf, -np.inf]]).round(3)
    array([1000.693,     -inf])
    """
    wide, _ = _widen(x)
    return _evaluate("logsumexp", axis, x=wide, m=_max(wide, axis)).squeeze(axis)


@quiet
def softmax_backward(dy: ArrayLike, y: ArrayLike, axis: int = -1) -> Float64:
    """The gradient with respect to x of y = softmax(x): dx = y * (dy - sum(dy * y)).  dy, y and dx share one shape.

    >>> softmax_backward([1.0, 0.0], [0.5, 0.5])
    array([ 0.25, -0.25])
    """
    (dy, shape), (y, _) = _widen(dy), _widen(y)
    return _evaluate("softmax_backward", axis, x=y, dy=dy).reshape(shape)


@quiet
def log_softmax_backward(dy: ArrayLike, y: ArrayLike, axis: int = -1) -> Float64:
    """The gradient with respect to x of y = log_softmax(x): dx = dy - exp(y) * sum(dy).  dy, y and dx share one shape.

    >>> log_softmax_backward([1.0, 0.0], np.log([0.5, 0.5])).round(15)
    array([ 0.5, -0.5])
    """
    (dy, shape), (y, _) = _widen(dy), _widen(y)
    return _evaluate("log_softmax_backward", axis, x=y, dy=dy).reshape(shape)


@quiet
def logsumexp_backward(dlse: ArrayLike, x: ArrayLike, lse: ArrayLike, axis: int = -1) -> Float64:
    """The gradient with respect to x of lse = logsumexp(x): dx = dlse * exp(x - lse), the softmax times dlse.

    dlse and lse have the shape of x without `axis`; dx has the shape of x.

    >>> logsumexp_backward(2.0, [3.0, 3.0], logsumexp([3.0, 3.0])).round(15)
    array([1., 1.])
    """
    wide, shape = _widen(x)
    dlse, lse = (np.expand_dims(np.asarray(a).astype(np.float64), axis) for a in (dlse, lse))
    return _evaluate("logsumexp_backward", axis, x=wide, dy=dlse, lse=lse).reshape(shape)


def _evaluate(operation: str, axis: int, **values: Float64) -> Float64:
    return np.asarray(evaluate(operation, namespace(values["x"]), values, axis))


def _widen(x: ArrayLike) -> tuple[Float64, tuple[int, ...]]:
    """Widen x to float64 with at least one dimension; return it with the shape of the result."""
    # Unlike dtype=, astype also converts the bfloat16 and float8 of ml_dtypes.
    wide: Any = np.asarray(x).astype(np.float64)
    return np.atleast_1d(wide), wide.shape


def _max(x: Float64, axis: int) -> Float64:
    """The maximum along `axis`, which stays with size 1; -inf for an empty row."""
    return np.asarray(np.max(x, axis, keepdims=True, initial=-np.inf))
