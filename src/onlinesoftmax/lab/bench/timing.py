"""The clocks: medians of single calls, interleaved so that drift of the machine affects all calls alike."""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter_ns
from typing import Any, NamedTuple

Call = Callable[[], Any]
Samples = dict[str, list[float]]
"""Microseconds of every repetition in the order of the rounds, by the name of the call."""


@dataclass(frozen=True)
class Times:
    """Median, 20th and 80th percentile of the samples of one call, in microseconds, and their number."""

    median_us: float
    p20_us: float
    p80_us: float
    count: int

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        """
        >>> Times.of([3.0, 1.0, 2.0])
        Times(median_us=2.0, p20_us=1.0, p80_us=3.0, count=3)
        """
        ordered, last = sorted(samples), len(samples) - 1
        at = [ordered[round(part * last)] for part in (0.2, 0.8)]
        return cls(statistics.median(ordered), at[0], at[1], len(ordered))


@dataclass(frozen=True)
class Against:
    """The time of one call relative to another's in the same run: their ratio, and their difference in microseconds."""

    ratio: float
    added_us: float

    @classmethod
    def of(cls, samples: list[float], others: list[float]) -> Against:
        """Compare round by round where both calls ran in every round; compare medians otherwise.

        Calls that follow each other meet the same load of the machine, so their differences vary less than the
        difference of two medians.

        >>> Against.of([2.0, 4.0, 40.0], [1.0, 2.0, 20.0])
        Against(ratio=2.0, added_us=2.0)
        """
        if len(samples) != len(others):
            samples, others = [statistics.median(samples)], [statistics.median(others)]
        pairs = list(zip(samples, others, strict=True))
        return cls(statistics.median(a / b for a, b in pairs), statistics.median(a - b for a, b in pairs))


class Flush(NamedTuple):
    """The flushes of the L2 cache before each call; a CPU has none.

    Attributes:
        clean: Names of the calls before which the cache is left without dirty lines.
        before: A call before the flushes.  A GPU at its power limit runs slower after long products than after others,
            so a product comes before calls that are compared with products.
    """

    clean: Collection[str] = ()
    before: Call | None = None


USUAL = Flush()
"""Flushes that leave dirty lines."""

TRIALS = 5
"""Calls that estimate a time."""

MOST_FLUSHES = 200
"""Flushes before one call at most: about 15 ms of an H200, longer than the host needs to queue a call."""


Events = tuple[Any, Any]
"""CUDA events before and after a call."""


def rounds(counts: Mapping[str, int]) -> Iterator[list[str]]:
    """The names of the calls of each round; each name is in as many rounds as it counts, evenly spread.

    Drift of the machine then affects all calls alike.

    >>> list(rounds({"a": 4, "b": 2}))
    [['a'], ['a', 'b'], ['a'], ['a', 'b']]
    """
    most = max(counts.values())
    for i in range(most):
        yield [name for name, count in counts.items() if i * count // most != (i + 1) * count // most]


def elapsed_us(events: Iterable[Events]) -> list[float]:
    """Microseconds between the events of each pair."""
    return [1e3 * start.elapsed_time(end) for start, end in events]


class CpuClock:
    """The clock of a CPU: perf_counter around single calls, every call once per round in random order."""

    kind = "cpu"

    def measure(self, calls: Mapping[str, Call], budget_ms: float, flush: Flush = USUAL) -> Samples:
        """Samples of every call, the same number for each; about `budget_ms` milliseconds per call on average."""
        names, samples = list(calls), dict[str, list[float]]()
        shuffle = random.Random(0).shuffle
        budget_ns = budget_ms * len(names) * 1e6
        with quiet():
            # The warm-up comes first; the samples of the second pass count.
            for least, pass_ns in ((1, budget_ns / 10), (5, budget_ns)):
                samples, end = {name: [] for name in calls}, perf_counter_ns() + pass_ns
                for i in range(20000):
                    if i >= least and perf_counter_ns() > end:
                        break
                    # The call before leaves its data in the caches, so the order is random.
                    shuffle(names)
                    for name in names:
                        call = calls[name]
                        start = perf_counter_ns()
                        call()
                        samples[name].append((perf_counter_ns() - start) / 1e3)
        return samples

    def host_us(self, calls: Mapping[str, Call], budget_ms: float) -> Samples:
        """Samples of every call; on a CPU a call is over when it returns."""
        return self.measure(calls, budget_ms)

    def overhead_us(self) -> float:
        """Microseconds of a call without work: a softmax of one number."""
        import torch

        x = torch.zeros(1)
        return _median_us(self, lambda: torch.softmax(x, 0))


class CudaClock:
    """The clock of a GPU: CUDA events around single calls, with the L2 cache flushed before each.

    There are as many flushes as it takes to hide the time that the host needs to queue the call.

    A flush writes zeros and leaves dirty lines in the cache, up to its size: the timed call pays for writing them to
    memory, and a call that writes elements, like the copy, leaves as many of its own unpaid.  A call that only reads
    leaves none, so before it the clock also reads a second buffer of the same size, which evicts the dirty lines.
    """

    kind = "cuda"

    def __init__(self, device: Any, flushes: int = 1) -> None:
        import torch

        self._cuda, self._device, self._flushes = torch.cuda, device, flushes
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        # Twice the size of the cache, so that all of it is evicted.  Zeroing 256 MB also takes longer than the
        # host needs to queue most calls.
        size = max(256 << 20, 2 * l2)
        self._flush = torch.empty(size, dtype=torch.int8, device=device)
        self._clean: Any = None

    @cached_property
    def flush_us(self) -> float:
        """Microseconds of one flush."""
        self._flush.zero_()
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._flush.zero_()
        end.record()
        self._cuda.synchronize(self._device)
        return elapsed_us([(start, end)])[0]

    def _hiding(self, calls: Iterable[Call]) -> int:
        """Number of flushes that take longer than the host needs to queue the slowest of the calls."""
        slowest = 0.0
        for call in calls:
            host = []
            for _ in range(TRIALS):
                self._cuda.synchronize(self._device)
                start = perf_counter_ns()
                call()
                host.append((perf_counter_ns() - start) / 1e3)
            slowest = max(slowest, statistics.median(host))
        return min(MOST_FLUSHES, max(self._flushes, math.ceil(1.5 * slowest / self.flush_us)))

    def measure(self, calls: Mapping[str, Call], budget_ms: float, flush: Flush = USUAL) -> Samples:
        """Samples of every call, as many as fit into `budget_ms` milliseconds for each call."""
        for call in calls.values():
            call()
        flushes = self._hiding(calls.values())
        trial = self._rounds(calls, dict.fromkeys(calls, TRIALS), flushes, flush, flushed_too=True)
        fitting = {name: int(1e3 * budget_ms / statistics.median(found)) for name, found in trial.items()}
        counts = {name: max(7, min(count, 1000)) for name, count in fitting.items()}
        return self._rounds(calls, counts, flushes, flush)

    def _rounds(
        self, calls: Mapping[str, Call], counts: dict[str, int], flushes: int, flush: Flush = USUAL,
        flushed_too: bool = False,
    ) -> Samples:  # fmt: skip
        events: dict[str, list[Events]] = {name: [] for name in calls}
        with quiet():
            for name in (name for names in rounds(counts) for name in names):
                if flush.before is not None:
                    flush.before()
                events[name].append(self.timed(calls[name], flushes, name in flush.clean, flushed_too))
            self._cuda.synchronize(self._device)
        return {name: elapsed_us(pairs) for name, pairs in events.items()}

    def on_end(self, calls: Sequence[Call], rounds: int, clean: bool = False) -> list[float]:
        """Microseconds of every call in `rounds` samples, each call repeated without others between.

        The calls run in two passes, and the smaller median of the two counts: other work on the GPU lasts longer than
        one pass over a call, and can only slow it.

        With `clean`, the L2 cache is left without dirty lines before each call, as for calls that only read.

        The first call of a pass does not count: its machine code comes from memory, which takes longer than the kernel
        itself for small shapes.
        """
        half = (rounds + 1) // 2
        passes = [count for count in (half, rounds - half) if count]
        events: list[list[list[Events]]] = [[] for _ in calls]
        with quiet():
            for count in passes:
                for call, found in zip(calls, events, strict=True):
                    call()
                    found.append([self.timed(call, clean=clean) for _ in range(count)])
            self._cuda.synchronize(self._device)
        return [min(statistics.median(elapsed_us(samples)) for samples in found) for found in events]

    def timed(
        self, call: Call, flushes: int = 1, clean: bool = False, flushed_too: bool = False,
        meet: Call = lambda: None,
    ) -> Events:  # fmt: skip
        """Events around a call that is queued behind flushes of the L2 cache, or around flushes and call.

        `meet` is called between the flushes and the first event.
        """
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        if flushed_too:
            start.record()
        for _ in range(max(self._flushes, flushes)):
            self._flush.zero_()
        if clean:
            self._read_clean_buffer()
        meet()
        if not flushed_too:
            start.record()
        call()
        end.record()
        return start, end

    def _read_clean_buffer(self) -> None:
        """Read a buffer as large as the flushed one; the maxima of its rows are the few bytes that are written."""
        import torch

        if self._clean is None:
            rows = torch.zeros(self._flush.numel() // 4, dtype=torch.float32, device=self._device).view(1024, -1)
            self._clean = rows, rows[:, 0].clone()
        rows, maxima = self._clean
        torch.amax(rows, 1, out=maxima)

    def host_us(self, calls: Mapping[str, Call], budget_ms: float) -> Samples:
        """Host microseconds per call, in runs of 100 calls without waiting, which the launch queue can hold."""
        samples: Samples = {name: [] for name in calls}
        start = perf_counter_ns()
        with quiet():
            while perf_counter_ns() - start < budget_ms * len(calls) * 1e6 or len(samples[next(iter(calls))]) < 5:
                for name, call in calls.items():
                    self._cuda.synchronize(self._device)
                    began = perf_counter_ns()
                    for _ in range(100):
                        call()
                    samples[name].append((perf_counter_ns() - began) / 1e5)
            self._cuda.synchronize(self._device)
        # The first run of each call is the warm-up.
        return {name: found[1:] for name, found in samples.items()}

    def overhead_us(self) -> float:
        """Microseconds between the events of a launch without work: one byte is set to zero."""
        return _median_us(self, self._flush[:1].zero_)


Clock = CpuClock | CudaClock


def _median_us(clock: Clock, call: Call) -> float:
    return Times.of(clock.measure({"": call}, 10)[""]).median_us


@contextmanager
def quiet() -> Iterator[None]:
    """Without garbage collection, which would add to one call's sample."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
