"""Sampling from torch tensors, by a kernel or in PyTorch's operations."""

from __future__ import annotations

from typing import Any

import torch

from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES, widened
from ..torch.gradients import adjacent, is_traced, reads_cuda
from ..torch.namespace import NAMESPACE
from .arguments import Logits
from .eager import sample_rows, support_of, verify_rows
from .order import largest
from .results import Sampled, Support, Verified
from .rules import Parameters
from .topk import topk_logprobs

__all__ = ["sample", "sample_flat", "topk_logprobs", "verify", "verify_flat"]

Tensor = torch.Tensor


@torch.no_grad()
def sample(
    logits: Logits, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int, most: int
) -> Sampled:
    """A token of each row.

    Args:
        logits: The logits.
        parameters: Temperature and filters.
        seed, offset: Seed of each row, and its position in the random stream of that, (rows,) int64.
        raw: True for log-probabilities of the scores as they are, without temperature and filters.
        top: Number of the largest log-probabilities to return.
        most: Most tokens of a row in the support; 0 for no support.
    """
    z, rows = logits.as_rows(), logits.rows
    sampler = _sample_by_operator if _needs_operator(z) else sample_flat
    found = sampler(z, parameters, seed, offset, raw, top, most)
    fields: list[Any] = [None if t is None else t.reshape(rows + t.shape[1:]) for t in found[:7]]
    return Sampled(*[*fields, found.support])


def sample_flat(
    z: Tensor, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int, most: int
) -> Sampled:
    """`sample` of scores (rows, tokens), by a kernel or in PyTorch's operations; its results have one axis of rows."""
    given, listed = (parameters, seed, offset, raw), max(top, most)
    found, tokens = _sample_by_kernel(z, *given, listed), None
    if found is None and listed > top:
        # No kernel lists so many tokens.  One may sample, and `largest` lists them.
        found = _sample_by_kernel(z, *given, top)
        tokens = None if found is None else largest(z, most)
    by_kernel = found is not None
    if found is None:
        found = sample_rows(widened(z), *given, listed)
    tops: list[Any] = [found.top_tokens, found.top_logprobs]
    support = None
    if most and by_kernel:
        from .kernels import support_launch

        support = support_launch.support((tops[0] if tokens is None else tokens).contiguous(), found.kept, most)
    elif most:
        support = support_of(tops[0][:, :most], found.kept)
    fields: list[Any] = [*found[:5], *[t[:, :top] if top else None for t in tops], support]
    return Sampled(*fields)


def _sample_by_kernel(
    z: Tensor, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int
) -> Sampled | None:
    """`sample` of scores (rows, tokens) by a kernel; None where none takes the call."""
    if not _kernels_take(z):
        return None
    from .kernels import sample_launch

    x = adjacent(z)
    run = sample_launch.bind(x, (len(x),), parameters, raw, top)
    return None if run is None else run(x, parameters.temperature, seed, offset, parameters[1:4])


def _sample_by_operator(
    z: Tensor, parameters: Parameters, seed: Tensor, offset: Tensor, raw: bool, top: int, most: int
) -> Sampled:
    """`sample_flat` as an operator."""
    found = getattr(torch.ops, NAMESPACE).sample(z, *parameters, seed, offset, raw, top, most)
    fields: list[Any] = [*found[:5], *(found[5:7] if top else (None, None)), Support(*found[-2:]) if most else None]
    return Sampled(*fields)


def _kernels_take(z: Tensor) -> bool:
    """True where our kernels may take scores."""
    plain = type(z) in PLAIN_TYPES and not is_traced(z) and not is_transformed()
    return plain and reads_cuda(z) and z.dtype != torch.float64


def _needs_operator(z: Tensor) -> bool:
    """True for scores in a trace that a kernel may take when the traced program runs, on whichever machine."""
    return is_traced(z) and not is_transformed() and z.is_cuda and z.dtype != torch.float64


@torch.no_grad()
def verify(
    target: Logits, drafts: Tensor, draft: Logits | None, parameters: Parameters, seed: Tensor, offset: Tensor
) -> Verified:
    """What is left of drafted tokens.

    Args:
        target: Logits (..., n + 1, tokens) of the target model.
        drafts: Drafted tokens (..., n).
        draft: Logits (..., n, tokens) that they were sampled from, or None.
        parameters: Temperature and filters of each row of drafts.
        seed, offset: As for `sample`, of the first position of each row.
    """
    *rows, n = drafts.shape
    z, other = target.as_rows(), None if draft is None else draft.as_rows()
    if other is not None and other.dtype != z.dtype:
        # A kernel reads both in one dtype.  float64 stays as it is: no kernel takes it.
        z, other = widened(z), widened(other)
    verifier = _verify_by_operator if _needs_operator(z) else verify_flat
    left = verifier(z, drafts.reshape(seed.shape[0], n).long(), other, parameters, seed, offset)
    return Verified(*[t.reshape((*rows, *t.shape[1:])) for t in left])


def verify_flat(
    z: Tensor, drafts: Tensor, draft: Tensor | None, parameters: Parameters, seed: Tensor, offset: Tensor
) -> Verified:
    """`verify` of scores (rows * (n + 1), tokens) and (rows * n, tokens), and int64 drafts (rows, n)."""
    models = [t for t in (z, draft) if t is not None]
    if all(map(_kernels_take, models)):
        from .kernels import verify_launch

        models = list(map(adjacent, models))
        run = verify_launch.bind(models, tuple(seed.shape), drafts.shape[-1], parameters)
        if run is not None:
            operands = parameters.temperature, seed, offset, parameters[1:4]
            return run(models[0], drafts.contiguous(), None if draft is None else models[1], *operands)
    return verify_rows((widened(z), None if draft is None else widened(draft)), drafts, parameters, seed, offset)


def _verify_by_operator(
    z: Tensor, drafts: Tensor, draft: Tensor | None, parameters: Parameters, seed: Tensor, offset: Tensor
) -> Verified:
    """`verify_flat` as an operator."""
    return Verified(*getattr(torch.ops, NAMESPACE).verify(z, drafts, draft, *parameters, seed, offset))
