"""The blocks of README.md and docs/index.md: the caption of the chart, and the speed beside other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.result import CANNOT, PLAIN, CaseResult, Result
from onlinesoftmax.lab.report.panels import NAMES

from .markdown import ABSENT, NOTHING, commit, copies, microseconds, share, spread, table
from .records import Records

LIBRARIES = ("ours", *NAMES)
"""Columns of the table, by their names in records."""

BF16 = "bfloat16"

VOCABULARY = (8192, 128256)
"""Shape of the logits of the losses in the table."""

ALIGNED = 8
"""Columns of bfloat16 in 16 bytes."""


FORWARD, IN_JAX = ("h200-forward", "h200-lengths"), ("jax-forward", "jax-lengths")
"""The records of softmax of many rows; those in JAX are of the first GPU that has them."""

SHORTEST, LONGEST = 64, 1 << 18
"""Columns of the rows in the ranges of the table."""


def readme_caption(records: Records) -> str:
    """The caption of the chart in README.md."""
    return _caption(records, "docs/performance.md")


def index_caption(records: Records) -> str:
    """The caption of the same chart on the first page of the documentation."""
    return _caption(records, "performance.md")


def _caption(records: Records, page: str) -> str:
    found = _field(records, FORWARD)
    record = records.get("h200-forward")
    if record is None:
        return ABSENT
    mine, theirs = (spread(result.of_copy for result in _results(found, who)) for who in ("ours", "torch"))
    return (
        f"*Softmax of bfloat16 rows on an NVIDIA H200 (commit {commit(record)}). The dashed line is a copy of the same "
        "size in the same run, which reads and writes each element once, as softmax must. From "
        f"{SHORTEST} to {LONGEST} columns, ours has {mine} of the copy's speed and PyTorch {theirs}. From 2^20 columns "
        f"on, the blocks that share a row wait for each other. [More figures, and the reasons]({page}).*"
    )


def readme_speed(records: Records) -> str:
    """Speed beside other libraries, in bfloat16 on H200s."""
    in_jax = [records.first(name) for name in IN_JAX]
    gpu = in_jax[0].partition("-")[0].upper()
    rows = [
        _range("softmax, aligned rows of {} columns", _field(records, FORWARD)),
        _range("softmax, unaligned rows of {} columns", _field(records, FORWARD, True)),
        _range("softmax, short rows of {} columns", [
            each for each in records.cases("h200-forward", dtype=BF16) if each.case.shape[-1] < SHORTEST
        ]),
        _one("softmax, one row of 2^24", records, "h200-single-row", Case("softmax", (1, 1 << 24), 1, BF16)),
        _range("gradient of softmax, {} columns", records.cases("h200-gradients", dtype=BF16)),
        _range(f"softmax in JAX on an {gpu}, aligned rows of {{}} columns, of XLA's copy", _field(records, in_jax)),
        _range("the same, unaligned rows of {} columns", _field(records, in_jax, True)),
        _one("cross-entropy and its gradient, 8192 × 128256, in times of the copy", records, "h200-cross-entropy",
             Case("cross_entropy", VOCABULARY, 1, BF16, with_gradient=True), copies),
        _one(f"the same in JAX on an {gpu}, of XLA's copy", records, records.first("jax-cross-entropy"),
             Case("cross_entropy", VOCABULARY, 1, BF16, with_gradient=True), copies),
        _sharded(records),
        _one("`token_logprobs` and its gradient, 8192 × 128256, in times of the copy",
             records, "h200-token-logprobs", Case("token_logprobs", VOCABULARY, 1, BF16, with_gradient=True), copies),
        _host(records),
    ]  # fmt: skip
    shown = [row for row in rows if any(cell != NOTHING for cell in row[1:])]
    header = ("", "onlinesoftmax", *NAMES.values())
    return f"{table(header, shown)}\n\n{_versions(records)}"


def _versions(records: Records) -> str:
    """The versions of the libraries; where records have several, all of them."""
    said = []
    for name in ("torch", "liger-kernel", "quack-kernels", "jax"):
        found = {r.content["versions"].get(name) for r in records if r.name.startswith("h200")} - {None}
        said.append(f"{name} {' and '.join(sorted(found))}" if found else "")
    return f"Versions: {', '.join(filter(None, said))}."


def _field(records: Records, names: Sequence[str], unaligned: bool = False) -> list[CaseResult]:
    """The cases of many rows in bfloat16, aligned or unaligned, of these records."""
    return [
        each for name in names for each in records.cases(name, dtype=BF16)
        if SHORTEST <= each.case.shape[-1] <= LONGEST and bool(each.case.shape[-1] % ALIGNED) is unaligned
        and each.case.dim == len(each.case.shape) - 1
    ]  # fmt: skip


def _results(found: Sequence[CaseResult], who: str) -> list[Result]:
    results = (each.result(who) for each in found)
    return [result for result in results if result is not None]


def _range(title: str, found: Sequence[CaseResult]) -> list[str]:
    """The smallest and the largest share of each library, and the number of cases that it cannot run or has wrong.

    The braces in the title stand for the shortest and the longest row.
    """
    cells, lengths = [], [each.case.shape[-1] for each in found] or [0]
    for who in LIBRARIES:
        results = _results(found, who)
        text = spread(result.of_copy for result in results)
        for status, verb in (("refused", CANNOT), ("wrong", "wrong in")):
            count = sum(result.status == status for result in results)
            text += f"; {verb} {count} of {len(results)}" if count else ""
        cells.append(text)
    return [title.format(f"{min(lengths)} to {max(lengths)}"), *cells]


def _one(
    title: str, records: Records, name: str, case: Case, cell: Callable[[Result | None], str] = share
) -> list[str]:
    return [title, *(cell(records.result(case, who, name)) for who in LIBRARIES)]


def _sharded(records: Records) -> list[str]:
    """The loss with its columns on several GPUs; PyTorch's way is loss_parallel."""
    title = "cross-entropy and its gradient, columns on 2 GPUs, µs"
    case = Case("cross_entropy", VOCABULARY, 1, BF16, with_gradient=True)
    times = [records.result(case, who, "h200x2-distributed") for who in ("ours", "loss-parallel")]
    ours, theirs = (microseconds(each and each.times) for each in times)
    return [title, ours, f"{theirs} (`loss_parallel`)", *[NOTHING] * (len(LIBRARIES) - 2)]


def _host(records: Records) -> list[str]:
    """The host time of a call of softmax."""
    found = records.cases("h200-host", operation="softmax")
    times = {
        result.who: result.calls[PLAIN].median_us
        for each in found for result in each.results if PLAIN in result.calls
    }  # fmt: skip
    title = "host time of softmax of 64 × 512, µs"
    return [title, *(microseconds(times.get(who)) for who in LIBRARIES)]
