"""The CUDA C++ of a plan: constants that make the kernel, ahead of the files that hold it.

The constants are the kernel's bucket.  N is not among them: a kernel takes any row that fits its blocks.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from ...core.operations import OPERATIONS
from ...core.task import ITEMSIZE
from ...planner.strategies.cuda import slice_tiles
from ..request import Request

BESIDE = ("dy", "bias", "mask", "logits", "lse")
"""Tensors that may be read beside x, in the order of the kernel's parameters."""


@cache
def text(name: str) -> str:
    """One of the .cuh files, its lines counted in the compiler's messages under its own name."""
    return f'#line 1 "{name}"\n' + resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def source(request: Request) -> str:
    """All of a kernel, self-contained."""
    lines = [f"{kind} {name} = {value};" for kind, name, value in constants(request)]
    types = [f"using {name} = {kind};" for name, kind in types_of(request).items()]
    enums = ["enum class Scale { NONE, NUMBER, TENSOR };", f"enum class Op {{ {', '.join(OPERATIONS).upper()} }};"]
    prologue = '#line 1 "constants"\n' + "\n".join([*enums, *types, *("constexpr " + line for line in lines)]) + "\n"
    strategy = [*(["team.cuh"] if request.plan.strategy == "grid" else []), f"{request.plan.strategy}.cuh"]
    files = ["state.cuh", "operands.cuh", "ops.cuh", "levels.cuh", "slice.cuh", *strategy]
    return text("numbers.cuh") + prologue + "".join(text(name) for name in files)


def types_of(request: Request) -> dict[str, str]:
    """Names of C++ types: of the elements of each tensor, of m, and of l."""
    names = {"float32": "float", "float64": "double"}
    kinds = {name: names.get(kind, kind) for name, kind in request.dtypes.items()}
    accumulator = names[request.task.accumulator]
    x = kinds["x"]
    return {
        "X": x, "Y": kinds["y"], "DY": kinds.get("dy", x), "BIAS": kinds.get("bias", x),
        "LOGITS": kinds.get("logits", x), "LSE": kinds.get("lse", x), "SCALE_TENSOR": kinds.get("scale", x),
        "ACC": accumulator,
        "SUM": "Twofold" if accumulator == "double" else "double" if request.task.exact else "float",
    }  # fmt: skip


def vector(request: Request) -> int:
    """Elements of a chunk: 16 bytes of x."""
    return 16 // ITEMSIZE[request.dtypes["x"]]


def kernel_name(request: Request) -> str:
    """Name of the kernel in its source."""
    return f"{request.plan.strategy}_kernel"


def shared_memory(request: Request) -> int:
    """Bytes of a block's dynamic shared memory: for the chunks of every input that its threads keep there."""
    plan = request.plan
    return plan.threads.shared * 16 * 32 * plan.warps * request.operation.inputs


def constants(request: Request) -> list[tuple[str, str, object]]:
    """(type, name, value) of what is compiled into a kernel."""
    plan, layout, operation = request.plan, request.layout, request.operation
    beside, threads = request.task.beside, plan.threads
    # A gradient that reads dy element by element, and sums over its row.
    gradient = operation.inputs > 1
    numbers = {
        "DIMS": len(layout.sizes),
        "VECTOR": vector(request),
        **{f"{name.upper()}_WIDTH": width for name, width in widths(request).items()},
        "THREADS": 32 * plan.warps,
        "RESIDENT": threads.resident,
        "LANES": threads.lanes,
        "CHUNKS": plan.block // (threads.lanes * vector(request)),
        "DEPTH": plan.blocks.depth,
    }
    if plan.strategy == "cluster":
        numbers["CLUSTER"] = plan.splits
    flags: dict[str, bool] = {}
    if plan.strategy == "grid":
        tiles = slice_tiles(layout.cols // vector(request), plan.splits, threads.lanes)
        flags = {"SHARED": threads.shared > 0, "STREAMED": tiles > numbers["CHUNKS"] + threads.shared}
    flags |= {
        "PER_ROW": not request.task.writes_elements,
        "TERMS": threads.terms,
        "REDUCES": operation.reduces,
        "GRADIENT": gradient,
        "EXACT": request.task.exact,
        "PEEL": plan.vector > 1,
        "EDGES": plan.vector > 1 or layout.cols % vector(request) != 0,
        "HAS_DY": gradient,
        "HAS_BIAS": "bias" in beside,
        "HAS_MASK": "mask" in beside,
        "HAS_LOGITS": "logits" in beside,
        "CAUSAL": request.task.diagonal is not None,
        "SOFTCAP": request.has("softcap"),
        "ZERO": request.task.zero,
    }
    scale = "TENSOR" if "scale" in request.dtypes else "NUMBER" if request.has("scale") else "NONE"
    flags["FUSED"] = bool({"bias", "mask"} & beside) or flags["CAUSAL"] or flags["SOFTCAP"] or scale != "NONE"
    return [
        ("Op", "OP", f"Op::{request.operation.name.upper()}"),
        ("Scale", "SCALE", f"Scale::{scale}"),
        *(("bool", name, str(value).lower()) for name, value in flags.items()),
        *(("int", name, value) for name, value in numbers.items()),
    ]


def widths(request: Request) -> dict[str, int]:
    """Elements of each tensor that one instruction may move; 1 where they are not neighbours."""
    layout, peel = request.layout, request.plan.vector > 1
    sides = layout.sides
    found = dict.fromkeys(("x", "y", "dy", "bias", "mask", "logits"), 1)
    for name in found.keys() & sides.keys():
        side = sides[name]
        size = 1 if name == "mask" else ITEMSIZE[request.dtypes[name]]
        if side.col != 1 or (name not in request.task.aligned and not (peel and name == "x")):
            continue
        widest = min(vector(request), 16 // size)
        if peel:
            # Where the body begins on 16 bytes in x, it does here if rows begin alike.
            found[name] = widest if side.congruent(layout.x) else 1
        else:
            found[name] = min(widest, side.unit)
    return found
