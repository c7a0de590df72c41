"""`tune`: its grid of shapes, what is proposed for them, and, on a GPU, a small table from end to end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from onlinesoftmax.cli import build
from onlinesoftmax.cli.tune import as_text
from onlinesoftmax.core.device import known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import ITEMSIZE
from onlinesoftmax.kernels import registry
from onlinesoftmax.kernels.cuda.strategy.grid.ring_proposals import SPECIAL_WARPS
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.lab.bench import tune, tune_shapes
from onlinesoftmax.planner import measured as measured_tables
from onlinesoftmax.planner.measured import KEPT_RATIO, Cell, Table, Timing, key_of
from onlinesoftmax.planner.variant import Variant

H200 = known("h200")


def key_of_shape(shape: tune_shapes.Shape) -> Any:
    return key_of(Problem.of(tune_shapes.task(shape)))


TARGET_FORMS = [
    # Operation, outputs, optional operands, and whether a value per element is written.
    ("cross_entropy", (("loss", "m", "l"), (), False)),
    ("cross_entropy", (("loss", "y"), ("dy",), True)),
    ("cross_entropy_backward", (("y",), ("dy", "m", "l"), True)),
    ("token_logprobs", (("y", "m", "l", "entropy"), (), False)),
    ("token_logprobs_backward", (("y",), ("dy", "m", "l", "dlse", "entropy", "dentropy"), True)),
]


def test_losses_are_measured_in_the_forms_that_a_call_runs() -> None:
    found = {}
    for shape in tune_shapes.shapes():
        task = tune_shapes.task(shape)
        if task.operation.has_target:
            given = task.dtypes.keys() - {"x", "target", *task.outputs}
            found[shape.operation, task.outputs] = (given, task.writes_elements)
            assert task.dtypes["target"] == "int64"
            assert {task.dtypes[name] for name in (*given, *task.row_outputs)} <= {"float32"}
            assert task.exact == (shape.dtype == "float32")
    assert found == {(name, outputs): (set(given), writes) for name, (outputs, given, writes) in TARGET_FORMS}


def test_the_grid_has_every_kind_of_shape_once() -> None:
    shapes = tune_shapes.shapes()
    assert len(set(shapes)) == len(shapes)
    assert {(1, 1 << 28), (1, 1 << 20), (1024, 1024), (1 << 20, 64)} <= {(s.rows, s.cols) for s in shapes}
    # The planner looks a table up by aligned and unaligned rows.
    kinds = {key_of_shape(shape) for shape in shapes}
    plain = {(operation, operation != "logsumexp") for operation in ("softmax", "logsumexp", "softmax_backward")}
    targets = {(name, writes) for name, (*_, writes) in TARGET_FORMS}
    assert {(kind.operation, kind.elements, kind.itemsize, kind.unaligned) for kind in kinds} == {
        *((*form, size, False) for form in plain | targets for size in (2, 4)),
        *((*form, size, True) for form in {("softmax", True)} | targets for size in (2, 4)),
    }
    assert set(tune_shapes.shapes(quick=True)).isdisjoint({s for s in shapes if s.rows == 1})


def test_a_table_that_is_broken_off_has_the_full_inputs_first() -> None:
    shapes = tune_shapes.shapes()
    nbytes = [s.rows * s.cols * ITEMSIZE[s.dtype] for s in shapes]
    few = [i for i, count in enumerate(nbytes) if count <= tune_shapes.FULL_BYTES // 4]
    assert few == list(range(few[0], len(shapes)))
    assert {s.cols for s in shapes[: 2 * len(tune_shapes.CLASSES)]} == set(tune_shapes.CLASSES)


@pytest.mark.parametrize(
    ("shape", "backend"),
    [(s, name) for s in tune_shapes.shapes()[::61] for name in tune.BACKENDS if tune_shapes.can_measure(name, s)],
    ids=str,
)
def test_proposals_are_told_apart_by_their_variants(shape: tune_shapes.Shape, backend: str) -> None:
    found = tune_shapes.proposals(shape, H200, backend)
    assert found
    names = Counter((request.plan.strategy, request.plan.variant) for request in found)
    assert max(names.values()) == 1, names.most_common(3)
    assert {request.plan.backend for request in found} == {backend}
    for request in found:
        threads = 32 * request.plan.warps
        assert threads * request.plan.resident <= H200.threads
        if backend == "cuda":
            holders = threads - 32 * SPECIAL_WARPS * bool(request.plan.kernel)
            assert holders % request.plan.lanes == 0


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "unavailable", lambda name: "no NVIDIA GPU")
    result = CliRunner().invoke(build(), ["tune", "--out", str(tmp_path / "table.json")])
    assert result.exit_code == 2
    assert result.stderr == "Error: tune needs the cuda backend: no NVIDIA GPU\n"
    unknown = CliRunner().invoke(build(), ["tune", "--backend", "eager", "--out", str(tmp_path / "table.json")])
    assert unknown.exit_code == 2
    assert "cuda, triton, pallas" in unknown.stderr
    assert not list(tmp_path.iterdir())


class _Clock:
    """A clock for which every call takes as long as its place in the list."""

    def __init__(self, *_: Any) -> None:
        pass

    def on_end(self, calls: Sequence[Any], rounds: int, clean: bool) -> list[float]:
        return [10.0 + i for i, _ in enumerate(calls)]


class _Compiler:
    def __init__(self, arch: str) -> None:
        pass

    def compile(self, requests: Sequence[Request]) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune without a device: nothing is compiled, and nothing is launched."""
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(tune, "CudaClock", _Clock)
    monkeypatch.setattr(tune, "Compiler", _Compiler)
    monkeypatch.setattr(registry, "load", lambda name: SimpleNamespace(prepare=lambda request: lambda x, y, more: None))


SMALL = [
    tune_shapes.Shape("softmax", "bfloat16", 64, 256),
    tune_shapes.Shape("softmax_backward", "float32", 16, 1024),
    tune_shapes.Shape("cross_entropy", "bfloat16", 16, 512, ("loss", "y")),
]


def measured(table: Table, backends: tuple[str, ...], minutes: float | None = None) -> Table:
    import torch

    left = tune.left_of(table, SMALL, backends)
    for table, _ in tune.tune(torch.device("cpu"), H200, left, table, minutes):  # noqa: B007, B020  the last one counts
        pass
    return table


def test_every_variant_that_is_fast_is_kept(no_gpu: None) -> None:
    table = measured(tune.begin(H200, "a test", None), ("cuda", "triton"))
    assert table.every_variant
    for shape in SMALL:
        [cell] = table.cells[key_of_shape(shape)]
        times = [timing.us for timing in cell.timings]
        assert times == sorted(times)
        for backend in ("cuda", "triton"):
            of_backend = [timing for timing in cell.timings if timing.backend == backend]
            assert len(of_backend) > 1
            assert max(timing.us for timing in of_backend) <= KEPT_RATIO * min(timing.us for timing in of_backend)
    again = Table.from_json(json.loads(as_text(table.as_json())))
    assert again.cells == {
        key: [Cell(c.rows, c.cols, c.timings, c.backends) for c in cells] for key, cells in table.cells.items()
    }


def test_what_is_measured_is_not_measured_again(no_gpu: None) -> None:
    table = measured(tune.begin(H200, "a test", None), ("cuda",))
    assert not tune.left_of(table, SMALL, ("cuda",))
    assert [names for _, names in tune.left_of(table, SMALL, ("cuda", "triton"))] == [["triton"]] * len(SMALL)
    both = measured(table, ("cuda", "triton"))
    assert not tune.left_of(both, SMALL, ("cuda", "triton"))
    for key, [cell] in both.cells.items():
        assert [t for t in cell.timings if t.backend == "cuda"] == list(table.cells[key][0].timings)


def test_new_times_replace_those_of_the_same_shape(no_gpu: None) -> None:
    import torch

    key = key_of_shape(SMALL[0])
    slow = Timing("cuda", "row", Variant(threads=128, lanes=32, depth=1), 1e6)
    other, older = Cell(9, 256, (slow,)), Cell(SMALL[0].rows, SMALL[0].cols, (slow,), ("cuda", "triton"))
    table = Table(H200.name, "a test", 4270.0, {key: [older, other]})
    left = tune.left_of(None, SMALL[:1], ["cuda"])
    [(table, _)] = tune.tune(torch.device("cpu"), H200, left, table)
    new, kept = table.cells[key]
    assert kept == other
    assert new.backends == ("cuda", "triton")
    assert new.timings
    assert slow not in new.timings


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_every_tensor_of_elements_has_memory_of_its_own(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, shape: tune_shapes.Shape
) -> None:
    import torch

    ran: list[dict[str, Any]] = []

    def prepare(request: Request) -> Any:
        return lambda x, first, more: ran.append({"x": x, request.task.outputs[0]: first, **more})

    monkeypatch.setattr(registry, "load", lambda name: SimpleNamespace(prepare=prepare))
    tuner = tune.Tuner(torch.device("cpu"), tune_shapes.input_bytes(shape))
    tuner.cell(shape, tune_shapes.proposals(shape, H200))
    sizes = (shape.rows, shape.cols)
    nbytes = tune_shapes.input_bytes(shape)
    task = tune_shapes.task(shape)
    for tensors in ran:
        starts = sorted(t.data_ptr() for t in tensors.values() if t.shape == sizes)
        assert len(starts) == task.operation.inputs + task.writes_elements
        assert all(b - a >= nbytes for a, b in pairwise(starts))
        assert {str(tensors["x"].dtype)} == {f"torch.{shape.dtype}"}
    assert ran


def test_operations_that_only_read_are_timed_without_dirty_lines(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked: list[bool] = []

    class Clock(_Clock):
        def on_end(self, calls: Sequence[Any], rounds: int, clean: bool) -> list[float]:
            asked.append(clean)
            return super().on_end(calls, rounds, clean)

    monkeypatch.setattr(tune, "CudaClock", Clock)
    for shape, clean in ((SMALL[0], False), (tune_shapes.Shape("logsumexp", "float32", 16, 1024), True)):
        asked.clear()
        tune.Tuner(torch.device("cpu"), tune_shapes.input_bytes(shape)).cell(shape, tune_shapes.proposals(shape, H200))
        assert set(asked) == {clean}


def test_long_rows_are_measured_in_large_inputs_too() -> None:
    """The losses and gradients of the records have 2^28 bytes of logits and more."""
    shapes = tune_shapes.shapes()
    for operation, outputs, cols in [
        ("cross_entropy", ("loss", "y"), 128256),
        ("cross_entropy", ("loss", "y"), 50257),
        ("softmax_backward", (), 262144),
        ("logsumexp", (), 151936),
    ]:
        sizes = [
            tune_shapes.input_bytes(shape)
            for shape in shapes
            if (shape.operation, shape.outputs, shape.cols) == (operation, outputs, cols)
        ]
        assert min(sizes) < tune_shapes.FULL_BYTES + 1
        assert max(sizes) > 0.99 * tune_shapes.LARGE_BYTES


def test_a_part_of_the_grid_is_chosen() -> None:
    shapes = tune_shapes.shapes()
    chosen = tune_shapes.Part(["cross_entropy"], ["y", "loss"], ["bfloat16"], [128256, 50257]).of(shapes)
    assert {shape[:2] for shape in chosen} == {("cross_entropy", "bfloat16")}
    assert {shape.outputs for shape in chosen} == {("loss", "y")}
    assert {shape.cols for shape in chosen} == {128256, 50257}
    assert set(chosen) < set(shapes)
    assert tune_shapes.Part().of(shapes) == shapes
    sizes = tune_shapes.Part(["logsumexp", "softmax"], sizes=[(8192, 8192), (3, 5)]).of(shapes)
    assert sorted(sizes) == sorted(
        tune_shapes.Shape(name, dtype, rows, cols)
        for name in ("logsumexp", "softmax")
        for dtype in ("bfloat16", "float32")
        for rows, cols in ((8192, 8192), (3, 5))
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--op", "softmaxx"], "unknown operation 'softmaxx'; there are: softmax, "),
        (["--op", "softmax", "--outputs", "loss,y"], "unknown outputs 'loss,y'; there are: y"),
        (["--dtype", "float64"], "unknown dtype 'float64'; there are: bfloat16, float32"),
        (["--op", "cross_entropy", "--cols", "9"], "unknown number of columns '9'"),
        (["--shape", "8x8x8"], "rows and columns are measured"),
        (["--shape", "eight"], "shape 'eight'"),
        (["--shape", "8x8", "--cols", "1000"], "leave one of them out"),
        (["--quick", "--op", "softmax"], "--quick has six shapes of its own"),
        (["--resume", "--replace"], "leave one of them out"),
    ],
)
def test_a_choice_that_cannot_be_made_is_an_error(options: list[str], reason: str) -> None:
    result = CliRunner().invoke(build(), ["tune", *options])
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())


@pytest.fixture
def tune_command(no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command without a GPU; the cache folder of the run."""
    import torch

    from onlinesoftmax.cli import tune as command
    from onlinesoftmax.core import cache
    from onlinesoftmax.torch import device

    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(command, "_backends", lambda asked: ["cuda"])
    monkeypatch.setattr(command, "torch_device", lambda text: torch.device("cuda", 0))
    monkeypatch.setattr(device, "from_torch", lambda kind, index: H200)
    monkeypatch.setattr(
        "onlinesoftmax.lab.bench.record_file.record", lambda *_: {"git": {"commit": "0"}, "date": "today"}
    )
    cpu = torch.device("cpu")
    made = tune.Tuner
    monkeypatch.setattr(tune, "Tuner", lambda where, largest: made(cpu, largest))
    return tmp_path


def test_a_table_of_few_shapes_does_not_hide_the_package_s(tune_command: Path) -> None:
    asked = ["tune", "--op", "softmax", "--shape", "64x256", "--dtype", "float32"]
    refused = CliRunner().invoke(build(), asked)
    assert refused.exit_code == 2
    assert "--replace" in refused.stderr
    assert not list(tune_command.iterdir())


def test_a_part_is_replaced_in_the_table_of_the_package(tune_command: Path) -> None:
    package = json.loads((Path(measured_tables.__file__).parent / "tables" / "nvidia-h200.json").read_text())
    asked = ["tune", "--op", "cross_entropy", "--outputs", "loss,y", "--shape", "64x4096", "--dtype", "float32"]
    result = CliRunner().invoke(build(), [*asked, "--replace", "--json"])
    assert result.exit_code == 0, result.output
    path = Path(json.loads(result.stdout)["table"])
    assert path.parent == tune_command
    table, before = Table.from_json(json.loads(path.read_text())), Table.from_json(package)
    key = key_of_shape(tune_shapes.Shape("cross_entropy", "float32", 64, 4096, ("loss", "y")))
    assert table.cells.keys() == before.cells.keys()
    for other, cells in before.cells.items():
        assert table.cells[other][: len(cells)] == cells
        assert [(cell.rows, cell.cols) for cell in table.cells[other][len(cells) :]] == [(64, 4096)] * (other == key)
    assert table.source.startswith(before.source)


def test_no_shape_is_begun_when_the_time_is_over(no_gpu: None) -> None:
    assert not measured(tune.begin(H200, "a test", None), ("cuda",), minutes=0).cells


def test_a_table_of_one_variant_a_strategy_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onlinesoftmax.cli.tune import TableFile

    path = tmp_path / "table.json"
    cell = Cell(1024, 256, (Timing("cuda", "row", Variant(threads=128, lanes=32, depth=1), 4.5),))
    whole = Table(H200.name, "commit 0", 4270.0, {key_of(Problem("softmax", 1024, 256, "bfloat16")): [cell]})
    path.write_text(as_text(whole.as_json()), encoding="utf-8")
    assert TableFile(path, False).begun(H200.name) == whole
    path.write_text(as_text({**whole.as_json(), "every_variant": False}), encoding="utf-8")
    with pytest.raises(typer.Exit, match="2"):
        TableFile(path, False).begun(H200.name)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", tune.BACKENDS)
def test_a_small_table_from_end_to_end(backend: str, tmp_path: Path) -> None:
    if reason := tune.unavailable(backend):
        pytest.skip(reason)
    path = tmp_path / "table.json"
    asked = ["tune", "--quick", "--backend", backend, "--out", str(path)]
    result = CliRunner().invoke(build(), [*asked, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["shapes"] == 6
    table = Table.from_json(json.loads(path.read_text(encoding="utf-8")))
    cells = [cell for cells in table.cells.values() for cell in cells]
    assert {(cell.rows, cell.cols) for cell in cells} == {(1024, 256), (1024, 4096), (1024, 65536)}
    for cell in cells:
        assert [timing.us for timing in cell.timings] == sorted(timing.us for timing in cell.timings)
        assert all(timing.us > 0 for timing in cell.timings)
        assert {timing.backend for timing in cell.timings} == {backend}

    again = CliRunner().invoke(build(), [*asked, "--resume"])
    assert again.exit_code == 0, again.output
    assert Table.from_json(json.loads(path.read_text(encoding="utf-8"))).cells == table.cells
    for content in ("{}", "not JSON", json.dumps({**table.as_json(), "device": "another"})):
        path.write_text(content, encoding="utf-8")
        refused = CliRunner().invoke(build(), [*asked, "--resume"])
        assert refused.exit_code == 2
        assert "--resume" in refused.stderr
        assert path.read_text(encoding="utf-8") == content
