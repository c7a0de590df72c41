"""The operations on a part of the columns of every row: a local pass, an exchange of states, and what follows it.

The local pass is an operation on the local columns, which a kernel may run.  The functions serve rows that are sharded
under `shard_map` (autograd.py) and under `jit` (partitioning.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax.numpy as jnp

from ..core.arrays import Array, accumulator
from ..core.options import ScoreOptions, softcap_slope
from ..kernels.pallas.loss_formulas import GRADIENTS
from ..ops import OPERATIONS
from .eager import FORMULAS, FUNCTIONS, MASKED, filled, masked, results_of, scores, scores_at
from .exchange import RowStates, devices, local_target, merged
from .plans import outputs_of
from .signature import Names, Signature, Values

Run = Callable[[Signature, Mapping[str, Array]], Values]
"""Applies an operation, as `custom_op.bind` does."""


def run_shards(run: Run, names: Names, call: Signature, operands: Mapping[str, Array]) -> Values:
    """The local part of the results of an operation, from local parts of its operands.

    Args:
        run: Applies an operation to the local columns.
        names: Axes of the mesh along which rows are sharded.
        call: The call.
        operands: The target of a row, if the operation has one, is its column in the whole row (`whole_target`).
    """
    operation = OPERATIONS[call.name]
    operation.check_mergeable()
    if call.writes_gradient:
        return in_two_passes(partial(run_shards, run, names), call, operands)
    if not operation.backward:
        whole = merged(states(run, call, localized(names, call, operands)[1]), names)
        if operation.per_row:
            return results_of(call, whole, operands.get("target"), operands["x"].shape[-1] * devices(names))
        return OF_ELEMENTS[call.name](run, call, operands, whole)
    if operation.reduces:
        return FORMULAS[call.name](call._replace(axis_name=names), **operands)
    return run(*localized(names, call, operands))


def localized(names: Names, call: Signature, operands: Mapping[str, Array]) -> tuple[Signature, Mapping[str, Array]]:
    """A derivative of sharded rows as one of the local columns: its target is a local column."""
    if "target" not in operands:
        return call, operands
    cols = operands["x"].shape[-1]
    target = local_target(operands["target"], cols, names)
    return call._replace(classes=cols * devices(names)), {**operands, "target": target}


def without_classes(call: Signature, operands: Mapping[str, Array]) -> tuple[Signature, Mapping[str, Array]]:
    """A gradient of sharded rows without smoothing, as a gradient of whole rows; any other call as it is.

    The gradient of whole rows ignores the gradient dy of the main result where the target is no column.  Where another
    device has the target, the effect of dy on the local columns is that of a gradient of lse.
    """
    if not call.classes or call.number("smoothing") or call.name not in GRADIENTS:
        return call, operands
    elsewhere = operands["target"] >= operands["x"].shape[-1]
    rows = {name: operands[name] for name in ("target", "dy", "m", "l")}
    of_lse = jnp.where(elsewhere, GRADIENTS[call.name](rows, call.classes, dict(call.numbers))[0], 0)
    dlse = operands["dlse"] + of_lse if "dlse" in operands else of_lse
    target = jnp.where(elsewhere, -1, operands["target"])
    return call._replace(classes=0), {**operands, "target": target, "dlse": dlse}


def in_two_passes(run: Run, call: Signature, operands: Mapping[str, Array]) -> Values:
    """Results per row by the operation, and the gradient in the logits by the operation's gradient, one after another.

    The gradient is that of sum(dy * result) over the rows.
    """
    rest = {name: t for name, t in operands.items() if name != "dy"}
    dy, x, arrays = operands["dy"], operands["x"], {name: operands[name] for name in call.options.arrays}
    results = run(call.without_gradient, rest)
    if call.options.mask is not None:
        # A row that the mask leaves without a class counts for nothing.
        dy = jnp.where(results["l"] == 0, 0, dy)
    scale = call.options.scale
    factor = scale if isinstance(scale, float) else 1.0
    backward = Signature(OPERATIONS[call.name].gradient_name, ("y",), call.options, call.numbers, call.choice, factor)
    given = {**rest, "m": results["m"], "l": results["l"], "dy": dy.astype(results["l"].dtype)}
    y = run(backward, given)["y"]
    y = masked(times_slope(call.options, x, y, arrays), arrays)
    return {name: y if name == "y" else results[name] for name in call.outputs}


def times_slope(options: ScoreOptions, x: Array, y: Array, arrays: Mapping[str, Array]) -> Array:
    """The gradient in x from that in the scores, by which a scale that is a number is multiplied already."""
    if options.softcap is None and isinstance(options.scale, float):
        return y
    wide, given = accumulator(x), filled(options, x, arrays)
    slope = softcap_slope(FUNCTIONS, x.astype(wide), given)
    slope = slope if isinstance(options.scale, float) else slope * given.scale
    # A row that counts for nothing may hold NaN.
    return jnp.where(y == 0, 0, y.astype(wide) * slope).astype(x.dtype)


def states(run: Run, call: Signature, operands: Mapping[str, Array]) -> RowStates:
    """The states of some columns of each row; the target of a row is one of them, or out of range."""
    rest = {name: operands[name] for name in ("x", *call.options.arrays)}

    def column(index: Array) -> Array:
        return scores_at(call.options, operands["x"], operands, index[..., None])[..., 0]

    z_target = mean = zl = None
    if "target" in operands:
        target = operands["target"]
        is_local = (target >= 0) & (target < operands["x"].shape[-1])
        z_target = jnp.where(is_local, column(jnp.where(is_local, target, 0)), 0)
    if call.number("smoothing"):
        # With smoothing = 1, loss = log(l) - mean, and the target has no influence.  So mean = log(l) - loss.
        first = jnp.zeros_like(target)
        smoothed = (("smoothing", 1.0),)
        local = Signature("cross_entropy", ("loss", "m", "l"), call.options, smoothed, call.choice)
        state = run(local, {**rest, "target": first})
        # If the score of column 0, the dummy target, is -inf, the loss is NaN (0 * inf); the mean is then -inf.
        mean = jnp.log(state["l"]) - state["loss"]
        mean = jnp.where(column(first) == -jnp.inf, -jnp.inf, mean)
    else:
        outputs = outputs_of("logsumexp", "entropy" in call.outputs)
        state = run(Signature("logsumexp", outputs, call.options, choice=call.choice), rest)
    if "entropy" in call.outputs:
        zl = jnp.where(state["l"] == 0, 0, state["l"] * (jnp.log(state["l"]) - state["entropy"]))
    return RowStates(state["m"], state["l"], zl, mean, z_target)


def _softmax(run: Run, call: Signature, operands: Mapping[str, Array], whole: RowStates) -> Values:
    # logsumexp_backward gives softmax when dy = 1.  Its kernel rounds the scores as the logsumexp kernel does.
    dy = jnp.where((whole.l > 0) & (whole.l < jnp.inf), jnp.ones_like(whole.l), jnp.nan)
    backward = Signature("logsumexp_backward", ("y",), call.options, choice=call.choice)
    return run(backward, {**operands, "m": whole.m, "l": whole.l, "dy": dy})


def _log_softmax(run: Run, call: Signature, operands: Mapping[str, Array], whole: RowStates) -> Values:
    log_l = jnp.log(jnp.where(whole.l < jnp.inf, whole.l, jnp.nan))
    y = (scores(call.options, operands["x"], operands) - whole.m[..., None]) - log_l[..., None]
    return {"y": masked(y, operands, MASKED[call.name]).astype(operands["x"].dtype)}


OF_ELEMENTS = {"softmax": _softmax, "log_softmax": _log_softmax}
"""The function that computes the output per element of each operation from the merged states."""
