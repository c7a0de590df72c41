"""The blocks of docs/performance.md about softmax, its gradient and its relatives, on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.result import CaseResult
from onlinesoftmax.lab.report.charts import NAMES

from .markdown import ABSENT, SHORT, microseconds, shape, share, source, spread, strategy, table, together
from .records import Records, ours, result_of

DTYPES = ("bfloat16", "float16", "float32")

VERDICTS = {"refuses": "refused", "wrong": "wrong", "fails": "failed"}
"""Words for a result that has no time, and its status in a record."""

SHORT_ROW = 64
"""Rows with fewer columns have lines of their own in `h100_table`, because most of them are far from the copy."""


def _beside(records: Records, name: str) -> str:
    """Our share of the copy in each dtype, and that of each library in bfloat16."""
    found = records.cases(name, dtype="bfloat16")
    if not found:
        return ABSENT
    dtypes = [dtype for dtype in DTYPES if records.cases(name, dtype=dtype)]
    header = ["rows × cols", "strategy", *(f"ours, {SHORT[dtype]}" for dtype in dtypes)]
    header += [f"{library}, bf16" for library in NAMES.values()]
    rows = []
    for each in found:
        mine = [share(records.result(replace(each.case, dtype=dtype), "ours", name)) for dtype in dtypes]
        theirs = [share(result_of(each, who)) for who in NAMES]
        rows.append([shape(each.case), strategy(each), f"**{mine[0]}**", *mine[1:], *theirs])
    return f"{table(header, rows)}\n\n{source(records.get(name))}"


def softmax_table(records: Records) -> str:
    """The suite forward on an H200."""
    return _beside(records, "h200-forward")


def rows1024_table(records: Records) -> str:
    """The suite rows1024 on an H200."""
    return _beside(records, "h200-rows1024")


def long_rows_table(records: Records) -> str:
    """The suite long-rows on an H200."""
    return _beside(records, "h200-long-rows")


def gradients_table(records: Records) -> str:
    """The suite gradients on an H200: ranges, and what other libraries cannot."""
    name = "h200-gradients"
    found = records.cases(name)
    if not found:
        return ABSENT
    said = []
    for who in ("ours", *NAMES):
        for dtype in ("bfloat16", "float32"):
            results = [result_of(each, who) for each in found if each.case.dtype == dtype]
            there = [result for result in results if result]
            if there:
                bad = [f"{word} in {count} of {len(there)} cases" for word, status in VERDICTS.items()
                       if (count := sum(result.status == status for result in there))]  # fmt: skip
                shares = spread(result.of_copy for result in there)
                said.append(f"| {NAMES.get(who, who)} | {dtype} | {shares} | {'; '.join(bad)} |")
    header = "| library | dtype | of the copy | |\n|---|---|---|---|\n"
    return header + "\n".join(said) + f"\n\n{source(records.get(name))}"


def single_row_table(records: Records) -> str:
    """The suite single-row on an H200."""
    found = records.cases("h200-single-row", dtype="bfloat16")
    if not found:
        return ABSENT
    rows = []
    for each in found:
        wide = records.result(replace(each.case, dtype="float32"), "ours", "h200-single-row")
        mine, theirs = ours(each), result_of(each, "torch")
        rows.append([
            f"2^{each.case.shape[-1].bit_length() - 1}", strategy(each),
            microseconds(each.copy and each.copy.median_us), microseconds(mine.times and mine.times.median_us),
            f"**{share(mine)}**", share(wide), microseconds(theirs and theirs.times and theirs.times.median_us),
        ])  # fmt: skip
    header = ("columns", "strategy", "copy, µs", "ours, µs", "of the copy, bf16", "of the copy, fp32", "PyTorch, µs")
    return f"{table(header, rows)}\n\n{source(records.get('h200-single-row'))}"


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
        f"reach these parts of a copy. {'. '.join(said)}.\n\n{source(record)}"
    )


def fused_table(records: Records) -> str:
    """The suite fused on an H200: one row for each option, one column for each shape."""

    def option(each: CaseResult) -> str:
        return " and ".join(each.case.fused) or "none"

    return _by_shape(records, "h200-fused", ("option", option), "PyTorch", 1)


def operations_table(records: Records) -> str:
    """Operations of the family that no suite of their own measures."""

    def operation(each: CaseResult) -> str:
        return f"`{each.case.operation}`"

    return _by_shape(records, "h200-operations", ("operation", operation), "PyTorch, more than one row", 2)


def _by_shape(
    records: Records, name: str, first: tuple[str, Callable[[CaseResult], str]], last: str, least_rows: int
) -> str:
    """A table of our shares: one line for each value of the first column, one column for each shape.

    Args:
        records: All records.
        name: Name of the record.
        first: Head of the first column, and the function that gives its value for a case.
        last: Head of the last column, the range of PyTorch's shares.
        least_rows: Least number of rows of a case whose share is in that range.
    """
    found = records.cases(name)
    if not found:
        return ABSENT
    head, value = first
    shapes = list(dict.fromkeys(each.case.shape for each in found))
    rows = []
    for line in dict.fromkeys(value(each) for each in found):
        mine = [each for each in found if value(each) == line]
        theirs = spread(
            result.of_copy
            for each in mine
            for result in each.results
            if result.who == "torch" and each.case.rows >= least_rows
        )
        rows.append([line, *(_pair(mine, size) for size in shapes), theirs])
    header = (head, *(" × ".join(map(str, size)) for size in shapes), last)
    return f"{table(header, rows)}\n\n{source(records.get(name))}"


def _pair(found: Iterable[CaseResult], size: Sequence[int]) -> str:
    """Our shares in bfloat16 and in float32 of one shape."""
    cells = {each.case.dtype: share(ours(each)) for each in found if each.case.shape == size}
    return together(cells[dtype] for dtype in DTYPES if dtype in cells)


def h100_table(records: Records) -> str:
    """The records of an H100, by strategy: how many cases, and the range of their shares of the copy."""
    suites = ("forward", "rows1024", "single-row", "long-rows", "gradients", "cross-entropy")
    names = [f"h100-{suite}" for suite in suites]
    rows = []
    for name in names:
        found = records.cases(name)
        for kind in dict.fromkeys(_kind(each) for each in found):
            mine = [each for each in found if _kind(each) == kind]
            theirs = [result.of_copy for each in mine for result in each.results if result.who == "torch"]
            rows.append([
                name.removeprefix("h100-"), kind, _lengths(each.case for each in mine), str(len(mine)),
                spread(ours(each).of_copy for each in mine), spread(theirs),
            ])  # fmt: skip
    if not rows:
        return ABSENT
    header = ("suite", "strategy", "columns", "cases", "ours", "PyTorch")
    return f"{table(header, rows)}\n\n{source(*map(records.get, names))}"


def _kind(found: CaseResult) -> str:
    """The strategy of our plan, and the reason if the case is far from the copy with every strategy."""
    plan, cols = ours(found).plan, found.case.shape[found.case.dim]
    if cols < SHORT_ROW:
        return f"{strategy(found)}, fewer than {SHORT_ROW} columns"
    return f"{strategy(found)}, rows read twice" if plan is not None and plan.reads > 1 else strategy(found)


def _lengths(cases: Iterable[Case]) -> str:
    cols = [case.shape[case.dim] for case in cases]
    return str(min(cols)) if min(cols) == max(cols) else f"{min(cols)} to {max(cols)}"


def strategies_table(records: Records) -> str:
    """The strategies that the planner chose in the suites of an H200, and the ranges of their shares."""
    names = ("h200-forward", "h200-rows1024", "h200-single-row", "h200-gradients", "h200-lengths")
    found = [each for name in names for each in records.cases(name)]
    rows = []
    for chosen in dict.fromkeys(strategy(each) for each in found):
        mine = [each for each in found if strategy(each) == chosen]
        shares = sorted(ours(each).of_copy or 0 for each in mine)
        worst = min(mine, key=lambda each: ours(each).of_copy or 0)
        rows.append([
            f"`{chosen}`", _lengths(each.case for each in mine), str(len(mine)), f"{shares[len(shares) // 2]:.2f}",
            f"{shares[0]:.2f} ({worst.case.operation}, {shape(worst.case)}, {worst.case.dtype})",
        ])  # fmt: skip
    return table(("strategy", "columns", "cases", "median", "lowest"), rows) if rows else ABSENT


def triton_table(records: Records) -> str:
    """The Triton kernels where they were forced, and the CUDA kernels for the same cases."""
    names = {"h200-triton-forward": "h200-forward", "h200-triton-single-row": "h200-single-row",
             "h200-triton-gradients": "h200-gradients"}  # fmt: skip
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for triton, cuda in names.items():
        for each in records.cases(triton):
            other = records.result(each.case, "ours", cuda)
            if other and other.of_copy:
                key = (each.case.operation, strategy(each), each.case.dtype)
                groups.setdefault(key, []).append((ours(each).of_copy or 0, other.of_copy))
    rows = [
        [f"`{operation}`", f"`{chosen}`", SHORT[dtype], str(len(pairs)), spread(a for a, _ in pairs),
         spread(b for _, b in pairs)]
        for (operation, chosen, dtype), pairs in groups.items()
    ]  # fmt: skip
    if not rows:
        return ABSENT
    header = ("operation", "Triton strategy", "dtype", "cases", "Triton", "the planner's choice")
    return f"{table(header, rows)}\n\n{source(*map(records.get, names))}"


def jax_table(records: Records) -> str:
    """Softmax in JAX on an H200: the suites forward and lengths."""
    return _beside_jax(records, "h200-jax-forward", "h200-jax-lengths")


def jax_gradients_table(records: Records) -> str:
    """The gradient of softmax in JAX on an H200."""
    return _beside_jax(records, "h200-jax-gradients")


def _beside_jax(records: Records, *names: str) -> str:
    """Shares of XLA's copy in bfloat16 and float32, of ours and of jax.nn; short rows first."""
    found = [(each.case, name) for name in names for each in records.cases(name, dtype="bfloat16")]
    if not found:
        return ABSENT
    rows = []
    for case, name in sorted(found, key=lambda pair: (pair[0].shape[-1], pair[0].rows)):
        cells = [
            together(share(records.result(replace(case, dtype=dtype), who, name)) for dtype in ("bfloat16", "float32"))
            for who in ("ours", "jax.nn")
        ]
        rows.append([shape(case), *cells])
    return f"{table(('rows × cols', 'ours', 'jax.nn'), rows)}\n\n{source(*map(records.get, names))}"


BLOCKS: dict[str, Callable[[Records], str]] = {
    block.__name__: block
    for block in (
        softmax_table, rows1024_table, gradients_table, single_row_table, long_rows_table, lengths_text, fused_table,
        operations_table,        h100_table, strategies_table, triton_table, jax_table, jax_gradients_table,
    )
}  # fmt: skip
"""The blocks by name."""
