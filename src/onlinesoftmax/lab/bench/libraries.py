"""Other libraries for NVIDIA GPUs, Liger-Kernel and quack, and the table of all peers for torch tensors."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from ..names import check_names
from .cases import Case
from .formulas import Function, with_gradient
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
        return with_gradient(case, self.functions[case.operation](case))


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


def _loss_by_liger(case: Case) -> Function:
    """The loss of Liger-Kernel, without the results that it returns beside the loss."""
    # The package itself chooses the implementation, as it does for Liger's modules.
    apply = importlib.import_module("liger_kernel.ops").LigerCrossEntropyFunction.apply
    # No weight; ignore_index, z-loss and smoothing at their defaults.
    before = (None, -100, 0.0, 0.0, case.reduction)
    return lambda x, target: apply(x, target, *before)[0]


class Liger(_ForGpus):
    """Liger-Kernel."""

    name, module, distribution = "liger", "liger_kernel.ops.softmax", "liger-kernel"
    # Its forward pass writes the gradient into the logits.
    overwrites = ("cross_entropy",)
    functions: ClassVar = {"softmax": _softmax_by_liger, "cross_entropy": _loss_by_liger}
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


def _loss_by_quack(case: Case) -> Function:
    """The loss of quack."""
    # `quack.cross_entropy` is the function; the module of this name is reached by its import name only.
    function, reduction = importlib.import_module("quack.cross_entropy").cross_entropy, case.reduction
    return lambda x, target: function(x, target, reduction=reduction)


class Quack(_ForGpus):
    """Dao-AILab's quack."""

    name, module, distribution = "quack", "quack.softmax", "quack-kernels"
    functions: ClassVar = {"softmax": _softmax_by_quack, "cross_entropy": _loss_by_quack}
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
    check_names("peer", names, known)
    return [known[name](device_type) for name in dict.fromkeys(names)]
