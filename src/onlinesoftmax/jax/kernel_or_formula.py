"""The kernels of sampling and routing in JAX programs, and XLA's operations where no kernel takes a call."""

from __future__ import annotations

from collections.abc import Callable

from ..core.arrays import Array
from ..core.device import Device
from ..core.plan_log import Kind, note_plan
from ..kernels.cuda import xla_handler
from .device import UNNAMED_GPU, to_lower_for
from .signature import Values

Planned = tuple[str, Callable[[], list[Array]]] | str
"""The plan of a kernel in a few words, and the function that returns its results.

Or one sentence: the reason why no kernel takes a call.
"""

Kernel = Callable[[Device, Values], Planned]
"""kernel(device, operands) plans the kernel of a function for a GPU."""


def run(
    platform: str, name: str, operands: Values, formula: Callable[[Values], list[Array]], kernel: Kernel | None
) -> list[Array]:  # fmt: skip
    """The results of a function of rows on the arrays of one device: by its kernel, or by its formula.

    Args:
        platform: "cuda" for a program of NVIDIA GPUs whose arrays here are those of one GPU; anything else runs the
            formula.
        name: Name of the public function.
        operands: Arrays by name, the logits "x" among them.
        formula: Returns the results by XLA's operations.
        kernel: The kernel of the function; None where it has none.
    """
    sizes = [size for t in operands.values() for size in t.shape]
    if kernel is None or platform != "cuda" or not all(isinstance(size, int) for size in sizes):
        return formula(operands)
    device, x = to_lower_for(), operands["x"]
    found = _unavailable(device) or kernel(device, operands)
    kind = Kind(name, tuple(x.shape), x.dtype.name, device.name)
    if isinstance(found, str):
        note_plan(kind, "XLA's operations", found)
        return formula(operands)
    plan, call = found
    note_plan(kind, plan, "a kernel takes the call")
    return call()


def _unavailable(device: Device) -> str | None:
    """The reason why programs for a device call no kernels; None where they do."""
    if device is UNNAMED_GPU:
        return "JAX has no NVIDIA GPU, and the program names none"
    return xla_handler.unavailable()
