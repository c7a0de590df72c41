"""The head of a language model and its loss in one: of the logits, there is one copy at most, or a part at a time.

    linear_cross_entropy     cross_entropy(input · linear_weightᵀ + linear_bias, target)
    linear_token_logprobs    log-probability of each target, entropy and logsumexp of each token, with all gradients
    linear_token_loss        any loss of these three numbers of each token, with its gradients in the forward pass

plans.py says how the logits of a problem (problem.py) are cut, products.py multiplies, rows.py computes what one chunk
of logits gives; tokens.py and columns.py are the ways of a call, and operators.py those of a traced call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.annotations import Reduction
from ..core.arrays import is_dtensor
from ..core.call import TokenLogprobs
from ..kernels.registry import needing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["linear_cross_entropy", "linear_token_logprobs", "linear_token_loss"]


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    weight: Tensor | None = None, reduction: Reduction = "mean", ignore_index: int | None = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, scale: float | Tensor = 1.0, softcap: float | None = None,
    token_weight: Tensor | None = None, dtype: torch.dtype | None = None, return_stats: bool = False,
    memory: int | None = None, acc_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Cross-entropy of the logits input · linear_weightᵀ + linear_bias, in one call.

    All logits exist at once if they fit in `memory`; a smaller `memory` lets only a part of them exist at a time
    (docs/linear.md).

    With the reductions "mean" and "sum" the forward pass also computes the gradients: the loss kernel writes the
    gradient of a chunk of logits in their place, and two products take it to the input and the weight.  The gradient of
    the weight is added up in float32 and rounded once.  With "none", the logits are kept for the backward pass if they
    fit, and are made again otherwise; with an option that needs whole rows, such as label smoothing, always again.

    Input and weight may be DTensors, sharded along tokens and classes (docs/sharded_heads.md).

    Args:
        input: Hidden states (..., hidden), floating point.
        linear_weight: Weight of the head (classes, hidden), in the dtype of `input`; under autocast both are cast.
        target: Class of each token, integers of the shape (...); or probabilities of each class, (..., classes).  The
            loss of a class out of range is NaN, and has no gradient.
        linear_bias: Bias (classes,); -inf excludes a class, if there is no softcap and the scale is positive.
        weight: Factor of each class, (classes,), without a gradient.
        reduction: "mean" over the tokens that count (with `weight`, over their weights), "sum", or "none".
        ignore_index: Target of tokens that count for nothing, whatever their input holds; None is -100, as in PyTorch.
        label_smoothing: Part of the target, from 0 to 1, that is spread over all classes.
        z_loss: Factor of lse², which is added to the loss of each token.
        scale: Factor of the logits, an inverse temperature: a number, or a tensor without a gradient, with one number
            or one for each token, of the shape (...).
        softcap: Soft bound on their magnitude, softcap * tanh(scale * logits / softcap).
        token_weight: Factor of the loss of each token, of the shape (...), without a gradient.  The divisor of a mean
            does not contain it.
        dtype: Dtype of the loss: by default that of `input`, and float32 under autocast.  A loss of 16 bits is computed
            in less time, from exponentials that have its digits and some more.
        return_stats: Return (loss, statistics): lse, z_loss, entropy, the largest class and whether it is the target,
            for each token, detached.
        memory: Most bytes of the logits and sums that exist at a time, beside results and gradients.  By default
            1.1 GB; for a mean or a sum with the gradient of the weight, more for each of its elements: 4 bytes of a
            bfloat16 weight without `acc_dtype=torch.bfloat16`, and 2 of a float16 one.
        acc_dtype: Dtype in which chunks of tokens add up the gradient of the weight: float32 by default (float64 in
            float64).  The dtype of a bfloat16 weight takes no buffer, and rounds the sum after each chunk: 4 chunks had
            1.6 times the error of one rounding.

    Returns:
        The loss: a scalar, or with "none" of the shape (...).

    Raises:
        TypeError, RuntimeError, ValueError: an argument is of the wrong type, dtype, shape or value; `memory` is too
            small; or the gradients are themselves to be differentiated.

    Source:
        The arguments are those of torch.nn.functional.linear_cross_entropy of PyTorch 2.13, and ours.

    Example:
        >>> import torch
        >>> x, w, target = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), torch.tensor([0, -100])
        >>> linear_cross_entropy(x, w, target)
        tensor(0.2395)
    """
    run = _implementation(input, linear_weight)
    numbers = reduction, -100 if ignore_index is None else ignore_index, label_smoothing, z_loss, scale, softcap
    tensors = input, linear_weight, target, linear_bias
    return run.cross_entropy(tensors, numbers, weight, token_weight, dtype, return_stats, memory, acc_dtype)


def linear_token_logprobs(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
    ignore_index: int | None = None, support: tuple[Tensor, Tensor] | None = None, scale: float | Tensor = 1.0,
    softcap: float | None = None, memory: int | None = None,
) -> TokenLogprobs:  # fmt: skip
    """Log-probability of each target, entropy and logsumexp of each token, from hidden states and the head.

    Each is float32 (float64 in float64), and differentiable in input, weight and bias.  Where the logits of all tokens
    fit in `memory`, by default 1.1 GB, they are kept for the backward pass.  Elsewhere they are made in chunks of
    columns, and made again in the backward pass; each slice of the gradient of the weight is then one product, rounded
    once.

    Args:
        input, linear_weight, linear_bias, scale, softcap, memory: As for `linear_cross_entropy`.
        target: Class of each token, integers of the shape (...).  The log-probability of a target out of range is NaN.
        ignore_index: A target whose log-probability is 0 and has no gradient; None where there is none.
        support: (token_ids, offsets), the classes that each token is restricted to, at most n of each, as for
            `token_logprobs`.  The n logits of a token are gathered from the chunks of all logits, and kept.  Not
            available for DTensors.

    Returns:
        (logprob, entropy, lse), each of the shape (...).  No log-probability is above 0.  With a support, the logprob
        is -inf where it lacks the target.

    Raises:
        TypeError, RuntimeError, ValueError: as for `linear_cross_entropy`.

    Example:
        >>> import torch
        >>> x, w = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> linear_token_logprobs(x, w, torch.tensor([0, 2])).logprob
        tensor([-0.2395, -2.2395])
    """
    run = _implementation(input, linear_weight)
    tensors = input, linear_weight, target, linear_bias
    found: TokenLogprobs = run.token_logprobs(tensors, ignore_index, scale, softcap, memory, support=support)
    return found


def linear_token_loss(
    input: Tensor, linear_weight: Tensor, target: Tensor, loss: Callable[..., Tensor], *per_token: Tensor,
    linear_bias: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100, scale: float | Tensor = 1.0,
    softcap: float | None = None, memory: int | None = None, acc_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """A loss of the log-probability, entropy and logsumexp of each token, with its gradients in the forward pass.

    The loss and its derivative are evaluated on the vectors of each chunk of tokens, or of all tokens where `memory` is
    too small for such chunks.  So a loss such as PPO's or GRPO's costs three products, or up to four with less memory,
    where `linear_token_logprobs` without stored logits costs four.  A graph of torch.compile has the operations of the
    loss once for each chunk.  A graph for any number of tokens, or of more than 16 chunks, has the loss of
    `linear_token_logprobs` instead.

    Args:
        input, linear_weight, target, linear_bias, scale, softcap, memory, acc_dtype: As for `linear_cross_entropy`,
            with classes as targets.
        loss: Function `loss(logprob, entropy, lse, *per_token)` of float32 vectors that returns the loss of each token.
            It must compute a token's loss from the numbers of this token alone, because it sees a chunk of tokens.  It
            must read no other tensor that requires a gradient, such as a parameter.
        per_token: Tensors with a number for each token, of the shape (...), without gradients: old log-probabilities,
            advantages, masks.
        reduction: "mean" over the tokens that are not ignored, or "sum".
        ignore_index: Target of tokens without loss and gradient.

    Returns:
        The loss, a float32 scalar (float64 in float64).

    Raises:
        TypeError, RuntimeError, ValueError: as for `linear_cross_entropy`.
        ValueError: the loss returns no number for each token.

    Example:
        >>> import torch
        >>> x, w = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> advantage = torch.tensor([1.0, -1.0])
        >>> linear_token_loss(x, w, torch.tensor([0, 2]), lambda logprob, entropy, lse, a: -a * logprob, advantage)
        tensor(-1.)
    """
    run = _implementation(input, linear_weight)
    tensors = input, linear_weight, target, linear_bias
    numbers = reduction, ignore_index, scale, softcap
    found: Tensor = run.token_loss(tensors, loss, per_token, numbers, memory, acc_dtype=acc_dtype)
    return found


def _implementation(*tensors: Any) -> Any:
    """The module that computes the functions of these tensors, which imports torch."""
    with needing("torch", "the head without logits"):
        if any(is_dtensor(type(t)) for t in tensors):
            from ..distributed.linear import dtensor

            return dtensor
        from . import run

        return run
