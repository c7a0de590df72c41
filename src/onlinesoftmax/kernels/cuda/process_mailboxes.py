"""The mailboxes through which the GPUs of several processes exchange the states of their shards (processes.cuh).

A process has mailboxes in the memory of its GPU, and knows the addresses at which its GPU reaches those of the others.
distributed/mailboxes.py makes them; a kernel finds them by their name, which is part of its task (`ColumnRange.mail`).
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.task import MOST_PROCESSES
from .messages import COPIES, LINE_WORDS, SETS

MAIL: dict[str, ShardMail] = {}
"""The mailboxes by name."""


def words_of_mail(launch_words: int) -> int:
    """64-bit words of the mailboxes of a process, and of the numbers of launches behind them.

    Args:
        launch_words: Number of 64-bit words that a process receives in one launch.
    """
    return SETS * launch_words + COPIES * LINE_WORDS


class ShardMail:
    """The mailboxes of a group of processes, as this process reaches them.

    Args:
        addresses: For each process, the address of its mailboxes.
        memory: The mailboxes of this process, zeros of int64.
        timeout_s: Seconds for which a kernel waits for a message.
        handle: The object through which the other mailboxes stay alive.

    Attributes:
        addresses: `addresses`, and 0 for each process that the group lacks.
        set_words: Number of 64-bit words of one process's mailboxes, in each set.
        timeout_ns: Nanoseconds for which a kernel waits for a message.
        launches: Number of launches that the host has made or captured; the replays of a CUDA graph do not count.
        sent: Number of 64-bit words that this process has sent to each process in these launches.
    """

    def __init__(self, addresses: list[Any], memory: torch.Tensor, timeout_s: float, handle: Any) -> None:
        self.addresses = [*addresses, *[0] * (MOST_PROCESSES - len(addresses))]
        self.set_words = (len(memory) - COPIES * LINE_WORDS) // SETS
        self.timeout_ns = min(int(timeout_s * 1e9), 1 << 62)
        self.launches = self.sent = 0
        # The two numbers of this_launch in processes.cuh: of the launches that were not captured, and, in the memory of
        # the GPU, copies of the number of those that graphs have made.
        self._numbered = 0
        self._replays = memory[SETS * self.set_words :][: COPIES * LINE_WORDS].view(COPIES, LINE_WORDS)[:, 1]
        self._memory = memory, handle
        self._processes = len(addresses)
        self._stream: int | None = None
        self._captured: int | None = None

    def next_launch(self, words: int, stream: int, index: int) -> int:
        """The number of the next launch among those that the host makes; 0 where a CUDA graph captures it.

        All processes make the same launches in the same order, and kernels on several streams must not use the
        mailboxes at the same time.  So where the stream changes, the launch first waits for the stream of the last
        launch.  In a CUDA graph, only the launches of the graph wait for each other: whoever replays it orders the
        replays and the other launches.

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
        # The default stream, whose handle is 0, cannot be captured; the question would take host time.
        if stream and torch.cuda.is_current_stream_capturing():
            self._wait(stream, self._captured, index, captured=True)
            self._captured = stream
            return 0
        if stream != self._stream:
            self._wait(stream, self._stream, index, captured=False)
            self._stream = stream
        self._numbered += 1
        return self._numbered

    def _wait(self, stream: int, before: int | None, index: int, *, captured: bool) -> None:
        """Make a stream wait for the stream of the last launch, if both are captured or neither is."""
        if before not in (None, stream) and _is_captured(before, index) == captured:
            _stream(stream, index).wait_stream(_stream(before, index))

    def count_replays(self) -> None:
        """Capture the kernel that counts the replays of the launch that has just been captured."""
        self._replays.add_(1)


def _is_captured(handle: int, index: int) -> bool:
    """True while a CUDA graph captures a stream."""
    with torch.cuda.stream(_stream(handle, index)):
        return torch.cuda.is_current_stream_capturing()


def _stream(handle: int, index: int) -> torch.cuda.Stream:
    """The stream of PyTorch's raw handle; ExternalStream would make another stream for the default one."""
    if not handle:
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(handle, device=index)
