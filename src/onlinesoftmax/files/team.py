"""The processes that share the work of one file.

All processes agree at the same points: after opening, before the states of a band merge, and before and after the new
file takes its name.  A process that fails says so at the next point, so all of them end with its error and no file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..core.processes import Group, device_of_small_exchanges, group_or_default
from ..core.state import State
from .disk import FileError, naming, replacing


class OtherFailedError(FileError):
    """Another process of the team has failed or ended."""


class Team:
    """A process group, seen from one of its processes.

    Args:
        path: The target file, for errors.
        group: Process group of torch that exchanges CPU tensors, as gloo does; None for one process alone.
    """

    def __init__(self, path: Path, group: Group | None) -> None:
        self.path, self.group = path, None if group is None else group_or_default(group)
        self.rank = 0 if self.group is None else self.group.rank()
        self.size = 1 if self.group is None else self.group.size()
        if self.group is not None and device_of_small_exchanges(self.group, None) is None:
            raise FileError(f"{path}: the process group does not exchange CPU tensors; make one with the backend gloo")

    def agree(self, message: Any = None, error: BaseException | None = None) -> list[Any]:
        """The messages of all processes in the order of their ranks, if none of them has failed.

        Args:
            message: What this process tells the others.
            error: Why this process has failed; it then raises nothing here.

        Raises:
            OtherFailedError: a process has failed or ended; all others raise the same error.
        """
        if self.group is None:
            return [message]
        import torch.distributed as dist

        mine = None if error is None else str(error) or type(error).__name__
        found: list[Any] = [None] * self.size
        with self._reaching_others():
            dist.all_gather_object(found, (message, mine), group=self.group)
        for rank, (_, failure) in enumerate(found):
            if failure is not None and error is None:
                raise OtherFailedError(f"{self.path}: was not written, because process {rank} failed: {failure}")
        return [message for message, _ in found]

    def merge(self, state: State) -> State:
        """The state of the slices of all processes; the same bits on every process."""
        self.agree()
        with self._reaching_others():
            return state.all_reduce(self.group)

    @contextmanager
    def _reaching_others(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise OtherFailedError(
                f"{self.path}: was not written: another process has ended, or did not answer within the timeout of the "
                f"process group ({error})"
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
            request: Description of the request; it must be the same on every process.
        """
        if self.rank == 0:
            with replacing(self.path, size) as writer:
                self._same((request, str(writer.name)))
                self.agree()  # Every process has opened the file, which is gone if this process fails from here on.
                yield writer
                self._flush(writer)
        else:
            with self._opened(request) as writer:
                yield writer
                self._flush(writer)
        self.agree()

    def _flush(self, writer: io.FileIO) -> None:
        if self.size > 1:
            with naming(self.path, "cannot be written"):
                os.fsync(writer.fileno())
        self.agree()

    @contextmanager
    def _opened(self, request: str) -> Iterator[io.FileIO]:
        temporary = Path(self._same((request, "")))
        try:
            with naming(self.path, "process 0 has created it, and this process cannot open it"):
                file = temporary.open("r+b", buffering=0)
            with file:
                self.agree()
                yield file
        except BaseException:
            # Process 0 may have been killed.
            temporary.unlink(missing_ok=True)
            raise

    def _same(self, request: tuple[str, str]) -> str:
        """The path of the temporary file, if all processes have the same request."""
        every = self.agree(request)
        different = next((rank for rank, (text, _) in enumerate(every) if text != every[0][0]), None)
        if different is not None:
            raise FileError(
                f"{self.path}: process 0 and process {different} have different arguments, or sources of different size"
            )
        path: str = every[0][1]
        return path
