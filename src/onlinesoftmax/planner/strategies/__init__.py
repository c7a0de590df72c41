"""The strategies that there are, with the functions that propose blocks for a problem."""

from __future__ import annotations

from ..forecast import Propose
from . import cuda, cuda_grid, eager, pallas, triton

__all__ = ["FORCED_EAGER", "FOR_JAX", "TABLE", "Propose"]

TABLE: tuple[tuple[str, str, Propose], ...] = (
    ("cuda", "row", cuda.row),
    ("cuda", "cluster", cuda.cluster),
    ("cuda", "grid", cuda_grid.grid),
    ("cuda", "looped", cuda.looped),
    ("triton", "row", triton.row),
    ("triton", "looped", triton.looped),
    ("triton", "split", triton.split),
    ("triton", "column", triton.column),
    ("eager", "row", eager.pytorch),
)
"""(backend, strategy, its proposals)."""

FORCED_EAGER: tuple[tuple[str, str, Propose], ...] = (*TABLE[:-1], ("eager", "row", eager.framework))
"""The same for a call that forces PyTorch's operations: several of them run what has no kernel of PyTorch."""

FOR_JAX: tuple[tuple[str, str, Propose], ...] = (
    ("pallas", "row", pallas.row),
    ("pallas", "cluster", pallas.cluster),
    ("pallas", "looped", pallas.looped),
    ("pallas", "split", pallas.split),
    ("eager", "row", eager.framework),
)
"""The same for JAX arrays."""
