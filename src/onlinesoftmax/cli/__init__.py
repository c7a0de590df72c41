"""The command line: `onlinesoftmax doctor | verify | bench | explain | tune | apply`.

One file a command; output.py is all that knows of terminals, tables and JSON.  Nothing here imports a
framework before a command needs it, so `--help` is quick.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line on sys.argv; exit with 0 (fine), 1 (a check failed) or 2 (bad input)."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"The command line needs {' and '.join(missing)}: pip install 'onlinesoftmax[cli]'", file=sys.stderr)
        sys.exit(2)
    build()(prog_name="onlinesoftmax")


def build() -> typer.Typer:
    """The application, with every command registered."""
    import typer

    from .apply import apply
    from .bench import bench
    from .doctor import doctor
    from .explain import explain
    from .tune import tune
    from .verify import verify

    app = typer.Typer(
        # Plain help reads as well in a pipe as in a terminal, and needs no import of rich.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def onlinesoftmax(
        version: bool = typer.Option(
            False, "--version", help="Print the version and exit.", callback=_version, is_eager=True
        ),
    ) -> None:
        """Softmax and its family at the speed of memory: see, check and measure what runs here, and run it on files.

        Every command takes --json (one JSON document on stdout) and exits with 0 when all is well, 1 when a
        check failed, 2 when the input was wrong.
        """

    for command, summary in (
        (doctor, "What can run here, and on what hardware."),
        (verify, "Check every kernel against float64."),
        (bench, "Measure against a copy, and against others."),
        (explain, "The plan for a shape, and why."),
        (tune, "Measure which plans are fastest on this GPU."),
        (apply, "Softmax of a file of any size."),
    ):
        app.command(short_help=summary)(command)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        import typer

        from .. import __version__

        print(f"onlinesoftmax {__version__}")
        raise typer.Exit
