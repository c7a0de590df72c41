"""The benchmark of gradients and of score options: bytes, exact results, and a wrong result is found."""

from __future__ import annotations

import itertools
import json
import sys
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CPU, ON_CPU, call, needs_interpreter

from onlinesoftmax.lab.bench import formulas, libraries
from onlinesoftmax.lab.bench.cases import SCALE, SOFTCAP, Case
from onlinesoftmax.lab.bench.check import Reference
from onlinesoftmax.lab.bench.inputs import make_inputs, rounded
from onlinesoftmax.lab.bench.measure import planned, run
from onlinesoftmax.lab.bench.peers import Ours, Torch
from onlinesoftmax.lab.bench.suites import SUITES, cases

GRADIENTS = ["softmax_backward", "log_softmax_backward", "logsumexp_backward"]
EVERYTHING = ("scale", "softcap", "bias", "mask", "causal")
FUSED = [("scale",), ("softcap",), ("bias",), ("mask",), ("causal",), EVERYTHING]


def test_bytes_count_everything_that_must_move_once() -> None:
    tensor = 4 * 1024 * 2
    assert Case("softmax_backward", (4, 1024), 1, "bfloat16").bytes == 3 * tensor
    assert Case("log_softmax_backward", (4, 1024), 1, "bfloat16").bytes == 3 * tensor
    assert Case("logsumexp_backward", (4, 1024), 1, "bfloat16").bytes == 2 * tensor + 4 * (2 + 4)
    for fused, more in ((("scale", "softcap", "causal"), 0), (("bias",), 1024 * 2), (("mask",), 4 * 1024)):
        assert Case("softmax", (4, 1024), 1, "bfloat16", fused).bytes == 2 * tensor + more
    assert Case("softmax_backward", (4, 1024), 1, "bfloat16").tensor_bytes == tensor


def test_what_is_given_replaces_what_the_suite_says() -> None:
    (case,) = cases(SUITES["gradients"], shapes=[(4, 8)], dtypes=["float32"])
    assert case == Case("softmax_backward", (4, 8), 1, "float32")
    assert {c.operation for c in cases(SUITES["gradients"], operations=["logsumexp_backward"])} == {
        "logsumexp_backward"
    }
    (case,) = cases(SUITES["forward"], shapes=[(4, 8)], dtypes=["float32"], fused=["mask", "scale", "mask"])
    assert case.fused == ("scale", "mask")
    assert len(cases(SUITES["fused"], fused=["mask"], dtypes=["float32"])) == 4, "the same case twice"


def test_inputs_are_what_a_forward_pass_saves() -> None:
    y, dy = make_inputs(Case("softmax_backward", (50, 100), 1, "bfloat16"), CPU)
    assert y.dtype == dy.dtype == torch.bfloat16
    torch.testing.assert_close(y.float().sum(1), torch.ones(50), rtol=2e-2, atol=0)
    assert 0.9 < dy.float().std() < 1.1
    case = Case("logsumexp_backward", (5, 100), 1, "bfloat16")
    x, dlse, lse = inputs = make_inputs(case, CPU)
    assert (dlse.shape, dlse.dtype, x.dtype, lse.dtype) == ((5,), torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(lse, torch.logsumexp(x.float(), 1))
    assert [t.dtype for t in rounded(case, inputs)] == 3 * [torch.bfloat16], "as PyTorch keeps them"
    _, bias, mask = make_inputs(Case("softmax", (300, 100), 1, "float32", ("bias", "mask")), CPU)
    assert bias.shape == (100,)
    assert mask.any(1).all()
    assert 0.7 < mask.float().mean() < 0.8


@pytest.mark.parametrize("operation", GRADIENTS)
@pytest.mark.parametrize(("shape", "dim"), [((5, 33), 1), ((33, 5), 0), ((3, 17, 4), 1), ((40,), 0)])
@pytest.mark.parametrize("piece", [1 << 23, 16])
def test_the_exact_gradient_is_autograds(
    operation: str, shape: tuple[int, ...], dim: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinesoftmax.lab.bench.check.PIECE", piece)
    case = Case(operation, shape, dim, "float64")
    if operation == "logsumexp_backward":
        x, dy, _ = inputs = make_inputs(case, CPU)
    else:
        # log(softmax(x)) + c is as good a logit as x.
        y, dy = inputs = make_inputs(case, CPU)
        x = y.log() if operation == "softmax_backward" else y
    leaf = x.clone().requires_grad_()
    (right,) = torch.autograd.grad(getattr(torch, case.declaration.forward.name)(leaf, dim), leaf, dy)
    verdict = Reference(case, *inputs).judge(right, allowed=1e-14)
    assert verdict.wrong is None
    assert verdict.error < 1e-13
    wrong = right.clone()
    wrong.view(-1)[-1] += 1e-6
    assert Reference(case, *inputs).judge(wrong, allowed=1e-14).wrong is not None


@pytest.mark.parametrize("fused", FUSED, ids="+".join)
@pytest.mark.parametrize(("shape", "dim"), [((5, 33), 1), ((3, 17, 40), 2), ((4, 9, 3), 1)])
@pytest.mark.parametrize("piece", [1 << 23, 16])
def test_the_exact_fused_softmax_is_the_formula(
    fused: tuple[str, ...], shape: tuple[int, ...], dim: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinesoftmax.lab.bench.check.PIECE", piece)
    case = Case("softmax", shape, dim, "float64", fused)
    x, *beside = inputs = make_inputs(case, CPU)
    z, more = x, iter(beside)
    z = z * SCALE if "scale" in fused else z
    z = SOFTCAP * torch.tanh(z / SOFTCAP) if "softcap" in fused else z
    z = z + next(more) if "bias" in fused else z
    z = z.masked_fill(~next(more), -inf) if "mask" in fused else z
    if "causal" in fused:
        queries, keys = shape[dim - 1], shape[dim]
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        z = z.masked_fill(~seen.view(queries, keys, *[1] * (len(shape) - 1 - dim)), -inf)
    right = torch.softmax(z, dim)
    reference = Reference(case, *inputs)
    assert reference.judge(right, allowed=1e-14).wrong is None
    assert reference.judge(formulas.written_out(case)(*inputs), allowed=1e-14).wrong is None
    assert reference.judge(torch.softmax(x, dim), allowed=1e-14).wrong is not None, "as if nothing were fused"


@pytest.mark.parametrize("operation", ["log_softmax", "logsumexp"])
def test_every_forward_operation_has_fused_cases(operation: str) -> None:
    case = Case(operation, (2, 5, 33), 2, "float64", EVERYTHING)
    inputs = make_inputs(case, CPU)
    reference, right = Reference(case, *inputs), formulas.written_out(case)(*inputs)
    assert reference.judge(right, allowed=1e-14).wrong is None
    assert reference.judge(Ours("cpu").prepare(case)(*inputs), allowed=1e-14).wrong is None
    # The logarithm of a masked element is -inf, and no other number.
    assert reference.judge(right.nan_to_num(neginf=-1e300) + 1e-6, allowed=1e-14).wrong is not None


@needs_interpreter
def test_ours_is_judged_by_the_logsumexp_that_it_keeps(planned_for_a_gpu: None) -> None:
    """PyTorch's gradient is taken from a logsumexp of 16 bits; ours is not, and is held to float32's error."""
    case = Case("logsumexp_backward", (4, 64), 1, "bfloat16")
    (found,) = run([case], [Ours("cpu", "triton"), Torch("cpu")], CPU, 1)
    ours, theirs = found.results
    assert (ours.status, theirs.status) == ("ok", "ok"), ours.reason
    assert ours.allowed < theirs.allowed
    x, dy, lse = inputs = make_inputs(case, CPU)
    wrong = Ours("cpu", "triton").prepare(case)(x, dy, lse.bfloat16().float())
    assert Reference(case, *inputs).judge(wrong, ours.allowed).wrong is not None


def test_a_gradient_from_another_row_is_wrong() -> None:
    case = Case("softmax_backward", (7, 65), 1, "bfloat16")
    y, dy = make_inputs(case, CPU)
    reference, function = Reference(case, y, dy), Torch("cpu").prepare(case)
    allowed = reference.judge(function(y, dy), inf).error
    assert reference.judge(function(y, dy), allowed).wrong is None
    assert reference.judge(function(y, dy.roll(1, 0)), allowed, ours=False).wrong is not None


@needs_interpreter
@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        *itertools.product((Case(name, (3, 129), 1, "float32") for name in GRADIENTS), (None, "row", "split")),
        *((Case("softmax", (2, 4, 33), 2, "float32", fused), None) for fused in FUSED),
    ],
    ids=str,
)
def test_our_kernels_pass(case: Case, strategy: str | None) -> None:
    inputs = make_inputs(case, CPU)
    reference = Reference(case, *inputs)
    allowed = reference.judge(Torch("cpu").prepare(case)(*inputs), inf).error
    # As exact as others: the interpreter's multiply-add rounds twice.
    assert reference.judge(Ours("cpu", "triton", strategy).prepare(case)(*inputs), allowed, ours=False).wrong is None


@needs_interpreter
def test_a_case_of_our_kernels_runs_from_end_to_end(planned_for_a_gpu: None) -> None:
    gradient = Case("softmax_backward", (4, 64), 1, "float32")
    fused = Case("softmax", (4, 64), 1, "float32", ("bias", "causal"))
    for found in run([gradient, fused], [Ours("cpu", "triton"), Torch("cpu")], CPU, 1):
        ours = found.results[0]
        assert (ours.status, ours.plan.backend, ours.plan.strategy) == ("ok", "triton", "row"), ours.reason
        assert ours.gbps == pytest.approx(found.case.bytes / ours.times.median_us / 1e3)
        assert ours.of_copy == pytest.approx(ours.gbps / found.copy_gbps)


@needs_interpreter
def test_the_plan_of_a_fused_case_knows_what_it_reads(planned_for_a_gpu: None) -> None:
    case, plain = Case("softmax", (64, 512), 1, "float32", ("mask",)), Case("softmax", (64, 512), 1, "float32")
    found, without = (planned(c, make_inputs(c, CPU), Ours("cpu", "triton")) for c in (case, plain))
    assert found.plan.backend == "triton"
    assert found.plan.bytes_moved - without.plan.bytes_moved == 64 * 512


def test_on_a_cpu_gradients_are_refused_with_the_reason() -> None:
    done = call(*ON_CPU, "--suite", "gradients", "--shape", "4x8", "--dtype", "float32")
    assert done.exit_code == 2, done.output
    assert "onlinesoftmax can run none of these cases: on a CPU PyTorch's own backward runs" in done.stderr
    assert "GB/s of softmax_backward count 3 tensors" in done.stdout


def test_gradients_are_measured_over_three_passes() -> None:
    (found,) = run([Case("softmax_backward", (64, 512), 1, "float32")], [Torch("cpu")], CPU, 1)
    (theirs,) = found.results
    assert theirs.status == "ok"
    assert theirs.gbps == pytest.approx(3 * 64 * 512 * 4 / theirs.times.median_us / 1e3)
    assert found.copy_gbps == pytest.approx(2 * 64 * 512 * 4 / found.copy.median_us / 1e3)


def test_a_fused_case_runs_and_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    done = call(*ON_CPU, "--shape", "8x16", "--dtype", "bfloat16", "--fused", "mask, scale", "--out", str(path))
    assert done.exit_code == 0, done.output
    assert "8x16 scale+mask" in done.stdout
    record = json.loads(path.read_text())
    (case,) = record["cases"]
    assert case["fused"] == ["scale", "mask"]
    assert case["bytes"] == 2 * 8 * 16 * 2 + 8 * 16
    assert case["within_cpu_bound"] is None
    assert [result["status"] for result in case["results"]] == ["ok", "ok"]


def test_others_get_their_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's and quack's functions of the versions that the peers were written for, as far as they are called."""
    case, asked = Case("softmax_backward", (2, 3), 1, "float32"), []
    y, dy = make_inputs(case, CPU)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.softmax", SimpleNamespace(
        calculate_settings=lambda cols: (4 * cols, 8), _softmax_backward=lambda *given: asked.append(given)
    ))  # fmt: skip
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.softmax", SimpleNamespace(softmax_bwd=lambda *given: asked.append(given)))
    for peer in libraries.peers(["liger", "quack"], "cuda"):
        peer.prepare(case)(y, dy)
    assert asked[0][0] is asked[1][0] is dy
    assert asked[0][1] is asked[1][1] is y
    assert asked[0][2:] == (12, 8, False)
    assert asked[1][2:] == ()
