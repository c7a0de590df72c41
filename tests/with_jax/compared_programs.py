"""Two functions compiled as one program, and the comparison of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp

Call = Callable[..., Any]


def both(f: Call, g: Call, *arguments: Any) -> Any:
    """The results of two functions, compiled as one program."""
    return jax.jit(lambda *arguments: (f(*arguments), g(*arguments)))(*arguments)


def assert_close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    """The same shape and dtype, and close values."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=2e-6)


def assert_all_close(pair: tuple[Any, Any], tolerance: float = 1e-5) -> None:
    """Every array of the first result is close to that of the second."""
    for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
        assert_close(a, b, tolerance)


def number(f: Call) -> Call:
    """A number that every result counts for, each in its own way."""
    return lambda *arguments: sum(jnp.sum(jnp.sin((i + 1) * t)) for i, t in enumerate(f(*arguments)))
