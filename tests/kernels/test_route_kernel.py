"""The kernels of routing choose the experts that the formulas choose, and give the same numbers up to rounding."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

import cuda_simulator
from onlinesoftmax.core.device import KNOWN
from onlinesoftmax.kernels.cuda import compile
from onlinesoftmax.routing import eager
from onlinesoftmax.routing.kernels import gradient, gradient_launch, route_launch, source
from onlinesoftmax.routing.results import losses_of
from onlinesoftmax.routing.rules import Call, Gradients
from pairs import one_architecture, rest_exhaustive
from simulated_routing import (
    SMALL,
    a_bias,
    a_call,
    check,
    check_losses,
    hard_rows,
    logits,
    near,
    simulated,
    simulated_gradient,
)

Tensor = torch.Tensor


@pytest.mark.parametrize(
    ("experts", "k"),
    [(1, 1), (2, 2), (7, 2), (8, 2), (60, 60), (64, 6), (128, 8), (144, 144), (160, 16), (256, 36), (384, 8), (896, 16),
     (1024, 1), (2304, 36), (8192, 6)],
)  # fmt: skip
def test_experts_of_each_number(experts: int, k: int, folder: Path) -> None:
    x = logits(5 if experts > 1024 else 24, experts)
    check(a_call(x, k), folder)


OPTIONS: list[dict[str, Any]] = [
    {}, {"renormalize": False}, {"score": "sigmoid"}, {"score": "sqrtsoftplus", "renormalize": False},
    {"score": "identity", "order": "topk_first"}, {"score": "sigmoid", "order": "topk_first", "scale": 2.5},
    {"groups": 4, "group_k": 2}, {"groups": 4, "group_k": 3, "group_score": "max"},
    {"score": "sigmoid", "groups": 4, "group_k": 2, "group_score": 3},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_options_and_hard_rows(number: int, folder: Path) -> None:
    experts, k = 60, (4, 29)[number == 2 or number == 6]
    x = torch.cat([hard_rows(experts), logits(24, experts)])
    mask = torch.arange(40) % 7 != 3
    check(a_call(x, k, 2, bias=a_bias(experts) if number % 2 else None, mask=mask, **OPTIONS[number]), folder)


GROUPED = (128, 4, torch.float32, "top2_sum"), (96, 6, torch.bfloat16, "top2_sum"), (160, 5, torch.float32, "max")


@pytest.mark.parametrize(
    ("experts", "groups", "dtype", "group_score", "score"),
    rest_exhaustive((*one, score) for one in GROUPED for score in ("sigmoid", "sqrtsoftplus", "softmax")),
)
def test_groups_of_adjacent_lanes(
    score: str, experts: int, groups: int, dtype: torch.dtype, group_score: str, folder: Path
) -> None:
    """Their scores are merged by shuffles; those of a sigmoid with a bias are first computed with errors."""
    generator = torch.Generator().manual_seed(2)
    units = torch.randint(-1, 2, (40, experts), generator=generator)
    close = logits(40, experts).mul(16).round().div(16) * (1 + units * 6e-8)
    x = torch.cat([hard_rows(experts), close, logits(24, experts)]).to(dtype)
    for bias in (a_bias(experts), torch.zeros(experts), torch.full((experts,), 1e4), None):
        call = a_call(x, 5, 2, bias=bias, score=score, groups=groups, group_k=2, group_score=group_score)
        shape = source.shape_of(
            call.rule, str(dtype)[6:], route_launch.width_of(x), source.flags_of(call), 40, 2, SMALL
        )
        assert shape is not None
        assert shape.group_lanes
        check(call, folder)


def test_near_keys_decide_between_groups_beside_lanes_without_experts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries, load, call = [], cuda_simulator.load_kernel, "if (!found) hits_of<false>("

    def counting(text: str, folder: Path) -> Any:
        assert call in text
        counted = text.replace(call, "if (!found) ++exact_choices, hits_of<false>(")
        libraries.append(load('extern "C" long exact_choices = 0;\n' + counted, folder))
        return libraries[-1]

    monkeypatch.setattr(cuda_simulator, "load_kernel", counting)
    check(a_call(logits(24, 96), 5, bias=a_bias(96), score="sigmoid", groups=6, group_k=3), folder)
    assert not ctypes.c_long.in_dll(libraries[0], "exact_choices").value


@pytest.mark.parametrize(
    ("experts", "k", "options"),
    [(8, 2, {}), (64, 6, {"renormalize": False}), (256, 8, {"score": "sigmoid", "groups": 8, "group_k": 4}),
     (384, 8, {}), (60, 29, {"order": "topk_first"}), (160, 16, {"score": "sigmoid"})],
)  # fmt: skip
def test_more_lanes_share_one_of_few_tokens(experts: int, k: int, options: dict[str, Any], folder: Path) -> None:
    x = torch.cat([hard_rows(experts), logits(24, experts)])
    bias = a_bias(experts) if "groups" in options else None
    check(a_call(x, k, bias=bias, mask=torch.arange(40) % 7 != 3, **options), folder, device=KNOWN["h100"])


FEW = (8, 2), (16, 1), (24, 3), (28, 8), (32, 4), (60, 5), (64, 8)


@pytest.mark.parametrize(
    ("experts", "k", "dtype"),
    rest_exhaustive(
        ((*one, dtype) for one in FEW for dtype in (torch.float32, torch.bfloat16)), lambda cell: (cell[:2], cell[2])
    ),
)
def test_a_network_sorts_few_experts(experts: int, k: int, dtype: torch.dtype, folder: Path) -> None:
    """Each call has one kind of logits: a warp that has a hard token makes lists for all of its tokens."""
    x = logits(32, experts)
    near_ties = x.round() * (1 + torch.randint(-1, 2, x.shape, generator=torch.Generator().manual_seed(1)) * 2e-7)
    for hard in (x, x.round(), x.round().abs() + 1, near_ties, -x.round().abs(), x.sign() * 0, x.clamp(max=0)):
        check(a_call(hard.to(dtype), k), folder, 2)


@pytest.mark.parametrize("experts", [8, 32, 64])
@pytest.mark.parametrize("bits", [0x7F800001, -0x7FFFFF, 0x7FC00000, 0x7F800000, -0x800000])
def test_a_network_knows_nan_by_its_low_bits(bits: int, experts: int, folder: Path) -> None:
    """The expert's number takes the place of the low bits, of which NaN may have one alone."""
    for expert in (0, experts - 1):
        x = logits(24, experts).abs() + 1
        x.view(torch.int32)[::3, expert] = bits
        check(a_call(x, 3), folder)


@pytest.mark.parametrize(("experts", "k"), [(96, 6), (96, 8), (128, 3), (160, 5), (256, 8), (384, 12)])
def test_few_experts_reach_the_threshold_of_a_list(experts: int, k: int) -> None:
    """A warp takes the slow way if one of its tokens has more of them than lanes rank at once (ranking.cuh)."""
    rule = a_call(logits(1, experts), k).rule
    shape = source.shape_of(rule, "float32", 4, frozenset({"COUNTS"}), 1 << 20, 1, KNOWN["h100"])
    assert shape is not None
    expert, x = torch.arange(experts), logits(2000, experts)
    lane, item = expert // 4 % shape.team, expert // (4 * shape.team) * 4 + expert % 4
    maxima = torch.full((2000, shape.team * shape.heads), -torch.inf)
    maxima.scatter_reduce_(1, (lane * shape.heads + item % shape.heads).expand(2000, -1), x, "amax")
    length = 1 << (k - 1).bit_length()
    reached = (x >= maxima.sort(1, descending=True).values[:, length - 1 : length]).sum(1)
    at_once = -(-(3 * length // 2) // shape.team) * shape.team
    assert (reached > min(at_once, shape.capacity)).float().mean() < 0.01


def test_equal_keys_of_a_token_that_a_block_shares(folder: Path) -> None:
    check(a_call(logits(6, 1200).round(), 6), folder)


def test_keys_with_errors_and_no_groups(folder: Path) -> None:
    x = torch.cat([hard_rows(60), logits(24, 60).round()])
    for bias in (a_bias(60), torch.zeros(60), torch.linspace(-1e-6, 1e-6, 60)):
        check(a_call(x, 6, 2, bias=bias, score="sigmoid"), folder)


@pytest.mark.parametrize(("dtype", "experts"), [(torch.float16, 7), (torch.bfloat16, 96)])
def test_16_bit_logits_and_ties(dtype: torch.dtype, experts: int, folder: Path) -> None:
    x = torch.cat([logits(20, experts, dtype), logits(20, experts, dtype).round()])
    check(a_call(x, 5), folder, 4)
    check(a_call(x[:, 1:], 3, 4), folder, 1)


def test_scores_whose_sum_has_no_finite_reciprocal(folder: Path) -> None:
    call = a_call(torch.full((24, 8), -95.0), 2, score="sigmoid")
    check(call, folder)
    found = eager.found_at(call, eager.choose(call))
    # A probability is s / sum, so its derivative is s (dp - mean of dp) / sum, with slopes that are the scores.
    for sums in (torch.linspace(-1, 1, 8).unsqueeze(0), torch.linspace(0, 1, 8).unsqueeze(0)):
        want = (sums - sums.mean()).expand(24, 8) / 8
        for unit in (1, 1e-3):  # products of the scores and 1e-3 have few bits in float32
            got = simulated_gradient(call, found, Gradients(None, sums * unit, None), folder)
            near(got / unit, want)


def test_slopes_that_are_subnormal_numbers(folder: Path) -> None:
    """Equal weights have the derivative w (dw - mean of dw), although slopes and scores have few bits."""
    call = a_call(torch.full((24, 4), -100.0), 4, score="sigmoid")
    given = Gradients(torch.linspace(0, 1, 4).mul(1e-2).repeat(24, 1), None, None)
    found, want = eager.found_at(call, eager.choose(call)), (given.weights - given.weights.mean()) / 4
    near(eager.gradient(call, found, given) * 100, want * 100)
    near(simulated_gradient(call, found, given, folder) * 100, want * 100)


@pytest.mark.parametrize("renormalize", [True, False])
def test_logits_far_from_0(renormalize: bool, folder: Path) -> None:
    """Terms are powers of 2, of logits whose products with log2(e) may be infinite."""
    x = logits(6, 64)
    for offset in (300.7, -1e6, 2.0**30, 3e38, -3e38):
        call = a_call(torch.cat([x + offset, x.clamp(-1, 0) * 1e37 + offset]), 6, renormalize=renormalize)
        got, want = simulated(call, folder, 2), eager.found_at(call, eager.choose(call))
        assert torch.equal(got.indices, want.indices)
        exact = call.x.double()
        near(got.lse, exact.logsumexp(1), 2e-7)
        assert got.prob_sums is not None
        near(got.prob_sums, exact.softmax(1).sum(0, keepdim=True))
        chosen = got.indices.long()
        weights = exact.gather(1, chosen).softmax(1) if renormalize else exact.softmax(1).gather(1, chosen)
        near(got.weights, weights)
        near(want.weights, weights)


def test_a_scale_beyond_the_reciprocal_of_a_term(folder: Path) -> None:
    """The largest term is 2^-64 here, whose reciprocal times the scale is infinite."""
    call = a_call(torch.tensor([[1073640192.0, 0.0]]).repeat(8, 1), 1, scale=1e20)
    near(simulated(call, folder, 2).weights / 1e20, torch.ones(8, 1))


def test_the_largest_logit_may_be_in_a_group_that_is_left_out(folder: Path) -> None:
    x = torch.tensor([[100.0, -95.0, 6.0, 5.0]]).repeat(8, 1)
    check(a_call(x, 2, order="topk_first", groups=2, group_k=1), folder)


@pytest.mark.parametrize(("score", "renormalize"), [("softmax", True), ("sqrtsoftplus", False)])
def test_given_experts(score: str, renormalize: bool, folder: Path) -> None:
    x, generator = logits(30, 64), torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randperm(64, generator=generator)[:6] for _ in range(30)]).int()
    indices[3], indices[4, 2], indices[5, 0] = -1, -7, 64
    x[6], x[7, 4:] = torch.nan, -torch.inf
    check(a_call(x, 6, 3, indices=indices, score=score, renormalize=renormalize), folder)


def test_chosen_scores_that_add_up_to_0(folder: Path) -> None:
    """Their weights are 0, and so is the gradient."""
    x = logits(12, 8).round()
    x[3], x[7] = torch.tensor([4.0, -4, 2, -2, -9, -9, -9, -9]), 0.0
    call = a_call(x, 4, 1, score="identity", renormalize=True)
    assert not eager.found_at(call, eager.choose(call)).weights[[3, 7]].any()
    check(call, folder)


@pytest.mark.parametrize(
    ("score", "renormalize", "given"),
    [("softmax", True, "weights prob_sums lse"), ("softmax", True, "weights"), ("softmax", False, "weights"),
     ("softmax", True, "lse"), ("sigmoid", True, "weights prob_sums lse"), ("sqrtsoftplus", False, "weights prob_sums"),
     ("identity", True, "weights prob_sums")],
)  # fmt: skip
def test_gradients(score: str, renormalize: bool, given: str, folder: Path) -> None:
    experts, generator = 60, torch.Generator().manual_seed(3)
    x = torch.cat([hard_rows(experts), logits(24, experts)])
    if score == "identity":
        x = torch.where(x == -torch.inf, x, x.abs())  # sums to divide by are not near 0
    mask = torch.arange(40) % 7 != 3
    sizes = {"weights": (40, 5), "prob_sums": (2, experts), "lse": (40,)}
    noise = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    some = Gradients(**{name: t if name in given.split() else None for name, t in noise.items()})
    # Given experts may be equal.
    for indices in (None, torch.randint(-1, experts, (40, 5), generator=generator, dtype=torch.int32)):
        call = a_call(x, 5, 2, score=score, renormalize=renormalize, scale=2.5, mask=mask, indices=indices)
        found = eager.found_at(call, eager.choose(call))
        near(simulated_gradient(call, found, some, folder), eager.gradient(call, found, some), 1e-5)


@pytest.mark.parametrize("arch", one_architecture(1))
def test_the_kernels_compile_without_spills(arch: str, log_of: Any) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
    call = a_call(logits(1, 256), 8)
    shape = source.shape_of(call.rule, "float32", 4, source.flags_of(call), 65536, 1, KNOWN["h100"])
    assert shape is not None
    backward = gradient.shape_of(call.rule, "float32", 4, frozenset(gradient.FLAGS))
    for text in (source.KERNEL.source(shape), gradient.KERNEL.source(backward)):
        log = log_of(text, arch)
        assert not compile.usage(log)["spills"]


def on_gpu(call: Call) -> Call:
    return call._replace(**{name: t.cuda() for name, t in call._asdict().items() if isinstance(t, Tensor)})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(5, 1, 1), (1000, 2, 2), (1000, 7, 3), (5000, 8, 2), (999, 60, 6), (4096, 64, 6), (20000, 128, 8), (700, 144, 144),
     (3000, 160, 16), (70000, 256, 8), (3000, 256, 36), (512, 384, 8), (600, 896, 16), (400, 1024, 6), (300, 2304, 36),
     (200, 8192, 2), (9, 8192, 8192)],
)  # fmt: skip
def test_a_gpu_chooses_the_experts_of_a_cpu(tokens: int, experts: int, k: int, dtype: torch.dtype) -> None:
    x = logits(tokens, experts, dtype)
    for rows, sequences in ((x, 1), (x[:, 1:] if experts > k else x, 1), (x[: tokens // 4 * 4], 4)):
        gpu_equals_cpu(a_call(rows, k, sequences))


def gpu_equals_cpu(call: Call) -> None:
    """Compare results and gradients of the kernels with the formulas."""
    want = eager.found_at(call, eager.choose(call))
    for _ in range(2):
        got = route_launch.route(on_gpu(call))
        assert got is not None
        for name in ("indices", "counts"):
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
        for name in ("weights", "lse", *(("prob_sums",) if call.prob_sums else ())):
            near(getattr(got, name), getattr(want, name), 1e-5)
    if call.losses:
        check_losses(losses_of(got), want, call.rule)
    generator = torch.Generator().manual_seed(3)
    noise = [
        t if t is None else torch.randn(t.shape, generator=generator) for t in (want.weights, want.prob_sums, want.lse)
    ]
    dx = gradient_launch.gradient(on_gpu(call), got, Gradients(*(None if t is None else t.cuda() for t in noise)))
    assert dx is not None
    near(dx, eager.gradient(call, want, Gradients(*noise)), ERRORS.get(call.x.dtype, 1e-5))


ERRORS = {torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Rounding errors of a gradient."""


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("experts", [60, 256, 2304])
def test_a_gpu_takes_options_and_hard_rows(options: dict[str, Any], experts: int) -> None:
    x = torch.cat([hard_rows(experts), logits(984, experts)])
    if options.get("score") == "identity":
        x = torch.where(x == -torch.inf, x, x.abs())
    mask = torch.arange(1000) % 7 != 3
    for k in (4, 29):
        for one in (None, a_bias(experts)):
            gpu_equals_cpu(a_call(x, k, 2, bias=one, mask=mask, **options))


@pytest.mark.gpu
def test_a_gpu_takes_more_logits_than_int32_counts() -> None:
    tokens, experts = (1 << 24) + 5, 128
    x = torch.empty(tokens, experts, dtype=torch.bfloat16, device="cuda")
    x.normal_(generator=torch.Generator("cuda").manual_seed(1))
    call = a_call(x, 8)
    got = route_launch.route(call)
    assert got is not None
    assert int(got.counts.sum()) == 8 * tokens
    dx = gradient_launch.gradient(call, got, Gradients(torch.ones_like(got.weights), None, torch.ones_like(got.lse)))
    last = a_call(x[-100:].cpu(), 8)
    want = eager.found_at(last, eager.choose(last))
    assert torch.equal(got.indices[-100:].cpu(), want.indices)
    near(got.weights[-100:], want.weights, 1e-5)
    ones = Gradients(torch.ones_like(want.weights), None, torch.ones_like(want.lse))
    assert dx is not None
    near(dx[-100:], eager.gradient(last, want, ones), 1e-2)
