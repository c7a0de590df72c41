"""The base of the explanations of operations with kernels of their own, such as `sample` and `route`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

from ..core.device import Device
from ..core.units import duration, size
from ..kernels import registry
from ..kernels.cuda import xla_handler

EAGER = {"torch": "PyTorch's operations", "jax": "XLA's operations"}
"""Name of the way without a kernel of ours, by framework."""


class OtherWay(NamedTuple):
    """A way that the call does not take.

    Attributes:
        name: Name of a kernel, or one of EAGER.
        why_not: The reason, in one sentence.
    """

    name: str
    why_not: str


@dataclass(frozen=True)
class WayExplanation(ABC):
    """The result of `explain` for such an operation; `str()` of it is a text to read.

    Attributes:
        problem: What the way depends on.
        device: The device that was planned for.
        kernel: The kernel that takes the call; None where the operations of the framework do.
        reason: One sentence: why the call takes this way.
        others: The other ways, with the reasons.
    """

    function: ClassVar[str]
    """Name of the operation."""

    problem: Any
    device: Device
    kernel: Any
    reason: str
    others: tuple[OtherWay, ...]

    @property
    @abstractmethod
    def asked(self) -> str:
        """The call in one line."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the kernel, or that of EAGER."""

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """The bytes of the logits."""

    @property
    @abstractmethod
    def written_bytes(self) -> int:
        """The bytes that are returned."""

    @property
    @abstractmethod
    def launch(self) -> str:
        """The blocks and threads of the kernel."""

    @property
    def bytes(self) -> int:
        """The fewest bytes that any way moves: the logits once, and what is returned."""
        return self.read_bytes + self.written_bytes

    @property
    def floor_us(self) -> float:
        """Microseconds of these bytes at the bandwidth of the device."""
        return self.bytes / (self.device.bandwidth * 1e3)

    def facts(self) -> list[tuple[str, str]]:
        """Names and values, in reading order."""
        return [
            ("way", f"{self.name}: {self.reason}"),
            *([("launch", self.launch)] if self.kernel else []),
            ("bytes", f"{size(self.bytes)}: the logits once, and {size(self.written_bytes)} of results"),
            ("floor", f"{duration(self.floor_us)} at {self.device.bandwidth:.0f} GB/s"),
        ]

    def as_dict(self) -> dict[str, Any]:
        """The call, its way, and why it takes no other, for JSON."""
        return {
            "function": self.function,
            "problem": self.problem._asdict(),
            "device": asdict(self.device),
            "way": self.name,
            "kernel": self.kernel and self.kernel._asdict(),
            "reason": self.reason,
            "bytes": self.bytes,
            "floor_us": self.floor_us,
            "others": [other._asdict() for other in self.others],
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.asked}: {self.name}>"

    def __str__(self) -> str:
        lines = [self.asked, *(f"  {name:<8}{value}" for name, value in self.facts())]
        return "\n".join([*lines, *(f"  not {other.name}: {other.why_not}" for other in self.others)])


def why_no_cuda(framework: str, device: Device, named: bool) -> str | None:
    """The reason why a framework cannot call the CUDA kernels on a device; None where it can.

    JAX can compile a program for a GPU elsewhere, so without a driver there is no reason.

    Args:
        framework: "torch" or "jax".
        device: The device.
        named: True for a device that this machine need not have.
    """
    if device.kind != "cuda":
        return f"{device.name} is no NVIDIA GPU"
    if named:
        return None
    return xla_handler.unavailable() if framework == "jax" else registry.unavailable("cuda")
