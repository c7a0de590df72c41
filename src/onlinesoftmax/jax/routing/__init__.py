"""The gate of a mixture of experts for JAX arrays: experts, weights, and the losses of a training."""

from __future__ import annotations

from typing import Any, Literal

import jax
from jax.typing import ArrayLike

from ...core.arguments import check_flags
from ...routing import losses
from ...routing.results import Routed
from ...routing.rules import checked_rule
from ..exchange import checked_names, devices
from ..prepare import AxisName
from . import run

__all__ = ["load_balancing_loss", "route", "router_z_loss"]


def route(
    logits: ArrayLike, k: int, *, score: Literal["softmax", "sigmoid", "sqrtsoftplus", "identity"] = "softmax",
    order: Literal["score_first", "topk_first"] = "score_first", bias: ArrayLike | None = None,
    groups: int | None = None, group_k: int | None = None, group_score: Literal["top2_sum", "max"] | int = "top2_sum",
    renormalize: bool = True, scale: float = 1.0, indices: ArrayLike | None = None, where: ArrayLike | None = None,
    counts: bool = True, prob_sums: bool = False, dense: bool = False,
) -> Routed:  # fmt: skip
    """Choose k experts for each token of a mixture, and weight them: `onlinesoftmax.route` for JAX.

    The experts are those of `onlinesoftmax.route`, whatever the setting `jax_enable_x64` and whatever XLA fuses.

    Args:
        logits: Floating-point array (..., tokens, E) of E experts, at most 8192.  Axes before the tokens are
            sequences: each has its own counts and prob_sums.
        k: Number of experts of a token, from 1 to E.
        score, order, groups, group_k, group_score, renormalize, scale: As for `onlinesoftmax.route`.
        bias: One number for each expert, (E,), added to the scores for the choice alone.  It has no gradient.
        indices: Experts to take instead of choosing them, integers (..., tokens, k).
        where: Boolean, broadcasts to (..., tokens): False for a token that is not routed.
        counts, prob_sums, dense: Return these results.

    Returns:
        The named tuple `Routed` (weights, indices, counts, prob_sums, lse, dense).  Weights, prob_sums, lse and dense
        are differentiable in the logits, in reverse and forward mode.  For the gradient, nothing as large as the logits
        is kept but the logits.

    Raises:
        TypeError, RuntimeError, ValueError: an argument has the wrong type, dtype, shape or value.  The values of
            arrays are not read.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> found = jax.jit(route, static_argnums=1)(jnp.array([[0.0, 2.0, 1.0, 2.0], [3.0, 0.0, 0.0, 0.0]]), 2)
        >>> print(found.indices, found.counts)
        [[1 3]
         [0 1]] [1 2 0 1]
    """
    name = "route"
    x = run.checked_logits(logits)
    rule = checked_rule(f"{name}()", x.shape[-1], k, score, order, (groups, group_k, group_score), renormalize, scale)
    check_flags("route()", counts=counts, prob_sums=prob_sums, dense=dense)
    return run.route(x, run.checked_operands(x, bias, where, indices, rule), rule, counts, prob_sums, dense)


def load_balancing_loss(
    routed: Routed, kind: Literal["switch", "sequence"] = "switch", *, axis_name: AxisName = None
) -> jax.Array:
    """The loss that teaches a router to use all experts evenly: `onlinesoftmax.load_balancing_loss` for JAX.

    Args:
        routed: Result of `route` with `prob_sums=True`.
        kind: "switch" for one loss over the tokens of all sequences; "sequence" for the mean of the losses of the
            sequences.
        axis_name: Axes of `shard_map` or `pmap` whose devices have other tokens.  Each device gets its share: the mean
            of the losses of the devices is the loss of all tokens.  Under `jit`, arrays are whole, and it is None.

    Raises:
        TypeError, ValueError: routed is no result of `route`, or has no counts or no prob_sums; kind is unknown, or
            axis_name names no axis.

    Example:
        >>> import jax.numpy as jnp
        >>> print(load_balancing_loss(route(jnp.array([[20.0, 0.0], [0.0, 20.0]]), 1, prob_sums=True)))
        1.0
    """
    with jax.numpy_dtype_promotion("standard"):
        loss: jax.Array = losses.load_balancing_loss(
            routed, kind, lambda counts: _total("load_balancing_loss", counts, axis_name)
        )
    return loss


def router_z_loss(routed: Routed, *, axis_name: AxisName = None) -> jax.Array:
    """The mean of lse^2 over the tokens: `onlinesoftmax.router_z_loss` for JAX.

    Args:
        routed: Result of `route`.
        axis_name: As for `load_balancing_loss`.

    Raises:
        TypeError, ValueError: routed is no result of `route`, or has no counts; axis_name names no axis.

    Example:
        >>> import jax.numpy as jnp
        >>> print(f"{router_z_loss(route(jnp.zeros((3, 4)), 1)):.4f}")
        1.9218
    """
    with jax.numpy_dtype_promotion("standard"):
        loss: jax.Array = losses.router_z_loss(routed, lambda counts: _total("router_z_loss", counts, axis_name))
    return loss


def _total(name: str, counts: Any, axis_name: AxisName) -> tuple[Any, int]:
    """The counts of all devices along the axes, and the number of devices."""
    names = checked_names(name, axis_name)
    return (jax.lax.psum(counts, names), devices(names)) if names else (counts, 1)
