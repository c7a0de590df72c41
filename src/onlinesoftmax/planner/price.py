"""The price of a proposal: bytes moved, the floor, and its expected time.

The expected time is a forecast from a table of measured times (fastest.py), or an estimate where there is no table:
bytes over bandwidth, corrected by the part of the bandwidth that the blocks can use, plus launches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..core.device import Device
from ..core.problem import Problem
from ..core.view import power_of_two_divisor
from .proposal import Proposal, made
from .quality import exchange_wait_us, narrow, served_by_l2


@dataclass(frozen=True, kw_only=True)
class Plan(Proposal):
    """A proposal with its bytes and time: `explain` prints it, a backend runs it, `bench` records it.

    Attributes:
        device: Name of the device it was made for.
        bytes_moved: Bytes through device memory.
        floor_us: Microseconds in which device memory moves each byte once, at the bandwidth of a copy.
        estimate_us: Expected microseconds: the forecast or the estimate, at least floor_us and the launch time.
        rank_us: The forecast or estimate in microseconds, before it is raised to the floor and to the launch time.
            Plans are compared by rank_us: several plans for a small input can have the same estimate_us, because a
            call whose output stays in L2 takes less time than the floor.
        measured_on: Name of the device, which may be another one, whose times of the same variant at similar shapes
            give rank_us; empty if rank_us is an estimate, or is limited by the times of other variants.
        cells: Names of the measured shapes from which rank_us follows; empty if measured_on is empty.
    """

    device: str = ""
    bytes_moved: int = 0
    floor_us: float = 0.0
    estimate_us: float = 0.0
    rank_us: float = 0.0
    measured_on: str = ""
    cells: str = ""

    def __repr__(self) -> str:
        name = f"{self.backend}/{self.strategy}"
        return f"<Plan {name}: {self.programs} x {self.block} columns, {self.estimate_us:.1f} us on {self.device}>"


PROPOSED = tuple(field.name for field in fields(Proposal))
"""Fields of a plan that its proposal has."""

SECTOR_BYTES = 32
"""Bytes of the smallest transfer from device memory."""

LATENCY_US = 0.9
"""Microseconds from a load to its data on a busy device."""

LAUNCH_US = 2.5
"""Microseconds that one more launch on a stream takes."""


def priced(
    proposal: Proposal, problem: Problem, device: Device, forecast_us: float | None = None, measured_on: str = "",
    cells: str = "",
) -> Plan:  # fmt: skip
    """The proposal with its price; its time is as forecast from a table of a device, or else as estimated."""
    bytes_moved = problem.read_bytes + problem.write_bytes + bytes_read_again(proposal, problem)
    floor = (problem.read_bytes + problem.write_bytes) / (device.bandwidth * 1e3)
    us = estimated_us(proposal, problem, device) if forecast_us is None else forecast_us
    known = vars(proposal) if type(proposal) is Proposal else {name: getattr(proposal, name) for name in PROPOSED}
    estimate = max(us, floor, proposal.launches * LAUNCH_US)
    return made(
        Plan, **known, device=device.name, bytes_moved=bytes_moved, floor_us=floor, estimate_us=estimate, rank_us=us,
        measured_on=measured_on, cells=cells,
    )  # fmt: skip


def estimated_us(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Microseconds by bytes, bandwidth and launches."""
    bytes_moved = problem.read_bytes + problem.write_bytes + bytes_read_again(proposal, problem)
    quality = 1.0
    if device.kind == "cuda":
        quality = proposal.quality * _fill(proposal, problem, device)
        # The quality of PyTorch's kernels includes what narrow loads cost them.
        quality *= 1.0 if proposal.backend == "eager" else _width(proposal, problem)
    from_memory = bytes_moved - bytes_from_l2(proposal, problem, device)
    transfer = from_memory / (device.bandwidth * 1e3 * quality)
    # Each round waits once for its loads, which takes longer than the transfer where a plan gives a whole block to a
    # row of a few elements.
    moved = max(transfer, _rounds(proposal, problem, device) * LATENCY_US)
    return proposal.launches * LAUNCH_US + moved + exchange_us(proposal, problem, device)


def _rounds(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Number of rounds in which the rows run: all rows, divided by those that the device holds at a time."""
    if device.kind != "cuda" or proposal.backend == "eager":
        # The blocks of the framework's kernels are not known.
        return 0.0
    at_once = _programs_at_once(proposal, device) * proposal.rows_per_program / max(proposal.splits, 1)
    return problem.rows / max(at_once, 1.0)


def exchange_us(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Microseconds for which rows wait for the states of other GPUs; 0 for whole rows."""
    if not (problem.sharded and problem.reduces):
        return 0.0
    return exchange_wait_us(problem.writes_elements) * _rounds(proposal, problem, device)


def _programs_at_once(proposal: Proposal, device: Device) -> int:
    """Number of programs that the device runs at a time."""
    resident = proposal.resident if proposal.lanes else _resident(proposal, device)
    return min(max(proposal.programs, 1), resident * device.multiprocessors)


def _width(proposal: Proposal, problem: Problem) -> float:
    """Part of the bandwidth that a proposal reaches with loads of its width."""
    if proposal.vector > 1 or proposal.kernel:
        # A kernel that a strategy has besides its first one copies 16 bytes at a time, wherever rows begin.
        return 1.0
    if problem.contiguous:
        return narrow(problem.aligned_bytes)
    if proposal.backend == "cuda":
        # A warp's lanes read one row.
        return problem.itemsize / SECTOR_BYTES
    if proposal.strategy == "column":
        return narrow(min(16, power_of_two_divisor(problem.interleaved) * problem.itemsize))
    # Memory is read in sectors of 32 bytes, and a tile uses only the part of a sector that belongs to its rows.
    return min(1.0, min(proposal.rows_per_program, problem.interleaved) * problem.itemsize / SECTOR_BYTES)


def bytes_read_again(proposal: Proposal, problem: Problem) -> int:
    """Bytes of the reads after the first."""
    return round((proposal.reads - 1) * proposal.again * (problem.read_bytes - problem.all_logit_bytes))


def bytes_from_l2(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Bytes of repeated reads that L2 serves."""
    again = bytes_read_again(proposal, problem)
    if not again or device.kind != "cuda":
        return 0.0
    between = problem.read_bytes
    if proposal.strategy != "split":
        # Between the two reads of a row, only the rows of the resident programs pass through L2.
        rows = _resident(proposal, device) * device.multiprocessors * proposal.rows_per_program
        between = min(between, rows * problem.row_bytes)
    return again * served_by_l2(device.l2, between)


def _resident(proposal: Proposal, device: Device) -> int:
    """Approximate number of programs of a proposal that one multiprocessor holds at a time."""
    threads = 32 * max(proposal.warps, 1)
    registers = threads * (24 + proposal.rows_per_program * proposal.block // threads)
    return max(1, min(32, device.threads // threads, device.registers // registers))


def _fill(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Part of the bandwidth that the programs use, for `estimated_us`: Little's law, bytes in flight over latency.

    Unlike `busy`, this counts whole blocks with their padding, takes all their bytes as in flight, and approximates the
    number of resident programs from the registers.
    """
    programs = min(max(proposal.programs, 1), _resident(proposal, device) * device.multiprocessors)
    # A block of `grid` can hold its whole slice in shared memory and no column in registers; its block size is then 0.
    columns = max(proposal.block, 1)
    in_flight = 1.0 * programs * proposal.rows_per_program * columns * problem.itemsize * problem.inputs
    if proposal.by_estimate:
        # Stores are in flight too.  Only here do they count: this estimate is compared with measured times.
        in_flight *= 1 + problem.write_bytes / max(problem.read_bytes, 1)
    return min(1.0, in_flight / (device.bandwidth * 1e3 * LATENCY_US))


LAST_WAVE = 0.4
"""Lower limit of the time of a partial last wave, in times of a full wave, where no elements are written.

A partial wave is faster than a full one, but not in proportion to its blocks.  Measured on an H100 with rows of 200000
to 600000 columns: 0.35 to 0.45.  Where elements are written, the stores of one wave hide the start of the next.
"""

ALONE_US = 2.0
"""Further microseconds of a wave where one block is resident on each multiprocessor.

Nothing loads while this block waits for the state of its row.  Measured on an H100: 0.8 for softmax with 8 blocks a
row, 2.1 for a loss with 16.
"""


def busy(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Fraction of the bandwidth that the loads of the resident rows keep in use, for forecasts between row lengths.

    By Little's law, the bytes of bandwidth times latency must be in flight.  A block reduces and stores for about half
    of the time in which it is resident, so twice as many bytes must be on chip.  Unlike `_fill`, this leaves out the
    padding of rows to whole blocks, and takes the number of resident blocks from the proposal where it is known.
    """
    programs = _programs_at_once(proposal, device)
    columns = min(proposal.block, -(-problem.cols // max(proposal.splits, 1)))
    on_chip = programs * proposal.rows_per_program * columns * problem.itemsize * problem.inputs
    return min(1.0, max(on_chip, 1) / (2 * device.bandwidth * 1e3 * LATENCY_US))


def stretch(proposal: Proposal, problem: Problem, device: Device) -> float:
    """Time of a call, as a multiple of the time in which memory could move its rows, for forecasts between shapes.

    A partial last tile, a partial last wave, and blocks that are alone on their multiprocessor make it larger than 1.
    It is 1 for kernels of other languages, whose blocks are not known, and for `grid`, whose blocks take one row after
    another.
    """
    if not proposal.lanes or proposal.strategy == "grid":
        return 1.0
    # The columns beside whole chunks of 16 bytes are loaded by themselves, and are no tile.
    chunked_cols = problem.cols // problem.vector * problem.vector
    found, tiles = 1.0, chunked_cols / (proposal.block * max(proposal.splits, 1))
    if tiles > 1:
        # A block waits for the loads of its last tile as long as for those of a whole one.
        found = math.ceil(tiles) / tiles
    at_once = _rows_at_once(proposal, device)
    waves = problem.rows / at_once
    if waves <= 1:
        return found
    full = math.floor(waves)
    last = waves - full
    if last and not problem.writes_elements:
        last = max(last, LAST_WAVE)
    if proposal.resident == 1 and tiles <= 1 and problem.reduces:
        wave_us = (problem.read_bytes + problem.write_bytes) / waves / (device.bandwidth * 1e3)
        found *= 1 + ALONE_US / wave_us
    return found * (full + last) / waves


def _rows_at_once(proposal: Proposal, device: Device) -> float:
    """Number of rows that the device holds at a time.

    If blocks are alone on their multiprocessors, some of these are left over, and a cluster that finds no place waits:
    on an H200, 31 rows in clusters of 4 took 1.25 times as long as 30.  With more resident blocks, counting the places
    changed the plans of 243 calls, and made as many slower as faster.
    """
    if proposal.strategy == "cluster" and proposal.resident == 1:
        return device.cluster_places(proposal.splits) * proposal.rows_per_program
    return proposal.resident * device.multiprocessors * proposal.rows_per_program / max(proposal.splits, 1)
