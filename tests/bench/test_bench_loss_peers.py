"""The libraries that the benchmark of losses measures: ours, PyTorch, compiled functions, Liger-Kernel and quack."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CASES, CPU, LOSS, ROWS, TOKENS, name, needs_interpreter, results
from torch.nn import functional

from onlinesoftmax.lab.bench import libraries
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.inputs import make_inputs
from onlinesoftmax.lab.bench.peers import Compiled, Ours, Peer, Torch
from onlinesoftmax.lab.bench.run import run


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
