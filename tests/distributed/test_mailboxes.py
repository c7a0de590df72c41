"""Which calls exchange states through peer memory, on a machine without a GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.core.task import ANY, Choice, ColumnRange
from onlinesoftmax.distributed import fast_path, mailboxes
from onlinesoftmax.kernels.cuda.process_mailboxes import ShardMail, words_of_mail

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

sharded = osm.distributed


@pytest.fixture
def group() -> Iterator[Any]:
    with sharded.one_process() as found:
        yield found


X, TARGET = torch.zeros(2, 4), torch.tensor([0, 3])

CALLS = {
    "softmax": lambda **kw: sharded.softmax(X, **kw),
    "log_softmax": lambda **kw: sharded.log_softmax(X, **kw),
    "logsumexp": lambda **kw: sharded.logsumexp(X, **kw),
    "cross_entropy": lambda **kw: sharded.cross_entropy(X, TARGET, **kw),
    "token_logprobs": lambda **kw: sharded.token_logprobs(X, TARGET, **kw).logprob,
}


@pytest.mark.parametrize("name", CALLS)
def test_the_argument_exchange(name: str, group: Any) -> None:
    """A value that is unknown, or that cannot be used here, is an error that says so; a collective can be used."""
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{name}\(\): exchange must be 'peer_memory', 'collective' or None"):
            CALLS[name](group=group, exchange="pigeons")
        with pytest.raises(ValueError, match="exchange='peer_memory' cannot be used: "):
            CALLS[name](group=group, exchange="peer_memory")
    assert torch.equal(CALLS[name](group=group, exchange="collective"), CALLS[name](group=group))


class OnGpu:
    """A tensor's properties, as those of one on a GPU."""

    is_cuda, device, layout = True, torch.device("cuda", 0), torch.strided

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype


class OtherTensor(OnGpu):
    """A tensor of another type, with functions of its own."""


def a_group(size: int, rank: int = 1) -> Any:
    return SimpleNamespace(group_name="a group", size=lambda: size, rank=lambda: rank)


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """GPUs that reach each other; the list gets the bytes of the mailboxes that are made."""
    made: list[int] = []

    def make(group: Any, device: Any, size: int) -> mailboxes.Peers:
        made.append(size)
        return mailboxes.Peers(group, "", f"mail {len(made)}", size)

    monkeypatch.setattr(mailboxes, "_PEERS", {})
    monkeypatch.setattr(mailboxes, "PLAIN_TYPES", (OnGpu,))
    monkeypatch.setattr(mailboxes, "_why_unreachable", lambda *_: "")
    monkeypatch.setattr(mailboxes, "_make_mailboxes", make)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def part(x: Any, *groups: Any, choice: Choice = ANY, exchange: str | None = None) -> ColumnRange | None:
    return mailboxes.columns_of(groups or (a_group(2),), x, 1, 10, 100, exchange, choice)


def test_the_part_of_a_shard(reachable: list[int]) -> None:
    group = a_group(2)
    assert part(OnGpu(8, 90), group) == ColumnRange(10, 100, 1, 2, "mail 1")
    # A shard without columns counts as one behind the last column.
    assert part(OnGpu(8, 0), group) == ColumnRange(100, 100, 1, 2, "mail 1")
    assert part(OnGpu(8, 90), group, exchange="collective") is None
    assert reachable == [mailboxes.LEAST_BYTES]


def test_mailboxes_grow(reachable: list[int]) -> None:
    """Mailboxes are made for the largest call so far, and for another group of the same name again."""
    group = a_group(2)
    names = [part(OnGpu(rows, 90), group).mail for rows in (8, 4096, 100_000, 8)]  # type: ignore[union-attr]  a part
    assert names == ["mail 1", "mail 1", "mail 2", "mail 2"]
    assert reachable[1] >= 8 * mailboxes.words_of_mail(100_000 * 2 * mailboxes.MESSAGE_WORDS[4])
    assert part(OnGpu(8, 90), a_group(2)).mail == "mail 3"  # type: ignore[union-attr]  a part


@pytest.mark.parametrize(
    ("reason", "x", "groups", "choice"),
    [
        ("the shard is not on a GPU", X, (), ANY),
        ("backend is 'triton'", OnGpu(8, 90), (), Choice("triton")),
        ("CUDA kernels have no strategy 'split'", OnGpu(8, 90), (), Choice(strategy="split")),
        ("the shard is no plain tensor", OtherTensor(8, 90), (), ANY),
        ("the dtype is torch.float8_e4m3fn", OnGpu(8, 90, dtype=torch.float8_e4m3fn), (), ANY),
        ("there are no rows", OnGpu(0, 90), (), ANY),
        ("several process groups", OnGpu(8, 90), (a_group(2), a_group(2)), ANY),
        ("the group has 9 processes", OnGpu(8, 90), (a_group(9),), ANY),
        ("the group has 1 process, not 2 to 8", OnGpu(8, 90), (a_group(1),), ANY),
        ("more than 64 MiB", OnGpu(1 << 20, 90), (), ANY),
    ],
)
def test_calls_that_need_a_collective(
    reachable: list[int], reason: str, x: Any, groups: tuple[Any, ...], choice: Choice
) -> None:
    assert part(x, *groups, choice=choice) is None
    with pytest.raises(ValueError, match=reason):
        part(x, *groups, choice=choice, exchange="peer_memory")
    assert not reachable


def test_mailboxes_that_cannot_grow_serve_smaller_calls(reachable: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure to make larger ones is remembered, so that large calls do not try again and again."""
    group, tried = a_group(2), []
    assert part(OnGpu(8, 90), group) == ColumnRange(10, 100, 1, 2, "mail 1")
    monkeypatch.setattr(
        mailboxes, "_make_mailboxes", lambda g, *_: tried.append(g) or mailboxes.Peers(g, "out of memory")
    )
    for _ in range(2):
        assert part(OnGpu(100_000, 90), group) is None
        with pytest.raises(ValueError, match="out of memory"):
            part(OnGpu(100_000, 90), group, exchange="peer_memory")
        assert part(OnGpu(8, 90), group) == ColumnRange(10, 100, 1, 2, "mail 1")
    assert tried == [group]


def test_a_captured_call_makes_no_mailboxes(reachable: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured call uses the mailboxes of an earlier one, and a collective if these are absent or too small."""
    group = a_group(2)
    for made in ([], [mailboxes.LEAST_BYTES]):
        with monkeypatch.context() as capture:
            capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert part(OnGpu(100_000, 90), group) is None
            with pytest.raises(ValueError, match="a CUDA graph is captured; make a call of this size once before"):
                part(OnGpu(100_000, 90), group, exchange="peer_memory")
            assert reachable == made
            assert (part(OnGpu(8, 90), group) is None) == (not made)
        part(OnGpu(8, 90), group)


def test_gpus_that_do_not_reach_each_other(reachable: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is asked once for each group."""
    asked: list[str] = []
    monkeypatch.setattr(
        mailboxes, "_why_unreachable", lambda *_: asked.append("") or "the processes run on several hosts"
    )
    group = a_group(2)
    assert part(OnGpu(8, 90), group) is None
    with pytest.raises(ValueError, match="several hosts"):
        part(OnGpu(8, 90), group, exchange="peer_memory")
    assert len(asked) == 1
    assert not reachable


def test_the_key_of_a_call_knows_how_its_group_exchanges(reachable: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is unknown before its first call, in which all processes find out about it together."""
    near, far = a_group(2), SimpleNamespace(**vars(a_group(2)) | {"group_name": "far"})
    assert mailboxes.known_exchange(near) == mailboxes.known_exchange(far) == ""
    # A group of one process, or of more than mailboxes serve, never asks for them.
    assert [mailboxes.known_exchange(a_group(size)) for size in (1, mailboxes.MOST_PROCESSES + 1)] == ["collective"] * 2
    part(OnGpu(8, 90), near)
    assert mailboxes.known_exchange(near) == "mail 1"
    monkeypatch.setattr(mailboxes, "_why_unreachable", lambda *_: "the processes run on several hosts")
    part(OnGpu(8, 90), far)
    assert mailboxes.known_exchange(far) == "collective"


def test_a_repeated_softmax_takes_the_prepared_call(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without score options is prepared once for each way of exchange that is known before it."""
    # The function of this name hides the module.
    module = sys.modules["onlinesoftmax.distributed.softmax"]
    checked: list[str] = []

    def apply(call: Any) -> torch.Tensor:
        checked.append(call.settings.part.mail)
        return torch.softmax(call.x, 1)

    monkeypatch.setattr(module.autograd, "apply", apply)
    monkeypatch.setattr(module.autograd, "prepared_call", lambda _: lambda x, out: torch.softmax(x, 1))
    given, want = {"group": group, "shards": sharded.Shards(0, 4, 4)}, torch.softmax(X, 1)
    # The first call makes the mailboxes, and the second larger ones: the way that was known before is another one.
    for known, used in (("", "1"), ("1", "2"), ("2", "2"), ("2", "2"), ("2", "2")):
        monkeypatch.setattr(fast_path, "COLLECTIVE", known)
        monkeypatch.setattr(module, "columns_of", lambda *_, used=used: ColumnRange(0, 4, 0, 2, used))
        assert torch.equal(sharded.softmax(X, **given), want)
    assert checked == ["1", "2", "2"]
    for options in ({"scale": 1.0, "softcap": 9.0}, {"mask": X == 0}):
        for _ in range(2):
            sharded.softmax(X, **options, **given)
    assert len(checked) == 7


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The streams of PyTorch: `waits` gets (a stream, the stream that it waits for), `captured` has those of a graph.

    The handle of the default stream is 0, of which ExternalStream would make another stream.
    """
    found = SimpleNamespace(waits=[], captured=set(), current=0)

    def stream(handle: int) -> Any:
        return SimpleNamespace(handle=handle, wait_stream=lambda other: found.waits.append((handle, other.handle)))

    @contextlib.contextmanager
    def entered(one: Any) -> Iterator[None]:
        before, found.current = found.current, one.handle
        yield
        found.current = before

    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: stream(0))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: stream(handle) if handle else None)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.current in found.captured)
    return found


def _launches(mail: ShardMail, streams: SimpleNamespace, *handles: int) -> list[int]:
    """The numbers of launches on streams of these handles."""
    found = []
    for handle in handles:
        streams.current = handle
        found.append(mail.next_launch(24, handle, 0))
        if not found[-1]:
            mail.count_replays()
    return found


def test_launches_on_several_streams_follow_each_other(streams: SimpleNamespace) -> None:
    memory = torch.zeros(words_of_mail(64), dtype=torch.int64)
    mail = ShardMail([1 << 20, 1 << 21], memory, 1.0, None)
    assert (mail.addresses, mail.set_words) == ([1 << 20, 1 << 21, *[0] * 6], 64)
    assert _launches(mail, streams, 0, 0, 7, 7, 0) == [1, 2, 3, 4, 5]
    assert streams.waits == [(7, 0), (0, 7)]
    assert (mail.launches, mail.sent) == (5, 5 * 12)
    with pytest.raises(RuntimeError, match="the messages of a launch have 65 words"):
        mail.next_launch(65, 0, 0)


def test_launches_of_a_graph_wait_for_each_other_alone(streams: SimpleNamespace) -> None:
    """CUDA has no wait between a stream that is captured and one that is not.

    A small kernel counts the replays beside the mailboxes.
    """
    memory = torch.zeros(words_of_mail(64), dtype=torch.int64)
    mail = ShardMail([1 << 20, 1 << 21], memory, 1.0, None)
    assert _launches(mail, streams, 5) == [1]
    streams.captured = {7, 8}
    assert _launches(mail, streams, 7, 7, 8) == [0, 0, 0]
    assert streams.waits == [(8, 7)]
    streams.captured = set()
    assert _launches(mail, streams, 5) == [2]
    streams.captured = {9}
    assert _launches(mail, streams, 9) == [0]
    # Stream 8 belongs to a graph whose capture has ended.
    assert streams.waits == [(8, 7)]
    streams.captured = set()
    assert _launches(mail, streams, 0) == [3]
    assert streams.waits == [(8, 7), (0, 5)]
    # A stream that is captured now has made an earlier launch.
    assert _launches(mail, streams, 6) == [4]
    streams.waits.clear()
    streams.captured = {6}
    assert _launches(mail, streams, 5) == [5]
    assert not streams.waits
    numbers = memory[2 * 64 :].view(32, 16)
    assert (numbers[:, 1] == 4).all()
    assert memory.sum() == 4 * 32


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ([[1, 7, 1], [1, 7, 2]], ""),
        ([[1, 7, 1], [1, 8, 2]], "several hosts"),
        ([[1, 7, 1], [1, 7, 1]], "share a GPU"),
        ([[1, 7, 1], [0, 7, 2]], "cannot run on another process"),
    ],
)
def test_what_processes_tell_each_other(told: list[list[int]], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes.registry, "unavailable", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a GPU"))
    monkeypatch.setattr(mailboxes, "gathered", lambda *_: torch.tensor(told))
    monkeypatch.setattr(mailboxes, "device_of_small_exchanges", lambda *_: "cpu")
    found = mailboxes._why_unreachable(a_group(2), torch.device("cuda", 0))
    assert reason in found
    assert bool(found) == bool(reason)


def test_addresses_in_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of PyTorch that know an offset give the addresses of segments."""
    symmetric = pytest.importorskip("torch.distributed._symmetric_memory")
    for offset in ({}, {"offset": 512}):
        handle = SimpleNamespace(buffer_ptrs=[4096, 8192], **offset)
        monkeypatch.setattr(symmetric, "rendezvous", lambda *_, handle=handle: handle)
        more = offset.get("offset", 0)
        assert mailboxes._rendezvous(torch.empty(0), a_group(2)) == (handle, [4096 + more, 8192 + more])


def test_mailboxes_that_are_made_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph that is captured outside of it adds to them."""
    symmetric = pytest.importorskip("torch.distributed._symmetric_memory")
    monkeypatch.setattr(symmetric, "empty", torch.empty)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    with torch.inference_mode():
        memory = mailboxes._allocate(torch.device("cpu"), 8 * words_of_mail(64))
        mail = ShardMail([1 << 20, 1 << 21], memory, 1.0, None)
    mail.count_replays()
    assert memory.sum() == 32


@pytest.mark.parametrize("step", ["_allocate", "_rendezvous"])
def test_symmetric_memory_that_fails_is_a_reason(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes agree after each step, so that none waits for one that has failed."""
    agreed: list[bool] = []

    def fails(*_: Any) -> Any:
        raise RuntimeError("no peer access")

    monkeypatch.setattr(mailboxes, "_allocate", lambda *_: None)
    monkeypatch.setattr(mailboxes, step, fails)
    monkeypatch.setattr(mailboxes, "gathered", lambda t, _: agreed.append(bool(t.any())) or t)
    monkeypatch.setattr(mailboxes, "device_of_small_exchanges", lambda *_: "cpu")
    found = mailboxes._make_mailboxes(a_group(2), torch.device("cuda", 0), 1 << 20)
    assert found.reason == "PyTorch's symmetric memory failed: no peer access"
    assert not found.mail
    assert agreed == ([True] if step == "_allocate" else [False, True])
