"""The named tuples that sampling returns.  Their integers are int64, and int32 for JAX arrays."""

from __future__ import annotations

from typing import NamedTuple

from ..core.arrays import Array


class Support(NamedTuple):
    """The tokens that each row could sample; the rows are in the order of the logits without the dimension of tokens.

    Attributes:
        token_ids: (rows * n,) int64: the ids of each row, by rising id, row after row; then -1.
        offsets: (rows + 1,) int64: row i has token_ids[offsets[i] : offsets[i + 1]], and none if it keeps more than n.
    """

    token_ids: Array
    offsets: Array


class Sampled(NamedTuple):
    """A token of each row; a field has the shape of the rows, the top tokens one dimension more at the end.

    Attributes:
        token: Token id, int64; 0 where the row is not valid.
        logprob: Logarithm of its probability, float32 (float64 for float64 logits); NaN where the row is not valid.
        lse: Logsumexp of the scores that `logprob` refers to; NaN where the row is not valid.
        kept: Number of tokens that could be sampled, int64; 0 where the row is not valid.
        valid: False for a row that holds NaN or nothing but -inf, whose temperature is negative or
            infinite, or one of whose parameters is NaN.
        top_tokens: The tokens with the largest scores, by falling score; None unless they were asked for.
        top_logprobs: Logarithms of their probabilities; None unless they were asked for.
        support: The tokens that could be sampled, in its own shape; None unless it was asked for.
    """

    token: Array
    logprob: Array
    lse: Array
    kept: Array
    valid: Array
    top_tokens: Array | None
    top_logprobs: Array | None
    support: Support | None = None


class TopLogprobs(NamedTuple):
    """The largest scores of each row; those of the k tokens lie along the dimension of the tokens.

    Attributes:
        values: Scores, float32 (float64 for float64 logits), by falling size; NaN first; differentiable.
        indices: Their tokens, int64; of equal scores, the lower id first.
        logprobs: Logarithms of their probabilities; differentiable.
        target_logprob: Logarithm of the probability of the target, differentiable; NaN where it is no token; None
            without a target.
        target_rank: Rank of the target in the order of all scores, from 1, int64; 0 where it is no token; None
            without a target.
        lse: Logsumexp of the scores; differentiable.
    """

    values: Array
    indices: Array
    logprobs: Array
    target_logprob: Array | None
    target_rank: Array | None
    lse: Array


class Verified(NamedTuple):
    """What is left of the drafts of each row; n is the number of drafts.

    Attributes:
        accepted: Number of accepted drafts, int64.
        tokens: (..., n + 1) int64: the accepted drafts, then one more token, then -1.
        logprobs: Logarithms of the probabilities of these tokens under the target, float32 (float64 for float64
            logits); 0 for -1.
        valid: False for a row whose target has no distribution where its one more token would be sampled: -1 is in
            its place.
    """

    accepted: Array
    tokens: Array
    logprobs: Array
    valid: Array
