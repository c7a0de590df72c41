"""The gates of published models, as arguments of `route`."""

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
