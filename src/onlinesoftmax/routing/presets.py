"""The gates of published models, as arguments of `route`, and how to read them from a config of transformers."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "deepseek_v3": {"score": "sigmoid", "groups": 8, "group_k": 4, "scale": 2.5},
    "llama4": {"score": "sigmoid", "order": "topk_first", "renormalize": False},
    "gpt_oss": {"order": "topk_first"},
}
"""Arguments of `route` by the name that the configuration of a model has in transformers, `model_type`.

A bias is not among them: that of DeepSeek-V3 is a tensor of the model.
"""

LAYERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"correction": True, "logits_dtype": "float32"},
    "gpt_oss": {"bias": True},
}
"""Other arguments of the module `Router`, by the same names."""

SETTINGS: dict[str, dict[str, str]] = {
    "mixtral": {"experts": "num_local_experts"},
    "qwen3_moe": {"experts": "num_experts", "renormalize": "norm_topk_prob"},
    "deepseek_v3": {
        "experts": "n_routed_experts", "renormalize": "norm_topk_prob", "groups": "n_group", "group_k": "topk_group",
        "scale": "routed_scaling_factor",
    },
    "llama4": {"experts": "num_local_experts"},
    "gpt_oss": {"experts": "num_local_experts"},
}  # fmt: skip
"""Attributes of the config of a model by the arguments of `Router` that they are."""

OF_EVERY_MODEL = {"hidden_size": "hidden_size", "k": "num_experts_per_tok"}
"""Those of every config."""


def arguments_of(model: Any) -> dict[str, Any]:
    """The arguments of `Router` for the name of a model, or for a config of transformers, which has the sizes too.

    Raises:
        TypeError, ValueError: there is no such model, or the config lacks an attribute.
    """
    config = None if isinstance(model, str) else getattr(model, "get_text_config", lambda: model)()
    given = model if config is None else getattr(config, "model_type", None)
    if not isinstance(given, str):
        raise TypeError(
            "Router.like(): model must be the name of a model or a config of transformers, which has a model_type; "
            f"got {type(model).__name__}"
        )
    name = {_plain(each): each for each in PRESETS}.get(_plain(given).removesuffix("text"))
    if name is None:
        raise ValueError(f"Router.like(): no model {given!r}; there are {', '.join(PRESETS)}")
    found = {**PRESETS[name], **LAYERS.get(name, {})}
    if config is None:
        return found
    for argument, attribute in {**OF_EVERY_MODEL, **SETTINGS[name]}.items():
        if not hasattr(config, attribute):
            raise ValueError(f"Router.like(): the config of {name} has no {attribute}")
        found[argument] = getattr(config, attribute)
    return found


def _plain(name: str) -> str:
    """A name without capitals and separators: "Qwen3-MoE" and "qwen3_moe" are one model."""
    return "".join(filter(str.isalnum, name)).lower()
