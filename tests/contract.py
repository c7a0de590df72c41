"""The contract: every declared operation, on every backend and strategy, against the exact result.

Operands, outputs and expected values follow from the declaration of an operation (onlinesoftmax/ops) and from its
formula (ops/reference.py), so whatever is declared is covered.  A result is right when its error is no larger than
that of PyTorch's operations on the same input, plus one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.core.arrays import Array, namespace
from onlinesoftmax.core.call import Call, Settings
from onlinesoftmax.core.declaration import Operand, Operation, accumulator_dtype
from onlinesoftmax.core.options import PLAIN, Functions, ScoreOptions, bits, causal_mask, scores, softcap_slope
from onlinesoftmax.core.task import Choice, output_shape
from onlinesoftmax.lab import verify as verification
from onlinesoftmax.lab.verify import Case
from onlinesoftmax.ops import FORWARD
from onlinesoftmax.ops import OPERATIONS as DECLARED
from onlinesoftmax.ops.reference import evaluate, size_of_terms, with_sums
from onlinesoftmax.planner.strategies import TABLE
from onlinesoftmax.torch import fast_path, prepare

OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(osm, name) for name in FORWARD if not DECLARED[name].has_target and DECLARED[name].runs_on("eager")
}
"""The public functions of an input and a dimension that PyTorch has too."""

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"

# CUDA kernels have no interpreter: without a GPU they are compiled, by tests/kernels/test_cuda.py, and simulated.
PLANS = tuple(
    dict.fromkeys(
        f"{backend}/{strategy}"
        for operation in DECLARED.values()
        for backend, strategy, _ in (*TABLE, *operation.own_strategies)
        if backend != "eager" and (GPU or backend != "cuda")
    )
)
"""Every kernel strategy that runs here, as backend/strategy, also those of a single operation."""

ROW_PLANS = tuple(plan for plan in PLANS if plan != "triton/column")
"""Those that take rows whose elements are neighbours."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Rows of many blocks, slices and tiles, which `cluster` still holds in every dtype.
LONG = Case("3 x 30011", (3, 30011), heavy=True)

CASES = [case for case in (*verification.CASES, LONG) if GPU or not case.heavy]
"""Inputs of every size, layout and special value."""

UNITS = 1.0 if GPU else 1.25
"""Units in the last place that are added to PyTorch's error: the interpreter rounds a multiply-add twice."""


def forced(plan: str) -> dict[str, str]:
    """The arguments that force one of PLANS."""
    backend, _, strategy = plan.partition("/")
    return {"backend": backend, "strategy": strategy}


def outliers(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal numbers, one in a hundred of them times 20: some outputs matter, most underflow."""
    return verification.outliers(torch, *shape).to(dtype).to(device)


class Form(NamedTuple):
    """The form of a call: its outputs, and its optional operands.

    Attributes:
        name: Its name in the names of tests.
        outputs: Names of the outputs that are written.
        given: Names of the optional operands that are given.
        options: True where every score option is given.
    """

    name: str
    outputs: tuple[str, ...]
    given: tuple[str, ...] = ()
    options: bool = False

    def __str__(self) -> str:
        return self.name


def forms_of(operation: Operation) -> list[Form]:
    """The main output alone; every output and operand; the score options too; and each output per call."""
    optional = [operand for operand in operation.operands if operand.optional]
    forms = [Form("plain", (operation.result.name,))]
    outputs = tuple(output.name for output in operation.outputs if output.kind != "call")
    given = tuple(operand.name for operand in optional)
    if optional or len(outputs) > 1:
        forms.append(Form("everything", outputs, given))
    if operation.scores:
        forms.append(Form("options", outputs, given, options=True))
    if GPU:
        # Only CUDA's kernels reduce a call.  Where they do, no row has an incoming gradient.
        given = tuple(operand.name for operand in optional if operand.kind != "row")
        forms += [Form(name, (name,), given) for name in operation.call_outputs]
    return forms


FORMS = [(operation, form) for operation in DECLARED.values() for form in forms_of(operation)]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wide(t: torch.Tensor) -> Any:
    """A tensor as an array, with floating-point numbers in long double."""
    return t.detach().double().cpu().numpy().astype(np.longdouble) if t.is_floating_point() else t.cpu().numpy()


class Inputs:
    """The tensors and numbers of a call, made from the declaration.

    Attributes:
        values: Every operand by name, as the formula takes it; numbers as they are.
        options: The score options.
        wide: Dtype of the accumulator.
    """

    def __init__(self, operation: Operation, form: Form, case: Case, dtype: torch.dtype) -> None:
        self.operation, self.form, self.case, self.dtype = operation, form, case, dtype
        self.logits = case.tensor(dtype, DEVICE)
        self.dim = case.dim % self.logits.dim()
        self.wide = getattr(torch, accumulator_dtype(name_of(dtype)))
        self.generator = torch.Generator().manual_seed(7)
        self.options = self._options() if form.options else PLAIN
        # A gradient that takes no scores reads the result of the forward call.
        x = self.logits if operation.scores else self._saved(operation.forward.result.name, dtype)
        self.values: dict[str, Any] = {"x": x}
        for operand in operation.operands[1:]:
            if not operand.optional or operand.name in form.given:
                self.values[operand.name] = self._value(operand)

    def call(self, plan: str) -> Call:
        """The call with its plan forced."""
        numbers = self.operation.numbers
        operands = {name: bits(float(v)) if name in numbers else v for name, v in self.values.items() if name != "x"}
        settings = Settings(self.dim, None, False, Choice(*plan.split("/")))
        options = self.options if self.form.options else None
        return Call(self.operation, self.values["x"], settings, options, None, operands)

    def _value(self, operand: Operand) -> Any:
        """A value of the kind and the dtype that the declaration names."""
        if operand.number:
            return 2 if operand.dtype == "integer" else 2.0 ** -len(self.values)
        if operand.dtype == "integer":
            return self._columns()
        if operand.name in {output.name for output in self.operation.forward.outputs}:
            return self._saved(operand.name, self.wide)
        if operand.kind == "call":
            return torch.full((), 3.5, dtype=self.wide, device=DEVICE)
        if operand.kind == "element":
            # An optional one has a value for each column, of which some are zero.
            whole = self._random(self.logits.shape)
            return self._as_input(whole) if not operand.optional else self._random(self._size(self.dim)).relu()
        accumulated = self.operation.forward.result.dtype == "accumulator"
        return self._random(self._per_row()).to(self.wide if accumulated else self.dtype)

    def _per_row(self) -> list[int]:
        return [1 if axis == self.dim else size for axis, size in enumerate(self.logits.shape)]

    def _size(self, dim: int) -> list[int]:
        """The shape of a tensor with one value for each index of a dimension."""
        return [size if axis == dim else 1 for axis, size in enumerate(self.logits.shape)]

    def _random(self, shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(DEVICE)

    def _columns(self) -> torch.Tensor:
        """A column for each row; with every operand, some are those of an integer operand, and some are no column."""
        cols, shape = self.logits.shape[self.dim], self._per_row()
        found = torch.arange(int(np.prod(shape))) * 7919 % cols
        if self.form.given:
            found[1::5] = 2
            if {*self.form.outputs}.isdisjoint(self.operation.call_outputs):
                found[2::5], found[4::5] = -1, cols
        return found.to(torch.int32 if self.form.given else torch.int64).reshape(shape).to(DEVICE)

    def _options(self) -> ScoreOptions:
        """Every score option of the operation: a scale for each row, a bias and a mask for each column."""
        named = self.operation.options
        mask = torch.rand(self._size(self.dim), generator=self.generator).to(DEVICE) > 0.25
        mask.select(self.dim, 0).fill_(True)
        return ScoreOptions(
            scale=self._random(self._per_row()),
            softcap=20.0,
            bias=self._random(self._size(self.dim)) if "bias" in named else None,
            mask=mask,
            causal="causal" in named and self.dim > 0,
        )

    def _saved(self, output: str, dtype: torch.dtype) -> torch.Tensor:
        """An output that the forward call keeps for its gradient, rounded once."""
        z, _ = self._scores(self.logits.double())
        exact = evaluate(self.operation.forward.name, namespace(z), {"x": z}, self.dim, output)
        return self._as_input(exact.to(dtype))

    def _as_input(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape of the input in its layout, unless elements of the input share memory."""
        like = self.case.tensor(t.dtype, DEVICE)
        shared = any(stride == 0 and size > 1 for stride, size in zip(like.stride(), like.shape, strict=True))
        return like.copy_(t) if t.shape == like.shape and not shared else t

    def _scores(self, x: Array, capped: bool = True) -> tuple[Array, Array]:
        """The scores of logits, and their derivatives with respect to the logits; with the softcap where `capped`."""
        if not self.form.options:
            return x, 1.0
        options = self.options if capped else self.options._replace(softcap=None)
        of_numpy = isinstance(x, np.ndarray)
        xp = Functions(np.tanh, np.where) if of_numpy else Functions(torch.tanh, torch.where)
        as_x = wide if of_numpy else lambda t: t if t.dtype == torch.bool else t.to(x.dtype)
        tensors = {name: as_x(t) for name, t in options._asdict().items() if isinstance(t, torch.Tensor)}
        options = options._replace(**tensors)
        seen = as_x(causal_mask(torch.arange, self.logits.shape, self.dim, device=DEVICE)) if options.causal else None
        z = scores(xp, x, options, seen)
        slope = options.scale * softcap_slope(xp, x, options)
        for mask in (options.mask, seen):
            slope = slope if mask is None else xp.where(mask, slope, 0.0)
        return z, slope

    def expected(self, output: str, to: Callable[[torch.Tensor], Array]) -> tuple[Array, Array | None]:
        """An output by the formula, and the size of the terms whose difference it is; None where it is none.

        `to` chooses the arithmetic: it makes an array of a tensor.
        """
        values = {name: to(value) if isinstance(value, torch.Tensor) else value for name, value in self.values.items()}
        slope: Array = 1.0
        if self.operation.scores:
            # A softcap can make scores equal whose order an index shows.
            values["x"], slope = self._scores(values["x"], self.operation.output(output).dtype != "index")
        name, xp = self.operation.name, namespace(values["x"])
        y, size = evaluate(name, xp, values, self.dim, output), None
        if self.operation.backward:
            size = size_of_terms(name, xp, with_sums(name, xp, values, self.dim))
        elif self.operation.output(output).kind == "row" and output not in ("m", "l"):
            # Beside the state itself, what a row gives is a difference of its logsumexp.
            size = evaluate(name, xp, values, self.dim, "lse")
        follows = self.operation.follows_input(self.operation.output(output))
        if size is None and follows:
            # Without two terms, an exponent or a slope is a difference, and the gradient in the score stands for them.
            size = y
        if self.form.options and follows:
            # An element that is masked, or in a row that counts for nothing, has no gradient, even where it is NaN.
            y = xp.where((slope == 0) | (y == 0), 0.0, y * slope)
        return y, size


GUARD = 64


@contextmanager
def poisoned() -> Iterator[list[torch.Tensor]]:
    """Every new tensor of a call begins as NaN and lies between guards, which must stay as they are."""
    buffers: list[torch.Tensor] = []
    allocator, make = prepare.allocator, torch.empty_like

    def guarded(*memory: Any) -> torch.Tensor:
        return between(torch.empty_strided(*memory[:2], dtype=memory[2], device=DEVICE))

    def like(t: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        new = make(t, **kwargs)
        return new if new.is_meta else between(new)

    def between(new: torch.Tensor) -> torch.Tensor:
        size = new.untyped_storage().nbytes() // new.itemsize
        buffer = torch.full((size + 2 * GUARD,), 7, dtype=new.dtype, device=new.device)
        buffer[GUARD : GUARD + size] = torch.nan if new.is_floating_point() else -7
        buffers.append(buffer)
        return buffer.as_strided(new.shape, new.stride(), GUARD)

    # A prepared call keeps its allocator.
    fast_path.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "allocator", lambda device: allocator(device) if device.type == "meta" else guarded)
        patch.setattr(torch, "empty_like", like)
        yield buffers
    fast_path.forget()
    for buffer in buffers:
        assert (buffer[:GUARD] == 7).all(), "written before the beginning of an output"
        assert (buffer[-GUARD:] == 7).all(), "written past the end of an output"


def run_case(operation: Operation, form: Form, case: Case, dtype: torch.dtype, plan: str) -> None:
    """One call on the way that every call on a tensor takes, with all its outputs compared."""
    inputs = Inputs(operation, form, case, dtype)
    before = inputs.logits.clone()
    with poisoned() as buffers:
        found = prepare.run(inputs.call(plan), form.outputs)
    assert len(buffers) >= len(form.outputs), "an output is not among the poisoned tensors"
    assert torch.equal(inputs.logits.nan_to_num(nan=3.0), before.nan_to_num(nan=3.0)), "the input was changed"
    for name, ours in zip(form.outputs, found if isinstance(found, tuple) else (found,), strict=True):
        output = operation.output(name)
        assert name_of(ours.dtype) == output.dtype_of(name_of(dtype), name_of(dtype))
        assert ours.shape == output_shape(output, tuple(inputs.logits.shape), inputs.dim)
        exact, terms = inputs.expected(name, wide)
        if output.dtype == "index":
            np.testing.assert_array_equal(wide(ours).reshape(exact.shape), exact, name)
            continue
        theirs, _ = inputs.expected(name, lambda t: t.to(inputs.wide) if t.is_floating_point() else t)
        # A number beyond the largest of a dtype is the largest.
        largest = torch.finfo(ours.dtype).max
        exact = np.where(np.isinf(exact), exact, np.clip(exact, -largest, largest))
        # A row output that the caller gets in 16 bits may be as exact as 16 bits are.
        units = UNITS * verification.ulp(exact, ours.dtype if output.exact else dtype)
        if terms is not None:
            # The sums of a 16-bit result are merged in float32, those of another result in float64.
            units = units + verification.ulp(terms, inputs.wide) * (2 if ours.dtype.itemsize == 2 else 1)
        # An exponent is a score, and exact to a unit of the largest, the softcap.
        size, unit = np.abs(exact if terms is None else terms), torch.finfo(inputs.wide).eps
        units = units + np.nan_to_num(size) * unit * (inputs.options.softcap or 0.0)
        assert_near(name, wide(ours).reshape(exact.shape), exact, wide(theirs), units)


def assert_near(name: str, ours: Any, exact: Any, theirs: Any, units: Any) -> None:
    """The contract's comparison: PyTorch's largest error, and the units besides."""
    # The maximum of a row with NaN may be anything (tests/laws.py).
    ours = np.where(np.isnan(exact), np.nan, ours) if name == "m" else ours
    finite = np.isfinite(exact) & np.isfinite(theirs)
    np.testing.assert_array_equal(ours[~finite], exact[~finite], f"infinities and NaN of {name}")
    assert np.isfinite(ours[finite]).all(), f"infinities and NaN of {name}"
    error, own = (np.abs(y[finite] - exact[finite]) for y in (ours, theirs))
    allowed = np.max(own, initial=0)
    beyond = np.argmax(error - allowed - units[finite]) if error.size else 0
    assert np.all(error <= allowed + units[finite]), (
        f"{name}: {ours[finite][beyond]:.9g} for {exact[finite][beyond]:.9g}, an error of {error[beyond]:.3e} with "
        f"PyTorch's own of {allowed:.3e} and a unit of {units[finite][beyond]:.3e}"
    )


def assert_as_good_as_pytorch(
    ours: torch.Tensor, operation: str, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> None:
    """The result of a public function beside that of PyTorch's function with this name."""
    theirs = getattr(torch, operation)(x if dtype is None else x.to(dtype), dim)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    with np.errstate(all="ignore"):
        exact = verification.exact_result(operation, wide(x), dim)
    units, ours, theirs = verification.ulp(exact, ours.dtype), wide(ours), wide(theirs)
    # 16 bits are too few for the exact result where PyTorch's is infinite.
    exact = np.where(np.isfinite(theirs), exact, theirs)
    assert_near(operation, ours, exact, theirs, units)
