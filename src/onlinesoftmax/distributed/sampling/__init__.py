"""Sampling if the tokens are sharded over processes: candidates, bins and sums travel, and no logits.

Read run.py first, which has the steps of `sample`.  leaders.py has the largest scores of whole rows, thresholds.py the
thresholds of top_k and top_p, topk.py `topk_logprobs`, and dtensor.py takes DTensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from ...core.agreement import kind_of
from ...core.options import is_number
from ...core.processes import group_or_default
from ...sampling.arguments import Logits, checked_count, checked_part, checked_target
from ...sampling.results import Sampled, TopLogprobs
from ..shards import Shards, agreed, announced, checked_shards
from . import run, topk
from .leaders import Team

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sample", "topk_logprobs"]


def sample(
    local: Tensor, dim: int = -1, group: Any = None, *, temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None, top_p: float | Tensor | None = None, min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None, offset: int | Tensor = 0, generator: torch.Generator | None = None,
    bias: Tensor | None = None, mask: Tensor | None = None, softcap: float | None = None,
    ties: Literal["keep", "first"] = "keep", top_logprobs: int = 0,
    logprobs: Literal["processed", "raw"] = "processed", return_support: int | None = None,
    shards: Shards | None = None,
) -> Sampled:  # fmt: skip
    """Sample a token of each row if the tokens are sharded over processes: the same on every process.

    The tokens and the kept sets are those of `onlinesoftmax.sample` of the whole rows.  No process sends its logits:
    if top_k is one number of at most 1024, it sends its top_k largest scores; for another top_k, and for top_p without
    such a top_k, 40 KiB of bins for each row (84 KiB in float64).

    Args:
        local: Logits of the tokens of this process, floating point; other processes have the same dtype, and may differ
            in `dim` alone.  There may be no token.
        dim: The dimension of the tokens.
        group: Process group; the default group if None.
        temperature, top_k, top_p, min_p, offset: As for `onlinesoftmax.sample`, the same on every process.
        seed: As for `onlinesoftmax.sample`, the same on every process.  None draws one for each row from the generator
            of each process, and takes those of the first.
        generator: As for `onlinesoftmax.sample`.
        bias, mask: Those of the local tokens; they broadcast to the shape of `local`.
        softcap, ties, top_logprobs, logprobs, return_support: As for `onlinesoftmax.sample`.
        shards: Position of the local tokens, if the caller knows it: the calls of the processes are then not compared.

    Returns:
        The named tuple `Sampled` of `onlinesoftmax.sample`; token ids are counted over all processes.

    Raises:
        TypeError, RuntimeError, ValueError, IndexError: as for `onlinesoftmax.sample`; or the processes make different
            calls, `shards` does not fit `local`, or no process has a token.

    Example:
        >>> from onlinesoftmax.distributed import one_process
        >>> with one_process() as group:  # it has all tokens; torchrun starts more processes
        ...     found = sample(torch.tensor([[0.0, 3.0, 2.0, 1.0]]), group=group, temperature=0.7, top_k=2, seed=7)
        >>> found.token, found.kept
        (tensor([1]), tensor([2]))
    """
    numbers = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "offset": offset,
        "ties": ties, "top_logprobs": top_logprobs, "logprobs": logprobs,
        "return_support": return_support,
    }  # fmt: skip
    logits, team = _agreed("sample", (local, dim, 1.0, softcap, bias, mask), numbers, shards, group)
    return run.sample(logits, {**numbers, "generator": generator}, team)


def topk_logprobs(
    local: Tensor, k: int, dim: int = -1, group: Any = None, *, target: Tensor | None = None, scale: float = 1.0,
    softcap: float | None = None, mask: Tensor | None = None, shards: Shards | None = None,
) -> TopLogprobs:  # fmt: skip
    """The k largest scores of each row and their log-probabilities, if the tokens are sharded over processes.

    The results are the same on every process.  Each process gets the gradient of its own logits.

    Args:
        local, dim, group, shards: As for `sample`.
        k: Number of tokens, from 0 to those of all processes.
        target: A token of each row, counted over all processes; the same on every process.
        scale, softcap: As for `onlinesoftmax.topk_logprobs`; the scale is a number.
        mask: That of the local tokens; it broadcasts to the shape of `local`.

    Returns:
        The named tuple `TopLogprobs` of `onlinesoftmax.topk_logprobs`.

    Raises:
        TypeError, RuntimeError, ValueError, IndexError: as for `onlinesoftmax.topk_logprobs`; or the processes make
            different calls, `shards` does not fit `local`, or no process has a token.

    Example:
        >>> from onlinesoftmax.distributed import one_process
        >>> with one_process() as group:
        ...     found = topk_logprobs(torch.tensor([[0.0, 3.0, 1.0, 3.0]]), 2, group=group, target=torch.tensor([2]))
        >>> found.indices, found.target_rank
        (tensor([[1, 3]]), tensor([3]))
    """
    if not is_number(scale):
        raise TypeError(f"topk_logprobs(): scale must be a number, not {type(scale).__name__}")
    numbers = {"k": k, "target": kind_of(target), "scale": float(scale)}
    logits, team = _agreed("topk_logprobs", (local, dim, scale, softcap, None, mask), numbers, shards, group)
    return topk.topk_logprobs(logits, checked_count(logits, "k", k, 0), checked_target(logits, target), team)


@torch.compiler.disable
def _agreed(
    name: str, scores: tuple[Any, ...], numbers: dict[str, Any], shards: Any, group: Any
) -> tuple[Logits, Team]:
    """(the logits of this process, the processes), after a comparison of the calls unless `shards` is given.

    Args:
        name: Name of the public function.
        scores: local, dim, scale, softcap, bias and mask.
        numbers: The arguments that every process gives alike, by name.
        shards, group: The arguments of these names.
    """
    local, dim, scale, softcap, bias, mask = scores
    if type(local).__name__ == "DTensor":
        instead = "call onlinesoftmax.sample, or " if name == "sample" else ""
        raise TypeError(f"{name}(): local is a DTensor: {instead}pass local.to_local()")
    logits, group = checked_part(name, local, dim, scale, softcap, bias, mask, "local"), group_or_default(group)
    if not local.dim():
        raise ValueError(f"{name}(): local needs a dimension of tokens, got shape ()")
    if shards is not None:
        shards = checked_shards(name, shards, logits.tokens)
    else:
        same = {key: kind_of(value) if isinstance(value, torch.Tensor) else value for key, value in numbers.items()}
        call = announced(name, local, logits.dim, {**same, "softcap": softcap})
        shards = agreed(call, local, logits.dim, group)
    if not shards.total:
        raise ValueError(f"{name}(): no process has a token")
    return logits._replace(tokens=shards.total), Team((group,), shards)
