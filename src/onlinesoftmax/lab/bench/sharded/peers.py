"""The peers: our sharded functions, and other ways to compute rows whose columns lie on several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from .... import api, distributed
from ....core.processes import gathered
from ....kernels.cuda.process_mailboxes import MAIL
from .. import formulas
from ..cases import STATISTICS, Case, Inputs
from ..formulas import Function
from ..inputs import extra_bytes
from ..peers import Ours, Peer, by_name, public_function
from .team import InTeam, Team

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


class Member(InTeam):
    """A way to compute a sharded case: a function of the tensors of this process.

    Attributes:
        has_whole_rows: True where every process computes whole rows of whole tensors, without an exchange.
    """

    has_whole_rows = False

    def arguments(self, case: Case, inputs: Inputs) -> Inputs:
        """The tensors of this process; with a gradient the first requires one."""
        return super().arguments(case, self.team.cut(case, inputs))

    def returns(self, case: Case) -> Case:
        """The case with the columns of this process."""
        return case if self.has_whole_rows else self.team.local(case)

    def parts(self, found: Any) -> tuple[Any, ...]:
        """The results of this process as plain tensors."""
        return found if isinstance(found, tuple) else (found,)

    def whole(self, case: Case, found: Any) -> Any:
        """The results of all processes, put together."""
        parts = self.parts(found)
        if self.has_whole_rows:
            return parts
        return tuple(
            self.team.joined(case, y) if returned.kind == "element" else y
            for returned, y in zip(case.returned, parts, strict=True)
        )

    def facts(self, case: Case, call: Callable[[], Any], device: Any) -> dict[str, Any]:
        """The memory that a call takes, and its exchanges."""
        exchanged = collectives_of(call)
        formula = row_bytes(case, exchanged.by_peer_memory) if self.ours and not self.has_whole_rows else None
        return {
            "extra_bytes": extra_bytes(lambda: self.parts(call()), device), "collectives": exchanged.number,
            "sent_row_bytes": exchanged.sent_bytes / case.rows, "formula_row_bytes": formula,
            "analysis": f"not counted: {', '.join(exchanged.unknown)}" if exchanged.unknown else "",
        }  # fmt: skip


class OursSharded(Member):
    """Our functions in `onlinesoftmax.distributed`, which are told where the columns of the process are.

    Attributes:
        exchange: The argument of this name; None where our functions choose.
        told: True where the functions are told where the columns are.
    """

    name, ours, told = "ours", True, True

    exchange: str | None = None

    def __init__(self, team: Team, backend: str | None = None, strategy: str | None = None) -> None:
        super().__init__(team)
        forced = {"backend": backend, "strategy": strategy, "exchange": self.exchange}
        self._forced = {name: value for name, value in forced.items() if value is not None}

    def forward(self, case: Case) -> Function:
        """Our function with the arguments that are forced, and those that it is told."""
        told = {"shards": self.team.shards(case)} if self.told else {}
        return public_function(case, distributed, {"group": self.group, **told, **self._forced})


class OursByCollective(OursSharded):
    """The same functions, which exchange states by a collective, also where peer memory could be used."""

    name, exchange = "collective", "collective"


class OursUntold(OursSharded):
    """The same functions without `shards=`: every call compares the calls of the processes."""

    name, told = "without-shards", False


class OursWhole(Member):
    """Our function on the whole rows: every process computes all of them, as one GPU would."""

    name, ours, has_whole_rows = "one-process", True, True

    def arguments(self, case: Case, inputs: Inputs) -> Inputs:
        """The whole tensors."""
        return Peer.arguments(self, case, inputs)

    def forward(self, case: Case) -> Function:
        """Our public function."""
        return Ours(self.device_type).forward(case)


class _OfDTensors(Member):
    """A function of a DTensor that is sharded along the softmax dimension, on a mesh of one dimension."""

    def arguments(self, case: Case, inputs: Inputs) -> Inputs:
        """DTensors of logits and incoming gradients; targets are plain tensors."""
        mesh = init_device_mesh(self.device_type, (self.team.size,))
        local = super().arguments(case, inputs)

        def wrapped(name: str, whole: Any, part: Any) -> Any:
            if not whole.is_floating_point():
                return part
            placement = Shard(case.dim) if case.shape_of(name) == case.shape else Replicate()
            t = DTensor.from_local(
                part.detach(), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            return t.requires_grad_(part.requires_grad)

        return tuple(map(wrapped, case.tensors, inputs, local))

    def parts(self, found: Any) -> tuple[Any, ...]:
        """The local tensors of the results."""
        return tuple(y.to_local() for y in super().parts(found))


class OursOnDTensors(_OfDTensors):
    """Our ordinary functions, called with a DTensor."""

    name, ours = "dtensor", True

    def forward(self, case: Case) -> Function:
        """Our public function."""
        return public_function(case, api, {})


class LossParallel(_OfDTensors):
    """PyTorch's `loss_parallel`, around forward and backward of its own cross-entropy."""

    name, operations = "loss-parallel", ("cross_entropy",)

    def prepare(self, case: Case) -> Function:
        """PyTorch's function under its context manager."""
        run = formulas.own(case)

        def function(*tensors: Any) -> Any:
            with loss_parallel():
                return run(*tensors)

        return function


class AllGather(Member):
    """An all-gather of the logits, then PyTorch's own function on whole rows on every process."""

    name = "all-gather"

    def supports(self, case: Case) -> str | None:
        """Equal shards: an all-gather takes as many columns from every process."""
        return "takes equal shards only" if case.shape[case.dim] % self.team.size else None

    def forward(self, case: Case) -> Function:
        """PyTorch's function of the gathered logits; of a result per element, each process keeps its columns."""
        team, own, dim = self.team, formulas.own(case.without_gradient), case.dim
        first, cols, _ = team.shards(case)
        elements = not case.declaration.per_row

        def forward(x: Any, *more: Any) -> Any:
            y = own(_Gathered.apply(x, team, dim, elements), *more)
            return y.narrow(dim, first, cols) if elements else y

        return forward


class _Gathered(torch.autograd.Function):
    """Whole rows from the columns of all processes.

    If every process computes the same numbers per row, its own gradient of the rows is whole, and backward exchanges
    nothing.  If each process keeps its columns of the result, backward adds the gradients of all processes.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, team: Team, dim: int, adds: bool) -> Any:
        ctx.columns, ctx.group, ctx.adds = (dim, team.rank * x.shape[dim], x.shape[dim]), team.group, adds
        return torch.cat(gathered(x, team.group).unbind(0), dim)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if ctx.adds:
            dy = dy.contiguous()
            dist.all_reduce(dy, group=ctx.group)
        return dy.narrow(*ctx.columns), None, None, None


PEERS: dict[str, type[Member]] = by_name(
    OursUntold, OursByCollective, OursOnDTensors, LossParallel, AllGather, OursWhole,
)  # fmt: skip
"""The peers by name on the command line; all but `loss-parallel` and `all-gather` are our own functions."""
