"""The size of the cache folder: the kernels that go first, the files that are ours, and the command `cache`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onlinesoftmax.core import cache_size
from onlinesoftmax.core.cache import load_entry, store_entry, store_file, with_checksum
from onlinesoftmax.core.cache_size import ANSWERS, VARIABLE, contents, parse_size

KERNELS = [f"{i:032x}.cubin" for i in range(4)]
TABLE = with_checksum({"format": 2, "device": "NVIDIA H200"})


@pytest.fixture
def filled(cache: Path) -> Path:
    """A cache folder with four kernels of some 1000 bytes, the oldest first, and what else may lie there."""
    for i, name in enumerate(KERNELS):
        store_entry(name, bytes(1000))
        os.utime(cache / name, (1000 + i,) * 2)
    return cache


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_kernels_that_were_used_longest_ago_go_first(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_file("nvidia-h200.json", bytes(5000))
    monkeypatch.setenv(VARIABLE, "3.3K")
    assert load_entry(KERNELS[0]) is not None, "loading is a use"
    store_entry("f" * 32 + ".cubin", bytes(1000))
    assert names(filled) == [KERNELS[0], KERNELS[3], "f" * 32 + ".cubin", "nvidia-h200.json"]
    # Answers of a report count, and are used when they are stored.
    store_entry(ANSWERS, bytes(1000))
    assert names(filled) == [KERNELS[0], "f" * 32 + ".cubin", "nvidia-h200.json", ANSWERS]


def test_the_next_kernel_goes_in_place_of_one_that_cannot_be_deleted(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == KERNELS[0]:
            raise PermissionError
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    cache_size.trim(filled, 3300, KERNELS[3])
    assert names(filled) == [KERNELS[0], *KERNELS[2:]]


def test_a_kernel_that_another_process_deletes_meanwhile_counts_as_deleted(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [*cache_size._items(filled)]
    (filled / KERNELS[0]).unlink()
    monkeypatch.setattr(cache_size, "_items", lambda folder: iter(listed))
    cache_size.trim(filled, 3300, KERNELS[3])
    assert names(filled) == KERNELS[1:]


@pytest.mark.parametrize("limit", ["0", "1000"])
def test_an_entry_beyond_the_limit_is_not_stored(limit: str, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, limit)
    store_entry("f" * 32 + ".cubin", bytes(1000))
    assert names(filled) == KERNELS


def test_nothing_goes_within_the_limit_and_no_foreign_file_ever(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_entry("f" * 32 + ".cubin", b"")
    assert len(names(filled)) == 5
    (filled / "thesis.cubin").write_bytes(bytes(9000))
    (filled / ("e" * 32 + ".cubin")).mkdir()
    (filled / ("d" * 32 + ".cubin")).symlink_to(filled / "thesis.cubin")
    monkeypatch.setenv(VARIABLE, "1200")
    store_entry("f" * 32 + ".cubin", bytes(1000))
    left = ["d" * 32 + ".cubin", "e" * 32 + ".cubin", "f" * 32 + ".cubin", "thesis.cubin"]
    assert names(filled) == left
    assert (filled / "thesis.cubin").stat().st_size == 9000


def test_a_limit_that_is_no_size_is_logged_once(
    filled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "a lot")
    for _ in range(2):
        assert cache_size.limit() == cache_size.DEFAULT_LIMIT
    (record,) = caplog.records
    assert "ONLINESOFTMAX_CACHE_MAXSIZE='a lot' is no size" in record.getMessage()


@pytest.mark.parametrize("text", ["", "M", "-1", "1X", "1 2", "inf", "nan", "1e9", "٣", "9" * 400])
def test_a_text_that_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_every_file_has_its_kind(filled: Path) -> None:
    store_file("nvidia-h200.json", str(TABLE).replace("'", '"').encode())
    store_file("nvidia-a100.json", b'{"format": 2, "device": "NVIDIA A1')
    store_file("notes.json", b'{"format": 2}')
    store_entry(ANSWERS, b"answers")
    (filled / "folder.json").mkdir()
    (filled / "link.json").symlink_to("nvidia-h200.json")
    if os.name == "posix":
        os.mkfifo(filled / "fifo.json")
    found = {item.path.name: item.kind for item in contents(filled)}
    assert {name for name, kind in found.items() if kind == "kernel"} == {*KERNELS}
    assert {name for name, kind in found.items() if kind == "table"} == {"nvidia-h200.json", "nvidia-a100.json"}
    assert found[ANSWERS] == "answers"
    assert {*found} == {*names(filled)}


def test_a_folder_that_is_missing_is_empty(cache: Path) -> None:
    assert contents(cache) == []
    assert cache_size.clear(cache) == []
    assert not cache.exists()
