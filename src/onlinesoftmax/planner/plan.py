"""The planner: which backend and strategy, with which blocks, and why.  Pure: no hardware is asked.

Every strategy proposes candidates; the one with the least estimated time wins.  Where a table was measured on the
device (tuning.py), the estimate is the time of the nearest shape in it; else it is bytes over bandwidth, corrected by
what was measured on an H200, plus the launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..core.device import Device
from ..core.layout import power_of_two_divisor
from ..core.problem import Problem
from .measured import Cell, Table
from .strategies import TABLE, Candidate, Proposals

Strategies = Sequence[tuple[str, str, Proposals]]
"""Rows of candidates.TABLE."""


class PlanError(ValueError):
    """No plan: the message lists every reason."""


@dataclass(frozen=True, kw_only=True)
class Plan(Candidate):
    """A candidate with its price: what `explain` prints, a backend runs and `bench` records.

    Attributes:
        device: Name of the device it was made for.
        bytes_moved: Bytes through device memory, by this plan.
        floor_us: Least microseconds the device allows: each byte once, at its copy bandwidth.
        estimate_us: Microseconds this plan is expected to take.
    """

    device: str
    bytes_moved: int
    floor_us: float
    estimate_us: float

    def as_dict(self) -> dict[str, Any]:
        """Every attribute by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Refusal:
    """Why a strategy cannot run a problem."""

    backend: str
    strategy: str
    reason: str


def plan(
    problem: Problem,
    device: Device,
    backend: str | None = None,
    strategy: str | None = None,
    unavailable: Sequence[tuple[str, str]] = (),
    batch_invariant: bool = False,
    table: Table | None = None,
    strategies: Strategies = TABLE,
) -> Plan:
    """The plan for a problem on a device.

    Args:
        problem: What to compute.
        device: Where: `device.from_torch`, or `device.known` for one that is not here.
        backend: Force this backend.
        strategy: Force this strategy.
        unavailable: Backends that cannot be used here, or backend/strategy, each with the reason.
        batch_invariant: Choose as for INVARIANT_ROWS rows, however many there are.
        table: What was measured on the device, or on one like it.
        strategies: Those that there are: candidates.TABLE, or candidates.FOR_JAX.

    Raises:
        PlanError: nothing that was asked for can run; the message lists every reason.

    Example:
        >>> from onlinesoftmax.device import known
        >>> plan(Problem("softmax", 4096, 1024, "bfloat16"), known("h200")).strategy
        'row'
        >>> plan(Problem("softmax", 1, 1 << 24), known("h200")).strategy
        'grid'
    """
    for_plan = replace(problem, rows=INVARIANT_ROWS) if batch_invariant else problem
    options = alternatives(for_plan, device, backend, strategy, unavailable, table, strategies)
    plans = [option for option in options if isinstance(option, Plan)]
    if plans:
        best = min(plans, key=lambda option: option.estimate_us)
        return _for_rows(best, problem, device) if batch_invariant else best
    asked = "".join(f" {key}={value!r}" for key, value in (("backend", backend), ("strategy", strategy)) if value)
    reasons = "".join(f"\n  {o.backend}/{o.strategy}: {o.reason}" for o in options if isinstance(o, Refusal))
    raise PlanError(
        f"no plan for {problem.operation} of {problem.rows} x {problem.cols} {problem.dtype} on {device.name}"
        f"{' with' + asked if asked else ''}:{reasons}"
    )


def alternatives(
    problem: Problem,
    device: Device,
    backend: str | None = None,
    strategy: str | None = None,
    unavailable: Sequence[tuple[str, str]] = (),
    table: Table | None = None,
    strategies: Strategies = TABLE,
) -> list[Plan | Refusal]:
    """Every strategy's plan, or why it has none: what `explain` compares.  Arguments as for `plan`.

    Raises:
        PlanError: there is no such backend or strategy.
    """
    for argument, value, names in (
        ("backend", backend, [row[0] for row in strategies]),
        ("strategy", strategy, [row[1] for row in strategies]),
    ):
        if value is not None and value not in names:
            raise PlanError(f"unknown {argument} {value!r}; there are: {', '.join(dict.fromkeys(names))}")
    missing = dict(unavailable)
    cell = table.nearest(problem) if table is not None else None
    if cell is not None and all(timing.backend in missing for timing in cell.timings):
        cell = None
    found: list[Plan | Refusal] = []
    for its_backend, its_strategy, propose in strategies:
        if backend not in (None, its_backend) or strategy not in (None, its_strategy):
            continue
        reason = missing.get(its_backend) or missing.get(f"{its_backend}/{its_strategy}")
        options = reason or propose(problem, device)
        if isinstance(options, str):
            found.append(Refusal(its_backend, its_strategy, options))
        elif cell is None:
            found.append(price(options[0], problem, device))
        else:
            assert table is not None
            found.append(_measured(options, cell, problem, device, table.bandwidth / device.bandwidth))
    return found or [Refusal(str(backend), str(strategy), f"{backend} has no strategy {strategy!r}")]


NOT_IN_TABLE = 1.5
"""A strategy that is missing in a table was slower than the fastest by this, could not run, or was not measured."""


def _measured(options: list[Candidate], cell: Cell, problem: Problem, device: Device, slower: float) -> Plan:
    """The proposal that was fastest for a shape like the problem's, with its time there for as many elements."""
    scale = slower * problem.rows * problem.cols / (cell.rows * cell.cols)
    for timing in cell.timings:
        if (timing.backend, timing.strategy) == (options[0].backend, options[0].strategy):
            # What keeps no terms has else the blocks of what does.
            names = (timing.variant, timing.variant.removesuffix(", terms"))
            fitting = [option for name in names for option in options if option.variant == name]
            return replace(price((fitting or options)[0], problem, device), estimate_us=timing.us * scale)
    plan, best = price(options[0], problem, device), min((timing.us for timing in cell.timings), default=0.0)
    return replace(plan, estimate_us=max(plan.estimate_us, NOT_IN_TABLE * best * scale))


INVARIANT_ROWS = 4096
"""Rows that a batch-invariant plan is made for: enough to fill every device."""


def _for_rows(best: Plan, problem: Problem, device: Device) -> Plan:
    """The same blocks for a problem's own number of rows."""
    candidate = Candidate(**{field.name: getattr(best, field.name) for field in fields(Candidate)})
    # Blocks that stay, and take one row after another, are as many as before.
    if not candidate.stages and candidate.strategy != "grid":
        programs = -(-problem.rows // candidate.rows_per_program) * candidate.splits
        candidate = replace(candidate, programs=programs)
    return price(candidate, problem, device)


NARROW = {16: 1.0, 8: 1.0, 4: 0.95, 2: 0.65}
"""Part of the bandwidth left when a load is narrower than 16 bytes, by its bytes; measured on an H200."""

SECTOR_BYTES = 32
"""Least that device memory delivers."""

LAUNCH_US = 2.5
"""Microseconds of one launch behind another on a stream."""

LATENCY_US = 0.9
"""Microseconds from a load to its data on a busy device."""


def price(candidate: Candidate, problem: Problem, device: Device) -> Plan:
    """The candidate with the bytes it moves and the time it should take."""
    bytes_moved = candidate.reads * problem.read_bytes + problem.write_bytes
    per_us = device.bandwidth * 1e3
    quality = 1.0
    if device.kind == "cuda":
        quality = candidate.quality * _fill(candidate, problem, device)
        # What PyTorch's kernels do with narrow loads is in its quality already.
        quality *= 1.0 if candidate.backend == "eager" else _width(candidate, problem)
    return Plan(
        **asdict(candidate),
        device=device.name,
        bytes_moved=bytes_moved,
        floor_us=(problem.read_bytes + problem.write_bytes) / per_us,
        estimate_us=candidate.launches * LAUNCH_US
        + (bytes_moved - _served_by_l2(candidate, problem, device)) / (per_us * quality),
    )


def _width(candidate: Candidate, problem: Problem) -> float:
    """Part of the bandwidth that the width of its loads leaves a candidate."""
    if candidate.vector > 1:
        return 1.0
    if problem.contiguous:
        return NARROW[problem.aligned_bytes]
    if candidate.backend == "cuda":
        # A warp's lanes read one row.
        return problem.itemsize / SECTOR_BYTES
    if candidate.strategy == "column":
        return NARROW[min(16, power_of_two_divisor(problem.adjacent) * problem.itemsize)]
    # Memory comes in sectors of 32 bytes, and of each only the rows in the tile are used.
    return min(1.0, min(candidate.rows_per_program, problem.adjacent) * problem.itemsize / SECTOR_BYTES)


def _served_by_l2(candidate: Candidate, problem: Problem, device: Device) -> float:
    """Bytes of the second read that L2 still holds, measured: 0.42 of its size, and never all of them."""
    again = (candidate.reads - 1) * problem.read_bytes
    if not again or device.kind != "cuda":
        return 0.0
    between = problem.read_bytes
    if candidate.strategy != "split":
        # A program reads its rows again while only the resident ones have passed through L2 since.
        rows = _resident(candidate, device) * device.multiprocessors * candidate.rows_per_program
        between = min(between, rows * problem.row_bytes)
    return again * min(0.8, 0.42 * device.l2 / max(between, 1))


def _resident(candidate: Candidate, device: Device) -> int:
    """Programs of a candidate that one multiprocessor holds at a time."""
    threads = 32 * max(candidate.warps, 1)
    registers = threads * (24 + candidate.rows_per_program * candidate.block // threads)
    return max(1, min(32, device.threads // threads, device.registers // registers))


def _fill(candidate: Candidate, problem: Problem, device: Device) -> float:
    """Part of the bandwidth that the programs can keep busy: Little's law, bytes in flight over latency."""
    programs = min(max(candidate.programs, 1), _resident(candidate, device) * device.multiprocessors)
    in_flight = programs * candidate.rows_per_program * candidate.block * problem.itemsize * problem.inputs
    return min(1.0, in_flight / (device.bandwidth * 1e3 * LATENCY_US))
