"""The calls of the kernels of routing, for tokens of one device; operands are as in primitives.py."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...core.arrays import Array
from ...core.device import Device
from ...kernels.cuda.arguments import OwnLaunch
from ...routing.kernels import gradient, source
from ...routing.rules import Call, Gradients, Rule
from .. import cuda_call
from ..kernel_or_formula import Planned
from ..signature import Values


def route(rule: Rule, counts: bool, prob_sums: bool, device: Device, operands: Values) -> Planned:
    """The results of the formula of `route`, or why no kernel takes the operands.

    Args:
        rule, counts, prob_sums: As in primitives.How.
        device: The GPU.
        operands: Arrays by name.
    """
    x = operands["x"]
    *lead, tokens, experts = x.shape
    sequences, dtype = math.prod(lead), x.dtype.name
    bias, mask, indices = (operands.get(name) for name in ("bias", "mask", "indices"))
    own = Call(x, bias, mask, indices, rule, sequences, tokens, counts, prob_sums)
    shape = _other_biases(operands) or source.kernel_of(own, dtype, source.width_at(dtype, experts), device)
    if isinstance(shape, str):
        return shape
    parts = source.parts_of(shape, tokens, sequences, device)
    launch = source.launch_of(shape, rule, experts, tokens, sequences, parts)
    rows = x.shape[:-1]
    results = {
        "weights": ((*rows, rule.k), "float32"),
        "indices": ((*rows, rule.k), "int32"),
        "lse": ((*rows, 1), "float32"),
    }
    if counts:
        results["counts"] = (*lead, 1, experts), "int32"
    if prob_sums:
        results["prob_sums"] = (*lead, 1, experts), "float32"
    named = {"given" if name == "indices" else name: t for name, t in operands.items()}
    return _plan("route.cuh", shape), partial(_called, launch, named, results, device)


def route_backward(rule: Rule, device: Device, operands: Values) -> Planned:
    """The gradient of the logits, or why no kernel takes the operands; arguments as for `route`."""
    x = operands["x"]
    *lead, tokens, experts = x.shape
    sequences, dtype = math.prod(lead), x.dtype.name
    if reason := source.refusal_of(rule, dtype, sequences * tokens, False, device) or _other_biases(operands):
        return reason
    given = Gradients(*(operands.get(f"d{name}") for name in Gradients._fields))
    own = Call(x, operands.get("bias"), None, None, rule, sequences, tokens, False, False)
    shape = gradient.shape_of(rule, dtype, source.width_at(dtype, experts), gradient.flags_of(own, given))
    launch = gradient.launch_of(shape, rule, experts, tokens, sequences, device)
    return _plan("gradient.cuh", shape), partial(_called, launch, operands, {"dx": (x.shape, dtype)}, device)


def _called(
    launch: OwnLaunch, operands: Values, results: dict[str, tuple[tuple[int, ...], str]], device: Device
) -> list[Array]:
    types = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in results.items()}
    return list(cuda_call.run_own(launch, operands, types, device).values())


def _other_biases(operands: Values) -> str | None:
    bias, experts = operands.get("bias"), operands["x"].shape[-1]
    return None if bias is None or bias.size == experts else "a kernel has one bias for all sequences"


def _plan(file: str, shape: Any) -> str:
    return f"{file}, {shape.team} of {shape.threads} threads for a token"
