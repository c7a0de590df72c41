"""First mistakes of a user: arrays of another library, classes along another dimension, arguments that are swapped."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import onlinesoftmax as osm

ELEMENTWISE = ("softmax", "log_softmax", "logsumexp")
LOSSES = ("cross_entropy", "token_logprobs")
TARGET = torch.zeros(3, dtype=torch.long)


class OnDevice:
    """An array of a library that exchanges arrays by DLPack."""

    def __dlpack__(self) -> None: ...


class Table:
    """A table that NumPy can convert, as one of pandas."""

    def __array__(self) -> None: ...


def call(module: Any, name: str, x: Any) -> Any:
    return getattr(module, name)(x, *((TARGET.numpy() if module is not osm else TARGET,) if name in LOSSES else ()))


@pytest.mark.parametrize("name", ELEMENTWISE + LOSSES)
def test_each_framework_names_the_module_of_the_other(name: str) -> None:
    for value, words in (
        ([1.0, 2.0], r"torch\.tensor"), (3.0, r"torch\.tensor"), (OnDevice(), r"torch\.from_dlpack"),
        (Table(), r"numpy\.asarray"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"{name}\(\): argument .* must be Tensor, not \w+; .*{words}"):
            call(osm, name, value)
    if importlib.util.find_spec("jaxlib") is None:
        pytest.skip("needs jaxlib")
    import jax
    import jax.numpy as jnp

    message = rf"{name}\(\): the input is a JAX array \(\w+\): call onlinesoftmax\.jax\.{name}"
    with pytest.raises(TypeError, match=message):
        call(osm, name, jnp.zeros((3, 4)))
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda x: call(osm, name, x))(jnp.zeros((3, 4)))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(TypeError, match=rf"{name}: (x|logits) is a torch tensor: call onlinesoftmax\.{name}"):
            call(osm.jax, name, torch.zeros(3, 4, dtype=dtype))


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_token_logprobs"])
def test_heads_name_the_module_of_another_library(name: str) -> None:
    for x, words in (
        (np.zeros((3, 4)), r"input' must be Tensor, not ndarray; torch\.from_numpy"),
        ([[1.0]], r"input' must be Tensor, not list; .*torch\.tensor"),
    ):
        with pytest.raises(TypeError, match=rf"{name}\(\): argument '{words}"):
            getattr(osm, name)(x, x, TARGET)
    if importlib.util.find_spec("jaxlib") is None:
        pytest.skip("needs jaxlib")
    import jax.numpy as jnp

    for tensors in ((jnp.zeros((3, 4)), torch.zeros(5, 4)), (torch.zeros(3, 4), jnp.zeros((5, 4)))):
        with pytest.raises(TypeError, match=rf"{name}\(\): the input is a JAX array .*onlinesoftmax\.jax\.{name}"):
            getattr(osm, name)(*tensors, TARGET)


@pytest.mark.parametrize(
    ("x", "given", "message"),
    [
        (torch.zeros(4), {"mask": [True] * 4}, "mask must be a tensor or None, not list; make a tensor"),
        (torch.zeros(4), {"mask": np.ones(4, bool)}, r"mask must be Tensor.*not ndarray; torch\.from_numpy"),
        (np.zeros(4), {"bias": torch.zeros(4)}, "bias must be a NumPy array.*not Tensor; .* onlinesoftmax itself"),
        (np.zeros(4), {"dtype": torch.float32}, "dtype must be one of NumPy's"),
    ],
)
def test_options_of_another_library(x: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        osm.softmax(x, **given)


MISTAKES = [
    ((2, 5, 7), torch.zeros(2, 5).long(), r"classes are dimension 1.*input\.flatten\(0, -2\), target\.flatten\(\), or"),
    ((2, 5, 7), torch.zeros(10).long(), r"classes are dimension 1.*input\.flatten\(0, -2\)$"),
    ((2, 3, 5, 7), torch.zeros(2, 3, 5).long(), r"classes are dimension 1.*input\.movedim\(-1, 1\)"),
    ((10, 7), torch.zeros(2, 5).long(), r"pass target\.reshape\(10\)"),
    ((3, 4), torch.zeros(3, 1).long(), r"pass target\.reshape\(3\)"),
    ((3, 4), torch.zeros(3, 4).long(), r"class probabilities are floating point.*target\.argmax\(1\)"),
    ((3, 4), torch.zeros(3), r"class indices are integers: target\.long\(\)"),
    ((3, 4), torch.zeros(2).long(), r"target has shape \(2,\), and the rows of input \(3,\)$"),
]


@pytest.mark.parametrize(("shape", "target", "message"), MISTAKES)
def test_targets_of_a_wrong_shape(shape: tuple[int, ...], target: torch.Tensor, message: str) -> None:
    x = torch.zeros(shape)
    with pytest.raises((RuntimeError, ValueError)):
        functional.cross_entropy(x, target)
    with pytest.raises((RuntimeError, ValueError), match=message):
        osm.cross_entropy(x, target)


def test_the_advice_is_right() -> None:
    x, target = torch.randn(2, 5, 7), torch.arange(10).view(2, 5) % 7
    flat = osm.cross_entropy(x.flatten(0, -2), target.flatten())
    torch.testing.assert_close(flat, osm.cross_entropy(x.movedim(-1, 1), target))


@pytest.mark.parametrize("name", LOSSES)
def test_integer_logits_and_swapped_arguments(name: str) -> None:
    function, x = getattr(osm, name), torch.zeros(3, 4)
    for error in (NotImplementedError, RuntimeError):
        with pytest.raises(error, match=r"must be floating point of 16 to 64 bits, got torch\.int64$"):
            function(x.long(), TARGET)
        with pytest.raises(error, match="swapped"):
            function(TARGET, x)
        with pytest.raises(error, match="swapped"):
            function(TARGET.numpy(), x.numpy())


X, HIDDEN, HEAD = torch.zeros(3, 4), torch.zeros(3, 8), torch.zeros(5, 8)
WRONG_NAMES = [
    ("softmax", (X,), {"temperature": 2.0}, r"'temperature': pass scale=1/temperature$"),
    ("softmax", (X,), {"axis": 0}, "'axis': pass dim=$"),
    ("log_softmax", (X,), {"where": X > 0}, "'where': pass mask=$"),
    ("logsumexp", (X,), {"keepdims": True}, "'keepdims': pass keepdim=$"),
    ("softmax", (), {"logits": X}, "'logits': pass input=$"),
    ("cross_entropy", (X, TARGET), {"lse_square_scale": 1e-4}, "pass z_loss=$"),
    ("cross_entropy", (X, TARGET), {"label_smooth": 0.1}, "pass label_smoothing=$"),
    ("token_logprobs", (X,), {"labels": TARGET}, "'labels': pass index=$"),
    ("sample", (X,), {"topp": 0.9}, "'topp': pass top_p=$"),
    ("sample", (X,), {"topK": 5}, "'topK': pass top_k=$"),
    ("sample", (X,), {"scale": 2.0}, "pass temperature=1/scale$"),
    ("route", (X, 2), {"norm_topk_prob": True}, "pass renormalize=$"),
    ("route", (X,), {"top_k": 2}, "pass k=$"), ("route", (X, 1), {"temperature": 2.0}, "'temperature': it takes log"),
    ("linear_token_loss", (HIDDEN, HEAD, TARGET, max), {"support": X}, "linear_token_logprobs takes support$"),
    ("linear_cross_entropy", (HIDDEN, HEAD, TARGET), {"mask": X}, "'mask': it takes input, linear_weight, target, "),
    ("topk_logprobs", (X, 2), {"largest": True}, "'largest': it takes logits, k, target, "),
    ("topk_logprobs", (X, 2), {"logit_bias": X}, "'logit_bias': it takes logits, k, target, "),
    ("explain", ((3, 4),), {"gpu": "h200"}, "'gpu': pass device=$"),
    ("override", (), {"linaer": True}, "pass linear=$"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "given", "message"), WRONG_NAMES)
def test_a_wrong_name_is_answered_with_the_right_one(name: str, args: Any, given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument .*{message}"):
        getattr(osm, name)(*args, **given)


def test_a_call_without_an_argument_or_with_too_many_shows_the_order() -> None:
    with pytest.raises(TypeError, match=r"missing 1 required .*: call topk_logprobs\(logits, k, \*, target, scale"):
        osm.topk_logprobs(X)
    with pytest.raises(TypeError, match=r"takes 1 positional .*: call sample\(logits, \*, temperature, top_k, "):
        osm.sample(X, 0.7)
    with pytest.raises(TypeError, match=r"target, loss, \*per_token, \*, linear_bias"):
        osm.linear_token_loss(HIDDEN, HEAD)


def test_modules_and_sharded_functions_answer_too() -> None:
    for made, message in (
        (lambda: osm.nn.Softmax(axis=1), r"^Softmax\(\) .*'axis': pass dim=$"),
        (lambda: osm.nn.CrossEntropyLoss(temperature=2), r"^CrossEntropyLoss\(\) .*pass scale=1/temperature$"),
        (lambda: osm.nn.Router(8, 4, top_k=2), r"^Router\(\) .*pass k=$"),
        (lambda: osm.distributed.softmax(X, axis=1), r"^softmax\(\) .*pass dim=$"),
    ):
        with pytest.raises(TypeError, match=message):
            made()


def test_names_of_torch_in_the_functions_of_jax() -> None:
    pytest.importorskip("jaxlib")
    import jax
    import jax.numpy as jnp

    x = jnp.zeros((3, 4))
    for given, message in (
        ({"dim": 1}, "pass axis="),
        ({"mask": x > 0}, "pass where="),
        ({"temperature": 2}, "1/temp"),
    ):
        with pytest.raises(TypeError, match=message):
            osm.jax.softmax(x, **given)
    with pytest.raises(TypeError, match=r"call sample\(seed, logits, \*, "):
        osm.jax.sample(x)
    for seed in (0, jax.random.key(0)):
        with pytest.raises(TypeError, match=r"call sample\(seed, logits, \.\.\.\)"):
            osm.jax.sample(x, seed)
    with pytest.raises(ValueError, match=r"pass linear_weight\.T$"):
        osm.jax.linear_cross_entropy(jnp.zeros((3, 8)), jnp.zeros((8, 5)), jnp.zeros(3, int))
    assert pickle.loads(pickle.dumps(osm.jax.softmax)) is osm.jax.softmax


def test_an_error_from_inside_a_function_stays_as_it_is() -> None:
    def loss(logprob: Any, entropy: Any, lse: Any) -> Any:
        return sorted(logprob, axis=1)

    with pytest.raises(TypeError, match=r"^'axis' is an invalid keyword argument for sort\(\)$"):
        osm.linear_token_loss(HIDDEN, HEAD, TARGET, loss)


LOSSES_OF_TOKENS: list[tuple[Any, int, str | None]] = [
    (lambda logprob, entropy, lse: -logprob, 0, None),
    (lambda logprob, *others: -logprob, 1, None),
    (partial(lambda factor, logprob, *others: -factor * logprob, 2.0), 1, None),
    (lambda logprob, entropy, lse: -logprob, 1, r"here with 4 arguments, and takes \(logprob, entropy, lse\)$"),
    (lambda logprob: -logprob, 0, r"here with 3 arguments, and takes \(logprob\)$"),
    (
        lambda logprob, entropy, lse, old: -logprob,
        0,
        r"here with 3 arguments, and takes \(logprob, entropy, lse, old\)$",
    ),
]


@pytest.mark.parametrize(("loss", "per_token", "message"), LOSSES_OF_TOKENS)
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_loss_of_tokens_that_takes_other_arguments(library: str, loss: Any, per_token: int, message: str) -> None:
    if library == "jax":
        jnp, module = pytest.importorskip("jax.numpy"), osm.jax
        given = [jnp.asarray(t.numpy()) for t in (HIDDEN, HEAD, TARGET)]
        beside = [jnp.zeros(3)] * per_token
    else:
        module, given, beside = osm, [HIDDEN, HEAD, TARGET], [torch.zeros(3)] * per_token
    if message is None:
        assert module.linear_token_loss(*given, loss, *beside).shape == ()
        return
    with pytest.raises(TypeError, match=rf"loss is called as loss\(logprob, entropy, lse, \*per_token\), {message}"):
        module.linear_token_loss(*given, loss, *beside)
    with pytest.raises(ValueError, match=r"got 'none'; for other means pass weights as a per_token argument and red"):
        module.linear_token_loss(*given, lambda logprob, *others: -logprob, reduction="none")


def test_a_public_function_is_still_one() -> None:
    from onlinesoftmax import api

    assert inspect.signature(osm.softmax) == inspect.signature(api.softmax)
    assert pickle.loads(pickle.dumps(osm.softmax)) is osm.softmax
    assert osm.softmax.__doc__ == api.softmax.__doc__
    torch.compile(osm.softmax, backend="eager", fullgraph=True)(X)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("options", [{}, {"scale": 2.0}, {"backend": "eager"}])
def test_integers_have_no_softmax(name: str, options: dict[str, Any]) -> None:
    for x in (TARGET, TARGET.numpy(), TARGET > 0):
        with pytest.raises(
            NotImplementedError, match=rf"^{name}\(\): input of dtype .* is not floating point; pass dty"
        ):
            getattr(osm, name)(x, **options)


ROUTER = osm.nn.Router(8, 4, 2, correction=True)
OTHER_MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: osm.load_balancing_loss(X), r"routed must be .*not Tensor: call route\(logits, k, prob_sums=True\) first"),
    (lambda: osm.load_balancing_loss(X, TARGET), "routed must be the result of route"),
    (lambda: osm.router_z_loss((X, TARGET)), "routed must be .*not tuple: call route"),
    (lambda: osm.load_balancing_loss(ROUTER(HIDDEN), TARGET), "kind must be 'switch' or 'sequence', got Tensor$"),
    (lambda: osm.load_balancing_loss(osm.nn.Router(8, 4, 2).eval()(HIDDEN)), r"in training mode, and not after eval\("),
    (lambda: ROUTER.balance(ROUTER(HIDDEN)), r"counts must be .*: pass routed\.counts$"),
    (lambda: ROUTER.balance(torch.ones(3)), "one number for each of the 4 experts in the last dimension, got shape"),
    (lambda: ROUTER(torch.zeros(3, 9)), "input must have hidden_size = 8 numbers in its last dimension, got shape"),
    (lambda: ROUTER(torch.zeros(3, 8).long()), r"input must be hidden states, .*got torch\.int64"),
    (lambda: osm.linear_cross_entropy(HIDDEN, HEAD.T, TARGET), r"got \(8, 5\) for input .*; pass linear_weight\.T$"),
    (lambda: osm.linear_token_logprobs(HIDDEN, HEAD.T, TARGET), r"; pass linear_weight\.T$"),
    (lambda: osm.linear_cross_entropy(HIDDEN, TARGET, HEAD), "are linear_weight and target swapped"),
    (lambda: osm.linear_cross_entropy(HIDDEN, torch.nn.Linear(8, 5), TARGET), "linear_weight.*of a module, pass the"),
    (lambda: osm.explain((3, 4), device="l40s"), r"unknown device 'l40s'.*by its name: l4\)"),
    (lambda: osm.explain((3, 4), device="RTX 5090"), r"by its name: rtx4090\)"),
    (lambda: osm.explain((3, 4), device="gaudi2"), "name the one that is most like it, or leave the device out"),
]  # fmt: skip


OF_GROUPS: dict[str, Callable[[Any], Any]] = {
    "load_balancing_loss": lambda group: osm.load_balancing_loss(osm.route(X, 2, prob_sums=True), group=group),
    "router_z_loss": lambda group: osm.router_z_loss(osm.route(X, 2), group=group),
    "balance": lambda group: ROUTER.balance(torch.ones(4), group=group),
    "all_reduce": lambda group: osm.State.of(X, -1).all_reduce(group),
    "Shards.of": lambda group: osm.distributed.Shards.of(X, -1, group),
    "softmax": lambda group: osm.distributed.softmax(X, group=group),
    "log_softmax": lambda group: osm.distributed.log_softmax(X, group=group),
    "logsumexp": lambda group: osm.distributed.logsumexp(X, group=group),
    "sample": lambda group: osm.distributed.sample(X, group=group),
    "topk_logprobs": lambda group: osm.distributed.topk_logprobs(X, 2, group=group),
    "cross_entropy": lambda group: osm.distributed.cross_entropy(X, TARGET, group=group),
    "token_logprobs": lambda group: osm.distributed.token_logprobs(X, TARGET, group=group),
    "linear": lambda group: osm.distributed.linear_cross_entropy(HIDDEN, HEAD, TARGET, group=group),
}


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_group_that_is_none_is_named(name: str) -> None:
    message = r"^group must be a process group of torch\.distributed or None, not str$"
    with pytest.raises(TypeError, match=message):
        OF_GROUPS[name]("world")
    with osm.distributed.one_process(), pytest.raises(TypeError, match=message):
        OF_GROUPS[name]("world")


def test_a_group_of_numpy_arrays_is_named() -> None:
    with pytest.raises(TypeError, match="group: the counts are a NumPy array"):
        osm.router_z_loss(osm.route(X.numpy(), 2), group="world")


@pytest.mark.parametrize(("call", "message"), OTHER_MISTAKES)
def test_the_error_names_the_argument_and_the_next_step(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call()


NUMBERS: dict[str, tuple[str, ...]] = {
    "sample": ("temperature", "top_k", "top_p", "min_p", "seed", "offset", "softcap", "top_logprobs", "return_support"),
    "topk_logprobs": ("k", "softcap"),
    "route": ("k", "groups", "group_k", "group_score", "renormalize", "scale", "counts", "prob_sums", "dense"),
    "token_logprobs": ("ignore_index", "softcap", "entropy"),
    "linear_cross_entropy": (
        "reduction", "ignore_index", "label_smoothing", "z_loss", "softcap", "return_stats", "memory",
    ),
    "linear_token_logprobs": ("ignore_index", "softcap", "memory"),
}  # fmt: skip
"""Arguments of functions that are numbers, words or flags."""

WHOLE = (
    "top_k",
    "seed",
    "offset",
    "top_logprobs",
    "return_support",
    "k",
    "groups",
    "group_k",
    "ignore_index",
    "memory",
)
"""Those that are integers."""

OPERANDS: dict[str, tuple[str, ...]] = {
    "sample": ("logits", "bias", "mask"), "topk_logprobs": ("logits", "target", "scale", "mask"),
    "route": ("logits", "indices"), "token_logprobs": ("logits", "index", "scale", "mask"),
    "linear_cross_entropy": ("input", "linear_weight", "target", "linear_bias", "weight", "scale", "token_weight"),
    "linear_token_logprobs": ("input", "linear_weight", "target", "linear_bias", "scale"),
}  # fmt: skip
"""Arguments of functions that are arrays."""


@pytest.mark.parametrize("library", ["torch", "numpy", "jax"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_value_of_a_wrong_kind_names_its_argument(name: str, library: str) -> None:
    if library == "numpy" and name.startswith("linear"):
        pytest.skip("heads take no arrays of NumPy")
    jnp: Any = pytest.importorskip("jax.numpy") if library == "jax" else None
    make = {"torch": torch.from_numpy, "numpy": np.asarray, "jax": getattr(jnp, "asarray", None)}[library]
    x, target, seed = make(np.zeros((3, 5), np.float32)), make(np.array([0, 1, 4])), 1
    heads = {"input": make(HIDDEN.numpy()), "linear_weight": make(HEAD.numpy()), "target": target}
    given = {
        "sample": {"seed": seed},
        "topk_logprobs": {"k": 2},
        "route": {"k": 2},
        "token_logprobs": {"index": target},
    }
    arguments = {"logits": x, **given[name]} if name in given else heads
    wrong = [np.array(["a"]), np.array("a"), np.array([None]), "x", {}, object(), 1j]
    wrong += [torch.ones(3, 5).to_sparse()] if library == "torch" else []
    cases = [(argument, value) for argument in NUMBERS[name] + OPERANDS[name] for value in wrong]
    cases += [(argument, np.array(1.5)) for argument in NUMBERS[name] if argument in WHOLE]
    cases += [(argument, 10**30) for argument in OPERANDS[name] if argument != "scale"]
    cases += [("mask", np.float64(0.5))] if "mask" in OPERANDS[name] else []
    for argument, value in cases:
        said = "where" if argument == "mask" and library == "jax" else argument
        with pytest.raises((TypeError, ValueError, RuntimeError), match=said):
            getattr(osm.jax if jnp else osm, name)(**{**arguments, said: value})


def test_numbers_that_no_array_holds() -> None:
    loss = osm.linear_cross_entropy(HIDDEN, HEAD, TARGET, z_loss=10**30)
    assert loss == osm.linear_cross_entropy(HIDDEN, HEAD, TARGET, z_loss=1e30)
    assert osm.cross_entropy(X, TARGET, z_loss=10**30) == osm.cross_entropy(X, TARGET, z_loss=1e30)
    for call in (lambda n: osm.cross_entropy(X, TARGET, ignore_index=n), lambda n: HEAD_LOSS(ignore_index=n)):
        assert call(-(2**63)) == call(-100)
        with pytest.raises(ValueError, match="ignore_index must fit int64, got 1"):
            call(10**30)
    with pytest.raises(TypeError, match=r"token_weight must hold real numbers, got torch\.complex64"):
        HEAD_LOSS(token_weight=torch.ones(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="scale must be a number or a tensor, not ndarray"):
        osm.linear_token_logprobs(HIDDEN, HEAD, TARGET, scale=np.ones((3, 5)))


HEAD_LOSS = partial(osm.linear_cross_entropy, HIDDEN, HEAD, TARGET)
