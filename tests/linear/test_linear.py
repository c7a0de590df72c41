"""The head of a language model and its loss in one, beside the same formulas on all logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads import (
    CALLS,
    CLASSES,
    DEVICE,
    GPU,
    HIDDEN,
    MEMORY,
    TOKENS,
    Tensor,
    clipped,
    expected,
    head,
    logits_of,
    same_with_gradients,
)
from torch.nn import functional

import onlinesoftmax as osm
from onlinesoftmax.core.task import Choice
from onlinesoftmax.linear import plans, products, rows
from onlinesoftmax.linear.problem import problem_of

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_the_memory_gives_each_plan() -> None:
    problem = problem_of("linear_cross_entropy", (15, HIDDEN, CLASSES), "float64", (True, True, True))
    found = {name: plans.plan_of(problem, memory) for name, memory in MEMORY.items()}
    assert [(plan.name, plan.chunk) for plan in found.values()] == [("stored", 15), ("tokens", 7), ("columns", 4)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01, "scale": 0.7},
    "softcap": {"softcap": 3.0, "scale": -1.3},
    "scale": {"scale": torch.linspace(-1.0, 2.0, 15, dtype=torch.float64, device=DEVICE).reshape(TOKENS)},
    "weight": {"weight": torch.arange(1.0, 41.0, dtype=torch.float64, device=DEVICE)},
    "token_weight": {"token_weight": torch.arange(15.0, dtype=torch.float64, device=DEVICE).reshape(TOKENS)},
    "everything": {
        "label_smoothing": 0.2, "z_loss": 0.02, "softcap": 4.0,
        "weight": torch.arange(1.0, 41.0, dtype=torch.float64, device=DEVICE) / 40,
        "token_weight": torch.arange(15.0, dtype=torch.float64, device=DEVICE).reshape(TOKENS),
    },
}  # fmt: skip


@pytest.mark.parametrize("plan", MEMORY)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy(plan: str, reduction: Any, options: str) -> None:
    """z_loss with weights is averaged over the tokens that count, so it is compared with a sum."""
    given = OPTIONS[options]
    if options == "everything" and reduction == "mean":
        reduction = "sum"
    for bias in (False, True):
        x, w, b, target = head(bias=bias)
        memory = (
            MEMORY[plan]
            if plan != "columns" or options in ("plain", "z_loss", "softcap", "scale")
            else MEMORY["tokens"]
        )
        ours = osm.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction, memory=memory, **given)
        theirs = expected(x, w, b, target, reduction=reduction, **given)
        same_with_gradients(ours, theirs, [t for t in (x, w, b) if t is not None])


@pytest.mark.parametrize("plan", ["stored", "tokens"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_probabilities(plan: str, reduction: Any) -> None:
    x, w, b, _ = head()
    target = torch.rand(*TOKENS, CLASSES, dtype=torch.float64, device=DEVICE).softmax(-1)
    ours = osm.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction, memory=MEMORY[plan])
    same_with_gradients(ours, expected(x, w, b, target, reduction=reduction), [x, w, b])


@pytest.mark.parametrize("plan", ["stored", "columns"])
def test_token_logprobs(plan: str) -> None:
    """Each result is differentiable, alone and with the others."""
    x, w, b, target = head()
    known = target.clamp(min=0)

    def theirs(bias: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        z = logits_of(x, w, bias, **options)
        log_p = z.log_softmax(-1)
        return log_p.gather(-1, known.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1), z.logsumexp(-1)

    options: dict[str, Any] = {"scale": torch.rand(TOKENS, device=DEVICE).double() + 0.5, "softcap": 5.0}
    for i in range(3):
        ours = osm.linear_token_logprobs(x, w, known, linear_bias=b, memory=MEMORY[plan], **options)
        assert (ours.logprob <= 0).all()
        same_with_gradients(ours[i], theirs(b, **options)[i], [x, w, b])
    ours = osm.linear_token_logprobs(x, w, target, ignore_index=-100, memory=MEMORY[plan])
    assert ours.logprob[1, 2] == 0
    logprob, entropy, lse = theirs(None)
    kept = logprob * (target != -100)
    same_with_gradients(sum(t.sum() for t in ours), kept.sum() + entropy.sum() + lse.sum(), [x, w])  # type: ignore[arg-type]


def test_the_backward_pass_knows_lse_in_more_than_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With logits near 20 and lse in float32, the error of the input's gradient was 2.9 times PyTorch's."""
    monkeypatch.setattr(plans, "FEWEST_COLUMNS", 512)
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator).to(DEVICE) for shape in ((64, 64), (3000, 64), (64,)))
    target, b = torch.arange(64, device=DEVICE), torch.full((3000,), 20.0, device=DEVICE)

    def gradients(dtype: torch.dtype, memory: int | None) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, 0.3 * w)]
        if memory is None:
            log_p = logits_of(*leaves, b.to(dtype)).log_softmax(-1)
            y = log_p[target, target], -(log_p.exp() * log_p).sum(-1)
        else:
            y = osm.linear_token_logprobs(*leaves, target, linear_bias=b, memory=memory)[:2]
        return list(torch.autograd.grad((y[0] * dy + y[1] * dy.flip(0)).sum(), leaves))

    exact = gradients(torch.float64, None)
    for found in zip(exact, gradients(torch.float32, 200_000), gradients(torch.float32, None), strict=True):
        ours, theirs = ((g - found[0]).abs().max() for g in found[1:])
        assert ours <= 1.5 * theirs


@pytest.mark.parametrize("plan", MEMORY)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_token_loss(plan: str, reduction: str) -> None:
    x, w, b, target = head()
    old, advantage = (torch.randn(TOKENS, dtype=torch.float64, device=DEVICE) for _ in range(2))
    ours = osm.linear_token_loss(
        x, w, target, clipped, old, advantage, linear_bias=b, reduction=reduction, memory=MEMORY[plan]
    )
    found = osm.token_logprobs(logits_of(x, w, b), target.clamp(min=0), backend="eager")
    theirs = clipped(found.logprob, found.entropy, found.lse, old, advantage) * (target != -100)  # type: ignore[arg-type]
    same_with_gradients(ours, theirs.sum() / (14 if reduction == "mean" else 1), [x, w, b])


def test_statistics() -> None:
    x, w, b, target = head()
    loss, ours = osm.linear_cross_entropy(x, w, target, linear_bias=b, z_loss=0.1, return_stats=True)
    want, theirs = osm.cross_entropy(logits_of(x, w, b).flatten(0, 1), target.flatten(), z_loss=0.1, return_stats=True)
    torch.testing.assert_close(loss, want)
    for a, c in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.flatten(), c)


def test_a_module_holds_the_head_as_pytorch_does() -> None:
    x, _, b, target = head()
    module = osm.nn.LinearCrossEntropyLoss(7, 40, bias=True, weight=b.detach().exp(), z_loss=0.01, reduction="sum")
    module = module.to(DEVICE, torch.float64)
    assert list(module.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    w, bias = module.linear.weight, module.linear.bias
    weights = torch.rand(TOKENS, dtype=torch.float64, device=DEVICE)
    given: dict[str, Any] = {"reduction": "sum", "z_loss": 0.01, "weight": module.weight, "token_weight": weights}
    same_with_gradients(module(x, target, token_weight=weights), expected(x, w, bias, target, **given), [x, w, bias])
    y, module.ignore_index = module(x, target), None
    assert torch.equal(module(x, target), y)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        theirs = torch.nn.LinearCrossEntropyLoss(7, 40, bias=True, weight=torch.ones(40, dtype=torch.float64))
        theirs.load_state_dict(module.state_dict())
    ones = torch.ones(3)
    mistakes: list[dict[str, Any]] = [{"weight": ones}, {"weight": 1.0}, {"scale": ones[0]}, {"softcap": -1.0}]
    for wrong in mistakes:
        with pytest.raises((RuntimeError, TypeError, ValueError), match="LinearCrossEntropyLoss"):
            osm.nn.LinearCrossEntropyLoss(7, 40, **wrong)


@pytest.mark.parametrize("plan", ["stored", "columns"])
def test_results_may_change_before_the_backward_pass(plan: str) -> None:
    x, w, b, target = head()

    def found() -> Any:
        return osm.linear_token_logprobs(x, w, target.clamp(min=0), linear_bias=b, memory=MEMORY[plan])

    y, same = found(), sum(t.sum() for t in found())
    for t in y:
        t.mul_(2)
    for ours, half in zip(*(torch.autograd.grad(z, [x, w, b]) for z in (sum(t.sum() for t in y), same)), strict=True):
        torch.testing.assert_close(ours, 2 * half)


def test_a_row_with_nan_is_nan_with_every_plan() -> None:
    """Also where the target is in a chunk of columns that has nothing but -inf."""
    x, w, b, target = head()
    padded = b.detach().clone()
    padded[:4], padded[9] = -torch.inf, torch.nan
    for plan in ("stored", "columns"):
        y = osm.linear_token_logprobs(x, w, target.clamp(0, 3), linear_bias=padded, memory=MEMORY[plan])
        assert all(t.isnan().all() for t in y)


@pytest.mark.skipif(GPU, reason="without a GPU, Triton's interpreter runs the kernels")
@pytest.mark.parametrize("split", [False, True], ids=["whole products", "the last class apart"])
@pytest.mark.parametrize("plan", MEMORY)
def test_kernels_on_chunks(plan: str, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a chunk is written over its logits; products are split as on a GPU."""
    if split:
        monkeypatch.setattr(products, "has_fast_sizes", lambda _: True)
        monkeypatch.setattr(products, "FEWEST_CLASSES", 3)
        monkeypatch.setattr(products, "row_bytes", lambda classes, itemsize: 48 * itemsize)
    monkeypatch.setattr(rows, "why_not_kernels", lambda *_: None)
    monkeypatch.setattr(rows, "CHOICE", Choice("triton"))
    x, w, b, target = head()
    if split:
        # Rows of 8 numbers are a multiple of 16 bytes.
        w = w.detach().new_zeros(CLASSES, 8)[:, :HIDDEN].copy_(w.detach()).requires_grad_()
    options: dict[str, Any] = {"softcap": 3.0, "scale": torch.linspace(0.5, 2.0, 15).double().reshape(TOKENS)}
    given: dict[str, Any] = {"linear_bias": b, "memory": MEMORY[plan], **options}
    ours = osm.linear_cross_entropy(x, w, target, **given)
    same_with_gradients(ours, expected(x, w, b, target, **options), [x, w, b])
    if plan != "columns":
        kept = osm.linear_cross_entropy(x, w, target, return_stats=True, **given)[1]
        z = logits_of(x, w, b, **options).flatten(0, 1)
        torch.testing.assert_close(kept.lse.flatten(), z.logsumexp(1))
        assert torch.equal(kept.largest.flatten(), z.argmax(1))

    def stats() -> Any:
        return osm.token_logprobs(logits_of(x, w, b, **options), target.clamp(min=0), backend="eager")

    how = {**given, "memory": MEMORY["columns" if plan == "tokens" else plan]}
    found: Any = osm.linear_token_logprobs(x, w, target.clamp(min=0), **how)
    same_with_gradients(sum(t.sum() for t in found), sum(t.sum() for t in stats()), [x, w, b])
    old, advantage = (torch.randn(TOKENS, dtype=torch.float64) for _ in range(2))
    ours = osm.linear_token_loss(x, w, target, clipped, old, advantage, **given)
    found = stats()
    theirs = clipped(found.logprob, found.entropy, found.lse, old, advantage) * (target != -100)
    same_with_gradients(ours, theirs.sum() / 14, [x, w, b])


def test_a_loss_of_16_bits_takes_the_exponentials_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose result has more digits, and statistics, those of float32; the losses of rows are float32 anyway."""
    asked: list[torch.dtype] = []

    def outputs_of(call: Any, outputs: tuple[str, ...]) -> Any:
        asked.append(call.settings.dtype)
        found = of_kernels(call, outputs)
        assert found[0].dtype == torch.float32
        return found

    of_kernels = rows.outputs_of
    monkeypatch.setattr(rows, "outputs_of", outputs_of)
    monkeypatch.setattr(rows, "why_not_kernels", lambda *_: None)
    monkeypatch.setattr(rows, "CHOICE", Choice("triton"))
    x, w, _, target = head(torch.bfloat16)
    for given in ({}, {"dtype": torch.float32}, {"return_stats": True}):
        osm.linear_cross_entropy(x, w, target, **given)  # type: ignore[call-overload]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        osm.linear_cross_entropy(x.float(), w.float(), target)
    assert asked == [torch.bfloat16, torch.float32, torch.float32, torch.float32]


@pytest.mark.parametrize("memory", [None, MEMORY["columns"]])
@pytest.mark.parametrize("bias", [True, False])
def test_log_probabilities_of_a_support(bias: bool, memory: int | None) -> None:
    x, w, b, target = head(bias=bias)
    rows, scale = target.numel(), torch.rand(TOKENS, dtype=torch.float64, device=DEVICE) + 0.5
    z = logits_of(x, w, b)
    # Distinct classes in any order; rows of one, of none, of a class that is none, and of unused places.
    token_ids = z.detach().reshape(rows, -1).argsort(1)[:, ::5].flatten()
    token_ids[17] = CLASSES
    count = torch.tensor([8, 1, 8, 0, 8, *[7] * (rows - 5)], device=DEVICE)
    support = token_ids, torch.cat([count.new_zeros(1), count.cumsum(0)])
    target = target.where(target < 0, token_ids[support[1][:-1]].reshape(TOKENS) % CLASSES)
    target[2, 1] = token_ids[-1]
    given: dict[str, Any] = {"support": support, "ignore_index": -100, "softcap": 20.0}
    ours = osm.linear_token_logprobs(x, w, target, linear_bias=b, scale=scale, memory=memory, **given)
    theirs = osm.token_logprobs(z, target, scale=scale.unsqueeze(-1), **given)
    assert theirs.logprob.isfinite().sum() > rows // 2
    inputs = (x, w) if b is None else (x, w, b)
    for one, other in zip(ours, theirs, strict=True):
        same_with_gradients(one.masked_fill(~other.isfinite(), 0.0), other.masked_fill(~other.isfinite(), 0.0), inputs)
        torch.testing.assert_close(one, other, equal_nan=True)
    with pytest.raises(ValueError, match="support's offsets must have rows"):
        osm.linear_token_logprobs(x, w, target, support=(token_ids, support[1][1:]))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_default_dtype_is_not_that_of_a_loss(reduction: str) -> None:
    x, w, _, target = head()
    x, w = x.detach().float(), w.detach().float()
    torch.set_default_dtype(torch.float64)
    try:
        loss = osm.linear_token_loss(x, w, target, lambda logprob, *_: -logprob, reduction=reduction)
        assert loss.dtype == torch.float32
        assert osm.linear_token_logprobs(x, w, target).logprob.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("lead", [(), (1,), (2, 1, 3), (4, 1, 1, 2)])
def test_any_leading_dimensions(lead: tuple[int, ...], call: str) -> None:
    _, w, b, _ = head()
    x = torch.randn(*lead, 7, dtype=torch.float64, device=DEVICE, requires_grad=True)
    target = torch.randint(40, lead, device=DEVICE)
    same_with_gradients(CALLS[call](x, w, b, target), CALLS[call](x.reshape(-1, 7), w, b, target.reshape(-1)), [x, w])
    found = osm.linear_cross_entropy(x, w, target, reduction="none", return_stats=True)
    assert {t.shape for t in (found[0], *found[1], *osm.linear_token_logprobs(x, w, target))} == {lead}


def test_autocast_casts_as_linear_does() -> None:
    x, w, b, target = head(torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours = osm.linear_cross_entropy(x, w, target, linear_bias=b)
        theirs = functional.cross_entropy(functional.linear(x, w, b).flatten(0, 1).float(), target.flatten())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    wide = [t.detach().bfloat16().double().requires_grad_() for t in (x, w, b)]
    exact = torch.autograd.grad(expected(*wide, target), wide)
    pairs = zip(*(torch.autograd.grad(y, [x, w, b]) for y in (ours, theirs)), exact, strict=True)
    for found, own, value in pairs:
        assert found.dtype == own.dtype == torch.float32
        error, allowed = ((g.double() - value).norm() for g in (found, own))
        assert error <= 1.05 * allowed
