"""The planner: which backend and strategy runs a problem, with which blocks, and why.

The planner reads a problem, a description of a device and a table of measured times; it does not query the hardware.
Each strategy lists proposals, likeliest first.  With measured times of similar shapes, the planner forecasts the times
of all proposals (fastest.py).  Otherwise it estimates the time of the first proposal of each strategy from bytes,
bandwidth and launches (price.py).  The proposal with the least time wins; where two backends are equally fast, or two
strategies by their estimates, the one with less host time wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..core.device import Device
from ..core.problem import Problem
from ..core.task import ANY, Choice, Task
from .fastest import forecast_for
from .measured import Table
from .price import Plan, priced
from .proposal import no_gpu
from .strategies import FRAMEWORKS, TABLE, Strategies, strategies_of

__all__ = ["INVARIANT_ROWS", "Plan", "PlanError", "Planner", "Refusal", "Strategies", "best", "plan", "priced"]


class PlanError(ValueError):
    """No plan: the message lists every reason."""


@dataclass(frozen=True)
class Refusal:
    """Why a strategy cannot run a problem."""

    backend: str
    strategy: str
    reason: str


INVARIANT_ROWS = 4096
"""Rows that a batch-invariant plan is made for: enough to fill every device."""


class Planner(NamedTuple):
    """The inputs of a plan that are the same for all tasks on a device.

    Attributes:
        device: Where to run: this machine's, or `device.known` for one that is not here.
        unavailable: Backends that cannot be used here, or backend/strategy, each with the reason.
        table: Times that were measured on the device, or on a similar device.
        strategies: The strategies there are: strategies.TABLE, or strategies.FOR_JAX.
    """

    device: Device
    unavailable: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    strategies: Strategies = TABLE

    def plan(self, task: Task | Problem, choice: Choice = ANY) -> Plan:
        """The plan for a task.

        Args:
            task: What to compute.
            choice: What the caller forces.  A batch-invariant plan is made for INVARIANT_ROWS rows, however many there
                are.

        Raises:
            PlanError: no strategy that the choice allows can run; the message lists every reason.
        """
        problem = _problem_of(task, choice)
        options = self._options(problem, choice)
        if plans := [option for option in options if isinstance(option, Plan)]:
            fastest = best(plans)
            return _for_rows(fastest, problem, self.device) if choice.batch_invariant else fastest
        asked = "".join(f" {key}={value!r}" for key, value in zip(choice._fields, choice, strict=True) if value)
        reasons = "".join(f"\n  {o.backend}/{o.strategy}: {o.reason}" for o in options)
        raise PlanError(
            f"no plan for {problem.operation} of {problem.rows} x {problem.cols} {problem.dtype} on {self.device.name}"
            f"{' with' + asked if asked else ''}:{reasons}"
        )

    def alternatives(self, task: Task | Problem, choice: Choice = ANY) -> list[Plan | Refusal]:
        """Every strategy's plan for a task, or why it has none: what `explain` compares.  Arguments as for `plan`.

        Raises:
            PlanError: there is no such backend or strategy.
        """
        problem = _problem_of(task, choice)
        options = self._options(problem, choice)
        if not choice.batch_invariant:
            return options
        return [_for_rows(option, problem, self.device) if isinstance(option, Plan) else option for option in options]

    def _options(self, problem: Problem, choice: Choice) -> list[Plan | Refusal]:
        """The same, but batch-invariant plans are for INVARIANT_ROWS rows: the fastest for these is taken."""
        device, backend, strategy = self.device, choice.backend, choice.strategy
        strategies, lacking = strategies_of(problem.declaration, self.strategies)
        missing = self._missing(problem, choice) | lacking
        if choice.batch_invariant:
            problem = problem.for_rows(INVARIANT_ROWS)
        for i, (argument, value) in enumerate((("backend", backend), ("strategy", strategy))):
            names = dict.fromkeys(str(row[i]) for row in strategies)
            if value is not None and value not in names:
                have = [name for name, rows in FRAMEWORKS.items() if value in [row[i] for row in rows]]
                named = f"{argument} {value!r}"
                wrong = f"{named} needs the framework {have[0]!r}" if len(have) == 1 else f"unknown {named}"
                raise PlanError(f"{wrong}; there are: {', '.join(names)}")
        usable = {row[0] for row in strategies if backend in (None, row[0])} - missing.keys()
        forecast = None if self.table is None else forecast_for(self.table, problem, device, usable)
        found: list[Plan | Refusal] = []
        for its_backend, its_strategy, propose in strategies:
            if backend not in (None, its_backend) or strategy not in (None, its_strategy):
                continue
            reason = missing.get(f"{its_backend}/{its_strategy}") or missing.get(its_backend)
            options = reason or no_gpu(its_backend, device) or propose(problem, device)
            if isinstance(options, str):
                found.append(Refusal(its_backend, its_strategy, options))
            elif (
                forecast is None
                or options[0].by_estimate
                or (its_backend, its_strategy, propose) in problem.declaration.own_strategies
            ):
                # The measured times are those of the backends' own strategies.
                found.append(priced(options[0], problem, device))
            else:
                found.append(forecast.best(options, propose))
        return found or [Refusal(str(backend), str(strategy), f"{backend} has no strategy {strategy!r}")]

    def _missing(self, problem: Problem, choice: Choice) -> dict[str, str]:
        """Why backends, or backend/strategy, cannot be used for a problem."""
        missing = dict(self.unavailable)
        if choice.batch_invariant and self.device.kind == "cuda":
            missing["eager"] = "the framework's sums depend on the number of rows"
        if problem.sharded:
            others = {row[0] for row in self.strategies} - {"cuda"}
            missing |= dict.fromkeys(others, "only CUDA kernels exchange states with other GPUs")
        return missing


def _problem_of(task: Task | Problem, choice: Choice) -> Problem:
    return Problem.of(task, choice.batch_invariant) if isinstance(task, Task) else task


def plan(
    problem: Problem, device: Device, choice: Choice = ANY, unavailable: Sequence[tuple[str, str]] = (),
    table: Table | None = None, strategies: Strategies = TABLE,
) -> Plan:  # fmt: skip
    """The plan for a problem on a device.  Arguments and errors as for `Planner` and its `plan`.

    Example:
        >>> from onlinesoftmax.core.device import known
        >>> plan(Problem("softmax", 4096, 1024, "bfloat16"), known("h200")).strategy
        'row'
        >>> plan(Problem("softmax", 1, 1 << 24), known("h200")).strategy
        'grid'
    """
    return Planner(device, tuple(unavailable), table, strategies).plan(problem, choice)


EQUALLY_FAST = 1.03
"""Ratio of times up to which two backends count as equally fast: measured times of one kernel differ by 1 to 2 percent.
"""


def best(plans: Sequence[Plan]) -> Plan:
    """The fastest plan of the first backend that has a plan about as fast as the fastest of all.

    Backends are in the order of `strategies`: the kernels of an earlier backend compile and launch in less host time.
    So do the kernels of an earlier strategy, and estimates that are this close do not say which one is faster.
    """
    limit = EQUALLY_FAST * min(plan.rank_us for plan in plans)
    backend = next(plan.backend for plan in plans if plan.rank_us <= limit)
    plans = [plan for plan in plans if plan.backend == backend]
    fastest = min(plans, key=lambda plan: plan.rank_us)
    if fastest.measured_on:
        return fastest
    limit = EQUALLY_FAST * fastest.rank_us
    return next(plan for plan in plans if plan.rank_us <= limit and not plan.measured_on)


def _for_rows(fastest: Plan, problem: Problem, device: Device) -> Plan:
    """The plan for INVARIANT_ROWS rows with the same blocks, for the number of rows of a problem."""
    programs = fastest.programs
    # A persistent launch keeps its number of programs; each takes one row after another.
    if not fastest.stages and fastest.strategy != "grid":
        programs = -(-problem.rows // fastest.rows_per_program) * fastest.splits
    reason = f"{fastest.reason}; a batch-invariant plan is the fastest for {INVARIANT_ROWS} rows"
    return priced(replace(fastest, programs=programs, reason=reason), problem, device)
