"""The merge of sharded rows after the all-gather, and the incoming gradients of their backward pass, in two kernels."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...core.options import bits
from ..sharded import FLOATS, INTEGERS, TENSORS, ShardedRows
from . import state
from .formulas import number
from .launch import TL_DTYPES, Launch, Program

BLOCK = 256
"""Rows of a program."""


# A launch has None for a tensor that it lacks, and float64 numbers as the integers that have their bits.
Tensors = namedtuple("Tensors", TENSORS)
Numbers = namedtuple("Numbers", (*INTEGERS, *FLOATS))


class Form(NamedTuple):
    """Constants of both kernels.

    Attributes:
        acc: Accumulator type, in which states are sent.
        exact, kinds: As in OpConstants: the sums of a state are l and, with the entropy, zl.
        entropy: True where the entropy is computed.
        smoothed, z_loss: True where the loss has these options.
        loss: True for a cross-entropy.
        scalar: True where dy is one number.
        sent: Numbers that a process sends for each row.
    """

    acc: Any
    exact: bool
    kinds: tuple[str, ...]
    entropy: bool
    smoothed: bool
    z_loss: bool
    loss: bool
    scalar: bool
    sent: int


@triton.jit
def wide(value, FORM: tl.constexpr):
    """A value in float64."""
    return value.to(FORM.acc).to(tl.float64)


@triton.jit
def store(to, value, inside, FORM: tl.constexpr):
    """Stores a float64 value, rounded to the accumulator's type first: it is rounded to 16 bits from there."""
    tl.store(to, value.to(FORM.acc).to(to.dtype.element_ty), mask=inside)


@triton.jit
def target_of(p, n, row, FORM: tl.constexpr):
    """(target, whether it is a class, whether the row counts, factor of its loss)."""
    inside = row < n.rows
    target = tl.load(p.target + row, mask=inside, other=-1).to(tl.int64)
    is_class = (target >= 0) & (target < n.classes)
    counts = inside
    if FORM.loss:
        counts = inside & (target != n.ignore_index)
    weight = tl.full(row.shape, 1.0, tl.float64)
    if FORM.smoothed:
        weight = weight - number(n.smoothing, tl.float64)
    if p.weight is not None:
        weight = weight * wide(tl.load(p.weight + target, mask=is_class, other=0.0), FORM)
    return target, is_class, counts, weight


@triton.jit
def sent(p, n, process, I: tl.constexpr, row, FORM: tl.constexpr):
    """One number of the state that a process has sent."""
    at = p.states + (process * FORM.sent + I) * n.rows + row
    return wide(tl.load(at, mask=row < n.rows, other=0.0), FORM)


@triton.jit
def state_of(p, n, process, row, FORM: tl.constexpr):
    """The state (m, sums) that a process has sent."""
    m, l = sent(p, n, process, 0, row, FORM), sent(p, n, process, 1, row, FORM)
    sums = (l,)
    if FORM.entropy:
        # Without a score above -inf, the entropy is NaN.
        zl = l * (tl.log(l) - sent(p, n, process, 3, row, FORM))
        sums += (tl.where(l == 0, 0.0, zl),)
    return m, sums


@triton.jit
def merge_kernel(p, n, FORM: tl.constexpr, BLOCK: tl.constexpr):
    # One program: BLOCK rows.
    # Chosen: after the all-gather of the states.
    # Bytes: one read of the states and of the targets, of one weight for each target, one write of each result.
    # Limits: contiguous tensors.
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n.rows
    _, is_class, counts, weight = target_of(p, n, row, FORM)
    nan, inf = float("nan"), float("inf")
    m, sums = state_of(p, n, 0, row, FORM)
    # The target's log-probability, and m and log(l), of the process that has the target.
    own = sent(p, n, 0, 2, row, FORM)
    own_m, own_l, weighted = m, sums[0], tl.zeros_like(m)
    if FORM.smoothed:
        weighted = sent(p, n, 0, 3 + FORM.entropy, row, FORM)
    for process in range(1, n.processes):
        m_next, sums_next = state_of(p, n, process, row, FORM)
        logprob = sent(p, n, process, 2, row, FORM)
        found = logprob == logprob
        own, own_m = tl.where(found, logprob, own), tl.where(found, m_next, own_m)
        own_l = tl.where(found, sums_next[0], own_l)
        if FORM.smoothed:
            weighted += sent(p, n, process, 3 + FORM.entropy, row, FORM)
        m, sums = state.merge(m, sums, m_next, sums_next, FORM)
    l = sums[0]
    log_l = tl.log(l)
    lse = m + log_l
    # If all columns of the process with the target are at -inf, no process has the target's log-probability.
    logprob = tl.where(own == own, own + ((own_m - m) + (tl.log(own_l) - log_l)), -inf)
    logprob = tl.where(is_class & (l > 0) & (l < inf), logprob, nan)
    if p.y is not None:
        y = logprob
        if FORM.loss:
            y = -weight * logprob
            if FORM.smoothed:
                y += number(n.smoothing, tl.float64) * (lse - weighted / n.classes)
            if FORM.z_loss:
                y += number(n.z_loss, tl.float64) * lse * lse
            y = tl.where(counts, tl.where(is_class, y, nan), 0.0)
        store(p.y + row, y, inside, FORM)
    if p.lse is not None:
        store(p.lse + row, lse, inside, FORM)
    if FORM.entropy:
        store(p.entropy + row, log_l - sums[1] / l, inside, FORM)
    if p.m is not None:
        store(p.m + row, m, inside, FORM)
        store(p.l + row, l, inside, FORM)


@triton.jit
def incoming_kernel(p, n, FORM: tl.constexpr, BLOCK: tl.constexpr):
    # One program: BLOCK rows.
    # Chosen: before the gradient of the shard.
    # Bytes: one read of the incoming gradients and of the targets, of one weight for each target, two or three writes.
    # Limits: contiguous tensors.
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n.rows
    target, is_class, counts, weight = target_of(p, n, row, FORM)
    zero = tl.zeros(row.shape, tl.float64)
    dlogprob, dlse, flat = zero, zero, zero
    if p.dy is not None:
        if FORM.scalar:
            dy = zero + wide(tl.load(p.dy), FORM)
        else:
            dy = wide(tl.load(p.dy + row, mask=inside, other=0.0), FORM)
        if p.count is not None:
            dy = dy / wide(tl.load(p.count + 1), FORM)
        dlogprob = dy
        if FORM.loss:
            dlogprob = -dy * weight
            if FORM.z_loss:
                m, l = tl.load(p.m + row, mask=inside, other=0.0), tl.load(p.l + row, mask=inside, other=1.0)
                lse = wide(m, FORM) + tl.log(wide(l, FORM))
                dlse = dy * 2.0 * number(n.z_loss, tl.float64) * lse
            if FORM.smoothed:
                spread = dy * number(n.smoothing, tl.float64)
                dlse += spread
                flat = number(n.scale, tl.float64) * (spread / n.classes)
        # A row that is ignored, or whose target is no class, has no gradient, whatever it holds.
        valid = counts & is_class
        dlogprob = tl.where(valid, dlogprob, 0.0)
        dlse, flat = tl.where(valid, dlse, 0.0), tl.where(valid, flat, 0.0)
    if p.dlse is not None:
        dlse = wide(tl.load(p.dlse + row, mask=inside, other=0.0), FORM)
    here = (target >= n.first) & (target < n.first + n.cols)
    dlse = tl.where(here, dlse, dlse - dlogprob)
    store(p.to_y + row, dlogprob, inside, FORM)
    store(p.to_lse + row, dlse, inside, FORM)
    if p.to_flat is not None:
        store(p.to_flat + row, flat, inside, FORM)


def bind(kernel: str, rows: ShardedRows) -> Callable[[dict[str, Any]], None]:
    """The function run(tensors) for tensors that lie alike on 16 bytes in every call."""
    run = program(kernel, rows).bind("target")
    return lambda tensors: run(tensors["target"], tensors["target"], tensors)


def program(kernel: str, rows: ShardedRows) -> Program:
    """The launch of one of the two kernels."""
    tensors = Tensors(*(name if name in rows.names else None for name in TENSORS))
    entropy = "entropy" in rows.names
    kinds = ("scaled",) * (1 + entropy)
    has = rows.smoothing != 0, rows.z_loss != 0
    form = Form(TL_DTYPES[rows.accumulator], True, kinds, entropy, *has, rows.loss, rows.scalar, len(rows.sent))
    integers, floats = ([getattr(rows, name) for name in names] for names in (INTEGERS, FLOATS))
    numbers = Numbers(*integers, *map(bits, floats))
    function = {"merge": merge_kernel, "incoming": incoming_kernel}[kernel]
    return Program([Launch(function, triton.cdiv(rows.rows, BLOCK), (tensors,), (numbers,), (form, BLOCK), 4)])
