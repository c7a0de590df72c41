"""Softmax over files and over chunks: every format, axis and chunk size against a float64 reference."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onlinesoftmax
from onlinesoftmax.files.apply import Report, apply_file
from onlinesoftmax.files.chunks import STREAMED, softmax_chunks, state_of_chunks
from onlinesoftmax.files.disk import FileError
from onlinesoftmax.files.tiles import bands, reads, share_of, tile_shape

torch = pytest.importorskip("torch", reason="torch's own error is the tolerance")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="makes the bfloat16 inputs")
safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="the library that must read what is written")

DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}
CHUNKS = (1, 100, 1000, 1 << 20)
"""Values of chunk_bytes: a chunk of one element, of a few elements, of some rows, of the whole tensor."""


def outliers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Normal numbers with 2 % outliers that dominate their row."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 3
    return np.asarray(np.where(rng.random(shape) < 0.02, x * 10, x)).astype(DTYPES[dtype])


def to_torch(x: np.ndarray) -> Any:
    x = np.ascontiguousarray(x).reshape(x.shape)
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype.kind == "V" else torch.from_numpy(x)


def by_torch(operation: str, x: Any, axis: int) -> Any:
    if operation == "logsumexp":
        return torch.logsumexp(x, axis)
    return getattr(torch, operation)(x, axis)


def exactly(operation: str, x: np.ndarray, axis: int) -> np.ndarray:
    """Result by the definition, in long double, which has more digits than float64 on x86."""
    x = x.astype(np.longdouble)
    with np.errstate(all="ignore"):
        m = np.max(x, axis=axis, keepdims=True, initial=-np.inf)
        shift = np.where(np.isinf(m), 0, m)
        lse = shift + np.log(np.sum(np.exp(x - shift), axis=axis, keepdims=True))
        if operation == "logsumexp":
            return np.squeeze(lse, axis=axis) if x.ndim else lse[()]
        z = np.where(np.isinf(m), np.nan, x - lse)
        return np.exp(z) if operation == "softmax" else z


def check(y: np.ndarray, x: np.ndarray, axis: int, operation: str, pieces: int = 1) -> None:
    """Check that the error is at most torch's own error for the dtype plus one unit in the last place.

    A row in `pieces` may lose one more unit at each level of the merge tree. For a logarithm, the unit is that
    of the largest number in the row, because the logarithm is a difference from that number.
    """
    exact = exactly(operation, x, axis)
    theirs = by_torch(operation, to_torch(x), axis).to(torch.float64).numpy().astype(np.longdouble)
    assert y.shape == exact.shape == theirs.shape
    ours = y.astype(np.longdouble)
    assert np.array_equal(np.isnan(ours), np.isnan(exact))
    same = np.isinf(exact) | np.isnan(exact)
    assert np.array_equal(ours[same], exact[same], equal_nan=True)
    if same.all():
        return
    info = ml_dtypes.finfo(y.dtype)
    scale = np.abs(exact)
    if operation != "softmax":
        m = np.max(x.astype(np.longdouble), axis=axis, keepdims=operation == "log_softmax")
        scale = np.fmax(scale, np.abs(m))
    ulp = np.maximum(scale, float(info.tiny))[~same] * float(info.eps)
    own = np.abs(theirs[~same] - exact[~same]).max()
    assert (np.abs(ours[~same] - exact[~same]) <= own + pieces.bit_length() * ulp).all()


def pieces_of(x: np.ndarray, axis: int, chunk_bytes: int) -> int:
    return 1 if chunk_bytes == max(CHUNKS) else max(x.reshape(x.shape or (1,)).shape[axis], 1)


def run(folder: Path, x: np.ndarray, **options: Any) -> np.ndarray:
    np.save(folder / "x.npy", x)
    apply_file(folder / "x.npy", folder / "y.npy", **options)
    y = np.load(folder / "y.npy")
    return y.view(ml_dtypes.bfloat16) if y.dtype.kind == "V" else y


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_chunks_are_one_row(count: int) -> None:
    x = outliers((4, 1000), "float64")
    chunks = np.array_split(x, count, axis=1)
    assert np.allclose(state_of_chunks(chunks).logsumexp(), np.logaddexp.reduce(x, axis=1), rtol=1e-14)
    y = np.concatenate(list(softmax_chunks(lambda: iter(chunks))), axis=1)
    check(y, x, 1, "softmax", count)
    z = np.concatenate(list(softmax_chunks(lambda: chunks, operation="log_softmax")), axis=1)
    check(z, x, 1, "log_softmax", count)


def test_chunks_of_another_dim_and_of_torch() -> None:
    x = outliers((1000, 3))
    parts = softmax_chunks(lambda: to_torch(x).split(7), dim=0)
    check(torch.cat(list(parts)).numpy(), x, 0, "softmax", pieces=143)


def test_chunks_round_as_a_tree() -> None:
    """A merge of 20001 states one after the other would lose four digits."""
    lse = state_of_chunks(np.full(1, 0.1, np.float32) for _ in range(20_001)).logsumexp()
    assert abs(float(lse) - (np.float64(np.float32(0.1)) + np.log(20_001))) < 2e-6


@pytest.mark.parametrize("operation", STREAMED)
def test_numpy_neither_warns_nor_raises_about_underflow(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.array([[1.0, -60000.0, 6e-8, -np.inf], [np.nan, 0, 1, 2], [np.inf, 0, 1, 2]], np.float32)
    np.save(tmp_path / "x.npy", x)
    monkeypatch.setitem(sys.modules, "torch", None)
    with np.errstate(all="raise"):
        apply_file(tmp_path / "x.npy", tmp_path / "y.npy", operation=operation, dtype="float16", chunk_bytes=100)


@given(st.tuples(*[st.integers(0, 7)] * 3), st.integers(1, 200), st.integers(1, 4))
def test_tiles_of_all_processes_cover_everything_once_and_fit(
    split: tuple[int, int, int], limit: int, size: int
) -> None:
    seen, rows = np.zeros(int(np.prod(split)), int), set()
    for rank in range(size):
        share = share_of(split, rank, size)
        found = list(bands(share, limit))
        rows.add(tuple((band.outer, band.inner) for band in found) if share.merges else None)
        for band in found:
            tiles = list(band)
            assert reads(share.largest, limit) == 2 or len(tiles) == 1
            for tile in tiles:
                assert int(np.prod(tile.shape)) <= limit
                for first, count in tile.runs(split):
                    seen[first : first + count] += 1
    assert (seen == 1).all()
    assert len(rows) == 1, "processes that merge their states do so in the same order"


def test_shares_keep_rows_whole_where_they_are_even() -> None:
    assert share_of((1001, 10**6, 1), 0, 4).box.outer == (0, 250)
    assert share_of((3, 10**6, 1), 1, 2).merges
    assert not share_of((1, 10, 10**9), 1, 4).merges
    assert share_of((1, 1000, 8), 3, 4).box.axis == (750, 1000)


def test_wide_columns_are_read_in_long_runs() -> None:
    assert tile_shape((1, 10**6, 10**6), 1 << 22) == (1, 16, 1 << 18)
    assert tile_shape((1, 100, 10**6), 1 << 22) == (1, 100, (1 << 22) // 100)


@pytest.mark.parametrize("engine", ["torch", "numpy"])
@pytest.mark.parametrize("operation", STREAMED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(tmp_path: Path, dtype: str, operation: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = outliers((9, 50), dtype)
    np.save(tmp_path / "x.npy", x)
    with monkeypatch.context() as patch:
        if engine == "numpy":
            patch.setitem(sys.modules, "torch", None)
        y = run(tmp_path, x, operation=operation, chunk_bytes=700)
    assert y.dtype == x.dtype
    check(y, x, -1, operation, pieces=50)


@pytest.mark.parametrize("output", DTYPES)
def test_output_dtype_is_rounded_once(tmp_path: Path, output: str) -> None:
    x = outliers((9, 50))
    y = run(tmp_path, x, dtype=output, chunk_bytes=700)
    assert y.dtype == DTYPES[output]
    if output in ("float32", "float64"):
        check(y, x.astype(output), -1, "softmax", pieces=50)
        return
    info = ml_dtypes.finfo(y.dtype)
    exact = exactly("softmax", x, -1)
    assert (np.abs(y.astype(np.longdouble) - exact) <= exact * float(info.eps) + float(info.smallest_subnormal)).all()


@settings(max_examples=50, deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    data=st.data(),
    operation=st.sampled_from(STREAMED),
    fortran=st.booleans(),
    chunk_bytes=st.integers(1, 3000) | st.sampled_from(CHUNKS),
)
def test_any_shape_axis_and_chunk(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], data: st.DataObject, operation: str,
    fortran: bool, chunk_bytes: int,
) -> None:  # fmt: skip
    axis = data.draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    x = outliers(shape)
    stored = np.asfortranarray(x) if fortran and shape else x
    folder = tmp_path_factory.mktemp("any")
    y = run(folder, stored, axis=axis, operation=operation, chunk_bytes=chunk_bytes)
    check(y, x, axis, operation, pieces_of(x, axis, chunk_bytes))


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("operation", STREAMED)
@pytest.mark.parametrize("axis", [0, 1])
def test_infinities_and_nan(tmp_path: Path, axis: int, operation: str, chunk_bytes: int) -> None:
    x = outliers((6, 40))
    x[0] = -np.inf
    x[1, ::2] = -np.inf
    x[2, 17] = np.inf
    x[3, 5] = np.nan
    x[4, [0, -1]] = np.inf
    x = x if axis == 1 else x.T
    pieces = pieces_of(x, axis, chunk_bytes)
    check(run(tmp_path, x, axis=axis, operation=operation, chunk_bytes=chunk_bytes), x, axis, operation, pieces)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["<f4", ">f4"])
def test_npy_versions_and_byte_orders(tmp_path: Path, version: tuple[int, int], order: str) -> None:
    x = outliers((5, 6))
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, x.astype(order), version=version)
    apply_file(tmp_path / "x.npy", tmp_path / "y.npy", chunk_bytes=100)
    check(np.load(tmp_path / "y.npy"), x, -1, "softmax", pieces=60)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("operation", STREAMED)
def test_safetensors(tmp_path: Path, operation: str, chunk_bytes: int) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    arrays = {f"{dtype}.é": outliers((3, 7, 5), dtype) for dtype in DTYPES}
    arrays["empty"] = np.zeros((0, 4), np.float32)
    save_file({name: to_torch(x) for name, x in arrays.items()}, tmp_path / "x.safetensors", {"from": "a test"})
    report = apply_file(
        tmp_path / "x.safetensors", tmp_path / "y.safetensors", axis=1, operation=operation, chunk_bytes=chunk_bytes
    )
    assert (report.tensors, report.elements) == (5, 4 * 105)
    results = load_file(tmp_path / "y.safetensors")
    assert set(results) == set(arrays)
    for name, x in arrays.items():
        y = results[name]
        assert y.dtype == to_torch(x).dtype
        y = y.view(torch.int16).numpy().view(x.dtype) if y.dtype == torch.bfloat16 else y.numpy()
        check(y, x, 1, operation, pieces_of(x, 1, chunk_bytes))
    with safe_open(tmp_path / "y.safetensors", "np") as opened:
        assert opened.metadata() == {"from": "a test"}
    raw = (tmp_path / "y.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    for entry in (value for name, value in json.loads(raw[8 : 8 + length]).items() if name != "__metadata__"):
        assert entry["data_offsets"][0] % {"F64": 8, "F32": 4}.get(entry["dtype"], 2) == 0


def test_safetensors_selection(tmp_path: Path) -> None:
    source, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    x = outliers((3, 7))
    safetensors_numpy.save_file({"a": x, "b": x + 1, "ids": np.arange(3)}, source)
    with pytest.raises(FileError, match=r"x\.safetensors: tensor 'ids' is I64.*name the tensors"):
        apply_file(source, target)
    with pytest.raises(FileError, match=r"no tensor 'c'; it holds .*ids"):
        apply_file(source, target, tensors=["a", "c"])
    with pytest.raises(FileError, match=r"axis 2 is out of range for tensor 'b' of shape \(3, 7\)"):
        apply_file(source, target, tensors=["b"], axis=2)
    assert not target.exists()
    apply_file(source, target, tensors=["b"])
    results = safetensors_numpy.load_file(target)
    assert list(results) == ["b"]
    check(results["b"], x + 1, -1, "softmax")


def test_without_tensors(tmp_path: Path) -> None:
    safetensors_numpy.save_file({}, tmp_path / "x.safetensors")
    apply_file(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    assert safetensors_numpy.load_file(tmp_path / "y.safetensors") == {}


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_source_may_be_target(tmp_path: Path, suffix: str) -> None:
    path, x = tmp_path / f"x{suffix}", outliers((5, 60))
    np.save(path, x) if suffix == ".npy" else safetensors_numpy.save_file({"x": x}, path)
    apply_file(path, path, chunk_bytes=300)
    check(np.load(path) if suffix == ".npy" else safetensors_numpy.load_file(path)["x"], x, -1, "softmax", pieces=60)


def test_target_has_ordinary_permissions(tmp_path: Path) -> None:
    run(tmp_path, outliers((3, 4)))
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("x.npy", "y.npy")}
    assert len(modes) == 1


@pytest.mark.parametrize(
    ("axis", "chunk_bytes", "operation", "passes"),
    [(-1, 1 << 20, "softmax", 1), (-1, 240, "softmax", 2), (0, 240, "softmax", 2), (0, 240, "logsumexp", 1)],
)
def test_progress_and_report(tmp_path: Path, axis: int, chunk_bytes: int, operation: str, passes: int) -> None:
    x = outliers((50, 60))
    np.save(tmp_path / "x.npy", x)
    calls: list[tuple[int, int]] = []
    report = apply_file(
        tmp_path / "x.npy", tmp_path / "y.npy", axis=axis, chunk_bytes=chunk_bytes, operation=operation,
        progress=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    assert {total for _, total in calls} == {passes * x.nbytes}
    done = [done for done, _ in calls]
    assert done == sorted(set(done))
    assert done[-1] == passes * x.nbytes
    written = np.load(tmp_path / "y.npy").nbytes
    assert report == Report(1, x.size, passes * x.nbytes, written, report.seconds)
    assert report.seconds > 0


def in_a_process_of_its_own(code: str, *arguments: str) -> str:
    """Run the code in a new process with the same package; return its output."""
    environment = os.environ | {"PYTHONPATH": str(Path(onlinesoftmax.__file__).parents[1])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


_MEASURE = """
import resource, sys, torch
from onlinesoftmax.files.apply import apply_file
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
folder, *axes = sys.argv[1:]
apply_file(folder + "/warm.npy", folder + "/y.npy", chunk_bytes=8 << 20)
for i, axis in enumerate(axes):
    before = peak()
    apply_file(f"{folder}/{i}.npy", folder + "/y.npy", axis=int(axis), chunk_bytes=8 << 20)
    print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_memory_is_bounded(tmp_path: Path) -> None:
    """A file of 64 MB with 8 MB of working memory: the process may grow by a few chunks only."""
    np.save(tmp_path / "warm.npy", np.zeros((8, 8), np.float32))
    cases = [((1 << 12, 1 << 12), -1), ((1 << 24,), -1), ((1 << 7, 1 << 17), 0)]
    for i, (shape, _) in enumerate(cases):
        np.lib.format.open_memmap(tmp_path / f"{i}.npy", "w+", np.float32, shape)  # sparse: nothing is on the disk
    grown = in_a_process_of_its_own(_MEASURE, str(tmp_path), *(str(axis) for _, axis in cases)).split()
    (tmp_path / "y.npy").unlink()
    assert sum(map(int, grown)) < 48


def test_import_needs_numpy_alone() -> None:
    code = "import sys, onlinesoftmax.files.apply; print({'torch', 'jax', 'safetensors'} & set(sys.modules))"
    assert in_a_process_of_its_own(code).strip() == "set()"
