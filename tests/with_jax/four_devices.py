"""Checks of `onlinesoftmax.jax` on four devices, with rows that are sharded; test_jax_sharded.py runs this file.

XLA simulates the devices, so JAX must not have started with one.  A check compiles many functions as one program, which
takes less time than many programs.
"""

from __future__ import annotations

import gc
import re
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_losses import assert_leaves_close, classes, logits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import (
    COLS,
    ELEMENTWISE,
    KERNEL,
    LAYOUTS,
    NAMES,
    ROWS,
    Call,
    arguments,
    assert_contract,
    assert_small_exchanges,
    cotangents,
    every_function,
    functions,
    mapped,
    mesh_of,
    specs_of,
    with_gradients,
)

import fast_xla
import onlinesoftmax.jax as osj

# Traces make many objects, and few of them are cycles.  tests/conftest.py, with the same setting, is not read here.
gc.freeze()
gc.set_threshold(100000, 20, 20)
fast_xla.share_context()
fast_xla.name_partitions()

MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("layout", "dtype", "names"),
    [
        # The others have what "loss" and "tokens" exchange.
        ("columns", "float32", tuple(name for name in NAMES["float32"] if name not in ("loss", "tokens"))),
        pytest.param("both", "bfloat16", NAMES["bfloat16"], marks=MORE),
        ("columns along two axes", "float32", ("softmax", "loss, smoothing", "tokens")),
    ],
    ids=str,
)  # fmt: skip
def test_sharded_rows_are_as_good_as_whole_rows(layout: str, dtype: str, names: tuple[str, ...]) -> None:
    calls = every_function(axis_name=LAYOUTS[layout][2])
    calls = {name: mapped(name, calls[name], layout) for name in names}
    program = jax.jit(partial(with_gradients, calls)).lower(arguments(dtype)).compile()
    assert_contract(program(arguments(dtype)), dtype)
    # A state is at most four numbers, and every device receives those of four devices.
    assert_small_exchanges(program, 4 * 4 * ROWS)


def test_kernels_compute_the_states() -> None:
    """Those of the other calls are compared below, under jit."""
    calls = functions(axis_name="v", **KERNEL)
    calls = {name: mapped(name, calls[name], "both") for name in ("loss, smoothing", "tokens, options")}
    found = jax.jit(partial(with_gradients, calls))(arguments())
    assert_contract(found, "float32")


@pytest.mark.parametrize(
    ("layout", "kind", "forced", "names"),
    [
        ("both", AxisType.Auto, {}, tuple(functions())),
        pytest.param("both", AxisType.Explicit, {}, ("softmax", "logsumexp", "loss, smoothing", "tokens"), marks=MORE),
        ("both", AxisType.Auto, KERNEL, ("softmax, options", "loss, z_loss", "tokens")),
        ("columns along two axes", AxisType.Explicit, KERNEL, ("log_softmax", "loss, smoothing", "tokens, options")),
    ],
    ids=str,
)  # fmt: skip
def test_jit_of_sharded_arrays_gathers_no_row(
    layout: str, kind: AxisType, forced: dict[str, str], names: tuple[str, ...]
) -> None:
    _, rows, cols = LAYOUTS[layout]
    specs, mesh = specs_of(rows, cols), mesh_of(2, 2, kind=kind)
    cut = {name: jax.device_put(t, NamedSharding(mesh, specs[name])) for name, t in arguments().items()}
    calls = functions(**forced)
    program = jax.jit(partial(with_gradients, {name: calls[name] for name in names})).lower(cut).compile()
    found = program(cut)
    assert_contract(found, "float32")
    assert_small_exchanges(program, 4 * 4 * ROWS)
    for name, (_, dx) in found.items():
        assert dx.sharding.is_equivalent_to(cut["x"].sharding, 2), name


@pytest.mark.parametrize(
    ("name", "cols"),
    [
        pytest.param("logsumexp", 2, marks=MORE), ("loss", 3), pytest.param("tokens without entropy", 3, marks=MORE),
        ("tokens", 4),
    ],
)  # fmt: skip
def test_as_many_columns_as_results_per_row(name: str, cols: int) -> None:
    """A primitive stacks its results per row along a last axis, which is whole although it is as long as the row."""
    calls: dict[str, Call] = {
        "logsumexp": lambda x, target: osj.logsumexp(x, -1),
        "loss": osj.cross_entropy,
        "tokens without entropy": lambda x, target: osj.token_logprobs(x, target, entropy=False)[::2],
        "tokens": lambda x, target: tuple(osj.token_logprobs(x, target)),
    }
    mesh = jax.make_mesh((cols,), ("v",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:cols])
    x, change, target = logits(ROWS, cols), logits(ROWS, cols, seed=6), classes(ROWS, cols=cols)

    def every_kind(x: Any, change: Any, target: Any) -> Any:
        y, of_change = jax.jvp(lambda x: calls[name](x, target), (x,), (change,))
        _, vjp = jax.vjp(lambda x: calls[name](x, target), x)
        return y, of_change, vjp(cotangents(y))[0]

    cut = [
        jax.device_put(t, NamedSharding(mesh, spec))
        for t, spec in ((x, P(None, "v")), (change, P(None, "v")), (target, P(None)))
    ]
    ours, whole = jax.jit(every_kind)(*cut), jax.jit(every_kind)(x, change, target)
    assert_leaves_close(ours, whole, rtol=2e-6, atol=2e-6)
    *per_row, dx = jax.tree.leaves(ours)
    assert {t.sharding.spec for t in per_row} == {P(None)}
    assert dx.sharding.spec == P(None, "v")


@pytest.mark.parametrize("forced", [{}, pytest.param(KERNEL | {"strategy": "looped"}, marks=pytest.mark.exhaustive)])
def test_whole_rows_stay_where_they_are(forced: dict[str, str]) -> None:
    """Every operation on rows that lie on several devices, and on rows that are cut where kernels run."""
    x, target = jnp.arange(8 * 6 * 10.0).reshape(8, 6, 10) % 7, jnp.arange(48).reshape(8, 6) % 10
    bias = jnp.arange(60.0).reshape(6, 10) % 7

    def results(x: Any, target: Any, bias: Any, forced: dict[str, str] = forced) -> Any:
        names = ("softmax", "logsumexp")
        plain = (getattr(osj, name)(x, axis=-1, bias=bias, where=x > 0, softcap=4.0, **forced) for name in names)
        loss, tokens = osj.cross_entropy(x, target, label_smoothing=0.1, **forced), osj.token_logprobs
        return *plain, loss, *tokens(x, target, **forced)

    def with_gradient(x: Any, target: Any, bias: Any, f: Call = results) -> Any:
        def total(x: Any, bias: Any) -> Any:
            found = f(x, target, bias)
            return sum(jnp.sum(jnp.where(jnp.isfinite(t), t, 0) ** 2) for t in found), found

        gradient, found = jax.grad(total, (0, 1), has_aux=True)(x, bias)
        return found, gradient

    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    whole = jax.jit(partial(with_gradient, f=partial(results, forced={})))(x, target, bias)
    for f, spec in ((with_gradient, P("a", "b")), *([(results, P("b", None, "a"))] if forced else [])):
        placed = ((x, spec), (target, P(*spec[:2])), (bias, P()))
        cut = [jax.device_put(t, NamedSharding(mesh, s)) for t, s in placed]
        program = jax.jit(f).lower(*cut).compile()
        assert_leaves_close(program(*cut), whole if f is with_gradient else whole[0], atol=1e-5)
        # Only rows that are cut are exchanged: their states.
        assert ("all-gather" in program.as_text()) == (len(spec) == 3), spec
    rows = P("a", "b")
    mapped = jax.shard_map(results, mesh=mesh, in_specs=(rows, rows, P("b")), out_specs=rows)
    program = jax.jit(partial(with_gradient, f=mapped)).lower(x, target, bias).compile()
    assert "all-gather" not in program.as_text()
    assert_leaves_close(program(x, target, bias), whole, atol=1e-5)


def test_torch_is_never_imported() -> None:
    osj.softmax(jnp.ones((2, 3)), backend="pallas")
    assert "torch" not in sys.modules


SPECIAL = {
    "-inf": (slice(None), -np.inf),
    "a device of -inf": (slice(2, 4), -np.inf),
    "+inf": (slice(5, 6), np.inf),
    "NaN": (slice(7, 8), np.nan),
    "a -inf": (slice(0, 1), -np.inf),
    "large": (slice(3, 4), 3e38),
    "both": (slice(2, 8, 5), np.asarray([np.inf, -np.inf])),
    "numbers": (slice(0), 0.0),
}
"""Columns of eight, of which a device has two, and their values; the others are normal numbers."""


def test_special_rows_are_those_of_whole_rows() -> None:
    x = logits(len(SPECIAL), 8)
    for row, (columns, value) in enumerate(SPECIAL.values()):
        x = x.at[row, columns].set(value)
    # Each row with every number of columns that are kept: none, those of one device, more.
    where = jnp.arange(8) < jnp.asarray([8, 0, 2, 5])[:, None, None]
    x, where = jnp.broadcast_to(x, (4, *x.shape)), jnp.broadcast_to(where, (4, *x.shape))
    target = jnp.asarray([0, 7, 3, 8, -1, 0, 200, 5])

    def results(x: Any, where: Any, target: Any, **more: Any) -> Any:
        def of_one(name: str, x: Any) -> Any:
            if name in (*ELEMENTWISE, "logsumexp"):
                return getattr(osj, name)(x, -1, where=where, **more)
            options = {"label_smoothing": 0.1} if name == "smoothing" else {}
            mask = None if options else where
            labels = jnp.broadcast_to(target, x.shape[:-1])
            if name == "tokens":
                return jnp.stack(osj.token_logprobs(x, labels, where=where, **more), -1)
            return osj.cross_entropy(x, labels, where=mask, z_loss=0.1, **options, **more)

        found = {}
        for name in (*ELEMENTWISE, "logsumexp", "loss", "smoothing", "tokens"):
            y, vjp = jax.vjp(partial(of_one, name), x)
            # The incoming gradient of a row without a result is 0.
            found[name] = y, vjp(jnp.where(jnp.isfinite(y), 1, 0).astype(y.dtype))[0]
        return found

    cut, per_row = P(None, None, "v"), P()
    specs = {name: (cut if name in ELEMENTWISE else per_row, cut) for name in (*ELEMENTWISE, "logsumexp")}
    specs |= dict.fromkeys(("loss", "smoothing", "tokens"), (per_row, cut))
    sharded = jax.shard_map(
        partial(results, axis_name="v"), mesh=mesh_of(4), in_specs=(cut, cut, P()), out_specs=specs
    )  # fmt: skip
    ours, whole = jax.jit(sharded)(x, where, target), jax.jit(results)(x, where, target)
    for name, pair in ours.items():
        for one, other in zip(pair, whole[name], strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6, err_msg=name)
    for name in ("loss", "tokens"):
        result = np.asarray(ours[name][0]).reshape(4, len(SPECIAL), -1)[..., 0]
        assert np.isnan(result[0, [3, 4, 6]]).all()
        assert np.isfinite(result[0, 7])


def test_the_gradient_of_a_replicated_loss() -> None:
    """Also inside shard_map; without checks, JAX adds the gradients of the losses of all devices."""
    a = arguments()

    def loss(x: Any, target: Any, axis_name: Any = None) -> Any:
        return jnp.mean(osj.cross_entropy(x, target, label_smoothing=0.1, axis_name=axis_name))

    whole = jax.jit(jax.grad(loss))(a["x"], a["target"])
    columns, both = P(None, "v"), (P(None, "v"), P())
    sharded = partial(loss, axis_name="v")
    for checked in (True, False):
        map_ = partial(jax.shard_map, mesh=mesh_of(4), in_specs=both, check_vma=checked)
        outside, inside = jax.grad(map_(sharded, out_specs=P())), map_(jax.grad(sharded), out_specs=columns)
        found = jax.jit(lambda x, t, f=outside, g=inside: (f(x, t), g(x, t)))(a["x"], a["target"])
        np.testing.assert_allclose(found[0], whole, atol=1e-7)
        np.testing.assert_allclose(found[1], whole if checked else 4 * whole, atol=1e-7)


def test_a_weight_that_is_replicated_gets_the_gradient_of_all_devices() -> None:
    """A scale, and a head whose tokens are sharded along d, as in data parallelism."""
    mesh, rows, cols = mesh_of(2, 2), "d", "v"
    hidden, head, target = logits(ROWS, 16), logits(16, COLS, seed=2), arguments()["target"]

    def loss(head: Any, scale: Any, hidden: Any, target: Any, axis_name: Any = None) -> Any:
        found = osj.token_logprobs(hidden @ head, target, scale=scale, softcap=20.0, axis_name=axis_name)
        total = jnp.sum(found.entropy - 2 * found.logprob)
        return total if axis_name is None else jax.lax.psum(total, "d")

    sharded = jax.shard_map(
        partial(loss, axis_name="v"), mesh=mesh, in_specs=(P(None, cols), P(), P(rows), P(rows)), out_specs=P()
    )
    given = head, jnp.float32(0.3), hidden, target
    ours, whole = (jax.jit(jax.grad(f, (0, 1, 2)))(*given) for f in (sharded, loss))
    assert_leaves_close(ours, whole, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "names", [("softmax", "tokens"), pytest.param(("logsumexp", "loss, smoothing"), marks=MORE)], ids=str
)
def test_derivatives_of_every_kind(names: tuple[str, str]) -> None:
    """Higher derivatives of a function per element together with one per row; first ones of the others stand above."""
    a = {name: t[:2] for name, t in arguments().items()}
    change = logits(2, COLS, seed=6)

    def number(calls: dict[str, Call], x: Any) -> Any:
        found = jax.tree.leaves([f(a | {"x": x}) for f in calls.values()])
        return sum(jnp.sum(jnp.where(jnp.isfinite(t), jnp.sin(t), 0)) for t in found)

    def every_kind(calls: dict[str, Call]) -> Any:
        f = partial(number, calls)
        along = lambda x: jax.jvp(f, (x,), (change,))[1]  # noqa: E731  two uses
        of_batch = jax.vmap(lambda x: calls[names[1]](a | {"x": x}))
        return lambda x: (along(x), jax.grad(along)(x), of_batch(jnp.stack([x, 2 * x])), jax.grad(jax.checkpoint(f))(x))

    sharded, whole = functions(axis_name="v"), functions()
    sharded = {name: mapped(name, sharded[name], "columns") for name in names}
    whole = {name: whole[name] for name in names}
    found, expected = (jax.jit(every_kind(calls))(a["x"]) for calls in (sharded, whole))
    assert_leaves_close(found, expected, rtol=2e-4, atol=2e-5)


def test_an_axis_of_vmap_and_eager_shard_map() -> None:
    """The columns of a row may lie along an axis of vmap; shard_map without jit gives the same."""
    x = arguments()["x"]
    parts = jnp.moveaxis(x.reshape(ROWS, 4, -1), 1, 0)
    of_part = partial(osj.softmax, axis_name="v")
    squares = lambda f: lambda x: jnp.sum(f(x) ** 2)  # noqa: E731  two uses
    ours = jax.grad(squares(jax.vmap(of_part, axis_name="v")))(parts)
    eager = jax.shard_map(of_part, mesh=mesh_of(4), in_specs=P(None, "v"), out_specs=P(None, "v"))
    whole = jax.grad(squares(osj.softmax))(x)
    np.testing.assert_allclose(jnp.moveaxis(ours, 0, 1).reshape(x.shape), whole, atol=1e-6)
    np.testing.assert_allclose(eager(x), osj.softmax(x), atol=1e-7)


@pytest.mark.parametrize(("name", "sums"), [("loss, smoothing", 0), ("tokens", 0), ("softmax", 1)])
def test_exchanges_of_a_result_and_its_gradient(name: str, sums: int) -> None:
    """One exchange forward; backward none for a result per row, and one for a result per element."""
    f = mapped(name, functions(axis_name="v")[name], "columns")
    text = jax.jit(partial(with_gradients, {name: f})).lower(arguments()).compile().as_text()
    assert [len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in ("all-gather", "all-reduce")] == [1, sums]


def test_nothing_of_the_size_of_a_shard_is_kept_in_float32() -> None:
    a = arguments("bfloat16")
    calls = functions(axis_name="v")
    for name in ("softmax", "logsumexp", "loss, smoothing", "tokens, options"):
        f = mapped(name, calls[name], "columns")
        kept = jax.eval_shape(lambda x, f=f: jax.vjp(lambda x: f(a | {"x": x}), x)[1], a["x"])
        large = {t.dtype.name for t in jax.tree.leaves(kept) if t.size >= a["x"].size}
        assert "bfloat16" in large
        assert large <= {"bfloat16", "bool"}, name


@pytest.mark.parametrize(
    ("forced", "spec"),
    [
        (KERNEL, P("d")), ({}, P("d", "v")), pytest.param({}, P("d"), marks=MORE),
        pytest.param(KERNEL, P("d", "v"), marks=MORE),
    ],
    ids=str,
)  # fmt: skip
def test_a_scalar_loss_under_jit_is_over_the_rows_of_all_devices(forced: dict[str, str], spec: P) -> None:
    """Neither the logits nor the gradient leaves its device."""
    x, target = logits(ROWS, 128), classes(ROWS, cols=128).at[:3].set(7)

    def loss(x: Any, target: Any, **more: Any) -> Any:
        return osj.cross_entropy(x, target, reduction="mean", ignore_index=7, softcap=9.0, scale=0.5, **more)

    whole = jax.jit(jax.value_and_grad(loss))(x, target)
    place = [NamedSharding(mesh_of(2, 2), s) for s in (spec, P(spec[0]))]
    cut = [jax.device_put(t, s) for t, s in zip((x, target), place, strict=True)]
    program = jax.jit(jax.value_and_grad(partial(loss, **forced))).lower(*cut).compile()
    y, dx = program(*cut)
    np.testing.assert_allclose(y, whole[0], rtol=1e-6)
    np.testing.assert_allclose(dx, whole[1], atol=1e-7)
    assert dx.sharding.is_equivalent_to(place[0], 2)
    assert_small_exchanges(program, 4 * 4 * ROWS)


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.exhaustive)])
def test_a_scalar_loss_inside_shard_map_is_over_the_rows_of_one_device(kind: AxisType) -> None:
    x, target = logits(ROWS, 128), classes(ROWS, cols=128).at[:3].set(7)
    mesh = mesh_of(2, 2, kind=kind)

    def loss(x: Any, target: Any, **more: Any) -> Any:
        return osj.cross_entropy(x, target, ignore_index=7, **more)

    def by_sums(x: Any, target: Any, **more: Any) -> Any:
        total = loss(x, target, reduction="sum", **more)
        return jax.lax.psum(total, "d") / jax.lax.psum(jnp.sum(target != 7), "d")

    mean = partial(loss, reduction="mean")
    whole = jax.jit(jax.value_and_grad(mean))(x, target)
    for i, (more, spec) in enumerate((({}, P("d")), (KERNEL, P("d")), ({"axis_name": "v"}, P("d", "v")))):
        # Each case is checked by shard_map for one kind of axes, and not for the other.
        checked = (kind == AxisType.Auto) == i % 2
        f = partial(jax.shard_map, mesh=mesh, in_specs=(spec, P("d")), check_vma=checked)
        cut = [jax.device_put(t, NamedSharding(mesh, s)) for t, s in ((x, spec), (target, P("d")))]
        y, dx = jax.jit(jax.value_and_grad(f(partial(by_sums, **more), out_specs=P())))(*cut)
        np.testing.assert_allclose(y, whole[0], rtol=1e-6)
        np.testing.assert_allclose(dx, whole[1], atol=1e-7)
        of_part = f(lambda x, t, more=more: loss(x, t, reduction="mean", **more)[None], out_specs=P("d"))
        parts = jax.jit(jax.vmap(mean))(x.reshape(2, -1, 128), target.reshape(2, -1))
        np.testing.assert_allclose(jax.jit(of_part)(*cut), parts, rtol=1e-6)


def test_options_that_are_sharded_otherwise_than_the_logits() -> None:
    """On explicit axes, where every gradient has the sharding of its array."""
    a = arguments()
    given = a["x"], jnp.full((ROWS, 1), 0.5), a["bias"], a["where"]

    def total(x: Any, scale: Any, bias: Any, where: Any) -> Any:
        listed = osj.topk_logprobs(x, 3, scale=scale, where=where).logprobs
        loss = osj.cross_entropy(x, jax.nn.softmax(bias), where=where)
        return jnp.sum(osj.softmax(x, scale=scale, bias=bias, where=where) ** 2) + jnp.sum(listed) + jnp.sum(loss)

    gradients = jax.jit(jax.grad(total, (0, 1, 2)))
    whole = gradients(*given)
    for specs in ((P(), P("d"), P("d", "v"), P("v")), (P("d", "v"), P(), P(), P("v", "d"))):
        with jax.set_mesh(mesh_of(2, 2, kind=AxisType.Explicit)):
            cut = [jax.device_put(t, spec) for t, spec in zip(given, specs, strict=True)]
            ours = gradients(*cut)
        assert_leaves_close(ours, whole, rtol=1e-5, atol=1e-6)
        assert [jax.typeof(t).sharding for t in ours] == [jax.typeof(t).sharding for t in cut[:3]]
