"""The results of one case: every library's error, times and bandwidth; of calls timed by the host; of sharded rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cache
from math import isfinite, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ...core.task import ITEMSIZE
from ...planner.plan import Plan
from ...planner.variant import ONLY
from ..names import MOST_ELEMENTS, check_names
from .cases import MEASURED, Case
from .entries import Measures
from .heads.cases import HeadCase, StepCase
from .routing.cases import RouteCase
from .sampling.cases import DecodeCase, TokenCase
from .timing import Against, Times

if TYPE_CHECKING:
    # Python 3.10 lacks it.
    from typing_extensions import Self

T = TypeVar("T")

LARGE = 1 << 20
"""Number of elements from which a CPU spends its time on arithmetic, so that ours is held to a ratio."""

CANNOT = "cannot run"
"""Words of every table for a library that raises an error for a case, or lacks what it asks for."""

WORDS = {"wrong": "WRONG", "failed": "FAILED", "refused": CANNOT}
"""Words of the tables for a result without times, by its status."""

COPY_OF_SHARD, ALL_REDUCE = "copy of a shard", "all-reduce of rows"
"""Names of the two yardsticks of sharded rows."""

THREE_PRODUCTS, FOUR_PRODUCTS = "three bare products", "four bare products"
"""Names of the two yardsticks of a head."""

ONE_READ = "one read"
"""Name of the yardstick of sampling and of routing: our logsumexp of the logits."""

PLAIN, OUT, RECORDING, BOTH, BARE = "plain", "out=", "recording", "forward+backward", "bare launch"
"""Names of the kinds of calls.

A plain call has a tensor without a gradient.  "out=" writes to a given tensor.  "recording" is the forward call on a
tensor that requires a gradient, which autograd records; "forward+backward" is that call and the gradient of its result.
"bare launch" is the launch of the compiled kernel alone: the least host time that our layers could reach.
"""


class Form(NamedTuple):
    """The form in which a kind of measurement is recorded.

    Attributes:
        cases: Class of the cases.
        fields: The fields of a result that only some kinds record, and this one does.
        yardsticks: Name in tables of each call beside the libraries, by the field of CaseResult with its times; all
            kinds have a copy.
    """

    cases: type[Case] = Case
    fields: tuple[str, ...] = ()
    yardsticks: Mapping[str, str] = MappingProxyType({})


CALLS = Form(fields=("calls", "state"))
"""The form of calls that the host times."""

_OVER_ONE_READ: Any = ("of_read",), {"one_read": ONE_READ}

FORMS: dict[Measures, Form] = {
    "device time": Form(), "host time": CALLS, "first calls": CALLS, "step time": Form(StepCase),
    "decoding time": Form(DecodeCase), "token time": Form(TokenCase, *_OVER_ONE_READ),
    "gate time": Form(RouteCase, *_OVER_ONE_READ),
    "head time": Form(HeadCase, ("of_products",), {"three_products": THREE_PRODUCTS, "four_products": FOUR_PRODUCTS}),
    "sharded time": Form(
        Case, ("host_us", "collectives", "sent_row_bytes", "formula_row_bytes"), {"all_reduce": ALL_REDUCE}
    ),
}  # fmt: skip
"""The forms by the kinds of measurements."""

CPU_RATIO, CPU_ADDED_US = 1.03, 5.0
"""The most that our layer may add to PyTorch on a CPU: a ratio from LARGE elements up, microseconds below."""


@dataclass(frozen=True)
class Result:
    """The result of one library for one case.

    Of sharded rows, `times` are those of the slowest process in each repetition, `copies` the median over that of a
    copy of a shard, and `extra_bytes` the largest of any process.  Of calls that the host times, `reason` may also say
    why one kind of call has no time while `status` is "ok".

    Attributes:
        who: Name of the library; "ours" for our own.
        status: "ok"; "wrong" or "failed", which fail the run; "refused" where the library cannot run the case.
        reason: The reason for a status other than "ok".
        error: Largest absolute error against float64.
        allowed: Error of the framework's own function on the same input.
        plan: Our plan; None for other libraries.
        times: Times of the call.
        gbps: Bandwidth in 10^9 bytes per second, counting the fewest bytes.
        of_copy: `gbps` over the bandwidth of the copy.
        copies: Time of the call over the time of the copy.
        extra_bytes: Peak memory of one call beyond its input and its result; None on a CPU and for JAX.
        against_torch: Ratio to PyTorch's time, and difference from it.
        analysis: The reason why the time is what it is.
        utilisation: `gbps` over the bandwidth of a large copy on this GPU; None on a CPU.
        calls: Times of each kind of call, by its name, in the order in which the table shows them.
        state: State of the caches on disk before the process began; empty where it makes no difference.
        host_us: Microseconds until the call returns to the host; None on a CPU.
        collectives: Number of collectives of a call.
        sent_row_bytes: Bytes per row that a process gives to the collectives of a call, or sends to each other process
            through peer memory; the most of any process.
        of_products: Time of a head over that of its three bare products.
        of_read: Time of sampling over that of one read of the logits.
        formula_row_bytes: The same by the formula of the documentation; None where the peer has none.
    """

    who: str
    status: str
    reason: str | None = None
    error: float | None = None
    allowed: float | None = None
    plan: Plan | None = None
    times: Times | None = None
    gbps: float | None = None
    of_copy: float | None = None
    copies: float | None = None
    extra_bytes: int | None = None
    against_torch: Against | None = None
    analysis: str = ""
    utilisation: float | None = None
    # Of calls that the host times.
    calls: Mapping[str, Times] = field(default_factory=dict)
    state: str = ""
    # Of sharded rows.
    host_us: float | None = None
    collectives: int | None = None
    sent_row_bytes: float | None = None
    formula_row_bytes: int | None = None
    # Of heads.
    of_products: float | None = None
    # Of sampling.
    of_read: float | None = None

    @property
    def us(self) -> float | None:
        """Median microseconds of the call; None without times."""
        return self.times.median_us if self.times else None

    @property
    def failed(self) -> bool:
        """True where the run must report failure."""
        return self.status in ("wrong", "failed")

    def as_dict(self, measures: Measures) -> dict[str, Any]:
        """The attributes of a kind of measurement, for JSON; an infinite error becomes null."""
        error = self.error if self.error is not None and isfinite(self.error) else None
        found = {**asdict(self), "error": error, "plan": self.plan.as_dict() if self.plan else None}
        of_others = {name for form in FORMS.values() for name in form.fields} - {*FORMS[measures].fields}
        return {name: value for name, value in found.items() if name not in of_others}


@dataclass(frozen=True)
class CaseResult:
    """The results of one case, and the copy beside it.

    Of sharded rows, `case` has the shape of the whole input, and the copy is that of one shard.

    Attributes:
        case: The case.
        skipped: The reason why nothing was run; None where something was.
        copy, copy_gbps: Times and bandwidth of the copy.
        results: One result per library.
        framework: "torch" or "jax": the framework whose functions of ours were measured.
        flush: State of the L2 cache before each call but the copy: "dirty" after a flush that writes zeros, "clean"
            after a read of the same size; None on a CPU.  Before the copy it is dirty.
        overhead_us: Microseconds of a call without work on the same clock.
        measures: The kind of measurement.
        processes: Number of processes that share the rows.
        all_reduce: Times of an all-reduce of one float32 number per row, of sharded rows.
        three_products, four_products: Times of the bare products of a head; the fourth makes the logits again.
        one_read: Times of one read of the logits.
    """

    case: Case
    skipped: str | None = None
    copy: Times | None = None
    copy_gbps: float | None = None
    results: Sequence[Result] = field(default_factory=list)
    framework: str = "torch"
    flush: str | None = None
    overhead_us: float | None = None
    measures: Measures = "device time"
    processes: int = 1
    all_reduce: Times | None = None
    three_products: Times | None = None
    four_products: Times | None = None
    one_read: Times | None = None

    def result(self, who: str) -> Result | None:
        """The result of a library; None where it was not measured."""
        return next((each for each in self.results if each.who == who), None)

    @property
    def yardsticks(self) -> dict[str, Times]:
        """Times of calls that stand in the table beside the libraries, by name."""
        found = {COPY_OF_SHARD: self.copy} if self.measures == "sharded time" else {}
        found |= {name: getattr(self, place) for place, name in FORMS[self.measures].yardsticks.items()}
        return {name: times for name, times in found.items() if times is not None}

    @property
    def within_cpu_bound(self) -> bool | None:
        """True where our layer adds to PyTorch on a CPU no more than it may; None where the bound does not apply."""
        ours = self.result("ours")
        several = self.case.fused or self.case.with_gradient or self.case.declaration.has_target
        if several or self.framework != "torch":
            # PyTorch runs several operations, or our function is no layer over PyTorch.
            return None
        if ours is None or ours.against_torch is None or ours.plan is None or ours.plan.backend != "eager":
            return None
        if self.case.elements >= LARGE:
            return ours.against_torch.ratio <= CPU_RATIO
        return ours.against_torch.added_us <= CPU_ADDED_US

    def as_dict(self) -> dict[str, Any]:
        """Everything but the framework and the kind of measurement, for JSON."""
        own, own_form = asdict(replace(self, results=[])), FORMS[self.measures]
        of_others = set() if self.measures == "sharded time" else {"processes"}
        of_others |= {name for form in FORMS.values() for name in form.yardsticks if name not in own_form.yardsticks}
        for name in ("case", "framework", "measures", *of_others):
            del own[name]
        results = [result.as_dict(self.measures) for result in self.results]
        return {**self.case.as_dict(), **own, "within_cpu_bound": self.within_cpu_bound, "results": results}

    @classmethod
    def of(cls, recorded: Mapping[str, Any], framework: str = "torch", measures: Measures = "device time") -> Self:
        """The results of a dictionary as `as_dict` makes it; older records lack the newer attributes.

        Args:
            recorded: The dictionary, a case of a record.
            framework: The framework of the record's options.
            measures: The kind of measurement.

        Raises:
            ValueError: no such case can be measured.
        """
        kind = FORMS[measures].cases
        if kind is Case:
            check_names("operation", [recorded["operation"]], MEASURED)
        check_names("dtype", [recorded["dtype"]], ITEMSIZE)
        if recorded["dim"] >= len(recorded["shape"]):
            raise ValueError(f"dim {recorded['dim']} is out of range for the shape {recorded['shape']}")
        if prod(recorded["shape"]) >= MOST_ELEMENTS:
            raise ValueError(f"shape {recorded['shape']}: more elements than any memory holds")
        results = [made(Result, result) for result in recorded["results"]]
        own = {"case": made(kind, recorded), "results": results, "framework": framework, "measures": measures}
        return made(cls, recorded, **own)


def made(kind: type[T], recorded: Mapping[str, Any], **values: Any) -> T:
    """A record of this kind from a dictionary as JSON has it, in which older fields may be missing.

    The variant of a plan is left out: other versions of the planner have other variants.

    Args:
        kind: A dataclass.  Its fields may be dataclasses, or mappings to them.
        recorded: The dictionary, which may hold more.
        values: Fields that are not read from the dictionary.
    """
    if issubclass(kind, Plan):
        values["variant"] = ONLY
    left = {name: each for name, each in _types(kind).items() if name in recorded and name not in values}
    return kind(**values, **{name: _value(each, recorded[name]) for name, each in left.items()})


_types: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def _value(of_type: Any, found: Any) -> Any:
    """A value of JSON as a field of this type, which may be optional."""
    inner: Any = next(filter(is_dataclass, (of_type, *get_args(of_type))), None)
    if found is None or inner is None:
        return tuple(found) if isinstance(found, list) else found
    if get_origin(of_type) is Mapping:
        return {name: made(inner, each) for name, each in found.items()}
    return made(inner, found)
