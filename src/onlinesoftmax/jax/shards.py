"""The operations on a part of the columns of every row: a local pass, an exchange of states, and what follows it.

The local pass is an operation on the local columns, which a kernel may run.  The functions serve rows that are sharded
under `shard_map` (autograd.py) and under `jit` (partitioning.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax.numpy as jnp

from ..core.arrays import Array, accumulator
from ..core.options import softcap_slope
from ..ops import OPERATIONS
from .eager import FORMULAS, FUNCTIONS, MASKED, TO_LSE, filled, masked, scores
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
        call: The call; its `axis_name` is not read.
        operands: The target of a row, if the operation has one, is its column in the whole row (`whole_target`).
    """
    operation = OPERATIONS[call.name]
    if call.writes_gradient:
        return in_two_passes(partial(run_shards, run, names), call, operands)
    if not operation.backward:
        return FINISH[call.name](run, call, operands, merged(_states(run, names, call, operands), names))
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
    if call.name not in TO_LSE or not call.classes or call.number("smoothing"):
        return call, operands
    elsewhere = operands["target"] >= operands["x"].shape[-1]
    of_lse = jnp.where(elsewhere, TO_LSE[call.name](call, operands["dy"], operands["m"], operands["l"]), 0)
    dlse = operands["dlse"] + of_lse if "dlse" in operands else of_lse
    target = jnp.where(elsewhere, -1, operands["target"])
    return call._replace(classes=0), {**operands, "target": target, "dlse": dlse}


def in_two_passes(run: Run, call: Signature, operands: Mapping[str, Array]) -> Values:
    """Results per row by the operation, and the gradient in the logits by the operation's gradient, one after another.

    The gradient is that of sum(dy * result) over the rows.
    """
    rest = {name: t for name, t in operands.items() if name != "dy"}
    dy, x, arrays = operands["dy"], operands["x"], {name: operands[name] for name in call.options.arrays}
    results = run(call._replace(outputs=tuple(name for name in call.outputs if name != "y")), rest)
    if call.options.mask is not None:
        # A row that the mask leaves without a class counts for nothing.
        dy = jnp.where(results["l"] == 0, 0, dy)
    backward = call._replace(name=OPERATIONS[call.name].gradient_name, outputs=("y",), factor=float(call.options.scale))
    given = {**rest, "m": results["m"], "l": results["l"], "dy": dy.astype(results["l"].dtype)}
    y = run(backward, given)["y"]
    if call.options.softcap is not None:
        wide = accumulator(x)
        slope = softcap_slope(FUNCTIONS, x.astype(wide), filled(call.options, x, arrays))
        # A row that counts for nothing may hold NaN.
        y = masked(jnp.where(y == 0, 0, y.astype(wide) * slope), arrays).astype(x.dtype)
    return {name: y if name == "y" else results[name] for name in call.outputs}


def _states(run: Run, names: Names, call: Signature, operands: Mapping[str, Array]) -> RowStates:
    """The states of the local columns."""

    def local(name: str, outputs: tuple[str, ...], smoothing: float = 0.0, **more: Array) -> Values:
        numbers = (("smoothing", smoothing),) if smoothing else ()
        scored = {name: operands[name] for name in ("x", *call.options.arrays)}
        return run(Signature(name, outputs, call.options, numbers, call.choice), {**scored, **more})

    z_target = mean = zl = None
    if "target" in operands:
        target = local_target(operands["target"], operands["x"].shape[-1], names)
        is_local = (target >= 0) & (target < operands["x"].shape[-1])
        z_target = jnp.where(is_local, _column(call, operands, jnp.where(is_local, target, 0)), 0)
    if call.number("smoothing"):
        # With smoothing = 1, loss = log(l) - mean, and the target has no influence.  So mean = log(l) - loss.
        first = jnp.zeros_like(target)
        state = local("cross_entropy", ("loss", "m", "l"), 1.0, target=first)
        # If the score of column 0, the dummy target, is -inf, the loss is NaN (0 * inf); the mean is then -inf.
        mean = jnp.log(state["l"]) - state["loss"]
        mean = jnp.where(_column(call, operands, first) == -jnp.inf, -jnp.inf, mean)
    else:
        state = local("logsumexp", outputs_of("logsumexp", "entropy" in call.outputs))
    if "entropy" in call.outputs:
        zl = jnp.where(state["l"] == 0, 0, state["l"] * (jnp.log(state["l"]) - state["entropy"]))
    return RowStates(state["m"], state["l"], zl, mean, z_target)


def _column(call: Signature, operands: Mapping[str, Array], index: Array) -> Array:
    """The score of one local column of each row."""

    def picked(t: Array) -> Array:
        # An array of the score options may have size 1 along the row.
        return t if t.shape[-1] == 1 else jnp.take_along_axis(t, index[..., None], -1)

    x = jnp.take_along_axis(operands["x"], index[..., None], -1)
    return scores(call.options, x, {name: picked(operands[name]) for name in call.options.arrays})[..., 0]


def _softmax(run: Run, call: Signature, operands: Mapping[str, Array], whole: RowStates) -> Values:
    # logsumexp_backward gives softmax when dy = 1.  Its kernel rounds the scores as the logsumexp kernel does.
    dy = jnp.where((whole.l > 0) & (whole.l < jnp.inf), jnp.ones_like(whole.l), jnp.nan)
    backward = Signature("logsumexp_backward", ("y",), call.options, choice=call.choice)
    return run(backward, {**operands, "m": whole.m, "l": whole.l, "dy": dy})


def _log_softmax(run: Run, call: Signature, operands: Mapping[str, Array], whole: RowStates) -> Values:
    log_l = jnp.log(jnp.where(whole.l < jnp.inf, whole.l, jnp.nan))
    y = (scores(call.options, operands["x"], operands) - whole.m[..., None]) - log_l[..., None]
    return {"y": masked(y, operands, MASKED[call.name]).astype(operands["x"].dtype)}


def _logsumexp(run: Run, call: Signature, operands: Mapping[str, Array], whole: RowStates) -> Values:
    return {"m": whole.m, "l": whole.l}


def _cross_entropy(run: Run, call: Signature, operands: Mapping[str, Array], whole: RowStates) -> Values:
    smoothing, z_loss, log_l = call.number("smoothing"), call.number("z_loss"), jnp.log(whole.l)
    y = log_l - (whole.z_target - whole.m)
    if whole.mean is not None:
        y = (1 - smoothing) * y + smoothing * (log_l - whole.mean)
    if z_loss:
        y = y + z_loss * (whole.m + log_l) ** 2
    return {"loss": _of_known_rows(operands, whole, y), "m": whole.m, "l": whole.l}


def _token_logprobs(run: Run, call: Signature, operands: Mapping[str, Array], whole: RowStates) -> Values:
    log_l = jnp.log(whole.l)
    y = _of_known_rows(operands, whole, (whole.z_target - whole.m) - log_l)
    entropy = {} if whole.zl is None else {"entropy": log_l - whole.zl / whole.l}
    return {"y": y, "m": whole.m, "l": whole.l, **entropy}


def _of_known_rows(operands: Mapping[str, Array], whole: RowStates, y: Array) -> Array:
    """`y`, with NaN where the target is invalid or l is infinite."""
    return jnp.where((operands["target"] >= 0) & (whole.l < jnp.inf), y, jnp.nan)


FINISH: dict[str, Callable[[Run, Signature, Mapping[str, Array], RowStates], Values]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "cross_entropy": _cross_entropy,
    "token_logprobs": _token_logprobs,
}
"""The function that computes the outputs of each operation from the merged states."""
