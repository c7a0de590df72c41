"""Who is compared: ours, and others who offer the same operation."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.operations import OPERATIONS
from . import formulas
from .cases import Case
from .formulas import Function
from .inputs import SCALE, SOFTCAP


class Peer:
    """Someone to compare.  `device_type` is where the comparison runs: "cuda" or "cpu"."""

    name: str
    distribution: str | None = None
    """What to install, and whose version is recorded."""
    flushes = 1
    """Flushes of L2 that take longer than the host needs to queue a call."""

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


def option_values(case: Case) -> dict[str, Any]:
    """What a case fuses that is no tensor, by the name of our functions' argument."""
    values: dict[str, Any] = {"scale": SCALE, "softcap": SOFTCAP, "causal": True}
    return {name: values[name] for name in case.fused if name in values}


class Ours(Peer):
    """Our library, planned or forced: its public functions, and its gradients without autograd."""

    name, framework = "ours", "torch"

    def __init__(self, device_type: str, backend: str | None = None, strategy: str | None = None) -> None:
        super().__init__(device_type)
        self.backend, self.strategy = backend, strategy

    def supports(self, case: Case) -> str | None:
        """Everything; but for the CPU, forced kernels aside, there is nothing of ours in a gradient."""
        if case.backward and self.device_type == "cpu" and self.backend != "triton":
            return "on a CPU PyTorch's own backward runs"
        return None

    def copy(self, x: Any) -> Function:
        """A call that copies a tensor, as the framework does it."""
        target = x.new_empty(x.shape)
        return lambda: target.copy_(x)

    def yardstick(self, case: Case) -> Function:
        """What ours must be as exact as: the framework's own function."""
        return formulas.own(case)

    def prepare(self, case: Case) -> Function:
        """The function with the forced backend and strategy."""
        if case.backward:
            return self._gradient(case)
        if case.fused:
            return self._fused(case)
        from .. import api

        function, dim, backend, strategy = getattr(api, case.operation), case.dim, self.backend, self.strategy
        # As a user calls it: arguments that are not forced would cost time to pass.
        if backend is None and strategy is None:
            return lambda x: function(x, dim)
        return lambda x: function(x, dim, backend=backend, strategy=strategy)

    def _gradient(self, case: Case) -> Function:
        import torch

        from ..core.call import Call, Settings
        from ..core.task import Choice
        from ..torch.gradients import Kept, backward

        dtype = getattr(torch, case.dtype)
        forward = OPERATIONS[case.operation].forward
        asked = Call(forward, None, Settings(case.dim, choice=Choice(self.backend, self.strategy)))
        if "lse" in forward.saved:
            return lambda x, lse, dlse: backward(asked, Kept(None, x, lse), dlse, dtype)
        return lambda y, dy: backward(asked, Kept(y), dy, dtype)

    def _fused(self, case: Case) -> Function:
        from .. import api

        options = option_values(case)
        forced = {"backend": self.backend, "strategy": self.strategy}
        options |= {name: value for name, value in forced.items() if value is not None}
        beside = [name for name in case.fused if name in ("bias", "mask")]
        function, dim = api.softmax, case.dim
        return lambda x, *more: function(x, dim, **options, **dict(zip(beside, more, strict=True)))


class Torch(Peer):
    """PyTorch's own function."""

    name = "torch"
    distribution = "torch"

    def prepare(self, case: Case) -> Function:
        """`torch.softmax` and its sisters, its gradients, or the scores written out before it."""
        return formulas.own(case)


class Compiled(Torch):
    """torch.compile of PyTorch's function, for exactly this shape."""

    name = "compile"

    def prepare(self, case: Case) -> Function:
        """A fresh compilation: after eight shapes of one function dynamo would fall back to eager."""
        import torch

        torch._dynamo.reset()
        # Its own gradients are calls that no compiler looks into.
        function = formulas.written_out(case) if case.backward else super().prepare(case)
        compiled: Function = torch.compile(function, dynamic=False)
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
        """Plain softmax over the last dimension and its gradient alone."""
        if case.forward != "softmax":
            return f"has no {case.operation}"
        if case.fused:
            return f"fuses no {' or '.join(case.fused)}"
        return None if case.dim == len(case.shape) - 1 else "takes the last dimension only"


class Liger(_GpuSoftmax):
    """Liger-Kernel."""

    name, module, distribution = "liger", "liger_kernel.ops.softmax", "liger-kernel"

    def prepare(self, case: Case) -> Function:
        """Its autograd function, which is all it offers; the gradient is what that calls."""
        module = importlib.import_module(self.module)
        if not case.backward:
            function: Function = module.LigerSoftmaxFunction.apply
            return function
        # As its forward pass sets it.  It writes to a tensor of its own and leaves dy alone.
        block, warps = module.calculate_settings(case.shape[-1])
        backward = module._softmax_backward
        return lambda y, dy: backward(dy, y, block, warps, False)


class Quack(_GpuSoftmax):
    """Dao-AILab's quack."""

    name, module, distribution = "quack", "quack.softmax", "quack-kernels"

    def supports(self, case: Case) -> str | None:
        """Two dimensions."""
        return super().supports(case) or (None if len(case.shape) == 2 else "takes two dimensions only")

    def prepare(self, case: Case) -> Function:
        """Its public function, or what that one's autograd calls."""
        module = importlib.import_module(self.module)
        if case.backward:
            backward = module.softmax_bwd
            return lambda y, dy: backward(dy, y)
        function: Function = module.softmax
        return function


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Torch, Compiled, Liger, Quack)}
"""The others for tensors, by the name they have on the command line."""


def peers(names: Sequence[str], device_type: str, known: Mapping[str, type[Peer]] = PEERS) -> list[Peer]:
    """The others by name.

    Raises:
        ValueError: there is no such peer.

    Example:
        >>> [peer.name for peer in peers(["torch", "compile"], "cpu")]
        ['torch', 'compile']
    """
    for name in names:
        if name not in known:
            raise ValueError(f"unknown peer {name!r}; there are: {', '.join(known)}")
    return [known[name](device_type) for name in dict.fromkeys(names)]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, short enough for a table; its type where it has none.

    >>> first_line(AssertionError()), first_line(ValueError("no"))
    ('AssertionError', 'no')
    """
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return line if len(line) <= 160 else line[:157] + "..."
