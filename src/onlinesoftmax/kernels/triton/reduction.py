"""The total of a loss and the divisor of its mean, in two launches: sums of blocks of rows, then their sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..reduction import Reduction
from .launch import TL_DTYPES, Launch, Program

BLOCK = 4096
"""Rows of a program."""

FAN = 1024
"""Sums that the last program adds at once."""


class Tensors(NamedTuple):
    """Tensors besides the result, of which `divisor` is written; None where a reduction has none."""

    losses: Any
    target: Any
    weight: Any
    count: Any
    divisor: Any


class RowSums(NamedTuple):
    """Sums of each program in float64; None where a reduction has none."""

    total: Any
    divisor: Any


@triton.jit
def reduction_kernel(p, sums, rows, classes, ignore_index, ACC: tl.constexpr, BLOCK: tl.constexpr):
    # One program: the sums of BLOCK rows.
    # Chosen: before a loss with a gradient for the divisor, after any loss that becomes a scalar for the total.
    # Bytes: one read of the losses, of the targets, or of both, and of one weight for each target.
    # Limits: the elements are neighbours.
    pid = tl.program_id(0).to(tl.int64)
    row = pid * BLOCK + tl.arange(0, BLOCK)
    if p.losses is not None:
        losses = tl.load(p.losses + row, mask=row < rows, other=0.0)
        tl.store(sums.total + pid, tl.sum(losses.to(tl.float64), 0))
    if p.target is not None:
        target = tl.load(p.target + row, mask=row < rows, other=0).to(tl.int64)
        counts = (row < rows) & (target != ignore_index)
        if p.weight is not None:
            # A target out of range makes the loss of its row NaN.
            counts = counts & (target >= 0) & (target < classes)
            shares = tl.load(p.weight + target, mask=counts, other=0.0).to(ACC)
            tl.store(sums.divisor + pid, tl.sum(shares.to(tl.float64), 0))
        else:
            tl.store(sums.divisor + pid, tl.sum(counts.to(tl.float64), 0))


@triton.jit
def add(sums_ptr, count, FAN: tl.constexpr):
    """The sum of `count` numbers, in the same order on every run."""
    found = tl.zeros((FAN,), tl.float64)
    for first in range(0, count, FAN):
        i = first + tl.arange(0, FAN)
        found += tl.load(sums_ptr + i, mask=i < count, other=0.0)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=("programs",))
def reduction_end_kernel(p, sums, to, programs, ACC: tl.constexpr, FAN: tl.constexpr):
    # One program: the sums of all programs of reduction_kernel, and the result.
    # Chosen: after reduction_kernel.
    # Bytes: one read of the sums.
    # Limits: none.
    if p.target is not None:
        # Rounded, so that a total is the same whether an earlier kernel or this one has counted.
        divisor = add(sums.divisor, programs, FAN).to(ACC)
    if p.losses is not None:
        total = add(sums.total, programs, FAN)
        if p.target is not None:
            total = total / divisor.to(tl.float64)
            if p.divisor is not None:
                tl.store(p.divisor, 1.0 / divisor)
                tl.store(p.divisor + 1, divisor)
        if p.count is not None:
            total = total / tl.load(p.count + 1).to(tl.float64)
        tl.store(to[0], total.to(ACC).to(to[0].dtype.element_ty))
    else:
        tl.store(to[0], 1.0 / divisor)
        tl.store(to[0] + 1, divisor)


def bind(reduction: Reduction) -> Callable[[Any, dict[str, Any]], None]:
    """The function run(out, tensors) for tensors that lie alike on 16 bytes in every call."""
    run = program(reduction).bind("out")
    return lambda out, tensors: run(out, out, tensors)


def program(reduction: Reduction) -> Program:
    """The launches of a reduction."""
    tensors, accumulator = reduction.tensors, TL_DTYPES[reduction.accumulator]
    given = Tensors(*(name if name in tensors else None for name in Tensors._fields))
    sums = RowSums("totals" if "losses" in tensors else None, "divisors" if "target" in tensors else None)
    programs = triton.cdiv(reduction.rows, BLOCK)
    numbers = (reduction.rows, reduction.classes, reduction.ignore_index)
    return Program(
        [
            Launch(reduction_kernel, programs, (given, sums), numbers, (accumulator, BLOCK), 8),
            Launch(reduction_end_kernel, 1, (given, sums, ("out",)), (programs,), (accumulator, FAN), 4),
        ],
        {name: (programs, "float64") for name in sums if name is not None},
    )
