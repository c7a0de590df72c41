"""`onlinesoftmax bench`: check and time our functions and other libraries, beside a copy of the same size."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..bench.cases import MEASURED
from ..core.options import SCORE_OPTIONS
from ..core.task import ITEMSIZE
from . import output
from .benchmarks import check_plan_names, split_names, without_folder, write_record

if TYPE_CHECKING:
    from ..bench.result import CaseResult


def bench(
    suite: str | None = typer.Option(
        None,
        help="quick, default, full, gradients, fused, cross-entropy, token-logprobs, read-only, cpu, or distributed "
        "under torchrun.  By default: default on a GPU, cpu on a CPU.",
    ),
    quick: bool = typer.Option(False, "--quick", help="The same as --suite quick."),
    shape: list[str] | None = typer.Option(
        None, help="A shape instead of the suite's, as 4096x50257 or 1x2^24; repeat for more."
    ),
    dim: int | None = typer.Option(None, help="The softmax dimension of --shape; by default the last."),
    dtype: list[str] | None = typer.Option(None, help=f"{', '.join(ITEMSIZE)}; repeat for more."),
    op: list[str] | None = typer.Option(
        None,
        help=f"{', '.join(MEASURED)}; repeat for more.  By default the suite's operations, mostly softmax.",
    ),
    fused: str = typer.Option("", help=f"Score options, with commas between them: {', '.join(SCORE_OPTIONS)}."),
    with_gradient: bool = typer.Option(
        False, "--with-gradient", help="Measure the forward call and its gradient, through autograd."
    ),
    reduction: str = typer.Option("", help="Reduction of a loss: mean or none.  By default the suite's, mostly mean."),
    framework: str = typer.Option("torch", help="Measure our functions for torch or for jax."),
    backend: str | None = typer.Option(None, help="Force a backend of ours."),
    strategy: str | None = typer.Option(None, help="Force a strategy of ours."),
    peers: str | None = typer.Option(
        None,
        help="Libraries to compare, with commas between them: torch, compile, liger, quack; with --framework jax, "
        "jax.nn and torch; with --suite distributed, dtensor, loss-parallel, all-gather and one-process.  By default "
        "torch, jax.nn, or all four.",
    ),
    device: str | None = typer.Option(None, help="cpu, cuda or cuda:1; by default the GPU where there is one."),
    repeat: int | None = typer.Option(None, min=1, help="Milliseconds for each measurement; by default the suite's."),
    host: bool = typer.Option(False, "--host", help="Also measure the host time of one small call."),
    out: Path | None = typer.Option(None, help="Write the record to this JSON file."),
    commit: str | None = typer.Option(
        None, help="The commit to record, where the sources were copied without their history."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the record as one JSON document."),
) -> None:
    """Measure our functions beside a copy of the same size and beside other libraries.

    Every result is checked against float64 first.  A wrong result gets no time, and the exit code is 1; a slow one
    does not change the exit code.  GB/s counts every tensor that must be read or written once: input and result, for
    the gradient of softmax y, dy and dx, and a mask and a bias too.  A scalar loss with its gradient reads the logits
    once and writes the gradient once; losses of rows with their gradient read the logits twice.  "of copy" is that
    bandwidth over the bandwidth of the copy in the same run, so 100% is the floor.

    Example: onlinesoftmax bench --shape 4096x50257 --dtype bfloat16 --peers torch,compile
    """
    options = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    if importlib.util.find_spec("torch") is None:
        output.fail("bench needs torch, which is not installed: pip install 'onlinesoftmax[torch]'")
    from ..bench import libraries
    from ..bench.cases import parse_shape
    from ..bench.suites import SUITES, cases

    if host and framework != "torch":
        output.fail(f"--host measures calls of PyTorch; leave it out, or --framework {framework}")
    if quick and suite not in (None, "quick"):
        output.fail(f"--quick and --suite {suite} contradict each other")
    if out is not None and out.is_dir():
        output.fail(f"--out {out} is a folder; name a file")
    if suite == "distributed":
        from .sharded import measure_sharded

        measure_sharded(options)
    where = torch_device(device)
    suite = "quick" if quick else suite or ("default" if where.type == "cuda" else "cpu")
    try:
        shapes = [parse_shape(text) for text in shape or []]
        todo = cases(suite, op or [], shapes, dim, dtype or [], split_names(fused), with_gradient, reduction)
        ours, known = _sides(framework)
        names = peers if peers is not None else next(iter(known))
        asked = libraries.peers(split_names(names), where.type, known)
        check_plan_names(backend, strategy, framework)
    except ValueError as error:
        output.fail(error)
    us = ours(where.type, backend, strategy)
    if reason := us.why_absent():
        output.fail(f"--framework {framework}: {reason}")
    absent = {peer.name: reason for peer in asked if (reason := peer.why_absent())}
    everybody = [us, *(peer for peer in asked if peer.name not in absent)]
    options |= {
        "suite": suite, "repeat": repeat or SUITES[suite].repeat_ms, "device": str(where), "peers": names,
    }  # fmt: skip
    results, record = _measure(todo, everybody, where, options, absent)
    if as_json:
        output.print_json(record)
    else:
        _show(results, record)
    if results and all(_ours_refused(found) for found in results):
        who = "the forced plan" if backend or strategy else "onlinesoftmax"
        output.fail(f"{who} can run none of these cases: {results[0].results[0].reason}")
    raise typer.Exit(int(any(result.failed for found in results for result in found.results)))


def _sides(framework: str) -> tuple[type[Any], dict[str, Any]]:
    """Our library for a framework, and the other libraries by name."""
    from ..bench.libraries import PEERS
    from ..bench.peers import Ours, Torch

    if framework == "torch":
        return Ours, PEERS
    if framework != "jax":
        raise ValueError(f"unknown framework {framework!r}; there are: torch, jax")
    from ..bench.arrays import JaxNN, OursInJax

    return OursInJax, {"jax.nn": JaxNN, "torch": Torch}


def _measure(
    todo: list[Any], everybody: list[Any], device: Any, options: dict[str, Any], absent: dict[str, str]
) -> tuple[list[CaseResult], dict[str, Any]]:
    from ..bench import report
    from ..bench.host import host_times
    from ..bench.run import clock_of, run

    results: list[CaseResult] = []
    told = options | {"out": without_folder(options["out"])}
    record = report.record(device, told, absent, options["commit"])
    clock = clock_of(everybody, device)
    with output.progress_bar() as bar:
        task = bar.add_task("measuring", total=len(todo)) if bar else None
        for found in run(todo, everybody, device, options["repeat"], clock):
            results.append(found)
            record["cases"].append(found.as_dict())
            # Written after every case, so that a run that is killed leaves its results.
            write_record(options["out"], record)
            if bar and task is not None:
                bar.advance(task)
    if options["host"]:
        record["host"] = host_times(device, clock, options["repeat"])
        write_record(options["out"], record)
    return results, record


def _show(results: list[CaseResult], record: dict[str, Any]) -> None:
    from ..bench import report

    for line in report.above(record):
        output.note(line)
    output.table(*report.table(results, record["absent"]), right=report.NUMBERS)
    for line in report.below(results, record):
        output.note(line)


def _ours_refused(found: CaseResult) -> bool:
    return any(result.who == "ours" and result.status == "refused" for result in found.results)


def torch_device(name: str | None) -> Any:
    """The torch device of this name; by default the GPU where there is one."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        output.fail(f"unknown device {name!r}; there are: cpu, cuda, cuda:1, …")
    if device.type not in ("cuda", "cpu"):
        output.fail(f"--device {name}: only cpu and cuda can be measured")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        output.fail(f"--device {name}: torch sees {count or 'no'} NVIDIA GPU{'s' if count > 1 else ''} here")
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device
