"""Checks of sampling and routing on four devices; test_jax_sharded.py runs this file."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_losses import assert_leaves_close, logits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import COLS, KERNEL, ROWS, assert_small_exchanges, mesh_of

import fast_xla
import onlinesoftmax.jax as osj

fast_xla.share_context()


def test_sampling_exchanges_numbers_of_rows() -> None:
    """Thresholds, masses and the best tokens of the devices, but no scores."""
    f, seed, x = partial(osj.sample, top_k=40, top_p=0.9, min_p=1e-4), np.arange(ROWS), logits(ROWS, COLS)
    cut = jax.device_put(x, NamedSharding(mesh_of(2, 2), P("d", "v")))
    program = jax.jit(f).lower(seed, cut).compile()
    assert_small_exchanges(program, 4 * ROWS)
    ours, whole = program(seed, cut), f(seed, x)
    assert ours.token.sharding.is_equivalent_to(NamedSharding(mesh_of(2, 2), P("d")), 1)
    for one, other in zip(ours[:5], whole[:5], strict=True):
        np.testing.assert_array_equal(one, other)


def test_routing_of_sharded_tokens_exchanges_numbers_of_experts() -> None:
    def loss(x: Any) -> Any:
        found = osj.route(x, 3, score="sigmoid", bias=jnp.arange(64) / 64, prob_sums=True)
        return osj.load_balancing_loss(found) + found.weights[:, 0].sum() + osj.router_z_loss(found), found

    x, with_gradient = logits(8 * ROWS, 64), jax.jit(jax.value_and_grad(loss, has_aux=True))
    cut = jax.device_put(x, NamedSharding(mesh_of(4, 1), P("d")))
    program = with_gradient.lower(cut).compile()
    assert_small_exchanges(program, 2 * 64)
    ((ours, found), dx), ((wanted, whole), whole_dx) = program(cut), with_gradient(x)
    assert dx.sharding.is_equivalent_to(cut.sharding, 2)
    np.testing.assert_array_equal(found.indices, whole.indices)
    np.testing.assert_array_equal(found.counts, whole.counts)
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)
    np.testing.assert_allclose(dx, whole_dx, rtol=1e-5, atol=1e-8)


def test_rows_and_tokens_along_explicit_axes() -> None:
    """JAX refuses to gather from a sharded axis and to add along one; a gradient lies where its array lies."""
    seed, x, at = np.arange(ROWS), logits(ROWS, 64), np.arange(ROWS)

    def functions(x: Any) -> Any:
        sampled = osj.sample(seed, x, top_k=4, ties="first", return_support=4)
        routed = osj.route(x, 3, prob_sums=True, dense=True)
        listed = osj.topk_logprobs(x, 3, target=at, where=jnp.arange(64) != 5)
        trained = osj.token_logprobs(x, sampled.token, support=sampled.support)
        total = (routed.weights[:, 0] + listed.logprobs[:, 0] + listed.target_logprob + trained.logprob).sum()
        return total + osj.load_balancing_loss(routed), (sampled, routed, listed, trained)

    with_gradient = jax.jit(jax.value_and_grad(functions, has_aux=True))
    whole = with_gradient(x)
    with jax.set_mesh(mesh_of(2, 2, kind=AxisType.Explicit)):
        ours = with_gradient(jax.device_put(x, P("d", "v")))
    assert_leaves_close(ours, whole)
    assert ours[1].sharding.spec == P("d", "v")


@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=pytest.mark.exhaustive), AxisType.Explicit])
def test_arrays_that_are_older_than_the_mesh(kind: AxisType) -> None:
    """Their sharding has no mesh."""
    x = logits(ROWS + (kind == AxisType.Auto), 24)  # other shapes, as JAX keeps programs
    with jax.set_mesh(mesh_of(2, 2, kind=kind)):
        assert_leaves_close(osj.route(x, 3).weights, jax.nn.softmax(jax.lax.top_k(x, 3)[0]))
        assert_leaves_close(jax.jit(partial(osj.softmax, **KERNEL))(x), jax.nn.softmax(x))


def test_gradients_of_the_largest_log_probabilities_inside_shard_map() -> None:
    x, target = logits(ROWS, 64), np.arange(ROWS)

    def total(x: Any, target: Any) -> Any:
        found = osj.topk_logprobs(x, 3, target=target)
        return jnp.sum(found.logprobs[:, 0] + found.target_logprob)

    gradient = jax.grad(total)
    on_devices = jax.shard_map(gradient, mesh=mesh_of(2, 2), in_specs=(P("d"), P("d")), out_specs=P("d"))
    np.testing.assert_allclose(jax.jit(on_devices)(x, target), jax.jit(gradient)(x, target), atol=1e-6)
