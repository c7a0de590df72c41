"""torch.compile and torch.export: whole graphs, no recompilation for a new N, custom operators that pass opcheck."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_fused import moved, options
from torch._dynamo.testing import CompileCounterWithBackend

import onlinesoftmax as osm
from contract import DEVICE, GPU, OPERATIONS

BACKEND = "inductor" if GPU else "aot_eager"
pytestmark = pytest.mark.filterwarnings(
    # Inductor's own, on some machines.
    "ignore:.*TensorFloat32.*:UserWarning",
    "ignore::DeprecationWarning:torch",
)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["plain", "scale tensor", "all"])
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
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


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
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


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
