"""Stored answers of `report`: those that are damaged or not private are computed again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from onlinesoftmax.core import cache
from onlinesoftmax.core.cache_size import ANSWERS
from onlinesoftmax.lab.bench.record_file import sources
from onlinesoftmax.lab.report import stored
from onlinesoftmax.lab.report.lengths import KINDS

KEY = f"a key {sources()}"
ANSWER = {KEY: {kind: {"answers": [], "cliffs": []} for kind in KINDS}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ONLINESOFTMAX_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_reported", set())
    cache.cache_folder.cache_clear()
    tmp_path.chmod(0o700)
    yield tmp_path
    cache.cache_folder.cache_clear()


def test_answers_are_loaded_as_they_were_stored(folder: Path) -> None:
    assert stored.load() == {}
    stored.store({**ANSWER, "a key of other sources": {}})
    assert stored.load() == ANSWER


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", *map(gzip.compress, (b"", b"{", b"[]", b'{"a": 1}', b"[" * 10**5))],
    ids=["empty", "no gzip", "empty gzip", "cut off", "a list", "another object", "deep"],
)
def test_a_document_of_another_form_is_no_error(content: bytes, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.store_entry(ANSWERS, content)
    for _ in range(2):
        assert stored.load() == {}
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{folder / ANSWERS} is not used: ")
    assert record.getMessage().endswith("; the answers are computed again")


def test_damaged_bytes_and_folders_of_others_are_no_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored.store(ANSWER)
    whole = (folder / ANSWERS).read_bytes()
    (folder / ANSWERS).write_bytes(whole[:-1])
    assert stored.load() == {}
    (folder / ANSWERS).write_bytes(whole)
    folder.chmod(0o777)
    assert stored.load() == {}
    assert "may be written by other users" in caplog.text


def test_answers_for_other_kinds_of_rows_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = {"aligned": {"answers": [], "cliffs": []}}
    cache.store_entry(ANSWERS, gzip.compress(json.dumps({**ANSWER, "an old key": old}).encode()))
    assert stored.load() == ANSWER
    assert not caplog.records
