"""What an operation does with the elements of a row once the row's state is known.

A strategy calls `term` once for a row and `finish` for each element, or `result` where the
operation gives one number for a row.  A new operation is a branch here and a line in
onlinesoftmax/operation.py; no strategy changes.
"""

import triton
import triton.language as tl


@triton.jit
def term(m, l, OP: tl.constexpr):
    """The part of `finish` that is the same along a row; NaN where the maximum is infinite.

    A row of nothing but -inf, or with a +inf in it, has no softmax: PyTorch writes NaN to all of it.
    """
    if OP == "softmax":
        # Rounded correctly: the plain division of float32 is an approximation.
        if l.dtype == tl.float64:
            value = 1.0 / l
        else:
            value = tl.div_rn(1.0, l)
    else:
        value = tl.log(l)
    return tl.where(tl.abs(m) == float("inf"), float("nan"), value)


@triton.jit
def finish(x, s, t, OP: tl.constexpr):
    """The output for element x, where s = state.shift(m) and t = term(m, l)."""
    if OP == "softmax":
        y = tl.exp(x - s) * t
    else:
        y = (x - s) - t
    return y


@triton.jit
def result(s, l):
    """logsumexp, where s = state.shift(m): log(0) = -inf and log(inf) = inf need no case."""
    return s + tl.log(l)
