"""Routing as primitives of JAX: the results, their changes, and the gradient of the logits.

On a GPU, kernels compute the results and the gradient; elsewhere, and for what they do not take, XLA runs the formulas.
All arrays have the axes (..., tokens, n) of the logits, with 1 in the place of an axis that they do not have:

    x           (..., tokens, experts)   logits
    bias        (..., 1, experts)
    mask        (..., tokens, 1)
    indices     (..., tokens, k)         experts: operand, or result
    weights     (..., tokens, k)
    lse         (..., tokens, 1)
    counts      (..., 1, experts)
    prob_sums   (..., 1, experts)

Changes and gradients have the names of the arrays with a "d" before them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from ...core.arrays import Array, namespace
from ...routing import formulas, selection
from ...routing.rules import Rule, sizes_of
from .. import array_types, kernel_or_formula, partitioning, wide
from ..signature import Values
from . import kernels


class How(NamedTuple):
    """A static parameter of the primitives.

    Attributes:
        rule: How experts are chosen and weighted.
        counts, prob_sums: True where this result is wanted.
        complete: True where each token gets k experts: there is no mask, and no expert was given.
    """

    rule: Rule
    counts: bool
    prob_sums: bool
    complete: bool

    @property
    def linear(self) -> tuple[str, ...]:
        """Names of the results that change with the logits."""
        return ("weights", "lse", *(("prob_sums",) if self.prob_sums else ()))


def _take(t: Array, places: Array) -> Array:
    return jnp.take_along_axis(t, places, -1)


@cache
def _choosing() -> selection.Functions:
    """JAX's functions for the choice of experts."""
    # Hazard: XLA fuses a product of float32 numbers with an addition, and may leave out a pair of conversions.
    return selection.Functions(
        namespace(jnp.zeros(1)),
        exact=lambda t: t.astype(jnp.float64),
        rounded=lambda t: jax.lax.reduce_precision(t, 8, 23),
        double=lambda t: t.astype(jnp.float64),
        single=lambda t: t.astype(jnp.float32),
        bounded=jnp.clip,
        power_of_two=lambda n: (jnp.nan_to_num(n).astype(jnp.int64) + 1023 << 52).view(jnp.float64),
        sqrt=jnp.sqrt,
        log1p=jnp.log1p,
        largest=lambda keys, k: wide.order_of(keys).largest(k),
        sorted=lambda t: jnp.sort(t, -1),
        take=_take,
    )


def wide_of(x: Array) -> Any:
    """The dtype of the formulas."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _route(how: How, operands: Values) -> list[Array]:
    """Weights, indices, lse, and what else is wanted of counts and prob_sums."""
    x, bias, indices = operands["x"].astype(wide_of(operands["x"])), operands.get("bias"), operands.get("indices")
    rule, rows = how.rule, x.shape[:-1]
    if indices is None:
        indices = selection.chosen(_choosing(), x, bias, rule, x.dtype == jnp.float64).astype(jnp.int32)
    if "mask" in operands:
        indices = jnp.where(operands["mask"], indices, -1)
    found = _results(how, x, bias, indices)
    some = [found["weights"], indices, found["lse"]]
    if how.counts:
        # -1 is counted behind the last expert.
        sequences, tokens = sizes_of(x.shape)
        flat = jnp.where(indices < 0, rule.experts, indices).reshape(sequences, tokens * rule.k)
        counted = jnp.zeros((sequences, rule.experts + 1), jnp.int32)
        counted = counted.at[jnp.arange(sequences)[:, None], flat].add(1)
        some.append(counted[:, :-1].reshape(*rows[:-1], 1, rule.experts))
    return [*some, found["prob_sums"]] if how.prob_sums else some


def _results(how: How, x: Array, bias: Array | None, indices: Array) -> Values:
    """The results that change with the logits."""
    of = formulas.Functions(namespace(x), jnp.sqrt, jnp.log1p, jax.lax.stop_gradient, _take)
    found = formulas.results_of(of, x, bias, indices, how.rule, how.prob_sums, how.complete)
    some = {"weights": found.weights, "lse": found.lse}
    if found.probabilities is not None:
        some["prob_sums"] = found.probabilities.sum(-2, keepdims=True)
    return some


def _of_logits(how: How, operands: Values) -> Callable[[Array], Values]:
    """`_results` as a function of the logits."""

    def results(x: Array) -> Values:
        return _results(how, x.astype(wide_of(x)), operands.get("bias"), operands["indices"])

    return results


def _change(how: How, operands: Values) -> list[Array]:
    """The changes of the results from a change "dx" of the logits."""
    _, found = jax.jvp(_of_logits(how, operands), (operands["x"],), (operands["dx"],))
    return [found[name] for name in how.linear]


def _gradient(how: How, operands: Values) -> list[Array]:
    """The gradient of the logits from those of the results."""
    results, backward = jax.vjp(_of_logits(how, operands), operands["x"])
    given = {name: operands.get(f"d{name}") for name in results}
    return list(backward({name: jnp.zeros_like(results[name]) if t is None else t for name, t in given.items()}))


def _lowered(
    name: str, formula: Any, kernel: Any, totals: Callable[[How], int],
    platform: str, *arrays: Array, names: tuple[str, ...], call: How,
) -> list[Array]:  # fmt: skip
    """A primitive on the devices that have the tokens; XLA would bring all tokens to every device to choose experts.

    Args:
        name: Name for the record of plans.
        formula, kernel: Functions of `call` and then as in kernel_or_formula.py.
        totals: Number of the last results that are sums over tokens.
        platform, arrays, names, call: As for other primitives.
    """
    x = arrays[0]
    results = jax.eval_shape(lambda *some: formula(call, dict(zip(names, some, strict=True))), *arrays)
    sides = [[_factor(x, axis, size) for axis, size in enumerate(t.shape)] for t in (*arrays, *results)]
    tokens = _factor(x, x.ndim - 2, x.shape[-2])

    # JAX keeps this function after the trace, whose arrays it must not hold.
    def on_device(divided: Any, *local: Array) -> list[Array]:
        # The lowering of a part begins after that of the whole.
        with wide.with_64_bits():
            operands = dict(zip(names, local, strict=True))
            found = kernel_or_formula.run(
                platform, name, operands, partial(formula, call), kernel and partial(kernel, call)
            )
        several, number = divided.get(tokens), totals(call)
        if several and number:
            found = [*found[:-number], *(jax.lax.psum(t, several) for t in found[-number:])]
        return found

    found: list[Array] = partitioning.by_factors(on_device, results, sides, *arrays)
    return found


def _factor(x: Array, axis: int, size: int) -> str | None:
    """The name of an axis that x has too; None for the last one, and for an axis of size 1."""
    return f"axis{axis}" if axis < x.ndim - 1 and size == x.shape[axis] and size != 1 else None


def _primitive(name: str, *how: Any) -> Any:
    lowered = partial(_lowered, name, *how)
    return wide.primitive(name, lowered, ("bias",), divides=True)


_ROUTE = _primitive(
    "route", _route, lambda how, *given: kernels.route(how.rule, how.counts, how.prob_sums, *given),
    lambda how: how.counts + how.prob_sums,
)  # fmt: skip
_CHANGE = _primitive("route_tangent", _change, None, lambda how: int(how.prob_sums))
_GRADIENT = _primitive(
    "route_backward", _gradient, lambda how, *given: kernels.route_backward(how.rule, *given), lambda how: 0
)


def route(operands: Values, how: How) -> list[Array]:
    """The results of the primitive."""
    wide.check_sizes("route", operands["x"].shape)
    return _bind(_ROUTE, operands, how)


def _bind(primitive: Any, operands: Values, how: How) -> list[Array]:
    found: list[Array] = primitive.bind(*array_types.alike(tuple(operands.values())), names=tuple(operands), call=how)
    return found


def _no_change(t: Array) -> Any:
    return ad.Zero(jax.typeof(t).to_tangent_aval())


def _jvp(primals: tuple[Array, ...], tangents: tuple[Any, ...], *, names: tuple[str, ...], call: How) -> Any:
    """The results and their changes; only the logits have a derivative."""
    found = _ROUTE.bind(*primals, names=names, call=call)
    changes: list[Any] = list(map(_no_change, found))
    if type(tangents[0]) is not ad.Zero:
        operands = dict(zip(names, primals, strict=True))
        fixed: Values = {name: operands[name] for name in ("x", "bias") if name in operands}
        given = {**fixed, "indices": found[1], "lse": found[2], "dx": tangents[0]}
        changed: Values = dict(zip(call.linear, _bind(_CHANGE, given, call), strict=True))
        changes[0], changes[2] = changed["weights"], changed["lse"]
        if call.prob_sums:
            changes[-1] = changed["prob_sums"]
    return found, changes


def _transpose(cotangents: list[Any], *arrays: Any, names: tuple[str, ...], call: How) -> list[Any]:
    """The gradient of the logits."""
    given: dict[str, Any] = {f"d{name}": dy for name, dy in zip(call.linear, cotangents, strict=True)}
    given = {name: dy for name, dy in given.items() if type(dy) is not ad.Zero}
    operands: dict[str, Any] = dict(zip(names, arrays, strict=True))
    aval = operands.pop("dx").aval
    found: Any = ad.Zero(aval)
    if given:
        # The result of the primitive is sharded along the tokens alone.
        found = array_types.resharded(_bind(_GRADIENT, {**operands, **given}, call)[0], aval.sharding)
    return [found if name == "dx" else None for name in names]


def _jvp_of_linear(
    primitive: Any, formula: Any, primals: tuple[Array, ...], tangents: tuple[Any, ...], *,
    names: tuple[str, ...], call: How,
) -> Any:  # fmt: skip
    """The results of a change or of a gradient, and their changes, by the formula, which does not read lse."""
    operands, given = (dict(zip(names, each, strict=True)) for each in (primals, tangents))
    changes = {name: t for name, t in given.items() if type(t) is not ad.Zero and name not in ("indices", "lse")}
    found = primitive.bind(*primals, names=names, call=call)
    if not changes:
        return found, list(map(_no_change, found))
    changed: Values = {name: operands[name] for name in changes}
    _, found_changes = jax.jvp(lambda some: formula(call, {**operands, **some}), (changed,), (changes,))
    return found, found_changes


ad.primitive_jvps[_ROUTE] = _jvp
ad.primitive_jvps[_CHANGE] = partial(_jvp_of_linear, _CHANGE, _change)
ad.primitive_jvps[_GRADIENT] = partial(_jvp_of_linear, _GRADIENT, _gradient)
ad.primitive_transposes[_CHANGE] = _transpose
