"""Checks of `onlinesoftmax.jax` on two GPUs, with rows that are sharded; test_jax_sharded.py runs this file.

four_devices.py checks more, also the functions that no kernel computes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_losses import classes, logits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_calls import (
    NAMES,
    ROWS,
    arguments,
    assert_contract,
    assert_small_exchanges,
    functions,
    mapped,
    mesh_of,
    specs_of,
    with_gradients,
)

import onlinesoftmax as osm
import onlinesoftmax.jax as osj

MOST = 2 * 4 * ROWS
"""Most numbers that a collective moves: the states of two devices, at most four numbers for each row."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shard_map(dtype: str) -> None:
    calls = functions(axis_name="v")
    calls = {name: mapped(name, f, "columns of two") for name, f in calls.items() if name in NAMES[dtype]}
    program = jax.jit(partial(with_gradients, calls)).lower(arguments(dtype)).compile()
    assert_contract(program(arguments(dtype)), dtype)
    assert_small_exchanges(program, MOST)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_jit_of_sharded_arrays_gathers_no_row(kind: AxisType) -> None:
    specs, mesh = specs_of(None, "v"), mesh_of(2, kind=kind)
    cut = {name: jax.device_put(t, NamedSharding(mesh, specs[name])) for name, t in arguments().items()}
    program = jax.jit(partial(with_gradients, functions())).lower(cut).compile()
    found = program(cut)
    assert_contract(found, "float32")
    assert_small_exchanges(program, MOST)
    for name, (_, dx) in found.items():
        assert dx.sharding.is_equivalent_to(cut["x"].sharding, 2), name


@pytest.mark.parametrize(("mine", "axis"), [(P("v"), None), (P(None, "v"), "v")], ids=["rows", "columns"])
def test_long_rows_under_shard_map(mine: P, axis: str | None) -> None:
    """Rows that clusters of blocks hold, split over the GPUs by rows and by columns, against one GPU."""
    x, target = logits(64, 2 * 17408, dtype="bfloat16"), classes(64, cols=2 * 17408)

    def results(x: Any, target: Any, **more: Any) -> dict[str, Any]:
        loss, of_loss = jax.vjp(lambda x: osj.cross_entropy(x, target, label_smoothing=0.1, **more), x)
        tokens, of_tokens = jax.vjp(lambda x: osj.token_logprobs(x, target, **more).logprob, x)
        gradients = of_loss(jnp.ones_like(loss))[0], of_tokens(jnp.ones_like(tokens))[0]
        return {"elements": (osj.softmax(x, **more), *gradients), "rows": (loss, tokens)}

    per_row = P("v") if axis is None else P()
    specs = {"elements": (mine,) * 3, "rows": (per_row,) * 2}
    sharded = jax.shard_map(partial(results, **({} if axis is None else {"axis_name": axis})),
                            mesh=mesh_of(2), in_specs=(mine, per_row), out_specs=specs)  # fmt: skip
    ours, whole = jax.jit(sharded)(x, target), jax.jit(results)(x, target)
    for name, units in (("elements", 2.0**-7), ("rows", 4e-6)):
        for one, other in zip(ours[name], whole[name], strict=True):
            np.testing.assert_allclose(*(np.asarray(t, np.float32) for t in (one, other)), rtol=units, atol=1e-8)


STRATEGIES = {"row": (64, 200), "looped": (64, 5000), "cluster": (16, 40000), "grid": (4, 1 << 18)}
"""Rows and columns of one GPU for each strategy of the CUDA kernels."""


def _chain(arrays: Any, between: Any) -> Any:
    """Calls of each strategy, with an operation of all GPUs between two calls."""
    for _ in range(2):
        arrays = {name: between(osj.log_softmax(x, -1, backend="cuda", strategy=name)) for name, x in arrays.items()}
    return arrays


def _given() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    shapes = {name: (2 * rows, cols) for name, (rows, cols) in STRATEGIES.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_cuda_kernels_beside_collective_operations() -> None:
    """Thousands of programs in which each GPU waits for the other, beside programs of one GPU in other threads."""
    mesh, times = mesh_of(2), 2000
    given = {name: jax.device_put(x, NamedSharding(mesh, P("v"))) for name, x in _given().items()}
    sharded = jax.jit(jax.shard_map(
        partial(_chain, between=lambda y: y + jax.lax.pmean(y[:1, :1], "v")), mesh=mesh, in_specs=P("v"),
        out_specs=P("v"), check_vma=False,
    ))  # fmt: skip
    by_rows = jax.jit(partial(_chain, between=lambda y: y - y[:1].mean()))
    single = jax.jit(partial(_chain, between=lambda y: y))
    wrong: list[str] = []

    def work(number: int) -> None:
        # The thread goes from one GPU to the other, and so from one context to the other.
        parts = [jax.device_put({n: x[: len(x) // 2] for n, x in _given().items()}, d) for d in jax.devices()[:2]]
        right = jax.device_get(single(parts[0]))
        for i in range(times):
            found = single(parts[(i + number) % 2])
            if i % 100 == 0:
                wrong.extend(name for name, y in found.items() if not np.array_equal(y, right[name]))

    right = [jax.device_get(program(given)) for program in (sharded, by_rows)]
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(work, number) for number in range(2)]
        for i in range(times):
            found = [program(given) for program in (sharded, by_rows)]
            if i % 100 == 0:
                for ours, first in zip(found, right, strict=True):
                    wrong.extend(name for name, y in ours.items() if not np.array_equal(y, first[name]))
        for other in others:
            other.result()
    assert not wrong


def test_replicated_programs_of_two_gpus() -> None:
    """The programs of `pmap`: the same kernels on each GPU, which add up their results."""
    given = jax.pmap(lambda x: x)({name: x.reshape(2, -1, x.shape[-1]) for name, x in _given().items()})
    program = jax.pmap(partial(_chain, between=lambda y: jax.lax.pmean(y, "v")), axis_name="v")
    right = jax.device_get(program(given))
    for i in range(2000):
        found = program(given)
        if i % 100 == 0:
            for name, y in found.items():
                np.testing.assert_array_equal(y, right[name])
                np.testing.assert_array_equal(y[0], y[1])


def test_the_default_plan_takes_the_cuda_kernels() -> None:
    """Rows that are sharded over both GPUs, and the reason for a kernel that is shorter than two launches."""
    x = jax.device_put(jnp.ones((64, 1 << 20)), NamedSharding(mesh_of(2), P("v")))
    program = jax.jit(osj.softmax)
    assert "onlinesoftmax_cuda_kernel" in program.lower(x).compile().as_text()
    np.testing.assert_allclose(program(x), 2.0**-20, rtol=1e-6)
    short = osm.explain((64, 640), framework="jax")
    assert "for each of 2 GPUs in turn, longer than the kernel" in str(short) or jax.device_count() > 2
