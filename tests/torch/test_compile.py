"""torch.compile and torch.export: whole graphs, no recompilation for a new N, custom operators that pass opcheck."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from test_fused import moved, options
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from ways import HOW, gradient

import onlinesoftmax as osm
from contract import DEVICE, GPU, OPERATIONS
from pairs import rest_exhaustive

BACKEND = "inductor" if GPU else "aot_eager"
pytestmark = pytest.mark.filterwarnings(
    # Inductor's own, on some machines.
    "ignore:.*TensorFloat32.*:UserWarning",
    "ignore::DeprecationWarning:torch",
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "operation"), rest_exhaustive(itertools.product(("plain", "scale tensor", "all"), OPERATIONS))
)
def test_one_graph_with_gradients(operation: str, name: str, path: dict[str, str]) -> None:
    shape = (2, 3, 33)
    given = moved(options(torch.float32, shape)[name]) if name != "plain" else {}

    def function(x: torch.Tensor, **given: Any) -> torch.Tensor:
        return OPERATIONS[operation](x * 2, -1, **path, **given) + 1

    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend=BACKEND)):
        x = torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).requires_grad_()
        leaves = {
            k: v.clone().requires_grad_()
            for k, v in given.items()
            if isinstance(v, torch.Tensor) and v.is_floating_point()
        }
        y = call(x, **(given | leaves))
        y.backward(torch.linspace(0, 1, y.numel(), device=DEVICE).view(y.shape))
        results.append([y, x.grad, *(leaf.grad for leaf in leaves.values())])
    torch.testing.assert_close(*reversed(results), rtol=1e-5, atol=1e-6)


def test_no_recompilation_for_a_new_size(path: dict[str, str]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda x: osm.softmax(x, scale=0.5, causal=True, **path), backend=counter, dynamic=True)
    for rows, cols in ((4, 17), (5, 33), (9, 130), (2, 64)):
        x = torch.randn(rows, cols, device=DEVICE)
        expected = osm.softmax(x, scale=0.5, causal=True, **path)
        torch.testing.assert_close(function(x), expected)
    assert counter.frame_count == 1


def test_autocast_in_a_graph(path: dict[str, str]) -> None:
    x = torch.randn(4, 32, device=DEVICE, dtype=torch.bfloat16)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return osm.softmax(x, -1, **path)

    with torch.autocast(DEVICE, torch.bfloat16):
        expected = torch.softmax(x, -1).dtype
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    assert compiled.dtype == function(x).dtype == expected


def test_export(path: dict[str, str]) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return osm.log_softmax(x, -1, mask=mask, scale=2.0, **path)

    x, mask = torch.randn(3, 40, device=DEVICE), torch.ones(3, 40, dtype=torch.bool, device=DEVICE)
    mask[:, 5] = False
    rows, cols = torch.export.Dim("rows", min=2), torch.export.Dim("cols", min=2)
    shapes = {"x": {0: rows, 1: cols}, "mask": {0: rows, 1: cols}}
    for strict in (False, True):
        program = torch.export.export(Model(), (x, mask), dynamic_shapes=shapes, strict=strict)
        other, no_mask = torch.randn(7, 90, device=DEVICE), torch.ones(7, 90, dtype=torch.bool, device=DEVICE)
        for arguments in ((x, mask), (other, no_mask)):
            torch.testing.assert_close(program.module()(*arguments), Model()(*arguments))
        if path or GPU:
            assert "onlinesoftmax" in str(program.graph)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
def test_cuda_graphs_forward_and_backward(operation: str) -> None:
    torch.manual_seed(0)
    mask = torch.rand(64, 3000, device="cuda") > 0.2
    x = torch.randn(64, 3000, device="cuda", requires_grad=True)
    shape = (64,) if operation == "logsumexp" else (64, 3000)
    dy = torch.randn(shape, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = OPERATIONS[operation](x, mask=mask, scale=0.5)
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            expected = step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Any synchronisation of the host is an error inside.
    with torch.cuda.graph(graph, capture_error_mode="global"):
        found = step()
    for t in found:
        t.fill_(7.0)
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_no_synchronisation_and_no_foreign_memory() -> None:
    x = torch.randn(16, 100000, device="cuda", requires_grad=True)
    scale = torch.tensor(0.5, device="cuda", requires_grad=True)
    osm.softmax(x, scale=scale).sum().backward()
    before = torch.cuda.memory_allocated()
    try:
        with warnings.catch_warnings():
            # That this is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            osm.softmax(x, scale=scale, causal=True).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before


# Dynamo itself makes an instance of an autograd function while it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.exhaustive), "aot_eager"])
def test_compile(backend: str) -> None:
    x, target = torch.randn(6, 37, device=DEVICE, requires_grad=True), torch.randint(37, (6,), device=DEVICE)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return osm.cross_entropy(2 * x, target, label_smoothing=0.1, z_loss=0.01, softcap=4.0, **HOW)

    def rows(x: torch.Tensor) -> torch.Tensor:
        found = osm.token_logprobs(2 * x, target, **HOW)
        per_row = osm.cross_entropy(2 * x, target, reduction="none", **HOW)
        return found.logprob.sum() + found.entropy.sum() + found.lse.sum() + (per_row * per_row).sum()

    def masked(x: torch.Tensor) -> torch.Tensor:
        mask, scale = torch.arange(37, device=x.device) < 35, torch.linspace(-1, 2, 6, device=x.device)[:, None]
        options: dict[str, Any] = {"mask": mask, "scale": scale, "dtype": torch.float64, "softcap": 5.0, **HOW}
        mean = osm.cross_entropy(2 * x, target.clamp(max=34), **options)
        per_row = osm.cross_entropy(2 * x, target.clamp(max=34), reduction="none", **options)
        return mean + (per_row * per_row).sum()

    for function in (loss, rows, masked):
        ours, compiled = function(x), torch.compile(function, fullgraph=True, backend=backend)(x)
        torch.testing.assert_close(compiled, ours)
        one = torch.tensor(1.0)
        torch.testing.assert_close(gradient(compiled, x, one), gradient(ours, x, one))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.exhaustive)])
def test_compile_with_symbols_for_shapes_and_numbers(reduction: str) -> None:
    weight = torch.rand(37, device=DEVICE)
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "scale": 0.5, "ignore_index": 5}

    def loss(x: torch.Tensor, target: torch.Tensor) -> Any:
        return osm.cross_entropy(2 * x, target, weight, reduction=reduction, return_stats=True, **options, **HOW)

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 9):
        x, target = torch.randn(rows, 37, device=DEVICE, requires_grad=True), torch.arange(rows, device=DEVICE)
        (ours, stats), (theirs, expected) = compiled(x, target), loss(x, target)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(stats, expected)
        one = torch.ones_like(ours)
        torch.testing.assert_close(gradient(ours, x, one), gradient(theirs, x, one))


def test_autocast_gives_float32() -> None:
    x, target = torch.randn(3, 8, device=DEVICE, dtype=torch.bfloat16), torch.tensor([1, 0, 2], device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, theirs = osm.cross_entropy(x, target, **HOW), functional.cross_entropy(x, target)
    assert ours.dtype == theirs.dtype == torch.float32
    # On a GPU PyTorch rounds the logarithms of the probabilities to bfloat16.
    torch.testing.assert_close(ours, functional.cross_entropy(x.float(), target))


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    x = torch.randn(64, 1000, device=DEVICE, requires_grad=True)
    target, weight = torch.randint(1000, (64,), device=DEVICE), torch.rand(1000, device=DEVICE)

    def step() -> None:
        osm.cross_entropy(x, target).backward()
        osm.cross_entropy(x, target, weight, label_smoothing=0.1, z_loss=0.1).backward()
        osm.cross_entropy(x, target, reduction="none").sum().backward()
        found = osm.token_logprobs(x, target)
        (found.logprob.sum() + found.entropy.sum()).backward()

    step()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # The mode warns that it is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, want = torch.cuda.CUDAGraph(), x.grad.clone() * 1.5
    x.grad.zero_()
    with torch.cuda.graph(graph):
        step()
    x.grad.zero_()
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(x.grad, want)


FROM_LOGITS: dict[str, Any] = {
    "sample": lambda x: osm.sample(x, seed=3, top_p=0.8, top_logprobs=2, return_support=4),
    "listed": lambda x: osm.topk_logprobs(x, 3, target=torch.ones(x.shape[:-1], dtype=torch.int64)),
    "route": lambda x: osm.route(
        x, 2, score="sigmoid", bias=torch.linspace(0, 1, 9), groups=3, group_k=2, prob_sums=True, dense=True
    ),
}


@pytest.mark.parametrize("name", FROM_LOGITS)
def test_tokens_and_experts_of_any_number_of_rows(name: str) -> None:
    function = FROM_LOGITS[name]

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return tuple(function(x))

    few, many = (torch.randn(n, 9, generator=torch.Generator().manual_seed(n)) for n in (4, 31))
    shapes = ({0: torch.export.Dim("rows", min=2, max=100)},)
    program = torch.export.export(Model(), (few,), dynamic_shapes=shapes).module()
    for x in (few, many):
        torch.testing.assert_close(program(x), tuple(function(x)), equal_nan=True)


def test_numbers_that_are_symbols_of_a_trace() -> None:
    x, graphs = torch.randn(4, 9), CompileCounterWithBackend("eager")

    def token(p: float, seed: int, softcap: float) -> Any:
        found = osm.sample(x, seed=seed, temperature=p, top_p=p, min_p=p / 9, offset=seed, softcap=softcap)
        return found.token, found.logprob

    def weights(scale: float, k: int) -> Any:
        return osm.route(x, k, scale=scale).weights

    compiled = torch.compile(token, backend=graphs, fullgraph=True, dynamic=True)
    for given in ((0.3, 5, 9.0), (0.7, 6, 9.0), (0.9, 2**40, 9.0)):
        torch.testing.assert_close(compiled(*given), token(*given))
    assert graphs.frame_count == 1
    compiled = torch.compile(weights, backend="eager", fullgraph=True, dynamic=True)
    for given in ((0.5, 2), (1.5, 3)):
        torch.testing.assert_close(compiled(*given), weights(*given))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # of torch.func.linearize
@pytest.mark.parametrize("name", ["topk_logprobs", "route"])
def test_transforms_inside_a_trace(name: str) -> None:
    """The operators have no derivatives for torch.func: derivatives were 0 without an error."""
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))

    def total(x: torch.Tensor) -> torch.Tensor:
        found = osm.topk_logprobs(x, 3).logprobs if name == "topk_logprobs" else osm.route(x, 3).weights
        return found.square().sum()

    def tangent(x: torch.Tensor) -> Any:
        return torch.func.jvp(total, (x,), (x.cos(),))[1]

    wanted = tangent(x)
    assert wanted != 0
    torch.testing.assert_close(torch.func.linearize(total, x)[1](x.cos()), wanted)
    torch.testing.assert_close(torch.compile(tangent, backend="aot_eager", fullgraph=True)(x), wanted)
