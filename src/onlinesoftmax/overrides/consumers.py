"""Losses and log-probabilities of `Logits`: the linear functions compute them from input and weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..core.call import TokenLogprobs
from ..linear import linear_cross_entropy, linear_token_logprobs
from ..ops.cross_entropy.arguments import class_dim
from ..torch.formulas import PLAIN_TYPES
from ..torch.loss_run import result_dtype
from .checkpoints import checkpoint_hook
from .heads import Known, Logits, linked
from .table import LOSS, Arguments, bind

Tensor = torch.Tensor
functional = torch.nn.functional

Tensors = tuple[Tensor, Tensor, Tensor | None]
"""Hidden states, whose last dimension is that of the head, weight and bias."""


def tensors_of(x: Logits) -> Tensors | None:
    """What the linear functions need for some logits, as autograd knows it; None where the logits must exist."""
    head, recorded = x.head, x.requires_grad and torch.is_grad_enabled()
    if x.numbers.computed is not None or head.watched or (recorded and not _reaches(x.grad_fn, head.node)):
        return None
    if checkpoint_hook() not in (None, head.checkpoint):
        # The checkpoint repeats the loss without its head, whose logits may exist by then.
        return None
    tensors = head.tensors()
    if not recorded:
        tensors = tuple([None if t is None else t.detach() for t in tensors])  # type: ignore[assignment]  # three still
    hidden, weight, bias = tensors
    for step in x.rows:
        hidden = step.of_rows(hidden)
    return hidden.movedim(x.classes_dim, -1), weight, bias


def _reaches(node: Any, product: Any) -> bool:
    """True where only operations of PyTorch lie between a node of the graph and the product.

    A function of the user may give another gradient than the operations in its forward.
    """
    while node is not None and node is not product:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        node = node.next_functions[0][0] if node.next_functions else None
    return node is not None


def losses(
    x: Logits, target: Any, weight: Any, numbers: tuple[Any, ...], scores: tuple[float, float | None],
    stats: bool = False, dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """`linear_cross_entropy` of some logits; None where the call needs them.

    Args:
        x, target, weight: As for `cross_entropy`.
        numbers: reduction, ignore_index, label_smoothing and z_loss.
        scores: Scale and softcap.
        stats: Return the statistics too.
        dtype: Dtype of the loss; by default that of PyTorch.
    """
    dim, (reduction, ignore_index, smoothing, z_loss) = class_dim(x), numbers
    if x.classes_dim != dim or not _is_constant(target, x) or not (weight is None or _is_constant(weight, x)):
        return None
    soft, rows = target.is_floating_point(), x.shape[:dim] + x.shape[dim + 1 :]
    if target.shape != (x.shape if soft else rows) or not (soft or target.dtype == torch.long):
        return None
    if weight is not None and weight.shape != x.shape[dim : dim + 1]:
        return None
    if reduction not in ("mean", "sum", "none") or (tensors := tensors_of(x)) is None:
        return None
    hidden, linear_weight, bias = tensors
    dtype = dtype or result_dtype(x, target)
    with torch.autocast(x.device.type, enabled=False):
        y = linear_cross_entropy(
            hidden, linear_weight, target.movedim(dim, -1) if soft else target, linear_bias=bias, weight=weight,
            reduction=reduction, ignore_index=ignore_index, label_smoothing=smoothing, z_loss=z_loss, scale=scores[0],
            softcap=scores[1], dtype=dtype, return_stats=stats, memory=x.head.memory,
        )  # fmt: skip
    x.head.took(linear_cross_entropy.__name__, hidden)
    return y


def statistics(x: Logits, target: Any, scores: tuple[float, float | None]) -> TokenLogprobs | None:
    """`linear_token_logprobs` of some logits; None where the call needs them.

    Args:
        x: The logits.
        target: Class of each token, with the shape of the logits without the classes; None where only lse is wanted.
        scores: Scale and softcap.
    """
    dim = x.classes_dim
    shape = x.shape[:dim] + x.shape[dim + 1 :]
    if target is not None and (not _is_constant(target, x) or target.dtype != torch.long or target.shape != shape):
        return None
    if (tensors := tensors_of(x)) is None:
        return None
    if target is None:
        if (lse := _known_lse(x, scores)) is not None:
            return TokenLogprobs(lse, None, lse)
        target = torch.zeros(shape, dtype=torch.long, device=x.device)
    hidden, weight, bias = tensors
    with torch.autocast(x.device.type, enabled=False):
        found = linear_token_logprobs(
            hidden, weight, target, linear_bias=bias, scale=scores[0], softcap=scores[1], memory=x.head.memory
        )
    x.head.took(linear_token_logprobs.__name__, hidden)
    x.head.known = Known(x.rows, scores, dim, found)
    return found


def _known_lse(x: Logits, scores: tuple[float, float | None]) -> Tensor | None:
    """The logsumexp of the tokens, if the last call had them: code that gathers logits subtracts it afterwards."""
    known = x.head.known
    if known is None or known.scores != scores or len(known.rows) > len(x.rows):
        return None
    lse = known.found.lse
    same = all(a is b for a, b in zip(known.rows, x.rows, strict=False))
    if not same or lse.requires_grad != (x.requires_grad and torch.is_grad_enabled()):
        return None
    # Two equal columns stand for the classes, so that no step sees a dimension of size 1.
    shape = (*lse.shape[: known.classes_dim], 2, *lse.shape[known.classes_dim :])
    columns = lse.unsqueeze(known.classes_dim).expand(shape)
    for step in x.rows[len(known.rows) :]:
        columns = step.of_rows(columns)
    return columns.select(x.classes_dim, 0)


def _is_constant(t: Any, x: Logits) -> bool:
    """True for an ordinary tensor beside the logits that needs no gradient."""
    return type(t) in PLAIN_TYPES and t.device == x.device and not t.requires_grad


def _cross_entropy(x: Logits, arguments: Arguments) -> Any:
    if x.numbers.log or arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        return None
    return _loss(x, arguments, arguments.get("label_smoothing", 0.0))


def _nll_loss(x: Logits, arguments: Arguments) -> Any:
    target = arguments.get("target")
    soft = isinstance(target, Tensor) and target.is_floating_point()
    if soft or not x.numbers.log or arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        return None
    return _loss(x, arguments, 0.0)


def _loss(x: Logits, arguments: Arguments, smoothing: Any) -> Any:
    numbers = arguments.get("reduction", "mean"), arguments.get("ignore_index", -100), smoothing, 0.0
    return losses(x, arguments.get("target"), arguments.get("weight"), numbers, x.numbers.scores)


def _gather(x: Logits, arguments: Arguments) -> Any:
    """The logit or the log-probability of one class of each token."""
    dim, index = arguments.get("dim"), arguments.get("index")
    if not is_classes(x, dim) or not isinstance(index, Tensor) or arguments.get("sparse_grad"):
        return None
    if index.dim() != x.dim() or index.shape[x.classes_dim] != 1:
        return None
    found = statistics(x, index.squeeze(x.classes_dim), x.numbers.scores)
    if found is None:
        return None
    y = found.logprob if x.numbers.log else found.logprob + found.lse
    return y.unsqueeze(x.classes_dim).to(x.dtype)


def _logsumexp(x: Logits, arguments: Arguments) -> Any:
    dim = arguments.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if x.numbers.log or not is_classes(x, dim) or arguments.get("out") is not None:
        return None
    found = statistics(x, None, x.numbers.scores)
    if found is None:
        return None
    lse = found.lse.to(x.dtype)
    return lse.unsqueeze(x.classes_dim) if arguments.get("keepdim") else lse


def is_classes(x: Logits, dim: Any) -> bool:
    return type(dim) is int and -x.dim() <= dim < x.dim() and dim % x.dim() == x.classes_dim


class Taker(NamedTuple):
    """What takes the calls of one function of PyTorch: the function of the logits and the arguments by name."""

    take: Callable[[Logits, Arguments], Any]
    parameters: tuple[str, ...]
    positional: int


_NLL_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_OF_GATHER = Taker(_gather, ("input", "dim", "index", "sparse_grad"), 3)
_OF_LOGSUMEXP = Taker(_logsumexp, ("input", "dim", "keepdim", "out"), 3)

TAKERS: dict[Callable[..., Any], Taker] = {
    functional.cross_entropy: Taker(_cross_entropy, LOSS, len(LOSS)),
    functional.nll_loss: Taker(_nll_loss, _NLL_LOSS, len(_NLL_LOSS)),
    **dict.fromkeys((torch.gather, Tensor.gather), _OF_GATHER),
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp), _OF_LOGSUMEXP),
}
"""What takes the calls of functions of PyTorch with a `Logits`."""

REMEMBERED = (torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax, functional.log_softmax)
"""Functions that may give a `Logits` again."""


@torch.compiler.disable
def take(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call with a `Logits` without computing it; NotImplemented where the call needs it."""
    if func in REMEMBERED:
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)
    taker = TAKERS.get(func)
    arguments = None if taker is None else bind(taker, args, kwargs)
    if taker is None or arguments is None or not isinstance(x := arguments.pop("input", None), Logits):
        return NotImplemented
    with torch._C.DisableTorchFunction():
        y = taker.take(x, arguments)
        return NotImplemented if y is None else linked(y, x, func.__name__, lambda z: func(z, **arguments))
