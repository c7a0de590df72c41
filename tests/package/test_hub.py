"""The repository for the Hugging Face hub: built in a folder, and loaded under a name of its own."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the layers are modules of torch")

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.bfloat16]


def module_at(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / "hub").is_dir():
        pytest.skip("the tests run outside of the sources")
    return module_at(ROOT / "hub" / "build.py", "hub_build").build(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def kernel(variant: Path) -> Any:
    """The module, imported as `kernels` imports it (importer.py of version 0.17): its name is the id."""
    return module_at(variant / "__init__.py", json.loads((variant / "metadata.json").read_text())["id"])


def test_the_metadata_describe_the_files(variant: Path) -> None:
    found = json.loads((variant / "metadata.json").read_text())
    assert found["id"].isidentifier()
    files = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()} - {"metadata.json"}
    assert {name for name in files if "__pycache__" not in name} == set(found["digest"]["files"])
    for name, digest in found["digest"]["files"].items():
        assert base64.b64decode(digest) == hashlib.sha256((variant / name).read_bytes()).digest()


def test_all_imports_of_the_copy_are_relative(variant: Path) -> None:
    for path in variant.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in names if name.partition(".")[0] == "onlinesoftmax"], path


def test_the_copy_has_operators_of_its_own(kernel: Any) -> None:
    x = torch.randn(3, 7)
    assert torch.equal(kernel.softmax(x, -1), x.softmax(-1))
    found = torch.export.export(Softmax(kernel), (x,)).graph_module.code
    assert f"torch.ops.{kernel.__name__}_onlinesoftmax." in found


class Softmax(torch.nn.Module):
    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel.route(x, 2).weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_router_is_that_of_the_formula(kernel: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(1)  # torch.topk has no order of equal logits, and these bfloat16 numbers give none
    x, weight = torch.randn(2, 5, 16, dtype=dtype), torch.randn(8, 16, dtype=dtype, requires_grad=True)
    gate = SimpleNamespace(top_k=3, num_experts=8, hidden_dim=16, weight=weight)
    logits, scores, indices = kernel.layers.SoftmaxTopKRouter.forward(gate, x)
    exact = torch.nn.functional.linear(x.reshape(-1, 16), weight).double().softmax(-1)
    top, chosen = exact.topk(3)
    assert torch.equal(indices, chosen)
    assert (logits.dtype, scores.dtype) == (dtype, dtype)
    torch.testing.assert_close(scores, (top / top.sum(-1, keepdim=True)).to(dtype))
    if dtype == torch.float32:
        factor = torch.randn_like(scores)
        (ours,) = torch.autograd.grad((scores * factor).sum(), weight)
        (theirs,) = torch.autograd.grad((top / top.sum(-1, keepdim=True) * factor).sum(), weight)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("divisor", [None, 7, torch.tensor(7)], ids=str)
def test_the_loss_is_that_of_the_formula(kernel: Any, divisor: Any) -> None:
    logits, labels = torch.randn(2, 6, 11, requires_grad=True), torch.randint(11, (2, 6))
    labels[0, 3] = -100
    loss = kernel.layers.CausalLMLoss()(logits, labels, vocab_size=11, num_items_in_batch=divisor)
    target = labels[:, 1:].reshape(-1)
    rows = logits.double()[:, :-1].reshape(-1, 11).log_softmax(-1)[target != -100]
    losses = -rows.gather(1, target[target != -100].unsqueeze(1))
    exact = losses.sum() / (len(losses) if divisor is None else 7)
    torch.testing.assert_close(loss, exact.float())
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(exact, logits))
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    again = kernel.layers.CausalLMLoss()(logits, None, 11, divisor, shift_labels=shifted)
    torch.testing.assert_close(again, loss)


def test_layers_are_pure(kernel: Any) -> None:
    """The hub asks for it: no constructor, no method but forward, no class variable but two."""
    for layer in (kernel.layers.SoftmaxTopKRouter, kernel.layers.CausalLMLoss):
        own = {name for name in vars(layer) if not name.startswith("__")}
        assert own <= {"forward", "has_backward", "can_torch_compile"}
        assert "__init__" not in vars(layer)


def test_kernels_loads_the_folder(variant: Path) -> None:
    # The tests have a folder of this name.
    if not importlib.util.find_spec("kernels.importer"):
        pytest.skip("the library kernels is not installed")
    import kernels

    assert kernels.get_local_kernel(variant.parents[1]).__all__[-1] == "layers"
