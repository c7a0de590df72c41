"""The memory that a case needs, how much is free, and the memory that a call takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.task import ITEMSIZE
from .cases import Case


def lacks_memory(case: Case, device: Any) -> str | None:
    """The reason why a case does not fit in memory: inputs, copy, two results and float64 pieces are held at once."""
    # Scores in elementary float32 operations take three more tensors of twice the bytes.
    needed = (case.declaration.inputs + 3 + 6 * bool(case.fused)) * case.tensor_bytes
    needed += case.elements * ("mask" in case.fused) + 6 * 8 * min(case.elements, 1 << 24)
    # Log-probabilities in elementary operations keep tensors of the accumulator's dtype, more with autograd.
    wide = 6 * case.with_gradient or 4 * case.declaration.has_target
    needed += wide * case.elements * ITEMSIZE[case.accumulator]
    free = _free_bytes(device)
    if free is None or needed <= free:
        return None
    return f"needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"


def _free_bytes(device: Any) -> int | None:
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    try:
        # Linux does not refuse the allocation; it kills the process later.
        with open("/proc/meminfo") as lines:  # noqa: PTH123  a file of the operating system
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def extra_bytes(call: Callable[[], Any], device: Any) -> int | None:
    """Peak bytes that PyTorch's allocator gives to one call, less the bytes of the result; None on a CPU.

    The number is negative where the result is in the memory of the input.
    """
    import torch

    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    found = call()
    torch.cuda.synchronize(device)
    tensors = found if isinstance(found, tuple) else (found,)
    return int(torch.cuda.max_memory_allocated(device) - before - sum(t.nbytes for t in tensors))


def out_of_memory(error: BaseException) -> bool:
    """True for an error that says that memory is exhausted."""
    import torch

    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text
