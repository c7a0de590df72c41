"""The source of verify.cuh: which drafts of a row stay, and the token that follows them."""

from __future__ import annotations

from typing import NamedTuple

from ...core.device import Device
from ...kernels.cuda.arguments import OwnKernel
from . import source, unfiltered
from .source import constants_of
from .which_kernel import needs_more_memory, refusal

FILES = (
    "row/warp_shuffle", "channel/barrier", "channel/cluster_messages", "channel/cluster_words", "scores", "noise",
    "exchange", "verify",
)  # fmt: skip
"""Files of the kernel, in the order of inclusion."""

MODEL = "x", "largest", "key", "sum", "valid"
"""Fields of a model."""

POINTERS = (
    *(f"target_{name}" for name in MODEL), *(f"draft_{name}" for name in MODEL), "sampled", "drafts", "temperature",
    "min_p", "seed", "offset", "accepted", "tokens", "logprobs", "valid",
)  # fmt: skip
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = (
    "target_stride", "draft_stride", "cols", "slice", "n", "narrow", "temperature_bits", "min_p_bits", "seed_number",
    "offset_number",
)  # fmt: skip

RESIDENT_THREADS = 512
"""Threads of a multiprocessor that the registers have to suffice for."""


class Shape(NamedTuple):
    """The constants of a kernel.

    Attributes:
        dtype: Dtype of the logits of both models: "float32", "float16" or "bfloat16".
        cluster: Blocks of a row.
        threads: Threads of a block.
        aligned: True where the logits of every position begin on 16 bytes.
        draft: True where the draft model has logits.
    """

    dtype: str
    cluster: int
    threads: int
    aligned: bool
    draft: bool


def shape_of(rows: int, cols: int, dtype: str, aligned: bool, draft: bool, device: Device) -> Shape:
    """The kernel of a call: as many blocks read a position of each row as where it is sampled without a filter."""
    like = unfiltered.shape_of(rows, cols, dtype, aligned, False, device)
    return Shape(dtype, like.cluster, like.threads, aligned, draft)


class Shapes(NamedTuple):
    """The kernels of a call, in the order of their launches.

    Attributes:
        positions: Those of sample.cuh, one for each model that has logits.
        each: Number of positions that each of them reads for a row of drafts.
        decision: That of verify.cuh.
    """

    positions: tuple[source.Shape, ...]
    each: tuple[int, ...]
    decision: Shape


def shapes_of(
    rows: int, n: int, cols: int, logits: tuple[str, bool, bool], device: Device, listed: int | None = None
) -> Shapes | str:
    """The kernels of a call, or why none take it.

    Args:
        rows: Number of rows of drafts.
        n: Number of drafts of a row.
        cols: Number of tokens.
        logits: Their dtype, True where those of every position begin on 16 bytes, and True where the draft model has
            some.
        device: Where the kernels are to run.
        listed: As Parameters.listed.
    """
    dtype, aligned, draft = logits
    if reason := refusal(dtype, rows, device):
        return reason
    # Without drafts, the logits of the draft model are empty.
    each = (n + 1, n) if draft and n else (n + 1,)
    positions = []
    for count in each:
        found = source.shape_of(rows * count, cols, dtype, aligned, device, listed)
        if found is None:
            return needs_more_memory(device)
        positions.append(found)
    return Shapes(tuple(positions), each, shape_of(rows, cols, dtype, aligned, len(each) == 2, device))


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    numbers = {
        "THREADS": shape.threads, "CLUSTER": shape.cluster, "RESIDENT": max(RESIDENT_THREADS // shape.threads, 1),
        "ALIGNED": shape.aligned, "DRAFT": shape.draft,
    }  # fmt: skip
    return constants_of(shape.dtype, numbers)


KERNEL = OwnKernel("verify_kernel", FILES, POINTERS, prologue, package=__package__)
