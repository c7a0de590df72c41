"""Sampling under torch.compile and torch.export: whole graphs, operators, any number of rows, and transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import onlinesoftmax as osm
from onlinesoftmax.sampling import run

Tensor = torch.Tensor

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "greedy": {"temperature": 0.0, "top_logprobs": 3},
    "filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "ties": "first"},
    "support": {
        "top_p": 0.8, "return_support": 16, "logprobs": "raw", "softcap": 4.0, "mask": torch.arange(40) % 5 != 2,
    },
}  # fmt: skip


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: t.to(device) if isinstance(t, Tensor) else t for name, t in options.items()}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device where traces of sampling get operators: a GPU, or a CPU for which the question for one is patched."""
    if request.param == "cpu":
        monkeypatch.setattr(run, "_needs_operator", lambda z: run.is_traced(z) and not run.is_transformed())
    torch.compiler.reset()
    return str(request.param)


def traced(function: Callable[..., Any], operators: list[str], **options: Any) -> Callable[..., Any]:
    """A function compiled as one graph for any sizes; each compilation appends the names of our operators to a list."""

    def backend(graph: Any, _: Any) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        operators.extend(target for target in targets if target.startswith("onlinesoftmax."))
        return graph.forward

    return torch.compile(function, backend=backend, fullgraph=True, dynamic=True, **options)


def is_same(got: Any, want: Any) -> bool:
    pairs = list(zip(tree_leaves(got), tree_leaves(want), strict=True))
    return bool(pairs) and all(a is b is None or torch.equal(a, b) for a, b in pairs)


MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "none"), pytest.param(torch.bfloat16, "greedy", marks=MORE),
        pytest.param(torch.float32, "filters", marks=MORE), (torch.bfloat16, "support"),
    ],
    ids=str,
)  # fmt: skip
def test_a_compiled_call_samples_by_one_operator(device: str, dtype: torch.dtype, name: str) -> None:
    operators: list[str] = []
    options = on(device, OPTIONS[name])
    step = traced(lambda x, s: osm.sample(x, seed=s, **options), operators)
    for rows in (2, 5):
        x, seed = torch.randn(rows, 3, 40, device=device).to(dtype), torch.arange(3 * rows, device=device).view(rows, 3)
        want = osm.sample(x, seed=seed, **options)
        assert is_same(step(x, seed), want)
    # One graph for both sizes.
    assert operators == ["onlinesoftmax.sample"]


@pytest.mark.parametrize("of_draft", [None, pytest.param(torch.float32, marks=MORE), torch.bfloat16], ids=str)
def test_a_compiled_call_verifies_by_one_operator(device: str, of_draft: torch.dtype | None) -> None:
    operators: list[str] = []
    step = traced(lambda x, drafts, other: osm.verify(x, drafts, other, seed=7, top_k=9), operators)
    for rows in (2, 5):
        x, drafts = torch.randn(rows, 4, 40, device=device), torch.randint(-1, 40, (rows, 3), device=device)
        other = None if of_draft is None else torch.randn(rows, 3, 40, device=device).to(of_draft)
        want = osm.verify(x, drafts, other, seed=7, top_k=9)
        assert is_same(step(x, drafts, other), want)
    # One graph for both sizes.
    assert operators == ["onlinesoftmax.verify"]


def test_operators_pass_the_checks_of_pytorch(device: str) -> None:
    z, whole = torch.randn(3, 40, device=device), torch.arange(3, device=device)
    of_rows = torch.full((3,), 0.9, device=device)
    parameters = of_rows, whole + 2, of_rows.double(), None, True, None
    for numbers in ((False, 0, 0), (True, 2, 0), (False, 0, 7), (False, 5, 4)):
        torch.library.opcheck(torch.ops.onlinesoftmax.sample, (z, *parameters, whole, whole, *numbers))
    for draft in (None, z[:2]):
        given = z, whole[:2].view(1, 2), draft, *(t[:1] if isinstance(t, Tensor) else t for t in parameters)
        torch.library.opcheck(torch.ops.onlinesoftmax.verify, (*given, whole[:1], whole[:1]))
    torch.library.opcheck(torch.ops.onlinesoftmax.topk_logprobs, (z, whole, 6))


def test_topk_logprobs_are_one_operator_in_a_trace() -> None:
    z = torch.randn(3, 40, generator=torch.Generator().manual_seed(9)).requires_grad_()
    target, mask = torch.tensor([4, 0, 50]), torch.arange(40) % 5 != 2
    operators: list[str] = []
    compiled = traced(lambda z: osm.topk_logprobs(z, 6, target=target, mask=mask), operators)
    got, want = compiled(z), osm.topk_logprobs(z, 6, target=target, mask=mask)
    assert operators == ["onlinesoftmax.topk_logprobs"]
    assert all(torch.allclose(a.float(), b.float(), equal_nan=True) for a, b in zip(got, want, strict=True))
    dx, wanted = (torch.autograd.grad(t.logprobs.sum() + t.lse.sum(), z)[0] for t in (got, want))
    assert torch.allclose(dx, wanted)


TRANSFORMED: dict[str, Callable[[Tensor], Tensor]] = {
    "sample": lambda x: osm.sample(x, top_k=4, seed=3).logprob,
    "topk_logprobs": lambda x: osm.topk_logprobs(x, 5).logprobs.square(),
    "route": lambda x: osm.route(x, 4, score="sigmoid").weights.square(),
}


@pytest.mark.parametrize("function", TRANSFORMED)
def test_a_compiled_transform_is_that_of_eager(device: str, function: str) -> None:
    """Transformed calls take the formulas, because no operator has a rule for vmap or torch.func.grad."""
    x, operators = torch.randn(2, 3, 40, device=device), list[str]()
    transformed = torch.func.vmap(torch.func.grad(lambda x: TRANSFORMED[function](x).sum()))
    torch.testing.assert_close(traced(transformed, operators)(x), transformed(x))
    assert not operators


def test_a_program_of_a_cpu_needs_no_operator_and_takes_any_number_of_rows() -> None:
    class Step(torch.nn.Module):
        def forward(self, x: Tensor, drafts: Tensor, seed: Tensor) -> osm.Verified:
            return osm.verify(x, drafts, seed=seed, top_k=5)

    def given(rows: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, 3, 40), torch.randint(40, (rows, 2)), torch.arange(rows)

    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(Step(), given(4), dynamic_shapes=(rows, rows, rows), strict=False)
    assert "onlinesoftmax" not in program.graph_module.code
    more = given(7)
    assert is_same(program.module()(*more), Step()(*more))


@pytest.mark.gpu
# The first CUDA graph of Inductor is empty.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_cuda_graphs_of_compiled_steps_sample() -> None:
    """A step of decoding that Inductor compiles into a CUDA graph gives the tokens of eager calls."""

    def step(x: Tensor, offset: Tensor) -> Tensor:
        return osm.sample(x / 2, top_k=50, top_p=0.9, seed=7, offset=offset).token

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    for i in range(5):
        x, offset = torch.randn(8, 32000, device="cuda"), torch.full((8,), i, device="cuda")
        assert torch.equal(compiled(x, offset), step(x, offset))
