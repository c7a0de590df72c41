"""The modules are PyTorch's to whoever holds them: values, gradients, state, pickles, hooks; and `replace` swaps."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from contract import DEVICE

PAIRS = [
    pytest.param(osm.nn.Softmax, torch.nn.Softmax, "softmax", id="softmax"),
    pytest.param(osm.nn.LogSoftmax, torch.nn.LogSoftmax, "log_softmax", id="log_softmax"),
]
both = pytest.mark.parametrize(("ours", "theirs", "operation"), PAIRS)
Kind = Callable[..., torch.nn.Module]


def the_warnings(call: Callable[[], Any]) -> list[tuple[str, type[Warning], str, int]]:
    """Text, class, file and line of each warning of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(str(w.message), w.category, w.filename, w.lineno) for w in caught]


class Classifier(torch.nn.Module):
    """Softmax nested, shared, and in a subclass of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Softmax(dim=-1)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 6), self.shared, torch.nn.Softmax(dim=0)) for _ in range(2)
        )
        self.own = Halved(dim=-1)
        self.head = torch.nn.ModuleDict({"log": torch.nn.LogSoftmax(dim=1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head["log"](self.own(x))


class Halved(torch.nn.Softmax):
    """Something else than its parent, which `replace` cannot know."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / 2


@both
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 2, 2, 2)])
def test_without_a_dim_as_pytorch(ours: Kind, theirs: Kind, operation: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device=DEVICE)
    expected = the_warnings(lambda: theirs()(x))
    assert the_warnings(lambda: ours()(x)) == expected
    assert "Implicit dimension choice" in expected[0][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(ours()(x), theirs()(x))


@both
def test_is_pytorchs_to_whoever_asks(ours: Kind, theirs: Kind, operation: str) -> None:
    assert isinstance(ours(1), theirs)
    assert repr(ours(1)) == repr(theirs(1))
    assert repr(ours()) == repr(theirs())
    assert ours(1).state_dict() == theirs(1).state_dict() == {}
    ours(1).load_state_dict(theirs(1).state_dict())
    theirs(1).load_state_dict(ours(1).state_dict())


@both
def test_copies_and_pickles_keep_everything(ours: Kind, theirs: Kind, operation: str) -> None:
    module = ours(-1, scale=0.5, causal=True, fully_masked="zero").eval()
    x = torch.randn(4, 4, device=DEVICE)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(again) == repr(module)
        assert not again.training
        assert torch.equal(again(x), module(x))


@both
def test_options_reach_the_function(ours: Kind, theirs: Kind, operation: str) -> None:
    x = torch.randn(2, 4, 4, device=DEVICE)
    mask, bias = torch.rand(4, 4, device=DEVICE) > 0.5, torch.randn(4, device=DEVICE)
    options: dict[str, Any] = {"scale": 0.5, "causal": True, "softcap": 3.0, "fully_masked": "zero"}
    options |= {"batch_invariant": True}
    expected = getattr(osm, operation)(x, -1, mask=mask, bias=bias, **options)
    assert torch.equal(ours(-1, **options)(x, mask=mask, bias=bias), expected)


def test_logsumexp() -> None:
    x = torch.randn(3, 5, 7, device=DEVICE)
    for dim, keepdim in ((1, False), (-1, True), ((0, 2), True)):
        torch.testing.assert_close(osm.nn.LogSumExp(dim, keepdim)(x), torch.logsumexp(x, dim, keepdim))
    module = osm.nn.LogSumExp(2, causal=True, scale=2)
    assert torch.equal(module(x, bias=x), osm.logsumexp(x, 2, causal=True, scale=2, bias=x))
    assert module.state_dict() == {}
    assert repr(pickle.loads(pickle.dumps(module))) == repr(module)


def test_repr_shows_what_is_not_default() -> None:
    assert repr(osm.nn.Softmax(-1, scale=0.125, causal=True)) == "Softmax(dim=-1, scale=0.125, causal=True)"
    assert repr(osm.nn.LogSoftmax(0, fully_masked="zero")) == "LogSoftmax(dim=0, fully_masked='zero')"
    assert repr(osm.nn.LogSumExp(1, softcap=5.0)) == "LogSumExp(dim=1, softcap=5.0)"
    assert repr(osm.nn.LogSumExp((0, 1), True, batch_invariant=True)) == (
        "LogSumExp(dim=(0, 1), keepdim=True, batch_invariant=True)"
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": "2"}, TypeError, "scale must be a number"),
        ({"scale": torch.ones(())}, TypeError, "scale must be a number; pass a tensor to the function"),
        ({"causal": 1}, TypeError, "causal must be a bool"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
        ({"fully_masked": "one"}, ValueError, "fully_masked must be"),
        ({"batch_invariant": None}, TypeError, "batch_invariant must be a bool"),
    ],
)
@pytest.mark.parametrize("kind", [osm.nn.Softmax, osm.nn.LogSoftmax, osm.nn.LogSumExp])
def test_errors_come_when_the_module_is_made(kind: Kind, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"{kind.__name__}\(\): {message}"):
        kind(-1, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"label_smoothing": True}, TypeError, "argument 'label_smoothing' must be float, not bool"),
        ({"label_smoothing": 1.5}, RuntimeError, "label_smoothing must be from 0 to 1, got 1.5"),
        ({"z_loss": float("nan")}, ValueError, "z_loss must be at least 0 and finite in float32, got nan"),
        ({"ignore_index": 1.5}, TypeError, "argument 'ignore_index' must be int, not float"),
    ],
)
def test_errors_come_when_a_module_of_a_loss_is_made(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^CrossEntropyLoss\(\): {message}"):
        osm.nn.CrossEntropyLoss(**options)
    with pytest.raises(error, match=rf"^LinearCrossEntropyLoss\(\): {message}"):
        osm.nn.LinearCrossEntropyLoss(4, 5, **options)


def test_softmax2d_as_pytorch() -> None:
    ours, theirs = osm.nn.Softmax2d(), torch.nn.Softmax2d()
    for shape in ((2, 3, 4, 5), (3, 4, 5)):
        x = torch.randn(shape, device=DEVICE)
        torch.testing.assert_close(ours(x), theirs(x))
    for module in (ours, theirs):
        with pytest.raises(ValueError, match=r"Softmax2d: expected input to be 3D or 4D, got 2D instead"):
            module(torch.zeros(2, 2, device=DEVICE))
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, torch.nn.Softmax2d)


def test_replace_finds_the_nested_and_keeps_the_shared() -> None:
    model = Classifier().to(DEVICE)
    x = torch.randn(5, 6, device=DEVICE)
    before, names, weights = model(x), [name for name, _ in model.named_modules()], copy.deepcopy(model.state_dict())
    done = osm.nn.replace(model)
    assert done == osm.nn.Replaced(model, softmax=3, log_softmax=1)
    assert repr(done) == "Replaced(softmax=3, log_softmax=1, softmax2d=0, cross_entropy=0)"
    assert int(done) == 4
    assert done.model is model
    assert type(model.shared) is osm.nn.Softmax
    assert model.blocks[0][1] is model.blocks[1][1] is model.shared
    assert [block[2].dim for block in model.blocks] == [0, 0]
    assert type(model.head["log"]) is osm.nn.LogSoftmax
    assert type(model.own) is Halved
    assert [name for name, _ in model.named_modules()] == names
    model.load_state_dict(weights)
    Classifier().load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), before)


def test_replace_calls_our_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Softmax(1), torch.nn.LogSoftmax(1), torch.nn.Softmax2d())
    osm.nn.replace(model)
    called: list[tuple[str, int]] = []
    for name in ("softmax", "log_softmax"):
        monkeypatch.setattr(
            f"onlinesoftmax.api.{name}", lambda x, dim, name=name, **_: (called.append((name, dim)), x)[1]
        )
    model(torch.zeros(1, 2, 3, 4))
    assert called == [("softmax", 1), ("log_softmax", 1), ("softmax", -3)]


def test_replace_keeps_hooks_their_handles_and_the_training_flag() -> None:
    model = torch.nn.Sequential(torch.nn.Softmax(dim=-1)).eval()
    fired: list[str] = []
    model[0].register_forward_pre_hook(lambda *_: fired.append("before"))
    handle = model[0].register_forward_hook(lambda *_: fired.append("after"))
    model[0].register_full_backward_hook(lambda *_: fired.append("backward"))
    osm.nn.replace(model)
    assert not model[0].training
    x = torch.randn(2, 3, device=DEVICE, requires_grad=True)
    model(x).sum().backward()
    assert fired == ["before", "after", "backward"]
    handle.remove()
    model(x)
    assert fired[3:] == ["before"]


def test_replace_takes_a_root_that_is_a_softmax() -> None:
    root = torch.nn.LogSoftmax(dim=0)
    assert osm.nn.replace(root).model is root
    assert type(root) is osm.nn.LogSoftmax
    x = torch.randn(4, 3, device=DEVICE)
    torch.testing.assert_close(root(x), torch.log_softmax(x, 0))
    assert repr(copy.deepcopy(root)) == repr(pickle.loads(pickle.dumps(root))) == "LogSoftmax(dim=0)"


def test_replace_leaves_alone_what_is_not_exactly_pytorchs() -> None:
    ours = osm.nn.Softmax(dim=1, causal=True)
    model = torch.nn.Sequential(Halved(1), ours, torch.nn.Softmin(1), torch.nn.ReLU())
    assert int(osm.nn.replace(model)) == 0
    assert [type(module) for module in model] == [Halved, osm.nn.Softmax, torch.nn.Softmin, torch.nn.ReLU]
    assert ours.causal
    with pytest.raises(TypeError, match=r"replace\(\): model must be a torch\.nn\.Module, not list"):
        osm.nn.replace([torch.nn.Softmax()])


@pytest.mark.usefixtures("fresh_dynamo")
def test_replacing_nothing_points_to_override_unless_the_modules_are_ours() -> None:
    attention = torch.nn.MultiheadAttention(4, 1)
    with pytest.warns(
        UserWarning, match=r"replace\(\): MultiheadAttention has no module of Softmax, .*override\(\)"
    ) as found:
        osm.nn.replace(attention)
    assert found[0].filename == __file__
    model = torch.nn.Sequential(torch.nn.Softmax(1))
    assert [int(osm.nn.replace(model)) for _ in range(2)] == [1, 0]


def test_compiles_as_one_graph() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 6), osm.nn.Softmax(-1, scale=0.5, causal=True), osm.nn.LogSoftmax(0), osm.nn.LogSumExp(1)
    ).to(DEVICE)  # fmt: skip
    x = torch.randn(5, 6, device=DEVICE)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiles_without_a_dim() -> None:
    x = torch.randn(5, 6, device=DEVICE)
    y = torch.compile(osm.nn.Softmax(), backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(y, torch.softmax(x, 1))


@pytest.mark.usefixtures("fresh_dynamo")
def test_replace_through_a_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Softmax(-1)).to(DEVICE)
    assert int(osm.nn.replace(torch.compile(model, backend="eager", fullgraph=True))) == 1
    monkeypatch.setattr("onlinesoftmax.api.softmax", lambda x, *_, **__: x * 0)
    # What was traced before may live on, and is right; what is traced from now on is ours.
    torch._dynamo.reset()
    assert not torch.compile(model, backend="eager", fullgraph=True)(torch.randn(5, 6, device=DEVICE)).any()


def test_fx_traces_a_replaced_model() -> None:
    model = torch.nn.Sequential(torch.nn.Softmax2d(), torch.nn.Softmax(1), torch.nn.LogSoftmax(-1)).to(DEVICE)
    x = torch.randn(2, 3, 4, 5, device=DEVICE)
    before = model(x)
    osm.nn.replace(model)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), before)
