"""The kinds of measurement that have cases and ways of their own: heads, tokens, gates, whole steps, decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .entries import Measures
from .heads import measure as heads
from .heads import steps
from .heads.peers import HEAD_PEERS, OursHead
from .heads.step_peers import STEP_PEERS, OursStep
from .measure import Begin, clock_of, each_case
from .peers import Peer
from .result import CaseResult
from .routing import measure as routing
from .routing.peers import GATE_PEERS, OursGate
from .sampling import decoding
from .sampling import measure as sampling
from .sampling.peers import TOKEN_PEERS, OursTokens


class Kind(NamedTuple):
    """A kind of measurement.  `result.FORMS` has the class of its cases, and `tables.KINDS` its table.

    Attributes:
        ours: Our usual way.
        peers: The other ways, by their names on the command line.
        begin: Function that makes the tensors of a case.
    """

    ours: type[Peer]
    peers: Mapping[str, type[Peer]]
    begin: Begin


KINDS: dict[Measures, Kind] = {
    "head time": Kind(OursHead, HEAD_PEERS, heads.begin),
    "token time": Kind(OursTokens, TOKEN_PEERS, sampling.begin),
    "gate time": Kind(OursGate, GATE_PEERS, routing.begin),
    "step time": Kind(OursStep, STEP_PEERS, steps.begin),
    "decoding time": Kind(OursTokens, TOKEN_PEERS, decoding.begin),
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
    return each_case(cases, measures, kind.begin, everybody, device, repeat_ms, clock)
