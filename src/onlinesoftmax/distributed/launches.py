"""Losses and log-probabilities of sharded rows by our kernels alone, with little host time.

    states     one kernel reads the shard, and writes the state of each row where it is sent from
    exchange   one all-gather of the states of all processes
    merge      one small kernel merges the states, and writes the results of each row (kernels/sharded.py)
    total      small kernels reduce the losses to a scalar (torch/reductions.py)
    backward   one small kernel prepares the incoming gradients, and one reads the shard and writes its gradient

Launches are prepared once for each kind of call, as in torch/loss_launches.py.  `results` decides by what is the same
on every process, so that all processes merge by the same kernels and get the same bits.  What it does not take runs on
the general path (statistics.py), which sends the same numbers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..core.call import Call, Settings
from ..core.operations import OPERATIONS
from ..core.options import ScoreOptions
from ..core.processes import gathered_flat
from ..core.task import Choice
from ..kernels.sharded import STATES, ShardedRows
from ..torch.check import check_first_derivative
from ..torch.dispatch import DTYPES
from ..torch.gradients import accumulator_of
from ..torch.loss import Loss
from ..torch.ops import PLAIN_TYPES
from ..torch.prepare import DTYPE_NAMES, Prepared, aligned, prepared
from ..torch.reductions import backend_for, may_count, prepared_sharded, reducer
from .shards import Shards

Tensor = torch.Tensor

_FORWARD = OPERATIONS["token_logprobs"]
_BACKWARD = OPERATIONS[_FORWARD.gradient]


class Wanted(NamedTuple):
    """A call without its tensors and its process groups.

    Attributes:
        dim: The softmax dimension.
        shards: Position of the local columns in the whole row.
        options: Scale and softcap of the scores.
        choice: What the caller forces of the local plan.
        loss: The arguments of a cross-entropy; None for log-probabilities.
        outputs: Names of the results: "y" (the loss, or the log-probability), "lse", "entropy".
        result: Dtype of "y" and "lse".
    """

    dim: int
    shards: Shards
    options: ScoreOptions
    choice: Choice
    loss: Loss | None
    outputs: tuple[str, ...]
    result: torch.dtype

    @property
    def smoothing(self) -> float:
        """Part of the target that is spread over all classes."""
        return self.loss.smoothing if self.loss else 0.0

    @property
    def reduces(self) -> bool:
        """True where the losses are reduced to a scalar."""
        return self.loss is not None and self.loss.reduction != "none"


class Given(NamedTuple):
    """The tensors of a call: local logits and mask; targets and weights of all processes."""

    x: Tensor
    mask: Tensor | None
    target: Tensor
    weight: Tensor | None


LAUNCHES: dict[tuple[Any, ...], Launches] = {}
"""The launches of a kind of call."""

MOST_LAUNCHES = 4096


def results(wanted: Wanted, given: Given, groups: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    """The results of a checked call, the same on every process; None where the general path must compute them."""
    x = given.x
    if type(x) not in PLAIN_TYPES or torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    # A kernel reads the memory of a tensor, so no negation may be pending.
    weight = None if given.weight is None else given.weight.resolve_neg().contiguous()
    given = Given(x.resolve_neg(), given.mask, given.target.contiguous(), weight)
    with_gradient = given.x.requires_grad and torch.is_grad_enabled()
    processes = groups[0].size() if len(groups) == 1 else math.prod(group.size() for group in groups)
    key = (wanted, with_gradient, processes, given.x.stride(), *(_place(t) for t in given))
    launches = LAUNCHES.get(key)
    if launches is None:
        if not _by_kernels(wanted, given):
            return None
        if len(LAUNCHES) >= MOST_LAUNCHES:
            LAUNCHES.clear()
        launches = LAUNCHES[key] = Launches(wanted, given, processes, with_gradient)
    if with_gradient:
        found: tuple[Tensor, ...] = _apply(given.x, launches, given[1:], groups)
        return found
    return launches.forward(given, groups)[0]


def _place(t: Tensor | None) -> tuple[Any, ...]:
    return () if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16)


def _by_kernels(wanted: Wanted, given: Given) -> bool:
    """True where kernels take a call; the same on every process."""
    x, _, target, weight = given
    backend, _, batch_invariant = wanted.choice
    # On a CPU, Triton's interpreter runs the kernels if the caller forces them.
    if not (x.is_cuda or backend == "triton") or backend == "eager" or batch_invariant or backend_for(x) is None:
        return False
    if x.dtype not in DTYPES or not target.numel() or not wanted.shards.total:
        return False
    loss = wanted.loss
    if loss is None:
        return True
    # PyTorch's operations compute the weighted sum of the scores, and the gradient of a softcap.
    smooth = loss.smoothing == 0 or (weight is None and wanted.options.softcap is None)
    return smooth and (weight is None or weight.dtype in DTYPES) and may_count(target, weight, loss)


class Launches:
    """The prepared launches of one kind of call; no tensor is kept."""

    def __init__(self, wanted: Wanted, given: Given, processes: int, with_gradient: bool) -> None:
        self.wanted, self.with_gradient = wanted, with_gradient
        x, _, target, weight = given
        self.wide = accumulator_of(x.dtype, x.dtype)
        loss, shards = wanted.loss, wanted.shards
        self.total = None
        if loss is not None and wanted.reduces:
            # Only the divisor of a mean is needed in backward.
            keeps = with_gradient and loss.reduction == "mean"
            self.total = reducer(x, target, weight, loss, keeps, shards.total)
        # The dtype of y: losses that are reduced have the accumulator's.
        self.y_dtype = self.wide if wanted.reduces else wanted.result
        names = ("states", "target", *(() if weight is None else ("weight",)), *wanted.outputs)
        self.rows = ShardedRows(
            target.numel(), processes, DTYPE_NAMES[self.wide], DTYPE_NAMES[self.y_dtype], DTYPE_NAMES[target.dtype],
            None if weight is None else DTYPE_NAMES[weight.dtype], loss is not None, wanted.reduces, *shards,
            names=(*names, "m", "l") if with_gradient else names,
        )  # fmt: skip
        if loss is not None:
            self.rows = self.rows._replace(ignore_index=loss.ignore_index, smoothing=loss.smoothing, z_loss=loss.z_loss)
        self.rows = self.rows._replace(scale=wanted.options.scale)
        self.merge = prepared_sharded("merge", self.rows, x.device)
        self.incoming: dict[tuple[str, ...], Any] = {}
        self.local, self.numbers = self._prepared_states(given)
        self.gradient: dict[bool, Prepared] = {}

    def _prepared_states(self, given: Given) -> tuple[Prepared | None, dict[str, int]]:
        """The launch that computes the local states, and its operands that are numbers."""
        x, mask, target, _ = given
        if not x.numel():
            return None, {}
        more = ("m", "l", *(("entropy",) if "entropy" in self.wanted.outputs else ()))
        run, operands = prepared(self._call(_FORWARD, x, mask, {"target": self._from_here(target)}), ("y", *more))
        return run, {name: value for name, value in operands.items() if isinstance(value, int)}

    def _call(self, operation: Any, x: Tensor, mask: Tensor | None, rows: dict[str, Tensor]) -> Call:
        dim, options = self.wanted.dim, self.wanted.options._replace(mask=mask)
        dtype = x.dtype if operation.backward else None
        beside = {name: t.unsqueeze(dim) for name, t in rows.items()}
        settings = Settings(dim, dtype, choice=self.wanted.choice)
        return Call(operation, x, settings, None if options.plain else options, None, beside)

    def _from_here(self, target: Tensor) -> Tensor:
        """The targets counted from the first local column; a difference of narrow integers would not fit in them."""
        first = self.wanted.shards.first
        return target.long() - first if first else target.long()

    def forward(self, given: Given, groups: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """(the results, the tensors that backward reads besides x)."""
        x, mask, target, weight = given
        here = self._from_here(target)
        states = gathered_flat(self._states(x, mask, here).view(-1), *groups)
        tensors: dict[str, Any] = {"states": states, "target": target, "weight": weight}
        for name in self.rows.names:
            if name not in tensors:
                dtype = self.y_dtype if name in ("y", "lse") else self.wide
                tensors[name] = torch.empty_like(here, dtype=dtype)
        self.merge(tensors)
        found, factor = tuple(tensors[name] for name in self.wanted.outputs), None
        if self.total is not None:
            factor = self.total.factor and self.total.factor(target, weight)
            found = (self.total.total(tensors["y"], target, weight, factor),)
        kept = (tensors["m"], tensors["l"], tensors.get("entropy")) if self.with_gradient else ()
        return found, (mask, target, weight, here, factor, *kept)

    def _states(self, x: Tensor, mask: Tensor | None, here: Tensor) -> Tensor:
        """The local states, of shape (numbers, rows)."""
        sent, count = self.rows.sent, here.numel()
        packed = torch.empty((len(sent), count), dtype=self.wide, device=x.device)
        # A kernel is prepared for outputs that lie on 16 bytes.
        in_place = count * self.wide.itemsize % 16 == 0
        parts = packed.unbind(0) if in_place else [torch.empty_like(here, dtype=self.wide).view(-1) for _ in sent]
        named: dict[str, Any] = dict(zip(sent, parts, strict=True))
        if self.local is None:
            for name, value in zip(sent, (torch.finfo(self.wide).min, 0.0, torch.nan, 0.0), strict=False):
                named[name].fill_(value)
        else:
            assert sent[: len(STATES)] == STATES
            operands = {**named, "target": here, **self.numbers}
            if mask is not None:
                operands["mask"] = mask
            self.local(x, named["logprob"], operands)
        if "weighted" in named:
            total = x.sum(self.wanted.dim, dtype=self.wide).view(-1)
            named["weighted"].copy_(total if self.rows.scale == 1 else total * self.rows.scale)
        return packed if in_place else torch.stack(parts, out=packed)

    def backward(self, x: Tensor, kept: tuple[Any, ...], dys: tuple[Tensor | None, ...]) -> Tensor:
        """The gradient with respect to x, from the gradients of the results."""
        mask, target, weight, here, factor, m, l, entropy = kept
        if self.local is None:
            return torch.empty_like(x)
        given = {name: _contiguous(dy) for name, dy in zip(self.wanted.outputs, dys, strict=True) if dy is not None}
        dentropy = given.pop("entropy", None)
        tensors = {f"d{name}": dy for name, dy in given.items()}
        tensors |= {"target": target, "m": m, "l": l}
        if weight is not None:
            tensors["weight"] = weight
        if factor is not None:
            tensors["count"] = factor
        for name in ("to_y", "to_lse", *(("to_flat",) if self.wanted.smoothing else ())):
            tensors[name] = torch.empty_like(m)
        self._incoming(tuple(tensors), x.device)(tensors)
        rows = {"target": here, "dy": tensors["to_y"], "m": m, "l": l, "dlse": tensors["to_lse"]}
        if dentropy is not None:
            rows |= {"entropy": entropy, "dentropy": dentropy}
        run = self.gradient.get(dentropy is not None)
        if run is None:
            run = self.gradient[dentropy is not None] = prepared(self._call(_BACKWARD, x, mask, rows), ("y",))[0]
        dx: Tensor = run(x, None, {**rows, **self.numbers} if mask is None else {**rows, **self.numbers, "mask": mask})
        return dx.sub_(tensors["to_flat"].unsqueeze(self.wanted.dim)) if self.wanted.smoothing else dx

    def _incoming(self, names: tuple[str, ...], device: torch.device) -> Any:
        run = self.incoming.get(names)
        if run is None:
            rows = self.rows._replace(names=names, processes=0, result=DTYPE_NAMES[self.wanted.result])
            run = self.incoming[names] = prepared_sharded("incoming", rows, device)
        return run


def _contiguous(dy: Tensor) -> Tensor:
    """An incoming gradient whose elements are neighbours, the first on 16 bytes, as the kernels were prepared for."""
    return dy if dy.is_contiguous() and aligned(dy) else dy.clone(memory_format=torch.contiguous_format)


class _Rows(torch.autograd.Function):
    """The results of a call, with a gradient.  Backward needs no exchange: all processes have the same gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, launches: Launches, others: tuple[Any, ...], groups: tuple[Any, ...]) -> Any:
        # The other tensors travel in a tuple, so that autograd need not look at them.
        found, kept = launches.forward(Given(x, *others), groups)
        ctx.save_for_backward(x, *kept)
        ctx.launches = launches
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_derivative("the gradient of numbers of sharded rows")
        if all(dy is None for dy in dys):
            return None, None, None, None
        x, *kept = ctx.saved_tensors
        return ctx.launches.backward(x, tuple(kept), dys), None, None, None


# `apply` of the base class in C++, without the check for transforms in torch.autograd.Function.
_apply = super(torch.autograd.Function, _Rows).apply
