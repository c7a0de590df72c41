"""Conversion of file elements to arrays that `State` computes with, and back.

torch converts where it is installed, because it uses several threads. Otherwise NumPy converts, with ml_dtypes
for bfloat16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Any, Protocol

import numpy as np

from ..core.arrays import Array


def storage(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype that carries the bits of `dtype`; NumPy itself has no bfloat16."""
    return np.dtype(np.int16 if dtype == "bfloat16" else dtype)


class Converter(Protocol):
    """Conversion by one array library. Both directions copy only where the dtype changes."""

    def widen(self, raw: np.ndarray, dtype: str, wide: str) -> Array:
        """Convert elements of `dtype`, carried by their storage dtype, to `wide`: float32 or float64."""

    def narrow(self, x: Array, dtype: str) -> np.ndarray:
        """Round x to `dtype`; the result is contiguous and carried by its storage dtype."""


def converter(dtypes: Collection[str]) -> Converter:
    """Return the converter of the installed array library.

    Args:
        dtypes: Names of all dtypes to convert from or to.

    Raises:
        ModuleNotFoundError: bfloat16 is among the dtypes, and neither torch nor ml_dtypes is installed.
    """
    if importlib.util.find_spec("torch") is not None:
        return _Torch()
    if "bfloat16" in dtypes and importlib.util.find_spec("ml_dtypes") is None:
        raise ModuleNotFoundError(
            "bfloat16 needs torch or ml_dtypes, and neither is installed: pip install 'onlinesoftmax[cli]'"
        )
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
        with np.errstate(all="ignore"):
            return raw.view(_numpy_dtype(dtype)).astype(wide, copy=False)

    def narrow(self, x: Array, dtype: str) -> np.ndarray:
        # A number that is too large or too small for the narrower dtype becomes inf or 0 without a warning.
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(x.astype(_numpy_dtype(dtype), copy=False)).view(storage(dtype))


def _numpy_dtype(dtype: str) -> np.dtype[Any]:
    if dtype != "bfloat16":
        return np.dtype(dtype)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)
