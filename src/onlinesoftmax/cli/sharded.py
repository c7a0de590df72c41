"""The processes that torchrun has started, and the suites of `onlinesoftmax bench` that measure them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ..lab.names import check_names
from . import bench_steps, output
from .options import split_names

if TYPE_CHECKING:
    from ..lab.bench.cases import Case
    from ..lab.bench.entries import Suite
    from ..lab.bench.record_file import Recording
    from ..lab.bench.sharded.team import Team

NEEDED = ("MASTER_ADDR", "MASTER_PORT")
"""The variables, besides WORLD_SIZE and RANK, with which the processes find each other."""


def processes() -> int:
    """Number of processes that share the work; 1 without WORLD_SIZE.

    A variable that is wrong or missing ends the command with a sentence.
    """
    size = _number("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1
    if size < 2:
        return 1
    if "RANK" not in os.environ:
        output.fail(f"WORLD_SIZE={size} is set, and RANK is not: start the processes with torchrun")
    rank = _number("RANK")
    if rank >= size:
        output.fail(f"RANK={rank} and WORLD_SIZE={size} are set: a rank is less than the number of processes")
    for name in NEEDED:
        if name not in os.environ:
            output.fail(f"WORLD_SIZE and RANK are set, and {name} is not: start the processes with torchrun")
    return size


@contextmanager
def joining() -> Iterator[None]:
    """End the command with a sentence if the processes do not find each other in the block."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        output.fail(f"the processes that torchrun has started cannot form a group: {reason}")


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        output.fail(f"{name}={text!r} is set, and is no number: torchrun sets it, one process does not need it")
    return int(text)


COMMAND = "torchrun --nproc-per-node 2 -m onlinesoftmax bench --suite"


def measure_sharded(options: dict[str, Any], suite: Suite) -> NoReturn:
    """Measure the suite in all processes; process 0 prints and writes for all.

    Args:
        options: The options of `onlinesoftmax bench` by name.
        suite: The suite, as it is or with the few cases of --quick.
    """
    name = options["suite"]
    if processes() < 2:
        output.fail(f"--suite {name} measures several processes; start it with: {COMMAND} {name}")
    import torch.distributed as dist

    from ..lab.bench.sharded import heads, libraries, measure, peers
    from ..lab.bench.sharded.team import Team

    of_heads = suite.measures == "head time"
    known: dict[str, Any] = heads.PEERS if of_heads else peers.PEERS | libraries.PEERS
    with output.refusing():
        asked = list(known) if options["peers"] is None else split_names(options["peers"])
        check_names("peer", asked, known)
        todo = bench_steps.todo_of(suite, options)
    asked = list(dict.fromkeys(asked))
    kind = _device_type(options["device"])
    with joining():
        team = Team.begin(kind)
    try:
        forced = options["backend"], options["strategy"]
        ours = heads.ShardedHead(team) if of_heads else peers.OursSharded(team, *forced)
        others = [known[name](team) for name in asked]
        absent = {peer.name: reason for peer in others if (reason := peer.why_absent())}
        everybody = [ours, *(peer for peer in others if peer.name not in absent)]
        repeat_ms = options["repeat"] or suite.repeat_ms
        options |= {"repeat": repeat_ms, "peers": ",".join(asked), "device": str(team.device)}
        recording = _begun(team, options, suite, todo, absent)
        steps = partial(measure.run, everybody=everybody, team=team, repeat_ms=repeat_ms, measures=suite.measures)
        bench_steps.measure(recording, steps, options["out"], leader=not team.rank)
        if not team.rank:
            bench_steps.show(recording, options["as_json"])
        # torchrun ends all processes when the first one ends with an error, and process 0 must print before.
        team.largest(0.0)
    finally:
        dist.destroy_process_group()
    raise typer.Exit(int(bench_steps.failed(recording)))


def _begun(team: Team, options: dict[str, Any], suite: Suite, todo: list[Case], absent: dict[str, str]) -> Recording:
    """The record in the making, with the cases that process 0 finds in its file."""
    import torch
    import torch.distributed as dist

    processes = {"count": team.size, "backend": dist.get_backend(team.group)}
    if team.device.type == "cuda":
        processes["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    # The devices of the processes have other numbers, so all continue what process 0 has found.
    found: list[Any] = [None, None]
    if not team.rank:
        try:
            found[0] = bench_steps.begun(team.device, options, suite, todo, absent, processes=processes)
        except ValueError as error:
            found[0] = str(error)
        found[1] = options["out"]
    dist.broadcast_object_list(found, group=team.group, device=team.device)
    begun_or_reason, options["out"] = found
    if isinstance(begun_or_reason, str):
        output.fail(begun_or_reason)
    return begun_or_reason


def _device_type(name: str | None) -> str:
    """The type of the device, cpu or cuda; torchrun gives each process its GPU."""
    import torch

    gpus = torch.cuda.device_count()
    if name not in (None, "cpu", "cuda"):
        output.fail(
            f"--device {name}: with processes of torchrun it is cpu or cuda, and each process has a GPU of its own"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if name != "cpu" and gpus < local:
        output.fail(
            f"--device cuda, the default: {local} processes need as many GPUs, and torch sees {gpus or 'no GPU'}; "
            "--device cpu measures them over gloo"
        )
    return name or "cuda"
