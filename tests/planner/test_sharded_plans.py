"""Plans for rows whose columns lie on several GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onlinesoftmax.core.device import known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import MOST_PROCESSES, Choice
from onlinesoftmax.planner.measured import table_for
from onlinesoftmax.planner.plan import Plan, PlanError, alternatives, plan
from onlinesoftmax.planner.price import exchange_us
from onlinesoftmax.planner.strategies import cuda

H200 = known("h200")


def sharded(operation: str, rows: int, cols: int, outputs: tuple[str, ...] = ()) -> Problem:
    return Problem(operation, rows, cols, "bfloat16", sharded=True, outputs=outputs)


def test_only_cuda_kernels_exchange_states() -> None:
    problem = sharded("softmax", 8192, 64128)
    assert {p.backend for p in alternatives(problem, H200) if isinstance(p, Plan)} == {"cuda"}
    with pytest.raises(PlanError, match="only CUDA kernels exchange states with other GPUs"):
        plan(problem, H200, Choice("triton"))


@pytest.mark.parametrize("cols", [1, 5, 37, 1000, 16000])
def test_a_row_has_a_lane_for_each_process(cols: int) -> None:
    found = cuda.row(sharded("softmax", 1000, cols), H200)
    assert not isinstance(found, str)
    assert all(proposal.lanes >= MOST_PROCESSES for proposal in found)


def test_waiting_for_other_gpus_takes_time() -> None:
    """Each round of rows waits, longer where nothing is written; whole rows and given states wait for nobody."""
    for operation, waits in (("softmax", 1.5), ("logsumexp", 3), ("logsumexp_backward", 0), ("softmax_backward", 1.5)):
        problem = sharded(operation, 8192, 16000)
        proposals = cuda.row(problem, H200)
        assert not isinstance(proposals, str)
        one = proposals[0]
        rounds = 8192 / (one.resident * H200.multiprocessors * one.rows_per_program)
        assert exchange_us(one, problem, H200) == pytest.approx(waits * rounds)
        assert exchange_us(one, replace(problem, sharded=False), H200) == 0


@pytest.mark.parametrize(
    ("operation", "outputs", "cols", "strategy"),
    [
        ("softmax", ("y",), 16000, "row"), ("cross_entropy", ("loss", "y"), 16000, "row"),
        ("token_logprobs", ("y", "lse", "entropy"), 16000, "looped"), ("softmax", ("y",), 64128, "cluster"),
    ],
)  # fmt: skip
def test_the_plans_that_were_fastest_on_two_gpus(
    operation: str, outputs: tuple[str, ...], cols: int, strategy: str
) -> None:
    """Strategies that were faster than the others by a tenth for shards of 8192 rows on two H200s."""
    assert plan(sharded(operation, 8192, cols, outputs), H200, table=table_for(H200)).strategy == strategy
