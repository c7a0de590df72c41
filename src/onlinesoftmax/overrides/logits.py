"""Logits of a head that are not computed: a tensor that remembers what a linear layer and the code after it asked for.

A call of `linear` with many output features gives a `Logits`.  PyTorch's autograd records it, and all that follows, as
usual; only the operations below autograd, which would compute, do not run.  The result of an operation of steps.py is a
`Logits` again.  A loss of consumers.py runs the linear functions, which take input and weight.  Any other operation
gets the logits, which are computed then, once, and counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .consumers import take
from .heads import Head, Logits, Numbers, Step, plain
from .report import Counts
from .steps import KINDS

Tensor = torch.Tensor
aten = torch.ops.aten


NEED_MEMORY = frozenset({
    Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__array__, Tensor.__dlpack__,
    Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor._typed_storage,
    Tensor.share_memory_, Tensor.is_shared, Tensor.__cuda_array_interface__.__get__,
})  # fmt: skip
"""Functions that read the memory of a tensor without an operation."""

WATCH_GRADIENTS = frozenset({
    Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook, torch.autograd.grad,
})  # fmt: skip
"""Functions that ask for the gradient of a tensor, before or after its loss."""


class UncomputedLogits(Logits):
    """The tensor that PyTorch sees."""

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        taken = take(func, args, kwargs)
        if taken is not NotImplemented:
            return taken
        if func in NEED_MEMORY:
            args, kwargs = with_plain(args, kwargs, func.__name__)
            return func(*args, **kwargs)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]  # for the stubs, data is a tensor
            raise RuntimeError(
                "override(linear=True): the data of logits cannot be set; use copy_, or make a new tensor"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func in WATCH_GRADIENTS:
                for t in tree_leaves((args, kwargs)):
                    if isinstance(t, Logits):
                        t.head.watched = True
                        # PyTorch makes the node of a view anew after a change in place, and crashes in register_hook.
                        _ = t.grad_fn
            return func(*args, **kwargs)

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = KINDS.get(func)
        if kind is not None and isinstance(args[0], Logits):
            y = kind(args[0], Step(func, tuple(args[1:]), kwargs))
            if y is not None:
                return y
        # In inference mode, operations arrive whole that consist of others.
        y = func.decompose(*args, **kwargs) if kind is None else NotImplemented
        return _compute(func, args, kwargs) if y is NotImplemented else y


class Deferred(TorchDispatchMode):
    """In this block, the product of a `linear` of two dimensions is not computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm.default):
            x, classes = args[-2], args[-1].shape[1]
        elif func is aten.linear.default:  # in inference mode
            x, classes = args[0], args[1].shape[0]
        else:
            return func(*args, **(kwargs or {}))
        like = torch.empty(x.shape[0], classes, dtype=x.dtype, device="meta")
        return UncomputedLogits(like, x.device, Numbers((), 1.0, None, False))


def deferred(
    input: Tensor, weight: Tensor, bias: Tensor | None, counts: Counts, strict: bool, memory: int | None
) -> Tensor:
    """Logits in place of the result of `linear`, which is not computed; or the result where PyTorch computed it.

    Args:
        input: Hidden states (..., hidden).
        weight: (classes, hidden).
        bias: (classes,) or None.
        counts: Where computed logits and losses without them are counted.
        strict: Raise an error where the logits are computed.
        memory: Most bytes of the logits and sums of a loss.
    """
    with torch._C.DisableTorchFunction():
        rows = input.reshape(-1, input.shape[-1])
        with Deferred():
            y = torch.nn.functional.linear(rows, weight, bias)
        if not isinstance(y, Logits):
            return y.view(*input.shape[:-1], -1)
        y.head = Head((rows, weight, bias), y, counts, strict, memory)
        if input.dim() == 2:
            return y
        shape = (*input.shape[:-1], weight.shape[0])
        # A view only where PyTorch's is one: a change in place drops the hooks that were on a view before.
        is_view = bias is not None and input.is_contiguous()
        return y.view(shape) if is_view else aten._unsafe_view(y, shape)


def with_plain(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the function of this name with `plain` in the place of each `Logits`."""
    given: tuple[tuple[Any, ...], dict[str, Any]]
    given = tree_map(lambda t: plain(t, name) if isinstance(t, Logits) else t, (args, kwargs))
    return given


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that needs the logits; in-place operations return the `Logits` that they changed."""
    name, given = func._schema.name.removeprefix("aten::"), {}

    def computed(t: Any) -> Any:
        if not isinstance(t, Logits):
            return t
        y = t.computed(name)
        given[id(y)] = y, t
        return y

    args, kwargs = tree_map(computed, (args, kwargs))
    if any(result.alias_info is not None for result in func._schema.returns):
        for _, t in given.values():
            t.head.forget()
    y = func(*args, **kwargs)
    if any(computed.shape != t.shape for computed, t in given.values()):
        raise RuntimeError(f"override(linear=True): {name} changes the shape of logits in place; make a new tensor")
    return tree_map(lambda t: given[id(t)][1] if id(t) in given else t, y)
