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
def scale(t, EXACT: tl.constexpr):
    """Exp of the same t where it scales the l of a whole slice, and its error would be in every term.

    The hardware's exp2 is off by up to 3.4 · 2^-24, and on average by -0.8.  EXACT keeps it for powers
    of two, where it has no error, and leaves the rest to a polynomial that is right to 1.4 · 2^-24.
    """
    if EXACT and t.dtype == tl.float32:
        t = tl.maximum(t, -128.0, propagate_nan=tl.PropagateNan.ALL)
        t = tl.minimum(t, 128.0, propagate_nan=tl.PropagateNan.ALL)
        # Adding 1.5 · 2^23 rounds to an integer; f is what is left of t · log2(e), at most a half.
        n = tl.fma(t, LOG2E, 12582912.0) - 12582912.0
        f = tl.fma(t, LOG2E_LOW, tl.fma(t, LOG2E, -n))
        # 2^f, minimax in relative error.
        p = tl.fma(f, 0.00015326471475418657, 0.0013390807434916496)
        p = tl.fma(f, p, 0.009618505835533142)
        p = tl.fma(f, p, 0.05550359934568405)
        p = tl.fma(f, p, 0.24022647738456726)
        p = tl.fma(f, p, 0.6931471824645996)
        y = tl.fma(f, p, 1.0) * tl.exp2(n)
    else:
        y = exp(t, EXACT)
    return y


@triton.jit
def split_sum(v, sigma, axis: tl.constexpr):
    """(high, low), whose sum is that of v ≥ 0 along `axis`, where sigma, a finite number, is no less if it is finite.

    v + sigma - sigma is v rounded to a multiple of sigma's last place, such multiples add up without
    error whatever the order, and what was rounded away is summed apart (Rump, Ogita and Oishi,
    "Accurate floating-point summation", 2008).
    """
    high = (v + sigma) - sigma
    high_sum = tl.sum(high, axis)
    # An infinite sum has nothing below its last place but inf - inf.
    return high_sum, tl.where(high_sum == float("inf"), 0.0, tl.sum(v - high, axis))


@triton.jit
def total(v, axis: tl.constexpr, EXACT: tl.constexpr):
    """The sum along `axis` of terms from 0 to 1; EXACT rounds it once."""
    if EXACT:
        # No term passes 1, so that their number bounds their sum.
        high, low = split_sum(v, 1.0 * v.shape[axis], axis)
        result = high + low
    else:
        result = tl.sum(v, axis)
    return result


@triton.jit
def of(x, axis: tl.constexpr, EXACT: tl.constexpr):
    """The states of the slices of x along `axis`."""
    m = tl.max(x, axis)
    return m, total(exp(x - tl.expand_dims(shift(m), axis), EXACT), axis, EXACT)


@triton.jit
def of_both(x, axis: tl.constexpr, x_more, axis_more: tl.constexpr, EXACT: tl.constexpr):
    """The states of slices that lie in two tiles, as `of` each and `merge`, with one shift for both."""
    m = tl.maximum(tl.max(x, axis), tl.max(x_more, axis_more))
    s = shift(m)
    e, e_more = exp(x - tl.expand_dims(s, axis), EXACT), exp(x_more - tl.expand_dims(s, axis_more), EXACT)
    return m, total(e, axis, EXACT) + total(e_more, axis_more, EXACT)


@triton.jit
def merge(m_a, l_a, m_b, l_b, EXACT: tl.constexpr):
    """The states of two slices laid end to end."""
    m = tl.maximum(m_a, m_b)
    s = shift(m)
    return m, l_a * scale(m_a - s, EXACT) + l_b * scale(m_b - s, EXACT)


@triton.jit
def merge_all(m, l, axis: tl.constexpr, EXACT: tl.constexpr):
    """The state of all the slices along `axis`.

    EXACT gives l in float64, so that it is rounded once for a row, however many times slices merge.
    """
    m_all = tl.max(m, axis)
    v = l * scale(m - tl.expand_dims(shift(m_all), axis), EXACT)
    if EXACT and l.dtype == m.dtype:
        # Twice a rough sum bounds the sum; finite, as split_sum needs it to be.
        sigma = shift(2.0 * tl.expand_dims(tl.sum(v, axis), axis))
        high, low = split_sum(v, sigma, axis)
        l_all = high.to(tl.float64) + low.to(tl.float64)
    else:
        l_all = tl.sum(v, axis)
    return m_all, l_all
