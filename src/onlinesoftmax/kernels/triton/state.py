"""The state (m, sums) in Triton: the recurrence, written once for this language.

A state is the maximum m of a slice and a tuple `sums`, with the parts of each accumulator of the operation:
    l            sum(exp(z - m)): the first sum, where an operation has scores
    zl           sum((z - m) * exp(z - m)): merges with the same factor as l; the entropy is log(l) - zl / l
    a plain sum  sum(w): merges by addition
    an argmax    two parts, the largest key (`key_of`) and its index: the smaller index of equal keys
`OP.kinds[i]` is "scaled" for the first two, "plain", "key" or "index" (formulas.OpConstants).  A tuple of one sum costs
no more than a number: the loops over sums run in the compiler.

zl counts scores from m, so a merge corrects it where m changes (`lowered`).  sum(z * exp(z - m)) would need no
correction, but the entropy of large scores would be the difference of two large numbers, and would lose its digits.

Every strategy in this folder reduces with `identity`, `of`, `of_both`, `merge` and `merge_all`, and nothing else.
These functions obey the table of laws in tests/laws.py, which NumPy, torch and JAX share.

EXACT, or OP.exact, is True where an output is float32 or float64, so that sums and exp must be more accurate than a
16-bit output needs.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950216293335)  # the float32 nearest to log2(e)
LOG2E_LOW = tl.constexpr(1.9259629911783e-08)  # the rounding error of LOG2E
LN2 = tl.constexpr(0.6931471805599453)
LARGEST32 = tl.constexpr(3.4028234663852886e38)  # the largest finite float32
LARGEST64 = tl.constexpr(1.7976931348623157e308)
LOWEST_EXPONENT = tl.constexpr(-1000.0)  # exp of it is 0
NO_KEY32 = tl.constexpr(-(2**31))  # below the key of -inf
NO_KEY64 = tl.constexpr(-(2**63))
LARGEST_INTEGER32 = tl.constexpr(2**31 - 1)
LARGEST_INTEGER64 = tl.constexpr(2**63 - 1)


@triton.jit
def shift(m):
    """The number subtracted before exp: the finite number nearest to m.

    An infinite m would give m - m = NaN.  With a finite shift a slice of only -inf has l = 0 and a slice with +inf has
    l = inf, as their logsumexp needs.
    """
    if m.dtype == tl.float64:
        s = tl.minimum(tl.maximum(m, -LARGEST64), LARGEST64)
    else:
        s = tl.minimum(tl.maximum(m, -LARGEST32), LARGEST32)
    return s


@triton.jit
def exp(t, EXACT: tl.constexpr):
    """Exponential of t = z - shift(m), which is at most 0, or +inf, or NaN.

    The hardware has exp2.  tl.exp2 is that one instruction, which gives 0 for results under 2^-126; tl.exp spends three
    more instructions on them.  The rounded argument t · log2(e) has an error of up to |t| / 2^24; EXACT multiplies the
    result by a factor that undoes the error.
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
def rescale_factor(t, EXACT: tl.constexpr):
    """Factor exp(t) that rescales the sums of a whole slice, so its error is an error of every term.

    The hardware's exp2 has an error of up to 3.4 · 2^-24, and a mean error of -0.8 · 2^-24.  EXACT uses it only for
    powers of two, where it has no error; a polynomial with an error of 1.4 · 2^-24 computes the rest.
    """
    if EXACT and t.dtype == tl.float32:
        t = tl.maximum(t, -128.0, propagate_nan=tl.PropagateNan.ALL)
        t = tl.minimum(t, 128.0, propagate_nan=tl.PropagateNan.ALL)
        # Adding 1.5 · 2^23 rounds to an integer n; f = t · log2(e) - n is at most a half.
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
    """The sum of v ≥ 0 along `axis` as two numbers (high, low).

    sigma is finite, and at least the sum where the sum is finite.  v + sigma - sigma rounds v to a multiple of sigma's
    last place.  The multiples add up without error in any order; the rounding errors are summed separately (Rump, Ogita
    and Oishi, "Accurate floating-point summation", 2008).
    """
    high = (v + sigma) - sigma
    high_sum = tl.sum(high, axis)
    # An infinite sum makes v - high = inf - inf = NaN; its low part is therefore set to 0.
    return high_sum, tl.where(high_sum == float("inf"), 0.0, tl.sum(v - high, axis))


@triton.jit
def total(v, axis: tl.constexpr, EXACT: tl.constexpr):
    """The sum along `axis` of terms from 0 to 1; EXACT rounds the sum once."""
    if EXACT:
        # No term exceeds 1, so the number of terms bounds the sum.
        high, low = split_sum(v, 1.0 * v.shape[axis], axis)
        result = high + low
    else:
        result = tl.sum(v, axis)
    return result


@triton.jit
def identity(BLOCK: tl.constexpr, OP: tl.constexpr):
    """BLOCK states of nothing: merging one with any state gives that state."""
    sums = ()
    for i in tl.static_range(len(OP.kinds)):
        if OP.kinds[i] == "index":
            sums += (tl.full([BLOCK], LARGEST_INTEGER64, tl.int64),)
        elif OP.kinds[i] == "key" and OP.acc == tl.float64:
            sums += (tl.full([BLOCK], NO_KEY64, tl.int64),)
        elif OP.kinds[i] == "key":
            sums += (tl.full([BLOCK], NO_KEY32, tl.int32),)
        # Weighted and plain sums may cancel, so OP.exact keeps them in float64.
        elif OP.exact and (i > 0 or OP.kinds[i] == "plain"):
            sums += (tl.zeros([BLOCK], tl.float64),)
        else:
            sums += (tl.zeros([BLOCK], OP.acc),)
    return tl.full([BLOCK], -float("inf"), OP.acc), sums


@triton.jit
def key_of(x, inside):
    """An integer for each number, in the order of argmax: NaN is the largest, and -0 equals 0; no key outside."""
    if x.dtype == tl.float64:
        bits = tl.where(x == 0, 0.0, x).to(tl.int64, bitcast=True)
        key = tl.where(x != x, LARGEST_INTEGER64, bits ^ ((bits >> 63) & LARGEST_INTEGER64))
        key = tl.where(inside, key, NO_KEY64)
    else:
        # Negative numbers have the opposite order as integers.
        bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
        key = tl.where(x != x, LARGEST_INTEGER32, bits ^ ((bits >> 31) & LARGEST_INTEGER32))
        key = tl.where(inside, key, NO_KEY32)
    return key


@triton.jit
def merge_argmax(key_a, index_a, key_b, index_b):
    """(key, index) of two slices."""
    is_b = (key_b > key_a) | ((key_b == key_a) & (index_b < index_a))
    return tl.where(is_b, key_b, key_a), tl.where(is_b, index_b, index_a)


@triton.jit
def argmax(key, index, axis: tl.constexpr):
    """(key, index) of slices along `axis`."""
    largest = tl.max(key, axis)
    return largest, tl.min(tl.where(key == tl.expand_dims(largest, axis), index, LARGEST_INTEGER64), axis)


@triton.jit
def sums_of(z, weights, m, axis: tl.constexpr, OP: tl.constexpr):
    """The sums of slices along `axis`, relative to m; scaled sums read no `weights`."""
    if OP.kinds[0] == "scaled":
        t = z - tl.expand_dims(shift(m), axis)
        e = exp(t, OP.exact)
        sums = (total(e, axis, OP.exact),)
    else:
        sums = (tl.sum(weights[0], axis),)
    for i in tl.static_range(1, len(OP.kinds)):
        if OP.kinds[i] == "key":
            sums += argmax(weights[i], weights[i + 1], axis)
        elif OP.kinds[i] == "plain":
            sums += (tl.sum(weights[i], axis),)
        elif OP.kinds[i] == "scaled":
            # An infinite t times a term of 0 would be NaN.
            if OP.exact:
                term = tl.where(e == 0, 0.0, t.to(tl.float64) * e.to(tl.float64))
            else:
                term = tl.where(e == 0, 0.0, t * e)
            sums += (tl.sum(term, axis),)
    return sums


@triton.jit
def lowered(sums, t, i: tl.constexpr):
    """Sum i of a state whose scores are to be counted from a larger maximum; t is the old one less the new one."""
    v = sums[i]
    if i > 0:
        # A t of -inf times an l of 0 would be NaN.
        v += sums[0] * tl.maximum(t, LOWEST_EXPONENT).to(v.dtype)
    return v


@triton.jit
def of(z, weights, axis: tl.constexpr, OP: tl.constexpr):
    """The states of the slices of z along `axis`.

    z is the value whose maximum is m, and `weights` has the summand, key or index of each part.
    """
    if OP.maximum:
        m = tl.max(z, axis)
        sums = sums_of(z, weights, m, axis, OP)
    else:
        sums = sums_of(z, weights, z, axis, OP)
        m = (sums[0] * 0.0).to(z.dtype)
    return m, sums


@triton.jit
def of_both(z, weights, axis: tl.constexpr, z_more, weights_more, axis_more: tl.constexpr, OP: tl.constexpr):
    """The states of slices that lie in two tiles.

    The result is that of `of` on both tiles and `merge`, but exp uses the common maximum at once.
    """
    if OP.maximum:
        m = tl.maximum(tl.max(z, axis), tl.max(z_more, axis_more))
        sums_a, sums_b = sums_of(z, weights, m, axis, OP), sums_of(z_more, weights_more, m, axis_more, OP)
    else:
        sums_a, sums_b = sums_of(z, weights, z, axis, OP), sums_of(z_more, weights_more, z, axis_more, OP)
        m = (sums_a[0] * 0.0).to(z.dtype)
    sums = ()
    for i in tl.static_range(len(OP.kinds)):
        if OP.kinds[i] == "key":
            sums += merge_argmax(sums_a[i], sums_a[i + 1], sums_b[i], sums_b[i + 1])
        elif OP.kinds[i] != "index":
            sums += (sums_a[i] + sums_b[i],)
    return m, sums


@triton.jit
def merge(m_a, sums_a, m_b, sums_b, OP: tl.constexpr):
    """The states of two slices laid end to end."""
    m = tl.maximum(m_a, m_b)
    s = shift(m)
    factor_a, factor_b = rescale_factor(m_a - s, OP.exact), rescale_factor(m_b - s, OP.exact)
    sums = ()
    for i in tl.static_range(len(OP.kinds)):
        if OP.kinds[i] == "scaled":
            sums += (lowered(sums_a, m_a - s, i) * factor_a + lowered(sums_b, m_b - s, i) * factor_b,)
        elif OP.kinds[i] == "plain":
            sums += (sums_a[i] + sums_b[i],)
        elif OP.kinds[i] == "key":
            sums += merge_argmax(sums_a[i], sums_a[i + 1], sums_b[i], sums_b[i + 1])
    return m, sums


@triton.jit
def merge_all(m, sums, axis: tl.constexpr, OP: tl.constexpr):
    """The state of all the slices along `axis`.

    OP.exact returns the sums in float64, so a row's sum is rounded once, however many times slices merge.
    """
    m_all = tl.max(m, axis)
    t = m - tl.expand_dims(shift(m_all), axis)
    factor = rescale_factor(t, OP.exact)
    merged = ()
    for i in tl.static_range(len(OP.kinds)):
        v = sums[i]
        if OP.kinds[i] == "scaled":
            v = lowered(sums, t, i) * factor
        # Only the terms of l are positive, as split_sum needs them; other sums arrive in float64.
        if OP.exact and OP.kinds[i] == "scaled" and i == 0 and v.dtype == m.dtype:
            # Twice a rough sum bounds the sum; sigma must be finite.
            sigma = shift(2.0 * tl.expand_dims(tl.sum(v, axis), axis))
            high, low = split_sum(v, sigma, axis)
            merged += (high.to(tl.float64) + low.to(tl.float64),)
        elif OP.kinds[i] == "key":
            merged += argmax(v, sums[i + 1], axis)
        elif OP.kinds[i] != "index":
            merged += (tl.sum(v, axis),)
    return m_all, merged
