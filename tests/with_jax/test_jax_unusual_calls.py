"""Calls that are rare and must not surprise: narrow labels, no jit, a search for NaN, sizes that are symbols."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import onlinesoftmax as osm
import onlinesoftmax.jax as osj
from pairs import rest_exhaustive

NARROW = ("uint8", 256), ("uint8", 300), ("int8", 128), ("int8", 1000), ("int16", 50257), ("uint32", 300)


@pytest.mark.parametrize(
    ("dtype", "cols", "backend"),
    rest_exhaustive(
        ((*one, backend) for one in NARROW for backend in (None, "pallas")), lambda cell: (cell[:2], cell[2])
    ),
)
def test_labels_narrower_than_the_number_of_classes(dtype: str, cols: int, backend: str | None) -> None:
    """JAX takes the number of classes modulo the range of the labels: every row would have another target, or none."""
    x = jax.random.normal(jax.random.key(0), (4, cols))
    labels = jnp.array([0, 7, 100, 127])
    narrow = labels.astype(dtype)

    def calls(x: Any, labels: Any) -> tuple[Any, ...]:
        def mean(x: Any) -> Any:
            return osj.cross_entropy(x, labels, reduction="mean", backend=backend)

        loss = osj.cross_entropy(x, labels, backend=backend)
        return loss, jax.grad(mean)(x), osj.token_logprobs(x, labels, backend=backend).logprob

    found, expected = jax.jit(lambda x, *labels: [calls(x, each) for each in labels])(x, narrow, labels)
    for ours, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, want)
    assert jnp.isfinite(found[0]).all()


def test_without_jit() -> None:
    x, labels = jnp.arange(6.0).reshape(2, 3), jnp.array([0, 2])
    p, change = np.exp(np.arange(3)) / np.exp(np.arange(3)).sum(), np.array([1, 0, 2], np.float32)
    with jax.disable_jit():
        np.testing.assert_allclose(osj.softmax(x), [p, p], rtol=1e-6)
        gradient = jax.grad(lambda x: osj.cross_entropy(x, labels, reduction="mean"))(x)
        second = jax.jvp(jax.grad(osj.logsumexp), (x[0],), (jnp.asarray(change),))[1]
    np.testing.assert_allclose(gradient, (p - np.eye(3)[[0, 2]]) / 2, rtol=1e-6)
    np.testing.assert_allclose(second, p * (change - p @ change), rtol=1e-5, atol=1e-7)


def test_a_scale_of_nan_gives_nan() -> None:
    """XLA on a CPU computes numbers from a product with a constant NaN, those of jax.nn.softmax too."""
    for cols in (7, 700):
        x = np.random.default_rng(0).standard_normal((3, cols)).astype(np.float32)

        @jax.jit
        def results(x: Any) -> Any:
            return (
                osj.log_softmax(x, scale=jnp.nan), osj.logsumexp(x, -1, scale=jnp.nan),
                osj.cross_entropy(x, jnp.arange(3), scale=jnp.nan),
                *osj.token_logprobs(x, jnp.arange(3), scale=jnp.nan), osj.softmax(x, softcap=2.0, scale=jnp.nan),
                jax.grad(lambda x: osj.logsumexp(x, scale=jnp.nan))(x),
            )  # fmt: skip

        for y in (osj.softmax(x, scale=jnp.nan), *results(x)):
            assert np.isnan(y).all()


def test_a_search_for_nan_names_the_operation() -> None:
    labels = jnp.array([1, -100])
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="invalid value"):
            osj.softmax(jnp.array([jnp.inf, 1.0]))
        # The label of a row that counts for nothing is no class.
        loss = osj.cross_entropy(jnp.zeros((2, 3)), labels, ignore_index=-100)
        gradient = jax.grad(lambda x: osj.cross_entropy(x, labels, ignore_index=-100).sum())(jnp.zeros((2, 3)))
    np.testing.assert_allclose(loss, [np.log(3), 0], rtol=1e-6)
    assert not gradient[1].any()


def test_ranks_need_no_promotion() -> None:
    """JAX promotes ranks where it traces and lowers a program, which need not be compiled."""
    x, labels = jnp.ones((3, 6)), jnp.array([0, 1, 2])
    several: tuple[dict[str, Any], ...] = (
        {}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"ignore_index": 1, "reduction": "sum"},
    )  # fmt: skip
    with jax.numpy_rank_promotion("raise"):
        for options in several:
            jax.jit(jax.grad(lambda x, options=options: osj.cross_entropy(x, labels, **options).sum())).lower(x)
        jax.jit(jax.grad(lambda x: osj.token_logprobs(x, labels).logprob.sum())).lower(x)
        jax.jit(jax.hessian(lambda x: osj.cross_entropy(x, labels).sum())).lower(x)


def test_strict_settings_and_a_search_for_leaks_change_no_call() -> None:
    x, seed = jnp.ones((3, 6)), jnp.arange(3)

    def total(x: Any) -> Any:
        sampled = osj.sample(seed, x, top_k=2, top_p=0.9, return_support=2)
        routed = osj.route(x, 2, prob_sums=True, dense=True)
        trained = osj.token_logprobs(x, sampled.token, support=sampled.support)
        checked = osj.verify(1, x[None], jnp.zeros((1, 2), int)).logprobs.sum()
        losses = osj.load_balancing_loss(routed) + osj.router_z_loss(routed) + osj.topk_logprobs(x, 2).lse.sum()
        return losses + trained.logprob.sum() + osj.softmax(x, where=x > 0, backend="pallas").sum() + checked

    ones, target = jnp.ones(5), jnp.array([0, 1, 2])

    def of_head(head: Any) -> Any:
        weight, bias = head
        plain = osj.linear_cross_entropy(
            x, weight, target, linear_bias=bias, label_smoothing=0.1, token_weight=ones[:3]
        )
        weighted = osj.linear_cross_entropy(x, weight, target, linear_bias=bias, weight=ones, reduction="none")
        numbers = osj.linear_token_logprobs(x, weight, target, linear_bias=bias, memory=300)
        loss = osj.linear_token_loss(x, weight, target, lambda y, entropy, lse: entropy - y, linear_bias=bias)
        return plain + weighted.sum() + numbers.logprob.sum() + loss

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.checking_leaks():
        jax.jit(jax.grad(total)).lower(x)
        jax.jit(jax.grad(of_head)).lower((jnp.ones((5, 6)), ones))


COLS = 40
X, LABELS = np.random.default_rng(0).standard_normal((5, COLS)).astype(np.float32), np.arange(5, dtype=np.int32)

CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "softmax": (
        lambda x, t: osm.jax.softmax(x, where=jnp.arange(COLS) < 9),
        lambda x, t: jax.nn.softmax(x, where=jnp.arange(COLS) < 9),
    ),
    "log_softmax of columns": (lambda x, t: osm.jax.log_softmax(x, 0), lambda x, t: jax.nn.log_softmax(x, 0)),
    "logsumexp of all": (lambda x, t: osm.jax.logsumexp(x), lambda x, t: jax.nn.logsumexp(x)),
    "cross_entropy": (
        lambda x, t: osm.jax.cross_entropy(x, t, reduction="mean", ignore_index=1),
        lambda x, t: (
            ((jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, t[:, None], 1)[:, 0]) * (t != 1)).sum() / (t != 1).sum()
        ),
    ),
    "token_logprobs": (
        lambda x, t: osm.jax.token_logprobs(x, t, scale=2.0).entropy,
        lambda x, t: -(jax.nn.softmax(2 * x) * jax.nn.log_softmax(2 * x)).sum(-1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_program_for_any_number_of_rows(name: str) -> None:
    ours, theirs = CALLS[name]
    (rows,) = export.symbolic_shape("rows")
    arguments = jax.ShapeDtypeStruct((rows, COLS), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)

    def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, t: (function(x, t), jax.grad(lambda x: jnp.sum(function(x, t) ** 2))(x))

    program = export.export(jax.jit(with_gradient(ours)), platforms=("cpu", "cuda"))(*arguments)
    assert program.platforms == ("cpu", "cuda")
    for found, want in zip(program.call(X, LABELS), jax.jit(with_gradient(theirs))(X, LABELS), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)


def test_sampling_and_routing_in_a_program_for_two_platforms() -> None:
    """64-bit types inside a function, and the 32-bit number of the platform."""

    def every(x: Any) -> Any:
        routed = osj.route(x, 3, prob_sums=True)
        drafts = osj.verify(7, x, jnp.arange(4))
        sampled = osj.sample(7, x, top_k=5, top_p=0.9, return_support=5)
        listed = osj.topk_logprobs(x, 2, target=jnp.arange(5))
        loss = osj.load_balancing_loss(routed) + osj.router_z_loss(routed)
        return loss, jax.tree.leaves((routed, drafts, sampled, listed))

    with_gradient = jax.jit(jax.value_and_grad(every, has_aux=True))
    program = export.export(with_gradient, platforms=("cpu", "cuda"))(jax.ShapeDtypeStruct(X.shape, X.dtype))
    for found, want in zip(*map(jax.tree.leaves, (program.call(X), with_gradient(X))), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_a_routing_of_any_number_of_tokens_needs_integers_of_64_bits() -> None:
    (rows,) = export.symbolic_shape("rows")
    argument, route = jax.ShapeDtypeStruct((rows, COLS), jnp.float32), jax.jit(lambda x: osj.route(x, 3).indices)
    with pytest.raises(
        NotImplementedError, match=r"route: jax\.export with sizes that are symbols needs jax_enable_x64"
    ):
        export.export(route)(argument)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(export.export(route)(argument).call(X), route(X))


def test_a_forced_kernel_needs_sizes_that_are_known() -> None:
    (rows,) = export.symbolic_shape("rows")
    argument = jax.ShapeDtypeStruct((rows, COLS), jnp.float32)
    for how in ({"backend": "pallas"}, {"strategy": "looped"}):
        with pytest.raises(osm.PlanError, match="softmax: a kernel needs sizes that are known"):
            export.export(jax.jit(lambda x, how=how: osm.jax.softmax(x, **how)), platforms=("cuda",))(argument)
    export.export(jax.jit(lambda x: osm.jax.softmax(x, backend="eager", strategy="row")))(argument)


def test_a_plan_is_logged_when_a_program_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "onlinesoftmax")
    for _ in range(2):
        osj.softmax(jnp.ones((3, 7, 11)), backend="pallas")
    [line] = caplog.messages
    assert line.startswith("softmax of 3 x 7 x 11 float32 on NVIDIA ")
    assert "<Plan pallas/row: " in line
