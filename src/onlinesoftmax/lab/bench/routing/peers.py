"""The ways from logits to experts: ours, PyTorch, torch.compile, quack, TransformerEngine."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from ....explanation import explain
from ..cases import Case
from ..formulas import Function
from ..libraries import Quack
from ..peers import AsCompiled, ForGpus, Peer, by_name
from .cases import RouteCase

BALANCE, Z = 1e-2, 1e-3
"""Weights of the load-balancing loss and of the z-loss."""


class Gate(Peer):
    """A way to route; its function of the logits and the bias returns (weights, experts, counts).

    With a gradient, the weights are replaced by the gradient of the logits.
    """

    def rounding(self, case: RouteCase, x: Any) -> float:
        """Relative error that its scores and weights may have beyond float32 roundings."""
        return 0.0

    def incoming(self, case: RouteCase, x: Any, experts: Any) -> Any:
        """The incoming gradient of the weights of these experts, (tokens, k); None for that of `incoming`."""
        return None

    def prepare(self, case: Case) -> Function:
        """The function of logits and bias; with a gradient, `forward` returns both losses too."""
        import torch

        forward = self.forward(case)

        def with_gradient(x: Any, bias: Any) -> Any:
            weights, experts, counts, *losses = forward(x, bias)
            return torch.autograd.grad([weights, *losses], x, incoming(weights))[0], experts, counts

        return with_gradient if case.with_gradient else forward


def incoming(weights: Any) -> list[Any]:
    """The incoming gradients of the weights and of both losses; those of a shape are made once."""
    return _incoming(tuple(weights.shape), weights.dtype, weights.device)


@lru_cache(maxsize=4)
def _incoming(shape: tuple[int, ...], dtype: Any, device: Any) -> list[Any]:
    import torch

    numbers = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(1)).to(dtype)
    # Those of float64, too, are float32 numbers.  Losses are not narrower.
    weights = torch.tensor([BALANCE, Z], device=device).to(torch.promote_types(dtype, torch.float32))
    return [numbers, *weights]


class OursGate(Gate):
    """Our functions."""

    name, module, ours = "ours", "onlinesoftmax", True

    def note(self, case: RouteCase, x: Any, bias: Any = None) -> str:
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


class CompiledGate(AsCompiled, TorchGate):
    """The same under torch.compile."""


class QuackGate(Gate, ForGpus):
    """quack's softmax of the k largest logits; PyTorch adds the counts."""

    name, module, distribution = Quack.name, "quack.topk", Quack.distribution
    lacks = "counts by PyTorch, no lse"

    def supports(self, case: Any) -> str | None:
        """Softmax of the chosen logits, of a number of experts that its sort takes; no losses."""
        given, experts = case.arguments, case.shape[1]
        if case.with_gradient:
            return "has no losses"
        if "score" in given or not given.get("renormalize", True):
            return "has only the softmax of the chosen logits"
        if any(number & (number - 1) for number in (experts, given["k"])) or experts > 4096 or given["k"] > 128:
            return "takes powers of 2, up to 4096 experts and k = 128"
        return super().supports(case)

    def rounding(self, case: RouteCase, x: Any) -> float:
        """The number of an expert takes the place of the low bits of its float32 logit; weights are rounded."""
        import torch

        eps = torch.finfo(x.dtype).eps
        return 2 * float(x.detach().abs().max()) * case.shape[1] * 2.0**-23 + (eps if x.itemsize < 4 else 0.0)

    def forward(self, case: RouteCase) -> Function:
        """Its public function."""
        import torch

        topk, k, experts = self.named("topk"), case.arguments["k"], case.shape[1]

        def forward(x: Any, _: Any) -> Any:
            weights, chosen = topk(x, k, softmax=True)
            flat = chosen.flatten()
            counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
            return weights, chosen, counts.index_add_(0, flat, torch.ones_like(flat))

        return forward


class TransformerEngineGate(Gate, ForGpus):
    """The fused router of TransformerEngine: dense weights and a map of the chosen experts, which PyTorch counts."""

    name, module = "transformer-engine", "transformer_engine.pytorch.router"
    distribution = "transformer-engine"
    lacks = "dense weights, counts and z-loss by PyTorch"

    def rounding(self, case: RouteCase, x: Any) -> float:
        """Weights have the dtype of the logits."""
        import torch

        return float(torch.finfo(x.dtype).eps) if x.itemsize < 4 else 0.0

    def incoming(self, case: RouteCase, x: Any, experts: Any) -> Any:
        """Those of the dense weights, which have the dtype of the logits."""
        return incoming(x)[0].gather(1, experts)

    def forward(self, case: RouteCase) -> Function:
        """Its public functions, as Megatron-LM calls them."""
        router, given, (tokens, experts) = importlib.import_module(self.module), case.arguments, case.shape
        k, score = given["k"], given.get("score", "softmax")
        # Softmax, the default, of all experts before the choice; else of the chosen ones.
        before = "score" not in given and not given.get("renormalize", True)

        def forward(x: Any, bias: Any) -> Any:
            weights, chosen = router.fused_topk_with_score_function(
                logits=x, topk=k, use_pre_softmax=before, num_groups=given.get("groups"),
                group_topk=given.get("group_k"), scaling_factor=given.get("scale"), score_function=score,
                expert_bias=bias,
            )  # fmt: skip
            counts = chosen.sum(0)
            if not case.with_gradient:
                return weights, chosen, counts
            _, p = router.fused_compute_score_for_moe_aux_loss(logits=x, topk=k, score_function=score)
            balance = router.fused_moe_aux_loss(
                probs=p, tokens_per_expert=counts, total_num_tokens=tokens, num_experts=experts, topk=k, coeff=1.0
            )
            return weights, chosen, counts, balance, x.float().logsumexp(-1).square().mean()

        return forward

    def whole(self, case: Case, found: Any) -> Any:
        """(weights or gradient, experts, counts): the chosen experts of its map, and their weights."""
        assert isinstance(case, RouteCase)
        numbers, chosen, counts = found
        experts = chosen.int().topk(case.arguments["k"], -1).indices
        return numbers if case.with_gradient else numbers.gather(1, experts), experts, counts


GATE_PEERS: dict[str, type[Peer]] = by_name(TorchGate, CompiledGate, QuackGate, TransformerEngineGate)
"""The ways beside ours, by their names on the command line."""
