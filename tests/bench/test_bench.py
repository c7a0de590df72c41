"""The benchmark: its cases, its refusals, its clocks, its record; a wrong result never gets a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark measures torch tensors")

import torch
from bench_cases import CPU, LOSS, ROWS, TOKENS, Raises, Wrong, table

from onlinesoftmax.core.device import known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import Choice
from onlinesoftmax.lab.bench import analysis, libraries, record_file, timing
from onlinesoftmax.lab.bench.cases import Case
from onlinesoftmax.lab.bench.check import Reference
from onlinesoftmax.lab.bench.inputs import make_input
from onlinesoftmax.lab.bench.measure import run
from onlinesoftmax.lab.bench.peers import Ours, Torch
from onlinesoftmax.lab.bench.result import CaseResult
from onlinesoftmax.lab.bench.timing import Against, CpuClock, CudaClock, Flush, Times
from onlinesoftmax.lab.names import parse_shape
from onlinesoftmax.planner.plan import plan


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("4096x50257", (4096, 50257)),
        ("8X16", (8, 16)),
        ("2*3×4", (2, 3, 4)),
        (" 7 ", (7,)),
        ("1x2^28", (1, 1 << 28)),
    ],
)
def test_shapes(text: str, shape: tuple[int, ...]) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    "text", ["", "x", "4x", "4xx8", "4,8", "-4x8", "4x1.5", "0x8", "0^0x8", "2^60x1", "9" * 30, "٣"]
)
def test_bad_shapes_are_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="shape") as caught:
        parse_shape(text)
    assert repr(text) in str(caught.value)


def test_bytes_count_the_output_of_the_operation() -> None:
    softmax = Case("softmax", (4, 1024), 1, "bfloat16")
    assert softmax.bytes == 2 * 4 * 1024 * 2
    assert replace(softmax, operation="logsumexp").bytes == (4 * 1024 + 4) * 2


def test_inputs_have_outliers_and_repeat() -> None:
    case = Case("softmax", (100, 100), 1, "float32")
    x = make_input(case, CPU)
    assert torch.equal(x, make_input(case, CPU))
    assert 20 < (x.abs() > 6).sum() < 150


@pytest.mark.parametrize("operation", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize(("shape", "dim"), [((5, 33), 1), ((33, 5), 0), ((3, 17, 4), 1), ((40,), 0)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("piece", [1 << 23, 16])
def test_the_reference_is_right_in_pieces(
    operation: str, shape: tuple[int, ...], dim: int, dtype: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinesoftmax.lab.bench.check.PIECE", piece)
    case = Case(operation, shape, dim, dtype)
    x = make_input(case, CPU)
    exact = getattr(torch, operation)(x.double(), dim)
    # Two computations in float64 agree to their own rounding only.
    verdict = Reference(case, x).judge(exact.to(x.dtype), allowed=1e-14 if dtype == "float64" else 0.0)
    assert verdict.wrong is None
    assert verdict.error == pytest.approx((exact.to(x.dtype).double() - exact).abs().max().item(), abs=1e-13)


@pytest.mark.parametrize("piece", [1 << 23, 16])
@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_one_wrong_element_is_found(value: float, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onlinesoftmax.lab.bench.check.PIECE", piece)
    case = Case("softmax", (7, 65), 1, "bfloat16")
    x = make_input(case, CPU)
    reference, y = Reference(case, x), torch.softmax(x, 1)
    allowed = reference.judge(y, float("inf")).error
    assert reference.judge(y, allowed).wrong is None
    y[6, 64] = value
    assert reference.judge(y, allowed, ours=False).wrong is not None


def test_a_wrong_shape_or_dtype_is_wrong() -> None:
    case = Case("logsumexp", (3, 4), 1, "float32")
    x = make_input(case, CPU)
    assert "expected (3,) torch.float32" in str(Reference(case, x).judge(torch.logsumexp(x, 1, True)).wrong)
    assert "torch.float64" in str(Reference(case, x).judge(torch.logsumexp(x, 1).double()).wrong)


@pytest.fixture(scope="module")
def measured() -> CaseResult:
    everybody = [Ours("cpu"), Torch("cpu"), Wrong("cpu"), Raises("cpu")]
    (found,) = run([Case("softmax", (4, 8), 1, "float32")], everybody, CPU, 1)
    return found


def test_who_is_wrong_gets_no_time(measured: CaseResult) -> None:
    ours, theirs, wrong, raises = measured.results
    assert (ours.status, theirs.status, wrong.status, raises.status) == ("ok", "ok", "wrong", "refused")
    assert wrong.times is None
    assert wrong.gbps is None
    assert wrong.failed
    assert not raises.failed
    assert raises.reason == "N must be a multiple of 8"
    rows = table(measured).rows
    assert rows[2][3:7] == ("", "", "", "")
    assert rows[2][7].startswith("WRONG: error")


def test_times_are_complete(measured: CaseResult) -> None:
    ours = measured.results[0]
    assert ours.times is not None
    assert 0 < ours.times.p20_us <= ours.times.median_us <= ours.times.p80_us
    assert ours.times.count >= 5
    assert ours.gbps == pytest.approx(256 / ours.times.median_us / 1e3)
    assert ours.of_copy == pytest.approx(ours.gbps / measured.copy_gbps)
    assert ours.plan is not None
    assert ours.plan.backend == "eager"
    assert ours.against_torch is not None


@pytest.mark.parametrize(
    ("shape", "ratio", "added_us", "within"),
    [
        ((4, 8), 9.0, 4.9, True),
        ((4, 8), 1.0, 5.1, False),
        ((1024, 1024), 1.029, 99.0, True),
        ((1024, 1024), 1.031, 0.1, False),
    ],
)
def test_our_layer_is_bounded_by_time_for_few_elements_and_by_ratio_for_many(
    shape: tuple[int, ...], ratio: float, added_us: float, within: bool, measured: CaseResult
) -> None:
    ours = replace(measured.results[0], against_torch=Against(ratio, added_us))
    found = CaseResult(Case("softmax", shape, 1, "float32"), results=[ours])
    assert found.within_cpu_bound is within
    assert replace(found, framework="jax").within_cpu_bound is None
    assert replace(found, results=[]).within_cpu_bound is None


def test_a_case_beyond_memory_is_skipped_and_the_next_measured() -> None:
    huge, small = Case("softmax", (1 << 20, 1 << 30), 1, "float32"), Case("softmax", (2, 3), 1, "float32")
    first, second = run([huge, small], [Ours("cpu")], CPU, 1)
    assert "GB" in str(first.skipped)
    assert second.skipped is None
    rows = table(first, second, absent={"liger": "not installed"}).rows
    assert rows[0][-1].startswith("skipped: needs")
    assert rows[-1][-1] == "absent: not installed"


def test_out_of_memory_half_way_is_skipped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr("onlinesoftmax.lab.bench.measure.make_inputs", no_room)
    (found,) = run([Case("softmax", (2, 3), 1, "float32")], [Ours("cpu")], CPU, 1)
    assert str(found.skipped).startswith("out of memory")


def test_our_own_crash_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ours, "prepare", Raises("cpu").prepare.__func__)
    (found,) = run([Case("softmax", (2, 3), 1, "float32")], [Ours("cpu")], CPU, 1)
    assert found.results[0].status == "failed"
    assert found.results[0].failed


def test_peers_say_what_they_lack() -> None:
    softmax = Case("softmax", (2, 3), 1, "float32")
    for case, liger_lacks, quack_lacks in (
        (softmax, None, None),
        (replace(softmax, operation="softmax_backward"), None, None),
        (LOSS, None, None),
        (replace(ROWS, with_gradient=True), None, None),
        (TOKENS, "has no token_logprobs", "has no token_logprobs"),
        (replace(softmax, operation="logsumexp"), "has no logsumexp", "has no logsumexp"),
        (replace(softmax, operation="log_softmax_backward"), "has no log_softmax_backward", "has no log_softmax_back"),
        (replace(softmax, fused=("scale", "mask")), "has no scale or mask", "has no scale or mask"),
        (replace(softmax, dim=0), "takes only the last dimension", "takes only the last dimension"),
        (replace(LOSS, shape=(4, 8, 3)), "takes only the last dimension", "takes only the last dimension"),
        (replace(softmax, shape=(2, 3, 4), dim=2), None, "takes only two dimensions"),
        (replace(LOSS, shape=(4,), dim=0), "takes only two dimensions", "takes only two dimensions"),
    ):
        for peer, lacks in zip(libraries.peers(["liger", "quack"], "cpu"), (liger_lacks, quack_lacks), strict=True):
            assert peer.why_absent()
            says = peer.supports(case)
            assert says is None if lacks is None else str(says).startswith(lacks), (peer.name, case, says)
            assert peer.overwrites == (("cross_entropy",) if peer.name == "liger" else ())


def _word(of_copy: float, problem: Problem, time_us: float = 500.0, **changes: Any) -> str:
    device = known("h200")
    changed = replace(plan(problem, device, Choice("triton")), **changes)
    return analysis.word(of_copy, time_us, 4.0, changed, problem, device)


ROW = Problem("softmax", 65536, 1024, "bfloat16")
UNALIGNED = replace(ROW, cols=1023, can_peel=False)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("at the floor", _word(0.951, ROW)),
        ("close", _word(0.85, ROW)),
        ("launch-bound", _word(0.3, ROW, time_us=11.9)),
        ("reads twice", _word(0.6, ROW, reads=2)),
        ("3 launches", _word(0.6, ROW, launches=3)),
        ("reads twice, 3 launches", _word(0.6, ROW, reads=2, launches=3)),
        ("narrow loads (2 bytes)", _word(0.4, UNALIGNED)),
        ("unexplained by the plan", _word(0.4, UNALIGNED, vector=8)),
        ("8 programs on 132 multiprocessors", _word(0.4, ROW, programs=8)),
        ("the framework's own kernel", _word(0.4, ROW, backend="eager")),
        ("unexplained by the plan", _word(0.4, ROW)),
        ("", analysis.word(0.4, 500.0, 4.0)),
        ("call-bound", analysis.word(0.4, 5.0, 4.0, device=known("cpu"))),
    ],
)
def test_words(word: str, found: str) -> None:
    assert found == word


def test_writing_is_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record_file.write(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range"):
        record_file.write(path, {"a": float("nan")})
    with pytest.raises(TypeError):
        record_file.write(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]
    with pytest.raises(OSError, match="there is no folder"):
        record_file.write(tmp_path / "new" / "record.json", {"a": 1})
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_outside_git_the_commit_is_that_of_the_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record_file.shutil, "which", lambda name: None)
    monkeypatch.setattr(record_file, "BUILT", tmp_path / "commit.txt")
    assert record_file.git_state() == {"commit": "unknown", "dirty": None}
    for text, dirty in (("abc\n", False), ("abc dirty\n", True)):
        record_file.BUILT.write_text(text)
        assert record_file.git_state() == {"commit": "abc", "dirty": dirty}


def test_the_commit_that_is_given_is_recorded() -> None:
    assert record_file.git_state("abc") == {"commit": "abc", "dirty": None}


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
    samples = logging_clock(log)._rounds(calls, {"fast": 8, "slow": 2}, 1)
    assert samples == {"fast": [250.0] * 8, "slow": [250.0] * 2}
    steps = [tuple(log[i : i + 4]) for i in range(0, len(log), 4)]
    assert set(steps) == {("flush", "event", "fast", "event"), ("flush", "event", "slow", "event")}
    assert [step[2] for step in steps].index("slow") > 2, "few repetitions are spread, not first"


def test_a_call_that_only_reads_finds_no_dirty_lines() -> None:
    log: list[str] = []
    calls = {"ours": lambda: log.append("ours"), "copy": lambda: log.append("copy")}
    logging_clock(log)._rounds(calls, dict.fromkeys(calls, 2), 2, Flush(clean=["ours"]))
    ours = ["flush", "flush", "read", "event", "ours", "event"]
    copy = ["flush", "flush", "event", "copy", "event"]
    assert log == 2 * (ours + copy)


def test_flushes_hide_the_host_time_of_the_slowest_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now, clock = 0, logging_clock([])

    def taking(us: int) -> Callable[[], None]:
        def call() -> None:
            nonlocal now
            now += 1000 * us

        return call

    monkeypatch.setattr(timing, "perf_counter_ns", lambda: now)
    # A flush takes 250 us, by the events of this clock.
    for us, flushes in ((10, 1), (160, 1), (170, 2), (1000, 6), (10**6, timing.MOST_FLUSHES)):
        assert clock._hiding([taking(5), taking(us)]) == flushes


@pytest.mark.gpu
def test_the_clean_buffer_is_as_large_as_the_flushed_one() -> None:
    clock = CudaClock(torch.device("cuda"))
    x = torch.zeros(1 << 20, device="cuda")
    samples = clock.measure({"sum": x.sum, "copy": x.clone}, 1, Flush(clean=["sum"]))
    assert min(map(min, samples.values())) > 0
    rows, maxima = clock._clean
    assert rows.nbytes == clock._flush.nbytes
    assert maxima.nbytes < 1 << 13
