"""What an operation does with the elements of a row once the row's state is known.

A strategy calls `term` once for a row and `finish` for each element, or `result` where the
operation gives one number for a row.  A new operation is a branch here and a line in
onlinesoftmax/operation.py; no strategy changes.
"""

import triton
import triton.language as tl

from . import state


@triton.jit
def term(m, l, OP: tl.constexpr):
    """The part of `finish` that is the same along a row; NaN where the maximum is infinite.

    A row of nothing but -inf, or with a +inf in it, has no softmax: PyTorch writes NaN to all of it.
    """
    value = 1.0 / l if OP == "softmax" else tl.log(l)
    return tl.where(tl.abs(m) == float("inf"), float("nan"), value)


@triton.jit
def finish(x, s, l, t, OP: tl.constexpr, EXACT: tl.constexpr):
    """The output for element x, where s = state.shift(m) and t = term(m, l)."""
    if OP == "softmax":
        e = state.exp(x - s, EXACT)
        y = e * t
        if EXACT:
            # One Newton step makes the product with 1 / l as good as the division by l.
            y = tl.fma(tl.fma(-y, l, e), t, y)
    else:
        y = (x - s) - t
    return y


@triton.jit
def result(m, l):
    """logsumexp: log(0) = -inf and log(inf) = inf need no case."""
    return state.shift(m) + tl.log(l)
