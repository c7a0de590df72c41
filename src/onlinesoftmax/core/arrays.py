"""One set of function names for NumPy, torch and JAX arrays. A framework is imported only for its own arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import numpy as np

Array = Any
"""A NumPy array, a torch tensor or a JAX array."""


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def quiet(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function in which NumPy neither warns nor raises: underflow, 0, inf and NaN are ordinary values here."""

    # One object of np.errstate for all calls would mix up the settings of two threads in NumPy 1.
    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return call


def namespace(x: Array) -> Any:
    """Return the functions for the array library of x.

    Raises:
        TypeError: x is not a NumPy, torch or JAX array; is masked, a matrix or a DTensor; or is not floating point.
        RuntimeError: x is a nested or a sparse tensor.
    """
    kind = array_kind(x)
    if kind is None:
        raise TypeError(f"expected a NumPy, torch or JAX array, got {type(x).__module__}.{type(x).__qualname__}")
    check_plain("the array", x)
    xp = _BUILDERS[kind]()
    if not xp.is_floating(x):
        raise TypeError(f"expected a floating-point array, got dtype {x.dtype}")
    return xp


def array_kind(x: Array) -> str | None:
    """Return "numpy", "torch" or "jax" by the type of x, or None for another type. No framework is imported."""
    if isinstance(x, (np.ndarray, np.generic)):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    return None


def is_dtensor(kind: type) -> bool:
    """True for the DTensor of torch.distributed.tensor, which is not imported here: it takes half a second."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and issubclass(kind, tensors.DTensor)


def advice(kind: type) -> str:
    """End of a TypeError's message for an array of another library: the module or the conversion that takes it.

    >>> advice(list)
    '; make a tensor (torch.tensor) or an array (numpy.array) of it'
    """
    library = kind.__module__.partition(".")[0]
    if library in ("jax", "jaxlib"):
        return "; the functions for JAX arrays are in onlinesoftmax.jax"
    if kind.__module__.startswith("torch.nn.modules"):
        return "; of a module, pass the weight or the output"
    if library == "torch":
        return "; the functions for torch tensors are in onlinesoftmax itself"
    if issubclass(kind, (np.ndarray, np.generic)):
        return "; torch.from_numpy makes a tensor of it"
    if hasattr(kind, "__dlpack__"):
        return "; torch.from_dlpack or jax.numpy.from_dlpack makes a tensor of it"
    if hasattr(kind, "__array__"):
        return "; numpy.asarray makes an array of it"
    if issubclass(kind, (list, tuple, int, float)):
        return "; make a tensor (torch.tensor) or an array (numpy.array) of it"
    return ""


def check_no_jax(function: str, kind: type) -> None:
    """Raise an error for a JAX array in a function for tensors; torch need not be installed for it."""
    if kind.__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise TypeError(f"{function}(): the input is a JAX array ({kind.__name__}): call onlinesoftmax.jax.{function}")


def check_plain(what: str, x: Array) -> None:
    """Check that arithmetic keeps the meaning of an array; the error begins with `what`.

    Raises:
        TypeError: x is a masked array or a matrix of NumPy, or a DTensor.
        RuntimeError: x is a nested or a sparse tensor of torch, or one of another layout.
    """
    if is_dtensor(type(x)):
        raise TypeError(f"{what} is a DTensor; make the state of its to_local(), and all_reduce it over the processes")
    if array_kind(x) == "torch":
        check_strided(what, x, sys.modules["torch"].strided)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{what} is a masked array, whose mask would be lost; pass an array: filled(-numpy.inf) of the logits "
            "leaves the masked elements out of softmax"
        )
    if isinstance(x, np.matrix):
        raise TypeError(f"{what} is a numpy.matrix, which has two dimensions in every result; pass numpy.asarray of it")


def check_strided(what: str, t: Array, strided: Any) -> None:
    """Raise a RuntimeError for a tensor of torch that is nested or has a layout other than torch.strided."""
    if t.is_nested:
        raise RuntimeError(f"{what} is a nested tensor; pass its values, whose rows have one length")
    if t.layout is not strided:
        raise RuntimeError(f"{what} has the layout {t.layout}; pass its to_dense()")


def accumulator(x: Array) -> str:
    """Name of the dtype in which an operation on x computes: float32, or float64 for float64."""
    return "float64" if x.dtype.name == "float64" else "float32"


def is_floating_dtype(dtype: np.dtype[Any]) -> bool:
    """True for a floating-point dtype of NumPy or of ml_dtypes."""
    # The dtypes of ml_dtypes, such as bfloat16 and float8, have kind "V"; their names identify them.
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def is_real_dtype(dtype: np.dtype[Any]) -> bool:
    """True for the dtypes of booleans, integers and floating-point numbers, of NumPy or of ml_dtypes."""
    return dtype.kind in "biu" or is_floating_dtype(dtype) or dtype.name.startswith(("int", "uint"))


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """True where an array of this shape broadcasts to the other shape.

    >>> broadcasts((3, 1), (2, 3, 4)), broadcasts((2, 3), (3,))
    (True, False)
    """
    more = len(to) - len(shape)
    # Equal lengths, which torch.compile of PyTorch 2.9 demands of any zip.
    return more >= 0 and all(a in (1, b) for a, b in zip(shape, to[more:], strict=True))


def _shared(library: Any) -> dict[str, Any]:
    """The functions that are spelled alike in numpy, torch and jax.numpy."""
    return {
        **{name: getattr(library, name) for name in ("exp", "log", "where", "isinf", "maximum")},
        "broadcast": library.broadcast_to,
        "clip": lambda m: library.clip(m, library.finfo(m.dtype).min, library.finfo(m.dtype).max),
    }


def _shared_by_numpy(library: Any, accumulator: Callable[[Array], Any]) -> dict[str, Any]:
    """The functions that are spelled alike in numpy and jax.numpy."""
    return _shared(library) | {
        "accumulator": accumulator,
        "max": lambda x, dim: library.max(x, axis=dim, keepdims=True),
        "min": lambda x, dim: library.min(x, axis=dim, keepdims=True),
        "sum": lambda x, dim: library.sum(x, axis=dim, keepdims=True),
        "full": lambda like, shape, value: library.full(shape, value, accumulator(like)),
        "arange": lambda x, dim: library.arange(x.shape[dim]).reshape(_along(x, dim)),
    }


@cache
def _numpy() -> SimpleNamespace:
    own = {
        "is_floating": lambda x: is_floating_dtype(x.dtype),
        "astype": lambda x, dtype: np.asarray(x).astype(dtype, copy=False),
        "sum": _numpy_sum,
        "where": lambda condition, a, b: np.where(condition, _weak(a, b), _weak(b, a)),
        "index": np.int64,
    }
    return SimpleNamespace(**_shared_by_numpy(np, _numpy_accumulator) | own)


_PARTS = 8
"""Numbers that are added one after the other along a strided axis: with 8, a `State` takes no longer than without."""


_FEW = 4096
"""Elements that are added faster in float64 than in parts."""


def _numpy_sum(x: Array, dim: int) -> Array:
    """Sum along `dim`, which stays with size 1; the rounding error grows with the logarithm of the size.

    NumPy adds pairwise along the axis with the smallest stride only.  Along another it adds row after row, and the
    small numbers that follow a large one vanish.
    """
    if x.size <= _FEW and x.dtype.itemsize < 8:
        return np.sum(x, axis=dim, keepdims=True, dtype=np.float64).astype(x.dtype)
    x = x.swapaxes(0, dim)
    smallest = min((stride for stride, size in zip(x.strides, x.shape, strict=True) if size > 1), default=0)
    while len(x) > 2 * _PARTS and x.strides[0] > smallest:
        size, left = divmod(len(x), _PARTS)
        # The parts lie far apart, so that each addition of two parts runs over contiguous memory.
        total = np.sum(x[: len(x) - left].reshape(_PARTS, size, *x.shape[1:]), axis=0)
        if left:
            total[:1] += np.sum(x[len(x) - left :], axis=0, keepdims=True)
        x = total
    return np.sum(x, axis=0, keepdims=True).swapaxes(0, dim)


def _along(x: Array, dim: int) -> tuple[int, ...]:
    """Shape of a vector along `dim` that broadcasts to x."""
    return tuple(-1 if i == dim % x.ndim else 1 for i in range(x.ndim))


def _numpy_accumulator(x: Array) -> np.dtype[Any]:
    # The size decides, because float64 in the other byte order is not equal to np.float64. longdouble gets float64.
    return np.dtype(np.float64 if x.dtype.itemsize >= 8 else np.float32)


def _weak(value: Any, other: Any) -> Any:
    """Convert a Python float to the dtype of the other array. NumPy 2 does so itself; NumPy 1 does not."""
    return other.dtype.type(value) if isinstance(value, float) else value


@cache
def _torch() -> SimpleNamespace:
    import torch

    def accumulator(x: Array) -> Any:
        return torch.float64 if x.dtype == torch.float64 else torch.float32

    # On a CPU, MKL chooses the code of exp and of log in its first call.  If several threads make that call, one of
    # them may run code of low accuracy (PyTorch's issue 188792).  So the first call has one number.
    for dtype in (torch.float32, torch.float64):
        torch.log(torch.exp(torch.zeros(1, dtype=dtype, device="cpu")))

    own = {
        "is_floating": lambda x: x.is_floating_point(),
        "accumulator": accumulator,
        "astype": lambda x, dtype: x.to(dtype),
        "max": lambda x, dim: torch.amax(x, dim, keepdim=True),
        "min": lambda x, dim: torch.amin(x, dim, keepdim=True),
        "sum": lambda x, dim: torch.sum(x, dim, keepdim=True),
        "full": lambda like, shape, value: torch.full(shape, value, dtype=accumulator(like), device=like.device),
        "arange": lambda x, dim: torch.arange(x.shape[dim], device=x.device).reshape(_along(x, dim)),
        "index": torch.int64,
    }
    return SimpleNamespace(**_shared(torch) | own)


@cache
def _jax() -> SimpleNamespace:
    import jax.numpy as jnp

    own = {
        "is_floating": lambda x: jnp.issubdtype(x.dtype, jnp.floating),
        "astype": lambda x, dtype: x.astype(dtype),
        # 64 bits where JAX has them.
        "index": int,
    }
    wide = _shared_by_numpy(jnp, lambda x: jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32))
    return SimpleNamespace(**wide | own)


_BUILDERS = {"numpy": _numpy, "torch": _torch, "jax": _jax}


def dtype_name(dtype: Any) -> str:
    """Name of a dtype of torch, NumPy or JAX, or of one that is given by its name.

    Raises:
        TypeError: it is no dtype.

    Example:
        >>> dtype_name("bfloat16"), dtype_name(np.float32), dtype_name(np.dtype("float16"))
        ('bfloat16', 'float32', 'float16')
    """
    if isinstance(dtype, str):
        return dtype
    if type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype":
        return str(dtype).removeprefix("torch.")
    try:
        if dtype is not None:  # NumPy reads None as float64
            return np.dtype(dtype).name
    except TypeError:
        pass
    raise TypeError(f"dtype must be a dtype or its name, not {type(dtype).__name__}")
