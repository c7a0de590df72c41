"""Gradients of transposed logits have the layout of the logits: nothing of their size is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from ways import HOW

import onlinesoftmax as osm
from contract import DEVICE
from onlinesoftmax.core.call import Call, Settings
from onlinesoftmax.core.task import Choice
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.torch import custom_op

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

OURS: dict[str, Loss] = {
    **{
        reduction: lambda x, target, reduction=reduction: osm.cross_entropy(x, target, reduction=reduction, **HOW).sum()
        for reduction in ("mean", "sum", "none")
    },
    "tokens": lambda x, target: -osm.token_logprobs(x, target, dim=1, **HOW).logprob.sum(),
    "several tokens": lambda x, target: -osm.token_logprobs(x, target[:, None], dim=1, **HOW).logprob.sum(),
    "logsumexp": lambda x, target: osm.logsumexp(x, 1, **HOW).sum(),
}


def pytorch(name: str, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if name == "logsumexp":
        return x.logsumexp(1).sum()
    return functional.cross_entropy(x, target, reduction="mean" if name == "mean" else "sum")


class LargeStorages(TorchDispatchMode):
    """New storages of at least so many bytes."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.seen = least, set[int]()
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        for t in found if isinstance(found, tuple | list) else (found,):
            if not isinstance(t, torch.Tensor) or t.untyped_storage().nbytes() < self.least:
                continue
            if t.untyped_storage()._cdata not in given:
                self.seen.add(t.untyped_storage()._cdata)
                self.kept.append(t)
        return found


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("cut", [False, True])
def test_nothing_of_the_size_of_the_logits_is_copied(name: str, cut: bool) -> None:
    """With `cut`, the rows of the logits do not follow each other in memory."""
    n, length, classes = 2, 4, 48
    whole = torch.randn(n, length + cut, classes, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits, target = whole[:, :length].requires_grad_(), torch.tensor([[1, 47, 0, 8], [5, 5, 9, 30]], device=DEVICE)
    (want,) = torch.autograd.grad(pytorch(name, logits.transpose(1, 2), target), logits)
    x = logits.transpose(1, 2)
    for factor in (1.0, 3.0):
        # Launches are prepared in the first call.
        OURS[name](x, target).backward()
        logits.grad = None
        with LargeStorages(n * length * classes * 4) as mode:
            y = OURS[name](x, target)
            (dx,) = torch.autograd.grad(y, x, torch.tensor(factor, device=DEVICE))
            gradient = dx.transpose(1, 2).contiguous()
        # A prepared launch allocates the gradient itself, without PyTorch's dispatcher.
        assert mode.seen <= {dx.untyped_storage()._cdata}
        assert gradient.data_ptr() == dx.data_ptr()
        torch.testing.assert_close(gradient, factor * want)


@pytest.mark.parametrize("name", OURS)
def test_other_layouts(name: str) -> None:
    base = torch.randn(3, 8, 6, 2, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    views = {
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "slices": base[:, ::2, 1:-3],
        "expanded": base[:, :, :, :1].expand(3, 8, 6, 2),
        "permuted": base.permute(3, 2, 1, 0),
    }
    for layout, view in views.items():
        x = view.detach().requires_grad_()
        target = torch.randint(x.shape[1], (x.shape[0], *x.shape[2:]), device=DEVICE)
        (dx,) = torch.autograd.grad(OURS[name](x, target), x)
        (want,) = torch.autograd.grad(pytorch(name, x, target), x)
        torch.testing.assert_close(dx, want, msg=lambda m, layout=layout: f"{layout}: {m}")
        assert dx.stride() == torch.empty_like(x).stride(), layout


def test_batch_invariance_and_statistics_of_transposed_logits() -> None:
    x = torch.randn(2, 5, 33, device=DEVICE).transpose(1, 2).requires_grad_()
    target = torch.randint(33, (2, 5), device=DEVICE)
    (want,) = torch.autograd.grad(functional.cross_entropy(x, target), x)
    for options in ({"batch_invariant": True}, {"return_stats": True}, {"inplace_backward": True}):
        h = x * 1
        y = osm.cross_entropy(h, target, **options, **HOW)
        (dx,) = torch.autograd.grad(y[0] if isinstance(y, tuple) else y, x)
        torch.testing.assert_close(dx, want)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.exhaustive)])
def test_a_compiled_loss_of_transposed_logits(reduction: str) -> None:
    logits, target = torch.randn(2, 5, 33, device=DEVICE), torch.randint(33, (2, 5), device=DEVICE)

    def gradient(loss: Any) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        (dx,) = torch.autograd.grad(loss(leaf).sum(), leaf)
        return dx

    def ours(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = osm.cross_entropy(x.transpose(1, 2), target, reduction=reduction, **HOW)
        return y

    want = gradient(lambda x: functional.cross_entropy(x.transpose(1, 2), target, reduction=reduction))
    torch.testing.assert_close(gradient(torch.compile(ours, backend="aot_eager")), want)


@pytest.mark.parametrize("cut", [slice(None), slice(1, -2)], ids=str)
def test_operators_promise_the_layout_that_they_return(cut: slice) -> None:
    x = torch.randn(2, 5, 33, device=DEVICE)[..., cut].transpose(1, 2)
    beside = {"target": torch.zeros(2, 1, 5, dtype=torch.int64, device=DEVICE)}
    beside |= {name: torch.ones(2, 1, 5, device=DEVICE) for name in ("dy", "m", "l")}
    choice = Choice(HOW.get("backend"))
    for name, outputs in (("cross_entropy", ("loss", "y")), ("cross_entropy_backward", ("y",))):
        operation = OPERATIONS[name]
        given = {each: t for each, t in beside.items() if each in operation.row_operands}
        call = Call(operation, x, Settings(1, choice=choice), None, None, given)
        *_, y = custom_op.outputs(call, outputs)
        *_, fake = custom_op._fake(call, outputs)
        assert y.stride() == fake.stride() == torch.empty_like(x).stride()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("backend", [None, "cuda", "triton"])
def test_memory_on_a_gpu(name: str, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HOW, "backend", backend)
    logits = torch.randn(4, 2048, 16000, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(16000, (4, 2048), device=DEVICE)
    for _ in range(2):
        logits.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        OURS[name](logits.transpose(1, 2), target).backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.1 * logits.nbytes
    assert logits.grad is not None
    assert logits.grad.is_contiguous()
