"""The arguments of a routing, checked and made uniform: the records that formulas and kernels read."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, NamedTuple

from ..core.arguments import Library, check_flags, not_floating
from ..core.arrays import Array, broadcasts
from ..core.options import LARGEST_FLOAT64, check_number, is_number


class Score(Enum):
    """The function that makes scores of logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRTSOFTPLUS = "sqrtsoftplus"
    IDENTITY = "identity"


SCORES = tuple(score.value for score in Score)

ORDERS = ("score_first", "topk_first")

GROUP_SCORES = {"max": 1, "top2_sum": 2}

MOST_EXPERTS = 8192
"""Experts whose masses can be added in float64 without rounding (selection.py)."""


class Rule(NamedTuple):
    """How experts are chosen and weighted.

    Attributes:
        experts: Number of experts, E, from 1 to MOST_EXPERTS.
        k: Experts of a token, from 1 to E.
        score: The score.
        topk_first: True to choose by logits, and to compute the scores of the chosen ones.
        groups: Number of groups, which divides E; 1 without groups.
        group_k: Number of groups that a token may choose from; 1 without groups.  k <= group_k * E / groups.
        group_top: Number of experts of a group, at most E / groups, whose scores are added to the score of the group.
        renormalize: True where the weights of a token are divided by their sum.  Also True for softmax of the chosen
            logits (topk_first), and False for the identity only if the caller says so.
        scale: Factor of the weights, a finite number.
    """

    experts: int
    k: int
    score: Score
    topk_first: bool
    groups: int
    group_k: int
    group_top: int
    renormalize: bool
    scale: float

    # No properties, which torch.compile of PyTorch 2.10 cannot trace.
    def is_of_chosen(self) -> bool:
        """True where the weights are the softmax of the chosen logits."""
        return self.score is Score.SOFTMAX and self.renormalize

    def selection(self) -> Score:
        """The score by which experts are chosen."""
        return Score.IDENTITY if self.topk_first else self.score


class Call(NamedTuple):
    """A call on flat rows; T = sequences * tokens.

    Attributes:
        x: Logits (T, experts): the tokens of one sequence, then those of the next.
        bias: (experts,), contiguous, float32 (float64 for float64 logits); None for none.
        mask: (T,), contiguous, boolean: False for a token that is not routed; None where all are.
        indices: Given experts (T, k), contiguous, int32; None to choose them.
        rule: How they are chosen and weighted.
        sequences, tokens: Number of sequences, and of tokens of each.  counts and prob_sums are (sequences, experts).
        counts, prob_sums: True where this result is wanted.
        losses: True where the losses of one sequence are wanted too; then counts and prob_sums are.  Only kernels
            compute them.
    """

    x: Array
    bias: Array | None
    mask: Array | None
    indices: Array | None
    rule: Rule
    sequences: int
    tokens: int
    counts: bool
    prob_sums: bool
    losses: bool = False

    @property
    def complete(self) -> bool:
        """True where each token gets k experts."""
        return self.mask is None and self.indices is None


class Gradients(NamedTuple):
    """Gradients of the results of a call; None for 0.

    Attributes:
        weights: (T, k) float32 (float64 for float64 logits), as the following.
        prob_sums: (sequences, experts).
        lse: (T,).
    """

    weights: Array | None
    prob_sums: Array | None
    lse: Array | None


class LossGradients(NamedTuple):
    """Gradients of the losses that a kernel has computed with the results; None for 0.

    Attributes:
        balance, z_loss: Numbers, float32.
        slopes: That of `Losses`, in results.py.
    """

    balance: Array | None
    z_loss: Array | None
    slopes: Array

    def added(self, given: Gradients, call: Call, lse: Array) -> Gradients:
        """The gradients of the results with those of the losses.

        Args:
            given: Gradients of the results.
            call: The call.
            lse: Its result.
        """
        sums, of_lse = given.prob_sums, given.lse
        if self.balance is not None:
            own = (self.slopes[: call.rule.experts] * self.balance)[None]
            sums = own if sums is None else sums + own
        if self.z_loss is not None:
            own = lse * (self.slopes[-1] * self.z_loss)
            of_lse = own if of_lse is None else of_lse + own
        return Gradients(given.weights, sums, of_lse)


def check_logits(library: Library, logits: Any) -> None:
    """Raise an error for logits that are no floating-point array with a dimension of experts."""
    caller = "route()"
    library.check_array(caller, "logits", logits)
    if library.kind_of(logits) != "floating":
        raise not_floating(caller, "logits", logits)
    if not logits.ndim:
        raise ValueError(f"{caller}: logits must have a dimension of experts, got a number")


def check_arrays(
    library: Library, logits: Any, bias: Any, mask: Any, indices: Any, k: Any, mask_name: str = "mask"
) -> None:
    """Raise an error for an array that has the wrong type, dtype, shape or place.

    Args:
        library: Library of the arrays.
        logits, bias, mask, indices: Arguments of `route`.
        k: Its argument, which `checked_rule` checks.
        mask_name: Name of the mask, for errors.
    """
    caller = "route()"
    check_logits(library, logits)
    rows, experts = tuple(logits.shape[:-1]), logits.shape[-1]
    for argument, t, kind in (
        ("bias", bias, "floating"),
        (mask_name, mask, "boolean"),
        ("indices", indices, "integer"),
    ):
        if t is None:
            continue
        library.check_array(caller, argument, t, logits)
        if library.kind_of(t) != kind:
            wanted = {"boolean": "boolean (True for the tokens to route)", "floating": "floating point"}.get(kind, kind)
            raise RuntimeError(f"{caller}: {argument} must be {wanted}, got {t.dtype}")
    if bias is not None and tuple(bias.shape) != (experts,):
        raise ValueError(f"{caller}: bias must have one number for each expert, ({experts},), got {tuple(bias.shape)}")
    if mask is not None and not broadcasts(tuple(mask.shape), rows):
        raise ValueError(f"{caller}: {mask_name} of shape {tuple(mask.shape)} does not broadcast to the tokens' {rows}")
    if indices is not None and tuple(indices.shape) != (*rows, k):
        raise ValueError(f"{caller}: indices must have shape {(*rows, k)}, got {tuple(indices.shape)}")


def sizes_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Number of sequences, and of the tokens of each, for logits of a shape (..., tokens, experts)."""
    return math.prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1


def checked_rule(
    caller: str,
    experts: int,
    k: Any,
    score: Any,
    order: Any,
    groups: tuple[Any, Any, Any],
    renormalize: Any,
    scale: Any,
) -> Rule:
    """The rule of a call.

    Args:
        caller: Name of the public function, for errors.
        experts: Number of experts.
        k, score, order, renormalize, scale: Arguments of `route`.
        groups: Its arguments groups, group_k and group_score.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.
    """
    if not 1 <= experts <= MOST_EXPERTS:
        raise ValueError(f"{caller}: logits must have from 1 to {MOST_EXPERTS} experts, got {experts}")
    chosen = _whole(caller, "k", k)
    if not 1 <= chosen <= experts:
        raise ValueError(f"{caller}: k must be from 1 to the {experts} experts, got {k}")
    for argument, value, words in (("score", score, SCORES), ("order", order, ORDERS)):
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"{caller}: {argument} must be {' or '.join(map(repr, words))}, got {value!r}")
    check_flags(caller, renormalize=renormalize)
    check_number(caller, "scale", scale, -LARGEST_FLOAT64, LARGEST_FLOAT64)
    number, group_k, group_top = _checked_groups(caller, experts, chosen, groups)
    topk_first = order == "topk_first"
    together = renormalize or (topk_first and Score(score) is Score.SOFTMAX)
    return Rule(experts, chosen, Score(score), topk_first, number, group_k, group_top, together, float(scale))


def _checked_groups(caller: str, experts: int, k: int, given: tuple[Any, Any, Any]) -> tuple[int, int, int]:
    """The numbers groups, group_k and group_top of a rule."""
    groups, group_k, score = given
    if isinstance(score, str):
        if score not in GROUP_SCORES:
            raise ValueError(f"{caller}: group_score must be 'max', 'top2_sum' or an int, got {score!r}")
        top = GROUP_SCORES[score]
    else:
        top = _whole(caller, "group_score", score)
        if top < 1:
            raise ValueError(f"{caller}: group_score must be at least 1, got {score}")
    if (groups is None) != (group_k is None):
        raise ValueError(f"{caller}: groups and group_k belong together, got {groups!r} and {group_k!r}")
    if groups is None:
        return 1, 1, 1
    number, kept = _whole(caller, "groups", groups), _whole(caller, "group_k", group_k)
    if number < 1 or experts % number:
        raise ValueError(f"{caller}: groups must divide the {experts} experts, got {groups}")
    if not 1 <= kept <= number:
        raise ValueError(f"{caller}: group_k must be from 1 to the {number} groups, got {group_k}")
    size = experts // number
    if k > kept * size:
        raise ValueError(f"{caller}: k = {k} experts are more than {kept} groups of {size} have")
    # If every group is kept, there is nothing to choose.
    return (number, kept, min(top, size)) if kept < number else (1, 1, 1)


def _whole(caller: str, argument: str, value: Any) -> int:
    """An integer; a bool is none."""
    if type(value) is int:  # a symbol of a trace too, of which no methods can be asked
        return value
    if isinstance(value, bool) or not is_number(value) or not hasattr(value, "__index__"):
        raise TypeError(f"{caller}: {argument} must be an int, not {type(value).__name__}")
    return int(value)
