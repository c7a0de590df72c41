"""Forecasts: the time of a strategy's variants for a problem, from a table of measured shapes on both sides of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..core.device import Device
from ..core.problem import Problem
from .measured import KEPT_RATIO, LATENCY_US, UNMEASURED_RATIO, Anchor, Cell, Table, measured_bytes
from .price import LAUNCH_US, Plan, busy, estimated_us, exchange_us, priced, stretch
from .proposal import Proposal
from .variant import Variant

Propose = Callable[[Problem, Device], list[Proposal] | str]
"""Function that returns the proposals of a strategy for a problem, likeliest first, or the reason why it has none."""


class Speed(NamedTuple):
    """How fast a proposal moves its rows, for forecasts between shapes.

    Attributes:
        busy: Fraction of the bandwidth that its loads keep in use (`price.busy`).
        stretch: Its time, as a multiple of the time in which memory could move its rows (`price.stretch`).
    """

    busy: float
    stretch: float

    @classmethod
    def of(cls, option: Proposal, problem: Problem, rows: int, device: Device) -> Speed:
        """The speed of a proposal, with the stretch of a call of so many rows."""
        like = problem if rows == problem.rows else problem.for_rows(rows)
        return cls(busy(option, problem, device), stretch(option, like, device))

    def slower_than(self, measured: Speed) -> float:
        """Time of a byte, as a multiple of its time in a measured call of the same variant.

        A longer row can take one more chunk of each thread's registers, and then fewer blocks are resident than were
        measured.  In a shorter row, some threads hold no elements.
        """
        return max(1.0, measured.busy / self.busy) * self.stretch / measured.stretch


@dataclass(frozen=True)
class Forecast:
    """The measured shapes around one problem on one device.

    Attributes:
        problem: The problem.
        device: The device to plan for.
        anchors: The measured shapes, with the times of the backends that can be used.
        slower: Time on the planned device divided by time on the measured device, launches excluded.
        every_variant: As in Table.
        measured_on: Name of the measured device.
    """

    problem: Problem
    device: Device
    anchors: tuple[Anchor, ...]
    slower: float
    every_variant: bool
    measured_on: str

    @classmethod
    def of(cls, table: Table, problem: Problem, device: Device, backends: Collection[str]) -> Forecast | None:
        """The forecast by a table for these backends; None where the table has no times of them for similar shapes."""
        anchors = table.anchors(problem, backends)
        if not anchors:
            return None
        slower = _slowed(problem, table.bandwidth, table.bandwidth / device.bandwidth)
        return cls(problem, device, tuple(anchors), slower, table.every_variant, table.device)

    def best(self, options: list[Proposal], propose: Propose) -> Plan:
        """The plan of the variant with the least time among those that a strategy proposes for the problem.

        A variant that was the fastest for a shorter row may not be among them: its blocks may be too small for the row.
        """
        strategy = (options[0].backend, options[0].strategy)
        speeds = [
            self._speeds(propose, cell) if any(timing[:2] == strategy for timing in cell.timings) else {}
            for cell, _ in self.anchors
        ]
        times = [self._us(option, speeds) for option in options]
        us, measured = min(times, key=lambda pair: pair[0])
        chosen = options[times.index((us, measured))]
        return priced(chosen, self.problem, self.device, us, self.measured_on if measured else "")

    def _speeds(self, propose: Propose, cell: Cell) -> dict[Variant, Speed]:
        """The speed of each variant of a strategy at a measured shape."""
        like = self.problem.for_rows(self.problem.rows, cell.cols)
        return _speeds_of(propose, like, cell.rows, self.device)

    def _us(self, option: Proposal, speeds: list[dict[Variant, Speed]]) -> tuple[float, bool]:
        """Microseconds of a proposal, and True where a cell names its variant.

        The time is that of the launches plus the weighted times of the variant in all cells (`_time_in`).  The logits
        that the gradient of a softcap reads beside its input are added at full bandwidth, alike for every proposal.

        Args:
            option: The proposal.
            speeds: The speeds of the variants of its strategy at each measured shape.
        """
        launches = option.launches * LAUNCH_US
        here = Speed.of(option, self.problem, self.problem.rows, self.device)
        transfer, is_measured = 0.0, False
        for (cell, weight), measured in zip(self.anchors, speeds, strict=True):
            us, named = self._time_in(cell, option)
            # Launches take as long for any number of bytes: only the rest of the time grows with them.
            weight *= max(us - launches, 0.0)
            if named:
                is_measured = True
                ratio = here.slower_than(measured.get(option.variant, here))
                weight *= _slowed(self.problem, self.device.bandwidth, ratio)
            transfer += weight
        us = launches + self.slower * transfer + self.problem.all_logit_bytes / (self.device.bandwidth * 1e3)
        us += exchange_us(option, self.problem, self.device)
        if not is_measured or (self._few_rows and option.backend != "cuda"):
            # No measured shape near the problem names this variant, or none has so few rows.  Take the larger of
            # forecast and estimate, so that an optimistic guess does not win.
            us = max(us, estimated_us(option, self.problem, self.device))
        return us, is_measured

    @cached_property
    def _few_rows(self) -> bool:
        """True where every measured shape has more than twice as many rows.

        A forecast from many rows is too optimistic then, because one program for each row no longer fills the device.
        CUDA was measured with few rows too, so only the other backends need this caution.
        """
        return min(cell.rows for cell, _ in self.anchors) > 2 * self.problem.rows

    def _time_in(self, cell: Cell, option: Proposal) -> tuple[float, bool]:
        """(microseconds of a proposal's variant in a cell, True where the cell names it).

        For a variant that the cell does not name, the time is the fastest of its strategy or backend times a ratio.
        """
        backend, strategy = option.backend, option.strategy
        names = [option.variant]
        if not self.problem.declaration.may_keep_terms:
            # The table's operation may keep terms where the problem's cannot: the same blocks with terms.
            names.append(option.variant.with_terms())
        found = [cell.us[backend, strategy, name] for name in names if (backend, strategy, name) in cell.us]
        if found:
            return min(found), True
        if not self.every_variant:
            own = [timing.us for timing in cell.timings if timing[:2] == (backend, strategy)]
            if own:
                return UNMEASURED_RATIO * min(own), False
        same_backend = [timing.us for timing in cell.timings if timing.backend == backend]
        return KEPT_RATIO * min(same_backend or (timing.us for timing in cell.timings)), False


def _slowed(problem: Problem, bandwidth: float, ratio: float) -> float:
    """Factor of the time of a transfer if each byte takes `ratio` times as long and the latency stays the same.

    The latency counts as the bytes that memory delivers meanwhile: the bandwidth, in GB/s, times LATENCY_US.
    """
    moved, latency = measured_bytes(problem), bandwidth * 1e3 * LATENCY_US
    return (latency + moved * ratio) / (latency + moved)


@lru_cache(maxsize=4096)
def _speeds_of(propose: Propose, problem: Problem, rows: int, device: Device) -> dict[Variant, Speed]:
    """The speed of each variant of a strategy.  Few shapes are measured, so most calls repeat."""
    options = propose(problem, device)
    if isinstance(options, str):
        return {}
    return {option.variant: Speed.of(option, problem, rows, device) for option in options}
