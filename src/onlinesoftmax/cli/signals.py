"""Signals that end a process, as interruptions that a command can clean up after."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let the signals that end a process interrupt the block as Ctrl-C does, so that it leaves nothing behind.

    torchrun ends the other processes by SIGTERM when one has failed, a batch system when the time is over; a terminal
    that is closed sends SIGHUP.  A signal that is ignored, as by nohup, stays ignored.
    """
    found = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    changed = [each for each in found if signal.getsignal(each) == signal.SIG_DFL]
    for each in changed:
        signal.signal(each, signal.default_int_handler)
    try:
        yield
    finally:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)
