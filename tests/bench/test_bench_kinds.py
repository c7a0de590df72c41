"""The suites with cases of their own: each writes a record, which a report reads too, and names wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

from bench_cases import ON_CPU, call

from onlinesoftmax.lab.bench.tables import read_cases, table_of


@pytest.mark.parametrize(
    ("arguments", "measures", "absent", "case", "columns"),
    [
        ("topk --shape 2x1100 --peers torch,flashinfer", "token time", "flashinfer", "2x1100 zipf, k 1024",
         ("time us", "of read")),
        ("verify --shape 3x3x90 --peers torch,flashinfer", "token time", "flashinfer", "3x3x90 normal, top-p 0.9",
         ("time us", "of read")),
        ("decoding --quick --peers torch", "decoding time", "", "3 rows, 32 -> 1000, 1 layers, top-p 0.9",
         ("time ms", "tokens/s")),
        ("training-step --quick --peers torch", "step time", "", "64x32 -> 1000, 1 layers", ("time ms", "tokens/s")),
        ("linear-cross-entropy --shape 30x4x800 --peers ours-bounded,ours-columns,torch,cce", "head time", "cce",
         "30x4 -> 800", ("time us", "of products")),
        ("route --shape 16x40 --peers torch,transformer-engine", "gate time", "transformer-engine",
         "16x40, top 8 of 4 groups with gradient", ("time us", "of read")),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) and "--" in value else "",
)  # fmt: skip
def test_a_suite_writes_a_record(
    arguments: str, measures: str, absent: str, case: str, columns: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    done = call("--suite", *arguments.split(), "--dtype", "bfloat16", *ON_CPU, "-o", str(path))
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    assert content["measures"] == measures
    assert content["absent"].keys() == {absent} - {""}
    found = read_cases(content)
    assert [each.as_dict() for each in found] == content["cases"]
    assert case in done.stdout
    assert table_of(found, content).header[3:6] == ("who", *columns)
    pytest.importorskip("jsonschema", reason="a report checks its records")
    from onlinesoftmax.lab.report.panels import series
    from onlinesoftmax.lab.report.records import read

    (record,), wrong, others = read([path])
    assert (wrong, others) == ([], [])
    assert all(panel["points"] for panel in series(record)["panels"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("topk --shape 4x8x9", "needs two sizes, rows x tokens"),
        ("topk --shape 4x1000", "a row has only 1000 tokens"),
        ("verify --shape 4x1000", "needs three sizes, rows x (drafts + 1) x tokens"),
        ("topk --op softmax", "--op does not go with --suite topk"),
        ("topk --peers liger", "unknown peer 'liger'; there are: torch, compile, flashinfer"),
        ("training-step --shape 4x8", "needs three sizes, tokens x hidden x classes"),
        ("training-step --shape 3000x8x9", "a multiple of 2048 tokens, or fewer, got 3000"),
        ("training-step --peers jax", "unknown peer 'jax'; there are: ours-compile"),
        ("linear-cross-entropy --shape 4x8", "needs three sizes, tokens x hidden x classes"),
        ("linear-cross-entropy --op softmax", "--op does not go with --suite linear-cross-entropy"),
        ("linear-cross-entropy --peers jax.nn", "unknown peer 'jax.nn'; there are: ours-stored"),
        ("route --shape 4x8x9", "needs two sizes, tokens x experts"),
        ("route --shape 4x7", "7 experts are too few"),
        ("route --shape 4x9000", "9000 experts are more than 8192"),
        ("route --peers liger", "unknown peer 'liger'; there are: torch, compile, quack, transformer"),
    ],
)
def test_wrong_arguments_of_a_suite(arguments: str, words: str) -> None:
    done = call("--suite", *arguments.split(), "--quick", "--device", "cpu")
    assert done.exit_code == 2
    assert words in done.output
