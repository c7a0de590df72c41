"""The ways to compute a head: ours within several bounds of memory, PyTorch, JAX, and libraries with a fused loss."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from ....core.units import size
from ....explanation import explain
from ..cases import OTHERS_SLACK, Case
from ..formulas import Function, log_probabilities
from ..jax_peers import Programs, called
from ..jax_peers import log_probabilities as in_jax
from ..libraries import Liger, Quack
from ..peers import AsCompiled, ForGpus, Peer, by_name
from .cases import LOGPROBS, LOSS, HeadCase

TOKENS_AT_ONCE = 1024
"""Tokens of a chunk of the way that libraries for reinforcement learning wrote themselves."""


def public_head(case: Case, module: Any, given: dict[str, Any]) -> Function:
    """The public function of this name in a module of ours with these arguments: the loss, or logprob and entropy."""
    function = getattr(module, case.operation)
    if case.operation == LOSS:
        return partial(function, **given)
    return lambda x, weight, target: tuple(function(x, weight, target, **given)[:2])


class OursHead(Peer):
    """Our functions, with the memory that they take by default, or within a bound.

    Attributes:
        slack: Error of the gradients over PyTorch's own that is allowed.
        acc_dtype: Name of the dtype in which chunks add up the gradient of the weight; None for the usual one.
    """

    name, module, ours = "ours", "onlinesoftmax", True
    slack = 1.0
    acc_dtype: str | None = None

    def memory(self, case: HeadCase) -> int | None:
        """The bound in bytes; of small cases a part of their logits, so that the plan is the same."""
        return None

    def supports(self, case: Case) -> str | None:
        """Everything but the sums of `acc_dtype`, which only chunks of tokens have."""
        return f"{case.operation} has no acc_dtype" if self.acc_dtype and case.operation == LOGPROBS else None

    def given(self, case: HeadCase) -> dict[str, Any]:
        """The arguments of a call; users leave out those that have their default value."""
        import torch

        # In dtypes wider than `acc_dtype`, the sum is the gradient itself.
        acc_dtype = getattr(torch, self.acc_dtype) if self.acc_dtype and case.dtype == self.acc_dtype else None
        asked = {"memory": self.memory(case), "acc_dtype": acc_dtype}
        return {name: value for name, value in asked.items() if value is not None}

    def forward(self, case: HeadCase) -> Function:
        """The public function."""
        import onlinesoftmax

        return public_head(case, onlinesoftmax, self.given(case))

    def note(self, case: HeadCase, x: Any, weight: Any = None, *more: Any) -> str:
        """The plan of the call in one line, with its forecast."""
        found = explain(x, linear_weight=weight, operation=case.operation, **self.given(case))
        plan, time = found.plan, f"; forecast {found.forecast}" if found.forecast else ""
        return f"{plan.name}, {plan.cut}, {plan.counted}, {size(plan.bytes)}{time}"


class Stored(OursHead):
    """Ours with all logits."""

    name = "ours-stored"

    def memory(self, case: HeadCase) -> int:
        """Enough for all logits, and in float16 for the sum."""
        return case.logits_bytes + 4 * case.shape[1] * case.shape[2]


class Bounded(OursHead):
    """Ours within 0.6 GB, exact."""

    name = "ours-bounded"

    def memory(self, case: HeadCase) -> int:
        """0.6 GB."""
        return min(600_000_000, case.logits_bytes * 3 // 4)


class Small(Bounded):
    """Ours within 0.6 GB, with the gradient of the weight added up in its own dtype."""

    name, slack, acc_dtype = "ours-small", 2.0, "bfloat16"


class Columns(OursHead):
    """Ours within 0.2 GB."""

    name = "ours-columns"

    def memory(self, case: HeadCase) -> int:
        """0.2 GB."""
        return min(200_000_000, case.logits_bytes // 3)


class TorchHead(Peer):
    """PyTorch's linear layer and the operations on its logits."""

    name, distribution = "torch", "torch"

    def forward(self, case: Case) -> Function:
        """`linear`, then `cross_entropy` or the operations of libraries for reinforcement learning."""
        return on_logits(case)


class CompiledHead(AsCompiled, TorchHead):
    """The same under torch.compile."""


class TorchLinear(Peer):
    """PyTorch's own function, which has chunks of tokens."""

    name, distribution, operations = "torch-linear", "torch", (LOSS,)

    def why_absent(self) -> str | None:
        """Older PyTorch has no such function."""
        from torch.nn import functional

        return None if hasattr(functional, LOSS) else f"torch.nn.functional has no {LOSS} here"

    def forward(self, case: Case) -> Function:
        """`torch.nn.functional.linear_cross_entropy` as it is."""
        from torch.nn import functional

        function: Function = getattr(functional, LOSS)
        return function


class Checkpointed(Peer):
    """PyTorch's operations on chunks of tokens, whose float32 logits the backward pass makes again."""

    name, operations = "torch-chunks", (LOGPROBS,)

    def forward(self, case: Case) -> Function:
        """Chunks under `torch.utils.checkpoint`."""
        import torch
        from torch.utils.checkpoint import checkpoint

        chunk = on_logits(case)

        def forward(x: Any, weight: Any, target: Any) -> Any:
            parts = zip(x.split(TOKENS_AT_ONCE), target.split(TOKENS_AT_ONCE), strict=True)
            found: Any = [checkpoint(chunk, one, weight, its_target, use_reentrant=False) for one, its_target in parts]
            return tuple(torch.cat(outputs) for outputs in zip(*found, strict=True))

        return forward


class LigerHead(ForGpus):
    """Liger-Kernel's fused linear cross-entropy; its losses and entropies of tokens."""

    name, module, distribution = Liger.name, "liger_kernel.ops", Liger.distribution
    operations = LOSS, LOGPROBS

    def forward(self, case: Case) -> Function:
        """The autograd functions, without the results beside the loss."""
        ops = importlib.import_module(self.module)
        if case.operation == LOGPROBS:
            scaled = ops.LigerFusedLinearScaledCrossEntropyFunction.apply

            def tokens(x: Any, weight: Any, target: Any) -> Any:
                loss, entropy = scaled(x, weight, target, return_entropy=True)
                return -loss, entropy

            return tokens
        apply = ops.LigerFusedLinearCrossEntropyFunction.apply

        def forward(x: Any, weight: Any, target: Any) -> Any:
            found = apply(x, weight, target)
            return found[0] if isinstance(found, tuple) else found

        return forward


class QuackHead(ForGpus):
    """quack's linear cross-entropy in chunks of tokens."""

    name, module, distribution = Quack.name, "quack.linear_cross_entropy", Quack.distribution
    operations = (LOSS,)

    def forward(self, case: Case) -> Function:
        """Its public function."""
        return self.named("chunked_linear_cross_entropy")


class Cut(ForGpus):
    """cut-cross-entropy, which leaves out small gradients.

    Attributes:
        impl: Its name of the implementation.
    """

    name, module, distribution = "cce", "cut_cross_entropy", "cut-cross-entropy"
    operations, impl = (LOSS,), "cce"
    # It leaves them out by design, and the table shows the error.
    slack = 100.0

    def forward(self, case: Case) -> Function:
        """Its public function with this implementation."""
        return partial(self.named("linear_cross_entropy"), impl=self.impl)


class CutExact(Cut):
    """cut-cross-entropy with all gradients, added up in float32."""

    name, impl = "cce-exact", "cce_exact"
    slack = float(OTHERS_SLACK)


def on_logits(case: Case) -> Function:
    """From input, weight and target to the outputs, by PyTorch's operations on all logits."""
    import torch
    from torch.nn.functional import cross_entropy, linear

    if case.operation == LOSS:
        return lambda x, weight, target: cross_entropy(linear(x, weight), target)
    wide = getattr(torch, case.accumulator)
    return lambda x, weight, target: log_probabilities(linear(x, weight).to(wide), target)


class JaxHead(Programs):
    """XLA on all logits."""

    name, distribution = "jax", "jax"

    def function(self, case: Case) -> Function:
        """The gradients of input and weight, and the outputs."""
        return called(case, self.of_arrays(case))

    def of_arrays(self, case: Case) -> Function:
        """The function from input, weight and target to the outputs."""

        def on_logits(x: Any, weight: Any, target: Any) -> Any:
            logprob, entropy = in_jax((x @ weight.T).astype(case.accumulator), target)
            return -logprob.mean().astype(x.dtype) if case.operation == LOSS else (logprob, entropy)

        return on_logits


class OursInJaxHead(JaxHead):
    """Our functions for JAX with their usual memory."""

    name, module, ours = "jax-ours", "onlinesoftmax", True
    slack = 1.0

    def of_arrays(self, case: Case) -> Function:
        """The public function."""
        from onlinesoftmax import jax

        return public_head(case, jax, {})


HEAD_PEERS: dict[str, type[Peer]] = by_name(
    Stored, Small, Bounded, Columns, TorchHead, CompiledHead, TorchLinear, Checkpointed, LigerHead, QuackHead, Cut,
    CutExact, OursInJaxHead, JaxHead,
)  # fmt: skip
"""The ways beside ours with its usual memory, by their names on the command line."""
