"""The contract, checked on this machine: every backend × strategy × operation × dtype against float64.

A result is right when no element is further from the exact result than PyTorch's largest error on the same input
plus one unit in the last place (ulp) of the output dtype, and when its infinities and NaNs are those of PyTorch.
float64 is tested too, so the exact result is computed in NumPy's long double.
A gradient is computed by autograd from the public function, for a fixed random gradient of its result.  It is compared
with the exact gradient at the output that the forward call saved, for ours and for PyTorch alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ...core.task import ITEMSIZE
from ...kernels import registry
from ...ops import OPERATIONS
from ...planner.strategies import FOR_JAX, TABLE
from .. import jax_on_torch
from ..names import check_names
from .cell import Cell
from .exact import Exact, exact_gradient, exact_result, ulp
from .inputs import CASES, QUICK_GRADIENT_DTYPES, QUICK_GRADIENTS, Case, outliers, specials

__all__ = [
    "CASES", "INTERPRETER_ULPS", "QUICK_GRADIENTS", "Case", "Cell", "Exact", "exact_gradient",
    "exact_result", "interpreted", "outliers", "pairs", "specials", "ulp", "unavailable", "units", "verify",
]  # fmt: skip

Progress = Callable[[int, int], None]

INTERPRETER_ULPS = {"triton": 4, "pallas": 8}
"""Units that the contract adds in a backend's interpreter, instead of 1.

Triton's interpreter rounds a multiply-add twice, so the corrections by fma in the kernels have no effect, and its
conversion to bfloat16 truncates.  JAX's interpreter runs XLA, whose softmax of float64 on a CPU is off by six units.
"""

FLOAT64_ULPS = {"triton": 4}
"""Units that the contract adds for float64, instead of 1, where a backend merges float64 sums in float64.

Each merge of two tiles rounds, and PyTorch's largest error on a few rows can be far below a unit by chance: on an H100,
gradients of 5000 columns were at most 3.6 units beyond it.  Narrower sums are merged in float64 and rounded once.
"""


def units(backend: str, dtype: str, interpreted: bool) -> int:
    """The number of units in the last place that the contract adds to PyTorch's largest error."""
    most = INTERPRETER_ULPS if interpreted else FLOAT64_ULPS if dtype == "float64" else {}
    return most.get(backend, 1)


def pairs(backends: Sequence[str] = (), strategies: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The (backend, strategy) pairs of the planner's tables that match; all pairs where nothing is named.

    Raises:
        ValueError: a name is unknown, or no pair is left.
    """
    table = [row[:2] for row in (*TABLE, *(row for row in FOR_JAX if row[0] == "pallas"))]
    check_names("backend", backends, [backend for backend, _ in table])
    check_names("strategy", strategies, [strategy for _, strategy in table])
    found = [(b, s) for b, s in table if (not backends or b in backends) and (not strategies or s in strategies)]
    if not found:
        raise ValueError(f"{' and '.join(backends)} has no strategy {' or '.join(strategies)}")
    return found


def unavailable(backend: str, device: str) -> str | None:
    """One sentence that says why a backend cannot be checked on this machine's "cpu" or "cuda"; None when it can."""
    return jax_on_torch.unavailable(device) if backend == "pallas" else registry.unavailable(backend)


def interpreted(backends: Iterable[str], device: str) -> list[str]:
    """The names of the backends, of these, whose kernels an interpreter runs on this machine's "cpu" or "cuda"."""

    def by_triton() -> bool:
        return registry.module_missing("triton", "triton") is None and registry.load("triton").interpreted()

    of_device = {"triton": by_triton, "pallas": lambda: device == "cpu"}
    return [name for name in backends if name in of_device and of_device[name]()]


def verify(
    *,
    backends: Sequence[str] = (),
    strategies: Sequence[str] = (),
    operations: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    device: str = "cpu",
    quick: bool = False,
    progress: Progress | None = None,
) -> list[Cell]:
    """Check every backend, strategy, operation and dtype, or those that are named; each combination is a cell.

    A backend that cannot be used here has no cells.  Without a GPU, Triton needs TRITON_INTERPRET=1 in the
    environment before it is imported.  Backends that run in an interpreter do not get the largest inputs.

    Args:
        backends, strategies, operations, dtypes: Names; empty for all.
        device: "cpu" or "cuda": where the tensors are.
        quick: A few inputs instead of all; even fewer for gradients, in two dtypes unless dtypes are named.
        progress: Called as progress(done, total) after each input.

    Raises:
        ValueError: a name is unknown.
        ImportError: torch is not installed.

    Example:
        >>> [cell] = verify(backends=["eager"], operations=["softmax"], dtypes=["float32"], quick=True)
        >>> cell.result, cell.error <= cell.pytorch_error
        ('pass', True)
    """
    import torch

    check_names("operation", operations, list(OPERATIONS))
    check_names("dtype", dtypes, list(ITEMSIZE))
    few = dtypes or (QUICK_GRADIENT_DTYPES if quick else list(ITEMSIZE))
    operations, dtypes = operations or list(OPERATIONS), dtypes or list(ITEMSIZE)
    chosen = [pair for pair in pairs(backends, strategies) if unavailable(pair[0], device) is None]
    slow = interpreted(dict(chosen), device)
    table = [
        Cell(b, s, operation, dtype, slack=units(b, dtype, b in slow))
        for b, s in chosen
        for operation in operations
        for dtype in (few if OPERATIONS[operation].backward else dtypes)
    ]
    steps = list(_steps(table, quick, slow))
    # The interpreter computes in NumPy, which warns of infinities and NaNs, and inputs contain them.
    with (
        torch.no_grad(), torch.autocast(torch.device(device).type, enabled=False), np.errstate(all="ignore"),
        warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
        for done, (case, group) in enumerate(steps, 1):
            oracle = Exact.of(case, group[0].operation, group[0].dtype, device)
            for cell in group:
                cell.add(case, oracle)
            if progress is not None:
                progress(done, len(steps))
    return table


def _steps(table: Sequence[Cell], quick: bool, slow: Sequence[str]) -> Iterator[tuple[Case, list[Cell]]]:
    """Every input with the cells that take it.  Cells of one operation and dtype share the exact result."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in table:
        groups.setdefault((cell.operation, cell.dtype), []).append(cell)
    for group in groups.values():
        for case in CASES:
            takes = [cell for cell in group if not (case.heavy and cell.backend in slow)]
            chosen = case.name in QUICK_GRADIENTS if OPERATIONS[group[0].operation].backward else case.quick
            if takes and (chosen or not quick):
                yield case, takes
