"""The record of rows that are sharded over processes, in a report."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("altair", reason="Altair draws the charts")
pytest.importorskip("jsonschema", reason="a schema checks the records")

from onlinesoftmax.lab.bench.result import ShardedCaseResult
from onlinesoftmax.lab.bench.tables import SHARDED_TIME
from onlinesoftmax.lab.report.charts import LIBRARIES
from onlinesoftmax.lab.report.records import read
from onlinesoftmax.lab.report.series import series

RECORDS = sorted(Path(__file__).parents[2].joinpath("benchmarks", "results").glob("*-distributed.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_record_of_sharded_rows_is_shown(path: Path) -> None:
    (record,), wrong, others = read([path])
    assert not wrong
    assert not others
    shown = series(record)
    assert shown["header"] == ("operation", "shape", "dtype", "who", *SHARDED_TIME, "analysis")
    points = [point for panel in shown["panels"] for point in panel["points"]]
    assert {point["who"] for point in points} <= set(LIBRARIES)
    panel = next(panel for panel in shown["panels"] if "with gradient" in panel["title"])
    ours = next(point for point in panel["points"] if point["who"] == "ours")
    found = next(each for each in record.sharded if str(each.case) == ours["shape"])
    times = next(result.times for result in found.results if result.who == "ours")
    assert times is not None
    assert found.copy is not None
    assert found.all_reduce is not None
    assert any(f"{found.processes} processes" in note for note in shown["notes"])
    # The gradient is counted beside the logits, so a call that takes as long as the copy has its speed.
    assert ours["ratio"] == pytest.approx(found.copy.median_us / times.median_us, rel=0.01)


def test_a_sharded_case_is_read_as_it_was_written() -> None:
    assert RECORDS
    (record,), _, _ = read(RECORDS[:1])
    for found in record.sharded:
        assert ShardedCaseResult.of(found.as_dict()) == found
