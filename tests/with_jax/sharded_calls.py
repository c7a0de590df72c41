"""Calls of `onlinesoftmax.jax` on sharded rows, their exact results, and the contract between the two."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
import numpy as np
from exact_losses import classes, logits, wide
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

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
    "columns of two": ((2,), None, "v"),
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
