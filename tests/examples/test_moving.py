"""docs/moving.md: the call of another library and ours give the same values, dtypes and gradients."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch", reason="the page is about PyTorch")
pytest.importorskip("jax", reason="a part of the page is about JAX")
pytest.importorskip("optax", reason="a part of the page is about optax")

import numpy as np
import torch
from torch.nn import functional

TEXT = (Path(__file__).parents[2] / "docs" / "moving.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*)\n(?:(?!^## ).*\n)*?```diff\n((?:.*\n)*?)```\n", TEXT, re.MULTILINE))


def loss_by_formula(logits, target, smoothing, z_loss, reduction="mean", ignore_index=-100):
    """The loss that Liger and flash-attn compute, by PyTorch's operations, in float32."""
    z = logits.float()
    losses = functional.cross_entropy(z, target, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing)
    losses = losses + z_loss * z.logsumexp(-1) ** 2 * (target != ignore_index)
    total = losses if reduction == "none" else losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


# The signatures are those of Liger ead96b61, flash-attention 0251105a, TRL 1.16.0 and FlashInfer 01c897d7.


def liger_cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, return_token_accuracy=False,
    return_predicted_tokens=False,
):  # fmt: skip
    z = input.float() if softcap is None else softcap * torch.tanh(input.float() / softcap)
    return loss_by_formula(z, target, label_smoothing, lse_square_scale, reduction, ignore_index).to(input.dtype)


def liger_fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False,
):  # fmt: skip
    z = functional.linear(input, weight, bias)
    numbers = {"label_smoothing": label_smoothing, "lse_square_scale": lse_square_scale, "softcap": softcap}
    return liger_cross_entropy(z, target, ignore_index=ignore_index, reduction=reduction, **numbers)


class CrossEntropyLoss:
    """Stand-in for flash-attn's module."""

    def __init__(
        self, ignore_index=-100, reduction="mean", label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0,
        inplace_backward=False, process_group=None, return_z_loss=False,
    ):  # fmt: skip
        self.scale, self.numbers = logit_scale, (label_smoothing, lse_square_scale, reduction, ignore_index)

    def __call__(self, input, target, precomputed_lse=None):
        return loss_by_formula(input * self.scale, target, *self.numbers)


def selective_log_softmax_and_entropy(logits, index, entropy_requires_grad=True, temperature=1.0, row_mask=None):
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, index[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def top_k_top_p_sampling_from_logits(
    logits, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True, generator=None,
    check_nan=False, seed=None, offset=None,
):  # fmt: skip
    values, found = logits.topk(top_k)
    p = values.softmax(-1)
    kept = p * (p.cumsum(-1) - p < top_p)
    return found.gather(-1, kept.multinomial(1, generator=generator))[:, 0].int()


STAND_INS: dict[str, tuple[Any, ...]] = {
    "liger_kernel.transformers.functional": (liger_cross_entropy, liger_fused_linear_cross_entropy),
    "flash_attn.losses.cross_entropy": (CrossEntropyLoss,),
    "trl.trainer.utils": (selective_log_softmax_and_entropy,),
    "flashinfer.sampling": (top_k_top_p_sampling_from_logits,),
}


def runs_here(module: str) -> bool:
    """TRL's functions run on a CPU; the others are kernels for a GPU, where the page has no tensors."""
    try:
        # Older versions of TRL lack the function.
        return module.startswith("trl") and hasattr(importlib.import_module(module), STAND_INS[module][0].__name__)
    except ImportError:
        return False


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, contents in STAND_INS.items():
        if not runs_here(name):
            module = ModuleType(name)
            vars(module).update({item.__name__: item for item in contents})
            parts = name.split(".")
            for i in range(1, len(parts)):
                monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[0]))
            monkeypatch.setitem(sys.modules, name, module)


def results(code: str) -> dict[str, Any]:
    """The arrays that the code assigns, after the first block of the page."""
    setup = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert setup
    scope: dict[str, Any] = {}
    exec(setup[1], scope)
    before = set(scope)
    exec(code, scope)
    found = {name: value for name, value in scope.items() if name not in before and hasattr(value, "dtype")}
    leaves = [scope[name] for name in ("logits", "hidden", "weight")]
    for name in [name for name, value in found.items() if getattr(value, "requires_grad", False)]:
        # Unequal factors, so that the gradient of a sum that is constant is not 0.
        scalar = (found[name] * torch.arange(1.0, found[name].numel() + 1).view_as(found[name])).sum()
        for i, gradient in enumerate(torch.autograd.grad(scalar, leaves, retain_graph=True, allow_unused=True)):
            if gradient is not None:
                found[f"{name}, gradient {i}"] = gradient
    return found


@pytest.mark.parametrize("library", SECTIONS)
def test_their_call_and_ours_agree(library: str, peers: None) -> None:
    theirs, ours = (
        results("".join(line[1:] for line in SECTIONS[library].splitlines(True) if line[0] == sign)) for sign in "-+"
    )
    assert theirs
    assert theirs.keys() <= ours.keys()
    for name, value in theirs.items():
        want, got = (np.asarray(v.detach() if hasattr(v, "detach") else v) for v in (value, ours[name]))
        if want.dtype.kind == "f":
            assert got.dtype == want.dtype, name
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=name)
        else:  # random tokens
            assert got.shape == want.shape


def test_the_page_has_every_library() -> None:
    assert list(SECTIONS) == ["PyTorch", "Liger", "flash-attn", "TRL", "optax", "FlashInfer"]
    assert set(re.findall(r"^-from (\S+) import", TEXT, re.MULTILINE)) == set(STAND_INS)
