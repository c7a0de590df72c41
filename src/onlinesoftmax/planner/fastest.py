"""The fastest proposal of a strategy for a problem, by a forecast from the times of measured shapes around it.

    time = launches + sum over the anchors of weight · (measured time - launches) · slowdown

An anchor is a measured shape near the problem.  Its weight is its part in the interpolation, times the ratio of the
bytes that the problem and the shape move; the latency of a load counts as bytes in both.  The slowdown is 1 on the
device that was measured, for blocks that use it as well as at the anchor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..core.device import Device
from ..core.problem import Problem
from ..ops import OPERATIONS
from .measured import KEPT_RATIO, Cell, Key, Table, key_of
from .price import LATENCY_US, LAUNCH_US, Plan, busy, estimated_us, exchange_us, priced, stretch
from .proposal import Proposal
from .variant import Variant

Propose = Callable[[Problem, Device], list[Proposal] | str]
"""Function that returns the proposals of a strategy for a problem, likeliest first, or the reason why it has none."""

SHORT_COLS = 64
"""Rows of at most so many columns behave alike: if such a length was measured, it counts for all shorter rows."""

UNMEASURED_RATIO = 1.05
"""Forecast time of a variant without a measured time, divided by the time of the fastest variant of its strategy.

Used for tables that keep only the fastest variant of each strategy.
"""

Lengths = dict[int, list[Cell]]
"""Measured shapes by their columns."""


def stand_in(problem: Problem) -> str:
    """The operation whose measured times stand for a problem's where a table has none of its own operation.

    It reduces rows, has no target and no kernels of its own, and writes elements if the problem does.  Of such
    operations it is the one that reads about as many tensors as the problem.

    >>> stand_in(Problem("log_softmax", 1, 1)), stand_in(Problem("logsumexp_backward", 1, 1))
    ('softmax', 'softmax')
    """
    reducing = [o for o in OPERATIONS.values() if o.reduces and not o.has_target and not o.kernels]
    # The first part is False, so that it is least, for an operation that writes elements where the problem does.  One
    # that also writes results per row takes as long as one that writes elements alone.
    return min(reducing, key=lambda o: (o.per_row == problem.writes_elements, abs(o.inputs - problem.inputs))).name


def _is_near(problem: Problem, key: Key, lengths: Lengths) -> bool:
    """True where rows of about a problem's length were measured: half as long, or for unaligned rows as long."""
    close = any(problem.cols <= 2 * cols <= 4 * problem.cols for cols in lengths)
    return 2 * max(lengths) >= problem.cols and (close or not key.unaligned)


LENGTHS = (("about as long", _is_near), ("of any length", lambda problem, key, lengths: True))
"""(name, predicate) of the lengths that are taken from the cells of a key, preferred ones first."""


class Source(NamedTuple):
    """The cells that stand for a problem.

    Attributes:
        name: Name of the fallback.
        key: Key of the cells.
        backends: Backends whose times are used.
        lengths: The cells.
    """

    name: str
    key: Key
    backends: frozenset[str]
    lengths: Lengths


def source_for(table: Table, problem: Problem, backends: Collection[str]) -> Source | None:
    """The cells that stand for a problem, of these backends; None where there are none."""
    similar = stand_in(problem)
    # The fastest plan of another operation may be slow here, so aligned rows of the same operation come before it.
    keys = {
        "rows of the operation": key_of(problem),
        "aligned rows of the operation": key_of(problem, aligned=True),
        "rows of a similar operation": key_of(problem, similar),
        "aligned rows of a similar operation": key_of(problem, similar, aligned=True),
    }
    for (length, is_taken), (rows, key) in itertools.product(LENGTHS, keys.items()):
        # CUDA kernels split an unaligned row, so that most of it is read as an aligned one.  The other compilers make
        # slower code of unaligned rows, so times of aligned rows say nothing about them.
        usable = frozenset({"cuda"} & {*backends} if problem.unaligned and not key.unaligned else backends)
        lengths = table.lengths(key, usable)
        if not lengths or not is_taken(problem, key, lengths):
            continue
        if min(lengths) > max(2 * problem.cols, SHORT_COLS):
            # If all measured rows are much longer than those of the problem, the fastest strategy of CUDA is still a
            # good guess.  With the other backends, a strategy that was slow for long rows may be the best for short
            # ones.
            usable &= {"cuda"}
            lengths = table.lengths(key, usable)
        if lengths:
            # A length that was measured only with many rows says nothing about few rows, so it is left out.  If all
            # that remain are much longer than the problem's, none is left out: they would say even less.
            few = {cols: cells for cols, cells in lengths.items() if min(c.rows for c in cells) <= 2 * problem.rows}
            return Source(f"{rows}, {length}", key, usable, few if few and min(few) <= 2 * problem.cols else lengths)
    return None


class Anchor(NamedTuple):
    """A measured shape near a problem.

    Attributes:
        cell: The shape and its times.
        weight: Factor of its times without launches.
        source: Name of its fallback.
        like: The problem for rows of its length.
    """

    cell: Cell
    weight: float
    source: str
    like: Problem


def anchors(table: Table, problem: Problem, backends: Collection[str]) -> list[Anchor]:
    """The measured shapes between which a problem lies, of these backends; empty where none stands for it.

    Columns are between the nearest measured lengths on both sides, by their logarithms: the time of a byte changes
    slowly with them.  Rows are between the nearest numbers on both sides: the time of a kernel grows linearly with
    them, from the latency of one row to the bandwidth of many.
    """
    if not problem.contiguous or not problem.rows * problem.cols:
        # Only rows whose elements are neighbours were measured.
        return []
    source = source_for(table, problem, backends)
    if source is None:
        return []
    dtype = problem.dtype if source.key.itemsize == problem.itemsize else "float32"
    found = []
    for cols, part_of_cols in _between(problem.cols, source.lengths, math.log2):
        like_here = problem.for_rows(problem.rows, cols)
        cells = {cell.rows: cell for cell in source.lengths[cols]}
        pairs = _between(problem.rows, cells, float)
        for rows, part_of_rows in pairs:
            # Between two numbers of rows, the parts say how the time grows; beyond the ends, the bytes do.
            like = source.key.problem(problem.rows if len(pairs) > 1 else rows, cols, dtype)
            moved, measured = (measured_bytes(each) + latency_bytes(table.bandwidth) for each in (problem, like))
            cell = cells[rows].of_backends(source.backends)
            found.append(Anchor(cell, part_of_cols * part_of_rows * moved / measured, source.name, like_here))
    return found


def _between(value: int, measured: Collection[int], scale: Callable[[float], float]) -> list[tuple[int, float]]:
    """The measured numbers below and above a value with their parts in the interpolation.

    One number alone if the value was measured, or is beyond the ends.
    """
    below = max((n for n in measured if n <= value), default=min(measured))
    above = min((n for n in measured if n >= value), default=max(measured))
    if not below < value < above:
        return [(below, 1.0)]
    part = (scale(value) - scale(below)) / (scale(above) - scale(below))
    return [(below, 1.0 - part), (above, part)]


def measured_bytes(problem: Problem) -> int:
    """Bytes that a problem moves at least, without the logits, which no measured call read."""
    return problem.read_bytes - problem.all_logit_bytes + problem.write_bytes


def latency_bytes(bandwidth: float) -> float:
    """Bytes that a bandwidth, in GB/s, moves during the latency of a load.

    The time for fewer bytes hardly depends on their number.
    """
    return bandwidth * 1e3 * LATENCY_US


@dataclass(frozen=True)
class Forecast:
    """The measured shapes around one problem on one device.

    Attributes:
        problem: The problem.
        device: The device to plan for.
        table: The table.
        anchors: Its measured shapes around the problem, with the times of the backends that can be used.
    """

    problem: Problem
    device: Device
    table: Table
    anchors: tuple[Anchor, ...]

    @cached_property
    def slower(self) -> float:
        """Factor of the time of a transfer on the device, over that on the device of the table."""
        return _slowed(self.problem, self.table.bandwidth, self.table.bandwidth / self.device.bandwidth)

    @cached_property
    def has_many_rows(self) -> bool:
        """True where many more rows were measured than the problem has.

        A forecast from many rows is too optimistic for few, because one program for each row no longer fills the
        device.  CUDA was measured with few rows too.
        """
        return min(anchor.cell.rows for anchor in self.anchors) > 2 * self.problem.rows

    def best(self, options: list[Proposal], propose: Propose) -> Plan:
        """The plan of the variant with the least time among those that a strategy proposes for the problem.

        A variant that was the fastest for a shorter row may not be among them: its blocks may be too small for the row.
        """
        known = [self._known(anchor, options[0], propose) for anchor in self.anchors]
        measured = {variant for each in known for variant in each.times}
        guesses: dict[int, float] = {}
        best, least, is_measured = options[0], math.inf, False
        for option in options:
            names = [option.variant]
            if not self.problem.declaration.may_keep_terms:
                # The table's operation may keep terms where the problem's cannot: the same blocks with terms.
                names.append(option.variant.with_terms())
            unmeasured = measured.isdisjoint(names)
            if not unmeasured or option.launches not in guesses:
                us = self._us(option, names, known)
                if unmeasured:
                    guesses[option.launches] = us
            else:
                us = guesses[option.launches]
            if self.problem.sharded:
                us += exchange_us(option, self.problem, self.device)
            if us < least and (unmeasured or (self.has_many_rows and option.backend != "cuda")):
                # Take the larger of forecast and estimate, so that an optimistic guess does not win.
                us = max(us, estimated_us(option, self.problem, self.device))
            if us < least:
                best, least, is_measured = option, us, not unmeasured
        shapes = ", ".join(f"{anchor.cell.rows} x {anchor.cell.cols}" for anchor in self.anchors)
        on = (self.table.device, f"{self.anchors[0].source}: {shapes}") if is_measured else ("", "")
        return priced(best, self.problem, self.device, least, *on)

    def _known(self, anchor: Anchor, option: Proposal, propose: Propose) -> Known:
        """What is known of the strategy of a proposal at an anchor."""
        times, fastest = anchor.cell.times(option.backend, option.strategy)
        if times and not self.table.every_variant:
            otherwise = UNMEASURED_RATIO * min(times.values())
        else:
            otherwise = KEPT_RATIO * fastest
        paces = _paces_of(propose, anchor.like, anchor.cell.rows, self.device) if times else {}
        return Known(anchor.weight, times, otherwise, paces)

    def _us(self, option: Proposal, names: list[Variant], known: list[Known]) -> float:
        """Microseconds of a proposal from those of its variant; the same for all that no anchor names.

        The logits that the gradient of a softcap reads beside its input are added at full bandwidth, alike for every
        proposal.

        Args:
            option: The proposal.
            names: The variants whose times stand for it.
            known: What is known of its strategy at each anchor.
        """
        problem, device, launches = self.problem, self.device, option.launches * LAUNCH_US
        here: Pace | None = None
        transfer = 0.0
        for weight, times, otherwise, paces in known:
            found = [times[name] for name in names if name in times]
            # Launches take as long for any number of bytes: only the rest of the time grows with them.
            weight *= max(min(found, default=otherwise) - launches, 0.0)
            if found:
                here = here or _pace(option, problem, problem, device)
                weight *= _slowed(problem, device.bandwidth, here.time_of_byte(paces.get(option.variant, here)))
            transfer += weight
        return launches + self.slower * transfer + problem.all_logit_bytes / (device.bandwidth * 1e3)


def forecast_for(table: Table, problem: Problem, device: Device, backends: Collection[str]) -> Forecast | None:
    """The forecast by a table for these backends; None where the table has no times of them for similar shapes."""
    found = tuple(anchors(table, problem, backends))
    return Forecast(problem, device, table, found) if found else None


class Pace(NamedTuple):
    """How fast a proposal moves its rows, for forecasts between shapes.

    Attributes:
        busy: Fraction of the bandwidth that its loads keep in use (`price.busy`).
        stretch: Its time, as a multiple of the time in which memory could move its rows (`price.stretch`).
    """

    busy: float
    stretch: float

    def time_of_byte(self, measured: Pace) -> float:
        """Time of a byte, as a multiple of its time in a measured call of the same variant.

        A longer row can take one more chunk of each thread's registers, and then fewer blocks are resident than were
        measured.  In a shorter row, some threads hold no elements.
        """
        return max(1.0, measured.busy / self.busy) * self.stretch / measured.stretch


def _pace(option: Proposal, problem: Problem, call: Problem, device: Device) -> Pace:
    """The pace of a proposal for a problem, with the stretch of a call of perhaps other rows."""
    return Pace(busy(option, problem, device), stretch(option, call, device))


class Known(NamedTuple):
    """What is known of a strategy at an anchor.

    Attributes:
        weight: Weight of the anchor.
        times: Microseconds of the variants that its cell names.
        otherwise: Microseconds of the others: the fastest of their strategy or backend times a ratio.
        paces: The pace of each variant there.
    """

    weight: float
    times: dict[Variant, float]
    otherwise: float
    paces: dict[Variant, Pace]


@lru_cache(maxsize=4096)
def _paces_of(propose: Propose, problem: Problem, rows: int, device: Device) -> dict[Variant, Pace]:
    """The pace of each variant of a strategy.  Few shapes are measured, so most calls repeat."""
    call = problem.for_rows(rows)
    return {option.variant: _pace(option, problem, call, device) for option in _proposals(propose, problem, device)}


@lru_cache(maxsize=1024)
def _proposals(propose: Propose, problem: Problem, device: Device) -> list[Proposal]:
    """The proposals for the length of a measured row, of which several numbers were measured."""
    options = propose(problem, device)
    return [] if isinstance(options, str) else options


def _slowed(problem: Problem, bandwidth: float, ratio: float) -> float:
    """Factor of the time of a transfer if each byte takes `ratio` times as long and the latency stays the same."""
    moved, latency = measured_bytes(problem), latency_bytes(bandwidth)
    return (latency + moved * ratio) / (latency + moved)
