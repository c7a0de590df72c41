"""Plans `stored` and `tokens` of losses: the logits of a chunk of tokens, and their gradient, at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...core.arrays import accumulator
from ..shards import Run
from ..signature import Values
from . import rows
from .call import HeadCall, Shards, layout, plan_of_losses, types
from .chunks import in_chunks, logits_of, product

SUMS = ("dweight", "dbias")
"""Results that are sums over the tokens."""


def losses(run: Run, call: HeadCall, shards: Shards, arrays: Values) -> Values:
    """The results of each token, and the gradients of the sum of factor · loss that the outputs name.

    Args:
        run: Applies an operation.
        call: The call.
        shards: The axes of the mesh along which the arrays are parts of whole ones.
        arrays: The arrays of one device; the tokens have one axis.
    """
    x, weight, wide, wanted = arrays["x"], arrays["weight"], accumulator(arrays["x"]), types(call, arrays)
    chunk = plan_of_losses(call, arrays, call.outputs).chunk
    of_input = wide if shards.of_input else x.dtype
    of_weight = call.sum_dtype if chunk >= x.shape[0] and not shards.of_weight else call.acc_dtype

    def of_chunk(first: Any, size: int) -> Values:
        def part(name: str, t: Any) -> Any:
            return jax.lax.dynamic_slice_in_dim(t, first, size) if layout(name).startswith("t") else t

        given = {name: part(name, t) for name, t in arrays.items()}
        # A token that counts for nothing may hold NaN, and its gradient of 0 times NaN would be NaN.
        valid = jnp.where((given["factor"] == 0)[:, None], 0, given["x"]) if "factor" in given else given["x"]
        z = logits_of(given["x"] if call.loss is None else valid, weight, arrays.get("bias"), call.padding)
        found, dz = rows.losses(run, call, shards.classes, z, given)
        if dz is None:
            return found
        if "dx" in wanted:
            found["dx"] = product(dz, weight, (1, 0), of_input)
        if "dweight" in wanted:
            found["dweight"] = product(dz, valid, (0, 0), of_weight)
        if "dbias" in wanted:
            found["dbias"] = jnp.sum(dz, 0, dtype=wide)
        return found

    found = in_chunks(x.shape[0], chunk, of_chunk, SUMS)
    for names, some in ((shards.of_weight, SUMS), (shards.of_input, ("dx",))):
        found |= {name: jax.lax.psum(found[name], names) for name in some if names and name in found}
    return {name: found[name].astype(t.dtype) for name, t in wanted.items()}
