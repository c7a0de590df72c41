"""What each strategy proposes for a problem: the planner's table, one row for each."""

from __future__ import annotations

from collections.abc import Callable

from ...core.device import Device
from ...core.problem import Problem
from ..forecast import Propose
from ..proposal import Proposal
from . import cuda, eager, pallas, triton

__all__ = ["FOR_JAX", "TABLE", "Propose"]

def _only(propose: Callable[[Problem, Device], Proposal | str]) -> Propose:
    """Those of a strategy that has one proposal at most."""

    def proposals(problem: Problem, device: Device) -> list[Proposal] | str:
        proposal = propose(problem, device)
        return proposal if isinstance(proposal, str) else [proposal]

    return proposals


TABLE: tuple[tuple[str, str, Propose], ...] = (
    ("cuda", "row", cuda.row),
    ("cuda", "cluster", cuda.cluster),
    ("cuda", "grid", cuda.grid),
    ("cuda", "looped", cuda.looped),
    ("triton", "row", _only(triton.triton_row)),
    ("triton", "looped", _only(triton.triton_looped)),
    ("triton", "split", _only(triton.triton_split)),
    ("triton", "column", _only(triton.triton_column)),
    ("eager", "row", _only(eager.pytorch)),
)
"""(backend, strategy, its proposals)."""

FOR_JAX: tuple[tuple[str, str, Propose], ...] = (
    ("pallas", "row", _only(pallas.row)),
    ("pallas", "cluster", _only(pallas.cluster)),
    ("pallas", "looped", _only(pallas.looped)),
    ("pallas", "split", _only(pallas.split)),
    ("eager", "row", _only(eager.framework)),
)
"""The same for JAX arrays."""
