"""`onlinesoftmax explain`: the plan for a shape, why it was chosen, and what the compiler makes of its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from ..core.options import SCORE_OPTIONS
from ..linear.problem import FUNCTIONS
from ..ops import OPERATIONS
from ..planner.facts import lacks_memory, plan_facts
from ..routing.rules import SCORES
from . import output
from .options import (
    AS_JSON,
    BACKENDS,
    DTYPES,
    FRAMEWORKS,
    OUTPUTS,
    REDUCTIONS,
    STRATEGIES,
    known_device,
    named,
    split_names,
)

if TYPE_CHECKING:
    from ..explanation import Explanation, HeadExplanation
    from ..explanation.ways import WayExplanation
    from ..kernels.report import Kernel

OF_ARGUMENTS = {"linear_weight": "classes", "framework='jax'": "framework jax"}
"""The options whose names are not those of the arguments."""


def explain(
    shape: str = typer.Argument(
        metavar="SHAPE",
        help="Sizes with x between them, as in 4096x50257 or 1x2^24; for a head those of its input: tokens x hidden; "
        "for verify rows x (drafts + 1) x tokens.",
    ),
    dtype: str = named("dtype", DTYPES, "float32", help=f"Dtype of the input: {', '.join(DTYPES)}."),
    op: str = named(
        "operation",
        (*OPERATIONS, *FUNCTIONS, "sample", "verify", "route"),
        "softmax",
        help=f"The operation: {', '.join(OPERATIONS)}; with --classes a head: {', '.join(FUNCTIONS)}; sample; verify; "
        "route.",
    ),
    classes: int | None = typer.Option(None, min=1, help="Classes of a head, the rows of its weight."),
    memory: str | None = typer.Option(None, help="Most bytes of a head's logits and sums, as 600MB or 1.5GiB."),
    gradients: str | None = named(
        "gradient",
        ("input", "linear_weight", "linear_bias", "none"),
        help="Gradients of a head that are wanted: input,linear_weight (the default), or none.",
        commas=True,
    ),
    reduction: str | None = named("reduction", REDUCTIONS, help="Reduction of a head's loss: mean, sum or none."),
    acc_dtype: str | None = named(
        "dtype", DTYPES, help="Dtype in which chunks add up the gradient of a head's weight."
    ),
    top_k: int | None = typer.Option(None, help="Of sample and verify: number of tokens to keep."),
    top_p: float | None = typer.Option(None, help="Of sample and verify: part of the probability to keep."),
    min_p: float | None = typer.Option(
        None, help="Of sample and verify: smallest probability to keep, as a part of the largest."
    ),
    top_logprobs: int = typer.Option(0, help="Of sample: number of the largest log-probabilities to return."),
    draft_logits: bool = typer.Option(False, "--draft-logits", help="Of verify: the draft model has logits too."),
    k: int | None = typer.Option(None, "--k", min=1, help="Of route: number of experts of a token."),
    score: str = named("score", SCORES, "softmax", help=f"Of route: {', '.join(SCORES)}."),
    groups: int | None = typer.Option(None, min=1, help="Of route: number of groups of experts."),
    group_k: int | None = typer.Option(None, min=1, help="Of route: number of groups that a token chooses from."),
    prob_sums: bool = typer.Option(False, "--prob-sums", help="Of route: add up probabilities for a loss."),
    outputs: str = named(
        "output",
        OUTPUTS,
        "",
        help="The outputs that a call asks for: loss,y for losses with their gradient.",
        commas=True,
    ),
    dim: int = typer.Option(-1, help="The softmax dimension; negative counts from the end."),
    scale: float = typer.Option(1.0, help="Scale of the logits."),
    softcap: float | None = typer.Option(None, help="Softcap of the logits, a positive number."),
    bias: str | None = typer.Option(None, help="A bias of this shape, which broadcasts to SHAPE, as 50257."),
    mask: str | None = typer.Option(None, help="A boolean mask of this shape, which broadcasts to SHAPE."),
    causal: bool = typer.Option(False, "--causal", help="A causal mask; the dimension before --dim counts queries."),
    fully_masked: str = named("result", ("nan", "zero"), "nan", help="Result of a fully masked row: nan or zero."),
    batch_invariant: bool = typer.Option(False, "--batch-invariant", help="Give a row the same bits in every batch."),
    device: str | None = known_device(help="A known device, as h200 or rtx4090; by default this machine's."),
    framework: str = named("framework", FRAMEWORKS, "torch", help="The framework of the input: torch or jax."),
    backend: str | None = named(
        "backend", BACKENDS, help="Force a backend: cuda, triton or eager; with jax, cuda, pallas or eager."
    ),
    strategy: str | None = named(
        "strategy",
        STRATEGIES,
        help="Force a strategy: row, looped, cluster or grid (cuda); row, looped, split or column (triton); "
        "row, looped, cluster or split (pallas).",
    ),
    cuda: bool = typer.Option(False, "--cuda", help="Also print the CUDA C++ source of a cuda plan."),
    ttir: bool = typer.Option(False, "--ttir", help="Also print the intermediate code of a triton plan."),
    ptx: bool = typer.Option(False, "--ptx", help="Also print the PTX."),
    sass: bool = typer.Option(False, "--sass", help="Also print the machine code."),
    compiled: bool = typer.Option(True, "--compile/--no-compile", help="Report registers and occupancy of kernels."),
    as_json: bool = AS_JSON,
) -> None:
    """The plan for a shape: its numbers, its time against the floor, why it was chosen, and its compiled kernels.

    The GPU need not be present: kernels are compiled for the device that --device names.

    \b
    Examples:
      onlinesoftmax explain 4096x50257 --dtype bfloat16 --device h200
      onlinesoftmax explain 64x1024x1024 --causal --scale 0.125 --bias 1024x1024 --device h200
      onlinesoftmax explain 4096x50257 --op softmax_backward --batch-invariant --device h200
      onlinesoftmax explain 8192x128256 --op cross_entropy --outputs loss,y --device h200
      onlinesoftmax explain 8192x4096 --op linear_cross_entropy --classes 128256 --memory 600MB --device h200
      onlinesoftmax explain 64x128256 --op sample --top-k 50 --top-p 0.9 --device h200
      onlinesoftmax explain 64x5x128256 --op verify --draft-logits --top-k 50 --device h200
      onlinesoftmax explain 65536x256 --op route --k 8 --score sigmoid --groups 8 --group-k 4 --device h200
    """  # noqa: D301  \b is typer's mark for lines that it does not wrap
    asked = {"cuda": cuda, "ttir": ttir, "ptx": ptx, "sass": sass}
    listings = [name for name, wanted in asked.items() if wanted]
    if listings and not compiled:
        output.fail(f"--{listings[0]} needs the compiled kernels; leave out --no-compile")
    if causal and framework == "jax":
        output.fail("--causal: our functions for JAX have no causal mask; leave out --framework jax")
    options = {"scale": scale, "softcap": softcap, "bias": bias, "mask": mask, "causal": causal}
    head = {"classes": classes, "memory": memory, "gradients": gradients, "reduction": reduction, "acc": acc_dtype}
    explanation = _explain(
        shape, options, head, dim=dim, operation=op, dtype=dtype, fully_masked=fully_masked, device=device,
        batch_invariant=batch_invariant, framework=framework, backend=backend, strategy=strategy, top_k=top_k,
        top_p=top_p, min_p=min_p, top_logprobs=top_logprobs, draft_logits=draft_logits, k=k, score=score, groups=groups,
        group_k=group_k, prob_sums=prob_sums, outputs=split_names(outputs) or None,
    )  # fmt: skip
    from ..explanation import Explanation

    if not isinstance(explanation, Explanation):
        if listings:
            output.fail(f"--{listings[0]}: name an operation of the planner: {op} has no such listing")
        _print_function(explanation, as_json)
        return
    kernels, problem = _compile(explanation) if compiled else ([], "not asked for (--no-compile)")
    _check_listings(listings, kernels, problem)
    if as_json:
        described = [{**k.as_dict(), "listings": {name: k.listings[name] for name in listings}} for k in kernels]
        document = {**explanation.as_dict(), "score_options": score_options(explanation)}
        output.print_json({**document, "kernels": described, "not_compiled": problem})
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
    shape: str, options: dict[str, Any], head: dict[str, Any], **asked: Any
) -> Explanation | HeadExplanation | WayExplanation:
    from ..explanation import NotTakenError
    from ..explanation import explain as explain_shape
    from ..kernels.registry import missing
    from ..lab.names import parse_bytes, parse_shape
    from ..planner.plan import PlanError

    with output.refusing("", IndexError, TypeError):
        sizes = parse_shape(shape)
        for name in ("bias", "mask"):
            with output.refusing(f"--{name}: "):
                options[name] = None if options[name] is None else parse_shape(options[name])
        if asked["operation"] in FUNCTIONS and head["classes"] is None:
            output.fail(f"--op {asked['operation']} needs --classes, the rows of its weight")
        if asked["operation"] == "route" and asked["k"] is None:
            output.fail("--op route needs --k, the number of experts of a token")
        if head["classes"] is not None:
            with output.refusing("--classes: "):
                options["linear_weight"] = parse_shape(f"{head['classes']}x{sizes[-1]}")
        if head["memory"] is not None:
            options["memory"] = parse_bytes(head["memory"])
        if head["gradients"] is not None:
            names = split_names(head["gradients"])
            if "none" in names and len(set(names)) > 1:
                output.fail("--gradients: none stands alone")
            options["gradients"] = [name for name in names if name != "none"]
        try:
            return explain_shape(sizes, **options, reduction=head["reduction"], acc_dtype=head["acc"], **asked)
        except NotTakenError as error:
            output.fail(not_taken(error.operation, error.names))
        except PlanError:
            if asked["device"] is None and (reason := dict(missing()).get(asked["backend"])):
                output.fail(f"{reason}; name a GPU, as in --device h200, to plan for one that is not here")
            raise


def not_taken(operation: str, names: list[str]) -> str:
    """The sentence about options that belong to another operation."""
    from ..explanation import OWNERS

    found = []
    for name in names:
        option = f"--{OF_ARGUMENTS.get(name, name).replace('_', '-')}"
        owners = " or ".join(OWNERS.get(name, ()))
        found.append(f"{option} is an option of --op {owners}" if owners else f"--op {operation} has no {option}")
    return "; ".join(found)


def _print_function(explanation: HeadExplanation | WayExplanation, as_json: bool) -> None:
    """The explanation of a function that is no operation of the planner."""
    if as_json:
        output.print_json(explanation.as_dict())
        return
    output.heading(explanation.asked, first=True)
    output.facts(explanation.facts())
    output.heading("Why not another?")
    output.table(("plan", "why not"), [(other.name, other.why_not) for other in explanation.others])


def score_options(explanation: Explanation) -> list[str]:
    """Names of the score options that the kernels of a plan apply."""
    task = explanation.task
    given = {*task.numbers, *task.tensors, *(("causal",) if task.diagonal is not None else ())}
    return [name for name in SCORE_OPTIONS if name in given]


def _compile(explanation: Explanation) -> tuple[list[Kernel], str | None]:
    """The compiled kernels, or the reason why there are none."""
    if explanation.plan.backend == "eager":
        return [], "the eager backend has no kernels of ours"
    try:
        return explanation.compile(), None
    except Exception as error:  # a compiler fails in many ways, and the plan is right without it
        lines = str(error).strip().splitlines()
        return [], lines[0] if lines else type(error).__name__


def _check_listings(listings: list[str], kernels: list[Kernel], problem: str | None) -> None:
    """Exit with an error where there are no kernels, or they do not have a listing that was asked for."""
    from ..kernels.report import NO_CUOBJDUMP

    if listings and not kernels:
        output.fail(f"--{listings[0]}: there is no kernel to list: {problem}", 1)
    for kernel in kernels:
        if lacking := next((name for name in listings if name not in kernel.listings), None):
            there_are = f"{kernel.name} has none; it has {', '.join(kernel.listings)}"
            output.fail(f"--{lacking}: {NO_CUOBJDUMP if lacking == 'sass' else there_are}")


def _print_plan(explanation: Explanation) -> None:
    plan, problem = explanation.plan, explanation.problem
    options = score_options(explanation)
    with_options = f" with {', '.join(options)}" if options else ""
    shape = f"{problem.rows} x {problem.cols} {problem.dtype}{with_options}"
    outputs = f" ({', '.join(problem.outputs)})" if problem.outputs != problem.declaration.always else ""
    output.heading(f"{problem.operation}{outputs} of {shape} on {explanation.device.name}", first=True)
    output.facts([("plan", f"{plan.backend}/{plan.strategy}"), ("why", plan.reason)])
    if small := lacks_memory(problem, explanation.device):
        output.warn(f"{explanation.device.name} is {small}.")
    output.heading("Plan")
    output.facts(plan_facts(explanation.plan, explanation.problem, explanation.device))


def _print_others(explanation: Explanation) -> None:
    from ..planner.plan import Plan

    # The strategies of a backend that is missing have one reason, and share one line.
    rows: dict[tuple[str, str], tuple[str, str]] = {}
    for other in explanation.others:
        why = explanation.why_not(other)
        known = rows.get((other.backend, why))
        estimate = output.duration(other.estimate_us) if isinstance(other, Plan) else ""
        name = f"{known[0]}, {other.strategy}" if known else f"{other.backend}/{other.strategy}"
        rows[other.backend, why] = (name, estimate)
    if rows:
        output.heading("Why not another?")
        cells = [(name, estimate, why) for (_, why), (name, estimate) in rows.items()]
        output.table(("strategy", "estimate", "why not"), cells, right=("estimate",))


def _print_kernels(kernels: list[Kernel], problem: str | None) -> None:
    output.heading("Kernels")
    if problem:
        output.note(f"  not compiled: {problem}")
        return
    header = ("kernel", "registers", "spills", "shared memory", "warps", "occupancy")
    rows = [
        (k.name, str(k.registers), f"{k.spills} B", f"{k.shared_memory} B", str(k.warps), f"{k.occupancy:.0%}")
        for k in kernels
    ]
    output.table(header, rows, right=header[1:])
