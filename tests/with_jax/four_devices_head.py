"""Checks of the head without logits on four devices; test_jax_sharded.py runs this file."""

from __future__ import annotations

import math
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_losses import assert_leaves_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import mesh_of

import fast_xla
import onlinesoftmax.jax as osj
from onlinesoftmax.linear import plans

fast_xla.share_context()

TOKENS, HIDDEN, CLASSES = (8, 6), 6, 24
IN_TOKENS, IN_COLUMNS = 8 * 24 * 4, 48 * (4 + 6) * 4 + 60
"""Bytes with which whole arrays are cut into chunks of tokens and of columns."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"TOKEN_TILE": 7, "COLUMN_TILE": 1, "FEWEST_TOKENS": 7, "FEWEST_COLUMNS": 4, "COLUMN_BYTES": 1}
    for name, value in small.items():
        monkeypatch.setattr(plans, name, value)


@cache
def arrays() -> tuple[Any, ...]:
    """(input, weight, bias, target, weights of classes); one target is ignored."""
    rng = np.random.default_rng(0)
    target = rng.integers(0, CLASSES, TOKENS)
    target[1, 2] = -100
    shapes = (*TOKENS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)
    x, w, b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return x, w, b, jnp.asarray(target), jnp.arange(1.0, CLASSES + 1) / CLASSES


def results(name: str, a: tuple[Any, ...], axis_name: Any = None) -> Any:
    """A number for each token, or for all."""
    x, w, b, target, class_weight = a
    how = {"linear_bias": b, "axis_name": axis_name, "memory": IN_TOKENS}
    in_columns = how | {"memory": IN_COLUMNS}
    if name == "sum":
        return osj.linear_cross_entropy(x, w, target, reduction="sum", softcap=4.0, **how)
    if name == "own":
        # An array that a loss uses is whole on every device.
        factors = jnp.asarray([0.1, 0.0])
        loss = lambda logprob, entropy, lse: entropy - 2 * logprob + factors[0] * lse**2  # noqa: E731  one use
        return osj.linear_token_loss(x, w, target, loss, reduction="sum", **how)
    if name == "none":
        return osj.linear_cross_entropy(x, w, target, reduction="none", z_loss=0.1, **in_columns)
    if name == "tokens":
        found = osj.linear_token_logprobs(x, w, target, ignore_index=-100, softcap=4.0, **in_columns)
        return found.logprob + 0.5 * found.entropy - 0.1 * found.lse
    y, found = osj.linear_cross_entropy(
        x, w, target, weight=class_weight, reduction="none", label_smoothing=0.1, z_loss=0.1, return_stats=True,
        linear_bias=b, axis_name=axis_name,
    )  # fmt: skip
    return y + found.entropy + found.lse * (found.largest + found.correct) / CLASSES


NAMES = ("sum", "own", "none", "tokens", "weights and statistics")


def with_gradients(names: tuple[str, ...], a: tuple[Any, ...], mapped: Any = None) -> Any:
    def both(name: str) -> Any:
        def total(*some: Any) -> Any:
            y = results(name, (*some, *a[3:])) if mapped is None else mapped(name)(*some, *a[3:])
            return jnp.sum(jnp.sin(y)), y

        (_, y), found = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*a[:3])
        return y, found

    return {name: both(name) for name in names}


@cache
def whole() -> Any:
    return jax.jit(with_gradients, static_argnums=0)(NAMES, arrays())


def assert_same(ours: Any) -> None:
    assert_leaves_close(ours, {name: whole()[name] for name in ours}, rtol=2e-5, atol=2e-5)


BOTH = (P("d"), P("v"), P("v"), P("d"), P("v"))
"""Tokens along d, and classes along v."""


def sharded(specs: tuple[Any, ...], kind: AxisType = AxisType.Auto) -> list[Any]:
    mesh = mesh_of(2, 2, kind=kind)
    return [jax.device_put(t, NamedSharding(mesh, spec)) for t, spec in zip(arrays(), specs, strict=True)]


@pytest.mark.parametrize(
    ("specs", "names"),
    [(BOTH, NAMES), ((P(None, "d"), P(), P(), P(None, "d"), P()), ("sum",)), ((P("d"),) * 5, ("none",))],
    ids=["both", "the second axis of tokens", "one axis for both"],
)
def test_jit_of_sharded_arrays(specs: tuple[Any, ...], names: tuple[str, ...]) -> None:
    """Neither tokens nor logits are gathered; each gradient is added up once."""
    cut = sharded(specs)
    program = jax.jit(with_gradients, static_argnums=0).lower(names, cut).compile()
    assert_same(program(cut))
    moved = re.findall(r"= (.*?) (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", program.as_text())
    shapes = [(kind, shape) for types, kind in moved for shape in re.findall(r"\[([\d,]+)\]", types)]
    local = math.prod(TOKENS) // (1 if specs[0] == P() else 2)
    # States of at most four numbers of two devices; with one axis for both, the weight.
    gathered = [math.prod(map(int, shape.split(","))) for kind, shape in shapes if kind != "all-reduce"]
    assert all(size <= 2 * 4 * local or (specs[0] == specs[1] and size in (24, 144)) for size in gathered)
    if names == ("sum",):
        assert sorted(shapes) == [("all-reduce", "24"), ("all-reduce", "24,6")]


@pytest.mark.parametrize("checked", [True, False])
def test_shard_map(checked: bool) -> None:
    mesh, names = mesh_of(2, 2), ("own", "tokens", "weights and statistics") if checked else ("sum", "none")

    def mapped(name: str) -> Any:
        def of_device(*a: Any) -> Any:
            y = results(name, a, "v")
            return y if y.ndim else jax.lax.psum(y, "d")

        spec = P("d") if whole()[name][0].ndim else P()
        return jax.shard_map(of_device, mesh=mesh, in_specs=BOTH, out_specs=spec, check_vma=checked)

    assert_same(jax.jit(lambda a: with_gradients(names, a, mapped))(arrays()))


def test_explicit_axes() -> None:
    """Tokens and classes, and hidden with one axis for tokens and classes; gradients lie where their arrays lie."""
    of_hidden = P("d", None, "v"), P("d", "v"), P("d"), P("d"), P("d")
    for specs, names in ((BOTH, ("tokens",)), (of_hidden, ("own",))):
        cut = sharded(specs, AxisType.Explicit)
        found = jax.jit(with_gradients, static_argnums=0)(names, cut)
        assert_same(found)
        for _, gradients in found.values():
            for one, t in zip(gradients, cut[:3], strict=True):
                assert one.sharding.is_equivalent_to(t.sharding, t.ndim)
    # The equations of a loss are lowered without the explicit axes of the mesh in which they were traced.
    with jax.set_mesh(mesh_of(2, 2, kind=AxisType.Explicit)):
        loss = results("own", arrays())
    assert jnp.allclose(loss, whole()["own"][0], rtol=2e-5)


def test_classes_that_are_added_for_fast_products() -> None:
    """In 16 bits 1026 classes become 1088, all of the added ones on the last device; a bias excludes them there."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-1, 2, shape), "float16") for shape in ((8, 6), (1026, 6)))
    target = jnp.asarray(rng.integers(0, 1026, 8))

    def both(x: Any, w: Any) -> Any:
        def own(x: Any, w: Any) -> Any:
            return sum(t.sum() for t in osj.linear_token_logprobs(x, w, target))

        total = partial(osj.linear_cross_entropy, target=target, reduction="sum")
        return [jax.value_and_grad(f, (0, 1))(x, w) for f in (total, own)]

    mesh = mesh_of(2, 2)
    cut = [jax.device_put(t, NamedSharding(mesh, spec)) for t, spec in ((x, P("d")), (w, P("v")))]
    with jax.enable_x64(True):
        theirs = jax.tree.map(np.asarray, jax.jit(both)(x.astype("float64"), w.astype("float64")))
    program = jax.jit(both).lower(*cut)
    assert "<1088x" in program.as_text()
    assert_leaves_close(program.compile()(*cut), theirs, rtol=2**-8, atol=2**-10)
