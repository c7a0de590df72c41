"""Logits in the memory of the weight's gradient, which is not written yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads import CLASSES, DEVICE, GPU, Tensor, expected, head, same_with_gradients

import onlinesoftmax as osm
from onlinesoftmax.linear import plans, rows
from onlinesoftmax.linear.problem import problem_of

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def rows_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute rows in two tensors (tests/kernels/test_cuda_targets.py); here PyTorch does."""

    def in_two(z: Tensor, rest: Tensor, *given: Any) -> tuple[Tensor, ...]:
        outputs, dz = losses(torch.cat([z, rest], 1), *given)
        assert dz is not None
        z.copy_(dz[:, : z.shape[1]])
        rest.copy_(dz[:, z.shape[1] :])
        return outputs

    losses = rows.losses
    monkeypatch.setattr(rows, "are_in_two", lambda *_: not GPU)
    monkeypatch.setattr(rows, "losses_in_two", in_two)


@pytest.mark.usefixtures("rows_in_two")
@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)])
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize(
    ("memory", "cut"),
    [(15 * (24 + 14) * 8, ("stored", 15, 0, 16)), (7 * (40 + 14) * 8, ("tokens", 7, 8, 8))],
    ids=["all tokens", "a first chunk"],
)
def test_the_last_columns_in_the_memory_of_the_gradient(
    memory: int, cut: tuple[Any, ...], wanted: tuple[bool, ...], stats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, b, target = head(bias=True)
    x = torch.cat([x, x], -1).detach().requires_grad_(wanted[0])
    w = torch.cat([w, -w], -1).detach().requires_grad_(wanted[1])
    b = b.detach().requires_grad_(wanted[2])
    problem = problem_of("linear_cross_entropy", (15, 14, 40), "float64", wanted)
    plan = plans.plan_of(problem._replace(in_two=True), memory)
    assert (plan.name, plan.chunk, plan.first, plan.apart) == cut
    assert plan.bytes <= memory
    with torch.no_grad():
        x[1, 2] = torch.nan
    calls = [
        osm.linear_cross_entropy(x, w, target, linear_bias=b, return_stats=stats, memory=given)
        for given in (memory, None)
    ]
    ours, theirs = calls
    if stats:
        torch.testing.assert_close(ours[1], theirs[1], equal_nan=True)
        ours, theirs = ours[0], theirs[0]
    same_with_gradients(ours, theirs, [t for t, one in zip((x, w, b), wanted, strict=True) if one])


@pytest.mark.usefixtures("rows_in_two")
@pytest.mark.parametrize("acc_dtype", [None, torch.bfloat16])
def test_a_first_chunk_in_the_memory_of_a_sum(
    acc_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Beside one chunk: the same error with a float32 sum, and that of four roundings with one of 16 bits."""
    x, w, b, target = (t.detach() for t in head(torch.bfloat16))
    x, target = torch.cat([x, -x]), torch.cat([target, 39 - target.clamp(min=0)])
    leaves = [t.requires_grad_() for t in (x, w, b)]
    memory, in_place = 800 + (0 if acc_dtype else 4 * w.numel()), acc_dtype is not None
    problem = problem_of("linear_cross_entropy", (30, 7, 40), "bfloat16", (True,) * 3, in_place=in_place)
    plan = plans.plan_of(problem._replace(in_two=True), memory)
    assert (plan.name, plan.chunk, plan.first, plan.apart, plan.chunks) == ("tokens", 7, 9, 12, 4)
    ours = osm.linear_cross_entropy(x, w, target, linear_bias=b, memory=memory, acc_dtype=acc_dtype)
    theirs = osm.linear_cross_entropy(x, w, target, linear_bias=b)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad(expected(*wide, target), wide)
    for found, own, value in zip(*(torch.autograd.grad(y, leaves) for y in (ours, theirs)), exact, strict=True):
        error, allowed = ((g.double() - value).norm() for g in (found, own))
        assert error <= (2 if in_place else 1.05) * allowed


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)])
@pytest.mark.parametrize(
    ("tokens", "hidden", "held"), [(15, 7, 16), (20, 7, 12), (7, 7, 40), (5, 7, 40), (5, 8, 40), (6, 1, 4)]
)
def test_the_first_columns_in_the_memory_of_the_gradient(
    tokens: int, hidden: int, held: int, wanted: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is written over logits that stay until they are read; with few tokens none is made again."""
    made: list[Any] = []
    for name in ("mm", "addmm"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, real=real, **how: made.append(0) or real(*args, **how))
    where: dict[str, Any] = {"dtype": torch.float64, "device": DEVICE}
    x, w, b = (torch.randn(shape, **where) for shape in ((tokens, hidden), (CLASSES, hidden), (CLASSES,)))
    x, w, b = (t.requires_grad_(one) for t, one in zip((x, w, b), wanted, strict=True))
    target = torch.arange(tokens, device=DEVICE) * 2
    target[1], target[3] = -100, 39
    memory = tokens * (4 + hidden) * 8
    plan = plans.plan_of(problem_of("linear_cross_entropy", (tokens, hidden, CLASSES), "float64", wanted), memory)
    assert (plan.name, plan.chunk, plan.apart, plan.bytes) == ("columns", 4, held, memory)
    ours = osm.linear_cross_entropy(x, w, target, linear_bias=b, z_loss=0.1, memory=memory)
    # One product of each chunk for each gradient, one for the logits, and one more for those that are made again.
    assert len(made) == 10 * (2 + wanted[0]) + (40 - held) // 4
    theirs = expected(x, w, b, target, z_loss=0.1)
    same_with_gradients(ours, theirs, [t for t, one in zip((x, w, b), wanted, strict=True) if one])
