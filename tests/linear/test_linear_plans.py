"""The plans of heads, and heads of real sizes on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import onlinesoftmax as osm
from onlinesoftmax.lab.bench.inputs import extra_bytes
from onlinesoftmax.linear import plans
from onlinesoftmax.linear.problem import problem_of

GPU = torch.cuda.is_available()
DEVICE = "cuda"

PROBLEM = problem_of("linear_cross_entropy", (8192, 4096, 128256), "bfloat16", (True, True, False))
ROWS = {"waits": True, "cuts": ("tokens",)}


@pytest.mark.parametrize(
    ("change", "memory", "name", "chunk", "products", "needed"),
    [
        # All logits take less than one float32 gradient of the weight and 1.1 GB.
        ({}, None, "stored", 8192, 3, 8192 * 128256 * 2),
        ({"tokens": 16384}, None, "tokens", 8192, 3, (8192 * 2 + 4096 * 4) * 128256),
        ({"hidden": 2304, "classes": 256000}, None, "tokens", 4096, 3, (4096 * 2 + 2304 * 4) * 256000),
        # The last 49472 columns lie in the memory of the weight's gradient; the sum of the input's gradient is float32.
        (
            {"hidden": 2304, "classes": 256000, "in_two": True},
            None,
            "stored",
            8192,
            3,
            8192 * ((256000 - 49472) * 2 + 2304 * 4),
        ),
        # This memory must hold the columns of all tokens.
        ({"tokens": 16384, "in_two": True}, None, "tokens", 8192, 3, (8192 * 2 + 4096 * 4) * 128256),
        # Float16 and one chunk: the weight's gradient is a float32 sum too.
        ({"dtype": "float16", "tokens": 4096}, None, "stored", 4096, 3, (4096 * 2 + 4096 * 4) * 128256),
        # JAX makes all logits again.
        ({"borrows": False}, 1 << 29, "columns", 16064, 4, 16064 * 8192 * 2 + 8192 * 4096 * 4),
        # The memory of the weight's gradient holds 64128 columns, so 4 of the chunks.
        ({}, 1 << 29, "columns", 16000, 4 - 64000 / 128256, 16000 * 8192 * 2 + 8192 * 4096 * 4),
        # With tokens = hidden it holds all columns.
        ({"tokens": 4096}, 200_000_000, "columns", 16064, 3, 16064 * 4096 * 2 + 4096 * 4096 * 4),
        # A chunk would be larger than the columns that fit, 9423, or not as large as it can be by far.
        (
            {"tokens": 4096, "hidden": 768, "classes": 50257},
            137_000_000,
            "columns",
            12608,
            4,
            (12608 * 2 + 768 * 4) * 4096,
        ),
        # The float32 sum is 2.1 GB, and what is left holds 1152 tokens and 1920.
        ({"tokens": 16384}, 2_400_000_000, "columns", 8000, 4 - 32000 / 128256, (8000 * 2 + 4096 * 4) * 16384),
        ({"tokens": 16384}, 2_600_000_000, "tokens", 1920, 3, (1920 * 2 + 4096 * 4) * 128256),
        ({"in_place": True}, None, "tokens", 4096, 3, 4096 * 128256 * 2),
        # No sum of the weight's gradient: a tile of tokens suffices.
        ({"of_weight": False}, 1 << 26, "tokens", 256, 2, 256 * 128256 * 2),
        ({"dtype": "float32"}, 1 << 29, "tokens", 1024, 3, 1024 * 128256 * 4),
        ({"waits": True}, None, "columns", 16064, 4, 16064 * 8192 * 2 + 8192 * 4096 * 4),
        ({"waits": True}, 3 << 30, "stored", 8192, 3, 8192 * 128256 * 2),
        ({**ROWS}, None, "stored", 8192, 4, 8192 * 128256 * 2),
        ({**ROWS, "tokens": 16384}, None, "tokens", 8192, 4, (8192 * 2 + 4096 * 4) * 128256),
        ({"recorded": False, "of_input": False, "of_weight": False}, None, "tokens", 4096, 1, 4096 * 128256 * 2),
        # Without a gradient of the input, a copy of the input has no NaN of ignored tokens.
        ({"of_input": False}, None, "stored", 8192, 2, 8192 * (128256 + 4096) * 2),
        ({"tokens": 0}, None, "stored", 1, 3, 0),
    ],
)
def test_plans(change: dict[str, Any], memory: int | None, name: str, chunk: int, products: float, needed: int) -> None:
    problem = PROBLEM._replace(**change)
    plan, others = plans.plans_of(problem, memory)
    assert plan == plans.plan_of(problem, memory)
    assert (plan.name, plan.chunk, plan.bytes) == (name, chunk, needed)
    assert plan.products == pytest.approx(products)
    held = round((problem.products + problem.recorded - products) * problem.classes) if name == "columns" else 0
    assert plan.apart == (49472 if problem.in_two and name == "stored" else held)
    assert plan.chunks == -(-(problem.classes if name == "columns" else max(problem.tokens, 1)) // chunk)
    assert memory is None or plan.bytes <= memory
    assert {plan.name, *(other.name for other in others)} == {"stored", "tokens", "columns"}
    assert all(other.reason for other in others)


@pytest.mark.parametrize(
    ("change", "memory", "first", "chunk", "chunks"),
    [
        ({"in_place": True}, 600_000_000, 4096, 2048, 3),
        ({"in_place": True, "hidden": 5120, "classes": 152064}, 600_000_000, 3584, 1536, 4),
        # The float32 sum of the weight's gradient is 2.1 GB, and 899 MB are left for logits.
        ({"tokens": 16384}, 3_000_000_000, 6400, 3328, 4),
        # Two chunks are as few as there can be.
        ({"in_place": True}, 1_060_000_000, 0, 4096, 2),
        ({"in_place": True}, 180_000_000, 1792, 640, 11),
        ({"in_place": True, "travels": True}, 600_000_000, 0, 2048, 4),
    ],
)
def test_the_first_chunk_of_tokens_lies_partly_in_the_memory_of_the_gradient(
    change: dict[str, Any], memory: int, first: int, chunk: int, chunks: int
) -> None:
    problem = PROBLEM._replace(**change, in_two=True)
    plan = plans.plan_of(problem._replace(cuts=("tokens",)), memory)
    assert (plan.name, plan.first, plan.chunk, plan.chunks) == ("tokens", first, chunk, chunks)
    assert plan.bytes <= memory
    # The last columns take no more than the place of the others.
    assert first * plan.apart * 2 <= (problem.classes - plan.apart) * problem.hidden * (2 if problem.in_place else 4)
    usual = plans.plan_of(problem._replace(in_two=False, cuts=("tokens",)), memory)
    assert chunks < usual.chunks if first else plan == usual


def test_a_gradient_waits_for_log_probabilities_and_for_losses_of_tokens() -> None:
    sizes, dtype, all_three, none = (2, 3, 4), "float32", (True, True, True), (False, False, False)
    for function, each, wanted, waits in (
        ("linear_cross_entropy", False, all_three, False),
        ("linear_cross_entropy", True, (False, False, True), True),
        ("linear_cross_entropy", True, none, False),
        ("linear_token_logprobs", False, all_three, True),
        ("linear_token_logprobs", False, none, False),
        ("linear_token_loss", False, all_three, False),
    ):
        assert problem_of(function, sizes, dtype, wanted, each).waits == waits


def test_a_loss_of_tokens_has_no_columns_where_its_gradient_is_a_sum() -> None:
    """The sum is that of float16, or of processes; otherwise the logits of columns stay, as for a mean."""
    name, sizes, wanted = "linear_token_loss", (8192, 4096, 128256), (True, True, False)
    plan = plans.plan_of(problem_of(name, sizes, "bfloat16", wanted), 200_000_000)
    assert plan == plans.plan_of(PROBLEM, 200_000_000)
    assert (plan.name, plan.apart) == ("columns", 63488)
    for how in ({"dtype": "float16"}, {"dtype": "bfloat16", "travels": True}):
        assert problem_of(name, sizes, wanted=wanted, **how).cuts == ("tokens",)  # type: ignore[arg-type]


def test_no_plan_fits() -> None:
    for cuts, least in ((("tokens", "columns"), "one token with"), (("columns",), "256 columns of all tokens")):
        with pytest.raises(ValueError, match=f"memory is 100 bytes, and {least}"):
            plans.plan_of(PROBLEM._replace(cuts=cuts), 100)


def test_a_call_without_a_bound_of_memory_always_has_a_plan() -> None:
    # The logits of one token are larger than those that are usual.
    for tokens in (1, 3):
        sizes = tokens, 4, 300_000_000
        problem = problem_of("linear_cross_entropy", sizes, "float32", (True, True, False), each=True, whole_rows=True)
        plan = plans.plan_of(problem, None)
        assert (plan.chunk, plan.chunks) == (1, tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("memory", [None, 120_000_000, 40_000_000])
@pytest.mark.parametrize(("tokens", "hidden", "classes"), [(1024, 512, 50257), (777, 768, 32000), (2048, 100, 1003)])
def test_bfloat16_on_a_gpu(tokens: int, hidden: int, classes: int, memory: int | None) -> None:
    """The gradient of the weight is as near to float64's, with the logits rounded to bfloat16, as one product."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(classes, hidden, device=DEVICE) * hidden**-0.5).bfloat16().requires_grad_()
    target = torch.randint(0, classes, (tokens,), device=DEVICE)
    z = functional.linear(x.detach(), w.detach()).double().requires_grad_()
    want = functional.cross_entropy(z, target)
    (dz,) = torch.autograd.grad(want, z)
    exact = dz @ w.detach().double(), dz.t() @ x.detach().double()
    y = osm.linear_cross_entropy(x, w, target, memory=memory, dtype=torch.float32)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-6)
    leaf = functional.linear(x, w)
    theirs = torch.autograd.grad(functional.cross_entropy(leaf.float(), target), [x, w])
    for ours, pytorch, value in zip(torch.autograd.grad(y, [x, w]), theirs, exact, strict=True):
        error, own = ((t.double() - value).norm() / value.norm() for t in (ours, pytorch))
        assert error <= 1.05 * own
    found = osm.linear_token_logprobs(x, w, target, memory=memory)
    torch.testing.assert_close(
        found.logprob.double(), z.log_softmax(1).gather(1, target[:, None])[:, 0], rtol=1e-5, atol=2e-5
    )
    again = torch.autograd.grad(-found.logprob.mean(), [x, w])
    for ours, pytorch, value in zip(again, theirs, exact, strict=True):
        error, own = ((t.double() - value).norm() / value.norm() for t in (ours, pytorch))
        assert error <= 1.05 * own


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("function", ["linear_cross_entropy", "linear_token_logprobs"])
@pytest.mark.parametrize("memory", [None, 320_000_000, 64_000_000])
def test_a_plan_takes_the_memory_that_it_says(function: str, memory: int | None) -> None:
    """Beside the results, and some vectors with a number for each token."""
    tokens, hidden, classes = 4096, 1024, 32000
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(classes, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    target = torch.arange(tokens, device=DEVICE)
    plan = osm.explain(x, operation=function, linear_weight=w, memory=memory).plan

    def call() -> tuple[torch.Tensor, ...]:
        y = getattr(osm, function)(x, w, target, memory=memory)
        y = y.logprob.mean() if isinstance(y, tuple) else y
        return torch.autograd.grad(y, [x, w])

    call()
    extra = extra_bytes(call, torch.device(DEVICE))
    assert extra is not None
    assert plan.bytes / 2 < extra <= plan.bytes + 64 * 8 * tokens + (8 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("classes", [8192, 50264])
def test_rows_in_two_tensors_on_a_gpu(classes: int) -> None:
    """Beside rows in one tensor, whose kernel adds in another order."""
    tokens, hidden = 100, 256
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(classes, hidden, device=DEVICE) / 8).bfloat16().requires_grad_()
    target = torch.arange(tokens, device=DEVICE) * (classes // tokens)
    target[3], target[4] = -100, classes - 1
    found = []
    for memory in (None, tokens * (classes * 7 // 8 * 2 + hidden * 4)):
        plan = osm.explain(x, operation="linear_cross_entropy", linear_weight=w, memory=memory).plan
        assert bool(plan.apart) == (memory is not None)
        y, stats = osm.linear_cross_entropy(x, w, target, return_stats=True, memory=memory)
        found.append((torch.autograd.grad(y, [x, w]), (y, *stats)))
    (gradients, outputs), (gradients_in_two, outputs_in_two) = found
    for one, two in zip(gradients, gradients_in_two, strict=True):
        assert (one.double() - two.double()).norm() < 2**-9 * one.double().norm()
    torch.testing.assert_close(outputs, outputs_in_two, rtol=2**-20, atol=2**-20)
