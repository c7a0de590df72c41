"""Labels and token ids of 64 bits from NumPy and Python, of which JAX keeps 32 by default."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
from exact_losses import logits

import onlinesoftmax.jax as osj

X, WEIGHT = logits(3, 4), logits(4, 4)
SUPPORT = np.array([0, 1, 1, 2, 0, 3]), np.array([0, 2, 4, 6])
KEPT = np.zeros(3, int), SUPPORT
PARTS = np.moveaxis(np.asarray(X).reshape(3, 2, 2), 1, 0)
NO_TOKEN = 2**32 + 1
"""Its lower 32 bits are the token 1."""


def _sharded(labels: Any) -> Any:
    return jax.vmap(partial(osj.cross_entropy, labels=labels, axis_name="v"), axis_name="v")(PARTS)


CALLS: dict[str, Callable[[Any], Any]] = {
    "cross_entropy": lambda t: osj.cross_entropy(X, t),
    "mean": lambda t: osj.cross_entropy(X, t, reduction="mean", ignore_index=-100),
    "sharded": _sharded,
    "token_logprobs": lambda t: osj.token_logprobs(X, t),
    "several tokens": lambda t: osj.token_logprobs(X, t[:, None]),
    "of a support": lambda t: osj.token_logprobs(X, t, support=SUPPORT),
    "a support's ids": lambda t: osj.token_logprobs(X, KEPT[0], support=(np.concatenate([t, t]), SUPPORT[1])),
    "a support's offsets": lambda t: osj.token_logprobs(X, KEPT[0], support=(SUPPORT[0], np.append(t, t[:1] + 6))),
    "linear_cross_entropy": lambda t: osj.linear_cross_entropy(X, WEIGHT, t, reduction="none"),
    "linear_token_logprobs": lambda t: osj.linear_token_logprobs(X, WEIGHT, t),
    "linear_token_loss": lambda t: osj.linear_token_loss(X, WEIGHT, t, lambda logprob, entropy, lse: -logprob),
    "topk_logprobs": lambda t: osj.topk_logprobs(X, 2, target=t),
    "verify": lambda t: osj.verify(3, X[None], t[None, :2]),
    "route": lambda t: osj.route(X, 1, indices=t[:, None]),
}


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("name", CALLS)
def test_a_label_beyond_32_bits_is_no_class(name: str, dtype: str) -> None:
    found, expected = (CALLS[name](np.array([0, NO_TOKEN, 3], dtype)), CALLS[name](np.array([0, 77, 3], "int32")))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("number", [NO_TOKEN, -(2**32) + 1, 2**70, -(2**70), np.int64(NO_TOKEN)])
@pytest.mark.parametrize("name", ["cross_entropy", "token_logprobs", "linear_token_logprobs", "topk_logprobs"])
def test_a_number_that_no_32_bits_hold_is_no_class(name: str, number: int) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "cross_entropy": lambda t: osj.cross_entropy(X[0], t),
        "token_logprobs": lambda t: osj.token_logprobs(X[0], t).logprob,
        "linear_token_logprobs": lambda t: osj.linear_token_logprobs(X[0], WEIGHT, t).logprob,
        "topk_logprobs": lambda t: osj.topk_logprobs(X[0], 1, target=t).target_logprob,
    }
    assert np.isnan(calls[name](number))


@pytest.mark.parametrize("ignored", [2**40, -(2**63)])
def test_ignore_index_beyond_32_bits(ignored: int) -> None:
    labels = np.array([0, ignored, 3])
    losses = [
        osj.cross_entropy(X, labels, ignore_index=ignored),
        osj.token_logprobs(X, labels, ignore_index=ignored).logprob,
        osj.token_logprobs(X, labels[:, None], ignore_index=ignored).logprob[:, 0],
        osj.token_logprobs(X, labels, support=SUPPORT, ignore_index=ignored).logprob,
        osj.linear_cross_entropy(X, WEIGHT, labels, ignore_index=ignored, reduction="none"),
        osj.linear_token_logprobs(X, WEIGHT, labels, ignore_index=ignored).logprob,
    ]
    for found in losses:
        assert (np.asarray(found) == 0).tolist() == [False, True, False]


IGNORING: dict[str, Callable[[int], Any]] = {
    "cross_entropy": lambda n: osj.cross_entropy(X, KEPT[0], ignore_index=n),
    "token_logprobs": lambda n: osj.token_logprobs(X, KEPT[0], ignore_index=n),
    "linear_cross_entropy": lambda n: osj.linear_cross_entropy(X, WEIGHT, KEPT[0], ignore_index=n),
    "linear_token_logprobs": lambda n: osj.linear_token_logprobs(X, WEIGHT, KEPT[0], ignore_index=n),
}


@pytest.mark.parametrize(
    "number", [10**400, -(10**400), 2**63, -(2**63) - 1], ids=["10^400", "-10^400", "2^63", "-2^63 - 1"]
)
@pytest.mark.parametrize("name", IGNORING)
def test_ignore_index_beyond_64_bits_is_an_error(name: str, number: int) -> None:
    with pytest.raises(ValueError, match=f"{name}: ignore_index must fit int64"):
        IGNORING[name](number)
