"""The results of one sharded case, and the table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..cases import STATISTICS, Case
from ..result import WORDS, CaseResult, Result, made
from ..timing import Times

if TYPE_CHECKING:
    from typing_extensions import Self

HEADER = (
    "operation", "shape", "dtype", "who", "time us", "host us", "copies", "extra MB", "collectives", "bytes/row",
    "error", "analysis",
)  # fmt: skip
"""Columns of the table."""

NUMBERS = ("time us", "host us", "copies", "extra MB", "collectives", "bytes/row", "error")
"""Columns that are aligned to the right."""


@dataclass(frozen=True)
class ShardedResult(Result):
    """The result of one way to compute a sharded case.

    `times` are those of the slowest process in each repetition, `copies` the median over that of a copy of a shard, and
    `extra_bytes` the largest of any process.

    Attributes:
        host_us: Microseconds until the call returns to the host; None on a CPU.
        collectives: Number of collectives of a call.
        sent_row_bytes: Bytes per row that a process gives to the collectives of a call, or sends to each other process
            through peer memory; the most of any process.
        formula_row_bytes: The same by the formula of the documentation; None where the peer has none.
    """

    host_us: float | None = None
    collectives: int | None = None
    sent_row_bytes: float | None = None
    formula_row_bytes: int | None = None


@dataclass(frozen=True)
class ShardedCaseResult(CaseResult):
    """The results of one sharded case.

    `case` has the shape of the whole input; `copy` is the time of a copy of one shard, `copy_gbps` its bandwidth.

    Attributes:
        processes: Number of processes.
        all_reduce: Times of an all-reduce of one float32 number per row.
    """

    result_type: ClassVar = ShardedResult

    processes: int = 1
    all_reduce: Times | None = None

    @classmethod
    def of(cls, recorded: Mapping[str, Any], framework: str = "torch") -> Self:
        """The results of a dictionary as `as_dict` makes it."""
        times = recorded["all_reduce"]
        return replace(super().of(recorded, framework), all_reduce=times and made(Times, times))

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        more = {"processes": self.processes, "all_reduce": asdict(self.all_reduce) if self.all_reduce else None}
        return {**super().as_dict(), **more, "within_cpu_bound": None}


def row_bytes(case: Case, by_peer_memory: bool = False) -> int:
    """Bytes per row that a process of ours sends in a call, by the formulas of docs/distributed.md.

    In a collective, forward sends numbers of the accumulator's dtype: m and l; the score of the target for a result per
    row; the sum for the entropy.  Backward of an operation with a result per element sends one float64 number.

    Through peer memory, 32 bits of the same numbers travel in 64 bits, and sums of 32-bit logits have 64 bits.

    >>> row_bytes(Case("softmax", (4, 8), 1, "bfloat16")), row_bytes(Case("token_logprobs", (4, 8), 1, "float64"))
    (8, 32)
    >>> row_bytes(Case("softmax", (4, 8), 1, "bfloat16"), True), row_bytes(Case("softmax", (4, 8), 1, "float32"), True)
    (16, 24)
    """
    if by_peer_memory:
        m = 2 if case.dtype == "float64" else 1
        entropy = "entropy" in STATISTICS.get(case.operation, ())
        a_sum = 2 * m if case.dtype in ("float32", "float64") or entropy else 1
        forward = m + (1 + entropy) * a_sum + m * case.declaration.has_target
        backward = (m + a_sum) * (case.with_gradient and not case.declaration.per_row)
        return 8 * (forward + backward)
    numbers = 2 + case.declaration.per_row + len(STATISTICS.get(case.operation, ()))
    backward = case.with_gradient and not case.declaration.per_row
    return numbers * (8 if case.dtype == "float64" else 4) + 8 * backward


def table(results: Sequence[ShardedCaseResult]) -> list[tuple[str, ...]]:
    """The rows of the table: one per result and skipped case, and the copy and the all-reduce beside each case."""
    rows: list[tuple[str, ...]] = []
    for found in results:
        start = (found.case.operation, str(found.case), found.case.dtype)
        if found.skipped:
            rows.append((*start, "-", *[""] * 7, f"skipped: {found.skipped}"))
            continue
        rows += [(*start, result.who, *_figures(found, result)) for result in found.results]
        for name, times in (("copy of a shard", found.copy), ("all-reduce of rows", found.all_reduce)):
            if times is not None:
                rows.append((*start, name, _us(times.median_us), *[""] * 7))
    return rows


def _figures(found: ShardedCaseResult, result: Result) -> tuple[str, ...]:
    if result.times is None or not isinstance(result, ShardedResult):
        return (*[""] * 7, f"{WORDS[result.status]}: {result.reason}")
    return (
        _us(result.times.median_us),
        "" if result.host_us is None else _us(result.host_us),
        "" if result.copies is None else f"{result.copies:.2f}",
        "" if result.extra_bytes is None else f"{result.extra_bytes / 1e6:.1f}",
        str(result.collectives),
        f"{result.sent_row_bytes:.6g}",
        f"{result.error:.1e}",
        result.analysis,
    )


def _us(microseconds: float) -> str:
    return f"{microseconds:.{1 if microseconds >= 10 else 2}f}"


def above(record: Mapping[str, Any]) -> list[str]:
    """The line above the table: the processes."""
    processes = record["processes"]
    nccl = f" {processes['nccl']}" if "nccl" in processes else ""
    return [f"{processes['count']} processes over {processes['backend']}{nccl}; each figure is the slowest process's."]


def below(results: Sequence[ShardedCaseResult]) -> list[str]:
    """The lines below the table: bytes that differ from the formula, and the speed-up over one process."""
    lines = [
        f"{found.case.operation} {found.case}: {result.who} sends {result.sent_row_bytes:.6g} bytes per row, and the "
        f"formula says {result.formula_row_bytes}."
        for found in results
        for result in found.results
        if isinstance(result, ShardedResult)
        and result.formula_row_bytes is not None
        and result.formula_row_bytes != result.sent_row_bytes
    ]
    for found in results:
        times = {result.who: result.times.median_us for result in found.results if result.times}
        if {"ours", "one-process"} <= set(times):
            ratio = times["one-process"] / times["ours"]
            name = f"{found.case.operation} {found.case}"
            lines.append(f"{name}: {found.processes} processes have {ratio:.2f} times the speed of one.")
    return lines
