"""The Pallas kernels in their interpreter: every strategy against JAX and float64.

On a machine without a GPU a covering array takes the place of the product of all cases: every strategy meets every
case, and dtypes and operations take turns so that each pair of values of two parameters meets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp

import onlinesoftmax.jax as osj
from laws import Float64
from onlinesoftmax import PlanError
from onlinesoftmax.core.device import known
from onlinesoftmax.core.options import ARRAY, ScoreOptions
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import Choice
from onlinesoftmax.jax import custom_op
from onlinesoftmax.jax.signature import Signature
from onlinesoftmax.kernels import pallas
from onlinesoftmax.kernels.pallas.operands import tanh
from onlinesoftmax.lab import verify as verification
from onlinesoftmax.ops import OPERATIONS, reference
from onlinesoftmax.planner.plan import priced
from onlinesoftmax.planner.strategies import pallas as strategies
from pairs import rest_exhaustive

STRATEGIES = ("row", "looped", "split")
FORWARD = ("softmax", "log_softmax", "logsumexp")
DTYPES = ("bfloat16", "float16", "float32")
ON_GPU = jax.default_backend() == "gpu"


def covering(first: Sequence[Any], second: Sequence[Any], *others: Sequence[Any], met_in: Any = enumerate) -> list[Any]:
    """Every pair of values of the first two parameters, the others taking turns; all combinations on a GPU.

    With three values each, any two of four parameters meet in every pair of values.  Few cells have every value, or
    what `met_in` finds in a cell.
    """
    if ON_GPU:
        return list(itertools.product(first, second, *others))
    cells = (
        (a, b, *(values[(i + k * j) % len(values)] for k, values in enumerate(others, 1)))
        for (i, a), (j, b) in itertools.product(enumerate(first), enumerate(second))
    )
    return rest_exhaustive(cells, met_in)


def outliers(rows: int, cols: int, dtype: str) -> Any:
    """Normal numbers, one in a hundred times 20."""
    rng = np.random.default_rng(rows * cols)
    x = rng.normal(size=(rows, cols)) * np.where(rng.random((rows, cols)) < 0.01, 20, 1)
    return jnp.asarray(x.astype(jnp.dtype(dtype)))


def assert_as_good_as_jax(ours: Any, theirs: Any, exact: Float64, dy: Any = 1.0) -> None:
    """Errors of ours are at most JAX's largest, and a unit in the last place.

    Errors of a gradient are parts of the largest dy of their row, lest the row of the largest dy of all, and JAX's
    luck in it, decide alone.
    """
    assert ours.dtype == theirs.dtype
    wide, other = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64) * 2.0 ** (23 - jnp.finfo(ours.dtype).nmant)
    smallest = float(jnp.finfo(ours.dtype).smallest_normal)
    scale = np.abs(np.asarray(dy, np.float64))
    scale = scale.max(-1, keepdims=True) if scale.ndim == exact.ndim else scale[..., None]
    largest = (np.abs(other - exact) / scale).max()
    allowed = largest * scale + np.maximum(unit, smallest)
    assert (np.abs(wide - exact) <= allowed).all(), np.max(np.abs(wide - exact) / allowed)


def exact_forward(name: str, x: Any) -> Float64:
    return verification.exact_result(name, np.asarray(x, np.float64), -1)


def exact_gradient(name: str, x: Any, dy: Any) -> Float64:
    wide, wide_dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    return verification.exact_gradient(f"{name}_backward", wide, exact_forward(name, x), wide_dy, -1)[0]


def gradient_of_output(name: str, y: Any, dtype: str) -> Any:
    return outliers(*y.shape, 1, dtype)[..., 0] if name == "logsumexp" else outliers(*y.shape, dtype)


def with_kernel(call: Signature, operands: dict[str, Any]) -> dict[str, Any]:
    """The results of a kernel, interpreted where there is no GPU."""
    plan = custom_op.plan_for(call, operands, known("h200"))
    return pallas.run(call.name, operands, plan, not ON_GPU, call.options, outputs=call.outputs)


def gradient(name: str, y: Any, dy: Any, strategy: str | None) -> Any:
    """The gradient of an operation with a saved output y, by a kernel or by the formula."""
    call = Signature(f"{name}_backward", ("y",), choice=Choice("pallas" if strategy else "eager", strategy))
    return custom_op.bind(call, {"x": y, "dy": dy})["y"]


OUTPUTS = {"softmax": ("y", "lse", "entropy"), "log_softmax": ("entropy", "y"), "logsumexp": ("y", "l", "entropy", "m")}


@pytest.mark.parametrize(("strategy", "name", "dtype"), covering(STRATEGIES, FORWARD, DTYPES))
def test_several_outputs(strategy: str, name: str, dtype: str) -> None:
    """One launch writes an output per element and outputs per row, also where a mask leaves a row one element."""
    x, where = outliers(5, 1025, dtype), np.random.default_rng(1).random((5, 1025)) < 0.5
    where[2], where[2, 7] = False, True
    options = ScoreOptions(mask=ARRAY)
    operands = {"x": x, "mask": jnp.asarray(where)}
    found = with_kernel(Signature(name, OUTPUTS[name], options, choice=Choice("pallas", strategy)), operands)
    z = np.where(where, np.asarray(x, np.float64), -np.inf)
    lse, p = reference.logsumexp(z), reference.two_pass(z)
    log_p = np.where(where, z - lse[:, None], 0)
    exact = {"lse": lse, "m": z.max(-1), "l": np.exp(lse - z.max(-1)), "entropy": -(p * log_p).sum(-1)}
    exact["y"] = {"softmax": p, "log_softmax": z - lse[:, None], "logsumexp": lse}[name]
    for output, y in found.items():
        assert y.dtype == (dtype if output == "y" else "float32")
        tolerance = float(jnp.finfo(y.dtype).eps) * 2
        # The entropy is a difference of numbers as large as the largest score.
        largest = np.abs(exact["m"]).max() if output == "entropy" else 0
        np.testing.assert_allclose(
            np.asarray(y, np.float64), exact[output], rtol=max(tolerance, 2e-6), atol=max(2e-6 * largest, 1e-7)
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_outputs_of_special_rows(strategy: str) -> None:
    x = jnp.asarray([[-np.inf] * 3, [1, np.inf, 0], [-np.inf, 5, -np.inf]], jnp.float32)
    call = Signature("softmax", ("lse", "entropy", "m"), choice=Choice("pallas", strategy))
    found = with_kernel(call, {"x": x})
    np.testing.assert_array_equal(found["lse"], [-np.inf, np.inf, 5])
    np.testing.assert_array_equal(found["entropy"], [np.nan, np.nan, 0])
    assert np.isfinite(found["m"]).all()


BESIDE = {
    "of a column": (1, 1, 1, 0),
    "of a query": (1, 1, 6, 1),
    "of a batch": (2, 1, 1, 0),
    "of a batch and a query": (2, 1, 6, 0),
    "of all": (2, 3, 6, 0),
    "of heads": (1, 3, 1, 1),
}
"""Shapes of arrays beside an x of (2, 3, 6, cols); 0 stands for cols."""

PLACES = [*((name, 70) for name in BESIDE), *((name, 519) for name in ("of a query", "of all"))]


def with_options(name: str, backend: str, strategy: str | None) -> Callable[..., Any]:
    """A function of x, where and bias: the result, and the gradient in x where its kernel reads the options."""
    scale = jnp.linspace(-0.5, 0.6, 12).reshape(2, 1, 6, 1)
    forced = {"backend": backend, "strategy": strategy, "scale": scale, "softcap": 4.0}

    def result(x: Any, where: Any, bias: Any) -> Any:
        y = getattr(osj, name)(x, axis=-1, where=where, bias=bias, **forced)
        return jnp.sum(jnp.where(jnp.isfinite(y), y, 0) ** 2), y

    reads_options = OPERATIONS[f"{name}_backward"].scores
    return jax.jit(jax.value_and_grad(result, has_aux=True) if reads_options else result)


@cache
def by_xla(name: str) -> Callable[..., Any]:
    """The eager function, which is compiled once for each shape."""
    return with_options(name, "eager", None)


@pytest.mark.parametrize(
    ("strategy", "place", "name"),
    covering(STRATEGIES, PLACES, FORWARD, met_in=lambda cell: (cell[0], *cell[1], cell[2])), ids=str,
)  # fmt: skip
def test_masks_and_biases_are_read_where_they_lie(strategy: str, place: tuple[str, int], name: str) -> None:
    beside, cols = place
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(2, 3, 6, cols)) * 3, jnp.float32)
    *outer, last = BESIDE[beside]
    where = jnp.asarray(rng.random((*outer, last or cols)) < 0.7)
    bias = jnp.asarray(rng.normal(size=(*outer, last or cols)), jnp.bfloat16)
    found, expected = (f(x, where, bias) for f in (with_options(name, "pallas", strategy), by_xla(name)))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4 if ours.ndim == 0 else 1e-5, atol=1e-5)


@pytest.mark.parametrize(("strategy", "name"), covering(STRATEGIES, FORWARD))
def test_special_values_of_an_unaligned_row_stay_there(strategy: str, name: str) -> None:
    """The first and the last elements of a row lie in 16 bytes that hold a neighbour's elements too."""
    x = np.random.default_rng(4).normal(size=(19, 519)).astype(np.float32)
    for i, special in enumerate((-np.inf, np.inf, np.nan)):
        x[6 * i + 1], x[6 * i + 3, 0], x[6 * i + 5, -1] = special, special, special
    ours = getattr(osj, name)(jnp.asarray(x), axis=-1, backend="pallas", strategy=strategy)
    np.testing.assert_allclose(ours, getattr(jax.nn, name)(x, axis=-1), rtol=2e-5)


@pytest.mark.parametrize(
    ("strategy", "name", "dtype"), covering(STRATEGIES, ("softmax", "log_softmax"), ("bfloat16", "float32"))
)
def test_an_infinite_gradient_of_the_output(strategy: str, name: str, dtype: str) -> None:
    y = getattr(jax.nn, name)(jnp.zeros((1, 1025 if strategy == "row" else 20000), dtype))
    dy = jnp.zeros_like(y).at[0, 3].set(jnp.inf)
    ours, theirs = gradient(name, y, dy, strategy), gradient(name, y, dy, None)
    np.testing.assert_array_equal(ours.astype("float32"), theirs.astype("float32"))


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_beside_a_forced_kernel(name: str) -> None:
    x, t = outliers(3, 70, "float32"), outliers(3, 70, "float32")[::-1]
    ours, theirs = (
        jax.jvp(lambda x, more=more: getattr(osj, name)(x, axis=-1, **more), (x,), (t,))[1]
        for more in ({"backend": "pallas"}, {})
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(ON_GPU, reason="on a GPU they run")
@pytest.mark.parametrize("name", FORWARD)
def test_kernels_are_not_interpreted_unasked(name: str) -> None:
    x = outliers(3, 64, "float32")
    with pytest.raises(PlanError, match="Pallas kernels need an NVIDIA GPU"):
        getattr(osj, name)(x, axis=-1, strategy="looped")
    with pytest.raises(PlanError, match="Mosaic is not interpreted"):
        getattr(osj, name)(x, axis=-1, backend="pallas", strategy="cluster")


def test_tanh_is_right_to_a_few_units() -> None:
    x = np.concatenate([np.linspace(-10, 10, 4001), [-100, 100, 1e-20, 0]]).astype(np.float32)
    exact = np.tanh(x.astype(np.float64))
    assert (
        np.abs(np.asarray(tanh(jnp.asarray(x)), np.float64) - exact) <= 3 * np.spacing(np.abs(exact).astype(np.float32))
    ).all()


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [1024, 4095, 8192, 17408, 17409, 32768, 50256, 50257, 128255, 128256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORWARD)
def test_clusters_are_as_good_as_jax(name: str, dtype: str, cols: int) -> None:
    # Outliers leave a row one or two numbers whose roundings decide: in few rows, whose are larger is chance.
    x = outliers(64, cols, dtype)
    call = partial(getattr(osj, name), axis=-1, backend="pallas", strategy="cluster")
    y, vjp = jax.vjp(call, x)
    theirs, their_vjp = jax.vjp(partial(getattr(jax.nn, name), axis=-1), x)
    assert_as_good_as_jax(y, theirs, exact_forward(name, x))
    dy = gradient_of_output(name, y, dtype)
    assert_as_good_as_jax(vjp(dy)[0], their_vjp(dy)[0], exact_gradient(name, x, dy), dy)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [8192, 17409, 50257])
@pytest.mark.parametrize("name", FORWARD)
def test_several_outputs_of_clusters(name: str, cols: int) -> None:
    x = outliers(64, cols, "float32")
    found = with_kernel(Signature(name, OUTPUTS[name], choice=Choice("pallas", "cluster")), {"x": x})
    z = np.asarray(x, np.float64)
    p = reference.two_pass(z)
    np.testing.assert_allclose(found["entropy"], -(p * reference.log_softmax(z)).sum(-1), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found["y"], exact_forward(name, x), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [8192, 16384, 32768])
def test_many_clusters_at_a_time(cols: int) -> None:
    """Blocks that share a multiprocessor do not keep step: a state that is read too early shows here alone."""
    y, dy = (outliers(4096, cols, "float32") for _ in range(2))
    y = jax.nn.softmax(y)
    ours, theirs = gradient("softmax", y, dy, "cluster"), gradient("softmax", y, dy, None)
    with jax.enable_x64(True):
        exact = gradient("softmax", y.astype("float64"), dy.astype("float64"), None)
        largest, allowed = (float(jnp.abs(dx.astype("float64") - exact).max()) for dx in (ours, theirs))
        unit = np.spacing(np.float32(jnp.abs(exact).max()))
    assert largest <= allowed + unit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", range(3))
def test_launches_in_close_succession(rank: int, dtype: str) -> None:
    """A block that ends before its peers have read its state shows only while other launches begin and end."""
    x = outliers(512, 128256, dtype)
    problem = Problem("softmax", *x.shape, dtype)
    proposal = strategies.cluster(problem, known("h200"))[rank]
    assert not isinstance(proposal, str)
    run = jax.jit(partial(pallas.run, "softmax", plan=priced(proposal, problem, known("h200")), interpret=False))
    first, *others = [run({"x": x})["y"] for _ in range(40)]
    assert all(bool(jnp.array_equal(first, y)) for y in others)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORWARD)
def test_special_rows_of_clusters(name: str) -> None:
    x = outliers(6, 17408, "float32")
    x = x.at[0].set(-jnp.inf).at[1, 9].set(jnp.inf).at[2, 17407].set(jnp.nan).at[3, :17000].set(-jnp.inf)
    call = partial(getattr(osj, name), axis=-1, backend="pallas", strategy="cluster")
    np.testing.assert_allclose(call(x), getattr(jax.nn, name)(x, axis=-1), rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_of_scales(strategy: str) -> None:
    x, scales = outliers(3, 70, "float32"), jnp.asarray([0.5, -2.0], jnp.float32)
    call = jax.vmap(lambda scale: osj.softmax(x, scale=scale, backend="pallas", strategy=strategy))
    for y, scale in zip(call(scales), scales, strict=True):
        np.testing.assert_allclose(y, jax.nn.softmax(scale * x), rtol=2e-5, atol=1e-7)


def test_options_name_their_arrays() -> None:
    options = ScoreOptions(scale=ARRAY, softcap=2.0, mask=ARRAY)
    assert options.arrays == ("scale", "mask")
    assert options.filled([1, 2]) == ScoreOptions(1, 2.0, None, 2)
    assert hash(options) == hash(ScoreOptions(scale=ARRAY, softcap=2.0, mask=ARRAY))
