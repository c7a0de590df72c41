"""The source and the launch of unfiltered.cuh: a token of each row without a filter."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from struct import Struct
from typing import NamedTuple

import torch
from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]  # its stub lacks it

from ...core.device import Device
from ...core.plan_log import Kind, note_plan
from ...kernels import cuda
from ...kernels.cuda import driver
from ...kernels.cuda.launch import loaded
from ...kernels.cuda.source import program
from ...torch.device import from_torch
from ...torch.fast_path import MOST_ENTRIES
from ..results import Sampled
from .choice import refusal
from .source import constants_of, slice_of
from .stream import STAGES, TOKENS, stream_bytes

Tensor = torch.Tensor

NAME = "unfiltered_kernel"

_SHARED = "row/warp_shuffle", "channel/barrier", "channel/cluster_messages"
_OWN = "scores", "noise", "stream", "parts", "race", "unfiltered"

FILES = (*((name, cuda.__name__) for name in _SHARED), *((name, str(__package__)) for name in _OWN))
"""Files of the kernel, in the order of inclusion."""

POINTERS = ("x", "temperature", "seed", "offset", "token", "logprob", "lse", "kept", "valid")
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("stride", "cols", "slice", "temperature_bits", "seed_number", "offset_number")

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


def dynamic_bytes(shape: Shape) -> int:
    """Bytes of the logits that are under way."""
    return stream_bytes(shape.threads, shape.dtype)


@cache
def source(shape: Shape) -> str:
    """The source of a kernel."""
    return program(prologue(shape), *FILES)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    resident = RESIDENT_THREADS // (1 if shape.aligned else 2) // shape.threads
    numbers = {
        "THREADS": shape.threads, "RESIDENT": max(resident, 1), "CLUSTER": shape.cluster, "STAGES": STAGES,
        "ALIGNED": shape.aligned, "RAW": shape.raw,
    }  # fmt: skip
    return constants_of(shape.dtype, numbers)


def is_aligned(scores: Tensor) -> bool:
    """True where every row of (rows, tokens) begins on 16 bytes."""
    return not (scores.data_ptr() | scores.stride(0) * scores.element_size()) % 16


Run = Callable[[Tensor, Tensor | float, Tensor | int, Tensor | int], Sampled]


def bind(scores: Tensor, rows: tuple[int, ...], raw: bool) -> Run | None:
    """The function run(x, temperature, seed, offset) that samples a token of each row; None if the kernel does not.

    x has its rows where `scores` has them.  The others are numbers, or contiguous tensors with one a row: float32
    or int64.

    Args:
        scores: Logits (rows, tokens) on a GPU that are the scores: no score option is given.
        rows: Shape of the results.
        raw: As for `sample` in run.py.
    """
    count, cols = scores.shape
    index, dtype = scores.get_device(), str(scores.dtype).removeprefix("torch.")
    device = from_torch("cuda", index)
    if refusal(dtype, count, scores.stride(1) == 1, device):
        return None
    shape = shape_of(count, cols, dtype, is_aligned(scores), raw, device)
    if count * shape.cluster >= 1 << 31:
        return None
    return _bound(shape, rows, count, scores.stride(0), cols, index)


@lru_cache(MOST_ENTRIES)
def _bound(shape: Shape, rows: tuple[int, ...], count: int, stride: int, cols: int, index: int) -> Run:
    """`bind` of rows of these properties."""
    plan = f"unfiltered.cuh, {shape.cluster} x {shape.threads} threads for a row"
    note_plan(Kind("sample", (count, cols), shape.dtype, f"cuda:{index}"), plan, "no filter is given")
    steps = tuple(math.prod(rows[i + 1 :]) for i in range(len(rows)))
    stream_of, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    launch, dynamic = driver.library().cuLaunchKernelEx, dynamic_bytes(shape)

    def new_call(index: int) -> driver.Arguments:
        config = driver.launch_config(count * shape.cluster, 1, shape.threads, dynamic, shape.cluster, False)
        kernel = loaded(source(shape), NAME, index, dynamic, shape.cluster)
        call = driver.Arguments(bytes(8 * (len(POINTERS) + len(NUMBERS))), config, kernel)
        call.fields[_STRIDE : _STRIDE + 3] = [stride, cols, slice_of(cols, shape.cluster)]
        return call

    pool = driver.ArgumentPool(new_call)
    # This allocation takes half the host time of torch.empty.
    take, give_back, new = pool.take, pool.give_back, _empty_strided_cuda

    def run(x: Tensor, temperature: Tensor | float, seed: Tensor | int, offset: Tensor | int) -> Sampled:
        if current_device() != index:
            # The default stream is that of the current device.
            with torch.cuda.device(index):
                return run(x, temperature, seed, offset)
        token, kept, valid = new(rows, steps, _WHOLE), new(rows, steps, _WHOLE), new(rows, steps, _FLAG)
        logprob, lse = new(rows, steps, _REAL), new(rows, steps, _REAL)
        call = take(index)
        fields = call.fields
        fields[0] = x.data_ptr()
        if isinstance(temperature, Tensor):
            fields[1] = temperature.data_ptr()
        else:
            fields[1], fields[_NUMBER] = 0, _bits_of(temperature)
        for i, value in (2, seed), (3, offset):
            if isinstance(value, Tensor):
                fields[i] = value.data_ptr()
            else:
                fields[i], fields[_NUMBER - 1 + i] = 0, value
        fields[4], fields[5], fields[6] = token.data_ptr(), logprob.data_ptr(), lse.data_ptr()
        fields[7], fields[8] = kept.data_ptr(), valid.data_ptr()
        call.config.stream = stream_of(index)
        status = launch(*call.addresses)
        if status:
            driver.check(driver.retry_with_context(status, call.addresses, index), "launching unfiltered_kernel")
        give_back(call)
        return Sampled(token, logprob, lse, kept, valid, None, None, None)

    return run


_STRIDE, _NUMBER = len(POINTERS), len(POINTERS) + 3
_WHOLE, _REAL, _FLAG = torch.int64, torch.float32, torch.bool


def _bits_of(x: float) -> int:
    """The bits of a number in float32."""
    return int.from_bytes(_FLOAT.pack(x), "little")


_FLOAT = Struct("<f")
