"""Forecasts: the time of a strategy's variants for a problem, from a table of measured shapes on both sides of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ..core.device import Device
from ..core.problem import Problem
from .measured import KEPT, LATENCY_US, UNSEEN, Anchor, Cell, Table
from .price import LAUNCH_US, Plan, busy, estimated_us, price
from .proposal import Proposal
from .variant import Variant

Propose = Callable[[Problem, Device], list[Proposal] | str]
"""What a strategy proposes, likeliest first, or why it cannot."""


@dataclass(frozen=True)
class Forecast:
    """The measured shapes around one problem on one device.

    Attributes:
        problem: The problem.
        device: The device to plan for.
        anchors: The measured shapes, with the times of those backends alone that can be used.
        slower: Factor of the device to plan for to the device that was measured, for the time without launches.
        every_variant: As in Table.
    """

    problem: Problem
    device: Device
    anchors: tuple[Anchor, ...]
    slower: float
    every_variant: bool

    @classmethod
    def of(cls, table: Table, problem: Problem, device: Device, backends: Collection[str]) -> Forecast | None:
        """The forecast by a table for these backends; None where the table says nothing of them."""
        anchors = table.anchors(problem, backends)
        if not anchors:
            return None
        # A slower memory takes longer for the bytes, not for the latency of the first of them.
        moved, latency = problem.read_bytes + problem.write_bytes, table.bandwidth * 1e3 * LATENCY_US
        slower = (latency + moved * table.bandwidth / device.bandwidth) / (latency + moved)
        return cls(problem, device, tuple(anchors), slower, table.every_variant)

    def best(self, options: list[Proposal], propose: Propose) -> Plan:
        """The plan of the variant with the least time among those that a strategy proposes for the problem.

        Only these can hold a row of the problem; a variant that was the fastest for a shorter row may not be one.
        """
        strategy = (options[0].backend, options[0].strategy)
        named = {cell.cols for cell, _ in self.anchors if any(timing[:2] == strategy for timing in cell.timings)}
        busy_there = {cols: self._busy(propose, cols) for cols in named}
        times = [self._us(option, busy_there) for option in options]
        us = min(times)
        return price(options[times.index(us)], self.problem, self.device, us)

    def _busy(self, propose: Propose, cols: int) -> dict[Variant, float]:
        """Part of the bandwidth that each variant can keep busy for rows of another length."""
        if cols == self.problem.cols:
            return {}
        problem = replace(self.problem, cols=cols)
        options = propose(problem, self.device)
        if isinstance(options, str):
            return {}
        return {option.variant: busy(option, problem, self.device) for option in options}

    def _us(self, option: Proposal, busy_there: dict[int, dict[Variant, float]]) -> float:
        """Microseconds of a proposal, by the cells that name its variant and, in the others, by what is known there."""
        launches = option.launches * LAUNCH_US
        busy_here = busy(option, self.problem, self.device)
        transfer, seen = 0.0, False
        for cell, weight in self.anchors:
            us, named = self._time_in(cell, option)
            # Launches take as long for any number of bytes: only the rest of the time grows with them.
            weight *= max(us - launches, 0.0)
            if named:
                seen = True
                # A longer row can take one more chunk of each thread's registers, and then fewer blocks are resident
                # than were measured.
                weight *= max(1.0, busy_there[cell.cols].get(option.variant, 0.0) / busy_here)
            transfer += weight
        us = launches + self.slower * transfer
        if not seen:
            # An estimate leaves out what a measurement has met, so alone it is never a reason to be preferred.
            us = max(us, estimated_us(option, self.problem, self.device))
        return us

    def _time_in(self, cell: Cell, option: Proposal) -> tuple[float, bool]:
        """(microseconds of a proposal's variant in a cell, True where the cell names it)."""
        backend, strategy = option.backend, option.strategy
        names = [option.variant]
        if not self.problem.declaration.keeps_terms:
            # The table's operation may keep terms where the problem's cannot: the same blocks with terms.
            names.append(option.variant.with_terms())
        found = [cell.us[backend, strategy, name] for name in names if (backend, strategy, name) in cell.us]
        if found:
            return min(found), True
        if not self.every_variant:
            own = [timing.us for timing in cell.timings if timing[:2] == (backend, strategy)]
            if own:
                return UNSEEN * min(own), False
        same_backend = [timing.us for timing in cell.timings if timing.backend == backend]
        return KEPT * min(same_backend or (timing.us for timing in cell.timings)), False
