"""The public functions do what PyTorch's do: values, shapes, dtypes, out, and types of errors."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import onlinesoftmax as osm
from contract import DEVICE, GPU, OPERATIONS, assert_as_good_as_pytorch, outliers

# PyTorch's own path, and ours: on a GPU the planner chooses it, elsewhere the interpreter runs it.
PATHS = [{}, {"backend": "triton"}]


@pytest.fixture(params=PATHS, ids=["default", "triton"])
def how(request: pytest.FixtureRequest) -> dict[str, str]:
    return dict(request.param)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("value", [3.0, torch.inf, -torch.inf, torch.nan])
def test_zero_dimensions(operation: str, value: float, how: dict[str, str]) -> None:
    x = torch.tensor(value, device=DEVICE)
    for dim in (0, -1):
        ours, theirs = OPERATIONS[operation](x, dim, **how), getattr(torch, operation)(x, dim)
        assert ours.shape == theirs.shape == ()
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("shape", "dim"), [((0, 3), 1), ((3, 0), 1), ((0,), 0), ((2, 0, 3), 0)])
def test_empty(operation: str, shape: tuple[int, ...], dim: int, how: dict[str, str]) -> None:
    x = torch.empty(shape, device=DEVICE)
    ours, theirs = OPERATIONS[operation](x, dim, **how), getattr(torch, operation)(x, dim)
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("operation", ["softmax", "log_softmax"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
)
def test_wider_dtype(operation: str, dtype: torch.dtype, out_dtype: torch.dtype, how: dict[str, str]) -> None:
    x = outliers(4, 37, dtype=dtype, device=DEVICE)
    assert_as_good_as_pytorch(OPERATIONS[operation](x, dtype=out_dtype, **how), operation, x, -1, out_dtype)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_narrower_dtype_rounds_once(operation: str, how: dict[str, str]) -> None:
    if not how and not GPU:
        pytest.skip("PyTorch itself, which rounds the input too, is what runs here")
    x = outliers(4, 37, dtype=torch.float32, device=DEVICE)
    ours = OPERATIONS[operation](x, dtype=torch.float16, **how)
    exact = getattr(torch, operation)(x.double(), -1)
    torch.testing.assert_close(ours.double(), exact.half().double(), rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_out(operation: str, how: dict[str, str]) -> None:
    x = outliers(4, 9, dtype=torch.float32, device=DEVICE)
    call, expected = OPERATIONS[operation], OPERATIONS[operation](x, 1, **how)
    empty = torch.empty(0, device=DEVICE)
    assert call(x, 1, out=empty, **how) is empty
    assert torch.equal(empty, expected)
    strided = torch.full((*expected.shape, 2), torch.nan, device=DEVICE)
    call(x, 1, out=strided[..., 0], **how)
    # Another layout is another plan, with its own order of additions.
    torch.testing.assert_close(strided[..., 0], expected)
    assert strided[..., 1].isnan().all()
    if operation != "logsumexp":
        itself = x.clone()
        call(itself, 1, out=itself, **how)
        assert torch.equal(itself, expected)


def _both_raise(operation: str, how: dict[str, str], *args: Any, **kwargs: Any) -> None:
    """Ours and PyTorch's raise the same type; a gradient of the message is ours to choose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as theirs:  # noqa: PT011 - the type is what is compared
            getattr(torch, operation)(*args, **kwargs)
    with pytest.raises(type(theirs.value)):
        OPERATIONS[operation](*args, **kwargs, **how)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dim", [3, -4, 1.0])
def test_bad_dim_is_pytorchs_error(operation: str, dim: Any, how: dict[str, str]) -> None:
    _both_raise(operation, how, torch.randn(2, 3, 4, device=DEVICE), dim)


def test_bad_input_is_pytorchs_error(how: dict[str, str]) -> None:
    _both_raise("softmax", how, [1.0, 2.0], 0)
    expanded = torch.empty(1, 3, device=DEVICE).expand(2, 3)
    _both_raise("softmax", how, torch.randn(2, 3, device=DEVICE), 1, out=expanded)
    _both_raise(
        "softmax", how, torch.randn(2, 3, device=DEVICE), 1, out=torch.empty(2, 3, dtype=torch.float64, device=DEVICE)
    )


def test_integers_are_pytorchs_error() -> None:
    _both_raise("softmax", {}, torch.arange(3, device=DEVICE), 0)
    assert osm.softmax(torch.arange(3, device=DEVICE), 0, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"scale": 2.0}, {"backend": "triton"}], ids=str)
def test_out_that_is_no_tensor(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="argument 'out' must be Tensor, not str"):
        osm.softmax(torch.randn(2, 3, device=DEVICE), 1, out="out", **options)


def test_a_backend_that_does_not_exist() -> None:
    with pytest.raises(osm.PlanError, match="unknown backend 'cudnn'"):
        osm.softmax(torch.randn(2, 3, device=DEVICE), 1, backend="cudnn")


def test_what_has_no_kernel_says_so() -> None:
    sparse = torch.eye(3, device=DEVICE).to_sparse()
    with pytest.raises(osm.PlanError, match=r"sparse_coo, not a plain strided tensor"):
        osm.softmax(sparse, backend="triton")
    with pytest.raises(osm.PlanError, match=r"dtype must be one of float16, .* got torch.int32"):
        osm.softmax(torch.ones(3, dtype=torch.int32, device=DEVICE), backend="triton")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_numpy_neither_warns_nor_raises_about_its_own_arithmetic(operation: str, dtype: type) -> None:
    values = [[1.0, -60000.0, 5e-8], [-np.inf] * 3, [np.inf, 0, 1], [np.nan, 0, 1], [60000.0, -60000.0, 0]]
    x = np.array(values).astype(dtype)
    mask, bias = np.array([True, False, True]), np.full(3, 1e300)
    with np.errstate(all="raise"):
        for arguments in ({}, {"mask": mask}, {"bias": bias}, {"softcap": 30.0, "scale": 1e30}, {"dtype": np.float16}):
            for options in (arguments, {**arguments, "fully_masked": "zero"}):
                OPERATIONS[operation](x, **options)
        OPERATIONS[operation](np.array([10**6, 1]), dtype=np.float16)


@pytest.mark.parametrize(("shape", "dim"), [((3,), -1), ((2, 3), 0), ((), -1)])
def test_causal_needs_a_dimension_before_dim(shape: tuple[int, ...], dim: int) -> None:
    with pytest.raises(ValueError, match=f"causal needs a dimension .* dim is the first of {len(shape) or 1}"):
        osm.softmax(torch.ones(shape), dim, causal=True)
