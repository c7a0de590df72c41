"""The record of a run: its head before the first case, its cases while it grows, and its file, always complete."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from ... import __version__
from ...core.device import KNOWN, model_of
from ...core.whole_files import NotRegularError, read_regular, write_whole
from ...torch.device import from_torch
from .cases import Case
from .heads.peers import HEAD_PEERS
from .heads.step_peers import STEP_PEERS
from .libraries import PEERS
from .result import CaseResult
from .routing.peers import GATE_PEERS
from .sampling.peers import TOKEN_PEERS
from .tables import read_cases

FORMAT = 1
"""Version of the record's format; it is raised when a key changes its meaning."""

BUILT = Path(__file__).parents[2] / "commit.txt"
"""The commit that an archive of this package was built from; no checkout has this file."""

OTHER_CASES = ("quick", "shape", "op", "fused", "with_gradient", "reduction", "strategy")
"""Options that make other cases than those of the suite; with one of these, the user names the file."""


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
        A dictionary with an empty list "cases", for `CaseResult.as_dict()`.  The caller adds "measures", the kind of
        its results (`tables.py`).
    """
    return {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git": {**git_state(commit), "sources": sources()},
        "versions": versions(),
        "device": device_facts(device),
        "options": dict(options),
        "absent": dict(absent),
        "cases": [],
    }


def git_state(commit: str | None = None) -> dict[str, Any]:
    """The commit that is given, of this checkout, or of the archive; "dirty" where the sources differ from it."""
    if commit is not None:
        return {"commit": commit, "dirty": None}
    here = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        # Without a lock, so that a commit at the same time does not fail.
        command = ["git", "--no-optional-locks", "-C", str(here), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    # A package in a virtual environment inside another project does not belong to that project's commits.
    if shutil.which("git") is None or git("ls-files", "--error-unmatch", "__init__.py") is None:
        words = BUILT.read_text(encoding="utf-8").split() if BUILT.is_file() else []
        return {"commit": words[0], "dirty": "dirty" in words} if words else {"commit": "unknown", "dirty": None}
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}


@cache
def sources() -> str:
    """A digest of every module, kernel and table of this package, which tells changes that are in no commit."""
    root, total = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*")):
        # An archive has records, too, which the package only shows.
        if path.suffix in (".py", ".cuh", ".json") and path.parent.name != "shipped":
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


def versions() -> dict[str, str | None]:
    """Versions of Python and of every package that matters; None for a package that is not installed."""
    names = ["torch", "triton", "numpy", "cuda-core", "jax", "jaxlib", "megatron-core"]
    others = [*PEERS.values(), *HEAD_PEERS.values(), *TOKEN_PEERS.values(), *GATE_PEERS.values(), *STEP_PEERS.values()]
    names += [peer.distribution for peer in others if peer.distribution]
    return {"python": platform.python_version(), "onlinesoftmax": __version__, **versions_of(dict.fromkeys(names))}


def versions_of(packages: Iterable[str]) -> dict[str, str | None]:
    """Versions of packages; None for a package that is not installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def device_facts(device: Any) -> dict[str, Any]:
    """The device as the planner knows it, with its driver or its processor."""
    import torch

    facts: dict[str, Any] = {"torch_device": str(device), **vars(from_torch(device.type, device.index or 0))}
    if device.type == "cuda":
        return {**facts, "driver": _driver(), "cuda": torch.version.cuda}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {**facts, "processor": processor(), "threads": torch.get_num_threads(), "load": load}


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def processor() -> str:
    """The model of the processor."""
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


def device_slug(name: str) -> str:
    """A device's name in a file name.

    Example:
        >>> device_slug("NVIDIA H100 80GB HBM3"), device_slug("CPU"), device_slug("NVIDIA H20")
        ('h100', 'cpu', 'nvidia-h20')
    """
    found = model_of(name)
    words = name.lower().split()
    return next((key for key, device in KNOWN.items() if device is found), "-".join(words))


def record_name(content: Mapping[str, Any]) -> str:
    """The file name of a record: DEVICE-SUITE.json.

    The framework or a forced backend stands before the suite, and the number of GPUs behind the device.

    Example:
        >>> options = {"suite": "gradients", "framework": "jax", "backend": None}
        >>> record_name({"device": {"name": "NVIDIA H200"}, "options": options})
        'h200-jax-gradients.json'
    """
    options = content["options"]
    device = device_slug(content["device"]["name"])
    count = content.get("processes", {}).get("count", 1)
    words = [device if count == 1 else f"{device}x{count}"]
    if options.get("framework", "torch") != "torch":
        words.append(options["framework"])
    if options.get("backend"):
        words.append(options["backend"])
    # The suite cpu on a CPU is cpu.json.
    return "-".join(dict.fromkeys([*words, options["suite"]])) + ".json"


def excluded(options: Mapping[str, Any]) -> str | None:
    """The first option that makes other cases than those of the suite, as on the command line; None without one.

    Example:
        >>> excluded({"with_gradient": True}), excluded({"shape": None})
        ('--with-gradient', None)
    """
    return next((f"--{name.replace('_', '-')}" for name in OTHER_CASES if options.get(name)), None)


IGNORED = ("date", "cases", "resumed", "device.load", "options.out", "options.commit", "options.as_json")
"""Fields that may differ between the two parts of a record: the others must be the same."""


class ResumeError(ValueError):
    """A record cannot be continued; the message names the field."""


@dataclass
class Recording:
    """A record in the making.

    Attributes:
        content: The record: JSON that is complete after every case.
        todo: Every case of the run, in the order of the record.
        results: The results so far, by their cases.
    """

    content: dict[str, Any]
    todo: Sequence[Case]
    results: dict[Case, CaseResult] = field(default_factory=dict)

    @property
    def left(self) -> list[Case]:
        """The cases to measure, those that were skipped included: there may be more memory now."""
        return [case for case in self.todo if case not in self.results or self.results[case].skipped]

    @property
    def found(self) -> list[CaseResult]:
        """The results so far, in the order of the record."""
        return [self.results[case] for case in self.todo if case in self.results]

    def add(self, *results: CaseResult) -> None:
        """Put the results of cases into the record."""
        self.results |= {result.case: result for result in results}
        self.content["cases"] = [result.as_dict() for result in self.found]

    def resume(self, old: Mapping[str, Any]) -> None:
        """Keep the results of an earlier record of the same run.

        Raises:
            ResumeError: the earlier record is of another run: the message names the first field that differs.
        """
        new = json.loads(json.dumps(self.content))
        for name, here, there in _differences(new, old):
            raise ResumeError(f"field {name}: the file has {there}, and this run has {here}")
        try:
            self.add(*(result for result in read_cases(old) if result.case in self.todo))
        except ValueError as error:
            raise ResumeError(str(error)) from None
        # A complete record stays as it is.
        earlier, now = old.get("resumed", []), [self.content["date"]] if self.left else []
        if earlier or now:
            self.content["resumed"] = [*earlier, *now]
        self.content["date"] = old["date"]


def load(path: Path) -> dict[str, Any]:
    """The document in a file.

    Raises:
        ResumeError: it cannot be read, or it is no record of `onlinesoftmax bench`.
    """
    try:
        content = json.loads(read_regular(path))
    except NotRegularError as error:
        raise ResumeError(f"it {error.strerror}") from None
    except OSError as error:
        raise ResumeError(f"it cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ResumeError(f"it is no JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("cases"), list):
        raise ResumeError("it is no record of onlinesoftmax bench")
    resumed = content.get("resumed", [])
    if not isinstance(resumed, list) or not all(isinstance(date, str) for date in [content.get("date"), *resumed]):
        raise ResumeError("it is no record of onlinesoftmax bench")
    return content


def _differences(new: Any, old: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """(field, value in the new record, value in the old one) of every field that differs and must not."""
    if name in IGNORED or new == old:
        return
    if not isinstance(new, dict) or not isinstance(old, dict):
        yield name, json.dumps(new), json.dumps(old)
        return
    for key in dict.fromkeys([*new, *old]):
        path = f"{name}.{key}" if name else key
        if path in IGNORED:
            continue
        if key not in new or key not in old:
            here, there = ("nothing" if key not in each else json.dumps(each[key]) for each in (new, old))
            yield path, here, there
        else:
            yield from _differences(new[key], old[key], path)
