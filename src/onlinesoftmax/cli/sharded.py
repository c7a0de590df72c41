"""`onlinesoftmax bench --suite distributed`: rows that are sharded over the processes that torchrun has started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ..bench.cases import known, parse_shape
from ..bench.suites import SUITES, cases
from . import output
from .benchmarks import check_plan_names, split_names, without_folder, write_record

if TYPE_CHECKING:
    from ..bench.cases import Case
    from ..bench.sharded.result import ShardedCaseResult
    from ..bench.sharded.team import Team

COMMAND = "torchrun --nproc-per-node 2 -m onlinesoftmax bench --suite distributed"


def measure_sharded(options: dict[str, Any]) -> NoReturn:
    """Measure the suite in all processes; process 0 prints and writes for all.

    Args:
        options: The options of `onlinesoftmax bench` by name.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        output.fail(f"--suite distributed measures several processes; start it with: {COMMAND}")
    import torch.distributed as dist

    from ..bench.sharded.peers import PEERS, OursSharded
    from ..bench.sharded.run import run
    from ..bench.sharded.team import Team

    todo, asked = _checked(options, list(PEERS))
    team = Team.begin(_device_type(options["device"]))
    results: list[ShardedCaseResult] = []
    try:
        ours = OursSharded(team, options["backend"], options["strategy"])
        repeat_ms = options["repeat"] or SUITES["distributed"].repeat_ms
        record = _record(team, {**options, "repeat": repeat_ms, "peers": ",".join(asked)})
        for found in run(todo, [ours, *(PEERS[name](team) for name in asked)], team, repeat_ms):
            results.append(found)
            record["cases"].append(found.as_dict())
            if not team.rank:
                # Written after every case, so that a run that is killed leaves its results.
                write_record(options["out"], record)
        if not team.rank:
            _show(results, record, options["as_json"])
        # torchrun ends all processes when the first one ends with an error, and process 0 must print before.
        team.largest(0.0)
    finally:
        dist.destroy_process_group()
    raise typer.Exit(int(any(result.failed for found in results for result in found.results)))


def _checked(options: dict[str, Any], known_peers: list[str]) -> tuple[list[Case], list[str]]:
    """The cases, and the names of the peers."""
    for name in ("host", "fused"):
        if options[name]:
            output.fail(f"--{name} does not go with --suite distributed; leave it out")
    if options["framework"] != "torch":
        output.fail(f"--suite distributed measures PyTorch; leave out --framework {options['framework']}")
    asked = known_peers if options["peers"] is None else split_names(options["peers"])
    try:
        shapes = [parse_shape(text) for text in options["shape"] or []]
        todo = cases(
            "distributed", options["op"] or [], shapes, options["dim"], options["dtype"] or [],
            with_gradient=options["with_gradient"], reduction=options["reduction"],
        )  # fmt: skip
        known("peer", asked, known_peers)
        check_plan_names(options["backend"], options["strategy"], "torch")
    except ValueError as error:
        output.fail(error)
    return todo, list(dict.fromkeys(asked))


def _device_type(name: str | None) -> str:
    """The type of the device, cpu or cuda; torchrun gives each process its GPU."""
    import torch

    gpus = torch.cuda.device_count()
    if name not in (None, "cpu", "cuda"):
        output.fail(
            f"--device {name}: with --suite distributed it is cpu or cuda, and each process has a GPU of its own"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if name == "cuda" and gpus < local:
        output.fail(f"--device cuda: {local} processes need as many GPUs, and torch sees {gpus or 'no GPU'}")
    return name or ("cuda" if gpus >= local else "cpu")


def _record(team: Team, options: dict[str, Any]) -> dict[str, Any]:
    import torch

    from ..bench import report

    told = options | {"out": without_folder(options["out"]), "device": str(team.device)}
    processes = {"count": team.size, "backend": torch.distributed.get_backend(team.group)}
    if team.device.type == "cuda":
        processes["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {**report.record(team.device, told, {}, options["commit"]), "processes": processes}


def _show(results: list[ShardedCaseResult], record: dict[str, Any], as_json: bool) -> None:
    from ..bench import report
    from ..bench.sharded import result

    if as_json:
        output.print_json(record)
        return
    for line in (*report.above(record), *result.above(record)):
        output.note(line)
    output.table(result.HEADER, result.table(results), right=result.NUMBERS)
    for line in result.below(results):
        output.note(line)
