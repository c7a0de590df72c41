"""Exported programs: saved, loaded after `import onlinesoftmax`, run on a CPU; opcheck of every operator.

A program that was exported on a GPU has our operators without a backend.  Here the kernels of Triton's interpreter are
forced, and the tests take the backend out of the program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export.passes import move_to_device_pass
from torch.nn import functional

import onlinesoftmax as osm
from contract import DEVICE
from onlinesoftmax.core.options import bits
from onlinesoftmax.ops import OPERATIONS
from pairs import rest_exhaustive

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CLASSES = 40
WEIGHT = torch.linspace(0.5, 2.0, CLASSES)
KEPT = torch.arange(CLASSES) != 7

Function = Callable[..., Any]


def _token_numbers(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax(logits, -1)
    logprob = log_p.gather(1, target[:, None])[:, 0]
    return logprob - (log_p.exp() * log_p).sum(-1) + logits.logsumexp(-1)


PROGRAMS: dict[str, tuple[Function, Function]] = {
    "softmax": (
        lambda y, t, **how: osm.softmax(y, -1, scale=2.0, mask=KEPT.to(y.device), **how),
        lambda y, t: torch.softmax(2 * y.masked_fill(~KEPT, -torch.inf), -1),
    ),
    "log_softmax": (
        lambda y, t, **how: osm.log_softmax(y, 0, softcap=3.0, **how),
        lambda y, t: torch.log_softmax(3 * torch.tanh(y / 3), 0),
    ),
    "logsumexp": (lambda y, t, **how: osm.logsumexp(y, -1, **how), lambda y, t: torch.logsumexp(y, -1)),
    "cross_entropy": (
        lambda y, t, **how: osm.cross_entropy(y, t, WEIGHT.to(y.device), label_smoothing=0.1, **how),
        lambda y, t: functional.cross_entropy(y, t, WEIGHT.to(y.dtype), label_smoothing=0.1),
    ),
    "cross_entropy of rows": (
        lambda y, t, **how: osm.cross_entropy(y, t, ignore_index=1, reduction="none", z_loss=0.1, **how),
        lambda y, t: (
            functional.cross_entropy(y, t, ignore_index=1, reduction="none")
            + (0.1 * y.logsumexp(-1) ** 2).where(t != 1, 0)
        ),
    ),
    "token_logprobs": (
        lambda y, t, **how: sum(osm.token_logprobs(y, t, **how)),  # type: ignore[no-any-return]  # tensors add up
        _token_numbers,
    ),
}
"""Ours and PyTorch's function of logits and targets, by name."""


class Head(torch.nn.Module):
    """Logits of a linear layer, and a function of them."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.linear = function, torch.nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        return self.function(self.linear(x), t)


def exported(function: Function, strict: bool) -> torch.export.ExportedProgram:
    """A program with operators that leave the backend open, for any number of rows."""
    rows = torch.export.Dim("rows", min=2)
    model = Head(lambda y, t: function(y, t, backend="triton")).to(DEVICE)
    arguments = torch.randn(6, 5, device=DEVICE), torch.arange(6, device=DEVICE)
    program = torch.export.export(model, arguments, dynamic_shapes=({0: rows}, {0: rows}), strict=strict)
    assert "onlinesoftmax" in str(program.graph)
    for node in program.graph.nodes:
        node.args = tuple(None if isinstance(each, str) and each == "triton" else each for each in node.args)
    return program


def check(program: torch.export.ExportedProgram, name: str) -> None:
    """Compare result and gradient of a program with those of PyTorch's function, for another number of rows."""
    module = program.module()
    model = Head(PROGRAMS[name][1]).double()
    model.load_state_dict(module.state_dict())
    x, t = torch.randn(9, 5), torch.arange(9) % CLASSES
    found, want = module(x, t), model(x.double(), t)
    torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-5)
    dy = torch.linspace(-1, 1, want.numel()).view(want.shape)
    (dw,) = torch.autograd.grad(found, [module.linear.weight], dy)
    torch.testing.assert_close(
        dw, torch.autograd.grad(want, [model.linear.weight], dy.double())[0].float(), rtol=1e-5, atol=1e-5
    )


def named_tuples(x: torch.Tensor, t: torch.Tensor) -> tuple[Any, ...]:
    """A result of each function that returns a named tuple, some with fields that are None."""
    _, statistics = osm.cross_entropy(x, t, return_stats=True)
    return (
        statistics, osm.token_logprobs(x, t, entropy=False), osm.topk_logprobs(x, 3), osm.route(x, 2),
        osm.sample(x, seed=1, top_k=3, return_support=3), osm.verify(x[None], t[None, 1:], seed=1),
    )  # fmt: skip


def check_named_tuples(program: torch.export.ExportedProgram) -> None:
    x, t = torch.linspace(-3, 3, 6 * CLASSES).sin().view(6, CLASSES), torch.arange(6)
    found, want = program.module()(x, t), named_tuples(x, t)
    assert [type(one) for one in found] == [type(one) for one in want]
    torch.testing.assert_close(found, want)


class NamedTuples(torch.nn.Module):
    """The function `named_tuples`, for torch.export."""

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        return named_tuples(x, t)


_LOAD = """
import sys
import onlinesoftmax, torch
sys.path.insert(0, sys.argv[1])
import test_export
assert "triton" not in sys.modules
test_export.check_named_tuples(torch.export.load(f"{sys.argv[2]}/named tuples.pt2"))
for name in sys.argv[3:]:
    test_export.check(torch.export.load(f"{sys.argv[2]}/{name}.pt2"), name)
"""

_NAME = """
import sys, torch, onlinesoftmax
assert "onlinesoftmax.torch.custom_op" not in sys.modules
torch.ops.onlinesoftmax.softmax.default
assert "triton" not in sys.modules
"""


@pytest.mark.early
@pytest.mark.parametrize(
    "saved",
    [
        # The losses of rows have the operator of their mean.
        ("softmax", "cross_entropy", "token_logprobs"),
        pytest.param(("log_softmax", "logsumexp"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_saved_program_runs_on_a_cpu_in_a_new_process(saved: tuple[str, ...], tmp_path: Path) -> None:
    """The operators are registered when a program names one; in the other order of the imports, when they are named."""
    for name in saved:
        program = exported(PROGRAMS[name][0], strict=name == "cross_entropy")
        program = move_to_device_pass(program, "cpu")
        torch.export.save(program, tmp_path / f"{name}.pt2")
    program = torch.export.export(NamedTuples(), (torch.randn(6, CLASSES), torch.arange(6)))
    torch.export.save(program, tmp_path / "named tuples.pt2")
    source = Path(osm.__file__).parents[1]
    paths = os.pathsep.join((str(source), str(Path(__file__).parents[1])))
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    load = [_LOAD, str(Path(__file__).parent), str(tmp_path), *saved]
    for code in (load, [_NAME]):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", *code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def _settings(operation: str, backend: str | None, dim: int = 1) -> tuple[Any, ...]:
    """The settings of an operator's call, its score options that are no tensors, and the numbers of a loss."""
    declared = OPERATIONS[operation]
    common = (dim, None, False, backend, None, False, 2.0, 3.0, False, False)
    values = {"smoothing": 0.1, "z_loss": 0.01, "ignore_index": -100.0}
    return (*common, *(bits(values[name]) for name in declared.numbers))


def _arguments(operation: str, backend: str | None) -> tuple[Any, ...]:
    """Arguments of an operator: all operands, and every output that its kernels of all backends write."""
    declared = OPERATIONS[operation]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, generator=generator)
    wide = torch.rand(3, 1, generator=generator)
    mask = torch.tensor([True, True, False, True, True])
    scores = (3 * torch.tanh(2 * x / 3)).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(1, keepdim=True)
    state = {"m": scores.amax(1, keepdim=True), "l": 1 + wide, "lse": lse, "entropy": wide}
    given: dict[str, Any] = {
        "x": x, "dy": wide if "dy" in declared.row_operands else torch.randn(3, 5, generator=generator),
        "target": torch.tensor([[0], [4], [2]]), **state, "dlse": wide, "dentropy": wide,
        "weight": torch.rand(5, generator=generator), "weight_sum": torch.tensor(2.5), "logits": x,
        "mask": mask, "bias": torch.zeros(5),
    }  # fmt: skip
    from onlinesoftmax.torch.custom_op import _tensors_of

    if declared.has_target and "smoothing" in declared.numbers:
        # No kernel has a mask and smoothing.
        given["mask"] = None
    tensors = [given.get(name) for name in _tensors_of(declared)]
    tensors = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in tensors]
    outputs = [each.name for each in declared.outputs if each.kind != "call"]
    if "y" in outputs and declared.result.name == "y" and declared.backward:
        outputs = ["y"]
    more = (",".join(outputs),) if declared.has_target else ()
    return (*tensors, *_settings(operation, backend), *more)


IN_TURN = [(name, (None, "triton")[(i + j) % 2]) for i in range(2) for j, name in enumerate(OPERATIONS)]
"""Every operator with one of two backends in turn, then with the other."""
OF_CUDA = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in OPERATIONS]


@pytest.mark.parametrize(("operation", "backend"), [*rest_exhaustive(IN_TURN), *OF_CUDA])
def test_opcheck_of_every_operator(operation: str, backend: str | None) -> None:
    """Schema, fake implementation, derivatives, and traces with shapes that are symbols."""
    arguments = _arguments(operation, backend)
    operator = getattr(torch.ops.onlinesoftmax, operation).default
    if not OPERATIONS[operation].backward:
        arguments = (arguments[0].requires_grad_(), *arguments[1:])
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operators_on_a_cpu_compute_what_the_kernels_compute(operation: str) -> None:
    operator = getattr(torch.ops.onlinesoftmax, operation).default
    eager, kernels = (operator(*_arguments(operation, backend)) for backend in ("eager", "triton"))
    torch.testing.assert_close(eager, kernels, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of checks of shapes
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trace_of_torchscript(name: str) -> None:
    """It has the operator, which runs for another number of rows too, and differentiates."""
    ours, theirs = PROGRAMS[name]
    given = torch.randn(6, CLASSES, device=DEVICE), torch.arange(6, device=DEVICE)
    traced = torch.jit.trace(lambda y, t: ours(y, t, backend="triton"), given)
    assert "onlinesoftmax" in str(traced.graph)
    y, t = torch.randn(9, CLASSES, device=DEVICE, requires_grad=True), torch.arange(9, device=DEVICE)
    exact = y.detach().double().requires_grad_()
    found, want = traced(y, t), theirs(exact, t)
    torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-5)
    dy = torch.linspace(-1, 1, want.numel(), device=DEVICE).view(want.shape)
    (dx,), (exact_dx,) = torch.autograd.grad(found, y, dy), torch.autograd.grad(want, exact, dy.double())
    torch.testing.assert_close(dx, exact_dx.float(), rtol=1e-5, atol=1e-5)
