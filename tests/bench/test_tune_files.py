"""`tune`: files that cannot be written, and tables that cannot be continued, are known before the first measurement."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from onlinesoftmax.cli import build
from onlinesoftmax.cli import tune as command
from onlinesoftmax.core import cache
from onlinesoftmax.core.device import known

PACKAGE = resources.files("onlinesoftmax.planner").joinpath("tables", "nvidia-h200.json")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache folder of a machine that seems to have an H200; nothing can be measured."""
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(command, "_backends", lambda asked: ["cuda"])
    monkeypatch.setattr(command, "torch_device", lambda text: torch.device("cuda", 0))
    monkeypatch.setattr("onlinesoftmax.torch.device.from_torch", lambda kind, index: known("h200"))
    monkeypatch.setattr(command, "_measure", lambda *_: pytest.fail("it measures"))
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("/dev/null", "/dev/null is a device; name a file"),
        (".", ". is a folder; name a file"),
        ("new/t.json", "new/t.json cannot be written: there is no folder new"),
    ],
)
def test_a_file_that_cannot_be_written(out: str, reason: str, folder: Path) -> None:
    result = CliRunner().invoke(build(), ["tune", "--quick", "--out", out])
    assert (result.exit_code, result.stderr) == (2, f"Error: --out {reason}\n")


def test_a_cache_folder_that_is_not_private(folder: Path) -> None:
    folder.chmod(0o777)
    result = CliRunner().invoke(build(), ["tune"])
    assert result.exit_code == 2
    assert result.stderr.endswith(f"cannot be written: the folder {folder} may be written by other users\n")
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("option", ["--resume", "--replace"])
def test_a_table_that_the_planner_would_not_read(option: str, folder: Path) -> None:
    path = folder / "nvidia-h200.json"
    path.write_bytes(PACKAGE.read_bytes().replace(b'"NVIDIA H200"', b'"NVIDIA H300"', 1))
    path.chmod(0o600)
    for reason in ("its checksum is that of another content", "may be written by other users"):
        result = CliRunner().invoke(build(), ["tune", option])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert result.stderr.startswith(f"Error: {path} cannot be continued: ")
        assert reason in result.stderr
        path.chmod(0o666)


def test_a_table_that_is_named_may_be_readable_by_all(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tables") / "t.json"
    path.write_bytes(PACKAGE.read_bytes())
    path.chmod(0o666)
    found = command.TableFile(path, False).begun("NVIDIA H200")
    assert found is not None
    assert found.cells
