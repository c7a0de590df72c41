"""The ways to compute a head in JAX: our functions, and XLA on all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import bridge
from ..cases import Case
from ..jax_peers import Arrays
from ..peers import Peer
from .peers import IN_TORCH, LOSS

Function = Callable[..., Any]


class JaxHead(Arrays):
    """XLA on all logits."""

    name, distribution = "jax", "jax"

    def prepare(self, case: Case) -> Function:
        """The gradients of input and weight, and the outputs, compiled in one."""
        forward = self.forward(case)

        def function(x: Any, weight: Any, target: Any, *incoming: Any) -> Any:
            import jax
            import jax.numpy as jnp

            outputs, vjp = jax.vjp(lambda x, weight: forward(x, weight, target), x, weight)
            return (*vjp(incoming or (jnp.ones((), outputs[0].dtype),)), *outputs)

        return bridge.on_tensors(function)

    def forward(self, case: Case) -> Function:
        """The function from input, weight and target to the tuple of outputs."""

        def on_logits(x: Any, weight: Any, target: Any) -> Any:
            import jax
            import jax.numpy as jnp

            log_p = jax.nn.log_softmax((x @ weight.T).astype(case.accumulator))
            logprob = jnp.take_along_axis(log_p, target[:, None], axis=1)[:, 0]
            if case.operation == LOSS:
                return (-logprob.mean().astype(x.dtype),)
            return logprob, -jnp.sum(jnp.exp(log_p) * log_p, axis=1)

        return on_logits


class OursInJaxHead(JaxHead):
    """Our functions for JAX with their usual memory."""

    name, module, ours = "jax-ours", "onlinesoftmax", True
    slack = 1.0

    def forward(self, case: Case) -> Function:
        """The public function."""
        from onlinesoftmax import jax as osj

        function = getattr(osj, case.operation)
        if case.operation == LOSS:
            return lambda x, weight, target: (function(x, weight, target),)
        return lambda x, weight, target: tuple(function(x, weight, target)[:2])


IN_JAX: tuple[type[Peer], ...] = (OursInJaxHead, JaxHead)
"""The ways in JAX."""

HEAD_PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (*IN_TORCH, *IN_JAX)}
"""The ways beside ours with its usual memory, by their names on the command line."""
