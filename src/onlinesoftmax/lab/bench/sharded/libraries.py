"""The other libraries with a loss of sharded columns: Megatron-LM, Transformer Engine, flash-attn and Liger-Kernel."""

from __future__ import annotations

from typing import Any

from .. import libraries
from ..cases import Case
from ..formulas import Function
from ..peers import ForGpus, by_name
from .peers import Member


class ShardedLoss(Member, ForGpus):
    """A library's loss of the columns of this process; each process has as many."""

    operations, matrices_only = ("cross_entropy",), libraries.TransformerEngine.matrices_only

    def supports(self, case: Case) -> str | None:
        """Rows of two dimensions and equal shards."""
        return super().supports(case) or ("takes equal shards only" if case.shape[1] % self.team.size else None)

    def forward(self, case: Case) -> Function:
        """The mean of the losses, or the losses."""
        losses, mean = self.losses(case), case.reduction == "mean"
        return lambda x, target: losses(x, target).mean() if mean else losses(x, target)

    def losses(self, case: Case) -> Function:
        """The function of local columns and global targets that returns the loss of each row."""
        raise NotImplementedError


class Megatron(ShardedLoss):
    """Megatron-LM's loss, in PyTorch's operations on float32 logits, with three all-reduces."""

    name, module, distribution = "megatron", "megatron.core.tensor_parallel.cross_entropy", "megatron-core"
    # It subtracts the maximum from float32 logits in place.
    overwrites = ("cross_entropy",)

    def losses(self, case: Case) -> Function:
        """Its public function, for a batch of one."""
        loss, group = self.named("vocab_parallel_cross_entropy"), self.group
        return lambda x, target: loss(x[:, None], target[:, None], tp_group=group)[:, 0]


class TransformerEngine(ShardedLoss, libraries.TransformerEngine):
    """Transformer Engine's loss, with one all-gather of states; it has the mean too."""

    forward = libraries.TransformerEngine.forward


class FlashAttention(ShardedLoss, libraries.FlashAttention):
    """flash-attn's loss, with an all-gather of logsumexps and an all-reduce of losses."""

    forward = libraries.FlashAttention.forward


class Liger(ShardedLoss):
    """Liger-Kernel's loss for Megatron-LM."""

    name, module, distribution = libraries.Liger.name, "liger_kernel.ops.vocab_parallel_cross_entropy", "liger-kernel"

    def losses(self, case: Case) -> Function:
        """The autograd function that its modules call: with no label smoothing, its kind does not matter."""
        function: Any = self.named("LigerVocabParallelCEFunction")
        apply, group = function.apply, self.group
        return lambda x, target: apply(x[:, None], target[:, None], group, -100, 0.0, "pytorch", "global")[:, 0]


PEERS: dict[str, type[Member]] = by_name(Megatron, TransformerEngine, FlashAttention, Liger)
"""The libraries by name on the command line."""
