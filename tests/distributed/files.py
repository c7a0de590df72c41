"""One file shared by several processes, against one process."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load_file, save_file

import onlinesoftmax as osm
from onlinesoftmax.cli import main
from onlinesoftmax.files import FileError

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
        try:
            osm.apply_file(source, target, chunk_bytes=400, group=dist.group.WORLD, **options)
        except error as found:
            assert message in str(found), found  # noqa: PT017  the check runs outside of pytest
        else:
            raise AssertionError("no error")
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
    check(FileError, "have different arguments", operation=("softmax", "log_softmax")[rank % 2])
    if rank == 1:
        check(FileError, "unknown operation", operation="sort")
    else:
        check(FileError, "process 1 failed: ")


def a_process_that_dies_leaves_no_file(folder: Path) -> None:
    """Process 0, which has created the file, cannot delete it."""
    source, target = folder / "die.npy", folder / "none.npy"
    if dist.get_rank() == 0:
        np.save(source, np.zeros((1, 1000), np.float32))
    dist.barrier()
    try:
        progress = (lambda *_: os._exit(0)) if dist.get_rank() == 0 else None
        osm.apply_file(source, target, chunk_bytes=400, group=dist.group.WORLD, progress=progress)
    except FileError as error:
        assert "another process has ended" in str(error)  # noqa: PT017
        assert not target.exists()
        assert not list(folder.glob("*.tmp"))
        # A group with a dead process cannot be taken down in an orderly way.
        os._exit(0)
    raise AssertionError("no error")


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
