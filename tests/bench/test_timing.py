"""The clocks of the benchmark: warm-up, interleaving, flushes, and differences between calls."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch

from onlinesoftmax.lab.bench.timing import Against, CpuClock, CudaClock, Flush, Times


def test_the_cpu_clock_is_sane() -> None:
    ran = {"a": count(), "b": count()}
    samples = CpuClock().measure({name: (lambda n=name: next(ran[n])) for name in ran}, 2)
    assert len(samples["a"]) == len(samples["b"]) >= 5
    for name in ran:
        times = Times.of(samples[name])
        assert 0 <= times.p20_us <= times.median_us <= times.p80_us < 1e4
        # The warm-up ran too, and is not counted.
        assert next(ran[name]) > times.count


def test_a_slow_call_still_ends() -> None:
    samples = CpuClock().measure({"slow": lambda: sum(range(200_000))}, 1)
    assert len(samples["slow"]) == 5


def test_round_by_round_differences_cancel_drift() -> None:
    drifting = [10.0, 1000.0, 50.0]
    against = Against.of([t + 2 for t in drifting], drifting)
    assert against.added_us == pytest.approx(2)
    assert Against.of([3.0, 3.0], [1.0, 1.5, 2.0]).ratio == 2.0


def logging_clock(log: list[str]) -> CudaClock:
    """The clock of a GPU without a GPU: what it does is written into a list."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, other: Event) -> float:
            return 0.25

    clock = object.__new__(CudaClock)
    clock._cuda = SimpleNamespace(Event=Event, synchronize=lambda device: None)
    clock._device, clock._flush = torch.device("cpu"), SimpleNamespace(zero_=lambda: log.append("flush"))
    clock._flushes, clock._read_clean_buffer = 1, lambda: log.append("read")  # type: ignore[method-assign]  # a log
    return clock


def test_the_gpu_clock_spreads_repetitions_and_flushes_before_each() -> None:
    log: list[str] = []
    calls = {"fast": lambda: log.append("fast"), "slow": lambda: log.append("slow")}
    samples = logging_clock(log)._rounds(calls, {"fast": 8, "slow": 2})
    assert samples == {"fast": [250.0] * 8, "slow": [250.0] * 2}
    steps = [tuple(log[i : i + 4]) for i in range(0, len(log), 4)]
    assert set(steps) == {("flush", "event", "fast", "event"), ("flush", "event", "slow", "event")}
    assert [step[2] for step in steps].index("slow") > 2, "few repetitions are spread, not first"


def test_a_call_that_only_reads_finds_no_dirty_lines() -> None:
    log: list[str] = []
    calls = {"ours": lambda: log.append("ours"), "copy": lambda: log.append("copy")}
    logging_clock(log)._rounds(calls, dict.fromkeys(calls, 2), Flush(clean=["ours"], least=2))
    ours = ["flush", "flush", "read", "event", "ours", "event"]
    copy = ["flush", "flush", "event", "copy", "event"]
    assert log == 2 * (ours + copy)


@pytest.mark.gpu
def test_the_clean_buffer_is_as_large_as_the_flushed_one() -> None:
    clock = CudaClock(torch.device("cuda"))
    x = torch.zeros(1 << 20, device="cuda")
    samples = clock.measure({"sum": x.sum, "copy": x.clone}, 1, Flush(clean=["sum"], least=2))
    assert min(map(min, samples.values())) > 0
    rows, maxima = clock._clean
    assert rows.nbytes == clock._flush.nbytes
    assert maxima.nbytes < 1 << 13
