"""The primitive of a head: its types, its batches, and its lowering for each platform and for several devices.

Under `jit`, each device computes the tokens and the classes that it holds.  Under `shard_map`, JAX traces the
computation of one device, and no primitive is needed.  The primitive has no derivatives: gradients.py has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe
from jax.sharding import NamedSharding, PartitionSpec

from ...core.arrays import Array
from .. import array_types, custom_op, partitioning
from ..exchange import devices
from ..shards import Run
from ..signature import Names, Values
from . import columns, tokens
from .call import GRADIENTS, HeadCall, Shards, layout, plan_of_losses, plan_of_statistics, types

KINDS = {"losses": tokens.losses, "statistics": columns.statistics, "gradient": columns.gradient}
"""The computation of each kind of call."""


def bind(call: HeadCall, arrays: Mapping[str, Array], outputs: tuple[str, ...] | None = None, kind: str = "") -> Values:
    """The results of a call by name.

    Args:
        call: The call.
        arrays: x with any number of axes of tokens, weight, and the other arrays that the kind reads.
        outputs, kind: Names of the results and kind where they are not those of the call.

    Raises:
        ValueError: the smallest chunk does not fit into the memory.
    """
    # `_lowered` and `types` take the first array for x.
    arrays = {"x": arrays["x"], "weight": arrays["weight"], **arrays}
    call = _planned(call, arrays, call.outputs if outputs is None else outputs, kind or call.kind)
    if jax.sharding.get_abstract_mesh().manual_axes:
        # The results of a token are the same along the axes of the exchange, so that its target must not vary there.
        # A constant of a loss varies as it did when the loss was traced.
        shared = {name for name in arrays if layout(name)}
        every = frozenset().union(*(array_types.varying(arrays[name]) for name in shared)) - set(call.names)
        arrays = {name: array_types.vary(t, every) if name in shared else t for name, t in arrays.items()}
        return _of_device(custom_op.bind, call, Shards(call.names), arrays)
    results = HEAD.bind(*arrays.values(), names=tuple(arrays), call=call)
    return dict(zip(call.outputs, results, strict=True))


def _planned(call: HeadCall, arrays: Mapping[str, Array], outputs: tuple[str, ...], kind: str) -> HeadCall:
    """The call of a kind with these outputs and the dtype of its sum, if its plan for whole arrays fits the memory."""
    x, several = arrays["x"], False
    if kind != "losses":
        plan_of_statistics(call, arrays, outputs)
    else:
        # A single product is rounded once by itself; in float16 a sum over all tokens could be infinite.
        several = plan_of_losses(call, arrays, outputs).chunks > 1 or x.dtype == jnp.float16
    return call._replace(kind=kind, outputs=outputs, sum_dtype=call.acc_dtype if several else x.dtype.name)


def _of_device(run: Run, call: HeadCall, shards: Shards, arrays: Values) -> Values:
    """The results of a call on the arrays of one device."""
    wanted, axes = types(call, arrays), arrays["x"].ndim - 1
    if 0 in arrays["x"].shape:
        varying = frozenset().union(*map(array_types.varying, arrays.values()))
        return {name: array_types.vary(jnp.zeros(t.shape, t.dtype), varying) for name, t in wanted.items()}

    def flat(name: str, t: Array) -> Array:
        return t.reshape(-1, *t.shape[axes:]) if layout(name).startswith("t") else t

    if call.padding and shards.classes:
        call, arrays = call._replace(padding=0), {**arrays, "bias": _bias_of_padding(call, shards.classes, arrays)}
    found = KINDS[call.kind](run, call, shards, {name: flat(name, t) for name, t in arrays.items()})
    return {name: found[name].reshape(t.shape) for name, t in wanted.items()}


def _bias_of_padding(call: HeadCall, names: Names, arrays: Values) -> Array:
    """The bias on a device that holds some of the classes: -inf for the padding, which is on the last device."""
    local = arrays["weight"].shape[0]
    column = jax.lax.axis_index(names) * local + jnp.arange(local)
    bias = arrays.get("bias", jnp.zeros((), call.dtype))
    return jnp.where(column < local * devices(names) - call.padding, bias, -jnp.inf)


def _lowered(platform: str, *arrays: Array, names: tuple[str, ...], call: HeadCall) -> list[Array]:
    """The primitive on the devices that hold its tokens and classes."""

    def on_device(axes: Mapping[str, Names], *arrays: Array) -> list[Array]:
        of_tokens = tuple(one for factor, some in axes.items() if factor != "c" for one in some)
        shards = Shards(axes.get("c", ()), axes.get("c", ()), of_tokens)
        found = _of_device(partial(custom_op.run, platform), call, shards, dict(zip(names, arrays, strict=True)))
        return [found[name] for name in call.outputs]

    results, token_axes = types(call, dict(zip(names, arrays, strict=True))), arrays[0].ndim - 1
    named = zip((*names, *call.outputs), (*arrays, *results.values()), strict=True)
    # A constant of a loss is whole on every device.
    factors = [_factors(name, token_axes) if layout(name) else (None,) * t.ndim for name, t in named]
    found: list[Array] = partitioning.by_factors(on_device, list(results.values()), factors, *arrays)
    return found


def _factors(name: str, token_axes: int) -> tuple[str | None, ...]:
    """The names of the axes of an array that other arrays have too; hidden is whole on every device."""
    of = {"t": tuple(f"t{i}" for i in range(token_axes)), "h": (None,), "c": ("c",)}
    return sum((of[axis] for axis in layout(name)), ())


def _abstract(*avals: Any, names: tuple[str, ...], call: HeadCall) -> list[Any]:
    known = dict(zip(names, avals, strict=True))
    x, weight = known["x"], known["weight"]
    of_token = x.sharding.spec[: x.ndim - 1]
    # As `by_factors` has it, a mesh axis that divides tokens and classes divides the tokens.
    taken = {one for part in of_token for one in partitioning.names_in(part)}
    of_class = tuple(one for one in partitioning.names_in(weight.sharding.spec[0]) if one not in taken)
    like = {GRADIENTS[name]: t.sharding.spec for name, t in known.items() if name in GRADIENTS}
    found = []
    for name, t in types(call, known).items():
        axes = like.get(name, (*of_token, *([of_class or None] if "c" in layout(name) else [])))
        sharding = NamedSharding(x.sharding.mesh, PartitionSpec(*axes))
        found.append(x.update(shape=t.shape, dtype=t.dtype, weak_type=False, sharding=sharding))
    return found


def _batch(
    arrays: tuple[Array, ...], axes: tuple[int | None, ...], *, names: tuple[str, ...], call: HeadCall
) -> tuple[list[Array], list[int]]:
    """A batch of tokens is one more axis of tokens; any other batch is computed one element after another."""
    known = dict(zip(names, arrays, strict=True))
    moved = {n: jnp.moveaxis(known[n], axis, 0) for n, axis in zip(names, axes, strict=True) if axis is not None}
    size = len(next(iter(moved.values())))
    if all(layout(name).startswith("t") for name in (*moved, *call.outputs)):
        shared = {
            name: jnp.broadcast_to(t, (size, *t.shape)) if layout(name).startswith("t") else t
            for name, t in known.items()
        }
        found = bind(call, {**shared, **moved})
    else:
        found = jax.lax.map(lambda some: bind(call, {**known, **some}), moved)
    return [found[name] for name in call.outputs], [0] * len(call.outputs)


def _without_unused(used: list[bool], equation: Any) -> Any:
    """The call without the results that are not used, as in the first pass of a checkpoint."""
    if not any(used):
        return [False] * len(equation.invars), None
    call = equation.params["call"]
    outputs = tuple(name for name, one in zip(call.outputs, used, strict=True) if one)
    kept = [t for t, one in zip(equation.outvars, used, strict=True) if one]
    params = {**equation.params, "call": call._replace(outputs=outputs)}
    return [True] * len(equation.invars), equation.replace(outvars=kept, params=params)


def _no_derivative(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the gradient of a head without logits cannot be differentiated again")


HEAD = custom_op.primitive("head", _lowered, _abstract)
batching.primitive_batchers[HEAD] = _batch
pe.dce_rules[HEAD] = _without_unused
ad.primitive_jvps[HEAD] = _no_derivative
