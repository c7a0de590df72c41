"""benchmarks/measure.py measures every record of benchmarks/results again, with one command for each."""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="records are measured with torch")

from onlinesoftmax.lab.bench.record_file import OTHER_CASES, record_name
from onlinesoftmax.lab.bench.suites import SUITES

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "measure.py"
RESULTS = ROOT / "benchmarks" / "results"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="an sdist has no records")


@pytest.fixture(scope="module")
def measure() -> Any:
    """The names of benchmarks/measure.py, which is not part of the package."""
    return runpy.run_path(str(SCRIPT))


def options_of(words: list[str]) -> dict[str, str]:
    """The options of a command of `bench` and their values."""
    return {key.removeprefix("--"): value for key, value in itertools.pairwise(words) if key[:2] == "--"}


def test_each_command_gives_the_record_its_name(measure: Any, tmp_path: Path) -> None:
    for name in measure["RECORDS"]:
        options = {"framework": "torch", "backend": None} | options_of(measure["command"](name, tmp_path))
        assert not {*options} & {*OTHER_CASES}, name
        device = "CPU" if name == "cpu" else "NVIDIA H200"
        stem = record_name({"device": {"name": device}, "options": options})
        assert stem == ("cpu.json" if name == "cpu" else f"h200-{name}.json")


def test_every_suite_and_every_record_has_a_command(measure: Any) -> None:
    assert {*SUITES} <= {*measure["RECORDS"]}
    for path in RESULTS.glob("*.json"):
        name = path.stem if path.stem == "cpu" else path.stem.partition("-")[2]
        assert name in measure["RECORDS"], path.name


def test_a_record_of_the_same_commit_is_continued(measure: Any, tmp_path: Path) -> None:
    (tmp_path / "cpu.json").write_text(json.dumps({"git": {"commit": "feedbeef"}}))
    assert measure["command"]("cpu", tmp_path, "feedbeef")[-1] == "--resume"
    assert measure["command"]("cpu", tmp_path, "feedbeef0ddba11")[-1] == "--resume"
    assert "--resume" not in measure["command"]("cpu", tmp_path, "0ddba11")
    assert "--resume" not in measure["command"]("gradients", tmp_path, "feedbeef")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--list", "jax-forward"], 0, "bench --framework jax --suite forward --peers jax"),
        (["--list", "--gpus", "4", "distributed-heads"], 0, "torch.distributed.run --nproc-per-node 4 -m"),
        (["--minutes", "0", "cpu"], 1, "not started: cpu"),
        (["nothing"], 2, "unknown record 'nothing'; there are: cross-entropy"),
        (["--out", "nowhere", "cpu"], 2, "--out nowhere is no folder"),
    ],
)
def test_the_command_line(
    arguments: list[str], code: int, says: str, measure: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as end:
        sys.exit(measure["main"]())
    assert end.value.code == code
    assert says in "".join(capsys.readouterr())


def test_a_complete_record_stays(measure: Any, tmp_path: Path) -> None:
    suite = SUITES["cpu"]
    record = {"git": {"commit": "feedbeef"}, "options": {"suite": "cpu", "dtype": None}}
    every = [{"skipped": None} for _ in range(len(suite.entries) * len(suite.dtypes))]
    for complete, found in ((True, every), (False, every[1:]), (False, [*every[1:], {"skipped": "too large"}])):
        (tmp_path / "cpu.json").write_text(json.dumps(record | {"cases": found}))
        assert measure["is_complete"]("cpu", tmp_path, "feedbeef") is complete
        assert not measure["is_complete"]("cpu", tmp_path, "0ddba11")


def test_an_interrupted_command_may_write_its_record(measure: Any) -> None:
    """After its time a command gets an interruption, not an end."""
    child = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise SystemExit(7)"
    assert measure["run"]([sys.executable, "-c", child], 2.0) == 7
    assert measure["run"]([sys.executable, "-c", "raise SystemExit(3)"], float("inf")) == 3
