"""Other libraries for NVIDIA GPUs, Liger-Kernel and quack, and the table of all peers for torch tensors."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence

from ..names import check_names
from .cases import Case
from .formulas import Function, with_gradient
from .peers import Compiled, Peer, Torch, first_line


class _ForGpus(Peer):
    """A library with functions over the last dimension for NVIDIA GPUs.

    Attributes:
        operations: Names of the operations that it has.
    """

    operations: tuple[str, ...]

    def why_absent(self) -> str | None:
        """The library is not installed or cannot be imported, or there is no GPU."""
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
        """Only its own operations over the last dimension, without score options."""
        if case.operation not in self.operations:
            return f"has no {case.operation}"
        if case.fused:
            return f"has no {' or '.join(case.fused)}"
        return None if case.dim == len(case.shape) - 1 else "takes only the last dimension"

    def prepare(self, case: Case) -> Function:
        """Its public function, with autograd where the case has a gradient; or its gradient alone."""
        return with_gradient(case, self.function(case))

    def function(self, case: Case) -> Function:
        """Its function for the forward call, or for a gradient alone."""
        raise NotImplementedError


class Liger(_ForGpus):
    """Liger-Kernel."""

    name, module, distribution = "liger", "liger_kernel.ops.softmax", "liger-kernel"
    operations = "softmax", "softmax_backward", "cross_entropy"
    # Its forward pass writes the gradient into the logits.
    overwrites = ("cross_entropy",)

    def supports(self, case: Case) -> str | None:
        """Losses of two dimensions."""
        if reason := super().supports(case):
            return reason
        return "takes only two dimensions" if case.reduction and len(case.shape) != 2 else None

    def function(self, case: Case) -> Function:
        """The autograd functions that it offers, a loss without the results beside it; the function of backward."""
        if case.reduction:
            # The package itself chooses the implementation, as it does for Liger's modules.
            apply = importlib.import_module("liger_kernel.ops").LigerCrossEntropyFunction.apply
            # No weight; ignore_index, z-loss and smoothing at their defaults.
            before = (None, -100, 0.0, 0.0, case.reduction)
            return lambda x, target: apply(x, target, *before)[0]
        softmax = importlib.import_module(self.module)
        if not case.backward:
            function: Function = softmax.LigerSoftmaxFunction.apply
            return function
        # The same settings as in its forward pass.  The gradient goes to a new tensor; dy is not changed.
        settings, backward = softmax.calculate_settings(case.shape[-1]), softmax._softmax_backward
        return lambda y, dy: backward(dy, y, *settings, False)


class Quack(_ForGpus):
    """Dao-AILab's quack."""

    name, module, distribution = "quack", "quack.softmax", "quack-kernels"
    operations = "softmax", "softmax_backward", "cross_entropy"

    def supports(self, case: Case) -> str | None:
        """Only two dimensions."""
        return super().supports(case) or (None if len(case.shape) == 2 else "takes only two dimensions")

    def function(self, case: Case) -> Function:
        """Its public function, or the function that backward calls."""
        if case.reduction:
            # `quack.cross_entropy` is the function; the module of this name is reached by its import name only.
            loss, reduction = importlib.import_module("quack.cross_entropy").cross_entropy, case.reduction
            return lambda x, target: loss(x, target, reduction=reduction)
        softmax = importlib.import_module(self.module)
        if not case.backward:
            function: Function = softmax.softmax
            return function
        backward = softmax.softmax_bwd
        return lambda y, dy: backward(dy, y)


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Torch, Compiled, Liger, Quack)}
"""The other libraries for torch tensors, by their names on the command line."""


def peers(names: Sequence[str], device_type: str, known: Mapping[str, type[Peer]] = PEERS) -> list[Peer]:
    """The other libraries by name.

    Raises:
        ValueError: there is no such peer.

    Example:
        >>> [peer.name for peer in peers(["torch", "compile"], "cpu")]
        ['torch', 'compile']
    """
    check_names("peer", names, known)
    return [known[name](device_type) for name in dict.fromkeys(names)]
