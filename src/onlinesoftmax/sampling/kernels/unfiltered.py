"""The source and the launch of unfiltered.cuh: a token of each row without a filter."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

from ...core.device import Device
from ...core.options import LARGEST_FLOAT32
from ...core.task import ITEMSIZE
from ...kernels import cuda
from ...kernels.cuda import driver
from ...kernels.cuda.launch import loaded
from ...kernels.cuda.source import declarations, program, typed
from ...torch.device import from_torch
from ..masses import MASS_BITS, POWER_OF_TWO
from ..philox import ROUNDS
from ..results import Sampled
from .choice import refusal

Tensor = torch.Tensor

NAME = "unfiltered_kernel"

_SHARED = "row/warp_shuffle", "channel/barrier", "channel/cluster_messages"
_OWN = "scores", "noise", "stream", "parts", "race", "unfiltered"

FILES = (*((name, cuda.__name__) for name in _SHARED), *((name, str(__package__)) for name in _OWN))
"""Files of the kernel, in the order of inclusion."""

POINTERS = ("x", "temperature", "seed", "offset", "token", "logprob", "lse", "kept", "valid")
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("stride", "cols", "slice")

TOKENS = 16
"""Tokens of a thread in a step."""

STAGES = 2
"""Steps that a thread loads ahead."""

MOST_THREADS = 512
"""Most threads of a block."""

RESIDENT_THREADS = 1024
"""Threads of a multiprocessor that the registers have to suffice for; half as many where loads pass through them."""


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype: Dtype of the logits: "float32", "float16" or "bfloat16".
        cluster: Blocks of a row.
        threads: Threads of a block.
        aligned: True where every row begins on 16 bytes.
        raw: True for log-probabilities of the logits without temperature.
    """

    dtype: str
    cluster: int
    threads: int
    aligned: bool
    raw: bool


def shape_of(rows: int, cols: int, dtype: str, aligned: bool, raw: bool, device: Device) -> Shape:
    """The kernel of a call.

    A block takes some microseconds, however few tokens it has: with 4 blocks of a row, of which a multiprocessor gets
    two, 64 x 128256 float32 takes 8 microseconds more than with 2 on an H100.
    """
    cluster = 1
    while cluster < most_blocks(device) and 2 * rows * cluster <= device.multiprocessors and cols > 4096 * cluster:
        cluster *= 2
    threads = MOST_THREADS
    while threads > 64 and slice_of(cols, cluster) <= TOKENS * threads // 2:
        threads //= 2
    return Shape(dtype, cluster, threads, aligned, raw)


def most_blocks(device: Device) -> int:
    """Most blocks of a cluster; 1 where there are no clusters."""
    return 16 if device.compute_capability[0] == 9 else 8 if device.compute_capability >= (9, 0) else 1


def slice_of(cols: int, cluster: int) -> int:
    """Tokens of a block: a multiple of 8, which is whole chunks, and whole blocks of the noise."""
    return -(-cols // (8 * cluster)) * 8


def dynamic_bytes(shape: Shape) -> int:
    """Bytes of the logits that are under way."""
    return STAGES * TOKENS * shape.threads * ITEMSIZE[shape.dtype]


@cache
def source(shape: Shape) -> str:
    """The source of a kernel."""
    return program(prologue(shape), *FILES)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    resident = RESIDENT_THREADS // (1 if shape.aligned else 2) // shape.threads
    numbers = {
        "THREADS": shape.threads, "RESIDENT": max(resident, 1), "CLUSTER": shape.cluster,
        "VECTOR": 16 // ITEMSIZE[shape.dtype], "STAGES": STAGES, "MASS_BITS": MASS_BITS, "ROUNDS": ROUNDS,
        "ALIGNED": shape.aligned, "RAW": shape.raw,
    }  # fmt: skip
    floats = {f"POWER_{i}": float(c) for i, c in enumerate(POWER_OF_TWO)} | {"LARGEST_FLOAT32": LARGEST_FLOAT32}
    doubles = {"LOG2_E": math.log2(math.e), "LOG_2": math.log(2.0)}
    constants = [("float", name, f"{value!r}f") for name, value in floats.items()]
    constants += [("double", name, repr(value)) for name, value in doubles.items()]
    return declarations({"X": shape.dtype}, [*typed(numbers), *constants])


def sample(scores: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor, raw: bool) -> Sampled | None:
    """A token of each row of logits (rows, tokens) on a GPU; None if the kernel does not take them.

    Args:
        scores: Logits that are the scores: no score option is given.
        temperature, seed, offset: Of each row.
        raw: As for `sample` in run.py.
    """
    rows, cols = scores.shape
    index, dtype = scores.get_device(), str(scores.dtype).removeprefix("torch.")
    if refusal(dtype, rows, scores.stride(1) == 1) or cols >> 32:
        return None
    aligned = not (scores.data_ptr() | scores.stride(0) * scores.element_size()) % 16
    shape = shape_of(rows, cols, dtype, aligned, raw, from_torch("cuda", index))
    if rows * shape.cluster >= 1 << 31:
        return None
    whole, real, device = torch.int64, torch.float32, scores.device
    token, kept = (torch.empty(rows, dtype=whole, device=device) for _ in range(2))
    logprob, lse = (torch.empty(rows, dtype=real, device=device) for _ in range(2))
    valid = torch.empty(rows, dtype=torch.bool, device=device)
    pool = _pool(shape, index)
    call = pool.take(index)
    tensors = scores, temperature, seed, offset, token, logprob, lse, kept, valid
    call.fields[: len(tensors)] = [t.data_ptr() for t in tensors]
    call.fields[len(tensors) :] = [scores.stride(0), cols, slice_of(cols, shape.cluster)]
    call.config.grid[0] = rows * shape.cluster
    call.config.stream = torch._C._cuda_getCurrentRawStream(index)
    driver.launch(call, index, "launching unfiltered_kernel")
    pool.give_back(call)
    return Sampled(token, logprob, lse, kept, valid, None, None)


@cache
def _pool(shape: Shape, index: int) -> driver.ArgumentPool:
    """The arguments of launches."""

    def new_call(index: int) -> driver.Arguments:
        config = driver.launch_config(1, 1, shape.threads, dynamic_bytes(shape), shape.cluster, False)
        kernel = loaded(source(shape), NAME, index, dynamic_bytes(shape), shape.cluster)
        return driver.Arguments(bytes(8 * (len(POINTERS) + len(NUMBERS))), config, kernel)

    return driver.ArgumentPool(new_call)
