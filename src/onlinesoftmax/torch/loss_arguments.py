"""The arguments of one cross-entropy on torch tensors besides the tensors, and the divisor of its mean."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.call import Settings
from ..core.options import ScoreOptions
from ..ops.cross_entropy.formulas import divisor
from .formulas import accumulator_of


class Loss(NamedTuple):
    """The arguments of a cross-entropy besides its tensors.

    Attributes:
        settings: The dimension of the classes, the dtype of the result (None for the usual one), and what the caller
            forces of the plan.
        ignore_index: Target of the rows that count for nothing.
        reduction: "mean", "sum" or "none".
        smoothing: Part of the target that is spread over all classes.
        z_loss: Factor of lse², which is added to the loss of each row.
        options: Scale, softcap and mask; None where all are at their default.
        inplace: True where the gradient may overwrite the logits.
    """

    settings: Settings
    ignore_index: int = -100
    reduction: str = "mean"
    smoothing: float = 0.0
    z_loss: float = 0.0
    options: ScoreOptions | None = None
    inplace: bool = False

    # No property, which torch.compile of PyTorch 2.10 cannot trace.
    def mask(self) -> torch.Tensor | None:
        """True for the classes that are kept; None where all are."""
        return None if self.options is None else self.options.mask

    def with_settings(self, **values: Any) -> Loss:
        """The loss with other settings."""
        return self._replace(settings=self.settings._replace(**values))

    def per_row(self, **settings: Any) -> Loss:
        """The loss of each row, not reduced, with other settings."""
        return self._replace(reduction="none", settings=self.settings._replace(**settings))

    def wide(self, x: torch.Tensor) -> torch.dtype:
        """The dtype in which the losses of logits are computed."""
        return accumulator_of(x.dtype, self.settings.dtype or x.dtype)


MOST_EXACT_INDEX = 1 << 53
"""Largest magnitude of an `ignore_index` for kernels: it travels to a kernel as a float64, which rounds larger ones."""


def is_class(target: torch.Tensor, classes: int) -> torch.Tensor:
    """True for the targets that are one of so many classes."""
    # In a narrow dtype, PyTorch would take the number of classes modulo its range.
    wide = target.long()
    return (wide >= 0) & (wide < classes)


UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Unsigned target dtypes: PyTorch lacks most operations for them, and this library has no kernels for them."""


def signed(target: torch.Tensor) -> torch.Tensor:
    """The targets in int64 if their dtype is one of UNSIGNED, and as they are otherwise."""
    if target.dtype not in UNSIGNED:
        return target
    wide = target.long()
    # The largest numbers of uint64 become negative: they are no class, and must not be an ignore_index.
    return wide.where(wide >= 0, torch.iinfo(torch.int64).max)


def counted(target: torch.Tensor, loss: Loss) -> torch.Tensor:
    """True for the rows that count."""
    can = _can_be(target, loss.ignore_index)
    return target != loss.ignore_index if can else torch.ones_like(target, dtype=torch.bool)


def ignored(target: torch.Tensor, loss: Loss) -> torch.Tensor:
    """True for the rows that do not count."""
    return equals(target, loss.ignore_index)


def equals(target: torch.Tensor, number: int) -> torch.Tensor:
    """True where a target is this number."""
    return target == number if _can_be(target, number) else torch.zeros_like(target, dtype=torch.bool)


def _can_be(target: torch.Tensor, number: int) -> bool:
    """True if a target can be this number; PyTorch would compare modulo the range of the dtype."""
    limits = torch.iinfo(target.dtype)
    return limits.min <= number <= limits.max


def with_constants(loss: Loss) -> Loss:
    """The arguments with plain numbers: torch.compile may trace a call with symbols in their places.

    The operators take these numbers as bits, and a symbol has none.  So a program is compiled for each number.
    """
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    ignore_index: Any = guard_scalar(loss.ignore_index)
    return loss._replace(
        ignore_index=ignore_index, smoothing=guard_scalar(loss.smoothing), z_loss=guard_scalar(loss.z_loss)
    )


def count_of(target: torch.Tensor, weight: torch.Tensor | None, loss: Loss, dtype: torch.dtype) -> torch.Tensor:
    """Divisor of a mean, on the device: the number of rows that count, or the sum of their weights."""
    counts = counted(target, loss)
    if weight is None:
        return divisor(torch, counts).to(dtype)
    if not weight.numel():
        # There is no class, and `index_select` takes nothing from an empty tensor.
        return weight.to(dtype).sum()
    # A target out of range makes its row NaN, and must not make this sum an error.
    inside = counts & is_class(target, weight.numel())
    # An index without dimensions would be read by the host, which vmap and traces do not allow.
    of_row = weight.to(dtype).index_select(0, target.where(inside, 0).long().flatten())
    return divisor(torch, inside.flatten(), of_row)


def scales_weight(target: torch.Tensor, weight: torch.Tensor | None, loss: Loss) -> bool:
    """True for a weighted mean with z_loss, which takes `scaled_weight` instead of its weights."""
    return weight is not None and loss.z_loss != 0 and loss.reduction == "mean" and not target.is_floating_point()


def scaled_weight(target: torch.Tensor, weight: torch.Tensor, loss: Loss, dtype: torch.dtype) -> torch.Tensor:
    """Class weights in this dtype, scaled so that the divisor of a mean is the number of rows that count.

    The mean of the weighted losses stays the same, and z_loss * lse**2 is averaged over the rows that count.
    """
    return scaled(weight, count_of(target, None, loss, dtype), count_of(target, weight, loss, dtype))


def scaled(weight: torch.Tensor, row_count: torch.Tensor, weight_sum: torch.Tensor) -> torch.Tensor:
    """Class weights multiplied by row_count / weight_sum, so that a weighted mean divides by the row count.

    Args:
        weight: Weight of each class.
        row_count: Number of rows that count.
        weight_sum: Sum of the weights of the targets of these rows.
    """
    # If no row counts, the factor would be 0 / 0, and make gradients NaN that are 0.
    return weight.to(row_count.dtype) * (row_count / weight_sum).where(row_count > 0, 1.0)
