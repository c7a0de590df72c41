"""Worker processes that end when their parent ends, even if the parent is killed.

A killed process cannot stop its workers. Therefore a thread in each worker waits on the parent's sentinel, which
becomes ready when the parent ends, and on a pipe that the parent closes to end the workers itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection
from typing import Any


class WorkerPool(ProcessPoolExecutor):
    """An executor whose processes are new, so that they inherit no threads of a framework, and end with this one.

    An exception that leaves the `with` block ends them at once, without waiting for their work.

    Hazard: in such a block, submit work one by one.  The iterator of `map` cancels work when an exception leaves it,
    and Python 3.11 prints a traceback where a worker has ended and work is cancelled.
    """

    def __init__(self, workers: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        alive, self._end = spawn.Pipe(duplex=False)
        super().__init__(workers, spawn, _end_with_parent, (alive,))

    def __exit__(self, kind: Any, *error: Any) -> bool | None:
        if kind is not None:
            self._end.close()
        return super().__exit__(kind, *error)


def _end_with_parent(alive: connection.Connection) -> None:
    """End this worker as soon as the process that started it has ended, or has closed the other end of the pipe."""
    # Ctrl-C reaches every process of a terminal.  The parent ends its workers; they have nothing to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel, alive), daemon=True).start()


def _end_after(*ends: int | connection.Connection) -> None:
    connection.wait(ends)
    # Nobody takes a result any more, and an ordinary exit would wait for the work to finish.
    os._exit(1)
