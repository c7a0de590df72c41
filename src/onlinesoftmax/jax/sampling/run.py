"""The ways of the calls: the formulas as one primitive, which JAX lowers with 64-bit types whatever its setting.

Masses are int64 and the noise is float64 (sampling/formulas.py), and JAX has no such types by default (wide.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.arrays import Array, accumulator
from ...sampling import formulas
from ...sampling.results import Sampled, Support, TopLogprobs, Verified
from ...sampling.rules import Parameters
from .. import array_types, wide
from ..eager import scores, scores_at
from ..functions import token_logprobs
from ..prepare import Rows
from ..signature import Values
from ..wide import FUNCTIONS
from .arguments import Words

_DTYPES = {
    "temperature": "float32", "top_k": "int64", "top_p": "float64", "min_p": "float64", "seed": "int64",
    "offset": "int64", "drafts": "int64",
}  # fmt: skip
"""Dtypes of operands in the formulas."""


class Call(NamedTuple):
    """A static parameter of the primitive.

    Attributes:
        formula: formula(call, operands) returns the results.
        words: Name and dtype of each operand that is an array of pairs of 32-bit words.
        first, raw, top: As for the formulas.
        most: Most tokens of a row in the support; 0 for no support.
    """

    formula: Callable[[Call, Values], list[Array]]
    words: tuple[tuple[str, str], ...]
    first: bool
    raw: bool = False
    top: int = 0
    most: int = 0


def _sample(call: Call, operands: Values) -> list[Array]:
    seeds = operands["seed"], operands["offset"]
    *found, kept = formulas.sample(FUNCTIONS, operands["x"], _parameters(call, operands), *seeds, call.raw, call.top)
    if call.most:
        # The ids of the kept tokens by rising id.
        tokens = kept.shape[-1]
        found.append(jnp.sort(jnp.where(kept, jnp.arange(tokens), tokens))[..., : call.most])
    return [t for t in found if t is not None]


def _verify(call: Call, operands: Values) -> list[Array]:
    # The parameters of a row of drafts are those of each of its positions.
    of_rows = {name: t[..., None] for name, t in operands.items() if name not in ("x", "draft", "drafts")}
    seeds, both = (of_rows["seed"], of_rows["offset"]), (operands["x"], operands.get("draft"))
    return list(formulas.verify(FUNCTIONS, both, operands["drafts"], _parameters(call, of_rows), *seeds))


def _parameters(call: Call, operands: Values) -> Parameters:
    k, p, least = (operands.get(name) for name in ("top_k", "top_p", "min_p"))
    return Parameters(operands["temperature"], k, p, least, call.first)


def _lowered(_: str, *arrays: Array, names: tuple[str, ...], call: Call) -> list[Array]:
    """The results of a call, in a context with 64-bit types; integers are int32."""
    operands = dict(zip(names, arrays, strict=True))
    for name, dtype in call.words:
        operands[name] = jax.lax.bitcast_convert_type(operands[name], dtype)
    for name, dtype in _DTYPES.items():
        if name in operands:
            operands[name] = operands[name].astype(dtype)
    found = call.formula(call, operands)
    return [t.astype(jnp.int32) if jnp.issubdtype(t.dtype, jnp.integer) else t for t in found]


_PRIMITIVE = wide.primitive("sampling", _lowered)


def _bind(formula: Any, operands: Mapping[str, Array | Words | None], first: bool, *numbers: Any) -> list[Array]:
    """The results of a formula without a gradient; the operand "x" comes first."""
    words = tuple((name, t.dtype) for name, t in operands.items() if isinstance(t, Words))
    given = {name: t.words if isinstance(t, Words) else t for name, t in operands.items() if t is not None}
    if not all(isinstance(size, int) for size in given["x"].shape) and jnp.result_type(int) != jnp.int64:
        # JAX computes with these sizes in the integers of its setting.
        raise NotImplementedError("sampling: jax.export with sizes that are symbols needs jax_enable_x64")
    arrays = array_types.alike(tuple(jax.lax.stop_gradient(jnp.asarray(t)) for t in given.values()))
    found: list[Array] = _PRIMITIVE.bind(*arrays, names=tuple(given), call=Call(formula, words, first, *numbers))
    return found


def sample(rows: Rows, given: Parameters, seed: Any, offset: Any, raw: bool, top: int, most: int) -> Sampled:
    """As the public function.

    Args:
        rows: The logits.
        given: Temperature and filters, arrays of the rows or `Words`.
        seed, offset: Arrays of the rows or `Words`.
        raw: True for log-probabilities without temperature and filters.
        top: Number of the largest log-probabilities to return.
        most: Most tokens of a row in the support; 0 for no support.
    """
    operands = {"x": _scores(rows), **given.tensors(), "seed": seed, "offset": offset}
    found = _bind(_sample, operands, given.first, raw, top, most)
    tops: list[Any] = [rows.back_of_row(t) for t in found[5:7]] if top else [None, None]
    return Sampled(*[*found[:5], *tops, _support(found[-1], found[3]) if most else None])


def _support(ids: Array, kept: Array) -> Support:
    """The tokens that rows keep; a row with more than n has none.

    Args:
        ids: Ids of the kept tokens, by rising id, and then any number, (rows, n).
        kept: Number of tokens that a row keeps, (rows,).
    """
    n, count = ids.shape[-1], kept.reshape(-1)
    count = jnp.where(count <= n, count, 0)
    offsets, places = jnp.pad(jnp.cumsum(count), (1, 0)), jnp.arange(n)
    # The unused places write behind the end, so that no size depends on the data.
    at = jnp.where(places < count[:, None], offsets[:-1, None] + places, ids.size)
    return Support(jnp.full(ids.size, -1, jnp.int32).at[at.reshape(-1)].set(ids.reshape(-1), mode="drop"), offsets)


def topk_logprobs(logits: Array, rows: Rows, k: int, target: Array | None, options: Mapping[str, Any]) -> TopLogprobs:
    """As the public function.

    Args:
        logits: The logits as the caller has them.
        rows: Their rows.
        k: Number of tokens.
        target: Token of each row, int32.
        options: Score options of `token_logprobs`, by the names of its arguments.
    """
    axis = rows.axes[0]
    columns, rank = _ranks(jax.lax.stop_gradient(_scores(rows)), k, target)
    values = rows.back_of_row(scores_at(rows.options, rows.x, rows.arrays, columns))
    wanted = columns if target is None else jnp.concatenate([columns, target[..., None]], -1)
    found = token_logprobs(logits, rows.back_of_row(wanted), axis, entropy=False, **options)
    logprob, own = jnp.moveaxis(found.logprob, axis, -1), None
    if target is not None:
        logprob, own = logprob[..., :k], logprob[..., k]
    return TopLogprobs(values, rows.back_of_row(columns), rows.back_of_row(logprob), own, rank, found.lse)


@partial(jax.jit, static_argnums=1)
def _ranks(z: Array, k: int, target: Array | None) -> tuple[Array, Array | None]:
    """The columns of the k largest scores of each row, and the rank of its target, int32."""
    keys = formulas.ordered(FUNCTIONS, z)
    columns = FUNCTIONS.largest(keys, k).astype(jnp.int32)
    if target is None:
        return columns, None
    return columns, formulas.rank_of(FUNCTIONS, keys, target[..., None]).astype(jnp.int32)


def verify(target: Rows, drafts: Array, draft: Rows | None, given: Parameters, seed: Any, offset: Any) -> Verified:
    """As the public function; the parameters are as for `sample`."""
    operands = {"x": _scores(target), "drafts": drafts, "draft": None if draft is None else _scores(draft)}
    return Verified(*_bind(_verify, {**operands, **given.tensors(), "seed": seed, "offset": offset}, given.first))


def _scores(rows: Rows) -> Array:
    """The scores (rows, tokens), float32 or float64."""
    x: Array = rows.x.astype(accumulator(rows.x))
    return x if rows.options.plain else scores(rows.options, rows.x, rows.arrays)
