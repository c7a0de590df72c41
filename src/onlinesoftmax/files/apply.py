"""The softmax family over chunks: of an iterator, or of files larger than memory.

A row is seen as chunks; their states merge into the state of the row, and with it any chunk can be
normalised by itself.  So a row of any length needs memory for one chunk, and is read twice: once
for its state and once for its result.  Rows that fit in a chunk are read once.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..core.arrays import Array
from ..core.operations import OPERATIONS
from ..core.state import State
from .convert import Widening, storage, widening
from .formats import ITEM_BYTES, FileError, Stored, new_header, read_header, read_into, replacing, write_from
from .tiles import Band, Sizes, Tile, bands, reads

Progress = Callable[[int, int], None]

STREAMED = ("softmax", "log_softmax", "logsumexp")
"""The operations that a stream can compute: the methods of State."""

CHUNK_BYTES = 16 << 20


def state_of_chunks(chunks: Iterable[Array], dim: int = -1) -> State:
    """The state of a row, or of many rows at once, that arrives in chunks.

    Args:
        chunks: Floating-point NumPy, torch or JAX arrays that agree in shape but for `dim`; at least one.
        dim: Dimension along which the rows were cut, and which is reduced.

    Returns:
        The state that State.of would give for the concatenated chunks, up to rounding.  Never more than
        one chunk and log2(number of chunks) states are held.

    Raises:
        ValueError: there are no chunks.
        TypeError: a chunk is not a floating-point array.
        IndexError: dim is out of range.

    Example:
        >>> import numpy as np
        >>> state = state_of_chunks(np.full(1000, k, np.float32) for k in range(3))
        >>> round(float(state.logsumexp()), 4)  # log(1000 * (exp(0) + exp(1) + exp(2)))
        9.3154
    """
    # Merged as the bits of a counter carry: a balanced tree, so rounding grows with its depth.
    states: list[State] = []
    for count, chunk in enumerate(chunks, 1):
        states.append(State.of(chunk, dim))
        trailing_zeros = (count & -count).bit_length() - 1
        for _ in range(trailing_zeros):
            right = states.pop()
            states.append(states.pop().merge(right))
    return State.merge_all(states)


def softmax_chunks(
    chunks: Callable[[], Iterable[Array]], dim: int = -1, *, operation: str = "softmax"
) -> Iterator[Array]:
    """Softmax, or log-softmax, of rows that arrive in chunks: one chunk out for each chunk in.

    Args:
        chunks: Called twice, to give the same chunks twice: for the state, and for the results.
            They are as for `state_of_chunks`.
        dim: Dimension along which the rows were cut, and which is normalised.
        operation: "softmax" or "log_softmax".

    Yields:
        Arrays with the kind, shape and dtype of each chunk, computed in float32, or float64 for float64.

    Raises:
        ValueError: there are no chunks, or the operation is unknown.
        TypeError: a chunk is not a floating-point array.
        IndexError: dim is out of range.

    Source: the two passes of Milakov and Gimelshein, arXiv:1805.02867.

    Example:
        >>> import numpy as np
        >>> row = np.arange(10, dtype=np.float32)
        >>> parts = softmax_chunks(lambda: np.array_split(row, 3))
        >>> round(float(np.concatenate(list(parts)).sum()), 6)
        1.0
    """
    if operation not in STREAMED or OPERATIONS[operation].per_row:
        raise ValueError(f"softmax_chunks: unknown operation {operation!r}; it is 'softmax' or 'log_softmax'")
    state = state_of_chunks(chunks(), dim)
    for chunk in chunks():
        yield getattr(state, operation)(chunk)


@dataclass(frozen=True)
class Report:
    """What `apply_file` did.

    Attributes:
        tensors: Tensors processed.
        elements: Elements in them.
        bytes_read: Bytes of elements read; those of a row too long for a chunk count twice.
        bytes_written: Bytes of elements written.
        seconds: Wall-clock time, until the target was safely on disk.
    """

    tensors: int
    elements: int
    bytes_read: int
    bytes_written: int
    seconds: float


def apply_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    axis: int = -1,
    operation: str = "softmax",
    dtype: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    tensors: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Apply softmax, log_softmax or logsumexp to the tensors of a file of any size, in bounded memory.

    Computed by torch where it is installed (for its threads), else by NumPy (with ml_dtypes for
    bfloat16), in float32, or in float64 when the input or the output is; rounded once, at the end.

    Args:
        source: A .npy file (C or Fortran order; two-byte void is bfloat16, as ml_dtypes saves it) or a
            .safetensors file; float16, bfloat16, float32 or float64, any shape, 0-d and empty too.
        target: The file to write, with the suffix of `source`; it may be `source` itself.  It appears
            under its name complete, or, after any error, not at all; a file that was there stays.
        axis: Dimension to normalise or reduce; negative counts from the end.  logsumexp drops it.
        operation: "softmax", "log_softmax" or "logsumexp".
        dtype: Name of the output dtype; None for the dtype of each tensor.
        chunk_bytes: Working memory, in bytes: a bound on a chunk and its temporaries together.  The states
            of a strided axis too long for a chunk come on top, and are about as much again at most.
        tensors: Names of the tensors to process in a .safetensors file, the others being left out of
            `target`; None for all.
        progress: Called as progress(done_bytes, total_bytes) each time a chunk has been read.  Both count
            bytes of elements read from `source`: a row too long for a chunk is read twice and counts
            twice, except by logsumexp.  An exception that it raises ends the run and leaves no file.

    Raises:
        FileError: (a ValueError) a file is missing, truncated, corrupt, of another format or dtype, or
            cannot be written; the disk is full; an argument is out of range.  One sentence says which.

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
    source, target = Path(source), Path(target)
    inputs, metadata = read_header(source)
    _check_request(source, target, operation, dtype, chunk_bytes)
    inputs = _select(source, inputs, tensors)
    axes = [_axis_of(source, tensor, axis) for tensor in inputs]
    shaped = [_output(tensor, axis, operation, dtype) for tensor, axis in zip(inputs, axes, strict=True)]
    header, outputs = new_header(target.suffix, shaped, metadata)
    arrays = _arrays(source, inputs + outputs)

    pairs = zip(inputs, outputs, axes, strict=True)
    jobs = [_Job(old, new, old.split_at(axis), operation, chunk_bytes) for old, new, axis in pairs]
    done, total = 0, sum(job.bytes_to_read for job in jobs)

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    written = sum(tensor.nbytes for tensor in outputs)
    with source.open("rb", buffering=0) as reader, replacing(target, len(header) + written) as writer:
        write_from(writer, 0, memoryview(header), target)
        for job in jobs:
            transfer = _Transfer(job, _Ends(reader, writer, source, target), arrays, count)
            transfer.run()
    elements = sum(tensor.elements for tensor in inputs)
    return Report(len(inputs), elements, done, written, time.perf_counter() - began)


def _check_request(source: Path, target: Path, operation: str, dtype: str | None, chunk_bytes: int) -> None:
    if target.suffix.lower() != source.suffix.lower():
        raise FileError(f"{target}: must end in {source.suffix}, as {source} does: formats are not converted")
    if operation not in STREAMED:
        raise FileError(f"{source}: unknown operation {operation!r}; choose one of {', '.join(STREAMED)}")
    if dtype is not None and dtype not in ITEM_BYTES:
        raise FileError(f"{source}: unknown output dtype {dtype!r}; choose one of {', '.join(ITEM_BYTES)}")
    if chunk_bytes <= 0:
        raise FileError(f"{source}: chunk_bytes must be positive, got {chunk_bytes}")


def _select(source: Path, found: list[Stored], names: Sequence[str] | None) -> list[Stored]:
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
        if tensor.dtype not in ITEM_BYTES:
            what = f"tensor {tensor.name!r}" if named else "the array"
            hint = "; name the tensors to process (tensors=...) to leave it out" if named else ""
            raise FileError(f"{source}: {what} is {tensor.dtype}, not one of {', '.join(ITEM_BYTES)}{hint}")
    return found


def _axis_of(source: Path, tensor: Stored, axis: int) -> int:
    ndim = max(len(tensor.shape), 1)
    if not -ndim <= axis < ndim:
        what = f"tensor {tensor.name!r}" if tensor.name else "the array"
        raise FileError(f"{source}: axis {axis} is out of range for {what} of shape {tensor.shape}")
    return axis % ndim


def _output(tensor: Stored, axis: int, operation: str, dtype: str | None) -> Stored:
    shape = tensor.shape
    if OPERATIONS[operation].per_row:
        shape = shape[:axis] + shape[axis + 1 :]
    return replace(tensor, dtype=dtype or tensor.dtype, shape=shape)


def _arrays(source: Path, tensors: Sequence[Stored]) -> Widening:
    try:
        return widening(bfloat16=any(tensor.dtype == "bfloat16" for tensor in tensors))
    except ModuleNotFoundError as error:
        raise FileError(f"{source}: {error}") from error


@dataclass(frozen=True)
class _Ends:
    reader: io.FileIO
    writer: io.FileIO
    source: Path
    target: Path


@dataclass(frozen=True)
class _Job:
    """One tensor, where it lies in both files, and `split`: its sizes (outer, axis, inner) in file order."""

    source: Stored
    target: Stored
    split: Sizes
    operation: str
    chunk_bytes: int

    @property
    def per_row(self) -> bool:
        return OPERATIONS[self.operation].per_row

    @property
    def wide(self) -> str:
        return "float64" if "float64" in (self.source.dtype, self.target.dtype) else "float32"

    @property
    def limit(self) -> int:
        """Elements in a tile: a chunk as it is read, as it is written, and four arrays inside State."""
        per_element = ITEM_BYTES[self.source.dtype] + ITEM_BYTES[self.target.dtype] + 4 * ITEM_BYTES[self.wide]
        return max(1, self.chunk_bytes // per_element)

    @property
    def bytes_to_read(self) -> int:
        return self.source.nbytes * (1 if self.per_row else reads(self.split, self.limit))


class _Transfer:
    """A job under way."""

    def __init__(self, job: _Job, ends: _Ends, arrays: Widening, count: Callable[[int], None]) -> None:
        self.job, self.ends, self.arrays, self.count = job, ends, arrays, count
        # Chunks are read into the same memory in turn: State is done with one before the next is asked for.
        self.raw = np.empty(min(job.limit, job.source.elements), storage(job.source.dtype))

    def run(self) -> None:
        for band in bands(self.job.split, self.job.limit):
            if self.job.per_row:
                self._reduce(band)
            else:
                self._normalise(band)

    def _reduce(self, band: Band) -> None:
        lse = state_of_chunks(map(self._load, band), dim=1).logsumexp()
        outer, _, inner = self.job.split
        self._store(Tile(band.outer, (0, 1), band.inner), (outer, 1, inner), lse)

    def _normalise(self, band: Band) -> None:
        whole = [self._load(tile) for tile in band] if band.step >= band.length else None
        results = softmax_chunks(lambda: whole or map(self._load, band), dim=1, operation=self.job.operation)
        for tile, result in zip(band, results, strict=True):
            self._store(tile, self.job.split, result)

    def _load(self, tile: Tile) -> Array:
        outer, axis, inner = tile.shape
        chunk = self.raw[: outer * axis * inner]
        itemsize, view, start = chunk.itemsize, _bytes_of(chunk), 0
        for first, elements in tile.runs(self.job.split):
            stop = start + elements * itemsize
            offset = self.job.source.offset + first * itemsize
            read_into(self.ends.reader, offset, view[start:stop], self.ends.source)
            start = stop
        if self.job.source.swapped:
            chunk.byteswap(inplace=True)
        self.count(chunk.nbytes)
        return self.arrays.widen(chunk, self.job.source.dtype, self.job.wide).reshape(tile.shape)

    def _store(self, tile: Tile, split: Sizes, result: Array) -> None:
        chunk = self.arrays.narrow(result, self.job.target.dtype)
        if self.job.target.swapped:
            chunk = chunk.byteswap()
        itemsize, view, start = chunk.itemsize, _bytes_of(chunk), 0
        for first, elements in tile.runs(split):
            stop = start + elements * itemsize
            offset = self.job.target.offset + first * itemsize
            write_from(self.ends.writer, offset, view[start:stop], self.ends.target)
            start = stop


def _bytes_of(chunk: np.ndarray) -> memoryview:
    # By way of NumPy: memoryview.cast refuses an array without elements.
    return chunk.reshape(-1).view(np.uint8).data
