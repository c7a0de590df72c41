"""The head of a language model and its loss in one, for JAX arrays: all logits at once only if they fit.

arguments.py checks, call.py holds a call and its plan, rows.py computes the losses of a chunk of logits; tokens.py and
columns.py are the loops over the chunks, head.py is the primitive, gradients.py has the derivatives, and run.py the
ways of the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from ...core.annotations import Reduction
from ..loss_run import TokenLogprobs
from ..prepare import AxisName
from . import run

__all__ = ["linear_cross_entropy", "linear_token_logprobs", "linear_token_loss"]


def linear_cross_entropy(
    input: ArrayLike, linear_weight: ArrayLike, target: ArrayLike, *, linear_bias: ArrayLike | None = None,
    weight: ArrayLike | None = None, reduction: Reduction = "mean", ignore_index: int | None = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, scale: float | ArrayLike = 1.0, softcap: float | None = None,
    token_weight: ArrayLike | None = None, dtype: Any = None, return_stats: bool = False, memory: int | None = None,
    acc_dtype: Any = None, axis_name: AxisName = None,
) -> Any:  # fmt: skip
    """Cross-entropy of the logits input · linear_weightᵀ + linear_bias, in one call.

    All logits exist at once if they fit in `memory`; a smaller `memory` lets only a part of them exist at a time.

    With the reductions "mean" and "sum" the forward pass also computes the gradients that JAX asks for: two products
    take the gradient of a chunk of logits to the input and the weight.  The gradient of the weight is added up in
    float32 and rounded once.  With "none", the backward pass makes the logits again.

    Under `jit`, each device computes the tokens and the classes that it holds, without an argument.  Inputs and logits
    stay where they are: one state per token is exchanged where the classes are sharded, and the gradients are added up
    once.

    Args:
        input: Hidden states (..., hidden), in float16, bfloat16, float32 or float64.
        linear_weight: Weight of the head (classes, hidden), in the dtype of `input`: the transpose of the kernel of
            Flax's Dense or Linear.
        target: Class of each token, integers of the shape (...); or probabilities of each class, (..., classes).  A
            class out of range gives NaN, without a gradient.
        linear_bias: Bias (classes,); -inf excludes a class, if there is no softcap and the scale is positive.
        weight: Factor of each class, (classes,), without a gradient.
        reduction: "mean" over the tokens that count (with `weight`, over their weights), "sum", or "none".
        ignore_index: Target of tokens that count for nothing, whatever their input holds; None is -100, as in PyTorch.
        label_smoothing: Part of the target, from 0 to 1, that is spread over all classes.
        z_loss: Factor of lse², which is added to the loss of each token.
        scale: Factor of the logits, an inverse temperature: a number, or a floating-point array without a gradient,
            with one number or one for each token, of the shape (...).
        softcap: Soft bound on their magnitude, softcap * tanh(scale * logits / softcap).
        token_weight: Factor of the loss of each token, of the shape (...), without a gradient.  The divisor of a mean
            does not contain it.
        dtype: Dtype of the loss: by default that of `input`.
        return_stats: Return (loss, statistics): lse, z_loss, entropy, the largest class and whether it is the target,
            for each token, without derivatives.
        memory: Most bytes of the logits and sums that exist at a time, beside results and gradients.  By default
            1.1 GB; for a mean or a sum with the gradient of a 16-bit weight, 4 bytes more for each of its elements.  It
            is checked for whole arrays; a device that holds a part of them plans for its part.  A kernel writes the
            gradient of a chunk beside its logits, which takes as much again.
        acc_dtype: Dtype in which chunks of tokens add up the gradient of the weight: float32 by default (float64 in
            float64).  The dtype of a bfloat16 weight takes no buffer, and rounds the sum after each chunk.
        axis_name: Inside `jax.shard_map`, the name of the mesh axis along which the classes are sharded, or a tuple of
            names; None for all classes.  linear_weight, linear_bias, weight and class probabilities are then the parts
            of one device, and the parts of all devices are equally large.  Classes as targets count those of all
            devices.  A mean is over the tokens of the device.  Under `shard_map(..., check_vma=False)`, take the
            gradient outside of shard_map.

    Returns:
        The loss: a scalar, or with "none" of the shape (...).

    Raises:
        TypeError, ValueError: an argument is of the wrong type, dtype, shape or value; `memory` is too small; or an
            argument without a gradient is to be differentiated.
        NotImplementedError: the gradients are themselves to be differentiated.

    Source:
        The arguments are those of torch.nn.functional.linear_cross_entropy of PyTorch 2.13, and ours.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, w, target = jnp.eye(2), jnp.array([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), jnp.array([0, -100])
        >>> loss, dw = jax.value_and_grad(linear_cross_entropy, argnums=1)(x, w, target)
        >>> print(loss.round(4))
        0.2395
        >>> print(dw.round(2))
        [[-0.21  0.  ]
         [ 0.11  0.  ]
         [ 0.11  0.  ]]
    """
    arrays, numbers = (input, linear_weight, target, linear_bias), (reduction, ignore_index, label_smoothing, z_loss)
    weights, how = (weight, token_weight), (memory, acc_dtype, axis_name)
    return run.cross_entropy(arrays, (scale, softcap), numbers, weights, dtype, return_stats, how)


def linear_token_logprobs(
    input: ArrayLike, linear_weight: ArrayLike, target: ArrayLike, *, linear_bias: ArrayLike | None = None,
    ignore_index: int | None = None, scale: float | ArrayLike = 1.0, softcap: float | None = None,
    memory: int | None = None, axis_name: AxisName = None,
) -> TokenLogprobs:  # fmt: skip
    """Log-probability of each target, entropy and logsumexp of each token, from hidden states and the head.

    Each is float32 (float64 in float64), and differentiable in input, weight and bias.  Where the logits of all tokens
    fit in `memory`, by default 1.1 GB, they are kept for the backward pass.  Elsewhere they are made in chunks of
    columns, and made again in the backward pass; each slice of the gradient of the weight is then one product, rounded
    once.

    Args:
        input, linear_weight, linear_bias, scale, softcap, memory, axis_name: As for `linear_cross_entropy`.
        target: Class of each token, integers of the shape (...).  The log-probability of a target out of range is NaN.
        ignore_index: A target whose log-probability is 0 and has no gradient; None where there is none.

    Returns:
        (logprob, entropy, lse), each of the shape (...).  No log-probability is above 0.

    Raises:
        TypeError, ValueError, NotImplementedError: as for `linear_cross_entropy`.

    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.eye(2), jnp.array([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> print(linear_token_logprobs(x, w, jnp.array([0, 2])).logprob.round(4))
        [-0.2395 -2.2395]
    """
    arrays = input, linear_weight, target, linear_bias
    return run.token_logprobs(arrays, ignore_index, (scale, softcap), (memory, None, axis_name))


def linear_token_loss(
    input: ArrayLike, linear_weight: ArrayLike, target: ArrayLike, loss: Callable[..., ArrayLike],
    *per_token: ArrayLike, linear_bias: ArrayLike | None = None, reduction: str = "mean", ignore_index: int = -100,
    scale: float | ArrayLike = 1.0, softcap: float | None = None, memory: int | None = None,
    acc_dtype: Any = None, axis_name: AxisName = None,
) -> Array:  # fmt: skip
    """A loss of the log-probability, entropy and logsumexp of each token, with its gradients in the forward pass.

    The loss is traced for one token, and mapped with its derivative over the tokens of each chunk.  So a loss such as
    PPO's or GRPO's costs three products, where `linear_token_logprobs` without stored logits costs four.

    As for `jit`, the loss must be a pure function: JAX traces a function object once and keeps the trace, with the
    numbers that the function reads beside its arguments.  Outside of `jit`, a call with a new function object, such as
    a lambda written in the call, is compiled anew.

    Args:
        input, linear_weight, target, linear_bias, scale, softcap, memory, acc_dtype, axis_name: As for
            `linear_cross_entropy`, with classes as targets.
        loss: Function `loss(logprob, entropy, lse, *per_token)` of the numbers of one token, float32 scalars, that
            returns the loss of the token.  Arrays that it closes over have no gradient.
        per_token: Arrays with a number for each token, of the shape (...), without gradients: old log-probabilities,
            advantages, masks.
        reduction: "mean" over the tokens that are not ignored, or "sum".
        ignore_index: Target of tokens without loss and gradient.

    Returns:
        The loss, a float32 scalar (float64 in float64).

    Raises:
        TypeError, ValueError, NotImplementedError: as for `linear_cross_entropy`.
        ValueError: the loss returns no number.

    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.eye(2), jnp.array([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> advantage = jnp.array([1.0, -1.0])
        >>> print(linear_token_loss(x, w, jnp.array([0, 2]), lambda logprob, entropy, lse, a: -a * logprob, advantage))
        -1.0
    """
    arrays, how = (input, linear_weight, target, linear_bias), (memory, acc_dtype, axis_name)
    return run.token_loss(arrays, loss, per_token, (reduction, ignore_index), (scale, softcap), how)
