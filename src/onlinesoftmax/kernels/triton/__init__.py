"""The `triton` backend: the strategies `row`, `looped`, `split` and `column` as Triton kernels.

Read state.py, then formulas.py, operands.py and tiles.py.  After them each strategy is one page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.device import KNOWN, Device
from ..registry import has_nvidia_gpu, module_missing, strategy_module
from ..report import Kernel
from ..request import Request


def unavailable() -> str | None:
    """The reason why these kernels cannot run on this machine; None where they can."""
    if reason := _not_installed():
        return reason
    if not has_nvidia_gpu() and not interpreted():
        return "no NVIDIA GPU; Triton's interpreter runs the kernels on a CPU when TRITON_INTERPRET=1 is set"
    return None


def interpreted() -> bool:
    """True where Triton's interpreter runs the kernels: on any device, and slowly."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def prepare(request: Request) -> Callable[[Any, Any, dict[str, Any]], None]:
    """The function run(x, y, more) that runs a request on torch tensors."""
    return program(request).bind(request.task.outputs[0])


def compile_request(request: Request, device: Device) -> list[Kernel]:
    """The kernels of a request in launch order, compiled for a device that need not be present.

    Raises:
        RuntimeError: PyTorch or Triton is missing, or Triton's interpreter is on.
    """
    if reason := _not_installed():
        raise RuntimeError(reason)
    from .compile import compile_program

    return compile_program(program(request), request.task.dtypes, device)


PLANNED_FOR = KNOWN["h200"]
"""The GPU that plans are made for in the interpreter, which is no device of its own."""


def _not_installed() -> str | None:
    return module_missing("torch", "triton") or module_missing("triton", "triton")


def program(request: Request) -> Any:
    """The launches of a request."""
    strategy = strategy_module(request.operation, "triton", request.plan.strategy)
    from .launch import TritonRequest

    return strategy.program(TritonRequest(request.task, request.plan))
