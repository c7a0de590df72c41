"""The softmax family, sampling and routing for JAX, in the conventions of `jax.nn` and, for the losses, of optax.

Importing this package does not import JAX; using one of its functions does.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

from ..core.wrong_calls import hinting
from ..kernels.registry import LOADING, needing

if TYPE_CHECKING:
    from .functions import TokenLogprobs, cross_entropy, log_softmax, logsumexp, softmax, token_logprobs
    from .linear import linear_cross_entropy, linear_token_logprobs, linear_token_loss
    from .routing import load_balancing_loss, route, router_z_loss
    from .sampling import sample, topk_logprobs, verify

__all__ = [
    "TokenLogprobs",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_token_logprobs",
    "linear_token_loss",
    "load_balancing_loss",
    "log_softmax",
    "logsumexp",
    "route",
    "router_z_loss",
    "sample",
    "softmax",
    "token_logprobs",
    "topk_logprobs",
    "verify",
]


# A type checker would take every name for one that this function finds.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'onlinesoftmax.jax' has no attribute {name!r}")
        with needing("jax", "onlinesoftmax.jax"), LOADING:
            from . import functions, linear, routing, sampling
        # Python finds a global without this function.
        home = next(module for module in (functions, linear, routing, sampling) if name in module.__all__)
        found = getattr(home, name)
        globals()[name] = found = hinting(found, __name__) if isinstance(found, FunctionType) else found
        return found


def __dir__() -> list[str]:
    return list(__all__)
