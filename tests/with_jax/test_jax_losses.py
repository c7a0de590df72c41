"""Values of `onlinesoftmax.jax.cross_entropy` and `token_logprobs` and their gradients, against float64.

An error may be as large as that of the same formula in JAX's own float32 functions, and a unit in the last place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

from functools import partial

import jax
import jax.numpy as jnp
from compared_programs import Call, assert_all_close, both, number
from exact_losses import (
    STRATEGIES,
    classes,
    exact,
    exact_gradient,
    exact_loss,
    exact_results,
    exact_state,
    logits,
    results_written_out,
    wide,
    written_out,
)

import onlinesoftmax.jax as osj

NUMBERS: dict[str, dict[str, float]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "both": {"label_smoothing": 0.3, "z_loss": 1e-3},
}


def assert_as_good(ours: Any, theirs: Any, reference: Any, scale: Any = 1.0) -> None:
    """Errors of ours are at most the largest of theirs, and a unit in the last place; `scale` is that of each row."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape == reference.shape
    with np.errstate(all="ignore"):
        unit = np.spacing(np.abs(reference).astype(np.float32)).astype(np.float64)
    unit *= 2.0 ** (23 - jnp.finfo(ours.dtype).nmant)
    scale = np.abs(wide(scale))[..., None] if np.ndim(scale) == reference.ndim - 1 else np.abs(wide(scale))
    allowed = (np.abs(wide(theirs) - reference) / scale).max() * scale
    allowed = allowed + np.maximum(unit, float(jnp.finfo(ours.dtype).smallest_normal))
    error = np.abs(wide(ours) - reference)
    assert (error <= allowed).all(), np.max(error / allowed)


def with_gradient(f: Call, x: Any, dy: Any) -> tuple[Any, Any]:
    """The result, and the gradient in x for the gradient dy of the result."""

    def both(x: Any) -> Any:
        y, vjp = jax.vjp(f, x)
        return y, vjp(jax.tree.map(lambda t, like: t.astype(like.dtype), dy, y))[0]

    return jax.jit(both)(x)


def check_loss(x: Any, target: Any, numbers: dict[str, float], **forced: Any) -> None:
    """The loss and its gradient are as good as JAX's own."""
    dy = logits(*target.shape, seed=7).astype(x.dtype)
    (ours, dx), (theirs, their_dx) = (
        with_gradient(f, x, dy)
        for f in (
            lambda x: osj.cross_entropy(x, target, **numbers, **forced),
            lambda x: written_out(x, target, **numbers),
        )
    )
    assert_as_good(ours, theirs, exact_loss(x, target, **numbers))
    assert_as_good(dx, their_dx, exact_gradient(x, target, dy, **numbers), wide(dy))


ASKED = {"logprob": (1, 0, 0), "entropy": (0, 1, 0), "lse": (0, 0, 1), "all": (1, 1, 1)}


def check_results(x: Any, target: Any, asked: str, **forced: Any) -> None:
    """The three results and the gradient of those that are asked for are as good as JAX's own."""
    weights = [logits(*target.shape, seed=8 + i) * part for i, part in enumerate(ASKED[asked])]
    (ours, dx), (theirs, their_dx) = (
        with_gradient(f, x, tuple(weights))
        for f in (
            lambda x: tuple(osj.token_logprobs(x, target, **forced)),
            lambda x: results_written_out(x, target),
        )
    )
    references = exact_results(x, target)
    for found, other, reference in zip(ours, theirs, references, strict=True):
        assert_as_good(found, other, reference)
    shifted = wide(x) - wide(x).max(-1, keepdims=True)
    dy, dentropy, dlse = map(wide, weights)
    cotangents = {"dy": dy, "dlse": dlse, "entropy": references[1], "dentropy": dentropy}
    state = exact_state("token_logprobs", shifted, target)
    reference = exact("token_logprobs_backward", shifted, target, **cotangents, **state)
    assert_as_good(dx, their_dx, reference, sum(map(np.abs, (dy, dentropy, dlse))))


@pytest.mark.parametrize(
    ("numbers", "dtype"), [*((numbers, "float32") for numbers in NUMBERS), ("plain", "bfloat16"), ("both", "float16")]
)
def test_losses_are_as_good_as_in_jax(numbers: str, dtype: str) -> None:
    check_loss(logits(9, 1025, dtype=dtype), classes(9, cols=1025), NUMBERS[numbers])


RESULTS = [
    ("logprob", "float32"), ("entropy", "float16"), ("lse", "bfloat16"), ("all", "bfloat16"), ("all", "float32")
]  # fmt: skip


@pytest.mark.parametrize(("asked", "dtype"), RESULTS)
def test_log_probabilities_are_as_good_as_in_jax(asked: str, dtype: str) -> None:
    check_results(logits(9, 1025, dtype=dtype), classes(9, cols=1025), asked)


@pytest.mark.parametrize("strategy", [None, "row", "split"])
def test_large_logits_do_not_cancel(strategy: str | None) -> None:
    x, target = logits(5, 519, by=1e4), classes(5, cols=519)
    forced = {} if strategy is None else {"backend": "pallas", "strategy": strategy}
    check_loss(x, target, {"label_smoothing": 0.1}, **forced)
    check_results(x, target, "all", **forced)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kernels_with_every_option_give_what_xla_gives(strategy: str) -> None:
    x, target = logits(2, 3, 70) * 2, classes(2, 3, cols=70)
    scale = jnp.linspace(0.4, 1, 6).reshape(2, 3, 1)
    where = jnp.asarray(np.random.default_rng(3).random((3, 70)) < 0.7) | jnp.zeros((2, 3, 70), bool).at[
        jnp.arange(2)[:, None], jnp.arange(3), target
    ].set(True)

    def results(x: Any, scale: Any, **forced: Any) -> Any:
        arguments = {"where": where, "scale": scale, "softcap": 4.0, **forced}
        found = osj.token_logprobs(x, target, **arguments)
        return osj.cross_entropy(x, target, z_loss=0.1, **arguments), *found

    def with_gradients(**forced: Any) -> Any:
        number = lambda x, s: sum(jnp.sum(jnp.sin(t)) for t in results(x, s, **forced))  # noqa: E731  one use
        return jax.jit(lambda x, s: (results(x, s, **forced), jax.grad(number, (0, 1))(x, s)))(x, scale)

    ours, theirs = with_gradients(backend="pallas", strategy=strategy), with_gradients()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_float64() -> None:
    with jax.enable_x64(True):
        x, target = logits(3, 70, dtype="float64"), jnp.asarray([0, 1 << 32, 69])
        known_rows = jnp.asarray([0, 2])
        for forced in ({}, {"backend": "pallas", "strategy": "looped"}):
            loss = osj.cross_entropy(x, target, label_smoothing=0.1, **forced)
            assert loss.dtype == jnp.float64
            expected = exact_loss(x, target, label_smoothing=0.1)
            np.testing.assert_allclose(loss[known_rows], expected[known_rows], rtol=1e-14)
            assert jnp.isnan(loss[1])
            found = osj.token_logprobs(x, target, **forced)
            assert found.entropy.dtype == jnp.float64
            np.testing.assert_allclose(found.entropy, exact_results(x, target)[1], rtol=1e-13)


@pytest.mark.parametrize("axis", [-1, 1, (2, 0)], ids=str)
def test_optax_with_integer_labels(axis: Any) -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed")
    x, rng = logits(3, 4, 5), np.random.default_rng(5)
    axes = [a % 3 for a in (axis if isinstance(axis, tuple) else (axis,))]
    batch = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    target = classes(*batch, cols=int(np.prod([x.shape[a] for a in axes])))
    of_rows = jnp.asarray(rng.random(batch) < 0.5)
    # A label that is kept: optax reads the score of a label that is not.
    of_classes = jnp.asarray(rng.random(x.shape) < 0.5) | jax.nn.one_hot(target, 5, dtype=bool) if axis == -1 else None

    def of(f: Call) -> Call:
        loss = lambda x: tuple(f(x, target, axis, where) for where in (None, of_rows, of_classes))  # noqa: E731  two uses
        return lambda x: (loss(x), jax.grad(number(loss))(x))

    assert_all_close(both(of(osj.cross_entropy), of(optax.softmax_cross_entropy_with_integer_labels), x))


def test_optax_with_weights_of_classes() -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed")
    x, q = logits(3, 4, 5), jax.nn.softmax(logits(3, 4, 5, seed=3))
    rng = np.random.default_rng(6)
    of_classes, of_rows = jnp.asarray(rng.random((3, 4, 5)) < 0.5), jnp.asarray(rng.random((4, 5)) < 0.5)
    for axis, where in ((None, None), ((0, 2), None), (-1, of_classes), (0, of_rows)):
        ours = partial(osj.cross_entropy, axis=axis, where=where)
        theirs = partial(optax.softmax_cross_entropy, axis=axis, where=where)
        numbers = (lambda x, q, f=f: (jnp.sum(jnp.sin(f(x, q))), f(x, q)) for f in (ours, theirs))
        found = both(*(jax.value_and_grad(f, (0, 1), has_aux=True) for f in numbers), x, q)
        (value, (dx, dq)), (their_value, (their_dx, their_dq)) = found
        # A weight in a row without a class has the gradient NaN in optax.
        their_dq = jnp.where(jnp.isnan(their_dq), dq, their_dq)
        assert_all_close(((value, dx, dq), (their_value, their_dx, their_dq)))
    smoothed = lambda x, q: optax.softmax_cross_entropy(x, optax.smooth_labels(q, 0.2))  # noqa: E731  one use
    assert_all_close(both(partial(osj.cross_entropy, label_smoothing=0.2), smoothed, x, q))
