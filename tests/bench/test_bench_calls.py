"""The suites `host` and `cold`: every kind of call, wrong and refused peers, fresh processes, records."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CPU, SMALL, Raises, Wrong, call, table

from onlinesoftmax.lab.bench import cold_suite, cold_worker, tables
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.cold_suite import calls_of, run_cold
from onlinesoftmax.lab.bench.host_times import run_host
from onlinesoftmax.lab.bench.jax_peers import JaxNN, OursInJax
from onlinesoftmax.lab.bench.measure import run
from onlinesoftmax.lab.bench.peers import Ours, Peer, Torch
from onlinesoftmax.lab.bench.result import BARE, BOTH, OUT, PLAIN, RECORDING
from onlinesoftmax.lab.bench.timing import CpuClock

SOFTMAX = Case("softmax", (4, 8), 1, "float32")
LOSS = Case("cross_entropy", (4, 8), 1, "float32")


def hosts(case: Case, *everybody: Peer) -> dict[str, Any]:
    (found,) = run_host([case], everybody, CPU, 0.1, CpuClock())
    return {result.who: result for result in found.results}


def test_every_kind_of_call_has_a_time() -> None:
    found = hosts(SOFTMAX, Ours("cpu"), Torch("cpu"))
    for result in found.values():
        assert list(result.calls) == [PLAIN, OUT, RECORDING, BOTH]
        assert all(0 < times.p20_us <= times.median_us for times in result.calls.values())
    assert found["ours"].plan.backend == "eager"
    assert list(hosts(LOSS, Torch("cpu"))["torch"].calls) == [PLAIN, RECORDING, BOTH]


@pytest.mark.parametrize("peer", [Ours, Torch, OursInJax, JaxNN])
def test_calls_in_a_row_take_the_result_of_the_one_before(peer: type[Peer]) -> None:
    if reason := peer("cpu").why_absent():
        pytest.skip(reason)
    x = torch.randn(4, 8)
    expected = x
    for _ in range(3):
        expected = torch.softmax(expected, 1)
    torch.testing.assert_close(peer("cpu").repeated(replace(SOFTMAX, calls=3))(x), expected)
    copy = Ours("cpu").copy(x, 3) if peer in (Ours, Torch) else OursInJax("cpu").copy(x, 3)
    torch.testing.assert_close(copy(x), x if peer in (Ours, Torch) else x + 3)


def test_the_time_of_calls_in_a_row_is_that_of_one() -> None:
    class Fixed(CpuClock):
        def measure(self, calls: Any, budget_ms: float, flush: Any = None) -> Any:
            return {name: [call() is not None and 24.0] for name, call in calls.items()}

    (found,) = run([replace(SOFTMAX, calls=8)], [Ours("cpu")], CPU, 0.1, Fixed())
    assert found.copy.median_us == found.results[0].times.median_us == 3.0
    assert found.results[0].gbps == pytest.approx(2 * 4 * 8 * 4 / 3e3)


@pytest.mark.parametrize("wrong", [{"operation": "logsumexp"}, {"with_gradient": True}])
def test_only_a_result_that_is_an_input_is_called_again(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"calls=8: the result of \w+ is no input of the same function"):
        replace(SOFTMAX, calls=8, **wrong)


class CountingClock(CpuClock):
    """A clock that keeps the names of the calls that it times together."""

    def __init__(self) -> None:
        super().__init__()
        self.together: list[list[str]] = []

    def host_us(self, calls: Any, budget_ms: float) -> Any:
        self.together.append(list(calls))
        return super().host_us(calls, budget_ms)


def test_the_calls_of_one_shape_are_interleaved() -> None:
    """A machine that slows down then affects all operations alike, and their times can be compared."""
    cases = [replace(LOSS, operation="softmax", reduction=""), LOSS, replace(LOSS, shape=(3, 8))]
    clock = CountingClock()
    found = list(run_host(cases, [Ours("cpu"), Torch("cpu")], CPU, 0.1, clock))
    assert [one.case for one in found] == cases
    # softmax has a call with out=.
    assert [len(names) for names in clock.together] == [2 * (4 + 3), 2 * 3]
    for one in found:
        assert [result.who for result in one.results] == ["ours", "torch"]
        assert all(result.calls for result in one.results)


@pytest.mark.parametrize("case", [LOSS, replace(LOSS, operation="token_logprobs", reduction="")])
def test_the_bare_launch_runs_the_kernel_of_the_plan(case: Case) -> None:
    """Triton's interpreter stands for a GPU."""
    pytest.importorskip("triton", reason="a kernel is launched")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off where there is a GPU; the next test runs there")
    ours = hosts(case, Ours("cpu", "triton", "row"))["ours"]
    assert (ours.status, ours.reason) == ("ok", None)
    assert list(ours.calls) == [PLAIN, RECORDING, BOTH, BARE]


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["softmax", "log_softmax", "logsumexp", "token_logprobs", "cross_entropy"])
def test_the_bare_launch_on_a_gpu_is_the_fastest(operation: str) -> None:
    gpu, case = torch.device("cuda"), Case(operation, (64, 512), 1, "bfloat16")
    (found,) = run_host([case], [Ours("cuda")], gpu, 20)
    (ours,) = found.results
    assert (ours.status, ours.reason) == ("ok", None)
    assert ours.calls[BARE].median_us < ours.calls[PLAIN].median_us


def test_a_wrong_peer_has_no_host_time_and_a_refusal_has_its_reason() -> None:
    from onlinesoftmax.lab.bench.jax_peers import JaxNN

    found = hosts(SOFTMAX, Ours("cpu"), Wrong("cpu"), Raises("cpu"), JaxNN("cpu"))
    assert (found["wrong"].status, found["wrong"].calls) == ("wrong", {})
    assert (found["raises"].status, found["raises"].reason) == ("refused", "N must be a multiple of 8")
    assert "conversion of tensors" in found["jax.nn"].reason


def test_an_out_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Torch, "prepare_out", lambda self, case: lambda x, y: y.zero_())
    result = hosts(SOFTMAX, Torch("cpu"))["torch"]
    assert (OUT in result.calls, result.reason) == (False, "out=: another result than without")


def test_host_is_a_suite(tmp_path: Path) -> None:
    path = tmp_path / "host_times.json"
    done = call("--suite", "host", *SMALL, "--op", "logsumexp", "--out", str(path))
    assert done.exit_code == 0, done.output
    header = next(line for line in done.stdout.splitlines() if " who " in line)
    assert header.split() == ["operation", "shape", "dtype", "who", PLAIN, OUT, RECORDING, BOTH, "notes"]
    found = json.loads(path.read_text())
    assert found["measures"] == "host time"
    again = tables.read_cases(found)
    assert [each.as_dict() for each in again] == found["cases"]
    assert tables.table_of(again, found).rows[0][3] == "ours eager/row"


def test_the_calls_of_a_column_and_of_one_row() -> None:
    assert "new rows" not in calls_of(Case("softmax", (1, 64), 1, "float32"))
    shapes = {name: case.shape for name, case in calls_of(Case("softmax", (64, 32), 0, "float32")).items()}
    assert shapes["new rows"] == (64, 16)
    assert shapes["new length"] == (72, 32)


@pytest.mark.early
def test_first_calls_are_those_of_fresh_processes() -> None:
    (found,) = run_cold([SOFTMAX], [Ours("cpu")], CPU, quick=True)
    empty, filled = found.results
    assert [result.state for result in (empty, filled)] == ["empty", "filled"]
    for result in (empty, filled):
        assert result.status == "ok"
        assert list(result.calls) == [
            "import torch", "import library", "first", "again", "new rows", "new length", "other length",
        ]  # fmt: skip
        assert all(times.median_us > 0 and times.count == 1 for times in result.calls.values())
        # torch is imported anew in each process.
        assert result.calls["import torch"].median_us > 10 * result.calls["again"].median_us
        assert result.error <= 1e-6
    lines = tables.cold_lines(found.results, "cpu")
    assert "1 fresh process;" in lines[0]


@pytest.mark.parametrize("peer", [OursInJax, JaxNN])
def test_first_calls_in_jax(peer: type[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported everything."""
    if reason := peer("cpu").why_absent():
        pytest.skip(reason)

    def in_this_process(command: list[str], **_: Any) -> Any:
        monkeypatch.setattr(sys, "argv", command[1:])
        monkeypatch.setattr(cold_worker, "_end_after", lambda parent: None)
        cold_worker.main()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", in_this_process)
    (found,) = run_cold([LOSS], [peer("cpu")], CPU, quick=True)
    for result in found.results:
        assert (result.status, result.reason) == ("ok", None)
        assert list(result.calls)[-6:] == ["start JAX", "first", "again", "new rows", "new length", "other length"]
        # XLA makes a program for each shape.  Each call is timed once, and this machine may be busy with other tests.
        assert result.calls["new length"].median_us > result.calls["again"].median_us
    assert any(
        line.startswith("JAX makes a program for each shape") for line in tables.cold_lines(found.results, "cpu")
    )


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        ({"wrong": "error 1", "error": 1.0, "allowed": 0.0, "notes": {}, "times": {}}, "wrong", "error 1"),
        ({"wrong": None, "notes": {"other length": "no room"}, "times": {}}, "failed", "other length: no room"),
        ({"failure": "ValueError: no"}, "failed", "ValueError: no"),
    ],
)
def test_a_process_that_goes_wrong_has_no_time(
    answer: dict[str, Any], status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_suite, "_answer", lambda *_: answer)
    (found,) = run_cold([SOFTMAX], [Ours("cpu")], CPU, quick=True)
    (result,) = found.results
    assert (result.status, result.reason, result.calls) == (status, reason, {})


def test_a_peer_that_refuses_a_later_shape_keeps_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"wrong": None, "error": 0.0, "allowed": 0.0, "notes": {"other length": "no"}, "times": {"first": 2.0}}
    monkeypatch.setattr(cold_suite, "_answer", lambda *_: answer)
    (found,) = run_cold([SOFTMAX], [Torch("cpu")], CPU, quick=False)
    assert [(each.calls["first"].count, each.analysis) for each in found.results] == [(3, "other length: no")] * 2
    rows = table(found, absent={"quack": "not installed"}, measures="first calls").rows
    assert rows[0][-1] == "other length: no"
    assert rows[-1][-1] == "absent: not installed"


def test_a_plan_that_cannot_run_is_refused_before_any_process() -> None:
    (found,) = run_cold([SOFTMAX], [Ours("cpu", "eager", "split")], CPU, quick=True)
    assert found.results[0].status == "refused"
    assert "split" in found.results[0].reason


def test_the_lines_below_name_the_columns_that_are_there() -> None:
    (found,) = run_host([LOSS], [Torch("cpu")], CPU, 0.1, CpuClock())
    lines = tables.host_lines(found.results, "cuda")
    assert lines[0].startswith("Host time: until the call returns")
    assert [line.partition(":")[0] for line in lines[1:]] == [RECORDING, BOTH]
