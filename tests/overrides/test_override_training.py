"""Training in the block of `override`: gradients, autocast, transforms, checkpoints, compiled models, Hugging Face."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from spellings import BACKEND, DEVICE, ON_CPU, SPELLINGS, Function, sample
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import onlinesoftmax as osm
from onlinesoftmax.overrides import Report


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


NO_BLOCK = nullcontext()


def loss_in_the_middle(x: torch.Tensor) -> torch.Tensor:
    """Our loss and PyTorch's save other tensors, and the cosine saves one after them."""
    target = torch.tensor([3, -100, 0, 5], device=DEVICE)
    return functional.cross_entropy(x * x, target, label_smoothing=0.1).cos().exp()


def loss_in_nested_checkpoints(x: torch.Tensor) -> torch.Tensor:
    y = torch.logsumexp(x * 2, (0, 1)).cos()
    return (checkpoint(loss_in_the_middle, x + 1, use_reentrant=False) * y).exp()


def backward_in_a_thread(y: torch.Tensor) -> None:
    """As the backward of operations on a GPU, which runs in a thread of the device."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(y.backward).result()


@pytest.mark.parametrize("backward", [torch.autograd.backward, backward_in_a_thread])
@pytest.mark.parametrize(
    ("layer", "taken"),
    [
        (lambda x: torch.softmax(x, 1), {"softmax": 2}),
        (loss_in_the_middle, {"cross_entropy": 2}),
        # Each loss of the inner checkpoint is repeated, that of the first and that of the repeated forward.
        (loss_in_nested_checkpoints, {"logsumexp": 2, "cross_entropy": 3}),
    ],
)
def test_checkpoints_repeat_the_forward_inside_the_block(
    layer: Function, taken: dict[str, int], backward: Callable[[torch.Tensor], None]
) -> None:
    """Both forwards call the same functions, and see the same blocks in the same order."""

    def gradient(
        function: Function, *blocks: Any, around_backward: Any = NO_BLOCK, reentrant: bool = False
    ) -> torch.Tensor:
        leaf = sample(4, 6).requires_grad_()
        with ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block)
            y = checkpoint(lambda x: function(x).square(), leaf, use_reentrant=reentrant).sum()
        with around_backward:
            backward(y)
        assert leaf.grad is not None
        return leaf.grad

    outer, inner = osm.override(backend="eager"), osm.override(backend=BACKEND, leave=["logsumexp"])
    expected = gradient(layer)
    with set_checkpoint_early_stop(False):
        torch.testing.assert_close(gradient(layer, outer, inner), expected)
    assert outer.report().taken | inner.report().taken == taken
    assert outer.report().taken.keys().isdisjoint(inner.report().taken)
    torch.testing.assert_close(gradient(layer, around_backward=outer), expected)
    torch.testing.assert_close(gradient(layer, outer, reentrant=True), expected)

    def both(x: torch.Tensor) -> torch.Tensor:
        return layer(x) + inner(layer)(x)

    torch.testing.assert_close(gradient(both, outer, around_backward=outer), gradient(both))


compiles = pytest.mark.usefixtures("fresh_dynamo")
MORE = pytest.mark.exhaustive


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
    torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-6)


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


def twice_in_checkpoints(function: Function, reentrant: bool) -> Function:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return function(x + 1).square()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return function(x) * checkpoint(inner, x, use_reentrant=reentrant)

    return lambda x: checkpoint(outer, x * 1, use_reentrant=reentrant)


@compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("traced", "reentrant"),
    [("block", False), ("checkpoint", False), pytest.param("block and checkpoint", False, marks=MORE), ("block", True)],
)
def test_compiled_functions_in_checkpoints(traced: str, reentrant: bool) -> None:
    """A function compiled inside or outside a block or a checkpoint is called later where neither or both are."""
    counter, mode = CompileCounterWithBackend("aot_eager"), osm.override(backend="eager", strict=True)
    compiled = torch.compile(loss_in_the_middle, backend=counter, fullgraph=True)

    def gradient(
        function: Function, where: str, around_backward: Any = NO_BLOCK, backward: Any = torch.autograd.backward
    ) -> torch.Tensor:
        leaf = sample(4, 6).requires_grad_()
        called = twice_in_checkpoints(function, reentrant) if "checkpoint" in where else function
        with mode if "block" in where else NO_BLOCK:
            y = called(leaf).sum()
        with around_backward:
            backward(y)
        assert leaf.grad is not None
        return leaf.grad

    def compare(where: str, **how: Any) -> None:
        expected = gradient(loss_in_the_middle, where.removeprefix("block"))
        torch.testing.assert_close(gradient(compiled, where, **how), expected)

    compare(traced)
    compare("block and checkpoint")
    count = counter.frame_count
    compare("block and checkpoint", backward=backward_in_a_thread)
    compare("block and checkpoint", around_backward=mode)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(compare, "block and checkpoint").result()
    assert counter.frame_count == count, "compiled again for another block, thread or backward pass"
    for where in ("checkpoint", "block", ""):
        compare(where)
    assert mode.report().left == {}
    if not reentrant:
        assert counter.frame_count == 2, "one graph for the block and one outside"


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


@pytest.mark.early
def test_the_first_call_of_a_process_may_be_compiled() -> None:
    """The first read of a cached property takes a lock in Python 3.11, which torch.compile cannot trace."""
    code = (
        "import torch, onlinesoftmax as osm\n"
        "x = torch.randn(2, 3, 4)\n"
        # The first call changes nothing that torch.compile has assumed, so the second is not compiled again.
        "from torch._dynamo.testing import CompileCounter\n"
        "counter = CompileCounter()\n"
        "f = torch.compile(lambda x: osm.softmax(osm.softmax(x, -1), 0), backend=counter, fullgraph=True)\n"
        "f(x), f(x)\n"
        "assert counter.frame_count == 1, counter.frame_count\n"
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
