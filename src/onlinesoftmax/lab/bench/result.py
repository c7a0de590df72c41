"""The results of one case: every library's error, times and bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ...core.task import ITEMSIZE
from ...planner.plan import Plan
from ...planner.proposal import Blocks, Threads
from ...planner.variant import ONLY
from .cases import MEASURED, MOST_ELEMENTS, Case, known
from .timing import Against, Times

if TYPE_CHECKING:
    # Python 3.10 lacks it.
    from typing_extensions import Self

T = TypeVar("T")

LARGE = 1 << 20
"""Number of elements from which a CPU spends its time on arithmetic, so that ours is held to a ratio."""

WORDS = {"wrong": "WRONG", "failed": "FAILED", "refused": "refuses"}
"""Words of the tables for a result without times, by its status."""

CPU_RATIO, CPU_ADDED_US = 1.03, 5.0
"""The most that our layer may add to PyTorch on a CPU: a ratio from LARGE elements up, microseconds below."""


@dataclass(frozen=True)
class Result:
    """The result of one library for one case.

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

    @property
    def failed(self) -> bool:
        """True where the run must report failure."""
        return self.status in ("wrong", "failed")

    def as_dict(self) -> dict[str, Any]:
        """Every attribute, for JSON; an infinite error becomes null."""
        error = self.error if self.error is not None and isfinite(self.error) else None
        return {**asdict(self), "error": error, "plan": self.plan.as_dict() if self.plan else None}

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Self:
        """The result of a dictionary as `as_dict` makes it; older records lack the newer attributes.

        The variant of a plan is left out: other versions of the planner have other variants.
        """
        times, against, plan = recorded["times"], recorded["against_torch"], recorded["plan"]
        return made(
            cls, recorded, times=times and made(Times, times), against_torch=against and made(Against, against),
            plan=plan and _plan_of(plan),
        )  # fmt: skip


@dataclass(frozen=True)
class CaseResult:
    """The results of one case, and the copy beside it.

    Attributes:
        case: The case.
        skipped: The reason why nothing was run; None where something was.
        copy, copy_gbps: Times and bandwidth of the copy.
        results: One result per library.
        framework: "torch" or "jax": the framework whose functions of ours were measured.
        flush: State of the L2 cache before each call but the copy: "dirty" after a flush that writes zeros, "clean"
            after a read of the same size; None on a CPU.  Before the copy it is dirty.
        overhead_us: Microseconds of a call without work on the same clock.
    """

    result_type: ClassVar[type[Result]] = Result

    case: Case
    skipped: str | None = None
    copy: Times | None = None
    copy_gbps: float | None = None
    results: Sequence[Result] = field(default_factory=list)
    framework: str = "torch"
    flush: str | None = None
    overhead_us: float | None = None

    @property
    def within_cpu_bound(self) -> bool | None:
        """True where our layer adds to PyTorch on a CPU no more than it may; None where the bound does not apply."""
        ours = next((r for r in self.results if r.who == "ours"), None)
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
        """Everything, for JSON."""
        return {
            **self.case.as_dict(),
            "skipped": self.skipped,
            "copy": asdict(self.copy) if self.copy else None,
            "copy_gbps": self.copy_gbps,
            "flush": self.flush,
            "overhead_us": self.overhead_us,
            "within_cpu_bound": self.within_cpu_bound,
            "results": [result.as_dict() for result in self.results],
        }

    @classmethod
    def of(cls, recorded: Mapping[str, Any], framework: str = "torch") -> Self:
        """The results of a dictionary as `as_dict` makes it; older records lack the newer attributes.

        Args:
            recorded: The dictionary, a case of a record.
            framework: The framework of the record's options.

        Raises:
            ValueError: no such case can be measured.
        """
        known("operation", [recorded["operation"]], MEASURED)
        known("dtype", [recorded["dtype"]], ITEMSIZE)
        if recorded["dim"] >= len(recorded["shape"]):
            raise ValueError(f"dim {recorded['dim']} is out of range for the shape {recorded['shape']}")
        if prod(recorded["shape"]) >= MOST_ELEMENTS:
            raise ValueError(f"shape {recorded['shape']}: more elements than any memory holds")
        case = made(
            Case, recorded, shape=tuple(recorded["shape"]), fused=tuple(recorded.get("fused", ()))
        )  # fmt: skip
        copy, results = recorded["copy"], [cls.result_type.of(result) for result in recorded["results"]]
        return made(cls, recorded, case=case, copy=copy and made(Times, copy), results=results, framework=framework)


def made(kind: type[T], recorded: Mapping[str, Any], **values: Any) -> T:
    """A record of this kind from a dictionary, which may hold more; `values` replace what the dictionary holds."""
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # every kind is a dataclass
    return kind(**{name: recorded[name] for name in names if name in recorded} | values)


def _plan_of(recorded: Mapping[str, Any]) -> Plan:
    """The plan of a dictionary as `Plan.as_dict` makes it, without its variant."""
    blocks, threads = made(Blocks, recorded), made(Threads, recorded)
    return made(Plan, recorded, blocks=blocks, threads=threads, variant=ONLY)
