"""`onlinesoftmax explain`: the plan for a shape, why it won, and what the compiler makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from . import output

if TYPE_CHECKING:
    from ..explanation import Explanation
    from ..kernels.report import Kernel
    from ..planner.plan import Plan


def explain(
    shape: str = typer.Argument(metavar="SHAPE", help="Sizes joined by x, as in 4096x50257 or 1x2^24."),
    dtype: str = typer.Option("float32", help="float16, bfloat16, float32 or float64."),
    device: str | None = typer.Option(None, help="A known device, as h200 or rtx4090; this machine by default."),
    framework: str = typer.Option("torch", help="torch or jax: whose array it is."),
    backend: str | None = typer.Option(None, help="Force a backend: cuda, triton or eager; of JAX, pallas or eager."),
    strategy: str | None = typer.Option(
        None,
        help="Force a strategy: row, looped, cluster or grid (cuda), split or column (triton); of JAX row, cluster, "
        "looped or split.",
    ),
    op: str = typer.Option("softmax", help="softmax, log_softmax or logsumexp."),
    dim: int = typer.Option(-1, help="The softmax dimension; negative counts from the end."),
    cuda: bool = typer.Option(False, "--cuda", help="Also print the CUDA C++ of a cuda plan."),
    ttir: bool = typer.Option(False, "--ttir", help="Also print the intermediate code of a triton plan."),
    ptx: bool = typer.Option(False, "--ptx", help="Also print the PTX."),
    sass: bool = typer.Option(False, "--sass", help="Also print the machine code."),
    compiled: bool = typer.Option(
        True, "--compile/--no-compile", help="Compile the kernels, for registers and occupancy."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """The plan for a shape: its numbers, its time against the floor, why it won, and its compiled kernels.

    The GPU need not be here: kernels are compiled for the device that --device names.

    \b
    Example:
      onlinesoftmax explain 4096x50257 --dtype bfloat16 --device h200
    """  # noqa: D301  \b is typer's mark for lines that stay as they are
    asked = {"cuda": cuda, "ttir": ttir, "ptx": ptx, "sass": sass}
    listings = [name for name, wanted in asked.items() if wanted]
    if listings and not compiled:
        output.fail(f"--{listings[0]} needs the compiled kernels; leave out --no-compile")
    explanation = _explain(shape, dim, op, dtype, device, backend, strategy, framework)
    kernels, problem = _compile(explanation) if compiled else ([], "not asked for (--no-compile)")
    _check_listings(listings, kernels)
    if as_json:
        described = [{**k.as_dict(), "listings": {name: k.listings[name] for name in listings}} for k in kernels]
        output.print_json({**explanation.as_dict(), "kernels": described, "not_compiled": problem})
        return
    _print_plan(explanation)
    _print_others(explanation)
    if compiled:
        _print_kernels(kernels, problem)
    for kernel in kernels:
        for name in listings:
            output.heading(f"{kernel.name}: {name.upper()}")
            print(kernel.listings[name].rstrip())


def _explain(
    shape: str, dim: int, op: str, dtype: str, device: str | None, backend: str | None, strategy: str | None,
    framework: str,
) -> Explanation:  # fmt: skip
    from ..bench.cases import parse_shape
    from ..explanation import explain as explain_shape
    from ..kernels.registry import missing
    from ..planner.plan import PlanError

    try:
        return explain_shape(
            parse_shape(shape), dim, operation=op, dtype=dtype, device=device, backend=backend, strategy=strategy,
            framework=framework,
        )  # fmt: skip
    except PlanError as error:
        if device is None and backend is not None and (reason := dict(missing()).get(backend)):
            output.fail(f"{reason}; name a GPU, as in --device h200, to plan for one that is not here")
        output.fail(error)
    except (ValueError, IndexError) as error:
        output.fail(error)


def _compile(explanation: Explanation) -> tuple[list[Kernel], str | None]:
    """The compiled kernels, or why there are none."""
    if explanation.plan.backend == "eager":
        return [], "the eager backend has no kernels of ours"
    try:
        return explanation.compile(), None
    except Exception as error:  # a compiler fails in many ways, and the plan is right all the same
        lines = str(error).strip().splitlines()
        return [], lines[0] if lines else type(error).__name__


def _check_listings(listings: list[str], kernels: list[Kernel]) -> None:
    """Fail where a listing was asked for that the kernels do not have."""
    from ..kernels.report import NO_CUOBJDUMP

    for kernel in kernels:
        for name in listings:
            if name not in kernel.listings:
                there_are = f"{kernel.name} has none; it has {', '.join(kernel.listings)}"
                output.fail(f"--{name}: {NO_CUOBJDUMP if name == 'sass' else there_are}")


def _print_plan(explanation: Explanation) -> None:
    plan, problem = explanation.plan, explanation.problem
    output.heading(
        f"{problem.operation} of {problem.rows} x {problem.cols} {problem.dtype} on {explanation.device.name}",
        first=True,
    )
    output.facts([("plan", f"{plan.backend}/{plan.strategy}"), ("why", plan.reason)])
    output.heading("Plan")
    output.facts(plan_facts(explanation))


def plan_facts(explanation: Explanation) -> list[tuple[str, str]]:
    """The plan's numbers with their units, in reading order."""
    plan, problem, device = explanation.plan, explanation.problem, explanation.device
    found = [
        ("rows lie", _layout(explanation)),
        ("programs", f"{plan.programs:,} in the largest launch"),
        ("block", _block(plan)),
    ]
    if plan.warps:
        found.append(("warps", f"{plan.warps} a program"))
    if plan.threads.lanes:
        found.append(("lanes", f"{plan.threads.lanes} threads of a program share a row"))
    if plan.threads.shared:
        found.append(("shared memory", f"{plan.threads.shared} chunks of 16 bytes a thread, beside those in registers"))
    if plan.threads.terms:
        found.append(("terms", "kept in registers, for one exp an element instead of two"))
    if plan.blocks.stages:
        found.append(("stages", f"{plan.blocks.stages} tiles in flight in a program"))
    if plan.vector > 1:
        found.append(("vector", f"{plan.vector} elements: rows are cut to 16-byte boundaries"))
    found += [
        ("splits", f"{plan.splits} programs share a row" if plan.splits > 1 else "1: no row is shared"),
        ("launches", str(plan.launches)),
        ("input is read", {1: "once", 2: "twice"}.get(plan.reads, f"{plan.reads} times")),
        (
            "bytes moved",
            f"{output.size(plan.bytes_moved)}; at least {output.size(problem.read_bytes + problem.write_bytes)}: "
            f"{output.size(problem.read_bytes)} in, {output.size(problem.write_bytes)} out",
        ),
        ("floor", f"{output.duration(plan.floor_us)} at {device.bandwidth:.0f} GB/s"),
        ("estimate", f"{output.duration(plan.estimate_us)}, {_floors(plan.estimate_us, plan.floor_us)}"),
    ]
    if device.kind == "cuda":
        found.append(("quality", f"{plan.traffic.quality:.0%} of that bandwidth, with the device full"))
    return found


def _layout(explanation: Explanation) -> str:
    problem = explanation.problem
    if problem.contiguous:
        return "one after another, the elements of a row side by side"
    return f"{problem.access.adjacent} side by side, the elements of a row apart"


def _block(plan: Plan) -> str:
    rows = f"{plan.rows_per_program} rows x " if plan.rows_per_program > 1 else ""
    depth = f", {plan.blocks.depth} to a lane" if plan.blocks.depth > 1 and plan.backend == "triton" else ""
    return f"{rows}{plan.block} columns at a time{depth}"


def _floors(estimate: float, floor: float) -> str:
    return f"{estimate / floor:.2f} times the floor" if floor else "no floor"


def _print_others(explanation: Explanation) -> None:
    from ..planner.plan import Plan

    # A backend that is missing as a whole gives its reason once.
    rows: dict[tuple[str, str], tuple[str, str]] = {}
    for other in explanation.others:
        why = explanation.why_not(other)
        known = rows.get((other.backend, why))
        estimate = output.duration(other.estimate_us) if isinstance(other, Plan) else ""
        name = f"{known[0]}, {other.strategy}" if known else f"{other.backend}/{other.strategy}"
        rows[other.backend, why] = (name, estimate)
    if rows:
        output.heading("Why not another?")
        output.table(
            ("strategy", "estimate", "why not"),
            [(name, estimate, why) for (_, why), (name, estimate) in rows.items()],
            right=("estimate",),
        )


def _print_kernels(kernels: list[Kernel], problem: str | None) -> None:
    output.heading("Kernels")
    if problem:
        output.note(f"  not compiled: {problem}")
        return
    output.table(
        ("kernel", "registers", "spills", "shared memory", "warps", "occupancy"),
        [
            (k.name, str(k.registers), f"{k.spills} B", f"{k.shared_memory} B", str(k.warps), f"{k.occupancy:.0%}")
            for k in kernels
        ],
        right=("registers", "spills", "shared memory", "warps", "occupancy"),
    )
