"""The planner: which backend and strategy runs a problem, with which blocks, and why.

The planner reads a problem, a description of a device and a table of measured times; it does not query the hardware.
Each strategy lists proposals, likeliest first.  With measured times of similar shapes, the planner forecasts the times
of all proposals (forecast.py).  Otherwise it estimates the time of the first proposal of each strategy from bytes,
bandwidth and launches (price.py).  The proposal with the least time wins; where two backends are equally fast, the
backend with less host time wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..core.device import Device
from ..core.problem import Problem
from ..core.task import ANY, Choice, Task
from .forecast import forecast_for
from .measured import Table
from .price import Plan, priced
from .strategies import TABLE, Strategies, strategies_of

__all__ = [
    "INVARIANT_ROWS",
    "Plan",
    "PlanError",
    "Planner",
    "Refusal",
    "Strategies",
    "alternatives",
    "best",
    "plan",
    "priced",
]


class PlanError(ValueError):
    """No plan: the message lists every reason."""


class Planner(NamedTuple):
    """The inputs of a plan that are the same for all tasks on a device.

    Attributes:
        device, unavailable, table, strategies: As for `plan`.
    """

    device: Device
    unavailable: tuple[tuple[str, str], ...]
    table: Table | None
    strategies: Strategies

    def plan(self, task: Task, choice: Choice = ANY) -> Plan:
        """The plan for a task.

        Raises:
            PlanError: no strategy that the choice allows can run; the message lists every reason.
        """
        problem = Problem.of(task, choice.batch_invariant)
        return plan(problem, self.device, choice, self.unavailable, self.table, self.strategies)

    def alternatives(self, task: Task, choice: Choice = ANY) -> list[Plan | Refusal]:
        """Every strategy's plan for a task, or why it has none."""
        problem = Problem.of(task, choice.batch_invariant)
        return alternatives(problem, self.device, choice, self.unavailable, self.table, self.strategies)


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
        table: Times that were measured on the device, or on a similar device.
        strategies: The strategies there are: strategies.TABLE, or strategies.FOR_JAX.

    Raises:
        PlanError: no strategy that the choice allows can run; the message lists every reason.

    Example:
        >>> from onlinesoftmax.core.device import known
        >>> plan(Problem("softmax", 4096, 1024, "bfloat16"), known("h200")).strategy
        'row'
        >>> plan(Problem("softmax", 1, 1 << 24), known("h200")).strategy
        'grid'
    """
    options = _options(problem, device, choice, unavailable, table, strategies)
    plans = [option for option in options if isinstance(option, Plan)]
    if plans:
        fastest = best(plans)
        return _for_rows(fastest, problem, device) if choice.batch_invariant else fastest
    asked = "".join(f" {key}={value!r}" for key, value in zip(choice._fields, choice, strict=True) if value)
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
    options = _options(problem, device, choice, unavailable, table, strategies)
    if not choice.batch_invariant:
        return options
    return [_for_rows(option, problem, device) if isinstance(option, Plan) else option for option in options]


def _options(
    problem: Problem,
    device: Device,
    choice: Choice,
    unavailable: Sequence[tuple[str, str]],
    table: Table | None,
    strategies: Strategies,
) -> list[Plan | Refusal]:
    """The same, but batch-invariant plans are for INVARIANT_ROWS rows: the fastest for these is taken."""
    backend, strategy = choice.backend, choice.strategy
    strategies, lacking = strategies_of(problem.declaration, strategies)
    if choice.batch_invariant:
        problem = problem.for_rows(INVARIANT_ROWS)
        if device.kind == "cuda":
            unavailable = (*unavailable, ("eager", "the framework's sums depend on the number of rows"))
    if problem.sharded:
        others = dict.fromkeys(row[0] for row in strategies if row[0] != "cuda")
        unavailable = (*unavailable, *((name, "only CUDA kernels exchange states with other GPUs") for name in others))
    for argument, value, names in (
        ("backend", backend, [row[0] for row in strategies]),
        ("strategy", strategy, [row[1] for row in strategies]),
    ):
        if value is not None and value not in names:
            raise PlanError(f"unknown {argument} {value!r}; there are: {', '.join(dict.fromkeys(names))}")
    missing = dict(unavailable) | lacking
    usable = {row[0] for row in strategies if backend in (None, row[0])} - missing.keys()
    forecast = None if table is None else forecast_for(table, problem, device, usable)
    found: list[Plan | Refusal] = []
    for its_backend, its_strategy, propose in strategies:
        if backend not in (None, its_backend) or strategy not in (None, its_strategy):
            continue
        reason = missing.get(f"{its_backend}/{its_strategy}") or missing.get(its_backend)
        options = reason or propose(problem, device)
        if isinstance(options, str):
            found.append(Refusal(its_backend, its_strategy, options))
        elif forecast is None or (its_backend, its_strategy, propose) in problem.declaration.own_strategies:
            # The measured times are those of the backends' own strategies.
            found.append(priced(options[0], problem, device))
        else:
            found.append(forecast.best(options, propose))
    return found or [Refusal(str(backend), str(strategy), f"{backend} has no strategy {strategy!r}")]


EQUALLY_FAST = 1.03
"""Ratio of times up to which two backends count as equally fast: measured times of one kernel differ by 1 to 2 percent.
"""


def best(plans: Sequence[Plan]) -> Plan:
    """The fastest plan of the first backend that has a plan about as fast as the fastest of all.

    Backends are in the order of `strategies`: the kernels of an earlier backend compile and launch in less host time.
    """
    limit = EQUALLY_FAST * min(plan.rank_us for plan in plans)
    backend = next(plan.backend for plan in plans if plan.rank_us <= limit)
    return min((plan for plan in plans if plan.backend == backend), key=lambda plan: plan.rank_us)


INVARIANT_ROWS = 4096
"""Rows that a batch-invariant plan is made for: enough to fill every device."""


def _for_rows(fastest: Plan, problem: Problem, device: Device) -> Plan:
    """The plan for INVARIANT_ROWS rows with the same blocks, for the number of rows of a problem."""
    programs = fastest.programs
    # A persistent launch keeps its number of programs; each takes one row after another.
    if not fastest.stages and fastest.strategy != "grid":
        programs = -(-problem.rows // fastest.rows_per_program) * fastest.splits
    reason = f"{fastest.reason}; a batch-invariant plan is the fastest for {INVARIANT_ROWS} rows"
    return priced(replace(fastest, programs=programs, reason=reason), problem, device)
