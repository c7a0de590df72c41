"""The benchmark of operations with a target and of gradients: cases, suites, the command, time and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CASES, CPU, LOSS, ON_CPU, ROWS, TOKENS, call, name, table

from onlinesoftmax.lab.bench import inputs
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.inputs import make_inputs
from onlinesoftmax.lab.bench.measure import run
from onlinesoftmax.lab.bench.peers import Ours, Torch
from onlinesoftmax.lab.bench.suites import SUITES, cases
from onlinesoftmax.lab.bench.tables import MEMORY
from onlinesoftmax.lab.bench.timing import USUAL, Call, CpuClock, Flush, Samples


def test_bytes_count_one_read_of_the_logits_for_a_scalar_and_two_for_rows() -> None:
    case, tensor, target = Case("cross_entropy", (4, 1024), 1, "bfloat16", with_gradient=True), 4 * 1024 * 2, 4 * 8
    assert (case.passes, case.bytes) == (2, 2 * tensor + target + 2)
    rows = replace(case, reduction="none")
    assert (rows.passes, rows.bytes) == (3, 3 * tensor + target + 2 * 4 * 2)
    tokens = Case("token_logprobs", (4, 1024), 1, "bfloat16", with_gradient=True)
    assert (tokens.passes, tokens.bytes) == (3, 3 * tensor + target + 3 * 4 * 4)
    assert replace(case, with_gradient=False).bytes == tensor + target + 2
    assert replace(tokens, with_gradient=False).bytes == tensor + target + 2 * 4 * 4
    # Reads x, y and dy; writes y and dx.
    assert Case("softmax", (4, 1024), 1, "bfloat16", with_gradient=True).bytes == 5 * tensor
    assert Case("logsumexp", (4, 1024), 1, "bfloat16", with_gradient=True).passes == 3


def test_a_case_says_what_it_is() -> None:
    assert LOSS.reduction == "mean"
    assert replace(LOSS, reduction="mean") == LOSS
    assert str(replace(LOSS, with_gradient=True)) == "7x65 with gradient"
    assert str(replace(ROWS, with_gradient=True)) == "7x65 none with gradient"
    assert [(r.name, r.shape, r.dtype) for r in replace(TOKENS, dtype="bfloat16", with_gradient=True).returned] == [
        ("gradient", (7, 65), "bfloat16"), ("y", (7,), "float32"), ("entropy", (7,), "float32"),
    ]  # fmt: skip
    assert [(r.name, r.shape, r.dtype) for r in replace(LOSS, dtype="bfloat16").returned] == [("loss", (), "bfloat16")]
    written = {name(case): case.writes_elements for case in CASES}
    assert {key for key, value in written.items() if not value} == {
        "cross_entropy 7x65", "cross_entropy 7x65 none", "token_logprobs 7x65", "token_logprobs 3x17x4 dim 1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"operation": "softmax_backward", "with_gradient": True}, "with_gradient: softmax_backward is itself"),
        ({"operation": "softmax", "reduction": "none"}, "reduction='none': softmax has no reduction"),
        ({"operation": "cross_entropy", "reduction": "sum"}, "unknown reduction 'sum'; there are: mean, none"),
        ({"operation": "cross_entropy", "fused": ("scale",)}, "cross_entropy with scale: it has no score options"),
        ({"operation": "softmax", "fused": ("scale",), "with_gradient": True}, "gradients have no score options"),
        ({"operation": "cross_entropy", "dim": 0}, "dim=0: cross_entropy has its classes in dim 1"),
        ({"operation": "softmax_backward", "fused": ("scale",)}, "gradients have no score options here"),
        ({"fused": ("dropout",)}, "unknown score option 'dropout'"),
        ({"shape": (8,), "dim": 0, "fused": ("causal",)}, "causal needs a dimension of queries"),
        ({"shape": (8, 4), "fused": ("causal",)}, "no longer than dim"),
    ],
)
def test_a_case_without_sense_names_the_argument(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Case(**{"operation": "softmax", "shape": (4, 8), "dim": 1, "dtype": "float32", **arguments})


def test_inputs_are_tokens_and_incoming_gradients() -> None:
    x, target = make_inputs(replace(LOSS, with_gradient=True), CPU)
    assert (target.dtype, target.shape, x.requires_grad) == (torch.int64, (7,), False)
    assert 0 <= target.min() <= target.max() < 65
    _, _, dy = make_inputs(replace(TOKENS, dtype="bfloat16", with_gradient=True), CPU)
    assert (dy.shape, dy.dtype, len(dy.unique())) == ((7,), torch.float32, 7)
    _, _, dy = make_inputs(replace(ROWS, dtype="bfloat16", with_gradient=True), CPU)
    assert dy.dtype == torch.bfloat16


def test_what_is_given_replaces_what_the_suite_of_losses_says() -> None:
    found = cases(SUITES["cross-entropy"], shapes=[(4, 8)], dtypes=["float32"])
    assert [str(case) for case in found] == ["4x8 with gradient", "4x8 none with gradient"]
    assert [
        str(case) for case in cases(SUITES["forward"], shapes=[(4, 8)], dtypes=["float32"], with_gradient=True)
    ] == ["4x8 with gradient"]
    (case,) = cases(SUITES["cross-entropy"], ["softmax"], [(4, 8)], dtypes=["float32"])
    assert case == Case("softmax", (4, 8), 1, "float32", with_gradient=True)
    (case,) = cases(SUITES["forward"], ["cross_entropy"], [(4, 8)], dtypes=["float32"], reduction="none")
    assert case == Case("cross_entropy", (4, 8), 1, "float32", reduction="none")


def test_the_command_measures_losses_and_records_them() -> None:
    small = ("--shape", "4x8", "--dtype", "float32")
    done = call(*ON_CPU, "--suite", "cross-entropy", *small, "--json")
    assert done.exit_code == 0, done.output
    mean, none = json.loads(done.stdout)["cases"]
    assert (mean["with_gradient"], mean["reduction"], none["reduction"]) == (True, "mean", "none")
    for case in (mean, none):
        assert [(result["who"], result["status"]) for result in case["results"]] == [("ours", "ok"), ("torch", "ok")]
        assert case["within_cpu_bound"] is None
    done = call(*ON_CPU, "--op", "token_logprobs", "--with-gradient", *small)
    assert done.exit_code == 0, done.output
    assert "4x8 with gradient" in done.stdout


class OneOfEach(CpuClock):
    """The clock of a GPU without a GPU: it keeps the flush that it is asked for; a copy takes two microseconds."""

    kind = "cuda"

    def measure(self, calls: Mapping[str, Call], budget_ms: float, flush: Flush = USUAL) -> Samples:
        self.flush = flush
        return {name: [2.0 if name == "copy" else 3.0] for name in calls}


def test_a_call_that_only_reads_is_timed_without_dirty_lines() -> None:
    everybody, clock = [Ours("cpu"), Torch("cpu")], OneOfEach()
    for case in (*CASES, Case("softmax", (7, 65), 1, "float32")):
        (found,) = run([case], everybody, CPU, 1, clock)
        assert found.flush == ("dirty" if case.writes_elements else "clean")
        # The copy finds dirty lines, as it leaves some.
        assert set(clock.flush.clean) == (set() if case.writes_elements else {"ours", "torch"})
        assert found.as_dict()["flush"] == found.flush
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
    assert inputs.extra_bytes(lambda: torch.zeros(8), CPU) is None
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1100)
    gpu = torch.device("cuda")
    assert inputs.extra_bytes(lambda: torch.zeros(8), gpu) == 100 - 32
    assert inputs.extra_bytes(lambda: (torch.zeros(8), torch.zeros(2)), gpu) == 100 - 40


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
