"""Calls that are rare and must not surprise: batched gradients, meta tensors, `out` on a CPU, other integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from ways import HOW

import onlinesoftmax as osm
from contract import DEVICE
from onlinesoftmax.sampling import TopLogprobs
from onlinesoftmax.sampling.topk import CHUNK
from pairs import rest_exhaustive

CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "softmax": (lambda x, t, **how: osm.softmax(x, 1, **how), lambda x, t: x.softmax(1)),
    "scaled": (lambda x, t, **how: osm.log_softmax(x, 1, scale=0.5, **how), lambda x, t: (0.5 * x).log_softmax(1)),
    "logsumexp": (lambda x, t, **how: osm.logsumexp(x, 1, **how), lambda x, t: x.logsumexp(1)),
    "losses": (
        lambda x, t, **how: osm.cross_entropy(x, t, reduction="none", **how),
        lambda x, t: functional.cross_entropy(x, t, reduction="none"),
    ),
    "mean": (
        lambda x, t, **how: osm.cross_entropy(x, t, **how).reshape(1),
        lambda x, t: functional.cross_entropy(x, t).reshape(1),
    ),
    "logprob": (
        lambda x, t, **how: osm.token_logprobs(x, t, **how).logprob,
        lambda x, t: x.log_softmax(1).gather(1, t[:, None])[:, 0],
    ),
    "entropy": (
        lambda x, t, **how: osm.token_logprobs(x, t, **how).entropy,
        lambda x, t: -(x.softmax(1) * x.log_softmax(1)).sum(1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("how", [HOW, {}], ids=["kernels", "default"])
def test_a_batch_of_gradients(name: str, how: dict[str, Any]) -> None:
    """A kernel cannot read the gradients of `is_grads_batched=True`: vmap hides a dimension of them."""
    x, target = torch.randn(3, 5, device=DEVICE), torch.tensor([0, 4, 2], device=DEVICE)
    ours, theirs = (
        torch.autograd.functional.jacobian(lambda x, f=f, how=how: f(x, target, **how), x, vectorize=True)
        for f, how in zip(CALLS[name], (how, {}), strict=True)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["losses", "logprob"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_hooks_of_the_logits_run_once_for_a_batch_of_gradients(name: str, create_graph: bool) -> None:
    x, target = torch.randn(3, 5, device=DEVICE, requires_grad=True), torch.tensor([0, 4, 2], device=DEVICE)
    ours, theirs = CALLS[name]
    found = []
    for call in (lambda z: ours(z, target, **HOW), lambda z: theirs(z, target)):
        z = x * 1
        z.register_hook(lambda g: 2 * g)
        dy = torch.eye(3, device=DEVICE)
        found.append(torch.autograd.grad(call(z), x, dy, is_grads_batched=True, create_graph=create_graph)[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_meta_tensors_have_the_shapes_and_dtypes_of_the_results() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, target = torch.empty(3, 4, device="meta", dtype=dtype), torch.empty(3, device="meta", dtype=torch.int64)
        for y in (
            osm.softmax(x, 1), osm.softmax(x, 1, scale=2.0), osm.nn.Softmax(-1, causal=True)(x),
            osm.log_softmax(x, 0, batch_invariant=True),
        ):  # fmt: skip
            assert (y.device.type, y.shape, y.dtype) == ("meta", x.shape, dtype)
        assert osm.logsumexp(x, 1, batch_invariant=True).shape == (3,)
        assert osm.cross_entropy(x, target).dtype == dtype
        assert osm.nn.CrossEntropyLoss()(x, target).shape == ()
        with osm.override():
            assert torch.softmax(x, 1).shape == x.shape


@pytest.mark.parametrize("options", [{}, {"scale": 2.0}], ids=str)
def test_out_fits_on_a_cpu_too(options: dict[str, Any]) -> None:
    x = torch.randn(5, 4)
    for out in (torch.empty(5), torch.empty(4, 5)):
        with pytest.raises(RuntimeError, match=r"softmax\(\): out has shape .* and the result has \(5, 4\)"):
            osm.softmax(x, 1, out=out, **options)
    with pytest.raises(RuntimeError, match=r"logsumexp\(\): out has shape \(4,\), and the result has \(5, 1\)"):
        osm.logsumexp(x, 1, keepdim=True, out=torch.empty(4), **options)
    with pytest.raises(RuntimeError, match="out overlaps input in memory"):
        osm.softmax(x[:4], 1, out=x[1:], **options)
    want = osm.softmax(x, 1, **options)
    assert osm.softmax(x, 1, out=x, **options) is x
    torch.testing.assert_close(x, want)
    want = osm.logsumexp(x, (0, 1), **options)
    torch.testing.assert_close(osm.logsumexp(x, (0, 1), out=torch.empty(0), **options), want)


@pytest.mark.parametrize("backend", [None, "eager", "triton"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_out_takes_no_gradient_on_any_backend(name: str, backend: str | None) -> None:
    """PyTorch raises too: logsumexp in the call, softmax in the backward pass."""
    function, leaf = getattr(osm, name), torch.randn(3, 4, device=DEVICE, requires_grad=True)
    score_options = ({}, {"scale": 2.0}, {"dtype": torch.float64}, {"batch_invariant": True})
    shapes: list[dict[str, Any]] = [{"dim": 1}]
    if name == "logsumexp":
        shapes += [{"dim": (0, 1), "keepdim": keepdim} for keepdim in (False, True)]
    for given in ({**shape, **options, "backend": backend} for shape in shapes for options in score_options):
        out = torch.empty(0, dtype=given.get("dtype", torch.float32), device=DEVICE)
        with pytest.raises(RuntimeError, match="do not support gradients"):
            function(leaf, out=out, **given)
        with torch.no_grad():
            assert function(leaf, out=out, **given) is out
            torch.testing.assert_close(out, function(leaf, **given))
    with pytest.raises(RuntimeError, match="do not support gradients"):
        function(leaf.detach(), 1, bias=leaf, out=torch.empty(0, device=DEVICE), backend=backend)


def test_a_result_that_is_not_floating_is_refused_with_and_without_options() -> None:
    for options in ({}, {"scale": 2.0}, {"batch_invariant": True}):
        with pytest.raises(NotImplementedError):
            osm.softmax(torch.randn(2, 3), 1, dtype=torch.int32, **options)
        for name in ("softmax", "log_softmax", "logsumexp"):
            with pytest.raises(NotImplementedError, match="complex64 is complex; pass its real part"):
                getattr(osm, name)(torch.ones(2, 3, dtype=torch.complex64), 1, dtype=torch.float32, **options)


@pytest.mark.parametrize("how", [HOW, {}], ids=["kernels", "default"])
def test_integers_of_other_types_are_dimensions(how: dict[str, Any]) -> None:
    x, target = torch.randn(3, 4, device=DEVICE), torch.tensor([0, 1, 2], device=DEVICE)
    dim: Any = np.int64(1)
    for options in ({}, {"scale": 2.0}, {"causal": True}, {"batch_invariant": True}):
        torch.testing.assert_close(osm.softmax(x, dim, **options, **how), osm.softmax(x, 1, **options, **how))
    assert osm.token_logprobs(x, target, dim, **how).logprob.shape == (3,)
    wrong: Any
    for wrong in (True, 1.0, "1", torch.tensor(1), np.ones(2, int)):
        with pytest.raises(TypeError, match=r"'dim' .*must be int"):
            osm.softmax(x, wrong, causal=True, **how)


def test_a_loss_over_no_classes() -> None:
    x, weight, target = torch.zeros(3, 0), torch.zeros(0), torch.full((3,), -100)
    for options in ({"z_loss": 0.1}, {"scale": 0.5}):
        assert osm.cross_entropy(x, target, weight, **options).isnan()
    loss, stats = osm.cross_entropy(x, torch.zeros(3, 0), return_stats=True)
    assert loss.shape == ()
    assert stats.correct.shape == (3,)


@pytest.mark.parametrize("softcap", [1e39, 1e-46, float(np.nextafter(2.0**128, 0)), 10**400])
def test_a_softcap_must_be_a_number_of_float32(softcap: float) -> None:
    """It would be inf or 0 in the kernels, and every result NaN."""
    with pytest.raises(ValueError, match="softcap must be positive and finite in float32"):
        osm.softmax(torch.randn(3), 0, softcap=softcap)


def test_override_leaves_the_error_for_a_weight_that_is_no_tensor_to_pytorch() -> None:
    weight: Any = [1.0] * 4
    with osm.override(), pytest.raises(TypeError, match="'weight'"):
        functional.cross_entropy(torch.randn(3, 4), torch.tensor([0, 1, 2]), weight)


def test_an_equal_number_of_a_wrong_type_is_refused_after_a_right_call() -> None:
    x, target = torch.zeros(3, 5), torch.zeros(3, dtype=torch.long)
    calls: tuple[tuple[Callable[..., Any], str, Any, tuple[Any, ...]], ...] = (
        (partial(osm.softmax, x, scale=2.0), "dim", 1, (1.0, True)),
        (partial(osm.token_logprobs, x, target), "dim", 1, (1.0, True, 1 + 0j)),
        (partial(osm.token_logprobs, x, target, softcap=2.0), "scale", 1.0, (True, np.True_)),
        (partial(osm.cross_entropy, x, target), "ignore_index", 1, (1.0, True)),
        (partial(osm.cross_entropy, x, target), "z_loss", 0, (0j,)),
        (partial(osm.cross_entropy, x, target), "label_smoothing", 0, (0j,)),
        (partial(osm.logsumexp, x, scale=2.0), "keepdim", False, (0, np.False_)),
        (partial(osm.route, x, 2), "scale", 1.0, (True,)),
    )
    for call, argument, right, wrong in calls:
        call(**{argument: right})
        for value in wrong:
            with pytest.raises((TypeError, ValueError), match=argument):
                call(**{argument: value})


@pytest.mark.parametrize("x", [torch.zeros(3, 5), np.zeros((3, 5))], ids=["torch", "numpy"])
def test_flags_are_bools(x: Any) -> None:
    for flag in ("keepdim", "batch_invariant"):
        with pytest.raises(TypeError, match=f"{flag} must be a bool, not str"):
            osm.logsumexp(x, **{flag: "no"})


def test_out_without_strides_is_named() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(5)] * 3, layout=torch.jagged)
    for out in (nested, torch.zeros(3, 5).to_sparse(), torch.zeros(3, 5).to_mkldnn()):
        with pytest.raises(RuntimeError, match=r"softmax\(\): out (is a nested tensor|has the layout)"):
            osm.softmax(torch.zeros(3, 5), out=out)
    with pytest.raises(RuntimeError, match=r"softmax\(\): out is on meta, and input on cpu"):
        osm.softmax(torch.zeros(3, 5), out=torch.empty(3, 5, device="meta"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace. is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_torchscript_samples() -> None:
    def sample(x: torch.Tensor) -> torch.Tensor:
        return osm.sample(x, seed=1, offset=2).token

    traced = torch.jit.trace(sample, torch.randn(3, 8), check_trace=False)
    x = torch.randn(CHUNK // 8 + 1, 8)
    assert torch.equal(traced(x), sample(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace. is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_torchscript_lists_tokens() -> None:
    """It has the operator, as a trace of torch.fx has."""
    traced = torch.jit.trace(lambda x: osm.topk_logprobs(x, 2).logprobs, torch.randn(3, 8))
    assert "onlinesoftmax::topk_logprobs" in str(traced.graph)
    x = torch.randn(5, 8)
    torch.testing.assert_close(traced(x), osm.topk_logprobs(x, 2).logprobs)


@pytest.mark.parametrize(
    ("name", "warm"), rest_exhaustive([(name, (i + j) % 2 == 0) for i in range(2) for j, name in enumerate(CALLS)])
)
def test_tracers_see_the_calls_on_tensors_that_they_find_outside(name: str, warm: bool) -> None:
    """Such a tensor is of the plain type, and a launch would write to a tensor without memory."""
    ours, _ = CALLS[name]
    x, t = torch.randn(3, 8, device=DEVICE), torch.tensor([1, 0, 2], device=DEVICE)
    want = ours(x, t, **HOW) + 1
    for _ in range(3 if warm else 0):
        ours(x, t, **HOW)

    class Plus(torch.nn.Module):
        def forward(self, one: torch.Tensor) -> torch.Tensor:
            return ours(x, t, **HOW) + one

    one = torch.ones((), device=DEVICE)
    exported = torch.export.export(Plus(), (one,), strict=False)
    traces = [make_fx(Plus(), tracing_mode=mode, _allow_non_fake_inputs=True)(one) for mode in ("real", "fake")]
    for traced in (exported.module(), *traces):
        assert "onlinesoftmax" in str(traced.graph)
        torch.testing.assert_close(traced(one), want)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = ours(x, t, **HOW)
    assert isinstance(found, FakeTensor)
    assert found.shape == want.shape


def test_vmap_takes_results_with_fields_that_are_none() -> None:
    x = torch.randn(3, 4, 8)
    found = torch.vmap(lambda x: osm.topk_logprobs(x, 2), out_dims=TopLogprobs(0, 0, 0, None, None, 0))(x)
    torch.testing.assert_close(found, osm.topk_logprobs(x, 2))


def test_a_trace_reads_no_value_of_a_tensor_on_a_cpu() -> None:
    """make_fx records calls on plain tensors too."""
    x = torch.randn(3, 8)
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: osm.topk_logprobs(x, 2)[:3], lambda x: osm.sample(x, seed=1, top_k=3, top_logprobs=2)[:7],
        lambda x: osm.route(x, 2)[:3],
    ]  # fmt: skip
    for call in calls:
        y = torch.randn(3, 8)
        torch.testing.assert_close(make_fx(call)(x)(y), call(y))
