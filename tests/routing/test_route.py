"""`route` and its losses for tensors and arrays: shapes, transforms, compilation, replays, mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onlinesoftmax as osm

Tensor = torch.Tensor

KINDS: list[dict[str, Any]] = [
    {},
    {"renormalize": False, "scale": 0.5},
    {"score": "sigmoid", "bias": torch.linspace(-0.5, 0.5, 12), "groups": 4, "group_k": 2, "scale": 2.5},
    {"score": "sqrtsoftplus", "bias": torch.linspace(0.5, -0.5, 12)},
    {"order": "topk_first"},
    {"score": "sigmoid", "order": "topk_first", "renormalize": False},
]


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(4)) * 2).to(dtype)


def total(x: Tensor, **given: Any) -> Tensor:
    """A scalar that depends on every result with a gradient."""
    found = osm.route(x, 3, prob_sums=True, dense=True, **given)
    weighted = (found.weights * torch.tensor([1.0, -2.0, 0.5])).sum() + (found.dense * torch.arange(12)).sum() * 0.1
    return weighted + osm.load_balancing_loss(found, "sequence") + 0.1 * osm.router_z_loss(found)


@pytest.mark.parametrize("given", KINDS, ids=str)
def test_numpy_and_every_dtype_agree(given: dict[str, Any]) -> None:
    x = logits(2, 6, 12)
    x[0, 3], x[1, 2, 4:], mask = x[0, 0].round(), -torch.inf, torch.ones(2, 6, dtype=torch.bool)
    mask[1, 5] = False
    found = osm.route(x, 3, mask=mask, prob_sums=True, dense=True, **given)
    arrays = {name: t.numpy() if torch.is_tensor(t) else t for name, t in given.items()}
    theirs = osm.route(x.numpy(), 3, mask=mask.numpy(), prob_sums=True, dense=True, **arrays)
    assert [tuple(t.shape) for t in found] == [(2, 6, 3), (2, 6, 3), (2, 12), (2, 12), (2, 6), (2, 6, 12)]
    assert found.indices.dtype == found.counts.dtype == torch.int32
    for name, ours, other in zip(found._fields, found, theirs, strict=True):
        np.testing.assert_allclose(ours, other, rtol=2e-6, atol=1e-6, err_msg=name)
    for loss in (osm.load_balancing_loss, osm.router_z_loss):
        np.testing.assert_allclose(loss(found), loss(theirs), rtol=2e-6)
    # float16 holds these logits only nearly; float32 and float64 hold float16's.
    narrow = osm.route(x.half(), 3, mask=mask, **given)
    again = osm.route(x.half().float(), 3, mask=mask, **given)
    assert all(torch.equal(a, b) for a, b in zip(narrow[:3], again[:3], strict=True))
    wide = osm.route(x.half().double(), 3, mask=mask, **given)
    assert wide.weights.dtype == wide.lse.dtype == torch.float64
    assert torch.equal(wide.indices, again.indices)
    torch.testing.assert_close(wide.weights.float(), again.weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("given", KINDS, ids=str)
def test_gradients_of_every_kind(given: dict[str, Any]) -> None:
    """By automatic differentiation of every order, in transforms, and compiled."""
    x = logits(2, 4, 12, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: total(x, **given), x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: total(x, **given), x, fast_mode=True)
    (wanted,) = torch.autograd.grad(total(x, **given), x)
    torch.testing.assert_close(torch.func.grad(lambda x: total(x, **given))(x.detach()), wanted)
    each = torch.func.vmap(torch.func.grad(lambda x: total(x, **given)))(x.detach())
    alone = torch.autograd.grad(sum(total(part, **given) for part in x), x)[0]
    torch.testing.assert_close(each, alone)


def test_compiled_calls_are_those_of_eager() -> None:
    x = logits(2, 4, 12).requires_grad_()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, **KINDS[2]), total(x, **KINDS[2]))
    ours, wanted = (torch.autograd.grad(f(x, **KINDS[2]), x)[0] for f in (compiled, total))
    assert torch.equal(ours, wanted)


def test_the_gradient_keeps_nothing_as_large_as_the_logits_but_the_logits() -> None:
    x, kept = logits(64, 128).bfloat16().requires_grad_(), []
    for given in KINDS[:2]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            found = osm.route(x, 3, prob_sums=True, mask=torch.ones(64, dtype=torch.bool), **given)
            loss = found.weights.square().sum() + osm.load_balancing_loss(found) + osm.router_z_loss(found)
        assert {t.data_ptr() for t in kept if t.numel() >= x.numel()} == {x.data_ptr()}
        loss.backward()


def test_operators_pass_the_checks_of_pytorch() -> None:
    from onlinesoftmax.routing.operators import ROUTE

    x = logits(2, 3, 12).requires_grad_()
    for flags in ([0, 1, 1, 1], [0, 0, 0, 0]):
        given = x, None, None, None, "softmax", [3, 1, 1, 1, *flags], 1.0
        torch.library.opcheck(ROUTE, given, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace. is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_torchscript() -> None:
    """It has the operator, which runs for other numbers of sequences and tokens too, and differentiates."""
    traced = torch.jit.trace(lambda x: total(x, **KINDS[2]), logits(2, 4, 12).requires_grad_())
    assert "onlinesoftmax::route" in str(traced.graph)
    x = logits(3, 5, 12).requires_grad_()
    torch.testing.assert_close(traced(x), total(x, **KINDS[2]))
    ours, wanted = (torch.autograd.grad(f(x), x)[0] for f in (traced, lambda x: total(x, **KINDS[2])))
    torch.testing.assert_close(ours, wanted)


def test_replay_takes_the_given_experts() -> None:
    x = logits(5, 12).requires_grad_()
    found = osm.route(x, 3, score="sigmoid", renormalize=False)
    given = found.indices.long().flip(-1).clone()
    given[0, 1], given[1], given[2, 0] = 12, -7, 2**40 + 1
    again = osm.route(x, 3, score="sigmoid", renormalize=False, indices=given, prob_sums=True)
    assert again.indices[0, 1] == again.indices[2, 0] == -1
    assert again.indices[1].tolist() == [-1] * 3
    kept = again.indices >= 0
    torch.testing.assert_close(again.weights, found.weights.flip(-1) * kept)
    assert again.counts.sum() == kept.sum()
    again.weights.sum().backward()
    wanted = (
        torch.zeros_like(x).scatter_add(1, again.indices.clamp(min=0).long(), 1.0 * kept)
        * x.sigmoid()
        * (1 - x.sigmoid())
    )
    torch.testing.assert_close(x.grad, wanted)
    again = osm.route(x, 3, score="sigmoid", renormalize=False, indices=given)
    (dx,) = torch.autograd.grad(again.weights.sum(), x, create_graph=True)
    torch.testing.assert_close(dx, wanted)
    (second,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(second, wanted * (1 - 2 * x.sigmoid()))


def test_losses_are_those_of_the_papers() -> None:
    x = logits(2, 6, 12).double()
    found = osm.route(x, 2, prob_sums=True)
    p = x.softmax(-1)
    chosen = torch.zeros_like(x).scatter(-1, x.topk(2).indices, 1.0)
    each = 12 * (chosen.mean(1) / 2 * p.mean(1)).sum(-1)
    torch.testing.assert_close(osm.load_balancing_loss(found, "sequence"), each.mean())
    whole = 12 * (chosen.mean((0, 1)) / 2 * p.mean((0, 1))).sum()
    torch.testing.assert_close(osm.load_balancing_loss(found), whole)
    torch.testing.assert_close(osm.router_z_loss(found), x.logsumexp(-1).square().mean())
    nothing = osm.route(x[:, :0], 2, prob_sums=True)
    assert osm.load_balancing_loss(nothing) == osm.load_balancing_loss(nothing, "sequence") == 0
    assert osm.router_z_loss(nothing) == 0


def test_shapes_without_tokens_and_of_one() -> None:
    one = osm.route(logits(12), 3, prob_sums=True, dense=True)
    assert [tuple(t.shape) for t in one] == [(3,), (3,), (12,), (12,), (), (12,)]
    none = osm.route(logits(0, 5, 12).requires_grad_(), 3, prob_sums=True, dense=True)
    assert [tuple(t.shape) for t in none] == [(0, 5, 3), (0, 5, 3), (0, 12), (0, 12), (0, 5), (0, 5, 12)]
    none.weights.sum().backward()
    for number in (1, 2, 7, 160, 896, 8192):
        found = osm.route(logits(3, number), number)
        assert found.indices.sort(1).values.equal(torch.arange(number, dtype=torch.int32).expand(3, -1))


MISTAKES: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "k must be from 1 to the 12 experts, got 13", {"k": 13}),
    (TypeError, "k must be an int, not bool", {"k": True}),
    (ValueError, "score must be 'softmax' or", {"score": "soft"}),
    (ValueError, "order must be 'score_first' or 'topk_first'", {"order": "first"}),
    (ValueError, "groups must divide the 12 experts, got 5", {"groups": 5, "group_k": 1}),
    (ValueError, "groups and group_k belong together", {"groups": 4}),
    (ValueError, "k = 3 experts are more than 1 groups of 2 have", {"groups": 6, "group_k": 1}),
    (ValueError, "group_score must be 'max', 'top2_sum' or an int", {"group_score": "sum"}),
    (ValueError, "scale must be a finite number", {"scale": float("inf")}),
    (ValueError, "scale must be a finite number, got 10{400}$", {"scale": 10**400}),
    (TypeError, "counts must be a bool", {"counts": 1}),
    (ValueError, r"bias must have one number for each expert, \(12,\)", {"bias": torch.zeros(11)}),
    (RuntimeError, "mask must be boolean", {"mask": torch.ones(4)}),
    (ValueError, r"indices must have shape \(4, 3\)", {"indices": torch.zeros(4, 2, dtype=torch.long)}),
    (RuntimeError, "indices must be integer", {"indices": torch.zeros(4, 3)}),
    (TypeError, "bias must be Tensor, as input is, not ndarray", {"bias": np.zeros(12)}),
]


@pytest.mark.parametrize(("error", "message", "given"), MISTAKES, ids=[row[1] for row in MISTAKES])
def test_mistakes_name_the_argument(error: type[Exception], message: str, given: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        osm.route(logits(4, 12), **{"k": 3} | given)


def test_mistakes_of_logits_and_of_losses() -> None:
    with pytest.raises(NotImplementedError, match="logits must be floating point"):
        osm.route(torch.zeros(4, 12, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="from 1 to 8192 experts, got 0"):
        osm.route(logits(4, 0), 1)
    with pytest.raises(ValueError, match="call route, or the Router, with prob_sums=True"):
        osm.load_balancing_loss(osm.route(logits(4, 12), 3))
    with pytest.raises(ValueError, match="kind must be 'switch' or 'sequence'"):
        osm.load_balancing_loss(osm.route(logits(4, 12), 3, prob_sums=True), "batch")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(TypeError, match="routed must be the result of route, or of a Router, not Tensor"):
        osm.router_z_loss(logits(4, 12))  # type: ignore[arg-type]  # the mistake


def test_a_repeated_call_checks_its_arguments_again() -> None:
    """Prepared calls are keyed by all arguments: what changes takes the general path."""
    x, mask = logits(2, 4, 12), torch.tensor([[True] * 3 + [False], [True] * 4])
    given: dict[str, Any] = {"score": "sigmoid", "bias": torch.arange(12.0), "prob_sums": True, "dense": True}
    first = osm.route(x, 3, mask=mask, **given)
    for _ in range(2):
        again = osm.route(x + 1, 3, mask=mask, **given)
        assert torch.equal(again.indices, first.indices)
        assert torch.equal(osm.route(x, 3, mask=mask, **given).weights, first.weights)
    assert osm.route(x, 3, mask=mask, **given | {"bias": torch.arange(12.0).double()}).weights.equal(first.weights)
    assert osm.route(x, 3, mask=mask[1], **given).counts.sum() == 24
    z = x.clone().requires_grad_()
    for _ in range(2):
        osm.route(z, 3, mask=mask, **given).weights[0].square().sum().backward()
    assert not osm.route(z.detach(), 3, mask=mask, **given).weights.requires_grad
    assert z.grad is not None
    assert z.grad[0, :3].any()
    assert not z.grad[0, 3].any()
    with pytest.raises(TypeError, match="counts must be a bool"):
        osm.route(x, 3, mask=mask, **given | {"counts": 1})


def test_a_prepared_call_runs_the_kernel_that_was_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the formulas in the place of a kernel."""
    from onlinesoftmax.routing import eager, prepared

    runs = []

    def bound(call: Any) -> Any:
        def run(x: Tensor, bias: Tensor | None, mask: Tensor | None, indices: Tensor | None) -> Any:
            runs.append(x.shape)
            return eager.found_of(call._replace(x=x, bias=bias, mask=mask, indices=indices))

        return run

    monkeypatch.setattr(prepared, "bound", bound)
    given: dict[str, Any] = {"score": "sigmoid", "bias": torch.arange(13.0), "scale": 0.75, "prob_sums": True}
    x, mask = logits(2, 5, 13), torch.arange(10).reshape(2, 5) != 3
    for z in (x, x.clone().requires_grad_()):
        first, again = (osm.route(z, 4, mask=mask, **given) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first[:5], again[:5], strict=True))
    assert runs == [(10, 13)] * 2
    wanted, ours = (torch.autograd.grad(found.weights[..., 0].sum(), z)[0] for found in (first, again))
    assert torch.equal(ours, wanted)
    # Every other row: they are copied to be flat.
    copied = logits(4, 5, 13)[::2]
    assert torch.equal(
        osm.route(copied, 4, mask=mask, **given).indices, osm.route(copied, 4, mask=mask, **given).indices
    )
    assert len(runs) == 2


def test_scores_of_both_signs_that_add_up_to_0() -> None:
    """The gradient is 0 too: the weights of such a token are a constant."""
    x = torch.tensor([[1.0, 1.0, 0.0, -2.0], [3.0, -1.0, -1.0, 1.0]], requires_grad=True)
    found, alone = osm.route(x, 4, score="identity"), osm.route(x.detach().numpy(), 4, score="identity")
    want = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.5, 0.5, -0.5, -0.5]])
    assert torch.equal(found.weights, want)
    assert np.array_equal(alone.weights, want)
    (dx,) = torch.autograd.grad(found.weights[:, 0].sum(), x)
    assert dx[0].tolist() == [0.0] * 4
    assert dx[1].any()


def test_softmax_of_all_logits_does_not_depend_on_their_offset() -> None:
    """Softmax is not exp(x - lse), since lse is rounded; and an expert that is out brings no NaN into derivatives."""
    x, w = torch.tensor([[2.0**24, 2.0**24], [1000.0, 999.0], [-100.0, -torch.inf]]), 1 / (1 + np.exp(-1))
    weights, slopes = [[0.5, 0.5], [w, 1 - w], [1, 0]], [[0.25, -0.25], [w * (1 - w), -w * (1 - w)], [0, 0]]
    for count in (2, 3):  # a CPU takes fewer steps where all logits are finite
        rows = x[:count].clone().requires_grad_()
        found = osm.route(rows, 2, renormalize=False, prob_sums=True)
        others = (osm.route(t, 2, renormalize=False).weights for t in (x[:count], x[:count].numpy()))
        for own in (found.weights.detach(), *others):
            np.testing.assert_allclose(own, weights[:count], rtol=2e-7)
        for create_graph in (False, True):
            for first in (found.weights[:, 0], found.prob_sums[0]):
                (dx,) = torch.autograd.grad(first.sum(), rows, retain_graph=True, create_graph=create_graph)
                np.testing.assert_allclose(dx.detach(), slopes[:count], rtol=1e-6, atol=1e-7)


def test_a_bias_of_a_numpy_array_may_be_infinite_in_float32() -> None:
    x, bias = np.zeros((1, 4), np.float32), np.array([0.0, 1e39, 0.0, 1.0])
    theirs = osm.route(torch.from_numpy(x), 2, bias=torch.from_numpy(bias))
    assert osm.route(x, 2, bias=bias).indices.tolist() == theirs.indices.tolist()


def test_losses_of_numpy_arrays_have_their_dtype_and_raise_nothing() -> None:
    x = np.full((2, 5, 4), -90.0, np.float32)
    x[..., 1] = 0
    with np.errstate(all="raise"):
        for logits in (x, x[0], x[0, 0], x[:, :0], x.astype(np.float64)):
            found = osm.route(logits, 2, prob_sums=True)
            same = osm.route(torch.from_numpy(np.array(logits)), 2, prob_sums=True)
            for kind in ("switch", "sequence"):
                loss = osm.load_balancing_loss(found, kind)
                assert loss.dtype == logits.dtype
                np.testing.assert_allclose(loss, osm.load_balancing_loss(same, kind), rtol=1e-6)
            loss = osm.router_z_loss(found)
            assert loss.dtype == logits.dtype
            np.testing.assert_allclose(loss, osm.router_z_loss(same), rtol=1e-6, atol=1e-30)
