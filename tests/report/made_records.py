"""A record of `onlinesoftmax bench` for the tests: every kind of result, with numbers that nobody measured."""

from __future__ import annotations

import copy
import shutil
from typing import Any

from onlinesoftmax.core.device import known
from onlinesoftmax.explanation import explain

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The browser that opens the page; None where there is none."""

TIMES = {"median_us": 50.0, "p20_us": 49.0, "p80_us": 51.0, "count": 20}


def record(name: str = "softmax", date: str = "2026-01-02T03:04:05+00:00", commit: str = "0123456789abcdef") -> Any:
    """A record of one operation: two cases that were measured, and one that was skipped."""
    cases = [case(name, cols) for cols in (1024, 4096)]
    cases.append(case(name, 1 << 20) | {"skipped": "too large", "copy": None, "copy_gbps": None, "results": []})
    return {
        "format": 1,
        "date": date,
        "git": {"commit": commit, "dirty": False},
        "versions": {"python": "3.11.7", "onlinesoftmax": "0.1.0", "torch": "2.13.0", "jax": None},
        "device": {"torch_device": "cuda:0", **vars(known("h200")), "driver": "580.1", "cuda": "13.0"},
        "options": {"framework": "torch"},
        "absent": {"quack": "quack is not installed"},
        "cases": cases,
        "host": {"operation": name, "shape": [64, 512], "dtype": "bfloat16", "times": {"ours": {"median_us": 9.0}}},
    }


def case(operation: str, cols: int) -> dict[str, Any]:
    """A case with a result of ours, one of PyTorch, a wrong one and a refusal."""
    plan = explain((4096, cols), operation=operation, dtype="bfloat16", device="h200").plan.as_dict()
    ours = result("ours") | {
        "plan": plan,
        "against_torch": {"ratio": 0.5, "added_us": -50.0},
        "analysis": "at the floor",
    }
    nothing = {"times": None, "gbps": None, "of_copy": None, "copies": None, "error": None, "extra_bytes": None}
    return {
        "operation": operation, "shape": [4096, cols], "dim": 1, "dtype": "bfloat16", "fused": [],
        "with_gradient": False, "reduction": "", "bytes": 4096 * cols * 4, "skipped": None,
        "copy": copy.copy(TIMES), "copy_gbps": 4000.0, "flush": "dirty", "within_cpu_bound": None,
        "results": [
            ours, result("torch"), result("compile") | {"status": "wrong", "reason": "off by 3"} | nothing,
            result("liger") | {"status": "refused", "reason": "no such dtype"} | nothing,
        ],
    }  # fmt: skip


def result(who: str) -> dict[str, Any]:
    return {
        "who": who, "status": "ok", "reason": None, "error": 1e-3, "allowed": 2e-3, "plan": None,
        "times": copy.copy(TIMES), "gbps": 3900.0, "of_copy": 0.975, "copies": 1.03, "extra_bytes": 512,
        "against_torch": None, "analysis": "", "utilisation": None,
    }  # fmt: skip
