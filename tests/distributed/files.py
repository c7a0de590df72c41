"""One file shared by several processes, against one process."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file, save_file

import onlinesoftmax as osm
from onlinesoftmax.cli import main
from onlinesoftmax.core.state import State
from onlinesoftmax.files import FileError
from onlinesoftmax.files.team import Team

CASES: tuple[tuple[tuple[int, ...], int, str, str], ...] = (
    ((1, 1001), -1, "softmax", "float32"),
    ((1, 1001), -1, "logsumexp", "float32"),
    ((50, 7), -1, "log_softmax", "float16"),
    ((30, 40, 3), 1, "softmax", "float64"),
    ((2, 90, 5), 1, "log_softmax", "float32"),
    ((2, 90, 5), 1, "logsumexp", "float32"),
    ((1, 2), -1, "softmax", "float32"),
    ((0, 4), -1, "softmax", "float32"),
    ((3, 0), -1, "logsumexp", "float32"),
)
"""(shape, axis, operation, dtype): one long row, many rows, strided axes, an axis shorter than the team, nothing."""


def files_are_those_of_one_process(folder: Path) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    for number, (shape, axis, operation, dtype) in enumerate(CASES):
        x = (5 * np.random.default_rng(number).standard_normal(shape)).astype(dtype)
        source, one, target = (folder / f"{name}{number}.npy" for name in ("x", "one", "y"))
        if rank == 0:
            np.save(source, x)
            osm.apply_file(source, one, axis=axis, operation=operation, chunk_bytes=2000)
        dist.barrier()
        report = osm.apply_file(source, target, axis=axis, operation=operation, chunk_bytes=2000, group=group)
        want = np.load(one)
        np.testing.assert_allclose(np.load(target), want, rtol=4 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).eps)
        assert (report.elements, report.bytes_written) == (x.size, want.nbytes)
        assert report.bytes_read in (x.nbytes, 2 * x.nbytes)
    source = folder / "x.safetensors"
    tensors = {"a": np.ones((1, 500), np.float32), "b": np.arange(12, dtype=np.float32).reshape(3, 4)}
    if rank == 0:
        save_file(tensors, source)
    dist.barrier()
    osm.apply_file(source, source, group=group, chunk_bytes=800)
    for name, y in load_file(source).items():
        want = torch.from_numpy(tensors[name]).softmax(-1).numpy()
        np.testing.assert_allclose(y, want, rtol=1e-6)


def a_failure_of_one_is_a_failure_of_all(folder: Path) -> None:
    """The process that fails raises its own error; the others say which one failed, and why; no file changes."""
    rank, source, target = dist.get_rank(), folder / "fail.npy", folder / "kept.npy"
    if rank == 0:
        np.save(source, np.zeros((1, 1000), np.float32))
        target.write_bytes(b"old")
    dist.barrier()

    def fail(done: int, total: int) -> None:
        raise OSError("the disk is on fire")

    def check(error: type[Exception], message: str, **options: object) -> None:
        start = time.monotonic()
        with pytest.raises(error, match=message):
            osm.apply_file(source, target, chunk_bytes=400, group=dist.group.WORLD, **options)
        assert time.monotonic() - start < 10
        dist.barrier()
        assert target.read_bytes() == b"old"
        assert not list(folder.glob("*.tmp"))
        dist.barrier()

    for failing in (0, dist.get_world_size() - 1):
        if rank == failing:
            check(OSError, "the disk is on fire", progress=fail)
        else:
            check(FileError, f"process {failing} failed: the disk is on fire")
    check(FileError, "have different files or arguments", operation=("softmax", "log_softmax")[rank % 2])
    check(FileError, "have different files or arguments", axis=rank % 2)
    kept = target
    target = folder / f"of_{rank % 2}.npy"
    target.write_bytes(b"old")
    check(FileError, "have different files or arguments")
    target = kept
    if rank == 1:
        check(FileError, "unknown operation", operation="sort")
    else:
        check(FileError, "process 1 failed: ")


def no_file_of(folder: Path) -> tuple[Path, Path]:
    """(source, target): the source is a row that the processes share, and there is no target."""
    source, target = folder / "late.npy", folder / "named.npy"
    if dist.get_rank() == 0:
        np.save(source, np.zeros((1, 1000), np.float32))
        target.unlink(missing_ok=True)
    dist.barrier()
    return source, target


def failing_before(point: int, fail: Callable[[], object]) -> AbstractContextManager[object]:
    """Calls `fail` in place of the agreement 5 or 6 of files/team.py, in a process that is not process 0."""
    agree, flushed = Team.agree, []

    def late(self: Team, message: object = None, error: BaseException | None = None) -> list[object]:
        if error is None and self.written is None:
            flushed.append(self)
        if error is None and (len(flushed) == 2 if point == 5 else isinstance(message, int)):
            fail()
        return agree(self, message, error)

    return mock.patch.object(Team, "agree", late)


def on_fire(*_: object) -> None:
    raise OSError("the disk is on fire")


def end(*_: object) -> None:
    """Ends this process as a kill does: without an exception."""
    os._exit(0)


_all_reduce = State.all_reduce


def out_of_memory(state: State, group: object) -> State:
    """Stands for `State.all_reduce` in a process that has too little memory for the merge."""
    _all_reduce(state, group)
    raise RuntimeError("not enough memory")


def late_failures_say_what_became_of_the_file(folder: Path) -> None:
    """A file that has its name is complete, and stays; the errors of all processes say so."""
    rank = dist.get_rank()
    afterwards = "was written, and then process 1 failed: the disk is on fire"
    failures: tuple[tuple[int, AbstractContextManager[object], type[Exception], str, str], ...] = (
        (1, failing_before(5, on_fire), OSError, "on fire", afterwards),
        (1, failing_before(6, on_fire), OSError, "on fire", afterwards),
        (
            0, mock.patch.object(Path, "replace", on_fire), FileError, "cannot be replaced",
            "was not written, because process 0 failed: ",
        ),
        (
            1, mock.patch.object(State, "all_reduce", out_of_memory), RuntimeError, "not enough memory",
            "was not written, because process 1 failed: not enough memory",
        ),
    )  # fmt: skip
    for failing, patch, kind, own, others in failures:
        source, target = no_file_of(folder)
        expected, message = (kind, own) if rank == failing else (FileError, others)
        with pytest.raises(expected, match=message), patch if rank == failing else contextlib.nullcontext():
            osm.apply_file(source, target, chunk_bytes=400, group=dist.group.WORLD)
        dist.barrier()
        assert target.exists() == others.startswith("was written")
        assert not target.exists() or (np.load(target) == np.float32(0.001)).all()
        assert not list(folder.glob("*.tmp"))
        dist.barrier()


def each_process_flushes_once(folder: Path) -> None:
    source, target = no_file_of(folder)
    with mock.patch.object(os, "fsync", wraps=os.fsync) as flush:
        osm.apply_file(source, target, chunk_bytes=400, group=dist.group.WORLD)
    assert flush.call_count == 1


def a_process_that_dies_after_the_rename(folder: Path) -> None:
    """Process 0 knows that the file has its name, and process 2 does not."""
    source, target = no_file_of(folder)
    rank = dist.get_rank()
    patch = failing_before(5, end) if rank == 1 else contextlib.nullcontext()
    message = "was written, and then an exchange failed" if rank == 0 else "may or may not have been written"
    with pytest.raises(FileError, match=f"{message}: another process has ended"), patch:
        osm.apply_file(source, target, chunk_bytes=400, group=dist.group.WORLD)
    assert (np.load(target) == np.float32(0.001)).all()
    # A group with a dead process cannot be taken down in an orderly way.
    os._exit(0)


def a_process_that_dies_before_the_rename(folder: Path) -> None:
    """The other processes cannot know whether process 0 has renamed the file."""
    source, target = no_file_of(folder)
    said = pytest.raises(FileError, match="may or may not have been written: another process has ended")
    with said, mock.patch.object(Path, "replace", end):
        osm.apply_file(source, target, chunk_bytes=400, group=dist.group.WORLD)
    assert not target.exists()
    os._exit(0)


def a_process_that_dies_leaves_no_file(folder: Path) -> None:
    """Process 0, which has created the file, cannot delete it."""
    source, target = folder / "die.npy", folder / "none.npy"
    if dist.get_rank() == 0:
        np.save(source, np.zeros((1, 1000), np.float32))
    dist.barrier()
    progress = (lambda *_: os._exit(0)) if dist.get_rank() == 0 else None
    with pytest.raises(FileError, match="another process has ended"):
        osm.apply_file(source, target, chunk_bytes=400, group=dist.group.WORLD, progress=progress)
    assert not target.exists()
    assert not list(folder.glob("*.tmp"))
    os._exit(0)


def the_command_line(folder: Path) -> None:
    """`onlinesoftmax apply` with the variables that torchrun sets, in a process without a group."""
    source, target = folder / "x.npy", folder / "y.npy"
    rank = int(os.environ["RANK"])
    if rank == 0:
        np.save(source, np.zeros((1, 1000), np.float32))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for _ in range(100):
            if source.exists():
                break
            time.sleep(0.1)
        sys.argv = ["onlinesoftmax", "apply", str(source), str(target), "--json"]
        with contextlib.suppress(SystemExit):
            main()
    assert bool(printed.getvalue()) == (rank == 0)
    assert (np.load(target) == np.float32(0.001)).all()


def the_example_of_a_head(folder: Path) -> None:
    """examples/tensor_parallel_head.py with the variables that torchrun sets; prints into a file of this process."""
    script = str(Path(__file__).parents[2] / "examples" / "tensor_parallel_head.py")
    sys.argv = [script, "--steps", "3", "--words", "101"]
    with (
        (folder / f"{os.environ['RANK']}.txt").open("w") as printed,
        contextlib.redirect_stdout(printed),
        pytest.raises(SystemExit) as end,
    ):
        runpy.run_path(script, run_name="__main__")
    assert not end.value.code
