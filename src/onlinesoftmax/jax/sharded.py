"""The operations on rows that are sharded under `shard_map`, and their derivatives.

The tangent of a per-row result is a linear local primitive followed by a psum.  The tangent of softmax or log_softmax
is one linear primitive with a psum inside.  JAX transposes them.  The gradient of a per-row result needs no exchange if
`shard_map` checks varying axes, which is the default.  The gradient of softmax or log_softmax exchanges one number per
row.  The saved values are the same as for whole rows: x and the states, or y.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.arrays import Array
from ..core.options import ScoreOptions
from ..core.task import Choice
from ..ops import OPERATIONS
from . import array_types, ops, primitives
from .exchange import Names, local_target
from .part import Part, of_all_classes, outputs
from .plans import OUTPUTS
from .targets import PLAIN_TARGET, TargetOptions


class ShardedCall(NamedTuple):
    """A call without its arrays.

    Attributes:
        name: Name of a forward operation.
        names: Axes of the mesh along which rows are sharded.
        options: Score options; ARRAY stands for an array.
        choice: The backend and the strategy that the caller forces for the local pass.
        target_options: Options of an operation with a target.
    """

    name: str
    names: Names
    options: ScoreOptions
    choice: Choice
    target_options: TargetOptions = PLAIN_TARGET

    def part(self, operands: tuple[Array, ...]) -> Part:
        """The operands by name: x, the arrays of the score options, and the target if there is one."""
        arrays = operands[1 : 1 + len(self.options.arrays)]
        target = operands[-1] if OPERATIONS[self.name].has_target else None
        return Part(operands[0], arrays, target, self.options, self.target_options)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def apply(call: ShardedCall, *operands: Array) -> tuple[Array, ...]:
    """The outputs of a forward operation, as those of `part.outputs`.

    Args:
        call: The call without its arrays.
        operands: Local logits, the arrays of the score options, and the column of the target (`whole_target`).
    """
    run = partial(primitives.bind, choice=call.choice)
    return outputs(call.name, call.part(operands), call.names, run)


@partial(apply.defjvp, symbolic_zeros=True)
def _jvp(call: ShardedCall, primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> Any:
    found = apply(call, *primals)
    part = call.part(primals)
    is_zero = (isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents)
    changes = [None if zero else t for zero, t in zip(is_zero, tangents, strict=True)]
    named = dict(zip(("x", *call.options.arrays), changes, strict=False))
    change, factor = ops.score_tangent(part.x, part.arrays, call.options, named)
    if change is None:
        return found, tuple(map(jnp.zeros_like, found))
    if call.name in OUTPUTS:
        changed = _tangents_per_row(call, primals, found, (change, factor))
    else:
        exchanging = partial(primitives.bind, choice=call.choice, axis_name=call.names)
        changed = (ops.tangent(call.name, exchanging, primals, found[0], (change, factor), call.options),)
    return found, tuple(array_types.vary(t, array_types.varying(y)) for t, y in zip(changed, found, strict=True))


def _tangents_per_row(
    call: ShardedCall, primals: tuple[Array, ...], found: tuple[Array, ...], change: tuple[Array, float]
) -> tuple[Array, ...]:
    """The tangents of per-row outputs.  The tangent of m is 0."""
    t, factor = change
    more: dict[str, Any] = {"options": call.options, "factor": factor, "choice": call.choice}
    # The outputs before the state (m, l).
    before = 1 if OPERATIONS[call.name].has_target else 0
    if before:
        more["target_options"] = of_all_classes(call.target_options, primals[0], call.names)
        target = local_target(primals[-1], primals[0].shape[-1], call.names)
        primals = (*primals[:-1], target)
    local = primitives.bind(ops.TANGENTS[call.name], *primals, ops.stacked(found), t, **more)
    # Each result has its own psum, so that JAX removes the psum of an unused result.  This saves an exchange in forward
    # mode, and in the gradient with `check_vma=False`, where the transpose of a psum is a psum.
    parts = [local[..., i] for i in range(local.shape[-1])] if before else [local]
    changes = [jax.lax.psum(one, call.names) for one in parts]
    l, dlse = found[before + 1], changes[before]
    dl = dlse * jnp.where(jnp.isfinite(l), l, 0)
    return (*changes[:before], jnp.zeros_like(dl), dl, *changes[before + 1 :])
