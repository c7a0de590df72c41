"""`onlinesoftmax cache`: what it shows and what it deletes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run, run_json

from onlinesoftmax.core.cache import cache_folder, store_entry, store_file, with_checksum

KERNEL = f"{1:032x}.cubin"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ONLINESOFTMAX_CACHE", str(tmp_path / "cache"))
    cache_folder.cache_clear()
    yield tmp_path / "cache"
    cache_folder.cache_clear()


@pytest.fixture
def filled(folder: Path) -> Path:
    store_entry(KERNEL, bytes(100))
    store_entry("report-plans.json.gz", bytes(100))
    store_file("nvidia-h200.json", json.dumps(with_checksum({"format": 1, "device": "NVIDIA H200"})).encode())
    return folder


def test_a_folder_that_does_not_exist_is_empty_and_is_not_made(folder: Path) -> None:
    for options in ([], ["--clear"]):
        found = run_json("cache", *options)
        assert (found["folder"], found["kernels"], found["tables"], found["bytes"]) == (str(folder), 0, 0, 0)
    assert not folder.exists()


def test_the_folder_is_shown(filled: Path) -> None:
    found = run_json("cache")
    size = sum(path.stat().st_size for path in filled.iterdir())
    assert (found["kernels"], found["tables"], found["answers"], found["bytes"]) == (1, 1, 1, size)
    assert found["limit"] == 10**9
    assert found["not_used"] == {
        "nvidia-h200.json": "field format: this version of onlinesoftmax reads 2, and the file has 1"
    }
    shown = run("cache")
    assert shown.exit_code == 0
    lines = [line.split(maxsplit=1) for line in shown.stdout.splitlines()]
    assert ["folder", str(filled)] in lines
    assert ["kernels", "1 file, 168 B"] in lines
    assert "The table nvidia-h200.json is not used: field format" in shown.stdout


def test_clear_deletes_what_is_ours_and_nothing_else(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    links = [filled / f"{2:032x}.cubin", filled / "nvidia-a100.json"]
    for link in links:
        link.symlink_to(tmp_path / "precious")
    (filled / "thesis.json").write_text("{}")
    (filled / "folder").mkdir()
    (filled / "folder" / KERNEL).write_bytes(b"")
    foreign = []
    if os.geteuid() == 0:
        foreign = [filled / f"{3:032x}.cubin"]
        foreign[0].touch()
        os.chown(foreign[0], 12345, -1)
    found = run_json("cache", "--clear")
    assert found["removed"]["files"] == 3
    assert {*filled.iterdir()} == {*links, *foreign, filled / "thesis.json", filled / "folder"}
    assert (filled / "folder" / KERNEL).exists()
    assert (tmp_path / "precious").read_bytes() == b"precious"
    again = run("cache", "--clear")
    assert again.exit_code == 0
    assert again.stdout.startswith(f"{filled}: 0 files, 0 B deleted; ")


@pytest.mark.parametrize("options", [[], ["--clear"], ["--json"]])
def test_a_folder_that_is_none_is_one_sentence(options: list[str], folder: Path) -> None:
    folder.write_bytes(b"")
    result = run("cache", *options)
    assert result.exit_code == 1
    assert result.stderr == f"Error: {folder} (from ONLINESOFTMAX_CACHE): Not a directory\n"
    assert folder.read_bytes() == b""


def test_a_limit_that_is_no_size_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONLINESOFTMAX_CACHE_MAXSIZE", "a lot")
    result = run("cache")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ONLINESOFTMAX_CACHE_MAXSIZE='a lot' is no size; ")


def test_a_folder_of_other_users_says_so(filled: Path) -> None:
    filled.chmod(0o777)
    assert "The folder is not used: it may be written by other users." in run("cache").stdout
