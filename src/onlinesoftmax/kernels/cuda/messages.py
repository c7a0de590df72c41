"""Types of the numbers of a state in CUDA C++, and sizes of the messages and mailboxes in which states travel."""

from __future__ import annotations

from ...core.accumulators import Argmax
from ...core.device import CACHE_LINE
from ..request import Request

CPP_TYPES = {
    "float32": "float", "float64": "double", "bool": "unsigned char",
    "int64": "long long", "int32": "int", "int16": "short", "int8": "signed char", "uint8": "unsigned char",
}  # fmt: skip
"""C++ types of dtypes; float16 and bfloat16 are declared in numbers.cuh under these names."""


LINE_WORDS = CACHE_LINE // 8
"""64-bit words of a cache line; words that many blocks use at once lie on lines of their own."""


def sum_type(request: Request) -> str:
    """C++ type of a sum: wider than its summands where the request needs exact sums."""
    if request.task.accumulator == "float64":
        return "DoubleDouble"
    return "double" if request.task.exact_sums else "float"


def sum_count(request: Request) -> int:
    """Number of sums that a state keeps; a state that is given instead of reduced keeps one number, too."""
    return max(1, len(request.task.sums) - keeps_argmax(request))


def keeps_argmax(request: Request) -> bool:
    """True where a state keeps the index of the largest key, after its sums."""
    return any(one.kind is Argmax for one in request.task.sums)


def message_packets(request: Request) -> int:
    """Packets of the message by which one block of a team tells another its state.

    A packet has three words of 32 bits besides its tag.
    """
    return -(-_state_words(request) // 3)


_WORDS = {"float": 1, "double": 2, "DoubleDouble": 4}
"""Words of 32 bits of a number, by its C++ type."""


def _state_words(request: Request) -> int:
    """Words of 32 bits of a state: m, the sums, and the index and the key of the largest element."""
    of_m = _WORDS[CPP_TYPES[request.task.accumulator]]
    return of_m + sum_count(request) * _WORDS[sum_type(request)] + keeps_argmax(request) * (2 + of_m)


SETS = 2
"""Sets of mailboxes between processes, which launches use in turn (processes.cuh)."""


COPIES = 32
"""Copies of the numbers of launches behind the mailboxes, on cache lines of their own (processes.cuh)."""


def shard_message_words(request: Request) -> int:
    """64-bit words of the message by which a process tells another the state of its part of a row (processes.cuh)."""
    score = _WORDS[CPP_TYPES[request.task.accumulator]] if request.operation.has_target else 0
    return _state_words(request) + score


SLOTS = 4
"""Places for messages from one block of a team to another, which rows use in turn (team.cuh)."""


def team_mail_words(request: Request) -> int:
    """64-bit words of the messages of all teams (mailboxes.cuh, or team_board.cuh with a ring); 0 without messages."""
    plan = request.plan
    if plan.strategy != "grid" or not request.operation.reduces:
        return 0
    # A team that is alone leaves the last slots unused if it has few rows; but it prefetches the mailboxes of two.
    alone = plan.programs == plan.splits and not plan.kernel
    slots = min(SLOTS, max(2, request.task.rows)) if alone else SLOTS
    words = 2 * slots * plan.splits * message_packets(request)
    if plan.kernel:
        # In whole cache lines, as in team_board.cuh: messages, the count of each slot, `done`, and `tile_counter`.
        of_team = (-(-words // LINE_WORDS) + SLOTS + 2) * LINE_WORDS
    else:
        of_team = words * plan.splits if plan.splits > 1 else 0
    return plan.programs // plan.splits * of_team
