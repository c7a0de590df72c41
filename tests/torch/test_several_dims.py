"""Softmax, log-softmax and logsumexp of torch tensors over several dimensions, against their definition in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from contract import DEVICE, OPERATIONS, outliers
from pairs import rest_exhaustive

ELEMENTWISE = ("softmax", "log_softmax")


def definition(operation: str, z: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The result in float64; no dimension stands for all of them, as in torch.logsumexp."""
    wide = z.double()
    lse = wide.logsumexp(tuple(dims) or tuple(range(z.dim())), keepdim=True)
    return lse if operation == "logsumexp" else wide - lse if operation == "log_softmax" else (wide - lse).exp()


def made(*shape: int) -> torch.Tensor:
    return outliers(*shape, dtype=torch.float32, device="cpu").to(DEVICE)


CASES: dict[str, tuple[Callable[[], torch.Tensor], Sequence[int]]] = {
    "neighbours": (lambda: made(3, 4, 5, 6), (1, 2)),
    "from the end": (lambda: made(3, 4, 5, 6), [-1, -2]),
    "apart": (lambda: made(3, 4, 5), (0, 2)),
    "all": (lambda: made(3, 4, 5), (2, 0, 1)),
    "none means all": (lambda: made(3, 4, 5), ()),
    "one": (lambda: made(3, 4, 5), torch.Size((1,))),
    "channels last": (lambda: made(2, 4, 5, 3).to(memory_format=torch.channels_last), (1, 2, 3)),
    "transposed": (lambda: made(5, 4).t(), (0, 1)),
    "expanded": (lambda: made(1, 5).expand(4, 5), (0, 1)),
    "sliced": (lambda: made(4, 6, 8)[1:, ::2, 1:7], (1, 2)),
    "no dimensions": (lambda: made(1)[0], (-1,)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_derivatives_and_out(case: str, path: dict[str, str]) -> None:
    make, dims = CASES[case]
    x = make()
    for operation in OPERATIONS:
        function = OPERATIONS[operation]
        keep = {"keepdim": True} if operation == "logsumexp" else {}
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        y, expected = function(leaf, dims, **keep, **path), definition(operation, wide, dims)
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-5)
        dy = torch.linspace(-1, 2, y.numel(), device=DEVICE).view(y.shape)
        for _ in range(2):
            # The gradient, then the gradient of the gradient.
            (y,), (expected,) = (
                torch.autograd.grad(f, t, dy.to(f.dtype), create_graph=True) for f, t in ((y, leaf), (expected, wide))
            )
            torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
            dy = torch.linspace(-1, 2, y.numel(), device=DEVICE).view(y.shape)
        result = function(x, dims, **keep, **path)
        for out in (torch.empty_like(result), torch.empty(result.shape, device=DEVICE), result.new_empty(0)):
            assert function(x, dims, out=out, **keep, **path) is out
            assert torch.equal(out, result)
        invariant = function(x, dims, batch_invariant=True, **keep, **path)
        torch.testing.assert_close(invariant, result)
        assert function(x.half(), dims, dtype=torch.float32, **keep, **path).dtype == torch.float32 or keep


def test_options(path: dict[str, str]) -> None:
    x = made(3, 4, 5, 6)
    for scale, bias, mask in (
        (torch.linspace(0.5, 2, 18).view(3, 1, 1, 6), made(5, 6), torch.arange(20).view(4, 5, 1) % 3 > 0),
        (torch.linspace(0.5, 2, 3).view(3, 1, 1, 1), made(6), torch.arange(72).view(3, 4, 1, 6) % 3 > 0),
        (torch.ones(1, 1), made(3, 1, 1, 1), torch.arange(5).view(5, 1) > 0),
    ):
        given = {"scale": scale.to(DEVICE), "bias": bias, "mask": mask.to(DEVICE), "softcap": 3.0}
        z = (3 * torch.tanh(x.double() * given["scale"] / 3) + bias).masked_fill(~given["mask"], -torch.inf)
        for operation, function in OPERATIONS.items():
            found = function(x, (1, 2), **given, fully_masked="zero", **path)
            expected = definition(operation, z, (1, 2))
            # Some rows are masked whole.
            expected = (
                expected.squeeze((1, 2)) if operation == "logsumexp" else expected.masked_fill(expected.isnan(), 0)
            )
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("operation", "path"), rest_exhaustive(itertools.product(ELEMENTWISE, ({}, {"backend": "triton"}))), ids=str
)
def test_compiled_and_mapped(operation: str, path: dict[str, str]) -> None:
    torch._dynamo.reset()
    x, scale = made(3, 4, 5, 6), torch.linspace(0.5, 2, 3, device=DEVICE).view(3, 1, 1, 1)
    function = lambda x, s: OPERATIONS[operation](x, (1, 2), scale=s, **path)  # noqa: E731  used twice
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = []
    for call, wide in ((compiled, False), (lambda x, s: definition(operation, x * s, (1, 2)), True)):
        leaves = [(t.double() if wide else t).clone().requires_grad_() for t in (x, scale)]
        y = call(*leaves)
        gradients = torch.autograd.grad((y * torch.linspace(0, 1, 6, device=DEVICE)).sum(), leaves)
        results.append([t.double() for t in (y, *gradients)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    mapped = torch.func.vmap(lambda x, s: OPERATIONS[operation](x, (0, 1), scale=s, **path))(x, scale)
    torch.testing.assert_close(mapped, function(x, scale))


def test_without_elements(path: dict[str, str]) -> None:
    for shape, dims in (((3, 0, 2), (1, 2)), ((0, 3, 2), (1, 2)), ((0,), ())):
        assert osm.softmax(torch.empty(shape, device=DEVICE), dims, **path).shape == shape


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "twice": ({"dim": (1, 1)}, RuntimeError, "names a dimension twice"),
    "twice, once from the end": ({"dim": (1, -3)}, RuntimeError, "names a dimension twice"),
    "out of range": ({"dim": (0, 4)}, IndexError, "Dimension out of range"),
    "a word": ({"dim": (0, "1")}, TypeError, "argument 'dim' .* must be int, not str"),
    "a flag": ({"dim": (True, 0)}, TypeError, "argument 'dim' .* must be int, not bool"),
    "causal": ({"dim": (1, 2), "causal": True}, ValueError, "causal needs one dim"),
    "scale": ({"dim": (1, 2), "scale": torch.ones(4, 1, 1)}, RuntimeError, "scale must .* one number per row"),
    "out of another shape": ({"dim": (1, 2), "out": torch.empty(3, 4)}, RuntimeError, "out has shape"),
    "out of another dtype": ({"dim": (1, 2), "out": torch.empty(3, 4, 5, 6).half()}, RuntimeError, "dtype"),
}


@pytest.mark.parametrize("operation", ELEMENTWISE)
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_an_error(case: str, operation: str, path: dict[str, str]) -> None:
    given, error, message = WRONG[case]
    given = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    with pytest.raises(error, match=message):
        OPERATIONS[operation](made(3, 4, 5, 6), **given, **path)


def test_out_of_a_call_with_a_gradient(path: dict[str, str]) -> None:
    x = made(3, 4, 5).requires_grad_()
    with pytest.raises(RuntimeError, match=r"do.* not support"):
        osm.softmax(x, (1, 2), out=torch.empty(3, 4, 5, device=DEVICE), **path)


def test_neighbouring_dimensions_are_not_copied() -> None:
    """The kernel gets the memory of the input and of `out`, in images whose channels are neighbours too."""
    from onlinesoftmax.torch import run

    seen: list[tuple[int, int]] = []
    original = run.run
    # The last call is the one over the joined dimension.
    run.run = lambda call: (seen.append((call.x.data_ptr(), call.out.data_ptr())), original(call))[1]
    try:
        for x in (made(2, 4, 5, 3), made(2, 4, 5, 3).to(memory_format=torch.channels_last)):
            out = torch.empty_like(x)
            osm.softmax(x, (1, 2, 3), out=out, backend="triton")
            assert seen.pop() == (x.data_ptr(), out.data_ptr())
    finally:
        run.run = original
