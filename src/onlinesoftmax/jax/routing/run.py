"""The calls of `route` on JAX arrays: their checks, and their shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...core.arguments import Kind, Library
from ...core.arrays import Array, advice, array_kind
from ...routing.results import Routed
from ...routing.rules import Rule, check_arrays
from ..exchange import column_of
from ..signature import Values
from . import primitives


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
        found["bias"] = jax.lax.stop_gradient(jnp.asarray(bias)).astype(primitives.wide_of(x))
    if where is not None:
        found["mask"] = jnp.broadcast_to(jnp.asarray(where), x.shape[:-1])
    if indices is not None:
        found["indices"] = column_of(indices, rule.experts)
    return found


def route(x: Array, operands: Values, rule: Rule, counts: bool, prob_sums: bool, dense: bool) -> Routed:
    """The public function, with `operands` as `checked_operands` returns them."""
    rows, x = x.shape[:-1], x if x.ndim > 1 else x[None]
    if jnp.finfo(x.dtype).bits < 16:
        x = x.astype(jnp.float32)
    given: Values = {"x": x}
    if (bias := operands.get("bias")) is not None:
        given["bias"] = bias.reshape((1,) * (x.ndim - 1) + bias.shape)
    if (mask := operands.get("mask")) is not None:
        given["mask"] = mask.reshape(*x.shape[:-1], 1)
    if (indices := operands.get("indices")) is not None:
        given["indices"] = indices.reshape(*x.shape[:-1], rule.k)
    how = primitives.How(rule, counts, prob_sums, not {"mask", "indices"} & operands.keys())
    weights, indices, lse, *more = primitives.route(given, how)
    weights, indices = (t.reshape(*rows, rule.k) for t in (weights, indices))
    sums = iter([t.reshape(*rows[:-1], rule.experts) for t in more])
    counted, total, whole = next(sums) if counts else None, next(sums) if prob_sums else None, None
    if dense:
        # A comparison with every expert; XLA would gather the results of a scatter on every device.
        own = indices[..., None] == jnp.arange(rule.experts).reshape((1,) * indices.ndim + (-1,))
        whole = jnp.where(own, weights[..., None], 0.0).sum(-2)
    return Routed(weights, indices, counted, total, lse.reshape(rows), whole)
