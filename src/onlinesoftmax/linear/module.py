"""The head and its loss as a module; nn.py shows it to users."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.loss import _WeightedLoss

from ..core.annotations import Reduction
from ..core.options import checked_options
from ..core.wrong_calls import hinting
from ..ops.cross_entropy.arguments import checked_numbers
from ..torch.arguments import TORCH
from . import linear_cross_entropy


class LinearCrossEntropyLoss(_WeightedLoss):
    """`torch.nn.LinearCrossEntropyLoss` of PyTorch 2.13, by `onlinesoftmax.linear_cross_entropy`; on any PyTorch.

    The head is the module `linear`, so the state is PyTorch's: `linear.weight`, and `linear.bias` and `weight` if there
    are any.  A head that shares the weight of an embedding: `loss.linear.weight = embedding.weight`.

    Args:
        in_features: Size of a hidden state.
        num_classes: Number of classes.
        bias: Give the head a bias.
        device, dtype: Of the head.
        reduction, weight, ignore_index, label_smoothing, z_loss, softcap, memory, acc_dtype: As for
            `linear_cross_entropy`.
        scale: Factor of the logits: a number.

    Shape:
        input (..., in_features); target (...), or class probabilities (..., num_classes); `token_weight` (...).  The
        loss is a scalar, or with the reduction "none" of the shape (...).

    Raises:
        TypeError, ValueError: an option is of the wrong type, or makes no sense: when the module is made.
        RuntimeError: weight has another shape than (num_classes,), or label_smoothing is out of range: when the module
            is made.
            A call raises what `onlinesoftmax.linear_cross_entropy` raises.

    Example:
        >>> head = LinearCrossEntropyLoss(2, 3, z_loss=1e-4)
        >>> _ = torch.nn.init.eye_(head.linear.weight)
        >>> head(torch.eye(2), torch.tensor([0, 1])).detach()
        tensor(0.5517)
        >>> head
        LinearCrossEntropyLoss(
          in_features=2, num_classes=3, bias=False, reduction='mean', z_loss=0.0001
          (linear): Linear(in_features=2, out_features=3, bias=False)
        )
    """

    # The defaults of the options that extra_repr leaves out.
    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    scale: float = 1.0
    softcap: float | None = None
    memory: int | None = None
    acc_dtype: torch.dtype | None = None

    @hinting
    def __init__(
        self, in_features: int, num_classes: int, *, bias: bool = False, device: Any = None,
        dtype: torch.dtype | None = None, reduction: Reduction = "mean", weight: torch.Tensor | None = None,
        ignore_index: int | None = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, scale: float = 1.0,
        softcap: float | None = None, memory: int | None = None, acc_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if weight is not None:
            TORCH.check_array("LinearCrossEntropyLoss()", "weight", weight)
            if weight.shape != (num_classes,):
                raise RuntimeError(
                    f"LinearCrossEntropyLoss(): weight must have shape ({num_classes},), got {tuple(weight.shape)}"
                )
        if isinstance(scale, torch.Tensor):
            raise TypeError("LinearCrossEntropyLoss(): scale must be a number; pass a tensor to linear_cross_entropy")
        checked_options("LinearCrossEntropyLoss", scale, softcap, None, None, False, "nan")
        index = -100 if ignore_index is None else ignore_index
        checked_numbers(TORCH, reduction, (index, label_smoothing, z_loss), "LinearCrossEntropyLoss")
        super().__init__(weight, reduction=reduction)
        self.num_classes, self.ignore_index, self.label_smoothing = num_classes, ignore_index, label_smoothing
        self.z_loss, self.scale, self.softcap = z_loss, scale, softcap
        self.memory, self.acc_dtype = memory, acc_dtype
        self.linear = torch.nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)

    def forward(
        self, input: torch.Tensor, target: torch.Tensor, *, token_weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss of hidden states."""
        loss: torch.Tensor = _linear_cross_entropy(
            input, self.linear.weight, target, linear_bias=self.linear.bias, weight=self.weight,
            reduction=self.reduction, token_weight=token_weight, **{name: getattr(self, name) for name in OPTIONS},
        )  # fmt: skip
        return loss

    def extra_repr(self) -> str:
        """PyTorch's, with the options that are not at their defaults."""
        changed = [name for name in OPTIONS if getattr(self, name) != getattr(type(self), name)]
        head = f"in_features={self.linear.in_features}, num_classes={self.num_classes}"
        fixed = f"{head}, bias={self.linear.bias is not None}, reduction={self.reduction!r}"
        return ", ".join([fixed, *[f"{name}={getattr(self, name)!r}" for name in changed]])


OPTIONS = ("ignore_index", "label_smoothing", "z_loss", "scale", "softcap", "memory", "acc_dtype")
"""Names of the options of a module."""


# torch.fx follows calls into modules that are not PyTorch's own, and stops here.
@torch.fx.wrap
def _linear_cross_entropy(*args: Any, **options: Any) -> Any:
    return linear_cross_entropy(*args, **options)
