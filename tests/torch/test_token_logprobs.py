"""Log-probabilities of tokens, entropies and logsumexps, and their gradients, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ways import HOW, gradient

import onlinesoftmax as osm
from contract import DEVICE, PLANS, forced


@pytest.mark.parametrize("plan", PLANS)
def test_the_entropy_of_large_scores_keeps_its_digits(plan: str) -> None:
    """A number that all scores of a row have in common changes no probability."""
    shape, dim = ((2, 37, 16), 1) if plan == "triton/column" else ((4, 1001), -1)
    x = (1e4 + torch.randn(shape, generator=torch.Generator().manual_seed(3))).to(DEVICE).requires_grad_()
    index = torch.zeros_like(x.select(dim, 0), dtype=torch.long)
    exact_x = x.detach().double().requires_grad_()
    log_p = exact_x.log_softmax(dim)
    exact = -(log_p * log_p.exp()).sum(dim)
    found = osm.token_logprobs(x, index, dim, **forced(plan)).entropy
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    dy = torch.ones_like(exact)
    dx, exact_dx = gradient(found, x, dy.float()), gradient(exact, exact_x, dy)
    torch.testing.assert_close(dx.double(), exact_dx, rtol=0, atol=1e-6 * float(exact_dx.abs().max()))


def test_without_the_entropy() -> None:
    x, index = torch.randn(3, 9, device=DEVICE, requires_grad=True), torch.tensor([0, 8, 4], device=DEVICE)
    found = osm.token_logprobs(x, index, entropy=False, **HOW)
    assert found.entropy is None
    theirs = x.log_softmax(-1).gather(1, index[:, None])[:, 0]
    torch.testing.assert_close(found.logprob, theirs)
    ones = torch.ones(3, device=DEVICE)
    torch.testing.assert_close(gradient(found.logprob, x, ones), gradient(theirs, x, ones))


def test_rows_without_an_incoming_gradient_may_hold_nan() -> None:
    x = torch.randn(3, 8, device=DEVICE)
    x[1] = torch.nan
    x.requires_grad_()
    found = osm.token_logprobs(x, torch.tensor([1, 0, 2], device=DEVICE), **HOW)
    dy = torch.tensor([1.0, 0.0, 2.0], device=DEVICE)
    (dx,) = torch.autograd.grad(list(found), x, [dy, dy, dy])
    assert (dx[1] == 0).all()
    assert dx.isfinite().all()


@pytest.mark.parametrize("index", [torch.zeros(2, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)], ids=str)
def test_empty_rows(index: torch.Tensor) -> None:
    """The entropy of an empty row is the sum over nothing: 0, and not -0."""
    found = osm.token_logprobs(torch.ones(2, 0, device=DEVICE), index.to(DEVICE))
    assert found.logprob.isnan().all()
    assert (found.lse == -torch.inf).all()
    assert found.entropy.tolist() == [0.0, 0.0]
    assert not found.entropy.signbit().any()


def test_batch_invariant_log_probabilities_ignore_strides_and_alignment() -> None:
    x, index = torch.randn(1001, device=DEVICE)[1:].view(1, 1000), torch.tensor([7], device=DEVICE)
    options: dict[str, Any] = {"batch_invariant": True, **HOW}
    for same in (x.clone(), x.t().contiguous().t(), x.expand(1, 1000)):
        for ours, want in zip(
            osm.token_logprobs(same, index, **options), osm.token_logprobs(x, index, **options), strict=True
        ):
            assert torch.equal(ours, want)


def test_a_scale_that_requires_a_gradient_is_refused() -> None:
    x, index = torch.randn(3, 9, device=DEVICE), torch.tensor([0, 8, 4], device=DEVICE)
    scale = torch.tensor(0.5, device=DEVICE, requires_grad=True)
    for backend in (None, "eager"):
        with pytest.raises(RuntimeError, match=r"scale requires a gradient.*multiply the logits"):
            osm.token_logprobs(x, index, scale=scale, backend=backend)
    with torch.no_grad():
        found = osm.token_logprobs(x, index, scale=scale)
    torch.testing.assert_close(found.lse, (0.5 * x).logsumexp(-1))
