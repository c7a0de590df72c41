"""Headers of `.npy` and `.safetensors` files: the place of each tensor in a file, and headers for new files.

The format's own library (`numpy.lib.format`, `safetensors`) reads the header and checks it. Neither library can
write a file piece by piece, so new headers are made here, and `disk` reads and writes the data.

Formats: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html and
https://huggingface.co/docs/safetensors (u64 header length, JSON header, data).
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..core.task import ITEMSIZE
from .disk import FileError, naming, reading

SUFFIXES = (".npy", ".safetensors")

MOST_NPY_HEADER = 10_000
"""Bytes of the longest header that is read, as in NumPy: an array of floats has a hundred."""

_NPY_START = 12
"""Bytes before the header: the magic, the version and the length."""

_SAFETENSORS_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True)
class Stored:
    """One tensor in a file.

    Attributes:
        name: Name in the file; empty in a .npy file, which holds one array without a name.
        dtype: Key of ITEMSIZE; for a dtype that is not processed, the file's own name of the dtype.
        shape: Shape of the array in the usual order of dimensions.
        offset: Bytes from the start of the file to the first element.
        fortran: True when the first dimension is the innermost in the file.
        swapped: True when the file's byte order is not the byte order of this machine.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    fortran: bool = False
    swapped: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.elements * ITEMSIZE[self.dtype]

    def split_at(self, axis: int) -> tuple[int, int, int]:
        """Return the sizes (outer, axis, inner) in file order: before, along and after `axis` (0 <= axis)."""
        shape = self.shape or (1,)
        if self.fortran:
            shape, axis = shape[::-1], len(shape) - 1 - axis
        return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def read_header(path: Path) -> tuple[list[Stored], dict[str, str] | None]:
    """Return the tensors of a file, in file order, and its metadata (`.safetensors` only).

    Raises:
        FileError: the file is missing, no regular file, in another format, truncated or corrupt.
    """
    if path.suffix.lower() not in SUFFIXES:
        has = f"ends in {path.suffix!r}, not in" if path.suffix else "has no suffix, and needs"
        raise FileError(f"{path}: the name {has} one of {', '.join(SUFFIXES)}")
    with reading(path) as file, naming(path, "cannot be read"):
        size = os.fstat(file.fileno()).st_size
        if path.suffix.lower() == ".npy":
            tensors, metadata = [_read_npy_header(path, file.read(_NPY_START + MOST_NPY_HEADER))], None
        else:
            tensors, metadata = _read_safetensors_header(path, file)
    for tensor in tensors:
        if tensor.dtype in ITEMSIZE and (promised := tensor.offset + tensor.nbytes) > size:
            raise FileError(f"{path}: truncated: the header promises {promised} bytes and the file holds {size}")
    return tensors, metadata


def _read_npy_header(path: Path, start: bytes) -> Stored:
    """The array of a file that begins with these bytes."""
    file = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(file)
        # Version 3 differs from version 2 in the encoding of field names only. An array of floats has no fields.
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        length = int.from_bytes(start[8 : 10 if version == (1, 0) else 12], "little")
        if length > MOST_NPY_HEADER:
            raise ValueError(f"its header has {length} bytes, and at most {MOST_NPY_HEADER} are read")
        shape, fortran, dtype = read(file)
        offset = file.tell()
    except Exception as error:  # NumPy parses the header as Python source, and a damaged header fails in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileError(f"{path}: not a .npy file: {reason}") from error
    if min(shape, default=0) < 0:
        raise FileError(f"{path}: not a .npy file: negative size in shape {shape}")
    if max(shape, default=0) > sys.maxsize:
        raise FileError(f"{path}: not a .npy file: no array has the shape {shape}")
    # NumPy has no bfloat16. ml_dtypes saves its bfloat16 as a void dtype of two bytes.
    plain = dtype.names is None and dtype.subdtype is None
    name = "bfloat16" if plain and dtype.kind == "V" and dtype.itemsize == 2 else dtype.name
    return Stored("", name, tuple(map(int, shape)), offset, fortran, swapped=plain and not dtype.isnative)


def _read_safetensors_header(path: Path, file: io.FileIO) -> tuple[list[Stored], dict[str, str] | None]:
    if importlib.util.find_spec("safetensors") is None:
        raise FileError(f"{path}: a .safetensors file needs the safetensors package: pip install 'onlinesoftmax[cli]'")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            metadata = opened.metadata()
    except SafetensorError as error:
        raise FileError(f"{path}: truncated or not a .safetensors file: {error}") from error
    # The library has checked the header, but it does not return the offsets.
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = [
        Stored(
            name, _SAFETENSORS_NAMES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0], swapped=sys.byteorder == "big",
        )
        for name, entry in header.items()
    ]  # fmt: skip
    return sorted(tensors, key=lambda tensor: tensor.offset), metadata


def new_header(
    suffix: str, tensors: Sequence[Stored], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[Stored]]:
    """Return the header of a new file, and the tensors, in the given order, with their offsets in that file."""
    return _new_npy_header(tensors[0]) if suffix.lower() == ".npy" else _new_safetensors_header(tensors, metadata)


def _new_npy_header(tensor: Stored) -> tuple[bytes, list[Stored]]:
    header = io.BytesIO()
    descr = "<V2" if tensor.dtype == "bfloat16" else np.lib.format.dtype_to_descr(np.dtype(tensor.dtype))
    fields = {"descr": descr, "fortran_order": tensor.fortran, "shape": tensor.shape}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue(), [replace(tensor, offset=header.tell(), swapped=False)]


def _new_safetensors_header(
    tensors: Sequence[Stored], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[Stored]]:
    names = {dtype: name for name, dtype in _SAFETENSORS_NAMES.items()}
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    # The widest dtype comes first, as in files that the library writes. So every tensor is aligned to its elements.
    for tensor in sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor.dtype], tensor.name)):
        starts[tensor.name], end = end, end + tensor.nbytes
        offsets = [starts[tensor.name], end]
        entries[tensor.name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    swapped = sys.byteorder == "big"
    return header, [
        replace(tensor, offset=len(header) + starts[tensor.name], fortran=False, swapped=swapped) for tensor in tensors
    ]
