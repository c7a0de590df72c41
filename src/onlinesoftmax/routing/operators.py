"""`route` of flat rows as custom operators of PyTorch: opaque to torch.compile and torch.export, with a gradient."""

from __future__ import annotations

from typing import Any

import torch

from ..torch.formulas import accumulator_of
from ..torch.namespace import NAMESPACE
from .results import Routed
from .rules import Call, Gradients, Rule, Score
from .run import flat_rule, found_of, gradient_of

Tensor = torch.Tensor

_REST = "str score, int[] numbers, float scale"

_CALL = f"Tensor x, Tensor? bias, Tensor? mask, Tensor? indices, {_REST}"


def call_of(x: Tensor, bias: Any, mask: Any, indices: Any, *rest: Any) -> Call:
    """The call of an operator's arguments, of which x is (sequences, tokens, experts)."""
    sequences, tokens, experts = x.shape
    score, (k, groups, group_k, group_top, *flags), scale = rest
    topk_first, renormalize, counts, prob_sums = map(bool, flags)
    rule = Rule(experts, k, Score(score), topk_first, groups, group_k, group_top, renormalize, scale)
    return Call(x.reshape(-1, experts), bias, mask, indices, rule, sequences, tokens, counts, prob_sums)


def _route(*arguments: Any) -> tuple[Tensor, ...]:
    """Weights, indices, counts, prob_sums and lse; an empty tensor for one that is not asked for."""
    call = call_of(*arguments)
    found = found_of(call)
    absent = call.x.new_empty(0)
    weights, indices, counts, sums, lse, _ = found
    return weights, indices, absent.int() if counts is None else counts, absent.float() if sums is None else sums, lse


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    call = call_of(*arguments)
    x, rule, wide = call.x, call.rule, accumulator_of(call.x.dtype, call.x.dtype)
    whole = (call.sequences, rule.experts)
    return (
        x.new_empty(x.shape[0], rule.k, dtype=wide),
        x.new_empty(x.shape[0], rule.k, dtype=torch.int32),
        x.new_empty(whole if call.counts else 0, dtype=torch.int32),
        x.new_empty(whole if call.prob_sums else 0, dtype=wide if call.prob_sums else torch.float32),
        x.new_empty(x.shape[0], dtype=wide),
    )


def _backward(
    weights: Tensor, indices: Tensor, lse: Tensor, d_weights: Any, d_sums: Any, d_lse: Any, *arguments: Any
) -> Tensor:
    x, bias, mask, *rest = arguments
    call = call_of(x, bias, mask, None, *rest)
    found = Routed(weights, indices, None, None, lse)
    return gradient_of(call, found, Gradients(d_weights, d_sums, d_lse)).view_as(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, bias, mask, _, *ctx.rest = inputs
    weights, indices, counts, _, lse = output
    ctx.with_sums = bool(ctx.rest[1][-1])
    ctx.mark_non_differentiable(indices, counts)
    ctx.save_for_backward(weights, indices, lse, x, bias, mask)


def _differentiate(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
    weights, indices, lse, *operands = ctx.saved_tensors
    given = dys[0], dys[3] if ctx.with_sums else None, dys[4]
    operator = getattr(torch.ops, NAMESPACE).route_backward
    return operator(weights, indices, lse, *given, *operands, *ctx.rest), *[None] * 6


ROUTE = torch.library.custom_op(
    f"{NAMESPACE}::route", _route, mutates_args=(), schema=f"({_CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
ROUTE.register_fake(_fake)
ROUTE.register_autograd(_differentiate, setup_context=_setup_context)

BACKWARD = torch.library.custom_op(
    f"{NAMESPACE}::route_backward", _backward, mutates_args=(),
    schema="(Tensor weights, Tensor indices, Tensor lse, Tensor? d_weights, Tensor? d_sums, Tensor? d_lse, Tensor x, "
    f"Tensor? bias, Tensor? mask, {_REST}) -> Tensor",
)  # fmt: skip
BACKWARD.register_fake(lambda *arguments: torch.empty_like(arguments[6], memory_format=torch.contiguous_format))

__all__ = ["BACKWARD", "ROUTE", "call_of", "flat_rule"]
