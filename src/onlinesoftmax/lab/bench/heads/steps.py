"""The measurement of training steps: all ways train the same decoder, one step at a time in turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ..inputs import extra_bytes, lacking
from ..peers import Peer
from ..result import CaseResult, Result
from ..run import check_each, clock_of, each_case, with_times
from ..suites import Measures
from ..timing import Call, Clock
from .step_cases import LENGTH, StepCase

KIND: Measures = "step time"

HEAD_SIZE = 128
"""Numbers of an attention head."""

STATES = 4
"""Numbers of a weight's size: the weight, its gradient and both states of the optimizer."""

ALLOWED = 2.0**-8
"""Largest error of a loss relative to PyTorch's float32 loss of the same hidden states: a rounding of bfloat16."""


def run_steps(
    cases: Iterable[StepCase], everybody: Sequence[Peer], device: Any, repeat_ms: float
) -> Iterator[CaseResult]:
    """Measure the cases, one at a time.

    Args:
        cases: The cases.
        everybody: `OursStep` and other ways, all of them present.
        device: A torch device.
        repeat_ms: Milliseconds for each measurement.
    """
    clock = clock_of(everybody, device)

    def lacks(case: StepCase) -> str | None:
        tokens, _, classes = case.shape
        # PyTorch keeps the logits, and their float32 copy with its gradient.
        return lacking(STATES * 2 * case.parameters + 10 * tokens * classes, device)

    def measure(case: StepCase) -> CaseResult:
        return _measure(case, everybody, device, repeat_ms, clock)

    return each_case(cases, device, lacks, measure, KIND)


def make_decoder(case: StepCase, device: Any) -> Any:
    """A decoder of PyTorch's own layers; called with tokens, it returns the last hidden states."""
    import torch
    from torch import nn

    _, hidden, classes = case.shape
    where: dict[str, Any] = {"device": device, "dtype": getattr(torch, case.dtype)}

    class Decoder(nn.Module):
        """Embedding, layers with a causal mask, and the weight of the head."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(classes, hidden, **where)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    hidden, max(1, hidden // HEAD_SIZE), 4 * hidden, dropout=0.0, activation="gelu", batch_first=True,
                    norm_first=True, bias=False, **where,
                )
                for _ in range(case.layers)
            )  # fmt: skip
            self.norm = nn.RMSNorm(hidden, **where)
            self.head = nn.Parameter(torch.randn(classes, hidden, **where) * hidden**-0.5)

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], **where)
            for layer in self.layers:
                x = layer(x, mask, is_causal=True)
            return self.norm(x).flatten(0, 1)

    torch.manual_seed(case.layers)
    return Decoder()


def make_batch(case: StepCase, device: Any) -> tuple[Any, Any]:
    """Tokens (sequences, length), and the targets of all of them."""
    import torch

    tokens, _, classes = case.shape
    length = min(LENGTH, tokens)
    generator = torch.Generator().manual_seed(tokens)
    drawn = torch.randint(classes, (tokens // length, length), generator=generator).to(device)
    return drawn, drawn.roll(-1, 1).flatten()


def _measure(case: StepCase, everybody: Sequence[Peer], device: Any, repeat_ms: float, clock: Clock) -> CaseResult:
    import torch

    decoder, batch = make_decoder(case, device), make_batch(case, device)
    # A rate of 0: the optimizer does its work, and all steps find the same weights.
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.0, fused=device.type == "cuda")
    right = _loss_in_parts(decoder, *batch)
    results, calls = check_each(
        case, everybody, lambda peer: _checked(peer, _step(case, peer, decoder, optimizer, batch), right, device)
    )
    samples = clock.measure(calls, repeat_ms)
    timed = [with_times(result, samples)[0] if result.who in calls else result for result in results]
    return CaseResult(case, results=timed, measures=KIND)


def _step(case: StepCase, peer: Peer, decoder: Any, optimizer: Any, batch: tuple[Any, Any]) -> Call:
    """A step of one way, which returns the loss."""
    import torch

    loss_of, (tokens, target) = peer.prepare(case), batch

    def loss() -> Any:
        return loss_of(decoder(tokens), decoder.head, target)

    if getattr(peer, "compiled", False):
        torch._dynamo.reset()
        loss = torch.compile(loss, dynamic=False)

    def step() -> Any:
        found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return step


def _loss_in_parts(decoder: Any, tokens: Any, target: Any) -> float:
    """The mean loss, in float32 from the hidden states on, of some tokens at a time."""
    import torch
    from torch.nn import functional

    with torch.no_grad():
        hidden, weight = decoder(tokens).float(), decoder.head.float()
        parts = zip(hidden.split(LENGTH // 4), target.split(LENGTH // 4), strict=True)
        losses = [functional.cross_entropy(x @ weight.t(), its_target, reduction="sum") for x, its_target in parts]
        return float(torch.stack(losses).double().sum()) / len(target)


def _checked(peer: Peer, step: Call, right: float, device: Any) -> tuple[Result, Call]:
    """The result of a way without times, and its step."""
    # The first step makes the states of the optimizer, which are not memory of a step.
    error = abs(float(step()) - right) / right
    reason = None if error <= ALLOWED else f"loss: error {error:.1e}, allowed {ALLOWED:.1e}"
    extra = extra_bytes(partial(step), device)
    return Result(peer.name, "wrong" if reason else "ok", reason, error, ALLOWED, extra_bytes=extra), step
