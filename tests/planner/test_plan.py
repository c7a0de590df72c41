"""The planner's decisions, as tables: it is pure, so any GPU can be planned for here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from onlinesoftmax.core.device import KNOWN, known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.planner.measured import Cell, Key, Table, Timing, table_for
from onlinesoftmax.planner.plan import Plan, PlanError, Refusal, alternatives, plan
from onlinesoftmax.planner.strategies import TABLE

H200 = known("h200")


@pytest.mark.parametrize(
    ("rows", "cols", "strategy"),
    [
        (1 << 20, 64, "row"),
        (65536, 1000, "row"),
        (65536, 1023, "row"),
        (1 << 19, 255, "row"),
        (1 << 21, 65, "row"),
        (4096, 32768, "row"),
        (2048, 128256, "looped"),
        (1024, 262144, "looped"),
        (16, 1 << 22, "split"),
        (1, 1 << 20, "split"),
        (1, 1 << 28, "split"),
        (64, 512, "row"),
        (1, 1, "row"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_h200_with_triton(rows: int, cols: int, strategy: str, dtype: str) -> None:
    chosen = plan(Problem("softmax", rows, cols, dtype), H200, "triton")
    assert (chosen.backend, chosen.strategy) == ("triton", strategy)


@pytest.mark.parametrize(
    ("rows", "cols", "strategy"),
    [
        (1 << 20, 64, "row"),
        (65536, 1000, "row"),
        (65536, 1023, "row"),
        (32768, 2048, "row"),
        (4096, 32768, "cluster"),
        (4096, 50257, "cluster"),
        (2048, 128256, "cluster"),
        (1024, 262144, "cluster"),
        (256, 1 << 20, "grid"),
        (1, 1 << 20, "grid"),
        (1, 1 << 28, "grid"),
        (64, 512, "row"),
        (1, 1, "row"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_h200_as_measured(rows: int, cols: int, strategy: str, dtype: str) -> None:
    chosen = plan(Problem("softmax", rows, cols, dtype), H200, table=table_for(H200))
    assert (chosen.backend, chosen.strategy) == ("cuda", strategy)
    assert chosen.reads == (2 if cols == 1 << 28 else 1)


def test_a_table_decides_for_its_neighbours_and_scales_their_times() -> None:
    times = (Timing("cuda", "looped", "512 x 2", 10.0), Timing("cuda", "row", "32 of 128, depth 1, terms", 20.0))
    table = Table("made up", "a test", H200.bandwidth, {Key("softmax", 2, False): [Cell(100, 1024, times)]})
    near = Problem("log_softmax", 200, 1000, "bfloat16")
    chosen = plan(near, H200, table=table)
    assert (chosen.strategy, chosen.variant, chosen.estimate_us) == (
        "looped",
        "512 x 2",
        pytest.approx(2000 / 1024 * 10),
    )
    others = {o.strategy: o for o in alternatives(near, H200, "cuda", table=table) if isinstance(o, Plan)}
    # log_softmax keeps no terms, so the blocks are the strategy's first.
    assert others["row"].estimate_us == pytest.approx(2000 / 1024 * 20)
    assert others["cluster"].estimate_us >= 1.5 * chosen.estimate_us
    # What was measured says nothing of other layouts, dtypes and machines without these kernels.
    strided = Problem("softmax", 200, 1000, "bfloat16", contiguous=False, adjacent=100)
    assert plan(strided, H200, table=table).strategy == "column"
    assert plan(near, H200, unavailable=(("cuda", "absent"),), table=table).backend == "triton"
    assert plan(replace(near, dtype="float32"), H200, table=table).estimate_us != chosen.estimate_us


def test_a_table_is_what_its_json_says() -> None:
    table = table_for(H200)
    assert table is not None
    again = Table.from_json(json.loads(json.dumps(table.as_json())))
    assert again.cells == table.cells
    assert (again.device, again.source, again.bandwidth) == (table.device, table.source, table.bandwidth)


def test_a_gpu_without_a_table_borrows_one_and_a_cpu_does_not() -> None:
    assert table_for(known("h100")) == table_for(known("a100")) == table_for(H200)
    assert table_for(known("cpu")) is None
    # Times are scaled by bandwidth, and what the other GPU cannot run is not planned for it.
    problem = Problem("softmax", 65536, 1024, "bfloat16")
    here, there = (plan(problem, gpu, table=table_for(gpu)) for gpu in (H200, known("h100")))
    assert there.estimate_us == pytest.approx(here.estimate_us * H200.bandwidth / known("h100").bandwidth)
    long = Problem("softmax", 4096, 50257, "bfloat16")
    assert plan(long, H200, table=table_for(H200)).strategy == "cluster"
    assert plan(long, known("a100"), table=table_for(known("a100"))).strategy in ("row", "looped")


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "cpu"])
def test_every_known_gpu_has_a_plan(name: str) -> None:
    for rows, cols in ((1 << 20, 64), (4096, 50257), (1, 1 << 26), (0, 7), (7, 0)):
        chosen = plan(Problem("log_softmax", rows, cols, "float16"), known(name))
        assert chosen.device == known(name).name
        assert chosen.reason


def test_cpu_is_eager() -> None:
    chosen = plan(Problem("softmax", 10, 10), known("cpu"))
    assert (chosen.backend, chosen.strategy) == ("eager", "row")
    assert "no kernels of ours" in chosen.reason


def test_strided_rows_side_by_side_go_by_column() -> None:
    problem = Problem("softmax", 131072, 512, "float32", contiguous=False, adjacent=4096)
    assert plan(problem, H200).strategy == "column"


def test_bytes_and_floor() -> None:
    rows, cols = 2048, 128256
    chosen = plan(Problem("softmax", rows, cols, "bfloat16"), H200, "triton", "looped")
    assert chosen.bytes_moved == 3 * rows * cols * 2
    assert chosen.floor_us == pytest.approx(2 * rows * cols * 2 / (H200.bandwidth * 1e3))
    per_row = plan(Problem("logsumexp", rows, cols, "bfloat16"), H200, "triton", "looped")
    assert per_row.bytes_moved == rows * cols * 2 + rows * 2


def test_no_plan_beats_the_floor() -> None:
    for rows, cols in ((1 << 18, 256), (4096, 4096), (1, 1 << 24)):
        for option in alternatives(Problem("softmax", rows, cols), H200):
            if isinstance(option, Plan):
                assert option.estimate_us > option.floor_us


def test_forced_but_impossible_lists_every_reason() -> None:
    with pytest.raises(PlanError, match=r"(?s)strategy='row'.*triton/row: a row of 200000 columns.*registers") as error:
        plan(Problem("softmax", 4, 200000), H200, backend="triton", strategy="row")
    assert "looped" not in str(error.value)
    with pytest.raises(PlanError, match="eager has no strategy 'split'"):
        plan(Problem("softmax", 4, 4), H200, backend="eager", strategy="split")
    with pytest.raises(PlanError, match=r"(?s)triton/row.*triton/looped.*triton/split.*triton/column"):
        plan(Problem("softmax", 4, 4), known("cpu"), backend="triton")


def test_unknown_names() -> None:
    with pytest.raises(PlanError, match=r"unknown backend 'tritn'; there are: cuda, triton, eager"):
        plan(Problem("softmax", 4, 4), H200, backend="tritn")
    with pytest.raises(
        PlanError, match=r"unknown strategy 'rows'; there are: row, cluster, grid, looped, split, column"
    ):
        plan(Problem("softmax", 4, 4), H200, strategy="rows")
    with pytest.raises(ValueError, match=r"unknown operation 'sofmax'"):
        Problem("sofmax", 4, 4)
    with pytest.raises(ValueError, match=r"unknown dtype 'int8'"):
        Problem("softmax", 4, 4, "int8")
    with pytest.raises(ValueError, match="rows and cols"):
        Problem("softmax", -1, 4)


def test_unavailable_backends_are_refused_with_their_reason() -> None:
    absent = (("triton", "triton is not installed"), ("cuda", "cuda.core is not installed"))
    assert plan(Problem("softmax", 4096, 4096), H200, unavailable=absent).backend == "eager"
    options = alternatives(Problem("softmax", 4, 4), H200, unavailable=absent)
    assert {o.reason for o in options if isinstance(o, Refusal)} == {reason for _, reason in absent}


def test_rows_that_begin_anywhere_are_cut() -> None:
    odd, even = (plan(Problem("softmax", 4096, cols, "bfloat16"), H200, "triton") for cols in (4095, 4096))
    assert (odd.vector, even.vector) == (8, 1)
    unaligned = plan(Problem("softmax", 4096, 4095, "bfloat16", unit=1, peelable=False), H200, "triton")
    assert unaligned.vector == 1
    assert unaligned.estimate_us > odd.estimate_us


def test_split_adds_merges_as_the_partials_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("softmax", 1, 1 << 28, "bfloat16")
    assert plan(problem, H200, strategy="split").launches == 3
    monkeypatch.setattr("onlinesoftmax.planner.strategies.triton.MERGE_FAN", 16)
    # 4096 partials, 16 to a program: 256, 16, 1.
    assert plan(problem, H200, strategy="split").launches == 5


def test_the_table_names_each_pair_once() -> None:
    pairs = [(backend, strategy) for backend, strategy, _ in TABLE]
    assert len(set(pairs)) == len(pairs)
