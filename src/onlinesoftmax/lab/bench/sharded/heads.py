"""The ways to compute a head whose classes are sharded over processes, and the whole head on each of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from .... import distributed
from ....distributed import mailboxes
from ..cases import Case, Inputs
from ..formulas import Function
from ..heads.cases import HeadCase
from ..heads.peers import OursHead, public_head
from ..peers import by_name
from .team import InTeam


class WholeHead(InTeam, OursHead):
    """Our function of the whole head: every process computes all of it, as one GPU would."""

    name = "one-process"

    def note(self, case: HeadCase, x: Any, weight: Any = None, *more: Any) -> str:
        """Nothing."""
        return ""


class ShardedHead(WholeHead):
    """Our functions in `onlinesoftmax.distributed`, with equal shards of the classes."""

    name = OursHead.name

    def forward(self, case: HeadCase) -> Function:
        """The public function of the input and of this process's rows of the weight."""
        given = {"shards": self.team.shards(case), "group": self.team.group}
        return public_head(case, distributed, given)

    def arguments(self, case: Case, inputs: Inputs) -> Inputs:
        """The tensors with the rows of the weight that this process has, in memory of their own."""
        x, weight, *more = inputs
        shards = self.team.shards(case)
        return x, weight.detach()[shards.first : shards.first + shards.cols].clone().requires_grad_(), *more

    def whole(self, case: Case, found: Any) -> Any:
        """The results with the gradient of the weight of all processes."""
        dx, own, *outputs = found
        # The classes are the last dimension of a case's logits.
        return (dx, self.team.joined(case, own.t(), 1).t(), *outputs)


class ShardedByCollective(ShardedHead):
    """The same functions, which add the input's gradient by a collective also where peer memory could be used."""

    name = "collective"

    def prepare(self, case: Case) -> Function:
        """The function, which sees no process that it could reach by peer memory."""
        function = super().prepare(case)

        def by_collective(*tensors: Any) -> Any:
            with patch.object(mailboxes, "MOST_PROCESSES", 1):
                return function(*tensors)

        return by_collective


PEERS: dict[str, type[WholeHead]] = by_name(ShardedByCollective, WholeHead)
"""The peers by name on the command line."""
