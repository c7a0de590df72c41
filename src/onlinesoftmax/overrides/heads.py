"""Heads whose logits are not computed: the call of `linear`, and the operations after it.

logits.py has the tensor that stands for the logits, steps.py the operations that it remembers, consumers.py the losses
that need no logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..core.call import TokenLogprobs
from .checkpoints import checkpoint_hook
from .report import Counts

Tensor = torch.Tensor
aten = torch.ops.aten

NAME = "linear"
"""Name of heads in reports."""

RESHAPES = (aten.view.default, aten._unsafe_view.default)
"""Views whose argument is the shape of the result."""


class Step(NamedTuple):
    """One operation after the product.

    Attributes:
        function: The operation of PyTorch.
        arguments: What follows the tensor.
        keywords: Arguments by name.
        item: Index of the result in a list of results; None where there is one result.
        classes: Dimension of the classes before and after a view.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    item: int | None = None
    classes: tuple[int, int] = (0, 0)

    def of(self, t: Tensor) -> Any:
        """The result for a tensor of logits."""
        y = self.function(t, *self.arguments, **self.keywords)
        return y if self.item is None else y[self.item]

    def of_rows(self, t: Tensor) -> Tensor:
        """The result for a tensor that has other numbers in the place of the classes: hidden states, or one number."""
        if self.function not in RESHAPES:
            return self.of(t)
        shape = list(self.arguments[0])
        shape[self.classes[1]] = t.shape[self.classes[0]]
        return t.reshape(shape)


class Known(NamedTuple):
    """Numbers of the tokens that some `Logits` has."""

    rows: tuple[Step, ...]
    scores: tuple[float, float | None]
    classes_dim: int
    found: TokenLogprobs


class Head:
    """A call of `linear`: its tensors, and its product once it has been computed.

    Attributes:
        input, weight, bias: The tensors (tokens, hidden), (classes, hidden) and (classes,) or None, as autograd knows
            them.
        dtype: Dtype of the product, which is that of autocast where it was on.
        node: The node of the product in the graph of autograd; None without gradients.
        checkpoint: The result of `checkpoint_hook` in the call.
        watched: True where somebody has asked for the gradient of the logits, so that they must exist.
        known: The last result of `linear_token_logprobs`.
        memory: The argument of the linear functions.
    """

    known: Known | None

    def __init__(
        self, tensors: tuple[Tensor, Tensor, Tensor | None], product: Logits, counts: Counts, strict: bool,
        memory: int | None,
    ) -> None:  # fmt: skip
        self.input, self.weight, self.bias = tensors
        self.dtype, self.node, self.watched = product.dtype, product.grad_fn, False
        self.checkpoint, self.known, self.memory = checkpoint_hook(), None, memory
        self._counts, self._strict = counts, strict
        self._product: Tensor | None = None
        self._versions = self._current_versions()

    def _current_versions(self) -> tuple[tuple[int, int], ...]:
        """Address and version of each tensor: memory that has been freed has another address."""
        tensors = (t for t in (self.input, self.weight, self.bias) if t is not None)
        return tuple([(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Input, weight and bias in the dtype of the product.

        Raises:
            RuntimeError: one of them has changed since the call, or its memory has been freed.
        """
        if self._versions != self._current_versions():
            raise RuntimeError(
                "override(linear=True): the logits of this call of linear are not computed yet, and its input or its "
                "weight has changed or been freed since; use the logits before that"
            )
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return self.input.to(self.dtype), self.weight.to(self.dtype), bias

    def product(self, name: str) -> Tensor:
        """The product, for the operation of this name, which is counted."""
        reason = f"{name} needs the logits"
        if self._strict:
            raise RuntimeError(f"override(strict=True, linear=True): PyTorch would compute a {NAME}: {reason}")
        self._counts.add(NAME, reason)
        if self._product is None:
            self._product = torch.nn.functional.linear(*self.tensors())
        return self._product

    def took(self, name: str, hidden: Tensor) -> None:
        """Count a call that one of our functions took, with the hidden states of its tokens."""
        width = hidden.shape[-1]
        self._counts.add(name, None, ((hidden.numel() // width, width), hidden.dtype, hidden.device))

    def forget(self) -> None:
        """Do not use the computed product again, as it may change in place."""
        self._product = None


class Numbers:
    """The numbers of one or several `Logits` that share them, as views of a tensor do.

    Attributes:
        recipe: The steps from the product to the tensor of these numbers.
        scale, softcap: Score options that give the numbers from the product.
        log: True where a log_softmax follows.
        computed: The tensor; None until an operation needs it.
    """

    def __init__(self, recipe: tuple[Step, ...], scale: float, softcap: float | None, log: bool) -> None:
        self.recipe, self.scale, self.softcap, self.log = recipe, scale, softcap, log
        self.computed: Tensor | None = None

    @property
    def scores(self) -> tuple[float, float | None]:
        """Scale and softcap."""
        return self.scale, self.softcap

    def with_factor(self, factor: float) -> tuple[float, float | None]:
        """Scale and softcap of these numbers times a factor."""
        return self.scale * factor, None if self.softcap is None else self.softcap * factor


class Logits(torch.Tensor):
    """Logits of a head, which are not computed until an operation needs them.

    Attributes:
        head: The call of `linear`.
        numbers: Their numbers; other `Logits` may be views of them.
        path: The steps from the tensor of the numbers to this view.
        rows: The steps from the input of the head to the hidden states of the tokens of this view.
        classes_dim: The dimension of the classes.
    """

    head: Head
    numbers: Numbers
    path: tuple[Step, ...]
    rows: tuple[Step, ...]
    classes_dim: int

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, numbers: Numbers, offset: int = 0) -> Any:
        """Logits of the shape, the strides and the dtype of a tensor on the device meta."""
        y = torch.Tensor._make_wrapper_subclass(cls, like.shape, like.stride(), offset, dtype=like.dtype, device=device)
        y.numbers, y.path, y.rows, y.classes_dim = numbers, (), (), like.dim() - 1
        return y

    def computed(self, name: str) -> Tensor:
        """The logits, for the operation of this name: a tensor without gradient, which shares the numbers."""
        # No gradient, no autocast, and no mode sees these calls.
        with (
            torch._C._InferenceMode(False),
            torch._C._AutoDispatchBelowAutograd(),
            torch._C._DisableAutocast(),
            torch._C.DisableTorchFunction(),
        ):
            if self.numbers.computed is None:
                y = self.head.product(name)
                for step in self.numbers.recipe:
                    y = step.of(y)
                self.numbers.computed = y
            y = self.numbers.computed
            for step in self.path:
                y = step.of(y)
        return y

    def meta(self) -> Tensor:
        """A tensor without numbers that has the same shape, strides and dtype."""
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def view_of(self, like: Tensor, step: Step, item: int | None = None) -> Logits | None:
        """The view after a step, or one of several by its index; None where the step cuts the classes."""
        classes = self.head.weight.shape[0], 1
        here = [i for i, size in enumerate(zip(like.shape, like.stride(), strict=True)) if size == classes]
        if not here:
            return None
        # In inference mode, a view of an ordinary tensor is an ordinary tensor.
        with torch._C._InferenceMode(self.is_inference()):
            y: Logits = type(self)(like, self.device, self.numbers, int(self.storage_offset() + like.storage_offset()))
        step = step._replace(item=item, classes=(self.classes_dim, here[-1]))
        # A part that is the whole, as of all classes, has the same tokens; the step could cut the hidden states.
        whole = (like.shape, like.stride()) == (self.shape, self.stride())
        y.head, y.path, y.classes_dim = self.head, (*self.path, step), here[-1]
        y.rows = self.rows if whole else (*self.rows, step)
        return y

    def copy_of(self, step: Step, scores: tuple[float, float | None], log: bool) -> Logits | None:
        """The tensor after a step that gives each token numbers of its own."""
        like = step.of(self.meta())
        if like.stride(self.classes_dim) != 1:
            return None
        numbers = Numbers((*self.numbers.recipe, *self.path, step), *scores, log)
        y: Logits = type(self)(like, self.device, numbers)
        y.head, y.rows, y.classes_dim = self.head, self.rows, self.classes_dim
        return y


class Computed(torch.autograd.Function):
    """The logits as a tensor of PyTorch's own type."""

    @staticmethod
    def forward(ctx: Any, x: Logits, name: str) -> Any:
        y = x.computed(name).detach()
        x.head.forget()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


def plain(x: Logits, name: str) -> Tensor:
    """The logits as a tensor of PyTorch's own type, for the function of this name; gradients go through it."""
    with torch._C.DisableTorchFunction():
        y: Tensor = Computed.apply(x, name)
        return y


class Linked(torch.autograd.Function):
    """Results of the linear functions, which the graph joins to the logits as well as to the tensors of the head.

    Gradients go to the tensors of the head.  They go through the logits where somebody asks for the gradient of the
    logits, or for second derivatives, which the linear functions do not have.
    """

    @staticmethod
    def forward(ctx: Any, x: Logits, name: str, repeat: Callable[[Tensor], Any], *found: Tensor | None) -> Any:
        ctx.x, ctx.name, ctx.repeat = x, name, repeat
        # PyTorch forbids to change a view that a Function returns in place.
        copies = [None if y is None else y.clone() for y in found]
        pairs = zip(copies, found, strict=True)
        ctx.mark_non_differentiable(*[c for c, y in pairs if c is not None and y is not None and not y.requires_grad])
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, repeat, differentiable = ctx.x, ctx.repeat, torch.is_grad_enabled()
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # As PyTorch frees saved tensors.
            ctx.x = ctx.repeat = None
        # A pass with the logits as `inputs` stops there, and does not run the linear functions.
        past = any(torch._C._will_engine_execute_node(node) for node, _ in ctx.next_functions[1:] if node is not None)
        if x is None or (past and not x.head.watched and not differentiable):
            return None, None, None, *gradients
        with torch.enable_grad():
            logits = plain(x, ctx.name)
            pairs = zip(tree_leaves(repeat(logits)), gradients, strict=True)
            found, dy = zip(*[pair for pair in pairs if pair[0] is not None and pair[0].requires_grad], strict=True)
            (dx,) = torch.autograd.grad(found, logits, dy, create_graph=differentiable)
        return dx, None, None, *[None for _ in gradients]


def linked(found: Any, x: Logits, name: str, repeat: Callable[[Tensor], Any]) -> Any:
    """Results of the linear functions, with a place after the logits in the graph of autograd.

    Args:
        found: Tensors and None, in a tuple or alone.
        x: The logits.
        name: The function of which these are the results.
        repeat: The same function of logits that exist.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return found
    leaves, structure = tree_flatten(found)
    return tree_unflatten(Linked.apply(x, name, repeat, *leaves), structure)
