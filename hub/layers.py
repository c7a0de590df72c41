"""Layers for the Hugging Face hub, which replace the `forward` of a layer of transformers.

They hold no state, as the hub requires: `self` is the layer whose `forward` they replace.  build.py puts this file
beside the package.
"""

from __future__ import annotations

import torch

from .onlinesoftmax import cross_entropy, route


class SoftmaxTopKRouter(torch.nn.Module):
    """The gate of Qwen3.5-MoE, Laguna and others: the k largest probabilities of each token, divided by their sum."""

    can_torch_compile = True

    top_k: int
    hidden_dim: int
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits, weights, indices) of hidden states (..., hidden): (T, experts), (T, k) in their dtype, (T, k)."""
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        found = route(logits, self.top_k)
        return logits, found.weights.to(logits.dtype), found.indices.long()


class CausalLMLoss(torch.nn.Module):
    """The loss of causal language models of transformers (`ForCausalLMLoss`), without a float32 copy of the logits."""

    can_torch_compile = True

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """The mean of the losses, or their sum over `num_items_in_batch`, a float32 scalar.

        Args:
            logits: (..., tokens, classes).
            labels: (..., tokens): token i + 1 is the target of row i.
            vocab_size: Number of classes.
            num_items_in_batch: The divisor; None for the number of targets that count.
            ignore_index: Target of the rows that do not count.
            shift_labels: The targets of the rows themselves, in place of labels.
            kwargs: Ignored, as transformers ignores them.
        """
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = cross_entropy(
            logits.reshape(-1, vocab_size), target, ignore_index=ignore_index, reduction=reduction, dtype=torch.float32
        )
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch
