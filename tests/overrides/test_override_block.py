"""The block of `override`: what it takes, its report, strict mode, nested blocks, errors, threads and decorators."""

from __future__ import annotations

import threading
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from spellings import BACKEND, DEVICE, FLOATS, ON_CPU, SPELLINGS, Function, cases, sample
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import onlinesoftmax as osm
from onlinesoftmax.overrides import Report
from onlinesoftmax.overrides.table import REPLACEMENTS


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
    of_plans = [line for line in str(mode.report()).splitlines() if line.startswith("  ")]
    assert [line for line in str(mode.report()).splitlines() if line not in of_plans] == [
        "softmax: our function took 2 calls.",
        "logsumexp: our function took 1 call.",
        f"softmax: PyTorch ran 1 call: {FLOATS} torch.int32.",
    ]
    x = f"of 2 x 3 x 5 float32 on {sample().device}: <Plan "
    # Other plans for tensors of this shape, which other tests forced in this process, are named too.
    assert list(dict.fromkeys(line.partition(x)[0] for line in of_plans)) == ["  softmax ", "  logsumexp "]
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
    async def steps() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r"override\(\) decorates no asynchronous generator; decorate the functions"):
        osm.override()(steps)
    for thing in (torch.nn.Linear, 3):
        with pytest.raises(TypeError, match=r"override\(\) decorates functions, not"):
            osm.override()(thing)


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
    assert seen >= set(REPLACEMENTS) - {functional.cross_entropy, getattr(functional, "linear_cross_entropy", None)}


def test_a_forced_backend_that_cannot_run_is_an_error() -> None:
    with pytest.raises(osm.PlanError, match="cuda/row: "), osm.override(backend="cuda"):
        torch.softmax(sample().cpu(), 1)


@pytest.mark.parametrize("backend", [BACKEND, "eager"])
@pytest.mark.parametrize("rows", [0, 2])
def test_every_function_is_taken_by_a_forced_backend(backend: str | None, rows: int) -> None:
    x, target = sample(2, 3)[:rows], torch.tensor([0, 1], device=DEVICE)[:rows]

    def results() -> list[torch.Tensor]:
        loss = functional.cross_entropy(x, target, reduction="sum")
        return [torch.softmax(x, 1), torch.log_softmax(x, 1), torch.logsumexp(x, 1), loss]

    want = results()
    with osm.override(backend=backend, strict=True) as mode:
        found = results()
    torch.testing.assert_close(found, want)
    assert mode.report() == Report(dict.fromkeys(("softmax", "log_softmax", "logsumexp", "cross_entropy"), 1), {})


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


@pytest.mark.skipif(
    not hasattr(functional, "linear_cross_entropy"), reason="PyTorch has linear_cross_entropy since 2.13"
)
def test_linear_cross_entropy_of_pytorch() -> None:
    x, weight, bias, flat = sample(4, 8), sample(7, 8), sample(7), torch.tensor([0, 6, 3, 3], device=DEVICE)
    module = torch.nn.LinearCrossEntropyLoss(8, 7, bias=True, device=DEVICE)

    def results() -> list[torch.Tensor]:
        return [
            functional.linear_cross_entropy(x, weight, flat, linear_bias=bias, label_smoothing=0.1),
            functional.linear_cross_entropy(x, weight, flat, reduction="none", ignore_index=3),
            module(x, flat),
        ]

    expected = results()
    mode = osm.override(strict=True)
    with mode:
        found = results()
    assert mode.report() == Report({"linear_cross_entropy": 3}, {})
    torch.testing.assert_close(found, expected)
    mode = osm.override()
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functional.linear_cross_entropy(x, weight, flat, options=torch.nn.LinearCrossEntropyOptions())
        with pytest.raises(RuntimeError, match="Long"):
            functional.linear_cross_entropy(x, weight, flat.int())
    assert mode.report() == Report({}, {("linear_cross_entropy", "options chooses the chunks of PyTorch"): 1})
