"""Host time: microseconds of the CPU for one eager call, without the device's own time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from .cases import Case
from .inputs import make_input
from .timing import Clock, Times

ROWS, COLS = 64, 512


def host_times(device: Any, clock: Clock, repeat_ms: float) -> dict[str, Any]:
    """Host time of a softmax of 64 × 512: our function, PyTorch's, and our launch alone.

    "out=" is a call that writes to a given tensor.  "with grad" is the forward call on a tensor that requires a
    gradient, which autograd records.

    Returns:
        The case, and the times by name; without "bare launch" where no kernel of ours runs.
    """
    import torch

    from .. import api

    case = Case("softmax", (ROWS, COLS), 1, "bfloat16" if device.type == "cuda" else "float32")
    x = make_input(case, device)
    y, leaf = torch.empty_like(x), x.clone().requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: api.softmax(x, -1),
        "ours out=": lambda: api.softmax(x, -1, out=y),
        "torch": lambda: torch.softmax(x, -1),
        "torch out=": lambda: torch.softmax(x, -1, out=y),
        "ours with grad": lambda: api.softmax(leaf, -1),
        "torch with grad": lambda: torch.softmax(leaf, -1),
    }
    if device.type == "cuda":
        calls["bare launch"] = _bare_launch(x, y)
    samples = clock.host_us(calls, repeat_ms)
    return {**case.as_dict(), "times": {name: asdict(Times.of(found)) for name, found in samples.items()}}


def _bare_launch(x: Any, y: Any) -> Callable[[], Any]:
    """The launch of the compiled kernel alone: the least host time that our layers could reach."""
    from ..explanation import explain
    from ..kernels import registry
    from ..kernels.request import Request

    found = explain(x)
    launch = registry.load(found.plan.backend).prepare(Request(found.task, found.plan))
    launch(x, y, {})
    return lambda: launch(x, y, {})
