"""From the elements of a file to arrays that `State` computes with, and back.

Torch does it where it is installed, for its threads; otherwise NumPy does, with ml_dtypes for bfloat16.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import numpy as np

from ..core.arrays import Array


def storage(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype that carries the bits of `dtype`; NumPy has no bfloat16 of its own."""
    return np.dtype(np.int16 if dtype == "bfloat16" else dtype)


class Widening(Protocol):
    """How one array library does it; both directions copy only where the dtype changes."""

    def widen(self, raw: np.ndarray, dtype: str, wide: str) -> Array:
        """Elements of `dtype`, carried by their storage dtype, as `wide`: float32 or float64."""

    def narrow(self, x: Array, dtype: str) -> np.ndarray:
        """Round x to `dtype`, contiguous, carried by its storage dtype."""


def widening(bfloat16: bool) -> Widening:
    """The library to compute with.

    Args:
        bfloat16: Whether bfloat16 occurs.

    Raises:
        ModuleNotFoundError: bfloat16 occurs, and neither torch nor ml_dtypes is installed.
    """
    if importlib.util.find_spec("torch") is not None:
        return _Torch()
    if bfloat16 and importlib.util.find_spec("ml_dtypes") is None:
        raise ModuleNotFoundError("bfloat16 needs torch or ml_dtypes: pip install ml_dtypes")
    return _NumPy()


class _Torch:
    def __init__(self) -> None:
        import torch

        self.torch = torch

    def widen(self, raw: np.ndarray, dtype: str, wide: str) -> Array:
        return self.torch.from_numpy(raw).view(getattr(self.torch, dtype)).to(getattr(self.torch, wide))

    def narrow(self, x: Array, dtype: str) -> np.ndarray:
        x = x.to(getattr(self.torch, dtype)).contiguous()
        result: np.ndarray = (x.view(self.torch.int16) if dtype == "bfloat16" else x).numpy()
        return result


class _NumPy:
    def widen(self, raw: np.ndarray, dtype: str, wide: str) -> Array:
        return raw.view(_numpy_dtype(dtype)).astype(wide, copy=False)

    def narrow(self, x: Array, dtype: str) -> np.ndarray:
        # Too large for the narrower dtype is inf, as in torch, and no warning.
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(x.astype(_numpy_dtype(dtype), copy=False)).view(storage(dtype))


def _numpy_dtype(dtype: str) -> np.dtype[Any]:
    if dtype != "bfloat16":
        return np.dtype(dtype)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)
