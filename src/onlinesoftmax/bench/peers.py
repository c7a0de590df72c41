"""Who is compared: ours, and others who offer the same operation."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from .cases import Case

Function = Callable[[Any], Any]
"""From the input tensor to the output."""


class Peer:
    """Someone to compare.  `device_type` is where the comparison runs: "cuda" or "cpu"."""

    name: str
    distribution: str | None = None
    """What to install, and whose version is recorded."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def why_absent(self) -> str | None:
        """Why it cannot take part at all on this machine; None when it can."""
        return None

    def supports(self, case: Case) -> str | None:
        """Why it is not asked this case; None when it is.  What it refuses itself, it says by raising."""
        return None

    def prepare(self, case: Case) -> Function:
        """Its function for the case."""
        raise NotImplementedError


class Ours(Peer):
    """Our library through its public functions, planned or forced."""

    name = "ours"

    def __init__(self, device_type: str, backend: str | None = None, strategy: str | None = None) -> None:
        super().__init__(device_type)
        self.backend, self.strategy = backend, strategy

    def prepare(self, case: Case) -> Function:
        """The public function with the forced backend and strategy."""
        from .. import api

        function, dim, backend, strategy = getattr(api, case.operation), case.dim, self.backend, self.strategy
        # As a user calls it: arguments that are not forced would cost time to pass.
        if backend is None and strategy is None:
            return lambda x: function(x, dim)
        return lambda x: function(x, dim, backend=backend, strategy=strategy)


class Torch(Peer):
    """PyTorch's own function: the yardstick of correctness too."""

    name = "torch"
    distribution = "torch"

    def prepare(self, case: Case) -> Function:
        """`torch.softmax` and its sisters."""
        import torch

        function, dim = getattr(torch, case.operation), case.dim
        return lambda x: function(x, dim)


class Compiled(Torch):
    """torch.compile of PyTorch's function, for exactly this shape."""

    name = "compile"

    def prepare(self, case: Case) -> Function:
        """A fresh compilation: after eight shapes of one function dynamo would fall back to eager."""
        import torch

        torch._dynamo.reset()
        compiled: Function = torch.compile(super().prepare(case), dynamic=False)
        return compiled


class _GpuSoftmax(Peer):
    """A library with a softmax over the last dimension for NVIDIA GPUs."""

    module: str

    def why_absent(self) -> str | None:
        """Not installed, or broken, or no GPU."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"not installed: pip install {self.distribution}"
        if self.device_type != "cuda":
            return "needs an NVIDIA GPU"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a foreign package may fail in any way; the reason is reported
            return f"cannot be imported: {first_line(error)}"
        return None

    def supports(self, case: Case) -> str | None:
        """The forward softmax over the last dimension alone."""
        if case.operation != "softmax":
            return f"has no {case.operation}"
        return None if case.dim == len(case.shape) - 1 else "takes the last dimension only"


class Liger(_GpuSoftmax):
    """Liger-Kernel."""

    name, module, distribution = "liger", "liger_kernel.ops.softmax", "liger-kernel"

    def prepare(self, case: Case) -> Function:
        """Its autograd function, which is all it offers."""
        function: Function = importlib.import_module(self.module).LigerSoftmaxFunction.apply
        return function


class Quack(_GpuSoftmax):
    """Dao-AILab's quack."""

    name, module, distribution = "quack", "quack.softmax", "quack-kernels"

    def supports(self, case: Case) -> str | None:
        """Two dimensions."""
        return super().supports(case) or (None if len(case.shape) == 2 else "takes two dimensions only")

    def prepare(self, case: Case) -> Function:
        """Its public function."""
        function: Function = importlib.import_module(self.module).softmax
        return function


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Torch, Compiled, Liger, Quack)}
"""The others, by the name they have on the command line."""


def peers(names: Sequence[str], device_type: str) -> list[Peer]:
    """The others by name.

    Raises:
        ValueError: there is no such peer.

    Example:
        >>> [peer.name for peer in peers(["torch", "compile"], "cpu")]
        ['torch', 'compile']
    """
    for name in names:
        if name not in PEERS:
            raise ValueError(f"unknown peer {name!r}; there are: {', '.join(PEERS)}")
    return [PEERS[name](device_type) for name in dict.fromkeys(names)]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, short enough for a table; its type where it has none.

    >>> first_line(AssertionError()), first_line(ValueError("no"))
    ('AssertionError', 'no')
    """
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return line if len(line) <= 160 else line[:157] + "..."
