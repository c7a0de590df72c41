"""Targets of every integer dtype, and operands narrower or wider than the logits, on every path."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional
from ways import HOW

import onlinesoftmax as osm
from contract import DEVICE
from loss_formula import expected_loss
from onlinesoftmax import distributed
from pairs import rest_exhaustive

DTYPES = {
    torch.uint8: 300, torch.int8: 200, torch.int16: 33000, torch.int32: 300, torch.int64: 300,
    torch.uint16: 300, torch.uint32: 300, torch.uint64: 300,
}  # fmt: skip
"""Each dtype with a number of classes."""

PATHS: dict[str, dict[str, Any]] = {"kernels": HOW, "eager": {"backend": "eager"}}
OF_EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def in_turn(name: str, values: Any) -> Any:
    """Every dtype with one of two values in turn, and with the other where all combinations run."""
    cells = [(dtype, value, (i + j) % 2) for i, dtype in enumerate(DTYPES) for j, value in enumerate(values)]
    cells = [pytest.param(*cell, marks=pytest.mark.exhaustive if late else ()) for *cell, late in cells]
    return pytest.mark.parametrize(("dtype", name), cells, ids=str)


def logits(classes: int, rows: int = 4) -> torch.Tensor:
    x = torch.randn(rows, classes, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x.to(DEVICE).requires_grad_()


def targets(dtype: torch.dtype, most: int = 2**31) -> torch.Tensor:
    """Targets in int64 that the dtype has, the largest among them, of at most so many classes."""
    largest = min(torch.iinfo(dtype).max, DTYPES[dtype] - 1, most - 1)
    return torch.tensor([largest, 44, 0, largest - 3], device=DEVICE)


def derivatives(y: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, its gradient, and two gradients of the gradient."""
    (stored,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.square().sum(), x)
    return [y.detach(), stored, dx.detach(), second]


@pytest.mark.parametrize(
    ("dtype", "reduction", "path"),
    rest_exhaustive(itertools.product(DTYPES, ("none", "mean"), PATHS), lambda cell: itertools.combinations(cell, 2)),
    ids=str,
)
def test_losses(dtype: torch.dtype, reduction: str, path: str) -> None:
    how = PATHS[path]
    x, target = logits(DTYPES[dtype]), targets(dtype)
    weight = torch.linspace(0.5, 2, DTYPES[dtype], dtype=torch.float64, device=DEVICE)
    for options in ({}, {"weight": weight, "label_smoothing": 0.1}):
        y = osm.cross_entropy(x, target.to(dtype), reduction=reduction, **options, **how)
        want = functional.cross_entropy(x, target, reduction=reduction, **options)
        torch.testing.assert_close(derivatives(y, x), derivatives(want, x))
    found = osm.cross_entropy(x, target.to(dtype), weight, reduction=reduction, z_loss=0.01, check=True, **how)
    torch.testing.assert_close(found, osm.cross_entropy(x, target, weight, reduction=reduction, z_loss=0.01, **how))


@in_turn("path", PATHS)
def test_log_probabilities(dtype: torch.dtype, path: str) -> None:
    how = PATHS[path]
    x, target = logits(DTYPES[dtype]), targets(dtype)
    found = osm.token_logprobs(x, target.to(dtype), check=True, **how)
    want = x.log_softmax(1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(derivatives(found.logprob, x), derivatives(want, x))
    several = osm.token_logprobs(x, target.to(dtype)[:, None], ignore_index=44, **how).logprob
    want = x.log_softmax(1).gather(1, target[:, None]).where(target[:, None] != 44, 0.0)
    torch.testing.assert_close(derivatives(several, x), derivatives(want, x))


@in_turn("path", PATHS)
def test_an_ignored_target(dtype: torch.dtype, path: str) -> None:
    """An ignore_index outside of the range of the dtype ignores nothing."""
    how = PATHS[path]
    x, target, limits = logits(min(DTYPES[dtype], 300)), targets(dtype, 300), torch.iinfo(dtype)
    for index in (-100, 44, min(limits.max, 2**50), int(target[0]) + 256):
        y = osm.cross_entropy(x, target.to(dtype), ignore_index=index, reduction="sum", **how)
        want = functional.cross_entropy(x[target != index], target[target != index], reduction="sum")
        torch.testing.assert_close(derivatives(y, x), derivatives(want, x))


@OF_EACH_DTYPE
def test_targets_that_are_no_class(dtype: torch.dtype) -> None:
    classes, limits = 100, torch.iinfo(dtype)
    x = logits(classes)
    target = torch.tensor([3, 100, 5, limits.max], dtype=dtype, device=DEVICE)
    if limits.min:
        target[0] = -7
    wrong = [0, 1, 3] if limits.min else [1, 3]
    y = osm.cross_entropy(x, target, reduction="none", **HOW)
    (dx,) = torch.autograd.grad(y.sum(), x)
    lost = torch.zeros(4, dtype=torch.bool, device=DEVICE)
    lost[wrong] = True
    assert torch.equal(y.isnan(), lost)
    assert torch.equal((dx == 0).all(1), lost)
    assert osm.cross_entropy(x, target, **HOW).isnan()
    assert torch.equal(osm.token_logprobs(x, target, **HOW).logprob.isnan(), lost)
    for check in (osm.cross_entropy, osm.token_logprobs):
        with pytest.raises(IndexError, match=rf"at position {wrong[0]}, which is not in \[0, 100\)"):
            check(x, target, check=True, **HOW)


def test_the_largest_numbers_are_no_ignored_targets() -> None:
    x = logits(5, 1)
    target = torch.tensor([2**64 - 100], dtype=torch.uint64, device=DEVICE)
    assert osm.cross_entropy(x, target, reduction="sum", **HOW).isnan()


@in_turn("backend", ("eager", "triton"))
def test_sharded_rows(dtype: torch.dtype, backend: str) -> None:
    classes = DTYPES[dtype]
    x, target = logits(classes), targets(dtype)
    weight = torch.linspace(0.5, 2, classes, dtype=torch.float64, device=DEVICE)
    with distributed.one_process() as group:
        how: dict[str, Any] = {"group": group, "backend": backend, "shards": distributed.Shards(0, classes, classes)}
        for options in ({}, {"weight": weight, "label_smoothing": 0.1}, {"ignore_index": int(target[0]) + 256}):
            want = functional.cross_entropy(x, target, **options)
            # The second call finds the launches of the first.
            for _ in range(2):
                y = distributed.cross_entropy(x, target.to(dtype), **options, **how)
                torch.testing.assert_close((y, *torch.autograd.grad(y, x)), (want, *torch.autograd.grad(
                    want, x, retain_graph=True)))  # fmt: skip
        found = distributed.token_logprobs(x, target.to(dtype), **how)
        torch.testing.assert_close(found.logprob, x.log_softmax(1).gather(1, target[:, None])[:, 0])


@OF_EACH_DTYPE
def test_dtensors(dtype: torch.dtype) -> None:
    x, target = logits(DTYPES[dtype]), targets(dtype)
    want = functional.cross_entropy(x, target)
    with distributed.one_process():
        mesh = init_device_mesh(DEVICE, (1,))
        for placement in (Shard(0), Shard(1)):
            cut = distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
            for index in (
                target.to(dtype),
                distribute_tensor(target.to(dtype), mesh, [Replicate()], src_data_rank=None),
            ):
                y = osm.cross_entropy(cut, index, check=True)
                torch.testing.assert_close(y.full_tensor(), want)
                (dx,) = torch.autograd.grad(y, cut)
                torch.testing.assert_close(dx.full_tensor(), torch.autograd.grad(want, x, retain_graph=True)[0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [pytest.param(torch.uint8, marks=pytest.mark.exhaustive), torch.uint16], ids=str)
def test_a_compiled_loss(dtype: torch.dtype) -> None:
    x, target = logits(DTYPES[dtype]), targets(dtype)
    loss = torch.compile(lambda x, t: osm.cross_entropy(x, t, reduction="none", **HOW), backend="aot_eager")
    y, want = loss(x, target.to(dtype)), functional.cross_entropy(x, target, reduction="none")
    torch.testing.assert_close((y, *torch.autograd.grad(y.sum(), x)), (want, *torch.autograd.grad(want.sum(), x)))


TARGET = torch.tensor([1, 69, -100, 7, 33], device=DEVICE)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(DEVICE)


def assert_near(found: torch.Tensor, want: torch.Tensor) -> None:
    """At most some rounding errors of the result's dtype, beside its largest element."""
    eps = torch.finfo(found.dtype).eps
    assert (found.double() - want).abs().max() <= 64 * eps * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_narrow_weights_of_float64_logits(reduction: str, dtype: torch.dtype) -> None:
    x, weight = random(5, 70).requires_grad_(), random(70, seed=1).abs().to(dtype)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01}
    dy = torch.linspace(1, 2, 5, dtype=torch.float64, device=DEVICE) if reduction == "none" else torch.tensor(1.5).to(x)
    arrays = (t.detach().double().cpu().numpy() if t.is_floating_point() else t.cpu().numpy() for t in (x, TARGET, dy))
    exact = expected_loss(*arrays, weight=weight.double().cpu().numpy(), **options)
    want, dx = torch.from_numpy(exact.loss).to(DEVICE), torch.from_numpy(exact.gradient).to(DEVICE)
    with distributed.one_process() as group:
        how: dict[str, Any] = {"group": group, "shards": distributed.Shards(0, 70, 70)}
        for y in (
            osm.cross_entropy(x, TARGET, weight, **options, **HOW),
            distributed.cross_entropy(x, TARGET, weight, **options, **how, **HOW),
            distributed.cross_entropy(x, TARGET, weight, **options, **how, backend="eager"),
        ):
            assert_near(y.detach(), want)
            assert_near(torch.autograd.grad(y, x, dy)[0], dx)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("dtypes", [
    (torch.float32, torch.float64), (torch.float64, torch.float32), (torch.float64, torch.bfloat16),
    (torch.bfloat16, torch.float32),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_scales_and_biases(name: str, dtypes: tuple[torch.dtype, torch.dtype], softcap: float | None) -> None:
    """The dtype of the logits, and that of the scale and the bias; the result has the wider one."""
    of_x, of_operands = dtypes
    x = random(5, 70).to(of_x).requires_grad_()
    bias, scale = random(70, seed=2).to(of_operands).requires_grad_(), torch.tensor(
        0.7, dtype=of_operands, device=DEVICE, requires_grad=True)  # fmt: skip
    y = getattr(osm, name)(
        x, 1, bias=bias, scale=scale, softcap=softcap, dtype=torch.promote_types(of_x, of_operands), **HOW
    )
    wide = [t.detach().double().requires_grad_() for t in (x, bias, scale)]
    z = wide[0] * wide[2]
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    want = getattr(torch, name)(z + wide[1], 1)
    dy = random(5, 70, seed=3).to(y.dtype)
    assert_near(y.detach(), want.detach())
    for found, exact in zip(
        torch.autograd.grad(y, (x, bias, scale), dy), torch.autograd.grad(want, wide, dy.double()), strict=True
    ):
        assert_near(found, exact)
