"""The CUDA C++ of a request: the constants that specialise a kernel, followed by the files that hold it.

Requests with equal constants share one compiled kernel.  The number of columns is an argument of the kernel, not a
constant, so a kernel takes every row that fits its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources

from ...core.accumulators import Argmax
from ...core.device import CACHE_LINE
from ...core.task import ITEMSIZE, MOST_PROCESSES
from ...ops import OPERATIONS
from ...planner.plan import Plan
from ..registry import kernels_of
from ..request import Request
from .messages import COPIES, CPP_TYPES, LINE_WORDS, SETS, SLOTS, keeps_argmax, message_packets, sum_count, sum_type
from .params import (
    CALL_OUTPUTS,
    CALL_TENSORS,
    ELEMENT_TENSORS,
    LOGITS,
    OPERAND_NUMBERS,
    PLACES,
    ROW_OPERANDS,
    ROW_OUTPUTS,
    TENSORS,
    struct_text,
)
from .strategy.blocks import slice_chunks, slice_tiles
from .strategy.grid.ring_proposals import PIPELINE, STREAM
from .strategy.row.packed_proposals import PACKED

FILES = (
    "numeric/state", "channel/channel", "channel/state_words", "channel/loss_words", "row/operands", "numeric/formulas",
    "row/warp_shuffle", "row/block_reduce", "channel/processes", "row/slice", "row/scalar_loss",
)  # fmt: skip
"""Files that every kernel needs besides numeric/numbers, in the order of inclusion."""

_RING = ("channel/team", "channel/team_board", "channel/barrier", "strategy/grid/ring", "strategy/grid/exchange_states")

KERNEL_FILES = {
    "row": ("strategy/row/row",),
    PACKED: ("strategy/row/packed",),
    "looped": ("strategy/looped/looped",),
    "cluster": ("channel/barrier", "channel/cluster_messages", "channel/cluster_states", "strategy/cluster/cluster"),
    "grid": ("channel/team", "channel/mailboxes", "strategy/grid/grid"),
    "pipeline": (*_RING, "strategy/grid/pipeline"),
    "stream": (*_RING, "strategy/grid/stream"),
}
"""Files of a kernel besides FILES, in the order of inclusion."""


DEPTHS = {
    "row": "ROWS_AT_ONCE", PACKED: "ROWS_AT_ONCE", "grid": "TILES_AT_ONCE",
    "pipeline": "TILE_CHUNKS", "stream": "TILE_CHUNKS",
}  # fmt: skip
"""Name of the constant for `Blocks.depth`, by kernel: rows of a group of threads that are loaded together, tiles that
are streamed together, or chunks of a thread in a tile of the ring."""


@cache
def text(name: str, package: str = __package__) -> str:
    """One of the .cuh files, by its path; the compiler's messages give its path and its own line numbers."""
    return f'#line 1 "{name}"\n' + resources.files(package).joinpath(name).read_text(encoding="utf-8")


def declarations(
    types: Mapping[str, str], constants: Iterable[tuple[str, str, object]], enums: Sequence[str] = ()
) -> str:
    """C++ text of types and constants, which stands before the files of a kernel.

    Args:
        types: Dtype or C++ type of each name.
        constants: (type, name, value) of each constant.
        enums: Enumerations, which stand before them.
    """
    lines = [f"using {name} = {CPP_TYPES.get(kind, kind)};" for name, kind in types.items()]
    lines += [f"constexpr {kind} {name} = {value};" for kind, name, value in constants]
    return '#line 1 "constants"\n' + "\n".join([*enums, *lines]) + "\n"


def typed(values: Mapping[str, bool | int]) -> list[tuple[str, str, object]]:
    """(type, name, value) of constants that are flags or integers, as C++ spells them."""
    return [
        ("bool", name, str(value).lower()) if isinstance(value, bool) else ("int", name, value)
        for name, value in values.items()
    ]


def source(request: Request) -> str:
    """The whole source of a request's kernel; it includes no header."""
    return program(prologue(request), *files_of(request))


def program(prologue: str, *files: str | tuple[str, str]) -> str:
    """The source of a kernel of these files, whose types and constants a prologue declares.

    A file is a path in this package, or (path, package).
    """
    named = (file if isinstance(file, tuple) else (file, __package__) for file in files)
    return "".join([text("numeric/numbers.cuh"), prologue, *(text(f"{name}.cuh", package) for name, package in named)])


def files_of(request: Request) -> list[tuple[str, str]]:
    """(name, package) of the files of a request's kernel, in the order of inclusion.

    The last file of an operation's own kernel stands in the operation's room.
    """
    own = kernels_of(request.operation, "cuda", request.plan.strategy)
    files, package = (own.KERNEL_FILES, request.operation.kernels) if own else (KERNEL_FILES, __package__)
    *parts, last = files[kernel_file(request.plan)]
    return [*((name, __package__) for name in (*FILES, *parts)), (last, package)]


def kernel_file(plan: Plan) -> str:
    """Name of the file of a plan's kernel."""
    return plan.kernel or plan.strategy


def prologue(request: Request) -> str:
    """Enumerations, types, constants and parameters of a request's kernel."""
    enums = [
        "enum class Scale { NONE, NUMBER, TENSOR };",
        f"enum class Op {{ {', '.join(OPERATIONS).upper()} }};",
        f"enum class RowOutput {{ {', '.join(ROW_OUTPUTS).upper()} }};",
    ]
    return declarations(types_of(request), constants(request), enums) + struct_text()


def types_of(request: Request) -> dict[str, str]:
    """C++ types by name: of the elements of each tensor, of the maximum m (ACC) and of a sum (SUM)."""
    kinds = {name: CPP_TYPES.get(kind, kind) for name, kind in request.task.dtypes.items()}
    elements = {tensor.type: kinds.get(tensor.name, "int64" if tensor.integer else kinds["x"]) for tensor in TENSORS}
    # A mask's element is a byte, and no tensor's type may depend on whether the tensor is given.
    elements["MASK"] = "unsigned char"
    accumulator = CPP_TYPES[request.task.accumulator]
    return elements | {"ACC": accumulator, "SUM": sum_type(request)}


def vector(request: Request) -> int:
    """Number of elements in a chunk: 16 bytes of x; one where rows are packed, because a row may begin anywhere."""
    return 1 if request.plan.kernel == PACKED else 16 // ITEMSIZE[request.task.dtypes["x"]]


def kernel_name(request: Request) -> str:
    """Name of the kernel in its source."""
    return f"{kernel_file(request.plan)}_kernel"


def shared_memory(request: Request) -> int:
    """Bytes of a block's dynamic shared memory: 16 for each chunk of each input that its threads keep there."""
    plan = request.plan
    return plan.shared * 16 * plan.lanes * request.operation.inputs


def slice_length(request: Request) -> int:
    """Chunks of a slice, which a block holds; in the kernels that load through a ring, chunks of a tile."""
    plan, chunks = request.plan, request.task.cols // vector(request)
    if plan.kernel == STREAM:
        return plan.depth * plan.lanes
    tiles = _held_chunks(request) // plan.depth if plan.kernel == PIPELINE else 1
    return slice_chunks(chunks, plan.splits * tiles)


def _held_chunks(request: Request) -> int:
    """Chunks of a row that a thread holds in registers."""
    return request.plan.block // (request.plan.lanes * vector(request))


def sizes_of(request: Request) -> dict[str, int]:
    """The value of every name in params.SIZES; 0 for those that a call fills in."""
    task, part = request.task, request.task.part
    return {
        "rows": task.rows,
        "cols": 0 if part and part.first == part.total else task.cols,
        "diagonal": task.diagonal or 0,
        "slice": slice_length(request),
        "shared_tiles": request.plan.shared,
        "counters": counters(request),
        "first": part.first if part else 0,
        "total": part.total if part else task.cols,
        "process": part.process if part else 0,
        "processes": part.processes if part else 1,
        "rest_first": request.rest.first if request.rest else 0,
        "rest_row": request.rest.stride if request.rest else 0,
        "set_words": 0,
        "number": 0,
        "timeout": 0,
    }


def places_of(request: Request) -> dict[str, tuple[tuple[int, ...], int]]:
    """The strides of the outer dimensions and of the columns, by the names in params.PLACES that a request has."""
    views = {**request.task.tensors, "query": request.task.query}
    return {name: (view.outer, view.col) for name, view in views.items() if view and name in PLACES}


def _head_unit(request: Request) -> int:
    """Columns in the unit of memory in which the body of an unaligned row begins; its head has fewer.

    The unit is a cache line where each thread has at most one column of head and tail, and otherwise a chunk.
    """
    itemsize = ITEMSIZE[request.task.dtypes["x"]]
    line = CACHE_LINE // itemsize
    return line if request.plan.vector > 1 and request.plan.lanes >= line + vector(request) else vector(request)


DIVISORS = 32
"""Copies of the divisor of a mean, so that blocks read different addresses."""

COUNTERS = 32
"""Most blocks that count targets; each lane of a warp takes the count of one of them."""

SEGMENT = 1024
"""Rows whose losses one block adds.

A block that adds keeps other rows from its multiprocessor, and reads each batch of losses through a busy L2.  With 512
or 4096, a loss of 16384 x 4096 bfloat16 with its gradient takes 2 or 3 microseconds more on an H200.
"""

WIDE_WORDS = 2
"""64-bit words of the mailbox for a part of the divisor or a sum of losses; the type Wide of scalar_loss.cuh."""

LOSSES_AT_ONCE = 8
"""Losses that a thread loads at once, where a loss is reduced to a scalar."""

BATCH = 4
"""Targets that a thread loads at once, where a loss is reduced to a scalar.

With 8, half as many blocks count the targets, and a loss of 16384 x 4096 bfloat16 with its gradient takes 1 microsecond
more on an H200.
"""


def counters(request: Request) -> int:
    """Blocks that count the targets for the divisor of a mean that the kernel writes; 0 for other kernels.

    A block counts a batch for each thread; where that takes more than COUNTERS blocks, it counts several batches.
    """
    if "mean_loss" not in request.task.call_outputs:
        return 0
    plan = request.plan
    most = min(COUNTERS, plan.programs) if plan.strategy == "grid" else COUNTERS
    return min(most, -(-request.task.rows // (BATCH * 32 * plan.warps)))


def blocks(request: Request) -> int:
    """Blocks of a launch: those that own rows, and before them those that only count targets (scalar_loss.cuh).

    The blocks of `grid` are resident together, so its first blocks count before they take their rows.
    """
    plan = request.plan
    if plan.strategy == "grid":
        return plan.programs
    cluster = plan.splits if plan.strategy == "cluster" else 1
    return plan.programs + -(-counters(request) // cluster) * cluster


def loss_mail_words(request: Request) -> int:
    """64-bit words of the mailboxes of a loss that is reduced to a scalar, as in LossMail (loss_words.cuh); else 0."""
    if not request.task.call_outputs:
        return 0
    rows = request.task.rows
    losses, segments = -(-rows * ITEMSIZE[request.task.accumulator] // 8), -(-rows // SEGMENT)
    return LINE_WORDS * DIVISORS + WIDE_WORDS * (COUNTERS + segments) + losses


def element_tensors(request: Request) -> set[str]:
    """Names of the tensors that this kernel reads or writes element by element."""
    task, operation = request.task, request.operation
    operands = (one.name for one in operation.operands if one.kind == "element")
    names = {*operands, "bias", "mask", LOGITS.name} & task.tensors.keys()
    return names | {output.name for output in task.written if output.kind == "element"}


def constants(request: Request) -> list[tuple[str, str, object]]:
    """(type, name, value) of everything that is compiled into a kernel."""
    scale = "TENSOR" if "scale" in request.task.dtypes else "NUMBER" if request.has("scale") else "NONE"
    return [
        ("Op", "OP", f"Op::{request.operation.name.upper()}"),
        ("Scale", "SCALE", f"Scale::{scale}"),
        *typed(_flags(request)),
        *typed(_numbers(request)),
    ]


def _numbers(request: Request) -> dict[str, int]:
    """Integer constants."""
    plan = request.plan
    numbers = {
        "DIMS": len(request.task.sizes),
        "VECTOR": vector(request),
        **{f"{name.upper()}_WIDTH": width for name, width in widths(request).items()},
        "HEAD": _head_unit(request),
        "THREADS": 32 * plan.warps,
        "RESIDENT": plan.resident,
        "LANES": plan.lanes,
        "CHUNKS": _held_chunks(request),
        **({DEPTHS[kernel]: plan.depth} if (kernel := kernel_file(plan)) in DEPTHS else {}),
        "STAGES": plan.stages,
        "SUMS": sum_count(request),
        "RESCALED": sum(one.rescaled << i for i, one in enumerate(request.task.sums)),
        "PACKETS": message_packets(request),
        "COPIES": COPIES,
        "SETS": SETS,
        "SLOTS": SLOTS,
        "DIVISORS": DIVISORS,
        "LINE_WORDS": LINE_WORDS,
        "COUNTERS": COUNTERS,
        "WIDE_WORDS": WIDE_WORDS,
        "SEGMENT": SEGMENT,
        "BATCH": BATCH,
        "LOSSES_AT_ONCE": LOSSES_AT_ONCE,
        "CLUSTER": plan.splits if plan.strategy == "cluster" else 1,
        "MOST_PROCESSES": MOST_PROCESSES,
    }
    # Position of each accumulator among the sums of a state; -1 where the state does not keep it.
    kept = [one.name for one in request.task.sums]
    sums = (one for operation in OPERATIONS.values() for one in operation.accumulators if one.kind is not Argmax)
    for name in dict.fromkeys(one.name for one in sums):
        numbers[f"SUM_{name.upper()}"] = kept.index(name) if name in kept else -1
    return numbers


def _flags(request: Request) -> dict[str, bool]:
    """Constants that are true or false."""
    plan, task, operation = request.plan, request.task, request.operation
    columns, moved = request.task.cols, element_tensors(request)
    given = {*operation.row_operands, *operation.call_operands} & {*request.task.dtypes, *task.numbers}
    gradient = task.writes_elements and (operation.backward or operation.per_row)
    flags = {
        "WRITES_ELEMENTS": task.writes_elements,
        "WRITES_ROWS": bool(task.row_outputs or task.call_outputs),
        # True where the losses are reduced to a scalar.
        "SCALAR_LOSS": bool(task.call_outputs),
        "FOLLOWS_DIVISOR": request.follows_divisor,
        "SHARDED": task.part is not None,
        # True where the last columns of the rows lie in another tensor.
        "HAS_REST": request.rest is not None,
        "REDUCES": operation.reduces,
        # True where x is the saved output of the forward pass and dy has a value for each element; no scores are made.
        "READS_SAVED_OUTPUT": not operation.scores,
        # True where the element output is a gradient with respect to the logits: it takes the slope of the scores.
        "WRITES_GRADIENT": gradient,
        # True where the outputs depend on an element only through its term.
        "ONLY_TERMS": operation.may_keep_terms or not task.writes_elements,
        # The slope of a softcap is computed from the score, which a thread with terms no longer holds.
        "TERMS": plan.terms and operation.may_keep_terms and not (gradient and request.has("softcap")),
        "EXACT": task.exact,
        "KEEPS_ARGMAX": keeps_argmax(request),
        "PEEL": plan.vector > 1,
        "EDGES": plan.vector > 1 or columns % vector(request) != 0,
        "CAUSAL": task.diagonal is not None,
        "SOFTCAP": request.has("softcap"),
        "ZERO": task.zero,
        "FUSED": task.fused,
    }
    flags |= {f"HAS_{name.upper()}": name in moved for name in ELEMENT_TENSORS}
    # A name with GIVEN_ is an operand with one value per row that is loaded before the row.  dy may also have one value
    # per element, or may be loaded later.
    early = {*operation.row_operands, *operation.options} & request.task.dtypes.keys()
    early -= {"dy"} if request.follows_divisor else set()
    flags |= {f"GIVEN_{tensor.type}": tensor.name in early for tensor in ROW_OPERANDS}
    flags |= {f"HAS_{name.upper()}": name in given for name in ("target", *CALL_TENSORS, *OPERAND_NUMBERS)}
    flags |= {f"ROW_{name.upper()}": name in task.row_outputs for name in ROW_OUTPUTS}
    flags |= {f"CALL_{name.upper()}": name in task.call_outputs for name in CALL_OUTPUTS}
    if plan.strategy == "grid":
        tiles = slice_tiles(columns // vector(request), plan.splits, plan.lanes)
        shared = plan.shared
        flags |= {"SHARED": shared > 0, "STREAMED": tiles > _held_chunks(request) + shared}
    return flags


def widths(request: Request) -> dict[str, int]:
    """Elements of each tensor that one instruction may move; 1 where they are not neighbours."""
    tensors, peel = request.task.tensors, request.plan.vector > 1
    found = dict.fromkeys(ELEMENT_TENSORS, 1)
    for name in element_tensors(request):
        view = tensors[name]
        size = 1 if name == "mask" else ITEMSIZE[view.dtype]
        if request.plan.kernel == PACKED and view.col == 1:
            # Neighbours in shared memory; a thread takes them one by one, because its chunks have one element.
            found[name] = 16 // size
            continue
        if view.col != 1 or (not view.aligned and not (peel and name == "x")):
            continue
        widest = min(vector(request), 16 // size)
        if peel:
            # Rows that begin alike in x and here have their bodies on 16 bytes in both.
            found[name] = widest if view.congruent(tensors["x"]) else 1
        else:
            found[name] = min(widest, view.unit)
    return found
