"""The source of verify.cuh: which drafts of a row stay, and the token that follows them."""

from __future__ import annotations

from typing import NamedTuple

from ...core.device import Device
from ...kernels.cuda.arguments import OwnKernel
from . import unfiltered
from .source import constants_of

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


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    numbers = {
        "THREADS": shape.threads, "CLUSTER": shape.cluster, "RESIDENT": max(RESIDENT_THREADS // shape.threads, 1),
        "ALIGNED": shape.aligned, "DRAFT": shape.draft,
    }  # fmt: skip
    return constants_of(shape.dtype, numbers)


KERNEL = OwnKernel("verify_kernel", FILES, POINTERS, prologue, package=__package__)
