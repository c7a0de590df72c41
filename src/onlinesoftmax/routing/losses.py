"""The losses of a mixture of experts, from the results of `route`: the same arithmetic for all array libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.arrays import Array
from .results import Routed

KINDS = ("switch", "sequence")

Total = Callable[[Array], tuple[Array, int]]
"""total(counts) adds counts over processes or devices; and returns how many there are."""


def load_balancing_loss(routed: Any, kind: Any, total: Total) -> Array:
    """The loss, as the public functions describe it."""
    caller = "load_balancing_loss()"
    if kind not in KINDS:
        raise ValueError(f"{caller}: kind must be {' or '.join(map(repr, KINDS))}, got {kind!r}")
    _check(caller, routed)
    counts, sums = routed.counts, routed.prob_sums
    if sums is None:
        raise ValueError(f"{caller}: routed has no prob_sums: call route with prob_sums=True")
    if kind == KINDS[0] and counts.ndim > 1:
        experts = counts.shape[-1]
        counts, sums = (t.reshape((-1, experts)).sum(0) for t in (counts, sums))
    k, (counts, parts) = routed.weights.shape[-1], total(counts)
    chosen = counts.sum(-1)
    # Of each sequence: experts * sum of (counts / chosen) * (sums / tokens), where tokens = chosen / k.
    each = (counts * sums).sum(-1) * (counts.shape[-1] * k * parts) / _divisor(chosen) / _divisor(chosen)
    return each.sum() / _divisor((chosen > 0).sum()) if each.ndim else each


def router_z_loss(routed: Any, total: Total) -> Array:
    """The loss, as the public functions describe it."""
    _check("router_z_loss()", routed)
    chosen, parts = total(routed.counts.sum())
    return (routed.lse * routed.lse).sum() * (routed.weights.shape[-1] * parts) / _divisor(chosen)


def _divisor(number: Array) -> Array:
    """A number to divide by: 1 in the place of 0."""
    return number + (number == 0)


def _check(caller: str, routed: Any) -> None:
    if not isinstance(routed, Routed):
        raise TypeError(f"{caller}: routed must be the result of route, not {type(routed).__name__}")
    if routed.counts is None:
        raise ValueError(f"{caller}: routed has no counts: call route with counts=True")
