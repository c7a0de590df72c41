"""The kinds of measurement that have cases and ways of their own: heads, tokens, gates, whole steps, decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .entries import Measures
from .heads import measure as heads
from .heads import steps
from .heads.peers import HEAD_PEERS, OursHead
from .heads.step_peers import STEP_PEERS, OursStep
from .measure import clock_of, each_case
from .peers import Peer
from .result import CaseResult
from .routing import measure as routing
from .routing.peers import GATE_PEERS, OursGate
from .sampling import decoding
from .sampling import measure as sampling
from .sampling.peers import TOKEN_PEERS, OursTokens
from .timing import Clock


class Kind(NamedTuple):
    """A kind of measurement.  `result.FORMS` has the class of its cases, and `tables.KINDS` its table.

    Attributes:
        ours: Our usual way.
        peers: The other ways, by their names on the command line.
        lacks: Function (case, torch device) -> the memory or the package that the case lacks there, or None.
        measure: Function (case, ways, torch device, milliseconds of a measurement, clock) -> results.
    """

    ours: type[Peer]
    peers: Mapping[str, type[Peer]]
    lacks: Callable[[Any, Any], str | None]
    measure: Callable[[Any, Sequence[Peer], Any, float, Clock], CaseResult]


KINDS: dict[Measures, Kind] = {
    "head time": Kind(OursHead, HEAD_PEERS, heads.lacks_memory, heads.measure),
    "token time": Kind(OursTokens, TOKEN_PEERS, sampling.lacks_memory, sampling.measure),
    "gate time": Kind(OursGate, GATE_PEERS, routing.lacks_memory, routing.measure),
    "step time": Kind(OursStep, STEP_PEERS, steps.lacks_memory, steps.measure),
    "decoding time": Kind(OursTokens, TOKEN_PEERS, decoding.lacks, decoding.measure),
}
"""The kinds by name."""


def run_kind(
    measures: Measures, cases: Iterable[Any], everybody: Sequence[Peer], device: Any, repeat_ms: float
) -> Iterator[CaseResult]:
    """Measure cases of a kind, one at a time.

    Args:
        measures: Name of the kind, in KINDS.
        cases: The cases.
        everybody: Our usual way and others, all of them installed.
        device: A torch device.
        repeat_ms: Milliseconds for each measurement.
    """
    kind, clock = KINDS[measures], clock_of(everybody, device)

    def lacks(case: Any) -> str | None:
        return kind.lacks(case, device)

    def measure(case: Any) -> CaseResult:
        return kind.measure(case, everybody, device, repeat_ms, clock)

    return each_case(cases, device, lacks, measure, measures)
