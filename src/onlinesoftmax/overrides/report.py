"""Record of the calls inside an `override` block: the calls that our functions took, and the calls left to PyTorch."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from ..core.plan_log import Kind, plans_made
from ..ops import OPERATIONS

MOST_SHOWN = 8
"""Most plans of a function that the text of a report shows."""

MOST_KINDS = 4096
"""Most shapes whose plans a block reports."""


@dataclass(frozen=True)
class Report:
    """Number of calls inside an `override` block.

    Attributes:
        taken: Number of calls that ran our function, by the name of the function.
        left: Number of calls that ran PyTorch's function, by the name of the function and the reason.
        plans: The plans that the process has made for calls like those that ran our function, and for their gradients,
            by the name of the function.  PyTorch's operations, and calls that `torch.compile` traces, have none.
            Reports are compared without their plans.

    Example:
        >>> print(Report({"softmax": 12}, {("softmax", "dim is None, so PyTorch chooses it"): 1}))
        softmax: our function took 12 calls.
        softmax: PyTorch ran 1 call: dim is None, so PyTorch chooses it.
    """

    taken: dict[str, int]
    left: dict[tuple[str, str], int]
    plans: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        lines = []
        for name, count in self.taken.items():
            plans = self.plans.get(name, ())
            lines.append(f"{name}: our function took {_calls(count)}.")
            lines += [f"  {plan}" for plan in plans[:MOST_SHOWN]]
            lines += [f"  and {len(plans) - MOST_SHOWN} more in plans"] if len(plans) > MOST_SHOWN else []
        lines += [f"{name}: PyTorch ran {_calls(count)}: {reason}." for (name, reason), count in self.left.items()]
        return "\n".join(lines) or "No call was counted."


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"


# One lock for all counters, because torch.compile cannot trace the creation of a lock.
_LOCK = threading.Lock()


class Counts:
    """Counters of calls, which several threads may increase.

    Attributes:
        has_head: True once a linear layer has been taken for a head.
    """

    def __init__(self) -> None:
        self.has_head = False
        self._taken: dict[str, int] = {}
        self._left: dict[tuple[str, str], int] = {}
        self._kinds: dict[tuple[Any, ...], None] = {}

    def add(self, name: str, reason: str | None, kind: tuple[Any, ...] = ()) -> None:
        """Count one call of a function: taken if the reason is None, else left to PyTorch for this reason.

        Args:
            name: Name of the function.
            reason: Why PyTorch runs the call; None for a call of ours.
            kind: Shape, dtype and device of the input of a call of ours, whose plans are reported.
        """
        with _LOCK:
            if reason is None:
                self._taken[name] = self._taken.get(name, 0) + 1
                if kind and len(self._kinds) < MOST_KINDS:
                    self._kinds.setdefault((name, *kind))
            else:
                self._left[name, reason] = self._left.get((name, reason), 0) + 1

    def report(self) -> Report:
        """The numbers of calls until now."""
        with _LOCK:
            taken, left, kinds = dict(self._taken), dict(self._left), list(self._kinds)
        plans: dict[str, tuple[str, ...]] = {}
        for name, shape, dtype, device in kinds:
            gradient = OPERATIONS[name].gradient_name if name in OPERATIONS else name
            for each in dict.fromkeys((name, gradient)):
                kind = Kind(each, tuple(shape), str(dtype).removeprefix("torch."), str(device))
                plans[name] = plans.get(name, ()) + tuple(f"{kind}: {plan}" for plan in plans_made(kind))
        return Report(taken, left, plans)
