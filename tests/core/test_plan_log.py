"""The log of plans: one line for each new plan, with what ran and why."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.kernels.registry import unavailable

SIZES = (3, 7, 11)
"""A shape that no other test has: a plan is logged once in a process."""


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
        "linear_cross_entropy of 13 x 6 float32 on cpu: stored, 1 products with 50 classes: "
        "the logits of all tokens take 2.6 kB, which fit",
        "linear_cross_entropy of 13 x 6 float32 on cpu: tokens, 2 chunks of 7 tokens, 1 products with 50 classes: "
        "the logits of all tokens would take 2.6 kB",
    ]


def test_jax_logs_when_a_program_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    jnp = pytest.importorskip("jax.numpy")
    import onlinesoftmax.jax as osj

    caplog.set_level(logging.DEBUG, "onlinesoftmax")
    for _ in range(2):
        osj.softmax(jnp.ones(SIZES), backend="pallas")
    [line] = caplog.messages
    assert line.startswith("softmax of 3 x 7 x 11 float32 on NVIDIA ")
    assert "<Plan pallas/row: " in line
