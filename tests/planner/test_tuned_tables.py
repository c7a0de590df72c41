"""Tables of `tune` in the cache folder: one that is damaged, or not private, is ignored with a warning."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onlinesoftmax.core import cache as disk_cache
from onlinesoftmax.core.cache import UnusableError, parse_document, with_checksum
from onlinesoftmax.core.device import known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.planner import measured
from onlinesoftmax.planner.measured import Cell, Key, Table, Timing, slug, table_for
from onlinesoftmax.planner.plan import plan
from onlinesoftmax.planner.strategies import TABLE
from onlinesoftmax.planner.table_check import check_table
from onlinesoftmax.planner.variant import Variant

H200 = known("h200")
NAME = f"{slug(H200.name)}.json"
shipped = cache(measured._read)
SHIPPED = resources.files("onlinesoftmax.planner").joinpath("tables")
PROBLEMS = [Problem(name, rows, 1000, "bfloat16") for name, rows in (("softmax", 3000), ("logsumexp", 1))]

needs_user_ids = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no user ids")


def document() -> dict[str, Any]:
    """The document of a small table, with its checksum."""
    timings = (
        Timing("cuda", "row", Variant(threads=512, chunks=2), 5.0),
        Timing("triton", "row", Variant(tile=512), 6.0),
    )
    cells = [Cell(rows, cols, timings, ("cuda", "triton")) for rows in (16, 4096) for cols in (512, 4096)]
    keys = [Key("softmax", True, 2, False), Key("logsumexp", False, 2, False)]
    return Table(H200.name, "mine", H200.bandwidth, dict.fromkeys(keys, cells)).as_json()


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of the H200's table in a private cache folder."""
    monkeypatch.setenv("ONLINESOFTMAX_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    monkeypatch.setattr(disk_cache, "_reported", set())
    monkeypatch.setattr(measured, "_read", shipped)
    disk_cache.cache_folder.cache_clear()
    table_for.cache_clear()
    yield tmp_path / NAME
    disk_cache.cache_folder.cache_clear()
    table_for.cache_clear()


def write(path: Path, content: dict[str, Any] | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    path.chmod(0o600)


def planned() -> str:
    """The source of the table that the planner reads; every problem has a plan."""
    table_for.cache_clear()
    table = table_for(H200)
    assert table is not None
    for problem in PROBLEMS:
        assert plan(problem, H200, table=table, strategies=TABLE).estimate_us > 0
    return table.source


def test_a_table_of_ones_own_is_read_first(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert planned().startswith("commit ")
    write(path, document())
    assert planned() == "mine"
    assert not caplog.records


@pytest.mark.parametrize("name", [place.name for place in SHIPPED.iterdir() if place.name.startswith("nvidia-")])
def test_a_table_of_the_package_is_valid_in_the_cache(name: str) -> None:
    """After an edit by hand: `onlinesoftmax tune --out FILE` writes the checksum."""
    assert parse_document(SHIPPED.joinpath(name).read_bytes(), Table.checked).cells


def changed(*place: str | int, value: Any) -> Callable[[], dict[str, Any]]:
    """A document in which one value is another, with the right checksum."""

    def make() -> dict[str, Any]:
        found = document()
        del found["sha256"]
        inner: Any = found
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        return with_checksum(found)

    return make


def raw(content: bytes) -> Callable[[], bytes]:
    return lambda: content


OTHER = "is not as onlinesoftmax tune writes it"
DAMAGE: dict[str, tuple[Callable[[], dict[str, Any] | bytes], str]] = {
    "empty": (raw(b""), "it is no JSON"),
    "truncated": (lambda: json.dumps(document()).encode()[:-20], "it is no JSON"),
    "no text": (raw(b"\xff\xfe\x00"), "it is no JSON"),
    "nested": (raw(b"[" * 100_000), "it is nested too deeply"),
    "a long number": (raw(b'{"a": ' + b"1" * 9999 + b"}"), "it is no JSON"),
    "a list": (raw(b"[]"), "it is no JSON object"),
    "no checksum": (raw(b"{}"), "it has no checksum"),
    "another checksum": (lambda: {**document(), "sha256": "0" * 64}, "its checksum is that of another content"),
    "a checksum of another type": (lambda: {**document(), "sha256": [1]}, "its checksum is that of another content"),
    "a flipped digit": (lambda: json.dumps(document()).replace("5.0", "6.0").encode(), "its checksum is that"),
    "nothing else": (lambda: with_checksum({}), "field format"),
    "an older format": (changed("format", value=1), "field format: this version of onlinesoftmax reads 2, and"),
    "another device": (changed("device", value="NVIDIA A100"), "field device: it is a table of NVIDIA A100"),
    "a device of another type": (changed("device", value=7), f"field device: it is missing, or {OTHER}"),
    "no bandwidth": (changed("bandwidth", value=0), "field bandwidth"),
    "a bandwidth that is NaN": (changed("bandwidth", value=float("nan")), "field bandwidth"),
    "a bandwidth that is true": (changed("bandwidth", value=True), "field bandwidth"),
    "plans of another type": (changed("plans", value={}), "field plans"),
    "a plan of two texts": (changed("plans", 0, value=["cuda", "row"]), "field plans[0]"),
    "a plan of numbers": (changed("plans", 1, value=[1, 2, 3]), "field plans[1]"),
    "a variant that is unknown": (changed("plans", 0, 2, value="warps=4"), "field plans[0]: 'warps=4' is no field"),
    "a cell that is a number": (changed("cells", 3, value=5), "field cells[3]"),
    "a cell without times": (changed("cells", 0, value=["softmax", True, 2, False, 16, 512]), "field cells[0]"),
    "a cell without backends": (changed("cells", 0, slice(7, None), value=[]), "field cells[0]"),
    "a size that is 0": (changed("cells", 0, 4, value=0), "field cells[0]"),
    "a size that is no number": (changed("cells", 0, 5, value="512"), "field cells[0]"),
    "a size that is huge": (changed("cells", 0, 5, value=10**400), "field cells[0]"),
    "a plan that is not there": (changed("cells", 0, 6, 0, 0, value=2), "field cells[0]"),
    "a plan before the first": (changed("cells", 0, 6, 0, 0, value=-1), "field cells[0]"),
    "a time that is negative": (changed("cells", 1, 6, 0, 1, value=-1.0), "field cells[1]"),
    "a time that is infinite": (changed("cells", 1, 6, 0, 1, value=float("inf")), "field cells[1]"),
    "times in disorder": (changed("cells", 1, 6, 0, 1, value=9.0), "field cells[1]"),
    "a time without its plan": (changed("cells", 2, 6, 0, value=[0]), "field cells[2]"),
    "a backend that was not measured": (changed("cells", 2, 7, value="pallas"), "field cells[2]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_table_is_ignored_with_one_warning(damage: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = DAMAGE[damage]
    write(path, make())
    assert planned().startswith("commit ")
    assert planned().startswith("commit ")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("onlinesoftmax", "WARNING")
    assert record.getMessage().startswith(f"{path} is not used: {reason}")
    assert "\n" not in record.getMessage()


def make_huge(path: Path) -> None:
    os.truncate(path, disk_cache.MOST_BYTES + 1)


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


UNTRUSTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file for others to write": (lambda path: path.chmod(0o602), "the file {name} may be written by other users"),
    "a file for a group to write": (lambda path: path.chmod(0o620), "the file {name} may be written by other users"),
    "a folder for others to write": (lambda path: path.parent.chmod(0o777), "the folder may be written by other"),
    "a folder": (replace_by(Path.mkdir), "the file {name} is a folder"),
    "a fifo": (replace_by(getattr(os, "mkfifo", Path.mkdir)), "the file {name} is a "),
    "a device": (replace_by(lambda path: path.symlink_to("/dev/zero")), "the file {name} is a device"),
    "a loop": (replace_by(lambda path: path.symlink_to(path)), "the file {name} cannot be read: Too many levels"),
    "a huge file": (make_huge, "the file {name} has 268435457 bytes, more than any of ours"),
}


@needs_user_ids
@pytest.mark.parametrize("case", UNTRUSTED)
def test_a_table_that_cannot_be_trusted_is_ignored(case: str, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage, reason = UNTRUSTED[case]
    write(path, document())
    damage(path)
    try:
        assert planned().startswith("commit ")
    finally:
        path.parent.chmod(0o700)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} is not used: {reason.format(name=NAME)}")


@needs_user_ids
def test_a_table_of_another_user_is_ignored(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, document())
    user = os.geteuid()
    if user == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert planned().startswith("commit ")
    assert "belongs to user" in caplog.records[0].getMessage()


def test_a_folder_without_tables_is_no_matter(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.chmod(0o777)
    assert planned().startswith("commit ")
    assert not caplog.records


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5), st.sampled_from([2**62, 10**30, 0.0, 1e-300, 1e300, float("nan")]),
    st.text(max_size=3), st.lists(st.integers(-1, 9), max_size=3), st.dictionaries(st.text(max_size=2), st.none()),
)  # fmt: skip


@given(st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_document_that_passes_stops_the_planner(data: st.DataObject) -> None:
    """A value anywhere in the document is another, and the checksum is right."""
    found = document()
    del found["sha256"]
    inner, key = found, data.draw(st.sampled_from(sorted(found)))
    while isinstance(inner[key], list) and inner[key] and data.draw(st.integers(0, 4)):
        inner, key = inner[key], data.draw(st.integers(0, len(inner[key]) - 1))
    inner[key] = data.draw(VALUES)
    try:
        table = parse_document(json.dumps(with_checksum(found)).encode(), Table.checked)
    except UnusableError:
        return
    for problem in PROBLEMS:
        assert plan(problem, H200, table=table, strategies=TABLE).estimate_us > 0


def test_the_check_names_the_field() -> None:
    with pytest.raises(ValueError, match=r"field cells\[1\]"):
        check_table(changed("cells", 1, value=None)())
