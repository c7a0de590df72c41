"""The calls of the kernels of sampling; the operands have the dtypes of the kernels, in any shape that broadcasts."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...core.arrays import Array
from ...core.device import Device
from ...kernels.cuda.arguments import OwnLaunch
from ...sampling.kernels import source, topk, unfiltered
from ...sampling.kernels import verify as verification
from ...sampling.kernels.which_kernel import is_unfiltered, lists_at_most, needs_more_memory, refusal
from .. import cuda_call
from ..kernel_or_formula import Planned
from ..signature import Values


def sample(
    first: bool, raw: bool, top: int, most: int, listed: int | None, device: Device, operands: Values
) -> Planned:  # fmt: skip
    """The kernel of a call of `sample` and a function that runs it, or why no kernel takes the operands.

    Args:
        first: True for ties="first".
        raw: True for log-probabilities of the scores as they are.
        top: Number of the largest log-probabilities to return.
        most: Most tokens of a row in the support; 0 for no support.
        listed: As Parameters.listed.
        device: The GPU.
        operands: Arrays by name.
    """
    *shape, cols = operands["x"].shape
    rows, dtype, aligned, wanted = math.prod(shape), *_layout(operands["x"]), max(top, most)
    if reason := refusal(dtype, rows, device):
        return reason
    filters = bool({"top_k", "top_p", "min_p"} & operands.keys())
    numbers: tuple[int, ...]
    if is_unfiltered(filters, wanted):
        of_all = unfiltered.shape_of(rows, cols, dtype, aligned, raw, device)
        numbers, file = (*_sizes(cols, of_all.cluster), 0, 0, 0), "unfiltered.cuh"
        launch = unfiltered.KERNEL.launch(of_all, numbers, rows, of_all.dynamic_bytes)
    else:
        found = source.shape_of(rows, cols, dtype, aligned, device, listed)
        if wanted > source.MOST_TOP:
            return lists_at_most(source.MOST_TOP)
        if found is None:
            return needs_more_memory(device)
        numbers, file = (*_sizes(cols, found.cluster), int(first), int(raw), wanted, *source.NEUTRAL), "sample.cuh"
        launch = source.KERNEL.launch(found, numbers, rows, found.dynamic_bytes)
    results = _types((rows,), **_OF_ROWS)
    if wanted:
        results |= _types((rows, wanted), top_tokens="int64", top_logprobs="float32")
    return _plan(file, launch), partial(_sampled, launch, device, operands, results, top, most)


def _sampled(
    launch: OwnLaunch, device: Device, operands: Values, results: dict[str, Any], top: int, most: int
) -> list[Array]:
    *shape, cols = operands["x"].shape
    found = cuda_call.run_own(launch, _of_rows(operands), results, device)
    tops = [found.pop(name) for name in ("top_tokens", "top_logprobs") if name in found]
    some = [*found.values(), *(t[:, :top] for t in tops if top)]
    if most:
        # The kept tokens are the first ones of the list; they are wanted by rising id.
        ids = jnp.where(jnp.arange(most) < found["kept"][:, None], tops[0][:, :most], cols)
        some.append(jnp.sort(ids))
    return [t.reshape(*shape, *t.shape[1:]) for t in some]


def topk_logprobs(k: int, device: Device, operands: Values) -> Planned:
    """The kernel of a call of `topk_logprobs` for k scores and a function that runs it, or why no kernel takes it."""
    *shape, cols = operands["x"].shape
    rows, dtype, aligned = math.prod(shape), *_layout(operands["x"])
    if reason := refusal(dtype, rows, device):
        return reason
    with_target = "target" in operands
    if k > topk.MOST:
        return lists_at_most(topk.MOST)
    found = topk.shape_of(rows, cols, k, dtype, aligned, with_target, device)
    if found is None:
        return needs_more_memory(device)
    launch = topk.KERNEL.launch(found, (*_sizes(cols, found.cluster), k), rows, found.dynamic_bytes)
    results = {
        **_types((rows, k), values="float32", indices="int64", logprobs="float32"), **_types((rows,), lse="float32"),
        **(_types((rows,), target_logprob="float32", target_rank="int64") if with_target else {}),
    }  # fmt: skip

    def run() -> list[Array]:
        listed = cuda_call.run_own(launch, _of_rows(operands), results, device)
        return [t.reshape(*shape, *t.shape[1:]) for t in listed.values()]

    return _plan("topk.cuh", launch), run


def verify(first: bool, listed: int | None, device: Device, operands: Values) -> Planned:
    """The kernels of a call of `verify` and a function that runs them, or why no kernels take it.

    Like verify_launch.py, the function lets sample.cuh read the positions of each model before verify.cuh decides.
    """
    *shape, places, cols = operands["x"].shape
    rows, n = math.prod(shape), places - 1
    models = [operands[name] for name in ("x", "draft") if name in operands]
    common = jnp.result_type(*models)
    models = [x.astype(common) for x in models]
    shapes = verification.shapes_of(rows, n, cols, (*_layout(models[0]), len(models) == 2), device, listed)
    if isinstance(shapes, str):
        return shapes
    launches = []
    for own, each in zip(shapes.positions, shapes.each, strict=True):
        numbers: tuple[int, ...] = *_sizes(cols, own.cluster), int(first), 0, 1, each, *source.NEUTRAL[1:]
        launches.append(source.KERNEL.launch(own, numbers, rows * each, own.dynamic_bytes))
    last = shapes.decision
    numbers = cols, *_sizes(cols, last.cluster), n, *[0] * (len(verification.NUMBERS) - 5)
    launches.append(verification.KERNEL.launch(last, numbers, rows))
    return _plan("verify.cuh", launches[-1]), partial(_verified, launches, device, operands, models)


def _verified(launches: list[OwnLaunch], device: Device, operands: Values, models: list[Array]) -> list[Array]:
    *shape, places, cols = operands["x"].shape
    of_rows = _flat({name: t for name, t in operands.items() if name not in ("x", "draft", "drafts")}, shape)
    count, names = math.prod(shape), ("temperature", "min_p", "seed", "offset")
    given: Values = {name: of_rows[name] for name in names if name in of_rows}
    given["drafts"] = operands["drafts"].reshape(count, places - 1)
    for model, x, launch in zip(("target", "draft"), models, launches[:-1], strict=False):
        x = x.reshape(-1, cols)
        found = cuda_call.run_own(launch, {"x": x, **of_rows}, _types((len(x),), **_OF_POSITIONS), device)
        own = x, *[found[name] for name in ("top_tokens", "kept_key", "kept_sum", "valid")]
        given |= {f"{model}_{name}": t for name, t in zip(verification.MODEL, own, strict=True)}
        given.setdefault("sampled", found["token"])
    results = {
        **_types((count,), accepted="int64"), **_types((count, places), tokens="int64", logprobs="float32"),
        **_types((count,), valid="bool"),
    }  # fmt: skip
    decided = cuda_call.run_own(launches[-1], given, results, device)
    return [t.reshape(*shape, *t.shape[1:]) for t in decided.values()]


_OF_ROWS = {"token": "int64", "logprob": "float32", "lse": "float32", "kept": "int64", "valid": "bool"}
"""Results of the kernels of `sample` for each row."""

_OF_POSITIONS = _OF_ROWS | {
    "top_tokens": "int64", "top_logprobs": "float32", "kept_key": "uint64", "kept_sum": "float64",
}  # fmt: skip
"""Results of sample.cuh for the positions of drafts."""


def _layout(x: Array) -> tuple[str, bool]:
    """The dtype of logits, and True where each row begins on 16 bytes, as the array does."""
    return x.dtype.name, x.shape[-1] * x.dtype.itemsize % 16 == 0


def _sizes(cols: int, cluster: int) -> tuple[int, int, int]:
    """The first numbers of every launch: the distance of rows, their tokens, and the tokens of a block."""
    return cols, cols, source.slice_of(cols, cluster)


def _types(shape: tuple[int, ...], **dtypes: str) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, dtype in dtypes.items()}


def _of_rows(operands: Values) -> Values:
    """The operands with one axis of rows: the logits (rows, tokens), the others (rows,)."""
    *shape, cols = operands["x"].shape
    each = {name: t for name, t in operands.items() if name != "x"}
    return {"x": operands["x"].reshape(-1, cols), **_flat(each, shape)}


def _flat(each: Values, shape: list[int]) -> Values:
    """Operands with one number for each row, (rows,)."""
    return {name: jnp.broadcast_to(t, (*shape, 1)).reshape(-1) for name, t in each.items()}


def _plan(file: str, launch: OwnLaunch) -> str:
    return f"{file}, {launch.cluster} x {launch.threads} threads for a row"
