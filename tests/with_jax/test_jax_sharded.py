"""Rows of JAX arrays that are sharded over devices: the checks of four_devices*.py, and what one device can show."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fast_xla
import onlinesoftmax.jax as osj
from onlinesoftmax.jax.exchange import whole_target


@pytest.mark.early
@pytest.mark.parametrize("marks", ["not exhaustive", pytest.param("exhaustive", marks=pytest.mark.exhaustive)])
def test_four_devices(marks: str) -> None:
    names = "four_devices.py", "four_devices_head.py", "four_devices_tokens.py"
    fast_xla.check(names, {"JAX_PLATFORMS": "cpu"} | fast_xla.environment(devices=4), marks)


def test_two_simulated_gpus() -> None:
    fast_xla.check(["two_simulated_gpus.py"], {"JAX_PLATFORMS": "cpu"} | fast_xla.environment(devices=2))


@pytest.mark.gpu
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_two_gpus() -> None:
    """The exchanges of XLA between kernels on GPUs, over NCCL."""
    fast_xla.check(["two_gpus.py"], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


X, LABELS = jnp.ones((2, 3)), jnp.zeros(2, jnp.int32)
UNBOUND = "axis_name 'w': no such axis here; call the function inside jax.shard_map over that axis"
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (partial(osj.softmax, axis_name="w"), ValueError, f"softmax: {UNBOUND}"),
    (partial(osj.cross_entropy, labels=LABELS, axis_name="w"), ValueError, f"cross_entropy: {UNBOUND}"),
    (partial(osj.token_logprobs, index=LABELS, axis_name=("v", "v")), ValueError, "names an axis twice"),
    (partial(osj.log_softmax, axis_name=0), TypeError, "axis_name must be a name or a tuple of names, not 0"),
    (partial(osj.log_softmax, axis_name=()), TypeError, r"axis_name must be a name or a tuple of names, not \(\)"),
    (partial(osj.logsumexp, b=X, axis_name="v"), ValueError, "b, return_sign and complex numbers do not work with"),
    (partial(osj.logsumexp, return_sign=True, axis_name="v"), ValueError, "logsumexp: b, return_sign and complex"),
]


@pytest.mark.parametrize(("function", "error", "message"), REFUSED, ids=[r[2][:40] for r in REFUSED])
def test_what_is_refused(function: Any, error: type[Exception], message: str) -> None:
    mesh = jax.make_mesh((1,), ("v",), axis_types=(AxisType.Auto,))
    with pytest.raises(error, match=message):
        jax.shard_map(function, mesh=mesh, in_specs=P(None, "v"), out_specs=P())(X)


def test_targets_of_few_bits_count_the_classes_of_all_devices() -> None:
    """256 classes of eight devices are more than 8 bits can count; one device has 32 of them."""
    x = jnp.arange(512.0).reshape(2, 256) % 11
    target = jnp.asarray([255, 3], jnp.uint8)
    parts = jnp.moveaxis(x.reshape(2, 8, 32), 1, 0)
    found = jax.vmap(partial(osj.cross_entropy, labels=target, axis_name="v"), axis_name="v")(parts)
    assert jnp.allclose(found, osj.cross_entropy(x, target.astype(jnp.int32)))


def test_targets_of_64_bits_without_a_sign_stay_integers() -> None:
    with jax.enable_x64(True):
        x = jnp.arange(12.0).reshape(3, 4) % 5
        target = jnp.asarray([3, 2**64 - 1, 2**53 + 1], jnp.uint64)
        parts = jnp.moveaxis(x.reshape(3, 2, 2), 1, 0)

        def columns(part: Any) -> Any:
            return whole_target(target, part.shape[-1], ("v",))

        found = jax.vmap(columns, axis_name="v")(parts)
        assert found.dtype == jnp.int64
        assert found.tolist() == [[3, -1, -1]] * 2
        loss = jax.vmap(partial(osj.cross_entropy, labels=target, axis_name="v"), axis_name="v")(parts)
        assert jnp.allclose(loss, osj.cross_entropy(x, jnp.asarray([3, -1, -1])), equal_nan=True)


def test_arrays_without_elements() -> None:
    mesh = jax.make_mesh((1,), ("v",), axis_types=(AxisType.Auto,))
    on_mesh = partial(jax.shard_map, mesh=mesh, in_specs=P(None, "v"))
    for shape in ((0, 5), (3, 0)):
        x, target = jnp.ones(shape), jnp.zeros(shape[0], jnp.int32)
        loss = partial(osj.cross_entropy, labels=target, axis_name="v")
        assert on_mesh(loss, out_specs=P())(x).shape == shape[:1]
        assert on_mesh(partial(osj.softmax, axis_name="v"), out_specs=P(None, "v"))(x).shape == shape
