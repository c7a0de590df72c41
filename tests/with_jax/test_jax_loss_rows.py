"""Rows with wrong labels, infinities and NaN, rows without some classes, and losses that are reduced to a scalar."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from exact_losses import (
    STRATEGIES,
    assert_all_close,
    assert_leaves_close,
    both,
    classes,
    exact,
    exact_gradient,
    exact_loss,
    logits,
    wide,
    written_out,
)
from test_jax_losses import NUMBERS, assert_as_good

import onlinesoftmax.jax as osj
from onlinesoftmax.ops.reference import two_pass
from pairs import rest_exhaustive

MORE = pytest.mark.exhaustive


@pytest.mark.parametrize("strategy", [None, "row", *(pytest.param(each, marks=MORE) for each in ("looped", "split"))])
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


def test_rows_that_are_restricted_to_a_support() -> None:
    """Rows of two elements and of three, of none, and of one that is no element; an element outside; one to ignore."""
    x, target = logits(6, 70).at[0, 3].set(jnp.nan), jnp.asarray([69, 0, 1, 4, 5, -100])
    ids = jnp.asarray([4, 69, 0, 7, 40, 70, 4, 9, 6, 5, 8, *[-1] * 7])
    support = ids, jnp.asarray([0, 2, 5, 5, 6, 8, 11])

    def found(x: Any) -> Any:
        return osj.token_logprobs(x.T, target, 0, support=support, scale=0.5, ignore_index=-100)

    def expected(x: Any) -> Any:
        rows = [jax.nn.log_softmax(0.5 * x[0, ids[:2]]), jax.nn.log_softmax(0.5 * x[1, ids[2:5]])]
        return jnp.stack([rows[0][1], rows[1][0]]), jnp.stack([-jnp.sum(jnp.exp(row) * row) for row in rows])

    def with_gradient(f: Any) -> Any:
        def total(x: Any) -> Any:
            y = f(x)
            return sum(jnp.sum(t) for t in y[:2]), y

        return jax.jit(jax.value_and_grad(total, has_aux=True))(x)

    ((_, got), dx), ((_, want), dx_wanted) = map(with_gradient, (found, expected))
    for a, b in zip(got, want, strict=False):
        np.testing.assert_allclose(a[:2], b, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got.logprob[2:], [np.nan, np.nan, -np.inf, 0])
    np.testing.assert_allclose(dx[:2], dx_wanted[:2], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.any(dx != 0, -1), [True, True, False, False, True, True])


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


@pytest.mark.parametrize("strategy", [None, pytest.param("row", marks=MORE), "looped", "split"])
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


HOLES: list[dict[str, Any]] = [{}, {"softcap": 3.0, "scale": jnp.float32(0.5)}, {"softcap": 3.0}]


@pytest.mark.parametrize(
    ("options", "labels"), rest_exhaustive(itertools.product(HOLES, ("integers", "weights"))), ids=str
)
def test_nan_that_counts_for_nothing_has_no_gradient(options: dict[str, Any], labels: str) -> None:
    """Reductions take turns."""
    reduction = "none" if (len(options) == 1) == (labels == "weights") else "mean"
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

    traced = "scale" in options

    @partial(jax.jit, static_argnums=() if traced else 2)
    def gradients(x: Any, x_ignored: Any, scale: Any) -> Any:
        gradient = partial(jax.grad, argnums=(0, 1) if traced else 0)
        return gradient(masked)(x, scale), gradient(ignored)(x_ignored, scale)

    holes = x.at[:, 5:].set(jnp.nan), x.at[1].set(jnp.nan)
    found, expected = gradients(*holes, scale), gradients(*(jnp.nan_to_num(hole) for hole in holes), scale)
    assert_leaves_close(found, expected, rtol=1e-6, atol=1e-7)


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


IGNORED = -100
STRIDE = 3
"""Every third row is ignored."""


def some_ignored(rows: int, cols: int) -> Any:
    target = np.array(classes(rows, cols=cols))
    target[::STRIDE] = IGNORED
    return target


CASES = [
    (None, (9, 1025), "both", "float32", "mean"), (None, (9, 1025), "plain", "bfloat16", "sum"),
    ("row", (7, 33), "both", "bfloat16", "mean"), ("row", (2, 5001), "z_loss", "float32", "sum"),
    ("looped", (5, 577), "both", "float16", "mean"), ("looped", (7, 33), "plain", "float32", "mean"),
    ("split", (2, 5001), "both", "float32", "mean"), ("split", (5, 577), "smoothing", "bfloat16", "sum"),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "shape", "numbers", "dtype", "reduction"), rest_exhaustive(CASES), ids=str)
def test_scalars_are_as_good_as_in_jax(
    strategy: str | None, shape: tuple[int, int], numbers: str, dtype: str, reduction: str
) -> None:
    check_scalar(strategy, shape, numbers, dtype, reduction)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cols", [4096, 8185, 128256])
@pytest.mark.parametrize("strategy", ["cluster", "looped", "split"])
def test_scalars_on_a_gpu(strategy: str, cols: int, dtype: str) -> None:
    check_scalar(strategy, (64, cols), "both", dtype, "mean")


def check_scalar(strategy: str | None, shape: tuple[int, int], numbers: str, dtype: str, reduction: str) -> None:
    """The scalar and its gradient are as good as JAX's own."""
    x, target, more = logits(*shape, dtype=dtype), some_ignored(*shape), NUMBERS[numbers]
    counts = target != IGNORED
    weight = 1 / counts.sum() if reduction == "mean" else 1.0
    forced = {} if strategy is None else {"backend": "pallas", "strategy": strategy}

    def ours(x: Any) -> Any:
        return osj.cross_entropy(x, target, reduction=reduction, ignore_index=IGNORED, **more, **forced)

    def theirs(x: Any) -> Any:
        losses = written_out(x.astype(jnp.float32), target, **more)
        return (jnp.sum(jnp.where(counts, losses, 0)) * weight).astype(x.dtype)

    (y, dx), (their_y, their_dx) = both(jax.value_and_grad(ours), jax.value_and_grad(theirs), x)
    valid = np.maximum(target, 0)
    exact = np.where(counts, exact_loss(x, valid, **more), 0)
    assert_as_good(y, their_y, exact.sum() * weight, exact.sum() * weight)
    dy = np.where(counts, weight, 0.0)
    assert_as_good(dx, their_dx, exact_gradient(x, valid, dy, **more), weight)
    assert not wide(dx)[~counts].any()


def unreduced(x: Any, labels: Any, **more: Any) -> Any:
    return jnp.mean(osj.cross_entropy(x, labels, **more))


def reduced(x: Any, labels: Any, **more: Any) -> Any:
    return osj.cross_entropy(x, labels, reduction="mean", **more)


LABELS = classes(6, cols=40)
WHERE = (np.arange(40) % 3 != np.arange(6)[:, None] % 3) & (np.arange(6) != 2)[:, None]
WHERE |= np.arange(40) == np.asarray(LABELS)[:, None]
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "scale": {"scale": -0.7, "softcap": 3.0, "label_smoothing": 0.1},
    "an array as scale": {"scale": jnp.float32(0.7), "z_loss": 0.1},
    "where": {"where": WHERE, "softcap": 2.0},
    "rows without a class": {"where": WHERE & (np.arange(6) != 2)[:, None]},
    "where and smoothing": {"where": WHERE, "label_smoothing": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_give_the_mean_of_the_losses(name: str) -> None:
    x = logits(6, 40)
    # The scale of row 2 is no finite number if `where` leaves the row nothing.
    x = x.at[2].set(-jnp.inf) if name == "rows without a class" else x

    def with_gradients(f: Any) -> Any:
        return jax.value_and_grad(lambda x: f(x, LABELS, **OPTIONS[name]))

    assert_all_close(both(*map(with_gradients, (reduced, unreduced)), x))


@pytest.mark.parametrize(
    ("name", "strategy"), rest_exhaustive(itertools.product(("scale", "where", "rows without a class"), STRATEGIES))
)
def test_kernels_write_the_gradient_in_the_logits(strategy: str, name: str) -> None:
    x, forced = logits(6, 40), {"backend": "pallas", "strategy": strategy}
    ours = jax.grad(lambda x: reduced(x, LABELS, **OPTIONS[name], **forced))
    assert_all_close(both(ours, jax.grad(lambda x: unreduced(x, LABELS, **OPTIONS[name])), x))


def test_other_axes_labels_and_batches() -> None:
    x, target = logits(2, 40, 3), classes(2, 3, cols=40)
    weights = jax.nn.softmax(logits(2, 40, 3, seed=5), 1)

    def results(f: Any) -> Any:
        def all_of(x: Any) -> Any:
            joined = jax.grad(lambda x: f(x, target[0], axis=(1, 0)))(x)
            batch = jax.vmap(jax.value_and_grad(lambda x, t: f(x, t, axis=0)))(x, target)
            one_label = jax.vmap(jax.grad(lambda x, t: f(x, t, axis=0)), (0, None))(x, target[0])
            of_weights = jax.value_and_grad(lambda x: f(x, weights, axis=1))(x)
            one_row = jax.value_and_grad(lambda x: f(x, target[0, 0]))(x[0, :, 0])
            return joined, batch, one_label, of_weights, one_row

        return all_of

    assert_all_close(both(results(reduced), results(unreduced), x))


LOOPED: list[dict[str, str]] = [{}, {"backend": "pallas", "strategy": "looped"}]


@pytest.mark.parametrize(("softcap", "forced"), rest_exhaustive(itertools.product((None, 3.0), LOOPED)), ids=str)
def test_a_row_that_does_not_count_may_hold_anything(forced: dict[str, str], softcap: float | None) -> None:
    x, target = logits(4, 40), jnp.asarray([3, 7, 7, 1])
    wrong = x.at[1].set(jnp.nan).at[2, 5].set(jnp.inf)

    def loss(x: Any) -> Any:
        return osj.cross_entropy(x, target, reduction="sum", ignore_index=7, softcap=softcap, **forced)

    (y, dx), (expected, gradient) = map(jax.jit(jax.value_and_grad(loss)), (wrong, x))
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(dx, gradient)


def test_rows_that_do_not_count_have_no_loss_without_a_reduction_either() -> None:
    x, target = logits(4, 40).at[1].set(jnp.nan), jnp.asarray([3, 7, 7, 1])
    loss = lambda x, **more: osj.cross_entropy(x, target, ignore_index=7, **more)  # noqa: E731  several uses
    np.testing.assert_array_equal(loss(x)[1:3], 0)
    for more in ({}, {"where": jnp.ones((4, 40), bool), "label_smoothing": 0.1}):
        gradient = np.asarray(jax.jit(jax.grad(lambda x, more=more: jnp.sum(loss(x, **more))))(x))
        assert np.isfinite(gradient).all()
        assert not gradient[1:3].any()


def test_no_row_that_counts() -> None:
    x, target = logits(3, 40), jnp.full(3, 7)
    for reduction, expected in (("mean", np.nan), ("sum", 0.0)):
        y, dx = jax.value_and_grad(osj.cross_entropy)(x, target, reduction=reduction, ignore_index=7)
        np.testing.assert_array_equal(y, expected)
        assert not np.asarray(dx).any()
        for shape in ((0, 40), (0, 0)):
            empty = osj.cross_entropy(jnp.zeros(shape), jnp.zeros(0, int), reduction=reduction)
            np.testing.assert_array_equal(empty, expected)
    assert jnp.isnan(osj.cross_entropy(jnp.zeros((2, 0)), jnp.zeros(2, int), reduction="sum"))
    assert jax.grad(osj.cross_entropy)(jnp.zeros((0, 4)), jnp.zeros(0, int), reduction="mean").shape == (0, 4)


def test_a_wrong_label_makes_the_scalar_nan_and_has_no_gradient() -> None:
    x, target = logits(4, 40), jnp.asarray([3, 40, -1, 1])
    y, dx = jax.value_and_grad(reduced)(x, target)
    assert np.isnan(y)
    assert np.isfinite(dx).all()
    assert [bool(row.any()) for row in np.asarray(dx)] == [True, False, False, True]


def test_an_index_outside_the_dtype_of_the_labels_ignores_nothing() -> None:
    x, target = logits(4, 40), classes(4, cols=40).astype("uint8")
    np.testing.assert_array_equal(reduced(x, target, ignore_index=-100), reduced(x, target))
    np.testing.assert_array_equal(reduced(x, target, ignore_index=np.int64(300)), reduced(x, target))


@pytest.mark.parametrize("forced", [{}, {"backend": "pallas", "strategy": "row"}], ids=str)
def test_a_gradient_scaler_reaches_float16_before_it_rounds(forced: dict[str, Any]) -> None:
    """1 / 300 of a small probability is 0 in float16; times the factor of the scaler it is not.  A row is ignored."""
    x, target = logits(300, 40).clip(-3, 3) / 3 - 9.5 * (jnp.arange(40) > 9), jnp.arange(300) % 10
    x, target = x.astype("float16").at[5].set(jnp.nan), target.at[5].set(-100)
    mean = partial(osj.cross_entropy, reduction="mean", ignore_index=-100)
    # Compiled with the forward pass, XLA may leave out the rounding.
    y, vjp = jax.vjp(lambda x: mean(x, target, **forced), x)
    dx = wide(vjp(jnp.full_like(y, 16384.0))[0])
    assert (dx[5] == 0).all()
    exact, others = two_pass(wide(x)) * (16384.0 / 299), np.arange(300) != 5
    error = (dx - exact)[others, 10:]
    assert np.linalg.norm(error) < 1e-2 * np.linalg.norm(exact[others, 10:])
