"""The ways from the last hidden states of a decoder to the mean loss of its tokens."""

from __future__ import annotations

from typing import Any

from ..cases import Case
from ..formulas import Function, at_target
from ..libraries import Trl
from ..peers import Compiled, Peer, by_name
from .cases import POLICY, TRAINING
from .peers import CutExact, LigerHead, QuackHead

CLIP = 0.2
"""Distance of a ratio of probabilities from 1 at which it is clipped."""

TRL_COLUMNS = 32768
"""Columns of a tile in TRL's trainer."""


def clipped(logprob: Any, entropy: Any, lse: Any, advantage: Any, old: Any) -> Any:
    """The loss of each token in PPO and GRPO without the term of a reference model (arXiv:1707.06347, equation 7)."""
    import torch

    ratio = (logprob - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def losses_on_logits(logits: Any, target: Any, *per_token: Any) -> Any:
    """The loss of each token by PyTorch's operations: cross-entropy, or that of a policy with its numbers."""
    import torch

    logprob = at_target(torch.log_softmax(logits, -1), target)
    return clipped(logprob, None, None, *per_token) if per_token else -logprob


class OursStep(Peer):
    """Our functions of hidden states, which hold as many logits as their memory allows.

    The functions of all ways take the hidden states, the weight of the head, the targets and the numbers of each token,
    and return the mean loss.
    """

    name, module, ours = "ours", "onlinesoftmax", True

    def forward(self, case: Case) -> Function:
        """The function with the memory that it takes by default."""
        import onlinesoftmax as osm

        if case.operation == TRAINING:
            return osm.linear_cross_entropy
        return lambda hidden, weight, target, *per_token: osm.linear_token_loss(
            hidden, weight, target, clipped, *per_token
        )


class OursCompiled(OursStep):
    """The same under torch.compile, together with the decoder: `steps` compiles the loss of a way that says so."""

    name, compiled = "ours-compile", True


class OursOnLogits(Peer):
    """Our functions on the logits; the gradient of cross-entropy is written into their memory."""

    name, module, ours = "ours-logits", "onlinesoftmax", True

    def forward(self, case: Case) -> Function:
        """`cross_entropy` or `token_logprobs` after a linear layer."""
        from torch.nn import functional

        import onlinesoftmax as osm

        def training(hidden: Any, weight: Any, target: Any) -> Any:
            return osm.cross_entropy(functional.linear(hidden, weight), target, inplace_backward=True)

        def policy(hidden: Any, weight: Any, target: Any, *per_token: Any) -> Any:
            found = osm.token_logprobs(functional.linear(hidden, weight), target)
            return clipped(*found[:3], *per_token).mean()

        return training if case.operation == TRAINING else policy


class TorchStep(Peer):
    """PyTorch's operations, as the models of transformers have them: on logits in float32."""

    name, distribution = "torch", "torch"

    def forward(self, case: Case) -> Function:
        """`linear`, then the loss in float32."""
        from torch.nn import functional

        def mean(logits: Any, *given: Any) -> Any:
            if case.operation == TRAINING:
                return functional.cross_entropy(logits, *given)
            return losses_on_logits(logits, *given).mean()

        return lambda hidden, weight, *given: mean(functional.linear(hidden, weight).float(), *given)


class CompiledStep(TorchStep):
    """The same under torch.compile."""

    name, compiled = Compiled.name, True


class LigerStep(LigerHead):
    """Liger-Kernel's fused linear cross-entropy, and its fused linear GRPO, a sequence at a time."""

    operations = (TRAINING, POLICY)

    def forward(self, case: Any) -> Function:
        """The autograd function of the one, the module of the other."""
        if case.operation == TRAINING:
            return super().forward(case)
        loss, length = _liger_policy(), case.length

        def policy(hidden: Any, weight: Any, target: Any, advantage: Any, old: Any) -> Any:
            target, advantage, old = (t.view(-1, length) for t in (target, advantage, old))
            tokens = hidden.view(-1, length, hidden.shape[-1])
            ones = target.new_ones(target.shape)
            found = loss(tokens, weight, target, ones, advantage[:, 0], old_per_token_logps=old)
            return found[0] if isinstance(found, tuple) else found

        return policy


def _liger_policy() -> Any:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # type: ignore[import-not-found, unused-ignore]

    return LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="bnpo"
    )


class TrlOnLogits(Trl):
    """TRL's log-probabilities by its own kernel, on the logits."""

    name, operations = "trl-logits", (POLICY,)

    def forward(self, case: Case) -> Function:
        """`selective_log_softmax_and_entropy` after a linear layer."""
        from torch.nn import functional

        logprobs = super().forward(case)

        def policy(hidden: Any, weight: Any, target: Any, *per_token: Any) -> Any:
            logprob, entropy = logprobs(functional.linear(hidden, weight), target)
            return clipped(logprob, entropy, None, *per_token).mean()

        return policy


class TrlStep(Trl):
    """TRL's log-probabilities without logits, in tiles of tokens and classes."""

    operations, needed = (POLICY,), "ChunkedLogProbFunction"

    def forward(self, case: Case) -> Function:
        """The autograd function with the arguments that TRL's trainer gives, without the further outputs."""
        function: Any = super().forward(case)

        def policy(hidden: Any, weight: Any, target: Any, *per_token: Any) -> Any:
            logprob = function.apply(hidden, weight, None, target, 1.0, TRL_COLUMNS, None, 1.0, ())[0]
            return clipped(logprob, None, None, *per_token).mean()

        return policy


STEP_PEERS: dict[str, type[Peer]] = by_name(
    OursCompiled, OursOnLogits, TorchStep, CompiledStep, LigerStep, QuackHead, CutExact, TrlStep, TrlOnLogits,
)  # fmt: skip
"""The ways other than OursStep, by their names on the command line."""
