"""`explain` of `sample`: the kernel that takes a call, or why none does; bytes, floor, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.core.device import KNOWN
from onlinesoftmax.explanation.sampling import EAGER
from onlinesoftmax.sampling.kernels import source

SHAPE = (64, 128256)


def explained(x: Any = SHAPE, **given: Any) -> Any:
    return osm.explain(x, operation="sample", **given)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("and the logits have float64", {"dtype": "float64"}),
        ("and the logits have float64", {"dtype": "float64", "mask": (128256,)}),
        ("a kernel lists at most", {"top_logprobs": 100_000}),
        ("CPU is no NVIDIA GPU", {"device": "cpu"}),
    ],
)
def test_pytorch_takes_what_no_kernel_takes(words: str, given: dict[str, Any]) -> None:
    found = explained(**{"device": "h100", "top_k": 50} | given)
    assert (found.kernel, found.name) == (None, EAGER["torch"])
    assert any(words in other.why_not for other in found.others)
    assert EAGER["torch"] not in [other.name for other in found.others]


def test_a_kernel_takes_the_scores_that_options_make() -> None:
    found = explained(dtype="bfloat16", device="h100", top_k=50, softcap=30.0, mask=(128256,), bias=(64, 1))
    assert found.name == "sample.cuh"
    assert found.reason.startswith("PyTorch writes the scores in float32; then it lists the largest tokens")


def test_rows_that_are_not_adjacent() -> None:
    for strided in (torch.zeros(100, 7).t(), torch.zeros(4, 50, 3).transpose(1, 2)):
        found = explained(strided, device="h100")
        assert found.reason.startswith("PyTorch copies the logits, so that those of a row are adjacent; then")
    assert not explained(torch.zeros(8, 100)[::2], device="h100").reason.startswith("PyTorch copies")
    # Another dimension than the last is copied first.
    assert explained(torch.zeros(100, 7), dim=0, device="h100").problem.rows == 7


def test_bytes_and_floor_by_hand() -> None:
    found = explained(device="h100", dtype="bfloat16", top_k=50, top_logprobs=20)
    # Token, log-probability, lse, number of kept tokens and validity of a row, and 20 tokens with log-probabilities.
    assert found.bytes == 64 * (128256 * 2 + 8 + 4 + 4 + 8 + 1 + 20 * (8 + 4))
    # JAX's integers have 4 bytes.
    in_jax = replace(found, problem=found.problem._replace(framework="jax"))
    assert in_jax.bytes == 64 * (128256 * 2 + 4 * 4 + 1 + 20 * (4 + 4))
    assert found.floor_us == pytest.approx(found.bytes / KNOWN["h100"].bandwidth / 1e3)
    text = str(found)
    assert "sample of 64 x 128256 bfloat16 with top_k, top_logprobs=20 on NVIDIA H100" in text
    assert f"{64} x {found.kernel.blocks} blocks of {found.kernel.threads} threads" in text
    assert found.as_dict()["kernel"]["blocks"] == found.kernel.blocks


@pytest.mark.parametrize(("top_k", "rows"), [(50, (29, 30, 32, 300)), (None, (29, 32, 200)), (500, (1, 66, 300))])
def test_equal_launches_are_one_kernel(top_k: int | None, rows: tuple[int, ...]) -> None:
    """`warm` compiles a kernel for each launch that `explain` shows."""
    sources: dict[str, str] = {}
    for count in rows:
        found = explained((count, 128256), device="h200", top_k=top_k, top_p=0.9)
        shape = source.shape_of(count, 128256, "float32", True, KNOWN["h200"], found.problem.listed)
        assert shape is not None
        launch = found.launch.removeprefix(f"{count} x ")
        assert sources.setdefault(launch, source.prologue(shape)) == source.prologue(shape)
    assert len({*sources.values()}) == len(sources) > 1


def test_an_array_of_numpy_counts_as_its_shape() -> None:
    found = explained(np.zeros((3, 50), np.float16), device="h100")
    assert found.problem == explained((3, 50), dtype="float16", device="h100").problem


def test_a_number_that_filters_nothing_is_no_filter() -> None:
    found = explained(top_k=0, top_p=1.0, min_p=torch.zeros(64), device="h100")
    assert found.problem.filters == ("min_p",)


@pytest.mark.parametrize(
    ("error", "words", "given"),
    [
        (ValueError, "sample() has no outputs, scale here", {"scale": 2.0, "outputs": ("y",)}),
        (ValueError, "sample() has no linear_weight here", {"linear_weight": (3, 4)}),
        (ValueError, "top_p must be at least 0, got -0.1", {"top_p": -0.1}),
        (ValueError, "top_logprobs must be from 0 to the 128256 tokens", {"top_logprobs": -1}),
        (TypeError, "top_k must be an int", {"top_k": 1.5}),
        (TypeError, "top_k must be an int or Tensor, as logits is, not list", {"top_k": [50, 40]}),
    ],
)
def test_mistakes_are_named(error: type[Exception], words: str, given: dict[str, Any]) -> None:
    with pytest.raises(error) as raised:
        explained(**given)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("options", "dtype", "words"),
    [
        ({"top_k": 5}, "bfloat16", "it lists the largest tokens"),
        ({"softcap": 30.0, "mask": (128256,)}, "bfloat16", "XLA writes the scores in float32; then one read"),
        ({"bias": (64, 1)}, "float64", "the logits have float64"),
    ],
)
def test_in_jax(options: dict[str, Any], dtype: str, words: str) -> None:
    """XLA computes the scores for the kernel, which has no options."""
    pytest.importorskip("jax", reason="jax is not installed")
    found = explained(framework="jax", device="h100", dtype=dtype, **options)
    assert words in (found.reason if found.kernel else found.others[0].why_not)
    assert EAGER["jax"] in (found.name, found.others[-1].name)
    assert "top_k" not in options or found.kernel == explained(device="h100", dtype=dtype, **options).kernel


@pytest.mark.parametrize(
    ("error", "words", "given"),
    [
        (ValueError, "top_p must be at least 0, got -0.1", {"top_p": -0.1}),
        (ValueError, "top_logprobs must be from 0 to the 128256 tokens", {"top_logprobs": -1}),
        (TypeError, "top_k must be an int", {"top_k": 1.5}),
        (ValueError, "bias", {"bias": (7,)}),
    ],
)
def test_mistakes_in_jax(error: type[Exception], words: str, given: dict[str, Any]) -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    with pytest.raises(error, match=words):
        explained(framework="jax", **given)


def test_other_operations_have_no_filters() -> None:
    with pytest.raises(ValueError, match="logsumexp\\(\\) has no top_k here"):
        osm.explain(SHAPE, operation="logsumexp", top_k=3)


@pytest.mark.parametrize(
    ("name", "other", "given"),
    [
        ("unfiltered.cuh", "nothing is asked for that needs a list", {}),
        ("sample.cuh", "it has no top_p", {"top_p": 0.9}),
        ("sample.cuh", "it has no top_k, min_p, top_logprobs", {"top_k": 5, "min_p": 0.1, "top_logprobs": 3}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_kernel_of_a_call(name: str, other: str, given: dict[str, Any], dtype: str) -> None:
    found = explained(dtype=dtype, device="h200", **given)
    assert found.name == name
    assert other in found.others[0].why_not
    assert found.others[1].name == EAGER["torch"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given", [{}, {"top_k": 5}, {"top_logprobs": 2}, {"top_k": 5, "dtype": "float64"}, {"top_p": 0.9, "softcap": 5.0}]
)
def test_a_call_runs_what_explain_says(given: dict[str, Any]) -> None:
    given = dict(given)
    x = torch.randn(3, 1000, device="cuda", dtype=getattr(torch, given.pop("dtype", "float32")))
    osm.sample(x, seed=1, **given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        osm.sample(x, seed=1, **given)
        torch.cuda.synchronize()
    launched = {event.key for event in profile.key_averages()}
    ours = {file for file, name in (("unfiltered.cuh", "unfiltered_kernel"), ("sample.cuh", "sample_kernel"))
            if any(name in each for each in launched)}  # fmt: skip
    found = explained(x, **given)
    assert ours == ({found.name} if found.kernel else set())
