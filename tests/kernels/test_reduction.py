"""The reduction of a loss, in CUDA on simulated threads and in Triton's interpreter, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from contract import DEVICE, GPU
from cuda_simulator import launch_reduction, simulate_reduction
from onlinesoftmax.kernels import registry
from onlinesoftmax.kernels.cuda import launch as launches
from onlinesoftmax.kernels.cuda import reduction as cuda
from onlinesoftmax.kernels.cuda.compile import usage
from onlinesoftmax.kernels.reduction import Reduction
from onlinesoftmax.torch.prepare import INTEGERS
from pairs import with_each

SIZES = (1, 2, 31, 33, 1000, 4097, 100001)
CLASSES, IGNORED = 40, 7
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Form(NamedTuple):
    """Inputs of a reduction: losses, and targets or an earlier divisor; `weighted` and `keeps` concern the divisor."""

    adds: bool = True
    counts: bool = False
    divides: bool = False
    weighted: bool = False
    keeps: bool = False

    def __str__(self) -> str:
        return "+".join(name for name, value in self._asdict().items() if value)


FORMS = [
    Form(), Form(divides=True), Form(counts=True), Form(counts=True, weighted=True),
    Form(adds=False, counts=True), Form(adds=False, counts=True, weighted=True), Form(counts=True, keeps=True),
]  # fmt: skip


def _cells() -> list[Any]:
    """Every form meets every number of rows; dtypes take turns."""
    cells = []
    for (i, form), (j, rows) in itertools.product(enumerate(FORMS), enumerate(SIZES)):
        accumulator = ("float32", "float64")[(i + j) % 2]
        result = (*FLOATS[:3], "bfloat16")[(i + j) // 2 % 4] if accumulator == "float32" else "float64"
        target, weight = INTEGERS[(i + j) % 5], FLOATS[(i + j) % 4]
        one = Reduction(
            rows, accumulator, result if form.adds else None, form.divides, target if form.counts else None,
            weight if form.weighted else None, CLASSES, IGNORED, form.keeps,
        )  # fmt: skip
        cells.append((f"{form}-{rows}-{accumulator}", one, form, rows))
    # In few cells, forms, numbers of rows and dtypes meet; on a GPU, Triton's kernel runs all.
    few = {cell[0] for cell in with_each(cells, lambda cell: [*combinations_of(cell[1], cell[2]), cell[3]])}
    late = pytest.mark.exhaustive
    return [pytest.param(one, id=name, marks=() if GPU or name in few else late) for name, one, *_ in cells]


def combinations_of(one: Reduction, form: Form) -> Any:
    """Each form with each accumulator, and each dtype of a result, of targets and of weights."""
    return (form, one.accumulator), ("result", one.result), ("target", one.target), ("weight", one.weight)


def inputs_of(one: Reduction, seed: int = 0) -> dict[str, torch.Tensor]:
    """Losses with outliers; targets of which some are ignored and some are no class, as far as their dtype has them."""
    random = torch.Generator().manual_seed(seed)
    losses = 3 * torch.rand(one.rows, generator=random, dtype=torch.float64)
    losses[:: one.rows // 3 + 1] *= 1e4
    target = torch.randint(CLASSES, (one.rows,), generator=random)
    target[5::11], target[3::17], target[4::19] = IGNORED, CLASSES, -1
    found = {"losses": losses, "target": target, "weight": torch.rand(CLASSES, generator=random, dtype=torch.float64)}
    found["count"] = torch.tensor([torch.nan, 3.0], dtype=torch.float64)
    found["divisor"] = torch.full((2,), torch.nan, dtype=torch.float64)
    return {name: found[name].to(getattr(torch, dtype)) for name, dtype in one.tensors.items()}


def expected(one: Reduction, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """(total, divisor) in float64."""
    total = float(inputs["losses"].double().sum()) if one.result else 0.0
    divisor = float(inputs["count"][1]) if one.divides else 1.0
    if one.target:
        target = inputs["target"].long()
        counts = target != one.ignore_index
        divisor = float(counts.sum())
        if one.weight:
            counts &= (target >= 0) & (target < one.classes)
            wide = inputs["weight"].to(getattr(torch, one.accumulator)).double()
            divisor = float(wide[target[counts]].sum())
    return total / divisor if divisor else (torch.nan if total == 0 else torch.inf), divisor


def check(one: Reduction, inputs: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    """One unit in the last place for each of the roundings: of the divisor, of the quotient, and of the result."""
    total, divisor = expected(one, inputs)
    unit = torch.finfo(getattr(torch, one.accumulator)).eps
    if one.keeps:
        both = torch.tensor([1 / divisor if divisor else torch.inf, divisor], dtype=torch.float64)
        torch.testing.assert_close(inputs["divisor"].double(), both, rtol=unit, atol=0)
    if one.result:
        wanted = torch.tensor([total], dtype=torch.float64)
        tolerance = unit + torch.finfo(out.dtype).eps / 2
    else:
        wanted = torch.tensor([1 / divisor if divisor else torch.inf, divisor], dtype=torch.float64)
        tolerance = unit
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=tolerance, atol=0, equal_nan=True)


def as_array(x: torch.Tensor) -> NDArray[Any]:
    """The memory of a tensor on the CPU as an array; bfloat16 as uint16."""
    found: NDArray[Any] = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return found


def new_mail() -> NDArray[np.uint64]:
    """The empty mailboxes of the blocks."""
    return np.full(cuda.MAIL_WORDS, -1).view(np.uint64)


def new_out(one: Reduction) -> torch.Tensor:
    """The output of a reduction, filled with NaN."""
    dtype = getattr(torch, one.result or one.accumulator)
    return torch.full((1 if one.result else 2,), torch.nan, dtype=dtype)


Run = Callable[[Reduction, dict[str, torch.Tensor]], torch.Tensor]


@pytest.fixture(params=["cuda", "triton"])
def run(request: pytest.FixtureRequest) -> Run:
    """A function that reduces tensors of the CPU; all words of the CUDA kernel's mailboxes are empty again."""
    folder, mail = request.getfixturevalue("folder") if request.param == "cuda" else None, new_mail()

    def by_simulator(one: Reduction, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out = new_out(one)
        simulate_reduction(one, {name: as_array(x) for name, x in {**inputs, "out": out}.items()}, mail, folder)
        assert np.array_equal(mail, new_mail())
        return out

    def by_triton(one: Reduction, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out, tensors = new_out(one).to(DEVICE), {name: x.to(DEVICE) for name, x in inputs.items()}
        registry.small_kernels("triton", "reduction").bind(one)(out, tensors)
        if one.keeps:
            inputs["divisor"].copy_(tensors["divisor"])
        return out.cpu()

    return by_simulator if request.param == "cuda" else by_triton


@pytest.mark.parametrize("one", _cells())
def test_values(one: Reduction, run: Run) -> None:
    inputs = inputs_of(one)
    first = run(one, inputs)
    check(one, inputs, first)
    # Blocks that finish in another order change no bit.
    assert all(torch.equal(run(one, inputs), first) for _ in range(2))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_launch_passes_what_the_kernel_reads(
    form: Form, folder: Path, launch_on_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch for a GPU, with a driver that runs the kernel on the host."""
    made: dict[Any, torch.Tensor] = {}
    for rows in (33, 40000):
        one = Reduction(
            rows, "float32", "bfloat16" if form.adds else None, form.divides, "int32" if form.counts else None,
            "float16" if form.weighted else None, CLASSES, IGNORED, form.keeps,
        )  # fmt: skip

        launch_on_host(lambda parameter, blocks, one=one: launch_reduction(one, parameter, blocks, folder))
        # The words of a stream, filled when they are made.
        monkeypatch.setattr(
            launches, "words_of_stream",
            lambda use, count, value, *_: made.setdefault(use, torch.full((count,), value, dtype=torch.int64)),
        )  # fmt: skip
        run = cuda.bind(one)
        # The second launch takes the arguments of the first, with other tensors.
        for seed in (0, 1):
            inputs, out = inputs_of(one, seed), new_out(one)
            run(out, inputs)
            check(one, inputs, out)


@pytest.mark.parametrize("weight", [None, "float32"])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("rows", [3, 20000])
def test_all_rows_are_ignored(rows: int, adds: bool, weight: str | None, run: Run) -> None:
    """0 / 0 is NaN, as in PyTorch; the divisor is 0."""
    one = Reduction(rows, "float32", "float32" if adds else None, False, "int64", weight, CLASSES, -100)
    inputs = inputs_of(one) | {"target": torch.full((rows,), -100)}
    if adds:
        inputs["losses"] = torch.zeros(rows)
    check(one, inputs, run(one, inputs))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("accumulator", ["float32", "float64"])
def test_a_loss_that_is_not_finite(accumulator: str, value: float, run: Run) -> None:
    one = Reduction(40000, accumulator, accumulator)
    inputs = inputs_of(one)
    inputs["losses"][39000] = value
    out = run(one, inputs)
    assert torch.equal(out.isnan(), torch.tensor([value != value]))
    assert value != value or out.item() == value


@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_ignore_index_that_the_dtype_of_the_targets_does_not_have(dtype: str, run: Run) -> None:
    """-100 is no uint8, and not the same as 156; 300 is no int8, and not the same as 44."""
    for ignored, alias in ((-100, 156), (300, 44)):
        kind = getattr(torch, dtype)
        target = torch.tensor([alias if alias <= torch.iinfo(kind).max else 1, 2, 3]).to(kind)
        one = Reduction(3, "float32", None, False, dtype, None, 1000, ignored)
        assert run(one, {"target": target})[1] == 3


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_cuda_compiles_without_spills(form: Form, turn: int, log_of: Any) -> None:
    """Every result, form and architecture meets every other in two turns; in one, a form has two of four results."""
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    for i, result in [*enumerate(FLOATS)][(FORMS.index(form) + turn) % 2 :: 2]:
        arch = ("sm_80", "sm_90", "sm_100")[(i + FORMS.index(form)) % 3]
        accumulator = "float64" if result == "float64" else "float32"
        target, weight = INTEGERS[(i + FORMS.index(form)) % 5], FLOATS[(i + FORMS.index(form)) % 4]
        one = Reduction(
            1, accumulator, result if form.adds else None, form.divides, target if form.counts else None,
            weight if form.weighted else None, keeps=form.keeps,
        )  # fmt: skip
        used = usage(log_of(cuda.source(one), arch))
        assert used["registers"] <= 65536 // cuda.THREADS
        assert not used["spills"]
        assert not used["stack"]


def test_one_block_takes_a_usual_batch() -> None:
    blocks = [cuda.launch_of(Reduction(rows, "float32")).blocks for rows in (1, 4096, 4097, 1 << 18, 1 << 31)]
    assert blocks == [1, 1, 2, 64, cuda.MOST_BLOCKS]
    assert cuda.MOST_BLOCKS <= cuda.THREADS
