"""`tune`: its grid of shapes, what is proposed for them, and, on a GPU, a small table from end to end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onlinesoftmax.bench import tune
from onlinesoftmax.cli import build
from onlinesoftmax.core.device import known
from onlinesoftmax.kernels import registry
from onlinesoftmax.planner.measured import Cell, Table, Timing, key_of

H200 = known("h200")


def test_the_grid_has_every_kind_of_shape_once() -> None:
    shapes = tune.shapes()
    assert len(set(shapes)) == len(shapes)
    assert {(1, 1 << 28), (1, 1 << 20), (1024, 1024), (1 << 20, 64)} <= {(s.rows, s.cols) for s in shapes}
    # What the planner looks a table up by: rows that begin on 16 bytes, and rows that begin anywhere.
    kinds = Counter(key_of(tune.case(shape)[0]) for shape in shapes)
    assert {(kind.operation, kind.itemsize, kind.cut) for kind in kinds} == {
        *((operation, size, False) for operation in ("softmax", "logsumexp", "softmax_backward") for size in (2, 4)),
        ("softmax", 2, True),
        ("softmax", 4, True),
    }
    assert set(tune.shapes(quick=True)).isdisjoint({s for s in shapes if s.rows == 1})


@pytest.mark.parametrize("shape", tune.shapes()[::23], ids=str)
def test_proposals_are_told_apart_by_their_words(shape: tune.Shape) -> None:
    found = tune.proposals(shape, H200)
    assert found
    names = Counter((proposal.plan.strategy, proposal.plan.variant) for proposal in found)
    assert max(names.values()) == 1, names.most_common(3)
    assert {proposal.plan.backend for proposal in found} == {"cuda"}
    for proposal in found:
        assert proposal.request.plan is proposal.plan
        threads = 32 * proposal.plan.warps
        assert threads % proposal.plan.lanes == 0
        assert threads * proposal.plan.resident <= H200.threads


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "unavailable", lambda name: "no NVIDIA GPU")
    result = CliRunner().invoke(build(), ["tune", "--out", str(tmp_path / "table.json")])
    assert result.exit_code == 2
    assert result.stderr == "Error: tune needs the cuda backend: no NVIDIA GPU\n"
    assert not list(tmp_path.iterdir())


def test_what_is_measured_is_not_measured_again() -> None:
    shape = tune.Shape("softmax", "bfloat16", 1024, 256)
    cell = Cell(1024, 256, (Timing("cuda", "row", "32 of 128, depth 1, terms", 4.5),))
    begun = Table(H200.name, "commit 0", 4270.0, {key_of(tune.case(shape)[0]): [cell]})
    assert not list(tune.tune(None, H200, [shape], begun))


@pytest.mark.gpu
def test_a_small_table_from_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    result = CliRunner().invoke(build(), ["tune", "--quick", "--out", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["shapes"] == 6
    table = Table.from_json(json.loads(path.read_text(encoding="utf-8")))
    cells = [cell for cells in table.cells.values() for cell in cells]
    assert {(cell.rows, cell.cols) for cell in cells} == {(1024, 256), (1024, 4096), (1024, 65536)}
    for cell in cells:
        assert [timing.us for timing in cell.timings] == sorted(timing.us for timing in cell.timings)
        assert all(timing.us > 0 for timing in cell.timings)

    again = CliRunner().invoke(build(), ["tune", "--quick", "--out", str(path), "--resume"])
    assert again.exit_code == 0, again.output
    assert Table.from_json(json.loads(path.read_text(encoding="utf-8"))).cells == table.cells
    for content in ("{}", "not JSON", json.dumps({**table.as_json(), "device": "another"})):
        path.write_text(content, encoding="utf-8")
        refused = CliRunner().invoke(build(), ["tune", "--quick", "--out", str(path), "--resume"])
        assert refused.exit_code == 2
        assert "--resume" in refused.stderr
        assert path.read_text(encoding="utf-8") == content
