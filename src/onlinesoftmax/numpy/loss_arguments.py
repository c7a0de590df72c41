"""The checks of the arguments of cross_entropy and token_logprobs on NumPy arrays.

The errors have the types of calls on torch tensors (torch/loss_arguments.py), and name the argument.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array, is_floating_dtype
from ..core.call import Call
from ..core.options import ScoreOptions
from ..ops import OPERATIONS
from .check import check_array, check_choice, check_options, checked_dims, checked_dtype

CROSS_ENTROPY, TOKEN_LOGPROBS = "cross_entropy", "token_logprobs"
"""Names of the operations."""


class Loss(NamedTuple):
    """A checked call of cross_entropy.

    Attributes:
        x, target, weight: The arrays; the weights are float64, or None.
        counts: True for the rows that count.
        reduction, smoothing, z_loss, options: As the arguments of the call.
    """

    x: Array
    target: Array
    weight: Array | None
    counts: Array
    reduction: str
    smoothing: float
    z_loss: float
    options: ScoreOptions | None

    @property
    def axis(self) -> int:
        """The dimension of the classes."""
        return class_axis(self.x)

    @property
    def of_classes(self) -> bool:
        """True where a target is the probability of each class."""
        return is_floating_dtype(self.target.dtype)


def check_targets(x: Any, target: Any, weight: Any, fields: tuple[Any, ...]) -> None:
    """Check the arguments and the range of every target that counts, as every call on NumPy arrays does."""
    checked_loss(x, target, weight, fields)


def check_tokens(x: Any, index: Any, dim: Any, ignore_index: Any = None) -> None:
    """Check the arguments, and the range of every index that counts.

    Raises:
        IndexError: an index is out of range; the message has its position and its value.
    """
    tokens = checked_tokens(x, index, dim, ignore_index)
    _check_range("token_logprobs(): index", np.asarray(index), x.shape[tokens.axis], ~tokens.ignored)


def class_axis(x: Array) -> int:
    """The dimension of the classes, as PyTorch has it: the second, or the only one."""
    return 1 if x.ndim > 1 else 0


def checked_loss(x: Any, target: Any, weight: Any, fields: tuple[Any, ...]) -> Loss:
    name = CROSS_ENTROPY
    settings, ignore_index, reduction, smoothing, z_loss, options, inplace = fields
    for argument, t in (("input", x), ("target", target)):
        check_array(name, argument, t)
    if not is_floating_dtype(x.dtype):
        raise NotImplementedError(f"{name}(): input must be floating point, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{name}(): input needs a dimension of classes, got shape ()")
    if inplace:
        raise TypeError(f"{name}(): inplace_backward: a NumPy array has no gradient; pass a torch tensor")
    ignore_index, smoothing, z_loss = (
        _number(name, argument, value, kind)
        for argument, value, kind in (
            ("ignore_index", ignore_index, int), ("label_smoothing", smoothing, float), ("z_loss", z_loss, float)
        )
    )  # fmt: skip
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction: 'none', 'mean' or 'sum'")
    if not 0.0 <= smoothing <= 1.0:
        raise RuntimeError(f"{name}(): label_smoothing must be between 0.0 and 1.0, got {smoothing}")
    x, target, dim = np.asarray(x), np.asarray(target), class_axis(x)
    classes, rows = x.shape[dim], (*x.shape[:dim], *x.shape[dim + 1 :])
    counts = np.ones(rows, bool)
    if not is_floating_dtype(target.dtype):
        hint = "; the classes are dimension 1, as in PyTorch: pass numpy.moveaxis(input, -1, 1)"
        _check_index(name, "target", target, rows, hint if x.ndim > 2 and target.shape == x.shape[:-1] else "")
        counts = np.asarray(target != ignore_index)
        _check_range(f"{name}(): target", target, classes, counts)
    elif target.shape != x.shape:
        raise RuntimeError(f"{name}(): target with class probabilities has shape {target.shape}, and input {x.shape}")
    check_choice(name, settings.choice)
    check_options(Call(OPERATIONS[name], x, settings._replace(dim=dim), options))
    return Loss(x, target, _checked_weight(name, weight, classes), counts, reduction, smoothing, z_loss, options)


def _number(function: str, argument: str, value: Any, kind: type[Any]) -> Any:
    """Convert an argument to Python's type `kind`: `int` needs a value with __index__, `float` one with __float__."""
    if not hasattr(value, "__index__" if kind is int else "__float__") or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{function}(): argument '{argument}' must be {kind.__name__}, not {type(value).__name__}")
    return operator.index(value) if kind is int else float(value)


def _checked_weight(name: str, weight: Any, classes: int) -> Array | None:
    """The weights of the classes in float64, if there are any."""
    if weight is None:
        return None
    check_array(name, "weight", weight)
    if weight.dtype.kind == "c":
        raise TypeError(f"{name}(): weight must hold real numbers, got {weight.dtype}")
    if weight.shape != (classes,):
        raise RuntimeError(f"{name}(): weight must have shape ({classes},), one value per class, got {weight.shape}")
    return weight.astype(np.float64)


def dtype_of_loss(dtype: Any, x: Array) -> np.dtype[Any]:
    """The dtype of the loss: that of the logits where the call names none."""
    found = checked_dtype(CROSS_ENTROPY, dtype, x)
    if not is_floating_dtype(found):
        raise RuntimeError(f"{CROSS_ENTROPY}(): dtype must be floating point, got {found}")
    return found


class Tokens(NamedTuple):
    """The tokens of a checked call of token_logprobs.

    Attributes:
        axis: The dimension of the tokens, counted from 0.
        columns: The column of each token, -1 where it is out of range, along that dimension.
        ignored: True where the index is `ignore_index`; it has the shape of the index.
    """

    axis: int
    columns: Array
    ignored: Array


def checked_tokens(x: Any, index: Any, dim: Any, ignore_index: Any) -> Tokens:
    """The tokens of a call, after the checks of its arguments."""
    name = TOKEN_LOGPROBS
    for argument, t in (("logits", x), ("index", index)):
        check_array(name, argument, t)
    if not is_floating_dtype(x.dtype):
        raise NotImplementedError(f"{name}(): logits must be floating point, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{name}(): logits need a dimension of tokens, got shape ()")
    if isinstance(dim, tuple | list):
        raise TypeError(f"{name}(): argument 'dim' (position 2) must be int, not {type(dim).__name__}")
    (axis,) = checked_dims(name, dim, x.ndim)
    # Several tokens of each row lie along the dimension of the logits' tokens.
    several = index.shape[axis : axis + 1] if index.ndim == x.ndim else ()
    _check_index(name, "index", index, (*x.shape[:axis], *several, *x.shape[axis + 1 :]))
    index = np.asarray(index)
    ignored = np.zeros(index.shape, bool)
    if ignore_index is not None:
        ignored = np.asarray(index == _number(name, "ignore_index", ignore_index, int))
    # A large unsigned number is not in range either, so its int64 is not used.
    columns = np.where((index >= 0) & (index < x.shape[axis]), index.astype(np.int64), -1)
    return Tokens(axis, columns if index.ndim == x.ndim else np.expand_dims(columns, axis), ignored)


def _check_index(name: str, argument: str, index: Array, rows: tuple[int, ...], hint: str = "") -> None:
    if index.dtype.kind not in "iu":
        raise RuntimeError(f"{name}(): {argument} must have an integer dtype, got {index.dtype}")
    if index.shape != rows:
        raise ValueError(f"{name}(): {argument} has shape {index.shape}, and the rows of input {rows}{hint}")


def _check_range(name: str, index: Array, classes: int, counts: Array) -> None:
    wrong = ((index < 0) | (index >= classes)) & counts
    if not wrong.any():
        return
    position = tuple(np.argwhere(wrong)[0].tolist())
    where = f" at position {position[0] if len(position) == 1 else position}" if position else ""
    count = int(wrong.sum())
    more = f"; {count} of {index.size} are out of range" if count > 1 else ""
    raise IndexError(f"{name} is {index[position]}{where}, which is not in [0, {classes}){more}")
