"""Integers that int64 does not hold: an error that says what is wrong, and not that of a conversion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import onlinesoftmax as osm

TOO_LARGE = [10**400, -(10**400), 2**63, -(2**63) - 1]
X, TARGET = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.array([0, 1, 2])
DIMENSION = r"Dimension out of range \(expected to be in range of \[-2, 1\]"
IGNORED = "ignore_index must fit int64"

CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "softmax": (lambda x, target, n: osm.softmax(x, n), DIMENSION),
    "softmax of two": (lambda x, target, n: osm.softmax(x, (0, n)), DIMENSION),
    "log_softmax": (lambda x, target, n: osm.log_softmax(x, n, scale=2.0), DIMENSION),
    "logsumexp": (lambda x, target, n: osm.logsumexp(x, n), DIMENSION),
    "logsumexp of two": (lambda x, target, n: osm.logsumexp(x, (0, n)), DIMENSION),
    "token_logprobs": (lambda x, target, n: osm.token_logprobs(x, target, n), DIMENSION),
    "ignored token": (lambda x, target, n: osm.token_logprobs(x, target, ignore_index=n), IGNORED),
    "cross_entropy": (lambda x, target, n: osm.cross_entropy(x, target, ignore_index=n), IGNORED),
    "topk_logprobs": (lambda x, target, n: osm.topk_logprobs(x, 2, dim=n), DIMENSION),
    "sample": (lambda x, target, n: osm.sample(x, seed=1, dim=n), DIMENSION),
    "k": (lambda x, target, n: osm.topk_logprobs(x, n), "k must be from 0 to the 4 tokens"),
    "top_logprobs": (lambda x, target, n: osm.sample(x, seed=1, top_logprobs=n), "top_logprobs must be from 0 to"),
    "seed": (lambda x, target, n: osm.sample(x, seed=n), "seed must be at least 0 and less than 2"),
    "experts": (lambda x, target, n: osm.route(x, n), "k must be from 1 to the 4 experts"),
}
HEADS: dict[str, Callable[..., Any]] = {
    "linear_cross_entropy": lambda x, target, n: osm.linear_cross_entropy(x, x, target, ignore_index=n),
    "linear_token_logprobs": lambda x, target, n: osm.linear_token_logprobs(x, x, target, ignore_index=n),
    "linear_token_loss": lambda x, target, n: osm.linear_token_loss(
        x, x, target, lambda logprob, entropy, lse: -logprob, ignore_index=n
    ),
}


@pytest.mark.parametrize("number", TOO_LARGE, ids=["10^400", "-10^400", "2^63", "-2^63 - 1"])
@pytest.mark.parametrize("name", CALLS)
def test_of_numpy(name: str, number: int) -> None:
    call, message = CALLS[name]
    with pytest.raises((IndexError, ValueError), match=message):
        call(X, TARGET, number)


@pytest.mark.parametrize("number", TOO_LARGE, ids=["10^400", "-10^400", "2^63", "-2^63 - 1"])
@pytest.mark.parametrize("name", [*CALLS, *HEADS])
def test_of_torch(name: str, number: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    call, message = CALLS[name] if name in CALLS else (HEADS[name], IGNORED)
    with pytest.raises((IndexError, ValueError), match=message):
        call(torch.from_numpy(X), torch.from_numpy(TARGET), number)
