"""Other libraries for NVIDIA GPUs, Liger-Kernel and quack, and the table of all peers for torch tensors."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from . import losses
from .cases import Case
from .losses import Function
from .peers import Compiled, Peer, Torch, first_line


class _ForGpus(Peer):
    """A library with functions over the last dimension for NVIDIA GPUs.

    Attributes:
        functions: The forward function for a case, by the name of the operation; it takes a case.
        gradients: The function for a gradient alone, by the name of the operation; it takes a case.
    """

    functions: ClassVar[Mapping[str, Callable[[Case], Function]]]
    gradients: ClassVar[Mapping[str, Callable[[Case], Function]]]

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
        if case.operation not in {**self.functions, **self.gradients}:
            return f"has no {case.operation}"
        if case.fused:
            return f"has no {' or '.join(case.fused)}"
        return None if case.dim == len(case.shape) - 1 else "takes only the last dimension"

    def prepare(self, case: Case) -> Function:
        """Its public function, with autograd where the case has a gradient; or its gradient alone."""
        if case.backward:
            return self.gradients[case.operation](case)
        forward = self.functions[case.operation](case)
        return losses.with_gradient(case, forward) if case.with_gradient else forward


def _softmax_by_liger(_: Case) -> Function:
    """Its autograd function, the only one that it offers."""
    function: Function = importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction.apply
    return function


def _gradient_by_liger(case: Case) -> Function:
    """The function that backward calls."""
    module = importlib.import_module("liger_kernel.ops.softmax")
    # The same settings as in its forward pass.  The gradient goes to a new tensor; dy is not changed.
    block, warps = module.calculate_settings(case.shape[-1])
    backward = module._softmax_backward
    return lambda y, dy: backward(dy, y, block, warps, False)


class Liger(_ForGpus):
    """Liger-Kernel."""

    name, module, distribution = "liger", "liger_kernel.ops.softmax", "liger-kernel"
    # Its forward pass writes the gradient into the logits.
    overwrites = ("cross_entropy",)
    functions: ClassVar = {"softmax": _softmax_by_liger, "cross_entropy": losses.loss_by_liger}
    gradients: ClassVar = {"softmax_backward": _gradient_by_liger}

    def supports(self, case: Case) -> str | None:
        """Losses of two dimensions."""
        if reason := super().supports(case):
            return reason
        return "takes only two dimensions" if case.reduction and len(case.shape) != 2 else None


def _softmax_by_quack(_: Case) -> Function:
    function: Function = importlib.import_module("quack.softmax").softmax
    return function


def _gradient_by_quack(_: Case) -> Function:
    """The function that backward calls."""
    backward = importlib.import_module("quack.softmax").softmax_bwd
    return lambda y, dy: backward(dy, y)


class Quack(_ForGpus):
    """Dao-AILab's quack."""

    name, module, distribution = "quack", "quack.softmax", "quack-kernels"
    functions: ClassVar = {"softmax": _softmax_by_quack, "cross_entropy": losses.loss_by_quack}
    gradients: ClassVar = {"softmax_backward": _gradient_by_quack}

    def supports(self, case: Case) -> str | None:
        """Only two dimensions."""
        return super().supports(case) or (None if len(case.shape) == 2 else "takes only two dimensions")


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
    for name in names:
        if name not in known:
            raise ValueError(f"unknown peer {name!r}; there are: {', '.join(known)}")
    return [known[name](device_type) for name in dict.fromkeys(names)]
