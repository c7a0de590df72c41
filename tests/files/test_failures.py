"""Failures of apply_file, one sentence that names the file, without a file that is left; chunks that do not fit."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onlinesoftmax.files.apply import apply_file
from onlinesoftmax.files.chunks import softmax_chunks, state_of_chunks
from onlinesoftmax.files.disk import FileError

torch = pytest.importorskip("torch", reason="chunks may be tensors")
safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="makes the .safetensors inputs")


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def raise_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError])
@pytest.mark.parametrize("at", [1, 30, -1])
def test_interrupted_run_leaves_nothing(tmp_path: Path, at: int, error: type[BaseException], existing: bool) -> None:
    np.save(tmp_path / "x.npy", normal(50, 60))
    if existing:
        (tmp_path / "y.npy").write_bytes(b"precious")
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at or (at == -1 and done == total):
            raise error

    with pytest.raises(error) as caught:
        apply_file(tmp_path / "x.npy", tmp_path / "y.npy", chunk_bytes=2400, progress=progress)
    assert type(caught.value) is error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "y.npy"][: 1 + existing]
    assert not existing or (tmp_path / "y.npy").read_bytes() == b"precious"


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot reserve space")
def test_full_disk_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", normal(50, 60))
    monkeypatch.setattr(os, "posix_fallocate", raise_full)
    with pytest.raises(FileError, match=r"y\.npy: no room for 12128 bytes: No space left"):
        apply_file(tmp_path / "x.npy", tmp_path / "y.npy", progress=lambda *_: pytest.fail("it had begun"))
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_disk_that_fills_up_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", normal(50, 60))
    monkeypatch.setattr(os, "fsync", raise_full)
    with pytest.raises(FileError, match=r"y\.npy: cannot be written: No space left"):
        apply_file(tmp_path / "x.npy", tmp_path / "y.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_source_that_shrinks(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", normal(50, 60))
    with pytest.raises(FileError, match=r"x\.npy: became shorter"):
        apply_file(
            tmp_path / "x.npy",
            tmp_path / "y.npy",
            chunk_bytes=2400,
            progress=lambda *_: os.truncate(tmp_path / "x.npy", 200),
        )
    assert not (tmp_path / "y.npy").exists()


SHAPES = [(10**9, 0), (0, 10**9), (10**9, 0, 10**9), (2**63 - 1, 0), (0,)]


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operation", ["softmax", "log_softmax"])
def test_empty_arrays_of_any_shape_take_no_time(
    shape: tuple[int, ...], axis: int, operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header_of(fields(shape=shape))(tmp_path / "x.npy")
    monkeypatch.setattr("onlinesoftmax.files.transfer.bands", lambda *_: pytest.fail("it reads"))
    report = apply_file(tmp_path / "x.npy", tmp_path / "y.npy", axis=axis, operation=operation, chunk_bytes=1)
    assert (report.elements, report.bytes_read, report.bytes_written) == (0, 0, 0)
    with (tmp_path / "y.npy").open("rb") as file:
        np.lib.format.read_magic(file)
        assert np.lib.format.read_array_header_1_0(file)[0] == shape


@pytest.mark.parametrize(("shape", "axis"), [((1000, 0), 1), ((0, 1000), 0), ((3, 0, 5), 1)])
def test_rows_without_elements_are_not_reduced_one_by_one(
    shape: tuple[int, ...], axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.zeros(shape, np.float16))
    monkeypatch.setattr("onlinesoftmax.files.transfer.state_of_chunks", lambda *_, **__: pytest.fail("it reduces"))
    apply_file(tmp_path / "x.npy", tmp_path / "y.npy", axis=axis, operation="logsumexp", chunk_bytes=100)
    result = np.load(tmp_path / "y.npy")
    assert result.dtype == np.float16
    np.testing.assert_array_equal(result, np.full([n for n in shape if n], -np.inf))


def test_a_result_larger_than_any_file_is_refused(tmp_path: Path) -> None:
    header_of(fields("<f8", (2**62, 0)))(tmp_path / "x.npy")
    with pytest.raises(FileError, match=r"y\.npy: no room for \d+ bytes"):
        apply_file(tmp_path / "x.npy", tmp_path / "y.npy", operation="logsumexp")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def saved(x: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, x)


def one_tensor(path: Path) -> None:
    safetensors_numpy.save_file({"a": np.zeros(9)}, path)


def cut_after(make: Callable[[Path], None], size: int) -> Callable[[Path], None]:
    """Makes a file, and leaves these first bytes, or all but the last ones."""

    def cut(path: Path) -> None:
        make(path)
        os.truncate(path, path.stat().st_size + size if size < 0 else size)

    return cut


def fields(descr: object = "<f4", shape: object = (2,)) -> str:
    return repr({"descr": descr, "fortran_order": False, "shape": shape}) + "\n"


def header_of(text: str) -> Callable[[Path], Any]:
    """Writes a .npy file with this header."""
    return lambda path: path.write_bytes(b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode())


def sparse(magic: bytes, length: int) -> Callable[[Path], None]:
    """Writes a header of zeros that take no room on the disk."""

    def write(path: Path) -> None:
        path.write_bytes(magic + length.to_bytes(4, "little"))
        os.truncate(path, 12 + length)

    return write


BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing": ("x.npy", lambda path: None, "cannot be read: No such file"),
    "folder": ("x.npy", Path.mkdir, "is a folder"),
    "suffix": ("x.bin", Path.touch, "ends in '.bin', not in one of .npy, .safetensors"),
    "no suffix": ("x", Path.touch, "no suffix"),
    "not npy": ("x.npy", lambda path: path.write_bytes(b"PK\3\4" * 9), "not a .npy file"),
    "empty npy": ("x.npy", Path.touch, "not a .npy file"),
    "npy of the future": ("x.npy", lambda path: path.write_bytes(b"\x93NUMPY\x09\0" + b" " * 90), "not a .npy file"),
    "truncated npy": (
        "x.npy",
        cut_after(saved(np.zeros(100)), -1),
        "truncated: the header promises 928 bytes and the",
    ),
    "truncated npy header": ("x.npy", cut_after(saved(np.zeros(100)), 50), "not a .npy file"),
    "npy header without its end": ("x.npy", header_of("{'descr': '<f4', 'shape': (2, 3"), "not a .npy file: "),
    "npy header without its quote": ("x.npy", header_of("{'descr: '<f4', 'shape': (2, 3)}"), "not a .npy file: "),
    "npy header with a list as its key": ("x.npy", header_of("{[]: 1}"), "not a .npy file: unhashable type"),
    "npy header with an empty descr": ("x.npy", header_of(fields(descr=("<f4",), shape=(2,))), "not a .npy file: "),
    "npy header that is nested deeply": ("x.npy", header_of("-" * 9000), "not a .npy file: "),
    "ints": ("x.npy", saved(np.arange(3)), "the array is int64, not one of float16"),
    "complex": ("x.npy", saved(np.zeros(3, complex)), "the array is complex128"),
    "structured": ("x.npy", saved(np.zeros(3, "f4,f4")), "not one of float16"),
    "objects": ("x.npy", saved(np.array([print], object)), "the array is object"),
    "npy header of a GiB": ("x.npy", sparse(b"\x93NUMPY\2\0", 1 << 30), "header has 1073741824 bytes"),
    "npy header of version 3": ("x.npy", sparse(b"\x93NUMPY\3\0", 1 << 28), "has 268435456 bytes"),
    "npy header of a byte too many": ("x.npy", sparse(b"\x93NUMPY\2\0", 10_001), "10001 bytes"),
    "size beyond any array": ("x.npy", header_of(fields(shape=(10**24, 0))), f"no array has the shape ({10**24}, 0)"),
    "fifo": ("x.npy", os.mkfifo, "x.npy: is a fifo, not a file"),
    "fifo of tensors": ("x.safetensors", os.mkfifo, "is a fifo, not a file"),
    "link to a device": ("x.npy", lambda path: path.symlink_to("/dev/zero"), "is a device, not a file"),
    "loop of links": ("x.npy", lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    "corrupt safetensors": ("x.safetensors", lambda path: path.write_bytes(b"\xff" * 50), "not a .safetensors file"),
    "empty safetensors": ("x.safetensors", Path.touch, "not a .safetensors file"),
    "truncated safetensors": ("x.safetensors", cut_after(one_tensor, -1), "truncated"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_source(tmp_path: Path, case: str) -> None:
    name, make, message = BROKEN[case]
    make(tmp_path / name)
    with pytest.raises(FileError) as caught:
        apply_file(tmp_path / name, (tmp_path / "y").with_suffix(Path(name).suffix))
    text = str(caught.value)
    assert text.startswith(str(tmp_path / name))
    assert message in text
    assert "\n" not in text
    assert {path.name for path in tmp_path.iterdir()} <= {name}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis": 2}, r"x\.npy: axis 2 is out of range for the array of shape \(5, 6\)"),
        ({"axis": -3}, "axis -3 is out of range"),
        ({"dtype": "int8"}, "unknown output dtype 'int8'; there are: float16"),
        ({"dtype": [np.float16]}, "unknown output dtype .*; there are: float16"),
        ({"operation": "softmin"}, "unknown operation 'softmin'; there are: softmax"),
        ({"chunk_bytes": 0}, "chunk_bytes must be positive, got 0"),
        ({"chunk_bytes": -1e308}, "chunk_bytes must be positive, got -1e"),
        ({"chunk_bytes": float("nan")}, "chunk_bytes must be positive, got nan"),
        ({"chunk_bytes": 0.5}, "chunk_bytes must be positive, got 0.5"),
        ({"chunk_bytes": float("inf")}, r"chunk_bytes must be at most \d+, got inf"),
        ({"chunk_bytes": 1e308}, r"chunk_bytes must be at most \d+, got 1e"),
        ({"chunk_bytes": 1 << 63}, r"chunk_bytes must be at most \d+, got 9223372036854775808"),
        ({"target": "a\0b.npy"}, "no file can have this name"),
        ({"target": "x" * 252 + ".npy"}, "cannot be created: File name too long"),
        ({"tensors": ["x"]}, "none can be chosen by name"),
        ({"target": "y.safetensors"}, r"y\.safetensors: must end in \.npy"),
        ({"target": "nowhere/y.npy"}, r"there is no folder .*nowhere"),
        ({"target": "folder.npy"}, r"folder\.npy: is a folder"),
        ({"target": "fifo.npy"}, r"fifo\.npy: is a fifo"),
        ({"target": "null.npy"}, r"null\.npy: is a device"),
    ],
)
def test_request_that_does_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    np.save(tmp_path / "x.npy", normal(5, 6))
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "fifo.npy")
    (tmp_path / "null.npy").symlink_to("/dev/null")
    target = tmp_path / options.pop("target", "y.npy")
    with pytest.raises(FileError, match=message):
        apply_file(tmp_path / "x.npy", target, **options)
    assert {path.name for path in tmp_path.iterdir()} == {"x.npy", "folder.npy", "fifo.npy", "null.npy"}
    assert (tmp_path / "null.npy").is_char_device()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis": None}, "axis must be an int, not NoneType"),
        ({"axis": True}, "axis must be an int, not bool"),
        ({"axis": (0, 1)}, "axis must be an int, not tuple"),
        ({"axis": np.array([1, 2])}, "axis must be an int, not ndarray"),
        ({"chunk_bytes": "1M"}, "chunk_bytes must be a number of bytes, not str"),
        ({"chunk_bytes": True}, "chunk_bytes must be a number of bytes, not bool"),
        ({"source": b"x.npy"}, "source must be a path, not bytes"),
        ({"target": 3}, "target must be a path, not int"),
        ({"tensors": b"a"}, "tensors must be names or None, not bytes"),
        ({"tensors": 3}, "tensors must be names or None, not int"),
        ({"progress": 3}, "progress must be a function or None, not int"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    np.save(tmp_path / "x.npy", normal(5, 6))
    with pytest.raises(TypeError, match=message):
        apply_file(**{"source": tmp_path / "x.npy", "target": tmp_path / "y.npy", **options})


@pytest.mark.parametrize(("name", "has"), [("x", "has no suffix, and needs"), ("x.txt", "ends in '.txt', not in")])
def test_a_name_without_a_known_suffix(name: str, has: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=rf"{name}: the name {has} one of \.npy, \.safetensors"):
        apply_file(tmp_path / name, tmp_path / name)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that even root cannot write to: /proc")
def test_folder_not_writable(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", normal(5, 6))
    with pytest.raises(FileError, match=r"^/proc/y\.npy: cannot be created"):
        apply_file(tmp_path / "x.npy", "/proc/y.npy")


@pytest.mark.parametrize(
    ("absent", "name", "message"),
    [
        (["torch", "ml_dtypes"], "x.npy", "bfloat16 needs torch or ml_dtypes"),
        (["safetensors"], "x.safetensors", "needs the safetensors package"),
    ],
)
def test_missing_library(
    tmp_path: Path, absent: list[str], name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", normal(5, 6).astype(np.float16).view("V2"))
    safetensors_numpy.save_file({"x": normal(5, 6)}, tmp_path / "x.safetensors")
    for library in absent:
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(FileError, match=message):
        apply_file(tmp_path / name, (tmp_path / "y").with_suffix(Path(name).suffix))


@pytest.mark.parametrize(
    "chunks",
    [
        lambda x: (lambda once: lambda: once)(iter(x)),
        lambda x: (lambda once: lambda: (t for t in once))(iter(x)),
        lambda x: (lambda calls: lambda: x if next(calls) == 0 else x[:2])(itertools.count()),
        lambda x: (lambda calls: lambda: x if next(calls) == 0 else [*x, x[0]])(itertools.count()),
        lambda x: (lambda calls: lambda: x if next(calls) == 0 else [])(itertools.count()),
    ],
    ids=["one iterator", "used up", "fewer", "more", "none"],
)
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_chunks_of_the_second_pass_must_be_those_of_the_first(chunks: Any, kind: Any) -> None:
    with pytest.raises(ValueError, match=r"softmax_chunks: .*chunks\(\) returned"):
        list(softmax_chunks(chunks([kind([1.0, 2.0]), kind([3.0]), kind([4.0])])))


def test_chunks_of_other_shapes_and_dtypes() -> None:
    def of(*shapes: tuple[int, ...]) -> list[np.ndarray]:
        return [np.zeros(shape, np.float32) for shape in shapes]

    for chunks, dim in ((of((2, 3), (1, 3)), 1), (of((2, 3), (3,)), -1), (of((2, 3), (2, 4)), 0)):
        with pytest.raises(ValueError, match=r"chunk 1 of shape .* does not fit .* shape \((2, 1|1, 3)\)"):
            state_of_chunks(chunks, dim)
    with pytest.raises(ValueError, match=r"chunk 2 of shape \(2,\) and dtype float64 does not fit"):
        state_of_chunks([*of((2,), (2,)), np.zeros(2)])
    assert state_of_chunks([*of((2,)), np.zeros(2, np.float16)]).l == 4
    with pytest.raises(TypeError, match="chunks must be a function that returns the chunks, not list"):
        next(softmax_chunks(of((2,))))  # type: ignore[arg-type]  # the mistake itself
    with pytest.raises(TypeError, match="masked array"):
        list(softmax_chunks(lambda: [np.ma.array([1.0, 2.0], mask=[True, False])]))


def test_chunks_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="state_of_chunks: there are no chunks"):
        state_of_chunks([])
    with pytest.raises(ValueError, match="'logsumexp'"):
        next(softmax_chunks(lambda: [np.zeros(3)], operation="logsumexp"))
    with pytest.raises(TypeError):
        state_of_chunks([np.zeros(3, int)])


def test_chunks_that_are_not_iterable() -> None:
    with pytest.raises(TypeError, match="state_of_chunks: chunks must be an iterable of arrays, not int"):
        state_of_chunks(3)  # type: ignore[arg-type]  # the mistake itself
    with pytest.raises(TypeError, match=r"softmax_chunks: chunks\(\) must be an iterable of arrays, not NoneType"):
        list(softmax_chunks(lambda: None))  # type: ignore[arg-type,return-value]  # the mistake itself
