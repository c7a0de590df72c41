"""Options: a wrong name of one, and of one's value, is an error with the name that was meant; shells complete both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand

from ..core.device import KNOWN
from ..core.task import ITEMSIZE
from ..core.wrong_calls import meant, unknown
from ..kernels import registry
from ..ops import OPERATIONS
from ..planner.strategies import FOR_JAX, TABLE
from . import output

DTYPES = tuple(ITEMSIZE)
BACKENDS = tuple(dict.fromkeys((*registry.BACKENDS, *(row[0] for row in FOR_JAX))))
STRATEGIES = tuple(dict.fromkeys(str(row[1]) for row in (*TABLE, *FOR_JAX)))
FRAMEWORKS = ("torch", "jax")
REDUCTIONS = ("mean", "sum", "none")
OUTPUTS = tuple(dict.fromkeys(output.name for operation in OPERATIONS.values() for output in operation.outputs))


class Command(TyperCommand):
    """A command whose error for an option that it does not have names the one that was meant.

    An option with one value that is given twice is an error too: the first value would count for nothing.  So is an
    empty value, which would be the current folder where a file is named.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            if not ctx.resilient_parsing:
                self._check_given(ctx, args)
            return super().parse_args(ctx, args)
        except Exception as error:  # NoSuchOption, of click or of the copy of click that newer versions of Typer have
            wrong = getattr(error, "option_name", None)
            if wrong and hasattr(error, "possibilities"):
                names = [str(option).strip("-").replace("-", "_") for each in self.params for option in each.opts]
                if found := meant(wrong.strip("-").replace("-", "_"), names):
                    vars(error).update(
                        message=f"No such option: {wrong}; did you mean --{found.replace('_', '-')}?",
                        possibilities=None,
                    )
            raise

    def _check_given(self, ctx: Any, args: list[str]) -> None:
        values, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option, count in Counter[Any](order).items():
            value, name = values.get(option.name), max(option.opts, key=len)
            if "" in (value if isinstance(value, (list, tuple)) else (value,)):
                output.fail(f"{name if name.startswith('-') else option.metavar or name.upper()} is empty")
            if count > 1 and not (option.multiple or option.is_flag):
                output.fail(f"{name} is given {count} times, and {ctx.info_name} takes one: run it once for each")


def named(
    what: str, names: Iterable[str], default: Any = None, *flags: str, help: str, commas: bool = False
) -> Any:  # fmt: skip
    """An option with one name, several names where its type is a list, or names with commas between them.

    Args:
        what: What the names are names of.
        names: The names.
        default: The default value.
        flags: The option's own names, where they do not follow from the parameter.
        help: The help.
        commas: True where one value has names with commas between them.
    """
    known = tuple(names)

    def check(context: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
        if not context.resilient_parsing:
            texts = [value] if isinstance(value, str) else value or ()
            for text in texts:
                for name in split_names(text) if commas else [text]:
                    if name not in known:
                        output.fail(f"{option.opts[-1]}: {unknown(what, name, filter(None, known))}")
        return value

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if commas else ("", "", incomplete)
        return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

    return typer.Option(default, *flags, help=help, callback=check, autocompletion=complete)


def known_device(*, help: str) -> Any:
    """An option for the name of a device, which the command checks; shells complete the names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in KNOWN if name.startswith(incomplete)]

    return typer.Option(None, help=help, autocompletion=complete)


def split_names(text: str) -> list[str]:
    """The names in a text with commas between them."""
    return [name for name in map(str.strip, text.split(",")) if name]


AS_JSON: Any = typer.Option(False, "--json", help="Print one JSON document.")
