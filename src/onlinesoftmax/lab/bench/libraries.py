"""The other libraries for torch tensors: Liger-Kernel, quack, flash-attn, Transformer Engine and TRL."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..names import check_names
from .cases import Case
from .formulas import Function
from .peers import Compiled, ForGpus, Peer, Torch, by_name


class Liger(ForGpus):
    """Liger-Kernel."""

    name, module, distribution = "liger", "liger_kernel.ops.softmax", "liger-kernel"
    operations = "softmax", "softmax_backward", "cross_entropy"
    # Its forward pass writes the gradient into the logits.
    overwrites = ("cross_entropy",)

    def supports(self, case: Case) -> str | None:
        """Losses of two dimensions."""
        flat = not case.reduction or len(case.shape) == 2
        return super().supports(case) or (None if flat else "takes only two dimensions")

    def forward(self, case: Case) -> Function:
        """The autograd functions that it offers, a loss without the results beside it; the function of backward."""
        if case.reduction:
            # The package itself chooses the implementation, as it does for Liger's modules.
            apply = importlib.import_module("liger_kernel.ops").LigerCrossEntropyFunction.apply
            # No weight; ignore_index, z-loss and smoothing at their defaults.
            before = (None, -100, 0.0, 0.0, case.reduction)
            return lambda x, target: apply(x, target, *before)[0]
        softmax = importlib.import_module(self.module)
        if not case.declaration.backward:
            function: Function = softmax.LigerSoftmaxFunction.apply
            return function
        # The same settings as in its forward pass.  The gradient goes to a new tensor; dy is not changed.
        settings, backward = softmax.calculate_settings(case.shape[-1]), softmax._softmax_backward
        return lambda y, dy: backward(dy, y, *settings, False)


class Quack(ForGpus):
    """Dao-AILab's quack."""

    name, module, distribution = "quack", "quack.softmax", "quack-kernels"
    matrices_only = "takes only two dimensions"
    operations = "softmax", "softmax_backward", "cross_entropy"

    def forward(self, case: Case) -> Function:
        """Its public function, or the function that backward calls."""
        if case.reduction:
            # `quack.cross_entropy` is the function; the module of this name is reached by its import name only.
            return partial(importlib.import_module("quack.cross_entropy").cross_entropy, reduction=case.reduction)
        if not case.declaration.backward:
            return self.named("softmax")
        backward = self.named("softmax_bwd")
        return lambda y, dy: backward(dy, y)


class FlashAttention(ForGpus):
    """flash-attn's module of the loss, which returns float32."""

    name, module, distribution = "flash-attn", "flash_attn.losses.cross_entropy", "flash-attn"
    operations, matrices_only = ("cross_entropy",), Quack.matrices_only

    def forward(self, case: Case) -> Function:
        """Its module with the reduction of the case, and the process group of sharded columns."""
        function: Function = self.named("CrossEntropyLoss")(reduction=case.reduction, process_group=self.group)
        return function


class TransformerEngine(ForGpus):
    """Transformer Engine's cross-entropy, which returns float32, and compares the incoming gradient with 1."""

    name, module = "transformer-engine", "transformer_engine.pytorch.cross_entropy"
    distribution = "transformer-engine"
    operations = ("cross_entropy",)
    # A batch of one is added to them.
    matrices_only = "takes only two dimensions here"
    # Versions before 2.18 write the gradient into the logits.
    overwrites = ("cross_entropy",)

    def forward(self, case: Case) -> Function:
        """Its public function for a batch of one, on one process or on the process group of sharded columns."""
        loss, mean, group = self.named("parallel_cross_entropy"), case.reduction == "mean", self.group

        def function(x: Any, target: Any) -> Any:
            found = loss(x[None], target[None], reduce_loss=mean, dist_process_group=group)
            return found if mean else found[0]

        return function


class Trl(ForGpus):
    """TRL's log-probabilities and entropies, by its own kernel."""

    # The trainers call these kernels for tensors on a GPU.  The trainers' own module needs further packages.
    name, module, distribution = "trl", "trl.kernels", "trl"
    operations = ("token_logprobs",)
    needed = "selective_log_softmax_and_entropy"

    def why_absent(self) -> str | None:
        """Older versions have no kernels."""
        if reason := super().why_absent():
            return reason
        return None if hasattr(importlib.import_module(self.module), self.needed) else f"has no {self.needed}"

    def forward(self, case: Case) -> Function:
        """The kernel's function."""
        return self.named(self.needed)


PEERS: dict[str, type[Peer]] = by_name(Torch, Compiled, Liger, Quack, FlashAttention, TransformerEngine, Trl)
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
