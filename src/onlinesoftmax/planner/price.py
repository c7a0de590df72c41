"""The price of a proposal: bytes moved, the floor, and an estimate of its time where none was measured.

The estimate is bytes over bandwidth, corrected by the part of the bandwidth that the blocks can use, plus launches.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..core.device import Device
from ..core.layout import power_of_two_divisor
from ..core.problem import Problem
from .measured import LATENCY_US
from .proposal import Proposal


@dataclass(frozen=True)
class Price:
    """What a plan costs.

    Attributes:
        device: Name of the device it was made for.
        bytes_moved: Bytes through device memory.
        floor_us: Least microseconds that the device allows: each byte once, at its copy bandwidth.
        estimate_us: Microseconds that the plan is expected to take: no less than the floor, nor than its launches.
        rank_us: The estimate before it is raised to the floor.  Plans are compared by it: times of small inputs whose
            output stays in L2 are measured under the floor, where the estimates of several plans would be equal.
    """

    device: str = ""
    bytes_moved: int = 0
    floor_us: float = 0.0
    estimate_us: float = 0.0
    rank_us: float = 0.0


@dataclass(frozen=True)
class Plan(Proposal):
    """A proposal with its price: `explain` prints it, a backend runs it, `bench` records it.

    Attributes:
        price: What it costs; its main parts are also attributes of the plan.
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


NARROW = {16: 1.0, 8: 1.0, 4: 0.95, 2: 0.65}
"""Part of the bandwidth left when a load is narrower than 16 bytes, by its bytes; measured on an H200."""

SECTOR_BYTES = 32
"""Least that device memory delivers."""

LAUNCH_US = 2.5
"""Microseconds of one launch behind another on a stream."""


def price(proposal: Proposal, problem: Problem, device: Device, measured_us: float | None = None) -> Plan:
    """The proposal with the bytes it moves and the time it should take: as measured, or else as estimated."""
    bytes_moved = proposal.reads * problem.read_bytes + problem.write_bytes
    floor = (problem.read_bytes + problem.write_bytes) / (device.bandwidth * 1e3)
    us = estimated_us(proposal, problem, device) if measured_us is None else measured_us
    known = {field.name: getattr(proposal, field.name) for field in fields(Proposal)}
    estimate = max(us, floor, proposal.launches * LAUNCH_US)
    return Plan(**known, price=Price(device.name, bytes_moved, floor, estimate, us))


def estimated_us(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Microseconds by bytes, bandwidth and launches."""
    bytes_moved = proposal.reads * problem.read_bytes + problem.write_bytes
    quality = 1.0
    if device.kind == "cuda":
        quality = proposal.traffic.quality * _fill(proposal, problem, device)
        # The quality of PyTorch's kernels includes what narrow loads cost them.
        quality *= 1.0 if proposal.backend == "eager" else _width(proposal, problem)
    from_memory = bytes_moved - _served_by_l2(proposal, problem, device)
    return proposal.launches * LAUNCH_US + from_memory / (device.bandwidth * 1e3 * quality)


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
    """Programs of a proposal that one multiprocessor holds at a time, about."""
    threads = 32 * max(proposal.warps, 1)
    registers = threads * (24 + proposal.rows_per_program * proposal.block // threads)
    return max(1, min(32, device.threads // threads, device.registers // registers))


def _fill(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Part of the bandwidth that the programs can keep busy: Little's law, bytes in flight over latency."""
    programs = min(max(proposal.programs, 1), _resident(proposal, device) * device.multiprocessors)
    # A block of `grid` can hold its whole slice in shared memory, and no column in registers.
    columns = max(proposal.block, 1)
    in_flight = programs * proposal.rows_per_program * columns * problem.itemsize * problem.inputs
    return min(1.0, in_flight / (device.bandwidth * 1e3 * LATENCY_US))


def busy(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Part of the bandwidth that the rows on chip can keep busy, without the padding of a row to whole blocks.

    About half of the time in which a block is resident it reduces and stores, so that by Little's law twice the bytes
    of bandwidth times latency must be on chip for loads to be always in flight.
    """
    resident = proposal.threads.resident if proposal.threads.lanes else _resident(proposal, device)
    programs = min(max(proposal.programs, 1), resident * device.multiprocessors)
    columns = min(proposal.block, -(-problem.cols // max(proposal.splits, 1)))
    on_chip = programs * proposal.rows_per_program * columns * problem.itemsize * problem.inputs
    return min(1.0, max(on_chip, 1) / (2 * device.bandwidth * 1e3 * LATENCY_US))
