"""The Pallas kernels: each strategy in its interpreter, and lowered for a GPU that is not there."""

from __future__ import annotations

import itertools
import re
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp

import onlinesoftmax.jax as osj
from laws import Float64
from onlinesoftmax import PlanError
from onlinesoftmax import verify as verification
from onlinesoftmax.core.device import known
from onlinesoftmax.core.scores import PLAIN, Scores
from onlinesoftmax.jax import ops as xla
from onlinesoftmax.jax import primitives
from onlinesoftmax.kernels.pallas.cut import PIECE_BYTES, Cut, pieces_of
from onlinesoftmax.kernels.pallas.operands import Tile, tanh

STRATEGIES = ("row", "looped", "split")
FORWARD = ("softmax", "log_softmax", "logsumexp")
DTYPES = ("bfloat16", "float16", "float32")
ON_GPU = jax.default_backend() == "gpu"


def outliers(rows: int, cols: int, dtype: str) -> Any:
    """Normal numbers, one in a hundred times 20."""
    rng = np.random.default_rng(rows * cols)
    return jnp.asarray(rng.normal(size=(rows, cols)) * np.where(rng.random((rows, cols)) < 0.01, 20, 1), dtype)


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


@pytest.mark.parametrize("shape", [(7, 33), (5, 577), (2, 5001)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forward_is_as_good_as_jax(strategy: str, name: str, dtype: str, shape: tuple[int, int]) -> None:
    x = outliers(*shape, dtype)
    ours = getattr(osj, name)(x, axis=-1, backend="pallas", strategy=strategy)
    assert_as_good_as_jax(ours, getattr(jax.nn, name)(x, axis=-1), exact_forward(name, x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_as_good_as_jax(strategy: str, name: str, dtype: str) -> None:
    x = outliers(5, 1025, dtype)
    y, vjp = jax.vjp(lambda x: getattr(osj, name)(x, axis=-1, backend="pallas", strategy=strategy), x)
    dy = gradient_of_output(name, y, dtype)
    (theirs,) = jax.vjp(lambda x: getattr(jax.nn, name)(x, axis=-1), x)[1](dy)
    assert_as_good_as_jax(vjp(dy)[0], theirs, exact_gradient(name, x, dy), dy)


BESIDE = {
    "of a column": (1, 1, 1, 0),
    "of a query": (1, 1, 6, 1),
    "of a batch": (2, 1, 1, 0),
    "of a batch and a query": (2, 1, 6, 0),
    "of all": (2, 3, 6, 0),
    "of heads": (1, 3, 1, 1),
}
"""Shapes of what is read beside x; 0 stands for all of its columns."""


@pytest.mark.parametrize(
    ("beside", "cols"), [*((name, 70) for name in BESIDE), *((name, 519) for name in ("of a query", "of all"))]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_masks_and_biases_are_read_where_they_lie(strategy: str, beside: str, cols: int) -> None:
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(2, 3, 6, cols)) * 3, jnp.float32)
    *outer, last = BESIDE[beside]
    where = jnp.asarray(rng.random((*outer, last or cols)) < 0.7)
    bias = jnp.asarray(rng.normal(size=(*outer, last or cols)), jnp.bfloat16)
    arguments: dict[str, Any] = {"where": where, "bias": bias, "scale": jnp.float32(0.3), "softcap": 4.0}
    for name in FORWARD:
        call = getattr(osj, name)
        ours = call(x, axis=-1, backend="pallas", strategy=strategy, **arguments)
        np.testing.assert_allclose(ours, call(x, axis=-1, backend="eager", **arguments), rtol=1e-5, atol=1e-6)
    ours, theirs = (
        jax.grad(lambda x, b=b, s=s: jnp.sum(osj.logsumexp(x, -1, backend=b, strategy=s, **arguments) ** 2))(x)
        for b, s in (("pallas", strategy), ("eager", None))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_special_rows(strategy: str) -> None:
    x = jnp.asarray([[-np.inf] * 3, [1, np.inf, 0], [np.nan, 0, 0], [-np.inf, 0, 1], [3e38, -3e38, 0]], jnp.float32)
    for name in FORWARD:
        ours = getattr(osj, name)(x, axis=-1, backend="pallas", strategy=strategy)
        np.testing.assert_allclose(ours, getattr(jax.nn, name)(x, axis=-1), rtol=1e-6)


@pytest.mark.parametrize("special", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_special_in_a_ragged_row_stays_there(strategy: str, special: float) -> None:
    """Its first and last elements lie in 16 bytes that hold a neighbour's too."""
    x = np.random.default_rng(4).normal(size=(9, 519)).astype(np.float32)
    x[1], x[3, 0], x[5, -1] = special, special, special
    for name in FORWARD:
        ours = getattr(osj, name)(jnp.asarray(x), axis=-1, backend="pallas", strategy=strategy)
        np.testing.assert_allclose(ours, getattr(jax.nn, name)(x, axis=-1), rtol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_infinite_gradient_of_the_output(strategy: str, dtype: str) -> None:
    cols = 1025 if strategy == "row" else 20000
    x = jnp.zeros((1, cols), dtype)
    dy = x.at[0, 3].set(jnp.inf)
    for name in ("softmax", "log_softmax"):
        ours, theirs = (
            jax.vjp(lambda x, name=name, more=more: getattr(osj, name)(x, axis=-1, **more), x)[1](dy)[0]
            for more in ({"backend": "pallas", "strategy": strategy}, {"backend": "eager"})
        )
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


# Plans, and what they become on a GPU


def shapes(*sizes: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("rows", "cols", "strategy"),
    [
        (65536, 64, "row"),
        (65536, 1024, "row"),
        (16384, 2049, "row"),
        (16384, 4095, "row"),
        (16384, 5001, "cluster"),
        (16384, 4096, "cluster"),
        (4096, 16384, "cluster"),
        (2048, 128256, "cluster"),
        (4096, 50257, "cluster"),
        (1, 1 << 24, "split"),
    ],
)
def test_plans_for_an_h200(rows: int, cols: int, strategy: str) -> None:
    plan = primitives.plan_for("softmax", (shapes(rows, cols),), known("h200"), spec=PLAIN)
    assert (plan.backend, plan.strategy) == ("pallas", strategy)


def test_what_no_kernel_takes_goes_to_xla_or_is_refused() -> None:
    h200 = known("h200")
    wide = (shapes(1, (1 << 31) + 1),)
    assert primitives.plan_for("softmax", wide, h200).backend == "eager"
    assert primitives.plan_for("softmax", (shapes(4, 4, dtype="float8_e5m2"),), h200).backend == "eager"
    with pytest.raises(PlanError, match="a kernel's indices end at"):
        primitives.plan_for("softmax", wide, h200, ("pallas", None))
    with pytest.raises(PlanError, match="does not fit the registers"):
        osj.softmax(jnp.zeros((1, 1 << 17)), backend="pallas", strategy="row")


def lowered(function: Any, *arguments: Any) -> str:
    """The program for CUDA, on a machine that need not have it."""
    program: str = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return program


NEEDS_A_GPU = jax.__version_info__ >= (0, 11) and not ON_GPU


@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 lowers Triton kernels only where there is a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_operation_lowers_for_cuda(strategy: str, dtype: str) -> None:
    x, where = shapes(64, 6, 4096, dtype=dtype), jax.ShapeDtypeStruct((64, 1, 4096), jnp.bool_)
    for name in FORWARD:
        call = getattr(osj, name)
        plain = lowered(lambda x, call=call: call(x, -1, backend="pallas", strategy=strategy), x)
        fused = lowered(
            lambda x, w, call=call: call(x, -1, where=w, softcap=3.0, backend="pallas", strategy=strategy), x, where
        )
        gradient = lowered(
            jax.grad(lambda x, call=call: jnp.sum(call(x, -1, backend="pallas", strategy=strategy) ** 2)), x
        )
        for program in (plain, fused, gradient):
            assert re.search(f"triton.*onlinesoftmax_{strategy}|onlinesoftmax_{strategy}.*triton", program, re.DOTALL)


@pytest.mark.skipif(find_spec("absl") is None, reason="JAX's Mosaic needs absl-py")
@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 asks for a device to lower for")
@pytest.mark.parametrize("cols", [8192, 17408, 50257, 128256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORWARD)
def test_clusters_lower_for_cuda(name: str, dtype: str, cols: int) -> None:
    x = shapes(64, cols, dtype=dtype)
    call = partial(getattr(osj, name), axis=-1, backend="pallas", strategy="cluster")
    for function in (call, jax.grad(lambda x: jnp.sum(call(x) ** 2))):
        assert re.search("mosaic_gpu.*onlinesoftmax_cluster", lowered(function, x), re.DOTALL)


def test_what_a_cluster_refuses() -> None:
    def refused(device: str, *asked: Any, **spec: Any) -> str:
        with pytest.raises(PlanError) as error:
            primitives.plan_for("softmax", asked, known(device), ("pallas", "cluster"), **spec)
        return str(error.value)

    assert "50257 bfloat16 elements are not whole 16 bytes" in refused("h200", shapes(7, 50257))
    assert "needs compute capability 9.0" in refused("a100", shapes(8, 8192)).replace("need ", "needs ")
    assert "take logits as they are" in refused("h200", shapes(8, 8192), spec=Scores(softcap=2.0))
    assert "shorter than a tile of 1024" in refused("h200", shapes(8, 512))
    assert "more than the shared memory of 16 blocks" in refused("h200", shapes(8, 1 << 23))


@pytest.mark.parametrize("vector", [4, 8])
@pytest.mark.parametrize("cols", [16, 17, 31, 519, 1023, 1025])
def test_tiles_of_ragged_rows_hold_each_element_once(cols: int, vector: int) -> None:
    rows, block = 2 * vector, 128
    held = np.zeros(rows * cols, int)
    for row in range(rows):
        tiles = [Tile.of_body(jnp.int32(row), jnp.int32(at), block, cols, vector) for at in range(0, cols, block)]
        for at, inside in ((np.asarray(tile.at), np.asarray(tile.inside)) for tile in tiles):
            # Triton has to see one mask for 16 bytes that begin on 16 bytes.
            assert (at[:, ::vector] % vector == 0).all()
            assert (inside.reshape(-1, vector).all(1) == inside.reshape(-1, vector).any(1)).all()
        for tile in (*tiles, Tile.of_edges(jnp.int32(row), cols, vector)):
            at = np.asarray(tile.at)[np.asarray(tile.inside)]
            np.testing.assert_array_equal(at // cols, row)
            np.testing.assert_array_equal(at % cols, np.asarray(tile.column)[np.asarray(tile.inside)])
            held[at] += 1
    assert (held == 1).all()


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cols", [1024, 4095, 5001, 8191, 8192, 17408, 17409, 50255, 50256, 50257])
def test_slices_count_each_element_once_and_lie_in_the_array(
    cols: int, dtype: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinesoftmax.kernels.pallas.cut.PIECE_BYTES", piece_bytes)
    rows = 16
    plan = primitives.plan_for("softmax", (shapes(rows, cols, dtype=dtype),), known("h200"), ("pallas", "cluster"))
    vector, (length, size) = 16 // jnp.dtype(dtype).itemsize, (plan.block, plan.splits)
    tile = 128 * vector
    pieces = pieces_of(length, tile, jnp.dtype(dtype).itemsize)
    assert (len(pieces) > 1) == (length * jnp.dtype(dtype).itemsize >= 2 * piece_bytes)
    counted, written = np.zeros(rows * cols, int), np.zeros(rows * cols, int)
    for row, rank in itertools.product(range(rows), range(size)):
        cut = Cut.of(row, rank, rows, cols, length, vector)
        first = int(cut.first) + (0 if cut.ragged else row * cols)
        assert first % vector == 0
        assert 0 <= first <= rows * cols - length
        for start, stop in pieces:
            edges, inner = cut.tiles(start, stop, tile, size * length > cols)
            for at in edges:
                begin, end = (int(column) for column in cut.counted(at, tile))
                assert start <= at <= stop - tile
                assert begin >= 0
                counted[first + at + begin : first + at + min(end, tile)] += 1
            counted[first + inner.start * tile : first + inner.stop * tile] += 1
        at, count = cut.whole
        for begin, end in ((at, at + count), *((int(at), int(at) + 128) for at in cut.edges(128))):
            assert 0 <= begin <= end <= length
            assert row * cols <= first + begin < first + end <= row * cols + cols
            written[first + begin : first + end] += 1
    assert (counted == 1).all()
    assert (written >= 1).all()


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
@pytest.mark.parametrize("cols", [8192, 16384, 32768])
def test_many_clusters_at_a_time(cols: int) -> None:
    """Blocks that share a multiprocessor do not keep step: a state that is read too early shows here alone."""
    y, dy = (outliers(4096, cols, "float32") for _ in range(2))
    y = jax.nn.softmax(y)
    ours = primitives.bind("softmax_backward", y, dy, who=("pallas", "cluster"))
    theirs = xla.softmax_backward(y, dy)
    with jax.enable_x64(True):
        exact = xla.softmax_backward(y.astype("float64"), dy.astype("float64"))
        largest, allowed = (float(jnp.abs(dx.astype("float64") - exact).max()) for dx in (ours, theirs))
        unit = np.spacing(np.float32(jnp.abs(exact).max()))
    assert largest <= allowed + unit


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORWARD)
def test_special_rows_of_clusters(name: str) -> None:
    x = outliers(6, 17408, "float32")
    x = x.at[0].set(-jnp.inf).at[1, 9].set(jnp.inf).at[2, 17407].set(jnp.nan).at[3, :17000].set(-jnp.inf)
    call = partial(getattr(osj, name), axis=-1, backend="pallas", strategy="cluster")
    np.testing.assert_allclose(call(x), getattr(jax.nn, name)(x, axis=-1), rtol=2e-5, atol=1e-30)


@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 lowers Triton kernels only where there is a GPU")
def test_one_program_for_two_platforms() -> None:
    traced = jax.jit(osj.softmax).trace(shapes(4096, 1024))
    assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_of_scales(strategy: str) -> None:
    x, scales = outliers(3, 70, "float32"), jnp.asarray([0.5, -2.0], jnp.float32)
    call = jax.vmap(lambda scale: osj.softmax(x, scale=scale, backend="pallas", strategy=strategy))
    for y, scale in zip(call(scales), scales, strict=True):
        np.testing.assert_allclose(y, jax.nn.softmax(scale * x), rtol=2e-5, atol=1e-7)


def test_scores_name_their_arrays() -> None:
    spec = Scores(scale="array", mask=True)
    assert spec.arrays == 2
    assert spec.named((1, 2)) == (1, None, 2)
