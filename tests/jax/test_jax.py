"""`onlinesoftmax.jax` against `jax.nn`: values, derivatives of every kind, batches, dtypes, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp

import onlinesoftmax
import onlinesoftmax.jax as osj
from onlinesoftmax import PlanError

NAMES = ("softmax", "log_softmax", "logsumexp")
SHAPE = (3, 4, 5)
AXES = (-1, 0, 1, (0, 2), (2, -2), None, ())
Call = Callable[..., Any]


def numbers(seed: int, shape: tuple[int, ...] = SHAPE) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 3, jnp.float32)


def booleans(seed: int, shape: tuple[int, ...]) -> Any:
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.6)


def pair(name: str, axis: Any, where: Any = None, **more: Any) -> tuple[Call, Call]:
    """Ours and JAX's."""
    ours, theirs = getattr(osj, name), getattr(jax.nn, name)
    return partial(ours, axis=axis, where=where, **more), partial(theirs, axis=axis, where=where)


def loss(f: Call) -> Call:
    """A number that every output counts for, but for the infinite, each in its own way."""

    def number(x: Any) -> Any:
        y = f(x)
        return jnp.sum(jnp.where(jnp.isfinite(y), jnp.sin(y + jnp.arange(y.size).reshape(y.shape) % 3), 0))

    return number


def assert_close(a: Any, b: Any, tolerance: float = 2e-5) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=2e-6)


WHERE = {"all": None, "some": booleans(2, (3, 1, 5))}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_jax(name: str, axis: Any, where: str) -> None:
    ours, theirs = pair(name, axis, WHERE[where])
    assert_close(ours(numbers(0)), theirs(numbers(0)))


@pytest.mark.parametrize(("axis", "where"), [(-1, "all"), (-1, "some"), ((0, 2), "some")], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_derivatives_and_batches_are_those_of_jax(name: str, axis: Any, where: str) -> None:
    ours, theirs = pair(name, axis, WHERE[where])
    x, t = numbers(0), numbers(1)
    assert_close(jax.jit(ours)(x), theirs(x))
    assert_close(jax.grad(loss(ours))(x), jax.grad(loss(theirs))(x))
    assert_close(jax.grad(jax.checkpoint(loss(ours)))(x), jax.grad(loss(theirs))(x))
    tangent, expected = jax.jvp(ours, (x,), (t,))[1], jax.jvp(theirs, (x,), (t,))[1]
    # JAX's own tangent of a row without an element is NaN; its gradient is 0, as ours are.
    assert_close(tangent, jnp.where(jnp.isnan(expected), 0, expected))
    batch = jnp.stack([x, t, x + t], 2)
    assert_close(jax.vmap(ours, 2)(batch), jax.vmap(theirs, 2)(batch))
    assert_close(jax.vmap(jax.grad(loss(ours)), 2, 1)(batch), jax.vmap(jax.grad(loss(theirs)), 2, 1)(batch))


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives(name: str) -> None:
    ours, theirs = pair(name, -1, booleans(3, (1, 5)))
    x = numbers(4, (2, 5))
    expected = jax.hessian(loss(theirs))(x)
    assert_close(jax.hessian(loss(ours))(x), expected)
    assert_close(jax.jacrev(jax.grad(loss(ours)))(x), expected)
    assert_close(jax.jacfwd(jax.jacfwd(loss(ours)))(x), expected)


@pytest.mark.parametrize("given", ["scale", "softcap", "bias", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_fused_is_what_is_written_out(name: str, given: str) -> None:
    where = booleans(5, (3, 4, 1))
    x, scale, bias = numbers(6), jnp.float32(0.7), numbers(7, (4, 1))

    def ours(x: Any, scale: Any, bias: Any) -> Any:
        more = {"scale": {"scale": scale}, "softcap": {"softcap": 5.0}, "bias": {"bias": bias}}
        arguments = more["scale"] | more["softcap"] | more["bias"] | {"where": where} if given == "all" else more[given]
        return getattr(osj, name)(x, axis=1, **arguments)

    def theirs(x: Any, scale: Any, bias: Any) -> Any:
        z = x * scale if given in ("scale", "all") else x
        z = 5 * jnp.tanh(z / 5) if given in ("softcap", "all") else z
        z = z + bias if given in ("bias", "all") else z
        return getattr(jax.nn, name)(z, axis=1, **({"where": where} if given == "all" else {}))

    assert_close(ours(x, scale, bias), theirs(x, scale, bias))
    for derivative in (jax.grad, jax.jacfwd):
        of_ours, of_theirs = (
            derivative(lambda *a, f=f: loss(lambda x: f(x, *a[1:]))(a[0]), (0, 1, 2))(x, scale, bias)
            for f in (ours, theirs)
        )
        for a, b in zip(of_ours, of_theirs, strict=True):
            assert_close(a, b, 1e-4)
    batched = jax.vmap(ours, (None, None, 0))(x, scale, jnp.stack([bias, 2 * bias]))
    assert_close(batched[1], ours(x, scale, 2 * bias))
    scales = jnp.stack([scale, 3 * scale])
    assert_close(jax.vmap(ours, (None, 0, None))(x, scales, bias)[1], ours(x, 3 * scale, bias))
    if given == "scale":
        # A number is compiled in, and folded into the gradient's kernel.
        fixed = partial(getattr(osj, name), axis=1, scale=-0.7)
        assert_close(jax.grad(loss(fixed))(x), jax.grad(loss(lambda x: theirs(x, -0.7, bias)))(x), 1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "uint16", "int8", "float8_e5m2"])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes(name: str, dtype: str) -> None:
    ours, theirs = pair(name, -1)
    x = jnp.asarray(np.random.default_rng(8).integers(0, 6, (7, 33)), dtype)
    kind = dtype if "float" in dtype else "float32"
    assert ours(x).dtype == kind
    # JAX's own would round on the way, and wraps what is unsigned.
    exact = theirs(x.astype(jnp.float32)).astype(kind)
    unit = float(jnp.finfo(kind).eps)
    assert_close(ours(x).astype(jnp.float32), exact.astype(jnp.float32), 2 * unit)


@pytest.mark.parametrize("name", NAMES)
def test_float64_and_complex(name: str) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(9).normal(size=(3, 40)))
        ours, theirs = pair(name, -1)
        assert ours(x).dtype == jnp.float64
        np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-14)
    ours, theirs = pair(name, -1)
    assert_close(jnp.abs(ours(x.astype(jnp.complex64))), jnp.abs(theirs(x.astype(jnp.complex64))))


ROWS = {
    "-inf": [-np.inf, -np.inf],
    "+inf": [1.0, np.inf],
    "both": [-np.inf, np.inf],
    "NaN": [np.nan, 1.0],
    "large": [3e38, -3e38],
    "a -inf": [-np.inf, 1.0],
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", NAMES)
def test_special_rows(name: str, row: str) -> None:
    ours, theirs = pair(name, -1)
    x = jnp.asarray([ROWS[row], [0.0, 1.0]], jnp.float32)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-6)
    (_, our_vjp), (_, their_vjp) = jax.vjp(ours, x), jax.vjp(theirs, x)
    change, dy = jnp.asarray([[1.0, 2.0], [3.0, 5.0]]), jnp.ones_like(ours(x))
    np.testing.assert_allclose(our_vjp(dy)[0], their_vjp(dy)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jvp(ours, (x,), (change,))[1], jax.jvp(theirs, (x,), (change,))[1], rtol=1e-5)


def test_a_masked_nan_counts_for_nothing() -> None:
    x = jnp.asarray([[jnp.nan, 0.0, 0.0], [jnp.nan, 1.0, jnp.nan]])
    where = jnp.asarray([[False, True, True], [False, False, False]])
    np.testing.assert_allclose(osj.softmax(x, where=where), [[0, 0.5, 0.5], [0, 0, 0]])
    gradient = jax.grad(lambda x: osj.logsumexp(x, -1, where=where)[0])(x)
    np.testing.assert_allclose(gradient, [[0, 0.5, 0.5], [0, 0, 0]])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (), (1,)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_empty_and_small(name: str, shape: tuple[int, ...]) -> None:
    axis = -1 if shape else None
    ours, theirs = pair(name, axis)
    x = jnp.ones(shape)
    assert_close(ours(x), theirs(x))


def test_logsumexp_as_jax_has_it() -> None:
    x, b = numbers(10), numbers(11)
    for more in ({"keepdims": True}, {"b": b, "return_sign": True}, {"axis": 1, "keepdims": True}):
        for a, e in zip(
            jax.tree.leaves(osj.logsumexp(x, **more)), jax.tree.leaves(jax.nn.logsumexp(x, **more)), strict=True
        ):
            assert_close(a, e)
    capped, sign = osj.logsumexp(x, axis=0, b=b, return_sign=True, softcap=2.0)
    expected, _ = jax.nn.logsumexp(2 * jnp.tanh(x / 2), axis=0, b=b, return_sign=True)
    assert_close(capped, expected)
    assert sign.shape == (4, 5)


X = jnp.ones((2, 3))
REFUSED = [
    ({"x": [1.0, 2.0]}, TypeError, "x must be an array, not list"),
    ({"x": jnp.ones(3, bool)}, TypeError, "x must be a number array, not bool"),
    ({"axis": 2}, ValueError, "axis 2 is out of range for an array with 2 axes"),
    ({"axis": (0, -2)}, ValueError, "names an axis twice"),
    ({"axis": 1.0}, TypeError, "axis must be an int"),
    ({"where": jnp.ones((2, 3))}, ValueError, "where must be boolean"),
    ({"where": jnp.ones((4, 3), bool)}, ValueError, r"where of shape \(4, 3\) does not broadcast to x's \(2, 3\)"),
    ({"bias": jnp.ones((2, 2, 3))}, ValueError, "bias of shape"),
    ({"bias": jnp.ones(3, int)}, TypeError, "bias must be floating point"),
    ({"scale": "2"}, TypeError, "scale must be a number"),
    ({"scale": jnp.ones(2)}, TypeError, "scale must be a number"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive"),
    ({"softcap": "1"}, TypeError, "softcap must be a number"),
    ({"backend": "triton"}, PlanError, "no backend='triton' with strategy=None for JAX; there are eager/row"),
    ({"backend": "eager", "strategy": "split"}, PlanError, "no backend='eager' with strategy='split'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=[r[2] for r in REFUSED])
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        osj.softmax(**({"x": X} | arguments))
    assert str(caught.value).startswith("softmax: ")


def test_no_torch_and_four_devices() -> None:
    """In a process of its own: rows stay where they are, and torch is never imported."""
    code = """
import sys, jax, jax.numpy as jnp, onlinesoftmax as osm
from jax.sharding import PartitionSpec as P
x = jnp.arange(32.0).reshape(8, 4) % 7
f = lambda x: osm.jax.softmax(x, where=x > 0)
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
sharded = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
assert jnp.allclose(sharded(x), f(x)) and "all-gather" not in sharded.lower(x).compile().as_text()
g = jax.jit(jax.grad(lambda x: jnp.sum(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x) ** 2)))
assert jnp.allclose(g(x), jax.grad(lambda x: jnp.sum(f(x) ** 2))(x), atol=1e-6)
assert osm.jax.softmax(x, backend="pallas").shape == (8, 4)

def kernel(name):
    return lambda x, b: getattr(osm.jax, name)(x, axis=-1, bias=b, softcap=4.0, backend="pallas", strategy="looped")
mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
x, bias = jnp.arange(8 * 6 * 10.0).reshape(8, 6, 10) % 7, jnp.arange(60.0).reshape(6, 10) % 7
for name in ("softmax", "log_softmax", "logsumexp"):
    gradient = jax.grad(lambda *xb: jnp.sum(kernel(name)(*xb) ** 2), (0, 1))
    for f, spec in ((kernel(name), P("a", "b")), (kernel(name), P("b", None, "a")), (gradient, P("a", "b"))):
        cut = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        program = jax.jit(f).lower(cut, bias).compile()
        for ours, whole in zip(jax.tree.leaves(program(cut, bias)), jax.tree.leaves(f(x, bias))):
            assert jnp.allclose(ours, whole, rtol=1e-5, atol=1e-5), (name, spec)
        # Only what is cut along its rows is brought together.
        assert f is gradient or ("all-gather" in program.as_text()) == (len(spec) == 3), (name, spec)
assert "torch" not in sys.modules
print("fine")
"""
    source = str(Path(onlinesoftmax.__file__).parents[1])
    environment = {
        "PYTHONPATH": source,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.stdout == "fine\n", result.stderr
