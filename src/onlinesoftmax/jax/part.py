"""The operations on a part of the columns of every row: a local pass, an exchange of states, and what follows it.

The local pass is an operation on the local columns, which a kernel may run.  The functions serve rows that are sharded
under `shard_map` (sharded.py) and under `jit` (partitioning.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..core.arrays import Array
from ..core.options import PLAIN, ScoreOptions
from ..ops import OPERATIONS
from . import ops
from .exchange import Names, RowStates, devices, local_target, merged
from .scores import masked, scores
from .targets import PLAIN_TARGET, TargetOptions

Run = Callable[..., Array]
"""Applies an operation: run(name, *operands, **params), with the arguments of `primitives.bind`."""


class Part(NamedTuple):
    """The local columns of the rows of one call.

    Attributes:
        x: Local logits.
        arrays: Arrays of the score options, in the order of `options.arrays`.
        target: Column of the target in the whole row, as `whole_target` gives it; None for an operation without one.
        options: Score options; ARRAY stands for an array.
        target_options: Options of an operation with a target.
    """

    x: Array
    arrays: tuple[Array, ...]
    target: Array | None
    options: ScoreOptions = PLAIN
    target_options: TargetOptions = PLAIN_TARGET

    def column(self, index: Array) -> Array:
        """The score of one local column of each row."""
        index = index[..., None]
        # An array of the score options may have size 1 along the row.
        arrays = tuple(t if t.shape[-1] == 1 else jnp.take_along_axis(t, index, -1) for t in self.arrays)
        return scores(jnp.take_along_axis(self.x, index, -1), arrays, self.options)[..., 0]


def outputs(name: str, part: Part, names: Names, run: Run) -> tuple[Array, ...]:
    """The outputs of a forward operation: the local columns of y, or results per row as in `plans.OUTPUTS`."""
    return FINISH[name](part, merged(_states(part, names, run), names), run)


def apply(name: str, names: Names, run: Run, operands: tuple[Array, ...], **params: Any) -> Array:
    """The local part of the result of a primitive, from local parts of its operands.

    The target of a row, if the operation has one, is its column in the whole row.
    """
    operation, x = OPERATIONS[name], operands[0]
    if name in ops.EXCHANGING:
        return ops.EAGER_FUNCTIONS[name](*operands, axis_name=names, **params)
    options = params.get("options", PLAIN)
    first = operation.inputs + len(options.arrays)
    arrays, beside = operands[operation.inputs : first], operands[first:]
    if operation.backward:
        if operation.has_target:
            beside = (local_target(beside[0], x.shape[-1], names), *beside[1:])
            params["target_options"] = of_all_classes(params["target_options"], x, names)
        return run(name, *operands[:first], *beside, **params)
    target = beside[0] if operation.has_target else None
    part = Part(x, arrays, target, options, params.get("target_options", PLAIN_TARGET))
    return ops.stacked(outputs(name, part, names, run))


def of_all_classes(target_options: TargetOptions, x: Array, names: Names) -> TargetOptions:
    """The options with the number of classes of all devices."""
    return target_options._replace(classes=x.shape[-1] * devices(names))


def _states(part: Part, names: Names, run: Run) -> RowStates:
    """The states of the local columns."""
    x, arrays, target, options, target_options = part
    if target is None:
        state = run("logsumexp", x, *arrays, options=options)
        return RowStates(state[..., 0], state[..., 1])
    target = local_target(target, x.shape[-1], names)
    is_local = (target >= 0) & (target < x.shape[-1])
    z_target = jnp.where(is_local, part.column(jnp.where(is_local, target, 0)), 0)
    if target_options.smoothing:
        # With smoothing = 1, loss = log(l) - mean, and the target has no influence.  So mean = log(l) - loss.
        only = TargetOptions(smoothing=1.0)
        first = jnp.zeros_like(target)
        y = run("cross_entropy", x, *arrays, first, options=options, target_options=only)
        loss, m, l = y[..., 0], y[..., 1], y[..., 2]
        # If the score of column 0, the dummy target, is -inf, the loss is NaN (0 * inf); the mean is then -inf.
        mean = jnp.where(part.column(first) == -jnp.inf, -jnp.inf, jnp.log(l) - loss)
        return RowStates(m, l, None, mean, z_target)
    entropy = TargetOptions(entropy=target_options.entropy)
    y = run("token_logprobs", x, *arrays, target, options=options, target_options=entropy)
    m, l = y[..., 1], y[..., 2]
    zl = jnp.where(l == 0, 0, l * (jnp.log(l) - y[..., 3])) if entropy.entropy else None
    return RowStates(m, l, zl, None, z_target)


def _softmax(part: Part, merged_state: RowStates, run: Run) -> tuple[Array, ...]:
    # logsumexp_backward gives softmax when dy = 1.  Its kernel rounds the scores as the logsumexp kernel does.
    l = merged_state.l
    dy = jnp.where((l > 0) & (l < jnp.inf), jnp.ones_like(l), jnp.nan)
    state = jnp.stack([merged_state.m, l], axis=-1)
    return (run("logsumexp_backward", part.x, *part.arrays, state, dy, options=part.options, factor=1.0),)


def _log_softmax(part: Part, merged_state: RowStates, run: Run) -> tuple[Array, ...]:
    log_l = jnp.log(jnp.where(merged_state.l < jnp.inf, merged_state.l, jnp.nan))
    y = (scores(part.x, part.arrays, part.options) - merged_state.m[..., None]) - log_l[..., None]
    return (masked(y, part.arrays, part.options, ops.MASKED["log_softmax"]).astype(part.x.dtype),)


def _logsumexp(part: Part, merged_state: RowStates, run: Run) -> tuple[Array, ...]:
    return merged_state.m, merged_state.l


def _cross_entropy(part: Part, merged_state: RowStates, run: Run) -> tuple[Array, ...]:
    smoothing, z_loss, *_ = part.target_options
    log_l = jnp.log(merged_state.l)
    y = log_l - (merged_state.z_target - merged_state.m)
    if merged_state.mean is not None:
        y = (1 - smoothing) * y + smoothing * (log_l - merged_state.mean)
    if z_loss:
        y = y + z_loss * (merged_state.m + log_l) ** 2
    return _of_known_rows(part, merged_state, y), merged_state.m, merged_state.l


def _token_logprobs(part: Part, merged_state: RowStates, run: Run) -> tuple[Array, ...]:
    log_l = jnp.log(merged_state.l)
    y = _of_known_rows(part, merged_state, (merged_state.z_target - merged_state.m) - log_l)
    more = () if merged_state.zl is None else (log_l - merged_state.zl / merged_state.l,)
    return y, merged_state.m, merged_state.l, *more


def _of_known_rows(part: Part, merged_state: RowStates, y: Array) -> Array:
    """`y`, with NaN where the target is invalid or l is infinite."""
    assert part.target is not None
    return jnp.where((part.target >= 0) & (merged_state.l < jnp.inf), y, jnp.nan)


FINISH: dict[str, Callable[[Part, RowStates, Run], tuple[Array, ...]]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "cross_entropy": _cross_entropy,
    "token_logprobs": _token_logprobs,
}
"""The function that computes the outputs of each operation from the merged states."""
