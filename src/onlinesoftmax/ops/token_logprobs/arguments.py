"""The rules for the arguments of token_logprobs, with PyTorch's error types."""

from __future__ import annotations

from typing import Any

from ...core.arguments import Library, check_index, check_logits, checked_dim

NAME = "token_logprobs"


def checked_axis(library: Library, x: Any, index: Any, dim: Any) -> int:
    """The dimension of the tokens, counted from 0, after the checks of the logits and of the index."""
    caller = f"{NAME}()"
    check_logits(library, caller, "logits", x, "index", index)
    if x.ndim == 0:
        raise ValueError(f"{caller}: logits need a dimension of tokens, got shape ()")
    axis = checked_dim(NAME, dim, x.ndim)
    # Several tokens of each row lie along the dimension of the logits' tokens.
    several = index.shape[axis : axis + 1] if index.ndim == x.ndim else ()
    check_index(library, caller, "index", x, index, (*x.shape[:axis], *several, *x.shape[axis + 1 :]))
    return axis
