"""The blocks of docs/performance.md about softmax, its gradient and its relatives, on GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.result import CaseResult
from onlinesoftmax.lab.report.panels import NAMES

from .markdown import (
    ABSENT,
    NOTHING,
    SHORT,
    grouped,
    microseconds,
    shape,
    share,
    sizes,
    source,
    spread,
    strategy,
    table,
    together,
)
from .records import Records, ours

DTYPES = ("bfloat16", "float16", "float32")

SHORT_ROW = 64
"""Rows with fewer columns have lines of their own in tables of ranges, because most of them are far from the copy."""

LONG_ROW = 1 << 20
"""Rows with this many columns or more have lines of their own in `jax_table`."""

ALIGNED = 8
"""Columns of bfloat16 in 16 bytes."""

COLUMNS = (5, 33, 64, 1000, 1025, 4096, 16384, 50257, 128256, 262144, 1 << 20, 1 << 22)
"""Row lengths of `softmax_table`; the chart above the table has every aligned length."""


def softmax_table(records: Records) -> str:
    """The suite forward on an H200: our share of the copy in each dtype, and that of each library in bfloat16."""
    name = "h200-forward"
    found = [each for each in records.cases(name, dtype="bfloat16") if _is_shown(each.case)]
    dtypes = [dtype for dtype in DTYPES if records.cases(name, dtype=dtype)]
    header = ["rows × cols", "strategy", *(f"ours, {SHORT[dtype]}" for dtype in dtypes)]
    header += [f"{library}, bf16" for library in NAMES.values()]
    rows = []
    for each in sorted(found, key=lambda each: (not _is_inner(each.case), each.case.shape[-1])):
        mine = [share(records.result(replace(each.case, dtype=dtype), "ours", name)) for dtype in dtypes]
        theirs = [share(each.result(who)) for who in NAMES]
        rows.append([shape(each.case), strategy(each), f"**{mine[0]}**", *mine[1:], *theirs])
    return records.table(header, rows, name)


def _is_shown(case: Case) -> bool:
    return case.shape[-1] in COLUMNS or not _is_inner(case)


def _is_inner(case: Case) -> bool:
    return case.dim == len(case.shape) - 1


def single_row_table(records: Records) -> str:
    """The suite single-row on an H200: every fourth length."""
    name, rows = "h200-single-row", []
    for each in records.cases(name, dtype="bfloat16")[::4]:
        wide = records.result(replace(each.case, dtype="float32"), "ours", name)
        mine, theirs = ours(each), each.result("torch")
        rows.append([
            f"2^{each.case.shape[-1].bit_length() - 1}", strategy(each), microseconds(each.copy),
            microseconds(mine.times), f"**{share(mine)}**", share(wide), microseconds(theirs and theirs.times),
        ])  # fmt: skip
    header = ("columns", "strategy", "copy, µs", "ours, µs", "of the copy, bf16", "of the copy, fp32", "PyTorch, µs")
    return records.table(header, rows, name)


def lengths_text(records: Records) -> str:
    """Row lengths that are no powers of two."""
    name = "h200-lengths"
    record = records.get(name)
    if record is None:
        return ABSENT
    said = []
    for dtype in ("bfloat16", "float32"):
        found = records.cases(name, dtype=dtype)
        slow = [each for each in found if (ours(each).of_copy or 0) < 0.95]
        text = ", ".join(f"{share(ours(each))} at {each.case.shape[-1]}" for each in slow)
        rest = spread(ours(each).of_copy for each in found if each not in slow)
        said.append(f"{dtype}: {text + '; ' if text else ''}{rest} at the {'other ' if slow else ''}"
                    f"{len(found) - len(slow)} lengths")  # fmt: skip
    cols = [each.case.shape[-1] for each in records.cases(name)]
    return (
        f"{len(set(cols))} other lengths from {min(cols)} to {max(cols)} columns, most of them unaligned, "
        f"reach these shares of the copy. {'. '.join(said)}.\n\n{source(record)}"
    )


def short_rows_table(records: Records) -> str:
    """The suite short-rows on an H100: shares of the copy, bfloat16 before float32, with each library beside ours."""
    name = "h100-short-rows"
    found = [each for each in records.cases(name) if not each.case.with_gradient]
    if not found:
        return ABSENT
    operations = list(dict.fromkeys(each.case.operation for each in found))
    who = {"ours": "ours"} | NAMES
    header = ["rows × cols", *(f"`{operation}`, {who[each]}" for operation in operations for each in who)]
    rows = []
    for size in dict.fromkeys(each.case.shape for each in found):
        of_size = [each for each in found if each.case.shape == size]
        cells = [_shares(of_size, operation, each) for operation in operations for each in who]
        rows.append([sizes(size), *cells])
    return f"{table(header, rows)}\n\n{_short_losses(records, name)}\n\n{source(records.get(name))}"


def _shares(found: Iterable[CaseResult], operation: str, who: str) -> str:
    """The shares of a library in bfloat16 and in float32, for the cases of one shape."""
    results = {each.case.dtype: each.result(who) for each in found if each.case.operation == operation}
    return together(share(results[dtype]) for dtype in DTYPES if results.get(dtype)) or NOTHING


def _short_losses(records: Records, name: str) -> str:
    """A sentence about the losses of the suite, which are measured with their gradients."""
    said, losses = [], records.cases(name, with_gradient=True)
    for operation in dict.fromkeys(each.case.operation for each in losses):
        found = [each for each in losses if each.case.operation == operation]
        times = [1 / each.against_torch.ratio for each in map(ours, found) if each.against_torch]
        said.append(
            f"`{operation}` with its gradient takes {spread(ours(each).copies for each in found)} times as long as the "
            f"copy, and PyTorch {min(times):.0f} to {max(times):.0f} times as long as ours"
        )
    cols = sorted({each.case.shape[-1] for each in losses})
    return f"Over {' and '.join(map(str, cols))} columns, {'; '.join(said)}."


def fused_table(records: Records) -> str:
    """The suite fused on an H200: one row for each option, one column for each shape."""
    name = "h200-fused"
    found = records.cases(name)
    shapes = list(dict.fromkeys(each.case.shape for each in found))
    rows = []
    for option in dict.fromkeys(each.case.fused for each in found):
        mine = [each for each in found if each.case.fused == option]
        theirs = spread(result.of_copy for each in mine for result in each.results if result.who == "torch")
        rows.append([" and ".join(option) or "none", *(_pair(mine, size) for size in shapes), theirs])
    header = ("option", *(" × ".join(map(str, size)) for size in shapes), "PyTorch")
    return records.table(header, rows, name)


def _pair(found: Iterable[CaseResult], size: Sequence[int]) -> str:
    """Our shares in bfloat16 and in float32 of one shape."""
    cells = {each.case.dtype: share(ours(each)) for each in found if each.case.shape == size}
    return together(cells[dtype] for dtype in DTYPES if dtype in cells)


def h100_table(records: Records) -> str:
    """The records of an H100, by operation and strategy: how many cases, and the range of their shares of the copy."""
    suites = ("forward", "rows1024", "single-row", "long-rows", "gradients", "cross-entropy")
    names = [f"h100-{suite}" for suite in suites]
    found = (each for name in names for each in records.cases(name))
    rows = [
        [*key, _lengths(each.case for each in mine), str(len(mine)), spread(ours(each).of_copy for each in mine),
         spread(result.of_copy for each in mine for result in each.results if result.who == "torch")]
        for key, mine in grouped(found, _kind).items()
    ]  # fmt: skip
    return records.table(("operation", "strategy", "columns", "cases", "ours", "PyTorch"), rows, *names)


def _kind(found: CaseResult) -> tuple[str, str]:
    """The operation, and the strategy of our plan with the reason if the case is far from the copy with each."""
    plan, case = ours(found).plan, found.case
    why = ", rows read twice" if plan is not None and plan.reads > 1 else ""
    why = f", fewer than {SHORT_ROW} columns" if case.shape[case.dim] < SHORT_ROW else why
    return f"`{case.operation}`" + " and its gradient" * case.with_gradient, strategy(found) + why


def _lengths(cases: Iterable[Case]) -> str:
    cols = [case.shape[case.dim] for case in cases]
    return str(min(cols)) if min(cols) == max(cols) else f"{min(cols)} to {max(cols)}"


def jax_table(records: Records) -> str:
    """Softmax and its gradient in JAX: ranges of the shares of XLA's copy on the first GPU that has a record."""
    names = [records.first(suite) for suite in ("jax-forward", "jax-lengths", "jax-gradients")]
    groups: dict[str, list[CaseResult]] = {}
    for name in names:
        for each in records.cases(name):
            where = name.partition("-")[0].upper()
            groups.setdefault(f"{where}: `{each.case.operation}`, {_rows_of(each.case)}", []).append(each)
    rows = []
    by_pallas = {
        each.case: ours(each).of_copy
        for name in names for each in records.cases(name.replace("jax-", "jax-pallas-"))
    }  # fmt: skip
    for title, mine in groups.items():
        found = [each.result("jax.nn") for each in mine]
        wrong = sum(result.status == "wrong" for result in found if result)
        theirs = spread(result.of_copy for result in found if result)
        rows.append([
            title, _lengths(each.case for each in mine),
            *(spread(ours(each).of_copy for each in mine if each.case.dtype == dtype)
              for dtype in ("bfloat16", "float32")),
            spread(by_pallas.get(each.case) for each in mine),
            theirs + (f"; wrong in {wrong} of {len(mine)}" if wrong else ""),
        ])  # fmt: skip
    header = ("operation and rows", "columns", "ours, bf16", "ours, fp32", "ours by Pallas", "jax.nn")
    return records.table(header, rows, *names, *(name.replace("jax-", "jax-pallas-") for name in names))


def jax_calls_table(records: Records) -> str:
    """The time of one of several calls in a row from PyTorch, and in a program of JAX."""
    names = records.first("calls"), records.first("jax-calls")
    in_torch = {each.case: ours(each) for each in records.cases(names[0])}
    rows = []
    for each in records.cases(names[1]):
        mine, theirs, before = ours(each), each.result("jax.nn"), in_torch.get(each.case)
        if mine.times and before and before.times:
            rows.append([
                shape(each.case), SHORT[each.case.dtype], str(each.case.calls), microseconds(before.times),
                f"**{microseconds(mine.times)}**", f"{mine.times.median_us / before.times.median_us:.3f}",
                microseconds(theirs and theirs.times),
            ])  # fmt: skip
    header = ("rows × columns", "dtype", "calls", "PyTorch, µs", "JAX, µs", "JAX over PyTorch", "jax.nn, µs")
    return records.table(header, rows, *names)


def _rows_of(case: Case) -> str:
    """The kind of rows of a case, in words."""
    cols = case.shape[case.dim]
    if not _is_inner(case):
        return "another dimension"
    if cols < SHORT_ROW:
        return "short rows"
    if cols >= LONG_ROW:
        return "long rows"
    return "unaligned rows" if cols % ALIGNED else "aligned rows"
