"""The tables of docs/steps.md: whole steps of training and of decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onlinesoftmax.lab.bench.heads.cases import POLICY, TRAINING
from onlinesoftmax.lab.bench.result import CaseResult, Result

from .markdown import NOTHING, size, together, without_time
from .records import Records
from .tokens import WAYS

STEP_WAYS = {
    "ours": "ours", "ours-compile": "ours, compiled", "ours-logits": "ours on logits", "torch": "PyTorch",
    "compile": "torch.compile", "liger": "Liger", "quack": "quack", "cce-exact": "CCE exact", "trl": "TRL",
    "trl-logits": "TRL on logits",
}  # fmt: skip
"""Ways to train, by their names in records."""

DECODING_WAYS = {"ours": "ours", **WAYS}
"""Ways to sample, by their names in records."""


def training_steps_table(records: Records) -> str:
    """Tokens per second and memory of pre-training."""
    return _of_training(records, TRAINING)


def policy_steps_table(records: Records) -> str:
    """Tokens per second and memory of GRPO."""
    return _of_training(records, POLICY)


def decoding_table(records: Records) -> str:
    """Milliseconds of a step of decoding."""
    name = records.first("decoding")
    return _table(records, name, records.cases(name), DECODING_WAYS, milliseconds)


def _of_training(records: Records, operation: str) -> str:
    name = records.first("training-step")
    return _table(records, name, records.cases(name, operation=operation), STEP_WAYS, _speed_and_memory)


def _speed_and_memory(found: CaseResult, result: Result) -> str:
    return together([f"{tokens_per_second(found, result):,.0f}", size(result.extra_bytes)])


def tokens_per_second(found: CaseResult, result: Result) -> float:
    """The speed of a way that has a time."""
    assert result.us is not None
    return 1e6 * found.case.rows / result.us


def milliseconds(_: CaseResult, result: Result) -> str:
    """The time of a step of a way that has one."""
    assert result.us is not None
    return f"{result.us / 1e3:.2f}"


def _table(
    records: Records, name: str, found: Sequence[CaseResult], ways: Mapping[str, str],
    cell: Callable[[CaseResult, Result], str],
) -> str:  # fmt: skip
    """A row for each case, whose fastest way is bold, and a column for each way that has a time in some case."""
    results = {who: [each.result(who) for each in found] for who in ways}
    timed = [who for who, ours in results.items() if any(result and result.times for result in ours)]
    rows = []
    for i, each in enumerate(found):
        here = [results[who][i] for who in timed]
        least = min(result.us for result in here if result and result.us)
        rows.append([named(each), *(_cell(each, result, cell, least) for result in here)])
    return records.table(("step", *(ways[who] for who in timed)), rows, name)


def named(found: CaseResult) -> str:
    """The sizes of a step."""
    return str(found.case).replace("->", "→").replace("x", "\u00a0×\u00a0")


def _cell(
    found: CaseResult, result: Result | None, cell: Callable[[CaseResult, Result], str], least: float
) -> str:  # fmt: skip
    if result is None:
        return NOTHING
    if not result.times:
        return without_time(result)
    text = cell(found, result)
    return f"**{text}**" if result.us == least else text
