"""Sampling beside a sampler that sorts in float64, and beside the distribution that it promises."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.sampling.arguments import checked_logits, checked_of_rows
from onlinesoftmax.sampling.eager import FUNCTIONS
from onlinesoftmax.sampling.formulas import gumbel, masses_of
from onlinesoftmax.sampling.masses import FRACTION_BITS, MASS_BITS, POWER_OF_TWO
from onlinesoftmax.sampling.philox import philox

Tensor = torch.Tensor


def kept_by_sorting(z: np.ndarray, t: float, k: int | None, p: float | None, least: float | None) -> set[int]:
    """The tokens that the filters keep, ties included, by the words of the docstring."""
    order = sorted(range(len(z)), key=lambda i: -z[i])
    kept = [i for i in order if z[i] > -math.inf]
    if k is not None and k > 0:
        kept = [i for i in kept if z[i] >= z[kept[min(k, len(kept)) - 1]]]
    e = {i: math.exp((z[i] - z[order[0]]) / t) for i in kept}
    if p is not None and p < 1:
        total, sum_, threshold = math.fsum(e.values()), 0.0, None
        for i in kept:
            sum_ += e[i] / total
            if sum_ >= p - 1e-11:
                threshold = z[i]
                break
        kept = [i for i in kept if threshold is None or z[i] >= threshold]
    return {i for i in kept if e[i] >= (least or 0.0) * (1 - 1e-9)}


def kept_of(found: Any, row: int) -> set[int]:
    """The tokens of a row with a probability."""
    return {int(t) for t, y in zip(found.top_tokens[row], found.top_logprobs[row], strict=True) if y > -math.inf}


def test_philox_gives_the_words_of_its_authors() -> None:
    """The known answers of the Random123 library."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    words = torch.tensor([[0] * 6, [ones] * 6, pi]).unbind(1)
    assert torch.stack(philox(words[:4], words[4:]), 1).tolist() == [
        [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
        [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A],
    ]


def test_noise_depends_on_seed_offset_and_token_and_is_gumbels() -> None:
    seed, offset = torch.tensor([[1], [2], [1]]), torch.tensor([[0], [0], [2**40]])
    noise = gumbel(FUNCTIONS, seed, offset, 50_001)
    assert torch.equal(noise[:, :7], gumbel(FUNCTIONS, seed, offset, 7))
    assert (noise[0] != noise[1]).double().mean() > 0.999
    assert (noise[0] != noise[2]).double().mean() > 0.999
    assert torch.equal(noise * 2**24, (noise * 2**24).round())
    for row in noise.numpy():
        # Kolmogorov and Smirnov: 1.95 / sqrt(n) is passed with a probability of 0.001.
        y = np.exp(-np.exp(-np.sort(row)))
        assert np.abs(y - np.arange(1, len(y) + 1) / len(y)).max() < 1.95 / math.sqrt(len(y))


FILTERS = [
    {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 7, "top_p": 0.6}, {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0},
    {"top_k": 0}, {"top_k": -1}, {"top_k": 1000}, {"top_p": 1.0}, {"min_p": 0.0}, {},
]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_what_a_sorting_sampler_keeps(filters: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    z = torch.randn(6, 40, generator=generator) * torch.tensor([0.1, 1, 3, 10, 3, 1]).unsqueeze(1)
    z[4:] = z[4:].round()  # ties
    z[5, ::3] = -torch.inf
    for t in (0.5, 1.0, 3.0):
        found = osm.sample(z, temperature=t, seed=torch.arange(6), top_logprobs=40, **filters)
        for row in range(6):
            want = kept_by_sorting(z[row].double().numpy(), t, *(filters.get(k) for k in ("top_k", "top_p", "min_p")))
            assert kept_of(found, row) == want
            assert found.kept[row] == len(want)
            assert int(found.token[row]) in want
            e = {i: math.exp(float(z[row, i].double() - z[row].max()) / t) for i in want}
            exact = math.log(e[int(found.token[row])] / math.fsum(e.values()))
            assert float(found.logprob[row]) == pytest.approx(exact, abs=1e-6, rel=1e-6)
            lse = math.log(math.fsum(e.values())) + float(z[row].max()) / t
            assert float(found.lse[row]) == pytest.approx(lse, rel=1e-6, abs=1e-6)


def test_filters_of_rows_are_those_of_single_calls() -> None:
    z = torch.randn(5, 30, generator=torch.Generator().manual_seed(1)) * 3
    columns = {
        "temperature": torch.tensor([1.0, 0.0, 0.3, 2.0, 1.0]), "top_k": torch.tensor([3, 0, -1, 50, 1]),
        "top_p": torch.tensor([0.9, 1.0, 0.5, 0.99, 0.0]), "min_p": torch.tensor([0.0, 0.5, 0.0, 0.2, 1.0]),
        "seed": torch.tensor([3, 1, 4, 1, 2**62]), "offset": torch.tensor([0, 1, 2, 3, 2**33]),
    }  # fmt: skip
    together = osm.sample(z, top_logprobs=4, **columns)
    for row in range(5):
        alone = osm.sample(z[row : row + 1], top_logprobs=4, **{k: v[row].item() for k, v in columns.items()})
        for a, b in zip(together[:7], alone[:7], strict=True):
            assert torch.equal(a[row : row + 1], b)


@pytest.mark.parametrize("n", [200_000, pytest.param(10**7, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.05, "temperature": 2.0}], ids=str)
def test_tokens_have_their_probabilities(filters: dict[str, Any], n: int) -> None:
    """Chi-square over so many seeds, and over as many offsets of one seed."""
    z = torch.tensor([0.0, 2.0, 1.0, -1.0, 2.5, -3.0, 1.5, 1.4])
    numbers = torch.arange(n)
    want = osm.sample(z, seed=0, top_logprobs=8, **filters)
    p = torch.zeros(8, dtype=torch.float64).scatter(0, want.top_tokens, want.top_logprobs.double().exp())
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-6)
    for of_rows in ({"seed": numbers}, {"seed": 11, "offset": numbers}):
        count = torch.bincount(osm.sample(z.expand(n, 8), **of_rows, **filters).token, minlength=8).double()
        inside = p > 0
        assert not count[~inside].any()
        # With 7 degrees of freedom or fewer, 29.9 is passed with a probability below 0.0001.
        assert float(((count - n * p)[inside] ** 2 / (n * p)[inside]).sum()) < 29.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_row_has_its_token_beside_any_others(dtype: torch.dtype) -> None:
    z = (torch.randn(8, 1000, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    given: dict[str, Any] = {"seed": torch.arange(8), "top_p": 0.9}
    want = osm.sample(z, **given)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    given["seed"] = given["seed"][order]
    assert torch.equal(osm.sample(z[order], **given).token, want.token[order])
    across = osm.sample(z[order].T, dim=0, **given)
    assert torch.equal(across.token, want.token[order])
    assert across.logprob.dtype == want.logprob.dtype
    cube = osm.sample(z[order].reshape(2, 4, 1000), seed=given["seed"].reshape(2, 4), top_p=0.9)
    assert torch.equal(cube.token, want.token[order].reshape(2, 4))
    wider = torch.cat([z, torch.full((8, 77), -torch.inf, dtype=dtype)], 1)
    assert torch.equal(osm.sample(wider, seed=torch.arange(8), top_p=0.9).token, want.token)


def test_rows_without_a_distribution_are_not_valid() -> None:
    inf, nan = torch.inf, torch.nan
    z = torch.tensor([[0, 1, nan], [-inf] * 3, [1, 2, 3], [inf, 0, inf], [1, 1, 1], [0, 0, 0], [0, 0, 0]])
    t = torch.tensor([1, 1, 1, 1, 1, -1, nan])
    nothing = osm.sample(z[2:3], top_p=torch.tensor([nan]), min_p=torch.tensor([nan]), seed=2)
    assert not nothing.valid.item()
    for filters in ({}, {"top_k": 2, "top_p": 0.99}):
        found = osm.sample(z, temperature=t, seed=torch.arange(7), top_logprobs=3, **filters)
        assert found.valid.tolist() == [False, False, True, True, True, False, False]
        assert found.token[~found.valid].tolist() == [0] * 4
        assert found.logprob[~found.valid].isnan().all()
        assert found.kept[~found.valid].tolist() == [0] * 4
        assert found.kept[3] == 2
        assert found.token[3] in (0, 2)
        assert found.lse[3] == inf
        assert float(found.logprob[3]) == pytest.approx(-math.log(2))
        alone = osm.sample(z[2:3], seed=2, top_logprobs=3, **filters)
        assert all(torch.equal(a[2:3], b) for a, b in zip(found[:7], alone[:7], strict=True))


def test_parameters_may_be_integers_and_a_negative_min_p_keeps_all() -> None:
    z = torch.tensor([[0.0, 3.0, 2.0], [2.0, 2.0, -torch.inf]])
    given = {"temperature": torch.tensor([1, 2]), "top_p": torch.tensor([2, 2]), "min_p": torch.tensor([-1.0, -0.5])}
    want = osm.sample(z, seed=3, temperature=torch.tensor([1.0, 2.0]))
    assert want.kept.tolist() == [3, 2]
    with osm.distributed.one_process() as group:
        here = osm.distributed.sample(z, group=group, seed=3, **given)
    arrays = osm.sample(z.numpy(), seed=3, **{name: t.numpy() for name, t in given.items()})
    for found in (osm.sample(z, seed=3, **given), here, arrays):
        assert all(np.array_equal(a, b) for a, b in zip(found[:5], want[:5], strict=True))


def test_extremes() -> None:
    z = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)) * 4
    seeds = torch.arange(3)
    assert torch.equal(osm.sample(z, temperature=1e-6, seed=seeds).token, z.argmax(1))
    flat = osm.sample(z, temperature=1e6, seed=seeds)
    assert torch.allclose(flat.logprob, torch.full((3,), -math.log(64)), atol=1e-4)
    # The noise of large equal scores is not lost to rounding.
    tokens = osm.sample(torch.full((64, 8), 1e30), seed=torch.arange(64)).token
    assert len(tokens.unique()) > 4
    one = osm.sample(torch.tensor([[3.0]]), seed=1)
    assert (int(one.token), float(one.logprob), float(one.lse), int(one.kept)) == (0, 0.0, 3.0, 1)
    empty = osm.sample(torch.zeros(0, 5), top_logprobs=2)
    assert empty.token.shape == (0,)
    assert empty.top_tokens.shape == (0, 2)
    # A tail of small masses: a tenth of the probability lies in 10^5 tokens that float32 sums would lose.
    tail = torch.full((1, 100_001), math.log(0.1 / 0.9 / 1e5))
    tail[0, 0] = 0.0
    assert osm.sample(tail, top_p=0.899, seed=1).kept.item() == 1
    assert osm.sample(tail, top_p=0.901, seed=1).kept.item() == 100_001
    assert osm.sample(tail, top_p=0.95, seed=1, ties="first").kept.item() == pytest.approx(50_001, abs=2)


def test_greedy_takes_the_smaller_of_equal_tokens() -> None:
    z = torch.tensor([[1.0, 5.0, 5.0, 0.0], [-0.0, 0.0, -1.0, -1.0]])
    for filters in ({}, {"top_k": 3}):
        found = osm.sample(z, temperature=0, seed=9, top_logprobs=2, **filters)
        assert found.token.tolist() == [1, 0]
        assert found.logprob.tolist() == [0, 0]
        assert found.kept.tolist() == [1, 1]
        assert found.lse.tolist() == [5, 0]
        assert found.top_logprobs.tolist() == [[0, -math.inf], [0, -math.inf]]
    raw = osm.sample(z, temperature=0, seed=9, top_logprobs=2, logprobs="raw")
    assert torch.allclose(raw.logprob, z.log_softmax(1).amax(1))
    assert torch.allclose(raw.lse, z.logsumexp(1))
    assert raw.top_tokens.tolist() == [[1, 2], [0, 1]]


def test_ties_at_a_threshold() -> None:
    z = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert kept_of(osm.sample(z, top_k=2, seed=0, top_logprobs=5), 0) == {0, 1, 2, 3}
    assert kept_of(osm.sample(z, top_k=2, seed=0, top_logprobs=5, ties="first"), 0) == {0, 1}
    assert kept_of(osm.sample(z, top_p=0.5, seed=0, top_logprobs=5), 0) == {0, 1, 2, 3}
    assert kept_of(osm.sample(z, top_p=0.5, seed=0, top_logprobs=5, ties="first"), 0) == {0, 1}


def test_thresholds_are_those_of_the_scores() -> None:
    """Not those of rounded differences: 1e-15 and 0 are as far from 1000.  0.1 of ten equal tokens is one."""
    assert osm.sample(torch.tensor([[1000.0, 1e-15, 0.0]]), top_k=2, seed=0).kept.item() == 2
    equal = torch.zeros(1, 10)
    kept = [osm.sample(equal, top_p=n / 10, ties="first", seed=0).kept.item() for n in range(1, 11)]
    assert kept == list(range(1, 11))


def exact_mass(x: float, m: float, rate: float) -> int:
    """The mass of a score by the definition of masses.py, in fractions; `float` rounds them once."""
    unit = 1 << FRACTION_BITS
    y = Fraction(x) * Fraction(rate)
    n = math.floor(y)
    g = 1 + Fraction(round((y - n) * unit), unit)
    power = Fraction(POWER_OF_TWO[-1])
    for coefficient in POWER_OF_TWO[-2::-1]:
        step = power * g + Fraction(coefficient)
        assert Fraction(float(step)) == step, "float64 holds each step"
        power = Fraction(float(np.float32(float(step))))
    assert (power * unit).denominator == 1, "a whole number of units"
    octaves = math.floor(Fraction(m) * Fraction(rate)) - n
    return math.floor(power * Fraction(2) ** (MASS_BITS - octaves)) if octaves < 100 else 0


@pytest.mark.parametrize("t", [1.0, 0.213, 0.256, 1e-3, 5.0])
def test_masses_are_those_of_their_definition(t: float) -> None:
    rate = float(np.float32(math.log2(math.e) / t))
    x = torch.randn(1, 400, generator=torch.Generator().manual_seed(4)) * 4 * t
    # The fractions of the last two, at temperatures of 0.213 and 0.256, are near halves of a unit.
    odd = [0.0, -0.0, 1e-40, -1e-40, 1 / rate, -1 / rate, -3e38, -8.800050466106768e-09, -3.172976192900023e-08]
    x[0, : len(odd)] = torch.tensor(odd)
    m = x.amax(1, keepdim=True).double()
    found = masses_of(FUNCTIONS, x, m, torch.tensor([[t]], dtype=torch.float64))[0]
    assert found.tolist() == [exact_mass(float(z), float(m), rate) for z in x[0]]
    # 2e-7 of the polynomial, one unit, and the power of 2 that both sides leave out.
    exact = ((x[0].double() - m) * rate).exp2() * 2.0 ** float(m * rate - (m * rate).floor() + MASS_BITS)
    assert ((found - exact).abs() <= 3e-7 * exact + 1).all()
    order = x[0].argsort()
    assert (found[order].diff() >= 0).all()


def test_masses_of_infinite_scores() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    x = torch.tensor([[math.inf, 1.0, -math.inf, math.inf]])
    assert masses_of(FUNCTIONS, x, one * math.inf, one).tolist() == [[1 << MASS_BITS, 0, 0, 1 << MASS_BITS]]
    assert masses_of(FUNCTIONS, torch.tensor([[-math.inf, math.nan, 0.0]]), one * 0, one).tolist() == [
        [0, 0, 1 << MASS_BITS]
    ]


def test_float64_statistics_have_float64_accuracy() -> None:
    z = torch.full((1, 100_001), -28.5, dtype=torch.float64)
    z[0, 0] = 0.0
    found = osm.sample(z, seed=0)
    assert torch.equal(found.lse, z.logsumexp(1))


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "seed", "offset"])
def test_parameters_of_rows_may_have_any_strides(name: str) -> None:
    values = torch.tensor([[2, 9], [3, 9], [2, 9]])
    values = values if name in ("top_k", "seed", "offset") else values.double() / 4
    z = torch.randn(3, 20, generator=torch.Generator().manual_seed(3))
    logits = checked_logits("sample", z, -1, 1.0, None, None, None)
    for value in (values[:, 0], values[0, 0], values[:1, 0], values[:, 0].contiguous()):
        of_rows = checked_of_rows(logits, name, value, "int64" if values.dtype == torch.int64 else "float32", 0, 1)
        assert of_rows.is_contiguous()
        assert torch.equal(of_rows, value.expand(3).to(of_rows.dtype))
    assert osm.sample(z, **{"seed": 1, name: values[:, 0]}).valid.all()


def test_score_options() -> None:
    z = torch.randn(4, 30, generator=torch.Generator().manual_seed(4)) * 4
    bias, mask = torch.randn(30), torch.rand(4, 30) > 0.3
    scores = (5 * torch.tanh(z / 5) + bias).masked_fill(~mask, -torch.inf)
    given = {"seed": torch.arange(4), "top_p": 0.9}
    got, want = osm.sample(z, softcap=5.0, bias=bias, mask=mask, **given), osm.sample(scores, **given)
    assert all(torch.equal(a, b) for a, b in zip(got[:5], want[:5], strict=True))


def test_without_a_seed_the_generator_decides() -> None:
    z = torch.zeros(100, 50)
    torch.manual_seed(3)
    a, b = osm.sample(z).token, osm.sample(z).token
    torch.manual_seed(3)
    assert torch.equal(a, osm.sample(z).token)
    assert not torch.equal(a, b)
    assert len(a.unique()) > 30
    one, other = (osm.sample(z, generator=torch.Generator().manual_seed(8)).token for _ in range(2))
    assert torch.equal(one, other)
    # Greedy rows need no seed, and none is drawn.
    state = torch.get_rng_state()
    osm.sample(z, temperature=0)
    osm.verify(z[:2].expand(4, 2, 50), torch.zeros(4, 1, dtype=torch.int64), temperature=0.0)
    assert torch.equal(state, torch.get_rng_state())
    osm.sample(z, temperature=torch.zeros(100))
    assert not torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be at least 0 and finite in float32, got -1.0"),
        ({"temperature": torch.ones(3)}, ValueError, "temperature must be a number or have one for each row"),
        ({"temperature": True}, TypeError, "temperature must be a number or Tensor, as logits is, not bool"),
        ({"top_p": np.ones(2)}, TypeError, "top_p must be a number or Tensor, as logits is, not ndarray"),
        ({"bias": torch.ones(3)}, RuntimeError, r"^sample\(\): bias of shape"),
        ({"top_k": 1.5}, TypeError, "top_k must be an int"),
        ({"top_k": torch.ones(2)}, TypeError, "top_k must be an int"),
        ({"top_p": -0.1}, ValueError, "top_p must be at least 0, got -0.1"),
        ({"min_p": 2}, ValueError, "min_p must be from 0 to 1, got 2"),
        ({"seed": -1}, ValueError, "seed must be at least 0 and less than 2.*63, got -1"),
        ({"seed": 1, "generator": torch.Generator()}, ValueError, "seed and generator exclude each other"),
        ({"generator": 3}, TypeError, "generator must be a torch.Generator"),
        ({"ties": "all"}, ValueError, "ties must be 'keep' or 'first'"),
        ({"logprobs": "both"}, ValueError, "logprobs must be 'processed' or 'raw'"),
        ({"top_logprobs": 5}, ValueError, "top_logprobs must be from 0 to the 4 tokens"),
        ({"mask": torch.ones(2, 4)}, RuntimeError, "mask must be boolean"),
        ({"dim": 2}, IndexError, "Dimension out of range"),
        ({"logits": torch.ones(2, 4, dtype=torch.int64)}, NotImplementedError, "logits must be floating point"),
        ({"logits": torch.ones(2, 4).to(torch.float8_e5m2)}, NotImplementedError, "point of 16 to 64 bits"),
        ({"logits": [[0.0] * 4] * 2}, TypeError, "'logits' must be Tensor"),
        ({"logits": torch.ones(2, 0)}, ValueError, "logits has no tokens"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        osm.sample(**{"logits": torch.zeros(2, 4), **given})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_topk_logprobs_are_those_of_a_sort(dtype: torch.dtype) -> None:
    z = (torch.randn(4, 50, generator=torch.Generator().manual_seed(6)) * 3).round().to(dtype)
    z[1, 7], z[2, ::2], z[3, :] = torch.nan, -torch.inf, torch.tensor([0.0, -0.0]).repeat(25)
    target = torch.tensor([4, 7, 8, -100])
    found = osm.topk_logprobs(z, 9, target=target)
    order = z.float().sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(found.indices, order[:, :9])
    want = z.to(found.values.dtype).log_softmax(1)
    assert torch.allclose(found.logprobs, want.gather(1, found.indices), atol=1e-5, equal_nan=True)
    assert torch.equal(found.values.nan_to_num(), z.gather(1, found.indices).to(found.values.dtype).nan_to_num())
    ranks = [(order[i] == target[i]).nonzero().item() + 1 for i in range(3)]
    assert found.target_rank.tolist() == [*ranks, 0]
    assert torch.allclose(found.target_logprob[:3], want[range(3), target[:3]], atol=1e-5, equal_nan=True)
    assert found.target_logprob[3].isnan()
    assert torch.allclose(found.lse, want.dtype and z.to(want.dtype).logsumexp(1), equal_nan=True)


def test_topk_logprobs_have_gradients_and_options() -> None:
    z = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()
    target, mask = torch.tensor([1, 2, 3]), torch.rand(12, generator=torch.Generator().manual_seed(8)) > 0.2
    options = {"target": target, "mask": mask, "softcap": 3.0, "scale": 0.7}

    def outputs(x: Tensor) -> tuple[Tensor, ...]:
        found = osm.topk_logprobs(x, 4, **options)
        finite = [t.masked_fill(t == -torch.inf, 0.0) for t in (found.values, found.logprobs, found.target_logprob)]
        return *finite, found.lse

    assert torch.autograd.gradcheck(outputs, (z,))
    along = osm.topk_logprobs(z.T, 4, dim=0, target=target, mask=mask.unsqueeze(1), softcap=3.0, scale=0.7)
    assert torch.equal(along.indices, osm.topk_logprobs(z, 4, **options).indices.T)
    with pytest.raises(ValueError, match="k must be from 0 to the 12 tokens"):
        osm.topk_logprobs(z, 13)
    with pytest.raises(ValueError, match="target has shape"):
        osm.topk_logprobs(z, 3, target=torch.zeros(4, dtype=torch.int64))
