"""The exchanges of one call, in forward and backward.

Collectives are counted where PyTorch dispatches them, and messages through peer memory where kernels are launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ....kernels.cuda.shard_mail import MAIL
from ..cases import STATISTICS, Case

SENT = {
    "_allgather_base_": 1, "allgather_": 1, "allgather_into_tensor_coalesced_": 1, "allreduce_": 0, "broadcast_": 0,
    "_reduce_scatter_base_": 1, "reduce_scatter_": 1, "alltoall_": 1, "alltoall_base_": 1,
    "all_gather_into_tensor": 0, "all_gather_into_tensor_coalesced": 0, "all_reduce": 0, "all_reduce_": 0,
    "all_reduce_coalesced": 0, "broadcast": 0, "reduce_scatter_tensor": 0, "all_to_all_single": 0,
}  # fmt: skip
"""Position of the argument that a process gives to a collective, by the name of PyTorch's operator."""

NAMESPACES = ("c10d", "_c10d_functional")
"""Namespaces of the operators that communicate."""

NO_DATA = ("barrier", "wait_tensor", "_wrap_tensor_autograd")
"""Operators of these namespaces that move no tensor."""


class Collectives(NamedTuple):
    """The exchanges of one call on this process.

    Attributes:
        number: Number of collectives.
        sent_bytes: Bytes of the tensors that this process gives to them, and of its messages to each other process.
        by_peer_memory: True where kernels sent messages.
        unknown: Operators that communicate and are not in the table SENT; they are not counted.
    """

    number: int
    sent_bytes: int
    by_peer_memory: bool
    unknown: tuple[str, ...]


def collectives_of(call: Callable[[], Any]) -> Collectives:
    """Run a call and count its exchanges."""
    counter, before = _Counter(), _message_bytes()
    with counter:
        call()
    messages = _message_bytes() - before
    unknown = tuple(dict.fromkeys(counter.unknown))
    return Collectives(len(counter.sent), sum(counter.sent) + messages, messages > 0, unknown)


def _message_bytes() -> int:
    """Bytes that this process has sent to each other process through peer memory."""
    return 8 * sum(mail.sent for mail in MAIL.values())


class _Counter(TorchDispatchMode):
    """Sees every operator of a call, those of autograd's threads too."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.unknown: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # The DTensor first becomes operators on local tensors, which come here again.
            return NotImplemented
        if getattr(func, "namespace", None) in NAMESPACES:
            name = func.overloadpacket.__name__
            if name in SENT:
                self.sent.append(_nbytes(args[SENT[name]]))
            elif name not in NO_DATA:
                self.unknown.append(name)
        return func(*args, **(kwargs or {}))


def _nbytes(given: Any) -> int:
    """Bytes of a tensor, or of all tensors in lists."""
    return int(given.nbytes) if isinstance(given, torch.Tensor) else sum(map(_nbytes, given))


def row_bytes(case: Case, by_peer_memory: bool = False) -> int:
    """Bytes per row that a process of ours sends in a call, by the formulas of docs/distributed.md.

    In a collective, forward sends numbers of the accumulator's dtype: m and l; the score of the target for a result per
    row; the sum for the entropy.  Backward of an operation with a result per element sends one float64 number.

    Through peer memory, 32 bits of the same numbers travel in 64 bits, and sums of 32-bit logits have 64 bits.

    >>> row_bytes(Case("softmax", (4, 8), 1, "bfloat16")), row_bytes(Case("token_logprobs", (4, 8), 1, "float64"))
    (8, 32)
    >>> row_bytes(Case("softmax", (4, 8), 1, "bfloat16"), True), row_bytes(Case("softmax", (4, 8), 1, "float32"), True)
    (16, 24)
    """
    if by_peer_memory:
        m = 2 if case.dtype == "float64" else 1
        entropy = "entropy" in STATISTICS[case.operation]
        a_sum = 2 * m if case.dtype in ("float32", "float64") or entropy else 1
        forward = m + (1 + entropy) * a_sum + m * case.declaration.has_target
        backward = (m + a_sum) * (case.with_gradient and not case.declaration.per_row)
        return 8 * (forward + backward)
    numbers = 2 + case.declaration.per_row + len(STATISTICS[case.operation])
    backward = case.with_gradient and not case.declaration.per_row
    return numbers * (8 if case.dtype == "float64" else 4) + 8 * backward
