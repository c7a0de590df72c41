"""Time and memory of the losses: the flush, the time in copies, and extra bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CASES, CPU, LOSS, TOKENS, table

from onlinesoftmax.lab.bench import memory
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.peers import Ours, Torch
from onlinesoftmax.lab.bench.run import run
from onlinesoftmax.lab.bench.tables import MEMORY
from onlinesoftmax.lab.bench.timing import USUAL, Call, CpuClock, Flush, Samples


class OneOfEach(CpuClock):
    """The clock of a GPU without a GPU: it keeps the flush that it is asked for; a copy takes two microseconds."""

    kind = "cuda"

    def measure(self, calls: Mapping[str, Call], budget_ms: float, flush: Flush = USUAL) -> Samples:
        self.flush = flush
        return {name: [2.0 if name == "copy" else 3.0] for name in calls}


def test_a_call_that_only_reads_is_timed_without_dirty_lines() -> None:
    everybody, clock = [Ours("cpu"), Torch("cpu")], OneOfEach()
    asked = {}
    for case in (*CASES, Case("softmax", (7, 65), 1, "float32")):
        (found,) = run([case], everybody, CPU, 1, clock)
        assert found.flush == ("dirty" if case.writes_elements else "clean")
        # The copy finds dirty lines, as it leaves some.
        assert set(clock.flush.clean) == (set() if case.writes_elements else {"ours", "torch"})
        assert found.as_dict()["flush"] == found.flush
        asked[case.with_gradient] = clock.flush.least
    assert asked[True] > asked[False] == 1
    assert ("clean" in " ".join(table(found).below)) is False
    (found,) = run([TOKENS], everybody, CPU, 1, clock)
    assert "without dirty lines" in " ".join(table(found).below)
    (found,) = run([TOKENS], everybody, CPU, 1)
    assert found.flush is None


def test_the_time_is_recorded_in_copies() -> None:
    (found,) = run([replace(LOSS, with_gradient=True)], [Ours("cpu")], CPU, 1, OneOfEach())
    assert found.results[0].copies == 1.5
    assert found.as_dict()["results"][0]["copies"] == 1.5


def test_the_memory_of_a_call_is_its_peak_without_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.extra_bytes(lambda: torch.zeros(8), CPU) is None
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1100)
    gpu = torch.device("cuda")
    assert memory.extra_bytes(lambda: torch.zeros(8), gpu) == 100 - 32
    assert memory.extra_bytes(lambda: (torch.zeros(8), torch.zeros(2)), gpu) == 100 - 40


@pytest.mark.gpu
def test_the_memory_of_our_gradient_is_that_of_the_rows() -> None:
    gpu, case = torch.device("cuda"), Case("cross_entropy", (256, 32000), 1, "bfloat16", with_gradient=True)
    (found,) = run([case], [Ours("cuda"), Torch("cuda")], gpu, 1)
    ours, theirs = found.results
    assert (ours.status, theirs.status) == ("ok", "ok"), ours.reason
    assert 0 <= ours.extra_bytes < case.tensor_bytes // 100
    assert theirs.extra_bytes >= case.tensor_bytes
    assert found.flush == "dirty"


def test_the_table_tells_memory_where_a_gradient_ran_on_a_gpu() -> None:
    (found,) = run([replace(LOSS, with_gradient=True)], [Ours("cpu")], CPU, 1)
    assert MEMORY not in table(found).header
    on_gpu = replace(found, results=[replace(found.results[0], extra_bytes=-2_500_000)])
    (row,), header = table(on_gpu).rows, table(on_gpu).header
    assert row[header.index(MEMORY)] == "-2.5"
    forward = replace(on_gpu, case=LOSS)
    assert MEMORY not in table(forward).header
    (line,) = table(found).below
    assert "GB/s of cross_entropy with reduction mean with gradient count 2 tensors" in line
