"""Operations that logits remember, which are then not computed: the table `KINDS`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .heads import Logits, Numbers, Step

Tensor = torch.Tensor
aten = torch.ops.aten


def _view(x: Logits, step: Step) -> Any:
    if step.function is aten.squeeze.default:
        # Hidden states of size 1 must stay.
        step = step._replace(function=aten.squeeze.dims, arguments=([i for i, n in enumerate(x.shape) if n == 1],))
    found = step.of(x.meta())
    if isinstance(found, Tensor):
        return x.view_of(found, step)
    views = [x.view_of(like, step, i) for i, like in enumerate(found)]
    return None if any(y is None for y in views) else views


def _is_open(x: Logits) -> bool:
    """True where a step can still be remembered."""
    return x.numbers.computed is None


def _copied(x: Logits, step: Step) -> Logits | None:
    """A clone or a cast to the same or a wider dtype on the same device."""
    keywords = step.keywords
    dtype = keywords.get("dtype") or x.dtype
    widens = dtype == x.dtype or (dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16))
    here = keywords.get("device") in (None, x.device) and keywords.get("layout") in (None, torch.strided)
    if not (_is_open(x) and widens and here) or keywords.get("pin_memory"):
        return None
    # type_as names the device, on which a tensor without numbers cannot be copied.
    step = step._replace(keywords={name: value for name, value in keywords.items() if name != "device"})
    return x.copy_of(step, x.numbers.scores, x.numbers.log)


def _factor(x: Logits, step: Step, divides: bool) -> float | None:
    """The factor of a product or quotient with a positive number."""
    number: Any = step.arguments[0] if len(step.arguments) == 1 else None
    if not _is_open(x) or x.numbers.log or type(number) not in (int, float) or not 0 < number < math.inf:
        return None
    return 1.0 / number if divides else float(number)


def _scaled(divides: bool) -> Callable[[Logits, Step], Logits | None]:
    def scaled(x: Logits, step: Step) -> Logits | None:
        factor = _factor(x, step, divides)
        return None if factor is None else x.copy_of(step, x.numbers.with_factor(factor), False)

    return scaled


def _scaled_in_place(divides: bool, function: Any) -> Callable[[Logits, Step], Logits | None]:
    """The product or quotient in place of all numbers, which all views see; `function` gives a new tensor."""

    def scaled(x: Logits, step: Step) -> Logits | None:
        factor, numbers = _factor(x, step, divides), x.numbers
        whole = all(path.function in WHOLE for path in x.path)
        # A factor that autograd does not record changes the numbers, but not the gradient.
        recorded = x.head.node is None or (x.requires_grad and torch.is_grad_enabled())
        if factor is None or not whole or not recorded:
            return None
        numbers.scale, numbers.softcap = numbers.with_factor(factor)
        numbers.recipe = (*numbers.recipe, step._replace(function=function))
        return x

    return scaled


def _tanh(x: Logits, step: Step) -> Logits | None:
    """Softcap * tanh(scale * z / softcap), which is tanh(scale * z) with a softcap of 1; a factor follows."""
    if not _is_open(x) or x.numbers.log or x.numbers.softcap is not None:
        return None
    return x.copy_of(step, (x.numbers.scale, 1.0), False)


def _log_softmax(x: Logits, step: Step) -> Logits | None:
    dim = step.arguments[0] % max(x.dim(), 1)
    if not _is_open(x) or x.numbers.log or dim != x.classes_dim:
        return None
    return x.copy_of(step, x.numbers.scores, True)


def _selected(x: Logits, step: Step) -> Logits | None:
    """The tokens that integers or a mask select."""
    indices = step.arguments[0]
    if not _is_open(x) or x.classes_dim != x.dim() - 1:
        return None
    # A mask stands for as many integers as it has dimensions, and the last dimension is that of the classes.
    found: list[Tensor | None] = []
    for index in indices:
        masks = index is not None and index.dtype in (torch.bool, torch.uint8)
        if masks and index.shape != x.shape[len(found) : len(found) + index.dim()]:
            return None
        found += index.nonzero().unbind(1) if masks else [index]
    if len(found) >= x.dim() and found[-1] is not None:
        return None
    like = aten.index.Tensor(x.meta(), [None if t is None else t.to("meta") for t in found])
    step = step._replace(arguments=(found,))
    if like.stride(-1) != 1:
        return None
    y: Logits = type(x)(like, x.device, Numbers((*x.numbers.recipe, *x.path, step), *x.numbers.scores, x.numbers.log))
    y.head, y.rows = x.head, (*x.rows, step)
    return y


WHOLE = (
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.transpose.int, aten.permute.default, aten.alias.default, aten.detach.default,
)  # fmt: skip
"""Views that have all numbers."""

PARTS = (
    aten.slice.Tensor, aten.select.int, aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default,
)  # fmt: skip
"""Views of some tokens."""

KINDS: dict[Any, Callable[[Logits, Step], Any]] = {
    **dict.fromkeys((*WHOLE, *PARTS), _view),
    **dict.fromkeys((aten._to_copy.default, aten.clone.default), _copied),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _scaled(False)),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _scaled(True)),
    **dict.fromkeys((aten.mul_.Tensor, aten.mul_.Scalar), _scaled_in_place(False, aten.mul.Tensor)),
    **dict.fromkeys((aten.div_.Tensor, aten.div_.Scalar), _scaled_in_place(True, aten.div.Tensor)),
    aten.tanh.default: _tanh,
    aten._log_softmax.default: _log_softmax,
    aten.index.Tensor: _selected,
}
"""What is remembered of an operation: the `Logits` that it gives, or None where it needs the logits."""
