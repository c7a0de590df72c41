"""Host time: what one eager call costs the CPU, apart from what the device does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from .cases import Case, make_input
from .timing import Clock, Times

ROWS, COLS = 64, 512


def host_times(device: Any, clock: Clock, repeat_ms: float) -> dict[str, Any]:
    """Microseconds of a softmax of 64 × 512: ours, ours into `out=`, torch's, and our launch alone.

    Returns:
        The case, and by name the times; "bare launch" is missing where the call is no launch of ours.
    """
    import torch

    from .. import api, dispatch

    case = Case("softmax", (ROWS, COLS), 1, "bfloat16" if device.type == "cuda" else "float32")
    x = make_input(case, device)
    y = torch.empty_like(x)
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: api.softmax(x, -1),
        "ours out=": lambda: api.softmax(x, -1, out=y),
        "torch": lambda: torch.softmax(x, -1),
        "torch out=": lambda: torch.softmax(x, -1, out=y),
    }
    bare = getattr(dispatch, "bare_launch", None)
    if device.type == "cuda" and bare is not None:
        calls["bare launch"] = bare("softmax", x, y)
    samples = clock.host_us(calls, repeat_ms)
    return {**case.as_dict(), "times": {name: asdict(Times.of(found)) for name, found in samples.items()}}
