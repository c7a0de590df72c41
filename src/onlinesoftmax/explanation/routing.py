"""The way that a call of `route` would take (routing/), and why not another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.device import Device
from ..core.task import ITEMSIZE
from ..kernels import registry
from ..routing.kernels import source
from ..routing.rules import Call, Rule, checked_rule
from ..routing.rules import sizes_of as sequences_of
from .rows import described, sizes_of
from .ways import EAGER, OtherWay, WayExplanation, why_no_cuda

ROUTE = "route"

KERNEL = "route.cuh"
"""Name of the kernel: its file in routing/kernels."""


class Gate(NamedTuple):
    """The part of a call that its way depends on.

    Attributes:
        sequences, tokens: Number of sequences, and of the tokens of each.
        dtype: Name of the dtype of the logits.
        framework: "torch" or "jax".
        rule: How experts are chosen and weighted.
        bias: True where a bias is given.
        prob_sums: True where the sums of probabilities are wanted.
    """

    sequences: int
    tokens: int
    dtype: str
    framework: str
    rule: Rule
    bias: bool
    prob_sums: bool


class RouteKernel(NamedTuple):
    """The kernel of a call.

    Attributes:
        lanes: Threads that share a token.
        threads: Threads of a block.
        blocks: Blocks of a sequence.
        reason: One sentence: why it takes the call.
    """

    lanes: int
    threads: int
    blocks: int
    reason: str


@dataclass(frozen=True, repr=False)
class RouteExplanation(WayExplanation):
    """The result of `explain` for `route`; `str()` of it is a text to read."""

    function = ROUTE
    problem: Gate
    kernel: RouteKernel | None

    @property
    def name(self) -> str:
        """Name of the kernel, or that of EAGER."""
        return KERNEL if self.kernel else EAGER[self.problem.framework]

    @property
    def asked(self) -> str:
        """The call in one line."""
        q, rule = self.problem, self.problem.rule
        given = [f"k={rule.k}", f"score={rule.score.value}", *(["order=topk_first"] if rule.topk_first else [])]
        given += [f"groups={rule.groups}", f"group_k={rule.group_k}"] if rule.groups > 1 else []
        given += [name for name in ("bias", "prob_sums") if getattr(q, name)]
        return (
            f"{ROUTE} of {q.sequences * q.tokens} x {rule.experts} {q.dtype}: {', '.join(given)}, on {self.device.name}"
        )

    @property
    def read_bytes(self) -> int:
        """The bytes of the logits."""
        q = self.problem
        return q.sequences * q.tokens * q.rule.experts * ITEMSIZE[q.dtype]

    @property
    def written_bytes(self) -> int:
        """The bytes of weights, indices and lse of each token, and of the counts and sums of each expert."""
        q = self.problem
        wide = 8 if q.dtype == "float64" else 4
        of_experts = q.sequences * q.rule.experts * (4 + (wide if q.prob_sums else 0))
        return q.sequences * q.tokens * (q.rule.k * (wide + 4) + wide) + of_experts

    @property
    def launch(self) -> str:
        """The blocks and threads of the kernel."""
        assert self.kernel is not None
        blocks = f"{self.problem.sequences} x {self.kernel.blocks} blocks of {self.kernel.threads} threads"
        return f"{blocks}, {self.kernel.lanes} for a token"

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        found = super().as_dict()
        rule = self.problem.rule._asdict() | {"score": self.problem.rule.score.value}
        return found | {"problem": found["problem"] | {"rule": rule}}


def explain_route(
    x: Any, dtype: Any, bias: Any, asked: dict[str, Any], framework: str, device: Device, named: bool
) -> RouteExplanation:
    """The way of a call, and why not another; the checks are those of the function.

    Args:
        x: Logits: a tensor, an array or a shape.
        dtype: Dtype of a shape.
        bias: As in the function, or a shape.
        asked: k, score, order, groups, group_k, group_score, renormalize and prob_sums, as in the function.
        framework: "torch" or "jax".
        device: The device.
        named: True for a device that this machine need not have.
    """
    shape, like = described(x, dtype)
    groups = asked["groups"], asked["group_k"], asked["group_score"]
    rest = asked["k"], asked["score"], asked["order"], groups, asked["renormalize"], 1.0
    rule = checked_rule(f"{ROUTE}()", shape[-1], *rest)
    bias = sizes_of("bias", bias) if isinstance(bias, (tuple, list)) else bias
    make = _call_in_jax if framework == "jax" else _call_in_torch
    call, width = make(x, shape, like.dtype, bias, rule, asked["prob_sums"])
    problem = Gate(call.sequences, call.tokens, like.dtype, framework, rule, bias is not None, asked["prob_sums"])
    found = _kernel(call, like.dtype, width, framework, device, named)
    if isinstance(found, str):
        return RouteExplanation(problem, device, None, "no kernel takes the call", (OtherWay("a kernel", found),))
    other = OtherWay(EAGER[framework], "a kernel takes the call")
    return RouteExplanation(problem, device, found, found.reason, (other,))


def _call_in_torch(
    x: Any, shape: tuple[int, ...], dtype: str, bias: Any, rule: Rule, prob_sums: bool
) -> tuple[Call, int]:
    """A call on torch tensors without data, and the logits that an instruction loads."""
    with registry.needing("torch", "routing"):
        import torch

        from ..routing import arguments
        from ..routing.kernels import route_launch
        from ..torch.gradients import adjacent

    if torch.is_tensor(x):
        logits = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    else:
        logits = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    if isinstance(bias, tuple):
        bias = torch.empty(bias)
    bias = bias.to("meta") if torch.is_tensor(bias) else bias
    call = arguments.checked_call(logits, bias, None, None, rule, True, prob_sums)
    return call, route_launch.width_of(adjacent(call.x))


def _call_in_jax(
    x: Any, shape: tuple[int, ...], dtype: str, bias: Any, rule: Rule, prob_sums: bool
) -> tuple[Call, int]:
    """A call on arrays of JAX without data, and the logits that an instruction loads."""
    with registry.needing("jax", "routing"):
        import jax

        from ..jax.routing.run import checked_operands

    # The checks need no dtype but a floating one, and JAX may lack float64.
    logits = jax.ShapeDtypeStruct(shape, "float32")
    given = jax.ShapeDtypeStruct(bias, "float32") if isinstance(bias, tuple) else bias
    found = jax.eval_shape(lambda x, bias: checked_operands(x, bias, None, None, rule), logits, given)
    sequences, tokens = sequences_of(shape)
    call = Call(logits, found.get("bias"), None, None, rule, sequences, tokens, True, prob_sums)
    return call, source.width_at(dtype, shape[-1])


def _kernel(call: Call, dtype: str, width: int, framework: str, device: Device, named: bool) -> RouteKernel | str:
    """The kernel of a call; or, in one sentence, why none takes it."""
    if reason := why_no_cuda(framework, device, named):
        return reason
    shape = source.kernel_of(call, dtype, width, device)
    if isinstance(shape, str):
        return shape
    blocks = source.parts_of(shape, call.tokens, call.sequences, device)
    return RouteKernel(shape.team, shape.threads, blocks, "one read of the logits, which stay in registers")
