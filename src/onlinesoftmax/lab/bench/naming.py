"""The file name of a record: one for each device and suite, so that a new run replaces the record before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.device import KNOWN, model_of

OTHER_CASES = ("quick", "shape", "op", "fused", "with_gradient", "reduction", "strategy")
"""Options that make other cases than those of the suite; with one of these, the user names the file."""


def device_slug(name: str) -> str:
    """A device's name in a file name.

    Example:
        >>> device_slug("NVIDIA H100 80GB HBM3"), device_slug("CPU"), device_slug("NVIDIA H20")
        ('h100', 'cpu', 'nvidia-h20')
    """
    found = model_of(name)
    words = name.lower().split()
    return next((key for key, device in KNOWN.items() if device is found), "-".join(words))


def record_name(content: Mapping[str, Any]) -> str:
    """The file name of a record: DEVICE-SUITE.json.

    The framework or a forced backend stands before the suite, and the number of GPUs behind the device.

    Example:
        >>> options = {"suite": "gradients", "framework": "jax", "backend": None}
        >>> record_name({"device": {"name": "NVIDIA H200"}, "options": options})
        'h200-jax-gradients.json'
    """
    options = content["options"]
    device = device_slug(content["device"]["name"])
    count = content.get("processes", {}).get("count", 1)
    words = [device if count == 1 else f"{device}x{count}"]
    if options.get("framework", "torch") != "torch":
        words.append(options["framework"])
    if options.get("backend"):
        words.append(options["backend"])
    # The suite cpu on a CPU is cpu.json.
    return "-".join(dict.fromkeys([*words, options["suite"]])) + ".json"


def excluded(options: Mapping[str, Any]) -> str | None:
    """The first option that makes other cases than those of the suite, as on the command line; None without one.

    Example:
        >>> excluded({"with_gradient": True}), excluded({"shape": None})
        ('--with-gradient', None)
    """
    return next((f"--{name.replace('_', '-')}" for name in OTHER_CASES if options.get(name)), None)
