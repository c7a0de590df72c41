"""The head of a language model and its loss in one, beside the same formulas on all logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import onlinesoftmax as osm
from onlinesoftmax.core.task import Choice
from onlinesoftmax.linear import plans, rows, tokens

Tensor = torch.Tensor

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOKENS, HIDDEN, CLASSES = (3, 5), 7, 11

MEMORY = {"stored": None, "tokens": 8 * 11 * 8, "columns": 15 * 4 * 8 + 60}
"""Bytes with which small problems take each plan."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"TOKEN_TILE": 7, "COLUMN_TILE": 1, "FEWEST_TOKENS": 7, "FEWEST_COLUMNS": 4, "COLUMN_BYTES": 1}
    for name, value in small.items():
        monkeypatch.setattr(plans, name, value)
    problem = plans.problem_of("linear_cross_entropy", (15, HIDDEN, CLASSES), "float64", (True, True, True))
    assert [plans.plan_of(problem, memory).name for memory in MEMORY.values()] == list(MEMORY)


def head(dtype: torch.dtype = torch.float64, bias: bool = True, seed: int = 0) -> tuple[Tensor, ...]:
    """(input, weight, bias, target); one target is ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (*TOKENS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)
    x, w, b = (torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes)
    target = torch.randint(0, CLASSES, TOKENS, generator=generator).to(DEVICE)
    target[1, 2] = -100
    return x, w, b if bias else None, target  # type: ignore[return-value]


def logits_of(x: Tensor, w: Tensor, b: Tensor | None, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    z = functional.linear(x, w, b) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def expected(
    x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, *, reduction: str = "mean", z_loss: float = 0.0,
    token_weight: Tensor | None = None, scale: float = 1.0, softcap: float | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """The loss on all logits."""
    z, soft = logits_of(x, w, b, scale, softcap), target.is_floating_point()
    y = functional.cross_entropy(
        z.movedim(-1, 1), target.movedim(-1, 1) if soft else target, reduction="none", **kwargs
    )
    counts = torch.ones_like(y) if soft else (target != -100).to(y.dtype)
    y = y + z_loss * z.logsumexp(-1) ** 2 * counts
    weights = kwargs.get("weight")
    divisor = counts.sum() if weights is None or soft else (weights[target.clamp(min=0)] * counts).sum()
    y = y if token_weight is None else y * token_weight
    return {"none": y, "sum": y.sum(), "mean": y.sum() / divisor}[reduction]


def same_with_gradients(ours: Tensor, theirs: Tensor, inputs: Any, seed: int = 1) -> None:
    """The results and the gradients in `inputs` agree to the last digits of float64."""
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(seed)).to(theirs)
    found = (torch.autograd.grad(y, inputs, dy) for y in (ours, theirs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01, "scale": 0.7},
    "softcap": {"softcap": 3.0, "scale": -1.3},
    "weight": {"weight": torch.arange(1.0, 12.0, dtype=torch.float64, device=DEVICE)},
    "token_weight": {"token_weight": torch.arange(15.0, dtype=torch.float64, device=DEVICE).reshape(TOKENS)},
    "everything": {
        "label_smoothing": 0.2, "z_loss": 0.02, "softcap": 4.0,
        "weight": torch.arange(1.0, 12.0, dtype=torch.float64, device=DEVICE) / 11,
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
        memory = MEMORY[plan] if plan != "columns" or options in ("plain", "z_loss", "softcap") else MEMORY["tokens"]
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

    options = {"scale": 0.9, "softcap": 5.0}
    for i in range(3):
        ours = osm.linear_token_logprobs(x, w, known, linear_bias=b, memory=MEMORY[plan], **options)
        assert (ours.logprob <= 0).all()
        same_with_gradients(ours[i], theirs(b, **options)[i], [x, w, b])
    ours = osm.linear_token_logprobs(x, w, target, ignore_index=-100, memory=MEMORY[plan])
    assert ours.logprob[1, 2] == 0
    logprob, entropy, lse = theirs(None)
    kept = logprob * (target != -100)
    same_with_gradients(sum(t.sum() for t in ours), kept.sum() + entropy.sum() + lse.sum(), [x, w])  # type: ignore[arg-type]


def clipped(logprob: Tensor, entropy: Tensor, lse: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """PPO's loss of a token, with an entropy bonus and a penalty of lse."""
    ratio = (logprob - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.01 * entropy + 1e-3 * lse * lse


@pytest.mark.parametrize("plan", ["stored", "tokens"])
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


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("plan", MEMORY)
def test_an_ignored_token_may_hold_nan(plan: str, reduction: Any) -> None:
    x, w, b, target = head()
    clean, w2, _, _ = head()
    with torch.no_grad():
        x[1, 2] = torch.nan
        clean[1, 2] = 0.0
    ours = osm.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction, memory=MEMORY[plan])
    theirs = osm.linear_cross_entropy(clean, w2, target, linear_bias=b, reduction=reduction, memory=MEMORY[plan])
    torch.testing.assert_close(ours, theirs)
    for a, c in zip(
        torch.autograd.grad(ours.sum(), [x, w, b], retain_graph=True),
        torch.autograd.grad(theirs.sum(), [clean, w2, b]),
        strict=True,
    ):
        torch.testing.assert_close(a, c)


def test_an_ignored_nan_has_no_square_and_narrow_targets_select_their_class() -> None:
    """z_loss squares the lse of the columns' statistics; 255 columns fit uint8, and 256 do not."""
    x, w, b, target = head()
    with torch.no_grad():
        x[1, 2] = torch.nan
    y = osm.linear_cross_entropy(x, w, target, linear_bias=b, z_loss=0.1, memory=MEMORY["columns"])
    assert all(g.isfinite().all() for g in torch.autograd.grad(y, [x, w, b]))
    x, w = (torch.randn(300, 3, dtype=torch.float64, device=DEVICE).requires_grad_() for _ in range(2))
    narrow = (torch.arange(300, device=DEVICE) % 256).to(torch.uint8)
    for memory in (None, 300 * 8 * 64 + 300 * 3 * 8):
        ours = osm.linear_cross_entropy(x, w, narrow, memory=memory)
        same_with_gradients(ours, functional.cross_entropy(x @ w.t(), narrow.long()), [x, w])


def test_no_grad_computes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _, target = head()
    monkeypatch.setattr(tokens, "add_product", lambda *_: pytest.fail("a gradient is computed"))
    with torch.no_grad():
        assert not osm.linear_cross_entropy(x, w, target).requires_grad


def test_a_frequent_class_does_not_overflow_float16() -> None:
    x = torch.full((8192, 4), 12.0, device=DEVICE, dtype=torch.float16, requires_grad=True)
    w = torch.zeros(3, 4, device=DEVICE, dtype=torch.float16, requires_grad=True)
    y = osm.linear_cross_entropy(x, w, torch.zeros(8192, dtype=torch.int64, device=DEVICE))
    (dw,) = torch.autograd.grad(y, w)
    torch.testing.assert_close(dw[:, 0].float(), torch.tensor([-8.0, 4.0, 4.0], device=DEVICE), rtol=1e-3, atol=0)


def test_everything_ignored_is_nan_without_a_gradient() -> None:
    x, w, b, target = head()
    y = osm.linear_cross_entropy(x, w, torch.full_like(target, -100), linear_bias=b)
    assert y.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(y, [x, w, b]))


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("classes", [1, 11])
def test_small_sizes(count: int, classes: int) -> None:
    x = torch.randn(count, 3, device=DEVICE, requires_grad=True)
    w, target = (
        torch.randn(classes, 3, device=DEVICE, requires_grad=True),
        torch.zeros(count, dtype=torch.int64, device=DEVICE),
    )
    for reduction in ("mean", "sum", "none"):
        y = osm.linear_cross_entropy(x, w, target, reduction=reduction)  # type: ignore[arg-type]
        torch.testing.assert_close(y, functional.cross_entropy(x @ w.t(), target, reduction=reduction), equal_nan=True)
        assert all(g.shape == t.shape for g, t in zip(torch.autograd.grad(y.sum(), [x, w]), (x, w), strict=True))
    y = osm.linear_token_loss(x, w, target, lambda logprob, *_: -logprob)
    torch.testing.assert_close(y, functional.cross_entropy(x @ w.t(), target), equal_nan=True)
    assert osm.linear_token_logprobs(x, w, target).lse.shape == (count,)


def test_frozen_tensors_cost_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _, target = head()
    made: list[tuple[int, ...]] = []
    real = torch.mm

    def counted(a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
        made.append(tuple(kwargs["out"].shape) if "out" in kwargs else ())
        return real(a, b, **kwargs)

    monkeypatch.setattr(torch, "mm", counted)
    for frozen, count in (((), 2), ((0,), 1), ((1,), 2), ((0, 1), 1)):
        made.clear()
        tensors = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate((x, w))]
        y = osm.linear_cross_entropy(*tensors, target)
        # The product for the gradient of the weight is an addmm.
        assert len(made) == count
        assert y.requires_grad == (len(frozen) < 2)


def test_a_mean_in_float16_keeps_small_gradients() -> None:
    """With a scaled loss, the gradient of a mean over many tokens is as exact as that of a sum."""
    generator = torch.Generator().manual_seed(0)
    x, w = (
        (torch.randn(n, 8, generator=generator) / 3).to(DEVICE, torch.float16).requires_grad_() for n in (4096, 1000)
    )
    target = torch.randint(0, 10, (4096,), generator=generator).to(DEVICE)
    # Classes that are no target: float16 has no number as small as 1 / 4096 of their probability.
    bias = torch.where(torch.arange(1000, device=DEVICE) < 10, 0.0, -8.0).half()
    leaf = w.detach().double().requires_grad_()
    z = x.detach().double() @ leaf.t() + bias.double()
    exact = torch.autograd.grad(functional.cross_entropy(z, target) * 1024.0, leaf)[0][10:]
    losses = (
        osm.linear_cross_entropy(x, w, target, linear_bias=bias),
        osm.linear_token_loss(x, w, target, lambda logprob, *_: -logprob, linear_bias=bias),
    )
    for y in losses:
        ours = torch.autograd.grad(y.float() * 1024.0, w)[0][10:]
        assert (ours.double() - exact).norm() / exact.norm() < 1e-2
    y = osm.linear_cross_entropy(x, w, torch.full_like(target, -100))
    assert y.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(y, [x, w]))


def test_two_losses_of_one_tied_weight_and_retained_graphs() -> None:
    x, w, b, target = head()
    for which in ("ours", "theirs"):
        made = (
            osm.linear_cross_entropy if which == "ours" else lambda x, w, t, linear_bias: expected(x, w, linear_bias, t)
        )
        y = made(x @ w.t() @ w, w, target, linear_bias=b) + 2 * made(x, w, target, linear_bias=b)
        first = torch.autograd.grad(y, [x, w, b], retain_graph=True)
        again = torch.autograd.grad(y, [x, w, b])
        assert all(map(torch.equal, first, again))
        if which == "ours":
            found = first
    for a, c in zip(found, first, strict=True):
        torch.testing.assert_close(a, c)


def test_what_cannot_be_differentiated_says_so() -> None:
    x, w, _, target = head()
    for y in (osm.linear_cross_entropy(x, w, target), osm.linear_token_logprobs(x, w, target.clamp(min=0)).lse.sum()):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(y, x, create_graph=True)
    y = osm.linear_cross_entropy(x, w, target)
    y.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.backward()


def test_autocast_casts_as_linear_does() -> None:
    x, w, b, target = head(torch.float32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        ours = osm.linear_cross_entropy(x, w, target, linear_bias=b)
        theirs = functional.cross_entropy(functional.linear(x, w, b).flatten(0, 1).float(), target.flatten())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert [g.dtype for g in torch.autograd.grad(ours, [x, w, b])] == [torch.float32] * 3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    x, w, b, target = head()
    compiled = torch.compile(osm.linear_cross_entropy, backend=backend)
    same_with_gradients(
        compiled(x, w, target, linear_bias=b), osm.linear_cross_entropy(x, w, target, linear_bias=b), [x, w, b]
    )
    whole = torch.compile(osm.linear_cross_entropy, backend=backend, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(x, w, target)


@pytest.mark.skipif(GPU, reason="without a GPU, Triton's interpreter runs the kernels")
@pytest.mark.parametrize("plan", MEMORY)
def test_kernels_on_chunks(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a chunk is written over its logits."""
    monkeypatch.setattr(rows, "why_not_kernels", lambda *_: None)
    monkeypatch.setattr(rows, "CHOICE", Choice("triton"))
    x, w, b, target = head()
    given: dict[str, Any] = {"linear_bias": b, "memory": MEMORY[plan], "softcap": 3.0}
    ours = osm.linear_cross_entropy(x, w, target, **given)
    same_with_gradients(ours, expected(x, w, b, target, softcap=3.0), [x, w, b])
    if plan != "columns":
        kept = osm.linear_cross_entropy(x, w, target, return_stats=True, **given)[1]
        z = logits_of(x, w, b, softcap=3.0).flatten(0, 1)
        torch.testing.assert_close(kept.lse.flatten(), z.logsumexp(1))
        assert torch.equal(kept.largest.flatten(), z.argmax(1))

    def stats() -> Any:
        return osm.token_logprobs(logits_of(x, w, b, softcap=3.0), target.clamp(min=0), backend="eager")

    how = {**given, "memory": MEMORY["columns" if plan == "tokens" else plan]}
    found: Any = osm.linear_token_logprobs(x, w, target.clamp(min=0), **how)
    same_with_gradients(sum(t.sum() for t in found), sum(t.sum() for t in stats()), [x, w, b])
    if plan != "columns":
        old, advantage = (torch.randn(TOKENS, dtype=torch.float64) for _ in range(2))
        ours = osm.linear_token_loss(x, w, target, clipped, old, advantage, **given)
        found = stats()
        theirs = clipped(found.logprob, found.entropy, found.lse, old, advantage) * (target != -100)
        same_with_gradients(ours, theirs.sum() / 14, [x, w, b])


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "argument 'linear_weight' must be Tensor", {"linear_weight": 3}),
        (RuntimeError, "linear_weight must have shape", {"linear_weight": torch.zeros(11, 6)}),
        (RuntimeError, "linear_bias must have shape", {"linear_bias": torch.zeros(10)}),
        (RuntimeError, "linear_weight has the dtype", {"linear_weight": torch.zeros(11, 7).half()}),
        (ValueError, "target has shape", {"target": torch.zeros(15, dtype=torch.int64)}),
        (RuntimeError, "target must have an integer dtype", {"target": torch.zeros(3, 5, dtype=torch.bool)}),
        (RuntimeError, "label_smoothing must be between", {"label_smoothing": 1.5}),
        (ValueError, "not a valid value for reduction", {"reduction": "median"}),
        (RuntimeError, "weight must have shape", {"weight": torch.zeros(3)}),
        (ValueError, "token_weight has shape", {"token_weight": torch.zeros(15)}),
        (RuntimeError, "token_weight requires a gradient", {"token_weight": torch.zeros(3, 5, requires_grad=True)}),
        (RuntimeError, "target requires a gradient", {"target": torch.zeros(3, 5, 11, requires_grad=True)}),
        (ValueError, "linear_weight has no elements", {"linear_weight": torch.zeros(0, 7)}),
        (RuntimeError, "dtype must be floating point", {"dtype": torch.int64}),
        (TypeError, "argument 'memory' must be int", {"memory": 1e9}),
        (ValueError, "memory must be a positive number", {"memory": 0}),
        (ValueError, "memory is 10 bytes, and one token", {"memory": 10}),
        (TypeError, "scale must be a number", {"scale": torch.tensor(1.0)}),
        (ValueError, "softcap must be", {"softcap": -1.0}),
    ],
)
def test_mistakes(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"input": torch.zeros(3, 5, 7), "linear_weight": torch.zeros(11, 7)}
    given["target"] = torch.zeros(3, 5, dtype=torch.int64)
    with pytest.raises(error, match=message):
        osm.linear_cross_entropy(**{**given, **change})


def test_a_loss_that_returns_something_else() -> None:
    x, w, _, target = head()
    for wrong in (lambda *_: 1.0, lambda logprob, *_: logprob.sum()):
        with pytest.raises(ValueError, match="loss must return one number for each token"):
            osm.linear_token_loss(x, w, target, wrong)
    with pytest.raises(TypeError, match="'loss' must be a function"):
        osm.linear_token_loss(x, w, target, None)  # type: ignore[arg-type]
