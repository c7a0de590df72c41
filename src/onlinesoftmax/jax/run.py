"""Runs a call on rows: by one primitive for whole rows, or by an exchange for those that `shard_map` shards."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp

from ..core.arrays import Array
from ..core.task import ANY, Choice
from ..ops import OPERATIONS
from . import array_types, autograd, custom_op
from .eager import logsumexp_of
from .plans import needs_move, outputs_of
from .prepare import Rows
from .signature import Signature, Values

Numbers = Mapping[str, float]
"""Operands that are numbers, by name; 0 is the same as none."""

NONE: Numbers = MappingProxyType({})


def result(rows: Rows, name: str, choice: Choice, zero: bool = False) -> Array:
    """The result per element, or the logsumexp per row; with `zero`, that of a row of only -inf has the gradient 0."""
    custom_op.check(name, choice)
    per_row = OPERATIONS[name].per_row
    if rows.x.size == 0:
        return (jnp.full(rows.x.shape[:-1], -jnp.inf, rows.x.dtype) if per_row else rows.x).astype(rows.dtype)
    found = results(rows, name, choice)
    return (logsumexp_of(found["m"], found["l"], zero) if per_row else found["y"]).astype(rows.dtype)


def results(
    rows: Rows, name: str, choice: Choice, entropy: bool = False, target: Array | None = None, numbers: Numbers = NONE
) -> Values:
    """The results of an operation on rows, by name.

    Args:
        rows: The rows.
        name: Name of the operation.
        choice: The parts of the plan that the caller forces.
        entropy: True where the entropy is computed too.
        target: Column of each row, for an operation that has targets.
        numbers: Operands that are numbers.
    """
    call, operands = call_on(rows, name, choice, entropy, target, numbers)
    if not rows.names:
        return custom_op.bind(call, operands)
    # JAX wants operands that vary along the same axes of the mesh.  Results per row are the same along those of the
    # exchange, so the operands do not vary there.
    every = frozenset().union(*map(array_types.varying, operands.values())) - set(rows.names)
    return autograd.run_shards(rows.names, call, {name: array_types.vary(t, every) for name, t in operands.items()})


def call_on(
    rows: Rows, name: str, choice: Choice, entropy: bool = False, target: Array | None = None, numbers: Numbers = NONE
) -> tuple[Signature, Values]:
    """The signature and the operands of a call on rows; the arguments are those of `results`."""
    if choice == ANY and needs_move(rows.shape, rows.axes):
        choice = Choice("eager")
    given = tuple((number, value) for number, value in numbers.items() if value)
    call = Signature(name, outputs_of(name, entropy), rows.options, given, choice)
    return call, {"x": rows.x, **rows.arrays, **({} if target is None else {"target": target})}
