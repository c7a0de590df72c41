"""Which elements each thread of a CUDA kernel owns: the real kernels, run by the host (tests/cuda_host.py).

Every length is met in all its residues modulo a chunk and around the ends of slices and tiles, and rows begin at every
offset from 16 bytes.  Each element must be reduced once and written once.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest

from cuda_host import COMPILER, check_ownership
from onlinesoftmax.core.device import known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import ITEMSIZE, Task, TensorSpec, row_spec, task_of
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.planner.plan import Plan, priced
from onlinesoftmax.planner.strategies import TABLE

pytestmark = pytest.mark.skipif(COMPILER is None, reason="neither g++ nor clang++ is installed")

PROPOSALS = {strategy: propose for backend, strategy, propose in TABLE if backend == "cuda"}


def a_task(rows: int, cols: int, stride: int, dtype: str) -> Task:
    """A softmax with one per-row output, of rows that begin `stride` elements apart."""
    tensor = TensorSpec((stride, 1), dtype)
    wide = "float64" if dtype == "float64" else "float32"
    return task_of(
        OPERATIONS["softmax"], ("y", "lse"), (rows, cols), 1,
        {"x": tensor, "y": tensor, "lse": row_spec((rows, cols), 1, wide)},
    )  # fmt: skip


def small_plan(strategy: str, rows: int, vector: int, peel: bool, team: int, held: int) -> Plan:
    """A plan with one warp a block and `held` chunks a lane; the planner's own have more of everything."""
    kept = vector if peel else 1
    block = held * 32 * vector
    of_strategy = partial(Plan, backend="cuda", strategy=strategy)
    if strategy == "row":
        # Groups of 8 lanes with 2 rows each: 8 rows a block.
        return of_strategy(-(-rows // 8), held * 8 * vector, 8, depth=2, warps=1, vector=kept, lanes=8, terms=True)
    if strategy == "cluster":
        return of_strategy(rows * team, block, warps=1, splits=team, vector=kept, lanes=32, terms=True)
    if strategy == "grid":
        # Fewer teams than rows, so that a team takes several.
        return of_strategy(2 * team, block, depth=2, warps=1, splits=team, vector=kept, lanes=32, shared=3)
    return of_strategy(rows, block, warps=1, vector=kept, lanes=32)


def lengths(strategy: str, vector: int, team: int, held: int) -> list[int]:
    """Columns around 0, a chunk, and every end of a slice or a tile that a plan of these sizes has, in all residues."""
    slice_end = {"row": held * 8, "cluster": held * 32 * team}.get(strategy)
    ends = [1, 8 * team, 32, held * 32, held * 32 + 32]
    if strategy == "grid":
        # In registers, then 3 tiles in shared memory, then streamed two at a time.
        ends += [held * 32 * team, (held + 3) * 32 * team, (held + 3) * 32 * team + 64 * team]
    if slice_end:
        ends = [end for end in (*ends, slice_end // 2) if end < slice_end] + [slice_end]
    found = {max(1, end * vector + more) for end in ends for more in range(-vector, vector)}
    longest = slice_end * vector if slice_end else max(found)
    return sorted(cols for cols in found if cols <= longest)


TEAMS = {"row": (1,), "cluster": (2, 4), "grid": (1, 3), "looped": (1,)}

SMALL = [
    (strategy, team, dtype, peel)
    for strategy, teams in TEAMS.items()
    for team, dtype, peel in itertools.product(teams, ("bfloat16", "float32", "float64"), (True, False))
    # Without a head to peel, a chunk's size is all that differs between dtypes.
    if peel or dtype == "bfloat16"
]


@pytest.mark.parametrize(("strategy", "team", "dtype", "peel"), SMALL)
def test_every_element_is_owned_once(strategy: str, team: int, dtype: str, peel: bool, folder: Path) -> None:
    vector, held = 16 // ITEMSIZE[dtype], 2
    # With an odd stride, as many rows as a chunk has elements begin at every offset from 16 bytes.
    rows = vector + 1
    for cols in lengths(strategy, vector, team, held):
        stride = cols + 1 - cols % 2 if peel else -(-cols // vector) * vector
        if rows * stride >= 1 << 16 and dtype == "bfloat16":
            continue
        request = Request(a_task(rows, cols, stride, dtype), small_plan(strategy, rows, vector, peel, team, held))
        check_ownership(request, folder)


PLANNED = [
    ("row", 9, 1000), ("row", 7, 2049), ("cluster", 1, 50257), ("cluster", 2, 32001), ("grid", 1, 60001),
    ("grid", 2, 20000), ("looped", 2, 30011),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "rows", "cols"), PLANNED)
def test_plans_own_every_element_once(strategy: str, rows: int, cols: int, folder: Path) -> None:
    """The planner's first and last proposals for an H200."""
    device, task = known("h200"), a_task(rows, cols, cols, "bfloat16")
    problem = Problem.of(task)
    proposals = PROPOSALS[strategy](problem, device)
    assert not isinstance(proposals, str), proposals
    for proposal in (proposals[0], proposals[-1]):
        check_ownership(Request(task, priced(proposal, problem, device)), folder)
