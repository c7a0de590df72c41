"""The blocks about losses: of docs/performance.md, docs/losses.md, docs/jax.md and docs/distributed.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.sharded.result import ShardedCaseResult, ShardedResult
from onlinesoftmax.lab.report.charts import NAMES

from .markdown import (
    ABSENT,
    NOTHING,
    SHORT,
    commit,
    copies,
    microseconds,
    shape,
    share,
    size,
    source,
    spread,
    table,
    together,
)
from .records import Records, ours, result_of

CROSS_ENTROPY, TOKENS, IN_JAX = "h200-cross-entropy", "h200-token-logprobs", "h200-jax-cross-entropy"

WAYS = {
    "ours": "ours", "without-shards": "ours without `shards=`", "collective": "ours by a collective",
    "dtensor": "ours on a DTensor", "loss-parallel": "`loss_parallel`", "all-gather": "all-gather",
    "one-process": "ours on one GPU",
}  # fmt: skip
"""Ways to compute rows that are sharded, by their names in records."""


def cross_entropy_table(records: Records) -> str:
    """Cross-entropy with its gradient: times in copies, and extra memory."""
    return _with_gradient(records, CROSS_ENTROPY)


def token_logprobs_table(records: Records) -> str:
    """Log-probabilities and entropies with their gradient."""
    return _with_gradient(records, TOKENS)


def _with_gradient(records: Records, name: str) -> str:
    found = records.cases(name)
    if not found:
        return ABSENT
    header = ["rows × classes", "", "ours", *NAMES.values(), "extra: ours", "extra: PyTorch"]
    rows = []
    for each in sorted(found, key=lambda each: (each.case.reduction != "mean", each.case.dtype)):
        case, theirs = each.case, result_of(each, "torch")
        rows.append([
            shape(case), together(filter(None, (SHORT[case.dtype], case.reduction))), f"**{copies(ours(each))}**",
            *(copies(result_of(each, who)) for who in NAMES),
            size(ours(each).extra_bytes), size(theirs.extra_bytes if theirs else None),
        ])  # fmt: skip
    return f"{table(header, rows)}\n\n{source(records.get(name))}"


def read_only_table(records: Records) -> str:
    """Passes that only read: shares of the copy's bandwidth."""
    name = "h200-read-only"
    found = records.cases(name, dtype="bfloat16")
    if not found:
        return ABSENT
    operations = list(dict.fromkeys(each.case.operation for each in found))
    rows = []
    for case in dict.fromkeys(replace(each.case, operation="logsumexp", reduction="") for each in found):
        each_operation = [
            replace(case, operation=operation, reduction="mean" if operation == "cross_entropy" else "")
            for operation in operations
        ]
        mine = (
            together(
                share(records.result(replace(each, dtype=dtype), "ours", name)) for dtype in ("bfloat16", "float32")
            )
            for each in each_operation
        )
        theirs = together(share(records.result(each, "torch", name)) for each in each_operation)
        rows.append([shape(case), *mine, theirs])
    header = ["rows × cols", *operations, "PyTorch's three, bf16"]
    return f"{table(header, rows)}\n\n{source(records.get(name))}"


def reductions_table(records: Records) -> str:
    """The two reductions of one shape, for docs/losses.md."""
    rows = []
    for reduction in ("mean", "none"):
        case = Case("cross_entropy", (8192, 128256), 1, "bfloat16", with_gradient=True, reduction=reduction)
        found = {who: records.result(case, who, CROSS_ENTROPY) for who in ("ours", "torch", "compile")}
        extra = [size(each.extra_bytes if each else None) for each in (found["ours"], found["torch"])]
        rows.append([f'`reduction="{reduction}"`', *map(copies, found.values()), *extra])
    header = ("forward and backward, 8192 × 128256, bfloat16", "ours", "PyTorch", "torch.compile",
              "extra memory, ours", "extra memory, PyTorch")  # fmt: skip
    return f"{table(header, rows)}\n\n{source(records.get(CROSS_ENTROPY))}"


def token_logprobs_text(records: Records) -> str:
    """The times of token_logprobs, for docs/losses.md."""
    found = [each for each in records.cases(TOKENS, dtype="bfloat16") if each.case.with_gradient]
    if not found:
        return ABSENT
    theirs = sorted(
        result.copies for each in found for result in each.results if result.copies and result.who == "torch"
    )
    return (
        f"For {len(found)} shapes of vocabularies in bfloat16 on an H200, forward and backward through both take "
        f"{spread(ours(each).copies for each in found)} copies; PyTorch's operations take {theirs[0]:.0f} to "
        f"{theirs[-1]:.0f} ([Performance](performance.md#losses))."
    )


def jax_losses_table(records: Records) -> str:
    """Cross-entropy with its gradient in JAX, in times of XLA's copy."""
    found = records.cases(IN_JAX)
    if not found:
        return ABSENT
    rows = [
        [shape(each.case), SHORT[each.case.dtype], each.case.reduction, f"**{copies(ours(each))}**",
         copies(result_of(each, "jax.nn"))]
        for each in found
    ]  # fmt: skip
    return f"{table(('rows × classes', 'dtype', 'reduction', 'ours', 'jax.nn'), rows)}\n\n{source(records.get(IN_JAX))}"


def distributed_table(records: Records) -> str:
    """Rows that are sharded over the GPUs of one host: every case of the newest records of several GPUs."""
    found = [(_gpu(record), each) for record in _of_many(records) for each in record.sharded if not each.skipped]
    if not found:
        return ABSENT
    rows = []
    for gpu, each in found:
        for result in each.results:
            name = f"{_name(each)} on {each.processes} {gpu}s" if result is each.results[0] else ""
            rows.append([name, WAYS.get(result.who, result.who).replace(" ", "\u00a0"), *_cells(result)])
    header = ("call", "method", "time, µs", "host, µs", "extra memory", "collectives", "bytes per row")
    return f"{table(header, rows)}\n\n{source(*_of_many(records))}"


def _name(each: ShardedCaseResult) -> str:
    case = each.case
    words = [f"`{case.operation}`", shape(case)] + (["with gradient"] if case.with_gradient else [])
    return " ".join([*words, *([case.reduction] if case.reduction == "none" else [])])


def _cells(result: Any) -> list[str]:
    if not isinstance(result, ShardedResult) or result.times is None:
        return [result.status, *[NOTHING] * 4]
    bold = "**" if result.who == "ours" else ""
    sent = NOTHING if result.sent_row_bytes is None else f"{result.sent_row_bytes:.12g}"
    return [
        f"{bold}{microseconds(result.times.median_us)}{bold}", microseconds(result.host_us), size(result.extra_bytes),
        str(result.collectives), sent,
    ]  # fmt: skip


def _gpu(record: Any) -> str:
    """Model of the GPU of a record, as "H200"."""
    name: str = record.content["device"]["name"]
    return name.removeprefix("NVIDIA ").split()[0]


def _of_many(records: Records) -> list[Any]:
    """The records of several GPUs, the one with the most cases first."""
    found = [record for record in records if "processes" in record.content]
    return sorted(found, key=lambda record: -len(record.sharded))


def sharded(records: Records) -> list[ShardedCaseResult]:
    """The results of the records of several GPUs."""
    return [each for record in _of_many(records) for each in record.sharded]


def distributed_text(records: Records) -> str:
    """Our times in copies of a shard, and the speed-up over one GPU."""
    said = []
    for of_many, each in ((record, each) for record in _of_many(records) for each in record.sharded):
        times = {result.who: result.times.median_us for result in each.results if result.times}
        if each.skipped or not each.copy or "ours" not in times:
            continue
        line = f"- {_name(each)} on {each.processes} {_gpu(of_many)}s: "
        line += f"a copy of one shard takes {each.copy.median_us:.0f} µs, "
        line += f"and our call {times['ours'] / each.copy.median_us:.2f} times as long"
        if "one-process" in times:
            ratio = times["one-process"] / times["ours"]
            line += f". One GPU with all columns takes {ratio:.2f} times our time"
        alone, record = records.result(each.case, "ours", CROSS_ENTROPY), records.get(CROSS_ENTROPY)
        if alone and alone.times and record and _gpu(record) == _gpu(of_many):
            line += f", and {alone.times.median_us / times['ours']:.2f} times in `{record.name}` ({commit(record)})"
        said.append(line + ".")
    return "\n".join(said) or ABSENT


NETWORK_BYTES = 50e3
"""Bytes that one GPU is assumed to receive from other hosts in a microsecond: 400 Gbit/s."""

FORECAST = ((8, "peer memory"), (8, "collective"), (64, "collective"), (1024, "collective"))
"""Numbers of processes, and how they exchange states."""


def distributed_forecast(records: Records) -> str:
    """The time of a loss with its gradient on many GPUs: a forecast from its times on two."""
    each = next((each for each in sharded(records) if each.case.operation == "cross_entropy" and each.copy), None)
    times = {result.who: result.times.median_us for result in each.results if result.times} if each else {}
    if each is None or each.copy is None or not {"ours", "collective", "one-process"} <= times.keys():
        return ABSENT
    copy, rows = each.copy.median_us, each.case.rows
    wait, latency = times["ours"] - copy, times["collective"] - 1.5 * copy
    lines = []
    for processes, way in FORECAST:
        part = each.processes / processes
        by_peers = way == "peer memory"
        local = copy * part * (1 if by_peers else 1.5)
        received = (processes - 1) * rows * (24 if by_peers else 12)
        # A shorter shard leaves room for more rows on chip, which wait together.
        exchange = wait * part if by_peers else latency + received / NETWORK_BYTES * (processes > LARGEST_HOST)
        total = local + exchange
        efficiency = times["one-process"] / (processes * total)
        lines.append([
            str(processes), way, str(each.case.elements // rows // processes), microseconds(local), size(received),
            microseconds(exchange), microseconds(total), f"{100 * efficiency:.2g}\u00a0%",
        ])  # fmt: skip
    header = (
        "processes", "exchange", "columns of each", "local passes, µs", "received by each", "exchange, µs", "time, µs",
        "efficiency",
    )  # fmt: skip
    said = (
        f"On {each.processes} GPUs, a copy of a shard takes {copy:.0f} µs, rows wait {wait:.0f} µs longer than that "
        f"through peer memory, and the collective adds {latency:.0f} µs to 1.5 copies; these times are in "
        f"`{_of_many(records)[0].name}`. The forecast scales the copy and the wait with the columns. It assumes that a "
        f"GPU receives {NETWORK_BYTES / 1e3:.0f} GB/s from other hosts, and that a collective has the latency of two "
        f"GPUs, which in fact grows with the number of hosts. Efficiency is compared with one GPU with all columns, "
        f"{times['one-process']:.0f} µs."
    )
    return f"{table(header, lines)}\n\n{said}"


LARGEST_HOST = 8
"""GPUs of one host, which exchange data without a network."""


BLOCKS: dict[str, Callable[[Records], str]] = {
    block.__name__: block
    for block in (
        cross_entropy_table, token_logprobs_table, read_only_table, reductions_table, token_logprobs_text,
        jax_losses_table, distributed_table, distributed_text, distributed_forecast,
    )
}  # fmt: skip
"""The blocks by name."""
