"""Malformed records, made from right ones by a seed: each is shown, or is a sentence that names its field."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_records import record

pytest.importorskip("jsonschema", reason="the records are checked with jsonschema")

from onlinesoftmax.lab.report.page import shown_first
from onlinesoftmax.lab.report.panels import series
from onlinesoftmax.lab.report.records import DEEPEST, read

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

VALUES = (
    None, True, False, 0, 1, -1, 2, 1.0, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), 2**63, -(2**70), 10**400,
    "", "x", "softmax", "ok", "wrong", "jax", "cuda", "device time", "sharded time", "host time",
    "\x1b[2J\x07", "\ud800", "</script><script>", "a\nb",
    [], {}, [[]], [1, 2], ["x"], {"x": 1}, {"median_us": 1.0}, [None], [2**62, 2**62],
)  # fmt: skip
"""Values that a field of another type may get."""


def originals() -> list[Any]:
    """One small record of each kind of measurement, the real ones cut to two results of a case."""
    names = ["h200x2-distributed", "cpu"]
    names += [f"h200-{suite}" for suite in ("forward", "host", "cold", "jax-forward", "gradients")]
    real = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names if RESULTS.is_dir()]
    for content in real:
        content["cases"] = content["cases"][:1]
        content["cases"][0]["results"] = content["cases"][0]["results"][:2]
        content["versions"] = {"python": "3", "onlinesoftmax": "0", "torch": "2", "jax": "0"}
    return [record(), *real]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(a list or an object, a key of it) for every value in a document."""
    for key in range(len(value)) if isinstance(value, list) else list(value):
        yield value, key
        if isinstance(value[key], list | dict):
            yield from places(value[key])


def malformed(right: Any, chance: random.Random) -> Any:
    """The document with one to three random changes."""
    content = copy.deepcopy(right)
    for _ in range(chance.choice((1, 1, 2, 3))):
        parent, key = chance.choice([*places(content)])
        how = chance.randrange(6)
        if how == 0:
            del parent[key]
        elif how == 1 and isinstance(parent, dict):
            parent[key + "\x9b"] = parent.pop(key)
        elif how == 2:
            parent[key] = [parent[key]] if isinstance(parent, dict) else {"x": parent[key]}
        else:
            parent[key] = copy.deepcopy(chance.choice(VALUES))
        if not content:
            break
    return content


def shown(folder: Path, text: str) -> list[str]:
    """Check the text that the page would hold of a record; return the sentences about a file that is not shown."""
    path = folder / "record.json"
    path.write_text(text, encoding="utf-8")
    records, wrong, others = read([path])
    assert len(records) + len(wrong) == 1
    assert others == []
    page = [json.dumps(series(each), allow_nan=False, ensure_ascii=False) for each in records]
    shown_first(records)
    for sentence in (*page, *wrong):
        assert sentence.isprintable(), "escape sequences and halves of surrogate pairs are readable text"
    for sentence in wrong:
        assert sentence.startswith(str(path))
        assert len(sentence) < 600
    return wrong


@pytest.mark.parametrize("place", range(8))
def test_a_malformed_record_is_a_sentence(place: int, tmp_path: Path) -> None:
    if place >= len(right := originals()):
        pytest.skip("the recorded runs are in the repository, not in the archives")
    chance = random.Random(place)
    assert shown(tmp_path, json.dumps(right[place])) == []
    refused = 0
    for _ in range(50):
        refused += len(shown(tmp_path, json.dumps(malformed(right[place], chance))))
    assert refused > 15


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"format": 1', '"format": 1, "format": 1', "field format: it is given twice in one object"),
        ("4000.0", "NaN", "NaN is no number of JSON"),
        ("4000.0", "-Infinity", "-Infinity is no number of JSON"),
        ("4000.0", "1e999", "field cases[0].copy_gbps: inf is not of type 'number'"),
        ("4000.0", "1" * 5000, "digits"),
        ("4000.0", "1" * 400, "field cases[0].copy_gbps: "),
        ('"dim": 1', '"dim": 1.0', "field cases[0].dim: 1.0 is not of type 'integer'"),
        ('"dim": 1', '"dim": true', "field cases[0].dim: True is not of type 'integer'"),
        ("4000.0", "[" * DEEPEST + "]" * DEEPEST, "it is nested too deeply"),
        ("[4096, 1024]", json.dumps([2**40, 2**40]), "field cases[0]: shape [1099511627776, 1099511627776]: more elem"),
        ('"status": "ok", "reason": null', '"status": "\\u001b[31m", "reason": null', "'\\\\x1b[31m' is not one of"),
    ],
)
def test_what_json_allows_and_a_record_does_not(old: str, new: str, words: str, tmp_path: Path) -> None:
    text = json.dumps(record())
    assert old in text
    [sentence] = shown(tmp_path, text.replace(old, new, 1))
    assert words in sentence
