"""Host time: microseconds of the CPU for one eager call, without the device's own time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from .cases import Case
from .inputs import make_input, make_inputs
from .peers import Ours, Torch
from .timing import Clock, Times

ROWS, COLS = 64, 512


def host_times(device: Any, clock: Clock, repeat_ms: float) -> dict[str, Any]:
    """Host time of a softmax of 64 × 512 and of a cross-entropy of the same logits: our functions and PyTorch's.

    "out=" is a call that writes to a given tensor.  "with grad" is the forward call on a tensor that requires a
    gradient, which autograd records.  "forward+backward" is that call and the gradient of its result.

    Returns:
        The case of the softmax, and its times by name, without "bare launch" where no kernel of ours runs.  The key
        "cross_entropy" has the same of the loss.
    """
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    softmax = Case("softmax", (ROWS, COLS), 1, dtype)
    loss = Case("cross_entropy", (ROWS, COLS), 1, dtype, with_gradient=True)
    found = {}
    for case, calls in ((softmax, _of_softmax(softmax, device)), (loss, _of_loss(loss, device))):
        samples = clock.host_us(calls, repeat_ms)
        found[case.operation] = {
            **case.as_dict(),
            "times": {name: asdict(Times.of(us)) for name, us in samples.items()},
        }
    return {**found.pop(softmax.operation), **found}


def _of_softmax(case: Case, device: Any) -> dict[str, Callable[[], Any]]:
    import torch

    from .. import api

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
    return calls


def _of_loss(case: Case, device: Any) -> dict[str, Callable[[], Any]]:
    """Calls of the mean loss of one class per row."""
    inputs = make_inputs(case, device)
    calls: dict[str, Callable[[], Any]] = {}
    for peer in (Ours(device.type), Torch(device.type)):
        forward, both = peer.prepare(case.without_gradient), peer.prepare(case)
        leaves = peer.arguments(case, inputs)
        calls[peer.name] = partial(forward, *inputs)
        calls[f"{peer.name} with grad"] = partial(forward, *leaves)
        calls[f"{peer.name} forward+backward"] = partial(both, *leaves)
    return calls


def _bare_launch(x: Any, y: Any) -> Callable[[], Any]:
    """The launch of the compiled kernel alone: the least host time that our layers could reach."""
    from ..explanation import explain
    from ..kernels import registry
    from ..kernels.request import Request

    found = explain(x)
    launch = registry.load(found.plan.backend).prepare(Request(found.task, found.plan))
    launch(x, y, {})
    return lambda: launch(x, y, {})
