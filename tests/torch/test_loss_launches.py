"""Usual losses, whose launches are found under a short key: the same bits as the general path, streams and graphs."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from ways import HOW

import onlinesoftmax as osm
from contract import DEVICE, DTYPES, GPU, outliers
from onlinesoftmax.core.call import Settings
from onlinesoftmax.torch import loss_run, small_kernels
from onlinesoftmax.torch.loss_arguments import Loss
from onlinesoftmax.torch.loss_kernels import MOST_ROWS_IN_ONE_LAUNCH

pytestmark = pytest.mark.usefixtures("cacheable")


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a call on the general path."""

    def general(call: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(loss_run, "look_up", lambda *_: ((), None))
            return call()

    return general


def test_a_weight_that_requires_a_gradient_is_an_error_after_one_that_does_not() -> None:
    x, target, weight = torch.randn(4, 33, device=DEVICE), some_targets(4, classes=33), torch.ones(33, device=DEVICE)
    osm.cross_entropy(x, target, weight, **HOW)
    with pytest.raises(RuntimeError, match="weight requires a gradient"):
        osm.cross_entropy(x, target, weight.requires_grad_(), **HOW)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight": True},
    {"ignore_index": 3},
    {"weight": True, "label_smoothing": 0.1, "z_loss": 0.01},
    {"label_smoothing": 0.2, "scale": 0.5, "softcap": 4.0},
]


def loss_of(x: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """The loss; weight=True stands for a fixed weight."""
    if options.pop("weight", False):
        generator = torch.Generator().manual_seed(3)
        options["weight"] = torch.rand(x.shape[1], generator=generator).to(x.dtype).to(x.device)
    # Without the default, -100 is out of range, and its loss is NaN.
    target = target.clamp(min=0) if "ignore_index" in options else target
    found: torch.Tensor = osm.cross_entropy(x, target, **options, **HOW)
    return found


def some_targets(*shape: int, classes: int) -> torch.Tensor:
    target = torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))
    target.view(-1)[0] = -100
    return target.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_have_the_bits_of_the_general_path(
    general: Any, reduction: str, dtype: torch.dtype, prepared: Any
) -> None:
    target, turn = some_targets(5, classes=33), DTYPES.index(dtype) + len(reduction)
    for i, (options, needs_gradient) in enumerate(itertools.product(OPTIONS, (False, True))):
        if not GPU and (i // 2 + i + turn) % 2:
            # The interpreter is slow: every two of an option, a gradient, a dtype and a reduction meet.
            continue
        x = outliers(5, 33, dtype=dtype, device=DEVICE).requires_grad_(needs_gradient)

        def call(x: torch.Tensor = x, options: dict[str, Any] = options) -> torch.Tensor:
            return loss_of(x, target, reduction=reduction, **options)

        want, before = general(call), prepared()
        dy = torch.full_like(want, 1.5)
        want_dx = torch.autograd.grad(want, x, dy)[0] if needs_gradient else None
        for _ in range(2):
            found = call()
            assert (found.dtype, found.shape) == (want.dtype, want.shape)
            assert torch.equal(found, want)
            assert found.requires_grad == needs_gradient
            if needs_gradient:
                assert torch.equal(torch.autograd.grad(found, x, dy)[0], want_dx)
        assert prepared() == before + 1


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_log_probabilities_have_the_bits_of_the_general_path(
    general: Any, needs_gradient: bool, entropy: bool, prepared: Any
) -> None:
    x = torch.randn(2, 3, 40, device=DEVICE, requires_grad=needs_gradient)
    index = some_targets(2, 3, classes=40).clamp(min=0)
    for options in ({}, {"scale": 0.7, "softcap": 9.0}):

        def call(options: dict[str, Any] = options) -> Any:
            return osm.token_logprobs(x, index, entropy=entropy, **options, **HOW)

        want = general(call)
        for _ in range(2):
            found = call()
            for ours, theirs in zip(found, want, strict=True):
                assert ours is theirs is None or torch.equal(ours, theirs)
            if needs_gradient:
                grads = [
                    torch.autograd.grad(sum(t.sum() for t in y if t is not None), x, retain_graph=True)[0]
                    for y in (found, want)
                ]
                assert torch.equal(*grads)
            else:
                assert not any(t.requires_grad for t in found if t is not None)
    assert prepared() == 2


def test_a_loss_without_a_gradient_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(*_: Any) -> Any:
        raise AssertionError("autograd is asked to record a call")

    monkeypatch.setattr(torch.autograd.Function, "apply", apply)
    x, target = torch.randn(4, 9, device=DEVICE, requires_grad=True), some_targets(4, classes=9)
    for reduction in ("mean", "none"):
        with torch.no_grad():
            assert not osm.cross_entropy(x, target, reduction=reduction, **HOW).requires_grad
        assert not osm.cross_entropy(x.detach(), target, reduction=reduction, return_stats=True, **HOW)[0].requires_grad
    assert not osm.token_logprobs(x.detach(), target.clamp(min=0), mask=x > -9, **HOW).lse.requires_grad


def test_arguments_are_checked_in_every_call() -> None:
    x, target = torch.randn(4, 9, device=DEVICE), some_targets(4, classes=9)
    for _ in range(2):
        osm.cross_entropy(x, target, **HOW)
        osm.token_logprobs(x, target.clamp(min=0), **HOW)
        for error, message, arguments, options in (
            (ValueError, "target has shape", (x, target[:3]), {}),
            (RuntimeError, "weight must have shape", (x, target, torch.ones(8, device=DEVICE)), {}),
            (RuntimeError, "label_smoothing must be from 0 to 1", (x, target), {"label_smoothing": 2.0}),
            (ValueError, "not a valid value for reduction", (x, target), {"reduction": "median"}),
            (RuntimeError, "target must have an integer dtype", (x, target > 0), {}),
        ):
            with pytest.raises(error, match=message):
                osm.cross_entropy(*arguments, **options, **HOW)
        with pytest.raises(ValueError, match="index has shape"):
            osm.token_logprobs(x, target[:3], **HOW)
        # A NumPy array has no hash, so it is part of no key.
        for function in (osm.cross_entropy, osm.token_logprobs):
            with pytest.raises(TypeError, match="scale must be Tensor, as input is, not ndarray"):
                function(x, target.clamp(min=0), scale=np.ones((4, 1)), **HOW)


def test_calls_that_need_the_general_path(prepared: Any) -> None:
    """Overwritten logits, batch invariance, statistics, and targets that the small kernel cannot read."""
    h, target = torch.randn(2, 9, 3, device=DEVICE, requires_grad=True), some_targets(2, 3, classes=9)
    apart = target.t().contiguous().t()
    want = functional.cross_entropy(h, target)
    for call in (
        lambda: osm.cross_entropy(2 * h / 2, target, inplace_backward=True, **HOW),
        lambda: osm.cross_entropy(h, target, batch_invariant=True, **HOW),
        lambda: osm.cross_entropy(h, target, return_stats=True, **HOW)[0],
        lambda: osm.cross_entropy(h, apart, **HOW),
        # The planner may take Triton for rows as short as these.
        lambda: osm.cross_entropy(h, target, torch.ones(18, device=DEVICE)[::2], **(HOW or {"backend": "cuda"})),
    ):
        for _ in range(2):
            torch.testing.assert_close(call(), want)
    # The loss kernel reads a weight with gaps, and CUDA's writes the scalar, too; beside Triton's, PyTorch's operations
    # compute the divisor.
    assert prepared() == GPU


def test_no_tensor_of_a_call_is_kept() -> None:
    x, target, weight = torch.randn(4, 40, device=DEVICE), some_targets(4, classes=40), torch.rand(40, device=DEVICE)
    out = torch.empty_like(x)
    osm.softmax(x, out=out, **HOW)
    for leaf in (x, x.clone().requires_grad_()):
        osm.cross_entropy(leaf, target, weight, **HOW)
        osm.token_logprobs(leaf, target.clamp(min=0), **HOW)
    kept = [weakref.ref(t) for t in (x, target, weight, leaf, out)]
    del x, target, weight, leaf, out
    gc.collect()
    assert [t() for t in kept] == [None] * 5


def test_an_ignore_index_that_is_no_target() -> None:
    """-100 modulo 256 is 156, which is a class; PyTorch's comparison would ignore it."""
    x = torch.randn(3, 200, device=DEVICE)
    target = torch.tensor([156, 3, 4], dtype=torch.uint8, device=DEVICE)
    want = functional.cross_entropy(x, target.long())
    for how in (HOW, {}):
        torch.testing.assert_close(osm.cross_entropy(x, target, **how), want)
    stats = osm.cross_entropy(x, target, z_loss=0.1, return_stats=True, **HOW)[1]
    assert (stats.z_loss > 0).all()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_numbers_that_are_tensors_may_change(reduction: str) -> None:
    """PyTorch takes tensors for numbers, and reads them in every call."""
    x, target = torch.randn(4, 33, device=DEVICE), torch.tensor([1, 0, 2, 5], device=DEVICE)
    index, smoothing = torch.tensor(0, device=DEVICE), torch.tensor(0.0, device=DEVICE)
    for _ in range(2):
        numbers = {"ignore_index": index, "label_smoothing": smoothing, "reduction": reduction}
        found = [osm.cross_entropy(x, target, **numbers, **HOW) for _ in range(2)]
        for y in found:
            torch.testing.assert_close(y, functional.cross_entropy(x, target, **numbers))
        index += 1
        smoothing += 0.25


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_reduction_is_prepared_for_each_alignment(needs_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton specialises a kernel for the tensors that begin on 16 bytes, so other tensors need another launch."""
    monkeypatch.setattr(small_kernels, "backend_for", lambda _: "triton")
    x = torch.randn(5, 33, device=DEVICE, requires_grad=needs_gradient)
    targets = torch.randint(33, (7,), device=DEVICE)
    weights = torch.rand(35, device=DEVICE)
    small_kernels._prepared.cache_clear()
    launches = set()
    for target, weight in itertools.product((targets[:5], targets[1:6]), (weights[:33], weights[1:34])):
        want = functional.cross_entropy(x, target, weight)
        torch.testing.assert_close(osm.cross_entropy(x, target, weight, backend="triton"), want)
        small = small_kernels.reducer(x, target, weight, Loss(Settings(1, x.dtype)), needs_gradient)
        assert small is not None
        launches.add(small_kernels._prepared.cache_info().currsize)
    # One launch more for each pair of alignments, and with a gradient one that adds the losses of all of them.
    assert launches == {number + needs_gradient for number in range(1, 5)}


ROWS = MOST_ROWS_IN_ONE_LAUNCH + 34465
"""Rows of several blocks of the small kernels, and too many for one launch."""

SEGMENTS = 40001
"""Rows of many segments in one launch."""


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1000, SEGMENTS, ROWS])
def test_scalars_of_many_rows(rows: int, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the float64 sum of our own losses; the same bits on every run, with and without a gradient."""
    monkeypatch.setattr(small_kernels, "backend_for", lambda _: backend)
    x, target = torch.randn(rows, 33, device=DEVICE).to(dtype), some_targets(rows, classes=33)
    weight = torch.rand(33, device=DEVICE).to(dtype)
    for w, reduction in itertools.product((None, weight), ("mean", "sum")):
        rows = osm.cross_entropy(x.double(), target, None if w is None else w.double(), reduction="none")
        counts = target != -100
        divisor = counts.sum() if w is None else w.double()[target.where(counts, 0)].where(counts, 0.0).sum()
        # A sum in float16 may be infinite.
        want = (rows.sum() / (divisor if reduction == "mean" else 1)).to(dtype).double()
        found = [osm.cross_entropy(x, target, w, reduction=reduction) for _ in range(20)]
        found += [osm.cross_entropy(x.clone().requires_grad_(), target, w, reduction=reduction) for _ in range(20)]
        assert all(torch.equal(y, found[0]) for y in found)
        wide = torch.promote_types(dtype, torch.float32)
        tolerance = 8 * torch.finfo(wide).eps + torch.finfo(dtype).eps
        torch.testing.assert_close(found[0].double(), want, rtol=tolerance, atol=0)


@pytest.mark.gpu
def test_scalars_on_two_streams_at_once() -> None:
    xs = [torch.randn(rows, 33, device=DEVICE, requires_grad=True) for rows in (ROWS, SEGMENTS, 64)]
    targets, streams = [some_targets(len(x), classes=33) for x in xs], [torch.cuda.Stream() for _ in xs]
    want = [osm.cross_entropy(x, target).detach() for x, target in zip(xs, targets, strict=True)]
    sums = [osm.cross_entropy(x, target, reduction="sum").detach() for x, target in zip(xs, targets, strict=True)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((osm.cross_entropy(xs[i], targets[i]).detach(), want[i]))
                found.append((osm.cross_entropy(xs[i], targets[i], reduction="sum").detach(), sums[i]))
    torch.cuda.synchronize()
    assert all(torch.equal(ours, theirs) for ours, theirs in found)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(64, 512), (2048, 4096), (40000, 1000), (64, 300000)])
def test_kernels_that_overlap_read_the_numbers_of_their_own_call(rows: int, cols: int) -> None:
    """Losses one after the other, each with another divisor; then the same calls, each after the end of the last."""
    x = torch.randn(rows, cols, device=DEVICE, dtype=torch.bfloat16)
    leaf = x.clone().requires_grad_()
    target = torch.randint(cols, (rows,), device=DEVICE)
    ignored = [target.clone() for _ in range(20)]
    for i, one in enumerate(ignored):
        one[: rows * i // 20] = -100

    def call(target: torch.Tensor) -> list[torch.Tensor]:
        loss = osm.cross_entropy(leaf, target)
        # The sum of the gradient's sizes has the divisor as a factor.
        (dx,) = torch.autograd.grad(loss, leaf)
        return [loss.detach(), dx.float().abs().sum(), osm.cross_entropy(x, target)]

    together = [call(one) for one in ignored]
    torch.cuda.synchronize()
    for one, found in zip(ignored, together, strict=True):
        want = call(one)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        torch.testing.assert_close(found[0].float(), functional.cross_entropy(x.float(), one), rtol=0.01, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("rows", [64, SEGMENTS, ROWS])
def test_a_graph_is_replayed_with_other_targets(rows: int, warm: bool) -> None:
    x, target = torch.randn(rows, 33, device=DEVICE, requires_grad=True), some_targets(rows, classes=33)
    other = some_targets(rows, classes=33).flip(0)
    other[::3] = -100

    def step() -> list[torch.Tensor]:
        found = []
        for reduction in ("mean", "sum"):
            loss = osm.cross_entropy(x, target, reduction=reduction)
            found += [loss.detach(), torch.autograd.grad(loss, x)[0], osm.cross_entropy(x.detach(), target)]
        return found

    # Compiles the kernels, which a capture does not allow; `warm` also fills the scratch of the capturing stream.
    step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    if warm:
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    first = target.clone()
    for given in (other, first, other):
        target.copy_(given)
        want = step()
        for _ in range(3):
            for y in captured:
                y.fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, want, strict=True))
    # Tensors that were made during the capture are not used outside of it.
    del graph, captured
    target.copy_(first)
    assert torch.isfinite(step()[0])


@pytest.mark.gpu
def test_another_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, target = torch.randn(64, 33, device="cuda:1", requires_grad=True), some_targets(64, classes=33).to("cuda:1")
    for reduction in ("mean", "sum", "none"):
        for leaf in (x, x.detach()):
            found = osm.cross_entropy(leaf, target, reduction=reduction)
            torch.testing.assert_close(found, functional.cross_entropy(leaf, target, reduction=reduction))


@pytest.mark.gpu
def test_two_devices_in_turn() -> None:
    """Prepared calls of one shape keep the arguments of launches for their own device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, target = torch.randn(64, 512), some_targets(64, classes=512)
    for _ in range(3):
        for device in ("cuda:0", "cuda:1"):
            ours, given = x.to(device).requires_grad_(), target.to(device)
            want = functional.cross_entropy(ours, given)
            found = osm.cross_entropy(ours, given)
            torch.testing.assert_close(found, want)
            for one, other in ((found, want), (osm.softmax(ours).square().sum(), ours.softmax(-1).square().sum())):
                torch.testing.assert_close(*(torch.autograd.grad(y, ours)[0] for y in (one, other)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize("rows", [64, 2 * MOST_ROWS_IN_ONE_LAUNCH])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_scalar_takes_few_kernels(reduction: str, rows: int) -> None:
    """One kernel for few rows; else one small kernel after it, and with a gradient of a mean one before it."""
    x, target = torch.randn(rows, 512, device=DEVICE), some_targets(rows, classes=512)
    few, before = rows <= MOST_ROWS_IN_ONE_LAUNCH, reduction == "mean"
    for leaf, wanted in ((x, 1 if few else 2), (x.clone().requires_grad_(), 1 if few else 2 + before)):
        osm.cross_entropy(leaf, target, reduction=reduction)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            osm.cross_entropy(leaf, target, reduction=reduction)
            torch.cuda.synchronize()
        ran = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len(ran) == wanted, [e.name for e in ran]
