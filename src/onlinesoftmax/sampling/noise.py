"""Gumbel noise of a token from (seed, offset, token id), by a counter-based generator, and not from the row's index.

So the same row gets the same token in every batch and on every device, and a token keeps its noise when others are
filtered out.  The generator is Philox4x32-7 (philox.py):

    counter  (token id / 4, low half of offset, high half of offset, stream)
    key      (low half of seed, high half of seed)
    bits     word (token id mod 4) of the four results

A stream is one use of the noise: numbers of two streams are independent, though seed and offset are the same.
"""

from __future__ import annotations

import torch

from .philox import GRID, LOW, SAMPLE, philox

Tensor = torch.Tensor


def gumbel(seed: Tensor, offset: Tensor, tokens: int, stream: int = SAMPLE, first: int = 0) -> Tensor:
    """The noise of the tokens `first` to `first` + `tokens` - 1 of each row, (rows, tokens) float64.

    Each is -log(-log(u)) for a uniform u, rounded to a multiple of 2^-24, from -3.1 to 22.9.  The product of such a
    number and a float32 temperature is exact in float64.  So a device that rounds it and one that fuses it with an
    addition choose the same token.  Two libraries whose logarithms differ in the last bit do so too, but for a few of
    the 2^32 possible u.

    Args:
        seed, offset: (rows,) int64.
        tokens: Number of tokens.
        stream: Use of the noise.
        first: The first token id.
    """
    return (-(-uniform(seed, offset, tokens, stream, first).log()).log() * GRID).round() / GRID


def uniform(seed: Tensor, offset: Tensor, tokens: int, stream: int, first: int = 0) -> Tensor:
    """The numbers (bits + 1/2) / 2^32 of the tokens of each row, between 0 and 1, float64; arguments as of `gumbel`."""
    blocks = torch.arange(first // 4, -(-(first + tokens) // 4), device=seed.device)
    (seed_low, seed_high), (low, high) = ((t & LOW, t >> 32 & LOW) for t in (seed.unsqueeze(1), offset.unsqueeze(1)))
    words = philox((blocks, low, high, torch.full_like(low, stream)), (seed_low, seed_high))
    return (torch.stack(words, -1).flatten(1)[:, first % 4 :][:, :tokens].double() + 0.5) * 2.0**-32
