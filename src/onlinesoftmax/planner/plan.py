"""The planner: which backend and strategy runs a problem, with which blocks, and why.

It asks no hardware: a problem, a device's numbers and a table of measured times are all it needs.  Every strategy
proposes blocks; the proposal with the least estimated time wins.  The estimate is the time in the measured table where
there is one (measured.py); else it is bytes over bandwidth, corrected by what was measured on an H200, plus launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ..core.device import Device
from ..core.layout import power_of_two_divisor
from ..core.problem import Problem
from ..core.task import ANY, Choice
from .measured import Cell, Table
from .proposal import Proposal
from .strategies import TABLE, Propose

Strategies = Sequence[tuple[str, str, Propose]]
"""Rows of strategies.TABLE."""


class PlanError(ValueError):
    """No plan: the message lists every reason."""


@dataclass(frozen=True)
class Price:
    """What a plan costs.

    Attributes:
        device: Name of the device it was made for.
        bytes_moved: Bytes through device memory.
        floor_us: Least microseconds that the device allows: each byte once, at its copy bandwidth.
        estimate_us: Microseconds that the plan is expected to take.
    """

    device: str = ""
    bytes_moved: int = 0
    floor_us: float = 0.0
    estimate_us: float = 0.0


@dataclass(frozen=True)
class Plan(Proposal):
    """A proposal with its price: `explain` prints it, a backend runs it, `bench` records it.

    Attributes:
        price: What it costs; each part is also an attribute of the plan.
    """

    price: Price = Price()

    @property
    def device(self) -> str:
        """Name of the device it was made for."""
        return self.price.device

    @property
    def bytes_moved(self) -> int:
        """Bytes through device memory."""
        return self.price.bytes_moved

    @property
    def floor_us(self) -> float:
        """Least microseconds that the device allows."""
        return self.price.floor_us

    @property
    def estimate_us(self) -> float:
        """Microseconds that the plan is expected to take."""
        return self.price.estimate_us


@dataclass(frozen=True)
class Refusal:
    """Why a strategy cannot run a problem."""

    backend: str
    strategy: str
    reason: str


def plan(
    problem: Problem,
    device: Device,
    choice: Choice = ANY,
    unavailable: Sequence[tuple[str, str]] = (),
    table: Table | None = None,
    strategies: Strategies = TABLE,
) -> Plan:
    """The plan for a problem on a device.

    Args:
        problem: What to compute.
        device: Where to run it: this machine's, or `device.known` for one that is not here.
        choice: What the caller forces.  A batch-invariant plan is made for INVARIANT_ROWS rows, however many there are.
        unavailable: Backends that cannot be used here, or backend/strategy, each with the reason.
        table: Times that were measured on the device, or on one like it.
        strategies: The strategies there are: strategies.TABLE, or strategies.FOR_JAX.

    Raises:
        PlanError: nothing that was asked for can run; the message lists every reason.

    Example:
        >>> from onlinesoftmax.core.device import known
        >>> plan(Problem("softmax", 4096, 1024, "bfloat16"), known("h200")).strategy
        'row'
        >>> plan(Problem("softmax", 1, 1 << 24), known("h200")).strategy
        'grid'
    """
    for_plan = replace(problem, rows=INVARIANT_ROWS) if choice.batch_invariant else problem
    if choice.batch_invariant and device.kind == "cuda":
        unavailable = (*unavailable, ("eager", "the framework's sums depend on the number of rows"))
    options = alternatives(for_plan, device, choice, unavailable, table, strategies)
    plans = [option for option in options if isinstance(option, Plan)]
    if plans:
        best = min(plans, key=lambda option: option.estimate_us)
        return _for_rows(best, problem, device) if choice.batch_invariant else best
    asked = "".join(f" {key}={value!r}" for key, value in zip(("backend", "strategy"), choice, strict=False) if value)
    reasons = "".join(f"\n  {o.backend}/{o.strategy}: {o.reason}" for o in options if isinstance(o, Refusal))
    raise PlanError(
        f"no plan for {problem.operation} of {problem.rows} x {problem.cols} {problem.dtype} on {device.name}"
        f"{' with' + asked if asked else ''}:{reasons}"
    )


def alternatives(
    problem: Problem,
    device: Device,
    choice: Choice = ANY,
    unavailable: Sequence[tuple[str, str]] = (),
    table: Table | None = None,
    strategies: Strategies = TABLE,
) -> list[Plan | Refusal]:
    """Every strategy's plan, or why it has none: what `explain` compares.  Arguments as for `plan`.

    Raises:
        PlanError: there is no such backend or strategy.
    """
    backend, strategy, _ = choice
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


def _measured(options: list[Proposal], cell: Cell, problem: Problem, device: Device, slower: float) -> Plan:
    """The proposal that was fastest for a shape like the problem's, with its time there for as many elements."""
    scale = slower * problem.rows * problem.cols / (cell.rows * cell.cols)
    for timing in cell.timings:
        if (timing.backend, timing.strategy) == (options[0].backend, options[0].strategy):
            # What keeps no terms has else the blocks of what does.
            names = (timing.variant, timing.variant.removesuffix(", terms"))
            fitting = [option for name in names for option in options if option.variant == name]
            return _estimated(price((fitting or options)[0], problem, device), timing.us * scale)
    plan, best = price(options[0], problem, device), min((timing.us for timing in cell.timings), default=0.0)
    return _estimated(plan, max(plan.estimate_us, NOT_IN_TABLE * best * scale))


def _estimated(plan: Plan, us: float) -> Plan:
    """The plan with another estimate of its time."""
    return replace(plan, price=replace(plan.price, estimate_us=us))


INVARIANT_ROWS = 4096
"""Rows that a batch-invariant plan is made for: enough to fill every device."""


def _for_rows(best: Plan, problem: Problem, device: Device) -> Plan:
    """The same blocks for a problem's own number of rows."""
    proposal = Proposal(**{field.name: getattr(best, field.name) for field in fields(Proposal)})
    # A persistent launch keeps its number of programs; each takes one row after another.
    if not proposal.blocks.stages and proposal.strategy != "grid":
        programs = -(-problem.rows // proposal.rows_per_program) * proposal.splits
        proposal = replace(proposal, blocks=replace(proposal.blocks, programs=programs))
    return price(proposal, problem, device)


NARROW = {16: 1.0, 8: 1.0, 4: 0.95, 2: 0.65}
"""Part of the bandwidth left when a load is narrower than 16 bytes, by its bytes; measured on an H200."""

SECTOR_BYTES = 32
"""Least that device memory delivers."""

LAUNCH_US = 2.5
"""Microseconds of one launch behind another on a stream."""

LATENCY_US = 0.9
"""Microseconds from a load to its data on a busy device."""


def price(proposal: Proposal, problem: Problem, device: Device) -> Plan:
    """The proposal with the bytes it moves and the time it should take."""
    bytes_moved = proposal.reads * problem.read_bytes + problem.write_bytes
    per_us = device.bandwidth * 1e3
    quality = 1.0
    if device.kind == "cuda":
        quality = proposal.traffic.quality * _fill(proposal, problem, device)
        # The quality of PyTorch's kernels includes what narrow loads cost them.
        quality *= 1.0 if proposal.backend == "eager" else _width(proposal, problem)
    floor = (problem.read_bytes + problem.write_bytes) / per_us
    from_memory = bytes_moved - _served_by_l2(proposal, problem, device)
    estimate = proposal.launches * LAUNCH_US + from_memory / (per_us * quality)
    known = {field.name: getattr(proposal, field.name) for field in fields(Proposal)}
    return Plan(**known, price=Price(device.name, bytes_moved, floor, estimate))


def _width(proposal: Proposal, problem: Problem) -> float:
    """Part of the bandwidth that the width of its loads leaves a proposal."""
    if proposal.vector > 1:
        return 1.0
    if problem.contiguous:
        return NARROW[problem.aligned_bytes]
    if proposal.backend == "cuda":
        # A warp's lanes read one row.
        return problem.itemsize / SECTOR_BYTES
    if proposal.strategy == "column":
        return NARROW[min(16, power_of_two_divisor(problem.access.adjacent) * problem.itemsize)]
    # Memory comes in sectors of 32 bytes, and of each only the rows in the tile are used.
    return min(1.0, min(proposal.rows_per_program, problem.access.adjacent) * problem.itemsize / SECTOR_BYTES)


def _served_by_l2(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Bytes of the second read that L2 still holds, measured: 0.42 of its size, and never all of them."""
    again = (proposal.reads - 1) * problem.read_bytes
    if not again or device.kind != "cuda":
        return 0.0
    between = problem.read_bytes
    if proposal.strategy != "split":
        # A program reads its rows again while only the resident ones have passed through L2 since.
        rows = _resident(proposal, device) * device.multiprocessors * proposal.rows_per_program
        between = min(between, rows * problem.row_bytes)
    return again * min(0.8, 0.42 * device.l2 / max(between, 1))


def _resident(proposal: Proposal, device: Device) -> int:
    """Programs of a proposal that one multiprocessor holds at a time."""
    threads = 32 * max(proposal.warps, 1)
    registers = threads * (24 + proposal.rows_per_program * proposal.block // threads)
    return max(1, min(32, device.threads // threads, device.registers // registers))


def _fill(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Part of the bandwidth that the programs can keep busy: Little's law, bytes in flight over latency."""
    programs = min(max(proposal.programs, 1), _resident(proposal, device) * device.multiprocessors)
    in_flight = programs * proposal.rows_per_program * proposal.block * problem.itemsize * problem.inputs
    return min(1.0, in_flight / (device.bandwidth * 1e3 * LATENCY_US))
