"""From logits to tokens for JAX arrays: sampling, the largest log-probabilities, and speculative decoding.

arguments.py checks, and run.py applies the formulas of sampling/formulas.py, which NumPy arrays take too.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from jax.typing import ArrayLike

from ...core.options import LARGEST_INT64
from ...sampling.results import Sampled, TopLogprobs, Verified
from ...sampling.rules import check_positions, checked_choice, checked_parameters
from ..prepare import options_of
from . import run
from .arguments import check_order, checked_count, checked_of_rows, checked_rows, checked_seed, checked_tokens

__all__ = ["sample", "topk_logprobs", "verify"]


def sample(
    seed: ArrayLike, logits: ArrayLike, *, temperature: ArrayLike = 1.0, top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None, min_p: ArrayLike | None = None, offset: ArrayLike = 0,
    bias: ArrayLike | None = None, where: ArrayLike | None = None, softcap: float | None = None,
    ties: Literal["keep", "first"] = "keep", top_logprobs: int = 0, logprobs: Literal["processed", "raw"] = "processed",
    return_support: int | None = None, axis: int = -1,
) -> Sampled:  # fmt: skip
    """Sample a token of each row from softmax(z / temperature), after the filters: `onlinesoftmax.sample` for JAX.

    The scores are z = softcap * tanh(logits / softcap) + bias, and -inf where `where` is False.  The filters, the noise
    and the results are those of `onlinesoftmax.sample`, which gives the same tokens for the same seeds.  Masses are
    added in 64-bit integers, with `jax_enable_x64` or without it.

    Args:
        seed: Integer from 0 to 2^63 - 1, or an array with one for each row; or a key of JAX, or one for each row.
            `jax.random.key(7)` gives the tokens of the seed 7: the last two words of a key are the high and the low
            half of the seed.  The two words of a `jax.random.PRNGKey`, which could be the seeds of two rows, are an
            error.  Equal rows with one seed get the same token, so give each row its own, or its own offset.
        logits: Floating-point array of any shape.
        temperature: Divisor of the scores; 0 for the largest score, of equal ones that with the lowest token id.  This
            and each of the following is a number, or an array that broadcasts to the shape of the rows.
        top_k: Number of tokens to keep; None, 0, -1 or too many for all.
        top_p: Part of the probability to keep; None, or 1 and more, for all.
        min_p: Smallest probability to keep, as a part of the largest, from 0 to 1; None or 0 for all.
        offset: Position in the random stream of the seed, such as the position of the token in the text.
        bias: Floating-point array that broadcasts to the shape of the logits.
        where: Boolean array that broadcasts to the shape of the logits: True for the tokens that can be sampled.
        softcap: Soft bound on the magnitude of the logits: a positive number; None for no bound.
        ties: "keep" keeps all tokens with the score of the last one that top_k or top_p keeps; "first" keeps those with
            the lowest ids.
        top_logprobs: Number of the largest log-probabilities to return.
        logprobs: "processed" for the probabilities that are sampled from; "raw" for those of softmax(z).
        return_support: Return the ids of the tokens that could be sampled, for `token_logprobs`, of the rows that keep
            at most so many.
        axis: The axis of the tokens.

    Returns:
        The named tuple `Sampled` (token, logprob, lse, kept, valid, top_tokens, top_logprobs, support); ids and
        counts of tokens are int32.  The results have no gradient.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or value.  The values of arrays are not
            read.

    Source:
        Gumbel noise: Maddison, Tarlow and Minka, "A* Sampling", 2014; its generator is Philox4x32-7.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> logits = jnp.array([[0.0, 3.0, 2.0, 1.0], [2.0, 2.0, 0.0, 0.0]])
        >>> found = jax.jit(sample)(jnp.array([7, 8]), logits, temperature=jnp.array([0.7, 0.0]), top_k=2)
        >>> print(found.token, found.kept)
        [1 0] [2 1]
    """
    check_order("sample", seed, "logits", logits)
    rows = checked_rows("sample", logits, axis, options_of("sample", 1.0, softcap, bias, where))
    shape, tokens = rows.x.shape[:-1], rows.cols
    given, seeds, offsets = _per_row("sample", shape, tokens, temperature, (top_k, top_p, min_p), (seed, offset), ties)
    raw = checked_choice("sample", "logprobs", logprobs, ("processed", "raw")) == "raw"
    top = checked_count("sample", "top_logprobs", top_logprobs, tokens)
    most = 0 if return_support is None else checked_count("sample", "return_support", return_support, tokens, 1)
    return run.sample(rows, given, seeds, offsets, raw, top, most)


def topk_logprobs(
    logits: ArrayLike, k: int, *, target: ArrayLike | None = None, where: ArrayLike | None = None, scale: Any = 1.0,
    softcap: float | None = None, axis: int = -1,
) -> TopLogprobs:  # fmt: skip
    """The k largest scores of each row, their log-probabilities, and the log-probability and rank of a target.

    Of equal scores, that of the lower token id comes first.  Values, log-probabilities and lse are differentiable in
    the logits.

    Args:
        logits: Floating-point array of any shape.
        k: Number of tokens, from 0 to those of a row.
        target: A token of each row: integers in the shape of the logits without `axis`.
        where, scale, softcap: As for `token_logprobs`.
        axis: The axis of the tokens.

    Returns:
        The named tuple `TopLogprobs` (values, indices, logprobs, target_logprob, target_rank, lse).

    Raises:
        TypeError, ValueError: as for `token_logprobs`; k is not a number of tokens.

    Example:
        >>> import jax.numpy as jnp
        >>> found = topk_logprobs(jnp.array([[0.0, 3.0, 1.0, 3.0]]), 2, target=jnp.array([2]))
        >>> print(found.indices, found.target_rank)
        [[1 3]] [3]
    """
    name = "topk_logprobs"
    rows = checked_rows(name, logits, axis, options_of(name, scale, softcap, None, where))
    number = checked_count(name, "k", k, rows.cols)
    tokens = None if target is None else checked_tokens(name, "target", target, rows.x.shape[:-1])
    return run.topk_logprobs(rows, number, tokens)


def verify(
    seed: ArrayLike, target_logits: ArrayLike, draft_tokens: ArrayLike, draft_logits: ArrayLike | None = None, *,
    temperature: ArrayLike = 1.0, top_k: ArrayLike | None = None, top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None, offset: ArrayLike = 0, ties: Literal["keep", "first"] = "keep",
) -> Verified:  # fmt: skip
    """Decide which drafted tokens stay in speculative decoding: `onlinesoftmax.verify` for JAX.

    Args:
        seed: Integer from 0 to 2^63 - 1, or an array with one for each row of drafts; or a key of JAX, or one for each
            row.
        target_logits: Logits of the target model, (..., n + 1, tokens): at each drafted token, and after the last.
        draft_tokens: Drafted tokens, integers (..., n); -1, or another number that is no token, where a row has fewer.
        draft_logits: Logits that they were sampled from, (..., n, tokens); None for drafts without a distribution.
        temperature: Divisor of the scores of both models, a number or an array with one for each row of drafts.  A row
            with 0 is greedy.
        top_k: Number of tokens to keep, a number or one for each row of drafts; None, 0, -1 or too many for all.
        top_p: Part of the probability to keep, a number or one for each row of drafts; None, or 1 and more, for all.
        min_p: Smallest probability to keep, as a part of the largest, a number or one for each row of drafts; None or 0
            for all.
        offset: Position of the first draft of a row in the random stream of its seed, a number or one for each row of
            drafts; each later draft has the next position.
        ties: "keep" keeps all tokens with the score of the last one that top_k or top_p keeps; "first" keeps those with
            the lowest ids.

    Returns:
        The named tuple `Verified` (accepted, tokens, logprobs, valid); ids and counts of tokens are int32.

    Raises:
        TypeError, ValueError: as for `sample`.

    Source:
        Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192.

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.array([[[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]]])
        >>> found = verify(1, logits, jnp.array([[0, 2]]))
        >>> print(found.accepted, found.tokens)
        [1] [[ 0  1 -1]]
    """
    name = "verify"
    plain = options_of(name, 1.0, None, None, None)
    check_order(name, seed, "target_logits", target_logits)
    target = checked_rows(name, target_logits, -1, plain, "target_logits")
    if target.x.ndim < 2 or not target.x.shape[-2]:
        raise ValueError(f"{name}: target_logits must have shape (..., n + 1, tokens), got {target.x.shape}")
    (*shape, places), tokens = target.x.shape[:-1], target.cols
    check_positions(name, target.x, draft_tokens, draft_logits)
    drafts = checked_tokens(name, "draft_tokens", draft_tokens, (*shape, places - 1))
    draft, wanted = None, (*shape, places - 1, tokens)
    if draft_logits is not None:
        draft = checked_rows(name, draft_logits, -1, plain, "draft_logits")
        if draft.x.shape != wanted:
            raise ValueError(f"{name}: draft_logits has shape {draft.x.shape}, and must have {wanted}")
    given, seeds, offsets = _per_row(
        name, tuple(shape), tokens, temperature, (top_k, top_p, min_p), (seed, offset), ties
    )
    return run.verify(target, drafts, draft, given, seeds, offsets)


def _per_row(
    name: str, rows: tuple[int, ...], tokens: int, temperature: Any, filters: Any, seeds: tuple[Any, Any], ties: Any
) -> tuple[Any, Any, Any]:
    """The parameters, seeds and offsets of the rows."""
    of_rows = partial(checked_of_rows, name, rows)
    given = checked_parameters(name, tokens, of_rows, temperature, filters, ties)
    offset = of_rows("offset", seeds[1], "int64", 0, LARGEST_INT64)
    return given, checked_seed(name, rows, seeds[0]), offset
