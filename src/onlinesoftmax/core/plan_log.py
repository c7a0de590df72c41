"""The plans that this process has made: a line of the log for each, at DEBUG, and a record for reports of `override`.

A prepared call runs the plan of an earlier call, and writes nothing.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

LOG = logging.getLogger("onlinesoftmax")

MOST_KINDS = 4096
"""Number of kinds of calls at which the record is emptied."""


class Kind(NamedTuple):
    """A kind of call, for which plans are made.

    Attributes:
        operation: Name of an operation, or of a public function.
        shape: Shape of the input.
        dtype: Name of its dtype.
        device: Its device, as the framework writes it.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: str
    device: str

    @classmethod
    def of(cls, operation: str, x: Any) -> Kind:
        """The kind of a call on a torch tensor."""
        return cls(operation, tuple(x.shape), str(x.dtype).removeprefix("torch."), str(x.device))

    def __str__(self) -> str:
        return f"{self.operation} of {' x '.join(map(str, self.shape)) or 'a number'} {self.dtype} on {self.device}"


_MADE: dict[Kind, dict[str, None]] = {}


def note_plan(kind: Kind, plan: str, why: str) -> None:
    """Write a line to the log if the plan is new for this kind of call.

    Args:
        kind: What the plan was made for.
        plan: The plan in a few words.
        why: Its reason, in one sentence.
    """
    if plan in _MADE.get(kind, ()):
        return
    if len(_MADE) >= MOST_KINDS:
        _MADE.clear()
    _MADE.setdefault(kind, {})[plan] = None
    LOG.debug("%s: %s: %s", kind, plan, why)


def plans_made(kind: Kind) -> tuple[str, ...]:
    """The plans that were made for a kind of call, the oldest first.

    Example:
        >>> note_plan(Kind("softmax", (4, 8), "float32", "cuda:0"), "<Plan cuda/row>", "a row fits")
        >>> plans_made(Kind("softmax", (4, 8), "float32", "cuda:0"))
        ('<Plan cuda/row>',)
    """
    return tuple(_MADE.get(kind, ()))
