"""The suite of gates: every way that runs on a CPU is right, wrong ways have no time."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CPU

import onlinesoftmax as osm
from onlinesoftmax.lab.bench.kinds import run_kind
from onlinesoftmax.lab.bench.routing.cases import GATES, RouteCase
from onlinesoftmax.lab.bench.routing.measure import checked, make_logits, wrong
from onlinesoftmax.lab.bench.routing.peers import OursGate, QuackGate, TorchGate, TransformerEngineGate


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_every_way_on_a_cpu_is_right(gate: str, gradient: bool) -> None:
    dtype = ("float32", "bfloat16")[([*GATES].index(gate) + gradient) % 2]
    case = RouteCase("route", (64, 40), 1, dtype, (), gradient, "", gate)
    (found,) = run_kind("gate time", [case], [OursGate("cpu"), TorchGate("cpu")], CPU, 1)
    assert set(found.yardsticks) == {"one read"}
    assert [(result.who, result.reason) for result in found.results if result.status != "ok"] == []
    assert all(result.of_read is not None and result.of_read > 0 for result in found.results)


def test_wrong_results_are_named() -> None:
    case = RouteCase("route", (64, 40), 1, "float32", gate="top 8")
    x, bias = make_logits(case, CPU)
    weights, experts, counts = OursGate("cpu").prepare(case)(x, bias)

    def reason(*found: Any, exact: bool = False) -> str:
        return str(wrong(case, x, bias, found, exact)[0])

    assert reason(weights, experts, counts, exact=True) == "None"
    assert "8 weights: error" in reason(weights * 1.001, experts, counts)
    assert "counts are others" in reason(weights, experts, counts + 1)
    assert "not those of our formulas" in reason(weights, experts.flip(1), counts, exact=True)
    assert "smaller scores" in reason(weights, x.topk(8, -1, largest=False).indices, counts)
    assert "equal, or are none" in reason(weights, experts[:, :1].expand(-1, 8), counts)


def test_the_terms_of_a_gradient_may_cancel() -> None:
    case = RouteCase("route", (8192, 64), 1, "float32", (), True, "", "top 6, not normalized")
    x, bias = make_logits(case, CPU)
    for peer in (OursGate("cpu"), TorchGate("cpu")):
        gradient, *others = peer.prepare(case)(x, bias)
        assert wrong(case, x, bias, (gradient, *others), False)[0] is None
        assert "gradient: error" in str(wrong(case, x, bias, (gradient * 1.0001, *others), False)[0])


def topk_of_quack(x: Any, k: int, softmax: bool) -> Any:
    """quack.topk.topk: the number of a column takes the place of the low bits of a logit."""
    assert softmax
    low = x.shape[1] - 1
    columns = torch.arange(x.shape[1], dtype=torch.int32)
    keys = x.float().view(torch.int32) & ~low | torch.where(x >= 0, ~columns, columns) & low
    values, indices = keys.view(torch.float32).topk(k, -1)
    return (values.view(torch.int32) & ~low).view(torch.float32).softmax(-1).to(x.dtype), indices.int()


def router_of_transformer_engine(
    logits: Any, topk: int, use_pre_softmax: bool, num_groups: Any, group_topk: Any, scaling_factor: Any,
    score_function: str, expert_bias: Any,
) -> Any:  # fmt: skip
    """fused_topk_with_score_function of transformer_engine.pytorch.router."""
    given: dict[str, Any] = {"renormalize": not use_pre_softmax, "scale": scaling_factor or 1.0, "bias": expert_bias}
    given |= {"score": score_function, "groups": num_groups, "group_k": group_topk}
    found = osm.route(logits, topk, dense=True, **given)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, found.indices.long(), True)
    return found.dense.to(logits.dtype), chosen


def scores_of_transformer_engine(logits: Any, topk: int, score_function: str) -> Any:
    """fused_compute_score_for_moe_aux_loss."""
    p = getattr(torch, score_function)(logits.float(), *((-1,) if score_function == "softmax" else ()))
    return None, p / p.sum(-1, keepdim=True)


def loss_of_transformer_engine(
    probs: Any, tokens_per_expert: Any, total_num_tokens: int, num_experts: int, topk: int, coeff: float
) -> Any:
    """fused_moe_aux_loss."""
    return (probs.sum(0) * tokens_per_expert).sum() * (coeff * num_experts / (topk * total_num_tokens**2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ways_of_other_libraries(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions with the signatures of their sources stand for the libraries, which need a GPU."""
    router = SimpleNamespace(
        fused_topk_with_score_function=router_of_transformer_engine,
        fused_compute_score_for_moe_aux_loss=scores_of_transformer_engine,
        fused_moe_aux_loss=loss_of_transformer_engine,
    )  # fmt: skip
    modules = {"quack.topk": SimpleNamespace(topk=topk_of_quack), "transformer_engine.pytorch.router": router}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    peers = [QuackGate("cpu"), TransformerEngineGate("cpu")]
    cases = [RouteCase("route", (48, 64), 1, dtype, (), bool(each), "", gate) for gate in GATES for each in range(2)]
    cases.append(RouteCase("route", (48, 40), 1, dtype, gate="top 8"))
    refusals: dict[str, list[str]] = {"quack": [], "transformer-engine": []}
    for case in cases:
        inputs = make_logits(case, CPU)
        for peer in peers:
            if reason := peer.supports(case):
                refusals[peer.name].append(reason)
                continue
            result, _ = checked(case, peer, inputs)
            assert result.status == "ok", (str(case), result)
    assert refusals["transformer-engine"] == []
    words = "has no losses", "has only the softmax of the chosen logits", "takes powers of 2"
    assert [sum(reason.startswith(each) for reason in refusals["quack"]) for each in words] == [4, 2, 1]
