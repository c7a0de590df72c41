"""Rows with wrong labels, infinities and NaN, and rows some of whose classes are left out."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from compared_programs import assert_all_close, both
from exact_losses import STRATEGIES, exact, exact_gradient, exact_loss, logits, wide

import onlinesoftmax.jax as osj


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_wrong_labels_give_nan_and_no_gradient(strategy: str | None) -> None:
    forced = {} if strategy is None else {"backend": "pallas", "strategy": strategy}
    x = logits(5, 70).at[3, 4].set(jnp.nan)
    target = jnp.asarray([0, -1, 70, -100, 69])

    @jax.jit
    def results(x: Any) -> Any:
        loss, vjp = jax.vjp(lambda x: osj.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.1, **forced), x)
        found, vjp_of_found = jax.vjp(lambda x: osj.token_logprobs(x[:3], target[:3], **forced), x)
        of_logprob = osj.TokenLogprobs(jnp.ones(3), jnp.zeros(3), jnp.zeros(3))
        return loss, vjp(jnp.ones(5))[0], found, vjp_of_found(of_logprob)[0]

    loss, dx, found, dx_of_logprob = results(x)
    np.testing.assert_array_equal(np.isnan(loss), [False, True, True, True, False])
    np.testing.assert_array_equal(np.any(wide(dx) != 0, -1), [True, False, False, False, True])
    np.testing.assert_array_equal(np.isnan(found.logprob), [False, True, True])
    assert np.isfinite(found.entropy).all()
    np.testing.assert_array_equal(np.any(wide(dx_of_logprob) != 0, -1), [True, False, False, False, False])


ROWS = {
    "-inf": [-np.inf, -np.inf, -np.inf],
    "a -inf": [-np.inf, 1.0, 0.0],
    "another -inf": [1.0, -np.inf, 0.0],
    "+inf": [1.0, np.inf, 0.0],
    "+inf at the target": [np.inf, 1.0, 0.0],
    "NaN": [0.0, np.nan, 0.0],
    "large": [3e38, -3e38, 0.0],
}
"""Rows whose target is the first element."""


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_special_rows(strategy: str | None) -> None:
    forced = {} if strategy is None else {"backend": "pallas", "strategy": strategy}
    # A row of numbers lies between any two special rows.
    x = jnp.asarray([values for row in ROWS.values() for values in (row, [0.0, 1.0, 2.0])], jnp.float32)
    target = jnp.zeros(len(x), jnp.int32)

    @jax.jit
    def results(x: Any) -> Any:
        loss = partial(osj.cross_entropy, labels=target, **forced)
        dx = jax.grad(lambda x: jnp.sum(loss(x)))(x)
        return loss(x), loss(x, label_smoothing=0.1), osj.token_logprobs(x, target, **forced), dx

    loss, smoothed, found, dx = results(x)
    infinite = np.isinf(wide(x).max(-1))
    np.testing.assert_allclose(loss, np.where(infinite, np.nan, exact_loss(x, target)).astype(np.float32), rtol=1e-6)
    expected = np.where(infinite, np.nan, exact_loss(x, target, label_smoothing=0.1)).astype(np.float32)
    # The sum of a row with 3e38 and -3e38 is finite, and each of its terms may be infinite in float32.
    np.testing.assert_allclose(smoothed[:-2], expected[:-2], rtol=1e-6)
    for ours, name in zip(found, ("y", "entropy", "lse"), strict=True):
        expected = exact("token_logprobs", x, target, name).astype(np.float32)
        expected[infinite & (name == "y")] = np.nan
        if name == "entropy":
            # The entropy of a row with 3e38 is the difference of two such numbers in the reference.
            expected[-2] = 0
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
    assert np.isnan(dx[infinite]).any(-1).all()
    finite = np.isfinite(loss)
    np.testing.assert_allclose(dx[finite], exact_gradient(x, target, np.ones(len(x)))[finite], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("one_hot", [False, True])
def test_smoothing_is_spread_over_the_classes_that_are_kept(one_hot: bool) -> None:
    x, kept = logits(4, 6), jnp.asarray([0, 2, 3])
    where = jnp.zeros(6, bool).at[kept].set(True)[None]
    small = jnp.asarray([0, 1, 2, 1])
    labels = jax.nn.one_hot(kept[small], 6) if one_hot else kept[small]
    few = lambda x: osj.cross_entropy(x[:, kept], small, label_smoothing=0.3, z_loss=0.1)  # noqa: E731  one use
    ours = lambda x: osj.cross_entropy(x, labels, where=where, label_smoothing=0.3, z_loss=0.1)  # noqa: E731  one use
    assert_all_close(both(ours, few, x))
    assert_all_close(both(jax.grad(lambda x: jnp.sum(ours(x))), jax.grad(lambda x: jnp.sum(few(x))), x))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("labels", ["integers", "weights"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"softcap": 3.0, "scale": jnp.float32(0.5)}], ids=str)
def test_nan_that_counts_for_nothing_has_no_gradient(options: dict[str, Any], labels: str, reduction: str) -> None:
    x, where = jax.random.normal(jax.random.key(0), (4, 8)), jnp.arange(8) < 5
    target = jnp.asarray([1, 0, 4, 2]) if labels == "integers" else jax.nn.softmax(2 * x)
    scale = options.get("scale", 1.0)

    def masked(x: Any, scale: Any) -> Any:
        more = options | {"scale": scale, "where": where, "reduction": reduction}
        smooth = osj.cross_entropy(x, target, label_smoothing=0.1, **more)
        return (osj.cross_entropy(x, target, **more) + smooth).sum()

    def ignored(x: Any, scale: Any) -> Any:
        more = options | {"scale": scale, "reduction": reduction}
        return osj.cross_entropy(x, jnp.asarray([1, -1, 4, 2]), ignore_index=-1, **more).sum()

    for loss, hole in (masked, x.at[:, 5:].set(jnp.nan)), (ignored, x.at[1].set(jnp.nan)):
        arguments = (0, 1) if "scale" in options else 0
        found = jax.grad(loss, arguments)(hole, scale)
        expected = jax.grad(loss, arguments)(jnp.where(jnp.isnan(hole), 0, hole), scale)
        for ours, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, want, rtol=1e-6, atol=1e-7)


def test_where_broadcasts_or_is_of_rows() -> None:
    x, labels = jax.random.normal(jax.random.key(0), (4, 8)), jnp.asarray([1, 0, 4, 2])
    classes, rows = jnp.arange(8) < 5, jnp.arange(4) < 2
    for flat, whole in (classes, classes[None]), (rows, rows[:, None]), (jnp.array([True]), jnp.array([[True]])):
        want = osj.cross_entropy(x, labels, where=whole)
        np.testing.assert_array_equal(osj.cross_entropy(x, labels, where=flat), want)


def test_where_leaves_classes_out() -> None:
    x = jnp.asarray([[jnp.nan, 0.0, 0.0], [jnp.nan, 1.0, 0.0], [jnp.nan, 1.0, jnp.nan], [-jnp.inf, -jnp.inf, 0.0]])
    where = jnp.asarray([[False, True, True], [False, True, True], [False, False, False], [False, True, False]])
    labels = jnp.asarray([1, 0, 0, 1])

    @jax.jit
    def results(x: Any) -> Any:
        of_labels = partial(osj.cross_entropy, labels=labels, where=where, z_loss=1.0)
        of_weights = partial(osj.cross_entropy, labels=jax.nn.one_hot(labels, 3), where=where, z_loss=1.0)
        losses = [(f(x), jax.grad(lambda x, f=f: f(x)[0] + f(x)[2])(x)) for f in (of_labels, of_weights)]
        return losses, osj.token_logprobs(x, labels, where=where)

    losses, found = results(x)
    for loss, dx in losses:
        np.testing.assert_allclose([loss[0], loss[2]], [np.log(2) + np.log(2) ** 2, 0], rtol=1e-6)
        assert np.isfinite(dx[:3]).all()
        np.testing.assert_array_equal(dx[2], 0)
    # An integer label that is left out has probability 0.
    assert losses[0][0][1] == np.inf
    np.testing.assert_allclose(found.logprob[:2], [-np.log(2), -np.inf], rtol=1e-6)
    np.testing.assert_allclose(found.lse, [np.log(2), np.log(1 + np.e), -np.inf, -np.inf], rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1,), (1, 1)], ids=str)
def test_empty_and_small(shape: tuple[int, ...]) -> None:
    x, target = jnp.ones(shape), jnp.zeros(shape[:-1], jnp.int32)
    loss, found = osj.cross_entropy(x, target), osj.token_logprobs(x, target)
    assert loss.shape == found.logprob.shape == found.entropy.shape == found.lse.shape == shape[:-1]
    np.testing.assert_array_equal(loss, np.nan if shape[-1] == 0 else 0)
    assert osj.token_logprobs(x, target, entropy=False).entropy is None
