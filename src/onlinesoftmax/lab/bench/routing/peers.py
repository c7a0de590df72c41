"""The ways from logits to experts: ours, PyTorch, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ....explanation import explain
from ..cases import Case
from ..peers import Compiled, Peer
from .cases import RouteCase

Function = Callable[..., Any]

BALANCE, Z = 1e-2, 1e-3
"""Weights of the load-balancing loss and of the z-loss."""


class Gate(Peer):
    """A way to route; its function of the logits and the bias returns (weights, experts, counts).

    With a gradient, the weights are replaced by the gradient of the logits.
    """

    def prepare(self, case: Case) -> Function:
        """The function of logits and bias."""
        assert isinstance(case, RouteCase)
        forward = self.forward(case)
        return with_gradient(forward) if case.with_gradient else forward

    def forward(self, case: RouteCase) -> Function:
        """The function that returns (weights, experts, counts), and with a gradient both losses."""
        raise NotImplementedError


def with_gradient(forward: Function) -> Function:
    """A function that returns (gradient, experts, counts), of one that returns (weights, experts, counts, *losses)."""
    import torch

    def call(x: Any, bias: Any) -> Any:
        weights, experts, counts, *losses = forward(x, bias)
        return torch.autograd.grad([weights, *losses], x, incoming(weights))[0], experts, counts

    return call


def incoming(weights: Any) -> list[Any]:
    """The incoming gradients of the weights and of both losses; those of a shape are made once."""
    return _incoming(tuple(weights.shape), weights.dtype, weights.device)


@lru_cache(maxsize=4)
def _incoming(shape: tuple[int, ...], dtype: Any, device: Any) -> list[Any]:
    import torch

    numbers = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(1)).to(dtype)
    # Those of float64, too, are float32 numbers.
    weights = torch.tensor([BALANCE, Z], device=device).to(dtype)
    return [numbers, *weights]


class OursGate(Gate):
    """Our functions."""

    name, module, ours = "ours", "onlinesoftmax", True

    def way(self, case: RouteCase, x: Any, bias: Any) -> str:
        """The kernel of a call and its blocks, or the way without one."""
        given = {name: value for name, value in case.arguments.items() if name not in ("k", "scale")}
        k: int = case.arguments["k"]
        found = explain(x, operation="route", k=k, bias=bias, prob_sums=case.with_gradient, **given)
        if not found.kernel:
            return found.name
        return f"{found.name}, {found.kernel.blocks} blocks of {found.kernel.threads} threads"

    def forward(self, case: RouteCase) -> Function:
        """`route`, and both losses with a gradient."""
        from onlinesoftmax import load_balancing_loss, route, router_z_loss

        given = case.arguments

        def forward(x: Any, bias: Any) -> Any:
            found = route(x, bias=bias, prob_sums=case.with_gradient, **given)
            if not case.with_gradient:
                return found.weights, found.indices, found.counts
            return found.weights, found.indices, found.counts, load_balancing_loss(found), router_z_loss(found)

        return forward


class TorchGate(Gate):
    """PyTorch's operations, as the models of transformers have them."""

    name, distribution = "torch", "torch"

    def forward(self, case: RouteCase) -> Function:
        """The operations."""
        return by_torch(case)


class CompiledGate(TorchGate):
    """The same under torch.compile."""

    name = Compiled.name

    def forward(self, case: RouteCase) -> Function:
        """A compilation for this shape."""
        import torch

        torch._dynamo.reset()
        compiled: Function = torch.compile(by_torch(case), dynamic=False)
        return compiled


def by_torch(case: RouteCase) -> Function:
    """The function in PyTorch's operations."""
    import torch

    given, (tokens, experts) = case.arguments, case.shape
    k, groups, sigmoid = given["k"], given.get("groups"), given.get("score") == "sigmoid"
    first, renormalize = given.get("order") == "topk_first", given.get("renormalize", True)

    def choose(scores: Any, bias: Any) -> Any:
        if groups is None:
            return scores.topk(k, -1).indices
        biased = scores + bias
        best = biased.view(tokens, groups, -1).topk(2, -1).values.sum(-1).topk(given["group_k"], -1).indices
        kept = torch.zeros(tokens, groups, dtype=torch.bool, device=scores.device).scatter(1, best, True)
        return biased.masked_fill(~kept.repeat_interleave(experts // groups, 1), -torch.inf).topk(k, -1).indices

    def forward(x: Any, bias: Any) -> Any:
        x = x.float()
        p: Any = None if sigmoid else x.softmax(-1)
        scores = x.sigmoid() if sigmoid else x if first else p
        chosen = choose(scores.detach(), bias)
        weights = scores.gather(1, chosen)
        if first:
            weights = weights.softmax(-1)
        elif renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * given.get("scale", 1.0)
        # A one-hot tensor, as torch.bincount waits for the GPU.
        routed = torch.zeros_like(x, dtype=torch.int32).scatter(1, chosen, 1)
        counts = routed.sum(0)
        if not case.with_gradient:
            return weights, chosen, counts
        p = scores / scores.sum(-1, keepdim=True) if sigmoid else p
        balance = (counts * p.sum(0)).sum() * (experts / (k * tokens * tokens))
        return weights, chosen, counts, balance, x.logsumexp(-1).square().mean()

    return forward


GATE_PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (TorchGate, CompiledGate)}
"""The ways beside ours, by their names on the command line."""
