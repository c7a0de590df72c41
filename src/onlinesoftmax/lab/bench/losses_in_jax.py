"""JAX's side of operations with a target column per row, and calls with a gradient by `jax.vjp`."""

from __future__ import annotations

from typing import Any

from .cases import Case
from .losses import Function, incoming


def called(case: Case, function: Function) -> Function:
    """The function, its losses reduced, with the gradient where the case has one: (gradient, output, …)."""
    import jax
    import jax.numpy as jnp

    count = len(case.without_gradient.tensors)

    def forward(x: Any, *more: Any) -> Any:
        found = function(x, *more)
        outputs = tuple(found) if isinstance(found, tuple) else (found,)
        if case.reduces_rows and outputs[0].ndim:
            # The functions of `jax.nn` and optax return the losses of the rows; the caller reduces them.
            return (jnp.mean(outputs[0]),)
        return outputs[: len(case.without_gradient.returned)]

    def with_gradient(x: Any, *more: Any) -> Any:
        operands = more[: count - 1]
        outputs, vjp = jax.vjp(lambda x: forward(x, *operands), x)
        dys = incoming(more[count - 1 :], len(outputs)) or (jnp.ones((), outputs[0].dtype),)
        return (*vjp(dys), *outputs)

    def without_gradient(*arrays: Any) -> Any:
        outputs = forward(*arrays)
        return outputs if len(outputs) > 1 else outputs[0]

    return with_gradient if case.with_gradient else without_gradient


def with_target(case: Case) -> Function:
    """The function for the rows of an operation with a target, in the operations of `jax.nn`."""
    return _BY_JAX_NN[case.operation](case)


def _loss_by_jax_nn(case: Case) -> Function:
    """The losses of the rows, in the dtype of the logits, as optax computes them."""
    return lambda x, target: -_picked_by_jax_nn(case, x, target).astype(x.dtype)


def _log_probabilities_by_jax_nn(case: Case) -> Function:
    import jax.numpy as jnp

    def function(x: Any, target: Any) -> Any:
        log_p = _log_softmax(case, x)
        return _picked_by_jax_nn(case, x, target), -jnp.sum(jnp.exp(log_p) * log_p, axis=case.dim)

    return function


def _picked_by_jax_nn(case: Case, x: Any, target: Any) -> Any:
    import jax.numpy as jnp

    picked = jnp.take_along_axis(_log_softmax(case, x), jnp.expand_dims(target, case.dim), axis=case.dim)
    return jnp.squeeze(picked, axis=case.dim)


def _log_softmax(case: Case, x: Any) -> Any:
    import jax

    return jax.nn.log_softmax(x.astype(case.accumulator), axis=case.dim)


_BY_JAX_NN = {"cross_entropy": _loss_by_jax_nn, "token_logprobs": _log_probabilities_by_jax_nn}
