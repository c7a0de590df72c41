"""Who is compared in JAX: ours and `jax.nn`, on the tensors of the harness."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..jax import bridge
from .cases import Case
from .formulas import Function
from .inputs import SCALE, SOFTCAP
from .peers import Ours, Peer, option_values


class _Arrays(Peer):
    """Someone whose functions take JAX arrays."""

    # JAX's host code, and the change of hands, take longer than one flush of L2.
    flushes = 16

    def why_absent(self) -> str | None:
        """JAX is missing, or does not know the GPU."""
        return bridge.unavailable(self.device_type)

    def supports(self, case: Case) -> str | None:
        """Everything but causality, which `jax.nn` does not know either."""
        return "has no causal mask" if "causal" in case.fused else None


class OursInJax(_Arrays, Ours):
    """Our library for JAX, planned or forced: its public functions, and its gradients without autodiff."""

    framework = "jax"

    def copy(self, x: Any) -> Function:
        """JAX's copy."""
        import jax.numpy as jnp

        copy = bridge.on_tensors(jnp.copy)
        return lambda: copy(x)

    def yardstick(self, case: Case) -> Function:
        """`jax.nn` in 32 bits at least: what it rounds to 16 on its way would hide any error of ours."""
        import jax.numpy as jnp

        from ..core.arrays import accumulator

        theirs = _of_jax_nn(case)

        def widened(*arrays: Any) -> Any:
            wide = (a if a.dtype == jnp.bool_ else a.astype(accumulator(a)) for a in arrays)
            return theirs(*wide).astype(jnp.dtype(case.dtype))

        return bridge.on_tensors(widened)

    def prepare(self, case: Case) -> Function:
        """The function with the forced backend and strategy."""
        if case.backward:
            return bridge.on_tensors(partial(_gradient, case, (self.backend, self.strategy)))
        from ..jax import functions as ours

        forced = {"backend": self.backend, "strategy": self.strategy}
        function = partial(getattr(ours, case.operation), axis=case.dim, **forced)
        options = option_values(case)
        names = {"bias": "bias", "mask": "where"}
        beside = [names[name] for name in case.fused if name in names]
        return bridge.on_tensors(lambda x, *more: function(x, **options, **dict(zip(beside, more, strict=True))))


class JaxNN(_Arrays):
    """`jax.nn`, compiled by XLA."""

    name, distribution = "jax.nn", "jax"

    def prepare(self, case: Case) -> Function:
        """Its function, with the scores written out before it; of a gradient, what its own rule computes."""
        return bridge.on_tensors(_of_jax_nn(case))


def _of_jax_nn(case: Case) -> Function:
    import jax
    import jax.numpy as jnp

    if case.backward:
        return partial(_its_gradient, case)
    forward = getattr(jax.nn, case.operation)

    def written_out(x: Any, *more: Any) -> Any:
        beside = dict(zip([name for name in case.fused if name in ("bias", "mask")], more, strict=True))
        x = x * SCALE if "scale" in case.fused else x
        x = SOFTCAP * jnp.tanh(x / SOFTCAP) if "softcap" in case.fused else x
        x = x + beside["bias"] if "bias" in beside else x
        return forward(x, case.dim, where=beside.get("mask"))

    return written_out


def _gradient(case: Case, who: tuple[str | None, str | None], *arrays: Any) -> Any:
    import jax.numpy as jnp

    from ..core.arrays import accumulator
    from ..core.options import PLAIN
    from ..core.task import Choice
    from ..jax import primitives

    *saved, dy = arrays
    x, choice = jnp.moveaxis(saved[0], case.dim, -1), Choice(*who)
    if case.forward == "logsumexp":
        lse = saved[1].astype(accumulator(x))
        # The state of a row whose logsumexp is this.
        state = jnp.stack([lse, jnp.ones_like(lse)], -1)
        dx = primitives.bind(case.operation, x, state, dy, choice=choice, options=PLAIN)
    else:
        dx = primitives.bind(case.operation, x, jnp.moveaxis(dy, case.dim, -1), choice=choice)
    return jnp.moveaxis(dx, -1, case.dim)


def _its_gradient(case: Case, *arrays: Any) -> Any:
    import jax.numpy as jnp

    *saved, dy = arrays
    if case.forward == "logsumexp":
        x, lse = saved
        return jnp.expand_dims(dy, case.dim) * jnp.exp(x - jnp.expand_dims(lse, case.dim))
    [y] = saved
    if case.forward == "softmax":
        return y * (dy - jnp.sum(y * dy, case.dim, keepdims=True))
    return dy - jnp.exp(y) * jnp.sum(dy, case.dim, keepdims=True)
