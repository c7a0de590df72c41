"""The ways from logits to tokens: ours, PyTorch, torch.compile, FlashInfer, JAX."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

from ....explanation import explain
from ... import jax_on_torch
from ..cases import Case
from ..formulas import Function
from ..jax_peers import Arrays
from ..peers import Compiled, ForGpus, Peer, by_name, compiled
from .cases import ASKED, LOGITS, SAMPLE, TOPK, VERIFY, TokenCase


class Tokens(Peer):
    """A way to sample; its function maps logits to a tuple (tokens, …), or (values, tokens, …) of the largest.

    Of drafts, it maps logits of the target model, drafts, and logits of the draft model to (accepted, tokens, …).

    Attributes:
        lacks: What the way does not return although it is asked for, by the name of the arguments.
    """

    lacks: ClassVar[dict[str, str]] = {}

    def note(self, case: TokenCase, x: Any, *more: Any) -> str:
        """A note for tables: what the way does not return."""
        return self.lacks.get(case.asked, "")


class OursTokens(Tokens):
    """Our functions, with a seed for each row."""

    name, module, ours = "ours", "onlinesoftmax", True

    def seeds(self, case: TokenCase) -> Any:
        """The seeds of the rows."""
        import torch

        return torch.arange(case.shape[0], device=self.device_type)

    def note(self, case: TokenCase, x: Any, *more: Any) -> str:
        """The kernel of a call and its blocks, or the way without one."""
        if case.operation == TOPK:
            return ""
        given = {name: value for name, value in case.arguments.items() if name != "temperature"}
        if case.operation == VERIFY:
            given["draft_logits"] = True
            drafts = explain(x, operation=VERIFY, **given)
            return f"{drafts.name}, {len(drafts.kernel.launches)} launches" if drafts.kernel else drafts.name
        found = explain(x, operation=SAMPLE, **given)
        return f"{found.name}, {found.kernel.blocks} blocks of a row" if found.kernel else found.name

    def forward(self, case: TokenCase) -> Function:
        """The public function."""
        import onlinesoftmax

        function, given = getattr(onlinesoftmax, case.operation), dict(case.arguments)
        if case.operation != TOPK:
            given["seed"] = self.seeds(case)
        return lambda *inputs: function(*inputs, **given)


class TorchTokens(Tokens):
    """PyTorch's operations: a sort or top-k, and an argmax of probabilities over exponential noise.

    `torch.multinomial` divides by exponential noise and takes the largest, too; it also checks its input and waits for
    the GPU, which no measurement could hide.
    """

    name, distribution = "torch", "torch"
    lacks = dict.fromkeys(ASKED[SAMPLE], "no log-probability of the token")

    def forward(self, case: TokenCase) -> Function:
        """The operations of libraries that serve models."""
        given = case.arguments
        k, p, min_p, top = (given.get(name) for name in ("top_k", "top_p", "min_p", "top_logprobs"))

        def greedy(x: Any) -> Any:
            return (x.argmax(-1),)

        def gumbel(x: Any) -> Any:
            return (_draw(x.float().softmax(-1))[:, 0],)

        def filtered(x: Any) -> Any:
            values, tokens = x.float().topk(k, -1) if k else x.float().sort(dim=-1, descending=True)
            probabilities = values.softmax(-1)
            if p is not None:
                probabilities = probabilities.where(probabilities.cumsum(-1) - probabilities < p, 0.0)
            if min_p is not None:
                probabilities = probabilities.where(probabilities >= min_p * probabilities[:, :1], 0.0)
            token = tokens.gather(-1, _draw(probabilities))[:, 0]
            if not top:
                return (token,)
            return token, tokens[:, :top], (probabilities[:, :top] / probabilities.sum(-1, keepdim=True)).log()

        def largest(x: Any) -> Any:
            logprobs = x.float().log_softmax(-1)
            values, tokens = x.topk(given["k"], -1)
            return values, tokens, logprobs.gather(-1, tokens)

        if case.operation == VERIFY:
            return drafts_by_torch(k, p)
        if case.operation == TOPK:
            return largest
        return filtered if k or p else greedy if given else gumbel


class CompiledTokens(TorchTokens):
    """The same under torch.compile."""

    name = Compiled.name

    def forward(self, case: TokenCase) -> Function:
        """A compilation for this shape, which serves all kinds of logits."""
        return _compiled(replace(case, logits=LOGITS[0]))


@lru_cache(maxsize=1)
def _compiled(case: TokenCase) -> Function:
    return compiled(TorchTokens("").forward(case))


def _draw(weights: Any) -> Any:
    import torch

    return (weights / torch.empty_like(weights).exponential_()).argmax(-1, keepdim=True)


def drafts_by_torch(k: int | None, p: float | None) -> Function:
    """PyTorch's operations for drafts: the probabilities of all tokens, rejection, and a draw from max(p - q, 0)."""
    import torch

    def probabilities(logits: Any) -> Any:
        z = logits.float()
        if k:
            z = z.masked_fill(z < z.topk(k, -1).values[..., -1:], -torch.inf)
        if p is not None:
            order = z.sort(dim=-1, descending=True).values
            shares = order.softmax(-1)
            kept = (shares.cumsum(-1) - shares < p).sum(-1, keepdim=True)
            z = z.masked_fill(z < order.gather(-1, kept - 1), -torch.inf)
        return z.softmax(-1)

    def verify(target: Any, drafts: Any, draft: Any) -> Any:
        of_target, of_draft, n = probabilities(target), probabilities(draft), drafts.shape[1]
        of_p, of_q = (each[:, :n].gather(-1, drafts.unsqueeze(-1))[..., 0] for each in (of_target, of_draft))
        accepted = (torch.rand_like(of_q) * of_q < of_p).long().cumprod(-1).sum(-1)
        row, position = (torch.arange(count, device=drafts.device) for count in (len(drafts), n + 1))
        q = of_draft[row, accepted.clamp(max=n - 1)].masked_fill((accepted == n).unsqueeze(1), 0.0)
        token, last = _draw((of_target[row, accepted] - q).clamp(min=0.0)), accepted.unsqueeze(1)
        more = torch.cat([drafts, token], 1)
        return accepted, more.where(position < last, token.where(position == last, -1))

    return verify


class FlashInfer(Tokens, ForGpus):
    """FlashInfer's softmax and its samplers of probabilities; its top-k."""

    name, module, distribution = "flashinfer", "flashinfer", "flashinfer-python"
    operations: tuple[str, ...] = (SAMPLE, TOPK)
    lacks = dict.fromkeys((*ASKED[SAMPLE], *ASKED[TOPK]), "no log-probabilities")
    lacks["all, top 20"] = "no min-p, no log-probabilities"

    def supports(self, case: Any) -> str | None:
        """Everything but greedy rows."""
        return "has no greedy rows" if case.asked == "greedy" else None

    def forward(self, case: TokenCase) -> Function:
        """Its public functions."""
        library: Any = importlib.import_module(self.module)
        given = case.arguments
        if case.operation != SAMPLE:
            return lambda x: library.top_k(x, given["k"], sorted=True)
        sampling = library.sampling
        k, p = given.get("top_k"), given.get("top_p")
        name = {(0, 0): "", (1, 0): "top_k_", (0, 1): "top_p_", (1, 1): "top_k_top_p_"}[bool(k), bool(p)]
        draw, limits = getattr(sampling, f"{name}sampling_from_probs"), [each for each in (k, p) if each]
        return lambda x: (draw(sampling.softmax(x), *limits),)


class FlashInferLogits(FlashInfer):
    """FlashInfer's samplers of logits; top-k alone is top-k with a top-p that keeps all."""

    name, operations = "flashinfer-logits", (SAMPLE,)

    def supports(self, case: Any) -> str | None:
        """No filter, and top-k with or without top-p."""
        if reason := ForGpus.supports(self, case) or super().supports(case):
            return reason
        given = case.arguments
        return "has no top-p of logits" if "top_p" in given and "top_k" not in given else None

    def forward(self, case: TokenCase) -> Function:
        """Its public functions."""
        sampling, given = importlib.import_module(self.module).sampling, case.arguments
        if "top_k" not in given:
            return lambda x: (sampling.sampling_from_logits(x),)
        limits = given["top_k"], given.get("top_p", 1.0)
        return lambda x: (sampling.top_k_top_p_sampling_from_logits(x, *limits),)


class JaxTokens(Arrays, Tokens):
    """`jax.random.categorical`, after `jax.lax.top_k` or a sort; `jax.lax.top_k` and `jax.nn.log_softmax`."""

    name, distribution = "jax", "jax"
    lacks = TorchTokens.lacks

    def supports(self, case: Case) -> str | None:
        """Everything but drafts."""
        return "has no function for drafts" if case.operation == VERIFY else None

    def forward(self, case: TokenCase) -> Function:
        """The functions, compiled in one."""
        import torch

        # The seed is an operand, or XLA would draw the noise when it compiles.
        call, seed = _in_jax(replace(case, logits=LOGITS[0])), torch.ones(1, dtype=torch.int32, device=self.device_type)
        return lambda x: call(x, seed)


@lru_cache(maxsize=1)
def _in_jax(case: TokenCase) -> Function:
    """The function of logits and a seed."""
    import jax
    import jax.numpy as jnp

    given = case.arguments
    k, p, min_p, top = (given.get(name) for name in ("top_k", "top_p", "min_p", "top_logprobs"))

    def sample(x: Any, seed: Any) -> Any:
        key = jax.random.key(seed[0])
        if not (k or p):
            token = jnp.argmax(x, -1) if given else jax.random.categorical(key, x.astype(jnp.float32))
            return (token.astype(jnp.int32),)
        z = x.astype(jnp.float32)
        order, tokens = jax.lax.top_k(z, k or z.shape[1])
        probabilities = jax.nn.softmax(order)
        if p is not None:
            order = jnp.where(jnp.cumsum(probabilities, -1) - probabilities < p, order, -jnp.inf)
        if min_p is not None:
            order = jnp.where(order >= order[:, :1] + jnp.log(min_p), order, -jnp.inf)
        column = jax.random.categorical(key, order)[:, None]
        token = jnp.take_along_axis(tokens, column, 1)[:, 0]
        return (token, tokens[:, :top], jax.nn.log_softmax(order)[:, :top]) if top else (token,)

    def largest(x: Any, seed: Any) -> Any:
        values, tokens = jax.lax.top_k(x, given["k"])
        return values, tokens, jnp.take_along_axis(jax.nn.log_softmax(x.astype(jnp.float32)), tokens, 1)

    return jax_on_torch.on_tensors(sample if case.operation == SAMPLE else largest)


TOKEN_PEERS: dict[str, type[Peer]] = by_name(TorchTokens, CompiledTokens, FlashInfer, FlashInferLogits, JaxTokens)
"""The ways beside ours, by their names on the command line."""
