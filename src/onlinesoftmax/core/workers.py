"""Processes that work for this one, and that end with it however it ends.

A killed process can end nobody. So each worker waits in a thread for the end of its parent: of a pipe that only the
parent holds open.
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
