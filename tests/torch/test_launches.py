"""Repeated cacheable calls, whose launch is found under a key, do what first calls do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ways import HOW

import onlinesoftmax as osm
from contract import DEVICE, OPERATIONS, outliers
from onlinesoftmax.torch import fast_path, run
from pairs import rest_exhaustive

pytestmark = pytest.mark.usefixtures("cacheable")


def test_a_cache_is_bounded_and_all_are_emptied(monkeypatch: pytest.MonkeyPatch, prepared: Any) -> None:
    osm.softmax(torch.randn(3, 5, device=DEVICE), 1, **HOW)
    assert prepared()
    fast_path.forget()
    assert not any(fast_path._CACHES)
    monkeypatch.setattr(fast_path, "MOST_ENTRIES", 2)
    found: dict[tuple[Any, ...], int] = {}
    for number in range(3):
        assert fast_path.keep(found, (number,), number) == number
    assert found == {(2,): 2}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("start", [0, 1])
def test_same_bits_as_the_general_path(operation: str, start: int, prepared: Any) -> None:
    # A start of 1 puts the first element beside a 16-byte boundary, which is another kernel.
    x = outliers(4 * 33 + 1, dtype=torch.float32, device=DEVICE)[start:][: 4 * 33].view(4, 33)
    call = OPERATIONS[operation]
    general = call(x, 1, dtype=torch.float32, **HOW)
    assert not prepared()
    for _ in range(4):
        assert torch.equal(call(x, 1, **HOW), general)
    out = torch.empty_like(general)
    for _ in range(4):
        assert call(x, 1, out=out.fill_(torch.nan), **HOW) is out
        assert torch.equal(out, general)
    assert prepared() == 2


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_empty_view_as_out(operation: str) -> None:
    """Once it has the shape of the result, it keeps its place in the storage, which may be beside 16 bytes."""
    x = outliers(4, 33, dtype=torch.float32, device=DEVICE)
    want = OPERATIONS[operation](x, 1, **HOW)
    for start in (0, 1, 1, 0):
        storage = torch.full((200,), -7.0, device=DEVICE)
        out = storage[start:start]
        assert OPERATIONS[operation](x, 1, out=out, **HOW) is out
        assert torch.equal(out, want)
        assert out.data_ptr() == storage[start:].data_ptr()
        assert (storage[start + want.numel() :] == -7).all()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [0, 1])
def test_recorded_calls_have_the_gradient_of_the_general_path(
    operation: str, dtype: torch.dtype, dim: int, prepared: Any
) -> None:
    x = outliers(4 * 33, dtype=dtype, device=DEVICE).view(4, 33).requires_grad_()
    call = OPERATIONS[operation]
    for more in ({}, {"keepdim": True}) if operation == "logsumexp" else ({},):
        general = call(x, dim, dtype=dtype, **more, **HOW)
        dy = torch.randn_like(general)
        (gradient,) = torch.autograd.grad(general, x, dy)
        before = prepared()
        for _ in range(4):
            usual = call(x, dim, **more, **HOW)
            assert torch.equal(usual, general)
            assert torch.equal(torch.autograd.grad(usual, x, dy)[0], gradient)
        assert prepared() == before + 1
        with torch.no_grad():
            assert torch.equal(call(x, dim, **more, **HOW), general)
        assert prepared() == before + 2


def test_the_gradient_of_a_recorded_logsumexp_is_differentiated() -> None:
    x = torch.randn(3, 5, device=DEVICE, requires_grad=True)
    (gradient,) = torch.autograd.grad(osm.logsumexp(x, 1, **HOW).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient[:, 0].sum(), x)
    y = torch.softmax(x.detach(), 1)
    expected = -y[:, :1] * y
    expected[:, 0] += y[:, 0]
    torch.testing.assert_close(second, expected)


@pytest.mark.parametrize("shape", [(33,), (1, 33), (3, 1, 33), (1, 1, 33), (2, 3, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_new_outputs_have_memory_and_usual_strides(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device=DEVICE, dtype=dtype).transpose(0, -1)
    for keepdim, recorded in ((False, False), (True, False), (True, True)):
        call = osm.logsumexp(x.detach().requires_grad_(recorded), 0, keepdim, **HOW)
        again = osm.logsumexp(x.detach().requires_grad_(recorded), 0, keepdim, **HOW)
        expected = torch.logsumexp(x, 0, keepdim)
        for y in (call, again):
            assert y.stride() == torch.empty(expected.shape).stride()
            torch.testing.assert_close(y, expected)
        assert call.data_ptr() != again.data_ptr()
    y = osm.softmax(x, 0, **HOW)
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.softmax(x, 0))


def test_settings_are_part_of_the_key() -> None:
    x = torch.randn(6, 6, device=DEVICE)
    for dim in (0, 1):
        assert torch.equal(osm.softmax(x, dim, **HOW), osm.softmax(x, dim, dtype=x.dtype, **HOW))
        assert osm.logsumexp(x, dim, **HOW).shape == (6,)
        assert osm.logsumexp(x, dim, keepdim=True, **HOW).dim() == 2


def test_out_is_checked_in_every_call() -> None:
    base = torch.randn(64, device=DEVICE)
    x, apart, shifted = base[:16], base[32:48], base[8:24]
    expected = osm.softmax(x.clone(), **HOW)
    osm.softmax(x, out=apart, **HOW)
    assert torch.equal(apart, expected)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out overlaps input"):
            osm.softmax(x, out=shifted, **HOW)
    with pytest.raises(RuntimeError, match="out requires a gradient"):
        osm.softmax(x, out=apart.clone().requires_grad_(), **HOW)
    with pytest.raises(RuntimeError, match="out has shape"):
        osm.softmax(x, out=base[32:40], **HOW)
    assert osm.softmax(x, out=x, **HOW) is x
    assert torch.equal(x, expected)


def test_negations_that_pytorch_has_put_off_are_carried_out_in_operands() -> None:
    def negated(*shape: int) -> torch.Tensor:
        t = torch.randn(shape, dtype=torch.complex64, device=DEVICE).conj().imag
        assert t.is_neg()
        return t

    def same(ours: Any, expected: Any, dy: torch.Tensor) -> None:
        x = torch.randn(3, 40, device=DEVICE, requires_grad=True)
        for _ in range(4):
            y, wanted = ours(x), expected(x)
            torch.testing.assert_close(y, wanted)
            for graph in (False, True):
                how = {"retain_graph": True, "create_graph": graph}
                gradients = [torch.autograd.grad(each, x, dy, **how) for each in (y, wanted)]
                torch.testing.assert_close(*gradients)

    bias, scale, target = negated(3, 40), negated(3, 1), torch.tensor([1, 2, 3], device=DEVICE)
    cross_entropy = torch.nn.functional.cross_entropy
    same(lambda x: osm.softmax(x, 1, **HOW), lambda x: torch.softmax(x, 1), negated(3, 40))
    same(lambda x: osm.logsumexp(x, 1, **HOW), lambda x: torch.logsumexp(x, 1), negated(3))
    same(
        lambda x: osm.softmax(x, 1, bias=bias, scale=scale, batch_invariant=True, **HOW),
        lambda x: torch.softmax(x * scale + bias, 1), negated(3, 40),
    )  # fmt: skip
    for reduction, dy in (("mean", negated(1)[0]), ("none", negated(3))):
        same(
            lambda x, reduction=reduction: osm.cross_entropy(x, target, reduction=reduction, **HOW),
            lambda x, reduction=reduction: cross_entropy(x, target, reduction=reduction), dy,
        )  # fmt: skip


def test_a_lazy_negation_is_left_to_pytorch_or_refused() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64, device=DEVICE).conj().imag
    assert x.is_neg()
    for _ in range(2):
        torch.testing.assert_close(osm.softmax(x), torch.softmax(x, -1))
        with pytest.raises(osm.PlanError, match="lazily negated"):
            osm.softmax(x, backend="triton")


SCORE_OPTIONS: list[dict[str, Any]] = [
    {"scale": 0.5}, {"softcap": 3.0}, {"scale": -2.0, "softcap": 9.0, "causal": True},
]  # fmt: skip


@pytest.mark.parametrize(("operation", "options"), rest_exhaustive(itertools.product(OPERATIONS, SCORE_OPTIONS)))
def test_score_options_that_are_numbers_are_part_of_the_key(
    operation: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, prepared: Any
) -> None:
    x = outliers(4 * 33, dtype=torch.float32, device=DEVICE).view(4, 33).requires_grad_()
    found = []
    for _ in range(3):
        y = OPERATIONS[operation](x, 1, **options, **HOW)
        found.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)))
        found.append((y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y[:1]).expand_as(y))))
        with torch.no_grad():
            assert torch.equal(OPERATIONS[operation](x, 1, **options, **HOW), y)
        assert prepared() == 2
    monkeypatch.setattr(run, "look_up", lambda *_: ((), None))
    general = OPERATIONS[operation](x, 1, **options, **HOW)
    want = general, *torch.autograd.grad(general, x, torch.ones_like(general))
    for results in found:
        assert all(map(torch.equal, results, want))


class _Marked(torch.Tensor):
    """A subclass, whose functions may do anything."""


def _beside_16_bytes(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


OTHER_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda t: t[:2],
    "strides": lambda t: t.t().contiguous().t(),
    "dtype": lambda t: t.double(),
    "records": lambda t: t.clone().requires_grad_(),
    "alignment": _beside_16_bytes,
    "negation": torch._neg_view,
    "conjugate": lambda t: torch.complex(t, t).conj(),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "subclass": lambda t: t.as_subclass(_Marked),
    "sparse": lambda t: t.to_sparse(),
    "compressed": lambda t: t.to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "jagged": lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
    "meta": lambda t: t.to("meta"),
    "absent": lambda _: None,
    "array": lambda t: t.cpu().numpy(),
    "number": lambda _: 7,
} | ({"opaque": lambda t: t.to_mkldnn()} if DEVICE == "cpu" else {})


def _traced(look: Callable[[], None]) -> None:
    def function(t: torch.Tensor) -> torch.Tensor:
        look()
        return t + 1

    torch.jit.trace(function, torch.ones(2), check_trace=False)


def _in_forward_mode(look: Callable[[], None]) -> None:
    with torch.autograd.forward_ad.dual_level():
        look()


def _under(transform: Callable[..., Any]) -> Callable[[Callable[[], None]], None]:
    def run(look: Callable[[], None]) -> None:
        def function(t: torch.Tensor) -> torch.Tensor:
            look()
            return t.sum()

        transform(function)(torch.ones(2))

    return run


def _with_autocast(look: Callable[[], None]) -> None:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        look()


MODES: dict[str, Callable[[Callable[[], None]], None]] = {
    "vmap": _under(torch.vmap), "grad": _under(torch.func.grad), "functionalize": _under(torch.func.functionalize),
    "forward mode": _in_forward_mode, "trace": _traced, "autocast": _with_autocast,
}  # fmt: skip


class TestGuards:
    """A call that is found twice is found by a guard of its tensors from then on, as by its key."""

    @pytest.fixture
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return torch.randn(4, 8, device=DEVICE), torch.randn(4, 8, device=DEVICE)

    @pytest.fixture
    def find(self, tensors: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        """The function that looks up a call without its key."""

        def look(*given: Any) -> Any:
            return fast_path.look_up(("name",), *given)[1]

        key, found = fast_path.look_up(("name",), *tensors)
        assert found is None
        fast_path.keep(fast_path.PREPARED_CALLS, key, "run")
        assert [look(*tensors) for _ in range(3)] == ["run"] * 3
        fast_path.PREPARED_CALLS.clear()
        return look

    def test_like_tensors_are_found(self, find: Any, tensors: Any) -> None:
        assert find(*map(torch.clone, tensors)) == find(*tensors, None) == "run"
        assert find(tensors[0]) is None
        assert find(*tensors, tensors[0]) is None

    @pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")  # both are in beta
    @pytest.mark.parametrize("place", [0, 1])
    @pytest.mark.parametrize("other", OTHER_TENSORS)
    def test_other_tensors_are_not(self, other: str, place: int, find: Any, tensors: Any) -> None:
        given = list(tensors)
        given[place] = OTHER_TENSORS[other](given[place])
        assert find(*given) is None
        assert find(*tensors) == "run"

    @pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")  # and still used
    @pytest.mark.parametrize("mode", MODES)
    def test_modes_end_the_search(self, mode: str, find: Any, tensors: Any) -> None:
        found = []
        MODES[mode](lambda: found.append(find(*tensors)))
        assert set(found) == {None}
        assert find(*tensors) == "run"

    @pytest.mark.parametrize("count", [2, fast_path.MOST_GUARDS, fast_path.MOST_GUARDS + 1])
    def test_calls_in_turn_are_found(self, count: int) -> None:
        calls = [(str(rows), torch.randn(rows, 8, device=DEVICE)) for rows in range(1, count + 1)]
        for name, x in calls:
            fast_path.keep(fast_path.PREPARED_CALLS, fast_path.look_up(("name",), x)[0], name)
        for _ in range(3):
            assert [fast_path.look_up(("name",), x)[1] for _, x in calls] == [name for name, _ in calls]
        fast_path.PREPARED_CALLS.clear()
        by_guards = [name if count <= fast_path.MOST_GUARDS else None for name, _ in calls]
        assert [fast_path.look_up(("name",), x)[1] for _, x in calls] == by_guards

    def test_a_call_that_records_is_another_one(self) -> None:
        x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
        fast_path.keep(fast_path.PREPARED_CALLS, fast_path.look_up(("name",), x)[0], "recorded")
        for _ in range(3):
            assert fast_path.look_up(("name",), x)[1] == "recorded"
        with torch.no_grad():
            assert fast_path.look_up(("name",), x)[1] is None
        with torch.inference_mode():
            assert fast_path.look_up(("name",), x)[1] is None
        assert fast_path.look_up(("name",), x)[1] == "recorded"
