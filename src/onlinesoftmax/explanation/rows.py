"""The plan that a call on rows would run, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..core.device import Device
from ..core.problem import Problem
from ..core.task import ANY, Choice, Task
from ..kernels import registry
from ..kernels.report import Kernel
from ..kernels.request import Request
from ..planner.facts import lacks_memory
from ..planner.plan import Plan, Planner, Refusal, best


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str()` of it is a text to read.

    Attributes:
        task: What was asked: a call without its data.
        problem: The part of the task that the plan depends on.
        device: The device that was planned for.  A plan for an interpreter, on a CPU, is made for an H200.
        plan: The plan that would run.
        others: The other plans, shortest estimate first, and the strategies that cannot run.  If the caller forces a
            plan, another plan can be faster.
    """

    task: Task
    problem: Problem
    device: Device
    plan: Plan
    others: tuple[Plan | Refusal, ...]

    def why_not(self, other: Plan | Refusal) -> str:
        """Why another strategy was not chosen, in one sentence."""
        if isinstance(other, Refusal):
            return f"cannot: {other.reason}"
        slower = other.estimate_us / self.plan.estimate_us
        guess = "" if other.measured_on and self.plan.measured_on else " by estimate"
        forced = ", but another plan is forced" if slower < 1 else ""
        return f"{slower:.2f} times as long{guess}{forced}: {other.reason}"

    def compile(self) -> list[Kernel]:
        """The plan's kernels, compiled for the device, which this machine need not have: registers, spills, listings.

        Returns:
            A record for each launch; an empty list for the eager backend, which has no kernels of ours.

        Raises:
            RuntimeError: the backend's compiler is missing, Triton's interpreter is on, or the backend is Pallas.
        """
        if self.plan.backend == "eager":
            return []
        if self.plan.backend == "pallas":
            raise RuntimeError("XLA compiles Pallas kernels, where the GPU is and when they are called")
        request = Request(self.task, self.plan)
        kernels: list[Kernel] = registry.load(self.plan.backend).compile_request(request, self.device)
        return kernels

    def as_dict(self) -> dict[str, Any]:
        """The problem, the device and all plans, for JSON."""
        return {
            "problem": asdict(self.problem),
            "device": vars(self.device),
            "lacks_memory": lacks_memory(self.problem, self.device),
            "plan": self.plan.as_dict(),
            "others": [
                {**(other.as_dict() if isinstance(other, Plan) else vars(other)), "why_not": self.why_not(other)}
                for other in self.others
            ],
        }

    @property
    def _asked(self) -> str:
        q = self.problem
        outputs = f" ({', '.join(q.outputs)})" if q.outputs != q.declaration.always else ""
        return f"{q.operation}{outputs} of {q.rows} x {q.cols} {q.dtype} on {self.device.name}"

    def __repr__(self) -> str:
        return f"<Explanation {self._asked}: {self.plan.backend}/{self.plan.strategy}, {self.plan.estimate_us:.1f} us>"

    def __str__(self) -> str:
        p, small = self.plan, lacks_memory(self.problem, self.device)
        lines = [
            self._asked,
            *([f"  memory {small}"] if small else []),
            f"  {p.backend}/{p.strategy}: {p.reason}",
            f"  {p.bytes_moved / 1e6:.1f} MB moved; floor {p.floor_us:.1f} us, estimate {p.estimate_us:.1f} us",
        ]
        lines += [f"  not {other.backend}/{other.strategy}: {self.why_not(other)}" for other in self.others]
        return "\n".join(lines)


def explain_task(task: Task, planner: Planner, choice: Choice) -> Explanation:
    """The plan for a task, and why."""
    every = {_name_of(o): o for o in planner.alternatives(task, Choice(batch_invariant=choice.batch_invariant))}
    plans = [option for option in every.values() if isinstance(option, Plan)]
    # Without a forced choice, the plan is among the alternatives, and need not be made twice.
    chosen = best(plans) if choice == ANY and plans else planner.plan(task, choice)
    if choice != ANY:
        # A plan that the choice allows was compared with the chosen one by times of the allowed backends alone.
        every |= {_name_of(o): o for o in planner.alternatives(task, choice) if isinstance(o, Plan)}
    del every[_name_of(chosen)]
    others = sorted(every.values(), key=lambda o: o.estimate_us if isinstance(o, Plan) else float("inf"))
    problem = Problem.of(task, choice.batch_invariant)
    return Explanation(task, problem, planner.device, chosen, tuple(others))


def _name_of(option: Plan | Refusal) -> tuple[str, str]:
    return option.backend, option.strategy
