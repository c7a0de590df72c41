"""`onlinesoftmax warm`: compile the kernels of some calls into the cache folder, as for an image of a container."""

from __future__ import annotations

import importlib.util
from itertools import product
from typing import TYPE_CHECKING, Any

import typer

from ..ops import FORWARD, OPERATIONS
from . import output
from .options import AS_JSON, DTYPES, REDUCTIONS, known_device, named

if TYPE_CHECKING:
    from ..core.device import Device
    from ..lab.warm import Asked, Program

FUNCTIONS = (*FORWARD, "sample")


def warm(
    shape: list[str] = typer.Argument(metavar="SHAPE...", help="Shapes of the input, as 8192x128256."),
    op: list[str] = named(
        "operation", FUNCTIONS, ["softmax"], help=f"Operation: {', '.join(FUNCTIONS)}; repeatable.  By default softmax."
    ),
    dtype: list[str] = named(
        "dtype", DTYPES, ["bfloat16"], help=f"Dtype: {', '.join(DTYPES)}; repeatable.  By default bfloat16."
    ),
    with_gradient: bool = typer.Option(False, "--with-gradient", help="The kernels of the gradients too."),
    reduction: str | None = named(
        "reduction", REDUCTIONS, help="Reduction of a loss: mean, sum or none; by default mean."
    ),
    dim: int | None = typer.Option(
        None, help="The softmax dimension, by default the last; a loss has its classes where PyTorch has them."
    ),
    device: str | None = known_device(help="A known device, as h100; by default this machine's GPU."),
    as_json: bool = AS_JSON,
) -> None:
    """Compile the kernels of calls into the cache folder, so that the first calls of a process compile nothing.

    The GPU need not be present: with --device, the kernels are those that calls on contiguous tensors of these shapes
    take there.  Kernels depend on the number of rows too: give a shape for each batch size that is served.  The line
    launch of `onlinesoftmax explain --op sample` shows which batch sizes share a kernel.  Name the dtype of the calls:
    by default it is bfloat16, and logits that tokens are sampled from are often float32.

    The cache folder is $ONLINESOFTMAX_CACHE (see onlinesoftmax cache); copy it into the image, or set the variable
    while the image is built and while it runs.  Other layouts, score options, heads and route take other kernels: on a
    machine with the GPU, run the calls themselves once, which fills the same folder.

    \b
    Examples:
      onlinesoftmax warm 8192x128256 --op cross_entropy --with-gradient --device h100
      onlinesoftmax warm 1x128256 64x128256 --op sample --dtype float32 --device h200
    """  # noqa: D301  \b is typer's mark for lines that it does not wrap
    if importlib.util.find_spec("torch") is None:
        output.fail("warm needs torch, which is not installed: pip install 'onlinesoftmax[torch]'")
    from ..core.device import known
    from ..lab.names import parse_shape
    from ..lab.warm import Asked
    from ..torch.device import here

    with output.refusing():
        machine = here() if device is None else known(device)
        shapes = [parse_shape(text) for text in shape]
    if machine.kind != "cuda":
        output.fail("warm compiles for an NVIDIA GPU; name the one that the image will run on, as in --device h100")
    _check_use(op, {"--with-gradient": with_gradient, "--reduction": reduction is not None, "--dim": dim is not None})
    rest = -1 if dim is None else dim, with_gradient, reduction or "mean"
    asked = [Asked(*each, *rest) for each in product(op, shapes, dtype)]
    _compile(asked, machine, as_json)


def _check_use(functions: list[str], given: dict[str, bool]) -> None:
    """Refuse an option that is given, and that none of the functions takes."""
    losses = [name for name in FORWARD if OPERATIONS[name].call_outputs]
    others = [name for name in FORWARD if name not in losses]
    for option, takers in {"--with-gradient": FORWARD, "--reduction": losses, "--dim": others}.items():
        if given[option] and not set(takers) & set(functions):
            output.fail(f"{option}: of no use to {', '.join(functions)}, but to {', '.join(takers)}")


def _compile(asked: list[Asked], machine: Device, as_json: bool) -> None:
    """Compile the kernels of all calls, and print what was done; exit with 1 if one cannot be compiled."""
    from ..core.cache import cache_folder, check_storable, folder_origin
    from ..lab.warm import programs

    with output.writing(f"{cache_folder()}{folder_origin()}"):
        check_storable("warm")
    with output.refusing("", IndexError):
        made = [program for each in asked for program in programs(each, machine)]
        every = {(program.name, program.source): program for program in made}.values()
    found: list[dict[str, Any]] = []
    # The first of the calls that share a kernel compiles it.
    first: dict[str, dict[str, Any]] = {}
    with output.progress_of("compiling") as show:
        for done, program in enumerate(every, 1):
            kernel, key = {"kernel": program.name}, program.source or program.name
            if owner := first.get(key):
                shared = f"shares that of {owner['kernel'].partition(' on ')[0]}"
                found.append({**kernel, "result": shared, "failed": owner["failed"]})
            else:
                first[key] = kernel | _compiled(program, machine)
                found.append(first[key])
            if show is not None:
                show(done, len(every))
    if as_json:
        output.print_json({"folder": str(cache_folder()), "device": machine.name, "kernels": found})
    else:
        output.table(("kernel", "result"), [(each["kernel"], each["result"]) for each in found])
        output.note(f"The cache folder is {cache_folder()}.")
    if any(each["failed"] for each in found):
        raise typer.Exit(1)


def _compiled(program: Program, machine: Device) -> dict[str, Any]:
    """The result of compiling a kernel, and whether it failed."""
    from ..lab.warm import compile_program

    try:
        return {"result": compile_program(program, machine), "failed": False}
    except Exception as error:  # a compiler fails in many ways; the other kernels are still compiled
        return {"result": (str(error).strip().splitlines() or [type(error).__name__])[0], "failed": True}
