"""Sizes, values, frozen tensors and mistakes that break other heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads import (
    CALLS,
    DEVICE,
    GPU,
    MEMORY,
    PROBLEM_OF,
    Tensor,
    each_call_and_plan,
    expected,
    head,
    same_with_gradients,
)
from torch.nn import functional

import onlinesoftmax as osm
from onlinesoftmax.linear import plans, products
from onlinesoftmax.linear.problem import problem_of

pytestmark = pytest.mark.usefixtures("small_chunks")


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


@pytest.mark.parametrize("plan", ["stored", "columns"])
@pytest.mark.parametrize(
    ("classes", "value"),
    [(slice(0, 4), -torch.inf), (slice(4, 40), -torch.inf), (slice(0, 40), -torch.inf), (5, torch.inf), (9, torch.nan)],
)
def test_infinite_logits(classes: Any, value: float, plan: str) -> None:
    """Chunks have four columns.  A target that is excluded has the log-probability -inf, and a row with +inf none."""
    x, w, b, target = head()
    target = target.clamp(min=0)
    with torch.no_grad():
        b[classes] = value
    found = osm.linear_token_logprobs(x, w, target, linear_bias=b, memory=MEMORY[plan])
    z = functional.linear(x, w, b)
    log_p = z.log_softmax(-1)
    # No class of probability 0 adds to the entropy.
    entropy = -torch.where(z == -torch.inf, 0.0, log_p.exp() * log_p.masked_fill(z == -torch.inf, 0.0)).sum(-1)
    entropy = torch.where(z.logsumexp(-1).isfinite(), entropy, torch.nan)
    theirs = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), entropy, z.logsumexp(-1)
    torch.testing.assert_close(found, theirs, equal_nan=True)
    pairs = [torch.autograd.grad(y[0].sum() + y[1].sum(), [x, w, b]) for y in (found, theirs)]
    torch.testing.assert_close(*pairs, equal_nan=True)


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
    monkeypatch.setattr(products, "_add_product", lambda *_: pytest.fail("a gradient is computed"))
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


@pytest.mark.parametrize(
    ("count", "classes"), [(0, 1), (0, 7), (1, 1), (1, 7), (7, 1), (7, 7), (2, 50257), (1, 151665), (2, 262208)]
)
def test_small_sizes(count: int, classes: int) -> None:
    x, w = (torch.randn(n, 3, dtype=torch.float64, device=DEVICE, requires_grad=True) for n in (count, classes))
    target = torch.arange(count, device=DEVICE) * 6101 % classes
    for reduction in ("mean", "sum", "none"):
        y = osm.linear_cross_entropy(x, w, target, reduction=reduction)  # type: ignore[arg-type]
        theirs = functional.cross_entropy(x @ w.t(), target, reduction=reduction)
        torch.testing.assert_close(y, theirs, equal_nan=True)
        pairs = [torch.autograd.grad(y.sum(), [x, w]) for y in (y, theirs)]
        # PyTorch's gradient of the mean of no tokens is NaN in the weight.
        assert all(a.shape == b.shape and (count == 0 or torch.allclose(a, b)) for a, b in zip(*pairs, strict=True))
    y = osm.linear_token_loss(x, w, target, lambda logprob, *_: -logprob)
    torch.testing.assert_close(y, functional.cross_entropy(x @ w.t(), target), equal_nan=True)
    found = osm.linear_token_logprobs(x, w, target)
    torch.testing.assert_close(-found.logprob, functional.cross_entropy(x @ w.t(), target, reduction="none"))


@each_call_and_plan
def test_gradcheck_and_the_same_bits(call: str, plan: str) -> None:
    x, w, b, target = head()
    given = {"memory": MEMORY[plan], "softcap": 4.0, "scale": torch.linspace(0.5, 1.5, 15, device=DEVICE).reshape(3, 5)}
    assert torch.autograd.gradcheck(lambda *inputs: CALLS[call](*inputs, target, **given), (x, w, b), fast_mode=True)
    runs = [torch.autograd.grad(CALLS[call](x, w, b, target, **given), [x, w, b]) for _ in range(2)]
    assert all(map(torch.equal, *runs))


@each_call_and_plan
def test_padded_classes_and_frozen_tensors(call: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class with the bias -inf does not count.  A gradient that nobody wants has no product."""
    made: list[Any] = []
    for name in ("mm", "addmm"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, real=real, **how: made.append(0) or real(*args, **how))
    x, w, b, target = head()
    target = target.clamp(max=8)
    padded = torch.cat([b[:9], b.new_full((31,), -torch.inf)]).detach().requires_grad_()
    less = [t.detach().requires_grad_() for t in (w[:9], b[:9])]
    for frozen in ((), (0,), (1,), (0, 1, 2)):
        made.clear()
        tensors = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate((x, w, padded))]
        if call == "smoothed":
            # A class with the probability 0 makes a smoothed loss infinite, as PyTorch's.
            tensors[2] = tensors[2].detach().clamp(min=-9.0).requires_grad_(2 not in frozen)
        # Without a gradient of the input, which lends its memory, chunks of tokens need some for a copy of the input.
        memory = MEMORY[plan] if plan != "tokens" or frozen != (0,) else MEMORY[plan] + 15 * 7 * 8
        y = CALLS[call](*tensors, target, memory=memory)
        assert y.requires_grad == (len(frozen) < 3)
        found = torch.autograd.grad(y, [t for t in tensors if t.requires_grad]) if len(frozen) < 3 else ()
        function, *how = PROBLEM_OF[call]
        wanted = tuple([i not in frozen for i in range(3)])
        planned = plans.plan_of(problem_of(function, (15, 7, 40), "float64", wanted, *how), memory)
        assert planned.chunks * planned.products == len(made)
        again = bool(found) and (planned.name == "columns" or call == "smoothed")
        # Columns whose logits stay in the memory of the weight's gradient are not made again.
        held = 16 if call in ("mean", "loss") and plan == "columns" and wanted[1] else 0
        assert planned.products == pytest.approx(1 + wanted[0] + wanted[1] + again * (1 - held / 40))
        if not frozen and call != "smoothed":
            theirs = CALLS[call](x, *less, target)
            torch.testing.assert_close(y, theirs)
            for a, c in zip(found, torch.autograd.grad(theirs, [x, *less]), strict=True):
                torch.testing.assert_close(a[: len(c)], c)
                assert not a[len(c) :].any()


@pytest.mark.parametrize("plan", MEMORY)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_target_out_of_range_is_nan_without_a_gradient(plan: str, reduction: Any) -> None:
    x, w, b, target = head()
    wrong = target.clone()
    wrong[0, 0], wrong[2, 4] = 40, -1
    target[0, 0] = target[2, 4] = -100
    how = {"linear_bias": b, "memory": MEMORY[plan], "reduction": reduction}
    pairs = []
    for each in (wrong, target):
        y = osm.linear_cross_entropy(x, w, each, **how)
        assert y.isnan().sum() == (0 if each is target else 1 if reduction == "sum" else 2)
        pairs.append(torch.autograd.grad(y.sum(), [x, w, b]))
    assert all(map(torch.equal, *pairs))


def test_micro_batches_add_up_and_a_graph_is_retained() -> None:
    x, w, b, target = head()
    whole = torch.autograd.grad(osm.linear_cross_entropy(x, w, target, linear_bias=b, reduction="sum"), [w, b])
    for part in range(3):
        osm.linear_cross_entropy(x[part], w, target[part], linear_bias=b, reduction="sum").backward()
    torch.testing.assert_close((w.grad, b.grad), whole)
    for plan in ("stored", "columns"):
        y = CALLS["logprobs"](x, w, b, target, memory=MEMORY[plan])
        first, again = (torch.autograd.grad(y, [x, w, b], retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, again))


def test_no_logarithm_is_above_0() -> None:
    """One class has all the probability; the logits are large and rounded."""
    x = torch.full((64, 8), 9.3, device=DEVICE, dtype=torch.bfloat16)
    w = torch.linspace(-5, 5, 100, device=DEVICE).unsqueeze(1).expand(100, 8).bfloat16()
    for memory in (None, 64 * 25 * 2 + 8):
        found = osm.linear_token_logprobs(x, w, torch.full((64,), 99, device=DEVICE), memory=memory)
        assert (found.logprob <= 0).all()
        assert (found.entropy >= 0).all()


def test_torch_func_and_batches_of_gradients_say_what_to_call() -> None:
    x, w, b, target = head()
    for call in ("mean", "logprobs", "loss"):

        def f(x: Tensor, call: str = call) -> Any:
            return CALLS[call](x, w, b, target)

        for transform in (torch.func.grad(f), torch.func.vmap(lambda x, f=f: f(x), randomness="error")):
            with pytest.raises(RuntimeError, match="call cross_entropy or token_logprobs on the logits"):
                transform(x.detach())
        with pytest.raises(RuntimeError, match="takes no batch"):
            torch.autograd.grad(f(x), x, torch.ones(3, dtype=torch.float64, device=DEVICE), is_grads_batched=True)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@each_call_and_plan
def test_cuda_graphs(call: str, plan: str) -> None:
    """Forward and backward are captured: they do not wait for the GPU, and read new inputs from the same memory."""
    x, w, b, target = head(torch.float32)
    # The bytes are those of plans in float64.
    memory = MEMORY[plan] and MEMORY[plan] // 2

    def step() -> Any:
        y = CALLS[call](x, w, b, target, memory=memory)
        return y.detach(), *torch.autograd.grad(y, [x, w, b])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.mul_(-0.5)
    graph.replay()
    torch.testing.assert_close(captured, step())


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


def test_a_sum_in_bfloat16_takes_no_buffer_and_has_at_most_twice_the_error() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 64, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_() for n in (512, 100))
    target = torch.randint(0, 100, (512,), generator=generator).to(DEVICE)
    z = functional.linear(x, w).double().detach().requires_grad_()
    (dz,) = torch.autograd.grad(functional.cross_entropy(z, target, reduction="sum"), z)
    exact, quarter = dz.bfloat16().double().t() @ x.detach().double(), 128 * 100 * 2

    def error(memory: int | None, acc_dtype: torch.dtype | None) -> float:
        y = osm.linear_cross_entropy(x, w, target, reduction="sum", memory=memory, acc_dtype=acc_dtype)
        (dw,) = torch.autograd.grad(y, w)
        return ((dw.double() - exact).norm() / exact.norm()).item()

    one, summed = error(None, None), error(quarter, torch.bfloat16)
    assert error(quarter + 4 * w.numel(), None) <= 1.01 * one
    assert 1.3 * one < summed <= 2 * one


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
    torch.testing.assert_close(found, first)


def test_what_cannot_be_differentiated_says_so() -> None:
    x, w, _, target = head()
    for y in (osm.linear_cross_entropy(x, w, target), osm.linear_token_logprobs(x, w, target.clamp(min=0)).lse.sum()):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(y, x, create_graph=True)
    y = osm.linear_cross_entropy(x, w, target)
    y.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.backward()


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "argument 'linear_weight' must be Tensor", {"linear_weight": 3}),
        (RuntimeError, "linear_weight must have shape", {"linear_weight": torch.zeros(40, 6)}),
        (RuntimeError, "linear_bias must have shape", {"linear_bias": torch.zeros(10)}),
        (RuntimeError, "linear_weight has the dtype", {"linear_weight": torch.zeros(40, 7).half()}),
        (ValueError, r"target has shape .*: target\.long\(\)$", {"target": torch.zeros(3, 5)}),
        (RuntimeError, "target must have an integer dtype", {"target": torch.zeros(3, 5, dtype=torch.bool)}),
        (RuntimeError, r"linear_cross_entropy\(\): label_smoothing must be from 0 to 1", {"label_smoothing": 1.5}),
        (TypeError, r"linear_cross_entropy\(\): argument 'z_loss' must be float, not bool", {"z_loss": True}),
        (ValueError, r"linear_cross_entropy\(\): z_loss must be at least 0 and finite", {"z_loss": float("nan")}),
        (ValueError, "not a valid value for reduction", {"reduction": "median"}),
        (RuntimeError, "weight must have shape", {"weight": torch.zeros(3)}),
        (ValueError, "token_weight has shape", {"token_weight": torch.zeros(15)}),
        (RuntimeError, "token_weight requires a gradient", {"token_weight": torch.zeros(3, 5, requires_grad=True)}),
        (RuntimeError, "target requires a gradient", {"target": torch.zeros(3, 5, 40, requires_grad=True)}),
        (ValueError, "linear_weight has no elements", {"linear_weight": torch.zeros(0, 7)}),
        (RuntimeError, "dtype must be floating point", {"dtype": torch.int64}),
        (TypeError, "memory must be an int, a number of bytes", {"memory": 1e9}),
        (ValueError, "memory must be a positive number", {"memory": 0}),
        (ValueError, "memory is 10 bytes, and one token", {"memory": 10}),
        (TypeError, "argument 'acc_dtype' must be torch.dtype", {"acc_dtype": "float32"}),
        (ValueError, "acc_dtype must be torch.float32 or the dtype of the weight", {"acc_dtype": torch.bfloat16}),
        (ValueError, "acc_dtype=torch.float16 would overflow", {"acc_dtype": torch.float16}),
        (ValueError, "scale has shape", {"scale": torch.ones(15)}),
        (RuntimeError, "scale must be floating point", {"scale": torch.ones(3, 5, dtype=torch.int64)}),
        (RuntimeError, "scale requires a gradient", {"scale": torch.ones((), requires_grad=True)}),
        (TypeError, "scale must be a number", {"scale": "1"}),
        (ValueError, "softcap must be", {"softcap": -1.0}),
    ],
)
def test_mistakes(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"input": torch.zeros(3, 5, 7), "linear_weight": torch.zeros(40, 7)}
    given["target"] = torch.zeros(3, 5, dtype=torch.int64)
    with pytest.raises(error, match=message):
        osm.linear_cross_entropy(**{**given, **change})


def test_meta_tensors_have_shapes() -> None:
    x, w, b, target = (t.detach().to("meta").requires_grad_(t.is_floating_point()) for t in head())
    for call in CALLS.values():
        y = call(x, w, b, target)
        assert [g.shape for g in torch.autograd.grad(y, [x, w, b])] == [x.shape, w.shape, b.shape]


def test_what_the_backward_pass_reads_must_not_change_before() -> None:
    x, w, _, target = head()
    weight = torch.rand(40, dtype=torch.float64, device=DEVICE)
    for t in (target, weight):
        y = osm.linear_cross_entropy(x, w, target, weight=weight, label_smoothing=0.1, reduction="none").sum()
        t.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_a_loss_that_reads_a_parameter() -> None:
    x, w, _, target = head()
    parameter = torch.ones((), dtype=torch.float64, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match="loss reads a tensor that requires a gradient"):
        osm.linear_token_loss(x, w, target, lambda logprob, *_: -logprob * parameter.exp())
    y = osm.linear_token_loss(x, w, target, lambda logprob, *_: -logprob * parameter.detach())
    torch.testing.assert_close(y, osm.linear_cross_entropy(x, w, target))


def test_a_loss_that_returns_something_else() -> None:
    x, w, _, target = head()
    for wrong in (lambda *_: 1.0, lambda logprob, *_: logprob.sum(), lambda logprob, *_: logprob * 1j):
        with pytest.raises(ValueError, match="loss must return one number for each token"):
            osm.linear_token_loss(x, w, target, wrong)
    with pytest.raises(TypeError, match="'loss' must be a function"):
        osm.linear_token_loss(x, w, target, None)  # type: ignore[arg-type]
