"""Sampling of NumPy arrays gives the tokens of torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onlinesoftmax as osm
from hard_logits import COLUMNS, assert_same, by_torch, hard_rows, parameters, verify_by_torch


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(
    "given",
    [
        {"top_logprobs": COLUMNS, "return_support": 9},
        {"ties": "first", "logprobs": "raw", "top_logprobs": 3, "return_support": COLUMNS},
    ],
    ids=["keep", "first"],
)
def test_tokens_are_those_of_torch(given: dict[str, Any], dtype: type) -> None:
    z = np.tile(hard_rows(), (8, 1)).astype(dtype)
    assert_same(osm.sample(z, **parameters(len(z)), **given), by_torch(z, **parameters(len(z)), **given))


def test_many_tokens_and_no_filter() -> None:
    z = np.random.default_rng(7).normal(size=(3, 100_000)).astype(np.float32) * 3
    assert_same(osm.sample(z, seed=3, temperature=0.7), by_torch(z, 3, temperature=0.7))
    assert_same(osm.sample(z[:, :1], seed=3, top_k=1), by_torch(z[:, :1], 3, top_k=1))
    assert osm.sample(z[:0], top_logprobs=2).top_tokens.shape == (0, 2)


def test_score_options_and_dims() -> None:
    rng = np.random.default_rng(8)
    z, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 30, 3), (30, 1)))
    given = {"bias": bias, "mask": rng.random((2, 30, 3)) > 0.3, "top_k": 5, "top_logprobs": 6, "dim": 1}
    assert_same(
        osm.sample(z, seed=np.arange(6).reshape(2, 3), **given), by_torch(z, np.arange(6).reshape(2, 3), **given)
    )


def test_wide_options_do_not_widen_narrow_logits() -> None:
    rng = np.random.default_rng(9)
    # Scores that are equal in float32 and not in float64.
    z, bias = rng.normal(size=(40, 50)).round(1).astype(np.float32), rng.normal(size=(40, 50)).round(1)
    for dtype in (np.float64, np.float16):
        given = {"bias": bias.astype(dtype), "top_k": 7, "top_logprobs": 3}
        assert_same(osm.sample(z, seed=3, **given), by_torch(z, 3, **given))
    scale = rng.uniform(0.5, 2, (40, 1))
    listed = osm.topk_logprobs(torch.from_numpy(z), 3, scale=torch.from_numpy(scale), target=torch.arange(40))
    want = osm.topk_logprobs(z, 3, scale=scale, target=np.arange(40))
    for a, b in zip(listed, want, strict=True):
        assert a.numpy().dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_temperature_that_is_infinite_in_float32_is_not_valid() -> None:
    assert osm.sample(np.zeros((2, 4)), seed=1, temperature=np.array([1e39, 1.0])).valid.tolist() == [False, True]


def test_without_a_seed_the_generator_decides() -> None:
    z = np.zeros((100, 50), np.float32)
    one, other = (osm.sample(z, generator=np.random.default_rng(8)).token for _ in range(2))
    assert np.array_equal(one, other)
    assert not np.array_equal(osm.sample(z).token, osm.sample(z).token)
    with pytest.raises(TypeError, match=r"generator must be a numpy.random.Generator"):
        osm.sample(z, generator=torch.Generator())
    for given, error in (({"top_k": np.ones(100)}, TypeError), ({"seed": np.arange(3)}, ValueError)):
        with pytest.raises(error, match=f"{next(iter(given))} must be an int"):
            osm.sample(z, **given)


def test_topk_logprobs_are_those_of_torch() -> None:
    z = np.delete(hard_rows(), [12], 0).reshape(17, 41, 1)
    target, mask = np.resize([3, 0, COLUMNS, -1, 40, 12], (17, 1)), np.arange(41)[:, None] != 7
    got = osm.topk_logprobs(z, 6, target=target, softcap=20.0, mask=mask, dim=1)
    want = osm.topk_logprobs(
        torch.from_numpy(z), 6, target=torch.from_numpy(target), softcap=20.0, mask=torch.from_numpy(mask), dim=1
    )
    for name in got._fields:
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-6, err_msg=name)
    assert osm.topk_logprobs(z, 3, dim=1).target_rank is None


@pytest.mark.parametrize("drafted", [True, False])
def test_verify_is_that_of_torch(drafted: bool) -> None:
    rng = np.random.default_rng(10)
    target = rng.normal(size=(8, 5, 4, 30)).astype(np.float32) * 2
    draft = target[..., :3, :] + rng.normal(size=(8, 5, 3, 30)).astype(np.float32) * 0.5 if drafted else None
    drafts = rng.integers(-1, 31, (8, 5, 3))
    drafts[::2] = target[::2, :, :3].argmax(-1)
    given = {"temperature": rng.choice([0, 0.5, 1.0], (8, 5)), "top_p": rng.choice([0.6, 0.95, 1.0], 5), "offset": 3}
    seed = rng.integers(0, 2**62, (8, 5))
    got = osm.verify(target, drafts, draft, seed=seed, **given)
    assert_same(got, verify_by_torch(target, drafts, draft, seed, **given))
