"""The cache of compiled kernels: an entry that is damaged or not private is never loaded.

The first part stores plain bytes. The second part compiles with NVRTC and needs no GPU. The third part runs
kernels on a GPU, each in a process of its own, because damaged machine code may kill the process.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import onlinesoftmax
from onlinesoftmax.core import cache as disk_cache
from onlinesoftmax.core.cache import cache_folder, load_entry, store_entry, store_file
from onlinesoftmax.kernels import registry
from onlinesoftmax.kernels.cuda import compile

CONTENT = b"machine code \0\xff" * 100
TINY = 'extern "C" __global__ void tiny() {}\n'

needs_user_ids = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no user ids")
NOT_INSTALLED = registry.module_missing("cuda.core", "cuda")
needs_nvrtc = pytest.mark.skipif(NOT_INSTALLED is not None, reason=str(NOT_INSTALLED))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def truncate(entry: Path, other: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-1])


def empty(entry: Path, other: Path) -> None:
    entry.write_bytes(b"")


def swap(entry: Path, other: Path) -> None:
    mine, others = entry.read_bytes(), other.read_bytes()
    entry.write_bytes(others)
    other.write_bytes(mine)


def make_unreadable(entry: Path, other: Path) -> None:
    entry.chmod(0)


def flip_a_bit(entry: Path, other: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[-10] ^= 1
    entry.write_bytes(content)


def write_old_format(entry: Path, other: Path) -> None:
    """The format of version 0.1.0: the content alone."""
    entry.write_bytes(entry.read_bytes()[-len(CONTENT) :])


DAMAGE: tuple[Callable[[Path, Path], None], ...] = (
    truncate,
    empty,
    swap,
    make_unreadable,
    flip_a_bit,
    write_old_format,
)
damaged = pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)


# Plain bytes


def test_an_entry_is_loaded_as_it_was_stored(cache: Path) -> None:
    assert load_entry("a") is None
    for content in (CONTENT, b"", disk_cache.MAGIC):
        store_entry("a", content)
        assert load_entry("a") == content
    assert [path.name for path in cache.iterdir()] == ["a"]


@damaged
def test_a_damaged_entry_counts_as_absent_and_is_replaced(cache: Path, damage: Callable[[Path, Path], None]) -> None:
    store_entry("a", CONTENT)
    store_entry("b", CONTENT[::-1])
    damage(cache / "a", cache / "b")
    # Permissions do not bind root.
    readable = damage is make_unreadable and os.access(cache / "a", os.R_OK)
    assert load_entry("a") == (CONTENT if readable else None)
    store_entry("a", CONTENT)
    assert load_entry("a") == CONTENT
    assert mode(cache / "a") == 0o600


@pytest.mark.parametrize("size", [0, 1, len(disk_cache.MAGIC), len(disk_cache.MAGIC) + 31, len(disk_cache.MAGIC) + 32])
def test_every_part_of_an_entry_is_needed(cache: Path, size: int) -> None:
    store_entry("a", CONTENT)
    os.truncate(cache / "a", size)
    assert load_entry("a") is None


def test_a_folder_in_place_of_an_entry_counts_as_absent(cache: Path) -> None:
    (cache / "a").mkdir(mode=0o700, parents=True)
    cache.chmod(0o700)
    assert load_entry("a") is None
    store_entry("a", CONTENT)
    assert (cache / "a").is_dir()


@needs_user_ids
def test_the_folder_and_its_entries_are_for_their_owner_alone(cache: Path) -> None:
    umask = os.umask(0)
    try:
        store_entry("a", CONTENT)
        assert (mode(cache), mode(cache / "a")) == (0o700, 0o600)
        # A table of `tune` may be the first file in the folder.
        (cache / "a").unlink()
        cache.rmdir()
        store_file("table.json", b"{}")
        assert (mode(cache), mode(cache / "table.json")) == (0o700, 0o600)
    finally:
        os.umask(umask)


@needs_user_ids
@pytest.mark.parametrize("bits", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_not_used(cache: Path, bits: int, caplog: pytest.LogCaptureFixture) -> None:
    store_entry("a", CONTENT)
    cache.chmod(bits)
    for _ in range(2):
        assert load_entry("a") is None
        store_entry("b", CONTENT)
    assert [path.name for path in cache.iterdir()] == ["a"]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("onlinesoftmax", logging.WARNING)
    assert "the folder may be written by other users" in record.getMessage()
    assert f"chmod go-w {cache}" in record.getMessage()
    cache.chmod(0o700)
    assert load_entry("a") == CONTENT


@needs_user_ids
@pytest.mark.parametrize("bits", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_loaded(cache: Path, bits: int, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        store_entry(name, CONTENT)
        (cache / name).chmod(bits)
        assert load_entry(name) is None
    (record,) = caplog.records
    assert "the file a may be written by other users" in record.getMessage()
    store_entry("a", CONTENT)
    assert (load_entry("a"), mode(cache / "a")) == (CONTENT, 0o600)


@needs_user_ids
def test_what_belongs_to_another_user_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store_entry("a", CONTENT)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert load_entry("a") is None
    (record,) = caplog.records
    assert f"the folder belongs to user {user}, not to user {user + 1}" in record.getMessage()


def test_without_user_ids_ownership_is_not_checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_entry("a", CONTENT)
    cache.chmod(0o777)
    monkeypatch.delattr(os, "geteuid", raising=False)
    assert load_entry("a") == CONTENT


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not bind root, but nobody can make a folder below a regular file.
    (cache.parent / "file").touch()
    monkeypatch.setenv("ONLINESOFTMAX_CACHE", str(cache.parent / "file" / "cache"))
    cache_folder.cache_clear()
    store_entry("a", CONTENT)
    assert load_entry("a") is None
    assert [path.name for path in cache.parent.iterdir()] == ["file"]


# NVRTC, without a GPU


@needs_nvrtc
def test_a_second_call_compiles_nothing(cache: Path) -> None:
    first = compile.cubin(TINY, "sm_90")
    assert [path.name for path in cache.iterdir()] == [f"{compile.key(TINY, 'sm_90')}.cubin"]
    assert compile.cubin(TINY, "sm_90") == first
    assert compile.compiled == 1
    assert compile.cubin(TINY, "sm_80") != first
    assert compile.compiled == 2


@needs_nvrtc
@damaged
def test_a_damaged_kernel_is_compiled_again_once(cache: Path, damage: Callable[[Path, Path], None]) -> None:
    right = compile.cubin(TINY, "sm_90")
    compile.cubin(TINY, "sm_80")
    damage(*(cache / f"{compile.key(TINY, arch)}.cubin" for arch in ("sm_90", "sm_80")))
    # Permissions do not bind root.
    again = 0 if damage is make_unreadable and os.geteuid() == 0 else 1
    for _ in range(2):
        assert compile.cubin(TINY, "sm_90") == right
        assert compile.compiled == 2 + again


@needs_nvrtc
@needs_user_ids
def test_a_kernel_is_compiled_and_used_without_an_untrusted_cache(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = compile.cubin(TINY, "sm_90")
    cache.chmod(0o777)
    for count in (2, 3):
        assert compile.cubin(TINY, "sm_90") == right
        assert compile.compiled == count
    assert len(caplog.records) == 1


@needs_nvrtc
def test_the_key_depends_on_all_that_machine_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [compile.key(TINY, "sm_90"), compile.key(TINY + " ", "sm_90"), compile.key(TINY, "sm_100")]
    assert compile.key(TINY, "sm_90") == keys[0]
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "0.0")
    keys.append(compile.key(TINY, "sm_90"))
    assert len(set(keys)) == len(keys)


@needs_nvrtc
def test_two_processes_leave_whole_files_and_nothing_else(cache: Path) -> None:
    texts = [TINY.replace("tiny", f"tiny{i}") for i in range(8)]
    twice = [text for text in texts for _ in range(2)]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        codes = list(pool.map(compile.cubin, twice, itertools.repeat("sm_90")))
    names = [f"{compile.key(text, 'sm_90')}.cubin" for text in texts]
    assert {path.name for path in cache.iterdir()} == set(names)
    for name, first, second in zip(names, codes[::2], codes[1::2], strict=True):
        assert load_entry(name) in (first, second)


# A GPU

_SOFTMAX = """
import torch
import onlinesoftmax as osm
from onlinesoftmax.kernels.cuda import compile
for cols in (1000, 3000):
    x = torch.randn(64, cols, device="cuda")
    assert torch.allclose(osm.softmax(x, backend="cuda", strategy="row"), torch.softmax(x, -1), atol=1e-6)
torch.cuda.synchronize()
print(compile.compiled)
"""
"""Two shapes whose kernels differ; prints how many kernels were compiled."""


def compiled_by_a_process_of_its_own(folder: Path) -> int:
    """The number of kernels that the process compiled."""
    source = Path(onlinesoftmax.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "ONLINESOFTMAX_CACHE": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", _SOFTMAX], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    return int(done.stdout)


@pytest.mark.gpu
def test_softmax_is_right_with_damaged_entries(tmp_path: Path) -> None:
    """A kernel whose entry is damaged is compiled again, and one with an intact entry is not."""
    folder = tmp_path / "cache"
    assert compiled_by_a_process_of_its_own(folder) == 2
    first, second = folder.iterdir()
    for damage, again in ((truncate, 1), (swap, 2)):
        damage(first, second)
        assert compiled_by_a_process_of_its_own(folder) == again
        assert compiled_by_a_process_of_its_own(folder) == 0
