"""`route` of JAX arrays gives the experts of torch tensors, and works in JAX's transformations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")
pytest.importorskip("torch", reason="the experts are compared with those of torch tensors")

import jax
import jax.numpy as jnp
import torch

import onlinesoftmax as osm
import onlinesoftmax.jax as osj

BIAS = np.linspace(-1, 1, 12).astype(np.float32)
KINDS: list[dict[str, Any]] = [
    {"renormalize": False, "scale": 0.5},
    {"bias": BIAS / 64, "groups": 3, "group_k": 2, "group_score": 3},
    {"score": "sigmoid", "bias": BIAS, "groups": 4, "group_k": 2, "scale": 2.5},
    {"score": "sqrtsoftplus", "bias": BIAS},
    {"score": "sqrtsoftplus", "groups": 4, "group_k": 2},
    {"order": "topk_first"},
]


def hard_logits(*shape: int) -> np.ndarray:
    """Logits that are often equal or neighbours, with NaN and infinities."""
    rng = np.random.default_rng(9)
    x = rng.normal(0, 4, shape)
    x[..., ::2, :] = 0.5 + 2.0**-22 * rng.integers(-8, 8, x[..., ::2, :].shape)
    x[..., 0, 1:4], x[..., 1, :7], x[..., 2, 5], x[..., 3, :] = np.nan, -np.inf, np.inf, -150
    return x.astype(np.float32)


def by_torch(x: Any, k: int, where: Any = None, **given: Any) -> osm.routing.Routed:
    arrays = {name: torch.from_numpy(t) if isinstance(t, np.ndarray) else t for name, t in given.items()}
    return osm.route(torch.from_numpy(x), k, mask=None if where is None else torch.from_numpy(where), **arrays)


def assert_same(ours: Any, wanted: Any) -> None:
    for name, a, b in zip(wanted._fields, ours, wanted, strict=True):
        if b is not None:
            assert str(a.dtype) == str(b.dtype).removeprefix("torch.")
            check = (
                np.testing.assert_array_equal
                if name in ("indices", "counts")
                else partial(np.testing.assert_allclose, rtol=4e-6, atol=1e-7)
            )
            check(a, b.detach().numpy(), err_msg=name)


@pytest.mark.parametrize("given", KINDS, ids=str)
def test_experts_are_those_of_torch(given: dict[str, Any]) -> None:
    x, where = hard_logits(2, 64, 12), np.ones((2, 64), bool)
    where[1, 9:] = False
    call = partial(osj.route, k=5, where=where, prob_sums=True, dense=True, **given)
    wanted = by_torch(x, 5, where=where, prob_sums=True, dense=True, **given)
    assert_same(jax.jit(call)(x), wanted)


def test_batches_and_replays() -> None:
    x, given = hard_logits(2, 64, 12), KINDS[2]
    wanted = by_torch(x, 5, prob_sums=True, dense=True, **given)
    assert_same(jax.jit(jax.vmap(partial(osj.route, k=5, prob_sums=True, dense=True, **given)))(x), wanted)
    indices = np.where(wanted.indices.numpy() == 3, 2**40 + 3, wanted.indices.numpy())
    replayed = jax.jit(lambda x: osj.route(x, 5, indices=indices, prob_sums=True, **given))(x)
    assert_same(replayed, by_torch(x, 5, indices=indices, prob_sums=True, **given))


def total(library: Any, x: Any, **given: Any) -> Any:
    found = library.route(x, 3, prob_sums=True, dense=True, **given)
    weights = 1.0 + (found.indices * 2) + found.weights
    of_dense = (found.dense * found.dense).sum() * 0.1
    losses = library.load_balancing_loss(found, "sequence") + 0.1 * library.router_z_loss(found)
    return (found.weights * weights).sum() + of_dense + losses


@pytest.mark.parametrize("given", KINDS[::2], ids=str)
def test_gradients_are_those_of_torch(given: dict[str, Any]) -> None:
    x = hard_logits(2, 16, 12)[:, 4:]
    z = torch.from_numpy(x).requires_grad_()
    arrays = {name: torch.from_numpy(t) if isinstance(t, np.ndarray) else t for name, t in given.items()}
    (wanted,) = torch.autograd.grad(total(osm, z, **arrays), z)
    function = partial(total, osj, **given)
    gradient, (_, along) = jax.jit(lambda x: (jax.grad(function)(x), jax.jvp(function, (x,), (x,))))(x)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(along, (wanted * z).sum().item(), rtol=1e-4)


def test_softmax_of_all_logits_does_not_depend_on_their_offset() -> None:
    x = jnp.array([[2.0**24, 2.0**24], [-100.0, -jnp.inf]], jnp.float32)
    assert osj.route(x, 2, renormalize=False).weights.tolist() == [[0.5, 0.5], [1, 0]]
    dx = jax.grad(lambda x: osj.route(x, 2, renormalize=False).weights[:, 0].sum())(x)
    assert dx.tolist() == [[0.25, -0.25], [0, 0]]
    assert jax.grad(lambda x: osj.route(x, 2, prob_sums=True).prob_sums[0])(x[1:]).tolist() == [[0, 0]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_z_loss_of_a_row_of_minus_infinity_has_the_gradient_of_torch(score: str) -> None:
    """The loss is infinite, and the gradient of this row NaN, as with logsumexp; that of its lse alone is 0."""
    x = np.array([[1.0, 2.0, -np.inf], [-np.inf] * 3], np.float32)
    t = torch.from_numpy(x).requires_grad_()
    for ours, theirs in (
        (lambda found: osj.router_z_loss(found), osm.router_z_loss), (lambda found: found.lse.sum(),) * 2,
    ):  # fmt: skip
        (want,) = torch.autograd.grad(theirs(osm.route(t, 1, score=score)), t)
        found = jax.grad(lambda x: ours(osj.route(x, 1, score=score)))(x)  # noqa: B023  # called at once
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_float64_and_bfloat16() -> None:
    x = hard_logits(1, 64, 12)
    given: dict[str, Any] = {"score": "sigmoid", "bias": BIAS, "groups": 4, "group_k": 2}
    route = jax.jit(partial(osj.route, k=4, **given))
    rounded = torch.from_numpy(x).bfloat16().float().numpy()
    assert_same(route(jnp.asarray(x, jnp.bfloat16)), by_torch(rounded, 4, **given))
    with jax.enable_x64(True):
        assert_same(route(x.astype(np.float64)), by_torch(x.astype(np.float64), 4, **given))


def test_devices_with_other_tokens_have_shares_of_the_losses() -> None:
    x = hard_logits(4, 6, 12)[:, 4:]
    whole = osm.route(x, 3, prob_sums=True)

    def on_device(x: Any) -> Any:
        found = osj.route(x, 3, prob_sums=True)
        return osj.load_balancing_loss(found, axis_name="device"), osj.router_z_loss(found, axis_name="device")

    each = jax.jit(jax.vmap(on_device, axis_name="device"))(x)
    for part, loss in zip(each, (osm.load_balancing_loss(whole), osm.router_z_loss(whole)), strict=True):
        np.testing.assert_allclose(part.mean(), loss, rtol=1e-6)


def test_mistakes_name_the_argument() -> None:
    with pytest.raises(TypeError, match="logits must be an array, not Tensor; the functions for torch tensors"):
        osj.route(torch.zeros(2, 4), 1)
    with pytest.raises(ValueError, match="bias must have one number for each expert"):
        osj.route(jnp.zeros((2, 4)), 1, bias=jnp.zeros(3))
    with pytest.raises(RuntimeError, match="where must be boolean"):
        osj.route(jnp.zeros((2, 4)), 1, where=jnp.zeros(2))
    routed = osj.route(jnp.zeros((2, 4)), 1, prob_sums=True)
    for loss in (osj.load_balancing_loss, osj.router_z_loss):
        with pytest.raises(ValueError, match=f"^{loss.__name__}: axis_name 'tokens': no such axis"):
            loss(routed, axis_name="tokens")
    with pytest.raises(TypeError, match="the input is a JAX array"):
        osm.route(jnp.zeros((2, 4)), 1)  # type: ignore[type-var]  # the mistake
