"""The processes that share the work of one file.

All processes agree at the same points:

1. Process 0 has created the temporary file.  It sends the path, and all compare their requests.
2. Every process has opened the temporary file.
3. Before the states of a band merge, if every process has a part of each row.
4. Every process has flushed its region to the disk.  Then process 0 gives the file the name of the target.
5. The file has the name of the target.
6. At the end of `apply_file`, which adds up the bytes that were read.

A process that fails says so at the next point, and all processes raise an error.  If the file already has the name of
the target, it is complete and stays, and the other processes say that it was written.  Otherwise there is no new file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..core.processes import ExchangeError, Group, device_of_small_exchanges, group_or_default
from ..core.state import State
from .disk import FileError, naming, replacing


class OtherFailedError(FileError):
    """Another process of the team has failed or ended."""


_BROKEN = {
    False: "was not written",
    None: "may or may not have been written",
    True: "was written, and then an exchange failed",
}
"""The state of the target in the error of a broken exchange, by `Team.written`."""


class Team:
    """A process group, seen from one of its processes.

    Args:
        path: The target file, for errors.
        group: Process group of torch that exchanges CPU tensors, as gloo does; None for one process alone.

    Attributes:
        written: True if the new file has the name of the target; None if only process 0 knows.
    """

    def __init__(self, path: Path, group: Group | None) -> None:
        self.path, self.group = path, None if group is None else group_or_default(group)
        self.rank = 0 if self.group is None else self.group.rank()
        self.size = 1 if self.group is None else self.group.size()
        self.written: bool | None = False
        if self.group is not None and device_of_small_exchanges(self.group, None) is None:
            raise FileError(f"{path}: the process group does not exchange CPU tensors; make one with the backend gloo")

    def agree(self, message: Any = None, error: BaseException | None = None) -> list[Any]:
        """The messages of all processes in the order of their ranks, if none of them has failed.

        Args:
            message: What this process tells the others.
            error: Why this process has failed; `agree` then does not raise in this process.

        Raises:
            OtherFailedError: a process has failed or ended; all others raise the same error.
        """
        if self.group is None:
            return [message]
        import torch.distributed as dist

        mine = None if error is None else str(error) or type(error).__name__
        found: list[Any] = [None] * self.size
        with self._reaching_others(RuntimeError):
            dist.all_gather_object(found, (message, mine, self.written), group=self.group)
        # Process 0 gives the file its name, so process 0 knows.
        outcome = "was written, and then" if found[0][2] else "was not written, because"
        for rank, (_, failure, _) in enumerate(found):
            if failure is not None and error is None:
                raise OtherFailedError(f"{self.path}: {outcome} process {rank} failed: {failure}")
        return [message for message, _, _ in found]

    def merge(self, state: State) -> State:
        """The state of the slices of all processes; the same bits on every process."""
        self.agree()
        # A RuntimeError of another kind, such as one for too little memory, is an error of this process.
        with self._reaching_others(ExchangeError):
            return state.all_reduce(self.group)

    @contextmanager
    def _reaching_others(self, broken: type[RuntimeError]) -> Iterator[None]:
        try:
            yield
        except broken as error:
            raise OtherFailedError(
                f"{self.path}: {_BROKEN[self.written]}: another process has ended, or did not answer within the "
                f"timeout of the process group ({error})"
            ) from error

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the other processes of an error in the block, and raise it again."""
        try:
            yield
        except OtherFailedError:
            raise
        except BaseException as error:
            # If the others have ended already, this error says more than theirs.
            with suppress(OtherFailedError):
                self.agree(error=error)
            raise

    @contextmanager
    def replacing(self, size: int, request: str) -> Iterator[io.FileIO]:
        """The function `replacing` of disk.py for all processes: each writes its own region of one new file.

        Process 0 creates the file, and gives it the name of the target when all processes have written their regions.

        Args:
            size: Bytes of the new file.
            request: The request as a text; it must be the same on every process.
        """
        if self.rank == 0:
            # The processes flush at the same time; process 0 does so in `replacing`, before the agreement `ready`.
            with replacing(self.path, size, ready=self.agree) as part:
                self._same((request, str(part.name)))
                # A process that cannot open the file ends all processes here, before they do any work.
                self.agree()
                # After this point every process has the file open. If process 0 fails later, `replacing` deletes the
                # file.
                yield part.file
            self.written = True
        else:
            with self._opened(request) as writer:
                yield writer
        self.agree()
        self.written = True

    @contextmanager
    def _opened(self, request: str) -> Iterator[io.FileIO]:
        """The new file in every process but process 0, up to the agreement before the rename."""
        temporary = Path(self._same((request, "")))
        try:
            with naming(self.path, "process 0 has created it, and this process cannot open it"):
                file = temporary.open("r+b", buffering=0)
            with file:
                self.agree()
                yield file
                with naming(self.path, "cannot be written"):
                    os.fsync(file.fileno())
                # Process 0 gives the file its name after this agreement, and says so in the next one.
                self.written = None
                self.agree()
        except BaseException:
            # Delete the file here too: process 0 may have been killed and cannot delete it.
            temporary.unlink(missing_ok=True)
            raise

    def _same(self, request: tuple[str, str]) -> str:
        """The path of the temporary file, if all processes have the same request."""
        every = self.agree(request)
        different = next((rank for rank, (text, _) in enumerate(every) if text != every[0][0]), None)
        if different is not None:
            raise FileError(
                f"{self.path}: process 0 and process {different} have different files or arguments, or sources of "
                "different size"
            )
        path: str = every[0][1]
        return path
