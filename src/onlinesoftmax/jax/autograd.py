"""The derivatives of the operations: one rule for whole rows, and for rows that are sharded under `shard_map`.

A derivative is a primitive too.  Let J = diag(y) - y yᵀ; softmax changes by J t where its scores change by t.  J is its
own transpose, so one kernel serves forward and reverse mode.  The other operations have a pair of primitives, a
tangent and its transpose, the gradient.  So grad runs two kernels, and JAX makes jvp, vjp, linearize, hessian and
checkpoint from the same rules.  XLA's operations compute third and higher derivatives.

The tangent of a per-row result of sharded rows is the tangent of the local columns followed by a psum, so its gradient
needs no exchange if `shard_map` checks varying axes, which is the default.  The tangent and the gradient of softmax and
log_softmax exchange one number per row.  The saved values are the same as for whole rows: x and the states, or y.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

from ..core.arrays import Array
from ..core.options import ScoreOptions
from ..kernels.pallas.loss_formulas import COTANGENTS
from ..ops import OPERATIONS
from . import array_types, custom_op, shards
from .eager import GRADIENT_OF, MASKED, gradient_call, scores
from .signature import Names, Signature, Values

TRANSPOSES = {
    **{operation.gradient_name: operation.gradient_name for operation in OPERATIONS.values() if not operation.backward},
    **{gradient: tangent for tangent, gradient in GRADIENT_OF.items()},
}
"""The tangent of each gradient: its transpose.  The gradient of softmax is its own transpose."""

Changes = Mapping[str, Array | None]
"""Changes of arrays by name; None for an array that does not change."""


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def run_shards(names: Names, call: Signature, operands: Values) -> Values:
    """The results of a forward operation on rows that are sharded along these axes of the mesh."""
    return shards.run_shards(custom_op.bind, names, call, operands)


@partial(run_shards.defjvp, symbolic_zeros=True)
def _jvp_of_shards(
    names: Names, call: Signature, primals: tuple[Values], tangents: tuple[dict[str, Any]]
) -> tuple[Values, Values]:
    (operands,), (given,) = primals, tangents
    results = run_shards(names, call, operands)
    is_zero = jax.custom_derivatives.SymbolicZero
    changes = {name: None if isinstance(t, is_zero) else t for name, t in given.items()}
    changed = _changes(names, call, operands, results, changes)

    def change(name: str, y: Array) -> Array:
        t = changed.get(name)
        return array_types.vary(jnp.zeros_like(y) if t is None else t, array_types.varying(y))

    return results, {name: change(name, y) for name, y in results.items()}


def _changes(
    axes: Names, call: Signature, operands: Mapping[str, Array], results: Values, changes: Changes
) -> Changes:  # fmt: skip
    """The changes of the results of a forward operation from the changes of its operands.

    Rows are sharded along `axes` of the mesh.
    """
    t, factor = score_tangent(call, operands, changes)
    operation = OPERATIONS[call.name]
    if t is None:
        return {}
    name = TRANSPOSES[operation.gradient_name]
    if not operation.per_row:
        tangent = Signature(name, ("dy",), choice=call.choice, factor=factor, axis_name=axes)
        [change] = _linear(tangent, {"x": results["y"]}, {"t": t}).values()
        # A masked output is constant.  Where it is 0, it has made its change 0 as a factor.
        constant = "mask" in call.options.arrays and MASKED.get(call.name, 0.0) != 0
        return {"y": jnp.where(operands["mask"], change, 0) if constant else change}
    saved: Mapping[str, Array] = {
        **operands,
        **{name: y for name, y in results.items() if name in ("m", "l", "entropy")},
    }
    given = {name: _cotangent(call, name) for name in call.outputs if name != "m"}
    tangent = Signature(name, tuple(given.values()), call.options, call.numbers, call.choice, factor)
    if axes:
        tangent, saved = shards.localized(axes, tangent, saved)
    found = _linear(tangent, saved, {"t": t})
    if axes:
        # Each result has its own psum, so that JAX removes the psum of an unused result.  This saves an exchange in
        # forward mode, and in the gradient with `check_vma=False`, where the transpose of a psum is a psum.
        found = {name: jax.lax.psum(change, axes) for name, change in found.items()}
    changed = {name: found[cotangent] for name, cotangent in given.items()}
    # Only l of the state changes: by its product with the change of lse, and not where it is infinite.
    l = results["l"]
    return {**changed, "l": changed["l"] * jnp.where(jnp.isfinite(l), l, 0)}


def change_of_lse(options: ScoreOptions, operands: Mapping[str, Array], changes: Changes) -> Array:
    """The change of the logsumexp of rows, whose state m and l is among the operands."""
    t, factor = score_tangent(Signature("logsumexp", (), options), operands, changes)
    if t is None:
        return jnp.zeros_like(operands["m"])
    tangent = Signature(TRANSPOSES[OPERATIONS["logsumexp"].gradient_name], ("dy",), options, factor=factor)
    fixed = {name: operands[name] for name in ("x", *options.arrays, "m", "l")}
    return _linear(tangent, fixed, {"t": t})["dy"]


def _cotangent(call: Signature, output: str) -> str:
    """Name of the gradient of an output per row.  For l it is the gradient of lse, which may be the result itself."""
    result = OPERATIONS[call.name].result.name
    if output == result or (output == "l" and result not in call.outputs):
        return "dy"
    return {"l": "dlse", "entropy": "dentropy"}[output]


def _linear(call: Signature, fixed: Mapping[str, Array], changes: Values) -> Values:
    """Apply a gradient to gradients of its results, or a tangent to the change "t" of the scores."""
    if call.name not in TRANSPOSES:
        return custom_op.bind(call, {**fixed, **changes})
    if "t" in changes:
        # This gradient is its own transpose.
        return custom_op.bind(call._replace(outputs=("y",)), {**fixed, "dy": changes["t"]})
    dy = changes["dy"] if "dy" in changes else jnp.zeros_like(next(iter(changes.values())))
    return custom_op.bind(call, {**fixed, **changes, "dy": dy})


def score_tangent(call: Signature, operands: Mapping[str, Array], changes: Changes) -> tuple[Array | None, float]:
    """The change of the scores from changes of x and of the arrays of the score options.

    Returns:
        (change, factor), whose product is the change of the scores; (None, 1.0) where nothing changes.
    """
    x, options, mask = operands["x"], call.options, operands.get("mask")
    changed = {name: t for name in ("x", "scale", "bias") if (t := changes.get(name)) is not None}
    if not changed:
        return None, 1.0
    if options.softcap is None and options.bias is None and isinstance(options.scale, float) and "x" in changed:
        # The kernel multiplies by the scale.
        return _where(mask, changed["x"]), float(options.scale)
    # The product of NaN and a gradient of 0 would be NaN, in an element that is masked or in a row that counts for
    # nothing.  Other rows with NaN have gradients of NaN without this factor.
    given = {**operands, "x": _where(mask, jnp.where(jnp.isnan(x), 0, x))}

    def formula(some: Values) -> Array:
        return scores(options, some["x"] if "x" in some else given["x"], {**given, **some})

    # The slope of the softcap is computed again for the gradient, so that no float32 array of the size of x is kept.
    formula = formula if options.softcap is None else jax.checkpoint(formula)
    _, change = jax.jvp(formula, ({name: given[name] for name in changed},), (changed,))
    return change.astype(x.dtype), 1.0


def _where(mask: Array | None, t: Array) -> Array:
    return t if mask is None else jnp.where(mask, t, 0)


def _jvp(primals: tuple[Array, ...], tangents: tuple[Any, ...], *, names: tuple[str, ...], call: Signature) -> Any:
    """The results of a primitive, and their changes."""
    operands = dict(zip(names, primals, strict=True))
    changes = {n: None if type(t) is ad.Zero else t for n, t in zip(names, tangents, strict=True)}
    changed: Changes = {}
    if call.name in TRANSPOSES or call.name in GRADIENT_OF:
        results, changed = _jvp_of_linear(call, operands, changes)
    elif call.writes_gradient and changes["x"] is not None:
        # The primitives of the two passes have derivatives.
        passes = lambda x: shards.in_two_passes(custom_op.bind, call, {**operands, "x": x})  # noqa: E731  one use
        results, changed = jax.jvp(passes, (operands["x"],), (changes["x"],))
    else:
        results = custom_op.bind(call, operands)
        changed = {} if call.writes_gradient else _changes((), call, operands, results, changes)

    def change(name: str) -> Any:
        t = changed.get(name)
        return ad.Zero(jax.typeof(results[name]).to_tangent_aval()) if t is None else t

    return [results[name] for name in call.outputs], [change(name) for name in call.outputs]


def _jvp_of_linear(call: Signature, operands: Values, changes: Changes) -> tuple[Values, Changes]:
    """The results of a gradient or a tangent, and their changes.

    Changes of the operands in which it is linear go through the same primitive; for the others JAX differentiates the
    formula.
    """
    results = custom_op.bind(call, operands)
    fixed = {name: t for name, t in operands.items() if name not in (*COTANGENTS, "t")}
    linear = {name: t for name, t in changes.items() if name not in fixed and t is not None}
    others = {name: t for name, t in changes.items() if name in fixed and t is not None}
    parts = [_linear(call, fixed, linear)] if linear else []
    if others:

        def formula(some: Values) -> Values:
            return custom_op.run_eager(call, {**operands, **some})

        parts.append(jax.jvp(formula, ({name: operands[name] for name in others},), (others,))[1])
    return results, {name: sum((p[name] for p in parts[1:]), parts[0][name]) for name in results} if parts else {}


def _transpose(cotangents: list[Any], *arrays: Any, names: tuple[str, ...], call: Signature) -> list[Any]:
    """The gradients in the operands in which a primitive is linear."""
    fixed = {n: t for n, t in zip(names, arrays, strict=True) if n not in (*COTANGENTS, "t")}
    linear = {n: t.aval for n, t in zip(names, arrays, strict=True) if ad.is_undefined_primal(t)}
    given = {n: t for n, t in zip(call.outputs, cotangents, strict=True) if type(t) is not ad.Zero}
    if not given:
        return [ad.Zero(linear[name]) if name in linear else None for name in names]
    if call.name in TRANSPOSES:
        transposed = call._replace(name=TRANSPOSES[call.name], outputs=tuple(linear))
        found = _linear(transposed, fixed, {"t": given["y"]})
    else:
        found = _linear(gradient_call(call), fixed, given)
    # The one output of a gradient is the gradient in the one operand of its transpose.
    found = found if len(linear) > 1 else dict(zip(linear, found.values(), strict=True))
    return [found.get(name) for name in names]


def _without_unused(used: list[bool], equation: Any) -> Any:
    """The operation alone where the gradient that it writes is not used, as in the first pass of a checkpoint."""
    call, names = equation.params["call"], equation.params["names"]
    if not any(used):
        return [False] * len(names), None
    if not call.writes_gradient or used[call.outputs.index("y")]:
        return [True] * len(names), equation
    kept = [name != "dy" for name in names]
    written = [name != "y" for name in call.outputs]
    params = {"names": tuple(name for name in names if name != "dy"), "call": call.without_gradient}
    smaller = equation.replace(
        invars=[t for t, keep in zip(equation.invars, kept, strict=True) if keep],
        outvars=[t for t, keep in zip(equation.outvars, written, strict=True) if keep], params=params,
    )  # fmt: skip
    return kept, smaller


for _name, _primitive in custom_op.PRIMITIVES.items():
    ad.primitive_jvps[_primitive] = _jvp
    pe.dce_rules[_primitive] = _without_unused
    if _name in TRANSPOSES or _name in GRADIENT_OF:
        ad.primitive_transposes[_primitive] = _transpose
