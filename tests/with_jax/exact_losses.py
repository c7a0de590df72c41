"""Inputs of the losses, their exact results in float64, the same formulas in JAX's own functions, and comparisons."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

from collections.abc import Callable

import jax
import jax.numpy as jnp

from onlinesoftmax.core.arrays import namespace
from onlinesoftmax.ops.reference import evaluate

STRATEGIES = ("row", "looped", "split")


def logits(*shape: int, dtype: str = "float32", seed: int = 0, by: float = 0.0) -> Any:
    """Normal numbers, one in a hundred times 20, all of them shifted."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.where(rng.random(shape) < 0.01, 20, 1) + by
    # JAX would compile the conversion for each shape.
    return jnp.asarray(np.asarray(x).astype(jnp.dtype(dtype)))


def classes(*shape: int, cols: int, seed: int = 1) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(0, cols, shape, np.int32))


def wide(x: Any) -> Any:
    return np.asarray(x).astype(np.float64)


def exact(name: str, x: Any, target: Any, output: str = "y", **values: Any) -> Any:
    """One output of the reference in float64, for rows along the last axis; values per row lack that axis."""
    # A number that is 0 is not given.
    rows = {key: wide(v)[..., None] if np.ndim(v) else v for key, v in values.items() if np.ndim(v) or v}
    given = {"x": wide(x), "target": np.asarray(target)[..., None], **rows}
    with np.errstate(all="ignore"):
        found = evaluate(name, namespace(given["x"]), given, -1, output)
    return found if found.shape == given["x"].shape else found[..., 0]


def exact_loss(x: Any, target: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Any:
    return exact("cross_entropy", x, target, "loss", smoothing=label_smoothing, z_loss=z_loss)


def exact_gradient(x: Any, target: Any, dy: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Any:
    numbers = {"smoothing": label_smoothing, "z_loss": z_loss}
    return exact("cross_entropy_backward", x, target, dy=dy, **exact_state("cross_entropy", x, target), **numbers)


def exact_state(name: str, x: Any, target: Any) -> dict[str, Any]:
    """M and l of each row."""
    return {output: exact(name, x, target, output) for output in ("m", "l")}


def exact_results(x: Any, target: Any) -> list[Any]:
    """logprob, entropy and lse.  The entropy does not depend on a shift, which would cancel in the reference."""
    shifted = wide(x) - wide(x).max(-1, keepdims=True)
    return [exact("token_logprobs", t, target, name) for t, name in ((x, "y"), (shifted, "entropy"), (x, "lse"))]


def written_out(x: Any, target: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Any:
    """The loss in JAX's own functions, in float32, rounded to the dtype of x."""
    log_p = jax.nn.log_softmax(x.astype(jnp.float32))
    q = (1 - label_smoothing) * jax.nn.one_hot(target, x.shape[-1]) + label_smoothing / x.shape[-1]
    loss = -jnp.sum(q * log_p, -1) + z_loss * jax.nn.logsumexp(x.astype(jnp.float32), -1) ** 2
    return loss.astype(x.dtype)


def results_written_out(x: Any, target: Any) -> Any:
    """logprob, entropy and lse in JAX's own functions, in float32."""
    log_p = jax.nn.log_softmax(x.astype(jnp.float32))
    logprob = jnp.take_along_axis(log_p, target[..., None], -1)[..., 0]
    return logprob, -jnp.sum(jnp.exp(log_p) * log_p, -1), jax.nn.logsumexp(x.astype(jnp.float32), -1)


Call = Callable[..., Any]


def both(f: Call, g: Call, *arguments: Any) -> Any:
    """The results of two functions, compiled as one program."""
    return jax.jit(lambda *arguments: (f(*arguments), g(*arguments)))(*arguments)


def assert_close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    """The same shape and dtype, and close values."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=2e-6)


def assert_all_close(pair: tuple[Any, Any], tolerance: float = 1e-5) -> None:
    """Every array of the first result is close to that of the second."""
    for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
        assert_close(a, b, tolerance)


def assert_leaves_close(ours: Any, theirs: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Every array of one result is close to that of another, where only the values count."""
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def number(f: Call) -> Call:
    """A number that every result counts for, each in its own way."""
    return lambda *arguments: sum(jnp.sum(jnp.sin((i + 1) * t)) for i, t in enumerate(f(*arguments)))
