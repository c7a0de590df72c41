"""The way that a call of `verify` would take (sampling/), and why not another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..core.device import Device
from ..core.task import ITEMSIZE
from ..kernels import registry
from ..sampling.kernels.verify import shapes_of
from ..sampling.rules import Parameters, checked_parameters
from .rows import described
from .sampling import FILTERED, FILTERS, INTEGER_BYTES, is_in_rows, reads_of, without_data
from .ways import EAGER, OtherWay, WayExplanation, why_no_cuda

VERIFY = "verify"

KERNEL = "verify.cuh"
"""Name of the kernel that decides: its file in sampling/kernels."""


class Drafts(NamedTuple):
    """The part of a call that its way depends on.

    Attributes:
        rows: Number of rows of drafts.
        n: Number of drafts of a row.
        tokens: Number of tokens of the vocabulary.
        dtype: Name of the dtype of the logits.
        framework: "torch" or "jax".
        adjacent: True where a kernel reads the logits of the target model in place, as `Asked.adjacent`.
        filters: Names of the filters that are given.
        listed: As Parameters.listed.
        draft_logits: True where the draft model has logits.
    """

    rows: int
    n: int
    tokens: int
    dtype: str
    framework: str
    adjacent: bool
    filters: tuple[str, ...]
    listed: int | None
    draft_logits: bool


class Launch(NamedTuple):
    """A launch of a call.

    Attributes:
        name: Name of the kernel.
        rows: Number of positions, or of rows of drafts.
        blocks: Blocks of each.
        threads: Threads of a block.
    """

    name: str
    rows: int
    blocks: int
    threads: int


class VerifyKernels(NamedTuple):
    """The kernels of a call.

    Attributes:
        launches: Their launches, in order.
        reason: One sentence: why they take it.
    """

    launches: tuple[Launch, ...]
    reason: str


@dataclass(frozen=True, repr=False)
class VerifyExplanation(WayExplanation):
    """The result of `explain` for `verify`; `str()` of it is a text to read."""

    function = VERIFY
    problem: Drafts
    kernel: VerifyKernels | None

    @property
    def name(self) -> str:
        """Name of the kernel that decides, or that of EAGER."""
        return KERNEL if self.kernel else EAGER[self.problem.framework]

    @property
    def asked(self) -> str:
        """The call in one line."""
        q = self.problem
        given = ", ".join([*q.filters, *(["draft_logits"] if q.draft_logits else [])])
        return (
            f"{VERIFY} of {q.rows} x {q.n} drafts of {q.tokens} tokens, {q.dtype}{f' with {given}' if given else ''} "
            f"on {self.device.name}"
        )

    @property
    def read_bytes(self) -> int:
        """The bytes of the logits of both models."""
        q = self.problem
        return q.rows * (q.n + 1 + q.n * q.draft_logits) * q.tokens * ITEMSIZE[q.dtype]

    @property
    def written_bytes(self) -> int:
        """The bytes of accepted and valid of each row, and of tokens and log-probabilities of its positions."""
        wide, integer = 8 if self.problem.dtype == "float64" else 4, INTEGER_BYTES[self.problem.framework]
        return self.problem.rows * (1 + integer + (self.problem.n + 1) * (integer + wide))

    @property
    def launch(self) -> str:
        """The blocks and threads of the kernels."""
        assert self.kernel is not None
        launches = [
            f"{name} {rows} x {blocks} blocks of {threads} threads"
            for name, rows, blocks, threads in self.kernel.launches
        ]
        return f"{len(launches)} launches: {', '.join(launches)}"

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        found = super().as_dict()
        if self.kernel:
            found["kernel"] |= {"launches": [launch._asdict() for launch in self.kernel.launches]}
        return found


def described_verify(x: Any, dtype: Any, asked: dict[str, Any]) -> Drafts:
    """Return the properties that decide the way of a call on torch tensors; the checks are those of the function.

    Args:
        x: Logits of the target model: a tensor or a shape.
        dtype: Dtype of a shape.
        asked: top_k, top_p and min_p, as in the function; and draft_logits, True where the draft model has some.
    """
    with registry.needing("torch", "sampling"):
        import torch

        from ..sampling import arguments

    shape, like = described(x, dtype)
    x = without_data(x if torch.is_tensor(x) else shape, like.dtype)
    logits = arguments.checked_logits(VERIFY, x, -1, 1.0, None, None, None, "target_logits")
    *rows, places = logits.rows or (0,)
    drafts = torch.empty((*rows, max(places - 1, 0)), dtype=torch.int64, device="meta")
    of_drafts = arguments.checked_drafts(logits, drafts, None)
    k, p, least = (without_data(asked[name]) for name in FILTERS)
    parameters = arguments.checked_parameters(of_drafts, 1.0, k, p, least, "keep")
    adjacent = is_in_rows(x)
    return _drafts((tuple(rows), places - 1, logits.tokens), like.dtype, "torch", adjacent, parameters, asked)


def verify_in_jax(x: Any, dtype: Any, asked: dict[str, Any]) -> Drafts:
    """The same for arrays of JAX."""
    with registry.needing("jax", "sampling"):
        from ..jax.sampling import arguments

    shape, like = described(x, dtype)
    if len(shape) < 2 or 0 in shape[-2:]:
        raise ValueError(f"{VERIFY}: target_logits must have shape (..., n + 1, tokens), got {shape}")
    *rows, places, tokens = shape
    of_rows = partial(arguments.checked_of_rows, VERIFY, tuple(rows))
    k, p, least = (asked[name] for name in FILTERS)
    given = checked_parameters(VERIFY, tokens, of_rows, 1.0, (k, p, least), "keep")
    return _drafts((tuple(rows), places - 1, tokens), like.dtype, "jax", True, given, asked)


def _drafts(
    sizes: tuple[tuple[int, ...], int, int], dtype: str, framework: str, adjacent: bool, given: Parameters,
    asked: dict[str, Any],
) -> Drafts:  # fmt: skip
    (rows, n, tokens), draft = sizes, bool(asked["draft_logits"])
    filters = tuple(name for name in FILTERS if getattr(given, name) is not None)
    return Drafts(math.prod(rows), n, tokens, dtype, framework, adjacent, filters, given.listed(1), draft)


def explain_verify(problem: Drafts, device: Device, named: bool) -> VerifyExplanation:
    """The way of a call, and why not another.

    Args:
        problem: What the way depends on.
        device: The device.
        named: True for a device that this machine need not have.
    """
    found = _kernels(problem, device, named)
    if isinstance(found, str):
        return VerifyExplanation(problem, device, None, "no kernel takes the call", (OtherWay("a kernel", found),))
    other = OtherWay(EAGER[problem.framework], "kernels take the call")
    return VerifyExplanation(problem, device, found, found.reason, (other,))


def _kernels(problem: Drafts, device: Device, named: bool) -> VerifyKernels | str:
    """The kernels of a call; or, in one sentence, why none take it."""
    q = problem
    if reason := why_no_cuda(q.framework, device, named):
        return reason
    shapes = shapes_of(q.rows, q.n, q.tokens, (q.dtype, True, q.draft_logits), device, q.listed)
    if isinstance(shapes, str):
        return shapes
    launches = [
        Launch(FILTERED, q.rows * each, shape.cluster, shape.threads)
        for shape, each in zip(shapes.positions, shapes.each, strict=True)
    ]
    last = Launch(KERNEL, q.rows, shapes.decision.cluster, shapes.decision.threads)
    copied = "" if q.adjacent else "PyTorch copies the logits, so that those of a position are adjacent; then "
    models = "both models keep" if len(launches) == 2 else "the target model keeps"
    reason = f"{copied}{FILTERED} finds first what {models} at each position, in {reads_of(q.filters)}"
    return VerifyKernels((*launches, last), reason)
