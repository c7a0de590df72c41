"""The mailboxes through which the GPUs of several processes exchange the states of their shards (shards.cuh).

A process has mailboxes in the memory of its GPU, and knows the addresses at which its GPU reaches those of the others.
distributed/peers.py makes them; a kernel finds them by their name, which is part of its task (`Part.mail`).
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.task import MOST_PROCESSES

SETS = 2
"""Sets of mailboxes, which successive launches use in turn (shards.cuh)."""

MAIL: dict[str, ShardMail] = {}
"""The mailboxes by name."""


class ShardMail:
    """The mailboxes of a group of processes, as this process reaches them.

    Args:
        addresses: For each process, the address of its mailboxes, which are zeros.
        total_words: Number of 64-bit words of one process's mailboxes, of all sets together.
        timeout_s: Seconds for which a kernel waits for a message.
        memory: The objects that keep the mailboxes alive.

    Attributes:
        set_words: Number of 64-bit words of one process's mailboxes, in each set.
        timeout_ns: Nanoseconds for which a kernel waits for a message.
        sent: Number of 64-bit words that this process has sent to each process.
    """

    def __init__(self, addresses: list[int], total_words: int, timeout_s: float, memory: Any) -> None:
        self.set_words = total_words // SETS
        self.timeout_ns = int(timeout_s * 1e9)
        self._memory = memory
        absent = [0] * (MOST_PROCESSES - len(addresses))
        self._sets: tuple[list[Any], ...] = tuple(
            [a + 8 * self.set_words * i for a in addresses] + absent for i in range(SETS)
        )
        self._launches = self.sent = 0
        self._processes = len(addresses)
        self._stream: int | None = None

    def next_launch(self, words: int, stream: int, index: int) -> tuple[list[Any], int]:
        """(the address of each process's mailboxes, the tag of the messages) for the next launch.

        All processes make the same launches in the same order.  Kernels on several streams must not use the mailboxes
        at the same time, so a launch on another stream than that of the launch before waits for that stream.

        Args:
            words: Number of 64-bit words that each process receives.
            stream: The stream of the launch, as PyTorch's raw handle.
            index: Number of the device.
        """
        if words > self.set_words:
            raise RuntimeError(f"the messages of a launch have {words} words, and the mailboxes {self.set_words}")
        self.sent += words // self._processes
        # The default stream, whose handle is 0, cannot be captured, so it is not asked, which would take host time.
        if stream and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a kernel that exchanges states through peer memory cannot be captured in a CUDA graph; "
                "capture forward and backward together, or pass exchange='collective'"
            )
        if stream != self._stream:
            if self._stream is not None:
                _stream(stream, index).wait_stream(_stream(self._stream, index))
            self._stream = stream
        self._launches += 1
        # No tag is 0, which an empty mailbox has.
        return self._sets[self._launches % SETS], 1 + self._launches % 0xFFFFFFFF


def _stream(handle: int, index: int) -> torch.cuda.Stream:
    """The stream of PyTorch's raw handle; ExternalStream would make another stream for the default one."""
    if not handle:
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(handle, device=index)
