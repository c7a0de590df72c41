"""The record of a run for later readers, and the table for the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.cache import write_whole
from ..torch.device import from_torch
from .cases import Case
from .libraries import PEERS
from .result import CPU_ADDED_US, CPU_RATIO, LARGE, CaseResult, Result

BUSY = 0.3
"""Load per processor above which other work on the machine shows in the times."""

FORMAT = 1
"""Version of the record's format; it is raised when a key changes its meaning."""

MEMORY = "extra MB"
"""Column of the memory that a call takes beyond its input and its result."""

HEADER = ("operation", "shape", "dtype", "who", "time us", "GB/s", "of copy", "vs torch", MEMORY, "analysis")
"""Columns of the table.

The first is left out where every line would have the same operation, the memory where no gradient ran on a GPU.
"""

NUMBERS = ("time us", "GB/s", "of copy", "vs torch", MEMORY)
"""Columns that are aligned to the right."""


def record(
    device: Any, options: Mapping[str, Any], absent: Mapping[str, str], commit: str | None = None
) -> dict[str, Any]:
    """The record of a run before its first case, ready for JSON.

    Args:
        device: The torch device.
        options: The options of the command line.
        absent: Libraries that were asked for and cannot take part, with the reason.
        commit: The commit to record where the sources were copied without their history.

    Returns:
        A dictionary with an empty list "cases", for `CaseResult.as_dict()`, and "host", for `host_times`.
    """
    return {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git": git_state(commit),
        "versions": versions(),
        "device": device_facts(device),
        "options": dict(options),
        "absent": dict(absent),
        "cases": [],
        "host": None,
    }


def git_state(commit: str | None = None) -> dict[str, Any]:
    """The commit that is given; otherwise the commit of this checkout, and "dirty" where the sources differ from it."""
    if commit is not None:
        return {"commit": commit, "dirty": None}
    here = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str | None:
        # Without a lock, so that a commit at the same time does not fail.
        command = ["git", "--no-optional-locks", "-C", str(here), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    # A package in a virtual environment inside another project does not belong to that project's commits.
    if shutil.which("git") is None or git("ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": "unknown", "dirty": None}
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}


def versions() -> dict[str, str | None]:
    """Versions of Python and of every package that matters; None for a package that is not installed."""
    names = ["torch", "triton", "numpy", "cuda-core", "jax", "jaxlib"]
    names += [peer.distribution for peer in PEERS.values() if peer.distribution]
    found: dict[str, str | None] = {"python": platform.python_version(), "onlinesoftmax": __version__}
    for name in dict.fromkeys(names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def device_facts(device: Any) -> dict[str, Any]:
    """The device as the planner knows it, with its driver or its processor."""
    import torch

    facts: dict[str, Any] = {"torch_device": str(device), **from_torch(device.type, device.index or 0).as_dict()}
    if device.type == "cuda":
        return {**facts, "driver": _driver(), "cuda": torch.version.cuda}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {**facts, "processor": _processor(), "threads": torch.get_num_threads(), "load": load}


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that the file is always complete: the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    # Without NaN and Infinity, which many parsers refuse.
    write_whole(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def table(results: Sequence[CaseResult], absent: Mapping[str, str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The header and the rows: one row per result, skipped case and absent library."""
    rows: list[tuple[str, ...]] = []
    for case_result in results:
        case = case_result.case
        start = (case.operation, str(case), case.dtype)
        if case_result.skipped:
            rows.append((*start, "-", "", "", "", "", "", f"skipped: {case_result.skipped}"))
        for result in case_result.results:
            rows.append((*start, _who(result), *_figures(case_result, result)))
    rows += [("-", "-", "-", name, "", "", "", "", "", f"absent: {reason}") for name, reason in absent.items()]
    left_out = set() if len({found.case.operation for found in results}) > 1 else {"operation"}
    if not any(found.case.with_gradient and r.extra_bytes is not None for found in results for r in found.results):
        left_out.add(MEMORY)
    kept = [i for i, column in enumerate(HEADER) if column not in left_out]
    return tuple(HEADER[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]


def _who(result: Result) -> str:
    return f"{result.who} {result.plan.backend}/{result.plan.strategy}" if result.plan else result.who


def _figures(case_result: CaseResult, result: Result) -> tuple[str, ...]:
    if result.times is None or result.gbps is None or result.of_copy is None:
        word = {"wrong": "WRONG", "failed": "FAILED", "refused": "refuses"}[result.status]
        return "", "", "", "", "", f"{word}: {result.reason}"
    return (
        f"{result.times.median_us:.{1 if result.times.median_us >= 10 else 2}f}",
        f"{result.gbps:.{0 if result.gbps >= 100 else 1}f}",
        f"{100 * result.of_copy:.0f}%",
        _against(case_result, result),
        "" if result.extra_bytes is None else f"{result.extra_bytes / 1e6:.1f}",
        result.analysis,
    )


def _against(case_result: CaseResult, result: Result) -> str:
    """The speed relative to PyTorch; where PyTorch's own kernel runs, the time that our layer adds to it."""
    if result.against_torch is None:
        return ""
    if case_result.within_cpu_bound is None or result.who != "ours":
        return f"{1 / result.against_torch.ratio:.2f}x"
    if case_result.case.elements >= LARGE:
        return f"{100 * (result.against_torch.ratio - 1):+.1f}%"
    return f"{result.against_torch.added_us:+.2f} us"


def above(content: Mapping[str, Any]) -> list[str]:
    """The lines above the table: operations, device, versions, date, and a warning where the machine is busy."""
    device, git, version = content["device"], content["git"], content["versions"]
    commit = git["commit"][:12] + (" with changes" if git["dirty"] else "")
    name = device.get("processor") or device["name"]
    what = ", ".join(dict.fromkeys(case["operation"] for case in content["cases"]))
    lines = [f"{what} on {name}, torch {version['torch']}, commit {commit}, {content['date']}"]
    load = device.get("load")
    if load is not None and load > BUSY * (os.cpu_count() or 1):
        lines.append(f"The machine is busy (load {load:.1f}): other work slows these times.")
    return lines


def _kind(case: Case) -> str:
    """The operation, its reduction and its gradient."""
    words = [case.operation, f"with reduction {case.reduction}" if case.reduction else ""]
    words.append("with gradient" if case.with_gradient else "")
    return " ".join(filter(None, words))


def below(results: Sequence[CaseResult], content: Mapping[str, Any]) -> list[str]:
    """The lines below the table: the tensors that a gradient's GB/s count, our layer on a CPU, host times."""
    lines = []
    passes = {_kind(r.case): r.case.passes for r in results if r.case.backward or r.case.with_gradient}
    for kind, count in passes.items():
        lines.append(f"GB/s of {kind} count {count} tensors, read or written once; those of the copy count 2.")
    if any(result.flush == "clean" for result in results):
        lines.append("Before a call that only reads, the L2 cache is left without dirty lines.")
    bounds = [result.within_cpu_bound for result in results if result.within_cpu_bound is not None]
    if bounds:
        lines.append(
            f"Our layer stays within its limit in {sum(bounds)} of {len(bounds)} cases.  It may add "
            f"{100 * (CPU_RATIO - 1):.0f}% to PyTorch from 2^20 elements up, {CPU_ADDED_US:.0f} us per call below."
        )
    # Records from before losses were measured have no key "cross_entropy".
    host = content["host"] or {}
    for times in filter(None, (host, host.get("cross_entropy"))):
        each = ", ".join(f"{name} {found['median_us']:.1f} us" for name, found in times["times"].items())
        shape = "x".join(map(str, times["shape"]))
        lines.append(f"Host time of one {times['operation']} call, {shape} {times['dtype']}: {each}.")
    return lines
