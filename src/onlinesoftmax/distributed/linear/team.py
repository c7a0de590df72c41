"""The processes that share the classes or the tokens of a head, and what they exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...core.agreement import kind_of, numbers_of_all
from ...core.arrays import dtype_name
from ...core.processes import group_or_default, start_adding
from ...linear import run
from ...linear.arguments import check_tensors
from ...linear.rows import Statistics
from ...linear.sharing import Sharing
from ...torch.loss_arguments import is_class
from ..exchange import RowStates, merge
from ..losses import OverRows
from ..shards import Shards, announced, checked_shards

Tensor = torch.Tensor


class Team(NamedTuple):
    """The processes that compute one loss together.

    Attributes:
        groups: Process groups over which the classes are sharded; several are the axes of a grid of processes.
        shards: Position of the local classes.
        largest: Most classes of one process.
        token_groups: Process groups over which the tokens are sharded.
    """

    groups: tuple[Any, ...]
    shards: Shards
    largest: int
    token_groups: tuple[Any, ...] = ()

    @property
    def sharing(self) -> Sharing:
        """The exchanges, as the plans of a head call them."""
        first, _, total = self.shards
        return Sharing(first, total, self.largest, self._merged, self._summed, self.over_tokens)

    def _merged(self, found: Statistics, target: Tensor) -> Statistics:
        if not target.numel():
            return found
        dtype = found.logprob.dtype
        limits = torch.finfo(dtype)
        m = found.lse.to(dtype).clamp(limits.min, limits.max)
        assert found.entropy is not None
        local = RowStates(m, (found.lse - m).exp().to(dtype), found.logprob, found.entropy.to(dtype))
        whole = merge(local, self.groups)
        assert whole.logprob is not None
        assert whole.entropy is not None
        logprob = whole.logprob.where(is_class(target, self.shards.total), torch.nan)
        return Statistics(logprob.to(dtype), whole.entropy.to(dtype), whole.lse)

    def _summed(self, total: Tensor, out: Tensor) -> Callable[[], Tensor]:
        # Without tokens there is nothing to add.
        finish = start_adding(total, *(self.groups if total.numel() else ()))
        return lambda: out.copy_(finish())

    def over_tokens(self, t: Tensor) -> Tensor:
        """The sum of a number over the processes that have other tokens."""
        if not self.token_groups:
            return t
        y: Tensor = OverRows.apply(t, None, self.token_groups)
        return y


@torch.compiler.disable
def agreed(name: str, tensors: run.Tensors, shards: Any, group: Any, more: Mapping[str, Any]) -> Team:
    """The processes of a group, after a comparison of their calls unless `shards` is given.

    Args:
        name: Name of the public function.
        tensors: input, linear_weight, target and linear_bias.
        shards, group: The arguments of these names.
        more: The other arguments, which every process gives alike, by name.
    """
    check_tensors(name, *tensors)
    x, linear_weight, target, bias = tensors
    group, classes = group_or_default(group), linear_weight.shape[0] if linear_weight.dim() else 0
    if shards is not None:
        shards = checked_shards(name, shards, classes)
        largest = -(-shards.total // group.size())
    else:
        gradients = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, linear_weight, bias)]
        # A bias that does not fit on one process would be an error there, and leave the others in an exchange.
        of_bias = dtype_name(bias.dtype) if bias is not None and bias.shape == (classes,) else kind_of(bias)
        given = {"input": kind_of(x), "target": kind_of(target), "linear_bias": of_bias} | {
            key: kind_of(value) if isinstance(value, Tensor) else value for key, value in more.items()
        }
        call = announced(name, linear_weight, 0, {**given, "gradients": gradients})
        sizes, here = numbers_of_all(call, classes, (group,), x.device), group.rank()
        shards, largest = Shards(sum(sizes[:here]), classes, sum(sizes)), max(sizes)
    if not shards.total:
        raise ValueError(f"{name}(): linear_weight has no classes on any process")
    return Team((group,), shards, largest)
