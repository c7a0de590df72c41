"""`onlinesoftmax bench`: check and time our functions and other libraries, beside a copy of the same size."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ..core.options import SCORE_OPTIONS
from ..lab.bench.cases import MEASURED
from ..lab.bench.heads.peers import HEAD_PEERS
from ..lab.bench.heads.step_peers import STEP_PEERS
from ..lab.bench.routing.peers import GATE_PEERS
from ..lab.bench.sampling.peers import TOKEN_PEERS
from ..lab.bench.suites import DISTRIBUTED, SUITES, suite_of
from ..lab.names import check_names
from . import bench_steps, output
from .options import BACKENDS, DTYPES, FRAMEWORKS, STRATEGIES, named, split_names

if TYPE_CHECKING:
    from ..lab.bench.cases import Case
    from ..lab.bench.entries import Suite
    from ..lab.bench.result import CaseResult


def bench(
    suite: str | None = named(
        "suite",
        SUITES,
        help=f"{', '.join(SUITES)}.  By default forward on a GPU, cpu on a CPU.  {' and '.join(DISTRIBUTED)} run under "
        "torchrun.",
    ),
    quick: bool = typer.Option(False, "--quick", help="A few small cases of the suite, and short repeats."),
    shape: list[str] | None = typer.Option(None, help="Instead of the suite's, as 4096x50257 or 1x2^24; repeatable."),
    dim: int | None = typer.Option(None, help="The softmax dimension of --shape; by default the last."),
    dtype: list[str] | None = named("dtype", DTYPES, help=f"{', '.join(DTYPES)}; repeatable."),
    op: list[str] | None = named(
        "operation", MEASURED, help=f"Instead of the suite's: {', '.join(MEASURED)}; repeatable."
    ),
    fused: str = named(
        "score option",
        SCORE_OPTIONS,
        "",
        help=f"Score options, with commas between them: {', '.join(SCORE_OPTIONS)}.",
        commas=True,
    ),
    with_gradient: bool = typer.Option(False, "--with-gradient", help="Measure calls and their gradients by autograd."),
    reduction: str = named(
        "reduction",
        ("", "mean", "none"),
        "",
        help="Reduction of a loss: mean or none.  By default the suite's, mostly mean.",
    ),
    framework: str = named("framework", FRAMEWORKS, "torch", help="Measure our functions for torch or for jax."),
    backend: str | None = named("backend", BACKENDS, help="Force a backend of ours."),
    strategy: str | None = named("strategy", STRATEGIES, help="Force a strategy of ours."),
    peers: str | None = typer.Option(
        None,
        help="Libraries to compare, with commas between them: torch, compile, liger, quack, flash-attn, "
        "transformer-engine, trl, jax; with --framework jax, jax and torch; with --suite distributed, without-shards, "
        "collective, dtensor, loss-parallel, all-gather, one-process, and the sharded losses of megatron, "
        "transformer-engine, flash-attn and liger; with distributed-heads, collective and one-process; with another "
        "suite of heads, "
        f"{', '.join(HEAD_PEERS)}; with sampling, topk and decoding, "
        f"{', '.join(TOKEN_PEERS)}; with route, {', '.join(GATE_PEERS)}; with training-step, "
        f"{', '.join(STEP_PEERS)}.  By default torch, jax, or all of those for several processes, heads, tokens, gates "
        "and steps.",
    ),
    device: str | None = typer.Option(None, help="cpu, cuda or cuda:1; by default the GPU where there is one."),
    repeat: int | None = typer.Option(None, min=1, help="Milliseconds for each measurement; by default the suite's."),
    out: Path | None = typer.Option(
        None,
        "--out",
        "-o",
        help="Write the record to this JSON file, after every case.  In a folder, the file is DEVICE-SUITE.json, as "
        "h200-forward.json, and replaces the record of an earlier run.",
    ),
    resume: bool = typer.Option(False, "--resume", help="Keep the cases that --out has from an interrupted run."),
    commit: str | None = typer.Option(None, help="The commit to record, if the sources have no history."),
    as_json: bool = typer.Option(False, "--json", help="Print the record as one JSON document."),
) -> None:
    """Measure our functions beside a copy of the same size and beside other libraries.

    Every result is checked against float64 first.  A wrong result gets no time; a library that cannot run a case is
    shown with its reason.  GB/s counts every tensor that must be read or written once: input and result, for
    the gradient of softmax y, dy and dx, and a mask and a bias too.  A scalar loss with its gradient reads the logits
    once and writes the gradient once; losses of rows with their gradient read the logits twice.  "of copy" is that
    bandwidth over the bandwidth of the copy in the same run, so 100% is the floor.  "of GPU" is the bandwidth over that
    of a large copy on this GPU.  --suite host measures the host time of calls, and --suite cold the first calls of
    fresh processes.  The suites linear-cross-entropy and linear-token-logprobs measure heads without logits, over the
    time of their three bare products; their shapes are tokens x hidden x classes.  The suites sampling and topk
    measure the way from logits to tokens over the time of one read of the logits; their shapes are rows x tokens.  The
    suite training-step measures steps of a decoder; its shapes are tokens x hidden x classes.  The suite decoding
    measures a step from tokens to the next ones; its shapes are rows x tokens.

    --resume needs a record of the same options, commit, sources, versions and device; the error names the field that
    differs.  The exit code is 0 where every result is right, whatever its speed and whoever cannot run it; 1 where a
    result of ours or of another library is wrong, or ours crashed; 2 for wrong input and where ours can run no case;
    130 after an interruption.

    \b
    Examples:
      onlinesoftmax bench --shape 4096x50257 --dtype bfloat16 --peers torch,compile
      onlinesoftmax bench --suite rows1024 --peers torch,compile,liger,quack,jax --out record.json --resume
      onlinesoftmax bench --suite gradients -o benchmarks/results
    """  # noqa: D301  \b is typer's mark for lines that it does not wrap
    options = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    if importlib.util.find_spec("torch") is None:
        output.fail("bench needs torch, which is not installed: pip install 'onlinesoftmax[torch]'")
    where = None if suite in DISTRIBUTED else torch_device(device)
    options["suite"] = suite or ("forward" if where is not None and where.type == "cuda" else "cpu")
    with output.refusing():
        chosen = suite_of(options["suite"], quick)
        bench_steps.check_options(chosen, options)
    if where is None:
        from .sharded import measure_sharded

        measure_sharded(options, chosen)
    _measure(options, chosen, where)


def _measure(options: dict[str, Any], suite: Suite, where: Any) -> NoReturn:
    """Measure the suite in this process, and end the command."""
    from ..lab.bench.kinds import KINDS
    from ..lab.bench.libraries import peers

    framework, forced = options["framework"], (options["backend"], options["strategy"])
    with output.refusing():
        whole = KINDS.get(suite.measures)
        ours, known = whole[:2] if whole else _sides(framework)
        usual = ",".join(known) if whole else next(iter(known))
        names = options["peers"] if options["peers"] is not None else usual
        asked = peers(split_names(names), where.type, known)
        todo = bench_steps.todo_of(suite, options)
    # Suites of heads and of tokens exclude a forced plan.
    us = ours(where.type, *(forced if any(forced) else ()))
    if reason := us.why_absent():
        output.fail(f"--framework {framework}: {reason}")
    absent = {peer.name: reason for peer in asked if (reason := peer.why_absent())}
    everybody = [us, *(peer for peer in asked if peer.name not in absent)]
    options |= {"repeat": options["repeat"] or suite.repeat_ms, "device": str(where), "peers": names}
    with output.refusing():
        recording = bench_steps.begun(where, options, suite, todo, absent)
    bench_steps.measure(recording, partial(_steps, suite, everybody, where, options), options["out"])
    bench_steps.show(recording, options["as_json"])
    found = recording.found
    if found and all(each.skipped for each in found):
        output.fail(f"no case was measured; the first was skipped: {found[0].skipped}")
    if found and all(any(r.who == "ours" and r.status == "refused" for r in each.results) for each in found):
        who = "the forced plan" if any(forced) else "onlinesoftmax"
        output.fail(f"{who} can run none of these cases: {found[0].results[0].reason}")
    raise typer.Exit(int(bench_steps.failed(recording)))


def _steps(
    suite: Suite, everybody: list[Any], where: Any, options: dict[str, Any], left: list[Case]
) -> Iterable[CaseResult]:
    """Measure cases in the way of the suite."""
    from ..lab.bench import cold_suite, host_times, measure
    from ..lab.bench.kinds import KINDS, run_kind

    if suite.measures in KINDS:
        return run_kind(suite.measures, left, everybody, where, options["repeat"])
    if suite.measures == "first calls":
        return cold_suite.run_cold(left, everybody, where, options["quick"])
    steps = host_times.run_host if suite.measures == "host time" else measure.run
    return steps(left, everybody, where, options["repeat"])


def _sides(framework: str) -> tuple[type[Any], dict[str, Any]]:
    """Our library for a framework, and the other libraries by name."""
    from ..lab.bench.jax_peers import JaxNN, OursInJax
    from ..lab.bench.libraries import PEERS
    from ..lab.bench.peers import Ours, Torch

    sides: dict[str, tuple[type[Any], dict[str, Any]]] = {
        "torch": (Ours, {**PEERS, "jax": JaxNN}),
        "jax": (OursInJax, {"jax": JaxNN, "torch": Torch}),
    }
    check_names("framework", [framework], sides)
    return sides[framework]


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
