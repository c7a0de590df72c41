"""The registry of backends."""

from __future__ import annotations

import pytest

from onlinesoftmax.kernels import registry


def test_a_backend_without_a_module_of_kernels_is_named() -> None:
    with pytest.raises(ValueError, match="unknown backend 'opencl'; backends: cuda, triton, eager"):
        registry.load("opencl")
    with pytest.raises(ValueError, match="backend 'eager' has no module of kernels"):
        registry.load("eager")
    assert registry.unavailable("eager") is None
