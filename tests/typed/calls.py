"""Calls as a user writes them, for type checkers only: tests/test_types.py gives this file to mypy and to pyright.

`assert_type` compares the type that the checker finds.  A line with `type: ignore` must be an error, because both
checkers report an ignore that is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import onlinesoftmax as osm

if TYPE_CHECKING:
    from onlinesoftmax.jax import TokenLogprobs
    from onlinesoftmax.routing import Routed


def tensors(x: torch.Tensor, t: torch.Tensor, array: NDArray[np.float32]) -> None:
    assert_type(osm.softmax(x), torch.Tensor)
    assert_type(osm.softmax(x, 0, mask=t > 0, bias=x, scale=x, fully_masked="zero"), torch.Tensor)
    assert_type(osm.log_softmax(x, dim=1, backend="triton", strategy="split"), torch.Tensor)
    assert_type(osm.logsumexp(x, (0, 1), keepdim=True, out=x), torch.Tensor)
    assert_type(osm.cross_entropy(x, t), torch.Tensor)
    assert_type(osm.cross_entropy(x, t, x, reduction="none", z_loss=1e-4, check=True), torch.Tensor)
    loss, stats = osm.cross_entropy(x, t, return_stats=True, backend="cuda")
    assert_type(loss, torch.Tensor)
    assert_type(stats.lse, torch.Tensor)
    found = osm.token_logprobs(x, t)
    assert_type(found.logprob, torch.Tensor)
    osm.softmax(x, mask=array)  # type: ignore  # arrays of two kinds
    osm.softmax([1.0, 2.0])  # type: ignore  # a list
    osm.softmax(x, backend="gpu")  # type: ignore  # no such backend
    osm.softmax(x, strategy="fast")  # type: ignore  # no such strategy
    osm.softmax(x, fully_masked="zeros")  # type: ignore  # neither "nan" nor "zero"
    osm.softmax(x, dims=1)  # type: ignore  # no such argument
    osm.cross_entropy(x, t, reduction="avg")  # type: ignore  # no such reduction
    osm.cross_entropy(x, t, smoothing=0.1)  # type: ignore  # no such argument
    osm.cross_entropy(x)  # type: ignore  # without a target
    stats.entropies  # type: ignore  # noqa: B018  # no such statistic
    found.logprobs  # type: ignore  # noqa: B018  # no such result


def routing(x: torch.Tensor, array: NDArray[np.float32], z: jax.Array) -> None:
    found: Routed = osm.route(x, 2, score="sigmoid", bias=x, groups=4, group_k=2, group_score="max", prob_sums=True)
    osm.load_balancing_loss(found, "sequence")
    assert_type(osm.nn.Router.like("mixtral", 64, 8, 2), osm.nn.Router)
    assert_type(osm.jax.router_z_loss(osm.jax.route(z, 2, where=z > 0)), jax.Array)
    osm.route(x, 2, score="soft")  # type: ignore  # no such score
    osm.route(x, 2, bias=array)  # type: ignore  # arrays of two kinds
    osm.route([1.0, 2.0], 1)  # type: ignore  # a list
    osm.load_balancing_loss(found, "batch")  # type: ignore  # no such kind
    osm.jax.route(z, 2, mask=z > 0)  # type: ignore  # JAX says where
    found.gates  # type: ignore  # noqa: B018  # no such result


def arrays(array: NDArray[np.float32]) -> None:
    assert_type(osm.softmax(array), NDArray[Any])
    assert_type(osm.logsumexp(array, 0, mask=array > 0), NDArray[Any])
    assert_type(osm.State.of(array), osm.State)
    loss, stats = osm.cross_entropy(array, np.zeros(3, int), return_stats=True)
    assert_type(loss, NDArray[Any])
    assert_type(stats.entropy, NDArray[Any])
    assert_type(osm.token_logprobs(array, np.zeros(3, int)).lse, NDArray[Any])


def names(x: torch.Tensor) -> None:
    osm.sofmax(x)  # type: ignore  # a misspelled name
    osm.nn.SoftMax(1)  # type: ignore  # a misspelled name
    osm.jax.soft_max(x)  # type: ignore  # a misspelled name
    osm.distributed.shards(x)  # type: ignore  # a misspelled name


def modules(x: torch.Tensor, model: torch.nn.Sequential) -> None:
    assert_type(osm.nn.Softmax(1, causal=True).forward(x), torch.Tensor)
    assert_type(osm.nn.replace(model).model, torch.nn.Sequential)
    osm.nn.Softmax(1, fully_masked="zeros")  # type: ignore  # neither "nan" nor "zero"
    osm.nn.CrossEntropyLoss(reduction="avg")  # type: ignore  # no such reduction
    assert_type(osm.distributed.softmax(x), torch.Tensor)
    assert_type(osm.distributed.cross_entropy(x, x, reduction="sum"), torch.Tensor)
    assert_type(osm.distributed.token_logprobs(x, x).lse, torch.Tensor)
    osm.distributed.cross_entropy(x, x, reduction="avg")  # type: ignore  # no such reduction
    osm.distributed.softmax(x, backend="pallas")  # type: ignore  # a backend of JAX


def overrides(x: torch.Tensor) -> None:
    @osm.override(strict=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 0)

    assert_type(function(x), torch.Tensor)
    assert_type(function.report().taken, dict[str, int])
    osm.override(backend="pallas")  # type: ignore  # a backend of JAX


def in_jax(x: jax.Array, labels: jax.Array) -> None:
    assert_type(osm.jax.softmax(x), jax.Array)
    assert_type(osm.jax.log_softmax(np.zeros(3), 0, backend="pallas"), jax.Array)
    assert_type(osm.jax.logsumexp(x, axis=0), jax.Array)
    assert_type(osm.jax.logsumexp(x, return_sign=True), tuple[jax.Array, jax.Array])
    assert_type(osm.jax.cross_entropy(x, labels, reduction="mean"), jax.Array)
    found: TokenLogprobs = osm.jax.token_logprobs(x, labels)
    assert_type(found.lse, jax.Array)
    osm.jax.softmax(x, backend="triton")  # type: ignore  # a backend of torch
    osm.jax.softmax(x, dim=0)  # type: ignore  # JAX says axis
    osm.jax.cross_entropy(x, labels, reduction="avg")  # type: ignore  # no such reduction


def plans() -> None:
    explained = osm.explain((4, 50257), device="h200")
    assert_type(explained.plan, osm.Plan)
    head = osm.explain((8, 16), operation="linear_cross_entropy", linear_weight=(50, 16), memory=1000)
    assert_type(head.plan.chunks, int)
    explained.plans  # type: ignore  # noqa: B018  # no such attribute
