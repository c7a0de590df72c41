"""The launch of support.cuh, which gathers the tokens that rows could be sampled from."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ...kernels.cuda.launch import launcher
from ...torch.fast_path import MOST_ENTRIES
from ...torch.prepare import allocator
from ..eager import support_of
from ..results import Sampled, Support
from .source import MOST_TOP
from .support import KERNEL, MOST_ROWS, Shape
from .unfiltered_launch import Run

Tensor = torch.Tensor


def support(tokens: Tensor, kept: Tensor, most: int) -> Support:
    """`support_of` of the listed tokens of rows on a GPU; by PyTorch's operations where the kernel does not take them.

    Args:
        tokens: The tokens with the largest scores, (..., listed), contiguous.
        kept: Number of tokens that a row keeps, contiguous.
        most: Most tokens of a row in the support, at most those that are listed.
    """
    width, rows = tokens.shape[-1], kept.numel()
    if most > MOST_TOP or rows > MOST_ROWS:
        return support_of(tokens.reshape(rows, width)[:, :most], kept.flatten())
    return _bound(rows, width, most, tokens.get_device())(tokens, kept)


def with_support(run: Run, top: int, most: int) -> Run:
    """A function that samples by another one, whose lists have the tokens of the support; it returns `top` of them."""

    def run_both(*given: Any) -> Sampled:
        found = run(*given)
        tokens: Any = found.top_tokens
        logprobs: Any = found.top_logprobs
        gathered = support(tokens, found.kept, most)
        tokens, logprobs = (tokens[..., :top], logprobs[..., :top]) if top else (None, None)
        return Sampled(found.token, found.logprob, found.lse, found.kept, found.valid, tokens, logprobs, gathered)

    return run_both


@lru_cache(MOST_ENTRIES)
def _bound(rows: int, width: int, most: int, index: int) -> Callable[[Tensor, Tensor], Support]:
    """`support` of such rows."""
    launch = launcher(KERNEL.launch(Shape(), (rows, width, most), rows))
    device, whole = torch.device("cuda", index), torch.int64
    new = allocator(device)
    current_device = torch._C._cuda_getDevice

    def run(tokens: Tensor, kept: Tensor) -> Support:
        if current_device() != index:
            with torch.cuda.device(index):
                return run(tokens, kept)
        token_ids, offsets = new((rows * most,), (1,), whole), new((rows + 1,), (1,), whole)
        launch(index, [t.data_ptr() for t in (tokens, kept, token_ids, offsets)])
        return Support(token_ids, offsets)

    return run
