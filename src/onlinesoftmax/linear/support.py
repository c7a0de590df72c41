"""`linear_token_logprobs` of the tokens that a sampler kept: the argument `support`.

The forward pass makes the logits of a chunk of columns and gathers those of the kept classes, n of each token; the rest
of the call sees no other logits.  The backward pass puts their gradient into chunks of zeros, which two products take
to input and weight.  So there are three products, whatever the memory.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.call import TokenLogprobs
from ..core.task import ANY
from ..ops.support import checked_support, excluding, truncated
from ..torch.arguments import TORCH
from ..torch.loss_run import run_tokens
from .arguments import Head, check_gradients
from .columns import Part, Way, chunks_of, products_of
from .plans import LinearPlan
from .products import logits_memory, logits_of

Tensor = torch.Tensor


@torch.compiler.disable
def truncated_logprobs(name: str, head: Head, options: Any, support: Any, plan: LinearPlan) -> TokenLogprobs:
    """(logprob, entropy, lse) of each token, of the classes that its support has.

    Args:
        name: Name of the public function, for errors.
        head: The tensors.
        options: Scale and softcap, or None.
        support: The argument (token_ids, offsets).
        plan: How the columns are cut.
    """
    # The shape and the device of all logits, without their memory.
    logits = head.input.new_empty(()).expand(len(head.input), len(head.weight))
    token_ids, offsets, n = checked_support(TORCH, f"{name}()", logits, 1, support)

    def kept(_: Tensor, ids: Tensor, axis: int) -> Tensor:
        found: Tensor = KeptLogits.apply(head.input, head.weight, head.bias, ids, plan)
        return found

    places = torch.arange(n, device=logits.device)
    call = truncated(torch, kept, logits, head.target, 1, options, (token_ids.long(), offsets.long()), places)
    found = run_tokens(call.x, call.index, 1, call.options, True, ANY)
    return found._replace(logprob=excluding(torch, found.logprob, found.lse, call.outside, 1))


class KeptLogits(torch.autograd.Function):
    """The logits (tokens, n) of some classes of each token; `ids` has their numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, plan: LinearPlan) -> Any:
        ctx.plan = plan
        ctx.save_for_backward(x, weight, bias, ids)
        chunks = chunks_of(plan, len(weight), ids)
        memory, found = logits_memory(len(x), chunks.size, x), x.new_zeros(ids.shape)
        for part, inside, column in chunks.each():
            z = memory[:, : part.stop - part.start]
            logits_of(x, weight[part], None if bias is None else bias[part], z)
            # The places of other chunks read column 0.
            found = torch.where(inside, z.gather(1, column.clamp(min=0)), found)
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        check_gradients(dy)
        x, weight, bias, ids = ctx.saved_tensors
        chunks = chunks_of(ctx.plan, len(weight), ids)

        def of_chunk(part: Part, z: Tensor) -> Tensor:
            # A class occurs once among those of a token; unused places add 0, so the order of additions is no matter.
            return z.zero_().scatter_add_(1, part.target.clamp(min=0), dy.where(part.inside, 0.0))

        way, wanted = Way(ctx.plan, None), ctx.needs_input_grad[:3]
        gradients = products_of(way, (x, weight, bias), wanted, chunks, (dy == 0).all(1), of_chunk)
        return (*gradients, None, None)
