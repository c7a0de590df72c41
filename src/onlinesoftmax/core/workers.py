"""Worker processes that end when their parent ends, even if the parent is killed.

A killed process cannot stop its workers. Therefore a thread in each worker waits on the parent's sentinel, which
becomes ready when the parent ends.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """An executor whose processes are new, so that they inherit no threads of a framework, and end with this one."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=end_with_parent)


def end_with_parent() -> None:
    """End this worker as soon as the process that started it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    connection.wait([sentinel])
    # Nobody takes a result any more, and an ordinary exit would wait for the work to finish.
    os._exit(1)
