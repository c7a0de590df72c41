"""The planner's answers for every combination and row length of the picker, computed when the page is made.

Each answer is an `explain` of its shape, in the words that `explain` prints.  Texts that repeat are stored once, and
the answers in the cache folder, until the planner or a table changes.
"""

from __future__ import annotations

import gc
import gzip
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...core.cache import UnusableError, cache_folder, load_entry, read_private, report_unused, store_entry
from ...core.cache_size import ANSWERS
from ...core.device import known
from ...core.workers import WorkerPool
from ...explanation import Explanation
from ...planner.facts import blocks_of, lacks_memory, plan_facts
from ...planner.measured import slug
from ...planner.plan import Plan, Refusal
from ..bench.record_file import sources
from .combinations import KINDS, STEP, Combination, cliffs, lengths

FEW = 12
"""Combinations that one process plans in less time than another process takes to start."""

Answer = list[Any]
"""The plan for one length: its cols, name, reason, bytes, floor, estimate, facts, and the strategies not chosen."""


class Texts:
    """A list of different texts; a packed answer refers to each by its place."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def packed(self, value: Any) -> Any:
        """The value with the place of each text instead of the text, in lists too."""
        if isinstance(value, (list, tuple)):
            return [self.packed(each) for each in value]
        return self.found.setdefault(value, len(self.found)) if isinstance(value, str) else value


def without_length(reason: str, cols: int) -> str:
    """A reason with the mark {n} for the row length, so that the reasons for many lengths are one text.

    >>> without_length("a row of 64 columns fits the registers of 64 threads", 64)
    'a row of {n} columns fits the registers of 64 threads'
    """
    return reason.replace(f"row of {cols} ", "row of {n} ").replace(f"rows of {cols} ", "rows of {n} ")


def answer_of(explanation: Explanation) -> Answer:
    """The answer for one length, with its texts in full."""
    plan, problem = explanation.plan, explanation.problem
    # Five digits are enough for a chart; the facts have the same numbers as `explain` prints.
    floor, estimate = (float(f"{us:.5g}") for us in (plan.floor_us, plan.estimate_us))
    return [
        problem.cols, _name(plan), without_length(plan.reason, problem.cols),
        problem.read_bytes + problem.write_bytes, floor, estimate, plan_facts(plan, problem, explanation.device),
        [_other(explanation, other) for other in explanation.others],
    ]  # fmt: skip


def _other(explanation: Explanation, other: Plan | Refusal) -> tuple[str, ...]:
    """A strategy that was not chosen, and why not: "1.13 times as long: ", and the reason, each of which repeats.

    Its block, warps and registers follow.
    """
    head, colon, tail = without_length(explanation.why_not(other), explanation.problem.cols).partition(": ")
    blocks = ("", "", "") if isinstance(other, Refusal) else blocks_of(other, explanation.device)
    return _name(other), head + colon, tail, *blocks


def why_cliff(before: Explanation, first: Explanation) -> str:
    """Why the strategy of one length does not run the next: the capacity that is exceeded, or its time.

    Args:
        before: The last length before the cliff.
        first: The first length behind it.
    """
    old = before.plan
    name = _name(old)
    other = next(each for each in first.others if (each.backend, each.strategy) == (old.backend, old.strategy))
    if isinstance(other, Refusal):
        return f"{name} cannot run it: {other.reason}"
    percent = 100 * (other.estimate_us / first.plan.estimate_us - 1)
    longer = f"would take {f'{percent:.2g}' if percent >= 0.1 else 'less than 0.1'}% longer"
    held, needed = old.block * old.splits, other.block * other.splits
    if old.reads == 1 and old.warps and held < first.problem.cols <= needed:
        return (
            f"the {held:,} columns that {_programs(old)} of {name} held are exceeded, and {_programs(other)} for "
            f"{needed:,} columns {longer}"
        )
    kind = "measured" if other.measured_on and first.plan.measured_on else "estimated"
    return f"{name} {longer}: no capacity is exceeded, the {kind} times cross"


def _name(plan: Plan | Refusal) -> str:
    return f"{plan.backend}/{plan.strategy}"


def _programs(plan: Plan) -> str:
    return f"{plan.splits} programs of {plan.warps} warps" if plan.splits > 1 else f"one program of {plan.warps} warps"


def until_too_large(listed: Sequence[int], like: Explanation) -> list[int]:
    """The row lengths up to the first for which the tensors of the call do not fit the memory of the device."""
    too_large = (lacks_memory(like.problem.for_rows(like.problem.rows, cols), like.device) for cols in listed)
    fitting = sum(1 for _ in itertools.takewhile(lambda sentence: sentence is None, too_large))
    return [*listed[: fitting + 1]]


def answers_of(combination: Combination) -> dict[str, Any]:
    """The answers for all lengths of a combination, and its cliffs, for each kind of rows.

    The lengths of a kind end with the first whose call does not fit the memory of the device.
    """
    collects = gc.isenabled()
    # Plans have no cycles, and a fifth of the time would go into looking for one.
    gc.disable()
    try:
        return _answers_of(cache(combination.explain))
    finally:
        if collects:
            gc.enable()


def _answers_of(explained: Callable[[int], Explanation]) -> dict[str, Any]:
    found = {}
    for name in KINDS:
        listed = until_too_large(lengths(name), explained(STEP))
        edges = cliffs(listed, lambda cols: _name(explained(cols).plan))
        every = sorted({*listed, *(cols for edge in edges for cols in edge)})
        reasons = [why_cliff(explained(before), explained(first)) for before, first in edges]
        edges_with_reasons = [[*edge, reason] for edge, reason in zip(edges, reasons, strict=True)]
        found[name] = {"answers": [answer_of(explained(cols)) for cols in every], "cliffs": edges_with_reasons}
    return found


def planned(combinations: Sequence[Combination], progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """The answers for all combinations, ready for JSON.

    Args:
        combinations: The combinations.
        progress: Called with the number of combinations that are planned, and the number of all that must be planned.

    Returns:
        "texts", a list of texts; "plans", a list of answers that refer to the texts by their places; and
        "combinations", which maps the fields of a combination, with spaces between them, to its place in "plans".
    """
    # Combinations that are the same problem to the planner, as a scale and a softcap are, are planned once.
    groups: dict[Hashable, list[Combination]] = {}
    for combination in combinations:
        groups.setdefault(combination.problems(), []).append(combination)
    texts = Texts()
    plans: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    for group, found in zip(groups.values(), _stored_or_new([group[0] for group in groups.values()]), strict=True):
        places |= {" ".join(map(str, combination)): len(plans) for combination in group}
        plans.append({name: _packed(family, texts) for name, family in found.items()})
        if progress:
            progress(len(plans), len(groups))
    return {"texts": list(texts.found), "plans": plans, "combinations": places}


def _stored_or_new(combinations: Sequence[Combination]) -> Iterator[dict[str, Any]]:
    """The answers of each combination, in order; those that an earlier report computed are not computed again."""
    known, keys = load_answers(), keys_of(combinations)
    new = _each([combination for combination, key in zip(combinations, keys, strict=True) if key not in known])
    found = {}
    for key in keys:
        found[key] = known[key] if key in known else next(new)
        yield found[key]
    if found.keys() - known.keys():
        store_answers(known | found)


def _each(combinations: Sequence[Combination]) -> Iterator[dict[str, Any]]:
    """The answers of each combination, in order, from as many processes as there are processors."""
    workers = min(os.cpu_count() or 1, -(-len(combinations) // FEW))
    if workers < 2:
        yield from map(answers_of, combinations)
        return
    with WorkerPool(workers) as pool:
        for work in [pool.submit(answers_of, combination) for combination in combinations]:
            yield work.result()


def _packed(family: dict[str, Any], texts: Texts) -> dict[str, Any]:
    """The answers and the cliffs of a family, with numbers in place of texts.

    There is a list for each field of an answer: neighbouring lengths have much in common, so these lists pack well.
    """
    rows = [texts.packed(answer) for answer in family["answers"]]
    return {"cliffs": texts.packed(family["cliffs"]), "columns": [list(column) for column in zip(*rows, strict=True)]}


def own_table(gpu: str) -> Path:
    """The table that `onlinesoftmax tune` makes on this machine for a GPU; it need not exist."""
    return cache_folder() / f"{slug(known(gpu).name)}.json"


def load_answers() -> dict[str, Any]:
    """The stored answers by the keys of their combinations; empty where there are none."""
    content = load_entry(ANSWERS)
    if content is None:
        return {}
    try:
        found: dict[str, Any] = json.loads(gzip.decompress(content))
        # Another version may have kept answers for other kinds of rows.
        found = {key: answers for key, answers in found.items() if {*answers} == {*KINDS}}
    except (OSError, EOFError, zlib.error, ValueError, TypeError, AttributeError, RecursionError) as error:
        report_unused(cache_folder() / ANSWERS, error, "the answers are computed again")
        return {}
    return found


def store_answers(answers: dict[str, Any]) -> None:
    """Replace the stored answers by these, and drop those of other sources of this package."""
    answers = {key: answer for key, answer in answers.items() if key.endswith(sources())}
    store_entry(ANSWERS, gzip.compress(json.dumps(answers, separators=(",", ":")).encode(), compresslevel=3))


def keys_of(combinations: Sequence[Combination]) -> list[str]:
    """A key for each combination, which changes with the sources of this package and with the tables of its GPU."""
    own = {gpu: _digest(own_table(gpu).name) for gpu in {combination.gpu for combination in combinations}}
    return [f"{' '.join(map(str, each))} {own[each.gpu]} {sources()}" for each in combinations]


def _digest(name: str) -> str:
    """A digest of a file of the cache folder; of no bytes where the planner does not read it."""
    try:
        content = read_private(name)
    except UnusableError:
        content = None
    return hashlib.sha256(content or b"").hexdigest()[:16]
