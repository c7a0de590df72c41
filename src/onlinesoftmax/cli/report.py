"""`onlinesoftmax report`: recorded measurements and the planner's choices as one HTML page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..ops import FORWARD, OPERATIONS
from . import output
from .options import DTYPES, FRAMEWORKS, known_device, named
from .signals import interrupted_by_signals

if TYPE_CHECKING:
    from ..lab.report.combinations import Choices


def report(
    results: list[Path] | None = typer.Argument(
        None,
        metavar="[RESULTS]...",
        help="Records that `onlinesoftmax bench --out` wrote, or folders of them.  By default benchmarks/results, if "
        "the current folder is a checkout; otherwise the few that the package has.",
    ),
    out: Path = typer.Option(Path("report.html"), "--out", "-o", help="The HTML file to write."),
    device: list[str] | None = known_device(help="A GPU of the picker; repeatable.  By default h200, h100, a100."),
    op: list[str] | None = named(
        "operation",
        OPERATIONS,
        help=f"An operation for the picker, with each of its score options; repeatable: {', '.join(OPERATIONS)}.  "
        f"By default every forward operation, {FORWARD[0]} with its score options, and the gradient of {FORWARD[0]}.",
    ),
    dtype: list[str] | None = named("dtype", DTYPES, help="A dtype; repeatable.  By default bfloat16 and float32."),
    rows: list[int] | None = typer.Option(None, help="Rows; repeatable.  By default 1, 64, 4096 and 65536."),
    framework: list[str] | None = named("framework", FRAMEWORKS, help="torch or jax; repeatable.  By default both."),
    svg: Path | None = typer.Option(None, help="Also write the first chart of the first record to this SVG file."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document about the page."),
) -> None:
    """Write one HTML page with charts of recorded measurements and a picker of plans.

    The page works offline: it loads nothing.  It shows speed, time, memory and error of every library over the row
    length, beside the copy, and the machine, the versions and the commit of each record.  On the picker, choose a
    shape by slider and lists, and see the planner's choice, its numbers and its reasons.  The planner makes these
    answers while the page is made, which takes one to two minutes on two processors.  They are kept in the cache
    folder, so the next page takes seconds.

    A link such as report.html#gpu=h200&rows=64&cols=128256 opens the page on a choice.

    The exit code is 1 if a file could not be shown; the page then has the others.

    \b
    Examples:
      onlinesoftmax report
      onlinesoftmax report record.json -o report.html --device h200 --rows 4096
    """  # noqa: D301  \b is typer's mark for lines that it does not wrap
    from ..lab.report.combinations import Choices
    from ..lab.report.page import missing
    from ..lab.report.records import FOLDER, SHIPPED

    if absent := missing():
        output.fail(f"report needs {', '.join(absent)}: pip install 'onlinesoftmax[report]'")
    chosen: dict[str, Any] = {
        "gpus": device, "operations": op, "with_options": op, "dtypes": dtype, "rows": rows, "frameworks": framework,
    }  # fmt: skip
    with output.refusing():
        choices = Choices(**{name: value for name, value in chosen.items() if value})
    paths = results or [folder for folder in (FOLDER, SHIPPED) if folder.is_dir()][:1]
    _check_outputs(out, svg, paths)
    with interrupted_by_signals():
        _write_page(paths, choices, out, svg, as_json)


def _check_outputs(out: Path, svg: Path | None, paths: list[Path]) -> None:
    """End the command before the work begins if a file cannot be written, or is another file of this command."""
    from ..core.whole_files import check_writable, same_file
    from ..lab.report.records import files_of

    outputs = {"--out": out, **({"--svg": svg} if svg is not None else {})}
    for option, path in outputs.items():
        with output.writing(f"{option} {path}"):
            check_writable(path)
        if record := next((record for record in files_of(paths) if same_file(path, record)), None):
            output.fail(f"{option} {path} would replace the record {record}; name another file")
    if svg is not None and same_file(out, svg):
        output.fail(f"--svg {svg} is the file of the page, --out {out}; name another file")


def _write_page(paths: list[Path], choices: Choices, out: Path, svg: Path | None, as_json: bool) -> None:
    """Read the records, make the page, write it, and say what is on it; exit with 1 if a file is not shown."""
    from ..core.whole_files import write_whole
    from ..lab.report.charts import headline
    from ..lab.report.page import page
    from ..lab.report.records import read

    begin = time.perf_counter()
    records, wrong, others = read(paths)
    for sentence in wrong:
        output.warn(sentence)
    if svg is not None:
        if not records:
            output.fail("--svg needs a record")
        with output.refusing("--svg: "):
            chart = headline(records[0]).encode()
        with output.writing(f"--svg {svg}"):
            write_whole(svg, chart)
    with output.progress_of("planning") as show:
        content = page(records, choices, wrong, show).encode()
    with output.writing(f"--out {out}"):
        write_whole(out, content)
    seconds = time.perf_counter() - begin
    if as_json:
        output.print_json({
            "out": str(out), "bytes": len(content), "seconds": seconds,
            "records": [record.name for record in records], "not_shown": wrong, "other_files": others,
        })  # fmt: skip
    else:
        count = f"{len(records)} record{'' if len(records) == 1 else 's'} and the picker"
        shown = count if records else "the picker alone: there are no records to show"
        made = f"{output.size(len(content))}, made in {output.duration(seconds * 1e6)}"
        output.note("\n".join([*others, f"{out}: {shown}; {made}."]))
    if wrong:
        raise typer.Exit(1)
