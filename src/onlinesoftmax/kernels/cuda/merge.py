"""The launches of merge.cuh: the merge of sharded rows, and the incoming gradients of their backward pass."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..sharded import FLOATS, INTEGERS, TENSORS, ShardedRows
from .arguments import OwnLaunch
from .source import declarations, program, typed

if TYPE_CHECKING:
    import torch

THREADS = 128


def bind(kernel: str, rows: ShardedRows) -> Callable[[dict[str, torch.Tensor]], None]:
    """The function run(tensors) of the kernel "merge" or "incoming", for the tensors of `rows.names` on one device."""
    # The source of the kernel needs no torch.
    from .launch import launcher

    launch, names = launcher(launch_of(kernel, rows)), [name if name in rows.names else "" for name in TENSORS]

    def run(tensors: dict[str, torch.Tensor]) -> None:
        launch(tensors["target"].get_device(), [tensors[name].data_ptr() if name else 0 for name in names])

    return run


def launch_of(kernel: str, rows: ShardedRows) -> OwnLaunch:
    """The launch of the kernel "merge" or "incoming"."""
    floats = (int.from_bytes(struct.pack("<d", getattr(rows, name)), "little") for name in FLOATS)
    numbers = *(getattr(rows, name) for name in INTEGERS), *floats
    blocks = -(-rows.rows // THREADS)
    # The states come from another stream, so the merge could not begin early.
    waits = kernel == "incoming"
    return OwnLaunch(source(rows.kind), f"{kernel}_kernel", TENSORS, numbers, blocks, THREADS, waits=waits)


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
