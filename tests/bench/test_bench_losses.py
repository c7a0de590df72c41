"""The benchmark of operations with a target and of gradients through autograd: cases, checks, peers and suites."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")
pytest.importorskip("typer", reason="the benchmark is a command")

import torch
import typer
from torch.nn import functional
from typer.testing import CliRunner

from onlinesoftmax.bench import libraries, memory, report
from onlinesoftmax.bench.cases import STATISTIC_WEIGHT, Case
from onlinesoftmax.bench.check import Reference
from onlinesoftmax.bench.inputs import make_inputs
from onlinesoftmax.bench.peers import Compiled, Ours, Peer, Torch
from onlinesoftmax.bench.result import Result
from onlinesoftmax.bench.run import run
from onlinesoftmax.bench.suites import cases
from onlinesoftmax.bench.timing import USUAL, Call, CpuClock, Flush, Samples
from onlinesoftmax.cli.bench import bench

CPU = torch.device("cpu")
LOSS = Case("cross_entropy", (7, 65), 1, "float32")
ROWS = replace(LOSS, reduction="none")
TOKENS = Case("token_logprobs", (7, 65), 1, "float32")
WITH_TARGET = [
    LOSS, ROWS, TOKENS, replace(TOKENS, shape=(3, 17, 4)), *(
        replace(case, with_gradient=True) for case in (LOSS, ROWS, TOKENS, replace(LOSS, shape=(9,), dim=0))
    )
]  # fmt: skip
PLAIN = [Case(name, (7, 65), 1, "float32", with_gradient=True) for name in ("softmax", "log_softmax", "logsumexp")]
CASES = WITH_TARGET + PLAIN
needs_interpreter = pytest.mark.skipif(
    not importlib.util.find_spec("triton") or torch.cuda.is_available(),
    reason="runs the kernels on the CPU, in Triton's interpreter",
)


def name(case: Case) -> str:
    return f"{case.operation} {case}"


def call(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, ["--device", "cpu", "--repeat", "1", *arguments])


def results(case: Case, *everybody: Peer) -> list[Result]:
    (found,) = run([case], everybody, CPU, 1)
    return found.results


# Cases


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
    ],
)
def test_a_case_without_sense_names_the_argument(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Case(**{"shape": (4, 8), "dim": 1, "dtype": "float32", **arguments})


def test_inputs_are_tokens_and_incoming_gradients() -> None:
    x, target = make_inputs(replace(LOSS, with_gradient=True), CPU)
    assert (target.dtype, target.shape, x.requires_grad) == (torch.int64, (7,), False)
    assert 0 <= target.min() <= target.max() < 65
    _, _, dy = make_inputs(replace(TOKENS, dtype="bfloat16", with_gradient=True), CPU)
    assert (dy.shape, dy.dtype, len(dy.unique())) == ((7,), torch.float32, 7)
    _, _, dy = make_inputs(replace(ROWS, dtype="bfloat16", with_gradient=True), CPU)
    assert dy.dtype == torch.bfloat16


# Suites and the command


def test_the_suites_of_losses() -> None:
    losses = {(case.dtype, str(case)) for case in cases("cross-entropy")}
    assert len(losses) == 14
    assert {("bfloat16", "4096x262144 with gradient"), ("float32", "8192x32000 none with gradient")} <= losses
    assert {case.operation for case in cases("cross-entropy")} == {"cross_entropy"}
    tokens = cases("token-logprobs")
    assert {(case.operation, case.passes) for case in tokens} == {("token_logprobs", 3)}
    assert {case.shape for case in tokens} == {(8192, 128256), (4096, 151936), (8192, 32000)}
    reads = cases("read-only")
    assert {case.operation for case in reads} == {"logsumexp", "token_logprobs", "cross_entropy"}
    assert len(reads) == 36
    assert not any(case.writes_elements for case in reads)


def test_what_is_given_replaces_what_the_suite_of_losses_says() -> None:
    found = cases("cross-entropy", shapes=[(4, 8)], dtypes=["float32"])
    assert [str(case) for case in found] == ["4x8 with gradient", "4x8 none with gradient"]
    assert [str(case) for case in cases("quick", shapes=[(4, 8)], dtypes=["float32"], with_gradient=True)] == [
        "4x8 with gradient"
    ]
    (case,) = cases("cross-entropy", ["softmax"], [(4, 8)], dtypes=["float32"])
    assert case == Case("softmax", (4, 8), 1, "float32", with_gradient=True)
    (case,) = cases("quick", ["cross_entropy"], [(4, 8)], dtypes=["float32"], reduction="none")
    assert case == Case("cross_entropy", (4, 8), 1, "float32", reduction="none")


def test_the_command_measures_losses_and_records_them() -> None:
    small = ("--shape", "4x8", "--dtype", "float32")
    done = call("--suite", "cross-entropy", *small, "--json")
    assert done.exit_code == 0, done.output
    mean, none = json.loads(done.stdout)["cases"]
    assert (mean["with_gradient"], mean["reduction"], none["reduction"]) == (True, "mean", "none")
    for case in (mean, none):
        assert [(result["who"], result["status"]) for result in case["results"]] == [("ours", "ok"), ("torch", "ok")]
        assert case["within_cpu_bound"] is None
    done = call("--op", "token_logprobs", "--with-gradient", *small)
    assert done.exit_code == 0, done.output
    assert "4x8 with gradient" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--op", "softmax_backward", "--with-gradient"), "softmax_backward is itself a gradient; name softmax"),
        (("--op", "cross_entropy", "--reduction", "sum"), "unknown reduction 'sum'"),
        (
            (
                "--op",
                "cross_entropy_backward",
            ),
            "unknown operation 'cross_entropy_backward'",
        ),
        (("--op", "cross_entropy", "--shape", "2x3x4"), "dim=2: cross_entropy has its classes in dim 1"),
    ],
)
def test_the_command_refuses_in_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    done = call("--shape", "4x8", *arguments)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert says in line


# The check


def exact_by_autograd(case: Case, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """The tensors of `Case.returned` by PyTorch's operations in the dtype of the inputs."""
    x, target, *dys = inputs
    leaf = x.clone().requires_grad_()
    if case.declaration.per_row and case.reduction:
        outputs = (functional.cross_entropy(leaf, target, reduction=case.reduction),)
    else:
        log_p = leaf.log_softmax(case.dim)
        picked = log_p.gather(case.dim, target.unsqueeze(case.dim)).squeeze(case.dim)
        outputs = (picked, -(log_p * log_p.exp()).sum(case.dim))
    if not case.with_gradient:
        return tuple(y.detach() for y in outputs)
    if not dys:
        return (*torch.autograd.grad(outputs[0], leaf), outputs[0].detach())
    factors = (1, STATISTIC_WEIGHT)[: len(outputs)]
    total = torch.stack([(factor * dys[0] * y).sum() for factor, y in zip(factors, outputs, strict=True)]).sum()
    return (*torch.autograd.grad(total, leaf), *(y.detach() for y in outputs))


@pytest.mark.parametrize("case", WITH_TARGET, ids=name)
@pytest.mark.parametrize("piece", [1 << 23, 16])
def test_the_exact_result_is_autograds(case: Case, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onlinesoftmax.bench.exact.PIECE", piece)
    case = replace(case, dtype="float64")
    inputs = make_inputs(case, CPU)
    reference, right = Reference(case, *inputs), exact_by_autograd(case, inputs)
    verdict = reference.judge(right, allowed=1e-13)
    assert verdict.wrong is None
    assert max(verdict.errors) < 1e-13
    for i, returned in enumerate(case.returned):
        wrong = right[i].clone()
        wrong.view(-1)[-1] += 1e-6
        says = reference.judge((*right[:i], wrong, *right[i + 1 :]), allowed=1e-13).wrong
        assert says is not None
        assert len(right) == 1 or says.startswith(returned.name)


@pytest.mark.parametrize("case", PLAIN, ids=name)
def test_the_exact_gradient_reads_an_exact_output(case: Case) -> None:
    case = replace(case, dtype="float64")
    x, dy = inputs = make_inputs(case, CPU)
    leaf = x.clone().requires_grad_()
    y = getattr(torch, case.operation)(leaf, 1)
    right = (*torch.autograd.grad(y, leaf, dy), y.detach())
    assert Reference(case, *inputs).judge(right, allowed=1e-13).wrong is None
    assert Reference(case, *inputs).judge((right[0].roll(1, 0), right[1]), allowed=1e-13).wrong is not None


def test_a_result_of_other_tensors_is_wrong() -> None:
    case = replace(TOKENS, with_gradient=True)
    inputs = make_inputs(case, CPU)
    right = exact_by_autograd(case, inputs)
    says = Reference(case, *inputs).judge(right[:2], inf).wrong
    assert says == "gives 2 tensors, expected 3"


def test_other_libraries_may_return_a_loss_as_they_accumulated_it() -> None:
    case = replace(ROWS, dtype="bfloat16")
    x, target = inputs = make_inputs(case, CPU)
    wide = functional.cross_entropy(x.float(), target, reduction="none")
    reference = Reference(case, *inputs)
    assert reference.judge(wide, 1.0, ours=False).wrong is None
    assert "expected (7,) torch.bfloat16" in str(reference.judge(wide, 1.0, ours=True).wrong)


class Changed(Torch):
    """PyTorch's function with a change to what it returns."""

    name = "changed"

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__("cpu")
        self._change = change

    def prepare(self, case: Case) -> Any:
        function = super().prepare(case)
        return lambda *tensors: self._change(function(*tensors))


def last_row_doubled(found: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (found[0].index_fill(0, torch.tensor([len(found[0]) - 1]), 0.5), *found[1:])


@pytest.mark.parametrize("case", [case for case in CASES if case.with_gradient and len(case.shape) > 1], ids=name)
def test_a_wrong_gradient_of_one_row_gets_no_time(case: Case) -> None:
    ours, wrong = results(case, Ours("cpu"), Changed(last_row_doubled))
    assert (ours.status, wrong.status, wrong.times) == ("ok", "wrong", None)
    assert wrong.reason is not None
    assert wrong.reason.startswith("gradient: error")


def test_a_wrong_row_is_not_hidden_in_a_mean() -> None:
    """The mean of 4000 losses in bfloat16 does not show one wrong loss, so the losses of the rows are checked too."""
    case = Case("cross_entropy", (4000, 9), 1, "bfloat16")

    def wrong(found: torch.Tensor) -> torch.Tensor:
        return found if not found.dim() else torch.cat([found[:-1], found[-1:] + 1])

    ours, changed = results(case, Ours("cpu"), Changed(wrong))
    assert (ours.status, changed.status) == ("ok", "wrong")
    assert changed.times is None


# The peers


@pytest.mark.parametrize("case", CASES, ids=name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ours_and_torch_are_right_on_a_cpu(case: Case, dtype: str) -> None:
    case = replace(case, dtype=dtype)
    (found,) = run([case], [Ours("cpu"), Torch("cpu")], CPU, 1)
    ours, theirs = found.results
    assert (ours.status, theirs.status) == ("ok", "ok"), (ours.reason, theirs.reason)
    assert ours.plan is not None
    assert ours.plan.backend == "eager"
    assert ours.times is not None
    assert ours.gbps == pytest.approx(case.bytes / ours.times.median_us / 1e3)


@pytest.mark.parametrize("case", [replace(case, with_gradient=True) for case in (LOSS, TOKENS)], ids=name)
def test_the_compiled_function_has_a_compiled_gradient(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # The backend of the benchmark needs a C++ compiler.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    (compiled,) = results(case, Compiled("cpu"))
    assert compiled.status == "ok", compiled.reason


@pytest.fixture
def planned_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` as on an H200, with whose numbers the interpreter's launches are planned."""
    from onlinesoftmax import explanation
    from onlinesoftmax.core import device

    monkeypatch.setattr(explanation, "_this_device", lambda x: device.known("h200"))


@needs_interpreter
@pytest.mark.parametrize("case", [case for case in CASES if len(case.shape) == 2], ids=name)
def test_our_kernels_are_right_and_planned(case: Case, planned_for_a_gpu: None) -> None:
    ours, theirs = results(replace(case, shape=(3, 33)), Ours("cpu", "triton"), Torch("cpu"))
    assert (ours.status, theirs.status) == ("ok", "ok"), ours.reason
    assert ours.plan is not None
    assert ours.plan.backend == "triton"
    # One kernel writes the losses and their gradient; elsewhere the launch that writes the gradient is told.
    tensor = 3 * 33 * 4
    assert ours.plan.bytes_moved >= tensor * (1 + case.writes_elements)


class Overwriting(Peer):
    """A library that writes the gradient into the logits in the forward pass, as Liger-Kernel does."""

    name = "overwriting"
    overwrites = ("cross_entropy",)

    def prepare(self, case: Case) -> Any:
        function = Torch("cpu").prepare(case)

        def overwrite(x: torch.Tensor, *more: torch.Tensor) -> Any:
            dx, *rest = function(x, *more)
            with torch.no_grad():
                x.copy_(dx)
            return x.detach(), *rest

        return overwrite


def test_who_overwrites_the_logits_gets_a_copy() -> None:
    case = replace(LOSS, with_gradient=True)
    inputs = make_inputs(case, CPU)
    before = inputs[0].clone()
    arguments = Overwriting("cpu").arguments(case, inputs)
    Overwriting("cpu").prepare(case)(*arguments)
    assert torch.equal(inputs[0], before)
    assert not torch.equal(arguments[0], before)
    found = results(case, Overwriting("cpu"), Ours("cpu"), Torch("cpu"))
    assert [result.status for result in found] == ["ok"] * 3
    # Without the copy, everybody after it would have other logits.
    careless = type("Careless", (Overwriting,), {"overwrites": ()})("cpu")
    assert [result.status for result in results(case, careless, Ours("cpu"))][1] == "wrong"


def test_others_say_which_losses_they_lack() -> None:
    liger, quack = libraries.peers(["liger", "quack"], "cpu")
    for peer in (liger, quack):
        assert peer.supports(LOSS) is None
        assert peer.supports(replace(ROWS, with_gradient=True)) is None
        assert peer.supports(TOKENS) == "has no token_logprobs"
        assert peer.supports(replace(LOSS, shape=(4, 8, 3))) == "takes only the last dimension"
        assert peer.supports(replace(LOSS, shape=(4,), dim=0)) == "takes only two dimensions"
    assert liger.overwrites == ("cross_entropy",)


def test_others_get_their_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of the versions of Liger and quack that the peers were written for, as far as they are called."""

    class OfLiger(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, target: Any, *more: Any) -> Any:
            assert more == (None, -100, 0.0, 0.0, "mean")
            ctx.dx = torch.autograd.functional.jacobian(lambda x: functional.cross_entropy(x, target), x.detach())
            return functional.cross_entropy(x, target), None, None, None

        @staticmethod
        def backward(ctx: Any, dy: Any, *_: Any) -> Any:
            return (ctx.dx, *[None] * 6)

    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", SimpleNamespace(LigerCrossEntropyFunction=OfLiger))
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(
        sys.modules, "quack.cross_entropy", SimpleNamespace(cross_entropy=functional.cross_entropy)
    )  # fmt: skip
    case = replace(LOSS, with_gradient=True)
    found = results(case, *libraries.peers(["liger", "quack"], "cuda"))
    assert [(result.who, result.status, result.reason) for result in found] == [
        ("liger", "ok", None), ("quack", "ok", None)
    ]  # fmt: skip


# The measure


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
    assert ("clean" in " ".join(report.below([found], {"host": None}))) is False
    (found,) = run([TOKENS], everybody, CPU, 1, clock)
    assert "without dirty lines" in " ".join(report.below([found], {"host": None}))
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
    header, _ = report.table([found], {})
    assert report.MEMORY not in header
    on_gpu = replace(found, results=[replace(found.results[0], extra_bytes=-2_500_000)])
    header, (row,) = report.table([on_gpu], {})
    assert row[header.index(report.MEMORY)] == "-2.5"
    forward = replace(on_gpu, case=LOSS)
    assert report.MEMORY not in report.table([forward], {})[0]
    (line,) = report.below([found], {"host": None})
    assert "GB/s of cross_entropy with reduction mean with gradient count 2 tensors" in line


def test_the_tables_of_the_documentation_name_the_gradient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, path = Path(__file__).parents[2] / "benchmarks" / "tables.py", tmp_path / "losses.json"
    done = call("--suite", "cross-entropy", "--shape", "8x16", "--dtype", "float32", "--host", "--out", str(path))
    assert done.exit_code == 0, done.output
    assert "Host time of one cross_entropy call" in done.stdout
    monkeypatch.setattr(sys, "argv", [str(tables), str(path)])
    runpy.run_path(str(tables), run_name="__main__")
    shown = capsys.readouterr().out
    assert "| 8 × 16, reduction mean, with gradient | " in shown
    assert "| 8 × 16, reduction none, with gradient | " in shown
    assert "Host microseconds of one cross_entropy call" in shown
