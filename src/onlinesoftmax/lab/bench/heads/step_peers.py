"""The ways from the last hidden states of a decoder to the mean loss of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cases import Case
from ..peers import Compiled, Peer
from .peers import CutExact, LigerHead, QuackHead

Function = Callable[..., Any]


class Step(Peer):
    """A way to the loss.  `prepare` returns the function (hidden states, weight of the head, targets) -> loss.

    Attributes:
        compiled: True for decoder and loss under one torch.compile.
    """

    compiled = False


class OursStep(Step):
    """Our function without logits."""

    name, module, ours = "ours", "onlinesoftmax", True

    def prepare(self, case: Case) -> Function:
        """`linear_cross_entropy` with the memory that it takes by default."""
        from onlinesoftmax import linear_cross_entropy

        return lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target)


class OursCompiled(OursStep):
    """The same, and the decoder under torch.compile."""

    name, compiled = "ours-compile", True


class OursOnLogits(Step):
    """Our function on the logits; the gradient is written into their memory."""

    name, module, ours = "ours-logits", "onlinesoftmax", True

    def prepare(self, case: Case) -> Function:
        """`cross_entropy` after a linear layer."""
        from torch.nn import functional

        from onlinesoftmax import cross_entropy

        return lambda hidden, weight, target: cross_entropy(
            functional.linear(hidden, weight), target, inplace_backward=True
        )


class TorchStep(Step):
    """PyTorch's operations, as the models of transformers have them: on logits in float32."""

    name, distribution = "torch", "torch"

    def prepare(self, case: Case) -> Function:
        """`linear`, then `cross_entropy` in float32."""
        from torch.nn import functional

        return lambda hidden, weight, target: functional.cross_entropy(
            functional.linear(hidden, weight).float(), target
        )


class CompiledStep(TorchStep):
    """The same under torch.compile."""

    name, compiled = Compiled.name, True


class LigerStep(LigerHead):
    """Liger-Kernel's fused linear cross-entropy."""

    prepare, compiled = LigerHead.function, False


class QuackStep(QuackHead):
    """quack's linear cross-entropy in chunks of tokens."""

    prepare, compiled = QuackHead.function, False


class CutStep(CutExact):
    """cut-cross-entropy with all gradients."""

    prepare, compiled = CutExact.function, False


STEP_PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (OursCompiled, OursOnLogits, TorchStep, CompiledStep, LigerStep, QuackStep, CutStep)
}
"""The ways other than OursStep, by their names on the command line."""
