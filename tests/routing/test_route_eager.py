"""The routing in PyTorch's operations, against float64 arithmetic written by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the routing of tensors needs torch")

from onlinesoftmax.routing import eager  # noqa: E402  # torch may be missing
from onlinesoftmax.routing.results import Routed  # noqa: E402  # torch may be missing
from onlinesoftmax.routing.rules import Call, Gradients, checked_rule  # noqa: E402

OPTIONS = [
    (score, order, renormalize)
    for score, order, renormalize in itertools.product(
        ("softmax", "sigmoid", "sqrtsoftplus", "identity"), ("score_first", "topk_first"), (True, False)
    )
]


def call_of(x, k, *, bias=None, mask=None, indices=None, sequences=1, **given):  # type: ignore[no-untyped-def]  # tensors
    names = {"score": "softmax", "order": "score_first", "groups": None, "group_k": None, "group_score": "top2_sum"}
    names |= {"renormalize": True, "scale": 1.0} | given
    groups = tuple(names.pop(name) for name in ("groups", "group_k", "group_score"))
    rule = checked_rule("route()", x.shape[-1], k, groups=groups, **names)
    return Call(x, bias, mask, indices, rule, sequences, len(x) // sequences, True, True)


def scores_of(x: np.ndarray, score: str) -> np.ndarray:
    """The scores of float64 logits, by the textbook."""
    with np.errstate(over="ignore"):
        if score == "softmax":
            e = np.exp(x - x.max(-1, keepdims=True))
            return e / e.sum(-1, keepdims=True)
        if score == "sigmoid":
            return 1 / (1 + np.exp(-x))
        return np.sqrt(np.logaddexp(0, x)) if score == "sqrtsoftplus" else x


@pytest.mark.parametrize(("score", "order", "renormalize"), OPTIONS)
def test_weights_and_sums_are_those_of_the_textbook(score: str, order: str, renormalize: bool) -> None:
    x = torch.from_numpy(np.random.default_rng(3).normal(0, 3, (12, 7))).abs()
    call = call_of(x, 3, score=score, order=order, renormalize=renormalize, scale=2.5, sequences=2)
    found = eager.found_at(call, eager.choose(call))
    z = x.numpy()
    order_of = np.argsort(-z, -1, kind="stable")[:, :3]
    assert found.indices.numpy().tolist() == order_of.tolist()
    chosen = np.take_along_axis(z, order_of, -1)
    s = scores_of(chosen, score) if order == "topk_first" else np.take_along_axis(scores_of(z, score), order_of, -1)
    w = 2.5 * (s / s.sum(-1, keepdims=True) if renormalize else s)
    np.testing.assert_allclose(found.weights.numpy(), w, rtol=1e-13)
    p = scores_of(z, score)
    p = p if score in ("softmax", "identity") else p / p.sum(-1, keepdims=True)
    np.testing.assert_allclose(found.prob_sums.numpy(), p.reshape(2, 6, 7).sum(1), rtol=1e-13)
    np.testing.assert_allclose(found.lse.numpy(), np.log(np.exp(z).sum(-1)), rtol=1e-13)
    wanted = [np.bincount(part.ravel(), minlength=7) for part in order_of.reshape(2, 18)]
    assert found.counts.tolist() == np.array(wanted).tolist()


def power(x: np.ndarray) -> np.ndarray:
    """exp(x) of float32 numbers by the arithmetic that selection.py describes, in float64 with roundings."""
    f32 = np.float32
    y = np.clip(f32(x.astype(np.float64) * 1.4426950216293335), f32(-125), f32(125))
    n = np.rint(y)
    f, total = y - n, np.full_like(y, 0.0001534581242594868)
    for c in (0.0013399930903688073, 0.009618489071726799, 0.05550328642129898, 0.24022646248340607):
        total = f32(f32(total.astype(np.float64) * f).astype(np.float64) + c)
    for c in (0.6931471824645996, 1.0):
        total = f32(f32(total.astype(np.float64) * f).astype(np.float64) + c)
    return total * f32(2.0) ** n


def biased_scores(x: np.ndarray, bias: np.ndarray, score: str) -> np.ndarray:
    """Score + bias as selection.py describes."""
    f32 = np.float32
    if score == "softmax":
        e = power(x - x.max(-1, keepdims=True))
        masses = [sum(round(float(t) * 2**40) for t in row) for row in e]
        return e / f32(np.array(masses, np.float64) * 2.0**-40)[:, None] + bias
    if score == "sigmoid":
        return f32(1) / (f32(1) + power(-x)) + bias
    t = power(-abs(x))
    u = t / (f32(2) + t)
    v, log = u * u, np.full_like(u, 0.14089162647724152)
    for c in (0.13980303704738617, 0.20012454688549042, 0.3333315849304199, 1.0):
        log = f32(f32(log.astype(np.float64) * v).astype(np.float64) + c)
    return np.sqrt(np.maximum(x, f32(0)) + f32(2) * u * log) + bias


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_biased_scores_decide_to_the_last_bit(score: str) -> None:
    """Few different scores, many of them equal or neighbours, in the order of exact scores and of experts."""
    rng = np.random.default_rng(5)
    x = (np.float32(0.5) + np.float32(2**-22) * rng.integers(-8, 8, (256, 32))).astype(np.float32)
    x[::2] = rng.normal(0, 4, x[::2].shape)
    bias = (rng.integers(-2, 2, 32) * 2**-24).astype(np.float32)
    call = call_of(torch.from_numpy(x), 32, bias=torch.from_numpy(bias), score=score)
    scores = biased_scores(x, bias, score).astype(np.float64)
    assert eager.choose(call).tolist() == np.argsort(-scores, -1, kind="stable").tolist()
    exact = scores_of(x.astype(np.float64), score)
    assert abs(biased_scores(x, 0 * bias, score) / exact - 1).max() < 2e-6


@pytest.mark.parametrize(("bias", "group_score"), [(False, "top2_sum"), (True, "top2_sum"), (True, 3), (False, "max")])
def test_groups_are_chosen_by_the_sums_of_their_best(bias: bool, group_score: str | int) -> None:
    rng, n = np.random.default_rng(6), {"top2_sum": 2, "max": 1}.get(group_score, group_score)  # type: ignore[call-overload]  # an int
    x, b = rng.normal(0, 2, (64, 24)).astype(np.float32), rng.normal(0, 0.5, 24).astype(np.float32)
    given = {"score": "sigmoid", "groups": 6, "group_k": 2, "group_score": group_score}
    call = call_of(torch.from_numpy(x), 5, bias=torch.from_numpy(b) if bias else None, **given)
    s = scores_of(x.astype(np.float64), "sigmoid") + (b if bias else 0)
    totals = np.sort(s.reshape(64, 6, 4), -1)[..., -n:].sum(-1)
    kept = np.argsort(-totals, -1)[:, :2, None] == np.arange(6).repeat(4)
    order = np.argsort(-np.where(kept.any(1), s, -np.inf), -1)[:, :5]
    assert eager.choose(call).tolist() == order.tolist()


def test_hard_rows_have_distinct_experts_and_weights_of_nan_or_0() -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor(
        [
            [nan] * 6,
            [-inf] * 6,
            [1.0, -inf, 1.0, -inf, -inf, -inf],
            [0.0, nan, inf, nan, -0.0, -inf],
            [inf, inf, 0, 0, 0, 0],
        ]
    )
    wanted = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3], [1, 3, 2, 0], [0, 1, 2, 3]]
    for score, order, renormalize in OPTIONS:
        for groups in (None, 1):
            call = call_of(x, 4, score=score, order=order, renormalize=renormalize, groups=groups, group_k=groups)
            found = eager.found_at(call, eager.choose(call))
            assert found.indices.tolist() == wanted
            assert found.weights[1].tolist() == [0] * 4
            assert found.weights[2, 2:].tolist() == [0] * 2
            assert found.weights[0].isnan().all()
        biased = eager.choose(call_of(x, 4, bias=torch.zeros(6), score=score, order=order))
        assert biased[:4].tolist() == [*wanted[:3], [1, 3, 2, 0]]
        assert sorted(biased[4].tolist())[:2] == [0, 1]


def test_a_sum_of_0_and_masked_tokens_give_0() -> None:
    x = torch.tensor([[-200.0, -300.0], [1.0, 2.0], [math.nan, 5.0], [0.0, 0.0]])
    mask = torch.tensor([True, True, False, True])
    call = call_of(x, 1, score="sigmoid", mask=mask)
    found = eager.found_at(call, eager.choose(call))
    assert found.weights.tolist() == [[0.0], [1.0], [0.0], [1.0]]
    assert found.indices.tolist() == [[0], [1], [-1], [0]]
    assert found.counts.tolist() == [[2, 1]]
    assert found.lse[2] == 0
    assert found.prob_sums.isfinite().all()
    again = eager.found_at(call._replace(mask=None), found.indices)
    assert all(torch.equal(a, b) for a, b in zip(found[:5], again[:5], strict=True))


@pytest.mark.parametrize(("score", "order", "renormalize"), OPTIONS)
def test_the_gradient_is_that_of_automatic_differentiation(score: str, order: str, renormalize: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=rng, dtype=torch.float64) * 3
    x[0, 2], x[1, :5], x[3, 1], x[4] = -math.inf, -math.inf, math.nan, -700.0
    mask = torch.tensor([True] * 3 + [False] + [True] * 4)
    bias = torch.tensor([0.0, 0.0, 0.0, -math.inf, 0.0, 0.0], dtype=torch.float64)
    x.requires_grad_()
    call = call_of(
        x, 3, score=score, order=order, renormalize=renormalize, scale=1.5, bias=bias, mask=mask, sequences=2
    )
    indices = eager.choose(call)
    found = eager.found_at(call, indices)
    given = Gradients(
        *[torch.randn(t.shape, generator=rng, dtype=torch.float64) for t in (found.weights, found.prob_sums, found.lse)]
    )
    (wanted,) = torch.autograd.grad([found.weights, found.prob_sums, found.lse], x, list(given))
    found = Routed(*(t if t is None else t.detach() for t in found))
    torch.testing.assert_close(eager.gradient(call, found, given), wanted, rtol=1e-12, atol=1e-14)
    assert wanted.isfinite().all()
    for name in Gradients._fields:
        alone = Gradients(*[given[i] if each == name else None for i, each in enumerate(Gradients._fields)])
        fresh = eager.found_at(call, indices)
        (wanted,) = torch.autograd.grad(getattr(fresh, name), x, getattr(given, name))
        torch.testing.assert_close(eager.gradient(call, found, alone), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sequences", [1, 2, 10])
@pytest.mark.parametrize("most", [3, 8, 16])
def test_parts_of_the_tokens_give_the_same(sequences: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(2)
    x, mask = torch.randn(40, 6, generator=rng, dtype=torch.float64), torch.rand(40, generator=rng) > 0.2
    call = call_of(x, 2, mask=mask, sequences=sequences)
    whole = eager.found_at(call, eager.choose(call))
    shapes = (40, 2), (sequences, 6), (40,)
    given = Gradients(*[torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes])
    monkeypatch.setattr(eager, "CHUNK", most * 6)
    for ours, wanted in zip(eager.found_of(call)[:5], whole[:5], strict=True):
        assert ours.dtype == wanted.dtype
        torch.testing.assert_close(ours, wanted, rtol=1e-14, atol=1e-14)
    ours = eager.gradient_of(call, whole, given)
    torch.testing.assert_close(ours, eager.gradient(call, whole, given), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("score", "order", "renormalize"), OPTIONS)
def test_calls_whose_numbers_are_finite_give_the_same(score: str, order: str, renormalize: bool) -> None:
    """A CPU leaves out steps for infinite numbers where it sees none; one of them brings all steps back."""
    rng = torch.Generator().manual_seed(3)
    x = (torch.randn(30, 8, generator=rng, dtype=torch.float64) * 4).requires_grad_()
    x.data[3, 2], x.data[4] = x.data[3, 5], 700.0
    bias = torch.randn(8, generator=rng, dtype=torch.float64)
    given = Gradients(*[torch.randn(s, generator=rng, dtype=torch.float64) for s in ((30, 3), (2, 8), (30,))])
    for own in (None, bias):
        options = {"score": score, "order": order, "renormalize": renormalize, "groups": 4, "group_k": 3, "scale": 0.5}
        call = call_of(x, 3, bias=own, sequences=2, **options)
        exact = eager.found_at(call, eager.choose(call))
        (wanted,) = torch.autograd.grad([exact.weights, exact.prob_sums, exact.lse], x, list(given))
        found = eager.found_of(call._replace(x=x.detach()))
        torch.testing.assert_close(found[:5], exact[:5], rtol=1e-13, atol=1e-13)
        dx = eager.gradient(call, found, given, complete=True)
        torch.testing.assert_close(dx, wanted, rtol=1e-12, atol=1e-13)
        infinite = torch.cat([x.detach(), torch.full((2, 8), -math.inf, dtype=torch.float64)])
        again = eager.found_of(call._replace(x=infinite, sequences=1, tokens=32))
        torch.testing.assert_close(again.weights[:30], found.weights, rtol=1e-13, atol=1e-13)
        assert again.indices[:30].tolist() == found.indices.tolist()
