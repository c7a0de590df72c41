"""The sizes of prefetch.cuh, which brings the logits of a block through shared memory."""

from __future__ import annotations

from ...core.task import ITEMSIZE

TOKENS = 16
"""Tokens of a thread in a step."""

STAGES = 2
"""Steps that a thread loads ahead."""


def prefetch_bytes(threads: int, dtype: str) -> int:
    """Bytes of shared memory of the logits that are under way."""
    return STAGES * TOKENS * threads * ITEMSIZE[dtype]
