"""Plans `columns` and `stored` of token log-probabilities, whose gradient is known only in the backward pass.

Forward merges the states of chunks of columns; backward makes each chunk again.  So each slice of the gradient of the
weight is one product, rounded once.  Where all logits fit, they are one chunk, which is kept.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...core.arrays import Array, accumulator
from ..eager import results_of
from ..exchange import RowStates, devices, joined, merged
from ..loss_run import TOKEN_LOGPROBS
from ..plans import outputs_of
from ..shards import Run, states
from ..signature import Names, Signature, Values
from . import rows
from .call import HeadCall, Shards, columns_at_once, layout, types
from .chunks import in_chunks, logits_of, pad_classes, product

COTANGENTS = ("dy", "dlse", "dentropy")
"""Gradients of the results; dlse and dentropy are 0 where they are missing."""


def statistics(run: Run, call: HeadCall, shards: Shards, arrays: Values) -> Values:
    """The log-probability y of each target, the entropy and the state of each token; and the logits z if they are kept.

    The arguments are those of `losses` in tokens.py.
    """
    operation = Signature(TOKEN_LOGPROBS, outputs_of(TOKEN_LOGPROBS, True), call.options, (), rows.CHOICE)
    kept: Values = {}

    def of_chunk(first: Any, size: int) -> Values:
        weight, bias = _slices(arrays, first, size)
        z = logits_of(arrays["x"], weight, bias, padding)
        if "z" in call.outputs:
            kept["z"] = z
        target = _target(arrays, shards.classes, first, size)
        return _fields(states(run, operation, {"x": z, "target": target, **rows.scale_of(arrays)}))

    def merge(a: Values, b: Values) -> Values:
        return _fields(joined({name: jnp.stack([a[name], b[name]]) for name in a}))

    chunk = arrays["weight"].shape[0] if "z" in call.outputs else columns_at_once(call, arrays)
    arrays, padding = _for_chunks(call, arrays, chunk)
    classes = arrays["weight"].shape[0]
    state = RowStates(**in_chunks(classes, chunk, of_chunk, (), merge))
    state = merged(state, shards.classes) if shards.classes else state
    found = results_of(operation, state, arrays["target"], _all_classes(arrays, shards.classes))
    # Rounding can put a logarithm above 0.
    found["y"] = jnp.minimum(found["y"], 0)
    return {name: (found | kept)[name] for name in call.outputs}


def gradient(run: Run, call: HeadCall, shards: Shards, arrays: Values) -> Values:
    """The gradients in input, weight and bias that the outputs name, from those of the results of `statistics`."""
    wide, wanted = accumulator(arrays["x"]), types(call, arrays)
    given = {name: arrays[name] for name in COTANGENTS if name in arrays}
    nothing = jnp.all(jnp.stack([t == 0 for t in given.values()]), 0)
    # The input of a token without gradients may be NaN, and so may its logits: 0 · NaN would be NaN.
    x = jnp.where(nothing[:, None], 0, arrays["x"])
    given |= {"scale": arrays["scale"]} if "scale" in arrays else {}
    given |= {name: jnp.where(nothing, fill, arrays[name]) for name, fill in (("m", 0), ("l", 1), ("entropy", 0))}
    chunk = columns_at_once(call, arrays)
    arrays, padding = _for_chunks(call, arrays, chunk)
    classes = arrays["weight"].shape[0]
    whole = _all_classes(arrays, shards.classes)
    of_input = x.dtype if chunk == classes and not shards.of_input else wide
    of_weight = wide if shards.of_weight else x.dtype

    def of_chunk(first: Any, size: int) -> Values:
        weight, bias = _slices(arrays, first, size)
        z = arrays["z"] if "z" in arrays else logits_of(x, weight, bias, padding)
        some = {**given, "target": _target(arrays, shards.classes, first, size)}
        dz = rows.gradient(run, call, z, some, 0 if size == whole else whole)
        dz = jnp.where(nothing[:, None], 0, dz) if "z" in arrays else dz
        found: Values = {}
        if "dx" in wanted:
            found["dx"] = product(dz, weight, (1, 0), of_input)
        # Unlike dx, the gradients of these columns are final: no other chunk adds to them.
        if "dweight" in wanted:
            found["dweight"] = _total(product(dz, x, (0, 0), of_weight), shards.of_weight).astype(x.dtype)
        if "dbias" in wanted:
            found["dbias"] = _total(jnp.sum(dz, 0, dtype=wide), shards.of_weight)
        return found

    found = in_chunks(classes, chunk, of_chunk, ("dx",))
    if "dx" in found:
        found["dx"] = _total(found["dx"], shards.of_input).astype(x.dtype)
    left = call.padding - padding
    return {name: pad_classes(t, left) if left and name != "dx" else t for name, t in found.items()}


def _for_chunks(call: HeadCall, arrays: Values, chunk: int) -> tuple[Values, int]:
    """(arrays, number of classes that are padding): with several chunks, all but the first are aligned without it."""
    if not call.padding or chunk >= arrays["weight"].shape[0]:
        return arrays, call.padding
    classes = arrays["weight"].shape[0] - call.padding
    return {name: t[:classes] if layout(name).startswith("c") else t for name, t in arrays.items()}, 0


def _slices(arrays: Values, first: Any, size: int) -> tuple[Array, Array | None]:
    """The slices of weight and bias for some columns."""
    weight, bias = arrays["weight"], arrays.get("bias")
    if size == weight.shape[0]:
        return weight, bias
    part = jax.lax.dynamic_slice_in_dim
    return part(weight, first, size), None if bias is None else part(bias, first, size)


def _target(arrays: Values, names: Names, first: Any, size: int) -> Array:
    """The target of each token as a column of a chunk: `size` where it is another class, and -1 where it is none."""
    target = arrays["target"]
    if names:
        first = first + jax.lax.axis_index(names) * arrays["weight"].shape[0]
    local = target - first
    return jnp.where(target < 0, -1, jnp.where((local >= 0) & (local < size), local, size)).astype(jnp.int32)


def _fields(state: RowStates) -> Values:
    return {name: t for name, t in state._asdict().items() if t is not None}


def _total(t: Array, names: Names) -> Array:
    return jax.lax.psum(t, names) if names else t


def _all_classes(arrays: Values, names: Names) -> int:
    return arrays["weight"].shape[0] * (devices(names) if names else 1)
