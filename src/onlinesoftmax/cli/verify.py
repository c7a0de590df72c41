"""`onlinesoftmax verify`: check every kernel on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

import typer

from ..core.task import ITEMSIZE
from ..ops import OPERATIONS
from . import output

if TYPE_CHECKING:
    from ..lab.verify import Cell


def verify(
    quick: bool = typer.Option(False, "--quick", help="Check few inputs instead of all, and gradients in two dtypes."),
    backend: list[str] | None = typer.Option(None, help="Only this backend; repeat for more."),
    strategy: list[str] | None = typer.Option(None, help="Only this strategy; repeat for more."),
    op: list[str] | None = typer.Option(None, help=f"Only this operation: {', '.join(OPERATIONS)}; repeat for more."),
    dtype: list[str] | None = typer.Option(None, help=f"Only this dtype: {', '.join(ITEMSIZE)}; repeat for more."),
    device: str | None = typer.Option(None, help="cpu or cuda; by default the GPU where there is one."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Check every backend, strategy, operation and dtype against the exact result, and compare with PyTorch's error.

    A result passes when its error is at most PyTorch's largest error on the same input plus one unit in the last
    place (ulp), and when its infinities and NaNs are PyTorch's.  A gradient is computed by autograd and compared with
    the exact gradient at the output that was saved; it is a difference of two terms, and one unit of the larger term
    is allowed too.  Without a GPU the Triton kernels run in Triton's interpreter, on fewer and smaller inputs.
    The exit code is 1 when anything fails.

    \b
    Example:
      onlinesoftmax verify --quick --backend triton --dtype bfloat16
    """  # noqa: D301  \b is typer's mark for lines that it does not wrap
    where, interpreted = _prepare(device)
    cells, absent = _run(backend or [], strategy or [], op or [], dtype or [], where, quick)
    failed = [cell for cell in cells if cell.result == "fail"]
    if as_json:
        output.print_json({
            "device": _device_name(where), "interpreter": interpreted, "quick": quick, "passed": not failed,
            "unavailable": absent, "cells": [cell.as_dict() for cell in cells],
        })  # fmt: skip
    else:
        _print(cells, absent, where)
    raise typer.Exit(1 if failed else 0)


def _prepare(device: str | None) -> tuple[str, bool]:
    """(device, interpreted): interpreted is True where Triton's interpreter runs the kernels."""
    if device not in (None, "cpu", "cuda"):
        output.fail(f"unknown device {device!r}; there are: cpu, cuda")
    if importlib.util.find_spec("torch") is None:
        output.fail("verify compares with PyTorch, and torch is not installed: pip install 'onlinesoftmax[torch]'")
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        output.fail("--device cuda: torch sees no NVIDIA GPU here")
    where = device or ("cuda" if has_gpu else "cpu")
    if where == "cpu" and "triton" not in sys.modules:
        # Triton reads the variable when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    from ..kernels import registry

    interpreted = registry.module_missing("triton", "triton") is None and registry.load("triton").interpreted()
    return where, interpreted


def _run(
    backends: list[str], strategies: list[str], operations: list[str], dtypes: list[str], device: str, quick: bool
) -> tuple[list[Cell], dict[str, str]]:
    """The cells, and the backends that cannot be used here with the reason."""
    from ..lab import verify as verification

    try:
        chosen = dict.fromkeys(name for name, _ in verification.pairs(backends, strategies))
        absent = {name: reason for name in chosen if (reason := verification.unavailable(name, device))}
        for name in backends:
            if name in absent:
                output.fail(f"backend {name} cannot be used here: {absent[name]}")
        if len(absent) == len(chosen):
            output.fail("; ".join(f"backend {name} cannot be used here: {reason}" for name, reason in absent.items()))
        with output.progress_of("checking") as show:
            cells = verification.verify(
                backends=backends, strategies=strategies, operations=operations, dtypes=dtypes,
                device=device, quick=quick, progress=show,
            )  # fmt: skip
    except ValueError as error:
        output.fail(error)
    return cells, absent


def _device_name(device: str) -> str:
    from ..torch.device import from_torch

    return from_torch(device).name


def _print(cells: list[Cell], absent: dict[str, str], device: str) -> None:
    from ..lab.verify import FLOAT64_ULPS, INTERPRETER_ULPS

    output.note(
        f"Checked against the exact result on {_device_name(device)}.  Allowed is PyTorch's largest error on the same "
        "input plus 1 ulp; for a value of a row also 1 ulp of its logsumexp, and for a gradient 1 ulp of the larger of "
        "its two terms, both in float32 or wider."
    )
    for name, whose in (("triton", "Triton's"), ("pallas", "JAX's")):
        slack = {cell.dtype: cell.slack for cell in cells if cell.backend == name}
        if slack.get("float64", 1) > slack.get("float32", 1):
            output.note(
                f"{name.capitalize()} kernels merge sums of float64 in float64; they are allowed "
                f"{FLOAT64_ULPS[name]} ulps there."
            )
        elif max(slack.values(), default=1) > 1:
            output.note(
                f"{name.capitalize()} kernels run in {whose} interpreter, which is slow and rounds differently; they "
                f"are allowed {INTERPRETER_ULPS[name]} ulps."
            )
    for name, reason in absent.items():
        output.note(f"Backend {name} is not checked: {reason}")
    print()
    output.table(
        ("strategy", "operation", "dtype", "inputs", "error", "PyTorch", "ulps", "PyTorch", "of allowed", "result"),
        [_row(cell) for cell in cells],
        right=("inputs", "error", "PyTorch", "ulps", "of allowed"),
    )
    print()
    told = [("FAIL", cell, failure) for cell in cells for failure in cell.failures]
    told += [("skipped", cell, str(cell.reason)) for cell in cells if cell.result == "skipped"]
    for word, cell, reason in told:
        output.note(f"{word} {cell.backend}/{cell.strategy} {cell.operation} {cell.dtype}: {reason}")
    output.note(_summary(cells))


def _row(cell: Cell) -> tuple[str, ...]:
    numbers = ("", "", "", "", "")
    if cell.cases:
        numbers = (
            f"{cell.error:.1e}", f"{cell.pytorch_error:.1e}",
            f"{cell.ulps:.1f}", f"{cell.pytorch_ulps:.1f}", f"{cell.of_allowed:.0%}",
        )  # fmt: skip
    return f"{cell.backend}/{cell.strategy}", cell.operation, cell.dtype, str(cell.cases), *numbers, cell.result


def _summary(cells: list[Cell]) -> str:
    counts = Counter(cell.result for cell in cells)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    checked = sum(cell.cases for cell in cells)
    return f"{counts['pass']} passed, {counts['fail']} failed{skipped}: {checked} results checked."
