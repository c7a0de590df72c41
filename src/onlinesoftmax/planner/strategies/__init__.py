"""The strategies that there are, with the functions that propose blocks for a problem."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.declaration import Operation
from ...kernels.cuda.strategy.cluster.proposals import cluster
from ...kernels.cuda.strategy.grid.proposals import grid
from ...kernels.cuda.strategy.looped.proposals import looped
from ...kernels.cuda.strategy.row.proposals import row
from ..fastest import Propose
from . import eager, pallas, triton

__all__ = [
    "FORCED_CUDA", "FORCED_EAGER", "FOR_JAX", "FRAMEWORKS", "JAX_WITH_CUDA", "TABLE", "Propose", "Strategies",
    "strategies_of",
]  # fmt: skip

Strategies = Sequence[tuple[str, str, Propose]]
"""Rows of TABLE."""

TABLE: Strategies = (
    ("cuda", "row", row),
    ("cuda", "cluster", cluster),
    ("cuda", "grid", grid),
    ("cuda", "looped", looped),
    ("triton", "row", triton.row),
    ("triton", "looped", triton.looped),
    ("triton", "split", triton.split),
    ("triton", "column", triton.column),
    ("eager", "row", eager.pytorch),
)
"""(backend, strategy, its proposals)."""

FORCED_EAGER: Strategies = (*TABLE[:-1], ("eager", "row", eager.framework))
"""The same for a call that forces PyTorch's operations: several of them run what has no kernel of PyTorch."""

FOR_JAX: Strategies = (
    ("pallas", "row", pallas.row),
    ("pallas", "cluster", pallas.cluster),
    ("pallas", "looped", pallas.looped),
    ("pallas", "split", pallas.split),
    ("eager", "row", eager.framework),
)
"""The same for JAX arrays, without the CUDA kernels."""

FORCED_CUDA: Strategies = tuple(row for row in TABLE if row[0] == "cuda")
"""The same for JAX arrays of a call that forces the CUDA kernels."""

JAX_WITH_CUDA: Strategies = (*FOR_JAX[:-1], *FORCED_CUDA, FOR_JAX[-1])
"""The same for JAX arrays of a call that forces no backend.  XLA launches a Pallas kernel in less host time."""

FRAMEWORKS = {"torch": TABLE, "jax": JAX_WITH_CUDA}
"""The strategies of each framework."""


def strategies_of(operation: Operation, table: Strategies) -> tuple[Strategies, dict[str, str]]:
    """(strategies, lacking): the strategies of a table and those of the operation's own kernels, by backend.

    An own kernel replaces the strategy of the same name.  `lacking` has, for each backend/strategy that does not exist
    for the operation, the sentence that says what exists.
    """
    if operation.backends is None and not operation.kernels:
        return table, {}
    order = list(dict.fromkeys(row[0] for row in table))
    own = {row[:2]: row for row in operation.own_strategies if row[0] in order}
    rows = sorted(({row[:2]: row for row in table} | own).values(), key=lambda row: order.index(row[0]))
    # The formula of an operation always runs.
    exist = [row[:2] for row in rows if row[0] == "eager" or row[:2] in own or operation.runs_on(row[0])]
    reason = f"{operation} has no such kernel; it has {', '.join(map('/'.join, exist))}"
    return rows, {"/".join(row[:2]): reason for row in rows if row[:2] not in exist}
