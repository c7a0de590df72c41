"""The argument `memory` of `override`: it bounds the logits of every head in the block."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spellings import DEVICE
from torch.nn import functional

import onlinesoftmax as osm

Tensor = torch.Tensor


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of 10 tokens, the weight of 40 classes, and targets."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in ((10, 8), (40, 8)))
    return x, weight, torch.arange(10, device=DEVICE)


def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight), target)


def logprobs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.linear(x, weight).log_softmax(-1).gather(-1, target.unsqueeze(-1))


HEADS: list[Callable[..., Tensor]] = [loss, logprobs]
if hasattr(functional, "linear_cross_entropy"):  # since PyTorch 2.13
    HEADS.append(functional.linear_cross_entropy)


def test_memory_bounds_the_logits_of_a_head() -> None:
    x, weight, target = tensors()
    want = torch.autograd.grad(loss(x, weight, target), (x, weight))
    with osm.override(linear=40, memory=900) as mode:
        found = torch.autograd.grad(loss(x, weight, target), (x, weight))
    torch.testing.assert_close(found, want)
    assert "tokens, 2 chunks of 5 tokens, 3 products with 40 classes" in str(mode.report())


@pytest.mark.parametrize("head", HEADS)
def test_every_head_of_a_block_has_its_memory(head: Callable[..., Tensor]) -> None:
    mode = osm.override(linear=40, memory=3)
    for block in (mode, copy.copy(mode), pickle.loads(pickle.dumps(mode))):
        with pytest.raises(ValueError, match="memory is 3 bytes, and "), block:
            head(*tensors())


@pytest.mark.parametrize(
    ("memory", "error"), [(0, ValueError), (-1, ValueError), ("600MB", TypeError), (True, TypeError)]
)
def test_a_wrong_memory_is_named(memory: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^override\(\): .*memory'? must be "):
        osm.override(linear=True, memory=memory)
