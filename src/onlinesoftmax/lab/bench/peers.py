"""The peers: our library, PyTorch, and what libraries for NVIDIA GPUs have in common."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from ...planner.plan import PlanError
from . import formulas
from .cases import Case, Inputs
from .formulas import Function, with_gradient

P = TypeVar("P", bound="Peer")


class Peer:
    """A library to compare.

    Attributes:
        name: Its name in tables and on the command line.
        distribution: Package to install, whose version is recorded.
        module: Module that an importer of the library names.
        flushes: Number of flushes of the L2 cache that take longer than the host needs to queue one call.
        in_torch: True where PyTorch's allocator gives the memory of a call.
        ours: True for our library, whose results may be no further off than the framework's own.
        overwrites: Names of the operations whose call with a gradient overwrites the input.
        operations: Names of the operations that it has; empty for all.
        device_type: "cuda" or "cpu", where the comparison runs.
        lacks: Note for tables: what it does not return.
        group: The process group of sharded rows; None where one process has all.
    """

    name: str
    distribution: str | None = None
    module = "torch"
    flushes, in_torch, ours = 1, True, False
    overwrites: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    lacks: ClassVar[Any] = ""
    group: Any = None

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def why_absent(self) -> str | None:
        """The reason why the library cannot take part on this machine; None when it can."""
        return None

    def supports(self, case: Case) -> str | None:
        """The reason why the case is not given to the library; None when it is.  The library may still raise."""
        return f"has no {case.operation}" if self.operations and case.operation not in self.operations else None

    def arguments(self, case: Case, inputs: Inputs) -> Inputs:
        """The tensors of a call: with a gradient the first requires one, and is a copy where the call overwrites it."""
        if not case.with_gradient:
            return inputs
        x, *more = inputs
        x = x.clone() if case.operation in self.overwrites else x.detach()
        return (x.requires_grad_(), *more)

    def forward(self, case: Any) -> Function:
        """The library's function for a call without its gradient, or for a gradient alone."""
        raise NotImplementedError

    def prepare(self, case: Case) -> Function:
        """The function that is timed: `forward`, with its gradient where the case has one."""
        return with_gradient(case, self.forward(case))

    def repeated(self, case: Case) -> Function:
        """The function that makes all calls of the case."""
        return in_a_row(self.prepare(case), case.calls)

    def returns(self, case: Case) -> Case:
        """The case whose results the call returns: those of one process may be a part."""
        return case

    def whole(self, case: Case, found: Any) -> Any:
        """The result of the whole case, from what the call returns."""
        return found

    def facts(self, case: Case, call: Callable[[], Any], device: Any) -> dict[str, Any]:
        """Fields of the result that a call without timing gives: the memory that it takes."""
        from .inputs import extra_bytes

        return {"extra_bytes": extra_bytes(call, device) if self.in_torch else None}

    def note(self, case: Any, x: Any, *more: Any) -> str:
        """A note for tables about a case with these tensors: the way of the call, or what it does not return."""
        return str(self.lacks)

    def prepare_out(self, case: Case) -> Function | None:
        """The function of the input and of a tensor that gets the result; None where the library has none."""
        return None


class Ours(Peer):
    """Our library: its public functions, and its gradients with or without autograd."""

    name, framework, module, ours = "ours", "torch", "onlinesoftmax", True

    def __init__(self, device_type: str, backend: str | None = None, strategy: str | None = None) -> None:
        super().__init__(device_type)
        self.backend, self.strategy = backend, strategy

    def supports(self, case: Case) -> str | None:
        """Everything but gradients on a CPU, where PyTorch's own backward runs unless the interpreter is forced."""
        if case.declaration.backward and self.device_type == "cpu" and self.backend != "triton":
            return "on a CPU PyTorch's own backward runs"
        return None

    def copy(self, x: Any, calls: int = 1) -> Function:
        """The function of a tensor with which the framework makes so many copies, one after the other."""
        return x.new_empty(x.shape).copy_ if calls == 1 else in_a_row(lambda a: a.clone(), calls)

    def own(self, case: Case) -> Function:
        """The framework's own function."""
        return formulas.own(case)

    def yardstick(self, case: Case) -> Function:
        """A function of the framework whose error ours may not exceed.

        Elementary operations in 16 bits round every step; their error would hide any error of ours, so they are
        computed in float32.
        """
        return formulas.written_out(case, wide=True) if formulas.is_written_out(case) else self.own(case)

    def forward(self, case: Case) -> Function:
        """The function with the forced backend and strategy."""
        from ... import api

        return self._gradient(case) if case.declaration.backward else public_function(case, api, self._forced())

    def prepare_out(self, case: Case) -> Function | None:
        """The function with `out=`."""
        from ... import api

        return _with_out(getattr(api, case.operation), case, self._forced())

    def _gradient(self, case: Case) -> Function:
        import torch

        from ...core.call import Call, Settings
        from ...core.task import Choice
        from ...torch.gradients import gradient_call
        from ...torch.prepare import run

        dtype, gradient = getattr(torch, case.dtype), case.declaration
        forward = gradient.forward
        asked = Call(forward, None, Settings(case.dim, choice=Choice(self.backend, self.strategy)))
        if "lse" in gradient.row_operands:
            return lambda x, dy, lse: run(gradient_call(asked, {"x": x, "lse": lse}, {"dy": dy}, dtype))
        return lambda y, dy: run(gradient_call(asked, {"y": y}, {"dy": dy}, dtype))

    def _forced(self) -> dict[str, str]:
        """The arguments that force a plan; users leave out the others."""
        forced = {"backend": self.backend, "strategy": self.strategy}
        return {name: value for name, value in forced.items() if value is not None}


class Torch(Peer):
    """PyTorch's own function."""

    name = "torch"
    distribution = "torch"

    def forward(self, case: Case) -> Function:
        """`torch.softmax` and the like, their gradients, or elementary operations for the scores and then these."""
        return formulas.own(case.without_gradient)

    def prepare_out(self, case: Case) -> Function | None:
        """The function with `out=`."""
        import torch

        return _with_out(getattr(torch, case.operation, None), case, {})


class Compiled(Torch):
    """PyTorch's function under torch.compile, for exactly this shape.

    Attributes:
        dynamic: The argument of torch.compile: False compiles for exactly this shape.
    """

    name = "compile"
    dynamic: bool | None = False

    def forward(self, case: Case) -> Function:
        """The compiled function; autograd runs the backward pass that was compiled with it."""
        # PyTorch's own gradients are calls that its compiler does not look into.
        function = formulas.written_out(case) if case.declaration.backward else super().forward(case)
        return compiled(function, self.dynamic)

    def prepare_out(self, case: Case) -> Function | None:
        """Nothing: a compiled function is called without `out=`."""
        return None


class AsCompiled(Peer):
    """Another peer's function under torch.compile, for exactly this shape; that peer is the next base class."""

    name = Compiled.name

    def forward(self, case: Any) -> Function:
        """A fresh compilation."""
        return compiled(super().forward(case))


def by_name(*peers: type[P]) -> dict[str, type[P]]:
    """Peers by their names on the command line."""
    return {peer.name: peer for peer in peers}


def compiled(function: Function, dynamic: bool | None = False) -> Function:
    """A fresh compilation: after eight shapes of one function dynamo falls back to eager."""
    import torch

    torch._dynamo.reset()
    found: Function = torch.compile(function, dynamic=dynamic)
    return found


def in_a_row(function: Function, calls: int, between: Function = lambda y: y) -> Function:
    """Calls of a function, each of the result of the one before; the tensors beside the first stay the same."""

    def all_calls(x: Any, *more: Any) -> Any:
        y = function(x, *more)
        for _ in range(calls - 1):
            y = function(between(y), *more)
        return y

    return all_calls


def public_function(case: Case, module: Any, given: dict[str, Any]) -> Function:
    """The public function of this name in a module of ours, as a function of the tensors of a case.

    `given` has further arguments.  Users leave out those that have their default value; passing None would add to the
    measured host time.
    """
    function, dim = getattr(module, case.operation), case.dim
    options, beside = case.option_values | given, case.option_tensors
    if case.reduction:
        options |= {} if case.reduces_rows else {"reduction": case.reduction}
        return lambda x, target: function(x, target, **options)
    if case.declaration.has_target:
        return lambda x, target: function(x, target, dim, **options)[:2]
    if not options and not beside:
        return lambda x: function(x, dim)
    return lambda x, *more: function(x, dim, **options, **dict(zip(beside, more, strict=True)))


def _with_out(function: Any, case: Case, forced: dict[str, str]) -> Function | None:
    dim = case.dim
    return None if case.declaration.has_target else lambda x, y: function(x, dim, out=y, **forced)


def reasons_of(error: PlanError) -> str:
    r"""The reasons of an error about a plan, in one line.

    >>> reasons_of(PlanError("no plan for softmax:\n  cuda/row: no GPU\n  triton/row: no GPU"))
    'cuda/row: no GPU; triton/row: no GPU'
    """
    # The first line repeats the case; the reasons follow.
    return "; ".join([line.strip() for line in str(error).splitlines()[1:]] or [str(error)])


def first_line(error: BaseException) -> str:
    r"""The first line of an error's message, short enough for a table; the error's type where there is no message.

    Codes that colour a terminal are left out.

    >>> first_line(AssertionError()), first_line(ValueError("no")), first_line(ValueError("\n\x1b[91mred\x1b[0m"))
    ('AssertionError', 'no', 'red')
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return line if len(line) <= 160 else line[:157] + "..."


class ForGpus(Peer):
    """A library with functions over the last dimension for NVIDIA GPUs.

    Attributes:
        matrices_only: The reason why a case of other than two dimensions is not given to it; empty where all are.
    """

    matrices_only = ""

    def why_absent(self) -> str | None:
        """The library is not installed or cannot be imported, or there is no GPU."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"not installed: pip install {self.distribution}"
        if self.device_type != "cuda":
            return "needs an NVIDIA GPU"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a foreign package may fail in any way; the reason is reported
            return f"cannot be imported: {first_line(error)}"
        return None

    def supports(self, case: Case) -> str | None:
        """Only its own operations over the last dimension, without score options."""
        if reason := super().supports(case):
            return reason
        if case.fused:
            return f"has no {' or '.join(case.fused)}"
        if case.dim != len(case.shape) - 1:
            return "takes only the last dimension"
        if self.matrices_only and len(case.shape) != 2:
            return self.matrices_only
        return None

    def named(self, name: str) -> Function:
        """The function of this name in its module."""
        function: Function = getattr(importlib.import_module(self.module), name)
        return function
