"""The formulas of the operations in JAX's own array functions, and of their tangents.

XLA runs these functions as the backend `eager`, on every device that JAX knows.  They are also the specification of
the Pallas kernels.  Each function works on the last axis; 16-bit arrays are computed in float32 and rounded once.

A formula takes the signature of the call and the operands by name, and returns the outputs by name.  An operation with
a result per row returns the state m and l with it; a gradient reads them again.  A gradient is linear in its operands
dy, dlse and dentropy, the gradients of the result, of lse and of the entropy.  A tangent is its transpose: it is linear
in the operand t, a change of the scores, and its outputs are the changes of the result, of lse and of the entropy,
under the same names dy, dlse and dentropy.

The results per row are made from states by the formulas in the rooms of the operations, and the gradients from the
constants of kernels/pallas/loss_formulas.py.  Everything is computed with scores from which the maximum m is
subtracted, so that large scores do not cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from ..core.arrays import Array, accumulator, namespace
from ..core.options import Functions, ScoreOptions
from ..core.options import scores as scores_of
from ..kernels.pallas.loss_formulas import COTANGENTS, GRADIENTS
from ..ops import OPERATIONS
from ..ops.reference import evaluate
from . import array_types
from .exchange import RowStates
from .signature import Names, Signature, Values

FUNCTIONS = Functions(jnp.tanh, jnp.where)
"""The functions with which XLA computes the score formula of core/options.py."""

MASKED = {"softmax": 0.0, "log_softmax": -jnp.inf}
"""The output per element where the mask is False."""


def filled(options: ScoreOptions, x: Array, arrays: Mapping[str, Array]) -> ScoreOptions:
    """The score options with their arrays, in the dtype of the computation."""
    wide = accumulator(x)
    given = (arrays[name] for name in options.arrays)
    return options.filled(t if t.dtype == jnp.bool_ else t.astype(wide) for t in given)


def scores(options: ScoreOptions, x: Array, arrays: Mapping[str, Array]) -> Array:
    """The scores of logits x, in float32 or float64."""
    wide = x.astype(accumulator(x))
    if isinstance(options.scale, float) and math.isnan(options.scale):
        # XLA on a CPU loses the NaN of a product with a constant NaN in the maximum of a row.
        wide, options = jnp.full_like(wide, jnp.nan), options._replace(scale=1.0)
    return scores_of(FUNCTIONS, wide, filled(options, x, arrays))


def scores_at(options: ScoreOptions, x: Array, arrays: Mapping[str, Array], columns: Array) -> Array:
    """The scores of some columns of each row."""

    def picked(t: Array) -> Array:
        # An array of the score options may have size 1 along any axis.
        return t if t.shape[-1] == 1 else array_types.take(jnp.broadcast_to(t, x.shape), columns, -1)

    return scores(options, picked(x), {name: picked(arrays[name]) for name in options.arrays})


def masked(y: Array, arrays: Mapping[str, Array], fill: float = 0.0) -> Array:
    """The output, with a number in place of elements where the mask is False."""
    return jnp.where(arrays["mask"], y, fill) if "mask" in arrays else y


def _peak(call: Signature, x: Array, z: Array) -> Array:
    """The maximum score of each row.  The maximum of 16-bit logits is exact, and several times as fast as of scores."""
    return jnp.max(x if call.options.is_plain() else z, axis=-1, keepdims=True).astype(z.dtype)


def softmax(call: Signature, x: Array, **arrays: Array) -> Values:
    """The softmax exp(z) / sum(exp(z)); NaN in a row whose maximum is infinite, 0 where the mask is False."""
    z = scores(call.options, x, arrays)
    # An infinite maximum gives NaN by itself.  A test for it would cost XLA its fusion.
    e = jnp.exp(z - _peak(call, x, z))
    y = e / jnp.sum(e, axis=-1, keepdims=True)
    return {"y": masked(y, arrays, MASKED[call.name]).astype(x.dtype)}


def log_softmax(call: Signature, x: Array, **arrays: Array) -> Values:
    """The log-softmax z - log(sum(exp(z))); NaN in a row whose maximum is infinite, -inf where the mask is False."""
    z = scores(call.options, x, arrays)
    z = z - _peak(call, x, z)
    y = z - jnp.log(jnp.sum(jnp.exp(z), axis=-1, keepdims=True))
    return {"y": masked(y, arrays, MASKED[call.name]).astype(x.dtype)}


def row_results(call: Signature, x: Array, target: Array | None = None, **arrays: Array) -> Values:
    """The results per row of an operation, and the state of each row.

    The result of a target is NaN where the target is no column, and where the maximum is infinite.
    """
    z = scores(call.options, x, arrays)
    m = _peak(call, x, z)
    # The finite number nearest to the maximum.
    m = jnp.clip(m, jnp.finfo(m.dtype).min, jnp.finfo(m.dtype).max)
    w = z - m
    e = jnp.exp(w)
    picked = None
    if target is not None:
        there = jnp.clip(target, 0, x.shape[-1] - 1)
        picked = jnp.take_along_axis(z, there[..., None], axis=-1)[..., 0]
    state = RowStates(
        m[..., 0], jnp.sum(e, axis=-1), jnp.sum(_finite(w, e) * e, axis=-1) if "entropy" in call.outputs else None,
        jnp.mean(w, axis=-1) if call.number("smoothing") else None, picked,
    )  # fmt: skip
    return results_of(call, state, target, x.shape[-1])


def results_of(call: Signature, state: RowStates, target: Array | None, cols: int) -> Values:
    """The results per row of an operation, from the states of whole rows.

    Args:
        call: The call.
        state: The states.
        target: Target column of each row, for an operation that has targets.
        cols: Number of columns of a whole row.
    """
    operation, z_loss = OPERATIONS[call.name], call.number("z_loss")
    # The formulas get scores from which m is subtracted.
    row = {"m": jnp.zeros_like(state.m), "l": state.l, "zl": state.zl, "cols": cols}
    if target is not None:
        row |= {"target": target, "z_target": state.z_target - state.m}
    if state.mean is not None:
        row |= {"smoothing": call.number("smoothing"), "wz": cols * state.mean}
    results = {"m": state.m, "l": state.l}
    for name in call.outputs:
        if name not in results:
            results[name] = operation.formula.outputs[name](namespace(state.l), **row)
    if z_loss:
        results[operation.result.name] += z_loss * (state.m + jnp.log(state.l)) ** 2
    return results


def logsumexp_of(m: Array, l: Array, zero: bool = False) -> Array:
    """The logsumexp m + log(l); log(l) where l is 0 or infinite, because log has no finite derivative there.

    With `zero`, a row whose l is 0 is a constant.
    """
    is_number = (l > 0) & (l < jnp.inf)
    y = jnp.where(l == 0, -jnp.inf, jnp.log(jnp.where(l == 0, 1, l))) if zero else jnp.log(l)
    return jnp.where(is_number, m + jnp.log(jnp.where(is_number, l, 1)), y)


def gradient_of_output(call: Signature, x: Array, dy: Array) -> Values:
    """Gradient in the scores from the saved output x: it needs one sum over each row.

    The gradient of softmax is also the change of the output from a change dy of the scores: the Jacobian of softmax is
    symmetric.  With `axis_name`, rows are sharded along these axes, and the sum is that of all devices.
    """
    formula, wide = OPERATIONS[call.name].formula, accumulator(x)
    values = {"x": x.astype(wide), "dy": dy.astype(wide)}
    xp = namespace(values["x"])
    dot = _sum(formula.sums["dot"](xp, **values), call.axis_name)
    return {"y": (call.factor * formula.outputs["y"](xp, **values, dot=dot)).astype(dy.dtype)}


def log_softmax_tangent(call: Signature, x: Array, t: Array) -> Values:
    """Change of the saved output x from a change t of the scores: factor * (t - sum(exp(x) t))."""
    y, wide = x.astype(accumulator(x)), t.astype(accumulator(x))
    return {"dy": (call.factor * (wide - _sum(jnp.exp(y) * wide, call.axis_name))).astype(t.dtype)}


def _sum(t: Array, axis_name: Names) -> Array:
    """The sum of each row, over all devices that hold a part of the row."""
    local = jnp.sum(t, axis=-1, keepdims=True)
    return jax.lax.psum(local, axis_name) if axis_name else local


def gradient(call: Signature, x: Array, **operands: Array) -> Values:
    """Gradient in the scores from the gradients of the results per row, by the state of each row."""
    return {"y": _gradient(call, x, operands).astype(x.dtype)}


def tangent(call: Signature, x: Array, t: Array, **fixed: Array) -> Values:
    """Changes of the results per row from a change t of the scores: the sums of t times their gradients."""
    backward = gradient_call(call)

    def change(name: str) -> Array:
        units = {"dy": jnp.zeros_like(fixed["m"]), name: jnp.ones_like(fixed["m"])}
        y = _gradient(backward, x, {**fixed, **units})
        return jnp.sum(y * t.astype(y.dtype), axis=-1)

    return {name: change(name) for name in call.outputs}


def _gradient(call: Signature, x: Array, operands: Mapping[str, Array]) -> Array:
    """The gradient in the scores, in the dtype of the computation.

    In a row with a target it is 0 where the gradients of the results are 0, even for NaN, and else NaN where the
    maximum is infinite.  Without a target it is 0 in a row without a score above -inf if dy is 0.
    """
    m, l, target = operands["m"], operands["l"], operands.get("target")
    rows = {name: call.factor * t if name in COTANGENTS else t for name, t in operands.items()}
    factor, constants = GRADIENTS[call.name](rows, call.classes or x.shape[-1], dict(call.numbers))
    w = scores(call.options, x, operands) - m[..., None]
    e = jnp.exp(w)
    l = l if target is None else jnp.where(l < jnp.inf, l, jnp.nan)
    zero = factor == 0 if target is not None else (factor == 0) & (l == 0)
    y = jnp.where(zero[..., None], 0, e * (factor / l)[..., None])
    if "slope" in constants:
        y = y - _finite(w, e) * e * constants["slope"][..., None]
    if target is not None:
        # With as many axes as the target, so that nothing is promoted to a higher rank.
        columns = jnp.arange(x.shape[-1], dtype=target.dtype)[(None,) * target.ndim]
        y = y - jnp.where(columns == target[..., None], constants["own"][..., None], 0)
    if "spread" in constants:
        y = y - constants["spread"][..., None]
    # A NaN counts for nothing where the mask is False.
    return masked(y, operands)


def declared(call: Signature, x: Array, **operands: Array) -> Values:
    """The output per element of an operation without formulas of this file, by the formula of its declaration."""
    operation = OPERATIONS[call.name]
    z = scores(call.options, x, operands) if operation.scores else x.astype(accumulator(x))
    values = {one.name: operands[one.name] for one in operation.operands if one.name in operands}
    wide = {name: t.astype(z.dtype) for name, t in values.items()}
    y = call.factor * evaluate(call.name, namespace(z), {**wide, "x": z}, -1)
    like = {**values, "x": x}[operation.element_operands[-1]]
    return {"y": masked(y, operands).astype(like.dtype)}


def declared_tangent(call: Signature, x: Array, t: Array) -> Values:
    """Change of the saved output x from a change t of the scores: the transpose of the declared gradient."""
    backward = gradient_call(call)
    [dy] = jax.linear_transpose(lambda dy: declared(backward, x, dy=dy)["y"], t)(t)
    return {"dy": dy}


def row_products(call: Signature, x: Array, t: Array) -> Values:
    """The sum of x * t over each row, in the dtype of the computation."""
    wide = accumulator(x)
    return {"dy": jnp.sum(x.astype(wide) * t.astype(wide), axis=-1)}


def scaled_rows(call: Signature, x: Array, dy: Array) -> Values:
    """Each row of x times a number dy, in the dtype of x.  XLA removes a multiplication by the constant 1."""
    return {"y": (x.astype(accumulator(x)) * dy[..., None]).astype(x.dtype)}


def _finite(w: Array, e: Array) -> Array:
    """Scores to multiply by e: a score of -inf would give NaN."""
    return jnp.where(e == 0, 0, w)


OF_ROWS = {
    f"{name}_tangent": operation.gradient_name
    for name, operation in OPERATIONS.items()
    if operation.per_row and not operation.backward
}
"""The gradient of each tangent of results per row."""

DECLARED = [operation for operation in OPERATIONS.values() if not operation.runs_on("eager")]
OF_DECLARED = {f"{operation}_tangent": operation.gradient_name for operation in DECLARED if not operation.backward}
"""The gradient of each tangent of an operation that has only its declared formula."""

GRADIENT_OF = {**OF_ROWS, **OF_DECLARED, "log_softmax_tangent": "log_softmax_backward", "row_products": "scaled_rows"}
"""The gradient of each tangent."""


def gradient_call(tangent: Signature) -> Signature:
    """The gradient whose transpose a tangent is."""
    return tangent._replace(name=GRADIENT_OF[tangent.name], outputs=("y",))


FORMULAS: dict[str, Callable[..., Values]] = {
    **{
        name: (gradient_of_output if operation.reduces else gradient) if operation.backward else row_results
        for name, operation in OPERATIONS.items()
    },
    **dict.fromkeys(OF_ROWS, tangent),
    **dict.fromkeys(map(str, DECLARED), declared),
    **dict.fromkeys(OF_DECLARED, declared_tangent),
    "softmax": softmax,
    "log_softmax": log_softmax,
    "log_softmax_tangent": log_softmax_tangent,
    "row_products": row_products,
    "scaled_rows": scaled_rows,
}
"""The formula of each primitive: the operations, and the tangents and the products, which have no kernels."""
