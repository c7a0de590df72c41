"""Checks of `onlinesoftmax.jax` on two GPUs, with rows that are sharded; test_jax_sharded.py runs this file.

four_devices.py checks more, also the functions that no kernel computes.
"""

from __future__ import annotations

from functools import partial

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
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

MOST = 2 * 4 * ROWS
"""Most numbers that a collective moves: every device receives the states of two, each of at most four numbers."""


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
