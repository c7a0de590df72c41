"""Few cases instead of a product of all options: two options that break only together still meet."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

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
    pairs = [{*combinations(features_of(case), 2)} for case in cases]
    # What a case would add only shrinks, so an old number is a bound.
    queue = [(-len(mine), i) for i, mine in enumerate(pairs)]
    heapq.heapify(queue)
    met: set[tuple[Hashable, Hashable]] = set()
    chosen = []
    while queue:
        _, i = heapq.heappop(queue)
        added = len(pairs[i] - met)
        if queue and -added > queue[0][0]:
            heapq.heappush(queue, (-added, i))
        elif added:
            met |= pairs[i]
            chosen.append(i)
    return [cases[i] for i in sorted(chosen)]
