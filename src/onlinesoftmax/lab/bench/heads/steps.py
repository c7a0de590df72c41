"""The measurement of training steps: all ways train the same decoder, one step at a time in turns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ..inputs import extra_bytes
from ..measure import Begun
from ..peers import Peer
from ..result import Result
from ..timing import Call
from .cases import POLICY, StepCase
from .step_peers import losses_on_logits

ATTENTION_WIDTH = 128
"""Width of an attention head, about: the number of heads has to divide the width of the decoder."""

SPREAD = 3.0
"""Standard deviation of the logits: of 128256 classes, some 170 have half of the probability."""

LOSS_ALLOWED, GRADIENT_ALLOWED = 2.0**-8, 2.0**-5
"""Largest errors of a loss, relative to the mean size of a token's loss, and of the head's gradient in the norm.

The exact ones are of float32 logits of the eager decoder.  These are one rounding of bfloat16, and eight of them.
"""

AT_ONCE = 512
"""Tokens whose float32 logits these exact results take at a time."""


class Batch(NamedTuple):
    """Input of a step.

    Attributes:
        tokens: Tokens (sequences, length).
        target: The next token of each.
        per_token: Of a policy, each token's advantage, which is equal in a sequence, and its old log-probability.
    """

    tokens: Any
    target: Any
    per_token: tuple[Any, ...] = ()


def make_decoder(case: StepCase, device: Any) -> Any:
    """A decoder of PyTorch's own layers; called with tokens, it returns the last hidden states."""
    _, hidden, classes = case.shape
    heads = next(count for count in range(max(1, hidden // ATTENTION_WIDTH), 0, -1) if hidden % count == 0)
    where: dict[str, Any] = {"device": device, "dtype": getattr(torch, case.dtype)}

    class Decoder(nn.Module):
        """Embedding, layers with a causal mask, and the weight of the head."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(classes, hidden, **where)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    hidden, heads, 4 * hidden, dropout=0.0, activation="gelu", batch_first=True,
                    norm_first=True, bias=False, **where,
                )
                for _ in range(case.layers)
            )  # fmt: skip
            self.norm = nn.RMSNorm(hidden, **where)
            self.head = nn.Parameter(torch.randn(classes, hidden, **where) * SPREAD * hidden**-0.5)

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], **where)
            for layer in self.layers:
                x = layer(x, mask, is_causal=True)
            return self.norm(x).flatten(0, 1)

    torch.manual_seed(case.layers)
    return Decoder()


def make_batch(case: StepCase, decoder: Any, device: Any) -> Batch:
    """Random tokens.  A policy's old log-probabilities are near those of the decoder, but for one token in eight."""
    generator = torch.Generator().manual_seed(case.rows)
    drawn = torch.randint(case.shape[2], (case.rows // case.length, case.length), generator=generator).to(device)
    target = drawn.roll(-1, 1).flatten()
    if case.operation != POLICY:
        return Batch(drawn, target)
    advantage = torch.randn(len(drawn), generator=generator).repeat_interleave(case.length)
    # No ratio lies so near the clip that the rounding of logits decides whether a token has a gradient.
    ahead = 0.05 * torch.randn(case.rows, generator=generator).clamp(-2, 2)
    ahead[::8] = 0.5
    with torch.no_grad():
        hidden, weight = decoder(drawn).float(), decoder.head.float()
        parts = zip(hidden.split(AT_ONCE), target.split(AT_ONCE), strict=True)
        logprob = -torch.cat([losses_on_logits(x @ weight.t(), y) for x, y in parts])
    return Batch(drawn, target, (advantage.to(device), logprob - ahead.to(device)))


def begin(case: StepCase, device: Any) -> Begun:
    """Make the tensors of a case, for `Kind`."""
    # Otherwise the cases add up to the limit of recompilations, and later ones run without being compiled.
    torch._dynamo.reset()
    decoder = make_decoder(case, device)
    batch = make_batch(case, decoder, device)
    # A rate of 0: the optimizer does its work, and all steps find the same weights.
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.0, fused=device.type == "cuda")
    right = _exact(decoder, batch)

    def check(peer: Peer) -> tuple[Result, Call]:
        loss = _loss(case, peer, decoder, batch)
        return _checked(peer, loss, decoder, optimizer, right)

    return Begun(check)


def _loss(case: StepCase, peer: Peer, decoder: Any, batch: Batch) -> Call:
    """The function that returns the loss of a batch in one way."""
    loss_of = peer.forward(case)

    def loss() -> Any:
        return loss_of(decoder(batch.tokens), decoder.head, batch.target, *batch.per_token)

    return torch.compile(loss, dynamic=False) if getattr(peer, "compiled", False) else loss


class Exact(NamedTuple):
    """Exact results of a step.

    Attributes:
        loss: The mean loss.
        size: The mean size of a token's loss; those of a policy have both signs.
        gradient: The gradient of the head.
    """

    loss: float
    size: float
    gradient: Any


def _exact(decoder: Any, batch: Batch) -> Exact:
    """The exact results, from float32 logits of some tokens at a time."""
    with torch.no_grad():
        hidden, weight = decoder(batch.tokens).float(), decoder.head.float().requires_grad_()
    found = []
    for x, *given in zip(*(t.split(AT_ONCE) for t in (hidden, batch.target, *batch.per_token)), strict=True):
        losses = losses_on_logits(x @ weight.t(), *given)
        (losses.sum() / len(hidden)).backward()
        found.append(losses.detach())
    losses = torch.cat(found)
    return Exact(float(losses.mean()), float(losses.abs().mean()), weight.grad)


def _checked(peer: Peer, loss: Call, decoder: Any, optimizer: Any, right: Exact) -> tuple[Result, Call]:
    """The result of a way without times, and its step."""
    found = loss()
    found.backward()
    gradient = right.gradient
    errors = {
        "loss": (abs(float(found.detach()) - right.loss) / right.size, LOSS_ALLOWED),
        "gradient of the head": (float((decoder.head.grad - gradient).norm() / gradient.norm()), GRADIENT_ALLOWED),
    }
    # No step follows a wrong gradient: a NaN would stay in the weights for the ways after this one.
    optimizer.zero_grad()
    # An error that is NaN is not within any bound.
    wrong = [
        f"{name}: error {error:.1e}, allowed {most:.1e}"
        for name, (error, most) in errors.items() if not error <= most
    ]  # fmt: skip
    error, allowed = errors["gradient of the head"]
    if wrong:
        return Result(peer.name, "wrong", "; ".join(wrong), error, allowed), loss

    def step() -> Any:
        found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    # The first step makes the states of the optimizer, which are not memory of a step.
    step()
    extra = extra_bytes(step, gradient.device)
    return Result(peer.name, "ok", None, error, allowed, extra_bytes=extra), step
