"""Calls that `override` leaves to PyTorch: with a reason, with an error, and calls of other functions."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from spellings import BACKEND, DEVICE, FLOATS, WIDE, Function, cases, sample
from torch.nn import functional

import onlinesoftmax as osm
from onlinesoftmax import PlanError
from onlinesoftmax.overrides import Report


class Subclass(torch.Tensor):
    """A tensor that counts the functions of PyTorch that are called with it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Subclass.calls += func is torch.softmax
        return super().__torch_function__(func, types, args, kwargs)


LEFT: dict[str, list[tuple[Function, str]]] = {
    "softmax": [
        (lambda x: functional.softmax(x, dim=None), "dim is None, so PyTorch chooses it"),
        (lambda x: torch.nn.Softmax()(x), "dim is None, so PyTorch chooses it"),
        (lambda x: torch.softmax(x, np.int64(1)), "dim is a int64, not an int"),
        (lambda x: torch.softmax(x.int(), 1, dtype=torch.float32), f"{FLOATS} torch.int32"),
        (lambda x: functional.softmax(x.long(), 1, dtype=torch.float64), f"{FLOATS} torch.int64"),
        (
            lambda x: torch.complex(x, x).conj().imag.softmax(1),
            "input is a lazily negated view; call resolve_neg() first",
        ),
        (
            lambda x: torch.softmax(x.as_subclass(Subclass), 1),
            "input is a Subclass of layout torch.strided, not a plain strided tensor",
        ),
        (
            lambda x: torch.softmax(x.requires_grad_(), 1, out=torch.empty_like(x)),
            "out is given, and a tensor requires a gradient",
        ),
        (lambda x: torch.softmax(x, 1, out=_another(x)), "out has shape (7,), and the result has (2, 3, 5)"),
        (
            lambda x: torch.softmax(x[:1], 1, out=x[:1].mT).clone(),
            "out has shape (1, 5, 3), and the result has (1, 3, 5)",
        ),
    ],
    "log_softmax": [
        (lambda x: functional.log_softmax(x), "dim is None, so PyTorch chooses it"),
        (lambda x: torch.log_softmax(x.short(), 1, torch.float32), f"{FLOATS} torch.int16"),
    ],
    "logsumexp": [
        (lambda x: torch.logsumexp(x.long(), 1), f"{FLOATS} torch.int64"),
        (lambda x: torch.logsumexp(torch.complex(x, x), 1), f"{FLOATS} torch.complex64"),
    ],
}


def _another(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(7, device=x.device)


@pytest.mark.filterwarnings(
    "ignore:Implicit dimension choice:UserWarning", "ignore:An output with one or more:UserWarning"
)
@pytest.mark.parametrize(("name", "call", "reason"), cases(LEFT))
def test_a_call_is_left_to_pytorch_with_its_reason(name: str, call: Function, reason: str, ours: list[str]) -> None:
    expected = call(sample())
    with osm.override(backend=BACKEND) as mode:
        found = call(sample())
    assert torch.equal(found, expected)
    assert mode.report() == Report({}, {(name, reason): 1})
    assert ours == []
    with pytest.raises(RuntimeError) as error, osm.override(backend=BACKEND, strict=True) as mode:
        call(sample())
    assert str(error.value) == f"override(strict=True): PyTorch would run a call of {name}: {reason}"
    assert mode.report() == Report({}, {})


def test_a_subclass_still_sees_the_call() -> None:
    Subclass.calls = 0
    with osm.override(backend=BACKEND):
        assert type(torch.softmax(sample().as_subclass(Subclass), 1)) is Subclass
    assert Subclass.calls == 1


# Some versions of PyTorch warn at every sparse tensor.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_other_inputs_are_left() -> None:
    x = sample(2, 3)
    indices = torch.tensor([[0, 1], [1, 2]], device=DEVICE)
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2, device=DEVICE), (2, 3), check_invariants=True)
    graph = torch.fx.Graph()
    proxy = torch.fx.Proxy(graph.placeholder("x"))
    with osm.override(backend=BACKEND) as mode:
        for function in (torch.softmax, torch.log_softmax):
            with pytest.raises((NotImplementedError, RuntimeError)):
                function(sparse, 1)
        assert isinstance(torch.softmax(proxy, 1), torch.fx.Proxy)
    assert mode.report().left == {("softmax", "input is a Proxy, not a tensor"): 1}
    with osm.override() as mode:
        assert torch.softmax(x.to("meta"), 1).is_meta
    assert mode.report().left == {("softmax", "input is on meta, where PyTorch's own operation runs"): 1}


def test_out_is_left_where_ours_would_differ() -> None:
    x = sample()
    out = torch.empty_like(x)
    with osm.override(backend=BACKEND) as mode:
        assert torch.softmax(x, 1, out=out) is out
        with torch.autocast(DEVICE, torch.bfloat16):
            torch.softmax(x, 1, out=out)
        x.logsumexp(2)
        torch.logsumexp(x, 2, out=x[:, :, 0])
    overlap = "out overlaps input in memory without being the same tensor; clone() one of them"
    left = {("softmax", "out is given under autocast"): 1, ("logsumexp", overlap): 1}
    assert mode.report() == Report({"softmax": 1, "logsumexp": 1}, left)


WRONG: list[Function] = [
    lambda x: torch.softmax(x, 5),
    lambda x: torch.softmax(x, "rows"),
    lambda x: torch.softmax(x, True),
    lambda x: torch.softmax(x),
    lambda x: torch.softmax(x, 1, 2, 3),
    lambda x: torch.softmax(x, 1, dtype=3),
    lambda x: torch.softmax(x, 1, keepdim=True),
    lambda x: torch.softmax(x, 1, dim=1),
    lambda x: torch.softmax([1.0], 0),
    lambda x: torch.softmax(x.long(), 1),
    lambda x: torch.softmax(x, 1, out=torch.empty_like(x, dtype=torch.float16)),
    lambda x: torch.softmax(x, 1, dtype=torch.complex64),
    lambda x: torch.logsumexp(x.requires_grad_(), 1, out=torch.empty_like(x)),
    lambda x: torch.softmax(x, 1, out=3),
    lambda x: x.softmax(-4),
    lambda x: x.log_softmax((0, 1)),
    lambda x: functional.softmax(x, 3),
    lambda x: functional.log_softmax(x, 1, axis=2),
    lambda x: torch.special.softmax(x, 1, out=torch.empty_like(x)),
    lambda x: torch.logsumexp(x, 7),
    lambda x: torch.logsumexp(x, (0, 7)),
    lambda x: torch.logsumexp(x, (0, 0)),
    lambda x: torch.logsumexp(x, None),
    lambda x: torch.logsumexp(x, 1, keepdim=2),
    lambda x: torch.logsumexp(x, 1, dtype=torch.float64),
]


@pytest.mark.parametrize("call", WRONG)
@pytest.mark.parametrize("backend", [None, BACKEND])
def test_a_wrong_call_raises_pytorchs_error(call: Function, backend: str | None) -> None:
    mode = osm.override(backend=backend)
    errors = []
    for block in (warnings.catch_warnings(), mode):
        try:
            with block:
                call(sample())
        except Exception as error:
            errors.append((type(error), str(error)))
    assert len(errors) == 2
    assert errors[0] == errors[1]
    assert mode.report() == Report({}, {})
    assert not torch._C._len_torch_function_stack()


UNTOUCHED: list[Function] = [
    lambda x: functional.softmin(x, 1),
    lambda x: functional.softmin(x, 1, dtype=WIDE),
    lambda x: functional.gumbel_softmax(x, dim=1),
    lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    lambda x: functional.nll_loss(x[0], torch.tensor([1, 0, 2], device=x.device)),
    lambda x: torch.nn.Softmin(dim=1)(x),
    lambda x: attention(x)[0],
    lambda x: torch.relu(x).sum(0).exp()[1:],
    lambda x: torch.sparse.softmax(torch.eye(3).to_sparse(), 1).to_dense(),
    lambda x: torch.ops.aten.softmax.int(x, 1),
    lambda x: in_torchscript()(x),
    lambda x: torch.logaddexp(x, x) + torch.logcumsumexp(x, 1),
]


@functools.cache
def in_torchscript() -> Any:
    with warnings.catch_warnings():
        # PyTorch deprecates TorchScript.
        warnings.simplefilter("ignore")
        return torch.jit.trace(lambda x: torch.softmax(x, 1), torch.zeros(1, 1, 1))


def attention(x: torch.Tensor) -> Any:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(5, 5, batch_first=True, device=x.device)
    return module(x, x, x)


@pytest.mark.parametrize("call", UNTOUCHED)
def test_no_other_function_is_touched(call: Function, ours: list[str]) -> None:
    """softmin, gumbel_softmax and multi_head_attention_forward call softmax, and PyTorch turns the mode off there."""
    results = []
    for block in (False, True):
        torch.manual_seed(1)
        mode = osm.override(backend=BACKEND, strict=True)
        with mode if block else warnings.catch_warnings():
            results.append(call(sample()))
    assert torch.equal(*results)
    assert mode.report() == Report({}, {})
    assert ours == []


def test_a_call_of_ours_inside_the_block_is_not_replaced(ours: list[str]) -> None:
    """The calls of PyTorch inside our functions are not for the block, whichever backend it forces."""
    x = sample()
    model = torch.nn.Sequential(torch.nn.Softmax(1), osm.nn.LogSumExp(1, causal=True))
    osm.nn.replace(model)

    def calls() -> list[torch.Tensor]:
        return [
            osm.softmax(x, 1, backend="eager"),
            osm.log_softmax(x.cpu(), 1),
            osm.logsumexp(x, 1, backend="eager", batch_invariant=True),
            osm.softmax(x, 1, scale=2.0, backend="eager", out=torch.empty_like(x)),
            torch.func.jvp(functools.partial(osm.logsumexp, dim=1, backend=BACKEND), (x,), (x,))[1],
            model.cpu()(x.cpu()),
        ]

    expected = calls()
    ours.clear()
    with osm.override(backend="triton", strict=True) as mode:
        found = calls()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert mode.report() == Report({}, {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_left_to_pytorch(layout: torch.layout) -> None:
    rows = [sample()[0, :1], sample()[0, :2]]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    with osm.override(backend=BACKEND) as mode:
        found = torch.softmax(nested, -1)
        with pytest.raises(RuntimeError):
            functional.cross_entropy(nested, torch.zeros(3, dtype=torch.long, device=DEVICE))
    for result in (found, osm.softmax(nested, -1)):
        for row, y in zip(rows, result.unbind(), strict=True):
            torch.testing.assert_close(y, torch.softmax(row, -1))
    reason = f"input is a nested tensor of layout {layout}, not a plain strided tensor"
    # PyTorch's error comes before the count.
    assert mode.report() == Report({}, {("softmax", reason): 1})
    with pytest.raises(PlanError, match="input is a nested tensor"):
        osm.softmax(nested, -1, backend="triton")
    for loss in (osm.cross_entropy, osm.token_logprobs):
        with pytest.raises(RuntimeError, match=r"\(\): (input|logits) is a nested tensor"):
            loss(nested, torch.zeros(3, dtype=torch.long, device=DEVICE))


@pytest.mark.parametrize("compiled", [False, True])
def test_functions_that_a_block_leaves_out(compiled: bool) -> None:
    x, target = sample(4, 6), torch.tensor([0, 5, 2, 1], device=DEVICE)

    def results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(x, 1), functional.cross_entropy(x, target)

    expected = results(x)
    # A function that is named is no surprise, so strict allows it.
    with osm.override(backend=BACKEND, strict=True, leave=("cross_entropy", "logsumexp")) as mode:
        found = (torch.compile(results, backend="eager") if compiled else results)(x)
    torch.testing.assert_close(found, expected)
    reason = "the block leaves this function to PyTorch (leave=)"
    # torch.compile traces PyTorch's function too, and counts the call twice.
    assert mode.report() == Report({"softmax": 1}, {("cross_entropy", reason): 1 + compiled})
    assert f"cross_entropy: PyTorch ran {'2 calls' if compiled else '1 call'}: {reason}." in str(mode.report())


def test_names_of_functions_to_leave_are_checked() -> None:
    with pytest.raises(
        ValueError, match=r"leave names an unknown function 'softmin'; functions: softmax, log_softmax, "
    ):
        osm.override(leave=["softmax", "softmin"])
    for wrong in ("softmax", None, 3):
        with pytest.raises(TypeError, match="leave must be a collection of names of functions"):
            osm.override(leave=wrong)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_model_that_differentiates_twice_and_repeats_backward(reduction: str) -> None:
    x, target = sample(4, 6), torch.tensor([0, 5, -100, 1], device=DEVICE)

    def training() -> list[torch.Tensor]:
        w = torch.eye(6, device=DEVICE).requires_grad_()
        loss = functional.cross_entropy(x @ w, target, reduction=reduction)
        (dw,) = torch.autograd.grad(loss, w, create_graph=True)
        (loss + dw.pow(2).sum()).backward(retain_graph=True)
        loss.backward()
        assert w.grad is not None
        return [loss.detach(), dw.detach(), w.grad]

    expected = training()
    with osm.override(backend=BACKEND, strict=True) as mode:
        found = training()
    torch.testing.assert_close(found, expected)
    assert mode.report() == Report({"cross_entropy": 1}, {})
