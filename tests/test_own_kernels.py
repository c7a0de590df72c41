"""An operation with kernels of its own, the sparsemax of tests/sparsemax, on the way of every call.

The contract compares its Triton kernels with its formulas, in NumPy's long double.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels of sparsemax are Triton kernels")

import onlinesoftmax as osm
from contract import CASES, DEVICE, DTYPES, GPU, Case, Form, forms_of, name_of, run_case
from onlinesoftmax.core.call import Call, Settings
from onlinesoftmax.core.declaration import Operation
from onlinesoftmax.core.options import ScoreOptions
from onlinesoftmax.core.task import Choice
from onlinesoftmax.kernels import registry
from onlinesoftmax.numpy.run import run as run_numpy
from onlinesoftmax.ops import OPERATIONS, also_declared
from onlinesoftmax.torch.run import run
from sparsemax.declare import BACKWARD, FORWARD

TRITON, EAGER = Choice("triton"), Choice("eager")
FORMS = [(operation, form) for operation in (FORWARD, BACKWARD) for form in forms_of(operation)]
SHORT = [case for case in CASES if not case.heavy and case.tensor(torch.float32, "cpu").shape[case.dim] <= 4096]
NAMED = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    with also_declared(FORWARD, BACKWARD):
        yield


def call_of(x: torch.Tensor, choice: Choice, options: ScoreOptions | None = None) -> Call:
    """What the public function of the operation would make of its arguments."""
    return Call(FORWARD, x, Settings(-1, choice=choice), options)


def _cells() -> list[tuple[Operation, Form, torch.dtype, Case]]:
    few = [NAMED["3 x 33"], NAMED["infinities and NaN"]]
    cells = [(*of, dtype, case) for of, dtype, case in itertools.product(FORMS, DTYPES, few)]
    return cells + [(*FORMS[i % len(FORMS)], DTYPES[i % 4], case) for i, case in enumerate(SHORT)]


@pytest.mark.parametrize(
    ("operation", "form", "dtype", "case"), _cells(), ids=lambda v: str(getattr(v, "name", v)).removeprefix("torch.")
)
def test_own_kernels_meet_the_contract(operation: Operation, form: Form, dtype: torch.dtype, case: Case) -> None:
    with np.errstate(all="ignore"):
        run_case(operation, form, case, dtype, "triton/row")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="tests/kernels/test_own_cuda_kernels.py compiles and simulates it without a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("form", forms_of(FORWARD), ids=str)
@pytest.mark.parametrize("name", ["3 x 33", "infinities and NaN", "permuted"])
def test_the_own_cuda_kernel_meets_the_contract(form: Form, dtype: torch.dtype, name: str) -> None:
    with np.errstate(all="ignore"):
        run_case(FORWARD, form, NAMED[name], dtype, "cuda/row")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_autograd_runs_the_own_gradient_beside_that_of_the_formula(dtype: torch.dtype) -> None:
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(3)).to(dtype).to(DEVICE)
    dy = torch.randn(5, 37, generator=torch.Generator().manual_seed(4)).to(dtype).to(DEVICE)
    found = []
    for choice in (TRITON, EAGER):
        logits = x.clone().requires_grad_()
        y = run(call_of(logits, choice, ScoreOptions(scale=2.0, softcap=3.0)))
        found.append((y.detach(), *torch.autograd.grad(y, logits, dy)))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(found[0][0].sum(-1), torch.ones_like(x[:, 0]))


def test_second_derivatives_are_those_of_the_declared_formula() -> None:
    x = torch.randn(2, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: run(call_of(x, TRITON)), (x,))
    with pytest.raises(NotImplementedError, match=r"sparsemax\(\) has no derivative in forward mode"):
        torch.func.jvp(lambda x: run(call_of(x, TRITON)), (x.detach(),), (torch.ones_like(x),))


def test_numpy_and_eager_run_the_formula() -> None:
    x = np.array([[0.0, 0.5, -2.0], [3.0, 0.0, 1.0]], np.float32)
    expected = [[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]
    np.testing.assert_array_equal(run_numpy(Call(FORWARD, x, Settings(-1))), expected)
    np.testing.assert_array_equal(run_numpy(Call(FORWARD, x.T, Settings(0))), np.transpose(expected))
    np.testing.assert_array_equal(run(call_of(torch.from_numpy(x), EAGER)).numpy(), expected)
    for empty in (np.zeros((3, 0)), np.float32(2.0)):
        y = run_numpy(Call(FORWARD, empty, Settings(-1)))
        assert y.shape == np.shape(empty)
        assert (run(call_of(torch.tensor(empty), EAGER)).numpy() == y).all()


@pytest.mark.parametrize(("dim", "error"), [(2, IndexError), (-3, IndexError), (1.0, TypeError)])
def test_a_bad_dim_is_an_error_of_every_way(dim: object, error: type[Exception]) -> None:
    for choice in (TRITON, EAGER, Choice()):
        with pytest.raises(error):
            run(Call(FORWARD, torch.zeros(3, 5), Settings(dim, choice=choice)))


def test_explain_says_what_exists() -> None:
    lines = str(osm.explain((64, 1000), operation="sparsemax", device="h200")).splitlines()
    assert lines[1] == "  cuda/row: a row fits the registers of a warp, which finds its tau by bisection"
    for pair in ("cuda/cluster", "cuda/looped", "triton/looped", "triton/column"):
        assert f"  not {pair}: cannot: sparsemax has no such kernel; it has cuda/row, triton/row, eager/row" in lines
    assert lines[-1] == (
        "  not eager/row: cannot: PyTorch has no function sparsemax; backend='eager' runs its formula in separate "
        "operations"
    )


@pytest.mark.parametrize("operation", [FORWARD, BACKWARD], ids=str)
def test_a_forced_plan_that_does_not_exist_is_an_error_that_says_what_does(operation: Operation) -> None:
    reason = f"{operation} has no such kernel; it has cuda/row, triton/row, eager/row"
    with pytest.raises(osm.PlanError) as error:
        osm.explain((64, 1000), operation=operation.name, device="h200", strategy="looped")
    assert str(error.value) == (
        f"no plan for {operation} of 64 x 1000 float32 on NVIDIA H200 with strategy='looped':\n"
        f"  cuda/looped: {reason}\n  triton/looped: {reason}"
    )
    with pytest.raises(osm.PlanError, match="triton/row: a row of 100000 columns does not fit the registers"):
        osm.explain((64, 100000), operation=operation.name, device="h200")


def test_an_own_kernel_refuses_what_it_cannot_do() -> None:
    plans = osm.explain((64, 1000), operation="sparsemax_backward", device="h200")
    assert (plans.plan.backend, plans.plan.strategy) == ("triton", "row")
    assert "  not cuda/row: cannot: the CUDA kernel of sparsemax computes no gradient" in str(plans).splitlines()


def test_a_call_that_forces_another_strategy_says_what_exists() -> None:
    # What the operation lacks is said before what this machine lacks.
    with pytest.raises(osm.PlanError, match="cuda/grid: sparsemax has no such kernel; it has cuda/row, triton/row"):
        run(call_of(torch.zeros(3, 5), Choice("cuda", "grid")))


def test_results_that_do_not_follow_from_states_are_refused_for_sharded_rows() -> None:
    for operation in (FORWARD, BACKWARD):
        with pytest.raises(NotImplementedError, match=rf"{operation}\(\) is not available if the softmax dimension"):
            operation.check_mergeable()
    OPERATIONS["softmax_backward"].check_mergeable()


def test_the_declarations_end_with_the_block() -> None:
    assert OPERATIONS["sparsemax"] is FORWARD
    with pytest.raises(ValueError, match="declared already: sparsemax"), also_declared(FORWARD):
        pass
    assert OPERATIONS["sparsemax"] is FORWARD
    with pytest.raises(ValueError, match="unknown operation 'other'"):
        osm.explain((3, 5), operation="other")


def test_own_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    if registry.load("triton").interpreted():
        pytest.skip("the interpreter compiles nothing")
    [kernel] = osm.explain((64, 1000), operation="sparsemax", device="h200").compile()
    assert kernel.name == "sparsemax_kernel"
