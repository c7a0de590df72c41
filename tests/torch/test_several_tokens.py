"""Log-probabilities of one and several tokens of each row, and an index that is ignored, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from ways import HOW, HOWS, UNITS, gradient

import onlinesoftmax as osm
from contract import DEVICE, PLANS, forced
from loss_formula import expected_tokens
from onlinesoftmax.core.call import Call, Settings
from onlinesoftmax.core.options import ScoreOptions
from onlinesoftmax.core.task import Choice
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.torch.several_tokens import gradient_of_tokens

COLS = 13

# (shape of the logits, dimension of the tokens, tokens of each row)
SHAPES = [((COLS,), 0, 3), ((5, COLS), -1, 1), ((5, COLS), 1, 4), ((3, COLS, 4), 1, 3), ((COLS, 6), 0, 2)]

OPTIONS: list[dict[str, Any]] = [
    {}, {"scale": -0.7}, {"softcap": 3.0, "mask": True}, {"scale": 0.5, "mask": True, "entropy": False},
    {"ignore_index": 2, "softcap": 4.0, "scale": "rows"},
]  # fmt: skip


def some_tokens(shape: tuple[int, ...], dim: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and an index with a token twice in a row and one out of range."""
    generator = torch.Generator().manual_seed(len(shape) + tokens)
    x = (3 * torch.randn(shape, generator=generator)).to(DEVICE, dtype)
    index = torch.randint(COLS, (*shape[: dim % x.dim()], tokens, *shape[dim % x.dim() + 1 :]), generator=generator)
    last = index.movedim(dim, -1)
    last[..., -1] = last[..., 0]
    if tokens > 2:
        last[(0,) * (last.dim() - 1)][1] = COLS
    return x, index.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_several_tokens_are_as_written_by_hand(how: dict[str, Any], dtype: torch.dtype) -> None:
    for (shape, dim, tokens), given in itertools.product(SHAPES, OPTIONS):
        options = dict(given)
        x, index = some_tokens(shape, dim, tokens, dtype)
        if options.get("mask"):
            options["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.7
        if options.get("scale") == "rows":
            options["scale"] = torch.linspace(-1, 2, x.select(dim, 0).numel(), device=DEVICE, dtype=dtype)
            options["scale"] = options["scale"].view_as(x.select(dim, 0)).unsqueeze(dim)
        x.requires_grad_()
        found = osm.token_logprobs(x, index, dim, **options, **how)
        entropy = options.pop("entropy", True)
        assert (found.entropy is not None) == entropy
        assert found.logprob.shape == index.shape
        assert found.lse.shape == x.select(dim, 0).shape
        generator = torch.Generator().manual_seed(2)
        results = [y for y in found if y is not None]
        dys = [torch.rand(y.shape, generator=generator, dtype=torch.float64).to(y) for y in results]
        (dx,) = torch.autograd.grad(results, x, dys)
        named = [dy.double().cpu().numpy() for dy in dys]
        if not entropy:
            named.insert(1, np.zeros(found.lse.shape))
        if "mask" in options:
            options["mask"] = options["mask"].cpu().numpy()
        if isinstance(options.get("scale"), torch.Tensor):
            options["scale"] = options["scale"].double().cpu().numpy()
        exact = expected_tokens(x.detach().double().cpu().numpy(), index.cpu().numpy(), dim, named, **options)
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        for name, y in zip(("logprob", "entropy", "lse"), found, strict=True):
            if y is not None:
                # A rounding error of numbers of the size of the scores, which are below 16 in magnitude.
                np.testing.assert_allclose(y.detach().double().cpu().numpy(), getattr(exact, name), 0, 16 * eps)
        assert dx.dtype == dtype
        rounding = UNITS * torch.finfo(dtype).eps * np.abs(exact.gradient)
        error = np.abs(dx.double().cpu().numpy() - exact.gradient)
        assert (error <= rounding + 64 * eps).all(), (shape, given, error.max())


def test_one_token_of_a_list_is_as_the_token_alone(path: dict[str, str]) -> None:
    x = torch.randn(6, COLS, device=DEVICE, requires_grad=True)
    index = torch.randint(COLS, (6,), device=DEVICE)
    one = osm.token_logprobs(x, index, **path)
    listed = osm.token_logprobs(x, index[:, None], **path)
    torch.testing.assert_close(listed.logprob[:, 0], one.logprob)
    assert torch.equal(listed.lse, one.lse)
    none = osm.token_logprobs(x, index[:, None][:, :0], **path)
    assert none.logprob.shape == (6, 0)
    assert torch.equal(none.lse, one.lse)
    (dx,) = torch.autograd.grad(none.lse.sum(), x)
    torch.testing.assert_close(dx, x.detach().softmax(1))


def test_a_sure_token_among_several_keeps_its_gradient(path: dict[str, str]) -> None:
    """In bfloat16 p = 0.999 rounds to 1: p - 1 must be computed before it is rounded."""
    x = torch.zeros(2, 16, dtype=torch.bfloat16, device=DEVICE)
    x[:, 3] = 9.5
    x.requires_grad_()
    index = torch.tensor([[3, 5], [1, 3]], device=DEVICE)
    (dx,) = torch.autograd.grad(osm.token_logprobs(x, index, **path).logprob[[0, 1], [0, 1]].sum(), x)
    exact = -x.detach().double().softmax(1)
    exact[:, 3] += 1
    assert ((dx.double() - exact).abs() <= torch.finfo(torch.bfloat16).eps * exact.abs()).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_an_ignored_index_has_no_logprob_and_no_gradient(path: dict[str, str], dtype: torch.dtype) -> None:
    x = torch.randn(5, COLS, device=DEVICE, requires_grad=True)
    index = torch.tensor([1, 200, 4, 200, 1], device=DEVICE).to(dtype)
    found = osm.token_logprobs(x, index, ignore_index=200, **path)
    assert torch.equal(found.logprob == 0, index == 200)
    (dx,) = torch.autograd.grad(found.logprob.sum(), x, retain_graph=True)
    assert torch.equal((dx == 0).all(1), index == 200)
    # The other results of an ignored row are those of any row.
    (dx,) = torch.autograd.grad(found.lse.sum(), x)
    torch.testing.assert_close(dx, x.detach().softmax(1))
    # No element of this dtype can be -100.
    assert osm.token_logprobs(x, index.clamp(max=4), ignore_index=-100, **path).logprob.ne(0).all()
    osm.token_logprobs(x, index, ignore_index=200, check=True, **path)
    with pytest.raises(IndexError, match="index is 200"):
        osm.token_logprobs(x, index, ignore_index=0, check=True, **path)


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_rows_whose_incoming_gradients_are_0_may_hold_nan(wanted: tuple[int, ...]) -> None:
    """`wanted` names the results with a gradient: logprob, entropy, lse."""
    x = torch.randn(3, COLS, device=DEVICE)
    x[1] = torch.nan
    x.requires_grad_()
    index = torch.tensor([[1, 4], [0, 2], [2, 2]], device=DEVICE)
    found = osm.token_logprobs(x, index, backend="triton")
    dys = [torch.ones_like(found[i]) for i in wanted]
    for dy in dys:
        dy[1] = 0.0
    (dx,) = torch.autograd.grad([found[i] for i in wanted], x, dys, retain_graph=True)
    assert (dx[1] == 0).all()
    assert dx.isfinite().all()
    # A gradient that is not 0 meets the NaN of the row.
    (dx,) = torch.autograd.grad([found[i] for i in wanted], x, [torch.ones_like(dy) for dy in dys])
    assert dx[1].isnan().all()
    assert dx[[0, 2]].isfinite().all()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_several_tokens_compile_and_differentiate_twice(path: dict[str, str]) -> None:
    x = torch.randn(2, 4, device=DEVICE, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[1, 1, 3], [0, 2, 9]], device=DEVICE)

    def function(x: torch.Tensor) -> Any:
        found = osm.token_logprobs(2 * x, index, ignore_index=9, **path)
        return (found.logprob**2).sum() + (found.entropy * found.lse).sum()

    ours, compiled = function(x), torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, ours)
    (dx,) = torch.autograd.grad(ours, x)
    torch.testing.assert_close(torch.autograd.grad(compiled, x)[0], dx)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("plan", PLANS)
def test_the_entropy_of_large_scores_keeps_its_digits(plan: str) -> None:
    """A number that all scores of a row have in common changes no probability."""
    shape, dim = ((2, 37, 16), 1) if plan == "triton/column" else ((4, 1001), -1)
    x = (1e4 + torch.randn(shape, generator=torch.Generator().manual_seed(3))).to(DEVICE).requires_grad_()
    index = torch.zeros_like(x.select(dim, 0), dtype=torch.long)
    exact_x = x.detach().double().requires_grad_()
    log_p = exact_x.log_softmax(dim)
    exact = -(log_p * log_p.exp()).sum(dim)
    found = osm.token_logprobs(x, index, dim, **forced(plan)).entropy
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    dy = torch.ones_like(exact)
    dx, exact_dx = gradient(found, x, dy.float()), gradient(exact, exact_x, dy)
    torch.testing.assert_close(dx.double(), exact_dx, rtol=0, atol=1e-6 * float(exact_dx.abs().max()))


def test_without_the_entropy() -> None:
    x, index = torch.randn(3, 9, device=DEVICE, requires_grad=True), torch.tensor([0, 8, 4], device=DEVICE)
    found = osm.token_logprobs(x, index, entropy=False, **HOW)
    assert found.entropy is None
    theirs = x.log_softmax(-1).gather(1, index[:, None])[:, 0]
    torch.testing.assert_close(found.logprob, theirs)
    ones = torch.ones(3, device=DEVICE)
    torch.testing.assert_close(gradient(found.logprob, x, ones), gradient(theirs, x, ones))


def test_rows_without_an_incoming_gradient_may_hold_nan() -> None:
    x = torch.randn(3, 8, device=DEVICE)
    x[1] = torch.nan
    x.requires_grad_()
    found = osm.token_logprobs(x, torch.tensor([1, 0, 2], device=DEVICE), **HOW)
    dy = torch.tensor([1.0, 0.0, 2.0], device=DEVICE)
    (dx,) = torch.autograd.grad(list(found), x, [dy, dy, dy])
    assert (dx[1] == 0).all()
    assert dx.isfinite().all()


@pytest.mark.parametrize("index", [torch.zeros(2, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)], ids=str)
def test_empty_rows(index: torch.Tensor) -> None:
    """The entropy of an empty row is the sum over nothing: 0, and not -0."""
    found = osm.token_logprobs(torch.ones(2, 0, device=DEVICE), index.to(DEVICE))
    assert found.logprob.isnan().all()
    assert (found.lse == -torch.inf).all()
    assert found.entropy.tolist() == [0.0, 0.0]
    assert not found.entropy.signbit().any()


def test_batch_invariant_log_probabilities_ignore_strides_and_alignment() -> None:
    x, index = torch.randn(1001, device=DEVICE)[1:].view(1, 1000), torch.tensor([7], device=DEVICE)
    options: dict[str, Any] = {"batch_invariant": True, **HOW}
    for same in (x.clone(), x.t().contiguous().t(), x.expand(1, 1000)):
        for ours, want in zip(
            osm.token_logprobs(same, index, **options), osm.token_logprobs(x, index, **options), strict=True
        ):
            assert torch.equal(ours, want)


def test_a_scale_that_requires_a_gradient_is_refused() -> None:
    x, index = torch.randn(3, 9, device=DEVICE), torch.tensor([0, 8, 4], device=DEVICE)
    scale = torch.tensor(0.5, device=DEVICE, requires_grad=True)
    for backend in (None, "eager"):
        with pytest.raises(RuntimeError, match=r"scale requires a gradient.*multiply the logits"):
            osm.token_logprobs(x, index, scale=scale, backend=backend)
    with torch.no_grad():
        found = osm.token_logprobs(x, index, scale=scale)
    torch.testing.assert_close(found.lse, (0.5 * x).logsumexp(-1))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("options", [None, ScoreOptions(scale=0.7, softcap=3.0)], ids=str)
def test_gradient_of_distinct_tokens_and_a_target_is_that_of_pytorch(dim: int, options: ScoreOptions | None) -> None:
    x = torch.randn(5, COLS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    target = torch.stack([x[0].argmax(), x[1].argmin(), torch.tensor(COLS), torch.tensor(-1), x[4].argmax()])
    x = (x if dim else x.T).contiguous().requires_grad_()
    given = {} if options is None else {"scale": options.scale, "softcap": options.softcap}
    found = osm.topk_logprobs(x, 4, target=target, dim=dim, **given)
    names = ("values", "logprobs", "target_logprob", "lse")
    dys = {name: torch.linspace(-1, 2, (t := getattr(found, name)).numel()).double().view_as(t) for name in names}
    (want,) = torch.autograd.grad([getattr(found, name) for name in names], x, [*dys.values()])
    saved = {"m": found.values.select(dim, 0), "l": (-found.logprobs.select(dim, 0)).exp()}
    here = {name: t.detach().to(DEVICE, torch.float32) for name, t in {"x": x, **saved, **dys}.items()}
    call = Call(OPERATIONS["token_logprobs"], here["x"], Settings(dim, choice=Choice("triton")), options)
    states = {name: here[name] for name in ("x", "m", "l")}
    given_dys = {name: here[name] for name in names}
    got = gradient_of_tokens(call, states, found.indices.to(DEVICE), target.to(DEVICE), given_dys)
    assert torch.allclose(got.cpu().double(), want, atol=2e-6)
