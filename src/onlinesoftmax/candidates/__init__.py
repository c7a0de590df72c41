"""What each strategy proposes for a problem: the planner's table, one row for each."""

from __future__ import annotations

from collections.abc import Callable

from ..device import Device
from ..problem import Problem
from . import cuda, eager, triton
from .candidate import Candidate

__all__ = ["TABLE", "Candidate"]

TABLE: tuple[tuple[str, str, Callable[[Problem, Device], list[Candidate] | str]], ...] = (
    ("cuda", "row", cuda.row),
    ("cuda", "cluster", cuda.cluster),
    ("cuda", "grid", cuda.grid),
    ("cuda", "looped", cuda.looped),
    ("triton", "row", lambda problem, device: _one(triton.triton_row(problem, device))),
    ("triton", "looped", lambda problem, device: _one(triton.triton_looped(problem, device))),
    ("triton", "split", lambda problem, device: _one(triton.triton_split(problem, device))),
    ("triton", "column", lambda problem, device: _one(triton.triton_column(problem, device))),
    ("eager", "row", lambda problem, device: _one(eager.eager_row(problem, device))),
)
"""(backend, strategy, what it proposes, likeliest first, or why it cannot)."""


def _one(proposal: Candidate | str) -> list[Candidate] | str:
    return proposal if isinstance(proposal, str) else [proposal]
