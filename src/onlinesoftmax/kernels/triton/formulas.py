"""The formulas of the operations: what is summed along a row, and what is written per element and per row.

A strategy calls `reduce` or `reduce_both`, `state.merge` and `state.merge_all` until a row has one state.  From the
state it writes elements, with `row_constants` once per row and `output` for each element; or per-row outputs, with
`row_output`; or both.  A new operation is a declaration in ops/ and branches here; no strategy changes.

The state of a gradient has one plain sum, and its m has another meaning:
    softmax           dx = y · (dy - dot)       dot = sum(dy · y)   m is unused
    log_softmax       dx = dy - exp(y) · dot    dot = sum(dy)       m = max(-y) with OP.maximum, else unused
    logsumexp         dx = dy · exp(z - lse)    none: given_state in operands.py is m = lse and the sum dy

An operation with a target column per row reads `row_values`, the result of operands.row_operands; for all others
`row_values` is the empty tuple.  The rooms in ops/ have the formulas of these operations.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import state


class OpConstants(NamedTuple):
    """The operation of a launch: compile-time constants that every kernel takes as OP.

    Attributes:
        name: Name of the operation.  Only this file compares with it.
        scores: True where x is a logit, from which scores are made.
        target: True where each row has a target column.
        gradient: True where the element output is a gradient, and is multiplied by the derivative of the score.
        writes_elements: True where y has a value for each element.
        row_outputs: Names of the outputs with one value per row.
        row_fields: For each of the row outputs, its position in Pointers and Places.
        sums: Names of the parts of the accumulators; empty where a row is not reduced.
        kinds: For each part, how it merges: "scaled", "plain", or "key" and then "index" of an argmax.
        argmax: True where one of the accumulators is an argmax.
        maximum: True where m is needed, and not only the sums.
        acc: Type of the computation.
        exact: True where an output is float32 or float64, so that sums and exp must be more accurate than a 16-bit
            output needs.
        zero: True where a row whose scores are all -inf gives zeros.
        read_fields: operands.READ_FIELDS.  In the interpreter, a kernel cannot read a tuple of its module.
    """

    name: str
    scores: bool
    target: bool
    gradient: bool
    writes_elements: bool
    row_outputs: tuple[str, ...]
    row_fields: tuple[int, ...]
    sums: tuple[str, ...]
    kinds: tuple[str, ...]
    argmax: bool
    maximum: bool
    acc: Any
    exact: bool
    zero: bool
    read_fields: tuple[int, ...] = ()


@triton.jit
def number(value, ACC: tl.constexpr):
    """The value of a number operand: the bits of a float64, or a pointer to the one element of a tensor."""
    if value.dtype.is_ptr():  # noqa: SIM108  Triton's ternary compiles both
        result = tl.load(value).to(ACC)
    else:
        result = value.to(tl.int64).to(tl.float64, bitcast=True).to(ACC)
    return result


@triton.jit
def tanh(x):
    """Tanh with an error of a few units in the last place of x's dtype: a rational function near 0, else exp.

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
def score(x, softcap, ACC: tl.constexpr):
    """The score of a scaled logit without its bias: softcap · tanh(x / softcap), where a softcap is given."""
    if softcap is not None:
        cap = number(softcap, ACC)
        x = cap * tanh(x / cap)
    return x


@triton.jit
def softcap_slope(x, softcap, ACC: tl.constexpr):
    """Derivative of softcap · tanh(x / softcap) at a scaled logit x."""
    y = tanh(x / number(softcap, ACC))
    return 1.0 - y * y


@triton.jit
def value_for_m(a, OP: tl.constexpr):
    """Value whose row maximum is m."""
    return a if OP.scores else -a


@triton.jit
def summand(a, b, argmax, i: tl.constexpr, OP: tl.constexpr):
    """Summand of the plain sum i, or the part of an argmax; l and zl read none.

    The sum that a gradient subtracts may cancel all but the last places, so OP.exact sums in float64; a memory-bound
    kernel has time for it even where float64 is slow.
    """
    if OP.kinds[i] == "key":
        value = argmax[0]
    elif OP.kinds[i] == "index":
        value = argmax[1]
    elif OP.sums[i] == "dot":
        wide_a, wide_b = a, b
        if OP.exact:
            wide_a, wide_b = a.to(tl.float64), b.to(tl.float64)
        value = wide_a * wide_b if OP.name == "softmax_backward" else wide_b
    elif OP.sums[i] == "wz":
        # A column of weight 0 counts for nothing, even where its score is infinite.
        product = b * a
        if OP.exact:
            product = b.to(tl.float64) * a.to(tl.float64)
        value = tl.where(b == 0, 0.0, product)
    else:
        value = a
    return value


@triton.jit
def summands(element, OP: tl.constexpr):
    """The value for each part of the accumulators."""
    a, b, _, argmax = element
    values = ()
    for i in tl.static_range(len(OP.sums)):
        values += (summand(a, b, argmax, i, OP),)
    return values


@triton.jit
def reduce(element, axis: tl.constexpr, OP: tl.constexpr):
    """The states of slices along `axis`; `element` is the result of operands.load."""
    return state.of(value_for_m(element[0], OP), summands(element, OP), axis, OP)


@triton.jit
def reduce_both(element, axis: tl.constexpr, more, axis_more: tl.constexpr, OP: tl.constexpr):
    """The states of slices that lie in two tiles."""
    z, z_more = value_for_m(element[0], OP), value_for_m(more[0], OP)
    return state.of_both(z, summands(element, OP), axis, z_more, summands(more, OP), axis_more, OP)


@triton.jit
def row_constants(m, sums, row_values, cols, OP: tl.constexpr):
    """Per-row constants (s, l, t) for `output`, and more where rows have a target; l is the first sum, rounded.

        softmax                 s = shift(m)               t = 1 / l
        log_softmax             s = shift(m)               t = log(l)
        softmax_backward        s = rounding error of t    t = dot
        log_softmax_backward    s = m with OP.zero         t = dot
        logsumexp_backward      s = lse                    t = dy
        with a target           s = shift(m)               t = 1 / l

    Softmax of a row of only -inf, or of a row with +inf, is undefined: PyTorch writes NaN to the whole row.  OP.zero
    writes 0 to a row of only -inf, in which everything is masked, and to its gradient.
    """
    l = sums[0]
    narrow = l.to(m.dtype)
    s, t = state.shift(m), narrow
    if OP.name == "softmax" or OP.name == "log_softmax":
        t = 1.0 / narrow if OP.name == "softmax" else tl.log(narrow)
        undefined = m == float("inf") if OP.zero else tl.abs(m) == float("inf")
        t = tl.where(undefined, float("nan"), t)
    elif OP.name == "softmax_backward":
        # The rounding error of t; none where t is infinite.
        s = tl.where(tl.abs(t) == float("inf"), 0.0, (l - t).to(m.dtype))
    elif OP.name == "log_softmax_backward" and OP.zero:
        # m = max(-y) is 0 only if every y is 0.  At most one probability of a row is 1, so in a row of several
        # columns these zeros were written because of OP.zero.
        s = tl.where(cols > 1, m, 1.0)
    elif OP.target:
        # A row of only -inf has l = 0, a row with +inf an infinite l; neither has a softmax.
        t = tl.where((narrow == 0) | (narrow == float("inf")), float("nan"), 1.0 / narrow)
    else:
        s = m
    constants = (s, narrow, t)
    if OP.target:
        constants += target_constants(s, narrow, row_values, cols, OP)
    return constants


@triton.jit
def target_constants(s, l, row_values, cols, OP: tl.constexpr):
    """Further constants of a row with a target.

    cross_entropy   counts, factor, own, spread:   dx = factor · p - spread · weight - own at the target
    token_logprobs  counts, factor, own, slope, entropy, log(l):
                    dx = own at the target - p · (factor + slope · (log p + entropy))
    """
    _, valid, ignored, _, w_target, dy, dlse, entropy, dentropy, smoothing, total, z_loss = row_values
    if OP.name == "cross_entropy" or OP.name == "cross_entropy_backward":
        own, spread = (1.0 - smoothing) * w_target, smoothing / cols
        factor = dy * (own + spread * total + 2.0 * z_loss * (s + tl.log(l)))
        result = (valid & ~ignored, factor, dy * own, dy * spread)
    else:
        own = tl.where(valid, dy, 0.0)
        counts = tl.abs(dy) + tl.abs(dlse) + tl.abs(dentropy) != 0.0
        result = (counts, own - dlse, own, dentropy + 0.0 * own, entropy + 0.0 * own, tl.log(l))
    return result


@triton.jit
def target_output(a, b, hit, constants, OP: tl.constexpr):
    """The output for an element of a row with a target; `hit` is True at the target column."""
    s, l, t = constants[0], constants[1], constants[2]
    e = state.exp(a - s, OP.exact)
    p = e * t
    if OP.exact:
        # One Newton step makes the product with 1 / l as accurate as the division by l.
        p = tl.fma(tl.fma(-p, l, e), t, p)
    if OP.name == "token_logprobs_backward":
        _, _, _, counts, factor, own, slope, entropy, log_l = constants
        log_p = tl.where(e == 0, 0.0, (a - s) - log_l)
        y = tl.where(hit, own, 0.0) - p * (factor + slope * (log_p + entropy))
    else:
        _, _, _, counts, factor, own, spread = constants
        y = factor * p - tl.where(hit, own, 0.0) - spread * b
    # The gradient of a row that does not count, or has no incoming gradient, is 0, even where the row holds NaN.
    return tl.where(counts, y, 0.0)


@triton.jit
def output(a, b, hit, constants, OP: tl.constexpr):
    """The output for the element (a, b), given the per-row constants; `hit` is True at the row's target column."""
    if OP.target:  # noqa: SIM108  Triton's ternary compiles both
        y = target_output(a, b, hit, constants, OP)
    else:
        y = plain_output(a, b, constants, OP)
    return y


@triton.jit
def plain_output(a, b, constants, OP: tl.constexpr):
    """The output for an element of a row without a target."""
    s, l, t = constants
    if OP.name == "softmax":
        e = state.exp(a - s, OP.exact)
        if OP.zero:
            t = tl.where(l == 0, 0.0, t)
        y = e * t
        if OP.exact:
            # One Newton step makes the product with 1 / l as accurate as the division by l.
            y = tl.fma(tl.fma(-y, l, e), t, y)
    elif OP.name == "log_softmax":
        y = (a - s) - t
        if OP.zero:
            y = tl.where(l == 0, 0.0, y)
    elif OP.name == "softmax_backward":
        y = a * ((b - t) - s)
    elif OP.name == "log_softmax_backward":
        y = tl.fma(-state.exp(a, OP.exact), t, b)
        if OP.zero:
            y = tl.where(s == 0, 0.0, y)
    else:
        y = t * state.exp(a - s, OP.exact)
        if OP.zero:
            y = tl.where(s == -float("inf"), 0.0, y)
    return y


@triton.jit
def row_output(m, sums, row_values, cols, i: tl.constexpr, OP: tl.constexpr):
    """Per-row output i, from a row's state and its per-row operands.

    log(0) = -inf and log(inf) = inf are the right logsumexp.  Entropy is NaN where l is 0 or m is infinite.
    """
    l = sums[0].to(m.dtype)
    if OP.row_outputs[i] == "m":
        value = state.shift(m)
    elif OP.row_outputs[i] == "l":
        value = l
    elif OP.row_outputs[i] == "largest":
        value = sums[len(OP.sums) - 1]
    elif OP.row_outputs[i] == "loss":
        value = loss(m, sums, row_values, cols, OP)
    elif OP.row_outputs[i] == "y" and OP.target:
        _, valid, _, z_target, _, _, _, _, _, _, _, _ = row_values
        defined = valid & (tl.abs(m) != float("inf"))
        value = tl.where(defined, (z_target - state.shift(m)) - tl.log(l), float("nan"))
    else:
        # "lse", and "y" of logsumexp.
        value = state.shift(m) + tl.log(l)
        if OP.row_outputs[i] == "entropy":
            for k in tl.static_range(len(OP.sums)):
                if OP.sums[k] == "zl":
                    value = tl.log(l) - (sums[k] / sums[0]).to(m.dtype)
    return value


@triton.jit
def loss(m, sums, row_values, cols, OP: tl.constexpr):
    """The cross-entropy of a row: 0 where the target is ignored, NaN where it is no column or softmax is NaN."""
    _, valid, ignored, z_target, w_target, _, _, _, _, smoothing, total, z_loss = row_values
    s, log_l = state.shift(m), tl.log(sums[0].to(m.dtype))
    lse = s + log_l
    value = (1.0 - smoothing) * w_target * ((s - z_target) + log_l)
    for k in tl.static_range(len(OP.sums)):
        if OP.sums[k] == "wz":
            # total * lse - wz, with m taken out of both before they are rounded.
            above = sums[k] - total.to(sums[k].dtype) * s.to(sums[k].dtype)
            value += smoothing / cols * (total * log_l - above.to(m.dtype))
    value += z_loss * lse * lse
    defined = valid & (tl.abs(m) != float("inf"))
    return tl.where(ignored, 0.0, tl.where(defined, value, float("nan")))
