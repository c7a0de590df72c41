"""The losses of the tokens of a chunk from their logits, and the gradient in the logits.

Where the losses are an operation of this library, a kernel may compute them.  XLA computes the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...core.arrays import Array, accumulator
from ...core.options import softcap_slope
from ...core.task import ANY
from .. import shards
from ..eager import FUNCTIONS, filled, logsumexp_of, scores
from ..exchange import RowStates, devices, gathered, local_target, merged
from ..loss_run import CROSS_ENTROPY, TOKEN_LOGPROBS
from ..plans import outputs_of
from ..shards import Run
from ..signature import Names, Signature, Values
from .call import CONSTANT, HeadCall

CHOICE = ANY
"""The plan of the kernels that read a chunk, which tests force."""

STATISTICS = ("lse", "entropy", "largest")
"""Results beside the loss."""


def losses(run: Run, call: HeadCall, names: Names, z: Array, rows: Values) -> tuple[Values, Array | None]:
    """(results per token, gradient of the sum of factor · loss in the logits); None where no gradient is computed.

    Args:
        run: Applies an operation.
        call: The call, whose outputs say what is computed.
        names: Axes of the mesh along which the columns of the logits are sharded.
        z: The logits.
        rows: The arrays of the call: those with a value per token for these tokens, the others whole.
    """
    if call.loss is not None:
        way = _of_function
    else:
        way = _of_weights if "q" in rows or "class_weight" in rows else _of_operation
    found, dz = way(run, call, names, z, rows)
    if any(name in call.outputs for name in STATISTICS):
        found |= _statistics(run, call, names, z, scale_of(rows))
    return found, dz


def _of_operation(run: Run, call: HeadCall, names: Names, z: Array, rows: Values) -> tuple[Values, Array | None]:
    """With one class as target, no weights of classes."""
    gradient = bool(call.gradients)
    if gradient and not isinstance(call.options.scale, float) and not names:
        # A kernel multiplies the gradient by a number.
        run = partial(shards.in_two_passes, run)
    operation = Signature(
        CROSS_ENTROPY, outputs_of(CROSS_ENTROPY, gradient=gradient), call.options, call.numbers, CHOICE
    )
    operands = {"x": z, "target": rows["target"], **scale_of(rows), **({"dy": rows["factor"]} if gradient else {})}
    found = _on_shards(run, names, operation, operands)
    return {"loss": found["loss"]}, found.get("y")


def _of_weights(run: Run, call: HeadCall, names: Names, z: Array, rows: Values) -> tuple[Values, Array | None]:
    """With a weight q for each class: loss = sum(q · (lse - z)) + z_loss · lse²."""
    smoothing, z_loss, cols = call.number("smoothing"), call.number("z_loss"), z.shape[-1]
    target = rows.get("target")
    if target is None:
        q = rows["q"].astype(accumulator(z))
    else:
        local = local_target(target, cols, names) if names else target
        q = (jnp.arange(cols, dtype=local.dtype)[None] == local[:, None]).astype(accumulator(z))
    q = (1 - smoothing) * q + smoothing / (cols * (devices(names) if names else 1))
    q = q * rows["class_weight"].astype(q.dtype)[None] if "class_weight" in rows else q
    s = scores(call.options, z, scale_of(rows))
    m = jnp.clip(jnp.max(s, -1), jnp.finfo(s.dtype).min, jnp.finfo(s.dtype).max)
    state = RowStates(m, jnp.sum(jnp.exp(s - m[:, None]), -1))
    m, l = (merged(state, names) if names else state)[:2]
    w = s - m[:, None]
    # A class of weight 0 and probability 0 counts for nothing.
    parts = jnp.stack([jnp.sum(q, -1), jnp.sum(jnp.where((q == 0) & (w == -jnp.inf), 0, q * w), -1)])
    total, of_scores = jax.lax.psum(parts, names) if names else parts
    lse = m + jnp.log(l)
    y = total * jnp.log(l) - of_scores + (z_loss * lse * lse if z_loss else 0)
    valid = (l > 0) & (l < jnp.inf) & (True if target is None else target >= 0)
    found = {"loss": jnp.where(valid, y, jnp.nan)}
    if not call.gradients:
        return found, None
    dy = rows["factor"] if target is None else jnp.where(target >= 0, rows["factor"], 0)
    of_sum = dy * (total + 2 * z_loss * lse if z_loss else total)
    dz = jnp.exp(w) * (of_sum / l)[:, None] - dy[:, None] * q
    options = filled(call.options, z, scale_of(rows))
    dz = dz * (options.scale * softcap_slope(FUNCTIONS, z.astype(s.dtype), options))
    return found, jnp.where((dy == 0)[:, None], 0, dz).astype(z.dtype)


def _of_function(run: Run, call: HeadCall, names: Names, z: Array, rows: Values) -> tuple[Values, Array | None]:
    """A function of the statistics of one token, which is mapped over the tokens of the chunk."""
    operation = Signature(TOKEN_LOGPROBS, outputs_of(TOKEN_LOGPROBS, True), call.options, (), CHOICE)
    state = _on_shards(run, names, operation, {"x": z, "target": rows["target"], **scale_of(rows)})
    m, l, entropy, factor = state["m"], state["l"], state["entropy"], rows["factor"]
    ignored = factor == 0
    # Rounding can put a logarithm above 0.
    known = jnp.minimum(state["y"], 0), entropy, logsumexp_of(m, l)
    beside = [rows[f"per_token{i}"] for i in range(sum(name.startswith("per_token") for name in rows))]
    constants = [rows[f"{CONSTANT}{i}"] for i in range(len(call.loss.constvars))]

    def of_token(*values: Array) -> Array:
        (y,) = jax.core.eval_jaxpr(call.loss, constants, *values)
        return y

    def of_chunk(*known: Array) -> Array:
        y: Array = jax.vmap(of_token)(*[jnp.where(ignored, 0, t) for t in known], *beside)
        return y

    y, backward = jax.vjp(of_chunk, *known)
    found = {"loss": y.astype(factor.dtype)}
    if not call.gradients:
        return found, None
    # A token that is ignored has no gradient, whatever the loss makes of it.
    changes = [jnp.where(ignored, 0, t) for t in backward(factor.astype(y.dtype))]
    rows = {"target": rows["target"], **scale_of(rows), "m": m, "l": l, "entropy": entropy}
    rows |= dict(zip(("dy", "dentropy", "dlse"), changes, strict=True))
    if names:
        rows["target"] = local_target(rows["target"], z.shape[-1], names)
    return found, gradient(run, call, z, rows, z.shape[-1] * devices(names) if names else 0)


def scale_of(arrays: Mapping[str, Array]) -> Values:
    """The scale of each token as an operand of an operation; nothing where it is a number."""
    return {"scale": arrays["scale"].reshape(-1, 1)} if "scale" in arrays else {}


def _statistics(run: Run, call: HeadCall, names: Names, z: Array, scale: Values) -> Values:
    """The lse, the entropy and the largest class of each token."""
    operation = Signature(TOKEN_LOGPROBS, outputs_of(TOKEN_LOGPROBS, True), call.options, (), CHOICE)
    state = _on_shards(run, names, operation, {"x": z, "target": jnp.zeros(z.shape[:1], jnp.int32), **scale})
    order = jnp.where(filled(call.options, z, scale).scale < 0, -z, z)
    return {"lse": logsumexp_of(state["m"], state["l"]), "entropy": state["entropy"], "largest": largest(order, names)}


def largest(t: Array, names: Names) -> Array:
    """The index of the largest element along the last axis, of which each device may have a part."""
    found = jnp.argmax(t, -1).astype(jnp.int32)
    if not names:
        return found
    first = (jax.lax.axis_index(names) * t.shape[-1]).astype(jnp.int32)
    # Of equal numbers, the first device has the first index.
    device = jnp.argmax(gathered(jnp.max(t, -1), names), 0)[None]
    return jnp.take_along_axis(gathered(found + first, names), device, 0)[0]


def gradient(run: Run, call: HeadCall, z: Array, rows: Mapping[str, Array], classes: int = 0) -> Array:
    """The gradient in the logits from the gradients of the log-probability, the entropy and lse of each token.

    Args:
        run, call: As for `losses`.
        z: Logits of some columns or of all.
        rows: Operands per row of the gradient of token_logprobs; dentropy and dlse may be missing.  The target is a
            column of z, or the number of columns of z where it is another class.
        classes: Number of all columns if z has some of them, and 0 otherwise.
    """
    factor = call.options.scale if isinstance(call.options.scale, float) else 1.0
    operation = Signature(f"{TOKEN_LOGPROBS}_backward", ("y",), call.options, (), CHOICE, factor, classes=classes)
    operands = {"x": z, **rows, **scale_of(rows)}
    return shards.times_slope(call.options, z, run(operation, operands)["y"], operands)


def _on_shards(run: Run, names: Names, operation: Signature, operands: Mapping[str, Any]) -> Values:
    return shards.run_shards(run, names, operation, operands) if names else run(operation, operands)
