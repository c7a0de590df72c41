"""The measurement of decoding: a decoder reads one token of each row and its cache, and a way samples the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ..measure import Begun
from ..peers import Peer
from ..result import Result
from ..timing import Call
from .cases import CONTEXT, GROUP, DecodeCase
from .measure import checked

ATTENTION_WIDTH = 128
"""Width of an attention head."""


def begin(case: DecodeCase, device: Any) -> Begun:
    """Make the tensors of a case, for `Kind`.  Every step reads the same tokens at the same place."""
    decode = make_decoder(case, device)
    logits = decode()  # all calls write this tensor, which the ways read

    def check(peer: Peer) -> tuple[Result, Call]:
        result, sample = checked(case, peer, logits)

        def step() -> Any:
            decode()
            return sample()

        return result, step

    return Begun(check)


def make_decoder(case: DecodeCase, device: Any) -> Callable[[], Any]:
    """A decoder with random weights: a call reads a token of each row, and returns the logits of the next one.

    It has about the products and the attention of Llama 3, without the rotation of queries and keys.  On a GPU a call
    replays a CUDA graph.  All calls return the same tensor.
    """
    generator = torch.Generator(device).manual_seed(case.layers)
    layers = [_Layer(case, generator) for _ in range(case.layers)]
    embedding, head = (_weight(case, generator, case.shape[1], case.hidden) for _ in range(2))
    tokens = torch.arange(case.rows, device=device) % case.shape[1]
    logits = torch.empty(case.shape, dtype=head.dtype, device=device)

    @torch.no_grad()
    def forward() -> Any:
        x = embedding[tokens]
        for layer in layers:
            x = layer(x)
        return torch.mm(_normalized(x), head.t(), out=logits)

    return _Replayed(forward) if device.type == "cuda" else forward


class _Layer:
    """Attention over the cache, and a gated product; each after a normalization."""

    def __init__(self, case: DecodeCase, generator: Any) -> None:
        hidden, self.size = case.hidden, min(ATTENTION_WIDTH, case.hidden)
        self.heads = hidden // self.size
        self.groups = max(1, self.heads // GROUP)
        width, inner = self.groups * self.size, 4 * hidden
        self.widths = hidden, width, width
        sizes = (hidden + 2 * width, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)
        self.qkv, self.out, self.up, self.down = (_weight(case, generator, *each) for each in sizes)
        cache = 2, case.rows, self.groups, CONTEXT, self.size
        self.keys, self.values = torch.randn(cache, dtype=self.out.dtype, device=generator.device)

    def __call__(self, x: Any) -> Any:
        q, k, v = (_normalized(x) @ self.qkv.t()).split(self.widths, 1)
        for cached, new in ((self.keys, k), (self.values, v)):
            cached[:, :, -1] = new.view(-1, self.groups, self.size)
        q = q.view(-1, self.heads, 1, self.size)
        found = functional.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
        x = x + found.flatten(1) @ self.out.t()
        gate, up = (_normalized(x) @ self.up.t()).chunk(2, 1)
        return x + (functional.silu(gate) * up) @ self.down.t()


def _normalized(x: Any) -> Any:
    return functional.rms_norm(x, x.shape[-1:])


def _weight(case: DecodeCase, generator: Any, rows: int, cols: int) -> Any:
    """Random numbers with which a product keeps the size of its input."""
    weight = torch.empty(rows, cols, dtype=getattr(torch, case.dtype), device=generator.device)
    return weight.normal_(0.0, cols**-0.5, generator=generator)


class _Replayed:
    """A function on a GPU that writes the same tensor in each call, as replays of a CUDA graph.

    A graph does not keep the tensors alive that it reads; the function does.
    """

    def __init__(self, forward: Callable[[], Any]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Libraries set themselves up outside of the graph.
            forward()
        torch.cuda.current_stream().wait_stream(side)
        self.forward, self.graph = forward, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.found = forward()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.found
