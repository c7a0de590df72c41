"""The mailboxes through which the GPUs of several processes exchange the states of their shards (shards.cuh).

A process has mailboxes in the memory of its GPU, and knows the addresses at which its GPU reaches those of the others.
distributed/peers.py makes them; a kernel finds them by their name, which is part of its task (`Part.mail`).
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.task import MOST_PROCESSES
from .messages import LINE_WORDS, SETS

MAIL: dict[str, ShardMail] = {}
"""The mailboxes by name."""


def words_of_mail(launch_words: int) -> int:
    """64-bit words of the mailboxes of a process, and of the counter of launches behind them.

    Args:
        launch_words: Number of 64-bit words that a process receives in one launch.
    """
    return SETS * launch_words + LINE_WORDS


class ShardMail:
    """The mailboxes of a group of processes, as this process reaches them.

    Args:
        addresses: For each process, the address of its mailboxes, which are zeros.
        total_words: Number of 64-bit words of one process's mailboxes and its counter.
        timeout_s: Seconds for which a kernel waits for a message.
        memory: The objects that keep the mailboxes alive.

    Attributes:
        addresses: `addresses`, and 0 for each process that the group lacks.
        set_words: Number of 64-bit words of one process's mailboxes, in each set.
        timeout_ns: Nanoseconds for which a kernel waits for a message.
        launches: Number of launches that the host has made; a replay of a CUDA graph does not count.
        sent: Number of 64-bit words that this process has sent to each process in these launches.
    """

    def __init__(self, addresses: list[Any], total_words: int, timeout_s: float, memory: Any) -> None:
        self.addresses = [*addresses, *[0] * (MOST_PROCESSES - len(addresses))]
        self.set_words = (total_words - LINE_WORDS) // SETS
        self.timeout_ns = int(timeout_s * 1e9)
        self.launches = self.sent = 0
        self._memory = memory
        self._processes = len(addresses)
        self._stream: int | None = None
        self._captured: int | None = None

    def before_launch(self, words: int, stream: int, index: int) -> None:
        """Make the next launch wait for the launch before where that is on another stream.

        All processes make the same launches in the same order, and kernels on several streams must not use the
        mailboxes at the same time.  In a CUDA graph, only the launches of the graph wait for each other: whoever
        replays it orders the replays and the other launches.

        Args:
            words: Number of 64-bit words that each process receives.
            stream: The stream of the launch, as PyTorch's raw handle.
            index: Number of the device.

        Raises:
            RuntimeError: the mailboxes are too small.
        """
        if words > self.set_words:
            raise RuntimeError(f"the messages of a launch have {words} words, and the mailboxes {self.set_words}")
        self.launches += 1
        self.sent += words // self._processes
        # The default stream, whose handle is 0, cannot be captured, so it is not asked, which would take host time.
        if stream and torch.cuda.is_current_stream_capturing():
            before, self._captured = self._captured, stream
            if before not in (None, stream) and _is_captured(_stream(before, index)):
                _stream(stream, index).wait_stream(_stream(before, index))
        elif stream != self._stream:
            before, self._stream = self._stream, stream
            if before is not None:
                _stream(stream, index).wait_stream(_stream(before, index))


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _stream(handle: int, index: int) -> torch.cuda.Stream:
    """The stream of PyTorch's raw handle; ExternalStream would make another stream for the default one."""
    if not handle:
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(handle, device=index)
