"""The family for JAX, in the conventions of `jax.nn`."""

from .functions import log_softmax, logsumexp, softmax

__all__ = ["log_softmax", "logsumexp", "softmax"]
