"""`apply_file`: the softmax family over the tensors of a file that may be larger than memory.

A row that fits in a chunk is read once. A longer row is read twice: once for its state, once for its result.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from ..core.options import is_number
from ..core.task import ITEMSIZE
from ..core.whole_files import destination
from ..core.wrong_calls import unknown
from ..ops import OPERATIONS
from .chunks import STREAMED
from .disk import FileError, naming, reading, write_from
from .formats import Stored, new_header, read_header
from .team import Team
from .tiles import share_of
from .transfer import Ends, Job, Transfer, converter

Progress = Callable[[int, int], None]
"""Function of (bytes done, bytes in total)."""

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Report:
    """Result of `apply_file`.

    Attributes:
        tensors: Number of tensors processed.
        elements: Number of elements in these tensors.
        bytes_read: Bytes of elements read; the bytes of a row that is read twice count twice.
        bytes_written: Bytes of elements written.
        seconds: Wall-clock time until the target was safely on disk.
    """

    tensors: int
    elements: int
    bytes_read: int
    bytes_written: int
    seconds: float


def apply_file(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, axis: int = -1, operation: str = "softmax",
    dtype: str | None = None, chunk_bytes: int = CHUNK_BYTES, tensors: Sequence[str] | None = None,
    progress: Progress | None = None, group: Any = None,
) -> Report:  # fmt: skip
    """Apply softmax, log_softmax or logsumexp to the tensors of a file of any size, in bounded memory.

    torch computes where it is installed, because it uses several threads; otherwise NumPy computes. The
    arithmetic is float32, or float64 if the input or the output is float64. Results are rounded once, at the end.

    Args:
        source: `.npy` file (C or Fortran order; a two-byte void dtype is bfloat16, as ml_dtypes saves it) or
            `.safetensors` file. The dtype is float16, bfloat16, float32 or float64; the shape may be any.
        target: File to write, with the suffix of `source`; it may be `source` itself. The file appears when
            it is complete. After an error it does not appear, and an older file of that name is unchanged; `group`
            names one exception. An older file keeps its permissions, and a link stays: the file behind it is replaced.
            Another hard link keeps the old content. What a killed process leaves is deleted by the next run in the
            same folder.
        axis: Dimension to normalise or reduce; a negative axis counts from the end. logsumexp drops it.
        operation: "softmax", "log_softmax" or "logsumexp".
        dtype: Name of the output dtype; None keeps the dtype of each tensor.
        chunk_bytes: Working memory in bytes, for a chunk and its temporary arrays together. A strided axis
            that is longer than a chunk needs memory for its states as well, at most about as much again.
        tensors: Names of the tensors to process in a `.safetensors` file; `target` holds these only. None for all.
        progress: Function called as progress(done_bytes, total_bytes) of this process after each chunk is read. A row
            that is read twice counts twice. An exception raised by this function ends the run and leaves no file.
        group: Process group of torch that exchanges CPU tensors, as gloo does. Its processes make the same call and
            share the work: each reads a part of `source` and writes a region of `target`, which all of them see under
            these paths. If one process fails, all raise an error and there is no new file. The exception is a
            failure after the complete file has taken its name: the file stays, and the other processes say that it was
            written. None for this process alone.

    Raises:
        FileError: (a ValueError) a file is missing, no regular file, truncated, corrupt, in another format or dtype,
            or cannot be written; the disk is full; an argument is out of range; another process has failed. The
            message is one sentence.
        TypeError: an argument is of the wrong type.

    Example:
        >>> import numpy as np, os, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> x, y = os.path.join(folder.name, "x.npy"), os.path.join(folder.name, "y.npy")
        >>> np.save(x, np.zeros((3, 4), np.float32))
        >>> report = apply_file(x, y)
        >>> np.load(y)[0].tolist(), report.bytes_read
        ([0.25, 0.25, 0.25, 0.25], 48)
        >>> folder.cleanup()
    """
    began = time.perf_counter()
    source, target = _path("source", source), _path("target", target)
    team = Team(target, group)
    with team.failing_together():
        _check_types(axis, chunk_bytes, tensors, progress)
        found, metadata = read_header(source)
        _check_request(source, target, operation, dtype, chunk_bytes)
        inputs = _select(source, found, tensors)
        axes = [_axis_of(source, tensor, axis) for tensor in inputs]
        shaped = [_output(tensor, axis, operation, dtype) for tensor, axis in zip(inputs, axes, strict=True)]
        header, outputs = new_header(target.suffix, shaped, metadata)
        splits = [old.split_at(axis) for old, axis in zip(inputs, axes, strict=True)]
        jobs = [
            Job(old, new, split, operation, int(chunk_bytes), share_of(split, team.rank, team.size))
            for old, new, split in zip(inputs, outputs, splits, strict=True)
        ]
        read = _run(source, target, jobs, header, team, progress)
    elements, written = sum(job.source.elements for job in jobs), sum(job.target.nbytes for job in jobs)
    return Report(len(jobs), elements, read, written, time.perf_counter() - began)


def _run(
    source: Path, target: Path, jobs: Sequence[Job], header: bytes, team: Team, progress: Progress | None
) -> int:  # fmt: skip
    """Run all jobs; return the bytes of elements that all processes have read."""
    try:
        arrays = converter({dtype for job in jobs for dtype in (job.source.dtype, job.target.dtype)})
    except ModuleNotFoundError as error:
        raise FileError(f"{source}: {error}") from error
    done, total = 0, sum(job.bytes_to_read for job in jobs)

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    # The processes of a team compare their requests; each may have named the files from its own folder.
    work = [(job.source, job.target, job.split, job.operation, job.chunk_bytes) for job in jobs]
    request = repr(([os.path.realpath(path) for path in (source, target)], source.stat().st_size, work))
    size = len(header) + sum(job.target.nbytes for job in jobs)
    with reading(source) as reader, team.replacing(size, request) as writer:
        if team.rank == 0:
            write_from(writer, 0, memoryview(header), target)
        for job in jobs:
            Transfer(job, Ends(reader, writer, source, target, team), arrays, count).run()
    return sum(team.agree(done))


def _path(argument: str, value: Any) -> Path:
    try:
        return Path(value)
    except TypeError:
        raise TypeError(f"apply_file(): {argument} must be a path, not {type(value).__name__}") from None


def _check_types(axis: Any, chunk_bytes: Any, tensors: Any, progress: Any) -> None:
    """Raise an error for an argument of the wrong type; `_check_request` checks the others."""
    is_names = isinstance(tensors, Iterable) and not isinstance(tensors, bytes)
    given = {
        "axis": (axis, "an int", is_number(axis) and isinstance(axis, Integral)),
        "chunk_bytes": (chunk_bytes, "a number of bytes", is_number(chunk_bytes)),
        "tensors": (tensors, "names or None", tensors is None or is_names),
        "progress": (progress, "a function or None", progress is None or callable(progress)),
    }
    for argument, (value, wanted, is_right) in given.items():
        if not is_right:
            raise TypeError(f"apply_file(): {argument} must be {wanted}, not {type(value).__name__}")


def _check_request(source: Path, target: Path, operation: str, dtype: str | None, chunk_bytes: int) -> None:
    with naming(target, "cannot be created"):
        destination(target)
    if target.suffix.lower() != source.suffix.lower():
        raise FileError(f"{target}: must end in {source.suffix}, as {source} does: formats are not converted")
    if operation not in STREAMED:
        raise FileError(f"{source}: {unknown('operation', operation, STREAMED)}")
    if dtype is not None and not (isinstance(dtype, str) and dtype in ITEMSIZE):
        raise FileError(f"{source}: {unknown('output dtype', dtype, ITEMSIZE)}")
    if not chunk_bytes >= 1:  # NaN compares false
        raise FileError(f"{source}: chunk_bytes must be positive, got {chunk_bytes}")
    if chunk_bytes > sys.maxsize:
        raise FileError(f"{source}: chunk_bytes must be at most {sys.maxsize}, got {chunk_bytes}")


def _select(source: Path, found: list[Stored], names: Sequence[str] | None) -> list[Stored]:
    """Return the tensors to process, in the order of `names`, or all in file order."""
    named = source.suffix.lower() == ".safetensors"
    if names is not None:
        if not named:
            raise FileError(f"{source}: a .npy file holds one array without a name, so none can be chosen by name")
        by_name = {tensor.name: tensor for tensor in found}
        chosen = dict.fromkeys([names] if isinstance(names, str) else names)
        for name in chosen:
            if name not in by_name:
                raise FileError(f"{source}: has no tensor {name!r}; it holds {', '.join(by_name) or 'none'}")
        found = [by_name[name] for name in chosen]
    for tensor in found:
        if tensor.dtype not in ITEMSIZE:
            hint = "; name the tensors to process (tensors=..., --tensor) to leave it out" if named else ""
            raise FileError(f"{source}: {_name(tensor)} is {tensor.dtype}, not one of {', '.join(ITEMSIZE)}{hint}")
    return found


def _axis_of(source: Path, tensor: Stored, axis: int) -> int:
    """Return `axis` counted from 0."""
    ndim = max(len(tensor.shape), 1)
    if not -ndim <= axis < ndim:
        raise FileError(
            f"{source}: axis {axis} is out of range for {_name(tensor)} of shape {tensor.shape}: "
            f"it is {-ndim} to {ndim - 1}"
        )
    return axis % ndim


def _name(tensor: Stored) -> str:
    return f"tensor {tensor.name!r}" if tensor.name else "the array"


def _output(tensor: Stored, axis: int, operation: str, dtype: str | None) -> Stored:
    """Describe the output tensor; its offset is not known yet."""
    shape = tensor.shape
    if OPERATIONS[operation].per_row:
        shape = shape[:axis] + shape[axis + 1 :]
    return replace(tensor, dtype=dtype or tensor.dtype, shape=shape)
