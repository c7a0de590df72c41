"""The results of a head with their gradients in input, weight and bias.

`known_factor` and `later_factor` are for losses, whose gradient is known in the forward pass or has to wait;
`log_probabilities` is for statistics.  Only the gradients are computed that JAX asks for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ...core.arrays import Array, accumulator
from ..eager import logsumexp_of
from ..signature import Values
from .call import GRADIENTS, HeadCall, plan_of_statistics
from .head import bind

STATISTICS = ("y", "m", "l", "entropy")
"""Results of each token from which its log-probability, entropy and lse are made."""

Inputs = tuple[Array, Array, Array | None]
"""Input, weight and bias."""

Found = tuple[Array | None, Array | None, Array | None]
"""Gradients of input, weight and bias; None where JAX does not ask for one."""


def _arrays(inputs: Inputs, rest: Values) -> Values:
    return {**{name: t for name, t in zip(GRADIENTS, inputs, strict=True) if t is not None}, **rest}


def _opened(inputs: Any, rest: Any) -> tuple[Inputs, Values, tuple[str, ...]]:
    """The values of some inputs of a forward pass, and the names of the gradients that are wanted."""
    given = {name: t for name, t in zip(GRADIENTS, inputs, strict=True) if t is not None}
    wanted = tuple(GRADIENTS[name] for name, t in given.items() if t.perturbed)
    x, weight, bias = (given[name].value if name in given else None for name in GRADIENTS)
    return (x, weight, bias), {name: t.value for name, t in rest.items()}, wanted


def _in_order(found: Values) -> tuple[Found, None]:
    x, weight, bias = (found.get(name) for name in GRADIENTS.values())
    return (x, weight, bias), None


def _cotangent(call: HeadCall, dy: Any) -> Array | None:
    """The gradient of a result; None where it is 0."""
    if isinstance(dy, SymbolicZero):
        return None
    return jax.lax.psum(dy, call.summed) if call.summed else dy


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def known_factor(call: HeadCall, inputs: Inputs, rest: Values) -> tuple[Array, Values]:
    """(total, results of each token): total is the sum of factor · loss, and `rest` has the factor."""
    return _total(bind(call, _arrays(inputs, rest)), rest)


def _total(found: Values, rest: Values) -> tuple[Array, Values]:
    factor = rest["factor"]
    return jnp.sum(jnp.where(factor == 0, 0, factor * found["loss"])), found


def _known_forward(call: HeadCall, inputs: Any, rest: Any) -> Any:
    inputs, rest, wanted = _opened(inputs, rest)
    found = bind(call, _arrays(inputs, rest), (*call.outputs, *wanted))
    gradients = {name: found.pop(name) for name in wanted}
    return _total(found, rest), gradients


def _known_backward(call: HeadCall, gradients: Values, changes: Any) -> Any:
    dy = _cotangent(call, changes[0])
    if dy is None:
        return (None,) * 3, None
    # A sum may be wider than the result.
    wide = {name: t.astype(accumulator(t)) * dy.astype(accumulator(t)) for name, t in gradients.items()}
    return _in_order({name: t.astype(call.dtype) for name, t in wide.items()})


known_factor.defvjp(_known_forward, _known_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def later_factor(call: HeadCall, inputs: Inputs, rest: Values) -> Values:
    """The results of each token; the backward pass makes the logits again."""
    return bind(call, _arrays(inputs, rest))


def _later_forward(call: HeadCall, inputs: Any, rest: Any) -> Any:
    inputs, rest, wanted = _opened(inputs, rest)
    # JAX keeps arrays only; the keys of a dictionary are no arrays.
    return bind(call, _arrays(inputs, rest)), (inputs, rest, dict.fromkeys(wanted))


def _later_backward(call: HeadCall, kept: Any, changes: Any) -> Any:
    inputs, rest, wanted = kept
    dy = _cotangent(call, changes["loss"])
    if dy is None:
        return (None,) * 3, None
    found = bind(call, _arrays(inputs, {**rest, "factor": dy}), ("loss", *wanted))
    return _in_order({name: found[name].astype(call.dtype) for name in wanted})


later_factor.defvjp(_later_forward, _later_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_probabilities(call: HeadCall, inputs: Inputs, rest: Values) -> tuple[Array, Array, Array]:
    """(log-probability, entropy, lse) of each token, each with derivatives; the call's own outputs are not read."""
    return _results(bind(call, _arrays(inputs, rest), STATISTICS, "statistics"))


def _results(found: Values) -> tuple[Array, Array, Array]:
    return found["y"], found["entropy"], logsumexp_of(found["m"], found["l"])


def _statistics_forward(call: HeadCall, inputs: Any, rest: Any) -> Any:
    inputs, rest, wanted = _opened(inputs, rest)
    arrays = _arrays(inputs, rest)
    plan = plan_of_statistics(call, arrays, wanted)
    found = bind(call, arrays, (*STATISTICS, "z") if plan.keeps else STATISTICS, "statistics")
    rest.update({name: found[name] for name in ("m", "l", "entropy", "z") if name in found})
    return _results(found), (inputs, rest, dict.fromkeys(wanted))


def _statistics_backward(call: HeadCall, kept: Any, changes: Any) -> Any:
    inputs, rest, wanted = kept
    given = dict(zip(("dy", "dentropy", "dlse"), (_cotangent(call, t) for t in changes), strict=True))
    given = {name: t for name, t in given.items() if t is not None}
    if not given:
        return (None,) * 3, None
    given.setdefault("dy", jnp.zeros_like(rest["m"]))
    found = bind(call, _arrays(inputs, {**rest, **given}), tuple(wanted), "gradient")
    return _in_order({name: t.astype(call.dtype) for name, t in found.items()})


log_probabilities.defvjp(_statistics_forward, _statistics_backward, symbolic_zeros=True)
