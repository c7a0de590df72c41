"""On a GPU: the plan that is chosen, timed against the plan of every strategy that can be forced."""

from __future__ import annotations

import os
import random

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from onlinesoftmax.core.task import ITEMSIZE
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.lab.bench.tune import Compiler, Tuner
from onlinesoftmax.lab.bench.tune_shapes import Shape, task
from onlinesoftmax.planner.measured import Timing, table_for
from onlinesoftmax.planner.plan import Plan, Planner, best
from onlinesoftmax.torch.device import from_torch

NAMED = (129280, 151936, 201088, 262208, 100277, 32001, 49153)
"""Vocabularies, among them those of Gemma 3 and GPT-4, and unaligned rows."""

FORMS = {
    "softmax": ("softmax", ()),
    "its gradient": ("softmax_backward", ()),
    "loss": ("cross_entropy", ("loss", "m", "l")),
    "loss and gradient": ("cross_entropy", ("loss", "y")),
    "log-probability": ("token_logprobs", ("y", "lse", "m", "l", "entropy")),
}

INPUT_BYTES = 1 << 29
SLOWER = 1 / 0.97
"""Most that the chosen plan may take, of the fastest forced strategy."""


def lengths() -> list[int]:
    """The named lengths, and each remainder of 8 in rows that several blocks or the whole device share."""
    draw = random.Random(39)
    near, far = (
        [8 * draw.randrange(low // 8, high // 8) + rest for rest in range(8)]
        for low, high in ((90000, 110000), (200000, 600000))
    )
    return [*NAMED, *near, *far]


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="the other processes of xdist use the GPU meanwhile")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_the_chosen_plan_is_as_fast_as_the_best_that_is_forced(form: str, dtype: str, device_memory: None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    machine = from_torch("cuda", device.index)
    operation, outputs = FORMS[form]
    plans: dict[Shape, list[Plan]] = {}
    for cols in lengths():
        shape = Shape(operation, dtype, INPUT_BYTES // (cols * ITEMSIZE[dtype]), cols, outputs)
        found = Planner(machine, table=table_for(machine)).alternatives(task(shape))
        plans[shape] = [plan for plan in found if isinstance(plan, Plan) and plan.backend == "cuda"]
    requests = {shape: [Request(task(shape), plan) for plan in found] for shape, found in plans.items()}
    compiler = Compiler(machine.arch)
    compiler.compile([request for some in requests.values() for request in some])
    compiler.close()
    tuner, slow = Tuner(device, INPUT_BYTES), []
    for shape, some in requests.items():
        chosen = best(plans[shape])
        # Other work on the GPU can slow one measurement; it seldom slows two.
        ratios = [_ratio(tuner.cell(shape, some)[1].timings, chosen) for _ in range(2)]
        if min(ratios) > SLOWER:
            slow.append((shape.cols, round(min(ratios), 3), str(chosen.strategy), str(chosen.variant)))
    assert not slow


def _ratio(timings: tuple[Timing, ...], chosen: Plan) -> float:
    """Time of the chosen plan, as a multiple of the fastest; infinite where a table would not keep it."""
    name = (chosen.backend, chosen.strategy, chosen.variant)
    own = next((timing.us for timing in timings if timing[:3] == name), float("inf"))
    return own / timings[0].us
