"""The calls of `sample` that kernels take; `explain` asks the same functions."""

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


def is_unfiltered(filters: bool, top: int) -> bool:
    """True where unfiltered.cuh takes a call, which keeps every token and lists none."""
    return not filters and not top
