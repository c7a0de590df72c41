"""The launch of reduction.cuh: the total of a loss and the divisor of its mean."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..reduction import Reduction
from . import driver
from .arguments import EMPTY
from .source import declarations, program, typed

if TYPE_CHECKING:
    import torch

THREADS, BATCH = 512, 8
"""Threads of a block, and rows that a thread loads at once."""

ROWS_PER_BLOCK = THREADS * BATCH
"""Rows that one block takes; a second block costs a message, which takes as long as the reading of a batch."""

MOST_BLOCKS = 128
"""Largest number of blocks; at most THREADS, because each thread of the last block receives the sums of one block."""

NAME = "reduction_kernel"

POINTERS = ("losses", "target", "weight", "count", "divisor", "out", "mail")
"""Fields of the kernel's parameter, in the order of the struct; then come rows, classes and ignore_index."""

_OUT, _MAIL = POINTERS.index("out"), POINTERS.index("mail")


def bind(reduction: Reduction) -> Callable[[torch.Tensor, dict[str, Any]], None]:
    """The function run(out, tensors) for tensors on one device."""
    # The source of the kernel needs no torch.
    import torch

    from .launch import small_kernel, words_of_stream

    blocks = blocks_of(reduction)
    inputs = tuple((POINTERS.index(name), name) for name in reduction.tensors)
    stream_of = torch._C._cuda_getCurrentRawStream

    # The kernel of the total follows the loss kernel, and waits itself before it reads the losses.
    pool = small_kernel(source(reduction), NAME, blocks, THREADS, pack(reduction), reduction.result is not None)
    take, give_back = pool.take, pool.give_back

    def run(out: torch.Tensor, tensors: dict[str, Any]) -> None:
        index = out.get_device()
        call = take(index)
        fields = call.fields
        for field, name in inputs:
            fields[field] = tensors[name].data_ptr()
        fields[_OUT] = out.data_ptr()
        call.config.stream = stream = stream_of(index)
        if blocks > 1:
            fields[_MAIL] = words_of_stream("reduction", MAIL_WORDS, EMPTY, index, stream).data_ptr()
        driver.launch(call, index, "launching reduction_kernel")
        give_back(call)

    return run


def blocks_of(reduction: Reduction) -> int:
    """Blocks of the launch; they depend on nothing but the rows, so the sum has the same bits on every device."""
    return min(MOST_BLOCKS, -(-reduction.rows // ROWS_PER_BLOCK))


def pack(reduction: Reduction) -> bytes:
    """The kernel's parameter with zeros for the pointers."""
    pointers = [0] * len(POINTERS)
    return struct.pack(f"={len(POINTERS) + 3}q", *pointers, reduction.rows, reduction.classes, reduction.ignore_index)


def source(reduction: Reduction) -> str:
    """The source of the kernel."""
    return program(prologue(reduction), "row/warp_shuffle", "channel/channel", "small/reduction")


def prologue(reduction: Reduction) -> str:
    """Types and constants of the kernel."""
    accumulator = reduction.accumulator
    types = {"ACC": accumulator, "RESULT": reduction.result or accumulator}
    types["SUM"] = "DoubleDouble" if accumulator == "float64" else "double"
    # The type of an absent tensor is never used.
    types |= {"TARGET": reduction.target or "uint8", "WEIGHT": reduction.weight or accumulator}
    flags = {
        "ADDS_LOSSES": reduction.result is not None,
        "COUNTS": reduction.target is not None,
        "WEIGHTED": reduction.weight is not None,
        "DIVIDES": reduction.divides,
        "KEEPS": reduction.keeps,
    }
    return declarations(types, typed({**flags, "THREADS": THREADS, "BATCH": BATCH}))


MAIL_WORDS = 4 * MOST_BLOCKS
"""64-bit words of the mailboxes: for each block, two sums of up to two float64."""
