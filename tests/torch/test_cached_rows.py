"""Log-probabilities on a CPU, for as many rows at a time as fit the cache: against PyTorch's operations on all rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import onlinesoftmax as osm
from onlinesoftmax.core.call import Call, Settings
from onlinesoftmax.ops import TOKEN_LOGPROBS
from onlinesoftmax.torch import cached_rows, fast_path

Tensor = torch.Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def no_prepared_calls() -> Iterator[None]:
    """The prepared calls of one way of running them must not serve the other."""
    for kept in (fast_path.PREPARED_CALLS, fast_path._GUARDS):
        kept.clear()
    yield
    for kept in (fast_path.PREPARED_CALLS, fast_path._GUARDS):
        kept.clear()


def rows_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Logits: the first row is all -inf, the next three hold +inf, one -inf and NaN; the last row is finite."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) * 3
    rows = x.view(-1, shape[-1])
    for row, (columns, value) in enumerate(
        [(slice(None), -torch.inf), (0, torch.inf), (1, -torch.inf), (2, torch.nan)]
    ):
        if row < len(rows) - 1 and shape[-1] > 2:
            rows[row, columns] = value
    return x.to(dtype)


def results_and_gradient(x: Tensor, index: Tensor, entropy: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    found = [t for t in osm.token_logprobs(x, index, entropy=entropy) if t is not None]
    weights = torch.Generator().manual_seed(3)
    dys = [torch.randn(t.shape, dtype=torch.float64, generator=weights).to(t.dtype) for t in found]
    return [*[t.detach() for t in found], *torch.autograd.grad(found, x, dys)]


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (6, 1), (7, 5), (2, 3, 11), (40, 4097)], ids=str)
def test_results_are_those_of_operations_on_all_rows(
    shape: tuple[int, ...], dtype: torch.dtype, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, rows = rows_of(shape, dtype), math.prod(shape[:-1])
    # Tokens of the last rows are before the first column and behind the last, if there are so many rows.
    index = (torch.arange(rows) % shape[-1]).masked_fill_(torch.arange(rows) == 5, -1)
    index = index.masked_fill_(torch.arange(rows) == 4, shape[-1]).view(shape[:-1])
    call = Call(TOKEN_LOGPROBS, x, Settings(x.dim() - 1), None, None, {"target": index})
    assert cached_rows.takes(call)
    found = results_and_gradient(x, index, entropy)
    monkeypatch.setattr(cached_rows, "takes", lambda call: False)
    fast_path.PREPARED_CALLS.clear()
    expected = results_and_gradient(x, index, entropy)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        largest = float(other.nan_to_num(0, 0, 0).abs().max())
        # A sum in pairs rounds a term once on each of log2(columns) levels; a few other operations round too.
        roundings = 4 + math.log2(shape[-1])
        unit = max(torch.finfo(wide).eps * max(1.0, largest) * roundings, torch.finfo(one.dtype).eps * largest)
        assert torch.equal(one.isnan(), other.isnan())
        torch.testing.assert_close(one, other, rtol=0, atol=unit, equal_nan=True)


def test_rows_in_parts_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, index = rows_of((12, 300), torch.bfloat16), torch.arange(12)
    whole = results_and_gradient(x, index, True)
    # Five rows in a part, so the last part has two.
    monkeypatch.setattr(cached_rows, "ELEMENTS_IN_CACHE", -(-1500 // torch.get_num_threads()))
    for one, other in zip(results_and_gradient(x, index, True), whole, strict=True):
        assert torch.equal(one.nan_to_num(5.0), other.nan_to_num(5.0))


def test_results_can_be_changed_in_place() -> None:
    x, index = torch.randn(2, 3, 5, requires_grad=True), torch.ones(2, 3, dtype=torch.int64)
    (expected,) = torch.autograd.grad(osm.token_logprobs(x, index).logprob.sum() * 2, x)
    found = osm.token_logprobs(x, index)
    found.logprob.mul_(2)
    (gradient,) = torch.autograd.grad(found.logprob.sum(), x)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.uint16], ids=str)
def test_narrow_and_unsigned_targets(dtype: torch.dtype) -> None:
    x, index = torch.randn(4, 300), torch.tensor([0, 7, 100, 127])
    found, expected = osm.token_logprobs(x, index.to(dtype)), osm.token_logprobs(x, index)
    assert torch.equal(found.logprob, expected.logprob)


def test_a_row_without_incoming_gradients_has_none_even_if_it_holds_nan() -> None:
    x = torch.full((3, 4), torch.nan).requires_grad_()
    # A token that is out of range has no gradient either.
    logprob = osm.token_logprobs(x, torch.tensor([1, 4, 2])).logprob
    (gradient,) = torch.autograd.grad(logprob, x, torch.tensor([0.0, 1.0, 1.0]))
    assert not gradient[:2].any()
    assert gradient[2].isnan().all()


def test_derivatives_of_the_gradient() -> None:
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    index = torch.tensor([0, 5, 2])
    assert torch.autograd.gradgradcheck(lambda x: tuple(osm.token_logprobs(x, index)), (x,))


@pytest.mark.parametrize(
    "x",
    [torch.randn(4, 6).t(), torch.randn(2, 4, 3)[..., ::2], torch.randn(4, 6)[:, 1:]],
    ids=["transposed", "every other column", "a part of the columns"],
)
def test_rows_that_are_not_contiguous(x: Tensor) -> None:
    index = torch.zeros(x.shape[:-1], dtype=torch.int64)
    found, expected = osm.token_logprobs(x, index), osm.token_logprobs(x.contiguous(), index)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_tensors_are_made_where_the_logits_are() -> None:
    x = torch.randn(3, 6, requires_grad=True)
    with torch.device("meta"):
        found = osm.token_logprobs(x, torch.zeros(3, dtype=torch.int64, device="cpu"))
        (gradient,) = torch.autograd.grad(found.entropy, x, torch.ones(3, device="cpu"))
    assert found.entropy.device == gradient.device == x.device
