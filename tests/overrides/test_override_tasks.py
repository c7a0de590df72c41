"""Blocks of `override` in asyncio tasks, generators and coroutines; blocks left out of order; copies of the object."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.overrides import Report

X = torch.zeros(2)


def depth() -> int:
    return int(torch._C._len_torch_function_stack())


def left(mode: Any) -> int:
    """Number of calls that a block has seen and left to PyTorch, as all calls on a CPU."""
    return sum(mode.report().left.values())


def test_a_block_is_around_its_own_task_only() -> None:
    """Tasks enter and leave blocks in turn, two of them blocks of one object; a fourth task has no block."""
    a, b = osm.override(), osm.override()

    async def inside(mode: Any, calls: int, before: int) -> None:
        for _ in range(before):
            await asyncio.sleep(0)
        with mode:
            for _ in range(calls):
                await asyncio.sleep(0)
                torch.softmax(X, 0)
        torch.softmax(X, 0)

    async def outside() -> None:
        for _ in range(12):
            torch.softmax(X, 0)
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        await asyncio.gather(inside(a, 3, 0), inside(b, 5, 1), inside(a, 2, 1), outside())

    asyncio.run(all_of_them())
    assert (left(a), left(b), depth()) == (5, 5, 0)


def test_each_task_has_its_own_order_of_blocks() -> None:
    outer, inner = osm.override(backend="eager"), osm.override(backend="eager")

    async def task(*modes: Any) -> None:
        with modes[0]:
            await asyncio.sleep(0)
            with modes[1]:
                await asyncio.sleep(0)
                torch.softmax(X, 0)

    async def all_of_them() -> None:
        await asyncio.gather(task(outer, inner), task(inner, outer), task(outer, inner))

    asyncio.run(all_of_them())
    assert (outer.report().taken, inner.report().taken) == ({"softmax": 1}, {"softmax": 2})
    assert depth() == 0


def test_a_task_that_a_block_starts_is_inside_until_the_block_ends() -> None:
    mode = osm.override()

    async def child(nested: bool) -> None:
        if nested:
            with mode:
                for _ in range(4):
                    torch.softmax(X, 0)
                    await asyncio.sleep(0)
        for _ in range(4):
            torch.softmax(X, 0)
            await asyncio.sleep(0)

    async def parent(nested: bool) -> None:
        with mode:
            task = asyncio.create_task(child(nested))
            await asyncio.sleep(0)
        await task

    asyncio.run(parent(nested=False))
    assert left(mode) == 1
    asyncio.run(parent(nested=True))
    assert (left(mode), depth()) == (1 + 4, 0)


def test_a_decorated_coroutine() -> None:
    @osm.override(backend="eager")
    async def waits() -> str:
        torch.softmax(X, 0)
        await asyncio.sleep(0)
        torch.softmax(X, 0)
        return "done"

    class Waits:
        async def __call__(self) -> None:
            torch.softmax(X, 0)

    async def beside() -> None:
        for _ in range(3):
            torch.softmax(X, 0)
            await asyncio.sleep(0)

    async def both() -> list[Any]:
        return await asyncio.gather(waits(), beside())

    assert asyncio.run(both()) == ["done", None]
    assert waits.report() == Report({"softmax": 2}, {})
    other: Any = osm.override(backend="eager")(Waits())
    asyncio.run(other())
    assert (other.report(), depth()) == (Report({"softmax": 1}, {}), 0)


def test_a_decorated_generator_leaves_the_code_between_its_steps_alone() -> None:
    @osm.override(backend="eager")
    def steps() -> Iterator[torch.Tensor]:
        got = yield torch.softmax(X, 0)
        assert got == "sent"
        try:
            yield torch.softmax(X, 0)
        finally:
            torch.softmax(X, 0)

    generator: Any = steps()
    next(generator)
    assert depth() == 0
    torch.softmax(X, 0)
    generator.send("sent")
    generator.close()
    assert steps.report() == Report({"softmax": 3}, {})


def test_blocks_that_are_left_in_another_order() -> None:
    """Two generators, each with a block around its step, end in the order in which they began."""
    a, b = osm.override(), osm.override()

    def holds(mode: Any) -> Iterator[None]:
        with mode:
            yield

    first, second = holds(a), holds(b)
    next(first)
    next(second)
    # A block that leaves a call to PyTorch passes the call on to the block around it.
    torch.softmax(X, 0)
    assert list(first) == []
    torch.softmax(X, 0)
    assert list(second) == []
    torch.softmax(X, 0)
    assert (left(a), left(b), depth()) == (1, 2, 0)


@pytest.mark.parametrize("entered", [False, True])
def test_leaving_a_block_that_is_not_open_is_an_error(entered: bool) -> None:
    mode, around = osm.override(), osm.override()
    if entered:
        with mode:
            pass
    with around:
        with pytest.raises(RuntimeError, match=r"override\(\): the block is not open on this thread: enter it"):
            mode.__exit__(None, None, None)
        torch.softmax(X, 0)
        assert (left(around), depth()) == (1, 1)
    assert depth() == 0


def test_a_block_is_left_on_its_own_thread() -> None:
    mode = osm.override()
    errors: list[str] = []

    def leave() -> None:
        try:
            mode.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    with mode:
        inherited = contextvars.copy_context()
        for target in (leave, lambda: inherited.run(leave)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        torch.softmax(X, 0)
    assert (len(errors), left(mode), depth()) == (2, 1, 0)


def test_a_block_that_was_entered_in_another_context_can_be_left() -> None:
    """Fixtures of asynchronous test runners do so."""
    mode = osm.override()
    contextvars.copy_context().run(mode.__enter__)
    torch.softmax(X, 0)
    contextvars.copy_context().run(mode.__exit__, None, None, None)
    assert (left(mode), depth()) == (0, 0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mode: pickle.loads(pickle.dumps(mode))])
def test_a_copy_is_an_object_of_its_own(copied: Callable[[Any], Any]) -> None:
    mode = osm.override(backend="eager")
    with mode:
        torch.softmax(X, 0)
        other = copied(mode)
        with pytest.raises(RuntimeError, match="the block is not open"):
            other.__exit__(None, None, None)
    with other:
        torch.logsumexp(X, 0)
    assert (mode.report(), other.report()) == (Report({"softmax": 1}, {}), Report({"logsumexp": 1}, {}))
    with pytest.raises(RuntimeError, match=r"override\(strict=True\)"), copied(osm.override(strict=True)):
        torch.softmax(X, 0)
