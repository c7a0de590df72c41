"""`onlinesoftmax verify`: check every kernel on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

import typer

from ..ops import OPERATIONS
from . import output
from .options import AS_JSON, BACKENDS, DTYPES, STRATEGIES, named

if TYPE_CHECKING:
    from ..lab.verify import Cell

DEVICES = ("cpu", "cuda")


def verify(
    quick: bool = typer.Option(False, "--quick", help="Check few inputs instead of all, and gradients in two dtypes."),
    backend: list[str] | None = named("backend", BACKENDS, help="Only this backend; repeatable."),
    strategy: list[str] | None = named("strategy", STRATEGIES, help="Only this strategy; repeatable."),
    op: list[str] | None = named(
        "operation", OPERATIONS, help=f"Only this operation: {', '.join(OPERATIONS)}; repeatable."
    ),
    dtype: list[str] | None = named("dtype", DTYPES, help=f"Only this dtype: {', '.join(DTYPES)}; repeatable."),
    device: str | None = named("device", DEVICES, help="cpu or cuda; by default the GPU where there is one."),
    as_json: bool = AS_JSON,
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
    where = _prepare(device)
    from ..lab.verify import interpreted
    from ..torch.device import from_torch

    cells, absent = _run(where, quick, {"backends": backend, "strategies": strategy, "operations": op, "dtypes": dtype})
    failed = any(cell.result == "fail" for cell in cells)
    if as_json:
        output.print_json({
            "device": from_torch(where).name, "interpreter": bool(interpreted(["triton"], where)), "quick": quick,
            "passed": not failed, "unavailable": absent, "cells": [cell.as_dict() for cell in cells],
        })  # fmt: skip
    else:
        _print(cells, absent, where)
    raise typer.Exit(int(failed))


def _prepare(device: str | None) -> str:
    """The device, "cpu" or "cuda"; on a CPU, interpreters run the kernels."""
    if importlib.util.find_spec("torch") is None:
        output.fail("verify compares with PyTorch, and torch is not installed: pip install 'onlinesoftmax[torch]'")
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        output.fail("--device cuda: torch sees no NVIDIA GPU here")
    where = device or ("cuda" if has_gpu else "cpu")
    if where == "cpu":
        if "triton" not in sys.modules:
            # Triton reads the variable when it is imported.
            os.environ["TRITON_INTERPRET"] = "1"
        # XLA takes longer to optimize the interpreted Pallas kernels than they take to run.
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    return where


def _run(device: str, quick: bool, asked: dict[str, list[str] | None]) -> tuple[list[Cell], dict[str, str]]:
    """The cells, and the backends that cannot be used here with the reason."""
    from ..lab import verify as verification

    chosen = {name: names or [] for name, names in asked.items()}
    with output.refusing():
        pairs = verification.pairs(chosen["backends"], chosen["strategies"])
        backends = dict.fromkeys(name for name, _ in pairs)
        absent = {name: reason for name in backends if (reason := verification.unavailable(name, device))}
        # A backend that is named must be there, and without names at least one.
        needed = [name for name in chosen["backends"] if name in absent][:1]
        if lacking := needed or (list(absent) if len(absent) == len(backends) else []):
            output.fail("; ".join(f"backend {name} cannot be used here: {absent[name]}" for name in lacking))
        with output.progress_of("checking") as show:
            return verification.verify(**chosen, device=device, quick=quick, progress=show), absent


def _print(cells: list[Cell], absent: dict[str, str], device: str) -> None:
    from ..lab.verify import FLOAT64_ULPS, INTERPRETER_ULPS, interpreted
    from ..torch.device import from_torch

    output.note(
        f"Checked against the exact result on {from_torch(device).name}.  Allowed is PyTorch's largest error on the "
        "same input plus 1 ulp; for a value of a row also 1 ulp of its logsumexp, and for a gradient 1 ulp of the "
        "larger of its two terms, both in float32 or wider."
    )
    slow = interpreted([cell.backend for cell in cells], device)
    for name, whose in (("triton", "Triton's"), ("pallas", "JAX's")):
        if name in slow:
            output.note(
                f"{name.capitalize()} kernels run in {whose} interpreter, which is slow and rounds differently; they "
                f"are allowed {INTERPRETER_ULPS[name]} ulps."
            )
        elif name in FLOAT64_ULPS and any((cell.backend, cell.dtype) == (name, "float64") for cell in cells):
            output.note(
                f"{name.capitalize()} kernels merge sums of float64 in float64; they are allowed "
                f"{FLOAT64_ULPS[name]} ulps there."
            )
    for name, reason in absent.items():
        output.note(f"Backend {name} is not checked: {reason}")
    print()
    numbers = ("inputs", "error", "PyTorch", "ulps", "PyTorch", "of allowed")
    output.table(("strategy", "operation", "dtype", *numbers, "result"), list(map(_row, cells)), right=numbers)
    print()
    told = [("FAIL", cell, failure) for cell in cells for failure in cell.failures]
    told += [("skipped", cell, str(cell.reason)) for cell in cells if cell.result == "skipped"]
    for word, cell, reason in told:
        output.note(f"{word} {cell.backend}/{cell.strategy} {cell.operation} {cell.dtype}: {reason}")
    output.note(_summary(cells))


def _row(cell: Cell) -> tuple[str, ...]:
    numbers = (
        f"{cell.error:.1e}", f"{cell.pytorch_error:.1e}", f"{cell.ulps:.1f}", f"{cell.pytorch_ulps:.1f}",
        f"{cell.of_allowed:.0%}",
    )  # fmt: skip
    shown = numbers if cell.cases else ("",) * len(numbers)
    return f"{cell.backend}/{cell.strategy}", cell.operation, cell.dtype, str(cell.cases), *shown, cell.result


def _summary(cells: list[Cell]) -> str:
    counts = Counter(cell.result for cell in cells)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    checked = sum(cell.cases for cell in cells)
    return f"{counts['pass']} passed, {counts['fail']} failed{skipped}: {checked} results checked."
