"""Sampling, and the largest log-probabilities, of NumPy arrays: the checks of the arguments, and the calls.

The functions have the names and the arguments of those for torch tensors in sampling/arguments.py and sampling/run.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

import numpy as np

from ..core.arrays import Array, broadcasts, quiet
from ..core.options import LARGEST_INT64
from ..core.task import ANY
from ..sampling import formulas, rules
from ..sampling.keys import Keys, ordered
from ..sampling.results import Sampled, Support, TopLogprobs, Verified
from ..sampling.rules import Logits, Parameters, checked_choice, checked_count, checked_target
from .arguments import NUMPY
from .eager import ELEMENTS, scores_of
from .run import run_tokens

__all__ = [
    "checked_choice", "checked_count", "checked_drafts", "checked_logits", "checked_parameters", "checked_seeds",
    "checked_target", "sample", "topk_logprobs", "verify",
]  # fmt: skip

checked_drafts = rules.checked_drafts


def order_of(scores: Array, filtered: bool = False) -> Keys:
    """The order of scores (rows, tokens)."""
    return Keys(FUNCTIONS, ordered(np, scores), _largest, lambda step, start, values: reduce(step, values, start))


def _largest(keys: Array, k: int) -> Array:
    # The complement turns the order, and overflows for no integer.
    return np.argsort(~keys, -1, kind="stable")[..., :k]


FUNCTIONS = formulas.Functions(
    np,
    cast=lambda t, dtype: t.astype(dtype, copy=False),
    float32=lambda t: t.astype(np.float32).astype(np.float64),
    take=np.take_along_axis,
    arange=lambda first, end, _: np.arange(first, end),
    order=order_of,
)
"""NumPy's functions for the formulas."""


def checked_logits(
    name: str, logits: Any, dim: Any, scale: Any, softcap: Any, bias: Any, mask: Any, argument: str = "logits"
) -> Logits:
    """The logits and their score options; `argument` is the name of the logits."""
    found = rules.checked_part(NUMPY, name, logits, dim, (scale, softcap, bias, mask), argument)
    rules.check_has_tokens(found, argument)
    return found._replace(x=np.asarray(logits))


@quiet
def _of_rows(logits: Logits, argument: str, value: Any, dtype: str, low: float, high: float) -> Array:
    """A number, or an array with one for each row, as an array of all rows, (rows,); arguments as of `OfRows`."""
    name, rows, whole = logits.name, logits.rows, dtype == "int64"
    if not isinstance(value, np.ndarray):
        value = np.asarray(rules.checked_between(logits, argument, value, whole, low, high))
    else:
        wanted, kind = ("an int", ("integer",)) if whole else ("a number", ("integer", "floating"))
        NUMPY.check_array(f"{name}()", argument, value)
        if NUMPY.kind_of(value) not in kind:
            raise TypeError(f"{name}(): {argument} must be {wanted} or an array of such, got {value.dtype}")
        if not broadcasts(value.shape, rows):
            raise ValueError(
                f"{name}(): {argument} must be {wanted} or have one for each row, of shape {rows}; got {value.shape}"
            )
    return np.broadcast_to(value.astype(dtype), rows).reshape(math.prod(rows))


def checked_parameters(logits: Logits, temperature: Any, top_k: Any, top_p: Any, min_p: Any, ties: Any) -> Parameters:
    """Temperature and filters of the rows."""
    of_rows, filters = partial(_of_rows, logits), (top_k, top_p, min_p)
    return rules.checked_parameters(f"{logits.name}()", logits.tokens, of_rows, temperature, filters, ties)


def checked_seeds(logits: Logits, seed: Any, offset: Any, generator: Any) -> tuple[Array, Array]:
    """Seed and offset of the rows, int64; without a seed, drawn from the generator."""
    name = logits.name
    if generator is not None and not isinstance(generator, np.random.Generator):
        raise TypeError(
            f"{name}(): generator must be a numpy.random.Generator or None for a NumPy array, "
            f"not {type(generator).__name__}"
        )
    if generator is not None and seed is not None:
        raise ValueError(f"{name}(): seed and generator exclude each other: a seed is drawn from a generator")
    offsets = _of_rows(logits, "offset", offset, "int64", 0, LARGEST_INT64)
    if seed is not None:
        return _of_rows(logits, "seed", seed, "int64", 0, LARGEST_INT64), offsets
    generator = generator or np.random.default_rng()
    return generator.integers(LARGEST_INT64, size=math.prod(logits.rows)), offsets


@quiet
def sample(
    logits: Logits, parameters: Parameters, seed: Array, offset: Array, raw: bool, top: int, most: int
) -> Sampled:
    """A token of each row; the arguments are those of `sample` in sampling/run.py."""
    scores, parts = _scores(logits), []
    for part in _chunks(len(scores), logits.tokens):
        given = parameters.map(lambda t: t[part, None])  # noqa: B023  # called at once
        parts.append(formulas.sample(FUNCTIONS, scores[part], given, seed[part, None], offset[part, None], raw, top))
    *fields, kept = (None if some[0] is None else np.concatenate(some) for some in zip(*parts, strict=True))
    found: list[Any] = [None if t is None else t.reshape(logits.rows + t.shape[1:]) for t in fields]
    return Sampled(*[*found, _support(kept, most) if most else None])


def _support(kept: Array, most: int) -> Support:
    """The tokens that rows keep, if they are at most `most`; `kept` is (rows, tokens)."""
    count = kept.sum(1)
    count[count > most] = 0
    ids = np.nonzero(kept & (count > 0)[:, None])[1]
    token_ids = np.full(len(kept) * most, -1)
    token_ids[: len(ids)] = ids
    return Support(token_ids, np.concatenate([[0], np.cumsum(count)]))


@quiet
def topk_logprobs(logits: Logits, k: int, target: Array | None) -> TopLogprobs:
    """The k largest scores of each row; the arguments are those of `topk_logprobs` in sampling/run.py."""
    x, dim, rows, scores = logits.x, logits.dim, logits.rows, _scores(logits)
    order = order_of(scores)
    columns = order.largest(k)

    def in_place(t: Array) -> Array:
        return np.moveaxis(t.reshape(*rows, k), -1, dim)

    indices, rank = in_place(columns), None
    wanted = indices
    if target is not None:
        tokens = np.asarray(target).astype(np.int64)
        rank = order.rank_of(tokens.reshape(-1, 1)).reshape(rows)
        wanted = np.concatenate([indices, np.expand_dims(tokens, dim)], dim)
    found = run_tokens(x, wanted, dim, logits.options, False, ANY)
    *logprobs, own = (found.logprob, None) if target is None else np.split(found.logprob, [k], dim)
    own = None if own is None else own.squeeze(dim)
    return TopLogprobs(in_place(np.take_along_axis(scores, columns, 1)), indices, logprobs[0], own, rank, found.lse)


@quiet
def verify(
    target: Logits, drafts: Array, draft: Logits | None, parameters: Parameters, seed: Array, offset: Array
) -> Verified:
    """What is left of drafted tokens; the arguments are those of `verify` in sampling/run.py."""
    *rows, n = drafts.shape
    tokens = np.asarray(drafts).astype(np.int64).reshape(len(seed), n)
    scores = _scores(target).reshape(len(seed), n + 1, target.tokens)
    of_draft = None if draft is None else _scores(draft).reshape(len(seed), n, target.tokens)
    parts = []
    for part in _chunks(len(seed), (n + 1) * target.tokens):
        both = scores[part], None if of_draft is None else of_draft[part]
        given = parameters.map(lambda t: t[part, None, None])  # noqa: B023  # called at once
        seeds = seed[part, None, None], offset[part, None, None]
        parts.append(formulas.verify(FUNCTIONS, both, tokens[part], given, *seeds))
    joined = (np.concatenate(some) for some in zip(*parts, strict=True))
    return Verified(*[t.reshape((*rows, *t.shape[1:])) for t in joined])


def _chunks(rows: int, elements: int) -> Iterator[slice]:
    """A few rows at a time; `elements` are those of a row.  Without a row, a chunk without one."""
    count = max(ELEMENTS // elements, 1)
    return (slice(first, first + count) for first in range(0, max(rows, 1), count))


def _scores(logits: Logits) -> Array:
    """The scores (rows, tokens), float32 or float64."""
    x = logits.x.astype(np.float64 if logits.x.dtype.itemsize >= 8 else np.float32, copy=False)
    z = np.moveaxis(scores_of(x, logits.options), logits.dim, -1)
    return np.ascontiguousarray(z).reshape(math.prod(logits.rows), logits.tokens)
