"""The suites of heads: exact samples, every way that runs on a CPU, wrong ways."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CPU

from onlinesoftmax.lab.bench.heads.cases import LOGPROBS, LOSS, HeadCase
from onlinesoftmax.lab.bench.heads.measure import errors, make_head, sample_of
from onlinesoftmax.lab.bench.heads.peers import HEAD_PEERS, OursHead, TorchHead
from onlinesoftmax.lab.bench.kinds import run_kind

HEADS = [HeadCase(name, (20, 6, 30), 2, "float64", with_gradient=True) for name in (LOSS, LOGPROBS)]
SMALL = [HeadCase(name, (30, 4, 800), 2, "float32", with_gradient=True) for name in (LOSS, LOGPROBS)]
HERE = [name for name, peer in HEAD_PEERS.items() if name != "compile" and peer("cpu").why_absent() is None]


@pytest.mark.parametrize("case", HEADS, ids=lambda case: case.operation)
def test_the_sample_is_exact(case: HeadCase) -> None:
    """PyTorch's operations in float64 give the same rows."""
    inputs = make_head(case, CPU)
    sample = sample_of(case, *inputs)
    found = TorchHead("cpu").prepare(case)(*inputs)
    assert max(errors(sample, found)) < 1e-14
    assert len(sample.classes) >= 25
    found[1][sample.classes[3], 2] += 1e-6
    assert errors(sample, found)[1] > 1e-8


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.operation)
def test_every_way_on_a_cpu_is_right_or_refuses(case: HeadCase) -> None:
    everybody = [OursHead("cpu"), *(HEAD_PEERS[name]("cpu") for name in HERE)]
    (found,) = run_kind("head time", [case], everybody, CPU, 1)
    assert set(found.yardsticks) == {"three bare products", "four bare products"}
    status = {result.who: result.status for result in found.results}
    refused = {"ours-small", "torch-linear"} if case.operation == LOGPROBS else {"torch-chunks"}
    assert {name for name, word in status.items() if word == "refused"} == refused & {*status}
    assert {*status.values()} <= {"ok", "refused"}
    for result in found.results:
        if result.status == "ok":
            assert result.of_products is not None
            assert result.of_products > 0
    plans = {result.who: result.analysis.partition(",")[0] for result in found.results}
    assert (plans["ours-stored"], plans["ours-columns"]) == ("stored", "columns")
    assert "3 products" in next(result.analysis for result in found.results if result.who == "ours")


class WrongHead(TorchHead):
    """PyTorch's gradients, but for a class without a gradient."""

    name = "wrong"

    def prepare(self, case: Any) -> Any:
        right = super().prepare(case)

        def function(*inputs: torch.Tensor) -> Any:
            dx, dw, *outputs = right(*inputs)
            dw[inputs[2][0]] = 0
            return dx, dw, *outputs

        return function


def test_a_wrong_gradient_has_no_time() -> None:
    (found,) = run_kind("head time", HEADS[:1], [OursHead("cpu"), WrongHead("cpu")], CPU, 1)
    result = found.results[1]
    assert (result.who, result.status, result.times) == ("wrong", "wrong", None)
    assert "gradient of weight: error" in str(result.reason)
