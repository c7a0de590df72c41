"""The source and the launch of gradient.cuh: the gradient of the logits of a routing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ...core.plan_log import Kind, note_plan
from ...kernels.cuda import driver
from ...kernels.cuda.launch import argument_pool
from ...kernels.cuda.source import program
from ...sampling.kernels.choice import refusal
from ...torch.device import from_torch
from ...torch.fast_path import MOST_ENTRIES
from ..results import Routed
from ..rules import Call, Gradients, Rule, Score
from .cuda import adjacent, dtype_of, width_of
from .source import MOST_ITEMS, MOST_TOKENS, SHARED, THREADS, bits_of, constants_of_weights, team_of

Tensor = torch.Tensor

NAME = "route_gradient_kernel"

FILES = (*SHARED, *((name, str(__package__)) for name in ("lanes", "weights", "gradient")))
"""Files of the kernel, in the order of inclusion."""

POINTERS = ("x", "bias", "indices", "lse", "dweights", "dprob_sums", "dlse", "dx")
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("stride", "tokens", "experts", "parts", "scale_bits")

FLAGS = ("HAS_BIAS", "HAS_DWEIGHTS", "HAS_DPROB_SUMS", "HAS_DLSE")


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype, k, width, team, chunks, threads, resident, score, renormalize: As in source.Shape.
        flags: Names of the constants that are true among FLAGS.
    """

    dtype: str
    k: int
    width: int
    team: int
    chunks: int
    threads: int
    resident: int
    score: Score
    renormalize: bool
    flags: frozenset[str]

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return 1

    @property
    def teams(self) -> int:
        """Tokens of a block at a time."""
        return self.threads // self.team

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of the rows of shared memory."""
        return 4 * self.threads * self.chunks * self.width if "HAS_DWEIGHTS" in self.flags else 0


def shape_of(rule: Rule, dtype: str, width: int, flags: frozenset[str]) -> Shape:
    """The kernel of a call.

    Args:
        rule: How experts are weighted.
        dtype, width, flags: As in Shape.
    """
    # A thread holds the gradient of the probabilities too, or computes slopes.
    plain, sums = rule.score is Score.SOFTMAX, "HAS_DPROB_SUMS" in flags
    most = MOST_ITEMS if not sums else MOST_ITEMS * 3 // 4 if plain else MOST_ITEMS // 2
    team, chunks = team_of(rule.experts, width, most)
    heavy = not plain or (sums and chunks * width > MOST_ITEMS // 2)
    threads = THREADS if team <= 32 else team
    resident = max((3 if heavy else 4) * THREADS // threads, 1)
    return Shape(dtype, rule.k, width, team, chunks, threads, resident, rule.score, rule.renormalize, flags)


@cache
def source(shape: Shape) -> str:
    """The source of a kernel."""
    return program(prologue(shape), *FILES)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    numbers: dict[str, bool | int] = {
        "WIDTH": shape.width, "TEAM": shape.team, "CHUNKS": shape.chunks, "THREADS": shape.threads,
        "RESIDENT": shape.resident, "K": shape.k, **{name: name in shape.flags for name in FLAGS},
    }  # fmt: skip
    return constants_of_weights(shape.score, shape.renormalize, shape.dtype, numbers)


def flags_of(call: Call, given: Gradients) -> frozenset[str]:
    """The constants of a call's kernel that are true."""
    holds = call.bias, given.weights, given.prob_sums, given.lse
    return frozenset(name for name, value in zip(FLAGS, holds, strict=True) if value is not None)


def numbers_of(rule: Rule, stride: int, tokens: int, parts: int) -> tuple[int, ...]:
    """The numbers of a launch, in the order of NUMBERS; the arguments are those of source.numbers_of."""
    return stride, tokens, rule.experts, parts, bits_of(rule.scale)


def gradient(call: Call, found: Routed, given: Gradients) -> Tensor | None:
    """The gradient of the logits of a call on a GPU, as reference.gradient; None if no kernel takes it."""
    x = adjacent(call.x)
    index = x.get_device()
    if refusal(dtype_of(x), len(x), True, from_torch("cuda", index)) or len(x) > MOST_TOKENS:
        return None
    given = Gradients(*(None if t is None else t.contiguous() for t in given))
    width = width_of(x)
    if given.prob_sums is not None and given.prob_sums.data_ptr() % 16:
        width = 1
    flags = flags_of(call, given)
    run = _run_of(call.rule, dtype_of(x), width, flags, len(x), x.stride(0), call.sequences, index)
    return run(call._replace(x=x), found, given)


Run = Callable[[Call, Routed, Gradients], Tensor]


@lru_cache(MOST_ENTRIES)
def _run_of(
    rule: Rule, dtype: str, width: int, flags: frozenset[str], count: int, stride: int, sequences: int, index: int
) -> Run:  # fmt: skip
    """`gradient` of calls with these properties."""
    shape = shape_of(rule, dtype, width, flags)
    plan = f"gradient.cuh, {shape.team} of {shape.threads} threads for a token"
    note_plan(Kind("route_backward", (count, rule.experts), dtype, f"cuda:{index}"), plan, f"k is {rule.k}")
    return bind(shape, rule, count, stride, sequences, index)


def bind(shape: Shape, rule: Rule, count: int, stride: int, sequences: int, index: int) -> Run:
    """`gradient` by a kernel; the arguments are those of cuda.bind."""
    tokens = count // sequences
    places = from_torch("cuda", index).multiprocessors * shape.resident
    parts = max(1, min(-(-tokens // shape.teams), places // sequences))
    numbers, dynamic = numbers_of(rule, stride, tokens, parts), shape.dynamic_bytes

    pool = argument_pool(source(shape), NAME, len(POINTERS), numbers, sequences * parts, shape.threads, dynamic)

    def run(call: Call, found: Routed, given: Gradients) -> Tensor:
        if torch.cuda.current_device() != index:
            # The default stream is that of the current device.
            with torch.cuda.device(index):
                return run(call, found, given)
        dx = torch.empty_like(call.x, memory_format=torch.contiguous_format)
        launch = pool.take(index)
        operands = (call.x, call.bias, found.indices, found.lse, given.weights, given.prob_sums, given.lse, dx)
        for i, t in enumerate(operands):
            launch.fields[i] = 0 if t is None else t.data_ptr()
        launch.config.stream = torch._C._cuda_getCurrentRawStream(index)
        driver.launch(launch, index, "launching route_gradient_kernel")
        pool.give_back(launch)
        return dx

    return run
