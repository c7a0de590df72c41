"""The launches of merge.cuh: the merge of sharded rows, and the incoming gradients of their backward pass."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..sharded import FLOATS, INTEGERS, TENSORS, ShardedRows
from . import driver
from .source import declarations, program, typed

if TYPE_CHECKING:
    import torch

THREADS = 128


def bind(kernel: str, rows: ShardedRows) -> Callable[[dict[str, torch.Tensor]], None]:
    """The function run(tensors) of the kernel "merge" or "incoming", for the tensors of `rows.names` on one device."""
    # The source of the kernel needs no torch.
    import torch

    from .launch import small_kernel

    places = tuple((TENSORS.index(name), name) for name in rows.names)
    stream_of, doing = torch._C._cuda_getCurrentRawStream, f"launching {kernel}_kernel"

    # The states come from another stream, so the merge could not begin early.
    early = kernel == "incoming"
    pool = small_kernel(source(rows.kind), f"{kernel}_kernel", blocks_of(rows), THREADS, pack(rows), early)
    take, give_back = pool.take, pool.give_back

    def run(tensors: dict[str, torch.Tensor]) -> None:
        index = tensors["target"].get_device()
        call = take(index)
        fields = call.fields
        for place, name in places:
            fields[place] = tensors[name].data_ptr()
        call.config.stream = stream_of(index)
        driver.launch(call, index, doing)
        give_back(call)

    return run


def blocks_of(rows: ShardedRows) -> int:
    """Blocks of a launch."""
    return -(-rows.rows // THREADS)


def pack(rows: ShardedRows) -> bytes:
    """The kernel's parameter with zeros for the pointers."""
    numbers = [getattr(rows, name) for name in (*INTEGERS, *FLOATS)]
    return struct.pack(f"={len(TENSORS)}Q{len(INTEGERS)}q{len(FLOATS)}d", *[0] * len(TENSORS), *numbers)


def source(rows: ShardedRows) -> str:
    """The source of both kernels."""
    return program(prologue(rows), "numeric/state", "small/merge")


def prologue(rows: ShardedRows) -> str:
    """Types and constants of the kernels; those of state.cuh are the ones of float64 scores."""
    types = {"ACC": "float64", "SUM": "float64", "FIELD": rows.accumulator, "RESULT": rows.result}
    # The type of an absent weight is never used.
    types |= {"TARGET": rows.target, "WEIGHT": rows.weight or rows.accumulator}
    entropy = "entropy" in rows.names
    flags = {"EXACT": True, "ONLY_TERMS": False, "READS_SAVED_OUTPUT": False, "ZERO": False, "KEEPS_ARGMAX": False}
    flags |= {f"HAS_{name.upper()}": name in rows.names for name in TENSORS}
    flags |= {"LOSS": rows.loss, "SCALAR": rows.scalar}
    flags |= {"SMOOTHED": rows.smoothing != 0, "HAS_Z_LOSS": rows.z_loss != 0}
    numbers = {"SUMS": 1 + entropy, "RESCALED": 3 if entropy else 1, "SUM_ZL": 1 if entropy else -1, "THREADS": THREADS}
    return declarations(types, typed(flags | numbers))
