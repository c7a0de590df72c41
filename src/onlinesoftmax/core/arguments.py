"""The checks of a call's arguments that every array library shares; errors have PyTorch's types and name the argument.

A library describes its arrays in a `Library`, the first argument of these functions.  The rules of one operation
stand in its room (ops/cross_entropy/arguments.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np

from .arrays import Array, array_kind, broadcasts
from .call import Call
from .options import SCORE_OPTIONS, as_float, check_one_per_row, query_axis

Kind = Literal["floating", "integer", "boolean", "other"]
"""Kind of the numbers of a dtype; "other" for complex numbers and quantized integers."""


class Library(NamedTuple):
    """Functions by which the checks read the arrays of one library.

    Attributes:
        check_array: check_array(caller, argument, value, x=None) raises an error for a value that is no array of this
            library.  With x, the value is an operand beside the input x, and must be where x is.
        check_place: check_place(caller, argument, array, x) raises an error for an array that is not where x is.
        kind_of: Kind of the numbers of an array.
        is_number: is_number(argument, value, kind): False for an array that is not to be taken for one number.
        shape_hint: shape_hint(argument, x, target, rows): end of the message for a target of a wrong shape.
    """

    check_array: Callable[..., None]
    check_place: Callable[[str, str, Array, Array], None]
    kind_of: Callable[[Array], Kind]
    is_number: Callable[[str, Any, type[Any]], bool]
    shape_hint: Callable[[str, Array, Array, tuple[int, ...]], str]


def checked_dim(operation: str, dim: Any, ndim: int) -> int:
    """`dim` as a number from 0 to ndim - 1; an array without dimensions counts as one dimension.

    Raises:
        TypeError: dim is not an int.
        IndexError: dim is out of range.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        dim = _converted_dim(operation, dim)
    ndim = max(ndim, 1)
    if not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % ndim


def _converted_dim(operation: str, dim: Any) -> int:
    """Convert an integer of another type, such as numpy.int64, to int; a TypeError for anything else.

    A torch tensor is refused: to read one on a GPU, the host would have to wait.
    """
    if not isinstance(dim, (bool, np.bool_)) and array_kind(dim) != "torch":
        with suppress(TypeError):
            return operator.index(dim)
    raise TypeError(f"{operation}(): argument 'dim' (position 2) must be int, not {type(dim).__name__}")


def checked_dims(operation: str, dim: Any, ndim: int) -> tuple[int, ...]:
    """The softmax dimensions, counted from 0; an empty tuple means all dimensions.

    Raises:
        TypeError: a dimension is no integer.
        IndexError: a dimension is out of range.
        RuntimeError: a dimension appears twice.
    """
    dims = tuple(checked_dim(operation, d, ndim) for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))
    for d in dims:
        if dims.count(d) > 1:
            raise RuntimeError(f"{operation}(): dim {d} appears twice in {tuple(dim)}")
    return dims or tuple(range(max(ndim, 1)))


def check_options(library: Library, call: Call, function: str = "") -> None:
    """Check the score options of a call against its input; `function` has a name other than that of the operation."""
    operation, x, dim, options = function or call.operation.name, call.x, call.settings.dim, call.options
    if options is None:
        return
    caller = f"{operation}()"
    for name, option in SCORE_OPTIONS.items():
        t = getattr(options, name)
        # NumPy's float64 is a float too, and no mask.
        if not option.tensor or t is None or (option.kind == "row" and isinstance(t, float)):
            continue
        library.check_array(caller, name, t, x)
        if library.kind_of(t) != option.dtype:
            wanted = "boolean (True keeps)" if option.dtype == "boolean" else "floating point"
            raise RuntimeError(f"{caller}: {name} must be {wanted}, got {t.dtype}")
        if not broadcasts(t.shape, x.shape):
            raise RuntimeError(
                f"{caller}: {name} of shape {tuple(t.shape)} does not broadcast to input's {tuple(x.shape)}"
            )
        if option.kind == "row" and t.ndim:
            check_one_per_row(caller, name, t.shape, x.shape, checked_dims(operation, dim, x.ndim))
    if options.causal:
        if isinstance(dim, (tuple, list)):
            raise ValueError(f"{caller}: causal needs one dim, got {dim}")
        query_axis(operation, checked_dim(operation, dim, x.ndim), max(x.ndim, 1))


def checked_number(library: Library, function: str, argument: str, value: Any, kind: type[Any]) -> Any:
    """Convert an argument to Python's type `kind`: `int` needs a value with __index__, `float` one with __float__.

    Raises:
        TypeError: the value is not a number of this kind.
    """
    if type(value) is kind:  # a symbol of a trace too, of which no methods can be asked
        return value
    flag = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    if not flag and hasattr(value, "__index__" if kind is int else "__float__"):
        # An array of several elements, or of letters, has both methods; int() would cut off the fraction of a number.
        with suppress(TypeError, ValueError):
            if library.is_number(argument, value, kind):
                return operator.index(value) if kind is int else as_float(value)
    raise TypeError(f"{function}(): argument '{argument}' must be {kind.__name__}, not {type(value).__name__}")


def check_int64(caller: str, argument: str, number: int) -> None:
    """Raise an error for an integer that int64 does not hold."""
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{caller}: {argument} must fit int64, got {number}")


def checked_memory(caller: str, memory: Any) -> int | None:
    """The bytes that buffers may take; None for the usual ones."""
    found = memory if type(memory) is int else None
    if memory is not found and not isinstance(memory, (bool, np.bool_)):
        with suppress(TypeError):
            found = operator.index(memory)
    if memory is not None and found is None:
        raise TypeError(f"{caller}: memory must be an int, a number of bytes, not {type(memory).__name__}")
    if found is not None and found <= 0:
        raise ValueError(f"{caller}: memory must be a positive number of bytes, got {memory}")
    return found


def check_flags(caller: str, **flags: Any) -> None:
    """Raise an error for a flag that is no bool."""
    for argument, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{caller}: {argument} must be a bool, not {type(value).__name__}")


def check_logits(library: Library, caller: str, argument: str, x: Any, other: str, target: Any) -> None:
    """Check the types of logits and of the targets of their rows, and the dtype of the logits."""
    library.check_array(caller, argument, x)
    library.check_array(caller, other, target)
    if library.kind_of(x) != "floating":
        swapped = f"; are {argument} and {other} swapped?" if library.kind_of(target) == "floating" else ""
        raise not_floating(caller, argument, x, swapped)


def not_floating(caller: str, argument: str, x: Any, hint: str = "") -> NotImplementedError:
    """The error for logits of another dtype, which is PyTorch's and a RuntimeError too; `hint` is the end of it."""
    return NotImplementedError(f"{caller}: {argument} must be floating point of 16 to 64 bits, got {x.dtype}{hint}")


def check_index(library: Library, caller: str, argument: str, x: Array, index: Array, rows: tuple[int, ...]) -> None:
    """Check dtype, shape and place of the targets of rows of this shape."""
    if library.kind_of(index) != "integer":
        raise RuntimeError(f"{caller}: {argument} must have an integer dtype, got {index.dtype}")
    if index.shape != rows:
        hint = library.shape_hint(argument, x, index, rows)
        raise ValueError(f"{caller}: {argument} has shape {tuple(index.shape)}, and the rows of input {rows}{hint}")
    library.check_place(caller, argument, index, x)


def wrong_weight(input: tuple[int, ...], weight: tuple[int, ...], target: tuple[int, ...]) -> str:
    """End of the error for a head whose weight has a wrong shape: the mistake that the shapes of the arguments show.

    >>> wrong_weight((3, 8), (8, 5), (3,)), wrong_weight((3, 8), (3,), (5, 8)), wrong_weight((3, 8), (5, 7), (3,))
    ('; pass linear_weight.T', '; are linear_weight and target swapped?', '')
    """
    if len(weight) == 2 and weight[:1] == input[-1:]:
        return "; pass linear_weight.T"
    return "; are linear_weight and target swapped?" if len(target) == 2 and target[1:] == input[-1:] else ""


def check_range(name: str, index: Array, classes: int, wrong: Array) -> None:
    """Raise an error for the first target that is wrong.

    Args:
        name: Name of the argument after that of the function.
        index: The targets.
        classes: Number of classes.
        wrong: True for the targets that count and are out of range.

    Raises:
        IndexError: a target is wrong; the message has its position and its value.
    """
    if not wrong.any():
        return
    position = tuple(map(int, np.unravel_index(int((wrong * 1).reshape(-1).argmax()), tuple(wrong.shape))))
    where = f" at position {position[0] if len(position) == 1 else position}" if position else ""
    value, count = index[position].item(), int(wrong.sum())
    more = f"; {count} of {math.prod(index.shape)} are out of range" if count > 1 else ""
    raise IndexError(f"{name} is {value}{where}, which is not in [0, {classes}){more}")


def checked_index_dim(library: Library, function: str, x: Any, index: Any, dim: Any) -> int:
    """The dimension of the columns, counted from 0, after the checks of the logits and of the columns that are picked.

    Args:
        library: The library of both arrays.
        function: Name of the public function.
        x: The logits.
        index: One column of each row, or several along `dim`.
        dim: The argument of the caller.
    """
    caller = f"{function}()"
    check_logits(library, caller, "logits", x, "index", index)
    if x.ndim == 0:
        raise ValueError(f"{caller}: logits need a dimension of tokens, got shape ()")
    axis = checked_dim(function, dim, x.ndim)
    several = index.shape[axis : axis + 1] if index.ndim == x.ndim else ()
    check_index(library, caller, "index", x, index, (*x.shape[:axis], *several, *x.shape[axis + 1 :]))
    return axis
