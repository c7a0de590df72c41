"""Hooks of saved tensors see all that a head keeps for its backward pass: gradients, and logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import onlinesoftmax as osm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGET = torch.tensor([1, 2, 3, 4, 5, 12], device=DEVICE)
Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

HEADS: dict[str, tuple[Head, tuple[int, ...]]] = {
    "mean": (lambda x, w: osm.linear_cross_entropy(x, w, TARGET), (13, 8)),
    "tokens": (lambda x, w: osm.linear_token_logprobs(x, w, TARGET).logprob.sum(), (6, 13)),
    "any loss": (
        lambda x, w: osm.linear_token_loss(x, w, TARGET, lambda logprob, _, lse: lse - logprob),
        (13, 8),
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_hooks_see_what_waits_for_backward(name: str) -> None:
    head, shape = HEADS[name]
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(n, 8, generator=generator).to(DEVICE).requires_grad_() for n in (6, 13)]
    want = torch.autograd.grad(head(*leaves), leaves)
    seen: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        y = head(*leaves)
    fresh = [t for t in seen if tuple(t.shape) == shape and t.data_ptr() != leaves[1].data_ptr()]
    assert fresh, [tuple(t.shape) for t in seen]
    # A pass that keeps the graph, and one that does not.
    for keeps in (True, False):
        torch.testing.assert_close(torch.autograd.grad(y, leaves, retain_graph=keeps), want)
    with save_on_cpu():
        y = head(*leaves)
    for found in (y, checkpoint(head, *leaves, use_reentrant=False)):
        torch.testing.assert_close(torch.autograd.grad(found, leaves), want)
