"""Modules for models in PyTorch: drop-ins for `torch.nn.Softmax` and its like, and `replace`, which drops them in.

>>> import torch
>>> import onlinesoftmax as osm
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(dim=-1))
>>> osm.nn.replace(model)
Replaced(softmax=1, log_softmax=0, softmax2d=0, cross_entropy=0)
>>> model
Sequential(
  (0): Linear(in_features=8, out_features=4, bias=True)
  (1): Softmax(dim=-1)
)
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from . import api
from .core.annotations import FullyMasked, Reduction
from .core.arguments import check_flags
from .core.options import checked_options
from .core.wrong_calls import hinting
from .kernels.registry import needing

with needing("torch", "onlinesoftmax.nn"):
    import torch

    from .linear.module import LinearCrossEntropyLoss
    from .ops.cross_entropy.arguments import checked_numbers
    from .routing.module import Router
    from .torch.arguments import TORCH

__all__ = [
    "CrossEntropyLoss", "LinearCrossEntropyLoss", "LogSoftmax", "LogSumExp", "Replaced", "Router", "Softmax",
    "Softmax2d", "replace",
]  # fmt: skip


class _WithOptions(torch.nn.Module):
    """A module that holds score options.

    The defaults belong to the class: a module that `replace` made, or that an older pickle holds, has none of its own.
    """

    scale: float = 1.0
    causal: bool = False
    softcap: float | None = None
    fully_masked: FullyMasked = "nan"
    batch_invariant: bool = False

    def _set(self, scale: Any, causal: Any, softcap: Any, fully_masked: Any, batch_invariant: Any) -> None:
        name = type(self).__name__
        if isinstance(scale, torch.Tensor):
            raise TypeError(f"{name}(): scale must be a number; pass a tensor to the function, which does not keep it")
        check_flags(f"{name}()", batch_invariant=batch_invariant)
        checked_options(name, scale, softcap, None, None, causal, fully_masked)
        self.scale, self.causal, self.softcap = scale, causal, softcap
        self.fully_masked, self.batch_invariant = fully_masked, batch_invariant

    def _call(self, operation: str, input: Any, dim: Any, mask: Any, bias: Any, *keepdim: bool) -> Any:
        return _operation(
            operation, input, dim, *keepdim, mask=mask, bias=bias, scale=self.scale, causal=self.causal,
            softcap=self.softcap, fully_masked=self.fully_masked, batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """PyTorch's, then the options that are not at their defaults."""
        names = ("scale", "causal", "softcap", "fully_masked", "batch_invariant")
        return ", ".join([super().extra_repr(), *_changed(self, names)])


def _changed(module: torch.nn.Module, names: tuple[str, ...]) -> list[str]:
    """The text name=value of each option of a module that is not at the default of its class."""
    return [f"{n}={getattr(module, n)!r}" for n in names if getattr(module, n) != getattr(type(module), n)]


class _OverDim(_WithOptions):
    """Common part of Softmax and LogSoftmax: PyTorch's `dim`, and a result of the input's shape."""

    operation: str
    dim: int | None

    @hinting
    def __init__(
        self, dim: int | None = None, *, scale: float = 1.0, causal: bool = False, softcap: float | None = None,
        fully_masked: FullyMasked = "nan", batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        self._set(scale, causal, softcap, fully_masked, batch_invariant)

    def forward(
        self, input: torch.Tensor, *, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the operation on `input`."""
        return self._call(self.operation, input, self.dim, mask, bias)


# torch.fx follows calls into modules that are not PyTorch's own, and stops here.
@torch.fx.wrap
def _operation(operation: str, input: Any, dim: Any, *keepdim: bool, **options: Any) -> Any:
    if dim is None:
        if not torch.compiler.is_compiling():
            # torch.compile cannot trace a warning.  5: the line that it names for PyTorch's own modules.
            warnings.warn(LEGACY_DIM.format(operation), stacklevel=5)
        dim = 0 if input.dim() in (0, 1, 3) else 1
    return getattr(api, operation)(input, dim, *keepdim, **options)


LEGACY_DIM = "Implicit dimension choice for {} has been deprecated. Change the call to include dim=X as an argument."
"""PyTorch's own words, so that a filter for them goes on working."""


class Softmax(_OverDim, torch.nn.Softmax):
    """`torch.nn.Softmax`, by `onlinesoftmax.softmax`.  It has no state: `state_dict()` is empty, as PyTorch's.

    Args:
        dim: Dimension to normalise.  None is PyTorch's deprecated choice: 0 for 0, 1 or 3 dimensions, else 1; it warns.
        scale: Factor of the input: a number.
        causal: Query i, counted along the dimension before `dim`, keeps keys up to i + keys - queries.
        softcap: Soft bound on the magnitude of scale * input: a positive number.
        fully_masked: "nan", as PyTorch, or "zero": a row with no score above -inf is zeros.
        batch_invariant: Give a row the same bits however many rows are beside it, for some speed.

    Shape:
        input of any shape; `mask` (boolean, True keeps) and `bias` broadcast to it; the output has its shape.

    Raises:
        TypeError, ValueError: an option is of the wrong type, or makes no sense: when the module is made.
            A call raises what `onlinesoftmax.softmax` raises.

    Example:
        >>> Softmax(dim=-1, causal=True)(torch.zeros(2, 3))
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
        >>> Softmax(dim=-1, causal=True)
        Softmax(dim=-1, causal=True)
    """

    operation = "softmax"


class LogSoftmax(_OverDim, torch.nn.LogSoftmax):
    """`torch.nn.LogSoftmax`, by `onlinesoftmax.log_softmax`.  Arguments, shapes and errors as for `Softmax`.

    Example:
        >>> LogSoftmax(dim=0)(torch.zeros(3))
        tensor([-1.0986, -1.0986, -1.0986])
    """

    operation = "log_softmax"


class LogSumExp(_WithOptions):
    """`onlinesoftmax.logsumexp` as a module, which PyTorch does not have.

    Args:
        dim: Dimension to reduce, or several.
        keepdim: Keep the reduced dimensions with size 1.
        scale, causal, softcap, fully_masked, batch_invariant: As for `Softmax`, and so are the errors.

    Shape:
        input of any shape; `mask` and `bias` broadcast to it; the output lacks the reduced dimensions.

    Example:
        >>> LogSumExp(dim=(0, 1))(torch.zeros(2, 4))
        tensor(2.0794)
        >>> LogSumExp(1, keepdim=True)
        LogSumExp(dim=1, keepdim=True)
    """

    @hinting
    def __init__(
        self, dim: int | tuple[int, ...], keepdim: bool = False, *, scale: float = 1.0, causal: bool = False,
        softcap: float | None = None, fully_masked: FullyMasked = "nan", batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.keepdim = dim, keepdim
        self._set(scale, causal, softcap, fully_masked, batch_invariant)

    def forward(
        self, input: torch.Tensor, *, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logsumexp of `input`."""
        return self._call("logsumexp", input, self.dim, mask, bias, self.keepdim)

    def extra_repr(self) -> str:
        """The arguments that are not at their defaults."""
        options = super().extra_repr()
        return f"dim={self.dim}{', keepdim=True' if self.keepdim else ''}{options}"


class Softmax2d(torch.nn.Softmax2d):
    """`torch.nn.Softmax2d`, by `onlinesoftmax.softmax`: over the channels, at every place of an image.

    Shape:
        input (N, C, H, W) or (C, H, W); the output has its shape.

    Raises:
        ValueError: the input has another number of dimensions.

    Example:
        >>> Softmax2d()(torch.zeros(1, 4, 1, 2))[0, :, 0, 0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Softmax of `input` over dimension -3."""
        return _over_channels(input)


@torch.fx.wrap
def _over_channels(input: torch.Tensor) -> Any:
    if input.dim() not in (3, 4):
        raise ValueError(f"Softmax2d: expected input to be 3D or 4D, got {input.dim()}D instead")
    return api.softmax(input, -3)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss`, by `onlinesoftmax.cross_entropy`.  Its state is PyTorch's: the weight, if given.

    Args:
        weight: A factor for each class, of shape (C).
        ignore_index: Target of the rows that count for nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: Part of the target that is spread over all classes, from 0 to 1.
        z_loss: Factor of logsumexp(input)**2, which is added to the loss of each row.  Its mean is not weighted.
        scale: Factor of the input: a number.
        softcap: Soft bound on the magnitude of scale * input: a positive number.
        dtype: Dtype of the loss, for example float32 for that of 16-bit logits.
        inplace_backward: Allow the gradient to overwrite the input.
        batch_invariant: Give a row the same bits however many rows are beside it, for some speed.
        check: Raise an error for a target that is out of range.  The call then waits for the GPU.

    Shape:
        input (C), (N, C) or (N, C, d1, ...); target without C, or with class probabilities the shape of the input;
        `mask` (boolean, True keeps a class) broadcasts to the input.

    Raises:
        TypeError, ValueError, RuntimeError: an option is of the wrong type, or makes no sense: when the module is made.
            A call raises what `onlinesoftmax.cross_entropy` raises.

    Example:
        >>> CrossEntropyLoss(reduction="sum")(torch.zeros(2, 2), torch.tensor([0, 1]))
        tensor(1.3863)
        >>> CrossEntropyLoss(z_loss=1e-4)
        CrossEntropyLoss(z_loss=0.0001)
    """

    # The defaults belong to the class: a module that `replace` made has none of its own.
    z_loss: float = 0.0
    scale: float = 1.0
    softcap: float | None = None
    dtype: torch.dtype | None = None
    inplace_backward: bool = False
    batch_invariant: bool = False
    check: bool = False

    @hinting
    def __init__(
        self, weight: torch.Tensor | None = None, ignore_index: int = -100, reduction: Reduction = "mean",
        label_smoothing: float = 0.0, *, z_loss: float = 0.0, scale: float = 1.0, softcap: float | None = None,
        dtype: torch.dtype | None = None, inplace_backward: bool = False, batch_invariant: bool = False,
        check: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        if isinstance(scale, torch.Tensor):
            raise TypeError("CrossEntropyLoss(): scale must be a number")
        checked_options("CrossEntropyLoss", scale, softcap, None, None, False, "nan")
        checked_numbers(TORCH, reduction, (ignore_index, label_smoothing, z_loss), "CrossEntropyLoss")
        self.z_loss, self.scale, self.softcap, self.dtype = z_loss, scale, softcap, dtype
        self.inplace_backward, self.batch_invariant, self.check = inplace_backward, batch_invariant, check

    def forward(self, input: torch.Tensor, target: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The loss of `input`."""
        return _cross_entropy(
            input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing, z_loss=self.z_loss,
            scale=self.scale, softcap=self.softcap, mask=mask, dtype=self.dtype,
            inplace_backward=self.inplace_backward, batch_invariant=self.batch_invariant, check=self.check,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The options of ours that are not at their defaults."""
        names = ("z_loss", "scale", "softcap", "dtype", "inplace_backward", "batch_invariant", "check")
        return ", ".join(_changed(self, names))


@torch.fx.wrap
def _cross_entropy(*args: Any, **options: Any) -> Any:
    return api.cross_entropy(*args, **options)


Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class Replaced(Generic[Model]):
    """The result of `replace`.

    Attributes:
        model: The model itself, changed in place.
        softmax: Number of modules of softmax that were replaced; a shared module counts once, here and below.
        log_softmax: Number of modules of log-softmax.
        softmax2d: Number of modules of softmax over channels.
        cross_entropy: Number of modules of cross-entropy.
    """

    model: Model = field(repr=False)
    softmax: int = 0
    log_softmax: int = 0
    softmax2d: int = 0
    cross_entropy: int = 0

    def __int__(self) -> int:
        """Number of replaced modules."""
        return self.softmax + self.log_softmax + self.softmax2d + self.cross_entropy


_OURS: dict[type[torch.nn.Module], tuple[str, type[torch.nn.Module]]] = {
    torch.nn.Softmax: ("softmax", Softmax),
    torch.nn.LogSoftmax: ("log_softmax", LogSoftmax),
    torch.nn.Softmax2d: ("softmax2d", Softmax2d),
    torch.nn.CrossEntropyLoss: ("cross_entropy", CrossEntropyLoss),
}


_TAKEN = tuple(ours for _, ours in _OURS.values())


def replace(model: Model) -> Replaced[Model]:
    """Make every `torch.nn.Softmax`, `LogSoftmax`, `Softmax2d` and `CrossEntropyLoss` in a model ours, in place.

    A module is given our class and remains the object that it was.  So its `dim`, hooks and their handles, its
    training flag and its names stay; where it is shared it stays shared; and `model` may be such a module itself.
    Subclasses are left alone, as they may do something else.  Functions that the model calls, such as `torch.softmax`,
    are left alone too: `onlinesoftmax.override` replaces them.

    `torch.compile`, `torch.export` and `torch.jit.trace` take our modules; `torch.jit.script` does not.

    Args:
        model: Any module.

    Returns:
        Number of replaced modules of each kind, and the model.

    Raises:
        TypeError: model is not a module.

    Warns:
        UserWarning: the model has no such module, neither PyTorch's nor ours, so nothing has changed.

    Example:
        >>> done = replace(torch.nn.Sequential(torch.nn.LogSoftmax(1), torch.nn.ReLU()))
        >>> done
        Replaced(softmax=0, log_softmax=1, softmax2d=0, cross_entropy=0)
        >>> type(done.model[0])
        <class 'onlinesoftmax.nn.LogSoftmax'>
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"replace(): model must be a torch.nn.Module, not {type(model).__name__}")
    found = [module for module in model.modules() if type(module) in _OURS]
    counts = {name: 0 for name, _ in _OURS.values()}
    for module in found:
        name, ours = _OURS[type(module)]
        module.__class__ = ours
        counts[name] += 1
    if not found and not any(isinstance(module, _TAKEN) for module in model.modules()):
        kinds = ", ".join(kind.__name__ for kind in _OURS)
        warnings.warn(
            f"replace(): {type(model).__name__} has no module of {kinds}, so nothing has changed. "
            "Where a model calls functions such as torch.softmax, use onlinesoftmax.override().",
            stacklevel=2,
        )
    return Replaced(model, **counts)
