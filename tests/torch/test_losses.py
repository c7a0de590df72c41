"""Cross-entropy and token log-probabilities against PyTorch in float64, and the cases that break other libraries."""

from __future__ import annotations

import itertools
import random
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional

import onlinesoftmax as osm
from contract import DTYPES, PLANS, forced, outliers
from onlinesoftmax.kernels import registry
from onlinesoftmax.verify import INTERPRETER_ULPS
from onlinesoftmax.verify.exact import ulp, wide

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HOW: dict[str, Any] = {} if GPU else {"backend": "triton"}

# Triton's interpreter truncates to bfloat16, and rounds a multiply-add twice.
UNITS = 1 if GPU else INTERPRETER_ULPS["triton"]

LOSS_OPTIONS = {
    "reduction": ("mean", "sum", "none"),
    "weight": (False, True),
    "label_smoothing": (0.0, 0.1),
    "z_loss": (0.0, 0.01),
    "scale": (1.0, -0.5),
    "softcap": (None, 5.0),
}


def combinations(choices: dict[str, tuple[Any, ...]], seed: int, every: bool) -> list[dict[str, Any]]:
    """Every combination, or a few in which every pair of values of two options occurs."""
    product = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    if every:
        return product
    random.Random(seed).shuffle(product)
    chosen, seen = [], set()
    for one in product:
        pairs = set(itertools.combinations(sorted(one.items(), key=str), 2))
        if pairs - seen:
            seen |= pairs
            chosen.append(one)
    return chosen


def expected_losses(x: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The loss by PyTorch's operations in the dtype of x; options are arguments of `cross_entropy`."""
    z = x * options.get("scale", 1.0)
    if options.get("softcap") is not None:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    weight = options.get("weight")
    weight = None if weight is None else weight.to(x.dtype)
    smoothing, reduction = options.get("label_smoothing", 0.0), options.get("reduction", "mean")
    rows = functional.cross_entropy(z, target, weight, reduction="none", label_smoothing=smoothing)
    dim = 1 if x.dim() > 1 else 0
    counts = target != -100
    rows = rows + options.get("z_loss", 0.0) * (z.logsumexp(dim) ** 2).where(counts, 0.0)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    of_row = counts.to(x.dtype) if weight is None else weight[target.where(counts, 0)].where(counts, 0.0)
    return rows.sum() / of_row.sum()


def gradient(y: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    (dx,) = torch.autograd.grad(y, x, dy.to(y.dtype))
    return dx


def assert_as_good(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, size: float = 0.0) -> None:
    """PyTorch's largest error and a unit in the last place, of the result or of a number of this size in float32."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    found, other, want = wide(ours.detach()), wide(theirs.detach()), wide(exact.detach())
    error, allowed = abs(found - want), abs(other - want).max(initial=0)
    unit = ulp(want, ours.dtype) + size * torch.finfo(torch.promote_types(ours.dtype, torch.float32)).eps
    # The exact values are float64, so beside float64 results they have rounding errors of the same size.
    unit = UNITS * unit * (2 if ours.dtype == torch.float64 else 1)
    assert (error <= allowed + unit).all(), f"error {error.max():.3e}, PyTorch's own {allowed:.3e}"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradients(plan: str, dtype: torch.dtype) -> None:
    strategy = plan.partition("/")[2]
    shape = {"column": (2, 37, 16), "split": (2, 5003), "looped": (2, 3001), "grid": (2, 70001)}.get(strategy, (5, 259))
    seed = DTYPES.index(dtype) + 4 * PLANS.index(plan)
    torch.manual_seed(seed)
    target = torch.randint(shape[1], (shape[0], *shape[2:]))
    target.view(-1)[1] = -100
    target = target.to(DEVICE)
    # Each combination is a kernel to compile, and the strategies share the code that depends on the options.
    for options in combinations(LOSS_OPTIONS, seed, every=plan == "cuda/row"):
        x = outliers(*shape, dtype=dtype, device=DEVICE).requires_grad_()
        weights = torch.rand(shape[1], generator=torch.Generator().manual_seed(3)).to(dtype).to(DEVICE)
        options["weight"] = weights if options["weight"] else None
        ours = osm.cross_entropy(x, target, **options, **forced(plan))
        theirs = expected_losses(x, target, options)
        exact_x = x.detach().double().requires_grad_()
        exact = expected_losses(exact_x, target, options)
        # The terms of the smoothed loss are as large as the largest score.
        assert_as_good(ours, theirs, exact, 4 * float(x.detach().abs().max()))
        dy = torch.rand(exact.shape, dtype=torch.float64, device=DEVICE).to(dtype) + 0.5
        # In float64 the expected p = exp(z - lse) has a rounding error as large as that of lse.
        part = 1.0 if dtype == torch.float64 else 0.1
        size = float(dy.max()) * (2 + part * float(x.detach().abs().max()))
        assert_as_good(gradient(ours, x, dy), gradient(theirs, x, dy), gradient(exact, exact_x, dy.double()), 8 * size)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_token_logprobs_and_gradients(plan: str, dtype: torch.dtype, masked: bool) -> None:
    shape, dim = ((2, 37, 16), 1) if plan == "triton/column" else ((4, 1001), -1)
    x = outliers(*shape, dtype=dtype, device=DEVICE).requires_grad_()
    rows = (*shape[:dim], *shape[dim:][1:]) if dim > 0 else shape[:-1]
    index = torch.randint(shape[dim], rows, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    options: dict[str, Any] = {"scale": 0.7, "softcap": 30.0}
    if masked:
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE) < 0.7
        options["mask"] = mask.scatter(dim, index.unsqueeze(dim), True)

    def by_pytorch(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = 30.0 * torch.tanh(0.7 * x / 30.0)
        z = z.masked_fill(~options["mask"], -torch.inf) if masked else z
        log_p = z.log_softmax(dim)
        entropy = -(log_p.masked_fill(log_p == -torch.inf, 0.0) * log_p.exp()).sum(dim)
        return log_p.gather(dim, index.unsqueeze(dim)).squeeze(dim), entropy, z.logsumexp(dim)

    ours = osm.token_logprobs(x, index, dim, **options, **forced(plan))
    narrow = x.detach().float().requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    theirs, exact = by_pytorch(narrow), by_pytorch(exact_x)
    for found, other, want in zip(ours, theirs, exact, strict=True):
        assert_as_good(found, other, want, 4 * float(want.detach().abs().max()))
    dys = [torch.randn(rows, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(3)]
    # All three together, then each alone.
    for chosen in ((0, 1, 2), (0,), (1,), (2,)):
        found, other, want = (
            torch.autograd.grad(
                [ys[i] for i in chosen], leaf, [dys[i].to(ys[i].dtype) for i in chosen], retain_graph=True
            )[0]
            for ys, leaf in ((ours, x), (theirs, narrow), (exact, exact_x))
        )
        assert_as_good(found, other.to(dtype), want, 32 * float(max(dy.abs().max() for dy in dys)))


def test_without_the_entropy() -> None:
    x, index = torch.randn(3, 9, device=DEVICE, requires_grad=True), torch.tensor([0, 8, 4], device=DEVICE)
    found = osm.token_logprobs(x, index, entropy=False, **HOW)
    assert found.entropy is None
    theirs = x.log_softmax(-1).gather(1, index[:, None])[:, 0]
    torch.testing.assert_close(found.logprob, theirs)
    ones = torch.ones(3, device=DEVICE)
    torch.testing.assert_close(gradient(found.logprob, x, ones), gradient(theirs, x, ones))


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 7, 3), (2, 7, 3, 2)])
def test_dimensions_and_strides(shape: tuple[int, ...]) -> None:
    """K-dimensional input, and views of it: no copy is made."""
    for view in (lambda x: x, lambda x: x.transpose(0, -1).contiguous().transpose(0, -1), lambda x: x.expand(x.shape)):
        x = view(torch.randn(shape, device=DEVICE)).requires_grad_()
        rows = (shape[0], *shape[2:]) if len(shape) > 1 else ()
        target = torch.randint(7, rows, device=DEVICE)
        for reduction in ("mean", "none"):
            ours = osm.cross_entropy(x, target, reduction=reduction, **HOW)
            theirs = functional.cross_entropy(x, target, reduction=reduction)
            torch.testing.assert_close(ours, theirs)
            dy = torch.rand_like(theirs)
            torch.testing.assert_close(gradient(ours, x, dy), gradient(theirs, x, dy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pytorchs_own_samples(dtype: torch.dtype) -> None:
    """The inputs with which PyTorch tests its function."""
    pytest.importorskip("expecttest", reason="PyTorch's samples need expecttest, which is not installed")
    from torch.testing._internal.common_methods_invocations import op_db

    operator = next(one for one in op_db if one.name == "nn.functional.cross_entropy")
    taken = 0
    for sample in operator.sample_inputs(DEVICE, dtype, requires_grad=True):
        x, target = sample.input, sample.args[0]
        want = operator(x, *sample.args, **sample.kwargs)
        how = HOW if not target.is_floating_point() and x.numel() else {}
        taken += bool(how) or GPU
        ours = osm.cross_entropy(x, *sample.args, **sample.kwargs, **how)
        torch.testing.assert_close(ours, want, equal_nan=True)
        if want.requires_grad and want.isfinite().all():
            ones = torch.ones_like(want)
            torch.testing.assert_close(gradient(ours, x, ones), gradient(want, x, ones))
    assert taken >= 10


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_integer_targets_of_every_dtype(dtype: torch.dtype) -> None:
    x, target = torch.randn(4, 9, device=DEVICE), torch.tensor([0, 8, 4, 1], device=DEVICE)
    torch.testing.assert_close(osm.cross_entropy(x, target.to(dtype), **HOW), functional.cross_entropy(x, target))
    torch.testing.assert_close(osm.cross_entropy(x, target.to(dtype)), functional.cross_entropy(x, target))


def test_class_probabilities() -> None:
    x, weight = torch.randn(4, 9, device=DEVICE, requires_grad=True), torch.rand(9, device=DEVICE)
    target = torch.rand(4, 9, device=DEVICE).softmax(1).requires_grad_()
    for options in ({}, {"label_smoothing": 0.2}, {"reduction": "none"}, {"reduction": "sum"}):
        ours, theirs = (f(x, target, weight, **options) for f in (osm.cross_entropy, functional.cross_entropy))
        torch.testing.assert_close(ours, theirs)
        dy = torch.ones_like(theirs)
        found, want = (torch.autograd.grad(y, (x, target), dy) for y in (ours, theirs))
        torch.testing.assert_close(found, want)
    z = 3.0 * torch.tanh(x / 3.0)
    penalized = functional.cross_entropy(z, target) + 0.5 * (z.logsumexp(1) ** 2).mean()
    torch.testing.assert_close(osm.cross_entropy(x, target, z_loss=0.5, softcap=3.0), penalized)


def test_a_confident_true_class_keeps_its_gradient() -> None:
    """In bfloat16 p = 0.999 rounds to 1, and a gradient from the rounded p would be 0."""
    x = torch.zeros(2, 16, dtype=torch.bfloat16, device=DEVICE)
    x[:, 3] = 9.5
    x.requires_grad_()
    exact = (x.detach().double().softmax(1) - functional.one_hot(torch.tensor([3, 3], device=DEVICE), 16)).float()
    for reduction in ("sum", "none"):
        y = osm.cross_entropy(x, torch.tensor([3, 3], device=DEVICE), reduction=reduction, **HOW)
        dx = gradient(y, x, torch.ones_like(y)).float()
        assert ((dx - exact).abs() <= torch.finfo(torch.bfloat16).eps * exact.abs()).all()


def test_a_large_common_offset_changes_nothing() -> None:
    x, target = torch.randn(4, 33, device=DEVICE).round(decimals=1), torch.tensor([0, 8, 4, 32], device=DEVICE)
    shifted = x + 1e4
    for options in ({}, {"label_smoothing": 0.3}):
        want = functional.cross_entropy((shifted.double() - 1e4), target, reduction="none", **options)
        found = osm.cross_entropy(shifted, target, reduction="none", **options, **HOW)
        torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=2e-7 if not options else 1e-3)
    assert (osm.token_logprobs(shifted, target, **HOW).logprob <= 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinite_scores_are_as_pytorch_has_them(value: float, smoothing: float) -> None:
    x = torch.randn(4, 40, device=DEVICE)
    x[1, 5] = x[2, 7] = value
    x[3] = value
    x.requires_grad_()
    target = torch.tensor([1, 2, 7, 0], device=DEVICE)
    for reduction in ("none", "sum"):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        ours, theirs = osm.cross_entropy(x, target, **options, **HOW), functional.cross_entropy(x, target, **options)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        dy = torch.ones_like(theirs)
        # PyTorch's sum of a row's gradients, which its log_softmax subtracts, is finite here too.
        torch.testing.assert_close(gradient(ours, x, dy)[0], gradient(theirs, x, dy)[0])


def test_ignored_rows_may_hold_nan() -> None:
    x = torch.randn(3, 8, device=DEVICE)
    x[1] = torch.nan
    x.requires_grad_()
    target = torch.tensor([1, -100, 2], device=DEVICE)
    for reduction in ("mean", "none"):
        y = osm.cross_entropy(x, target, reduction=reduction, z_loss=0.1, label_smoothing=0.1, **HOW)
        dx = gradient(y, x, torch.ones_like(y))
        assert y.isfinite().all()
        assert (dx[1] == 0).all()
        assert dx.isfinite().all()


def test_rows_without_an_incoming_gradient_may_hold_nan() -> None:
    x = torch.randn(3, 8, device=DEVICE)
    x[1] = torch.nan
    x.requires_grad_()
    found = osm.token_logprobs(x, torch.tensor([1, 0, 2], device=DEVICE), **HOW)
    dy = torch.tensor([1.0, 0.0, 2.0], device=DEVICE)
    (dx,) = torch.autograd.grad(list(found), x, [dy, dy, dy])
    assert (dx[1] == 0).all()
    assert dx.isfinite().all()


def test_a_batch_that_is_ignored() -> None:
    x, target = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.full((3,), 5, device=DEVICE)
    ours = osm.cross_entropy(x, target, ignore_index=5, **HOW)
    assert ours.isnan()
    assert functional.cross_entropy(x, target, ignore_index=5).isnan()
    assert (gradient(ours, x, torch.ones((), device=DEVICE)) == 0).all()
    assert osm.cross_entropy(x, target, ignore_index=5, reduction="sum", **HOW) == 0


def test_targets_out_of_range() -> None:
    """No read outside: NaN in that row alone, and no gradient; on a CPU by default PyTorch's error."""
    x, target = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.tensor([8, -3, 2], device=DEVICE)
    y = osm.cross_entropy(x, target, reduction="none", **HOW)
    assert y.isnan().tolist() == [True, True, False]
    dx = gradient(y, x, torch.ones_like(y))
    assert (dx[:2] == 0).all()
    assert (dx[2] != 0).all()
    found = osm.token_logprobs(x, target, **HOW)
    assert found.logprob.isnan().tolist() == [True, True, False]
    assert found.lse.isfinite().all()
    if not GPU:
        with pytest.raises(IndexError, match="out of bounds"):
            osm.cross_entropy(x, target)


def test_the_range_of_the_targets_is_checked_where_asked_for() -> None:
    x, target = torch.randn(2, 8, 3, device=DEVICE), torch.tensor([[1, -100, 2], [0, 8, -3]], device=DEVICE)
    with pytest.raises(IndexError, match=r"target is 8 at position \(1, 1\), which is not in \[0, 8\), and 2 are out"):
        osm.cross_entropy(x, target, check=True, **HOW)
    with pytest.raises(IndexError, match=r"target is 8 at position \(1, 1\)"):
        osm.nn.CrossEntropyLoss(check=True)(x, target)
    inside = target.clamp(max=7).where(target != -3, 5)
    want = functional.cross_entropy(x, inside)
    torch.testing.assert_close(osm.cross_entropy(x, inside, check=True, **HOW), want)
    with pytest.raises(IndexError, match=r"index is -100 at position \(0, 1\)"):
        osm.token_logprobs(x, inside, 1, check=True, **HOW)
    with pytest.raises(IndexError, match=r"index is 9, which is not in \[0, 8\)"):
        osm.token_logprobs(x[0, :, 0], torch.tensor(9, device=DEVICE), check=True, **HOW)
    with pytest.raises(ValueError, match="target has shape"):
        osm.cross_entropy(x, target[:1], check=True)


def test_the_logits_are_not_changed_unless_allowed() -> None:
    h = torch.randn(4, 64, device=DEVICE, requires_grad=True)
    target = torch.randint(64, (4,), device=DEVICE)
    x = 2 * h
    before = x.detach().clone()
    want = gradient(functional.cross_entropy(2 * h, target), h, torch.tensor(3.0))
    torch.testing.assert_close(gradient(osm.cross_entropy(x, target, **HOW), h, torch.tensor(3.0)), want)
    assert torch.equal(x, before)
    x = 2 * h
    loss = osm.cross_entropy(x, target, inplace_backward=True, **HOW)
    assert not torch.equal(x, before)
    torch.testing.assert_close(gradient(loss, h, torch.tensor(3.0)), want)
    x = 2 * h
    other = (x * x).sum()
    loss = osm.cross_entropy(x, target, inplace_backward=True, **HOW) + other
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="a leaf that requires grad"):
        osm.cross_entropy(h, target, inplace_backward=True, **HOW)


def test_derivatives_of_derivatives() -> None:
    x, target = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.tensor([1, -100, 2], device=DEVICE)

    def second(loss: torch.Tensor) -> torch.Tensor:
        (dx,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
        return gradient((dx * dx).sum(), x, torch.tensor(1.0))

    ours = osm.cross_entropy(x, target, reduction="none", label_smoothing=0.1, **HOW)
    torch.testing.assert_close(second(ours), second(functional.cross_entropy(
        x, target, reduction="none", label_smoothing=0.1)))  # fmt: skip
    found = osm.token_logprobs(x, target.clamp(min=0), **HOW)
    log_p = x.log_softmax(1)
    theirs = log_p.gather(1, target.clamp(min=0)[:, None]).sum() - (log_p * log_p.exp()).sum()
    torch.testing.assert_close(second(found.logprob.sum() + found.entropy.sum()), second(theirs))
    reduced = osm.cross_entropy(x, target, **HOW)
    reduced.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran a second time"):
        reduced.backward()


def test_statistics() -> None:
    x, target = torch.randn(3, 8, device=DEVICE), torch.tensor([1, -100, 2], device=DEVICE)
    x[2, 2] = 9.0
    for how in (HOW, {}):
        loss, stats = osm.cross_entropy(x.clone().requires_grad_(), target, z_loss=0.1, return_stats=True, **how)
        lse, log_p = x.logsumexp(1), x.log_softmax(1)
        assert loss.requires_grad
        assert not any(t.requires_grad for t in stats)
        torch.testing.assert_close(stats.lse, lse)
        torch.testing.assert_close(stats.z_loss, torch.where(target == -100, 0.0, 0.1 * lse * lse))
        torch.testing.assert_close(stats.entropy, -(log_p * log_p.exp()).sum(1))
        assert stats.largest.tolist() == x.argmax(1).tolist()
        assert stats.correct.tolist() == [int(x[0].argmax()) == 1, False, True]


# Dynamo itself makes an instance of an autograd function while it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str) -> None:
    x, target = torch.randn(6, 37, device=DEVICE, requires_grad=True), torch.randint(37, (6,), device=DEVICE)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return osm.cross_entropy(2 * x, target, label_smoothing=0.1, z_loss=0.01, softcap=4.0, **HOW)

    def rows(x: torch.Tensor) -> torch.Tensor:
        found = osm.token_logprobs(2 * x, target, **HOW)
        per_row = osm.cross_entropy(2 * x, target, reduction="none", **HOW)
        return found.logprob.sum() + found.entropy.sum() + found.lse.sum() + (per_row * per_row).sum()

    for function in (loss, rows):
        ours, compiled = function(x), torch.compile(function, fullgraph=True, backend=backend)(x)
        torch.testing.assert_close(compiled, ours)
        one = torch.tensor(1.0)
        torch.testing.assert_close(gradient(compiled, x, one), gradient(ours, x, one))


def test_autocast_gives_float32() -> None:
    x, target = torch.randn(3, 8, device=DEVICE, dtype=torch.bfloat16), torch.tensor([1, 0, 2], device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours, theirs = osm.cross_entropy(x, target, **HOW), functional.cross_entropy(x, target)
    assert ours.dtype == theirs.dtype == torch.float32
    # On a GPU PyTorch rounds the logarithms of the probabilities to bfloat16.
    torch.testing.assert_close(ours, functional.cross_entropy(x.float(), target))


def test_batch_invariant_rows_have_the_same_bits() -> None:
    x, target = torch.randn(9, 1000, device=DEVICE), torch.randint(1000, (9,), device=DEVICE)
    options: dict[str, Any] = {"reduction": "none", "batch_invariant": True, **HOW}
    whole = osm.cross_entropy(x, target, **options)
    for i in range(9):
        assert torch.equal(whole[i], osm.cross_entropy(x[i : i + 1], target[i : i + 1], **options)[0])


def test_wrong_arguments_name_themselves() -> None:
    x, target = torch.randn(3, 8, device=DEVICE), torch.tensor([1, 0, 2], device=DEVICE)
    for error, message, arguments, options in (
        (TypeError, "argument 'target' must be Tensor", (x, [1, 0, 2]), {}),
        (RuntimeError, "input must be floating point", (x.long(), target), {}),
        (ValueError, "target has shape", (x, target[:2]), {}),
        (RuntimeError, "target with class probabilities", (x, x[:2]), {}),
        (RuntimeError, "weight must have shape", (x, target, torch.ones(7, device=DEVICE)), {}),
        (RuntimeError, "label_smoothing must be between", (x, target), {"label_smoothing": -0.1}),
        (ValueError, "not a valid value for reduction", (x, target), {"reduction": "median"}),
        (ValueError, "softcap must be positive", (x, target), {"softcap": -1.0}),
        (TypeError, "scale must be a number", (x, target), {"scale": torch.ones((), device=DEVICE)}),
        (osm.PlanError, "unknown backend", (x, target), {"backend": "cudnn"}),
    ):
        with pytest.raises(error, match=message):
            osm.cross_entropy(*arguments, **options)
    with pytest.raises(ValueError, match="index has shape"):
        osm.token_logprobs(x, target[:2])
    with pytest.raises(IndexError, match="Dimension out of range"):
        osm.token_logprobs(x, target, 2)
    with pytest.raises(osm.PlanError, match="class probabilities"):
        osm.cross_entropy(x, x.softmax(1), backend="triton")


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    x = torch.randn(64, 1000, device=DEVICE, requires_grad=True)
    target, weight = torch.randint(1000, (64,), device=DEVICE), torch.rand(1000, device=DEVICE)

    def step() -> None:
        osm.cross_entropy(x, target).backward()
        osm.cross_entropy(x, target, weight, label_smoothing=0.1, z_loss=0.1).backward()
        osm.cross_entropy(x, target, reduction="none").sum().backward()
        found = osm.token_logprobs(x, target)
        (found.logprob.sum() + found.entropy.sum()).backward()

    step()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # The mode warns that it is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, want = torch.cuda.CUDAGraph(), x.grad.clone() * 1.5
    x.grad.zero_()
    with torch.cuda.graph(graph):
        step()
    x.grad.zero_()
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(x.grad, want)


@pytest.mark.gpu
def test_more_than_two_billion_elements(device_memory: None) -> None:
    rows, cols = 17000, 128256
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device=DEVICE)
    target = torch.arange(rows, device=DEVICE)
    x[-1, target[-1]] = 8.0
    x.requires_grad_()
    loss = osm.cross_entropy(x, target, reduction="none")
    want = functional.cross_entropy(x[-1:].float(), target[-1:], reduction="none")
    torch.testing.assert_close(loss[-1:].float(), want, rtol=1e-2, atol=1e-2)
    dx = gradient(osm.cross_entropy(x, target, reduction="sum"), x, torch.ones((), device=DEVICE))
    assert torch.equal(dx.argmin(1), target)


def test_the_module_is_the_function() -> None:
    x, target = torch.randn(4, 8, device=DEVICE), torch.tensor([1, 0, 2, -100], device=DEVICE)
    weight = torch.rand(8, device=DEVICE)
    ours = osm.nn.CrossEntropyLoss(weight, label_smoothing=0.1, z_loss=0.1, softcap=3.0)
    want = osm.cross_entropy(x, target, weight, label_smoothing=0.1, z_loss=0.1, softcap=3.0)
    torch.testing.assert_close(ours(x, target), want)
    assert repr(ours) == "CrossEntropyLoss(z_loss=0.1, softcap=3.0)"
    theirs = torch.nn.CrossEntropyLoss(weight, ignore_index=2, reduction="sum")
    want = theirs(x, target.clamp(min=0))
    assert osm.nn.replace(theirs).cross_entropy == 1
    assert type(theirs) is osm.nn.CrossEntropyLoss
    torch.testing.assert_close(theirs(x, target.clamp(min=0)), want)
    assert ours.state_dict().keys() == theirs.state_dict().keys() == {"weight"}
    with pytest.raises(ValueError, match="softcap must be positive"):
        osm.nn.CrossEntropyLoss(softcap=-1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_a_gradient_is_multiplied_in_place(dtype: torch.dtype, factor: float) -> None:
    wide_dtype = torch.promote_types(dtype, torch.float32)
    for count in (1, 15, 4097, 70001):
        x = torch.randn(count + 8, dtype=torch.float64, device=DEVICE).to(dtype)
        want, before = (factor * x[:count].to(wide_dtype)).to(dtype), x.clone()
        backends = ("cuda", "triton") if GPU else ("triton",)
        for backend, factor_dtype in itertools.product(backends, {wide_dtype, dtype}):
            y = before.clone()
            registry.load(backend).multiply_in_place(y[:count], torch.tensor(factor, dtype=factor_dtype, device=DEVICE))
            torch.testing.assert_close(y[:count], want)
            assert torch.equal(y[count:], before[count:])


def test_the_largest_class_is_that_of_the_scores() -> None:
    x, target = torch.tensor([[1.0, 3.0, 2.0]], device=DEVICE), torch.tensor([0], device=DEVICE)
    _, stats = osm.cross_entropy(x, target, scale=-1.0, return_stats=True, **HOW)
    assert (stats.largest.tolist(), stats.correct.tolist()) == ([0], [True])


def test_batch_invariant_log_probabilities_ignore_strides_and_alignment() -> None:
    x, index = torch.randn(1001, device=DEVICE)[1:].view(1, 1000), torch.tensor([7], device=DEVICE)
    options: dict[str, Any] = {"batch_invariant": True, **HOW}
    for same in (x.clone(), x.t().contiguous().t(), x.expand(1, 1000)):
        for ours, want in zip(
            osm.token_logprobs(same, index, **options), osm.token_logprobs(x, index, **options), strict=True
        ):
            assert torch.equal(ours, want)
