"""The formulas of sampling for NumPy, and for JAX with 64-bit types: the distribution of a row, its noise, its token.

They give the tokens that distribution.py, noise.py and order.py give for torch tensors.  A row is the
last axis, and its tokens keep their order: the threshold of a filter is found without sorting, one bit after the other.
So each step is a sum over the row, which a compiler can divide over devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.arrays import Array
from ..core.options import LARGEST_FLOAT32
from . import verification
from .masses import FRACTION_BITS, MASS_BITS, POWER_OF_TWO
from .philox import ACCEPT, CORRECT, GRID, LOW, SAMPLE, philox
from .rules import Parameters


class Functions(NamedTuple):
    """The functions that the formulas need besides those that NumPy and JAX have in common.

    Attributes:
        xp: numpy, or jax.numpy with 64-bit types.
        float32: Rounds float64 numbers to float32; the result is float64.
        largest: largest(keys, k): columns of the k largest integers of each row, of equal ones the lower column first.
        fold: fold(step, start, values): the last of start, step(start, values[0]), and so on.
    """

    xp: Any
    float32: Callable[[Array], Array]
    largest: Callable[[Array, int], Array]
    fold: Callable[[Callable[[Array, Array], Array], Array, Array], Array]


class Distribution(NamedTuple):
    """The distribution of each row, in float64; arrays (rows, tokens), and (rows, 1) for numbers of rows.

    Attributes:
        z: Score of each token less the largest.
        kept: True for the tokens that can be sampled.
        m: Largest score, (rows, 1).
        temperature: (rows, 1); 1 for a greedy row, which keeps one token.
        log_sum: Logarithm of the sum of exp(z / temperature) over the kept tokens, (rows, 1).
        valid: False for a row without a distribution, (rows, 1).
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
    xp, found = of.xp, distribution_of(of, scores, given)
    mask = found.kept & found.valid
    columns = xp.argmax(_keys(of, found, seed, offset), -1, keepdims=True)
    kept = xp.sum(mask, -1, keepdims=True)
    if raw:
        found = _without_filters(of, found, scores)
    if top:
        columns = xp.concatenate([columns, of.largest(ordered(of, scores), top)], -1)
    logprobs = xp.take_along_axis(found.z, columns, -1) / found.temperature - found.log_sum
    logprobs = xp.where(xp.take_along_axis(found.kept, columns, -1), logprobs, -xp.inf)
    lse = found.m / found.temperature + found.log_sum
    logprobs, lse = (xp.where(found.valid, t, xp.nan).astype(scores.dtype) for t in (logprobs, lse))
    tokens = xp.where(found.valid, columns, 0)
    rows = (t[..., 0] for t in (tokens, logprobs, lse, kept, found.valid))
    return (*rows, *(t[..., 1:] if top else None for t in (tokens, logprobs)), mask)


def distribution_of(of: Functions, scores: Array, given: Parameters) -> Distribution:
    """The distribution of each row of scores (rows, tokens)."""
    xp, temperature = of.xp, given.temperature.astype(of.xp.float64)
    # Hazard: XLA's maximum of a row on a CPU may leave a NaN out.  Of the integers, that of NaN is the largest.
    largest = xp.argmax(ordered(of, scores), -1, keepdims=True)
    m = xp.take_along_axis(scores, largest, -1).astype(xp.float64)
    valid, greedy = (m > -xp.inf) & (temperature >= 0) & (temperature < xp.inf), temperature == 0
    for p in (given.top_p, given.min_p):
        valid = valid if p is None else valid & ~xp.isnan(p)
    temperature = xp.where(greedy, 1.0, temperature)
    z, masses = _below(of, scores, m), _masses(of, scores, m, temperature)
    kept = z > -xp.inf
    if given.top_k is not None:
        number = xp.sum(kept, -1, keepdims=True)
        wanted = xp.where(given.top_k > 0, xp.minimum(given.top_k, number), number)
        kept = _largest_of(of, scores, kept, xp.ones_like(masses), wanted, given.first)
    if given.top_p is not None:
        total = xp.sum(xp.where(kept, masses, 0), -1, keepdims=True)
        wanted = xp.minimum(xp.ceil(given.top_p * total).astype(xp.int64), total)
        some = _largest_of(of, scores, kept, masses, xp.maximum(wanted, 1), given.first)
        kept = xp.where(given.top_p < 1, some, kept)
    if given.min_p is not None:
        kept = kept & (z >= temperature * xp.log(xp.clip(given.min_p, 0.0, 1.0)))
    kept = xp.where(greedy, xp.arange(scores.shape[-1]) == largest, kept)
    log_sum = _log_sum(of, z / temperature, kept) if scores.dtype == xp.float64 else _log(of, masses, kept)
    return Distribution(z, kept, m, temperature, log_sum, valid)


def _largest_of(of: Functions, scores: Array, kept: Array, weights: Array, wanted: Array, first: bool) -> Array:
    """Of the kept tokens, those with the largest scores, as few as have weights that add up to `wanted`, at least 1.

    Args:
        of: Functions of the library.
        scores: Scores (rows, tokens).
        kept: True for the tokens to choose from.
        weights: int64, equal for equal scores.
        wanted: (rows, 1) int64.
        first: As `Parameters.first`.
    """
    xp, keys = of.xp, ordered(of, scores)
    threshold = _threshold(of, keys, xp.where(kept, weights, 0), wanted)
    if not first:
        return kept & (keys >= threshold)
    above, ties = kept & (keys > threshold), kept & (keys == threshold)
    missing = wanted - xp.sum(xp.where(above, weights, 0), -1, keepdims=True)
    number = -(-missing // xp.max(xp.where(ties, weights, 1), -1, keepdims=True))
    low_ids_first = -xp.arange(scores.shape[-1], dtype=xp.int32)
    return above | (ties & (low_ids_first >= _threshold(of, low_ids_first, ties, number)))


def _threshold(of: Functions, keys: Array, weights: Array, wanted: Array) -> Array:
    """The largest number that leaves enough: the weights of the keys from it on add up to `wanted`; (rows, 1).

    It is made of the bits that leave enough, the highest first.  Each is a sum over the row, which is not sorted.
    """
    xp, smallest = of.xp, int(of.xp.iinfo(keys.dtype).min)
    bits = xp.asarray([smallest, *(1 << i for i in reversed(range(xp.iinfo(keys.dtype).bits - 1)))], keys.dtype)

    def step(threshold: Array, bit: Array) -> Array:
        # The sign bit of the smallest integer is 1, and that of the numbers above -1 is 0.
        higher = threshold ^ bit
        enough = xp.sum(xp.where(keys >= higher, weights, 0), -1, keepdims=True) >= wanted
        return xp.where(enough, higher, threshold)

    return of.fold(step, xp.full(wanted.shape, smallest, keys.dtype), bits)


def ordered(of: Functions, scores: Array) -> Array:
    """Integers of the same size in the order of the scores: 0 equals -0, and NaN is above all."""
    dtype = of.xp.int64 if scores.dtype == of.xp.float64 else of.xp.int32
    bits, limits = scores.view(dtype), of.xp.iinfo(dtype)
    bits = of.xp.where(bits == int(limits.min), 0, bits)
    return of.xp.where(of.xp.isnan(scores), int(limits.max), turned(of, bits))


def turned(of: Functions, bits: Array) -> Array:
    """Bits of scores as integers in their order, and the other way round.

    The bits of a negative number grow with its magnitude, so all but the sign are turned.
    """
    limits = of.xp.iinfo(bits.dtype)
    return bits ^ (bits >> limits.bits - 1 & int(limits.max))


def rank_of(of: Functions, keys: Array, target: Array) -> Array:
    """The rank of a token of each row in the order of falling scores, from 1; 0 where the target is no token; (rows,).

    Args:
        of: Functions of the library.
        keys: `ordered` of the scores (rows, tokens).
        target: A token of each row, (rows, 1).
    """
    xp, columns = of.xp, of.xp.arange(keys.shape[-1])
    inside = (target >= 0) & (target < keys.shape[-1])
    at = xp.where(inside, target, 0)
    own = xp.take_along_axis(keys, at, -1)
    rank = xp.sum((keys > own) | ((keys == own) & (columns < at)), -1, keepdims=True) + 1
    return xp.where(inside, rank, 0)[..., 0]


def _masses(of: Functions, scores: Array, m: Array, temperature: Array) -> Array:
    """The masses of scores by the definition of masses.py, int64; for float64 scores, by the library's exp."""
    xp = of.xp
    if scores.dtype == xp.float64:
        masses = xp.exp(_below(of, scores, m) / temperature) * 2.0**MASS_BITS
        return xp.where(xp.isnan(masses), 0, xp.round(masses)).astype(xp.int64)
    rate = of.float32(xp.minimum(math.log2(math.e) / temperature, LARGEST_FLOAT32))
    y = scores.astype(xp.float64) * rate
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
    power = (power * unit).astype(xp.int64)
    octaves = xp.where(octaves > -63.0, octaves, -63.0)
    left = octaves.astype(xp.int64) + (MASS_BITS - FRACTION_BITS)
    return xp.where(left < 0, power >> xp.maximum(-left, 0), power << xp.maximum(left, 0))


def _below(of: Functions, scores: Array, m: Array) -> Array:
    """Scores less the largest, float64."""
    # The difference of two infinite scores would be NaN.
    return of.xp.where(scores == m, 0.0, scores - m)


def _log(of: Functions, masses: Array, kept: Array) -> Array:
    """Logarithm of the sum of the kept masses of each row, in units of the largest one, (rows, 1) float64."""
    total, largest = of.xp.sum(of.xp.where(kept, masses, 0), -1, keepdims=True), of.xp.max(masses, -1, keepdims=True)
    return of.xp.log(total.astype(of.xp.float64) / largest.astype(of.xp.float64))


def _log_sum(of: Functions, z: Array, kept: Array) -> Array:
    """Logarithm of the sum of exp(z) over the kept tokens of each row, with the accuracy of float64; z is at most 0."""
    return of.xp.log(of.xp.sum(of.xp.where(kept, of.xp.exp(z), 0.0), -1, keepdims=True))


def _without_filters(of: Functions, found: Distribution, scores: Array) -> Distribution:
    """The distribution of all tokens of the scores at the temperature 1."""
    one, kept = of.xp.ones_like(found.temperature), of.xp.ones_like(found.kept)
    wide = scores.dtype == of.xp.float64
    log_sum = _log_sum(of, found.z, kept) if wide else _log(of, _masses(of, scores, found.m, one), kept)
    return found._replace(temperature=one, kept=kept, log_sum=log_sum)


def _keys(of: Functions, found: Distribution, seed: Array, offset: Array) -> Array:
    """The numbers of which the largest has the token that is sampled."""
    keys = found.z + found.temperature * gumbel(of, seed, offset, found.z.shape[-1])
    return of.xp.where(found.kept, keys, -of.xp.inf)


def gumbel(of: Functions, seed: Array, offset: Array, tokens: int, stream: int = SAMPLE) -> Array:
    """The noise of the tokens of each row, (rows, tokens) float64; seed and offset are (rows, 1) int64."""
    xp = of.xp
    return xp.round(-xp.log(-xp.log(uniform(of, seed, offset, tokens, stream))) * GRID) / GRID


def uniform(of: Functions, seed: Array, offset: Array, tokens: int, stream: int) -> Array:
    """The numbers (bits + 1/2) / 2^32 of the tokens of each row, between 0 and 1; arguments as of `gumbel`."""
    xp, blocks = of.xp, of.xp.arange(-(-tokens // 4))
    (seed_low, seed_high), (low, high) = ((t & LOW, t >> 32 & LOW) for t in (seed, offset))
    words = xp.stack(philox((blocks, low, high, xp.full_like(low, stream)), (seed_low, seed_high)), -1)
    bits = words.reshape(*words.shape[:-2], 4 * blocks.shape[0])[..., :tokens]
    return (bits.astype(xp.float64) + 0.5) * 2.0**-32


def verify(
    of: Functions, scores: tuple[Array, Array | None], drafts: Array, given: Parameters, seed: Array, offset: Array
) -> tuple[Array, ...]:
    """The fields of `Verified`, by the rule of verification.py.

    Args:
        of: Functions of the library.
        scores: Scores (rows, n + 1, tokens) of the target model; and those of the draft model (rows, n, tokens), or
            None for drafts without a distribution.
        drafts: Drafted tokens (rows, n) int64; another number where a row has fewer.
        given: Temperature and filters, (rows, 1, 1).
        seed, offset: What the noise of the first position of each row is made of, (rows, 1, 1) int64.
    """
    xp, n, tokens = of.xp, drafts.shape[-1], scores[0].shape[-1]
    target = distribution_of(of, scores[0], given)
    draft = None if scores[1] is None else distribution_of(of, scores[1], given)
    exists = (drafts >= 0) & (drafts < tokens)
    columns = xp.where(exists, drafts, 0)[..., None]
    of_p = xp.take_along_axis(_probabilities(of, target)[..., :n, :], columns, -1)[..., 0]
    of_q = 1.0 if draft is None else xp.take_along_axis(_probabilities(of, draft), columns, -1)[..., 0]
    chance = uniform(of, seed, offset + xp.arange(n)[:, None], 1, ACCEPT)[..., 0]
    accepted = verification.number_accepted(exists, of_p, of_q, chance)

    here, offset = _at(of, target, accepted[..., None]), offset + accepted[..., None]
    p, keys = (t[..., 0, :] for t in (_probabilities(of, here), _keys(of, here, seed, offset)))
    if n:
        at = xp.minimum(accepted, n - 1)
        if draft is None:
            q = (xp.take_along_axis(columns[..., 0], at, -1) == xp.arange(tokens)).astype(xp.float64)
        else:
            q = _probabilities(of, _at(of, draft, at[..., None]))[..., 0, :]
        replaces = xp.take_along_axis(exists, at, -1) & (accepted < n)
        noise = gumbel(of, seed, offset, tokens, CORRECT)[..., 0, :]
        keys = verification.keys_of_next(xp, p, q, replaces, noise, keys)
    valid = here.valid[..., 0]
    last = xp.where(valid, xp.argmax(keys, -1, keepdims=True), -1)
    of_last = xp.take_along_axis(p, xp.maximum(last, 0), -1)
    found, logprobs = verification.row_of(xp, xp.arange(n + 1), accepted, drafts, of_p, last, of_last)
    return accepted[..., 0], found, logprobs.astype(scores[0].dtype), valid[..., 0]


def _at(of: Functions, found: Distribution, position: Array) -> Distribution:
    """The distribution of one position of each row, (rows, 1, 1), among those along the second dimension."""
    return Distribution(*[t if t.shape[-2] == 1 else of.xp.take_along_axis(t, position, -2) for t in found])


def _probabilities(of: Functions, found: Distribution) -> Array:
    """Probabilities of all tokens, float64; NaN in rows that are not valid."""
    p = of.xp.where(found.kept, of.xp.exp(found.z / found.temperature - found.log_sum), 0.0)
    return of.xp.where(found.valid, p, of.xp.nan)
