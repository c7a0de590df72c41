"""The tables of docs/steps.md: whole steps of training and of decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from onlinesoftmax.lab.bench.heads.cases import POLICY, TRAINING
from onlinesoftmax.lab.bench.result import CaseResult, Result

from .markdown import cell, size, together
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
    return _table(records, name, records.cases(name), DECODING_WAYS, _milliseconds)


def _of_training(records: Records, operation: str) -> str:
    name = records.first("training-step")
    return _table(records, name, records.cases(name, operation=operation), STEP_WAYS, _speed_and_memory)


def _speed_and_memory(found: CaseResult, result: Result, us: float) -> str:
    return together([f"{tokens_per_second(found, us):,.0f}", size(result.extra_bytes)])


def _milliseconds(found: CaseResult, result: Result, us: float) -> str:
    return f"{us / 1e3:.2f}"


def tokens_per_second(found: CaseResult, us: float) -> float:
    """The speed of a way that takes so many microseconds."""
    return 1e6 * found.case.rows / us


def _table(
    records: Records, name: str, found: Sequence[CaseResult], ways: Mapping[str, str],
    form: Callable[[CaseResult, Result, float], str],
) -> str:  # fmt: skip
    """A row for each case, whose fastest way is bold, and a column for each way that has a time in some case."""
    timed = {result.who for each in found for result in each.results if result.times}
    timed = [who for who in ways if who in timed]
    rows = []
    for each in found:
        here = [each.result(who) for who in timed]
        least = min(result.us for result in here if result and result.us)
        texts = (cell(result, result and result.us, partial(form, each, result)) for result in here)
        bold = ("**" if result and result.us == least else "" for result in here)
        rows.append([named(each), *(f"{mark}{text}{mark}" for mark, text in zip(bold, texts, strict=True))])
    return records.table(("step", *(ways[who] for who in timed)), rows, name)


def named(found: CaseResult) -> str:
    """The sizes of a step."""
    return str(found.case).replace("->", "→").replace("x", "\u00a0×\u00a0")
