"""`onlinesoftmax.jax` against `jax.nn`: values, derivatives of every kind, batches and dtypes."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from exact_losses import Call, assert_all_close, assert_close, assert_leaves_close, both

import onlinesoftmax.jax as osj
from pairs import rest_exhaustive

NAMES = ("softmax", "log_softmax", "logsumexp")
SHAPE = (3, 4, 5)
AXES = (-1, 0, 1, (0, 2), (2, -2), None, ())


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


WHERE = {"all": None, "some": booleans(2, (3, 1, 5))}


@pytest.mark.parametrize(
    ("name", "axis", "where"),
    [(name, axis, list(WHERE)[(i + j) % 2]) for i, name in enumerate(NAMES) for j, axis in enumerate(AXES)], ids=str,
)  # fmt: skip
def test_values_are_those_of_jax(name: str, axis: Any, where: str) -> None:
    assert_close(*both(*pair(name, axis, WHERE[where]), numbers(0)))


AXES_WHERE = (-1, "all"), (-1, "some"), ((0, 2), "some")


@pytest.mark.parametrize(
    ("name", "axis", "where"),
    rest_exhaustive(((name, *one) for name in NAMES for one in AXES_WHERE), lambda cell: (cell[0], cell[1:])), ids=str,
)  # fmt: skip
def test_derivatives_and_batches_are_those_of_jax(name: str, axis: Any, where: str) -> None:
    def all_of(f: Call, checkpoint: Call) -> Call:
        def results(x: Any, t: Any, batch: Any) -> Any:
            gradient = jax.grad(loss(f))
            tangent = jax.jvp(f, (x,), (t,))[1]
            # JAX's own tangent of a row without an element is NaN; its gradient is 0, as ours are.
            tangent = jnp.where(jnp.isnan(tangent), 0, tangent) if f is theirs else tangent
            of_batches = jax.vmap(f, 2)(batch), jax.vmap(gradient, 2, 1)(batch)
            return f(x), gradient(x), jax.grad(checkpoint(loss(f)))(x), tangent, *of_batches

        return results

    ours, theirs = pair(name, axis, WHERE[where])
    x, t = numbers(0), numbers(1)
    results = all_of(ours, jax.checkpoint), all_of(theirs, lambda f: f)
    assert_all_close(both(*results, x, t, jnp.stack([x, t, x + t], 2)))


@pytest.mark.parametrize("name", rest_exhaustive(((name,) for name in NAMES), lambda _: ("without jit",)))
def test_derivatives_without_jit(name: str) -> None:
    ours, theirs = pair(name, -1, WHERE["some"])
    x, t = numbers(0), jnp.stack([numbers(1), numbers(2)])
    (y, vjp), (expected, their_vjp) = jax.vjp(ours, x), jax.vjp(theirs, x)
    assert_close(y, expected)
    assert_close(vjp(y)[0], their_vjp(expected)[0])
    assert_close(jax.vmap(ours)(t)[1], theirs(t[1]))


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives(name: str) -> None:
    ours, theirs = (loss(f) for f in pair(name, -1, booleans(3, (1, 5))))

    def every_way(x: Any) -> Any:
        return jax.hessian(ours)(x), jax.jacrev(jax.grad(ours))(x), jax.jacfwd(jax.jacfwd(ours))(x)

    found, expected = both(every_way, jax.hessian(theirs), numbers(4, (2, 5)))
    for hessian in found:
        assert_close(hessian, expected)


@pytest.mark.parametrize(
    ("name", "given"), rest_exhaustive(itertools.product(NAMES, ("scale", "softcap", "bias", "all")))
)
def test_what_is_fused_is_what_is_written_out(name: str, given: str) -> None:
    where = booleans(5, (3, 4, 1))
    x, scale, bias = numbers(6), jnp.float32(0.7), numbers(7, (4, 1))
    if given == "all":
        # A scale for each row.
        scale = jnp.linspace(-1, 2, 15).reshape(3, 1, 5)

    def ours(x: Any, scale: Any, bias: Any) -> Any:
        more = {"scale": {"scale": scale}, "softcap": {"softcap": 5.0}, "bias": {"bias": bias}}
        arguments = more["scale"] | more["softcap"] | more["bias"] | {"where": where} if given == "all" else more[given]
        return getattr(osj, name)(x, axis=1, **arguments)

    def theirs(x: Any, scale: Any, bias: Any) -> Any:
        z = x * scale if given in ("scale", "all") else x
        z = 5 * jnp.tanh(z / 5) if given in ("softcap", "all") else z
        z = z + bias if given in ("bias", "all") else z
        return getattr(jax.nn, name)(z, axis=1, **({"where": where} if given == "all" else {}))

    def derivatives(f: Call) -> Call:
        number = lambda *a: loss(lambda x: f(x, *a[1:]))(a[0])  # noqa: E731  one use
        return lambda *a: (jax.grad(number, (0, 1, 2))(*a), jax.jacfwd(number, (0, 1, 2))(*a))

    def in_batches(x: Any, scale: Any, bias: Any) -> Any:
        scales, biases = jnp.stack([scale, 3 * scale]), jnp.stack([bias, 2 * bias])
        return jax.vmap(ours, (None, None, 0))(x, scale, biases)[1], jax.vmap(ours, (None, 0, None))(x, scales, bias)[1]

    one_by_one = lambda x, scale, bias: (theirs(x, scale, 2 * bias), theirs(x, 3 * scale, bias))  # noqa: E731  one use
    of_ours = lambda *a: (ours(*a), in_batches(*a), derivatives(ours)(*a))  # noqa: E731  one use
    of_theirs = lambda *a: (theirs(*a), one_by_one(*a), derivatives(theirs)(*a))  # noqa: E731  one use
    (*values, derived), (*expected, derivative) = both(of_ours, of_theirs, x, scale, bias)
    assert_all_close((values, expected))
    assert_all_close((derived, derivative), 1e-4)
    if given == "scale":
        # A number is compiled in, and multiplied by in the gradient's kernel.
        fixed = partial(getattr(osj, name), axis=1, scale=-0.7)
        assert_close(*both(jax.grad(loss(fixed)), jax.grad(loss(lambda x: theirs(x, -0.7, bias))), x), 1e-4)


OF_ROWS = ((0, 2), (4, 1)), ((2, 0), (1, 4, 1)), (None, (1, 1)), ((1,), (1, 5))


@pytest.mark.parametrize(
    ("name", "axis", "shape"), rest_exhaustive((name, *one) for name in NAMES for one in OF_ROWS), ids=str
)
def test_a_scale_for_each_row_of_several_axes(name: str, axis: Any, shape: tuple[int, ...]) -> None:
    x, scale = numbers(0), jnp.linspace(-1, 2, math.prod(shape)).reshape(shape)
    ours = lambda x, scale: getattr(osj, name)(x, axis=axis, scale=scale)  # noqa: E731  one use
    theirs = lambda x, scale: getattr(jax.nn, name)(x * scale, axis=axis)  # noqa: E731  one use
    of = lambda f: lambda x, s: (f(x, s), jax.grad(lambda x, s: loss(lambda x: f(x, s))(x), (0, 1))(x, s))  # noqa: E731  two uses
    (y, dx), (expected, derivative) = both(of(ours), of(theirs), x, scale)
    assert_close(y, expected)
    assert_all_close((dx, derivative), 1e-4)


DTYPES = "float16", "bfloat16", "float32", "int32", "uint16", "int8", "float8_e5m2"


@pytest.mark.parametrize(("name", "dtype"), rest_exhaustive(itertools.product(NAMES, DTYPES)))
def test_dtypes(name: str, dtype: str) -> None:
    ours, theirs = pair(name, -1)
    x = jnp.asarray(np.random.default_rng(8).integers(0, 6, (7, 33)), dtype)
    kind = dtype if "float" in dtype else "float32"
    # JAX's own functions round on the way, and wrap unsigned numbers.
    found, exact = both(ours, lambda x: theirs(x.astype(jnp.float32)).astype(kind), x)
    assert found.dtype == kind
    unit = float(jnp.finfo(kind).eps)
    assert_close(found.astype(jnp.float32), exact.astype(jnp.float32), 2 * unit)


@pytest.mark.parametrize("name", NAMES)
def test_float64_and_complex(name: str) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(9).normal(size=(3, 40)))
        ours, theirs = pair(name, -1)
        found, expected = both(ours, theirs, x)
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, expected, rtol=1e-14)
    z = x.astype(jnp.complex64)
    assert_close(*both(lambda z: jnp.abs(ours(z)), lambda z: jnp.abs(theirs(z)), z))


ROWS = {
    "-inf": [-np.inf, -np.inf],
    "+inf": [1.0, np.inf],
    "both": [-np.inf, np.inf],
    "NaN": [np.nan, 1.0],
    "large": [3e38, -3e38],
    "a -inf": [-np.inf, 1.0],
}


@pytest.mark.parametrize("name", NAMES)
def test_special_rows(name: str) -> None:
    ours, theirs = pair(name, -1)
    # A row of numbers lies between any two special rows.
    x = jnp.asarray([values for row in ROWS.values() for values in (row, [0.0, 1.0])], jnp.float32)
    change = jnp.asarray([[1.0, 2.0], [3.0, 5.0]] * len(ROWS))

    def derivatives(f: Call) -> Call:
        def of_ones(x: Any) -> Any:
            y, vjp = jax.vjp(f, x)
            return vjp(jnp.ones_like(y))[0]

        return lambda x: (f(x), of_ones(x), jax.jvp(f, (x,), (change,))[1])

    assert_leaves_close(*both(derivatives(ours), derivatives(theirs), x))


def test_a_masked_nan_counts_for_nothing() -> None:
    x = jnp.asarray([[jnp.nan, 0.0, 0.0], [jnp.nan, 1.0, jnp.nan]])
    where = jnp.asarray([[False, True, True], [False, False, False]])
    np.testing.assert_allclose(osj.softmax(x, where=where), [[0, 0.5, 0.5], [0, 0, 0]])
    gradient = jax.grad(lambda x: osj.logsumexp(x, -1, where=where)[0])(x)
    np.testing.assert_allclose(gradient, [[0, 0.5, 0.5], [0, 0, 0]])


@pytest.mark.parametrize(
    ("name", "shape"), rest_exhaustive(itertools.product(NAMES, ((0, 5), (5, 0), (), (1,)))), ids=str
)
def test_empty_and_small(name: str, shape: tuple[int, ...]) -> None:
    axis = -1 if shape else None
    ours, theirs = pair(name, axis)
    x = jnp.ones(shape)
    assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("index", [jnp.zeros(2, int), jnp.zeros((2, 3), int)], ids=["one", "several"])
def test_the_log_probabilities_of_empty_rows(index: jax.Array) -> None:
    found = osj.token_logprobs(jnp.ones((2, 0)), index)
    assert found.logprob.shape == index.shape
    assert jnp.isnan(found.logprob).all()
    np.testing.assert_array_equal(found.lse, -np.inf)
    np.testing.assert_array_equal(found.entropy, 0.0)


@pytest.mark.parametrize(
    ("options", "how"),
    rest_exhaustive(
        itertools.product(({}, {"softcap": 3.0}, {"bias": jnp.zeros(4)}), ({}, {"backend": "pallas"})),
    ), ids=str,
)  # fmt: skip
def test_the_gradient_of_a_logsumexp_of_only_minus_infinity(options: dict[str, Any], how: dict[str, Any]) -> None:
    x = jnp.stack([jnp.full(4, -jnp.inf), jnp.arange(4.0), jnp.array([-jnp.inf, 0, jnp.nan, 1])])
    # A softcap makes -inf finite, so a bias excludes the row.
    options = (
        options | {"bias": jnp.where(jnp.arange(3) == 0, -jnp.inf, 0)[:, None]} if "softcap" in options else options
    )

    def function(x: jax.Array, fully_masked: str) -> jax.Array:
        return osj.logsumexp(x, -1, fully_masked=fully_masked, **options, **how)

    def results(x: jax.Array) -> Any:
        with_gradients = [jax.vjp(partial(function, fully_masked=each), x) for each in ("zero", "nan")]
        change = jax.jvp(partial(function, fully_masked="zero"), (x,), (jnp.ones_like(x),))[1]
        alone = jax.grad(lambda x: function(x, "nan")[1])(x)[1]
        return [(y, *vjp(jnp.ones(3))) for y, vjp in with_gradients], change, alone

    with_gradients, change, alone = map(partial(jax.tree.map, np.asarray), jax.jit(results)(x))
    for (y, dx), gradient in zip(with_gradients, (0.0, np.nan), strict=True):
        assert y[0] == -np.inf
        np.testing.assert_array_equal(dx[0], np.full(4, gradient))
        np.testing.assert_allclose(dx[1], alone, rtol=1e-6)
        assert np.isnan(dx[2]).all()
    assert change[0] == 0
    for more in ({"b": jnp.ones(4)}, {"return_sign": True}):
        with pytest.raises(ValueError, match="fully_masked='zero'"):
            osj.logsumexp(x, fully_masked="zero", **more)
    with pytest.raises(ValueError, match="'nan' or 'zero'"):
        osj.logsumexp(x, fully_masked="ignore")


def test_logsumexp_as_jax_has_it() -> None:
    x, b = numbers(10), numbers(11)
    for more in ({"keepdims": True}, {"b": b, "return_sign": True}, {"axis": 1, "keepdims": True}):
        assert_all_close((osj.logsumexp(x, **more), jax.nn.logsumexp(x, **more)))
    capped, sign = osj.logsumexp(x, axis=0, b=b, return_sign=True, softcap=2.0)
    expected, _ = jax.nn.logsumexp(2 * jnp.tanh(x / 2), axis=0, b=b, return_sign=True)
    assert_close(capped, expected)
    assert sign.shape == (4, 5)


def test_numbers_of_numpy() -> None:
    x = jnp.ones((2, 3))
    expected = osj.softmax(x, scale=2.0, softcap=3.0)
    for number in (np.int64, np.float32):
        assert_close(osj.softmax(x, scale=number(2), softcap=number(3)), expected)
