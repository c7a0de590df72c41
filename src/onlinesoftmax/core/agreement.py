"""Comparison of the calls of several processes, before they exchange anything that depends on the call.

Each process exchanges a note about its call with the others of its group; along further groups, the notes collected so
far.  In the end every process has all notes.  So either all processes go on, or all raise a ValueError.  If all are on
one host, notes travel through sockets: that waits for no GPU, and takes a fiftieth of the time of a collective of gloo.
Otherwise they travel by a collective for each group.

If all processes make a call, none of them waits for ever.  Along each group, a process sends before it reads.
Sending does not block: a process is at most one exchange ahead of another, so a socket holds at most two messages.
"""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from .arrays import array_kind
from .processes import Group, device_of_small_exchanges, failure, gathered, timeout_of

_TEXT_BYTES = 1024
"""Bytes of a text that processes send each other; a longer text is cut off."""

_NOTE = struct.Struct("=8s8sq")
"""A note: checksums of the call and of the rows, and a number."""

_RANK = struct.Struct("=q")


class Announcement(NamedTuple):
    """A call, as its process describes it to the others.

    Attributes:
        name: Name of the public function.
        call: The function with the arguments that every process must give alike.
        shard: The shape and the dtype of the local tensor; only for errors.
        checksums: Checksums of `call`, and of all that the tensors of the processes must have in common.
    """

    name: str
    call: str
    shard: str
    checksums: tuple[bytes, bytes]

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any], rows: Any = "", shard: str = "") -> Announcement:
        """The announcement of a call.

        Args:
            name: Name of the public function.
            arguments: The arguments that every process must give alike, by name.
            rows: The properties that the tensors of the processes must have in common.
            shard: The shape and the dtype of the local tensor.
        """
        call = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        return cls(name, call, shard, (_checksum(call), _checksum(repr(rows))))


def _checksum(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


def kind_of(x: Any) -> str:
    """The shape and the dtype of an array or tensor that every process gives alike, or the type of anything else."""
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" if array_kind(x) else type(x).__name__


def numbers_of_all(own: Announcement, number: int, groups: Sequence[Group], device: Any) -> list[int]:
    """One number of each process, in the order of the ranks, if all processes make the same call.

    Args:
        own: The call of this process.
        number: The number of this process.
        groups: Process groups that are the axes of a grid of processes.
        device: Device of the tensors of the call.

    Raises:
        ValueError: the processes make different calls, or their tensors do not belong together; all raise a ValueError.
        ExchangeError: another process has ended, or did not make a call within the group's timeout.
    """
    groups = tuple(group for group in groups if group.size() > 1)
    if not groups:
        return [number]
    along_groups = _sockets_of(groups, device)
    found = _NOTE.pack(*own.checksums, number)
    if along_groups is None:
        found = b"".join(_gathered_bytes(found, groups, device))
    else:
        for sockets in reversed(along_groups):
            found = sockets.exchanged(found)
    calls, rows, numbers = zip(*_NOTE.iter_unpack(found), strict=True)
    if len(set(calls)) > 1:
        texts = _gathered_texts(own.call, groups, device)
        each = "; ".join(f"rank {texts.index(text)}: {text}" for text in dict.fromkeys(texts))
        raise ValueError(f"{own.name}(): the processes make different calls; {each}")
    if len(set(rows)) > 1:
        texts = _gathered_texts(own.shard, groups, device)
        each = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise ValueError(
            f"{own.name}(): the shards must have the same dtype, and the same shape except in the softmax dimension; "
            f"{each}"
        )
    return list(numbers)


def connected_by_sockets(groups: Sequence[Group], device: Any) -> bool:
    """True if sockets connect the processes along all groups; arguments as for `numbers_of_all`."""
    groups = tuple(group for group in groups if group.size() > 1)
    return not groups or _sockets_of(groups, device) is not None


class _PeerSockets:
    """Sockets between this process and each other process of a group; all are on one host.

    Args:
        group: The process group.
        others: The sockets in the order of the ranks; None for this process.
    """

    def __init__(self, group: Group, others: list[socket.socket | None]) -> None:
        self._group, self._others = group, others

    def exchanged(self, note: bytes) -> bytes:
        """The notes of all processes in the order of the ranks; all notes of an exchange have the same length."""
        try:
            for other in self._others:
                if other is not None:
                    other.sendall(note)
            return b"".join(note if other is None else _read(other, len(note)) for other in self._others)
        except BaseException as error:
            # The next note of another process would be taken for the one that was not read.
            self.close()
            if isinstance(error, OSError):
                raise failure(self._group, error) from error
            raise

    def close(self) -> None:
        """Close the sockets, which the other processes see."""
        for other in self._others:
            if other is not None:
                other.close()


def _read(other: socket.socket, size: int) -> bytes:
    found = other.recv(size)
    while len(found) < size:
        more = other.recv(size - len(found)) if found else b""
        if not more:
            raise ConnectionError("the connection is closed")
        found += more
    return found


_SOCKETS: dict[tuple[str, ...], tuple[tuple[Group, ...], list[_PeerSockets] | None]] = {}
"""The sockets along groups, by the names of the groups; None if some processes cannot be connected.

The groups are stored too, because a new group may reuse the name of a destroyed one.
"""


def _sockets_of(groups: tuple[Group, ...], device: Any) -> list[_PeerSockets] | None:
    """The sockets along each group, made in the first call; None, on all processes, if some cannot be connected."""
    names = tuple(group.group_name for group in groups)
    found = _SOCKETS.get(names)
    if found is not None and found[0] == groups:
        return found[1]
    import torch

    if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A capture cannot make connections, because the host reads what these exchanges find.
        return None
    made = [_connected(group, device) for group in reversed(groups)]
    along_groups = [sockets for sockets in reversed(made) if sockets is not None]
    complete = len(along_groups) == len(groups)
    if len(groups) > 1:
        complete = all(_gathered_texts("complete" if complete else "", groups, device))
    if not complete:
        for sockets in along_groups:
            sockets.close()
    _SOCKETS[names] = groups, along_groups if complete else None
    return _SOCKETS[names][1]


def _connected(group: Group, device: Any) -> _PeerSockets | None:
    """Sockets to the other processes of a group; None, on all of them, where one cannot reach another.

    Each process listens, and connects to those of lower ranks.  When all have connected, each accepts the others.
    """
    rank, size = group.rank(), group.size()
    seconds = timeout_of(group, device_of_small_exchanges(group, device))
    with ExitStack() as stack:
        listener, path = _listener(size, stack)
        paths = _gathered_texts(path, (group,), device)
        if not all(paths):
            return None
        others = _connections(paths[:rank], rank, seconds)
        connected = all(_gathered_texts("" if others is None else "connected", (group,), device))
        if listener is None or others is None or not connected:
            for other in others or ():
                other.close()
            return None
        by_rank: list[socket.socket | None] = [*others, *[None] * (size - rank)]
        for _ in range(size - 1 - rank):
            other, _ = listener.accept()
            other.settimeout(seconds)
            by_rank[_RANK.unpack(_read(other, _RANK.size))[0]] = other
    return _PeerSockets(group, by_rank)


def _listener(size: int, stack: ExitStack) -> tuple[socket.socket | None, str]:
    """(a socket that listens until the stack ends, its path); the path is empty where there can be none."""
    try:
        # No other user can write to the folder, so none can connect.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="onlinesoftmax-"))
        path = str(Path(folder) / "socket")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(size)
    except (OSError, AttributeError):
        # Windows has no such sockets, and a path has at most some 100 bytes.
        return None, ""
    return listener, path


def _connections(paths: Sequence[str], rank: int, seconds: float) -> list[socket.socket] | None:
    """Sockets that are connected to these paths, and have sent the rank of this process; None where one cannot be."""
    found: list[socket.socket] = []
    try:
        for path in paths:
            found.append(socket.socket(socket.AF_UNIX))
            found[-1].settimeout(seconds)
            found[-1].connect(path)
            found[-1].sendall(_RANK.pack(rank))
    except OSError:
        for one in found:
            one.close()
        return None
    return found


def _gathered_texts(text: str, groups: tuple[Group, ...], device: Any) -> list[str]:
    """A text of each process, by a collective for each group."""
    found = _gathered_bytes(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), groups, device)
    return [each.rstrip(b"\0").decode(errors="replace") for each in found]


def _gathered_bytes(own: bytes, groups: tuple[Group, ...], device: Any) -> list[bytes]:
    """Bytes of each process, as many on all, by a collective for each group."""
    import torch

    where = {str(device_of_small_exchanges(group, device)) for group in groups}
    message = torch.tensor(list(own), dtype=torch.uint8, device=device if len(where) > 1 else where.pop())
    return [bytes(each) for each in gathered(message, *groups).tolist()]
