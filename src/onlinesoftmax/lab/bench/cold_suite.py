"""The suite `cold`: times of imports and first calls, each in a fresh process, with empty and with filled caches."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import onlinesoftmax

from ...core.cache import UnusableError, cache_folder, read_private
from ...core.whole_files import write_whole
from ...planner.plan import Plan, PlanError
from .cases import Case
from .jax_peers import OursInJax
from .measure import planned, refusal
from .peers import Compiled, Ours, Peer
from .result import CaseResult, Result
from .timing import Times

EMPTY, FILLED = "empty", "filled"
"""States of the caches on disk before a process begins."""

PROCESSES = 3
"""Processes of each library and state; the table has the medians."""

TIMEOUT_S = 600
"""Longest time of one process, in seconds."""

LONGEST_REASON = 160
"""Characters of a reason in the table."""

STEPS = (8, 16, 24, 32, 64, 128, -8, -16, -32)
"""Lengths to try, relative to the first, for another length that the same kernel serves."""

FOLDERS = (
    "ONLINESOFTMAX_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME", "TMPDIR",
)  # fmt: skip
"""Environment variables that name the folders in which libraries keep compiled kernels."""


def run_cold(cases: Iterable[Case], everybody: Sequence[Peer], device: Any, quick: bool) -> Iterator[CaseResult]:
    """Measure the first calls of the cases, one at a time.

    Args:
        cases: Forward cases, with or without gradient.
        everybody: `Ours` and other libraries, all of them present.
        device: A torch device.
        quick: One process for each library and state of the caches instead of several.
    """
    count = 1 if quick else PROCESSES
    for case in cases:
        results: list[Result] = []
        for peer in everybody:
            results += _measure(case, peer, device, count)
        yield CaseResult(case, results=results, measures="first calls")


def calls_of(case: Case, steps: Sequence[int] = STEPS) -> dict[str, Case]:
    """The cases that a process calls one after the other, by the names of the calls.

    Args:
        case: The first case.
        steps: Differences of lengths, of which the first is taken for the new length.

    Example:
        >>> for name, case in calls_of(Case("softmax", (1024, 1000), 1, "float32")).items():
        ...     print(f"{name}: {case}")
        first: 1024x1000
        again: 1024x1000
        new rows: 512x1000
        new length: 1024x1008
        other length: 1024x4000
    """
    rows = next((i for i, size in enumerate(case.shape) if i != case.dim and size > 1), None)
    cols = case.shape[case.dim]
    found = {"first": case, "again": case}
    if rows is not None:
        found["new rows"] = _with_size(case, rows, case.shape[rows] // 2)
    return found | {
        "new length": _with_size(case, case.dim, cols + steps[0]),
        "other length": _with_size(case, case.dim, 4 * cols),
    }


def _with_size(case: Case, axis: int, size: int) -> Case:
    return replace(case, shape=tuple(size if i == axis else old for i, old in enumerate(case.shape)))


def _measure(case: Case, peer: Peer, device: Any, count: int) -> list[Result]:
    """The results of one library: with empty caches, and with those that its first process has filled."""
    if reason := peer.supports(case):
        return [Result(peer.name, "refused", reason)]
    plan, calls, analysis = None, calls_of(case), list[str]()
    if isinstance(peer, Ours):
        found_plan = _plan(case, peer, device)
        if isinstance(found_plan, PlanError):
            return [refusal(peer, None, found_plan)]
        plan = found_plan
        calls, analysis = _planned_calls(case, plan, peer, device)
    samples: dict[str, list[dict[str, float]]] = {EMPTY: [], FILLED: []}
    for _ in range(count):
        with tempfile.TemporaryDirectory(prefix="onlinesoftmax-cold-") as folder:
            for state, found in samples.items():
                answer = _answer(peer, calls, device, Path(folder))
                if result := _without_times(peer, state, answer):
                    return [result]
                found.append(answer["times"])
    analysis += [f"{name}: {reason}" for name, reason in answer["notes"].items()]
    return [
        Result(
            peer.name, "ok", None, answer["error"], answer["allowed"], plan, analysis="; ".join(analysis), state=state,
            # A library may refuse a later call in some processes.
            calls={n: Times.of([each[n] for each in found]) for n in found[0] if all(n in each for each in found)},
        )
        for state, found in samples.items()
    ]  # fmt: skip


def _without_times(peer: Peer, state: str, answer: Mapping[str, Any]) -> Result | None:
    """The result of a process whose times do not count; None where they count."""
    if answer.get("wrong"):
        return Result(peer.name, "wrong", answer["wrong"], answer["error"], answer["allowed"], state=state)
    if isinstance(peer, Ours) and answer.get("notes"):
        # Our own crash fails the run; whatever another library raises is its refusal.
        name, reason = next(iter(answer["notes"].items()))
        return Result(peer.name, "failed", f"{name}: {reason}", state=state)
    if "failure" in answer:
        return Result(peer.name, "failed" if isinstance(peer, Ours) else "refused", answer["failure"], state=state)
    return None


def _planned_calls(case: Case, plan: Plan, ours: Ours, device: Any) -> tuple[dict[str, Case], list[str]]:
    """The calls that can be planned, with a length that the same kernel serves if there is one, and notes."""
    dim, notes = case.dim, []
    cols = case.shape[dim]
    steps = [step for step in STEPS if cols + step > 0]
    same = [step for step in steps if _same(plan, _plan(_with_size(case, dim, cols + step), ours, device))]
    calls = calls_of(case, same or steps)
    if plan.backend != "eager":
        notes.append(f"new length {calls['new length'].shape[dim]}: {'the same' if same else 'another'} kernel")
    for name, each in list(calls.items()):
        if isinstance(_plan(each, ours, device), PlanError):
            # A forced plan need not fit every shape.
            notes.append(f"{name}: cannot run {each}")
            del calls[name]
    return calls, notes


def _plan(case: Case, ours: Ours, device: Any) -> Plan | PlanError:
    """Our plan, from tensors without values, or the reason why there is none."""
    dtypes = [getattr(torch, case.dtype_of(name)) for name in case.tensors]
    sizes = map(case.shape_of, case.tensors)
    inputs = tuple(torch.empty(size, dtype=t, device=device) for size, t in zip(sizes, dtypes, strict=True))
    try:
        return planned(case, inputs, ours).plan
    except PlanError as error:
        return error


def _same(one: Plan, other: Plan | PlanError) -> bool:
    """True where one compiled kernel serves both."""
    names = "backend", "strategy", "blocks"
    return isinstance(other, Plan) and all(getattr(one, name) == getattr(other, name) for name in names)


def _answer(peer: Peer, calls: Mapping[str, Case], device: Any, folder: Path) -> dict[str, Any]:
    """The answer of a fresh process, whose caches are in `folder`."""
    answer, ours = folder / "answer.json", peer
    answer.unlink(missing_ok=True)
    if isinstance(peer, Compiled):
        # The default of torch.compile: a second shape compiles for every further shape.
        peer.dynamic = None
    if not peer.ours:
        ours = (Ours if peer.in_torch else OursInJax)(device.type)
    request = {
        "in_jax": not peer.in_torch, "module": peer.module, "function": next(iter(calls.values())).operation,
        "device": str(device), "parent": os.getpid(), "answer": str(answer),
        "work": pickle.dumps((peer, ours, calls)).hex(),
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("cold_worker.py")), json.dumps(request)]
    try:
        done = subprocess.run(
            command, env=_environment(folder), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"the process took more than {TIMEOUT_S} seconds"}
    if done.returncode == 0 and answer.is_file():
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
    lines = done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"]
    return {"failure": lines[-1].strip()[:LONGEST_REASON]}


def _environment(folder: Path) -> dict[str, str]:
    """The environment of a process: its caches are in `folder`, with this machine's measured tables in ours."""
    folders = {name: folder / name.lower() for name in FOLDERS}
    for path in folders.values():
        path.mkdir(mode=0o700, exist_ok=True)
    for path in cache_folder().glob("*.json"):
        # A table that the planner would not read here is not made one that it reads there.
        with suppress(UnusableError):
            if table := read_private(path.name):
                write_whole(folders["ONLINESOFTMAX_CACHE"] / path.name, table, 0o600)
    # The package that runs is the one to measure, however it was found.
    places = [str(Path(onlinesoftmax.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    # By default JAX keeps no programs.
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    inherited |= {name: str(path) for name, path in folders.items()}
    return {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, places))}
