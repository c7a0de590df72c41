"""From logits to tokens: sampling with temperature, top-k, top-p and min-p, and the largest log-probabilities.

    sample           a token of each row, with its log-probability
    topk_logprobs    the k largest scores of each row with their log-probabilities, and the rank of a target
    verify           which drafted tokens stay in speculative decoding, and the token that follows them

formulas.py says what is kept and which token the noise prefers, verification.py which draft stays, for torch, NumPy and
JAX.  eager.py and order.py have PyTorch's functions for them, and run.py chooses between these and a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..core.annotations import A
from ..core.arrays import check_no_jax, is_dtensor
from ..kernels.registry import needing
from .results import Sampled, Support, TopLogprobs, Verified

if TYPE_CHECKING:
    import torch

__all__ = ["Sampled", "Support", "TopLogprobs", "Verified", "sample", "topk_logprobs", "verify"]


def sample(
    logits: A, *, temperature: float | A = 1.0, top_k: int | A | None = None,
    top_p: float | A | None = None, min_p: float | A | None = None, seed: int | A | None = None,
    offset: int | A = 0, generator: torch.Generator | np.random.Generator | None = None, bias: A | None = None,
    mask: A | None = None, softcap: float | None = None, ties: Literal["keep", "first"] = "keep",
    top_logprobs: int = 0, logprobs: Literal["processed", "raw"] = "processed", return_support: int | None = None,
    dim: int = -1,
) -> Sampled:  # fmt: skip
    """Sample a token of each row from softmax(z / temperature), after the filters.

    The scores are z = softcap * tanh(logits / softcap) + bias, and -inf where masked.  Of the tokens, top_k keeps those
    with the k largest scores; of their probabilities, made to add up to 1, top_p keeps the smallest set of the largest
    that adds up to p; min_p keeps those of at least min_p times the largest.  Tokens with equal scores are kept or left
    out together, so the result does not depend on their order.

    The token is the one with the largest z / temperature + noise, and the noise depends on the seed, the offset and the
    token alone.  So a row gets the same token beside any other rows, whatever their parameters; and two equal rows with
    one seed get the same token.  Each parameter is a number, or a tensor with one for each row on the device of the
    logits.  No call waits for the GPU.

    Args:
        logits: Floating-point tensor of any shape and strides, or a NumPy array; the other arrays are of the same kind.
            A DTensor gives DTensors that are sharded as its rows are; if `dim` is sharded, no logits are exchanged
            (`onlinesoftmax.distributed.sample`).
        temperature: Divisor of the scores.  A row with 0 takes its largest score, of equal ones that with the
            lowest token id.  Rounded to float32.
        top_k: Number of tokens to keep; None, 0, -1 or too many for all.
        top_p: Part of the probability to keep, at least one token; None, or 1 and more, for all.
        min_p: Smallest probability to keep, as a part of the largest, from 0 to 1; None or 0 for all.
        seed: Integer from 0 to 2^63 - 1.  None draws one for each row from `generator`, unless the temperature is the
            number 0: then nothing is random.
        offset: Position in the random stream of the seed, such as the position of the token in the text.
        generator: Generator of PyTorch, on the device of the logits; by default that of the device.  For a NumPy array,
            a numpy.random.Generator; by default a new one.
        bias: Floating point, broadcasts to the shape of `logits`.
        mask: Boolean, broadcasts to the shape of `logits`: True for the tokens that can be sampled.
        softcap: Soft bound on the magnitude of the logits: a positive number.
        ties: "keep" keeps all tokens with the score of the last one that top_k or top_p keeps; "first" keeps those with
            the lowest ids, so that top_k keeps no more than k.
        top_logprobs: Number of the largest log-probabilities to return.
        logprobs: "processed" for the probabilities that are sampled from, which are 1 and 0 in a greedy row; "raw" for
            those of softmax(z).
        return_support: Return the ids of the tokens that could be sampled, for `token_logprobs`, of the rows that keep
            at most so many.  Of a row that keeps more, as `kept` says, it returns none.
        dim: The dimension of the tokens.

    Returns:
        The named tuple `Sampled` (token, logprob, lse, kept, valid, top_tokens, top_logprobs, support).  A row that
        holds a NaN or nothing but -inf is not valid, and changes no other row.  The tokens with +inf, where there are
        any, are equally probable.

    Raises:
        TypeError, RuntimeError, ValueError, IndexError: an argument has the wrong type, dtype, device, shape or value.
            The values of tensors are not read: a negative top_k keeps all, and top_p and min_p below 0 count as 0.

    Source:
        Gumbel noise: Maddison, Tarlow and Minka, "A* Sampling", 2014; its generator is Philox4x32-7.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [2.0, 2.0, 0.0, 0.0]])
        >>> found = sample(logits, temperature=torch.tensor([0.7, 0.0]), top_k=2, seed=torch.tensor([7, 8]))
        >>> found.token, found.kept
        (tensor([1, 0]), tensor([2, 1]))
    """
    if seed is None and generator is None and _is_zero(temperature):
        seed = 0
    if is_dtensor(type(logits)):
        given = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed, "offset": offset,
            "generator": generator, "ties": ties, "top_logprobs": top_logprobs, "logprobs": logprobs,
            "return_support": return_support,
        }  # fmt: skip
        return _of_dtensor(logits, dim, {"softcap": softcap, "bias": bias, "mask": mask}, given)
    plain = (
        generator is None and bias is None and mask is None and softcap is None
        and (return_support is None or type(return_support) is int) and type(top_logprobs) is int and type(dim) is int
    )  # fmt: skip
    filters, others = (top_k, top_p, min_p), ("sample", ties, logprobs, top_logprobs, return_support, dim)
    if plain and _PREPARED:
        _, call = _PREPARED[0].look_up_call(logits, temperature, seed, offset, filters, others)
        if call is not None:
            ready: Sampled = call(logits, temperature, seed, offset, filters)
            return ready
    arguments, run = _modules("sample", logits)
    x = arguments.checked_logits("sample", logits, dim, 1.0, softcap, bias, mask)
    given = arguments.checked_parameters(x, temperature, top_k, top_p, min_p, ties)
    raw = arguments.checked_choice("sample()", "logprobs", logprobs, ("processed", "raw")) == "raw"
    top = arguments.checked_count(x, "top_logprobs", top_logprobs, 0)
    most = None if return_support is None else arguments.checked_count(x, "return_support", return_support, 1)
    found: Sampled = run.sample(x, given, *arguments.checked_seeds(x, seed, offset, generator), raw, top, most or 0)
    if plain and not isinstance(logits, np.ndarray):
        from . import prepared

        if prepared.prepare(x, (temperature, seed, offset), filters, given, others, raw) and not _PREPARED:
            _PREPARED.append(prepared)
    return found


def _of_dtensor(logits: Any, dim: int, scores: dict[str, Any], given: dict[str, Any]) -> Sampled:
    """`sample` of a DTensor, from softcap, bias and mask and the other arguments by name."""
    from ..distributed.sampling import dtensor, run

    here = dtensor.local_call(logits, dim, scores, given)
    if here.team.groups:
        return here.results(run.sample(here.logits, here.arguments, here.team))
    options = here.logits.options
    more = {"softcap": options.softcap, "bias": options.bias, "mask": options.mask}
    return here.results(sample(here.logits.x, dim=here.logits.dim, **more, **here.arguments))


def topk_logprobs(
    logits: A, k: int, *, target: A | None = None, scale: float | A = 1.0, softcap: float | None = None,
    mask: A | None = None, dim: int = -1,
) -> TopLogprobs:  # fmt: skip
    """The k largest scores of each row, their log-probabilities, and the log-probability and rank of a target.

    Of equal scores, that of the lower token id comes first, and NaN before all.  In a row with NaN or +inf, or with
    nothing but -inf, the log-probabilities are NaN.  Values, log-probabilities and lse are differentiable in the
    logits.

    Args:
        logits: Floating-point tensor of any shape and strides, or a NumPy array.
        k: Number of tokens, from 0 to those of a row.
        target: A token of each row: integers in the shape of `logits` without `dim`.  A number that is no token has
            the rank 0 and the log-probability NaN.
        scale, softcap, mask: As for `token_logprobs`.
        dim: The dimension of the tokens.

    Returns:
        The named tuple `TopLogprobs` (values, indices, logprobs, target_logprob, target_rank, lse).

    Raises:
        TypeError, RuntimeError, ValueError, IndexError: as for `token_logprobs`; k is not a number of tokens.

    Example:
        >>> import torch
        >>> found = topk_logprobs(torch.tensor([[0.0, 3.0, 1.0, 3.0]]), 2, target=torch.tensor([2]))
        >>> found.indices, found.target_rank
        (tensor([[1, 3]]), tensor([3]))
    """
    whole = type(k) is int and type(dim) is int
    plain = whole and type(scale) is float and scale == 1 and softcap is None and mask is None
    if plain and _PREPARED:
        _, call = _PREPARED[0].look_up(("topk_logprobs", (k, dim)), logits, target)
        if call is not None:
            ready: TopLogprobs = call(logits, target)
            return ready
    arguments, run = _modules("topk_logprobs", logits)
    x = arguments.checked_logits("topk_logprobs", logits, dim, scale, softcap, None, mask)
    number = arguments.checked_count(x, "k", k, 0)
    found: TopLogprobs = run.topk_logprobs(x, number, arguments.checked_target(x, target))
    if plain and not isinstance(logits, np.ndarray):
        from . import prepared

        if prepared.prepare_topk(x, number, target, dim) and not _PREPARED:
            _PREPARED.append(prepared)
    return found


def verify(
    target_logits: A, draft_tokens: A, draft_logits: A | None = None, *,
    temperature: float | A = 1.0, top_k: int | A | None = None, top_p: float | A | None = None,
    min_p: float | A | None = None, seed: int | A | None = None, offset: int | A = 0,
    generator: torch.Generator | np.random.Generator | None = None, ties: Literal["keep", "first"] = "keep",
) -> Verified:  # fmt: skip
    """Decide which drafted tokens stay, so that the tokens of a row are distributed as those of the target model.

    A draft with the probability q in the draft model and p in the target model stays with the probability
    min(1, p / q).  The first that does not stay is replaced by a token of the distribution max(p - q, 0); if all stay,
    one more token is sampled from the target model.  Temperature and filters apply to both models, so the drafts must
    have been sampled with them.  The noise that accepts and replaces drafts is independent of that of `sample` with the
    same seed and offset.  Where a row has no more drafts, the token is that of `sample` at offset + position.  The
    offset of the next call is offset + accepted + 1.

    Args:
        target_logits: Logits of the target model, (..., n + 1, tokens): at each drafted token, and after the last.
        draft_tokens: Drafted tokens, integers (..., n); -1, or another number that is no token, where a row has fewer.
        draft_logits: Logits that they were sampled from, (..., n, tokens); None for drafts without a distribution, as
            from greedy decoding or from a look-up in the text: their q is 1.
        temperature: Divisor of the scores of both models, a number or a tensor with one for each row of drafts.  A row
            with 0 is greedy.
        top_k: Number of tokens to keep, a number or one for each row of drafts; None, 0, -1 or too many for all.
        top_p: Part of the probability to keep, a number or one for each row of drafts; None, or 1 and more, for all.
        min_p: Smallest probability to keep, as a part of the largest, a number or one for each row of drafts; None or 0
            for all.
        seed: Integer from 0 to 2^63 - 1, or one for each row of drafts.  None draws one for each row from `generator`,
            unless the temperature is the number 0.
        offset: Position of the first draft of a row in the random stream of its seed, a number or one for each row of
            drafts; each later draft has the next position.
        generator: Generator of PyTorch, on the device of the logits, or a numpy.random.Generator for NumPy arrays; by
            default that of the device, or a new one.
        ties: "keep" keeps all tokens with the score of the last one that top_k or top_p keeps; "first" keeps those with
            the lowest ids.

    Returns:
        The named tuple `Verified` (accepted, tokens, logprobs, valid).

    Raises:
        TypeError, RuntimeError, ValueError: as for `sample`.

    Source:
        Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]]])
        >>> found = verify(logits, torch.tensor([[0, 2]]), seed=1)
        >>> found.accepted, found.tokens
        (tensor([1]), tensor([[ 0,  1, -1]]))
    """
    others: tuple[Any, ...] = (draft_tokens,) if draft_logits is None else (draft_tokens, draft_logits)
    filters, called = (top_k, top_p, min_p), ("verify", ties, len(others))
    if seed is None and generator is None and _is_zero(temperature):
        seed = 0
    if generator is None and _PREPARED:
        _, call = _PREPARED[0].look_up_call(target_logits, temperature, seed, offset, filters, called, *others)
        if call is not None:
            ready: Verified = call(target_logits, draft_tokens, draft_logits, temperature, seed, offset, filters)
            return ready
    arguments, run = _modules("verify", target_logits)
    target = arguments.checked_logits("verify", target_logits, -1, 1.0, None, None, None, "target_logits")
    draft = None
    if draft_logits is not None:
        draft = arguments.checked_logits("verify", draft_logits, -1, 1.0, None, None, None, "draft_logits")
    rows = arguments.checked_drafts(target, draft_tokens, draft)
    given = arguments.checked_parameters(rows, temperature, top_k, top_p, min_p, ties)
    seeds = arguments.checked_seeds(rows, seed, offset, generator)
    found: Verified = run.verify(target, draft_tokens, draft, given, *seeds)
    if generator is None and not isinstance(target_logits, np.ndarray):
        from . import prepared

        operands = temperature, seed, offset
        if prepared.prepare_verify(rows, draft_tokens, draft, operands, filters, given, called) and not _PREPARED:
            _PREPARED.append(prepared)
    return found


def _is_zero(temperature: Any) -> bool:
    """True where all rows are greedy, so that no seed has to be drawn: that is a kernel of its own."""
    return type(temperature) in (int, float) and temperature == 0


_PREPARED: list[Any] = []
"""The module prepared.py, once it has prepared a call: an import statement takes the host a microsecond."""


def _modules(function: str, logits: Any) -> tuple[Any, Any]:
    """The modules that check the arguments and compute, for NumPy arrays or torch tensors."""
    if isinstance(logits, np.ndarray):
        from ..numpy import sampling

        return sampling, sampling
    check_no_jax(function, type(logits))
    with needing("torch", "sampling"):
        from . import arguments, run

        return arguments, run
