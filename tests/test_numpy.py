"""NumPy arrays: several dimensions, losses and token log-probabilities, and arrays whose meaning would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import onlinesoftmax as osm
from contract import OPERATIONS
from laws import UNREAL_ARRAYS
from onlinesoftmax.numpy import eager
from onlinesoftmax.ops import reference

EPS = np.finfo(np.float32).eps


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dims", [(0, 1), (2, 0), (-1, 0, 1), [1], (), (np.int64(1), -1)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_several_dimensions(operation: str, dims: Any, dtype: type) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, 4, 5)) * 3).astype(dtype)
    mask, bias = rng.random(x.shape) < 0.7, rng.standard_normal(5)
    mask[:, 0] = mask[0, :, 0] = True  # no row is excluded
    axes, wide = tuple(dims) or (0, 1, 2), np.float64 if dtype is np.float64 else np.float32
    per_row = rng.choice([0.25, 0.5], [1 if i in {a % 3 for a in axes} else size for i, size in enumerate(x.shape)])
    for options in ({}, {"mask": mask, "bias": bias, "scale": 0.5}, {"mask": mask, "bias": bias, "scale": per_row}):
        z = x.astype(np.float64)
        if options:
            z = np.where(mask, options["scale"] * z + bias.astype(wide), -np.inf)
        m = z.max(axes, keepdims=True)
        lse = m + np.log(np.exp(z - m).sum(axes, keepdims=True))
        exact = {"softmax": np.exp(z - lse), "log_softmax": z - lse, "logsumexp": lse.squeeze(axes)}[operation]
        y = OPERATIONS[operation](x, dims, **options)
        assert (y.shape, y.dtype) == (exact.shape, dtype)
        # The scores less their maximum are rounded, and so is the result.
        size = 2 + float(np.abs(np.where(z == -np.inf, 0, z - m)).max()) + float(np.abs(m).max())
        rtol, atol = np.finfo(dtype).eps + size * np.finfo(wide).eps, size * np.finfo(wide).eps
        np.testing.assert_allclose(y, exact, rtol, atol + np.finfo(dtype).smallest_subnormal)
        if operation == "logsumexp":
            kept = osm.logsumexp(x, dims, True, **options)
            np.testing.assert_array_equal(kept, np.expand_dims(y, axes))


def test_several_dimensions_of_empty_and_excluded_rows() -> None:
    x = np.zeros((2, 0, 3), np.float32)
    assert osm.softmax(x, (1, 2)).shape == x.shape
    np.testing.assert_array_equal(osm.logsumexp(x, (1, 2)), [-np.inf] * 2)
    assert osm.logsumexp(x, (0, 2)).shape == (0,)
    y = osm.softmax(np.zeros((2, 2, 2)), (0, 2), mask=np.array([[True], [False]]), fully_masked="zero")
    np.testing.assert_array_equal(y, np.array([[[0.25], [0.0]]] * 2).repeat(2, 2))


ONES = np.ones((2, 3), np.float32)
PER_ROW = r"softmax\(\): scale must be a number or have one number per row"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dim": (0, -2)}, RuntimeError, "dim 0 appears twice"),
    ({"dim": (0, 2)}, IndexError, "Dimension out of range"),
    ({"dim": 2}, IndexError, "Dimension out of range"),
    ({"dim": (0, 1.0)}, TypeError, "argument 'dim' .* not float"),
    ({"dim": True}, TypeError, "not bool"),
    ({"x": np.arange(3)}, NotImplementedError, "int64 is not floating point"),
    ({"out": np.zeros(3)}, TypeError, "out: only torch tensors"),
    ({"backend": "triton"}, TypeError, "runs on eager/row"),
    ({"scale": np.ones((2, 3))}, RuntimeError, f"{PER_ROW}, with size 1"),
    ({"scale": np.ones((2, 1)), "dim": (0, 1)}, RuntimeError, PER_ROW),
    ({"scale": np.array(2)}, RuntimeError, r"softmax\(\): scale must be floating point, got int64"),
    ({"scale": torch.ones(())}, TypeError, r"softmax\(\): scale must be a NumPy array, as input is, not Tensor"),
    ({"bias": torch.ones(3)}, TypeError, r"softmax\(\): bias must be a NumPy array, as input is, not Tensor"),
    ({"bias": np.ones(3, int)}, RuntimeError, r"softmax\(\): bias must be floating point, got int64"),
    ({"bias": np.ones((2, 2, 3))}, RuntimeError, r"bias of shape \(2, 2, 3\) does not broadcast to input's \(2, 3\)"),
    ({"mask": torch.ones(3).bool()}, TypeError, r"softmax\(\): mask must be a NumPy array, as input is, not Tensor"),
    ({"mask": np.ones(3)}, RuntimeError, r"softmax\(\): mask must be boolean \(True keeps\), got float64"),
    ({"mask": np.ones(2, bool)}, RuntimeError, r"softmax\(\): mask of shape \(2,\) does not broadcast to input's"),
    ({"causal": True, "dim": (0, 1)}, ValueError, "causal needs one dim"),
    ({"causal": True, "dim": 0}, ValueError, "causal needs a dimension .* dim is the first of 2"),
    ({"causal": True, "x": np.ones(())}, ValueError, "causal needs a dimension .* dim is the first of 1"),
    ({"dtype": torch.float32}, TypeError, "dtype must be one of NumPy's"),
    ({"dtype": np.int32}, RuntimeError, r"dtype.* floating point"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_arguments_that_do_not_suit(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"x": ONES, "dim": -1, **wrong}
    with pytest.raises(error, match=message):
        osm.softmax(given.pop("x"), given.pop("dim"), **given)
    options = {name: t for name, t in wrong.items() if name in ("scale", "bias", "mask")}
    if options and "dim" not in wrong:
        # A tensor as input refuses the same options, with arrays for tensors and the other way round.
        swapped = {n: t.numpy() if isinstance(t, torch.Tensor) else torch.from_numpy(t) for n, t in options.items()}
        with pytest.raises(error):
            osm.softmax(torch.from_numpy(ONES), **swapped)


@pytest.mark.parametrize("scale", [np.array(0.3), np.array(0.3, np.float16)])
def test_a_scale_does_not_widen_the_scores(scale: Any) -> None:
    x = np.linspace(-3, 3, 6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(osm.softmax(x, scale=scale), osm.softmax(x, scale=float(scale)))
    assert osm.softmax(np.zeros(()), scale=scale) == 1


def test_scalars_and_dtypes() -> None:
    for operation, value in (("softmax", 1), ("log_softmax", 0), ("logsumexp", 3)):
        y = OPERATIONS[operation](np.float32(3))
        assert (y.shape, y.dtype, float(y)) == ((), np.float32, value)
    # The input is not rounded to the narrower dtype of the result.
    x = np.array([[2049.0, 2048.0]], np.float32)
    np.testing.assert_allclose(osm.softmax(x, dtype=np.float16), reference.two_pass(x), rtol=2**-10)
    assert osm.softmax(np.array([True, False]), dtype="float32").dtype == np.float32


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **OPERATIONS,
    "with dtype": lambda x: osm.softmax(x, dtype=np.float32),
    "bias": lambda x: osm.softmax(np.ones(2), bias=x),
    "mask": lambda x: osm.softmax(np.ones(2), mask=x),
    "scale": lambda x: osm.softmax(np.ones(2), scale=x),
    "cross_entropy": lambda x: osm.cross_entropy(x, np.array(0)),
    "target": lambda x: osm.cross_entropy(np.ones(2), x),
    "weight": lambda x: osm.cross_entropy(np.ones(2), np.array(0), x),
    "mask of a loss": lambda x: osm.cross_entropy(np.ones(2), np.array(0), mask=x),
    "token_logprobs": lambda x: osm.token_logprobs(x, np.array(0)),
    "index": lambda x: osm.token_logprobs(np.ones((2, 2)), x),
    "sample": lambda x: osm.sample(x, seed=0),
    "temperature": lambda x: osm.sample(np.ones((2, 2)), temperature=x, seed=0),
    "seed": lambda x: osm.sample(np.ones((2, 2)), seed=x),
    "topk_logprobs": lambda x: osm.topk_logprobs(x, 1),
    "route": lambda x: osm.route(x, 1),
    "bias of a route": lambda x: osm.route(np.ones((2, 2)), 1, bias=x),
    "drafts": lambda x: osm.verify(np.ones((3, 2)), x, seed=0),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("wrong", UNREAL_ARRAYS, ids=lambda x: f"{type(x).__name__} {x.dtype.name}")
def test_arrays_whose_meaning_would_be_lost_are_refused(function: str, wrong: Any) -> None:
    refusals = (TypeError, NotImplementedError, RuntimeError) if wrong.dtype.kind == "c" else (TypeError,)
    with pytest.raises(refusals, match=r"\(\): .*(masked array|matrix|dtype|floating|boolean|real|number|int)"):
        FUNCTIONS[function](wrong)


@pytest.mark.parametrize("indices", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_every_integer_dtype_of_targets(indices: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 300)).astype(np.float32)
    last = min(299, np.iinfo(indices).max)
    target = np.array([0, 1, last, last - 1]).astype(indices)
    theirs = functional.cross_entropy(torch.from_numpy(x).double(), torch.from_numpy(target.astype(np.int64)))
    np.testing.assert_allclose(osm.cross_entropy(x, target), theirs, rtol=EPS)
    found = osm.token_logprobs(x, target)
    exact = reference.log_softmax(x)[np.arange(4), target.astype(int)]
    np.testing.assert_allclose(found.logprob, exact, rtol=EPS)
    # An ignore_index beyond the dtype ignores nothing.
    np.testing.assert_array_equal(osm.cross_entropy(x, target, ignore_index=last - 2**16), osm.cross_entropy(x, target))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_token_logprobs(dim: int, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setattr(eager, "ELEMENTS", 30)
    x = (rng.standard_normal((6, 5, 7)) * 4).astype(dtype)
    rows = tuple(np.delete(x.shape, dim))
    index = rng.integers(0, 5, rows)
    mask = rng.random(x.shape) < 0.7
    per_row = rng.choice([0.25, 0.5], [1 if i == dim % 3 else size for i, size in enumerate(x.shape)])
    for options in ({}, {"mask": mask}, {"scale": np.array(0.5), "softcap": 2.0}, {"scale": per_row, "softcap": 2.0}):
        found = osm.token_logprobs(x, index, dim, **options)
        z = torch.from_numpy(x.astype(np.float64) * options.get("scale", 1.0))
        z = 2 * torch.tanh(z / 2) if "softcap" in options else z
        z = z.masked_fill(~torch.from_numpy(mask), -torch.inf) if "mask" in options else z
        log_p = z.log_softmax(dim)
        entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(dim)
        exact = log_p.gather(dim, torch.from_numpy(index).unsqueeze(dim)).squeeze(dim), entropy, z.logsumexp(dim)
        for ours, theirs in zip(found, exact, strict=True):
            assert ours.dtype == (np.float64 if dtype is np.float64 else np.float32)
            np.testing.assert_allclose(ours, theirs, rtol=np.finfo(ours.dtype).eps, atol=1e-14)
    assert osm.token_logprobs(x, index, dim, entropy=False).entropy is None


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_several_tokens_of_each_row_and_an_index_to_ignore(dim: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    index = rng.integers(0, 3, [2 if i == dim % 3 else size for i, size in enumerate(x.shape)])
    index.flat[:3] = -1, -7, 99
    found = osm.token_logprobs(x, index, dim, ignore_index=-7)
    log_p = reference.log_softmax(x, dim)
    exact = np.take_along_axis(log_p, np.clip(index, 0, 2), dim)
    exact.flat[:3] = np.nan, 0, np.nan
    assert found.entropy is not None
    assert found.entropy.shape == found.lse.shape == log_p.max(dim).shape
    np.testing.assert_allclose(found.logprob, exact, rtol=EPS)
    one = np.take(index, 0, dim)
    of_one = osm.token_logprobs(x, one, dim, ignore_index=-7).logprob
    np.testing.assert_array_equal(of_one, np.take(found.logprob, 0, dim))
    with pytest.raises(IndexError, match=r"index is -1 at position .*; 2 of"):
        osm.token_logprobs(x, index, dim, ignore_index=-7, check=True)
    with pytest.raises(TypeError, match="argument 'ignore_index' must be int, not float"):
        osm.token_logprobs(x, index, dim, ignore_index=1.5)


def test_indices_out_of_range() -> None:
    x = np.zeros((3, 4), np.float32)
    for index in (np.array([0, 4, -1]), np.array([0, 200, 255], np.uint8), np.array([0, 2**63, 2**64 - 1], np.uint64)):
        logprob = osm.token_logprobs(x, index).logprob
        np.testing.assert_array_equal(np.isnan(logprob), [False, True, True])
        with pytest.raises(
            IndexError, match=r"token_logprobs\(\): index is .* at position 1.*; 2 of 3 are out of range"
        ):
            osm.token_logprobs(x, index, check=True)
        with pytest.raises(IndexError, match=r"cross_entropy\(\): target is .* at position 1"):
            osm.cross_entropy(x, index)
    assert osm.cross_entropy(x, np.array([0, 7, 7]), ignore_index=7, reduction="none")[1] == 0


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e12])
def test_an_offset_of_all_logits_costs_no_digits(offset: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 8, (5, 9)).astype(np.float64)
    target, other = rng.integers(0, 9, 5), rng.random((5, 9))
    for options in ({}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "weight": rng.random(9)}):
        for t in (target, other):
            exact = functional.cross_entropy(torch.from_numpy(x), torch.from_numpy(t), **{
                name: torch.from_numpy(o) if isinstance(o, np.ndarray) else o for name, o in options.items()
            })  # fmt: skip
            np.testing.assert_allclose(osm.cross_entropy(x + offset, t, **options), exact, rtol=1e-14)
    one, shifted = osm.token_logprobs(x, target), osm.token_logprobs(x + offset, target)
    np.testing.assert_allclose(shifted.logprob, one.logprob, rtol=1e-14)
    np.testing.assert_allclose(shifted.entropy, one.entropy, rtol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (2, 3, 0)])
@pytest.mark.parametrize("probabilities", [False, True])
def test_empty_losses(reduction: str, shape: tuple[int, ...], probabilities: bool) -> None:
    x, rows = np.zeros(shape, np.float32), (shape[0], *shape[2:])
    target = np.zeros(shape, np.float32) if probabilities else np.full(rows, -100)
    theirs = functional.cross_entropy(torch.from_numpy(x), torch.from_numpy(target), reduction=reduction)
    y, stats = osm.cross_entropy(x, target, reduction=reduction, return_stats=True)
    np.testing.assert_array_equal(y, theirs)
    _, expected = osm.cross_entropy(torch.from_numpy(x), torch.from_numpy(target), return_stats=True)
    for name in stats._fields:
        np.testing.assert_array_equal(getattr(stats, name), getattr(expected, name), err_msg=name)
    assert not np.signbit(stats.entropy).any()
    assert not expected.entropy.signbit().any()
    index = np.zeros(rows, int)
    for ours, of_torch in zip(
        osm.token_logprobs(x, index, 1), osm.token_logprobs(*map(torch.from_numpy, (x, index)), 1), strict=True
    ):
        np.testing.assert_array_equal(ours, of_torch)


def test_infinities_and_nan_of_losses() -> None:
    inf, nan = np.inf, np.nan
    x = np.array([[0, nan, 1], [-inf, -inf, -inf], [0, inf, 1], [-inf, 0, 0], [0, -inf, 0]], np.float32)
    for target in (np.array([0, 1, 1, 2, 1]), np.array([-100, -100, -100, 2, 0])):
        theirs = functional.cross_entropy(torch.from_numpy(x), torch.from_numpy(target), reduction="none")
        np.testing.assert_allclose(osm.cross_entropy(x, target, reduction="none"), theirs, rtol=EPS)
        with np.errstate(all="raise"):
            for options in ({}, {"z_loss": 0.1, "return_stats": True}, {"label_smoothing": 0.1, "mask": x > -1}):
                osm.cross_entropy(x, target, **options)
                osm.cross_entropy(x, np.eye(5, 3), **{**options, "dtype": np.float16})
            osm.token_logprobs(x, abs(target), mask=np.array([True, True, False]))


def test_a_loss_with_a_scale_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "ELEMENTS", 8)
    rng = np.random.default_rng(0)
    x, target, scale = rng.standard_normal((6, 5, 3)), rng.integers(0, 5, (6, 3)), rng.random((6, 1, 3))
    theirs = functional.cross_entropy(torch.from_numpy(x * scale), torch.from_numpy(target))
    np.testing.assert_allclose(osm.cross_entropy(x, target, scale=scale), theirs, rtol=1e-14)
    one = functional.cross_entropy(torch.from_numpy(x[0, :, 0] * 0.5), torch.tensor(2))
    for of_one in (np.array(0.5), np.array([0.5])):
        np.testing.assert_allclose(osm.cross_entropy(x[0, :, 0], np.array(2), scale=of_one), one, rtol=1e-14)
    with pytest.raises(RuntimeError, match="one number per row"):
        osm.cross_entropy(x, target, scale=np.ones((6, 5, 1)))


def test_largest_class_and_whether_it_is_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setattr(eager, "ELEMENTS", 8)
    x, mask = rng.standard_normal((6, 5, 3)).astype(np.float32), rng.random((6, 5, 3)) < 0.7
    target = rng.integers(0, 5, (6, 3))
    target[0] = -100
    for t in (target, rng.random(x.shape).astype(np.float32)):
        for options in ({}, {"scale": -1.0}, {"mask": mask, "scale": -0.5}, {"softcap": 1e-3}):
            _, ours = osm.cross_entropy(x, t, return_stats=True, **options)
            tensors = {n: torch.from_numpy(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
            _, theirs = osm.cross_entropy(torch.from_numpy(x), torch.from_numpy(t), return_stats=True, **tensors)
            np.testing.assert_array_equal(ours.largest, theirs.largest)
            np.testing.assert_array_equal(ours.correct, theirs.correct)
            assert (ours.largest.dtype, ours.correct.dtype) == (np.int64, np.bool_)


X, T = np.ones((2, 3), np.float32), np.array([0, 1])
MISTAKES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (([[1.0]], T), {}), ((X, [0, 1]), {}), ((X, T, [1.0] * 3), {}), ((X.astype(int), T), {}), ((np.ones(()), T), {}),
    ((X, T[:1]), {}), ((X, T > 0), {}), ((X, X[:1]), {}), ((X, T, np.ones(2)), {}), ((X, T), {"reduction": "avg"}),
    ((X, T), {"label_smoothing": 1.5}), ((X, T), {"label_smoothing": "a"}), ((X, T), {"ignore_index": 1.5}),
    ((X, T), {"ignore_index": True}), ((X, T), {"z_loss": "a"}), ((X, T), {"softcap": -1.0}),
    ((X, T), {"label_smoothing": True}), ((X, T), {"label_smoothing": np.True_}), ((X, T), {"z_loss": np.nan}),
    ((X, T), {"z_loss": -1.0}), ((X, T), {"z_loss": np.True_}),
    ((X, T), {"scale": X}), ((X, T), {"mask": X}), ((X, T), {"dtype": "nonsense"}), ((X, T + 5), {}),
    ((X, T), {"mask": X[:, :2] > 0}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_are_the_errors_of_torch_tensors(number: int) -> None:
    def tensor(t: Any) -> Any:
        return torch.from_numpy(t) if isinstance(t, np.ndarray) else t

    args, options = MISTAKES[number]
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - the type is what is compared
        osm.cross_entropy(*map(tensor, args), **{name: tensor(t) for name, t in options.items()})
    with pytest.raises(type(theirs.value)):
        osm.cross_entropy(*args, **options)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"the classes are dimension 1.*moveaxis"):
        osm.cross_entropy(np.zeros((2, 3, 4)), np.zeros((2, 3), int))
    for function in (osm.softmax, osm.token_logprobs, osm.cross_entropy):
        with pytest.raises(TypeError, match=r"masked array.*filled"):
            function(np.ma.zeros((2, 3)), *([T] if function is not osm.softmax else []))
    for error, message, dtype in (
        (TypeError, "dtype must be one of NumPy's", torch.float32), (RuntimeError, "dtype.* floating point", np.int32),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            osm.cross_entropy(X, T, dtype=dtype)


def test_arguments_that_need_a_tensor() -> None:
    for options in ({"inplace_backward": True}, {"backend": "triton"}, {"batch_invariant": True}):
        with pytest.raises(TypeError, match="NumPy"):
            osm.cross_entropy(X, T, **options)
    for options in ({"backend": "cuda"}, {"batch_invariant": True}):
        with pytest.raises(TypeError, match="NumPy"):
            osm.token_logprobs(X, T, **options)
    with pytest.raises(TypeError, match="must be a NumPy array, as input is, not Tensor"):
        osm.cross_entropy(X, torch.from_numpy(T))
    with pytest.raises(TypeError, match="Tensor"):
        osm.cross_entropy(torch.from_numpy(X), T)
