"""The peers in JAX: our functions and `jax.nn`, called with the torch tensors of the benchmark."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...core.arrays import namespace
from ...core.options import Functions, scores
from ...core.task import Choice
from .. import jax_on_torch
from .cases import Case
from .formulas import Function, evaluated, incoming
from .peers import Ours, Peer, in_a_row


class Arrays(Peer):
    """A library whose functions take JAX arrays."""

    # JAX's host code and the conversion of tensors take longer than one flush of L2.
    flushes, in_torch, module = 16, False, "jax"

    def why_absent(self) -> str | None:
        """JAX is missing, or has no support for the GPU."""
        return jax_on_torch.unavailable(self.device_type)

    def supports(self, case: Case) -> str | None:
        """Everything but causal masks, which `jax.nn` does not have either."""
        return "has no causal mask" if "causal" in case.fused else None


class Programs(Arrays):
    """A library of whose function XLA makes a program."""

    def prepare(self, case: Case) -> Function:
        """The library's function for the case, compiled."""
        return jax_on_torch.on_tensors(self.function(case))

    def repeated(self, case: Case) -> Function:
        """One program that makes all calls of the case."""
        return jax_on_torch.on_tensors(_program(self.function(case), case.calls))

    def function(self, case: Case) -> Function:
        """The library's function of arrays for the case."""
        raise NotImplementedError


class OursInJax(Programs, Ours):
    """Our library for JAX: its public functions, and its gradients without autodiff."""

    framework, module = "jax", "onlinesoftmax.jax"

    def copy(self, x: Any, calls: int = 1) -> Function:
        """JAX's copy; XLA would leave out copies of copies, so several of them are sums with 1."""
        import jax.numpy as jnp

        return jax_on_torch.on_tensors(jnp.copy if calls == 1 else _program(lambda a: a + 1, calls))

    def own(self, case: Case) -> Function:
        """The same as the yardstick: other libraries are judged with more slack, so one function serves both."""
        return self.yardstick(case)

    def yardstick(self, case: Case) -> Function:
        """`jax.nn` in float32 at least: rounding every step to 16 bits would hide any error of ours.

        A gradient through autodiff that reads the saved output keeps its dtype, because the output is saved rounded.
        """
        import jax.numpy as jnp

        if case.with_gradient and not case.gradient.declaration.scores:
            return jax_on_torch.on_tensors(_of_jax_nn(case))
        theirs, wide = _of_jax_nn(case), case.accumulator
        dtypes = [returned.dtype for returned in case.returned]

        def widened(*arrays: Any) -> Any:
            found = theirs(*(a.astype(wide) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in arrays))
            if not isinstance(found, tuple):
                return found.astype(dtypes[0])
            return tuple(y.astype(dtype) for y, dtype in zip(found, dtypes, strict=True))

        return jax_on_torch.on_tensors(widened)

    def function(self, case: Case) -> Function:
        """The function with the forced backend and strategy."""
        if case.declaration.backward:
            return partial(_gradient, case, Choice(self.backend, self.strategy))
        from ...jax import functions as ours

        forced = {"backend": self.backend, "strategy": self.strategy}
        forced |= {"reduction": case.reduction} if case.reduction else {}
        function = partial(getattr(ours, case.operation), axis=case.dim, **forced)
        if case.declaration.has_target:
            # A call of log-probabilities returns other statistics too.
            return called(case, function if case.reduction else lambda x, target: function(x, target)[:2])
        if case.with_gradient:
            return called(case, function)
        options, names = case.option_values, {"mask": "where"}
        beside = [names.get(name, name) for name in case.option_tensors]
        return lambda x, *more: function(x, **options, **dict(zip(beside, more, strict=True)))


class JaxNN(Programs):
    """`jax.nn`, compiled by XLA."""

    name, distribution = "jax.nn", "jax"

    def function(self, case: Case) -> Function:
        """Its function, after the scores in elementary operations; for a gradient, the formula of its own rule."""
        return _of_jax_nn(case)


def _program(function: Function, calls: int) -> Function:
    """A function that makes so many calls, each of the result before, with barriers so that XLA fuses none."""
    import jax

    return in_a_row(function, calls, between=jax.lax.optimization_barrier)


def _of_jax_nn(case: Case) -> Function:
    import jax
    import jax.numpy as jnp

    dim = case.dim
    if case.declaration.backward:
        return lambda *arrays: evaluated(case, namespace(arrays[0]), *arrays)

    def of_targets(x: Any, target: Any) -> Any:
        """The losses of the rows in the dtype of the logits, as optax computes them, or logprob and entropy."""
        logprob, entropy = log_probabilities(x.astype(case.accumulator), target, dim)
        return -logprob.astype(x.dtype) if case.reduction else (logprob, entropy)

    if case.declaration.has_target:
        return called(case, of_targets)
    functions, forward = Functions(jnp.tanh, jnp.where), getattr(jax.nn, case.operation)
    if case.with_gradient:
        return called(case, partial(forward, axis=dim))

    def written_out(x: Any, *more: Any) -> Any:
        options = case.score_options(dict(zip(case.option_tensors, more, strict=True)))
        # jax.nn takes the mask itself.
        return forward(scores(functions, x, options._replace(mask=None)), dim, where=options.mask)

    return written_out


def log_probabilities(logits: Any, target: Any, dim: int = -1) -> tuple[Any, Any]:
    """Logarithm of the probability of each row's target, and entropy of the row."""
    import jax
    import jax.numpy as jnp

    log_p = jax.nn.log_softmax(logits, axis=dim)
    logprob = jnp.take_along_axis(log_p, jnp.expand_dims(target, dim), axis=dim)
    return jnp.squeeze(logprob, axis=dim), -jnp.sum(jnp.exp(log_p) * log_p, axis=dim)


def _gradient(case: Case, choice: Choice, *arrays: Any) -> Any:
    import jax.numpy as jnp

    from ...jax import custom_op
    from ...jax.signature import Signature

    values = dict(zip(case.tensors, arrays, strict=True))
    operands = {"x": jnp.moveaxis(values["x"], case.dim, -1), "dy": values["dy"]}
    if "lse" in values:
        # (lse, 1) is a state of rows with this logsumexp.
        operands |= {"m": values["lse"], "l": jnp.ones_like(values["lse"])}
    else:
        operands["dy"] = jnp.moveaxis(values["dy"], case.dim, -1)
    dx = custom_op.bind(Signature(case.operation, ("y",), choice=choice), operands)["y"]
    return jnp.moveaxis(dx, -1, case.dim)


def called(case: Case, function: Function) -> Function:
    """The function, its losses reduced, with the gradient where the case has one: (gradient, …, output, …)."""
    import jax
    import jax.numpy as jnp

    count, wanted = case.operands, case.differentiated

    def forward(*operands: Any) -> Any:
        found = function(*operands)
        outputs = tuple(found) if isinstance(found, tuple) else (found,)
        if case.reduces_rows and outputs[0].ndim:
            # The functions of `jax.nn` and optax return the losses of the rows; the caller reduces them.
            return (jnp.mean(outputs[0]),)
        return outputs

    def with_gradient(*arrays: Any) -> Any:
        others = arrays[wanted:count]
        outputs, vjp = jax.vjp(lambda *first: forward(*first, *others), *arrays[:wanted])
        dys = incoming(arrays[count:], len(outputs)) or (jnp.ones((), outputs[0].dtype),)
        return (*vjp(dys), *outputs)

    def without_gradient(*arrays: Any) -> Any:
        outputs = forward(*arrays)
        return outputs if len(outputs) > 1 else outputs[0]

    return with_gradient if case.with_gradient else without_gradient
