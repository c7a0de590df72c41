"""The suite of gates: every way that runs on a CPU is right, wrong ways have no time, records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

from bench_cases import CPU, recorded, refused

from onlinesoftmax.lab.bench.routing.cases import GATES, RouteCase
from onlinesoftmax.lab.bench.routing.peers import OursGate, TorchGate
from onlinesoftmax.lab.bench.routing.reference import wrong
from onlinesoftmax.lab.bench.routing.run import make_logits, run_gates


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_every_way_on_a_cpu_is_right(gate: str, gradient: bool) -> None:
    dtype = ("float32", "bfloat16")[([*GATES].index(gate) + gradient) % 2]
    case = RouteCase("route", (64, 40), 1, dtype, (), gradient, "", gate)
    (found,) = run_gates([case], [OursGate("cpu"), TorchGate("cpu")], CPU, 1)
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


def test_the_suite_of_gates_writes_a_record(tmp_path: Path) -> None:
    asked = ("--suite", "route", "--shape", "16x40", "--peers", "torch")
    printed, table = recorded(tmp_path / "gates.json", "gate time", "", *asked)
    assert "16x40, top 8 of 4 groups with gradient" in printed
    assert table.header[3:6] == ("who", "time us", "of read")


def test_wrong_arguments_of_the_suite_of_gates() -> None:
    refused(
        "route",
        (("--shape", "4x8x9"), "needs two sizes, tokens x experts"),
        (("--shape", "4x7"), "7 experts are too few"),
        (("--peers", "liger"), "unknown peer 'liger'; there are: torch, compile"),
    )
