"""Causal language models of Hugging Face transformers in a block of `override(linear=...)`: no logits in training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from spellings import DEVICE

import onlinesoftmax as osm

CLASSES = 41
SIZES: dict[str, Any] = {
    "vocab_size": CLASSES, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.5,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "GPT2": {
        "vocab_size": CLASSES,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "initializer_range": 0.5,
    },  # tied embedding
    "Phi": SIZES,  # bias
    "Gemma2": SIZES | {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "Granite": SIZES | {"logits_scaling": 0.5},
}
"""Sizes and options of the models, by the beginning of the name of the class."""


def model_of(name: str) -> tuple[Any, torch.Tensor]:
    """A small model with random weights, and tokens for it."""
    transformers = pytest.importorskip("transformers", reason="the models come from Hugging Face transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name], attn_implementation="eager")
    kind = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{kind}")(config).to(DEVICE).eval()
    return model, torch.randint(3, CLASSES, (2, 7), device=DEVICE)


def training(model: Any, block: Any, **arguments: Any) -> list[torch.Tensor]:
    """The loss and the gradients."""
    model.zero_grad()
    with block:
        loss = model(**arguments).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_training_makes_no_logits(name: str) -> None:
    model, tokens = model_of(name)
    labels = tokens.where(torch.arange(7, device=DEVICE) != 2, -100)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    for more in (
        {},
        {"num_items_in_batch": torch.tensor(5, device=DEVICE)},
        {"shift_labels": shifted},
        {"labels": labels[:, -4:].contiguous(), "logits_to_keep": 4},
    ):
        arguments = {"input_ids": tokens, "labels": labels, **more}
        mode = osm.override(linear=CLASSES, strict=True, leave=["softmax"])
        found = training(model, mode, **arguments)
        assert mode.report().taken == {"linear_cross_entropy": 1}
        torch.testing.assert_close(found, training(model, nullcontext(), **arguments))


def test_logits_of_a_model_that_are_used_too() -> None:
    model, tokens = model_of("Gemma2")
    expected = model(input_ids=tokens, labels=tokens)
    mode = osm.override(linear=CLASSES)
    with mode:
        found = model(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(found.logits.sum(-1), expected.logits.sum(-1))
    gradients = [
        torch.autograd.grad(out.loss + out.logits.square().mean(), model.lm_head.weight) for out in (found, expected)
    ]
    torch.testing.assert_close(*gradients)
    assert mode.report().taken["linear_cross_entropy"] == 1
    assert mode.report().left["linear", "sum needs the logits"] == 1


def test_generating_computes_logits_at_once() -> None:
    model, tokens = model_of("Llama")
    expected = model.generate(tokens, max_new_tokens=3, do_sample=False)
    mode = osm.override(linear=CLASSES, leave=["softmax"], strict=True)
    with mode:
        found = model.generate(tokens, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, expected)
    assert mode.report().taken == {}
    assert {name for name, _ in mode.report().left} == {"softmax"}
