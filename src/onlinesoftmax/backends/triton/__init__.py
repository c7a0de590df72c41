"""The `triton` backend: the strategies `row`, `looped`, `split` and `column` as Triton kernels.

Read state.py, then ops.py, operands.py and tiles.py; then any strategy is a page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...layout import Layout
from ...plan import Plan
from ...registry import module_missing


def unavailable() -> str | None:
    """Why these kernels cannot run on this machine's GPU; None when they can."""
    for module in ("torch", "triton"):
        if reason := module_missing(module, "triton"):
            return reason
    import torch

    if not torch.cuda.is_available() and not interpreted():
        return "no NVIDIA GPU; Triton's interpreter runs the kernels on a CPU when TRITON_INTERPRET=1 is set"
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on any device and slowly."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def prepare(
    operation: str, plan: Plan, layout: Layout, x_dtype: str, y_dtype: str, **fused: Any
) -> Callable[[Any, Any, dict[str, Any]], None]:  # fmt: skip
    """The function run(x, y, more) that runs a plan on torch tensors of this layout; `fused` as in `Request`."""
    return program(operation, plan, layout, x_dtype, y_dtype, **fused).bind()


def program(operation: str, plan: Plan, layout: Layout, x_dtype: str, y_dtype: str, **fused: Any) -> Any:
    """The launches of a plan, unbound: `explain` compiles them for a GPU that may not be here."""
    from . import column, looped, row, split
    from .launch import Request

    strategies = {"row": row, "looped": looped, "split": split, "column": column}
    return strategies[plan.strategy].program(Request(operation, plan, layout, x_dtype, y_dtype, **fused))
