"""The formulas of sampling for NumPy, PyTorch, and JAX with 64-bit types: a distribution, its noise, its token.

A row is the last axis.  A filter keeps the tokens whose score reaches a threshold, and with ties="first" those of
equal scores with the lowest ids, so the result does not depend on how a row is divided over blocks or devices.  No
value is read back from a GPU.

The noise of a token comes from (seed, offset, token id), by the generator Philox4x32-7 (philox.py), and not from the
row's index.  So the same row gets the same token in every batch and on every device, and a token keeps its noise when
others are filtered out.

    counter  (token id / 4, low half of offset, high half of offset, stream)
    key      (low half of seed, high half of seed)
    bits     word (token id mod 4) of the four results

A stream is one use of the noise: numbers of two streams are independent, though seed and offset are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..core.arrays import Array
from ..core.options import LARGEST_FLOAT32
from . import verification
from .masses import FRACTION_BITS, MASS_BITS, POWER_OF_TWO
from .philox import ACCEPT, CORRECT, GRID, LOW, SAMPLE, philox
from .rules import Parameters


class Order(Protocol):
    """Scores (..., tokens) in their order: the largest first, NaN before all, and of equal scores the lower column."""

    def best(self) -> Array:
        """The column of the first score, (..., 1)."""

    def largest(self, k: int) -> Array:
        """The columns of the first k scores, (..., k)."""

    def leading(self, kept: Array, weights: Array | None, wanted: Array, first: bool) -> Array:
        """True for the first of the kept tokens: as few as have weights with a sum of at least `wanted`.

        Unless `first`, the result also has the kept tokens whose score equals that of the last one.

        Args:
            kept: True for the tokens to choose from.
            weights: int64, equal for the kept tokens with equal scores, 0 for all others.  None is 1 for each kept
                token; `kept` is then True for all scores above -inf.
            wanted: (..., 1) int64.
            first: As `Parameters.first`.
        """

    def log_sum(self, z: Array, kept: Array) -> Array:
        """Logarithm of the sum of exp(z) over the kept tokens, (..., 1), with the accuracy of float64; z <= 0."""


class Functions(NamedTuple):
    """The functions that the formulas need of an array library, besides those that are spelled alike in all.

    Attributes:
        xp: numpy, torch, or jax.numpy with 64-bit types.
        cast: cast(array, dtype).
        float32: Rounds float64 numbers to float32; the result is float64.
        take: take(array, places, axis) along the axis -1, or -2 with one place for all columns.
        arange: arange(first, end, like) in int64, on the device of `like`.
        order: order(scores, filtered) is their order; `filtered` is True where `leading` may be called.
    """

    xp: Any
    cast: Callable[[Array, Any], Array]
    float32: Callable[[Array], Array]
    take: Callable[[Array, Array, int], Array]
    arange: Callable[[int, int, Array], Array]
    order: Callable[[Array, bool], Order]


class Distribution(NamedTuple):
    """The distribution of each row, in float64; z and kept are (..., tokens), all others (..., 1).

    Attributes:
        z: Score of each token less the largest.
        kept: True for the tokens that can be sampled.
        m: Largest score.
        temperature: 1 for a greedy row, which keeps one token.
        log_sum: Logarithm of the sum of exp(z / temperature) over the kept tokens.
        valid: False for a row without a distribution: it has a NaN or nothing but -inf, its temperature is negative or
            infinite, or a parameter is NaN.
    """

    z: Array
    kept: Array
    m: Array
    temperature: Array
    log_sum: Array
    valid: Array


def sample(
    of: Functions, scores: Array, given: Parameters, seed: Array, offset: Array, raw: bool, top: int
) -> tuple[Any, ...]:
    """The fields of `Sampled` without the support, for scores (rows, tokens); then True for each token that is kept.

    Args:
        of: Functions of the library.
        scores: float32 or float64.
        given: Temperature and filters, (rows, 1).
        seed, offset: What the noise of a row is made of, (rows, 1) int64.
        raw: True for log-probabilities of the scores as they are, without temperature and filters.
        top: Number of the largest log-probabilities to return.
    """
    order = of.order(scores, given.is_filtered())
    found = distribution_of(of, scores, order, given)
    mask = found.kept & found.valid
    columns = _keys(of, found, seed, offset).argmax(-1, keepdims=True)
    kept = mask.sum(-1, keepdims=True)
    if raw:
        found = _without_filters(of, found, scores, order)
    if top:
        columns = of.xp.concatenate([columns, order.largest(top)], -1)
    return *results_of(of, _of_tokens(of, found, columns), columns, kept, scores.dtype), mask


def results_of(of: Functions, found: Distribution, tokens: Array, kept: Array, dtype: Any) -> tuple[Any, ...]:
    """The fields of `Sampled` without the support.

    Args:
        of: Functions of the library.
        found: The distribution that log-probabilities refer to, at `tokens` only.
        tokens: The sampled token, then the tokens with the largest scores, (rows, 1 + n).
        kept: Number of tokens that could be sampled, (rows, 1).
        dtype: Dtype of the log-probabilities.
    """
    xp, valid = of.xp, found.valid
    logprobs = xp.where(found.kept, found.z / found.temperature - found.log_sum, -xp.inf)
    lse = found.m / found.temperature + found.log_sum
    logprobs, lse = (of.cast(xp.where(valid, t, xp.nan), dtype) for t in (logprobs, lse))
    tokens, kept = (xp.where(valid, t, 0) for t in (tokens, kept))
    rows = (t[..., 0] for t in (tokens, logprobs, lse, kept, valid))
    return *rows, *(t[..., 1:] if tokens.shape[-1] > 1 else None for t in (tokens, logprobs))


def distribution_of(of: Functions, scores: Array, order: Order, given: Parameters) -> Distribution:
    """The distribution of each row of scores (rows, tokens), whose `Functions.order` is known."""
    xp, largest = of.xp, order.best()
    m = of.cast(of.take(scores, largest, -1), xp.float64)
    temperature, greedy, valid = constants_of(of, m, given)
    z, masses = below(of, scores, m), masses_of(of, scores, m, temperature)
    kept = z > -xp.inf
    if given.top_k is not None:
        wanted = number_of(of, given.top_k, kept.sum(-1, keepdims=True))
        kept = order.leading(kept, None, wanted, given.first)
    if given.top_p is not None:
        # The masses of scores of -inf are 0.
        weights = masses if given.top_k is None else xp.where(kept, masses, 0)
        wanted = xp.clip(mass_of(of, given.top_p, weights.sum(-1, keepdims=True)), 1, None)
        kept = xp.where(given.top_p < 1, order.leading(kept, weights, wanted, given.first), kept)
    kept = reaching_min_p(of, kept, z, temperature, given)
    kept = xp.where(greedy, of.arange(0, scores.shape[-1], scores) == largest, kept)
    wide = scores.dtype == xp.float64
    log_sum = order.log_sum(z / temperature, kept) if wide else _log_of_kept(of, masses, kept)
    return Distribution(z, kept, m, temperature, log_sum, valid)


def constants_of(of: Functions, m: Array, given: Parameters) -> tuple[Array, Array, Array]:
    """(temperature, 1 in greedy rows; greedy; valid) of each row with the largest score m, all (rows, 1)."""
    xp, temperature = of.xp, of.cast(given.temperature, of.xp.float64)
    valid, greedy = (m > -xp.inf) & (temperature >= 0) & (temperature < xp.inf), temperature == 0
    for p in (given.top_p, given.min_p):
        valid = valid if p is None else valid & ~xp.isnan(p)
    return xp.where(greedy, 1.0, temperature), greedy, valid


def below(of: Functions, scores: Array, m: Array) -> Array:
    """Scores less the largest, float64."""
    # The difference of two infinite scores would be NaN.
    return of.xp.where(scores == m, 0.0, scores - m)


def number_of(of: Functions, top_k: Array, finite: Array) -> Array:
    """How many of the `finite` tokens top_k keeps, if no scores are equal at its threshold, (rows, 1)."""
    return of.xp.where(top_k > 0, of.xp.minimum(top_k, finite), finite)


def mass_of(of: Functions, top_p: Array, total: Array) -> Array:
    """The mass that the tokens which top_p keeps have to reach, of the whole mass, (rows, 1)."""
    return of.xp.minimum(of.cast(of.xp.ceil(top_p * total), of.xp.int64), total)


def reaching_min_p(of: Functions, kept: Array, z: Array, temperature: Array, given: Parameters) -> Array:
    """True for the kept tokens that min_p keeps too; z are the scores less the largest."""
    if given.min_p is None:
        return kept
    return kept & (z >= temperature * of.xp.log(of.xp.clip(given.min_p, 0.0, 1.0)))


def masses_of(of: Functions, scores: Array, m: Array, temperature: Array) -> Array:
    """The masses of scores (rows, tokens) by masses.py, int64; those of float64 scores by the library's exp.

    Args:
        of: Functions of the library.
        scores: Scores, in their own dtype.
        m, temperature: Largest score and temperature of each row, (rows, 1) float64.
    """
    xp = of.xp
    if scores.dtype == xp.float64:
        masses = xp.exp(below(of, scores, m) / temperature) * 2.0**MASS_BITS
        return of.cast(xp.where(xp.isnan(masses), 0.0, xp.round(masses)), xp.int64)
    rate = of.float32(xp.clip(math.log2(math.e) / temperature, None, LARGEST_FLOAT32))
    y = of.cast(scores, xp.float64) * rate
    n = xp.floor(y)
    octaves = xp.where(scores == m, 0.0, n - xp.floor(m * rate))
    unit = 2.0**FRACTION_BITS
    # y - n may be rounded, and would be rounded twice.
    g = 1.0 + (xp.round(y * unit) - n * unit) / unit
    # The fraction of an infinite score is NaN.
    g = xp.where(xp.isnan(g), 1.0, g)
    power = xp.full_like(g, POWER_OF_TWO[-1])
    for coefficient in POWER_OF_TWO[-2::-1]:
        power = of.float32(power * g + coefficient)
    power = of.cast(power * unit, xp.int64)
    octaves = xp.where(octaves > -63.0, octaves, -63.0)
    left = of.cast(octaves, xp.int64) + (MASS_BITS - FRACTION_BITS)
    return xp.where(left < 0, power >> xp.clip(-left, 0, None), power << xp.clip(left, 0, None))


def log_of(of: Functions, mass: Array, largest: Array) -> Array:
    """Logarithm of the quotient of a mass and that of the row's largest score, float64."""
    # If only that one is kept, the quotient is 1, of which every library's logarithm is 0.
    mass, largest = (of.cast(t, of.xp.float64) for t in (mass, largest))
    return of.xp.log(mass / largest)


def _log_of_kept(of: Functions, masses: Array, kept: Array) -> Array:
    """`log_of` the sum of the kept masses of each row, (rows, 1)."""
    xp = of.xp
    return log_of(of, xp.where(kept, masses, 0).sum(-1, keepdims=True), xp.amax(masses, -1, keepdims=True))


def _without_filters(of: Functions, found: Distribution, scores: Array, order: Order) -> Distribution:
    """The distribution of all tokens of the scores at the temperature 1."""
    one, kept = of.xp.ones_like(found.temperature), of.xp.ones_like(found.kept)
    wide = scores.dtype == of.xp.float64
    log_sum = order.log_sum(found.z, kept) if wide else _log_of_kept(of, masses_of(of, scores, found.m, one), kept)
    return found._replace(temperature=one, kept=kept, log_sum=log_sum)


def _keys(of: Functions, found: Distribution, seed: Array, offset: Array) -> Array:
    """The sum of score and noise of each kept token: the token with the largest one is sampled."""
    keys = found.z + found.temperature * gumbel(of, seed, offset, found.z.shape[-1])
    return of.xp.where(found.kept, keys, -of.xp.inf)


def gumbel(of: Functions, seed: Array, offset: Array, tokens: int, stream: int = SAMPLE, first: int = 0) -> Array:
    """The noise of the tokens `first` to `first` + `tokens` - 1 of each row, (rows, tokens) float64.

    Each is -log(-log(u)) for a uniform u, rounded to a multiple of 2^-24, from -3.1 to 22.9.  The product of such a
    number and a float32 temperature is exact in float64.  So a device that rounds it and one that fuses it with an
    addition choose the same token.  Two libraries whose logarithms differ in the last bit do so too, but for a few of
    the 2^32 possible u.

    Args:
        of: Functions of the library.
        seed, offset: (rows, 1) int64.
        tokens: Number of tokens.
        stream: Use of the noise.
        first: The first token id.
    """
    xp = of.xp
    return xp.round(-xp.log(-xp.log(uniform(of, seed, offset, tokens, stream, first))) * GRID) / GRID


def uniform(of: Functions, seed: Array, offset: Array, tokens: int, stream: int, first: int = 0) -> Array:
    """The numbers (bits + 1/2) / 2^32 of the tokens of each row, between 0 and 1; arguments as of `gumbel`."""
    xp, blocks = of.xp, of.arange(first // 4, -(-(first + tokens) // 4), seed)
    (seed_low, seed_high), (low, high) = ((t & LOW, t >> 32 & LOW) for t in (seed, offset))
    words = xp.stack(philox((blocks, low, high, xp.full_like(low, stream)), (seed_low, seed_high)), -1)
    bits = words.reshape(*words.shape[:-2], 4 * blocks.shape[0])[..., first % 4 :][..., :tokens]
    return (of.cast(bits, xp.float64) + 0.5) * 2.0**-32


def verify(
    of: Functions, scores: tuple[Array, Array | None], drafts: Array, given: Parameters, seed: Array, offset: Array
) -> tuple[Array, ...]:
    """The fields of `Verified`, by the rule of verification.py.

    Args:
        of: Functions of the library.
        scores: Scores (rows, n + 1, tokens) of the target model; and those of the draft model (rows, n, tokens), or
            None for drafts without a distribution.
        drafts: Drafted tokens (rows, n) int64; a number that is no token id where a row has fewer.
        given: Temperature and filters, (rows, 1, 1).
        seed, offset: What the noise of the first position of each row is made of, (rows, 1, 1) int64.
    """
    xp, n, tokens = of.xp, drafts.shape[-1], scores[0].shape[-1]

    def whole(scores: Array) -> Distribution:
        return distribution_of(of, scores, of.order(scores, given.is_filtered()), given)

    target, draft = whole(scores[0]), None if scores[1] is None else whole(scores[1])
    exists = (drafts >= 0) & (drafts < tokens)
    columns = xp.where(exists, drafts, 0)[..., None]
    drafted = Distribution(*[t[..., :n, :] for t in target])
    of_p, of_q = (
        1.0 if t is None else _probabilities(of, _of_tokens(of, t, columns))[..., 0] for t in (drafted, draft)
    )
    position = of.arange(0, n + 1, drafts)
    chance = uniform(of, seed, offset + position[:n, None], 1, ACCEPT)[..., 0]
    accepted = verification.number_accepted(exists, of_p, of_q, chance)

    here, offset = _at(of, target, accepted[..., None]), offset + accepted[..., None]
    p, keys = (t[..., 0, :] for t in (_probabilities(of, here), _keys(of, here, seed, offset)))
    if n:
        at = xp.clip(accepted, None, n - 1)
        if draft is None:
            q = of.cast(of.take(columns[..., 0], at, -1) == of.arange(0, tokens, drafts), xp.float64)
        else:
            q = _probabilities(of, _at(of, draft, at[..., None]))[..., 0, :]
        replaces = of.take(exists, at, -1) & (accepted < n)
        noise = gumbel(of, seed, offset, tokens, CORRECT)[..., 0, :]
        keys = verification.keys_of_next(xp, p, q, replaces, noise, keys)
    valid = here.valid[..., 0]
    last = xp.where(valid, keys.argmax(-1, keepdims=True), -1)
    of_last = of.take(p, xp.clip(last, 0, None), -1)
    found, logprobs = verification.row_of(xp, position, accepted, drafts, of_p, last, of_last)
    return accepted[..., 0], found, of.cast(logprobs, scores[0].dtype), valid[..., 0]


def _of_tokens(of: Functions, found: Distribution, columns: Array) -> Distribution:
    """The distribution at some tokens of each row only; what is (..., 1) stays that of whole rows."""
    return found._replace(z=of.take(found.z, columns, -1), kept=of.take(found.kept, columns, -1))


def _at(of: Functions, found: Distribution, position: Array) -> Distribution:
    """The distribution of one position of each row, (rows, 1, 1), among those along the second dimension."""
    return Distribution(*[t if t.shape[-2] == 1 else of.take(t, position, -2) for t in found])


def _probabilities(of: Functions, found: Distribution) -> Array:
    """Probabilities of all tokens, float64; NaN in rows that are not valid."""
    p = of.xp.where(found.kept, of.xp.exp(found.z / found.temperature - found.log_sum), 0.0)
    return of.xp.where(found.valid, p, of.xp.nan)
