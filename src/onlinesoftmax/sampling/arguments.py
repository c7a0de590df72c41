"""The checks of the arguments of sampling from torch tensors; errors have PyTorch's types and name the argument.

The rules for all libraries stand in rules.py.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import torch

from ..core.arrays import broadcasts
from ..core.options import LARGEST_INT64
from ..torch.arguments import TORCH
from ..torch.eager import scores_of
from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES
from ..torch.gradients import is_traced
from . import rules
from .rules import Parameters, checked_between, checked_choice, checked_count, checked_target

__all__ = [
    "LARGEST_INT64", "Logits", "checked_choice", "checked_count", "checked_drafts", "checked_logits",
    "checked_of_rows", "checked_parameters", "checked_part", "checked_seeds", "checked_target", "in_rows",
]  # fmt: skip

Tensor = torch.Tensor


checked_drafts = rules.checked_drafts


class Logits(rules.Logits):
    """Logits of torch."""

    __slots__ = ()

    def scores(self) -> Tensor:
        """The scores (rows, tokens), float32 or float64."""
        return in_rows(scores_of(self.x, self.dim, self.options, torch.float32)[0], self.dim)

    def as_rows(self) -> Tensor:
        """The scores (rows, tokens), in the dtype of the logits where these are the scores."""
        return in_rows(self.x, self.dim) if self.options.is_plain() else self.scores()


def in_rows(x: Tensor, dim: int) -> Tensor:
    """The rows along a dimension, (rows, tokens)."""
    x = x.movedim(dim, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def checked_logits(
    name: str, logits: Any, dim: Any, scale: Any, softcap: Any, bias: Any, mask: Any, argument: str = "logits"
) -> Logits:
    """The logits and their score options; `argument` is the name of the logits."""
    found = checked_part(name, logits, dim, scale, softcap, bias, mask, argument)
    rules.check_has_tokens(found, argument)
    return found


def checked_part(
    name: str, logits: Any, dim: Any, scale: Any, softcap: Any, bias: Any, mask: Any, argument: str
) -> Logits:
    """The logits and their score options, if other processes may have more tokens of each row; there may be none."""
    return Logits(*rules.checked_part(TORCH, name, logits, dim, (scale, softcap, bias, mask), argument))


def checked_of_rows(logits: Logits, argument: str, value: Any, dtype: str, low: float, high: float) -> Tensor:
    """A number, or a tensor with one for each row, as a tensor of all rows, (rows,), in a dtype.

    Args:
        logits: The logits, which have the rows.
        argument: Name of the argument.
        value: Its value.  A number has to be from `low` to `high`; the values of a tensor are not read.
        dtype: Name of the dtype of the result: "int64" needs an integer.
        low, high: Bounds of a number.
    """
    name, x, wide = logits.name, logits.x, getattr(torch, dtype)
    whole = not wide.is_floating_point
    count, wanted = math.prod(logits.rows), "an int" if whole else "a number"
    if isinstance(value, Tensor):
        TORCH.check_array(f"{name}()", argument, value)
        if TORCH.kind_of(value) not in (("integer",) if whole else ("integer", "floating")):
            raise TypeError(f"{name}(): {argument} must be {wanted} or a tensor of such, got {value.dtype}")
        if value.device.type == "cpu" and not value.dim() and not x.is_cpu:
            # A copy to the GPU would wait for it.
            return checked_of_rows(logits, argument, value.item(), dtype, low, high)
        if value.device != x.device:
            raise RuntimeError(f"{name}(): {argument} is on {value.device}, and logits on {x.device}")
        if not broadcasts(value.shape, logits.rows):
            raise ValueError(
                f"{name}(): {argument} must be {wanted} or have one for each row, of shape {logits.rows}; "
                f"got {tuple(value.shape)}"
            )
        return value.detach().to(wide).expand(logits.rows).reshape(count).contiguous()
    number = checked_between(logits, argument, value, whole, low, high)
    traced = is_traced(x) or is_transformed()
    # A CUDA graph owns its memory.
    if not x.is_cuda or type(x) not in PLAIN_TYPES or traced or torch.cuda.is_current_stream_capturing():
        return torch.full((count,), number, dtype=wide, device=x.device)
    return _filled(count, number, wide, x.get_device(), torch._C._cuda_getCurrentRawStream(x.get_device()))


@lru_cache(maxsize=32)
def _filled(count: int, number: float, dtype: torch.dtype, index: int, stream: int) -> Tensor:
    """A tensor of one number, kept for the next calls on a stream: to fill one is a kernel of its own."""
    return torch.full((count,), number, dtype=dtype, device=index)


def checked_parameters(logits: Logits, temperature: Any, top_k: Any, top_p: Any, min_p: Any, ties: Any) -> Parameters:
    """Temperature and filters of the rows."""
    of_rows, filters = partial(checked_of_rows, logits), (top_k, top_p, min_p)
    return rules.checked_parameters(f"{logits.name}()", logits.tokens, of_rows, temperature, filters, ties)


def checked_seeds(logits: Logits, seed: Any, offset: Any, generator: Any) -> tuple[Tensor, Tensor]:
    """Seed and offset of the rows, int64; without a seed, drawn from the generator."""
    name, x = logits.name, logits.x
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{name}(): generator must be a torch.Generator or None, not {type(generator).__name__}")
    if generator is not None and seed is not None:
        raise ValueError(f"{name}(): seed and generator exclude each other: a seed is drawn from a generator")
    offsets = checked_of_rows(logits, "offset", offset, "int64", 0, LARGEST_INT64)
    if seed is not None:
        return checked_of_rows(logits, "seed", seed, "int64", 0, LARGEST_INT64), offsets
    return drawn_seeds(math.prod(logits.rows), x.device, generator), offsets


def drawn_seeds(count: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """A random seed for each row, by default from the generator of the device."""
    return torch.randint(LARGEST_INT64, (count,), device=device, generator=generator)
