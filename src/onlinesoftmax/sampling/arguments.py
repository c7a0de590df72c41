"""The checks of the arguments of sampling; errors have PyTorch's types and name the argument."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch

from ..core.arguments import check_index, check_options, checked_dim
from ..core.arrays import broadcasts
from ..core.call import Call, Settings
from ..core.options import LARGEST_FLOAT32, ScoreOptions, checked_options
from ..ops import OPERATIONS
from ..torch.arguments import TORCH, checked_number
from ..torch.eager import scores_of
from .distribution import Parameters
from .masses import MOST_TOKENS

Tensor = torch.Tensor

LARGEST_INT64 = 2**63 - 1


class Logits(NamedTuple):
    """Logits and the name of the public function, for errors.

    Attributes:
        name: Name of the function.
        x: Logits.
        dim: Dimension of the tokens, counted from 0.
        options: Score options.
        rows: Shape of the logits without that dimension.
        tokens: Number of tokens of a row, of which the logits may hold a part.
    """

    name: str
    x: Tensor
    dim: int
    options: ScoreOptions
    rows: tuple[int, ...]
    tokens: int

    def scores(self) -> Tensor:
        """The scores (rows, tokens), float32 or float64."""
        return in_rows(scores_of(self.x, self.dim, self.options, torch.float32)[0], self.dim)


def in_rows(x: Tensor, dim: int) -> Tensor:
    """The rows along a dimension, (rows, tokens)."""
    x = x.movedim(dim, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def checked_logits(
    name: str, logits: Any, dim: Any, scale: Any, softcap: Any, bias: Any, mask: Any, argument: str = "logits"
) -> Logits:
    """The logits and their score options; `argument` is the name of the logits."""
    found = checked_part(name, logits, dim, scale, softcap, bias, mask, argument)
    if not found.tokens:
        raise ValueError(f"{name}(): {argument} has no tokens, its shape is {tuple(logits.shape)}")
    return found


def checked_part(
    name: str, logits: Any, dim: Any, scale: Any, softcap: Any, bias: Any, mask: Any, argument: str
) -> Logits:
    """The logits and their score options, if other processes may have more tokens of each row; there may be none."""
    caller = f"{name}()"
    TORCH.check_array(caller, argument, logits)
    if type(logits).__name__ == "DTensor":
        raise TypeError(f"{caller}: {argument} is a DTensor, which this function does not take")
    if not logits.is_floating_point():
        raise NotImplementedError(f"{caller}: {argument} must be floating point, got {logits.dtype}")
    axis = checked_dim(name, dim, logits.dim())
    options = checked_options(name, scale, softcap, bias, mask, False, "nan")
    check_options(TORCH, Call(OPERATIONS["softmax"], logits, Settings(axis), options, None))
    rows = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    return Logits(name, logits, axis, options or ScoreOptions(), rows, logits.shape[axis] if logits.dim() else 0)


def checked_of_rows(logits: Logits, argument: str, value: Any, dtype: torch.dtype, low: float, high: float) -> Tensor:
    """A number, or a tensor with one for each row, as a tensor of all rows, (rows,), in a dtype.

    Args:
        logits: The logits, which have the rows.
        argument: Name of the argument.
        value: Its value.  A number has to be from `low` to `high`; the values of a tensor are not read.
        dtype: Dtype of the result: that of integers needs an integer.
        low, high: Bounds of a number.
    """
    name, x, whole = logits.name, logits.x, not dtype.is_floating_point
    count, wanted = math.prod(logits.rows), "an int" if whole else "a number"
    if isinstance(value, Tensor):
        if value.is_floating_point() == whole or value.dtype == torch.bool or value.is_complex():
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
        return value.detach().to(dtype).expand(logits.rows).reshape(count).contiguous()
    number = checked_number(name, argument, value, int if whole else float)
    if not low <= number <= high:
        raise ValueError(f"{name}(): {argument} must be from {low} to {high}, got {value}")
    return torch.full((count,), number, dtype=dtype, device=x.device)


def checked_choice(name: str, argument: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of these words."""
    if value not in choices:
        raise ValueError(f"{name}(): {argument} must be {' or '.join(map(repr, choices))}, got {value!r}")
    return str(value)


def checked_count(logits: Logits, argument: str, value: Any, low: int) -> int:
    """A number of tokens, at most those of a row."""
    name, tokens = logits.name, logits.tokens
    number: int = checked_number(name, argument, value, int)
    if not low <= number <= tokens:
        raise ValueError(f"{name}(): {argument} must be from {low} to the {tokens} tokens of a row, got {value}")
    return number


def checked_parameters(logits: Logits, temperature: Any, top_k: Any, top_p: Any, min_p: Any, ties: Any) -> Parameters:
    """Temperature and filters of the rows.  A number that filters nothing is no filter."""
    of_rows, tokens = partial(checked_of_rows, logits), logits.tokens
    if tokens > MOST_TOKENS:
        raise ValueError(f"{logits.name}(): rows have {tokens} tokens, and may have {MOST_TOKENS}")
    # A float32 number makes the products with the noise exact.
    divisor = of_rows("temperature", temperature, torch.float32, 0.0, LARGEST_FLOAT32)
    k = None if top_k is None else of_rows("top_k", top_k, torch.int64, -1, LARGEST_INT64)
    p = None if top_p is None else of_rows("top_p", top_p, torch.float64, 0.0, math.inf)
    least = None if min_p is None else of_rows("min_p", min_p, torch.float64, 0.0, 1.0)
    if not isinstance(top_k, Tensor) and (top_k is None or not 0 < top_k < tokens):
        k = None
    if not isinstance(top_p, Tensor) and (top_p is None or top_p >= 1):
        p = None
    if not isinstance(min_p, Tensor) and not min_p:
        least = None
    return Parameters(divisor, k, p, least, checked_choice(logits.name, "ties", ties, ("keep", "first")) == "first")


def checked_seeds(logits: Logits, seed: Any, offset: Any, generator: Any) -> tuple[Tensor, Tensor]:
    """Seed and offset of the rows, int64; without a seed, drawn from the generator."""
    name, x = logits.name, logits.x
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{name}(): generator must be a torch.Generator or None, not {type(generator).__name__}")
    if generator is not None and seed is not None:
        raise ValueError(f"{name}(): seed and generator exclude each other: a seed is drawn from a generator")
    offsets = checked_of_rows(logits, "offset", offset, torch.int64, 0, LARGEST_INT64)
    if seed is not None:
        return checked_of_rows(logits, "seed", seed, torch.int64, 0, LARGEST_INT64), offsets
    return torch.randint(LARGEST_INT64, (math.prod(logits.rows),), device=x.device, generator=generator), offsets


def checked_target(logits: Logits, target: Any) -> Tensor | None:
    """A token of each row, or None."""
    if target is not None:
        caller = f"{logits.name}()"
        TORCH.check_array(caller, "target", target, logits.x)
        check_index(TORCH, caller, "target", logits.x, target, logits.rows)
    return target


def checked_drafts(target: Logits, tokens: Any, draft: Logits | None) -> Logits:
    """The logits of the target model with the shape of the rows of drafts as `rows`, after the checks of the drafts."""
    name, caller = target.name, f"{target.name}()"
    if not target.rows:
        raise ValueError(f"{caller}: target_logits must have shape (..., n + 1, tokens), got {tuple(target.x.shape)}")
    *rows, places = target.rows
    TORCH.check_array(caller, "draft_tokens", tokens, target.x)
    check_index(TORCH, caller, "draft_tokens", target.x, tokens, (*rows, places - 1))
    wanted = (*rows, places - 1, target.x.shape[-1])
    if draft is not None and draft.x.shape != wanted:
        raise ValueError(f"{name}(): draft_logits has shape {tuple(draft.x.shape)}, and must have {wanted}")
    return target._replace(rows=tuple(rows))
