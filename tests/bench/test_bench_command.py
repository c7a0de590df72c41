"""`onlinesoftmax bench`: suites, records, tables, exit codes, and a sentence for each wrong input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import SMALL, Raises, Wrong, call

from onlinesoftmax.lab.bench import libraries, record_file
from onlinesoftmax.lab.bench.entries import Suite
from onlinesoftmax.lab.bench.record_file import record_name
from onlinesoftmax.lab.bench.suites import SUITES, cases


def test_every_suite_has_cases_that_can_be_made() -> None:
    for name, suite in SUITES.items():
        for each in (suite, suite.quick):
            found = cases(each)
            assert len(found) == len(each.entries) * len(each.dtypes)
            assert len(set(found)) == len(found), f"{name} measures a case twice"
            assert all(0 <= case.dim < len(case.shape) for case in found)


@pytest.mark.parametrize("name", SUITES)
def test_a_quick_suite_has_every_kind_of_case_in_few_elements(name: str) -> None:
    def kinds(suite: Suite) -> set[Any]:
        names = "operation", "fused", "with_gradient", "reduction"
        return {tuple(e.get(name) for name in names) for e in suite.entries}

    whole, quick = SUITES[name], SUITES[name].quick
    assert kinds(quick) <= kinds(whole)
    if whole.measures in ("device time", "sharded time"):
        assert kinds(quick) == kinds(whole)
    # The cells of sampling and routing are kinds by what is asked for, alone and with a gradient.
    others = {"operation", "shape", "dim", "fused", "reduction"}
    asked = {tuple((name, e[name]) for name in e if name not in others) for e in whole.entries}
    assert len(quick.entries) <= max(6, len(asked))
    assert max(case.elements for case in cases(quick)) <= 1 << 22 or name == "rows1024"
    assert quick.repeat_ms <= 50
    assert (quick.dtypes, quick.measures, quick.excluded) == (whole.dtypes, whole.measures, whole.excluded)


@pytest.mark.parametrize(
    ("name", "operations", "count", "some"),
    [
        ("forward", {"softmax"}, None, {"1048576x64", "4096x50257", "131072x1023", "32x512x4096 dim 1"}),
        ("rows1024", {"softmax"}, 7, {f"1024x{cols}" for cols in (512, 1024, 2048, 4096, 8192, 16384, 32768)}),
        ("single-row", {"softmax"}, 15, {f"1x{1 << k}" for k in range(16, 31)}),
        ("gradients", {"softmax_backward"}, None, {"524288x256", "1024x262144"}),
        ("fused", {"softmax"}, 16, {"16384x4096", "65536x1024 mask", "4096x32768 scale+mask", "64x1024x1024 causal"}),
        ("cross-entropy", {"cross_entropy"}, 7, {"4096x262144 with gradient", "8192x32000 none with gradient"}),
        ("token-logprobs", {"token_logprobs"}, 3, {
            "8192x128256 with gradient", "4096x151936 with gradient", "8192x32000 with gradient",
        }),
        ("read-only", {"logsumexp", "token_logprobs", "cross_entropy"}, 6, {"512x151936"}),
    ],
)  # fmt: skip
def test_a_suite_has_the_shapes_of_the_field(
    name: str, operations: set[str], count: int | None, some: set[str]
) -> None:
    found = cases(SUITES[name])
    assert {case.operation for case in found} == operations
    shapes = {str(case) for case in found}
    assert some <= shapes
    assert count in (None, len(shapes))
    assert len(found) == len(shapes) * len(operations) * len({case.dtype for case in found})


def test_suites_read_and_write_what_they_say() -> None:
    assert {case.passes for case in cases(SUITES["token-logprobs"])} == {3}
    assert not any(case.writes_elements for case in cases(SUITES["read-only"]))


def test_nothing_but_skipped_cases_is_wrong_input() -> None:
    done = call("--suite", "cpu", "--quick", "--shape", "3x1099511627776", "--dtype", "float32")
    assert done.exit_code == 2
    assert "no case was measured; the first was skipped: needs" in done.output


def test_the_record_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    done = call(*SMALL, "--json", "--peers", "torch,liger", "--out", str(path))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads(path.read_text())
    assert set(found) == {"format", "date", "git", "versions", "device", "options", "absent", "cases", "measures"}
    assert found["measures"] == "device time"
    assert found["git"]["sources"] == record_file.sources()
    assert found["date"].endswith("+00:00")
    # The installed version may lack the local part (2.11.0+cu130) that torch itself names.
    assert torch.__version__.startswith(found["versions"]["torch"].partition("+")[0])
    assert found["options"]["repeat"] == 1
    assert found["options"]["shape"] == ["4x8"]
    assert list(found["absent"]) == ["liger"]
    (case,) = found["cases"]
    assert (case["shape"], case["dim"], case["bytes"], case["skipped"]) == ([4, 8], 1, 256, None)
    assert [result["who"] for result in case["results"]] == ["ours", "torch"]
    for result in case["results"]:
        assert set(result["times"]) == {"median_us", "p20_us", "p80_us", "count"}
        assert result["status"] == "ok"
        assert result["error"] <= 1e-6
    assert case["results"][0]["plan"]["strategy"] == "row"


def test_a_pipe_gets_aligned_text() -> None:
    done = call(*SMALL, "--op", "softmax", "--op", "logsumexp", "--peers", "torch,quack")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    (header,) = [i for i, line in enumerate(lines) if "of copy" in line]
    assert "ours eager/row" in lines[header + 1]
    assert lines[header + 1].index("ours") == lines[header].index("who")
    assert any(line.split()[:4] == ["-", "-", "-", "quack"] and "absent: " in line for line in lines)
    assert not set("│─┃\x1b") & set(done.stdout)


def test_a_wrong_peer_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.PEERS, "wrong", Wrong)
    done = call(*SMALL, "--peers", "wrong")
    assert done.exit_code == 1
    assert "WRONG: error" in done.stdout


def test_a_peer_that_refuses_is_shown_with_its_error_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.PEERS, "raises", Raises)
    done = call(*SMALL, "--peers", "raises,liger")
    assert done.exit_code == 0, done.output
    lines = {line.split()[2]: line for line in done.stdout.splitlines() if line.startswith("  4x8")}
    assert lines["raises"].endswith("cannot run: N must be a multiple of 8")
    assert "absent: not installed: pip install liger-kernel" in done.stdout


def test_jax_is_a_peer() -> None:
    pytest.importorskip("jaxlib", reason="the peer is jax.nn")
    done = call(*SMALL, "--peers", "jax", "--json")
    assert done.exit_code == 0, done.output
    ((_, theirs),) = (case["results"] for case in json.loads(done.stdout)["cases"])
    assert (theirs["who"], theirs["status"]) == ("jax.nn", "ok")
    assert theirs["times"]["median_us"] > 0


def test_rows1024_has_a_sentence_about_each_case() -> None:
    done = call("--suite", "rows1024", "--device", "cpu", "--shape", "1024x16", "--dtype", "float32", "--repeat", "1")
    assert done.exit_code == 0, done.output
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("1024x16 float32: "))
    assert "of a copy of the same size" in line
    assert "A call without work takes" in line
    assert line.endswith(" times as long.")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "4y8"], "shape '4y8'"),
        (["--shape", "4x8", "--dim", "2"], "dim 2 is out of range for 4x8"),
        (["--dim", "0"], "a dim needs a shape"),
        (["--suite", "huge"], "unknown suite 'huge'; there are: forward, rows1024, lengths, single-row"),
        (["--resume"], "--resume continues a record; name its file with --out"),
        (["--suite", "host", "--with-gradient"], "--with-gradient does not go with --suite host"),
        (["--suite", "host", "--fused", "scale"], "--fused does not go with --suite host"),
        (["--suite", "host", "--op", "softmax_backward"], "instead of --op softmax_backward name softmax"),
        (["--suite", "cold", "--repeat", "9"], "--repeat does not go with --suite cold"),
        (["--suite", "host", "--framework", "jax"], "--suite host measures calls of PyTorch"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--op", "softmin"], "unknown operation 'softmin'"),
        (["--fused", "scale,dropout"], "unknown score option 'dropout'"),
        (
            ["--peers", "torch,apex"],
            "unknown peer 'apex'; there are: torch, compile, liger, quack, flash-attn, transformer-engine, trl, jax",
        ),
        (["--op", "cross_entropy_backward"], "unknown operation 'cross_entropy_backward'"),
        (["--op", "cross_entropy", "--shape", "2x3x4"], "dim=2: cross_entropy has its classes in dim 1"),
        (["--backend", "cudnn"], "unknown backend 'cudnn'"),
        (["--backend", "pallas"], "backend 'pallas' needs the framework 'jax'"),
        (["--strategy", "magic"], "unknown strategy 'magic'"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["--device", "meta"], "only cpu and cuda"),
        (["--device", "cuda:99"], "torch sees"),
        ([*SMALL, "--strategy", "split"], "can run none of these cases"),
        ([*SMALL, "--out", "."], "--out . is a folder for records of whole suites; with --shape, name a file"),
        (["--quick", "--out", "no-folder"], "--out no-folder: there is no such folder; a file for a record ends in .j"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], says: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert says in line


def test_a_folder_keeps_one_record_for_each_device_and_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = replace(SUITES["cpu"], entries=SUITES["cpu"].few[:1], dtypes=("float32",), repeat_ms=1)
    monkeypatch.setitem(SUITES, "gradients", suite)
    for commit in ("1", "2"):
        done = call("--suite", "gradients", "--device", "cpu", "--commit", commit, "-o", str(tmp_path))
        assert done.exit_code == 0, done.output
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert path.name == "cpu-gradients.json" == found["options"]["out"] == record_name(found)
    assert found["git"]["commit"] == "2"


def test_an_unwritable_record_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = call(*SMALL, "--out", str(tmp_path / "file" / "record.json"))
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr
