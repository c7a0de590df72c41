"""The tables of docs/sampling_kernels.md: times to tokens, to the largest log-probabilities, and of drafts."""

from __future__ import annotations

from onlinesoftmax.lab.bench.result import CaseResult
from onlinesoftmax.lab.bench.sampling.cases import TokenCase

from .markdown import NOTHING, cell, microseconds, sizes, spread
from .records import Records

WAYS = {
    "torch": "PyTorch", "compile": "torch.compile", "flashinfer": "FlashInfer, probabilities",
    "flashinfer-logits": "FlashInfer, logits", "jax": "XLA",
}  # fmt: skip
"""The ways beside ours, by their names in records."""


def sampling_table(records: Records) -> str:
    """From logits to tokens."""
    return _of_tokens(records, "sampling")


def topk_table(records: Records) -> str:
    """From logits to the largest log-probabilities."""
    return _of_tokens(records, "topk")


def verify_table(records: Records) -> str:
    """Which drafts stay, and the token that follows them."""
    return _of_tokens(records, "verify", "rows × (drafts + 1) × tokens")


def _of_tokens(records: Records, suite: str, axes: str = "rows × tokens") -> str:
    """Microseconds of float32 logits, over all kinds of logits: a row for each shape and all that is asked of it."""
    name = records.newest(suite)
    groups: dict[tuple[str, str], dict[str, list[CaseResult]]] = {}
    for found in records.cases(name):
        if isinstance(found.case, TokenCase):
            group = groups.setdefault((sizes(found.case.shape), found.case.asked), {})
            group.setdefault(found.case.dtype, []).append(found)
    timed = {result.who for each in records.cases(name) for result in each.results if result.times is not None}
    ways = {who: title for who, title in WAYS.items() if who in timed}
    header = [axes, "", "one read", "ours", *ways.values(), "bfloat16: one read", "ours"]
    rows = []
    for (shape, asked), found in groups.items():
        wide, narrow = found.get("float32", []), found.get("bfloat16", [])
        others = [_of_way(wide, who) for who in ways]
        ours = [f"**{_of_way(each, 'ours')}**" if each else NOTHING for each in (wide, narrow)]
        rows.append([shape, asked, _of_reads(wide), ours[0], *others, _of_reads(narrow), ours[1]])
    return records.table(header, rows, name)


def _of_way(found: list[CaseResult], who: str) -> str:
    """The least and the largest time of a way."""
    results = [result for each in found if (result := each.result(who)) is not None]
    if any(result.us is not None for result in results):
        return spread((result.us for result in results), microseconds)
    return next((cell(result, None, microseconds) for result in results), NOTHING)


def _of_reads(found: list[CaseResult]) -> str:
    return spread((each.one_read and each.one_read.median_us for each in found), microseconds)
