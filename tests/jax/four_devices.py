"""Checks of `onlinesoftmax.jax` on four devices, with rows that are sharded; test_jax_sharded.py runs this file.

XLA simulates the devices, so JAX must not have started with one.  A check compiles many functions as one program, which
takes less time than many programs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_jax_losses import classes, logits, wide

import onlinesoftmax.jax as osj

Call = Callable[..., Any]
ROWS, COLS = 8, 132
ELEMENTWISE = ("softmax", "log_softmax")
KERNEL = {"backend": "pallas", "strategy": "row"}


def mesh_of(*sizes: int, kind: AxisType = AxisType.Auto) -> Any:
    """A mesh with the axis v, or the axes d and v."""
    return jax.make_mesh(sizes, ("d", "v")[-len(sizes) :], axis_types=(kind,) * len(sizes))


LAYOUTS: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "columns": ((4,), None, "v"),
    "both": ((2, 2), "d", "v"),
    "columns along two axes": ((2, 2), None, ("d", "v")),
}
"""Sizes of the mesh, axis of the rows, axes of the columns."""


@cache
def arguments(dtype: str = "float32") -> dict[str, Any]:
    """The arrays of every function; `where` leaves a row nothing on one device."""
    rng = np.random.default_rng(3)
    target = classes(ROWS, cols=COLS).at[:2].set(jnp.asarray([0, COLS - 1]))
    where = rng.random((ROWS, COLS)) < 0.7
    where[0, 33:66] = False
    where[np.arange(ROWS), np.asarray(target)] = True
    of_classes = jax.nn.softmax(logits(ROWS, COLS, seed=4)).astype(dtype)
    bias = logits(ROWS, COLS, dtype=dtype, seed=5)
    return {
        "x": logits(ROWS, COLS, dtype=dtype), "target": target, "where": jnp.asarray(where), "q": of_classes,
        "bias": bias,
    }  # fmt: skip


def functions(**more: Any) -> dict[str, Call]:
    """Functions of the arrays, by name; the results of `token_logprobs` are tuples."""
    ce, tlp = partial(osj.cross_entropy, **more), partial(osj.token_logprobs, **more)
    return {
        "softmax": lambda a: osj.softmax(a["x"], where=a["where"], **more),
        "softmax, options": lambda a: osj.softmax(a["x"], bias=a["bias"], scale=0.7, softcap=8.0, **more),
        "log_softmax": lambda a: osj.log_softmax(a["x"], **more),
        "logsumexp": lambda a: osj.logsumexp(a["x"], -1, where=a["where"], **more),
        "loss": lambda a: ce(a["x"], a["target"]),
        "loss, z_loss": lambda a: ce(a["x"], a["target"], where=a["where"], z_loss=0.01, softcap=9.0),
        "loss, smoothing": lambda a: ce(a["x"], a["target"], label_smoothing=0.1, z_loss=0.01, scale=jnp.float32(0.5)),
        "tokens": lambda a: tuple(tlp(a["x"], a["target"])),
        "tokens, options": lambda a: tuple(tlp(a["x"], a["target"], where=a["where"], scale=0.5, softcap=6.0)),
    }


def functions_of_xla(**more: Any) -> dict[str, Call]:
    """Functions that no kernel computes."""
    ce = partial(osj.cross_entropy, **more)
    return {
        "loss, where and smoothing": lambda a: ce(a["x"], a["target"], where=a["where"], label_smoothing=0.2),
        "loss of weights": lambda a: ce(a["x"], a["q"], where=a["where"], label_smoothing=0.2, z_loss=0.01),
    }


def every_function(**more: Any) -> dict[str, Call]:
    return functions(**more) | functions_of_xla(**more)


def exact(name: str, a: dict[str, Any]) -> Any:
    """The result of a function, written out in JAX's own functions."""
    z, target, where = a["x"], a["target"], a["where"]
    scale = {"softmax, options": 0.7, "loss, smoothing": 0.5, "tokens, options": 0.5}.get(name, 1.0)
    softcap = {"softmax, options": 8.0, "loss, z_loss": 9.0, "tokens, options": 6.0}.get(name)
    z = z * scale if softcap is None else softcap * jnp.tanh(z * scale / softcap)
    z = z + a["bias"] if name == "softmax, options" else z
    masked = name in ("softmax", "logsumexp", "loss, z_loss", "tokens, options", *functions_of_xla())
    kept = where if masked else jnp.ones_like(where)
    lse = jax.nn.logsumexp(z, -1, where=kept)
    log_p = jnp.where(kept, z - lse[..., None], 0)
    p = jnp.where(kept, jnp.exp(log_p), 0)
    if name.startswith(ELEMENTWISE):
        return log_p if name == "log_softmax" else p
    if name == "logsumexp":
        return lse
    if name.startswith("tokens"):
        return jnp.take_along_axis(log_p, target[..., None], -1)[..., 0], -jnp.sum(p * log_p, -1), lse
    smoothing = {"loss, smoothing": 0.1, "loss, where and smoothing": 0.2, "loss of weights": 0.2}.get(name, 0.0)
    z_loss = {"loss, z_loss": 0.01, "loss, smoothing": 0.01, "loss of weights": 0.01}.get(name, 0.0)
    q = a["q"] if name == "loss of weights" else jax.nn.one_hot(target, COLS, dtype=z.dtype)
    q = (1 - smoothing) * q + smoothing / jnp.sum(kept, -1, keepdims=True)
    return -jnp.sum(jnp.where(kept, q, 0) * log_p, -1) + z_loss * lse**2


def specs_of(rows: Any, cols: Any) -> dict[str, Any]:
    """The PartitionSpec of every array."""
    return {name: P(rows) if name == "target" else P(rows, cols) for name in ("x", "target", "where", "q", "bias")}


def mapped(name: str, f: Call, layout: str, **more: Any) -> Call:
    """A function under shard_map."""
    sizes, rows, cols = LAYOUTS[layout]
    spec = P(rows, cols) if name.startswith(ELEMENTWISE) else P(rows)
    return jax.shard_map(f, mesh=mesh_of(*sizes), in_specs=(specs_of(rows, cols),), out_specs=spec, **more)


def cotangents(y: Any) -> Any:
    """Gradients of the results, exact in every dtype."""
    leaves, tree = jax.tree.flatten(y)
    found = [logits(*t.shape, dtype="bfloat16", seed=10 + i).astype(t.dtype) for i, t in enumerate(leaves)]
    return jax.tree.unflatten(tree, found)


def with_gradients(calls: dict[str, Call], a: dict[str, Any]) -> dict[str, Any]:
    """The result of every function, and its gradient in x for a gradient of normal size."""

    def both(name: str, a: dict[str, Any]) -> Any:
        y, vjp = jax.vjp(lambda x: calls[name](a | {"x": x}), a["x"])
        return y, vjp(cotangents(y))[0]

    return {name: both(name, a) for name in calls}


NAMES: dict[str, tuple[str, ...]] = {
    "float32": tuple(every_function()),
    "bfloat16": ("softmax, options", "log_softmax", "loss, smoothing", "tokens, options", "loss of weights"),
}
"""Functions that are checked in each dtype."""


@cache
def on_one_device(dtype: str) -> dict[str, Any]:
    """Results and gradients of whole rows."""
    calls = every_function()
    found: dict[str, Any] = jax.jit(partial(with_gradients, {name: calls[name] for name in NAMES[dtype]}))(
        arguments(dtype)
    )
    return found


def written_out(a: dict[str, Any], names: tuple[str, ...], dtype: Any) -> dict[str, Any]:
    """Results and gradients of the formulas in JAX's own functions, computed in a floating dtype."""
    wider = {name: t.astype(dtype) if jnp.issubdtype(t.dtype, jnp.floating) else t for name, t in a.items()}
    calls = {name: partial(exact, name) for name in names}
    found: dict[str, Any] = jax.tree.map(np.asarray, jax.jit(partial(with_gradients, calls))(wider))
    return found


@cache
def in_float32(dtype: str) -> dict[str, Any]:
    """Results and gradients of the formulas in float32."""
    return written_out(arguments(dtype), NAMES[dtype], jnp.float32)


@cache
def in_float64(dtype: str) -> dict[str, Any]:
    """Results and gradients of the formulas in float64."""
    with jax.enable_x64(True):
        return written_out({name: jnp.asarray(t) for name, t in arguments(dtype).items()}, NAMES[dtype], jnp.float64)


def assert_contract(found: dict[str, Any], dtype: str) -> None:
    """Errors are at most the largest of whole rows or of JAX's own functions, and a unit in the last place.

    A gradient is a difference of terms as large as the gradients of the results, or their sum, so its unit is that of
    the largest term.
    """
    for name, (y, dx) in found.items():
        whole, formula, reference = (of(dtype)[name] for of in (on_one_device, in_float32, in_float64))
        given = np.concatenate([wide(t).reshape(ROWS, -1) for t in jax.tree.leaves(cotangents(y))], 1)
        terms = np.maximum(np.abs(given).max(1, keepdims=True), np.abs(given.sum(1, keepdims=True)))
        for i, (ours, size) in enumerate(((y, None), (dx, terms))):
            arrays = (jax.tree.leaves(t) for t in (ours, whole[i], formula[i], reference[i]))
            for one, other, written, exactly in zip(*arrays, strict=True):
                assert (one.dtype, one.shape) == (other.dtype, exactly.shape)
                allowed = max(np.abs(wide(t) - exactly).max() for t in (other, written.astype(other.dtype)))
                allowed = allowed + unit(exactly if size is None else size, other.dtype)
                error = np.abs(wide(one) - exactly)
                assert (error <= allowed).all(), (name, ("result", "gradient")[i], np.max(error / allowed))


def unit(t: Any, dtype: Any) -> Any:
    """A unit in the last place of numbers in a dtype, at least the smallest normal number."""
    spacing = np.spacing(np.abs(t).astype(np.float32)).astype(np.float64) * 2.0 ** (23 - jnp.finfo(dtype).nmant)
    return np.maximum(spacing, float(jnp.finfo(dtype).smallest_normal))


def assert_small_exchanges(program: Any, most: int) -> None:
    """No collective moves more numbers than a few per row; `most` is their number on each device."""
    text = program.as_text()
    lines = re.findall(r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", text)
    assert lines
    for shapes in lines:
        for shape in re.findall(r"\[([\d,]*)\]", shapes):
            assert math.prod(int(n) for n in shape.split(",") if n) <= most, shapes


@pytest.mark.parametrize(
    ("layout", "dtype", "names"),
    [
        ("columns", "float32", NAMES["float32"]), ("both", "bfloat16", NAMES["bfloat16"]),
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
    calls = functions(axis_name="v", **KERNEL)
    names = ("softmax", "loss, z_loss", "loss, smoothing", "tokens, options")
    calls = {name: mapped(name, calls[name], "both") for name in names}
    found = jax.jit(partial(with_gradients, calls))(arguments())
    assert_contract(found, "float32")


@pytest.mark.parametrize(
    ("layout", "kind", "forced", "names"),
    [
        ("both", AxisType.Auto, {}, tuple(functions())),
        ("both", AxisType.Explicit, {}, ("softmax", "logsumexp", "loss, smoothing", "tokens")),
        ("both", AxisType.Auto, KERNEL, ("softmax, options", "logsumexp", "loss, z_loss", "tokens")),
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
    ("name", "cols"), [("logsumexp", 2), ("loss", 3), ("tokens without entropy", 3), ("tokens", 4)]
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
    for one, other in zip(*map(jax.tree.leaves, (ours, whole)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)
    *per_row, dx = jax.tree.leaves(ours)
    assert {t.sharding.spec for t in per_row} == {P(None)}
    assert dx.sharding.spec == P(None, "v")


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
            # Where a row has no result, its gradient counts for nothing.
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

    whole = jax.grad(loss)(a["x"], a["target"])
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
    for one, other in zip(ours, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_derivatives_of_every_kind() -> None:
    a = {name: t[:2] for name, t in arguments().items()}
    change = logits(2, COLS, seed=6)

    def number(calls: dict[str, Call], x: Any) -> Any:
        found = jax.tree.leaves([f(a | {"x": x}) for f in calls.values()])
        return sum(jnp.sum(jnp.where(jnp.isfinite(t), jnp.sin(t), 0)) for t in found)

    def every_kind(calls: dict[str, Call]) -> Any:
        f = partial(number, calls)
        along = lambda x: jax.jvp(f, (x,), (change,))[1]  # noqa: E731  two uses
        of_batch = jax.vmap(lambda x: calls["tokens"](a | {"x": x}))
        return lambda x: (along(x), jax.grad(along)(x), of_batch(jnp.stack([x, 2 * x])), jax.grad(jax.checkpoint(f))(x))

    names = ("softmax", "log_softmax", "logsumexp", "loss, smoothing", "tokens")
    sharded, whole = functions(axis_name="v"), functions()
    sharded = {name: mapped(name, sharded[name], "columns") for name in names}
    whole = {name: whole[name] for name in names}
    found, expected = (jax.jit(every_kind(calls))(a["x"]) for calls in (sharded, whole))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


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
