"""The state (m, l) in Triton: the recurrence, written once for this language.

Every strategy in this folder reduces with `of`, `merge` and `merge_all`, and nothing else.  The
laws these functions obey are the table in tests/laws.py, shared with NumPy, torch and JAX.

EXACT is set where the output has 24 bits or more; 16-bit outputs would not show the difference.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950216293335)  # the float32 nearest to log2(e)
LOG2E_LOW = tl.constexpr(1.9259629911783e-08)  # what it lacks
LN2 = tl.constexpr(0.6931471805599453)
LARGEST32 = tl.constexpr(3.4028234663852886e38)  # the largest finite float32
LARGEST64 = tl.constexpr(1.7976931348623157e308)


@triton.jit
def shift(m):
    """What is subtracted before exp: the finite number nearest to m.

    An infinite m would give m - m = NaN; so shifted, a slice of nothing but -inf has l = 0, and one
    with +inf has l = inf, which is what their logsumexp needs.
    """
    if m.dtype == tl.float64:
        s = tl.minimum(tl.maximum(m, -LARGEST64), LARGEST64)
    else:
        s = tl.minimum(tl.maximum(m, -LARGEST32), LARGEST32)
    return s


@triton.jit
def exp(t, EXACT: tl.constexpr):
    """Exp of t = x - shift(m): at most 0, or +inf, or NaN.

    The hardware has exp2, and tl.exp2 leaves it bare (results under 2^-126 are 0) where tl.exp spends
    three more instructions on those.  The argument t · log2(e), rounded, is off by up to |t| / 2^24;
    EXACT returns that error as a factor of the result.
    """
    if t.dtype == tl.float64:
        y = tl.exp(t)
    elif EXACT:
        # The residual of an infinite product would be NaN; 2^±184 overflows and underflows as it should.
        t = tl.maximum(t, -128.0, propagate_nan=tl.PropagateNan.ALL)
        t = tl.minimum(t, 128.0, propagate_nan=tl.PropagateNan.ALL)
        p = t * LOG2E
        residual = tl.fma(t, LOG2E_LOW, tl.fma(t, LOG2E, -p))
        y = tl.exp2(p)
        y = tl.fma(y, residual * LN2, y)
    else:
        y = tl.exp2(t * LOG2E)
    return y


@triton.jit
def total(v, sigma, axis: tl.constexpr, EXACT: tl.constexpr):
    """The sum of v ≥ 0 along `axis`, where sigma, a finite number, is no less than that sum if it is finite.

    EXACT rounds once, whatever the order of the additions: v + sigma - sigma is v rounded to a
    multiple of sigma's last place, such multiples add up without error, and what was rounded away
    is summed apart (Rump, Ogita and Oishi, "Accurate floating-point summation", 2008).
    """
    if EXACT:
        high = (v + sigma) - sigma
        high_sum = tl.sum(high, axis)
        # An infinite sum has nothing below its last place but inf - inf.
        low_sum = tl.where(high_sum == float("inf"), 0.0, tl.sum(v - high, axis))
        result = high_sum + low_sum
    else:
        result = tl.sum(v, axis)
    return result


@triton.jit
def of(x, axis: tl.constexpr, EXACT: tl.constexpr):
    """The states of the slices of x along `axis`."""
    m = tl.max(x, axis)
    # No term passes 1, so that their number bounds their sum.
    sigma = 1.0 * x.shape[axis]
    return m, total(exp(x - tl.expand_dims(shift(m), axis), EXACT), sigma, axis, EXACT)


@triton.jit
def of_both(x, axis: tl.constexpr, x_more, axis_more: tl.constexpr, EXACT: tl.constexpr):
    """The states of slices that lie in two tiles, as `of` each and `merge`, with one shift for both."""
    m = tl.maximum(tl.max(x, axis), tl.max(x_more, axis_more))
    s = shift(m)
    e, e_more = exp(x - tl.expand_dims(s, axis), EXACT), exp(x_more - tl.expand_dims(s, axis_more), EXACT)
    l = total(e, 1.0 * x.shape[axis], axis, EXACT)
    return m, l + total(e_more, 1.0 * x_more.shape[axis_more], axis_more, EXACT)


@triton.jit
def merge(m_a, l_a, m_b, l_b, EXACT: tl.constexpr):
    """The states of two slices laid end to end."""
    m = tl.maximum(m_a, m_b)
    s = shift(m)
    return m, l_a * exp(m_a - s, EXACT) + l_b * exp(m_b - s, EXACT)


@triton.jit
def merge_all(m, l, axis: tl.constexpr, EXACT: tl.constexpr):
    """The state of all the slices along `axis`."""
    m_all = tl.max(m, axis)
    v = l * exp(m - tl.expand_dims(shift(m_all), axis), EXACT)
    # Twice a rough sum bounds the sum; finite, as total needs it to be.
    sigma = shift(2.0 * tl.expand_dims(tl.sum(v, axis), axis))
    return m_all, total(v, sigma, axis, EXACT)
