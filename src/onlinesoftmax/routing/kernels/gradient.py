"""The source of gradient.cuh: the gradient of the logits of a routing."""

from __future__ import annotations

from typing import NamedTuple

from ...core.device import Device
from ...kernels.cuda.arguments import OwnKernel, OwnLaunch
from ..rules import Call, Gradients, LossGradients, Rule, Score
from .source import MOST_ITEMS, SCORES, THREADS, bits_of, constants_of_weights, team_of

FILES = "row/warp_shuffle", "channel/channel", SCORES, "block_sum", "lanes", "weights", "gradient"
"""Files of the kernel, in the order of inclusion."""

POINTERS = (
    "x", "bias", "indices", "lse", "dweights", "dprob_sums", "dlse", "dbalance", "z_slope", "dz_loss", "dx",
)  # fmt: skip
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = ("stride", "tokens", "experts", "parts", "scale_bits")

FLAGS = ("HAS_BIAS", "HAS_DWEIGHTS", "HAS_DPROB_SUMS", "HAS_DLSE")


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype, k, width, team, chunks, whole, threads, resident, score, renormalize: As in source.Shape.
        flags: Names of the constants that are true among FLAGS.
    """

    dtype: str
    k: int
    width: int
    team: int
    chunks: int
    whole: bool
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
    whole = rule.experts == team * chunks * width
    return Shape(dtype, rule.k, width, team, chunks, whole, threads, resident, rule.score, rule.renormalize, flags)


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    numbers: dict[str, bool | int] = {
        "WIDTH": shape.width, "TEAM": shape.team, "CHUNKS": shape.chunks, "THREADS": shape.threads,
        "RESIDENT": shape.resident, "WHOLE": shape.whole, "K": shape.k,
        **{name: name in shape.flags for name in FLAGS},
    }  # fmt: skip
    return constants_of_weights(shape.score, shape.renormalize, shape.dtype, numbers)


KERNEL = OwnKernel("route_gradient_kernel", FILES, POINTERS, prologue, waits=True, package=__package__)


def flags_of(call: Call, given: Gradients, losses: LossGradients | None = None) -> frozenset[str]:
    """The constants of a call's kernel that are true."""
    sums, z = (None, None) if losses is None else losses[:2]
    holds = (call.bias,), (given.weights,), (given.prob_sums, sums), (given.lse, z)
    return frozenset(name for name, some in zip(FLAGS, holds, strict=True) if any(t is not None for t in some))


def numbers_of(rule: Rule, stride: int, tokens: int, parts: int) -> tuple[int, ...]:
    """The numbers of a launch, in the order of NUMBERS; the arguments are those of source.numbers_of."""
    return stride, tokens, rule.experts, parts, bits_of(rule.scale)


def launch_of(shape: Shape, rule: Rule, stride: int, tokens: int, sequences: int, device: Device) -> OwnLaunch:
    """The launch of a kernel.

    Args:
        shape, rule: The kernel, and the rule of the call.
        stride: Distance of the rows of the logits.
        tokens, sequences: Number of tokens of a sequence, and of sequences.
        device: Where the kernel is to run.
    """
    places = device.multiprocessors * shape.resident
    parts = max(1, min(-(-tokens // shape.teams), places // sequences))
    numbers = numbers_of(rule, stride, tokens, parts)
    return KERNEL.launch(shape, numbers, sequences * parts, shape.dynamic_bytes)
