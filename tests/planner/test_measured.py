"""Measured tables: what they hold, and the plans that follow from them."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from onlinesoftmax.core.device import KNOWN, known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import Choice
from onlinesoftmax.kernels.cuda.strategy.row.packed_proposals import PACKED
from onlinesoftmax.planner import measured
from onlinesoftmax.planner.fastest import anchors
from onlinesoftmax.planner.measured import KEPT_RATIO, Cell, Key, Table, Timing, key_of, slug, table_for
from onlinesoftmax.planner.plan import Plan, Planner, Strategies, plan
from onlinesoftmax.planner.price import LAUNCH_US
from onlinesoftmax.planner.strategies import FOR_JAX, TABLE
from onlinesoftmax.planner.variant import Variant

H200 = known("h200")
SHIPPED = sorted(
    path.name
    for path in resources.files("onlinesoftmax.planner").joinpath("tables").iterdir()
    if path.name.startswith("nvidia-")
)
VOCABULARIES = (129280, 151936, 201088, 32001, 49153)
FAST, SLOW = Variant(threads=512, chunks=2), Variant(threads=1024, chunks=2)
ROW = Variant(threads=128, lanes=32, depth=1, terms=True)


def shipped(name: str) -> Table:
    text = resources.files("onlinesoftmax.planner").joinpath("tables").joinpath(name).read_text(encoding="utf-8")
    return Table.from_json(json.loads(text))


def table_of(*cells: Cell, every_variant: bool = True, unaligned: bool = False) -> Table:
    """A table of bfloat16 softmax, as if measured on an H200."""
    return Table("made up", "a test", H200.bandwidth, {Key("softmax", True, 2, unaligned): list(cells)}, every_variant)


def looped(us: float, variant: Variant = FAST) -> Timing:
    return Timing("cuda", "looped", variant, us)


def softmax(rows: int, cols: int) -> Problem:
    return Problem("softmax", rows, cols, "bfloat16")


@pytest.mark.parametrize("cols", [7, 100, 1000, 50257, 1 << 20])
def test_measured_times_grow_with_the_rows(cols: int) -> None:
    table = table_for(H200)
    times = [plan(softmax(rows, cols), H200, table=table).estimate_us for rows in (1, 3, 64, 1000, 8192, 1 << 17)]
    # A measurement is a few percent off, so neighbours may trade places by that.
    assert all(later > 0.9 * earlier for earlier, later in itertools.pairwise(times)), times
    assert times[-1] > times[0]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_table_is_small_and_is_what_its_json_says(name: str) -> None:
    path = resources.files("onlinesoftmax.planner").joinpath("tables").joinpath(name)
    assert len(path.read_bytes()) < 1 << 20
    table = shipped(name)
    assert name == f"{slug(table.device)}.json"
    again = Table.from_json(json.loads(json.dumps(table.as_json())))
    assert again.cells == table.cells
    assert (again.device, again.source, again.bandwidth) == (table.device, table.source, table.bandwidth)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_variants_of_a_shipped_table_are_still_proposed(name: str) -> None:
    """A variant that is proposed no more for the shape that was measured is a stale row of the table."""
    table = shipped(name)
    pairs = {(backend, strategy): propose for backend, strategy, propose in (*FOR_JAX, *TABLE)}
    stale = []
    for key, cells in table.cells.items():
        for cell in cells[:: max(1, len(cells) // 20)]:
            problem = key.problem(cell.rows, cell.cols, {2: "bfloat16", 4: "float32"}[key.itemsize])
            for pair in {(timing.backend, timing.strategy) for timing in cell.timings}:
                options = pairs[pair](problem, H200)
                proposed = set() if isinstance(options, str) else {option.variant for option in options}
                measured_ones = {timing.variant for timing in cell.timings if (timing.backend, timing.strategy) == pair}
                stale += [(key, cell.rows, cell.cols, *pair, variant) for variant in measured_ones - proposed]
    assert not stale, stale[:3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cols", VOCABULARIES)
def test_a_length_between_cells_is_planned_as_well_as_its_neighbours(cols: int, dtype: str) -> None:
    """The chosen plan reads a row once, and is expected to be within a tenth of the cells on both sides."""
    table = table_for(H200)
    assert table is not None
    problem = Problem("softmax", 4096, cols, dtype)
    chosen = plan(problem, H200, table=table)
    assert chosen.reads == 1
    beside = []
    for cell, *_ in anchors(table, problem, ["cuda"]):
        there = Problem("softmax", cell.rows, cell.cols, dtype)
        beside.append(cell.timings[0].us * H200.bandwidth * 1e3 / (there.read_bytes + there.write_bytes))
    assert chosen.estimate_us / chosen.floor_us < 1.1 * max(beside)


def test_a_time_is_launches_plus_bytes() -> None:
    table = table_of(Cell(1024, 4096, (looped(10.0),)))
    chosen = plan(softmax(8192, 4096), H200, Choice("cuda", "looped"), table=table)
    assert (chosen.strategy, chosen.variant) == ("looped", FAST)
    # Eight times the bytes take less than eight times as long, by launch and latency; a bit of a row takes a launch.
    assert 4 * 10.0 < chosen.estimate_us < LAUNCH_US + 8 * (10.0 - LAUNCH_US)
    tiny = plan(softmax(1, 64), H200, Choice("cuda", "looped"), table=table)
    assert LAUNCH_US < tiny.estimate_us < 10.0


def test_float64_takes_the_times_of_float32_for_twice_the_bytes() -> None:
    times = {}
    for dtype in ("float32", "float64"):
        problem = Problem("softmax", 4096, 4096, dtype)
        chosen = plan(problem, H200, Choice("cuda", "looped", False), table=table_for(H200))
        assert chosen.measured_on
        assert chosen.rank_us > chosen.floor_us
        times[dtype] = chosen.rank_us
    assert times["float64"] == pytest.approx(2 * times["float32"], rel=0.1)


def test_times_between_cells_lie_between_theirs() -> None:
    times = {(rows, cols): rows * cols / 50000 for rows in (512, 1024) for cols in (4096, 8192)}
    table = table_of(*(Cell(*shape, (looped(us),)) for shape, us in times.items()))
    for shape, us in times.items():
        assert plan(softmax(*shape), H200, Choice("cuda", "looped"), table=table).estimate_us == pytest.approx(us)
    middle = plan(softmax(700, 6000), H200, Choice("cuda", "looped"), table=table).estimate_us
    assert times[512, 4096] < middle < times[1024, 8192]


def test_both_sides_choose_the_variant() -> None:
    """The variant that is the fastest of the nearest cell is not taken where it is slow on the other side."""
    below = Cell(1024, 32768, (looped(30.0), looped(30.5, SLOW)))
    above = Cell(1024, 65536, (looped(60.0, SLOW), looped(80.0)))
    forced = Choice("cuda", "looped")
    assert plan(softmax(1024, 32768), H200, forced, table=table_of(below, above)).variant == FAST
    assert plan(softmax(1024, 49152), H200, forced, table=table_of(below, above)).variant == SLOW
    assert plan(softmax(1024, 36000), H200, forced, table=table_of(below)).variant == FAST


def test_a_variant_that_cannot_hold_the_row_is_not_taken() -> None:
    short = Variant(threads=128, lanes=128, depth=1)
    below = Cell(1024, 8192, (Timing("cuda", "row", short, 8.0), looped(12.0)))
    chosen = plan(softmax(1024, 50000), H200, Choice("cuda"), table=table_of(below))
    assert chosen.variant != short
    assert "row" not in {o.strategy for o in Planner(H200, table=table_of(below)).alternatives(softmax(1024, 1 << 18))
                         if isinstance(o, Plan) and o.variant == short}  # fmt: skip


def test_fewer_blocks_on_chip_than_measured_count_against_a_variant() -> None:
    """One more chunk a thread takes registers, so that fewer blocks are resident."""
    cell, few, many = 196608, Variant(threads=256, blocks=16, terms=True), Variant(threads=128, blocks=16)
    timings = (Timing("cuda", "cluster", few, 69.0), Timing("cuda", "cluster", many, 69.5))
    table = table_of(Cell(341, cell, timings))
    assert plan(softmax(341, cell), H200, table=table).variant == few
    assert plan(softmax(341, cell + 4480), H200, table=table).variant == many


def test_times_of_long_rows_say_nothing_of_short_ones_except_with_cuda() -> None:
    """The H200's unaligned rows were measured with Triton from 32001 columns on."""
    table = table_for(known("h200"))
    assert table is not None
    short, long = (Problem("softmax", 65536, cols, "bfloat16") for cols in (1025, 32001))
    assert not anchors(table, short, ["triton"])
    assert anchors(table, short, ["cuda"])
    assert anchors(table, long, ["triton"])
    chosen = plan(short, known("h200"), Choice("triton", None, False), table=table)
    assert (chosen.strategy, chosen.measured_on) == ("row", "")


def test_one_long_row_is_not_given_to_one_program() -> None:
    """Triton was measured with many rows of 2^17 to 2^20 columns, where each program takes one."""
    table = table_for(known("h200"))
    for cols in (1 << 17, 1 << 18, 1 << 20):
        problem = Problem("softmax", 1, cols, "bfloat16")
        assert plan(problem, known("h200"), Choice("triton", None, False), table=table).splits > 1, cols


@pytest.mark.parametrize("gpu", ["h100", "h200", "a100"])
@pytest.mark.parametrize("rows", [127, 3001, 200000])
def test_few_short_rows_are_moved_as_one_stretch(rows: int, gpu: str) -> None:
    """The estimate of this kernel is compared with measured times, also where a call is hardly more than its launch."""
    for cols, dtype in ((1, "float32"), (3, "float32"), (10, "float16"), (17, "bfloat16"), (63, "bfloat16")):
        problem = Problem("softmax", rows, cols, dtype)
        assert plan(problem, known(gpu), table=table_for(known(gpu))).kernel == PACKED, problem


@pytest.mark.parametrize(("rows", "cols", "dtype"), [(4096, 32768, "bfloat16"), (16384, 8192, "float32")])
def test_a_gradient_that_fits_is_read_once_by_triton(rows: int, cols: int, dtype: str) -> None:
    """`row` reached 0.98 and 1.03 of a copy on an H200 here, and `looped` 0.79 and 0.89."""
    table = table_for(known("h200"))
    problem = Problem("softmax_backward", rows, cols, dtype)
    assert plan(problem, known("h200"), Choice("triton", None, False), table=table).strategy == "row"


def test_what_a_cell_does_not_name_counts_as_slow() -> None:
    table = table_of(Cell(1024, 4096, (looped(10.0),)))
    found = {(o.backend, o.strategy): o for o in Planner(H200, table=table).alternatives(softmax(1024, 4096))}
    for option in found.values():
        if isinstance(option, Plan) and option.strategy != "looped":
            assert option.estimate_us >= KEPT_RATIO * 10.0 - 1e-9
    # Backends that were not measured are compared among themselves by their estimates.
    assert plan(softmax(1024, 4096), H200, Choice("triton"), table=table) == plan(
        softmax(1024, 4096), H200, Choice("triton")
    )
    assert plan(softmax(1024, 4096), H200, unavailable=(("cuda", "absent"),), table=table).backend == "triton"


def test_a_later_backend_wins_only_where_it_is_clearly_faster() -> None:
    """Two measurements of one kernel differ by 1 to 2 percent, and Triton compiles and launches more slowly."""
    proposed = next(propose for backend, strategy, propose in TABLE if (backend, strategy) == ("triton", "looped"))
    options = proposed(softmax(1024, 4096), H200)
    assert not isinstance(options, str)
    for triton_us, backend in ((9.9, "cuda"), (9.0, "triton")):
        other = Timing("triton", "looped", options[0].variant, triton_us)
        cell = Cell(1024, 4096, (other, looped(10.0)), ("cuda", "triton"))
        chosen = plan(softmax(1024, 4096), H200, table=table_of(cell))
        assert (chosen.backend, chosen.estimate_us) == (backend, pytest.approx({"cuda": 10.0}.get(backend, triton_us)))


def test_operations_without_terms_use_the_blocks_of_those_with_them() -> None:
    table = table_of(Cell(100, 1024, (Timing("cuda", "row", ROW, 5.0),)))
    chosen = plan(Problem("log_softmax", 100, 1024, "bfloat16"), H200, table=table)
    assert (chosen.strategy, chosen.lanes, chosen.terms) == ("row", 32, False)
    assert chosen.estimate_us == pytest.approx(5.0)


def test_a_table_says_nothing_of_other_layouts_and_dtypes() -> None:
    table = table_of(Cell(100, 1024, (looped(10.0),)))
    strided = Problem("softmax", 200, 1000, "bfloat16", interleaved=100)
    for problem in (strided, Problem("softmax", 200, 1000, "float32")):
        assert plan(problem, H200, table=table) == plan(problem, H200)
    # The times of aligned rows stand for those of unaligned ones where no others were measured.
    assert key_of(softmax(200, 1001)).unaligned
    assert plan(softmax(200, 1001), H200, table=table).strategy == "looped"


def test_times_of_aligned_rows_stand_for_those_of_much_longer_unaligned_ones() -> None:
    short, long = Cell(1 << 16, 1024, (looped(10.0),)), Cell(64, 1 << 20, (looped(20.0),))
    key = Key("softmax", True, 2, unaligned=True)
    table = replace(table_of(long), cells={key: [short], key._replace(unaligned=False): [long]})
    lengths = [[anchor.cell.cols for anchor in anchors(table, softmax(64, cols), ("cuda",))] for cols in (2047, 2049)]
    assert lengths == [[1024], [1 << 20]]
    # With no other times than those of much shorter rows, these are used.
    [anchor] = anchors(table_of(short, unaligned=True), softmax(64, (1 << 20) + 1), ("cuda",))
    assert anchor.cell.cols == 1024


def test_jax_is_planned_by_the_rows_of_pallas() -> None:
    cuda_alone = table_of(Cell(1024, 4096, (looped(1.0),)))
    problem = softmax(1024, 4096)
    untuned = plan(problem, H200, strategies=FOR_JAX)
    assert plan(problem, H200, table=cuda_alone, strategies=FOR_JAX) == untuned
    variant = Variant(tile=8192)
    cell = Cell(1024, 4096, (looped(1.0), Timing("pallas", "looped", variant, 9.0)), ("cuda", "pallas"))
    chosen = plan(problem, H200, table=table_of(cell), strategies=FOR_JAX)
    assert (chosen.backend, chosen.strategy, chosen.variant) == ("pallas", "looped", variant)
    assert chosen.estimate_us == pytest.approx(9.0)
    # XLA compiles other code for unaligned rows, so the times of aligned ones are not used.
    unaligned = softmax(1024, 4095)
    assert plan(unaligned, H200, table=table_of(cell), strategies=FOR_JAX) == plan(unaligned, H200, strategies=FOR_JAX)


def test_a_gpu_without_a_table_borrows_one_and_a_cpu_does_not() -> None:
    assert table_for(known("a100")) == table_for(H200)
    assert table_for(known("cpu")) is None
    # The part of a time that is not a launch is scaled by bandwidth, and every GPU plans with what it can run.
    for name in KNOWN:
        gpu = known(name)
        if name != "cpu" and table_for(gpu) == table_for(H200):
            problem = softmax(65536, 1024)
            here, there = (plan(problem, device, table=table_for(device)) for device in (H200, gpu))
            if (here.strategy, here.variant) == (there.strategy, there.variant):
                assert (there.estimate_us - LAUNCH_US) * gpu.bandwidth == pytest.approx(
                    (here.estimate_us - LAUNCH_US) * H200.bandwidth, rel=0.02
                )
    long = softmax(4096, 50257)
    assert plan(long, H200, table=table_for(H200)).strategy == "cluster"
    assert plan(long, known("a100"), table=table_for(known("a100"))).strategy in ("row", "looped")


def test_times_of_the_own_operation_come_before_those_of_its_stand_in() -> None:
    outputs = {True: ("loss", "y"), False: ("loss",)}
    other = Variant(threads=512, chunks=2)
    cells = {
        Key("softmax", True, 2, False): [Cell(1024, 32768, (looped(100.0),))],
        Key("cross_entropy", True, 2, False): [Cell(1024, 32768, (looped(90.0, other),))],
        Key("logsumexp", False, 2, False): [Cell(1024, 32768, (looped(50.0),))],
    }
    table = Table("made up", "a test", H200.bandwidth, cells)

    def timings(operation: str, writes_elements: bool) -> list[float]:
        written = outputs[writes_elements] if operation == "cross_entropy" else ()
        [anchor] = anchors(table, Problem(operation, 1024, 32768, "bfloat16", outputs=written), ("cuda",))
        return [timing.us for timing in anchor.cell.timings]

    assert timings("cross_entropy", True) == [90.0]
    assert timings("cross_entropy", False) == [50.0]
    assert timings("log_softmax", True) == timings("cross_entropy_backward", True) == [100.0]


def test_aligned_rows_of_the_own_operation_come_before_unaligned_ones_of_its_stand_in() -> None:
    """The plan of softmax with the least time was a third slower than the best for a loss on an H100."""
    key = Key("softmax", True, 2, unaligned=True)
    cells = {
        key: [Cell(1024, 32001, (looped(100.0),))],
        Key("cross_entropy", True, 2, unaligned=False): [Cell(1024, 32000, (looped(90.0),))],
    }
    table = Table("made up", "a test", H200.bandwidth, cells)
    loss = Problem("cross_entropy", 1024, 32001, "bfloat16", outputs=("loss", "y"))
    log_softmax = Problem("log_softmax", 1024, 32001, "bfloat16")
    assert [anchor.cell.cols for anchor in anchors(table, loss, ("cuda",))] == [32000]
    assert [anchor.cell.cols for anchor in anchors(table, log_softmax, ("cuda",))] == [32001]
    # Triton makes other code of unaligned rows, so the stand-in's times are all that there is.
    triton = Cell(1024, 32001, (Timing("triton", "looped", FAST, 95.0),), ("triton",))
    table = replace(table, cells={**cells, key: [triton]})
    assert [anchor.cell.cols for anchor in anchors(table, loss, ("triton",))] == [32001]


def test_cells_of_one_shape_merge() -> None:
    first = Cell(8, 64, (looped(4.0), Timing("triton", "row", Variant(tile=512), 5.0)), ("cuda", "triton"))
    again = Cell(8, 64, (looped(3.0, SLOW),), ("cuda",))
    table = table_of(first).with_cell(Key("softmax", True, 2, False), again)
    [cell] = table.cells[Key("softmax", True, 2, False)]
    assert [timing.us for timing in cell.timings] == [3.0, 5.0]
    assert cell.backends == ("cuda", "triton")


def test_a_variant_has_one_text() -> None:
    for variant in (FAST, ROW, Variant(), Variant(team="all", shared=True, chunks=4)):
        assert Variant.parse(str(variant)) is variant
        assert pickle.loads(pickle.dumps(variant)) is variant
    for text in ("512 x 2", "warps=4", "terms=1", "threads"):
        with pytest.raises(ValueError, match="no field of a variant"):
            Variant.parse(text)


def test_a_gpu_has_the_table_of_its_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver adds memory or socket to the name of a model."""
    of_h100 = Table("NVIDIA H100 80GB HBM3", "a test", 3000.0, {})
    shipped_tables = tmp_path / "tables"
    shipped_tables.mkdir()
    for table in (of_h100, Table("NVIDIA H200", "a test", 4270.0, {})):
        (shipped_tables / f"{slug(table.device)}.json").write_text(json.dumps(table.as_json()), encoding="utf-8")
    (shipped_tables / "quality.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(measured.resources, "files", lambda package: tmp_path)
    monkeypatch.setenv("ONLINESOFTMAX_CACHE", str(tmp_path))
    table_for.cache_clear()
    try:
        assert table_for(known("h100")) == of_h100
        for name in ("h200", "a100", "rtx4090"):
            found = table_for(known(name))
            assert found is not None
            assert found.device == "NVIDIA H200"
    finally:
        table_for.cache_clear()


def test_a_name_without_a_number_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is quality.json, which is no table."""
    borrowed, opened, read = table_for(H200), [], measured._read
    monkeypatch.setattr(measured, "_read", lambda place: opened.append(place.name) or read(place))
    assert table_for.__wrapped__(replace(H200, name="NVIDIA TITAN V")) == borrowed
    assert opened == [measured.FALLBACK_TABLE]


@pytest.mark.parametrize("strategies", [TABLE, FOR_JAX], ids=["torch", "jax"])
@pytest.mark.parametrize("operation", ["softmax", "logsumexp", "softmax_backward", "cross_entropy"])
@pytest.mark.parametrize("device", ["h200", "h100", "a100"])
def test_many_short_rows_share_blocks(device: str, operation: str, strategies: Strategies) -> None:
    """A block for each row of a few elements would take hundreds of times as long as the transfer of their bytes."""
    machine = known(device)
    for dtype, cols in itertools.product(("bfloat16", "float32"), (1, 2, 3, 5, 8, 17, 33, 63)):
        found = plan(Problem(operation, 1 << 22, cols, dtype), machine, table=table_for(machine), strategies=strategies)
        assert found.rows_per_program >= 8, (dtype, cols, found.strategy, found.variant)
