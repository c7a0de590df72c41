"""The blocks about losses: of docs/performance.md, docs/losses.md, docs/linear.md, docs/jax.md, docs/distributed.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.result import CaseResult, Result
from onlinesoftmax.lab.report.panels import NAMES
from onlinesoftmax.lab.report.records import Record

from .markdown import (
    ABSENT,
    NOTHING,
    SHORT,
    cell,
    copies,
    microseconds,
    shape,
    share,
    size,
    sizes,
    source,
    spread,
    together,
)
from .records import Records, ours

CROSS_ENTROPY, TOKENS, IN_JAX = "h200-cross-entropy", "h200-token-logprobs", "h100-jax-cross-entropy"

WAYS = {
    "ours": "ours", "collective": "ours by a collective", "loss-parallel": "`loss_parallel`",
    "all-gather": "all-gather", "one-process": "ours on one GPU",
}  # fmt: skip
"""Ways to compute rows that are sharded, by their names in records."""


HEAD_WAYS = {
    "ours": "ours", "ours-small": "`acc_dtype`, 0.6\u00a0GB", "ours-bounded": "0.6\u00a0GB",
    "ours-columns": "0.2\u00a0GB", "torch": "PyTorch", "compile": "torch.compile", "torch-linear": "PyTorch's own",
    "torch-chunks": "checkpoints", "liger": "Liger", "quack": "quack", "cce": "CCE", "cce-exact": "CCE exact",
    "jax-ours": "ours in JAX", "jax": "XLA",
}  # fmt: skip
"""Ways to compute a head, by their names in records."""


def linear_cross_entropy_table(records: Records) -> str:
    """A head and its loss: times over three bare products, and extra memory."""
    return _of_heads(records, "linear-cross-entropy")


def linear_token_logprobs_table(records: Records) -> str:
    """A head and its log-probabilities: times over three bare products, and extra memory."""
    return _of_heads(records, "linear-token-logprobs")


def _of_heads(records: Records, suite: str) -> str:
    """A row for each head, of the newest record; a column for each way that some head was timed by."""
    name = records.newest(suite)
    found = records.cases(name)
    results = [(who, each.result(who)) for who in HEAD_WAYS for each in found]
    timed = dict.fromkeys(who for who, result in results if result and result.of_products is not None)
    header = ["tokens × hidden → classes", "three products", *(HEAD_WAYS[who] for who in timed)]
    rows = []
    for each in found:
        tokens, hidden, classes = each.case.shape
        cells = [_of_products(each.result(who)) for who in timed]
        products = f"{microseconds(each.three_products)} µs"
        rows.append([f"{sizes((tokens, hidden))} → {classes}", products, f"**{cells[0]}**", *cells[1:]])
    return records.table(header, rows, name)


def _of_products(result: Result | None) -> str:
    """The time over three bare products, and the memory beyond inputs and gradients."""
    extra = [size(result.extra_bytes)] if result and result.extra_bytes is not None else []
    return cell(result, result and result.of_products, lambda value: together([f"{value:.2f}", *extra]))


def cross_entropy_table(records: Records) -> str:
    """Cross-entropy with its gradient: times in copies, and extra memory."""
    return _with_gradient(records, CROSS_ENTROPY)


def token_logprobs_table(records: Records) -> str:
    """Log-probabilities and entropies with their gradient."""
    return _with_gradient(records, TOKENS)


def _with_gradient(records: Records, name: str) -> str:
    """Times in copies in bfloat16 and float32, and the extra memory in bfloat16: a row for each shape and reduction."""
    found = records.cases(name, dtype="bfloat16")
    header = ["rows × classes", "", "ours", *NAMES.values(), "extra: ours", "extra: PyTorch"]
    rows = []
    for each in sorted(found, key=lambda each: each.case.reduction != "mean"):
        wide, theirs = replace(each.case, dtype="float32"), each.result("torch")
        pairs = ((each.result(who), records.result(wide, who, name)) for who in ("ours", *NAMES))
        cells = [together(map(copies, pair)) if any(pair) else NOTHING for pair in pairs]
        rows.append([
            shape(each.case), each.case.reduction, f"**{cells[0]}**", *cells[1:],
            size(ours(each).extra_bytes), size(theirs.extra_bytes if theirs else None),
        ])  # fmt: skip
    return records.table(header, rows, name)


def read_only_table(records: Records) -> str:
    """Passes that only read: shares of the copy's bandwidth."""
    name = "h200-read-only"
    found = records.cases(name, dtype="bfloat16")
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
    return records.table(("rows × cols", *operations, "PyTorch's three, bf16"), rows, name)


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
    return records.table(header, rows, CROSS_ENTROPY)


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
    rows = [
        [shape(each.case), SHORT[each.case.dtype], each.case.reduction, f"**{copies(ours(each))}**",
         copies(each.result("jax.nn"))]
        for each in records.cases(IN_JAX)
    ]  # fmt: skip
    return records.table(("rows × classes", "dtype", "reduction", "ours", "jax.nn"), rows, IN_JAX)


def distributed_table(records: Records) -> str:
    """Rows that are sharded over the GPUs of one host: the time of every case by each way, and the extra memory."""
    header = ("copy of a shard", *WAYS.values(), "extra: ours", "extra: `loss_parallel`")

    def cells(each: CaseResult) -> list[str]:
        timed = (each.result(who) for who in ("ours", "loss-parallel"))
        extra = (size(result.extra_bytes if result and result.times else None) for result in timed)
        return [microseconds(each.copy), *_times(each, WAYS), *extra]

    return _of_many(records, "distributed", header, cells)


def forecast_text(records: Records) -> str:
    """Times of a loss on more H100s, forecast by the formula of docs/distributed.md from the records of fewer."""
    case = Case("cross_entropy", (8192, 128256), 1, "bfloat16", with_gradient=True)
    names = {count: f"h100x{count}-distributed" for count in (2, 4, 8)}
    found = {count: each for count, name in names.items() for each in records.cases(name) if each.case == case}
    if 2 not in found:
        return ABSENT
    copies = {count: each.copy.median_us for count, each in found.items() if each.copy}
    us = {count: {r.who: r.us for r in each.results if r.us} for count, each in found.items()}

    def wait(count: int) -> float:
        """Microseconds beyond a part of the time of one GPU."""
        return us[count]["ours"] - us[count]["one-process"] / count

    text = (
        f"`cross_entropy` of {shape(case)} with its gradient takes {microseconds(us[2]['one-process'])} µs on one of "
        f"the H100s and {microseconds(us[2]['ours'])} µs on two, {microseconds(wait(2))} more than half."
    )
    for count in (4, 8):
        largest = max(n for n in us if n < count)
        whole, copy = us[largest]["one-process"], copies[largest] * largest / count
        forecast = whole / count + wait(largest)
        text += (
            f" With the wait of {largest}, {count} take {microseconds(forecast)} µs "
            f"({forecast / copy:.2f} times a copy of a shard); "
        )
        if count in us:
            text += f"measured: {microseconds(us[count]['ours'])} µs ({us[count]['ours'] / copies[count]:.2f} times)."
        else:
            text += "nobody has measured that."
    return f"{text}\n\n{source(*(records.get(names[count]) for count in found))}"


def sharded_heads_table(records: Records) -> str:
    """Heads whose classes are sharded over the GPUs of one host: the time by each way, and of the bare products."""
    ways = {who: name for who, name in WAYS.items() if who in ("ours", "collective", "one-process")}

    def cells(each: CaseResult) -> list[str]:
        return [*_times(each, ways), *map(microseconds, (each.three_products, each.four_products))]

    header = (*ways.values(), "three products on one GPU", "four products on one GPU")
    return _of_many(records, "distributed-heads", header, cells)


def _times(each: CaseResult, ways: Iterable[str]) -> list[str]:
    times = {result.who: result.times for result in each.results}
    found = [microseconds(times.get(who)) for who in ways]
    return [f"**{found[0]}**", *found[1:]]


def _of_many(records: Records, suite: str, header: Sequence[str], cells: Callable[[CaseResult], Sequence[str]]) -> str:
    """A row for each case of a suite that several GPUs measure, from the newest record of each number of GPUs."""
    found = _newest(record for record in records if record.name.partition("-")[2] == f"{suite}.json")
    rows = [
        [f"{_name(each)} on {_gpus(record)}", *cells(each)]
        for record in found for each in record.results if not each.skipped
    ]  # fmt: skip
    return records.table(("call", *header), rows, *(record.name.removesuffix(".json") for record in found))


def _newest(records: Iterable[Record]) -> list[Record]:
    """The newest record of each number of processes, the fewest first."""
    of_processes = [record for record in records if "processes" in record.content]
    by_count = {
        record.content["processes"]["count"]: record
        for record in sorted(of_processes, key=lambda record: str(record.content["date"]))
    }
    return [record for _, record in sorted(by_count.items())]


def _name(each: CaseResult) -> str:
    case = each.case
    words = [f"`{case.operation}`", shape(case)] + (["with gradient"] if case.with_gradient else [])
    return " ".join([*words, *([case.reduction] if case.reduction == "none" else [])])


def _gpus(record: Record) -> str:
    """Number and model of the GPUs of a record, as "2 H200s"."""
    name: str = record.content["device"]["name"]
    return f"{record.content['processes']['count']} {name.removeprefix('NVIDIA ').split()[0]}s"
