"""Arrays of a small head, the loss on all its logits, and a comparison of results with their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
import numpy as np
from exact_losses import assert_leaves_close

import onlinesoftmax.jax as osj

TOKENS, HIDDEN, CLASSES = (3, 5), 7, 40

MEMORY = {"stored": None, "tokens": 8 * 40 * 8, "columns": 15 * (4 + 7) * 8 + 60}
"""Bytes with which small problems in float64 take each plan."""

IN_FLOAT32 = {"stored": None, "tokens": 8 * 40 * 4, "columns": 15 * (4 + 7) * 4 + 60}
"""The same in float32."""


def head(dtype: Any = "float64", tokens: tuple[int, ...] = TOKENS, classes: int = CLASSES) -> dict[str, Any]:
    """The arrays of a head; one target is ignored, and one bias excludes its class."""
    rng = np.random.default_rng(0)
    bias = rng.normal(size=classes)
    bias[classes // 2] = -np.inf if classes > 1 else 0
    target = rng.integers(0, classes, tokens)
    target[target == classes // 2] = 0
    target.ravel()[7:8] = -100
    arrays = {"x": rng.normal(size=(*tokens, HIDDEN)), "w": rng.normal(size=(classes, HIDDEN)), "b": bias}
    return {**{name: jnp.asarray(t, dtype) for name, t in arrays.items()}, "target": jnp.asarray(target)}


def scores(a: dict[str, Any], scale: Any = 1.0, softcap: float | None = None) -> Any:
    z = (a["x"] @ a["w"].T + a["b"]) * (scale if isinstance(scale, float) else scale[..., None])
    return z if softcap is None else softcap * jnp.tanh(z / softcap)


def expected(
    a: dict[str, Any], *, reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0,
    weight: Any = None, token_weight: Any = None, scale: Any = 1.0, softcap: float | None = None,
) -> Any:  # fmt: skip
    """The loss on all logits."""
    z, target = scores(a, scale, softcap), a["target"]
    soft = jnp.issubdtype(target.dtype, jnp.floating)
    counts = jnp.ones(z.shape[:-1]) if soft else target != -100
    q = target if soft else jax.nn.one_hot(target, z.shape[-1], dtype=z.dtype)
    weights = jnp.ones(z.shape[-1]) if weight is None else weight
    of_class = ((1 - label_smoothing) * q + label_smoothing / z.shape[-1]) * weights
    y = -jnp.sum(jnp.where(of_class == 0, 0, of_class * jax.nn.log_softmax(z)), -1)
    divisor = jnp.sum(counts) if soft else jnp.sum(jnp.sum(q * weights, -1) * counts)
    y, penalty = y * counts, z_loss * jax.nn.logsumexp(z, -1) ** 2 * counts
    factor = 1.0 if token_weight is None else token_weight
    if reduction == "mean":
        return jnp.sum(y * factor) / divisor + jnp.sum(penalty * factor) / jnp.sum(counts)
    return (y + penalty) * factor if reduction == "none" else jnp.sum((y + penalty) * factor)


def with_gradients(f: Any, a: dict[str, Any], names: str = "xwb") -> Any:
    """The result of a function of arrays, and the gradients of its sum with some factors."""

    def total(some: dict[str, Any]) -> Any:
        y = f({**a, **some})
        dy = np.random.default_rng(5).normal(size=y.shape)
        return jnp.sum(y * dy), y

    (_, y), found = jax.value_and_grad(total, has_aux=True)({name: a[name] for name in names})
    return y, found


assert_same = partial(assert_leaves_close, rtol=1e-9, atol=1e-11)


def ours_of(a: dict[str, Any], function: Any = osj.linear_cross_entropy, **given: Any) -> Any:
    return function(a["x"], a["w"], a["target"], linear_bias=a.get("b"), **given)
