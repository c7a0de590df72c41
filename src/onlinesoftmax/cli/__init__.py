"""The command line: `onlinesoftmax doctor | verify | bench | explain | warm | tune | apply | report | cache`.

Each command has one file; output.py prints tables for terminals, text for pipes, and JSON.  No framework is imported
before a command needs it, so `--help` is quick.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


COMMANDS = {
    "doctor": "Show the backends, versions and devices of this machine.",
    "verify": "Check every kernel against the exact result.",
    "bench": "Measure beside a copy and other libraries.",
    "explain": "Show the plan for a shape, and the reasons.",
    "warm": "Compile the kernels of some calls, as for an image.",
    "tune": "Measure which plans are fastest on this GPU.",
    "apply": "Apply softmax to a file of any size.",
    "report": "Write a page of measurements and plans.",
    "cache": "Show the cache folder, or empty it.",
}
"""The commands with their summaries; each is the function of its name in the module of its name."""


def main() -> None:
    """Run the command line on sys.argv; exit with 0 (fine), 1 (a check failed) or 2 (bad input)."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"The command line needs {' and '.join(missing)}: pip install 'onlinesoftmax[cli]'", file=sys.stderr)
        sys.exit(2)
    from .boundary import guarded

    sys.exit(guarded(lambda: build()(prog_name="onlinesoftmax")))


def build() -> typer.Typer:
    """The application, with every command registered."""
    import typer

    from .options import Command

    app = typer.Typer(
        # Plain help reads well in a pipe and in a terminal, and needs no import of rich.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def onlinesoftmax(
        version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
    ) -> None:
        """The softmax family at the speed of memory: inspect, verify and measure the kernels, and run them on files.

        Every command has --json, which prints one JSON document on stdout.  The exit code is 0 for success, 1 for a
        failed check, and 2 for wrong input.  An option with a plural name takes names with commas between them; the
        others with several values are repeated.  --install-completion lets bash, zsh, fish and PowerShell complete
        commands, options and their values.
        """

    for name, summary in COMMANDS.items():
        app.command(cls=Command, short_help=summary)(getattr(importlib.import_module(f".{name}", __package__), name))
    return app


def _version(wanted: bool) -> None:
    if wanted:
        import typer

        from .. import __version__

        print(f"onlinesoftmax {__version__}")
        raise typer.Exit
