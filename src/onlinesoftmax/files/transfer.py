"""Transfer of one tensor from the source file to the target file, one tile at a time, with conversion of elements."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..core.arrays import Array
from ..core.declaration import accumulator_dtype
from ..core.state import State
from ..core.task import ITEMSIZE
from ..ops import OPERATIONS
from .chunks import state_of_chunks
from .disk import read_into, write_from
from .formats import Stored
from .team import Team
from .tiles import Band, Share, Sizes, Tile, bands, reads


@dataclass(frozen=True)
class Ends:
    """The two open files and their paths, which are for error messages; the processes that share the files."""

    reader: io.FileIO
    writer: io.FileIO
    source: Path
    target: Path
    team: Team


@dataclass(frozen=True)
class Job:
    """One tensor to process.

    Attributes:
        source: Place of the input tensor in the source file.
        target: Place of the output tensor in the target file.
        split: Sizes (outer, axis, inner) of the input, in file order.
        operation: Name in `chunks.STREAMED`.
        chunk_bytes: Working memory in bytes.
        share: The part of the tensor that this process reads and writes.
    """

    source: Stored
    target: Stored
    split: Sizes
    operation: str
    chunk_bytes: int
    share: Share

    @property
    def per_row(self) -> bool:
        """True when the operation returns one number for each row."""
        return OPERATIONS[self.operation].per_row

    @property
    def wide(self) -> str:
        """Dtype of the arithmetic."""
        return accumulator_dtype(self.source.dtype, self.target.dtype)

    @property
    def limit(self) -> int:
        """Largest number of elements in a tile: memory holds its input, its output and four arrays of `State`."""
        per_element = ITEMSIZE[self.source.dtype] + ITEMSIZE[self.target.dtype] + 4 * ITEMSIZE[self.wide]
        return max(1, self.chunk_bytes // per_element)

    @property
    def bytes_to_read(self) -> int:
        """Bytes of elements that this process reads; a row that is read twice counts twice."""
        nbytes = math.prod(self.share.box.shape) * ITEMSIZE[self.source.dtype]
        return nbytes * (1 if self.per_row else reads(self.share.largest, self.limit))


class Transfer:
    """A job that runs.

    Args:
        job: The job.
        ends: The files to read and to write.
        arrays: Conversion between file elements and arrays.
        count: Function called with the number of bytes after each tile is read.
    """

    def __init__(self, job: Job, ends: Ends, arrays: Converter, count: Callable[[int], None]) -> None:
        self.job, self.ends, self.arrays, self.count = job, ends, arrays, count
        # Every tile is read into the same memory. State has finished with a tile before the next one is read.
        self.raw = np.empty(min(job.limit, job.source.elements), storage(job.source.dtype))

    def run(self) -> None:
        """Read, compute and write the whole tensor."""
        if not self.job.target.elements:
            return  # A dimension of any length beside an empty one: there is nothing to read or to write.
        for band in bands(self.job.share, self.job.limit):
            if self.job.per_row:
                self._reduce(band)
            else:
                self._normalise(band)

    def _reduce(self, band: Band) -> None:
        outer, axis, inner = self.job.split
        tile = Tile(band.outer, (0, 1), band.inner)
        if axis:
            result = getattr(self._state(map(self._load, band)), self.job.operation)()
        else:
            wide = self.job.wide
            result = self.arrays.widen(np.full(tile.shape, self._of_empty_row, wide), wide, wide)
        if self.job.share.merges and self.ends.team.rank:
            return  # Every process has the same result, and process 0 writes it.
        self._store(tile, (outer, 1, inner), result)

    @cached_property
    def _of_empty_row(self) -> float:
        """The result of a row without elements, of which a small file may have a billion."""
        return float(getattr(State.of(np.zeros(0, self.job.wide)), self.job.operation)())

    def _normalise(self, band: Band) -> None:
        whole = [self._load(tile) for tile in band] if band.is_one_tile else None
        result_of = getattr(self._state(whole or map(self._load, band)), self.job.operation)
        for tile, chunk in zip(band, whole or map(self._load, band), strict=True):
            self._store(tile, self.job.split, result_of(chunk))

    def _state(self, chunks: Iterable[Array]) -> State:
        state = state_of_chunks(chunks, dim=1)
        return self.ends.team.merge(state) if self.job.share.merges else state

    def _load(self, tile: Tile) -> Array:
        outer, axis, inner = tile.shape
        chunk = self.raw[: outer * axis * inner]
        for offset, part in _parts(tile, self.job.split, chunk):
            read_into(self.ends.reader, self.job.source.offset + offset, part, self.ends.source)
        if self.job.source.swapped:
            chunk.byteswap(inplace=True)
        self.count(chunk.nbytes)
        return self.arrays.widen(chunk, self.job.source.dtype, self.job.wide).reshape(tile.shape)

    def _store(self, tile: Tile, split: Sizes, result: Array) -> None:
        chunk = self.arrays.narrow(result, self.job.target.dtype)
        if self.job.target.swapped:
            chunk = chunk.byteswap()
        for offset, part in _parts(tile, split, chunk):
            write_from(self.ends.writer, self.job.target.offset + offset, part, self.ends.target)


def _parts(tile: Tile, split: Sizes, chunk: np.ndarray) -> Iterator[tuple[int, memoryview]]:
    """(offset in the tensor, bytes) of each run of elements that are neighbours in a file."""
    itemsize, view, start = chunk.itemsize, _bytes_of(chunk), 0
    for first, elements in tile.runs(split):
        stop = start + elements * itemsize
        yield first * itemsize, view[start:stop]
        start = stop


def _bytes_of(chunk: np.ndarray) -> memoryview:
    # NumPy makes the view, because memoryview.cast refuses an array without elements.
    return chunk.reshape(-1).view(np.uint8).data


def storage(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype that carries the bits of `dtype`; NumPy itself has no bfloat16."""
    return np.dtype(np.int16 if dtype == "bfloat16" else dtype)


class _Torch:
    """Conversion by torch.  Both directions copy only where the dtype changes."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def widen(self, raw: np.ndarray, dtype: str, wide: str) -> Array:
        """Convert elements of `dtype`, carried by their storage dtype, to `wide`: float32 or float64."""
        return self.torch.from_numpy(raw).view(getattr(self.torch, dtype)).to(getattr(self.torch, wide))

    def narrow(self, x: Array, dtype: str) -> np.ndarray:
        """Round x to `dtype`; the result is contiguous and carried by its storage dtype."""
        x = x.to(getattr(self.torch, dtype)).contiguous()
        result: np.ndarray = (x.view(self.torch.int16) if dtype == "bfloat16" else x).numpy()
        return result


class _NumPy:
    """The same by NumPy."""

    def widen(self, raw: np.ndarray, dtype: str, wide: str) -> Array:
        with np.errstate(all="ignore"):
            return raw.view(_numpy_dtype(dtype)).astype(wide, copy=False)

    def narrow(self, x: Array, dtype: str) -> np.ndarray:
        # A number that is too large or too small for the narrower dtype becomes inf or 0 without a warning.
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(x.astype(_numpy_dtype(dtype), copy=False)).view(storage(dtype))


def _numpy_dtype(dtype: str) -> np.dtype[Any]:
    if dtype != "bfloat16":
        return np.dtype(dtype)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


Converter = _Torch | _NumPy


def converter(dtypes: Collection[str]) -> Converter:
    """Return the converter of the installed array library.

    Args:
        dtypes: Names of all dtypes to convert from or to.

    Raises:
        ModuleNotFoundError: bfloat16 is among the dtypes, and neither torch nor ml_dtypes is installed.
    """
    if importlib.util.find_spec("torch") is not None:
        return _Torch()
    if "bfloat16" in dtypes and importlib.util.find_spec("ml_dtypes") is None:
        raise ModuleNotFoundError(
            "bfloat16 needs torch or ml_dtypes, and neither is installed: pip install 'onlinesoftmax[cli]'"
        )
    return _NumPy()
