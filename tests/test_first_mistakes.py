"""First mistakes of a user: arrays of another library, classes along another dimension, arguments that are swapped."""

from __future__ import annotations

import importlib.util
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
        with pytest.raises(error, match=r"must be floating point, got torch\.int64$"):
            function(x.long(), TARGET)
        with pytest.raises(error, match="swapped"):
            function(TARGET, x)
        with pytest.raises(error, match="swapped"):
            function(TARGET.numpy(), x.numpy())
