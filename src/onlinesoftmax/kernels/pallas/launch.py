"""One launch of a Pallas kernel on whole arrays: compiled through Triton, or interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ...core.arrays import Array
from ...planner.plan import Plan


def launch(
    kernel: Callable[..., None], programs: int, arrays: Sequence[Array], out: Sequence[Any], plan: Plan, interpret: bool
) -> list[Array]:
    """The arrays that a kernel writes, in `programs` programs of as many warps as the plan says."""
    # Inside shard_map an output varies over the mesh as the first input does.
    manual = getattr(jax.typeof(arrays[0]), "manual_axis_type", None)
    more = {} if manual is None else {"manual_axis_type": manual}
    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype, **more) for o in out]
    result: list[Array] = pl.pallas_call(
        kernel, out_shape=shapes, grid=(programs,), interpret=interpret, name=f"onlinesoftmax_{plan.strategy}",
        compiler_params=pltriton.CompilerParams(num_warps=plan.warps, num_stages=1),
    )(*arrays)  # fmt: skip
    return result
