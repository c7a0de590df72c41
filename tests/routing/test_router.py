"""The module `Router` against the gates of transformers, and its balance without a loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import onlinesoftmax as osm

transformers = pytest.importorskip("transformers", reason="the gates are compared with those of transformers")

EXPERTS, HIDDEN, K = 16, 24, 3


def gate_of(model: str, **config: Any) -> tuple[Any, torch.nn.Module]:
    """The config of a small model, and its gate with random weights."""
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
    made = getattr(module, kind)(**sizes | config)
    gate: torch.nn.Module = getattr(getattr(module, f"modeling_{folder}"), router)(made)
    for t in gate.state_dict().values():
        torch.nn.init.normal_(t, std=0.3)
    return made, gate


MODELS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("mixtral", "Mixtral", {}, {}),
    ("qwen3_moe", "Qwen3-MoE", {"norm_topk_prob": True}, {}),
    ("qwen3_moe", "Qwen3-MoE", {"norm_topk_prob": False}, {"renormalize": False}),
    ("deepseek_v3", "DeepSeek-V3", {"n_routed_experts": EXPERTS}, {}),
    (
        "deepseek_v3", "DeepSeek-V3",
        {
            "n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
            "norm_topk_prob": False,
        },
        {"groups": 4, "group_k": 2, "scale": 1.5, "renormalize": False},
    ),
    ("llama4", "Llama 4", {}, {}),
    ("gpt_oss", "GPT-OSS", {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "name", "config", "changes"), MODELS, ids=[f"{m} {c or ''}" for m, _, _, c in MODELS]
)
def test_presets_are_the_gates_of_transformers(
    model: str, name: str, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    """The gate of a config, and that of a name with sizes."""
    torch.manual_seed(11)
    given, gate = gate_of(model, **config)
    ours = osm.nn.Router.like(given)
    assert str(ours) == str(osm.nn.Router.like(name, HIDDEN, EXPERTS, K, **changes))
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


def test_the_correction_of_a_module_that_changes_place_or_dtype() -> None:
    with torch.device("meta"):
        router = osm.nn.Router(HIDDEN, EXPERTS, K, correction=True)
    router = router.to_empty(device="cpu")
    router.e_score_correction_bias.fill_(7)
    router.reset_parameters()
    assert not router.e_score_correction_bias.any()
    # A step of 0.001 is lost beside 1 in bfloat16.
    router.e_score_correction_bias.fill_(1)
    router.bfloat16().balance(torch.arange(EXPERTS))
    assert router.weight.dtype == torch.bfloat16
    torch.testing.assert_close(router.e_score_correction_bias[[0, -1]], torch.tensor([1.001, 0.999]))


def test_mistakes_name_the_argument_and_what_to_do() -> None:
    like, config = osm.nn.Router.like, transformers.models.llama4.Llama4Config
    with pytest.raises(ValueError, match=r"Router\(\): k must be from 1 to the 16 experts"):
        osm.nn.Router(HIDDEN, EXPERTS, 17)
    with pytest.raises(ValueError, match="no model 'mistral'; there are mixtral, qwen3_moe"):
        like("mistral", HIDDEN, EXPERTS, K)
    with pytest.raises(TypeError, match="'Mixtral' is a name and needs hidden_size, k too; a config has them"):
        like("Mixtral", experts=EXPERTS)
    with pytest.raises(TypeError, match=r"model must be the name of a model or a config of transformers.*got int"):
        like(HIDDEN, EXPERTS, K)
    with pytest.raises(ValueError, match="the config of qwen3_moe has no num_experts"):
        like(SimpleNamespace(model_type="qwen3_moe", hidden_size=HIDDEN, num_experts_per_tok=K))
    text = {"hidden_size": HIDDEN, "num_local_experts": EXPERTS}
    assert str(like(config(text_config=text), k=K)) == str(like("llama4", HIDDEN, EXPERTS, K))
    router = osm.nn.Router(HIDDEN, EXPERTS, K)
    with pytest.raises(RuntimeError, match="the module has no correction"):
        router.balance(torch.zeros(EXPERTS))
    corrected = osm.nn.Router(HIDDEN, EXPERTS, K, correction=True)
    message = r"Router.balance\(\): rate must be a (finite number, got (nan|inf)|number, not (NoneType|bool))$"
    for rate in (float("nan"), float("inf"), None, True):
        with pytest.raises((TypeError, ValueError), match=message):
            corrected.balance(torch.arange(EXPERTS), rate=rate)
    assert torch.equal(corrected.e_score_correction_bias, torch.zeros(EXPERTS))
    for wrong in (torch.zeros(2, HIDDEN + 1), torch.zeros(()), torch.zeros(HIDDEN, 2)):
        with pytest.raises(ValueError, match="input must have hidden_size = 24 numbers in its last dimension, got sh"):
            router(wrong)
    with pytest.raises(TypeError, match=r"Router\(\): argument 'input' must be Tensor, not list"):
        router([0.0] * HIDDEN)


def test_prob_sums_in_training_and_where_they_are_asked_for() -> None:
    router, x = osm.nn.Router(HIDDEN, EXPERTS, K), torch.randn(9, HIDDEN)
    in_training = osm.load_balancing_loss(router(x))
    assert router(x, prob_sums=False).prob_sums is None
    found = router.eval()(x)
    with pytest.raises(ValueError, match=r"call route, or the Router, with prob_sums=True .*not after eval\(\)"):
        osm.load_balancing_loss(found)
    assert torch.equal(osm.load_balancing_loss(router(x, prob_sums=True)), in_training)
