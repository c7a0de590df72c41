"""Heads in a block of `override(linear=...)`: the losses that need no logits, and all that needs them."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from spellings import BACKEND, DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint

import onlinesoftmax as osm

F = nn.functional
CLASSES = 40
CE, LOGPROBS = "linear_cross_entropy", "linear_token_logprobs"
Tensor = torch.Tensor


def target() -> Tensor:
    return torch.tensor([[3, 39, -100, 7, 0], [1, 1, 12, 38, 5]], device=DEVICE)


def classes() -> Tensor:
    return target().clamp(min=0)


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 5, 8), (CLASSES, 8), (CLASSES,)
    return [(torch.randn(shape, generator=generator) / 2).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def results(function: Callable[[Tensor], Any], block: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
    """What a function makes of logits, and the gradients of the sum of its squares."""
    x, weight, bias = leaves(dtype)
    with block:
        found = function(F.linear(x, weight, bias))
    found = list(found) if isinstance(found, tuple | list) else [found]
    squares = [y.square().sum() for y in found if y.requires_grad]
    if squares:
        torch.stack(squares).sum().backward()
    return [y.detach() for y in found] + [leaf.grad for leaf in (x, weight, bias)]


def assert_same(function: Callable[[Tensor], Any], block: Any) -> None:
    """The error against float64 is at most twice that of PyTorch, and one unit in the last place."""
    plain, found = results(function, nullcontext()), results(function, block)
    wide = results(function, nullcontext(), torch.float64)
    for a, b, exact in zip(found, plain, wide, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            allowed = 2 * (b - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
            assert (a - exact).abs().max() <= allowed


def rows_of_logprobs(z: Tensor) -> Tensor:
    """As selective_log_softmax of TRL, which takes bfloat16 row by row."""
    rows = zip(z, classes(), strict=True)
    return torch.stack([F.log_softmax(row, dim=-1).gather(-1, i.unsqueeze(-1)).squeeze(-1) for row, i in rows])


def logits_less_lse(z: Tensor) -> Tensor:
    """As selective_log_softmax of TRL and logprobs_from_logits of verl, in float32."""
    chosen = torch.gather(z, dim=-1, index=classes().unsqueeze(-1)).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in z])


def scaled_in_place(z: Tensor) -> Tensor:
    first = z[0]
    z.squeeze(0).div_(0.7)
    return F.cross_entropy(first, target()[0])


def of_mask(z: Tensor) -> Tensor:
    counts = target() > 4
    return F.cross_entropy(z[counts] * 2, target()[counts])


def of_probabilities(z: Tensor) -> Tensor:
    wanted = torch.linspace(0, 2 / CLASSES, CLASSES, device=DEVICE, dtype=z.dtype).expand(10, CLASSES)
    return F.cross_entropy(z.flatten(0, 1), wanted, label_smoothing=0.1)


def weighted(z: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, CLASSES, device=DEVICE, dtype=z.dtype)
    return torch.nn.CrossEntropyLoss(weight, label_smoothing=0.2)(z.view(-1, CLASSES), target().view(-1))


TAKEN: dict[str, tuple[Callable[[Tensor], Any], dict[str, int]]] = {
    "flat": (lambda z: F.cross_entropy(z.view(-1, CLASSES), target().view(-1)), {CE: 1}),
    "shifted": (
        lambda z: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, CLASSES), target()[:, 1:].reshape(-1)), {CE: 1},
    ),
    "last tokens": (
        lambda z: F.cross_entropy(z[:, -2:].reshape(-1, CLASSES), target()[:, -2:].reshape(-1), reduction="none"),
        {CE: 1},
    ),
    "classes before tokens": (lambda z: F.cross_entropy(z.transpose(1, 2), target(), reduction="none"), {CE: 1}),
    "sum by a count": (
        lambda z: F.cross_entropy(z.flatten(0, 1), target().flatten(), reduction="sum") / target().numel(), {CE: 1},
    ),
    "weighted": (weighted, {CE: 1}),
    "probabilities": (of_probabilities, {CE: 1}),
    "softcap": (
        lambda z: F.cross_entropy((torch.tanh(z / 3) * 3).unflatten(0, (1, 2)).flatten(0, 2), target().view(-1)),
        {CE: 1},
    ),
    "softcap and temperature": (
        lambda z: F.cross_entropy((F.tanh(z / 3) * 3 / 0.5).view(-1, CLASSES), target().view(-1)), {CE: 1},
    ),
    "each sequence": (lambda z: [F.cross_entropy(a, b) for a, b in zip(z, target(), strict=True)], {CE: 2}),
    "chunks": (
        lambda z: [
            F.cross_entropy(a.flatten(0, 1), b.flatten())
            for a, b in zip(z.chunk(2, 1), target().chunk(2, 1), strict=True)
        ],
        {CE: 2},
    ),
    "all classes": (lambda z: loss(z.split([CLASSES], -1)[0]), {CE: 1}),  # as tensor parallelism of one process
    "mask": (of_mask, {CE: 1}),
    "in place": (scaled_in_place, {CE: 1}),
    "one token": (lambda z: F.cross_entropy(z[:1, :1].squeeze(), target()[0, 0]), {CE: 1}),
    "nll_loss": (lambda z: F.nll_loss(z.log_softmax(-1).view(-1, CLASSES), target().view(-1)), {CE: 1}),
    "detached": (lambda z: F.cross_entropy(z.detach().view(-1, CLASSES), target().view(-1)), {CE: 1}),
    "log_softmax": (lambda z: F.log_softmax(z / 0.7, -1).gather(-1, classes().unsqueeze(-1)), {LOGPROBS: 1}),
    "rows": (rows_of_logprobs, {LOGPROBS: 2}),
    "logits and lse": (logits_less_lse, {LOGPROBS: 1}),
    "lse": (lambda z: z.logsumexp(-1, keepdim=True), {LOGPROBS: 1}),
    "our loss": (
        lambda z: osm.cross_entropy((z * 2).view(-1, CLASSES), target().view(-1), z_loss=0.1, softcap=5.0), {CE: 1},
    ),
    "our statistics": (
        lambda z: osm.cross_entropy(z.view(-1, CLASSES), target().view(-1), return_stats=True)[0], {CE: 1},
    ),
    "our logprobs": (lambda z: tuple(osm.token_logprobs(z, target(), scale=0.5, ignore_index=-100)), {LOGPROBS: 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_losses_that_need_no_logits(name: str) -> None:
    function, taken = TAKEN[name]
    mode = osm.override(linear=CLASSES, strict=True)
    assert_same(function, mode)
    assert mode.report() == osm.overrides.Report(taken, {})


def loss(z: Tensor) -> Tensor:
    return F.cross_entropy(z.view(-1, CLASSES), target().view(-1))


def in_place(z: Tensor) -> tuple[Tensor, ...]:
    """Copies keep the old numbers, views see the new ones."""
    copied, view = 2 * z, z[:, :-1]
    z[:, 0] = 0
    z += 1
    return loss(copied), z, view


def saved(z: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(z, file)
    file.seek(0)
    found: Tensor = torch.load(file)
    assert type(found) is Tensor
    return found.detach()


def of_support(z: Tensor) -> Tensor:
    """Log-probabilities where each token is restricted to its class and the class 0."""
    own = classes().clamp(min=1)
    ids = torch.stack([torch.zeros_like(own), own], -1).flatten()
    return osm.token_logprobs(z, own, support=(ids, torch.arange(0, len(ids) + 1, 2, device=DEVICE))).logprob


COMPUTED: dict[str, tuple[Callable[[Tensor], Any], str | None]] = {
    "loss, and what needs logits": (lambda z: (loss(z), z.softmax(-1), z.argmax(-1)), "softmax"),
    "in place": (in_place, "fill_"),
    "cut classes": (lambda z: F.cross_entropy(z[..., :30].reshape(-1, 30), classes().clamp(max=29).view(-1)), "slice"),
    "negative": (lambda z: loss(-z), "neg"),
    "numpy": (lambda z: torch.from_numpy(z.detach().cpu().numpy()).to(DEVICE), "numpy" if DEVICE == "cpu" else None),
    "pickle": (lambda z: pickle.loads(pickle.dumps(z.detach())), "__reduce_ex__"),
    "save": (saved, "__reduce_ex__"),
    "deepcopy": (lambda z: copy.deepcopy(z.detach()), "__deepcopy__"),
    "our softmax": (lambda z: osm.softmax(z), "softmax"),
    "our logprobs of a support": (of_support, "token_logprobs"),
    "loss in a checkpoint": (lambda z: checkpoint(lambda z: loss(z).cos(), z, use_reentrant=False), "cross_entropy"),
    "vmap": (lambda z: torch.vmap(lambda row: row.sin())(z), "sin"),
    "other device and back": (lambda z: z.double().float(), "_to_copy"),
}


def test_the_report_says_that_a_head_is_too_small() -> None:
    x, weight, bias = leaves()
    with osm.override(linear=CLASSES + 1) as mode:
        loss(F.linear(x, weight, bias))
    said = f"its logits have {CLASSES} classes, and a head has {CLASSES + 1} or more; linear={CLASSES} takes it"
    assert mode.report().left["linear", said] == 1
    with osm.override(linear=CLASSES) as mode:
        loss(F.linear(x, weight, bias))
    assert not mode.report().left
    kind = f"{CE} of {x.shape[:-1].numel()} x {x.shape[-1]} float32 on {x.device}"
    told = f"{kind}: stored, 3 products with {CLASSES} classes; all logits at once, 1.6 kB"
    assert told in mode.report().plans[CE]


@pytest.mark.parametrize("name", COMPUTED)
def test_other_functions_get_the_logits(name: str) -> None:
    function, reason = COMPUTED[name]
    mode = osm.override(linear=CLASSES, backend=BACKEND)
    assert_same(function, mode)
    reasons = {reason for name, reason in mode.report().left if name == "linear"}
    assert reasons == {f"{reason} needs the logits"} or reason is None
    assert all(count == 1 for count in mode.report().left.values())


def test_the_tensor_is_one_of_pytorch() -> None:
    x, weight, bias = leaves()
    expected = F.linear(x, weight, bias)
    mode = osm.override(linear=CLASSES)
    with mode:
        z = F.linear(x, weight, bias)
    assert isinstance(z, Tensor)
    assert (z.shape, z.stride(), z.dtype, z.device, z.requires_grad, z.is_leaf, len(z), z.numel()) == (
        expected.shape, expected.stride(), expected.dtype, expected.device, True, False, 2, 400,
    )  # fmt: skip
    assert mode.report() == osm.overrides.Report({}, {})
    # The block has ended, and the tensor lives on.
    torch.testing.assert_close(loss(z), loss(expected))
    assert repr(z.detach()) == repr(expected.detach())
    assert f"{z[0, 0, 0]:.3f}" == f"{expected[0, 0, 0]:.3f}"
    assert mode.report() == osm.overrides.Report({CE: 1}, {("linear", "__repr__ needs the logits"): 1})
    found: list[Tensor] = []
    with mode:
        z = F.linear(x, weight, bias)
    thread = threading.Thread(target=lambda: found.extend([loss(z), z.exp()]))
    thread.start()
    thread.join()
    torch.testing.assert_close(found, [loss(expected), expected.exp()])
    with pytest.raises(RuntimeError, match="unsqueeze_ changes the shape of logits in place"):
        z.unsqueeze_(0)
    with pytest.raises(RuntimeError, match="the data of logits cannot be set"):
        z.data = torch.ones(2, 5, CLASSES, device=DEVICE)


def test_weights_that_have_changed_are_an_error() -> None:
    x, weight, bias = leaves()
    with osm.override(linear=CLASSES):
        z, other = F.linear(x, weight, bias), F.linear(x, weight, bias)
    expected = z + 0
    with torch.no_grad():
        weight.mul_(2)
    torch.testing.assert_close(z + 0, expected)
    with osm.override(linear=CLASSES):
        third = F.linear(x, weight, bias)
    weight.data = weight.data / 2
    for logits in (other, third):
        for function in (loss, torch.exp):
            with pytest.raises(RuntimeError, match=r"its input or its weight has changed or been freed since"):
                function(logits)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside: bool) -> None:
    """Logits are bfloat16, their loss is float32, inside the block of autocast and after it."""

    def training(block: Any) -> list[Tensor]:
        x, weight, bias = leaves()
        with block:
            with torch.autocast(DEVICE, torch.bfloat16):
                z = F.linear(x, weight, bias)
                y = loss(z.float()) if inside else None
            # F.log_softmax(z, -1, torch.float32) and type_as both name the device.
            y = loss(z.type_as(x)) if y is None else y
        y.backward()
        return [z.detach() + 0, y, *(t.grad for t in (x, weight, bias) if t.grad is not None)]

    mode = osm.override(linear=CLASSES)
    expected, found = training(nullcontext()), training(mode)
    assert mode.report().taken == {CE: 1}
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-9)


def test_few_tokens_without_gradients_are_computed_at_once() -> None:
    x, weight, bias = leaves()
    mode = osm.override(linear=CLASSES, strict=True, leave=["cross_entropy"])
    for context in (torch.no_grad(), torch.inference_mode()):
        with mode, context:
            assert type(F.linear(x, weight, bias)) is Tensor
            many = F.linear(x.repeat(30, 1, 1), weight, bias)
            y = F.nll_loss(many.log_softmax(-1).view(-1, CLASSES), target().repeat(30, 1).view(-1))
        torch.testing.assert_close(y, loss(F.linear(x, weight, bias)).detach())
        assert not y.requires_grad
    assert mode.report() == osm.overrides.Report({CE: 2}, {})
    with mode:
        assert type(F.linear(x, weight[1:], bias[1:])) is Tensor
    with osm.override(linear=CLASSES):
        assert type(F.linear(x, weight, bias[:1])) is Tensor


def test_nested_blocks_and_functions_that_are_left() -> None:
    x, weight, bias = leaves()
    outer, inner = osm.override(linear=CLASSES), osm.override(backend="eager")
    with outer, inner:
        loss(F.linear(x, weight, bias))
        F.linear(x, weight, bias).softmax(-1)
    assert outer.report() == osm.overrides.Report({CE: 1}, {("linear", "softmax needs the logits"): 1})
    assert inner.report() == osm.overrides.Report({"softmax": 1}, {})
    mode = osm.override(linear=CLASSES, leave=["cross_entropy"])
    with mode:
        loss(F.linear(x, weight, bias))
    assert mode.report().taken == {}
    with (
        pytest.raises(RuntimeError, match="PyTorch would compute a linear: exp needs the logits"),
        osm.override(linear=CLASSES, strict=True),
    ):
        F.linear(x, weight, bias).exp()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:The .grad attribute:UserWarning")
def test_heads_that_compute_their_logits() -> None:
    tensors = leaves()
    expected = loss_of_head(*tensors).detach()
    mode = osm.override(linear=CLASSES, backend="eager")
    with mode:
        found = [
            torch.compile(loss_of_head, backend="aot_eager", fullgraph=True)(*tensors),
            torch.func.grad_and_value(loss_of_head)(*tensors)[1],
        ]
        # The loss breaks the graph.
        found.append(torch.compile(loss, backend="aot_eager")(F.linear(*tensors)))
    for y in found:
        torch.testing.assert_close(y.detach(), expected)
    assert {reason for name, reason in mode.report().left if name == "linear"} == {
        "torch.compile traces it",
        "torch.func, forward mode or TorchScript transforms it",
    }
    assert mode.report().taken == {CE: 1, "cross_entropy": 1}


def loss_of_head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return loss(F.linear(x, weight, bias))


def repeated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: checkpoint(function, *tensors, use_reentrant=False)


IN_CHECKPOINTS: dict[str, Callable[..., Tensor]] = {
    "head and loss": repeated(loss_of_head),
    "in the middle": repeated(lambda *tensors: loss_of_head(*tensors).cos().exp()),
    "head": lambda *tensors: loss(repeated(lambda x, *others: F.linear(x.exp(), *others))(*tensors)),
    "decorated": repeated(lambda *tensors: osm.override(linear=CLASSES, strict=True)(loss_of_head)(*tensors).cos()),
}


@pytest.mark.parametrize("name", IN_CHECKPOINTS)
def test_heads_in_checkpoints(name: str) -> None:
    """A thread repeats the forward, as the thread of a GPU does."""

    def training(block: Any) -> list[Any]:
        tensors = leaves()
        with block:
            y = IN_CHECKPOINTS[name](*tensors)
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
        return [y.detach(), *(t.grad for t in tensors)]

    expected = training(nullcontext())
    mode = osm.override(linear=CLASSES, strict=True)
    torch.testing.assert_close(training(mode), expected)
    assert set(mode.report().taken) == ({CE} if name != "decorated" else set())


@pytest.mark.parametrize("wrong", [1, -3, 2.5, "many", None])
def test_wrong_numbers_of_classes(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"override\(\): linear must be a bool or a number of classes above 1, not"):
        osm.override(linear=wrong)
