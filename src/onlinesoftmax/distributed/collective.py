"""Statistics of sharded rows by kernels before and after a collective.

    states     one kernel reads the shard, and writes the state of each row where it is sent from
    exchange   one all-gather of the states for each process group, and for each chunk of rows where they are many
    merge      one small kernel merges the states, and writes the results of each row (kernels/sharded.py)
    total      one small kernel reduces the losses to a scalar (torch/small_kernels.py)
    backward   one small kernel prepares the incoming gradients, and one reads the shard and writes its gradient

Label smoothing adds one operation of PyTorch over the shard forward, and one backward.  Launches are prepared once for
each signature; fast_path.py finds them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.processes import gathered_flat, start_gathering
from ..kernels.sharded import STATES, ShardedRows
from ..ops import OPERATIONS, TOKEN_LOGPROBS
from ..torch.formulas import accumulator_of
from ..torch.prepare import DTYPE_NAMES, Prepared, aligned, prepared
from ..torch.small_kernels import prepared_sharded, total_after_losses
from .exchange import Saved, apply_in_eager_mode
from .local import Shard, call_of
from .shards import Operands, ShardSignature, to_local_columns

Tensor = torch.Tensor

_BACKWARD = OPERATIONS[TOKEN_LOGPROBS.gradient_name]

CHUNK_BYTES = 4 << 20
"""Least bytes that each process receives for a chunk of rows.

An all-gather of fewer bytes takes little more than its latency, and every chunk adds this latency.
"""

MOST_CHUNKS = 8
"""Most chunks of a call."""

CHUNK_STEP = 16
"""The length of a chunk in the first dimension is a multiple of this, so that a chunk is aligned as the whole is."""


class Chunk:
    """The launches of a chunk of rows: their local states, and the merge of the states of all processes.

    Args:
        signature: The properties of the call.
        operands: The tensors of the chunk.
        rows: The description of all rows of the call.
    """

    def __init__(self, signature: ShardSignature, operands: Operands, rows: ShardedRows) -> None:
        x, target = operands.x, operands.target
        self.dim, self.device = signature.dim, x.device
        self.rows = rows._replace(rows=target.numel())
        self.wide = accumulator_of(x.dtype, x.dtype)
        # The kernel of the states is prepared for outputs that lie on 16 bytes.
        self.in_place = self.rows.rows * self.wide.itemsize % 16 == 0
        self.merge = prepared_sharded("merge", self.rows, self.device)
        self.states: Prepared | None = None
        self.numbers: dict[str, int] = {}
        # A process without columns has nothing to launch.
        if x.numel():
            local_target = to_local_columns(target, signature.shards)
            call = call_of(TOKEN_LOGPROBS, Shard.of(signature, operands, local_target), {"target": local_target})
            more = ("entropy",) if "entropy" in self.rows.sent else ()
            self.states, named = prepared(call, ("y", "m", "l", *more))
            self.numbers = {name: value for name, value in named.items() if isinstance(value, int)}

    def local_states(self, x: Tensor, mask: Tensor | None, local_target: Tensor) -> Tensor:
        """The local states, flat: first number of all rows, second number of all rows, and so on."""
        sent = self.rows.sent
        packed = torch.empty((len(sent), self.rows.rows), dtype=self.wide, device=self.device)
        parts = packed.unbind(0) if self.in_place else tuple(torch.empty_like(part) for part in packed)
        named: dict[str, Any] = dict(zip(sent, parts, strict=True))
        if self.states is None:
            for name, value in zip(STATES, (torch.finfo(self.wide).min, 0.0, torch.nan), strict=True):
                named[name].fill_(value)
            for name in sent[len(STATES) :]:
                named[name].zero_()
        else:
            named["target"] = local_target
            if mask is not None:
                named["mask"] = mask
            self.states(x, named["logprob"], {**named, **self.numbers})
            if "weighted" in named:
                total = x.sum(self.dim, dtype=self.wide).view(-1)
                named["weighted"].copy_(total if self.rows.scale == 1 else total * self.rows.scale)
        return packed.view(-1) if self.in_place else torch.cat(parts)


class CollectiveLaunches:
    """The prepared launches of one kind of call; no tensor is kept.

    Where many bytes are exchanged, the rows are cut into chunks along the first dimension.  While the states of one
    chunk are exchanged, those of the next are computed.

    Args:
        signature: The properties of the call.
        operands: The tensors of the first call: none is lazily negated, target and weight are contiguous.
        processes: Number of processes.
        with_gradient: True where backward may follow.
    """

    def __init__(self, signature: ShardSignature, operands: Operands, processes: int, with_gradient: bool) -> None:
        x, target, weight = operands.x, operands.target, operands.weight
        loss, shards = signature.loss, signature.shards
        self.signature, self.with_gradient, self.device = signature, with_gradient, x.device
        wide = accumulator_of(x.dtype, x.dtype)
        self.total = None
        if loss is not None and signature.reduces:
            self.total = total_after_losses(x, target, weight, loss, shards.total)
        # Losses that are reduced have the accumulator's dtype.
        result = wide if signature.reduces else signature.result
        saved = ("m", "l") if with_gradient else ()
        self.written = {name: result if name in ("y", "lse") else wide for name in (*signature.outputs, *saved)}
        weights = () if weight is None else ("weight",)
        numbers: dict[str, Any] = {}
        if loss is not None:
            numbers = {"ignore_index": loss.ignore_index, "smoothing": loss.smoothing, "z_loss": loss.z_loss}
        self.rows = ShardedRows(
            target.numel(), processes, DTYPE_NAMES[wide], DTYPE_NAMES[result], DTYPE_NAMES[target.dtype],
            None if weight is None else DTYPE_NAMES[weight.dtype], loss is not None, signature.reduces, *shards,
            scale=signature.options.scale, names=("states", "target", *weights, *self.written), **numbers,
        )  # fmt: skip
        self.incoming: dict[tuple[str, ...], Any] = {}
        self.gradient: dict[bool, Prepared] = {}
        # The launches of each chunk, and its indices [first, end) of the first dimension.
        self.chunks: list[tuple[Chunk, int, int]] = []
        by_length: dict[int, Chunk] = {}
        step = self._chunk_length(len(x), wide.itemsize)
        for first in range(0, max(len(x), 1), step):
            end = min(first + step, len(x))
            if end - first not in by_length:
                by_length[end - first] = Chunk(signature, cut(operands, first, end), self.rows)
            self.chunks.append((by_length[end - first], first, end))

    def _chunk_length(self, length: int, itemsize: int) -> int:
        """Length of a chunk in the first dimension; the same on every process."""
        received = self.rows.processes * len(self.rows.sent) * itemsize * self.rows.rows
        count = min(MOST_CHUNKS, received // CHUNK_BYTES)
        if count < 2 or not self.signature.dim:
            return max(length, 1)
        return -(-length // (count * CHUNK_STEP)) * CHUNK_STEP

    def __call__(self, operands: Operands, groups: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The results of a call."""
        operands = operands.with_target(self.signature.dim)
        if not self.with_gradient:
            return self.forward(operands, groups)[0]
        # The other tensors travel in a tuple, so that autograd need not look at them.
        found: tuple[Tensor, ...] = apply_in_eager_mode(operands.x, self, operands, groups)
        return found

    def forward(self, operands: Operands, groups: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], Saved]:
        """(the results, what backward reads); without a gradient, there is no state of the rows among it."""
        target, weight = operands.target, operands.weight
        local_target = to_local_columns(target, self.signature.shards)
        tensors: dict[str, Any] = {"target": target}
        for name, dtype in self.written.items():
            tensors[name] = torch.empty_like(local_target, dtype=dtype)
        if len(self.chunks) == 1:
            chunk = self.chunks[0][0]
            states = gathered_flat(chunk.local_states(operands.x, operands.mask, local_target), *groups)
            chunk.merge({"states": states, "weight": weight, **tensors})
        else:
            self._run_chunks(operands, local_target, tensors, groups)
        divisor = None
        if self.total is None:
            found = tuple(tensors[name] for name in self.signature.outputs)
        else:
            total, divisor = self.total(tensors["y"], target, weight)
            found = (total,)
        m, l, entropy = (tensors.get(name) for name in ("m", "l", "entropy"))
        return found, Saved(operands.mask, target, weight, m, l, entropy, local_target, divisor)

    def _run_chunks(
        self, operands: Operands, local_target: Tensor, tensors: dict[str, Tensor], groups: tuple[Any, ...]
    ) -> None:
        """Writes the results of each row to the tensors.  All exchanges are started before the first is waited for."""
        finish = []
        for chunk, first, end in self.chunks:
            part = cut(operands, first, end)
            finish.append(start_gathering(chunk.local_states(part.x, part.mask, local_target[first:end]), *groups))
        for (chunk, first, end), finished in zip(self.chunks, finish, strict=True):
            rows = {name: t[first:end] for name, t in tensors.items()}
            chunk.merge({"states": finished(), "weight": operands.weight, **rows})

    def backward(self, x: Tensor, saved: Saved, dys: tuple[Tensor | None, ...], out: Tensor | None = None) -> Tensor:
        """The gradient with respect to x, from the gradients of the results, in `out` if that is given."""
        if not x.numel():
            return torch.empty_like(x)
        given = dict(zip(self.signature.outputs, map(_contiguous, dys), strict=True))
        dy, dlse, dentropy = given.get("y"), given.get("lse"), given.get("entropy")
        to_y, to_lse, flat = torch.empty_like(saved.m), torch.empty_like(saved.m), None
        if self.rows.smoothing:
            flat = torch.empty_like(saved.m)
        self._prepare_incoming({
            "target": saved.target, "weight": saved.weight, "m": saved.m, "l": saved.l, "dy": dy, "dlse": dlse,
            "count": saved.divisor, "to_y": to_y, "to_lse": to_lse, "to_flat": flat,
        })  # fmt: skip
        rows: dict[str, Any] = {"target": saved.local_target, "dy": to_y, "m": saved.m, "l": saved.l, "dlse": to_lse}
        rows |= self.chunks[0][0].numbers
        if dentropy is not None:
            rows |= {"entropy": saved.entropy, "dentropy": dentropy}
        run = self.gradient.get(dentropy is not None)
        if run is None:
            tensors = {name: t for name, t in rows.items() if isinstance(t, Tensor)}
            shard = Shard.of(self.signature, Operands(x, saved.mask), None)
            run = self.gradient[dentropy is not None] = prepared(call_of(_BACKWARD, shard, tensors), ("y",))[0]
        if saved.mask is not None:
            rows["mask"] = saved.mask
        dx: Tensor = run(x, out, rows)
        return dx if flat is None else dx.sub_(flat.unsqueeze(self.signature.dim))

    def _prepare_incoming(self, tensors: dict[str, Tensor | None]) -> None:
        """Write the incoming gradients of the gradient kernel; the tensors that a call does not have are None."""
        names = tuple(name for name, t in tensors.items() if t is not None)
        run = self.incoming.get(names)
        if run is None:
            rows = self.rows._replace(names=names, processes=0, result=DTYPE_NAMES[self.signature.result])
            run = self.incoming[names] = prepared_sharded("incoming", rows, self.device)
        run(tensors)


def cut(operands: Operands, first: int, end: int) -> Operands:
    """The tensors of the rows with the indices [first, end) of the first dimension."""
    x, mask = operands.x, operands.mask
    if end - first == len(x):
        return operands
    if mask is not None and mask.dim() == x.dim() and len(mask) > 1:
        mask = mask[first:end]
    return operands._replace(x=x[first:end], mask=mask, target=operands.target[first:end])


def _contiguous(dy: Tensor | None) -> Tensor | None:
    """An incoming gradient whose elements are neighbours, the first on 16 bytes, as the kernels were prepared for."""
    if dy is None or (dy.is_contiguous() and aligned(dy) and not dy.is_neg()):
        return dy
    return dy.resolve_neg().clone(memory_format=torch.contiguous_format)
