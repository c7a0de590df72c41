"""The log of plans: one line for each new plan, with what ran and why."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.core import plan_log
from onlinesoftmax.kernels.registry import unavailable

SIZES = (3, 7, 11)
"""A shape that no other test has: a prepared call makes no plan."""


@pytest.fixture(autouse=True)
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_log, "_MADE", {})


def test_a_new_plan_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    backend: Any = "cuda" if unavailable("cuda") is None else "triton"
    if reason := unavailable(backend):
        pytest.skip(reason)
    x = torch.randn(SIZES, device="cuda" if torch.cuda.is_available() else "cpu", requires_grad=True)
    caplog.set_level(logging.DEBUG, "onlinesoftmax")
    for _ in range(2):
        osm.softmax(x, backend=backend).backward(torch.ones_like(x))
    plans = {name: osm.explain(x, operation=name, backend=backend).plan for name in ("softmax", "softmax_backward")}
    assert caplog.messages == [
        f"{name} of 3 x 7 x 11 float32 on {x.device}: {plan!r}: {plan.reason}" for name, plan in plans.items()
    ]


def test_a_head_is_one_line_for_each_plan(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "onlinesoftmax")
    x, weight, target = torch.randn(13, 6), torch.randn(50, 6), torch.zeros(13, dtype=torch.long)
    for memory in (None, None, 1500):
        osm.linear_cross_entropy(x, weight, target, memory=memory)
    assert caplog.messages == [
        "linear_cross_entropy of 13 x 6 float32 on cpu: stored, 1 product with 50 classes; all logits at once, 2.6 kB: "
        "the logits of all tokens take 2.6 kB, which fit",
        "linear_cross_entropy of 13 x 6 float32 on cpu: tokens, 2 chunks of 7 tokens, 1 product with 50 classes: "
        "the logits of all tokens would take 2.6 kB",
    ]
