"""The parts that the benchmark of one process and that of several share: checks of names, and the record's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.operations import OPERATIONS
from . import output


def split_names(text: str) -> list[str]:
    """The names in a text with commas between them."""
    return [name for name in map(str.strip, text.split(",")) if name]


def check_plan_names(backend: str | None, strategy: str | None, framework: str) -> None:
    """Raise a ValueError for a backend or a strategy that does not exist."""
    from ..core.device import KNOWN
    from ..core.problem import Problem
    from ..core.task import Choice
    from ..planner.plan import alternatives
    from ..planner.strategies import FOR_JAX, TABLE

    # Unknown names are refused for every problem, so any problem serves.
    strategies = FOR_JAX if framework == "jax" else TABLE
    alternatives(Problem(next(iter(OPERATIONS)), 1, 1), KNOWN["cpu"], Choice(backend, strategy), strategies=strategies)


def without_folder(out: str | None) -> str | None:
    """The name of the record's file: a record does not tell the folders of this machine."""
    return out and Path(out).name


def write_record(out: str | None, record: dict[str, Any]) -> None:
    """Write the record to the file that was asked for, or end the command with a sentence."""
    from ..bench import report

    if out is None:
        return
    try:
        report.write(Path(out), record)
    except OSError as error:
        output.fail(f"--out {out} cannot be written: {error.strerror or error}")
