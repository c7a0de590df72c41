"""The measurement of a head whose classes are sharded over processes, beside the whole head on each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from .... import distributed
from ....distributed import mailboxes
from ..cases import Case
from ..formulas import Function
from ..heads.cases import HeadCase
from ..heads.measure import KIND, bare_products, lacks_memory, make_head, wrong
from ..heads.peers import LOSS, TOKENS, OursHead, TorchHead, with_gradients
from ..heads.reference import Sample, errors, sample_of
from ..inputs import extra_bytes
from ..measure import check_each, refusal
from ..result import FOUR_PRODUCTS, THREE_PRODUCTS, CaseResult, Result
from .measure import agreed
from .team import GroupClock, Team

FUNCTIONS: dict[str, Function] = {
    LOSS: distributed.linear_cross_entropy, TOKENS: distributed.linear_token_logprobs,
}  # fmt: skip


class ShardedHead(OursHead):
    """Our functions in `onlinesoftmax.distributed`, with equal shards of the classes."""

    def __init__(self, team: Team) -> None:
        super().__init__(team.device.type)
        self.team = team

    def prepare(self, case: Case) -> Function:
        """The public function of the input and of this process's rows of the weight."""
        shards, function = self.team.shards(case), FUNCTIONS[case.operation]

        def forward(x: Any, own: Any, target: Any) -> Any:
            found = function(x, own, target, shards=shards, group=self.team.group)
            return found if case.operation == LOSS else tuple(found[:2])

        return with_gradients(forward)

    def weight(self, case: HeadCase, weight: Any) -> Any:
        """The rows of the weight that this process has, in memory of their own."""
        shards = self.team.shards(case)
        return weight.detach()[shards.first : shards.first + shards.cols].clone().requires_grad_()

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


class WholeHead(ShardedHead):
    """Our function of the whole head: every process computes all of it, as one GPU would."""

    name = "one-process"

    def prepare(self, case: Case) -> Function:
        """Our public function."""
        return OursHead(self.device_type).prepare(case)

    def weight(self, case: HeadCase, weight: Any) -> Any:
        """The whole weight."""
        return weight

    def whole(self, case: Case, found: Any) -> Any:
        """The results as they are."""
        return found


PEERS: dict[str, type[ShardedHead]] = {each.name: each for each in (ShardedByCollective, WholeHead)}
"""The peers by name on the command line."""


def run_heads(
    cases: Iterable[HeadCase], everybody: Sequence[ShardedHead], team: Team, repeat_ms: float
) -> Iterator[CaseResult]:
    """Measure the cases, one at a time, in all processes of the team; arguments as for `sharded.measure.run`."""
    clock = GroupClock(team)
    for case in cases:
        lacking = lacks_memory(case, team.device)
        if team.largest(float(lacking is not None))[0]:
            yield CaseResult(case, skipped=lacking or "another process lacks memory", measures=KIND)
            continue
        yield _measure(case, everybody, team, repeat_ms, clock)
        if team.device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    case: HeadCase, everybody: Sequence[ShardedHead], team: Team, repeat_ms: float, clock: GroupClock
) -> CaseResult:
    # The same seed gives every process the same tensors.
    inputs = make_head(case, team.device)
    sample = sample_of(case, *inputs)
    allowed = errors(sample, TorchHead(team.device.type).prepare(case)(*inputs))

    def check(peer: Any) -> tuple[Result, Callable[[], Any]]:
        try:
            result, call = _checked(case, peer, inputs, sample, allowed)
        except Exception as error:  # the other processes wait for a result
            result, call = refusal(peer, None, error), lambda: None
        return agreed(team, result), call

    results, calls = check_each(case, everybody, check)
    three, four = bare_products(*inputs[:2])
    timed = clock.measure({**calls, THREE_PRODUCTS: three, FOUR_PRODUCTS: four}, repeat_ms, before=three)
    products, again = timed[THREE_PRODUCTS].times, timed[FOUR_PRODUCTS].times

    def with_times(result: Result) -> Result:
        if result.who not in calls:
            return result
        times = timed[result.who].times
        return replace(result, times=times, of_products=times.median_us / products.median_us)

    return CaseResult(
        case, results=[with_times(each) for each in results], measures=KIND, three_products=products,
        four_products=again,
    )  # fmt: skip


def _checked(
    case: HeadCase, peer: ShardedHead, inputs: tuple[Any, ...], sample: Sample, allowed: tuple[float, ...]
) -> tuple[Result, Callable[[], Any]]:
    """The result of a way without times, and its call."""
    x, weight, *more = inputs
    call = partial(peer.prepare(case), x, peer.weight(case, weight), *more)
    found = errors(sample, peer.whole(case, call()))
    # The processes add float32 sums in another order than one product does.
    reason = wrong(case, found, allowed, 1.0)
    extra = extra_bytes(call, x.device)
    return Result(peer.name, "wrong" if reason else "ok", reason, found[1], allowed[1], extra_bytes=extra), call
