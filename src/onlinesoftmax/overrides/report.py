"""Record of the calls inside an `override` block: the calls that our functions took, and the calls left to PyTorch."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Number of calls inside an `override` block.

    Attributes:
        taken: Number of calls that ran our function, by the name of the function.
        left: Number of calls that ran PyTorch's function, by the name of the function and the reason.

    Example:
        >>> print(Report({"softmax": 12}, {("softmax", "dim is None, so PyTorch chooses it"): 1}))
        softmax: our function took 12 calls.
        softmax: PyTorch ran 1 call: dim is None, so PyTorch chooses it.
    """

    taken: dict[str, int]
    left: dict[tuple[str, str], int]

    def __str__(self) -> str:
        lines = [f"{name}: our function took {_calls(count)}." for name, count in self.taken.items()]
        lines += [f"{name}: PyTorch ran {_calls(count)}: {reason}." for (name, reason), count in self.left.items()]
        return "\n".join(lines) or "No call was counted."


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"


# One lock for all counters, because torch.compile cannot trace the creation of a lock.
_LOCK = threading.Lock()


class Counts:
    """Counters of calls, which several threads may increase."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._left: dict[tuple[str, str], int] = {}

    def add(self, name: str, reason: str | None) -> None:
        """Count one call of a function: taken if the reason is None, else left to PyTorch for this reason."""
        with _LOCK:
            if reason is None:
                self._taken[name] = self._taken.get(name, 0) + 1
            else:
                self._left[name, reason] = self._left.get((name, reason), 0) + 1

    def report(self) -> Report:
        """The numbers of calls until now."""
        with _LOCK:
            return Report(dict(self._taken), dict(self._left))
