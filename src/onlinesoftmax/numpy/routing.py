"""The routing of NumPy arrays: the checks of the arguments, and the call.  There are no gradients.

The functions have the names and the arguments of those for torch tensors in routing/arguments.py and routing/run.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from ..core.arrays import Array, namespace, quiet
from ..routing import formulas, rules, selection
from ..routing.results import Routed
from ..routing.rules import Call, Rule, check_arrays, sizes_of
from .arguments import NUMPY
from .sampling import order_of


def _power_of_two(n: Array) -> Array:
    return (np.nan_to_num(n).astype(np.int32) + 127 << 23).view(np.float32)


def _take(t: Array, places: Array) -> Array:
    return np.take_along_axis(t, places, -1)


CHOOSING = selection.Functions(
    namespace(np.zeros(1)), exact=lambda t: t, rounded=lambda t: t, double=lambda t: t.astype(np.float64),
    single=lambda t: t.astype(np.float32, copy=False), bounded=np.clip, power_of_two=_power_of_two, sqrt=np.sqrt,
    log1p=np.log1p, largest=lambda keys, k: order_of(keys).largest(k), sorted=lambda t: np.sort(t, -1), take=_take,
)  # fmt: skip
"""NumPy's functions for the choice of experts."""

OF_RESULTS = formulas.Functions(namespace(np.zeros(1)), np.sqrt, np.log1p, lambda t: t, _take)
"""NumPy's functions for the formulas."""


check_logits = partial(rules.check_logits, NUMPY)


@quiet
def checked_call(
    logits: Any, bias: Any, mask: Any, indices: Any, rule: Rule, counts: bool, prob_sums: bool
) -> Call:  # fmt: skip
    """The call on flat rows."""
    check_arrays(NUMPY, logits, bias, mask, indices, rule.k)
    rows, wide = logits.shape[:-1], np.float64 if logits.dtype.itemsize >= 8 else np.float32
    x = np.asarray(logits).astype(wide, copy=False).reshape(math.prod(rows), rule.experts)
    bias = None if bias is None else bias.astype(wide)
    mask = None if mask is None else np.broadcast_to(mask, rows).reshape(len(x))
    indices = None if indices is None else np.asarray(indices).astype(np.int64).reshape(len(x), rule.k)
    return Call(x, bias, mask, indices, rule, *sizes_of(logits.shape), counts, prob_sums)


@quiet
def route(call: Call, rows: tuple[int, ...], dense: bool) -> Routed:
    """The results of a call; the arguments are those of `route` in routing/run.py."""
    x, rule, (experts, k) = call.x, call.rule, (call.rule.experts, call.rule.k)
    indices = call.indices
    if indices is None:
        indices = selection.chosen(CHOOSING, x, call.bias, rule, x.dtype == np.float64)
    indices = np.where((indices < 0) | (indices >= experts), -1, indices)
    if call.mask is not None:
        indices = np.where(call.mask[:, None], indices, -1)
    found = formulas.results_of(OF_RESULTS, x, call.bias, indices, rule, call.prob_sums, call.complete)
    counts, sums, whole, of_sequences = None, None, None, (*rows[:-1], experts)
    if call.counts:
        # -1 is counted behind the last expert.
        places = np.where(indices < 0, experts, indices).reshape(call.sequences, call.tokens * k)
        each = [np.bincount(part, minlength=experts + 1)[:experts] for part in places]
        counts = np.array(each, np.int32).reshape(of_sequences)
    if found.probabilities is not None:
        p = found.probabilities.reshape(call.sequences, call.tokens, experts)
        sums = OF_RESULTS.xp.sum(p, 1).reshape(of_sequences)
    if dense:
        whole = np.zeros_like(x)
        # The weight of -1 is 0.
        np.add.at(whole, (np.arange(len(x))[:, None], np.where(indices < 0, 0, indices)), found.weights)
        whole = whole.reshape(*rows, experts)
    weights, lse = found.weights.reshape(*rows, k), found.lse.reshape(rows)
    return Routed(weights, indices.astype(np.int32).reshape(*rows, k), counts, sums, lse, whole)
