"""The calls of sampling that kernels take, and why they take no others; `explain` asks the same functions."""

from __future__ import annotations

from ...core.device import Device
from ...planner.proposal import no_gpu

DTYPES = ("float32", "float16", "bfloat16")


def refusal(dtype: str, rows: int, device: Device) -> str | None:
    """Why no kernel takes a call, in one sentence; None if one may.

    Args:
        dtype: Name of the dtype of the logits.
        rows: Number of rows.
        device: Where the kernel is to run.
    """
    if reason := no_gpu("cuda", device):
        return reason
    if dtype not in DTYPES:
        return f"kernels read {', '.join(DTYPES)}, and the logits have {dtype}"
    return None if rows else "there are no rows"


def lists_at_most(most: int) -> str:
    """Why no kernel takes a call that lists more than `most` tokens."""
    return f"a kernel lists at most {most} tokens"


def needs_more_memory(device: Device) -> str:
    """Why no kernel takes rows whose blocks do not fit in shared memory."""
    return f"the blocks of a row need more shared memory than those of {device.name} have"


def is_unfiltered(filters: bool, top: int) -> bool:
    """True where unfiltered.cuh takes a call, which keeps every token and lists none."""
    return not filters and not top
