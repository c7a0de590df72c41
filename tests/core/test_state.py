"""The table of laws, over every language that has a state; and what is State's own."""

from __future__ import annotations

import importlib.util
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from laws import LAWS, UNREAL_ARRAYS, Algebra, Float64, Law, Native
from onlinesoftmax.core import arrays as array_libraries
from onlinesoftmax.core.accumulators import Argmax, PlainSum
from onlinesoftmax.core.arrays import namespace
from onlinesoftmax.core.state import State
from onlinesoftmax.ops import reference

ALL_DTYPES = ("float16", "bfloat16", "float32", "float64")


class Arrays:
    """The State class over one kind of array.

    Args:
        asarray: Makes the array of this kind from float64 values and the name of a dtype.
        tonumpy: The float64 values again.
    """

    def __init__(
        self,
        name: str,
        asarray: Callable[[Float64, str], Native],
        tonumpy: Callable[[Native], Float64],
        dtypes: Sequence[str] = ALL_DTYPES,
        examples: int = 50,
    ) -> None:
        self.name, self.array, self.numpy, self.dtypes, self.examples = name, asarray, tonumpy, dtypes, examples

    accumulators = ("weighted", "plain", "largest")

    def of(self, x: Native, first: int = 0) -> State:
        # An index is of the library of x.
        index = namespace(x).arange(x, 0) + first
        return State.of(x, weights={"weighted": x}, more={"plain": PlainSum(x), "largest": Argmax(x, index)})

    def identity(self, like: Native) -> State:
        return State.identity(like, weights=("weighted",), more={"plain": PlainSum, "largest": Argmax})

    def merge(self, a: State, b: State) -> State:
        return a.merge(b)

    def merge_all(self, states: Sequence[State]) -> State:
        return State.merge_all(states)

    def parts(self, state: State) -> tuple[float, float]:
        return float(state.m[0]), float(state.l[0])

    def accumulated(self, state: State, name: str) -> float:
        # The mean of a weight is its sum divided by l.
        return float(state.sums[name][0] if name == "weighted" else state.finish(name))

    def logsumexp(self, state: State) -> float:
        return float(state.logsumexp())

    def softmax(self, state: State, x: Native) -> Float64:
        return self.numpy(state.softmax(x))

    def log_softmax(self, state: State, x: Native) -> Float64:
        return self.numpy(state.log_softmax(x))


def numpy_algebra() -> Algebra:
    return Arrays("numpy", lambda v, dtype: v.astype(dtype), np.float64, ("float16", "float32", "float64"))


def torch_algebra() -> Algebra:
    """NumPy's examples test State; those of torch and JAX test the functions of their arrays."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    array = lambda v, dtype: torch.from_numpy(v).to(getattr(torch, dtype))  # noqa: E731  one use
    return Arrays("torch", array, lambda x: x.double().numpy(), examples=15)


def jax_algebra() -> Algebra:
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    # Every new length is a handful of compilations, so there are fewer examples, and NumPy converts.
    array = lambda v, dtype: jnp.asarray(v.astype(jnp.dtype(dtype)))  # noqa: E731  one use
    return Arrays("jax", array, lambda x: np.asarray(x).astype(np.float64), examples=4)


def triton_algebra() -> Algebra:
    pytest.importorskip("triton", reason="triton is not installed")
    import triton_algebra

    return triton_algebra.TritonAlgebra()


ALGEBRAS: dict[str, Callable[[], Algebra]] = {
    "numpy": numpy_algebra,
    "torch": torch_algebra,
    "jax": jax_algebra,
    "triton": triton_algebra,
}


@pytest.fixture(params=ALGEBRAS)
def algebra(request: pytest.FixtureRequest) -> Iterator[Algebra]:
    with _float64(request.param):
        yield ALGEBRAS[request.param]()


def _float64(name: str) -> AbstractContextManager[Any]:
    if name == "jax" and importlib.util.find_spec("jaxlib"):
        import jax

        return jax.enable_x64(True)
    return nullcontext()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_law(law: Law, algebra: Algebra) -> None:
    law.test(algebra)


STATES = [name for name in ALGEBRAS if name != "triton"]


@pytest.fixture(params=STATES)
def arrays(request: pytest.FixtureRequest) -> Iterator[Algebra]:
    with _float64(request.param):
        yield ALGEBRAS[request.param]()


@pytest.mark.parametrize("values", [[1.0, 2.0], [-np.inf, -np.inf], [np.inf, 1.0], [np.nan, 1.0], []])
def test_pickle_round_trips(arrays: Algebra, values: list[float]) -> None:
    state = State.of(arrays.array(np.array(values, np.float64), "float32"))
    again = pickle.loads(pickle.dumps(state))
    assert type(again.m) is type(state.m)
    assert (again.dim, again.m.dtype) == (state.dim, state.m.dtype)
    np.testing.assert_array_equal(arrays.parts(again), arrays.parts(state))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_dtype_of_state_and_result(arrays: Algebra, dtype: str) -> None:
    if dtype not in arrays.dtypes:
        pytest.skip("NumPy has no bfloat16 of its own: test_bfloat16_of_ml_dtypes")
    x = arrays.array(np.ones(3), dtype)
    state = State.of(x)
    wide = arrays.array(np.ones(1), "float64" if dtype == "float64" else "float32").dtype
    assert state.m.dtype == state.l.dtype == state.logsumexp().dtype == State.identity(x).l.dtype == wide
    assert state.softmax(x).dtype == state.log_softmax(x).dtype == x.dtype


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_dim(arrays: Algebra, dim: int) -> None:
    values = np.random.default_rng(0).standard_normal((3, 4, 5))
    x = arrays.array(values, "float64")
    head, tail = (arrays.array(v, "float64") for v in np.split(values, [1], dim))
    state = State.of(head, dim).merge(State.of(tail, dim))
    np.testing.assert_allclose(arrays.numpy(state.softmax(x)), reference.two_pass(values, dim), rtol=1e-14)
    np.testing.assert_allclose(arrays.numpy(state.log_softmax(x)), reference.log_softmax(values, dim), rtol=1e-14)
    np.testing.assert_allclose(arrays.numpy(state.logsumexp()), reference.logsumexp(values, dim), rtol=1e-14)
    assert tuple(state.logsumexp(keepdim=True).shape) == tuple(state.m.shape) == tuple(State.identity(x, dim).m.shape)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_accumulators_along_any_dim(arrays: Algebra, dim: int) -> None:
    values = np.random.default_rng(0).integers(-2, 3, (3, 4, 5)).astype(np.float64)
    values[1, 2, 3:] = np.nan

    def of(start: int, stop: int | None) -> State:
        x = arrays.array(np.moveaxis(np.moveaxis(values, dim, 0)[start:stop], 0, dim), "float32")
        columns = namespace(x).arange(x, dim) + start
        return State.of(x, dim, more={"largest": Argmax(x, columns), "of columns": PlainSum(columns)})

    state = State.merge_all([of(2, None), of(0, 1), of(1, 2)])
    np.testing.assert_array_equal(arrays.numpy(state.finish("largest")), values.argmax(dim))
    assert set(arrays.numpy(state.finish("of columns")).ravel()) == {sum(range(values.shape[dim]))}
    assert state.finish("largest", keepdim=True).shape == state.m.shape
    again = pickle.loads(pickle.dumps(state))
    np.testing.assert_array_equal(arrays.numpy(again.more["largest"].index), arrays.numpy(state.more["largest"].index))
    with pytest.raises(ValueError, match=r"accumulators {'a': 'PlainSum'} and {'a': 'Argmax'} do not match"):
        State.identity(state.m, more={"a": PlainSum}).merge(State.identity(state.m, more={"a": Argmax}))
    with pytest.raises(TypeError, match=r"more\['a'\]\.index must "):
        State.of(state.m, more={"a": Argmax(state.m, "index")})


def test_0d(arrays: Algebra) -> None:
    x = arrays.array(np.full((1,), 3.0), "float32").reshape(())
    state = State.of(x)
    assert tuple(state.logsumexp().shape) == tuple(state.softmax(x).shape) == ()
    assert (float(state.logsumexp()), float(state.softmax(x)), float(state.log_softmax(x))) == (3.0, 1.0, 0.0)
    assert arrays.parts(State.identity(x).merge(state)) == (3.0, 1.0)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_shapes(arrays: Algebra, shape: tuple[int, int]) -> None:
    x = arrays.array(np.zeros(shape), "float32")
    state = State.of(x)
    assert tuple(state.m.shape) == (shape[0], 1)
    assert tuple(state.softmax(x).shape) == tuple(state.log_softmax(x).shape) == shape
    np.testing.assert_array_equal(arrays.numpy(state.logsumexp()), reference.logsumexp(np.zeros(shape)))


def test_bfloat16_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    x = np.arange(4).astype(ml_dtypes.bfloat16)
    state = State.of(x)
    assert (state.m.dtype, state.softmax(x).dtype) == (np.float32, x.dtype)
    assert float(state.softmax(x)[3]) == float(reference.two_pass(x).astype(ml_dtypes.bfloat16)[3])


def test_float64_of_another_byte_order_stays_float64() -> None:
    x = np.array([1.0, 2.0], ">f8")
    state = State.of(x)
    assert state.m.dtype == State.identity(x).m.dtype == np.float64
    np.testing.assert_allclose(state.softmax(x), reference.two_pass(x), rtol=1e-15)


@pytest.mark.parametrize(("shape", "dim"), [((50257, 2), 0), ((1 << 20, 2), 0), ((2, 50257, 3), 1), ((50257, 1), 0)])
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_sums_along_any_dimension_keep_small_terms_beside_a_large_one(
    name: str, shape: tuple[int, ...], dim: int
) -> None:
    arrays = ALGEBRAS[name]()
    torch = pytest.importorskip("torch", reason="torch's own error is the tolerance")
    exact = np.log1p((shape[dim] - 1) * np.exp(np.float64(np.float32(-16.7))))
    ours, theirs = [], []
    for at in (0, 1000, 25_128, -1):
        values = np.full(shape, -16.7)
        values[(*[slice(None)] * dim, at)] = 0
        state = State.of(arrays.array(values, "float32"), dim, {"two": arrays.array(np.full(shape, 2.0), "float32")})
        ours += [arrays.numpy(state.logsumexp()), np.log(arrays.numpy(state.sums["two"]) / 2)]
        theirs += [torch.from_numpy(values).float().logsumexp(dim).double()]
    # The sum is at least 1 in float32, so half a unit of its last place is lost in any order.
    tolerance = max(float(abs(t - exact).max()) for t in theirs) + np.finfo(np.float32).eps
    assert max(float(abs(y - exact).max()) for y in ours) <= tolerance


@pytest.mark.parametrize("shape", [(rows, *more) for rows in (0, 1, 16, 17, 23, 127, 1000) for more in ((3,), (2, 1))])
def test_numpy_sums_every_row_once(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(1, 100, shape).astype(np.float64)
    for dim in range(x.ndim):
        for t in (x, np.asfortranarray(x), x[::-1], np.broadcast_to(x[..., :1], shape)):
            np.testing.assert_array_equal(array_libraries.namespace(t).sum(t, dim), t.sum(dim, keepdims=True))


def test_the_first_exp_on_tensors_has_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL chooses its code in the first call; several threads in that call may run code of low accuracy."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    sizes, exp = [], torch.exp
    monkeypatch.setattr(torch, "exp", lambda x: sizes.append((x.numel(), x.dtype)) or exp(x))
    array_libraries._torch.cache_clear()
    try:
        State.of(torch.randn(4, 1000))
    finally:
        array_libraries._torch.cache_clear()
    assert sizes[:2] == [(1, torch.float32), (1, torch.float64)]
    assert sizes[2][0] == 4000


INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("values", [[1, 2, -200], [-INF, -INF], [INF, 1], [NAN, 1], [3e38, -3e38]])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_no_warning_and_no_error_of_numpys_arithmetic(values: list[float], dtype: str) -> None:
    with np.errstate(all="ignore"):
        x = np.array(values).astype(dtype)
    with np.errstate(all="raise"):
        state = State.of(x, weights={"x": x}).merge(State.of(x[:1], weights={"x": x[:1]}))
        state.logsumexp(), state.softmax(x), state.log_softmax(x), state.mean("x")
        for function in (reference.two_pass, reference.online, reference.log_softmax, reference.logsumexp):
            function(x)
        y = reference.two_pass(x)
        reference.softmax_backward(x, y), reference.log_softmax_backward(x, y)
        reference.naive([0.0, -1000.0])


def test_an_infinite_weight_is_infinite_however_the_row_is_cut(arrays: Algebra) -> None:
    def of(weights: list[float], x: list[float]) -> State:
        return State.of(arrays.array(np.array(x), "float32"), weights={"w": arrays.array(np.array(weights), "float32")})

    # exp(0 - 60) is positive in float32, exp(0 - 120) is 0.
    x, cases = [0.0, 60.0, 120.0], {INF: [INF, 1.0, 1.0], -INF: [-INF, 1.0, 1.0], NAN: [INF, 1.0, -INF]}
    for expected, w in cases.items():
        a, b, c = (of([w[i]], [x[i]]) for i in range(3))
        for state in (a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b), of(w, x)):
            np.testing.assert_array_equal(arrays.numpy(state.sums["w"]), [expected])
    # An element of -inf is absent, whatever its weight; so is a slice of absent elements.
    for w0 in (INF, -INF, NAN, 2.0):
        empty = of([w0], [-INF])
        for state in (empty.merge(of([3.0], [1.0])), of([3.0], [1.0]).merge(empty), of([w0, 3.0], [-INF, 1.0])):
            np.testing.assert_array_equal(arrays.numpy(state.sums["w"]), [3.0])
    # A finite weight adds 0 where its factor underflows.
    np.testing.assert_array_equal(arrays.numpy(of([3e38, 1.0], [0.0, 200.0]).sums["w"]), [1.0])


def test_shapes_that_do_not_belong_together(arrays: Algebra) -> None:
    def zeros(*shape: int, dtype: str = "float32") -> Native:
        return arrays.array(np.zeros(shape), dtype)

    state = State.of(zeros(2, 3))
    for other, message in (
        (zeros(1, 3), r"merge: m has shape \(2, 1\) .* \(1, 1\)"),
        (zeros(3), r"merge: m has shape \(2, 1\) .* \(1,\)"),
        (zeros(4, 2, 3), r"merge: m has shape \(2, 1\) .* \(4, 2, 1\)"),
        (zeros(2, 3, dtype="float64"), r"merge: m .*float32 in one state.*float64 in the other"),
    ):
        with pytest.raises(ValueError, match=message):
            state.merge(State.of(other))
    sums = {"w": State.of(zeros(1, 3)).l}
    with pytest.raises(ValueError, match=r"merge: sums\['w'\] has shape \(2, 1\) .* \(1, 1\)"):
        State.of(zeros(2, 3), weights={"w": zeros(2, 3)}).merge(State(state.m, state.l, -1, sums))
    for shape in ((1, 3), (3,), (3, 2), (2, 2, 3), ()):
        for function in (state.softmax, state.log_softmax):
            with pytest.raises(ValueError, match=rf"softmax: x of shape {re.escape(str(shape))} .* shape \(2, 1\)"):
                function(zeros(*shape))
    assert tuple(state.softmax(zeros(2, 5)).shape) == (2, 5)
    for shape in ((2,), (4, 2, 3), (2, 4)):
        with pytest.raises(ValueError, match=rf"weights\['w'\] of shape {re.escape(str(shape))} .* \(2, 3\) of x"):
            State.of(zeros(2, 3), weights={"w": zeros(*shape)})


@pytest.mark.parametrize("wrong", UNREAL_ARRAYS, ids=lambda x: f"{type(x).__name__} {x.dtype.name}")
def test_arrays_whose_meaning_would_be_lost_are_refused(wrong: Any) -> None:
    x = np.ones(2)
    state = State.of(x)
    message = "masked array" if np.ma.isMaskedArray(wrong) else "matrix" if wrong.ndim == 2 else "dtype"
    for call in (State.of, State.identity, state.softmax, state.log_softmax):
        with pytest.raises(TypeError, match=message):
            call(wrong)
    with pytest.raises(TypeError, match=rf"weights\['w'\] .*{message}"):
        State.of(x, weights={"w": wrong})


def test_weights_of_other_kinds() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, n = torch.ones(2), np.ones(2)
    for array, w in ((x, n), (n, x), (x, 1.0)):
        with pytest.raises(TypeError, match=r"weights\['w'\] must be an array of the library of x"):
            State.of(array, weights={"w": w})
    with pytest.raises(TypeError, match=r"weights\['w'\] must hold real numbers, got dtype torch.complex64"):
        State.of(x, weights={"w": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(TypeError, match="merge: m is Tensor in one state and ndarray in the other"):
        State.of(x).merge(State.of(n))
    with pytest.raises(TypeError, match="softmax: x is ndarray, and the state has Tensor"):
        State.of(x).softmax(n)
    for w in ([1, 2], [True, False], np.array([1, 2], np.int8)):
        assert float(State.of(n, weights={"w": w}).sums["w"][0]) == sum(w)
    assert float(State.of(x, weights={"w": torch.tensor([1, 2])}).sums["w"][0]) == 3


def test_tensors_of_another_layout_or_device_are_named() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, there = torch.ones(2, 3), torch.ones(2, 3, device="meta")
    state, jagged = State.of(x), torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged)
    for wrong, why in (jagged, "is a nested tensor"), (x.to_sparse(), "has the layout"), (x.to_mkldnn(), "has the lay"):
        for call in (State.of, State.identity, state.softmax, state.log_softmax):
            with pytest.raises(RuntimeError, match=f"the array {why}"):
                call(wrong)
        with pytest.raises(RuntimeError, match=rf"more\['s'\].value {why}"):
            State.of(x, more={"s": PlainSum(wrong)})
    with pytest.raises(ValueError, match=r"weights\['w'\] is on meta, and x on cpu"):
        State.of(x, weights={"w": there})
    with pytest.raises(ValueError, match="softmax: x is on meta, and the state on cpu"):
        state.softmax(there)
    with pytest.raises(ValueError, match="merge: m of other is on meta, and that of self on cpu"):
        state.merge(State.of(there))


def test_errors() -> None:
    x = np.zeros((2, 3))
    with pytest.raises(IndexError, match=r"Dimension out of range .*\[-2, 1\], but got 2"):
        State.of(x, 2)
    with pytest.raises(IndexError, match=r"\[-1, 0\], but got 1"):
        State.of(np.float64(0), 1)
    with pytest.raises(TypeError, match="floating-point array, got dtype int64"):
        State.of(np.zeros(3, np.int64))
    with pytest.raises(TypeError, match=r"NumPy, torch or JAX array, got builtins\.list"):
        State.of([1.0])
    for dim in ((0, 1), 1.0, True, None):
        with pytest.raises(TypeError, match="dim must be an int, not"):
            State.of(x, dim)
    assert type(State.of(x, np.int64(1)).dim) is int
    with pytest.raises(TypeError, match="other must be a State, not int"):
        State.of(x).merge(3)
    with pytest.raises(TypeError, match="weights must be a mapping from names to arrays, not list"):
        State.of(x, weights=[x])
    with pytest.raises(ValueError, match="dim -1 and dim -2"):
        State.of(x, 1).merge(State.of(x, 0))
    with pytest.raises(ValueError, match=r"sums \['x'\] and \[\] do not match"):
        State.of(x, weights={"x": x}).merge(State.of(x))
    with pytest.raises(ValueError, match="states is empty"):
        State.merge_all([])
