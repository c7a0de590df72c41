"""The parts that the benchmark of one process and that of several share: checks, record, progress, table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..ops import OPERATIONS
from . import output
from .options import split_names

if TYPE_CHECKING:
    from ..lab.bench.cases import Case
    from ..lab.bench.entries import Suite
    from ..lab.bench.record_file import Recording
    from ..lab.bench.result import CaseResult

INTERRUPTED = 130
"""Exit code of a run that the user has interrupted, as shells give it."""


def check_options(suite: Suite, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option does not go with the suite, or is of no use without another."""
    from ..lab.bench.record_file import excluded

    for name in suite.excluded:
        if options[name]:
            raise ValueError(f"--{name.replace('_', '-')} does not go with --suite {options['suite']}; leave it out")
    if options["resume"] and options["out"] is None:
        raise ValueError("--resume continues a record; name its file with --out")
    out, other = options["out"], excluded(options)
    if out is not None and not Path(out).exists() and not Path(out).suffix:
        raise ValueError(f"--out {out}: there is no such folder; a file for a record ends in .json")
    if other and out is not None and Path(out).is_dir():
        raise ValueError(f"--out {out} is a folder for records of whole suites; with {other}, name a file")


def todo_of(suite: Suite, options: Mapping[str, Any]) -> list[Case]:
    """The cases that the options of the command line choose, of a suite or instead of it.

    Raises:
        ValueError: a name is unknown, or a case makes no sense.
    """
    from ..core.device import KNOWN
    from ..core.problem import Problem
    from ..core.task import Choice
    from ..lab.bench.suites import cases
    from ..lab.names import parse_shape
    from ..planner.plan import Planner
    from ..planner.strategies import JAX_WITH_CUDA, TABLE

    found = cases(
        suite, options["op"] or [], [parse_shape(text) for text in options["shape"] or []], options["dim"],
        options["dtype"] or [], split_names(options["fused"]), options["with_gradient"], options["reduction"],
    )  # fmt: skip
    framework = options["framework"]
    # Unknown names of plans are refused for every problem, so any problem serves.
    strategies, problem = JAX_WITH_CUDA if framework == "jax" else TABLE, Problem(next(iter(OPERATIONS)), 1, 1)
    Planner(KNOWN["cpu"], strategies=strategies).alternatives(problem, Choice(options["backend"], options["strategy"]))
    if suite.measures != "device time":
        name = f"--suite {options['suite']}"
        if framework != "torch" and suite.measures != "first calls":
            raise ValueError(f"{name} measures calls of PyTorch; leave out --framework {framework}")
        if backward := next((case for case in found if case.declaration.backward), None):
            operations = f"instead of --op {backward.operation} name {backward.declaration.forward}"
            raise ValueError(f"{name} measures public functions: {operations}")
    return found


def begun(
    device: Any, options: dict[str, Any], suite: Suite, todo: Sequence[Case], absent: Mapping[str, str], **more: Any
) -> Recording:
    """The record of a run, with the cases that its file already has if it is to be continued.

    The option "out" becomes the file: in a folder, the one of this device and suite.

    Args:
        device: The torch device.
        options: The options of the command line.
        suite: The suite.
        todo: The cases.
        absent: Libraries that cannot take part, with the reason.
        more: Further fields of the record.

    Raises:
        ResumeError: the file cannot be continued.
    """
    from ..lab.bench.record_file import Recording, ResumeError, load, record, record_name

    told = {name: value for name, value in options.items() if name != "resume"}
    head = {**record(device, told, absent, options["commit"]), "measures": suite.measures, **more}
    recording = Recording(head, todo)
    if out := options["out"]:
        # A record does not tell the folders of this machine.
        path = Path(out) / record_name(head) if Path(out).is_dir() else Path(out)
        head["options"]["out"], options["out"] = path.name, str(path)
        if options["resume"] and path.exists():
            try:
                recording.resume(load(path))
            except ResumeError as error:
                instead = "leave --resume out to begin anew, or name another file with --out"
                raise ResumeError(f"--resume: {path}: {error}; {instead}") from None
    return recording


def measure(
    recording: Recording, steps: Callable[[list[Case]], Iterable[CaseResult]], out: str | None, leader: bool = True
) -> None:
    """Measure the cases that are left, and write the record after every case.

    Args:
        recording: The record in the making.
        steps: The function that measures cases, one at a time.
        out: The file of the record; None for none.
        leader: True for the process that writes and shows progress.
    """
    from ..lab.bench.record_file import write

    def keep() -> None:
        if leader and out is not None:
            with output.writing(f"--out {out}"):
                write(Path(out), recording.content)

    left = recording.left
    total, names = len(recording.todo), [f"{case.operation} {case} {case.dtype}" for case in left]
    # A file that cannot be written ends the command before the first case.
    keep()
    try:
        with output.progress_of(names[0]) if leader and names else nullcontext() as show:
            for done, found in enumerate(steps(left), 1):
                recording.add(found)
                # Written after every case, so that a run that is killed leaves its results.
                keep()
                if show is not None:
                    show(total - len(left) + done, total, names[min(done, len(names) - 1)])
    except KeyboardInterrupt:
        if not leader:
            raise typer.Exit(INTERRUPTED) from None
        kept = f"; {out} has them, and --resume continues" if out else ""
        output.fail(f"interrupted after {total - len(recording.left)} of {total} cases{kept}", INTERRUPTED)


def show(recording: Recording, as_json: bool) -> None:
    """Print the record as JSON, or its table with the lines around it."""
    from ..lab.bench.tables import table_of

    if as_json:
        output.print_json(recording.content)
        return
    table = table_of(recording.found, recording.content)
    for line in table.above:
        output.note(line)
    output.table(table.header, table.rows, right=table.numbers)
    for line in table.below:
        output.note(line)


def failed(recording: Recording) -> bool:
    """True where a result is wrong, or where a call of ours crashed."""
    return any(result.failed for found in recording.found for result in found.results)
