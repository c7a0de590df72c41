"""Every backend × strategy × operation against the contract.

With a GPU, the whole product; without one, Triton's interpreter runs a covering part of what is Triton's.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from contract import DTYPES, OPERATIONS, SHAPE_CASES, SIZE_CASES, SPECIAL_CASES, Case, run_case
from onlinesoftmax import PlanError
from onlinesoftmax.planner.strategies import TABLE

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# CUDA kernels have no interpreter; tests/kernels/test_cuda.py compiles them.
COLUMN = ("triton", "column")
PAIRS = [(backend, strategy) for backend, strategy, _ in TABLE if GPU or backend != "cuda"]


def _cells() -> list[tuple[tuple[str, str], str, torch.dtype, Case]]:
    cases = [*SIZE_CASES, *SHAPE_CASES, *SPECIAL_CASES]
    product = list(itertools.product(PAIRS, OPERATIONS, DTYPES, cases))
    if GPU:
        return product
    # In the interpreter every pair meets every case, and the dtypes and operations take turns; 5 is coprime to both
    # counts, so that all combinations come up.  Every pair also meets every operation and dtype once, on one case.
    turns = list(itertools.product(DTYPES, OPERATIONS))
    return [
        (pair, turns[(i + 5 * j) % len(turns)][1], turns[(i + 5 * j) % len(turns)][0], case)
        for i, case in enumerate(cases)
        for j, pair in enumerate(PAIRS)
    ] + [cell for cell in product if cell[3].name == ("4d-first" if cell[0] == COLUMN else "cols=33")]


@pytest.mark.parametrize(
    ("pair", "operation", "dtype", "case"),
    _cells(),
    ids=lambda value: "/".join(value) if isinstance(value, tuple) else str(value).removeprefix("torch."),
)
def test_contract(pair: tuple[str, str], operation: str, dtype: torch.dtype, case: Case) -> None:
    backend, strategy = pair
    # The two refusals there are: `column` where rows are contiguous, `row` past its registers.
    refusals = {"column": "side by side"}
    if case.name == "cols=50257" and (dtype == torch.float64 or (backend, dtype) == ("cuda", torch.float32)):
        refusals["row"] = "does not fit the registers"
    try:
        run_case(case, operation, backend, strategy, dtype, DEVICE)
    except PlanError as error:
        if refusals.get(strategy, "no refusal is expected") not in str(error):
            raise
        pytest.skip(f"{strategy} cannot run this case, and says so")
