"""Every declared operation on every backend and strategy, against the contract.

Every strategy meets every operation on every input; forms of a call and dtypes take turns, and meet every strategy and
operation on one small input.  Without a GPU, where Triton's interpreter runs, each of these meets each other once in
all cells, some of which are `exhaustive`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from contract import CASES, DECLARED, DEVICE, DTYPES, FORMS, GPU, LONG, PLANS, Case, Form, forms_of, name_of, run_case
from onlinesoftmax import PlanError
from onlinesoftmax.core.declaration import Operation
from onlinesoftmax.lab import jax_on_torch
from onlinesoftmax.lab import verify as verification
from onlinesoftmax.lab.verify import exact, functions
from onlinesoftmax.planner.strategies import FOR_JAX, FORCED_CUDA
from pairs import rest_exhaustive, with_every_pair

NAMED = {case.name: case for case in CASES}
SMALL = {
    "triton/column": NAMED["first of four"],
    "pallas/cluster": Case("4 x 2048", (4, 2048)),
}
SPECIAL = {
    "triton/column": NAMED["infinities and NaN, transposed"],
    "pallas/cluster": Case("long infinities and NaN", (2048,), make=verification.specials),
}


def cases_of(plan: str) -> list[Case]:
    """The inputs for a plan; `column` takes rows that lie side by side."""
    if plan != "triton/column":
        return CASES
    return [case for case in CASES if case.tensor(torch.float32, "cpu").stride(case.dim) > 1]


def _cells() -> list[Any]:
    cells = []
    for j, plan in enumerate(PLANS):
        small, special = SMALL.get(plan, NAMED["3 x 33"]), SPECIAL.get(plan, NAMED["infinities and NaN"])
        cells += [(plan, *of, dtype, small) for of, dtype in itertools.product(FORMS, DTYPES)]
        cells += [(plan, *of, DTYPES[i % 4], special) for i, of in enumerate(FORMS)]
        for (i, case), (k, operation) in itertools.product(enumerate(cases_of(plan)), enumerate(DECLARED.values())):
            if case not in (small, special) and (GPU or (i + j + k) % 2):
                forms, turn = forms_of(operation), i // 2
                form, dtype = forms[(turn + j) % len(forms)], DTYPES[(turn + turn // 4 + k) % 4]
                cells.append((plan, operation, form, dtype, case))
    if GPU:
        return cells
    chosen = with_every_pair(cells, lambda cell: (cell[0], cell[1].name, cell[1:3], *cell[3:]))
    # In few cells, strategies meet operations and inputs, and forms meet operations.
    return rest_exhaustive(chosen, lambda cell: ((cell[0], cell[1].name), (cell[0], cell[4].name), cell[1:3], cell[3]))


def _name(value: Any) -> str:
    return name_of(value) if isinstance(value, torch.dtype) else str(getattr(value, "name", value))


def refused(plan: str, operation: Operation, case: Case, bytes_held: int, error: PlanError) -> None:
    """Skip a test where a refusal is right: what a backend has not, few neighbours of `column`, a long row of `row`."""
    backend, _, strategy = plan.partition("/")
    smallest = 4 if backend == "triton" else 2
    long = case.name in ("1 x 50257", "-inf first", LONG.name, *["taller columns"] * (bytes_held == 8))
    long = long and max(bytes_held, smallest) * operation.inputs > smallest
    right = [
        f"{backend} has no ",
        "has no such kernel",
        *["side by side"] * (strategy == "column"),
        *["does not fit"] * (strategy == "row" and (long or bool(operation.kernels))),
        *["Mosaic is not interpreted"] * (not GPU),
        *["Mosaic kernels take logits as they are, of 16 and 32 bits"] * (bytes_held == 8),
    ]
    if not any(words in str(error) for words in right):
        raise error
    pytest.skip(f"{strategy} cannot run this case, and says so")


@pytest.mark.parametrize(("plan", "operation", "form", "dtype", "case"), _cells(), ids=_name)
def test_contract(plan: str, operation: Operation, form: Form, dtype: torch.dtype, case: Case) -> None:
    if {*form.outputs} & {*operation.call_outputs} and not plan.startswith("cuda/"):
        pytest.skip("only CUDA's kernels reduce a call")
    try:
        with np.errstate(all="ignore"):
            run_case(operation, form, case, dtype, plan)
    except PlanError as error:
        # A CUDA kernel with score options holds scores, which are wider than logits.
        refused(plan, operation, case, max(dtype.itemsize, 4 * form.options), error)


PALLAS = tuple(f"{backend}/{strategy}" for backend, strategy, _ in FOR_JAX if backend == "pallas")


def _calls() -> list[Any]:
    cells = []
    for (j, plan), (k, name) in itertools.product(enumerate(("eager/row", *PLANS, *PALLAS)), enumerate(DECLARED)):
        cases = [SMALL.get(plan, NAMED["3 x 33"]), SPECIAL.get(plan, NAMED["infinities and NaN"])]
        if plan in PALLAS and plan not in SMALL:
            # XLA compiles for each input, so special rows, several tiles and very long rows, which `row` refuses, take
            # turns.
            cases = [cases[1], NAMED["3 x 1025"], NAMED["3 x 1025" if plan == "pallas/row" else "1 x 50257"]]
            cases = cases if GPU else [cases[(j + k) % 3]]
        elif GPU and plan not in PALLAS:
            cases = cases_of(plan)
        cells += [(plan, name, DTYPES[(i + j + k) % 4], case) for i, case in enumerate(cases)]
    if GPU:
        return cells
    # In few cells, strategies meet inputs, and backends meet operations.
    return rest_exhaustive(cells, lambda cell: ((cell[0], cell[3].name), (cell[0].partition("/")[0], cell[1]), cell[2]))


@pytest.mark.parametrize(("plan", "operation", "dtype", "case"), _calls(), ids=_name)
def test_public_function(plan: str, operation: str, dtype: torch.dtype, case: Case) -> None:
    """The public function, and its gradient by the framework's own differentiation, beside PyTorch's."""
    if reason := verification.unavailable(plan.partition("/")[0], DEVICE):
        pytest.skip(reason)
    _check_public_function(plan, operation, dtype, case)


def _check_public_function(plan: str, operation: str, dtype: torch.dtype, case: Case) -> None:
    backend, _, strategy = plan.partition("/")
    units = verification.units(backend, name_of(dtype), not GPU)
    cell = verification.Cell(backend, strategy, operation, name_of(dtype), slack=units)
    with np.errstate(all="ignore"):
        cell.add(case, verification.Exact.of(case, operation, name_of(dtype), DEVICE))
    assert not cell.failures
    if cell.refused:
        refused(plan, DECLARED[operation], case, dtype.itemsize, PlanError(cell.reason))


CUDA = tuple(f"{backend}/{strategy}" for backend, strategy, _ in FORCED_CUDA)


def _calls_of_jax() -> list[tuple[str, str, torch.dtype, Case]]:
    """Every operation on every input; strategies and dtypes take turns, and meet each other on special rows."""
    # XLA knows no strides: the others would be the same arrays again.  It takes no array that begins between 16 bytes.
    cases = [case for case in CASES if case.dim != -1 or case.tensor(torch.float32, "cpu").is_contiguous()]
    cases = [case for case in cases if case.name != "unaligned start"]
    cells = []
    for k, name in enumerate(DECLARED):
        cells += [(CUDA[(i + k) % 4], name, DTYPES[(i + i // 4 + k) % 4], case) for i, case in enumerate(cases)]
        cells += [(plan, name, dtype, SPECIAL["pallas/cluster"]) for plan, dtype in itertools.product(CUDA, DTYPES)]
    return cells


@pytest.mark.gpu
@pytest.mark.parametrize(("plan", "operation", "dtype", "case"), _calls_of_jax(), ids=_name)
def test_cuda_kernels_in_jax(
    plan: str, operation: str, dtype: torch.dtype, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public function for JAX through the CUDA kernels, and its gradient by JAX, beside PyTorch's."""
    if reason := jax_on_torch.unavailable("cuda"):
        pytest.skip(reason)
    monkeypatch.setattr(functions, "ours", lambda _, forward: functions.in_jax(forward))
    monkeypatch.setattr(exact, "KEEPS_STATES", ("cuda",))
    _check_public_function(plan, operation, dtype, case)
