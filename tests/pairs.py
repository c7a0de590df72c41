"""Few cases instead of a product of all options: two options that break only together still meet."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def with_every_pair(cases: Sequence[Case], features_of: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """The fewest cases that a greedy search finds in which every two features meet that meet in one of all cases.

    Args:
        cases: All cases.
        features_of: The options of a case, in one order; to lack an option can be a feature too.

    >>> product = [(x, y, z) for x in "ab" for y in "cd" for z in "ef"]
    >>> with_every_pair(product, lambda case: case)
    [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """
    return with_each(cases, lambda case: combinations(features_of(case), 2))


def with_each(cases: Sequence[Case], met_in: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """The fewest cases that a greedy search finds in which everything is met that is met in one of all cases.

    Args:
        cases: All cases.
        met_in: All that a case meets, such as an option or a pair of options.

    >>> with_each([("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")], enumerate)
    [('a', 'c'), ('b', 'd')]
    """
    met_in_each = [{*met_in(case)} for case in cases]
    # What a case would add only shrinks, so an old number is a bound.
    queue = [(-len(mine), i) for i, mine in enumerate(met_in_each)]
    heapq.heapify(queue)
    met: set[Hashable] = set()
    chosen = []
    while queue:
        _, i = heapq.heappop(queue)
        added = len(met_in_each[i] - met)
        if queue and -added > queue[0][0]:
            heapq.heappush(queue, (-added, i))
        elif added:
            met |= met_in_each[i]
            chosen.append(i)
    return [cases[i] for i in sorted(chosen)]


def rest_exhaustive(
    cases: Iterable[tuple[Any, ...]],
    met_in: Callable[[Any], Iterable[Hashable]] = lambda case: enumerate(map(str, case)),
) -> list[Any]:
    """All cases as parameters of a test; those that `with_each` leaves out are `exhaustive`."""
    cases = [*cases]
    few = {id(case) for case in with_each(cases, met_in)}
    return [pytest.param(*case, marks=() if id(case) in few else pytest.mark.exhaustive) for case in cases]


def one_architecture(turn: int) -> list[Any]:
    """Parameters of a test that compiles one kernel for each architecture: all but one are `exhaustive`.

    The strategies, and the kernel of a support, are compiled for all three; the kernels of one operation take turns.

    >>> [one.values for one in one_architecture(1) if not one.marks]
    [('sm_90',)]
    """
    return [
        pytest.param(arch, marks=() if i == turn else pytest.mark.exhaustive)
        for i, arch in enumerate(("sm_80", "sm_90", "sm_100"))
    ]
