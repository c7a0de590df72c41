"""The counter-based generator of the noise, and the grid of the noise, for arrays of any library.

The generator is Philox4x32-7 (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011).  In that paper
it passes BigCrush from 7 rounds on; its 10 rounds are a margin.  A round takes an instruction for each token, and a
kernel that reads bfloat16 logits as fast as the memory gives them has time for some 20.
"""

from __future__ import annotations

from ..core.arrays import Array

LOW = 0xFFFFFFFF
"""Mask of the lower 32 bits."""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 7
"""Rounds of the generator."""

SAMPLE, CORRECT, ACCEPT = range(3)
"""The streams: to sample a token, to sample another one instead of a draft, and to accept a draft."""

GRID = 2.0**24
"""The noise is a multiple of 1 / GRID."""


def philox(counter: tuple[Array, ...], key: tuple[Array, ...]) -> tuple[Array, ...]:
    """The four 32-bit words of Philox4x32-7; all words are int64 arrays from 0 to 2^32 - 1 that broadcast."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(ROUNDS):
        # A product has 64 bits, and wraps in int64.  The mask takes the sign off its upper half.
        of_a, of_c = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (of_c >> 32 & LOW) ^ b ^ low, of_c & LOW, (of_a >> 32 & LOW) ^ d ^ high, of_a & LOW
        low, high = low + _KEY_STEPS[0] & LOW, high + _KEY_STEPS[1] & LOW
    return a, b, c, d
