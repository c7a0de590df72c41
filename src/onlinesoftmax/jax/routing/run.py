"""The calls of `route` on JAX arrays: the choice is a primitive without a derivative, and the rest is formulas."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.arguments import Kind, Library
from ...core.arrays import Array, advice, array_kind, namespace
from ...routing import formulas, selection
from ...routing.results import Routed
from ...routing.rules import Rule, check_arrays, sizes_of
from ...sampling.formulas import ordered
from .. import array_types, partitioning, wide
from ..signature import Values


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
        largest=lambda keys, k: wide.FUNCTIONS.largest(ordered(wide.FUNCTIONS, keys), k),
        sorted=lambda t: jnp.sort(t, -1),
        take=_take,
    )


def _lowered(_: str, *arrays: Array, names: tuple[str, ...], call: Rule) -> list[Array]:
    """The experts of each token, int32; XLA by itself would bring all tokens to every device to choose them."""
    x, *bias = arrays
    tokens: list[str | None] = [f"axis{axis}" for axis in range(x.ndim - 1)]
    result = jax.ShapeDtypeStruct((*x.shape[:-1], call.k), jnp.int32)
    whole: list[list[str | None]] = [[None] * t.ndim for t in bias]
    factors = [[*tokens, None], *whole, [*tokens, None]]
    found: list[Array] = partitioning.by_factors(partial(_chosen, call), [result], factors, *arrays)
    return found


def _chosen(rule: Rule, _: Any, x: Array, *bias: Array) -> list[Array]:
    """The experts of the tokens of one device."""
    is_wide = x.dtype == jnp.float64
    # The lowering of a part begins after that of the whole.
    with wide.with_64_bits():
        return [selection.chosen(_choosing(), x, next(iter(bias), None), rule, is_wide).astype(jnp.int32)]


_PRIMITIVE = wide.primitive("routing", _lowered)


def _kind_of(t: Array) -> Kind:
    kinds: tuple[tuple[Any, Kind], ...] = (
        (jnp.floating, "floating"), (jnp.integer, "integer"), (jnp.bool_, "boolean"),
    )  # fmt: skip
    return next((kind for dtype, kind in kinds if jnp.issubdtype(t.dtype, dtype)), "other")


def _check_array(caller: str, argument: str, t: Any, *_: Any) -> None:
    if array_kind(t) not in ("numpy", "jax"):
        raise TypeError(f"{caller}: {argument} must be an array, not {type(t).__name__}{advice(type(t))}")


_JAX = Library(_check_array, lambda *_: None, _kind_of, lambda *_: True, lambda *_: "")
"""JAX's arrays for the checks that all libraries share."""


def checked_logits(logits: Any) -> Array:
    """The logits as an array of JAX."""
    check_arrays(_JAX, logits, None, None, None, None)
    return jnp.asarray(logits)


def checked_operands(x: Array, bias: Any, where: Any, indices: Any, rule: Rule) -> Values:
    """The arrays beside the logits by name: bias (E,) with the dtype of scores, mask and indices in whole shapes."""
    check_arrays(_JAX, x, bias, where, indices, rule.k, "where")
    found: Values = {}
    if bias is not None:
        found["bias"] = jax.lax.stop_gradient(jnp.asarray(bias)).astype(_wide_of(x))
    if where is not None:
        found["mask"] = jnp.broadcast_to(jnp.asarray(where), x.shape[:-1])
    if indices is not None:
        # NumPy's indices beyond int32 must not become experts.
        inside = (indices >= 0) & (indices < rule.experts)
        library: Any = np if array_kind(indices) == "numpy" else jnp
        found["indices"] = jnp.asarray(library.where(inside, indices, -1)).astype(jnp.int32)
    return found


def _wide_of(x: Array) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def route(x: Array, operands: Values, rule: Rule, counts: bool, prob_sums: bool, dense: bool) -> Routed:
    """The public function, with `operands` as `checked_operands` returns them."""
    x, bias = x.astype(_wide_of(x)), operands.get("bias")
    indices = operands.get("indices")
    if indices is None:
        given = {"x": jax.lax.stop_gradient(x)}
        if bias is not None:
            # A batch is one more axis of each operand, the first.
            given["bias"] = bias.reshape((1,) * (x.ndim - 1) + bias.shape)
        arrays = array_types.alike(tuple(given.values()))
        (indices,) = _PRIMITIVE.bind(*arrays, names=tuple(given), call=rule)
    if "mask" in operands:
        indices = jnp.where(operands["mask"][..., None], indices, -1)
    # It is computed again in the gradient, which then keeps nothing but the operands.
    complete = not {"mask", "indices"} & operands.keys()
    weights, p, lse = jax.checkpoint(partial(_results, rule, prob_sums, complete))(x, bias, indices)
    sequences, tokens = sizes_of(x.shape)
    counted, sums, whole = None, None, None
    of_sequences = (*x.shape[:-2], rule.experts)
    if counts:
        # -1 is counted behind the last expert.
        flat = jnp.where(indices < 0, rule.experts, indices).reshape(sequences, tokens * rule.k)
        counted = jnp.zeros((sequences, rule.experts + 1), jnp.int32).at[jnp.arange(sequences)[:, None], flat].add(1)
        counted = counted[:, :-1].reshape(of_sequences)
    if p is not None:
        sums = p.reshape(of_sequences)
    if dense:
        # A comparison with every expert; XLA would gather the results of a scatter on every device.
        own = indices[..., None] == jnp.arange(rule.experts)
        whole = jnp.where(own, weights[..., None], 0.0).sum(-2)
    return Routed(weights, indices, counted, sums, lse[..., 0], whole)


def _results(
    rule: Rule, prob_sums: bool, complete: bool, x: Array, bias: Array | None, indices: Array
) -> tuple[Array, Array | None, Array]:  # fmt: skip
    """Weights, prob_sums and lse."""
    of = formulas.Functions(namespace(x), jnp.sqrt, jnp.log1p, jax.lax.stop_gradient, _take)
    found = formulas.results_of(of, x, bias, indices, rule, prob_sums, complete)
    if found.probabilities is None:
        return found.weights, None, found.lse
    sums = found.probabilities if x.ndim == 1 else found.probabilities.sum(-2)
    return found.weights, sums, found.lse
