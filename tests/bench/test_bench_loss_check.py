"""The check of losses and gradients against exact results, and the libraries that are checked: a wrong result gets no
time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CASES, CPU, LOSS, PLAIN, ROWS, TOKENS, WITH_TARGET, name, needs_interpreter, results
from torch.nn import functional

from onlinesoftmax.lab.bench import libraries
from onlinesoftmax.lab.bench.cases import STATISTIC_WEIGHT, Case
from onlinesoftmax.lab.bench.check import Reference
from onlinesoftmax.lab.bench.inputs import make_inputs
from onlinesoftmax.lab.bench.peers import Compiled, Ours, Peer, Torch


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
    monkeypatch.setattr("onlinesoftmax.lab.bench.check.PIECE", piece)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_entropy_is_no_more_exact_than_its_sum(dtype: str) -> None:
    """With one almost certain token, l is rounded next to 1, and its logarithm is small."""
    x, target = torch.tensor([[0.0, -8.0]], dtype=getattr(torch, dtype)), torch.zeros(1, dtype=torch.int64)
    l, p = x.double().exp().sum(1), x.double().softmax(1)
    step = torch.nextafter(l.float(), torch.tensor(2.0)).double() - l.float()

    def results(units: int) -> tuple[torch.Tensor, torch.Tensor]:
        log_l = (l + units * step).log()
        return -log_l.float(), (log_l - (x * p).sum(1)).float()

    reference = Reference(Case("token_logprobs", (1, 2), 1, dtype), x, target)
    assert reference.judge(results(1), (2e-7, 0.0)).wrong is None
    assert str(reference.judge(results(2), (4e-7, 0.0)).wrong).startswith("entropy: error 2.4e-07")


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


@pytest.mark.parametrize("case", CASES, ids=name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ours_and_torch_are_right_on_a_cpu(case: Case, dtype: str) -> None:
    case = replace(case, dtype=dtype)
    ours, theirs = results(case, Ours("cpu"), Torch("cpu"))
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
