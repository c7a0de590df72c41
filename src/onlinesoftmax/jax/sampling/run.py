"""The ways of the calls: one primitive, which JAX lowers with 64-bit types whatever its setting.

On a GPU it calls the kernels of sampling/kernels.  Elsewhere, and for what they do not take, XLA runs the formulas:
masses are int64 and the noise is float64 (sampling/formulas.py), and JAX has no such types by default (wide.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core.arrays import Array, accumulator, namespace
from ...core.formulas import is_defined
from ...core.options import ScoreOptions
from ...sampling import formulas
from ...sampling.results import Sampled, Support, TopLogprobs, Verified
from ...sampling.rules import Parameters
from .. import array_types, autograd, custom_op, kernel_or_formula, wide
from ..eager import logsumexp_of, scores, scores_at
from ..prepare import Rows
from ..signature import Signature, Values
from ..wide import FUNCTIONS, order_of
from . import kernels
from .arguments import Words

_DTYPES = {
    "temperature": "float32", "top_k": "int64", "top_p": "float64", "min_p": "float64", "seed": "int64",
    "offset": "int64", "drafts": "int64", "target": "int64",
}  # fmt: skip
"""Dtypes of operands in the formulas."""


class Function(NamedTuple):
    """A function of logits.

    Attributes:
        name: Name of the public function.
        formula: formula(call, operands) returns the results.
        kernel: kernel(call) is its kernel in kernel_or_formula.py.
    """

    name: str
    formula: Callable[[Call, Values], list[Array]]
    kernel: Callable[[Call], kernel_or_formula.Kernel]


class Call(NamedTuple):
    """A static parameter of the primitive.

    Attributes:
        function: The function.
        words: Name and dtype of each operand that is an array of pairs of 32-bit words.
        first, raw, top: As for the formulas; for `topk_logprobs`, top is k.
        most: Most tokens of a row in the support; 0 for no support.
        listed: Most tokens of a row that a kernel lists, as Parameters.listed.
    """

    function: Function
    words: tuple[tuple[str, str], ...]
    first: bool = False
    raw: bool = False
    top: int = 0
    most: int = 0
    listed: int | None = None


def _sample(call: Call, operands: Values) -> list[Array]:
    seeds, x = (operands["seed"], operands["offset"]), _wide(operands["x"])
    *found, kept = formulas.sample(FUNCTIONS, x, _parameters(call, operands), *seeds, call.raw, call.top)
    if call.most:
        # The ids of the kept tokens by rising id.
        tokens = kept.shape[-1]
        found.append(jnp.sort(jnp.where(kept, jnp.arange(tokens), tokens))[..., : call.most])
    return [t for t in found if t is not None]


def _verify(call: Call, operands: Values) -> list[Array]:
    # The parameters of a row of drafts are those of each of its positions.
    of_rows = {name: t[..., None] for name, t in operands.items() if name not in ("x", "draft", "drafts")}
    seeds, draft = (of_rows["seed"], of_rows["offset"]), operands.get("draft")
    both = _wide(operands["x"]), None if draft is None else _wide(draft)
    return list(formulas.verify(FUNCTIONS, both, operands["drafts"], _parameters(call, of_rows), *seeds))


def _topk(call: Call, operands: Values) -> list[Array]:
    """Values, columns, log-probabilities and lse; then log-probability and rank of the target, if one is given."""
    z, target = _wide(operands["x"]), operands.get("target")
    order = order_of(z)
    columns = order.largest(call.top)
    states = custom_op.run_eager(Signature("logsumexp", ("m", "l")), {"x": z})
    m, l = (states[name][..., None] for name in ("m", "l"))

    def logprob(values: Array) -> Array:
        return jnp.where(is_defined(namespace(z), l), values - m - jnp.log(l), jnp.nan)

    values = jnp.take_along_axis(z, columns, -1)
    found = [values, columns, logprob(values), logsumexp_of(m, l)[..., 0]]
    if target is None:
        return found
    rank = order.rank_of(target)
    own = logprob(jnp.take_along_axis(z, jnp.where(rank[..., None] > 0, target, 0), -1))[..., 0]
    return [*found, jnp.where(rank > 0, own, jnp.nan), rank]


def _wide(x: Array) -> Array:
    return x.astype(accumulator(x))


def _parameters(call: Call, operands: Values) -> Parameters:
    k, p, least = (operands.get(name) for name in ("top_k", "top_p", "min_p"))
    return Parameters(operands["temperature"], k, p, least, call.first)


def _lowered(platform: str, *arrays: Array, names: tuple[str, ...], call: Call) -> list[Array]:
    """The results of a call, in a context with 64-bit types; integers are int32."""
    operands = dict(zip(names, arrays, strict=True))
    for name, dtype in call.words:
        operands[name] = jax.lax.bitcast_convert_type(operands[name], dtype)
    for name, dtype in _DTYPES.items():
        if name in operands:
            operands[name] = operands[name].astype(dtype)
    name, formula, kernel = call.function
    found = kernel_or_formula.run(platform, name, operands, partial(formula, call), kernel(call))
    return [t.astype(jnp.int32) if jnp.issubdtype(t.dtype, jnp.integer) else t for t in found]


_PRIMITIVE = wide.primitive("sampling", _lowered)

_SAMPLE = Function("sample", _sample, lambda call: partial(kernels.sample, *call[2:]))
_TOPK = Function("topk_logprobs", _topk, lambda call: partial(kernels.topk_logprobs, call.top))
_VERIFY = Function("verify", _verify, lambda call: partial(kernels.verify, call.first, call.listed))


def _bind(function: Function, operands: Mapping[str, Array | Words | None], **numbers: Any) -> list[Array]:
    """The results of a function without a gradient; the operand "x" comes first."""
    words = tuple((name, t.dtype) for name, t in operands.items() if isinstance(t, Words))
    given = {name: t.words if isinstance(t, Words) else t for name, t in operands.items() if t is not None}
    wide.check_sizes(function.name, given["x"].shape)
    arrays = array_types.alike(tuple(jax.lax.stop_gradient(jnp.asarray(t)) for t in given.values()))
    found: list[Array] = _PRIMITIVE.bind(*arrays, names=tuple(given), call=Call(function, words, **numbers))
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
    operands = {"x": _scores(rows.options, rows.x, rows.arrays), **given.tensors(), "seed": seed, "offset": offset}
    listed = given.listed(max(top, most))
    found = _bind(_SAMPLE, operands, first=given.first, raw=raw, top=top, most=most, listed=listed)
    tops: list[Any] = found[5:7] if top else [None, None]
    return Sampled(*[*found[:5], *tops, _support(found[-1], found[3]) if most else None])


def _support(ids: Array, kept: Array) -> Support:
    """The tokens that rows keep; a row with more than n has none.

    Args:
        ids: Ids of the kept tokens, by rising id, and then any number, (rows, n).
        kept: Number of tokens that a row keeps, (rows,).
    """
    ids, kept = map(array_types.unsharded, (ids, kept))
    n, count = ids.shape[-1], kept.reshape(-1)
    count = jnp.where(count <= n, count, 0)
    offsets, places = jnp.pad(jnp.cumsum(count), (1, 0)), jnp.arange(n)[None]
    # The unused places write behind the end, so that no size depends on the data.
    at = jnp.where(places < count[:, None], offsets[:-1, None] + places, ids.size)
    return Support(jnp.full(ids.size, -1, jnp.int32).at[at.reshape(-1)].set(ids.reshape(-1), mode="drop"), offsets)


def topk_logprobs(rows: Rows, k: int, target: Array | None) -> TopLogprobs:
    """As the public function, of rows; the target is int32."""
    given = {} if target is None else {"target": target[..., None]}
    values, columns, logprobs, lse, *more = _listed(rows.options, k, {"x": rows.x, **rows.arrays, **given})
    values, columns, logprobs = (rows.back_of_row(t) for t in (values, columns, logprobs))
    own, rank = more or (None, None)
    return TopLogprobs(values, columns, logprobs, own, rank, lse)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _listed(options: ScoreOptions, k: int, operands: Values) -> list[Array]:
    """The results of `_topk`."""
    given = {"x": _scores(options, operands["x"], operands), "target": operands.get("target")}
    return _bind(_TOPK, given, top=k)


@partial(_listed.defjvp, symbolic_zeros=True)
def _jvp(options: ScoreOptions, k: int, primals: Any, tangents: Any) -> tuple[list[Array], list[Any]]:
    """The results and their changes; the tokens are constants, and the scores change at them."""
    (operands,), (given,) = primals, tangents
    found = _listed(options, k, operands)
    values, columns, logprobs, lse, *of_target = found
    is_zero = jax.custom_derivatives.SymbolicZero
    changes = {name: t for name, t in given.items() if not isinstance(t, is_zero)}
    if "x" in changes:
        # In the backward pass, the gradients of the elements and of lse are added up in this dtype, and rounded once.
        changes["x"] = _wide(changes["x"])
    target = operands.get("target")
    if target is not None:
        inside = of_target[1][..., None] > 0
        columns = jnp.concatenate([columns, jnp.where(inside, target, 0)], -1)

    def chosen(some: Values) -> Array:
        own = {**operands, **some}
        return scores_at(options, own["x"], own, columns)

    # The log-probability of the largest score m is -log(l).
    state = {"m": values[..., 0], "l": jnp.exp(-logprobs[..., 0])} if k else {"m": lse, "l": jnp.ones_like(lse)}

    # The checkpoint keeps the logits in their dtype, and no float32 array of their size.
    @jax.checkpoint
    def of_lse(x: Array, changes: Values) -> Array:
        return autograd.change_of_lse(options, {**operands, **state, "x": _wide(x)}, changes)

    at = {name: _wide(operands[name]) if name == "x" else operands[name] for name in changes}
    _, dz = jax.jvp(chosen, (at,), (changes,))
    dlse = of_lse(operands["x"], changes)
    each = dz - dlse[..., None]
    changes_of_target: list[Any] = []
    if target is not None:
        changes_of_target = [jnp.where(inside, each[..., k:], 0)[..., 0], _no_change(of_target[1])]
    return found, [dz[..., :k], _no_change(found[1]), each[..., :k], dlse, *changes_of_target]


def _no_change(t: Array) -> Any:
    """The change of an array of integers, of a type that varies and is sharded as the array."""
    return jax.custom_derivatives.SymbolicZero(jax.typeof(t).to_tangent_aval())


def verify(target: Rows, drafts: Array, draft: Rows | None, given: Parameters, seed: Any, offset: Any) -> Verified:
    """As the public function; the parameters are as for `sample`."""
    operands = {"x": target.x, "drafts": drafts, "draft": None if draft is None else draft.x}
    tensors = given.tensors()
    operands |= {**tensors, "seed": seed, "offset": offset}
    return Verified(*_bind(_VERIFY, operands, first=given.first, listed=given.listed(1)))


def _scores(options: ScoreOptions, x: Array, arrays: Mapping[str, Array]) -> Array:
    """The scores (rows, tokens), in the dtype of the logits where these are the scores."""
    return x if options.is_plain() else scores(options, x, arrays)
