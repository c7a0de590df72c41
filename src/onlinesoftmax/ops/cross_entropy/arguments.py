"""The rules for the arguments of cross_entropy, with PyTorch's error types."""

from __future__ import annotations

from typing import Any

from ...core.arguments import Library, check_index, check_int64, check_logits, checked_number
from ...core.arrays import Array
from ...core.options import LARGEST_FLOAT32, check_number

NAME = "cross_entropy"


def class_dim(x: Array) -> int:
    """The dimension of the classes, as PyTorch has it: the second, or the only one."""
    return 1 if x.ndim > 1 else 0


def checked_numbers(
    library: Library, reduction: Any, numbers: tuple[Any, Any, Any], name: str = NAME
) -> tuple[int, float, float]:
    """(ignore_index, label_smoothing, z_loss) as Python's numbers; the same tuple where they are.

    `name` is that of the public function, for errors.

    Raises:
        TypeError: one of them is no number.
        ValueError: reduction or ignore_index is wrong.
        RuntimeError: label_smoothing is out of range.
        ValueError: z_loss is out of range.
    """
    index, smoothing, z_loss = numbers
    # An array takes no int beyond int64.
    plain = type(z_loss) is float or (type(z_loss) is int and abs(z_loss) < 2**63)
    if not (plain and type(index) is int and type(smoothing) in (float, int)):
        numbers = (
            checked_ignore_index(library, name, index),
            checked_number(library, name, "label_smoothing", smoothing, float),
            checked_number(library, name, "z_loss", z_loss, float),
        )
    check_int64(f"{name}()", "ignore_index", numbers[0])
    if not isinstance(reduction, str) or reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction: 'none', 'mean' or 'sum'")
    check_factors(f"{name}()", *numbers[1:], RuntimeError)
    return numbers


def checked_ignore_index(library: Library, name: str, index: Any) -> int:
    """ignore_index as an int of Python that int64 holds; `name` is that of the public function, for errors."""
    number: int = checked_number(library, name, "ignore_index", index, int)
    check_int64(f"{name}()", "ignore_index", number)
    return number


def check_factors(caller: str, smoothing: Any, z_loss: Any, of_smoothing: type[Exception] = ValueError) -> None:
    """Check label_smoothing and z_loss, which are numbers; the error for a wrong smoothing has the type that is given.

    Args:
        caller: Name of the function, for errors.
        smoothing, z_loss: The arguments.
        of_smoothing: Type of the error for a smoothing that is out of range, PyTorch's being its own.
    """
    check_number(caller, "label_smoothing", smoothing, 0.0, 1.0, of_smoothing)
    check_number(caller, "z_loss", z_loss, 0.0, LARGEST_FLOAT32)


def check_arrays(library: Library, x: Any, target: Any, weight: Any) -> None:
    """Check the logits, the targets, which are classes or probabilities of each class, and the weights."""
    caller = f"{NAME}()"
    check_logits(library, caller, "input", x, "target", target)
    if x.ndim == 0:
        raise ValueError(f"{caller}: input needs a dimension of classes, got shape ()")
    dim = class_dim(x)
    rows = (*x.shape[:dim], *x.shape[dim + 1 :])
    if library.kind_of(target) != "floating":
        check_index(library, caller, "target", x, target, rows)
    elif target.shape != x.shape:
        hint = library.shape_hint("target", x, target, rows)
        raise RuntimeError(
            f"{caller}: target with class probabilities has shape {tuple(target.shape)}, and input {tuple(x.shape)}"
            f"{hint}"
        )
    else:
        library.check_place(caller, "target", target, x)
    check_weight(library, caller, weight, x, x.shape[dim])


def check_weight(library: Library, caller: str, weight: Any, x: Array, classes: int) -> None:
    """Check type, shape and place of the weights of so many classes, if there are any."""
    if weight is None:
        return
    library.check_array(caller, "weight", weight)
    if library.kind_of(weight) == "other":
        raise TypeError(f"{caller}: weight must hold real numbers, got {weight.dtype}")
    if tuple(weight.shape) != (classes,):
        raise RuntimeError(
            f"{caller}: weight must have shape ({classes},), one value per class, got {tuple(weight.shape)}"
        )
    library.check_place(caller, "weight", weight, x)
