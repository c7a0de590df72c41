"""Libraries that are seldom installed: modules with their signatures, and PyTorch's operations, stand in for them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import LOSS, ROWS, TOKENS, results
from torch.nn import functional

from onlinesoftmax.lab.bench import libraries
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.heads import peers as heads
from onlinesoftmax.lab.bench.heads.cases import HeadCase
from onlinesoftmax.lab.bench.sharded.libraries import PEERS as SHARDED

# The signatures are those of flash-attention 0251105a, Transformer Engine d0067d0d, Megatron-LM d98e8a64, TRL 1.16.0
# and Liger 0.8.5.


class CrossEntropyLoss:
    """flash-attn's module."""

    def __init__(self, ignore_index: int = -100, reduction: str = "mean", *, process_group: Any = None) -> None:
        self.reduction, self.group = reduction, process_group

    def __call__(self, input: Any, target: Any, precomputed_lse: Any = None) -> Any:
        return functional.cross_entropy(input.float(), target, reduction=self.reduction)


def parallel_cross_entropy(
    inp: Any, target: Any, label_smoothing: float = 0.0, reduce_loss: bool = False, dist_process_group: Any = None,
) -> Any:  # fmt: skip
    """Transformer Engine's function."""
    assert inp.ndim == 3
    losses = functional.cross_entropy(inp.float().mT, target, reduction="none")
    return losses.mean() if reduce_loss else losses


def vocab_parallel_cross_entropy(logits: Any, target: Any, label_smoothing: float = 0.0, tp_group: Any = None) -> Any:
    """Megatron-LM's function of (sequence, batch, vocabulary)."""
    assert logits.shape[:2] == target.shape
    return functional.cross_entropy(logits.float().mT, target, reduction="none")


def selective_log_softmax_and_entropy(
    logits: Any, index: Any, entropy_requires_grad: bool = True, temperature: float = 1.0, row_mask: Any = None
) -> Any:
    """TRL's function."""
    logp = logits.float().log_softmax(-1)
    return logp.gather(-1, index[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


class OfLiger:
    """Liger's autograd functions with one name for `apply`."""

    @staticmethod
    def apply(x: Any, *given: Any, return_entropy: bool = False) -> Any:
        if return_entropy:
            logprob, entropy = selective_log_softmax_and_entropy(x @ given[0].T, given[1])
            return -logprob, entropy
        assert given[1:] == (GROUP, -100, 0.0, "pytorch", "global")
        return vocab_parallel_cross_entropy(x, given[0])


GROUP = SimpleNamespace(size=lambda: 1)

MODULES = {
    "flash_attn.losses.cross_entropy": SimpleNamespace(CrossEntropyLoss=CrossEntropyLoss),
    "transformer_engine.pytorch.cross_entropy": SimpleNamespace(parallel_cross_entropy=parallel_cross_entropy),
    "megatron.core.tensor_parallel.cross_entropy": SimpleNamespace(
        vocab_parallel_cross_entropy=vocab_parallel_cross_entropy
    ),
    "trl.kernels": SimpleNamespace(selective_log_softmax_and_entropy=selective_log_softmax_and_entropy),
    "liger_kernel.ops": SimpleNamespace(LigerFusedLinearScaledCrossEntropyFunction=OfLiger),
    "liger_kernel.ops.vocab_parallel_cross_entropy": SimpleNamespace(LigerVocabParallelCEFunction=OfLiger),
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {name.rsplit(".", count)[0] for name in MODULES for count in range(1, name.count(".") + 1)}
    for name, module in {**{name: SimpleNamespace() for name in packages}, **MODULES}.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_and_log_probabilities_are_right(dtype: str) -> None:
    for case, names in ((LOSS, ["flash-attn", "transformer-engine"]), (ROWS, ["flash-attn", "transformer-engine"])):
        case = replace(case, dtype=dtype, with_gradient=True)
        for result in results(case, *libraries.peers(names, "cuda")):
            assert (result.status, result.reason) == ("ok", None), result.who
    case = Case("token_logprobs", TOKENS.shape[:2], 1, dtype, with_gradient=True)
    (result,) = results(case, *libraries.peers(["trl"], "cuda"))
    assert (result.status, result.reason) == ("ok", None)


def test_they_say_what_they_lack_and_why_they_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in libraries.peers(["flash-attn", "transformer-engine", "trl"], "cpu"):
        assert peer.supports(replace(LOSS, operation="softmax", reduction=""))
    loss, engine, trl = libraries.peers(["flash-attn", "transformer-engine", "trl"], "cuda")
    assert trl.supports(LOSS) == "has no cross_entropy"
    assert loss.supports(TOKENS) == engine.supports(TOKENS) == "has no token_logprobs"
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: True)
    assert trl.why_absent() is None
    monkeypatch.setitem(sys.modules, "trl.kernels", SimpleNamespace())
    assert trl.why_absent() == "has no selective_log_softmax_and_entropy"
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    assert trl.why_absent() == "not installed: pip install trl"


def test_ligers_head_of_tokens_has_log_probabilities_and_entropies() -> None:
    case = HeadCase("linear_token_logprobs", (6, 4, 9), 2, "float32", with_gradient=True)
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    target, incoming = torch.randint(9, (6,)), (torch.randn(6), torch.randn(6))
    liger, ours = heads.LigerHead("cuda"), heads.OursHead("cpu")
    assert liger.supports(case) is None
    torch.testing.assert_close(*(each.prepare(case)(x, weight, target, *incoming) for each in (liger, ours)))


@pytest.mark.parametrize("name", SHARDED)
def test_losses_of_sharded_columns_get_the_group_and_local_columns(name: str) -> None:
    team: Any = SimpleNamespace(device=torch.device("cpu"), group=GROUP, size=2)
    peer = SHARDED[name](team)
    assert peer.supports(replace(LOSS, shape=(4, 7))) == "takes equal shards only"
    assert peer.supports(TOKENS) == "has no token_logprobs"
    for case in (replace(LOSS, shape=(4, 8)), replace(ROWS, shape=(4, 8))):
        assert peer.supports(case) is None
        x, target = torch.randn(case.shape), torch.randint(8, (4,))
        expected = functional.cross_entropy(x, target, reduction=case.reduction)
        torch.testing.assert_close(peer.forward(case)(x, target), expected)
