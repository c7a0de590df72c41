"""`onlinesoftmax bench --suite distributed`: rows that are sharded over the processes that torchrun has started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ..lab.names import check_names
from . import benchmarks, output
from .torchrun import joining, processes

if TYPE_CHECKING:
    from ..lab.bench.cases import Case
    from ..lab.bench.resume import Recording
    from ..lab.bench.sharded.team import Team
    from ..lab.bench.suites import Suite

COMMAND = "torchrun --nproc-per-node 2 -m onlinesoftmax bench --suite distributed"


def measure_sharded(options: dict[str, Any], suite: Suite) -> NoReturn:
    """Measure the suite in all processes; process 0 prints and writes for all.

    Args:
        options: The options of `onlinesoftmax bench` by name.
        suite: The suite, as it is or with the few cases of --quick.
    """
    if processes() < 2:
        output.fail(f"--suite distributed measures several processes; start it with: {COMMAND}")
    import torch.distributed as dist

    from ..lab.bench.sharded.peers import PEERS, OursSharded
    from ..lab.bench.sharded.run import run
    from ..lab.bench.sharded.team import Team

    with output.refusing():
        asked = list(PEERS) if options["peers"] is None else benchmarks.split_names(options["peers"])
        check_names("peer", asked, PEERS)
        todo = benchmarks.todo_of(suite, options)
    asked = list(dict.fromkeys(asked))
    kind = _device_type(options["device"])
    with joining():
        team = Team.begin(kind)
    try:
        ours = OursSharded(team, options["backend"], options["strategy"])
        everybody = [ours, *(PEERS[name](team) for name in asked)]
        repeat_ms = options["repeat"] or suite.repeat_ms
        options |= {"repeat": repeat_ms, "peers": ",".join(asked), "device": str(team.device)}
        recording = _begun(team, options, suite, todo)
        benchmarks.measure(
            recording, lambda left: run(left, everybody, team, repeat_ms), options["out"], leader=not team.rank
        )
        if not team.rank:
            benchmarks.show(recording, options["as_json"])
        # torchrun ends all processes when the first one ends with an error, and process 0 must print before.
        team.largest(0.0)
    finally:
        dist.destroy_process_group()
    raise typer.Exit(int(benchmarks.failed(recording)))


def _begun(team: Team, options: dict[str, Any], suite: Suite, todo: list[Case]) -> Recording:
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
            found[0] = benchmarks.begun(team.device, options, suite, todo, {}, processes=processes)
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
            f"--device {name}: with --suite distributed it is cpu or cuda, and each process has a GPU of its own"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if name != "cpu" and gpus < local:
        output.fail(
            f"--device cuda, the default: {local} processes need as many GPUs, and torch sees {gpus or 'no GPU'}; "
            "--device cpu measures them over gloo"
        )
    return name or "cuda"
