"""Checks of `onlinesoftmax.jax` on two GPUs, with rows that are sharded; test_jax_sharded.py runs this file.

four_devices.py checks more, also the functions that no kernel computes.
"""

from __future__ import annotations

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
