"""The losses of a mixture of experts, from the results of `route`: the same arithmetic for all array libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.arrays import Array
from .results import Routed

KINDS = ("switch", "sequence")

Total = Callable[[Array], tuple[Array, int]]
"""total(counts) adds counts over processes or devices; and returns how many there are."""

Fused = Callable[[Array, Array, float, bool], Array | None]
"""fused(values, counts, factor, z_loss) is a loss by one kernel, or None where there is none.

The values are prob_sums, and the loss is the mean over the sequences of factor * sum(counts * values) / sum(counts)^2;
or lse, and the loss is factor * sum(values^2) / sum(counts).
"""


def _own(counts: Array) -> tuple[Array, int]:
    return counts, 1


def load_balancing_loss(routed: Any, kind: Any, total: Total = _own, fused: Fused | None = None) -> Array:
    """The loss, as the public functions describe it."""
    caller = "load_balancing_loss()"
    _check(caller, routed)
    if not isinstance(kind, str) or kind not in KINDS:
        given = repr(kind) if isinstance(kind, str) else type(kind).__name__
        raise ValueError(f"{caller}: kind must be {' or '.join(map(repr, KINDS))}, got {given}")
    counts, sums = routed.counts, routed.prob_sums
    if sums is None:
        raise ValueError(
            f"{caller}: routed has no prob_sums: call route, or the Router, with prob_sums=True (a Router returns them "
            "in training mode, and not after eval())"
        )
    if kind == KINDS[0] and counts.ndim > 1:
        shape = (-1, counts.shape[-1])
        counts, sums = counts.reshape(shape), sums.reshape(shape)
        counts, sums = (counts[0], sums[0]) if len(counts) == 1 else (counts.sum(0), sums.sum(0))
    counts, parts = total(counts)
    # Of each sequence: experts * sum of (counts / chosen) * (sums / tokens), where tokens = chosen / k.
    factor = counts.shape[-1] * routed.weights.shape[-1] * parts
    if fused is not None and (found := fused(sums, counts, factor, False)) is not None:
        return found
    chosen = counts.sum(-1)
    divisor = _divisor(chosen)
    each = (counts * sums).sum(-1) * factor / divisor / divisor
    return each.sum() / _divisor((chosen > 0).sum()) if each.ndim else each


def router_z_loss(routed: Any, total: Total = _own, fused: Fused | None = None) -> Array:
    """The loss, as the public functions describe it."""
    _check("router_z_loss()", routed)
    lse, (counts, parts) = routed.lse, total(routed.counts)
    factor = routed.weights.shape[-1] * parts
    if fused is not None and (found := fused(lse, counts, factor, True)) is not None:
        return found
    return (lse * lse).sum() * factor / _divisor(counts.sum())


def _divisor(number: Array) -> Array:
    """A number to divide by: 1 in the place of 0."""
    return number + (number == 0)


def _check(caller: str, routed: Any) -> None:
    if not isinstance(routed, Routed):
        raise TypeError(
            f"{caller}: routed must be the result of route, or of a Router, not {type(routed).__name__}: "
            "call route(logits, k, prob_sums=True) first"
        )
    if routed.counts is None:
        raise ValueError(f"{caller}: routed has no counts: call route with counts=True")
