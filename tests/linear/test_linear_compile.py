"""Heads in whole graphs of torch.compile, and their operators."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from heads import DEVICE, GPU, MEMORY, TOKENS, Tensor, clipped, head, same_with_gradients
from torch.utils.checkpoint import checkpoint

import onlinesoftmax as osm
from onlinesoftmax.lab.bench.inputs import extra_bytes
from onlinesoftmax.linear import plans, products
from onlinesoftmax.linear.problem import problem_of

pytestmark = [
    pytest.mark.usefixtures("small_chunks"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore:The .grad attribute"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


OF_CHUNK = "linear_token_logprobs", "linear_gradients"
"""The operators of a chunk of tokens."""


def losses(x: Tensor, w: Tensor, b: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """A call for each operator and plan."""
    given: dict[str, Any] = {"linear_bias": b}
    scale = torch.linspace(0.5, 2.0, 15, dtype=x.dtype, device=x.device).reshape(TOKENS)
    old, advantage = scale - 1, 1 - scale
    each = osm.linear_cross_entropy(x, w, target, reduction="none", label_smoothing=0.1, return_stats=True, **given)
    found = osm.linear_token_logprobs(x, w, target.clamp(min=0), memory=MEMORY["columns"], softcap=3.0, **given)
    return (
        osm.linear_cross_entropy(x, w, target, token_weight=scale, scale=scale, **given),
        osm.linear_cross_entropy(x, w, target, z_loss=0.1, reduction="sum", memory=MEMORY["columns"], **given),
        osm.linear_cross_entropy(x, w, target, z_loss=0.1, reduction="none", scale=0.7, **given).sin().sum(),
        (each[0] * each[1].entropy).sum(),
        sum(found[1:], found.logprob).sum(),
        osm.linear_token_loss(x, w, target, clipped, old, advantage, **given),
        osm.linear_token_loss(x, w, target, clipped, old, advantage, scale=scale, memory=MEMORY["tokens"], **given),
    )


def test_a_whole_graph() -> None:
    x, w, b, target = head()
    compiled = torch.compile(losses, backend="aot_eager", fullgraph=True)(x, w, b, target)
    for ours, eager in zip(compiled, losses(x, w, b, target), strict=True):
        same_with_gradients(ours, eager, [x, w, b])


@pytest.mark.parametrize(
    "frozen", [(), pytest.param((0,), marks=pytest.mark.exhaustive), (1, 2)], ids=lambda frozen: f"frozen {frozen}"
)
def test_a_token_loss_in_chunks_makes_no_logits_again(frozen: tuple[int, ...]) -> None:
    """One token is ignored and holds NaN, and one target is no class; a graph of any number of tokens has no chunks."""
    x, w, b, target = head()
    with torch.no_grad():
        x[1, 2] = torch.nan
    target[0, 1], memory = 40, MEMORY["tokens"] + 8 * 15 * 7
    problem = problem_of("linear_token_loss", (15, 7, 40), "float64", (True, True, True))
    chunks = plans.plan_of(problem, memory).chunks
    assert chunks > 1
    advantage = torch.linspace(-1, 1, 15, dtype=torch.float64, device=DEVICE).reshape(TOKENS)

    def loss(x: Tensor, w: Tensor, b: Tensor, **given: Any) -> Tensor:
        return osm.linear_token_loss(
            x, w, target, clipped, advantage, advantage, linear_bias=b, reduction="sum", **given
        )

    inputs = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate((x, w, b))]
    code: list[str] = []

    def keep(graph: Any, _: Any) -> Any:
        code.append(graph.code)
        return graph

    ours = torch.compile(loss, backend=keep, fullgraph=True)(*inputs, memory=memory)
    assert [code[0].count(f"onlinesoftmax.{name}(") for name in OF_CHUNK] == [chunks, chunks]
    theirs, wanted = loss(*inputs, memory=memory), [t for t in inputs if t.requires_grad]
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    torch.testing.assert_close(*(torch.autograd.grad(y, wanted) for y in (ours, theirs)))
    if not frozen:
        torch.compile(loss, backend=keep, fullgraph=True, dynamic=True)(x, w, b)
        assert [code[-1].count(f"onlinesoftmax.{name}(") for name in OF_CHUNK] == [1, 0]


@pytest.mark.parametrize(
    "around",
    ["checkpoint of the compiled", pytest.param("compiled checkpoint", marks=pytest.mark.exhaustive), "save_on_cpu"],
)
def test_a_compiled_token_loss_among_hooks_of_saved_tensors(around: str) -> None:
    """There, torch.func.vjp is an error, so the loss is that of log-probabilities."""
    x, w, b, target = head()

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return osm.linear_token_loss(x, w, target, lambda p, h, lse: lse * h - p.exp(), linear_bias=b)

    def in_checkpoint(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        found: Tensor = checkpoint(loss, x, w, b, use_reentrant=False)
        return found

    compiled = torch.compile(in_checkpoint if "compiled c" in around else loss, backend="aot_eager", fullgraph=True)
    if around == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            ours = compiled(x, w, b)
    else:
        ours = checkpoint(compiled, x, w, b, use_reentrant=False) if "of the" in around else compiled(x, w, b)
    # A checkpoint takes one backward pass.
    pairs = zip(*(torch.autograd.grad(y, [x, w, b]) for y in (ours, loss(x, w, b))), strict=True)
    for a, c in pairs:
        torch.testing.assert_close(a, c)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("frozen", [(), (0,), (1,)])
def test_a_compiled_token_loss_takes_the_memory_of_its_plan(frozen: tuple[int, ...]) -> None:
    """One chunk of logits exists at a time, beside the gradients, the sum of the weight's, and vectors."""
    given: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    x, w = (torch.randn(n, 256, **given).requires_grad_(i not in frozen) for i, n in enumerate((8192, 16000)))
    target, old = torch.arange(8192, device=DEVICE), torch.zeros(8192, device=DEVICE)
    memory = 4 * w.numel() + 2 * 1100 * 16000 + 2 * x.numel()

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return osm.linear_token_loss(x, w, target, clipped, old, old + 1, memory=memory)

    compiled, wanted = torch.compile(loss, fullgraph=True), [t for t in (x, w) if t.requires_grad]

    def call() -> Any:
        return torch.autograd.grad(compiled(x, w), wanted)

    torch.testing.assert_close(call(), torch.autograd.grad(loss(x, w), wanted))
    extra = extra_bytes(call, torch.device(DEVICE))
    assert extra is not None
    assert extra <= memory + 64 * 8 * 8192 + (8 << 20)


def test_a_compiled_token_loss_reads_no_parameter() -> None:
    x, w, _, target = head()
    parameter = torch.ones((), dtype=torch.float64, device=DEVICE, requires_grad=True)
    compiled = torch.compile(osm.linear_token_loss, backend="aot_eager")
    with pytest.raises(RuntimeError, match="loss reads a tensor that requires a gradient"):
        compiled(x, w, target, lambda logprob, *_: -logprob * parameter)


def test_an_exported_program_takes_any_number_of_tokens_and_lacks_no_gradient_silently() -> None:
    module = osm.nn.LinearCrossEntropyLoss(7, 40, softcap=3.0).to(DEVICE)
    x, target, tokens = (
        torch.randn(6, 7, device=DEVICE),
        torch.arange(6, device=DEVICE),
        torch.export.Dim("tokens", min=2),
    )
    with torch.no_grad():
        program = torch.export.export(module, (x, target), dynamic_shapes=({0: tokens}, {0: tokens})).module()
    x, target = torch.randn(9, 7, device=DEVICE), torch.arange(9, device=DEVICE)
    y = program(x, target)
    torch.testing.assert_close(y, module(x, target))
    with pytest.raises(RuntimeError, match="traced without a gradient"):
        y.backward()


def test_kept_logits_have_the_strides_that_a_trace_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, rows of logits begin at multiples of 128 bytes where classes do not fill 16."""
    monkeypatch.setattr(products, "has_fast_sizes", lambda t: True)
    x, w, target = torch.randn(3, 4, device=DEVICE), torch.randn(1029, 4, device=DEVICE), torch.arange(3, device=DEVICE)
    arguments = x, w, None, target, None, 1.0, None, None, False, False, False, True, None
    assert torch.ops.onlinesoftmax.linear_token_logprobs(*arguments)[3].stride() == (1056, 1)
    torch.library.opcheck(torch.ops.onlinesoftmax.linear_token_logprobs.default, arguments)


def test_eager_calls_do_not_import_the_compiler() -> None:
    call = "osm.linear_cross_entropy(x, x, t), osm.linear_token_loss(x, x, t, lambda logprob, *_: logprob)"
    made = "x, t = torch.eye(2), torch.tensor([0, 1])"
    code = f"import sys, torch; import onlinesoftmax as osm; {made}; {call}; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_graph_for_any_number_of_tokens() -> None:
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(osm.linear_cross_entropy, backend=keep, fullgraph=True, dynamic=True)
    _, w, b, _ = head()
    for tokens in (5, 9, 31):
        x = torch.randn(tokens, 7, dtype=torch.float64, device=DEVICE, requires_grad=True)
        target = torch.arange(tokens, device=DEVICE) % 40
        theirs = osm.linear_cross_entropy(x, w, target, linear_bias=b)
        same_with_gradients(compiled(x, w, target, linear_bias=b), theirs, [x, w, b])
    assert len(graphs) == 1
    for memory in (2_000, 3_000):
        torch.testing.assert_close(compiled(x, w, target, linear_bias=b, memory=memory), theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace. is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_torchscript() -> None:
    """It has the operators, which run for another number of tokens too, and differentiates."""

    def losses(x: Tensor, w: Tensor, b: Tensor, target: Tensor) -> Tensor:
        known = osm.linear_cross_entropy(x, w, target, linear_bias=b)
        each, _ = osm.linear_cross_entropy(
            x, w, target, linear_bias=b, reduction="none", label_smoothing=0.1, softcap=3.0, return_stats=True
        )
        found = osm.linear_token_logprobs(x, w, target, linear_bias=b, ignore_index=-100)
        return known + each.sum() + found.logprob.sum() + osm.linear_token_loss(x, w, target, lambda p, *_: p.exp())

    x, w, b, target = head()
    traced = torch.jit.trace(losses, (x[0], w, b, target[0]), check_trace=False)
    assert str(traced.graph).count("onlinesoftmax::linear_") == 4
    x, target = x.flatten(0, 1), target.flatten()
    same_with_gradients(traced(x, w, b, target), losses(x, w, b, target), [x, w, b])


@pytest.mark.parametrize("form", ["known", "each", "soft", "columns", "kept", "made again", "backward", "chunk"])
def test_opcheck(form: str) -> None:
    """Schema, fake implementation, derivatives, and traces with shapes that are symbols."""
    x, w, b, target = head(torch.float32)
    x, target, wanted = x.detach().flatten(0, 1).requires_grad_(), target.flatten().clamp(min=0), [True, False, True]
    scale, ones = torch.rand(15, 1, device=DEVICE) + 0.5, torch.ones(15, device=DEVICE)
    ops, numbers, memory = (
        torch.ops.onlinesoftmax,
        (-100, 0.0, 0.01),
        None if form != "columns" else 15 * (4 + 7) * 4 + 60,
    )
    options = 1.0, 3.0, memory, *wanted
    if form == "soft":
        target = torch.rand(15, 40, device=DEVICE).softmax(1)
    if form == "backward":
        known, tensors = (-ones, ones, ones), [t.detach() for t in (x, w, b)]
        operator = ops.linear_token_logprobs_backward.default
        arguments: Any = (
            *tensors,
            target,
            scale,
            *known,
            torch.randn(15, 40, device=DEVICE),
            ones,
            None,
            ones,
            *options,
        )
    elif form == "chunk":
        operator, z = ops.linear_gradients.default, torch.randn(15, 40, device=DEVICE)
        dw, db, of_rows = torch.zeros(40, 7, device=DEVICE), torch.zeros(40, device=DEVICE), [ones] * 3
        tensors = x.detach(), w.detach(), target, scale, -ones, ones, ones.double(), z, *of_rows, dw, db
        arguments = (*tensors, 1.0, 3.0, True, False)
    elif form in ("kept", "made again"):
        operator = ops.linear_token_logprobs.default
        # A frozen input needs a copy without NaN beside the logits.
        given = (x.detach(), w) if form == "kept" else (x, w.detach())
        wanted = [t.requires_grad for t in (*given, b)]
        arguments = (*given, b, target, scale, *options[:3], *wanted, form == "kept", None)
    else:
        operator = ops.linear_cross_entropy.default
        weight, factor = (torch.ones(40, device=DEVICE), None) if form == "each" else (None, ones)
        dtypes = torch.float32, torch.float32
        arguments = (x, w.detach(), b, target, scale, weight, factor, *numbers, form == "soft", *dtypes, *options)
    torch.library.opcheck(operator, arguments)
