"""Softmax and its family at the speed of memory: the state (m, l) of a slice, merged at every scale.

    >>> import numpy as np
    >>> import onlinesoftmax as osm
    >>> osm.softmax(np.array([0.0, 0.0], dtype=np.float32))
    array([0.5, 0.5], dtype=float32)

Importing this package imports no framework. Each framework is imported when it is first needed.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .core.wrong_calls import hinting
from .torch.namespace import provide as _provide_operators

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import jax as jax
    from . import nn as nn
    from . import routing as routing
    from . import sampling as sampling
    from .api import cross_entropy, log_softmax, logsumexp, softmax, token_logprobs
    from .core.problem import Problem
    from .core.state import State
    from .explanation import explain
    from .files.apply import apply_file
    from .linear import linear_cross_entropy, linear_token_logprobs, linear_token_loss
    from .ops import reference as reference
    from .overrides import override
    from .planner.plan import Plan, PlanError
    from .routing import load_balancing_loss, route, router_z_loss
    from .sampling import sample, topk_logprobs, verify

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "PlanError",
    "Problem",
    "State",
    "__version__",
    "apply_file",
    "cross_entropy",
    "explain",
    "linear_cross_entropy",
    "linear_token_logprobs",
    "linear_token_loss",
    "load_balancing_loss",
    "log_softmax",
    "logsumexp",
    "override",
    "route",
    "router_z_loss",
    "sample",
    "softmax",
    "token_logprobs",
    "topk_logprobs",
    "verify",
]

_HOME = {
    "softmax": "api",
    "log_softmax": "api",
    "logsumexp": "api",
    "cross_entropy": "api",
    "linear_cross_entropy": "linear",
    "linear_token_logprobs": "linear",
    "linear_token_loss": "linear",
    "load_balancing_loss": "routing",
    "route": "routing",
    "router_z_loss": "routing",
    "sample": "sampling",
    "token_logprobs": "api",
    "topk_logprobs": "sampling",
    "verify": "sampling",
    "nn": "nn",
    "distributed": "distributed",
    "override": "overrides",
    "jax": "jax",
    "routing": "routing",
    "sampling": "sampling",
    "explain": "explanation",
    "Plan": "planner.plan",
    "PlanError": "planner.plan",
    "Problem": "core.problem",
    "State": "core.state",
    "apply_file": "files.apply",
    "reference": "ops.reference",
}


_provide_operators()


# A type checker would take every name for one that this function finds.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'onlinesoftmax' has no attribute {name!r}")
        home = importlib.import_module(f".{_HOME[name]}", __name__)
        found = home if _HOME[name].rpartition(".")[2] == name else getattr(home, name)
        if isinstance(found, FunctionType):
            found = hinting(found, __name__)
        # Python finds a global without this function, which takes longer than a launch.
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    # A star import takes __all__ only, because two modules import torch. Tools such as `help` take every name in this
    # list, so `nn` and `distributed` are left out where torch is not installed.
    modules = ["nn", "distributed"] if importlib.util.find_spec("torch") else []
    return [*__all__, "jax", "routing", "sampling", *modules]
