"""The source of route.cuh, and how many lanes share a token."""

from __future__ import annotations

import math
from struct import Struct
from typing import NamedTuple

from ...core.device import Device
from ...core.task import ITEMSIZE
from ...kernels.cuda.arguments import OwnKernel, OwnLaunch
from ...sampling import kernels as sampling
from ...sampling.kernels.source import constants_of
from ...sampling.kernels.which_kernel import refusal
from ..rules import Call, Rule, Score
from ..selection import HALF_LOG, MASS_BITS, POWER_OF_TWO

SCORES = "scores", sampling.__name__
"""A file of another room."""

FILES = (
    "row/warp_shuffle", "channel/channel", SCORES, "row/list_sort", "block_sum", "lanes", "weights", "keys",
    "threshold", "groups", "network", "ranking", "sums", "route",
)  # fmt: skip
"""Files of the kernel, in the order of inclusion."""

POINTERS = (
    "x", "bias", "mask", "given", "weights", "indices", "lse", "counts", "prob_sums", "balance", "z_loss", "slopes",
    "words",
)  # fmt: skip
"""Fields of the kernel's parameter, in the order of the struct; then come NUMBERS."""

NUMBERS = (
    "stride", "tokens", "experts", "parts", "sequence_words", "groups", "group_k", "group_top", "group_inverse",
    "team_words", "scale_bits", "unit_bits",
)  # fmt: skip

MOST_ITEMS = 32
"""Most logits of a lane: bits of a word stand for them."""

FEW = 16
"""Most experts of a token that are found by the maxima of groups of logits."""

THREADS = 256
"""Threads of a block of few tokens, or of a gradient, unless a token takes a block."""

MANY_THREADS = 768
"""Threads of the blocks of many tokens, and of a multiprocessor, unless many_threads says otherwise.

Large blocks are few, and add counts to the same words: 256 blocks took 6 microseconds for it at 4096 x 256 on an H100.
"""

MOST_PARTS = 1023
"""Most blocks of a sequence: 10 bits of a word count them (sums.cuh)."""


MOST_SQUARES = 1 << 22
"""Most tokens whose lse^2 a kernel adds: a lane of 10,000 adds some 400 of them in float32."""

MOST_TOKENS = 1 << 30
"""Most tokens: the numbers of tokens behind the last one are below 2^31 too."""


class Shape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        dtype: Dtype of the logits: "float32", "float16" or "bfloat16".
        k: Experts of a token.
        width: Logits that one instruction loads.
        team: Threads of a token.
        chunks: Loads of a lane for a token.
        threads: Threads of a block.
        resident: Blocks of a multiprocessor that its registers suffice for.
        capacity: Keys of a team's list.
        heads: Maxima of a lane that give the threshold of the list; 0 where bits give it.
        whole: True where the lanes have no more logits than there are experts.
        group_lanes: Lanes of whose loads each has one group of experts; 0 where groups go through shared memory.
        score, selection: Scores of the weights and of the choice.
        renormalize: As in Rule.
        flags: Names of the constants that are true among FLAGS.
    """

    dtype: str
    k: int
    width: int
    team: int
    chunks: int
    threads: int
    resident: int
    capacity: int
    heads: int
    whole: bool
    group_lanes: int
    score: Score
    selection: Score
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


FLAGS = ("HAS_BIAS", "MASKED", "REPLAY", "GROUPED", "SCORED_GROUPS", "COUNTS", "PROB_SUMS", "LOSSES")
"""Constants: operands that are given, results that are wanted, and SCORED_GROUPS where the scores of groups are sums
of scores, not of logits."""


def refusal_of(rule: Rule, dtype: str, rows: int, prob_sums: bool, device: Device) -> str | None:
    """Why no kernel takes a call, in one sentence; None if one may, where the device has enough shared memory.

    Args:
        rule: How experts are chosen and weighted.
        dtype, rows: Dtype and number of the rows of logits.
        prob_sums: True where sums of probabilities are wanted.
        device: Where the kernel is to run.
    """
    if reason := refusal(dtype, rows, device):
        return reason
    if rows > MOST_TOKENS:
        return f"a kernel counts tokens up to {MOST_TOKENS}"
    if prob_sums and rule.score is Score.IDENTITY:
        return "the sums of logits have no bound, so that whole numbers cannot stand for them"
    return None


def kernel_of(call: Call, dtype: str, width: int, device: Device) -> Shape | str:
    """The kernel of a call; or, in one sentence, why none takes it.

    Args:
        call: The call; its arrays may be without data.
        dtype, width: As in Shape.
        device: Where the kernel is to run.
    """
    if reason := refusal_of(call.rule, dtype, call.sequences * call.tokens, call.prob_sums, device):
        return reason
    found = shape_of(call.rule, dtype, width, flags_of(call), call.tokens, call.sequences, device)
    return found or f"the blocks of {device.name} have too little shared memory"


def width_at(dtype: str, number: int) -> int:
    """Logits that one instruction loads, where rows begin at multiples of a number of logits."""
    return min(16 // ITEMSIZE[dtype], number & -number)


def flags_of(call: Call) -> frozenset[str]:
    """The constants of a call's kernel that are true."""
    rule = call.rule
    given = {
        "HAS_BIAS": call.bias is not None, "MASKED": call.mask is not None, "REPLAY": call.indices is not None,
        "GROUPED": rule.groups > 1, "SCORED_GROUPS": rule.group_top > 1, "COUNTS": call.counts,
        "PROB_SUMS": call.prob_sums, "LOSSES": call.losses and call.tokens <= MOST_SQUARES,
    }  # fmt: skip
    if call.indices is not None:
        given |= {"GROUPED": False, "SCORED_GROUPS": False}
    return frozenset(name for name, holds in given.items() if holds)


def shape_of(
    rule: Rule, dtype: str, width: int, flags: frozenset[str], tokens: int, sequences: int, device: Device
) -> Shape | None:
    """The kernel of a call; None if the device has too little shared memory.

    Args:
        rule: How experts are chosen and weighted.
        dtype, width: As in Shape.
        flags: Those of FLAGS that hold.
        tokens, sequences: Tokens of a sequence, and sequences.
        device: Where the kernel is to run.
    """
    experts, k = rule.experts, rule.k
    plain = flags.isdisjoint({"HAS_BIAS", "GROUPED"})
    team, chunks = team_of(experts, width, MOST_ITEMS if plain else MOST_ITEMS // 2)
    # 2^20 x 128 took 0.92 of the time with 8 lanes, but 1.02 with k = 2, x 96 1.03, and in bfloat16 1.25 (H100).
    if plain and width == 4 and team == 4 and chunks > 6 and k > team:
        team, chunks = 2 * team, -(-chunks // 2)
    # Few tokens are spread over more lanes, which have fewer instructions each, and over more multiprocessors.
    count, room = sequences * tokens, device.multiprocessors * THREADS
    # One or two lanes sort by a network: 8192 x 64 in bfloat16 took 1.28 of the time with four.
    fewest = room // 4 if team <= 2 and plain and k <= 8 else room
    while chunks > 1 and team < 32 and 2 * team * count <= fewest:
        team, chunks = 2 * team, -(-chunks // 2)
    # The more maxima, the fewer experts reach the threshold; but they have to be sorted.  Sorted lists have a power of
    # two of them, of which the last one is the threshold.
    heads, length = 1, 1 << (k - 1).bit_length()
    while heads < min(8, chunks * width // 2) and 2 * team * heads < 5 * length:
        heads *= 2
    if k > FEW or (experts > 2 * FEW and 2 * k > team * heads):
        heads = 0
    group_lanes = group_lanes_of(rule, width, team, chunks) if "GROUPED" in flags else 0
    most = 1 << (experts - 1).bit_length()
    capacity = min(max(16, 1 << (2 * k - 1).bit_length()), max(most, 4))
    whole = experts == team * chunks * width
    many = many_threads(k, width, team, chunks, whole, flags)
    threads = team if team > 32 else THREADS if team * count <= room else many
    while threads % max(team, 32) == 0:
        resident = max(many // threads, 1)
        shape = Shape(
            dtype, k, width, team, chunks, threads, resident, capacity, heads, whole, group_lanes,
            rule.score, rule.selection(), rule.renormalize, flags,
        )  # fmt: skip
        if dynamic_bytes(shape, rule) + 1024 <= device.shared_memory:
            return shape
        threads //= 2
    return None


def many_threads(k: int, width: int, team: int, chunks: int, whole: bool, flags: frozenset[str]) -> int:
    """Threads of a multiprocessor that registers suffice for; the arguments are as in Shape."""
    items, plain = chunks * width, flags.isdisjoint({"HAS_BIAS", "GROUPED"})
    # A thread holds sums of probabilities too, or ranks many keys.
    if 3 * k > 8 * team or ("PROB_SUMS" in flags and items > MOST_ITEMS // 2):
        return 512
    if "PROB_SUMS" in flags:
        # 65536 x 256 in 8 groups took 0.91 of the time with more threads on an H100, and 2^20 x 128 0.97, with 768 of
        # them; 16-bit logits need more registers.
        return 512 if width > 4 else MANY_THREADS if plain and team == 8 else 640
    # With more threads on an H100, 65536 x 256 took 0.99 of the time, in bfloat16 0.93, and 2^20 x 8 0.92; but x 64,
    # where two lanes sort by a network, took 1.11 and 1.03.
    if plain and (team >= 8 or (width > 4 and team == 4 and whole)):
        return 896
    return 1024 if plain and team == 1 and items <= 8 else MANY_THREADS


def parts_of(shape: Shape, tokens: int, sequences: int, device: Device) -> int:
    """Blocks of a sequence: as many as are resident at the same time, or fewer for few tokens."""
    places = device.multiprocessors * shape.resident
    return max(1, min(-(-tokens // shape.teams), places // sequences, MOST_PARTS))


def team_of(experts: int, width: int, most: int) -> tuple[int, int]:
    """How many lanes share a token, and how many loads each of them takes, so that a lane has `most` items or fewer."""
    team = 1
    while -(-experts // (team * width)) * width > most:
        team *= 2
    return team, -(-experts // (team * width))


def group_lanes_of(rule: Rule, width: int, team: int, chunks: int) -> int:
    """Lanes that have the experts of one group in each of their loads; 0 where a group is not such lanes."""
    size = rule.experts // rule.groups
    lanes = size // width if size % width == 0 else 0
    is_power, few = lanes & (lanes - 1) == 0, rule.group_top <= 2 and team <= 32
    return lanes if is_power and few and 1 << (chunks - 1).bit_length() <= lanes <= team else 0


def team_words(shape: Shape, rule: Rule) -> int:
    """64-bit words of shared memory of a team; twice an odd number, so that teams begin in different banks."""
    words = shape.capacity + (rule.k if shape.heads else 0)
    if "GROUPED" in shape.flags and not shape.group_lanes:
        words += -(-(rule.experts + rule.groups) // 2)
    return 2 * (-(-words // 2) | 1)


def dynamic_bytes(shape: Shape, rule: Rule) -> int:
    """Bytes of shared memory: counts, then the memory of the teams, in whose place the sums of the warps lie later."""
    of_sums = (1 if shape.team > 32 else shape.threads // 32) * rule.experts * 4 if "PROB_SUMS" in shape.flags else 0
    return 16 * -(-rule.experts // 4) + max(8 * shape.teams * team_words(shape, rule), of_sums)


def numbers_of(shape: Shape, rule: Rule, stride: int, tokens: int, parts: int) -> tuple[int, ...]:
    """The numbers of a launch, in the order of NUMBERS.

    Args:
        shape, rule: The kernel, and the rule of the call.
        stride: Distance of the rows of the logits.
        tokens: Number of tokens of a sequence.
        parts: Blocks of a sequence.
    """
    size = rule.experts // rule.groups
    # A sum of probabilities is hardly more than the number of tokens, so 44 bits hold it.
    unit = 2.0 ** (43 - tokens.bit_length())
    values = {
        "stride": stride, "tokens": tokens, "experts": rule.experts, "parts": parts,
        "sequence_words": words_of(shape, rule, 1, parts),
        "groups": rule.groups, "group_k": rule.group_k, "group_top": rule.group_top,
        "group_inverse": -(-(1 << 32) // size), "team_words": team_words(shape, rule),
        "scale_bits": bits_of(rule.scale), "unit_bits": bits_of(unit),
    }  # fmt: skip
    return tuple(values[name] for name in NUMBERS)


def words_of(shape: Shape, rule: Rule, sequences: int, parts: int) -> int:
    """64-bit words by which the blocks of the sequences add up their sums; 0 before and after a launch."""
    sums = len(shape.flags & {"COUNTS", "PROB_SUMS"})
    # sums.cuh has their places.  Behind them are a ticket, and a number of each block.
    words = -(-sums * rule.experts // 4) * (4 if shape.team > 32 else 16) + 1 + ("LOSSES" in shape.flags) * parts
    return sequences * -(-words // 16) * 16 if parts > 1 and sums else 0


def launch_of(shape: Shape, rule: Rule, stride: int, tokens: int, sequences: int, parts: int) -> OwnLaunch:
    """The launch of a kernel; the arguments are those of `numbers_of`, and the number of sequences."""
    numbers = numbers_of(shape, rule, stride, tokens, parts)
    words = words_of(shape, rule, sequences, parts)
    return KERNEL.launch(shape, numbers, sequences * parts, dynamic_bytes(shape, rule), words)


def bits_of(x: float) -> int:
    """The bits of a number in float32; an infinity beyond its range."""
    return int.from_bytes(_FLOAT.pack(x if abs(x) < _LIMIT else math.copysign(math.inf, x)), "little")


_FLOAT, _LIMIT = Struct("<f"), 2.0**128 - 2.0**103


def prologue(shape: Shape) -> str:
    """Types and constants of a kernel."""
    numbers: dict[str, bool | int] = {
        "WIDTH": shape.width, "TEAM": shape.team, "CHUNKS": shape.chunks, "THREADS": shape.threads,
        "RESIDENT": shape.resident, "CAPACITY": shape.capacity, "SHORT": shape.heads > 0, "WHOLE": shape.whole,
        "HEADS": max(shape.heads, 1), "GROUP_LANES": shape.group_lanes, "K": shape.k,
        **{name: name in shape.flags for name in FLAGS},
    }  # fmt: skip
    coefficients = "".join(f"constexpr float HALF_LOG_{i} = {float(c)!r}f;\n" for i, c in enumerate(HALF_LOG))
    selection = f"constexpr Score SELECTION = Score::{shape.selection.name};\n"
    return constants_of_weights(shape.score, shape.renormalize, shape.dtype, numbers) + selection + coefficients


KERNEL = OwnKernel("route_kernel", FILES, POINTERS, prologue, waits=True, package=__package__)


def constants_of_weights(score: Score, renormalize: bool, dtype: str, numbers: dict[str, bool | int]) -> str:
    """C++ text of the type of the logits and of the constants of a kernel.

    Args:
        score, renormalize: As in Rule.
        dtype: Dtype of the logits.
        numbers: Other constants.
    """
    scores = ", ".join(one.name for one in Score)
    flags: dict[str, bool | int] = {"OF_CHOSEN": score is Score.SOFTMAX and renormalize, "RENORMALIZE": renormalize}
    first = f"enum class Score {{ {scores} }};\nconstexpr Score SCORE = Score::{score.name};\n"
    powers = "".join(f"constexpr float POWER_{i} = {c!r}f;\n" for i, c in enumerate(POWER_OF_TWO))
    return first + powers + constants_of(dtype, numbers | flags | {"MASS_BITS": MASS_BITS})
