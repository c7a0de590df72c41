"""What an operation does with the elements of a row: before they are reduced, as they are, and after.

A strategy calls `reduce`, `merge` and `merge_all` until a row has one state; then `term` once for the row
and `finish` for each element, or `result` where the operation gives one number for a row.  A new
operation is a branch here and a line in onlinesoftmax/operation.py; no strategy changes.

A gradient needs one sum over its row, and keeps it as the l of a state whose m says something else:
    softmax           dx = y · (dy - l)       l = Σ dy · y        m = 0
    log_softmax       dx = dy - exp(y) · l    l = Σ dy            m = max(-y), 0 only if all y are
    logsumexp         dx = l · exp(x - m)     l = dy              m = lse; given, not reduced
"""

import triton
import triton.language as tl

from . import state


@triton.jit
def number(value, ACC: tl.constexpr):
    """A number for a kernel: the bits of a float64, or a pointer to the one element of a tensor."""
    if value.dtype.is_ptr():  # noqa: SIM108  Triton's ternary compiles both
        result = tl.load(value).to(ACC)
    else:
        result = value.to(tl.int64).to(tl.float64, bitcast=True).to(ACC)
    return result


@triton.jit
def tanh(x):
    """Tanh to a few units in the last place of x's dtype: a rational function near 0, exp farther out.

    Source: Cephes, tanhf.c and tanh.c.
    """
    z = x * x
    if x.dtype == tl.float64:
        top = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
        bottom = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
        near = x + x * z * (top / bottom)
    else:
        p = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
        p = tl.fma(z, p, -5.37397155531e-2)
        p = tl.fma(z, p, 1.33314422036e-1)
        p = tl.fma(z, p, -3.33332819422e-1)
        near = tl.fma(z * p, x, x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def score(x, scale, softcap, ACC: tl.constexpr):
    """What softmax is taken of: softcap · tanh(x · scale / softcap), as far as those are given."""
    if scale is not None:
        x = x * number(scale, ACC)
    if softcap is not None:
        cap = number(softcap, ACC)
        x = cap * tanh(x / cap)
    return x


@triton.jit
def softcap_slope(x, scale, softcap, ACC: tl.constexpr):
    """The derivative of a softcap where the logit is x."""
    if scale is not None:
        x = x * number(scale, ACC)
    y = tanh(x / number(softcap, ACC))
    return 1.0 - y * y


@triton.jit
def reduce(a, b, axis: tl.constexpr, OP: tl.constexpr, EXACT: tl.constexpr, ZERO: tl.constexpr):
    """The states of slices along `axis`.

    What is subtracted in a gradient may cancel all but its last places, so EXACT sums in float64; a
    memory-bound kernel has time for that even where float64 is slow.
    """
    if OP == "softmax_backward" or OP == "log_softmax_backward":
        wide_a, wide_b = a, b
        if EXACT:
            wide_a, wide_b = a.to(tl.float64), b.to(tl.float64)
        l = tl.sum(wide_a * wide_b if OP == "softmax_backward" else wide_b, axis)
        m = tl.max(-a, axis) if OP == "log_softmax_backward" and ZERO else (l * 0.0).to(a.dtype)
    else:
        m, l = state.of(a, axis, EXACT)
    return m, l


@triton.jit
def reduce_both(
    a, b, axis: tl.constexpr, a_more, b_more, axis_more: tl.constexpr,
    OP: tl.constexpr, EXACT: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """The states of slices that lie in two tiles."""
    if OP == "softmax_backward" or OP == "log_softmax_backward":
        m, l = reduce(a, b, axis, OP, EXACT, ZERO)
        m_more, l_more = reduce(a_more, b_more, axis_more, OP, EXACT, ZERO)
        m, l = tl.maximum(m, m_more), l + l_more
    else:
        m, l = state.of_both(a, axis, a_more, axis_more, EXACT)
    return m, l


@triton.jit
def merge(m_a, l_a, m_b, l_b, OP: tl.constexpr, EXACT: tl.constexpr):
    """The states of two slices laid end to end; those of a gradient hold a plain sum."""
    if OP == "softmax_backward" or OP == "log_softmax_backward":
        m, l = tl.maximum(m_a, m_b), l_a + l_b
    else:
        m, l = state.merge(m_a, l_a, m_b, l_b, EXACT)
    return m, l


@triton.jit
def merge_all(m, l, axis: tl.constexpr, OP: tl.constexpr, EXACT: tl.constexpr):
    """The state of all the slices along `axis`."""
    if OP == "softmax_backward" or OP == "log_softmax_backward":
        m_all, l_all = tl.max(m, axis), tl.sum(l, axis)
    else:
        m_all, l_all = state.merge_all(m, l, axis, EXACT)
    return m_all, l_all


@triton.jit
def term(m, l, cols, OP: tl.constexpr, ZERO: tl.constexpr):
    """(s, l, t): what of `finish` is the same along a row; l may have been wider.

    A row of nothing but -inf, or with a +inf in it, has no softmax: PyTorch writes NaN to all of it.
    ZERO writes 0 to the first kind, where all is masked, and so has its gradient.
    """
    narrow = l.to(m.dtype)
    s, t = state.shift(m), narrow
    if OP == "softmax" or OP == "log_softmax":
        t = 1.0 / narrow if OP == "softmax" else tl.log(narrow)
        none = m == float("inf") if ZERO else tl.abs(m) == float("inf")
        t = tl.where(none, float("nan"), t)
    elif OP == "softmax_backward":
        # What t has rounded away, unless that is infinite.
        s = tl.where(tl.abs(t) == float("inf"), 0.0, (l - t).to(m.dtype))
    elif OP == "log_softmax_backward" and ZERO:
        # No two of a row's probabilities are 1: where all logs are 0, they were written, not computed.
        s = tl.where(cols > 1, m, 1.0)
    elif OP == "logsumexp_backward":
        s = m
    return s, narrow, t


@triton.jit
def finish(a, b, s, l, t, OP: tl.constexpr, EXACT: tl.constexpr, ZERO: tl.constexpr):
    """The output for the element (a, b), where (s, l, t) = term(m, l, …)."""
    if OP == "softmax":
        e = state.exp(a - s, EXACT)
        if ZERO:
            t = tl.where(l == 0, 0.0, t)
        y = e * t
        if EXACT:
            # One Newton step makes the product with 1 / l as good as the division by l.
            y = tl.fma(tl.fma(-y, l, e), t, y)
    elif OP == "log_softmax":
        y = (a - s) - t
        if ZERO:
            y = tl.where(l == 0, 0.0, y)
    elif OP == "softmax_backward":
        y = a * ((b - t) - s)
    elif OP == "log_softmax_backward":
        y = tl.fma(-state.exp(a, EXACT), t, b)
        if ZERO:
            y = tl.where(s == 0, 0.0, y)
    else:
        y = t * state.exp(a - s, EXACT)
        if ZERO:
            y = tl.where(s == -float("inf"), 0.0, y)
    return y


@triton.jit
def result(m, l):
    """logsumexp: log(0) = -inf and log(inf) = inf need no case."""
    return state.shift(m) + tl.log(l)
