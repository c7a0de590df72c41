"""The picker's answers are the planner's: each is compared with an `explain` of its shape; stored ones are checked."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onlinesoftmax.core import cache
from onlinesoftmax.core.cache_size import ANSWERS
from onlinesoftmax.core.options import SCORE_OPTIONS
from onlinesoftmax.explanation import explain
from onlinesoftmax.lab.bench.record_file import sources
from onlinesoftmax.lab.bench.tune_shapes import CLASSES
from onlinesoftmax.lab.report import plans
from onlinesoftmax.lab.report.combinations import (
    EVERY,
    KINDS,
    LONGEST,
    PLAIN,
    STEP,
    STEPS,
    Choices,
    Combination,
    cliffs,
    kind_of,
    lengths,
    step_at,
)
from onlinesoftmax.lab.report.plans import answers_of, planned, why_cliff
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.planner.facts import plan_facts
from onlinesoftmax.planner.plan import Refusal

LINE = 128 // 4
"""Elements of 32 bits in a cache line."""


def families(data: Any) -> list[tuple[Combination, str, Any]]:
    """(combination, kind of rows, the family) of everything that the page holds."""
    found = []
    for key, place in data["plans"]["combinations"].items():
        *names, rows = key.split(" ")
        for name, family in data["plans"]["plans"][place].items():
            found.append((Combination(*names, int(rows)), name, family))
    return found


def explained(combination: Combination, cols: int) -> Any:
    """The explanation of a shape, asked for in the words of the public function."""
    shape = (combination.rows, cols)
    options = {
        "scale": {"scale": 0.5}, "softcap": {"softcap": 0.5}, "bias": {"bias": shape}, "mask": {"mask": shape},
        "causal": {"causal": True}, PLAIN: {},
    }[combination.option]  # fmt: skip
    return explain(
        shape, operation=combination.operation, dtype=combination.dtype, device=combination.gpu,
        framework=combination.framework, **options,
    )  # fmt: skip


@settings(max_examples=30)
@given(choice=st.data())
def test_answers_are_what_explain_says(data: Any, choice: st.DataObject) -> None:
    combination, kind, family = choice.draw(st.sampled_from(families(data)))
    cols, plan, reason, nbytes, floor, estimate, facts, others = choice.draw(st.sampled_from(family["answers"]))
    texts = data["plans"]["texts"]
    right = explained(combination, cols)
    assert kind == kind_of(cols)
    assert texts[plan] == f"{right.plan.backend}/{right.plan.strategy}"
    assert texts[reason].replace("{n}", str(cols)) == right.plan.reason
    assert nbytes == right.problem.read_bytes + right.problem.write_bytes
    assert (floor, estimate) == pytest.approx((right.plan.floor_us, right.plan.estimate_us), rel=1e-4)
    shown = [tuple(texts[place] for place in pair) for pair in facts]
    assert shown == plan_facts(right.plan, right.problem, right.device)
    not_chosen = [(texts[name], texts[head] + texts[tail].replace("{n}", str(cols))) for name, head, tail, *_ in others]
    assert not_chosen == [(f"{other.backend}/{other.strategy}", right.why_not(other)) for other in right.others]
    for other, (*_, block, warps, registers) in zip(right.others, others, strict=True):
        if isinstance(other, Refusal) or other.backend == "eager":
            assert {texts[block], texts[warps], texts[registers]} == {""}
        else:
            assert texts[block] == f"{other.rows_per_program} x {other.block}"
            assert int(texts[registers]) <= 65536 / (32 * int(texts[warps]) * other.resident)


def test_every_cliff_is_one(data: Any) -> None:
    seen = 0
    for combination, _, family in families(data)[::2]:
        answers = {answer[0]: answer for answer in family["answers"]}
        for before, first, why in family["cliffs"]:
            seen += 1
            assert first - before <= step_at(before)
            assert {before, first} <= answers.keys(), "the slider stops on both sides of a cliff"
            plans = [explained(combination, cols).plan for cols in (before, first)]
            assert (plans[0].backend, plans[0].strategy) != (plans[1].backend, plans[1].strategy)
            assert f"{plans[0].backend}/{plans[0].strategy} " in data["plans"]["texts"][why]
    assert seen > 10


def test_neighbouring_stops_without_a_cliff_between_them_have_the_same_strategy(data: Any) -> None:
    for _, _, family in families(data):
        firsts = {first for _, first, _ in family["cliffs"]}
        answers = family["answers"]
        for below, above in pairwise(answers):
            assert (below[1] != above[1]) == (above[0] in firsts)


@pytest.mark.parametrize(
    ("gpu", "rows", "cols", "after"),
    [
        (
            "a100",
            4096,
            65536,
            r"cuda/row cannot run it: a row of 65544 columns does not fit .*: 65536 bfloat16",
        ),
        (
            "h200",
            1,
            262144,
            r"the 262,144 columns that .* of cuda/cluster held are exceeded, and .* would take",
        ),
    ],
)
def test_a_cliff_names_the_capacity_that_is_exceeded(gpu: str, rows: int, cols: int, after: str) -> None:
    combination = Combination("torch", gpu, "softmax", PLAIN, "bfloat16", rows)
    assert re.match(after, why_cliff(combination.explain(cols), combination.explain(cols + STEP)))


@pytest.mark.parametrize("first", [9, 13, 64, 1000])
def test_bisection_finds_the_first_multiple(first: int) -> None:
    [(before, found)] = cliffs([8, 1 << 20], lambda n: n >= first)
    assert found - before == STEP
    assert found == -(-first // STEP) * STEP


@pytest.mark.parametrize("low", [4096, 100_000, 3 << 20])
def test_a_cliff_between_long_rows_is_located_to_a_part_of_their_length(low: int) -> None:
    first = low * 4 // 3 + 1
    [(before, found)] = cliffs([low, 2 * low], lambda n: n >= first)
    assert before < first <= found
    assert STEP < found - before <= low / STEPS
    assert (found - low) % LINE == 0, "so rows that begin on cache lines stay there"


def test_the_stops_end_with_the_first_length_that_does_not_fit_the_memory() -> None:
    combination = Combination("torch", "h200", "softmax", PLAIN, "float32", 65536)
    for kind, family in answers_of(combination).items():
        memory = [dict(answer[6]).get("memory") for answer in family["answers"]]
        assert (memory[-1] is not None) == (kind != "even"), "the list of even lengths ends before"
        assert [each for each in memory[:-1] if each] == [], kind


def test_the_slider_stops_at_the_lengths_that_the_page_names() -> None:
    stops = {kind: lengths(kind) for kind in KINDS}
    assert {1, LONGEST, 3 << 20, 1 << 29} <= {*stops["aligned"]}
    assert {9, (1 << 29) + 1} <= {*stops["odd"]}
    for kind, found in stops.items():
        assert [*found] == sorted({*found})
        assert {kind_of(cols) for cols in found} == {kind}
        assert {cols for cols in range(1, EVERY + 1) if kind_of(cols) == kind} <= {*found}
    every = {*itertools.chain(*stops.values())}
    assert {50257, 50304, 128256, 129280, 151936, 152064, 201088, 256000, 262144, 262208, 32000, 32001, 100277} <= every
    assert {*CLASSES, 30522, 65024} <= every


@given(low=st.integers(1, 1 << 20), away=st.integers(1, 200), edge=st.integers(1, 1 << 20))
@example(low=1024, away=9, edge=1025)
def test_bisection_between_any_two_lengths_ends(low: int, away: int, edge: int) -> None:
    found = cliffs([low, low + away], lambda n: n >= edge)
    assert len(found) == (low < edge <= low + away)
    for before, first in found:
        assert low <= before < edge <= first <= low + away
        assert first - before <= max(STEP, low / STEPS)


def test_the_page_repeats_no_text(data: Any) -> None:
    texts = data["plans"]["texts"]
    assert len({*texts}) == len(texts)
    # A scale, a softcap and causality are one problem to the planner.
    places = data["plans"]["combinations"]
    assert len({places[f"torch h200 softmax {name} bfloat16 4096"] for name in ("scale", "softcap", "causal")}) == 1


def test_the_picker_offers_the_options_of_each_operation_and_framework() -> None:
    every = Choices(["h200"], tuple(OPERATIONS), tuple(OPERATIONS), ["float32"], [64]).combinations()
    for name, operation in OPERATIONS.items():
        offered = {c.option for c in every if c.operation == name and c.framework == "torch"}
        assert offered == {PLAIN, *operation.options}
    assert {c.option for c in every if c.framework == "jax"} == {PLAIN, *SCORE_OPTIONS} - {"causal"}


KEY = f"a key {sources()}"
ANSWER = {KEY: {kind: {"answers": [], "cliffs": []} for kind in KINDS}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ONLINESOFTMAX_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_reported", set())
    cache.cache_folder.cache_clear()
    tmp_path.chmod(0o700)
    yield tmp_path
    cache.cache_folder.cache_clear()


def test_answers_are_loaded_as_they_were_stored(folder: Path) -> None:
    assert plans.load_answers() == {}
    plans.store_answers({**ANSWER, "a key of other sources": {}})
    assert plans.load_answers() == ANSWER


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", *map(gzip.compress, (b"", b"{", b"[]", b'{"a": 1}', b"[" * 10**5))],
    ids=["empty", "no gzip", "empty gzip", "cut off", "a list", "another object", "deep"],
)
def test_a_document_of_another_form_is_no_error(content: bytes, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.store_entry(ANSWERS, content)
    for _ in range(2):
        assert plans.load_answers() == {}
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{folder / ANSWERS} is not used: ")
    assert record.getMessage().endswith("; the answers are computed again")


def test_damaged_bytes_and_folders_of_others_are_no_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plans.store_answers(ANSWER)
    whole = (folder / ANSWERS).read_bytes()
    (folder / ANSWERS).write_bytes(whole[:-1])
    assert plans.load_answers() == {}
    (folder / ANSWERS).write_bytes(whole)
    folder.chmod(0o777)
    assert plans.load_answers() == {}
    assert "may be written by other users" in caplog.text


def test_answers_for_other_kinds_of_rows_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = {"aligned": {"answers": [], "cliffs": []}}
    cache.store_entry(ANSWERS, gzip.compress(json.dumps({**ANSWER, "an old key": old}).encode()))
    assert plans.load_answers() == ANSWER
    assert not caplog.records


def test_stored_answers_are_those_that_were_computed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = Choices(["a100"], ["softmax"], [], ["float32"], [1], ["jax"]).combinations()
    computed = planned(few)
    monkeypatch.setattr("onlinesoftmax.lab.report.plans.answers_of", None)
    assert json.dumps(planned(few)) == json.dumps(computed)
    # A new table of this machine for the GPU makes the stored answers those of another planner.
    plans.own_table("a100").write_text("{}")
    with pytest.raises(TypeError):
        planned(few)
