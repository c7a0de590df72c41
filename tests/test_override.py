"""`override` sends every spelling of the softmax functions to ours, says what it left, and changes nothing else."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import onlinesoftmax as osm
from onlinesoftmax.overrides import Report
from onlinesoftmax.overrides.table import REPLACEMENTS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BACKEND = None if GPU else "triton"
"""Backend with which our functions take calls on DEVICE."""

ON_CPU = "input is on the CPU, where PyTorch's own operation runs"
WIDE = torch.float64
Function = Callable[[torch.Tensor], Any]

SPELLINGS: dict[str, list[Function]] = {
    "softmax": [
        lambda x: torch.softmax(x, 1),
        lambda x: torch.softmax(input=x, dim=0, dtype=WIDE),
        lambda x: torch.softmax(x, axis=-2),
        lambda x: torch.softmax(x, 1, WIDE),
        lambda x: torch.softmax(x, 1, out=torch.empty_like(x)),
        lambda x: torch.softmax(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: torch.softmax(y := x.clone(), 1, out=y),
        lambda x: x.softmax(-1),
        lambda x: x.softmax(dim=0, dtype=WIDE),
        lambda x: torch.Tensor.softmax(x, 0),
        lambda x: torch.special.softmax(x, 0),
        lambda x: torch.special.softmax(x, dim=1, dtype=WIDE),
        lambda x: functional.softmax(x, 1),
        lambda x: functional.softmax(x, 0, 3, WIDE),
        lambda x: functional.softmax(x, dim=0, _stacklevel=5),
        lambda x: torch.nn.Softmax(dim=-1)(x),
        lambda x: torch.nn.Softmax2d()(x[None]),
    ],
    "log_softmax": [
        lambda x: torch.log_softmax(x, 1),
        lambda x: torch.log_softmax(x, dim=-2, dtype=WIDE),
        lambda x: torch.log_softmax(x, 0, dtype=WIDE, out=torch.empty_like(x, dtype=WIDE)),
        lambda x: x.log_softmax(0),
        lambda x: torch.special.log_softmax(x, 1, dtype=WIDE),
        lambda x: functional.log_softmax(x, dim=1),
        lambda x: functional.log_softmax(x, -1, 3, WIDE),
        lambda x: torch.nn.LogSoftmax(dim=0)(x),
    ],
    "logsumexp": [
        lambda x: torch.logsumexp(x, 1),
        lambda x: torch.logsumexp(x, (0, 2), True),
        lambda x: torch.logsumexp(x, axis=[1, -1], keepdims=True),
        lambda x: torch.logsumexp(x, (0, 1), out=torch.empty(x.shape[2:], device=x.device)),
        lambda x: torch.logsumexp(x, 2, True, out=torch.empty_like(x[:, :, :1])),
        lambda x: x.logsumexp(-1, keepdim=True),
        lambda x: x.logsumexp(torch.Size([0])),
        lambda x: torch.special.logsumexp(x, dim=0),
    ],
}


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers on DEVICE."""
    return torch.randn(shape or (2, 3, 5), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).to(dtype)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of our public functions that `override` ran, in order."""
    called: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        function = getattr(osm, name)
        return lambda *args, **kwargs: (called.append(name), function(*args, **kwargs))[1]

    for name in SPELLINGS:
        monkeypatch.setattr(f"onlinesoftmax.api.{name}", recorded(name))
    return called


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


compiles = pytest.mark.usefixtures("fresh_dynamo")


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, *_row(row), id=f"{name}-{i}") for name in table for i, row in enumerate(table[name])]


def _row(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)


@pytest.mark.parametrize(("name", "call"), cases(SPELLINGS))
def test_every_spelling_is_taken(name: str, call: Function, ours: list[str]) -> None:
    x = sample()
    expected = call(x)
    with osm.override(backend=BACKEND) as mode:
        found = call(x)
    torch.testing.assert_close(found, expected)
    assert mode.report() == Report({name: 1}, {})
    assert ours == [name]


@pytest.mark.parametrize(("name", "call"), cases(SPELLINGS))
def test_pytorch_runs_on_a_cpu_by_default(name: str, call: Function, ours: list[str]) -> None:
    x = sample().cpu()
    expected = call(x)
    with osm.override() as mode:
        found = call(x)
    assert torch.equal(found, expected)
    assert mode.report() == Report({}, {(name, ON_CPU): 1})
    assert ours == []


def test_every_replaced_function_has_a_spelling_above() -> None:
    seen = set()

    class Record(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func)
            return func(*args, **(kwargs or {}))

    with Record():
        for calls in SPELLINGS.values():
            for call in calls:
                call(sample())
    assert seen >= set(REPLACEMENTS) - {functional.cross_entropy}


class Subclass(torch.Tensor):
    """A tensor that counts the functions of PyTorch that are called with it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Subclass.calls += func is torch.softmax
        return super().__torch_function__(func, types, args, kwargs)


FLOATS = "dtype must be one of float16, bfloat16, float32, float64, got"
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


def test_a_forced_backend_that_cannot_run_is_an_error() -> None:
    with pytest.raises(osm.PlanError, match="cuda/row: "), osm.override(backend="cuda"):
        torch.softmax(sample().cpu(), 1)


def test_cross_entropy() -> None:
    """The function and the module are taken; calls that only PyTorch computes are left, with their reasons."""
    x, target = sample(2, 3), torch.tensor([0, 1], device=DEVICE)
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=x.dtype, device=DEVICE)
    module = torch.nn.CrossEntropyLoss(weight, ignore_index=0, label_smoothing=0.5)
    want = module(x, target), functional.cross_entropy(x, target, weight, None, -100, None, "sum", 0.1)
    probabilities = functional.cross_entropy(x, x.softmax(1))
    with osm.override(strict=True) as outer, osm.override(backend=BACKEND) as mode:
        found = module(x, target), functional.cross_entropy(x, target, weight, None, -100, None, "sum", 0.1)
    torch.testing.assert_close(found, want)
    assert mode.report() == Report({"cross_entropy": 2}, {})
    assert outer.report() == Report({}, {})
    with osm.override(backend=BACKEND) as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.testing.assert_close(functional.cross_entropy(x, x.softmax(1)), probabilities)
        functional.cross_entropy(x, target, reduce=False)
    reasons = {reason for name, reason in mode.report().left if name == "cross_entropy"}
    assert reasons == {
        "the targets are class probabilities, for which there is no kernel",
        "reduce is deprecated, and our function does not have it",
    }
    with osm.override(backend=BACKEND, strict=True), pytest.raises(RuntimeError, match="class probabilities"):
        functional.cross_entropy(x, x.softmax(1))


def implicit(x: torch.Tensor) -> None:
    functional.softmax(x)
    functional.log_softmax(x)
    functional.softmin(x)


def test_the_warning_about_dim_names_the_same_line() -> None:
    caught = []
    for modes in ([], [osm.override()], [osm.override(), osm.override()]):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for mode in modes:
                mode.__enter__()
            implicit(sample())
            for mode in reversed(modes):
                mode.__exit__(None, None, None)
        caught.append([(str(w.message), w.category, w.filename, w.lineno) for w in found])
    assert caught[0] == caught[1] == caught[2]
    assert [Path(row[2]).name for row in caught[0]] == [Path(__file__).name] * 3


def test_strict_names_the_function_and_the_reason() -> None:
    with (
        pytest.raises(
            RuntimeError, match=r"override\(strict=True\): PyTorch would run a call of logsumexp: input is on"
        ),
        osm.override(strict=True),
    ):
        sample().cpu().logsumexp(0)
    with osm.override(strict=True, backend=BACKEND) as mode:
        torch.softmax(sample(), 1)
    assert mode.report().taken == {"softmax": 1}


def test_report_is_a_record_in_sentences() -> None:
    with osm.override(backend=BACKEND) as mode:
        for _ in range(2):
            torch.softmax(sample(), 1)
        sample().logsumexp(0)
        report = mode.report()
        torch.softmax(sample().int(), 1, dtype=torch.float32)
    assert report == Report({"softmax": 2, "logsumexp": 1}, {})
    assert str(mode.report()) == (
        "softmax: our function took 2 calls.\n"
        "logsumexp: our function took 1 call.\n"
        f"softmax: PyTorch ran 1 call: {FLOATS} torch.int32."
    )
    assert str(osm.override().report()) == "No call was counted."
    with pytest.raises(AttributeError):
        report.taken = {}  # type: ignore[misc]  # it is frozen
    report.taken["softmax"] = 9
    assert mode.report().taken["softmax"] == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"strict": 1}, TypeError, r"override\(\): strict must be a bool, not int"),
        ({"backend": "metal"}, ValueError, r"override\(\): unknown backend 'metal'; backends: cuda, triton, eager"),
    ],
)
def test_wrong_arguments_of_override(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        osm.override(**arguments)


def test_an_inner_block_decides_first(ours: list[str]) -> None:
    x = sample()
    with osm.override(backend="eager") as outer:
        with osm.override(backend=BACKEND) as inner:
            torch.softmax(x, 1)
            torch.softmax(x.int(), 1, dtype=torch.float32)
        torch.logsumexp(x, 1)
        with osm.override() as inner_of_cpu:
            torch.log_softmax(x.cpu(), 1)
    integers = {("softmax", f"{FLOATS} torch.int32"): 1}
    assert inner.report() == Report({"softmax": 1}, integers)
    assert inner_of_cpu.report() == Report({}, {("log_softmax", ON_CPU): 1})
    assert outer.report() == Report({"logsumexp": 1, "log_softmax": 1}, integers)
    assert ours == ["softmax", "logsumexp", "log_softmax"]


def test_a_block_that_is_open_already_counts_once() -> None:
    mode, other = osm.override(), osm.override()
    with mode, other, mode, mode:
        torch.softmax(torch.zeros(2), 0)
    assert mode.report() == other.report() == Report({}, {("softmax", ON_CPU): 1})
    assert not torch._C._len_torch_function_stack()
    with mode:
        torch.softmax(torch.zeros(2), 0)
    assert mode.report().left["softmax", ON_CPU] == 2


def test_an_error_closes_the_block(ours: list[str]) -> None:
    mode = osm.override(backend=BACKEND)

    def fails() -> float:
        torch.softmax(sample(), 1)
        return 1 / 0

    with pytest.raises(ZeroDivisionError), mode:
        fails()
    torch.softmax(sample(), 1)
    assert ours == ["softmax"]
    assert mode.report().taken == {"softmax": 1}


def test_each_thread_has_its_own_block() -> None:
    mode = osm.override(backend="eager")
    begin = threading.Barrier(4)
    bare: list[Any] = []

    def outside() -> None:
        torch.softmax(torch.zeros(2), 0)
        bare.append(torch._C._len_torch_function_stack())

    def inside() -> None:
        with mode:
            begin.wait()
            for _ in range(200):
                torch.softmax(torch.zeros(2), 0)

    with mode:
        other = threading.Thread(target=outside)
        other.start()
        other.join()
    assert bare == [0]
    assert mode.report() == Report({}, {})
    threads = [threading.Thread(target=inside) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mode.report() == Report({"softmax": 800}, {})


def test_a_decorated_function(ours: list[str]) -> None:
    class Model:
        scale = 2.0

        @osm.override(backend=BACKEND)
        def forward(self, x: torch.Tensor, *, dim: int = 0, depth: int = 0) -> torch.Tensor:
            """Docstring."""
            if depth:
                return self.forward(x, dim=dim, depth=depth - 1)
            return torch.softmax(x * self.scale, dim)

    x = sample()
    for depth in (0, 3):
        torch.testing.assert_close(Model().forward(x, dim=1, depth=depth), torch.softmax(2 * x, 1))
    assert ours == ["softmax", "softmax"]
    assert Model.forward.report() == Report({"softmax": 2}, {})
    assert Model.forward.__doc__ == "Docstring."
    assert not torch._C._len_torch_function_stack()


def test_what_cannot_be_decorated() -> None:
    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match=r"override\(\) decorates no coroutine and no generator"):
            osm.override()(function)
    for thing in (torch.nn.Linear, 3):
        with pytest.raises(TypeError, match=r"override\(\) decorates functions, not"):
            osm.override()(thing)


def test_gradients_autocast_and_transforms(ours: list[str]) -> None:
    x = sample(4, 6)

    def results() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = torch.softmax(leaf * 2, 1).log().sum() + functional.log_softmax(leaf, 0)[0, 0] + leaf.logsumexp(1).sum()
        (first,) = torch.autograd.grad(y, leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        with torch.autocast(DEVICE, torch.bfloat16):
            half = functional.softmax(x @ x.mT, -1)
        return [
            first.detach(), second, half.float(),
            torch.func.grad(lambda x: functional.softmax(x, -1)[0, 0])(x),
            torch.func.vmap(lambda row: torch.logsumexp(row, 0))(x),
            torch.func.vmap(torch.func.grad(lambda row: torch.log_softmax(row, 0)[1]))(x),
            torch.func.jvp(lambda x: x.softmax(1), (x,), (x,))[1],
        ]  # fmt: skip

    expected = results()
    with osm.override(backend=BACKEND, strict=True) as mode:
        found = results()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if a is found[2] else 1e-4, atol=1e-5)
        assert a.dtype == b.dtype
    assert mode.report() == Report({"softmax": 4, "log_softmax": 2, "logsumexp": 2}, {})
    assert len(ours) == 8


def test_checkpoints_repeat_the_forward_without_the_block(ours: list[str]) -> None:
    """PyTorch turns modes off in backward, so the repeated forward is ours only if the function is decorated."""
    x = sample(4, 6)
    mode = osm.override(backend=BACKEND)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * x, 1).square()

    expected = torch.autograd.grad(layer(leaf := x.clone().requires_grad_()).sum(), leaf)
    for function, calls in ((layer, 1), (mode(layer), 2)):
        for reentrant in (False, True):
            ours.clear()
            leaf = x.clone().requires_grad_()
            with mode:
                checkpoint(function, leaf, use_reentrant=reentrant).sum().backward()
            torch.testing.assert_close((leaf.grad,), expected)
            assert len(ours) == calls


class Block(torch.nn.Module):
    """A transformer block in the style of GPT-2, with every way to reach softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.probabilities = torch.nn.Linear(8, 24), torch.nn.Linear(8, 3), torch.nn.Softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(functional.layer_norm(x, x.shape[-1:])).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(torch.ones(5, 5, device=x.device).triu(1).bool(), -torch.inf)
        x = x + functional.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype) @ v
        x = x * self.probabilities(self.gate(x))[..., :1] + torch.logsumexp(x, (1, 2), keepdim=True)
        return x.log_softmax(dim=-1)


OF_BLOCK = Report({"softmax": 2, "logsumexp": 1, "log_softmax": 1}, {})


def model_and_input() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Block().to(DEVICE), sample(2, 5, 8).requires_grad_()


def assert_trains_alike(model: torch.nn.Module, compiled: Callable[..., Any], block: Any, *inputs: Any) -> None:
    """The same output and the same gradients as the model without the block."""
    results = []
    for function, context in ((model, warnings.catch_warnings()), (compiled, block)):
        model.zero_grad()
        with context:
            y = function(*inputs)
        y = getattr(y, "logits", y)
        y.square().mean().backward()
        results.append([y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


def targets(graph: torch.fx.GraphModule) -> list[str]:
    """Names of the functions in a graph."""
    return [str(node.target) for node in graph.graph.nodes]


@compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_model_has_our_operators_in_one_graph() -> None:
    model, x = model_and_input()
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(targets(graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    mode = osm.override(backend=BACKEND, strict=True)
    assert_trains_alike(model, compiled, mode, x)
    assert mode.report() == OF_BLOCK
    assert len(graphs) == 1
    for name, count in OF_BLOCK.taken.items():
        assert graphs[0].count(f"onlinesoftmax.{name}") == count
    # A new block runs the compiled model again; it is traced no more, so nothing is counted.
    with osm.override(backend=BACKEND, strict=True) as again:
        compiled(x)
    assert len(graphs) == 1
    assert again.report() == Report({}, {})
    # Outside the block, PyTorch's functions are compiled.
    torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 2
    assert not [target for target in graphs[1] if target.startswith("onlinesoftmax")]


@compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_blocks_inside_a_compiled_function() -> None:
    x = sample()
    counter = CompileCounterWithBackend("aot_eager")

    @osm.override(backend=BACKEND)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(x, 1)

    def function(x: torch.Tensor) -> torch.Tensor:
        with osm.override(backend=BACKEND):
            y = x.logsumexp(1)
        return y + decorated(x).sum(1) + torch.log_softmax(x, 1).sum(1)

    expected = function(x)
    before = decorated.report()
    torch.testing.assert_close(torch.compile(function, backend=counter, fullgraph=True)(x), expected)
    assert [f"onlinesoftmax.{name}" in targets(counter.graphs[0]) for name in SPELLINGS] == [True, False, True]
    assert decorated.report() == before == Report({"softmax": 1}, {})
    assert not torch._C._len_torch_function_stack()


@compiles
def test_what_the_compiler_leaves_to_pytorch() -> None:
    x = sample(3, 4).cpu()
    with osm.override() as mode:
        compiled = torch.compile(lambda x: torch.softmax(x, 1), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), torch.softmax(x, 1))
    # One call while it is traced, one of the line above.
    assert mode.report() == Report({}, {("softmax", ON_CPU): 2})
    with (
        pytest.raises(Exception, match=r"PyTorch would run a call of softmax: input is on the CPU"),
        osm.override(strict=True),
    ):
        torch.compile(lambda x: torch.softmax(x, 1), backend="aot_eager", fullgraph=True)(x)
    assert not torch._C._len_torch_function_stack()


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    """The first read of a cached property takes a lock in Python 3.11, which torch.compile cannot trace."""
    code = (
        "import torch, onlinesoftmax as osm\n"
        "x = torch.randn(2, 3, 4)\n"
        "f = torch.compile(lambda x: torch.logsumexp(x, (0, 2)), backend='eager', fullgraph=True)\n"
        "with osm.override(backend='eager') as mode: y = f(x)\n"
        "torch.testing.assert_close(y, torch.logsumexp(x, (0, 2)))\n"
        "assert mode.report().taken, mode.report()\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_hugging_face_model(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the model comes from Hugging Face transformers")
    sizes: dict[str, Any] = {"vocab_size": 19, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(**sizes, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            **sizes, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    model = model.to(DEVICE).eval()
    tokens = torch.arange(14, device=DEVICE).view(2, 7)
    mode = osm.override(backend=BACKEND, strict=True)
    assert_trains_alike(model, model, mode, tokens)
    assert mode.report() == Report({"softmax": 2}, {})
    expected = copy.deepcopy(model).generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    with osm.override(backend=BACKEND) as mode:
        found = model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(found, expected)
    assert mode.report() == Report({"softmax": 6}, {})
