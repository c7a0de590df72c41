"""The `cuda` backend: the strategies `row`, `cluster`, `grid` and `looped` in CUDA C++.

Reading order, by folder:

- numeric/: element types, loads and stores (numbers.cuh), the recurrence (state.cuh), the operations (formulas.cuh).
- row/: the operands of a row and its scores (operands.cuh), merges of the states of lanes and warps (block_reduce.cuh),
  and the row pass: load, score, reduce and write the slice that a group of lanes holds (slice.cuh).
- strategy/: a folder for each strategy, with its kernel and the blocks that it proposes to the planner.  `grid` has
  three kernels; two of them load through the ring of ring.cuh.
- channel/: the words that travel.  channel.cuh has the units of a message.  team.cuh, mailboxes.cuh and team_board.cuh
  serve the blocks of `grid`, cluster_states.cuh those of `cluster`, processes.cuh the GPUs that share rows,
  loss_words.cuh a loss that is reduced to a scalar.
- pass/: what goes before or after the row pass: scalar_loss.cuh in the same launch, the others in their own.

source.py, messages.py and params.py generate the constants and the parameters of a kernel.  docs/protocols.md has the
proofs of all messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..registry import has_nvidia_gpu, module_missing

if TYPE_CHECKING:
    # The planner imports the proposals of the strategies from this package, and a request has a plan.
    from ...core.device import Device
    from ..report import Kernel
    from ..request import Request

COMPILER = "cuda.core"


def unavailable() -> str | None:
    """The reason why these kernels cannot run on this machine; None when they can."""
    if reason := module_missing("torch", "cuda") or module_missing(COMPILER, "cuda"):
        return reason
    if not has_nvidia_gpu():
        return "no NVIDIA GPU"
    return why_not_compiled()


def why_not_compiled() -> str | None:
    """The reason why NVRTC cannot compile, or the driver cannot load the machine code; None when both can."""
    from . import driver
    from .compile import nvrtc_version

    try:
        version = nvrtc_version()
    except Exception as error:  # cuda.bindings raises its own types for a missing library
        return f"NVRTC cannot be loaded ({error}): pip install 'onlinesoftmax[cuda]'"
    major, supported = int(version.partition(".")[0]), driver.version()
    if major > supported[0]:
        has = "{}.{}".format(*supported)
        return f"NVRTC {version} compiles for drivers of CUDA {major}, and this one supports {has}: update the driver"
    return None


def prepare(request: Request) -> Callable[[Any, Any, dict[str, Any]], None]:
    """The function run(x, y, more) that runs a request on torch tensors."""
    from .launch import bind

    return bind(request)


def compile_request(request: Request, device: Device) -> list[Kernel]:
    """The kernel of a request, compiled for a device that this machine need not have.

    Raises:
        RuntimeError: cuda.core, which finds NVRTC, is missing.
    """
    if reason := module_missing(COMPILER, "cuda"):
        raise RuntimeError(reason)
    from .compile import compile_kernel

    return [compile_kernel(request, device)]
