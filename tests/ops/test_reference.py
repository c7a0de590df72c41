"""The executable specification: three softmaxes that agree, gradients that are derivatives, edge cases of PyTorch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws import outliers
from loss_formula import expected_loss, expected_tokens
from onlinesoftmax.core.arrays import namespace
from onlinesoftmax.ops import FORWARD, OPERATIONS
from onlinesoftmax.ops import reference as ref
from onlinesoftmax.ops.reference import evaluate

INF, NAN = np.inf, np.nan
EPS = np.finfo(np.float64).eps
EDGES = [
    [-INF, -INF],
    [INF, 1.0],
    [INF, INF, -INF],
    [INF, -INF],
    [-INF, 1.0, 2.0],
    [NAN, 1.0],
    [NAN, INF],
    [NAN, -INF],
    [1e308, -1e308],
    [5.0],
]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (0, 3), (3, 0), (2, 0, 3)]


def every_axis() -> Iterator[tuple[tuple[int, ...], int]]:
    for shape in SHAPES:
        ndim = max(len(shape), 1)
        yield from ((shape, axis) for axis in range(-ndim, ndim))


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def normal(shape: tuple[int, ...], scale: float = 5.0) -> np.ndarray[Any, Any]:
    return np.asarray(np.random.default_rng(0).standard_normal(shape)) * scale


def test_naive_overflows_and_says_so() -> None:
    x = [1000.0, 999.0]
    with pytest.warns(RuntimeWarning, match="overflow"), pytest.warns(RuntimeWarning, match="invalid value"):
        assert np.isnan(ref.naive(x)).all()
    np.testing.assert_allclose(ref.two_pass(x), [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], rtol=4 * EPS)
    np.testing.assert_allclose(ref.online(x), ref.two_pass(x), rtol=4 * EPS)


def test_naive_underflows_and_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="invalid value"):
        assert np.isnan(ref.naive([-1000.0, -1000.0])).all()
    np.testing.assert_array_equal(ref.two_pass([-1000.0, -1000.0]), [0.5, 0.5])


@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.integers(1, 45), st.sampled_from((0.0, 100.0, -100.0)))
def test_the_three_agree(size: int, seed: int, block: int, offset: float) -> None:
    x = outliers(size, seed) + offset
    # n additions, and 4 ulp for each block merged: the bound of laws.slack; naive's exp(x) is off by |x| ulp.
    ulps = size + 4 * size + 4
    np.testing.assert_allclose(ref.online(x, block=block), ref.two_pass(x), rtol=ulps * EPS)
    np.testing.assert_allclose(ref.naive(x), ref.two_pass(x), rtol=(ulps + np.abs(x).max()) * EPS)
    np.testing.assert_allclose(np.exp(ref.log_softmax(x)), ref.two_pass(x), rtol=(ulps + np.ptp(x)) * EPS)


@pytest.mark.parametrize(("shape", "axis"), list(every_axis()))
def test_agrees_with_torch(shape: tuple[int, ...], axis: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, dy = normal(shape), normal(shape, 1.0)
    for name, got_y, backward in (
        ("softmax", ref.two_pass(x, axis), ref.softmax_backward),
        ("log_softmax", ref.log_softmax(x, axis), ref.log_softmax_backward),
    ):
        leaf = torch.tensor(x, requires_grad=True)
        y = getattr(torch, name)(leaf, axis)
        y.backward(torch.tensor(dy))
        close(got_y, y.detach().numpy())
        close(backward(dy, got_y, axis), leaf.grad.numpy())
    close(ref.online(x, axis, block=2), ref.two_pass(x, axis))

    leaf = torch.tensor(x, requires_grad=True)
    lse = torch.logsumexp(leaf, axis)
    dlse = normal(tuple(lse.shape), 1.0)
    lse.backward(torch.tensor(dlse))
    got = ref.logsumexp(x, axis)
    close(got, lse.detach().numpy())
    close(ref.logsumexp_backward(dlse, x, got, axis), leaf.grad.numpy())


def close(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    assert got.shape == want.shape
    # Rows of 7 elements or fewer, |x| below 20: 7 additions and a few roundings, of numbers below 32.
    np.testing.assert_allclose(got, want, rtol=16 * EPS, atol=32 * EPS)


@pytest.mark.parametrize("row", EDGES, ids=str)
def test_edges_are_those_of_torch(row: list[float]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.tensor(row, dtype=torch.float64, requires_grad=True)
    for got in (ref.two_pass(row), ref.online(row), ref.online(row, block=2)):
        close(got, torch.softmax(x, -1).detach().numpy())
    close(ref.log_softmax(row), torch.log_softmax(x, -1).detach().numpy())
    lse = torch.logsumexp(x, -1)
    close(ref.logsumexp(row), lse.detach().numpy())
    lse.backward()
    close(ref.logsumexp_backward(1.0, row, ref.logsumexp(row)), x.grad.numpy())


def test_edges_as_written() -> None:
    for softmax in (ref.two_pass, ref.online, ref.log_softmax):
        for row in ([-INF, -INF], [INF, 1.0], [NAN, 1.0], [NAN, INF]):
            assert np.isnan(softmax(row)).all()
        assert softmax([]).shape == (0,)
        assert softmax(3.0).shape == ()
    assert ref.logsumexp([-INF, -INF]) == ref.logsumexp([]) == -INF
    assert ref.logsumexp([INF, 1.0]) == INF
    assert np.isnan(ref.logsumexp([INF, NAN]))
    assert (ref.two_pass(3.0), ref.online(3.0), ref.log_softmax(3.0), ref.logsumexp(3.0)) == (1, 1, 0, 3)


Function = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_gradients_are_derivatives(name: str, axis: int) -> None:
    x = normal((3, 4), 1.0)
    forward, dx = gradient(name, x, axis)
    # A central difference errs by h^2 (truncation) and eps / h (rounding); h = cbrt(eps) balances the two.
    h = EPS ** (1 / 3)
    numeric = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = h
        numeric[index] = (forward(x + step) - forward(x - step)) / (2 * h)
    # 12 terms are summed, none of which or of whose third derivatives is above 8.
    np.testing.assert_allclose(dx, numeric, rtol=0, atol=12 * 8 * h**2)


def gradient(name: str, x: np.ndarray[Any, Any], axis: int) -> tuple[Function, np.ndarray[Any, Any]]:
    """A weighted sum of the function's outputs, and its gradient in x as the specification has it."""
    if name == "logsumexp":
        lse = ref.logsumexp(x, axis)
        weights = normal(lse.shape, 1.0)
        return lambda v: (weights * ref.logsumexp(v, axis)).sum(), ref.logsumexp_backward(weights, x, lse, axis)
    f, backward = {
        "softmax": (ref.two_pass, ref.softmax_backward),
        "log_softmax": (ref.log_softmax, ref.log_softmax_backward),
    }[name]
    weights = normal(x.shape, 1.0)
    return lambda v: (weights * f(v, axis)).sum(), backward(weights, f(x, axis), axis)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f8", "bfloat16"])
def test_every_dtype_is_widened(dtype: str) -> None:
    kind = np.dtype(dtype) if dtype != "bfloat16" else pytest.importorskip("ml_dtypes", reason="no ml_dtypes").bfloat16
    x = normal((2, 3)).astype(kind)
    for f in (ref.naive, ref.two_pass, ref.online, ref.log_softmax, ref.logsumexp):
        assert f(x).dtype == np.float64
        np.testing.assert_array_equal(f(x), f(x.astype(np.float64)))


def test_every_declaration_has_its_formula() -> None:
    for operation in OPERATIONS.values():
        assert set(operation.formula.sums) == {accumulator.name for accumulator in operation.accumulators}
        assert set(operation.formula.outputs) == {output.name for output in operation.outputs}


def operands(name: str, dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Operands of an operation on rows of 5 elements, those of a gradient at the results of its forward operation."""
    x, dy = normal((3, 5)).astype(dtype), normal((3, 5), 1.0).astype(dtype)
    forward, declaration = OPERATIONS[name].forward, OPERATIONS[name]
    # The second row has an ignored target.
    values: dict[str, Any] = {
        "x": x, "target": np.array([[4], [1], [0]]), "ignore_index": 1, "smoothing": 0.25, "z_loss": 0.5,
        "weight": normal((1, 5), 1.0).astype(dtype) ** 2, "dy": dy[:, :1] if "dy" in declaration.row_operands else dy,
        "dlse": dy[:, 1:2], "dentropy": dy[:, 2:3],
    }  # fmt: skip
    values["weight_sum"] = values["weight"].sum()
    given = {operand.name: values[operand.name] for operand in forward.operands}
    for output in forward.outputs:
        if output.kind == "row" or not declaration.scores:
            values[output.name] = ref.evaluate(forward.name, namespace(x), given, 1, output.name)
    if not declaration.scores:
        values["x"] = values["y"]
    return {operand.name: values[operand.name] for operand in declaration.operands}


def _narrow(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return value.astype(np.float32 if value.dtype.kind == "f" else np.int32)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("library", ["long double", "torch", "jax"])
def test_the_formulas_serve_every_array_library(name: str, library: str) -> None:
    dtype = np.longdouble if library == "long double" else np.float64
    values = operands(name, dtype)
    for output in OPERATIONS[name].outputs:
        want = ref.evaluate(name, namespace(values["x"]), values, 1, output.name)
        assert want.shape == {"element": (3, 5), "row": (3, 1), "call": ()}[output.kind]
        assert want.dtype == (np.int64 if output.dtype == "index" else dtype)
        if library != "long double":
            lib = pytest.importorskip(library, reason=f"{library} is not installed")
            # JAX computes in float32 here.
            make, eps = (lib.tensor, EPS) if library == "torch" else (lib.numpy.asarray, np.finfo(np.float32).eps)
            given = {
                key: value if np.ndim(value) == 0 else make(value if library == "torch" else _narrow(value))
                for key, value in values.items()
            }
            got = np.asarray(ref.evaluate(name, namespace(given["x"]), given, 1, output.name))
            np.testing.assert_allclose(got, want, rtol=64 * eps, atol=64 * eps)


@pytest.mark.parametrize("name", FORWARD)
def test_the_statistics_of_a_row_are_those_of_its_softmax(name: str) -> None:
    x = np.array([[1.0, -INF, 3.0], [2.0, 2.0, 2.0], [1000.0, 999.0, -INF]])
    values = {"x": x, "target": np.array([[0], [1], [2]])}
    found = {output: ref.evaluate(name, namespace(x), values, 1, output) for output in ("m", "l", "lse", "entropy")}
    p = ref.two_pass(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.sum(np.where(p > 0, p * np.log(p), 0.0), 1, keepdims=True)
    np.testing.assert_array_equal(found["m"], x.max(1, keepdims=True))
    np.testing.assert_allclose(found["m"] + np.log(found["l"]), found["lse"], rtol=EPS)
    np.testing.assert_allclose(found["lse"][:, 0], ref.logsumexp(x), rtol=EPS)
    # lse and the mean score are numbers up to 1000, and their difference keeps their rounding errors.
    np.testing.assert_allclose(found["entropy"], entropy, rtol=0, atol=4 * 1000 * EPS)


def test_the_maximum_among_the_statistics_is_finite() -> None:
    with np.errstate(all="ignore"):
        m = [
            float(ref.evaluate("softmax", namespace(x), {"x": x}, 0, "m")[0])
            for x in (np.array([INF]), np.array([-INF]))
        ]
    assert m == [np.finfo(np.float64).max, np.finfo(np.float64).min]


@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.formula.terms])
def test_the_terms_of_a_gradient_are_those_of_its_difference(name: str) -> None:
    values = operands(name, np.float64)
    xp = namespace(values["x"])
    found = ref.with_sums(name, xp, values, 1)
    terms = OPERATIONS[name].formula.terms
    assert terms is not None
    a, b = terms(xp, **found)
    np.testing.assert_allclose(a - b, ref.evaluate(name, xp, values, 1), rtol=0, atol=4 * EPS * np.abs([a, b]).max())
    np.testing.assert_array_equal(ref.size_of_terms(name, xp, found), np.maximum(np.abs(a), np.abs(b)))


def test_axis_out_of_range() -> None:
    for f in (ref.naive, ref.two_pass, ref.online, ref.log_softmax, ref.logsumexp):
        with pytest.raises(np.exceptions.AxisError):
            f([1.0], 1)
        with pytest.raises(np.exceptions.AxisError):
            f(1.0, 1)


ROWS, COLS = 6, 7


def numbers(*shape: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def state_of(x: Any) -> dict[str, Any]:
    m = x.max(1, keepdims=True)
    return {"m": m, "l": np.exp(x - m).sum(1, keepdims=True)}


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize(("weighted", "smoothing", "z_loss"), [*itertools.product([False, True], [0, 0.1], [0, 0.03])])
def test_losses(weighted: bool, smoothing: float, z_loss: float, ignores: bool) -> None:
    x, target, dy = 3 * numbers(ROWS, COLS, seed=1), np.array([0, 6, 2, 2, 5, 1]), numbers(ROWS, 1, seed=2)
    index, weight = 2 if ignores else -100, numbers(COLS, seed=3) ** 2 if weighted else None
    counts = target != index
    given: dict[str, Any] = {"x": x, "target": target[:, None]}
    if ignores:
        given["ignore_index"] = index
    if smoothing:
        given["smoothing"] = smoothing
    if z_loss:
        given["z_loss"] = z_loss
    for reduction, output in (("none", "loss"), ("sum", "total_loss"), ("mean", "mean_loss")):
        w = weight
        if weight is not None and z_loss and reduction == "mean":
            # The callers scale the weights in this way, so that z_loss is averaged over the rows that count.
            w = weight * counts.sum() / weight[target[counts]].sum()
        if w is not None:
            given |= {"weight": w, "weight_sum": w.sum()}
        incoming = dy[:, 0] if reduction == "none" else 1.0
        options = {"weight": weight, "ignore_index": index, "label_smoothing": smoothing, "z_loss": z_loss}
        want = expected_loss(x, target, incoming, reduction=reduction, **options)
        found = evaluate("cross_entropy", namespace(x), given, 1, output)
        np.testing.assert_allclose(found.reshape(want.loss.shape), want.loss, rtol=1e-13)
        divisor = (counts.sum() if w is None else w[target[counts]].sum()) if reduction == "mean" else 1.0
        to_rows = dy if reduction == "none" else np.full((ROWS, 1), 1 / divisor)
        gradient = evaluate("cross_entropy_backward", namespace(x), {**given, **state_of(x), "dy": to_rows}, 1)
        np.testing.assert_allclose(gradient, want.gradient, rtol=1e-12, atol=1e-14)


def test_log_probabilities() -> None:
    x, index, dys = 3 * numbers(ROWS, COLS, seed=4), np.array([0, 6, 2, 7, -1, 1])[:, None], numbers(3, ROWS, 1, seed=5)
    want = expected_tokens(x, index, 1, [dys[0], dys[1, :, 0], dys[2, :, 0]])
    given = {"x": x, "target": index}
    for name, output in (("y", want.logprob[:, 0]), ("entropy", want.entropy), ("lse", want.lse)):
        np.testing.assert_allclose(evaluate("token_logprobs", namespace(x), given, 1, name)[:, 0], output, rtol=1e-13)
    more = {"dy": dys[0], "dentropy": dys[1], "dlse": dys[2], "entropy": want.entropy[:, None]}
    gradient = evaluate("token_logprobs_backward", namespace(x), {**given, **state_of(x), **more}, 1)
    np.testing.assert_allclose(gradient, want.gradient, rtol=1e-12, atol=1e-14)
