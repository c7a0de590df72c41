"""The tensors of a case, the same in every run, and the memory that a case needs and that a call takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .cases import Case, Inputs
from .check import exact, pieces, whole

KEPT = 0.75
"""Fraction of a mask that is True."""


def make_inputs(case: Case, device: Any) -> Inputs:
    """The tensors that a function takes, on a torch device, in the order of `Case.tensors`.

    A gradient reads what a forward call keeps: operands of the forward call, and its outputs, rounded once.
    """
    operation, made = case.declaration, {}
    if case.declaration.backward:
        forward = replace(case, operation=case.declaration.forward.name)
        made = _kept(case, forward, make_inputs(forward, device))
    for seed, name in enumerate(case.tensors, case.elements):
        if name not in made:
            is_logits = name == operation.operands[0].name
            made[name] = make_input(case, device) if is_logits else _tensor(case, name, device, seed)
    return tuple(made[name] for name in case.tensors)


def rounded(case: Case, inputs: Inputs) -> Inputs:
    """The tensors of a gradient with every wider one rounded to the dtype of the case, as PyTorch keeps its results."""
    if not case.declaration.backward:
        return inputs
    dtype = getattr(torch, case.dtype)
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)


def make_input(case: Case, device: Any) -> Any:
    """The logits: normal numbers, one in a hundred of them times 20.

    With normal numbers alone every output would be small, and an error in the maximum would not show.
    """

    def with_outliers(count: int, **where: Any) -> Any:
        fresh = torch.randn(count, **where)
        return fresh.mul_(torch.where(torch.rand(count, **where) < 0.01, 20.0, 1.0))

    return _filled(case.shape, getattr(torch, case.dtype), device, case.elements, with_outliers)


def _kept(case: Case, forward: Case, inputs: Inputs) -> dict[str, Any]:
    """The operands of a gradient that the forward call had or wrote, by name."""
    operation, outputs = case.declaration, {output.name for output in forward.declaration.outputs}
    found = {}
    for name in case.tensors:
        # A gradient that reads no logits has the saved result as its first operand, x.
        output = forward.declaration.result.name if name == "x" and not operation.scores else name
        if output in outputs:
            found[name] = _output(case, name, exact(forward, inputs, output))
        elif name in forward.tensors:
            found[name] = inputs[forward.tensors.index(name)]
    return {name: t.to(inputs[0].device) for name, t in found.items()}


def _output(case: Case, name: str, at: Any) -> Any:
    """An output of the forward call, as the operand of this name."""
    dtype, found = getattr(torch, case.dtype_of(name)), None
    if name in case.declaration.row_operands:
        return whole(case, at).to(dtype)
    for place in pieces(case):
        value, _ = at(place)
        found = torch.empty(case.shape, dtype=dtype, device=value.device) if found is None else found
        found[place] = value.to(dtype)
    assert found is not None
    return found


def _tensor(case: Case, name: str, device: Any, seed: int) -> Any:
    """A random operand or score option."""
    shape, dtype = case.shape_of(name), getattr(torch, case.dtype_of(name))
    if dtype == torch.int64:
        columns = case.shape[case.dim]
        return _filled(shape, dtype, device, seed, lambda n, **where: torch.randint(columns, (n,), **where))
    if dtype != torch.bool:
        return _filled(shape, dtype, device, seed, torch.randn)
    mask = _filled(shape, dtype, device, seed, lambda n, **where: torch.rand(n, **where) < KEPT)
    # Every row keeps a score: the NaN of a fully masked row would hide every error.  A causal mask keeps key 0 too.
    mask.select(case.dim, 0).fill_(True)
    return mask


def _filled(shape: Any, dtype: Any, device: Any, seed: int, make: Callable[..., Any]) -> Any:
    """A tensor filled in pieces, so that the float32 scratch stays small beside a row of 2^28 elements."""
    t = torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for piece in t.view(-1).split(1 << 24):
        piece.copy_(make(piece.numel(), device=device, generator=generator))
    return t


def lacks_memory(case: Case, device: Any) -> str | None:
    """The reason why a case does not fit in memory; None where it does."""
    needed, free = case.needed_bytes, _free_bytes(device)
    if free is None or needed <= free:
        return None
    return f"needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"


def _free_bytes(device: Any) -> int | None:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    try:
        # Linux does not refuse the allocation; it kills the process later.
        with open("/proc/meminfo") as lines:  # noqa: PTH123  a file of the operating system
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def extra_bytes(call: Callable[[], Any], device: Any) -> int | None:
    """Peak bytes that PyTorch's allocator gives to one call, less the bytes of the result; None on a CPU.

    The number is negative where the result is in the memory of the input.
    """
    if device.type != "cuda":
        return None
    gc.collect()  # tensors of others that are freed during the call would lower the number
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    found = call()
    torch.cuda.synchronize(device)
    tensors = found if isinstance(found, tuple) else (found,)
    return int(torch.cuda.max_memory_allocated(device) - before - sum(t.nbytes for t in tensors if t is not None))


def out_of_memory(error: BaseException) -> bool:
    """True for an error that says that memory is exhausted."""
    text = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in text
