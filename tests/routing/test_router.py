"""The module `Router` against the gates of transformers, and its balance without a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onlinesoftmax as osm

transformers = pytest.importorskip("transformers", reason="the gates are compared with those of transformers")

EXPERTS, HIDDEN, K = 16, 24, 3


def theirs(model: str, **config: Any) -> torch.nn.Module:
    """The gate of a model, with random weights."""
    names = {
        "mixtral": ("mixtral", "MixtralConfig", "MixtralTopKRouter"),
        "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter"),
        "deepseek_v3": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter"),
        "llama4": ("llama4", "Llama4TextConfig", "Llama4Router"),
        "gpt_oss": ("gpt_oss", "GptOssConfig", "GptOssTopKRouter"),
    }
    folder, kind, router = names[model]
    module = getattr(transformers.models, folder)
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": K, "num_local_experts": EXPERTS, "num_experts": EXPERTS}
    made: torch.nn.Module = getattr(getattr(module, f"modeling_{folder}"), router)(
        getattr(module, kind)(**sizes | config)
    )
    for t in made.state_dict().values():
        torch.nn.init.normal_(t, std=0.3)
    return made


MODELS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("mixtral", {}, {}),
    ("qwen3_moe", {"norm_topk_prob": True}, {}),
    ("qwen3_moe", {"norm_topk_prob": False}, {"renormalize": False}),
    ("deepseek_v3", {"n_routed_experts": EXPERTS, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}, {}),
    ("llama4", {}, {}),
    ("gpt_oss", {}, {}),
]


@pytest.mark.parametrize(("model", "config", "changes"), MODELS, ids=[f"{row[0]} {row[2] or ''}" for row in MODELS])
def test_presets_are_the_gates_of_transformers(model: str, config: dict[str, Any], changes: dict[str, Any]) -> None:
    torch.manual_seed(11)
    gate, ours = theirs(model, **config), osm.nn.Router.like(model, HIDDEN, EXPERTS, K, **changes)
    ours.load_state_dict(gate.state_dict())
    x = torch.randn(50, HIDDEN)
    found = ours(x)
    with torch.no_grad():
        if model == "llama4":
            dense, logits = gate(x)
            weights, indices = dense.topk(K)
        else:
            logits, weights, indices = gate(x)
    # DeepSeek's experts are in no order.
    order, ours_in_order = indices.argsort(1), found.indices.argsort(1)
    assert torch.equal(found.indices.gather(1, ours_in_order).long(), indices.gather(1, order))
    torch.testing.assert_close(found.weights.gather(1, ours_in_order), weights.gather(1, order).float())
    torch.testing.assert_close(found.lse, logits.logsumexp(1))
    if model == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        loss = load_balancing_loss_func((logits,), EXPERTS, K)
        torch.testing.assert_close(osm.load_balancing_loss(found) * K, loss)


def test_balance_evens_out_the_experts() -> None:
    torch.manual_seed(12)
    router = osm.nn.Router(HIDDEN, EXPERTS, K, score="sigmoid", correction=True)
    x = torch.randn(200, HIDDEN) + 1
    with torch.no_grad():
        counts = [router(x).counts]
        for _ in range(40):
            router.balance(counts[-1], 4e-2)
            counts.append(router(x).counts)
    first, last = counts[0].max().item(), counts[-1].max().item()
    assert first > 2 * 200 * K / EXPERTS > 1.1 * last
    assert "e_score_correction_bias" in router.state_dict()


def test_logits_in_float32_whatever_autocast_says() -> None:
    torch.manual_seed(13)
    x = torch.randn(2000, HIDDEN)
    exact = osm.nn.Router(HIDDEN, EXPERTS, K, logits_dtype=torch.float32)
    rounded = osm.nn.Router(HIDDEN, EXPERTS, K)
    rounded.load_state_dict(exact.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = exact(x), rounded(x)
    assert torch.equal(ours.indices, osm.route(x @ exact.weight.T, K).indices)
    assert not torch.equal(ours.indices, theirs.indices)
    ours.weights.sum().backward()
    assert exact.weight.grad.isfinite().all()


def test_in_training_prob_sums_are_returned_and_mistakes_name_the_argument() -> None:
    router = osm.nn.Router(HIDDEN, EXPERTS, K)
    assert router.eval()(torch.zeros(2, HIDDEN)).prob_sums is None
    with pytest.raises(ValueError, match=r"Router\(\): k must be from 1 to the 16 experts"):
        osm.nn.Router(HIDDEN, EXPERTS, 17)
    with pytest.raises(ValueError, match="no model 'mistral'; there are mixtral, qwen3_moe"):
        osm.nn.Router.like("mistral", HIDDEN, EXPERTS, K)
    with pytest.raises(RuntimeError, match="the module has no correction"):
        router.balance(torch.zeros(EXPERTS))
