"""`onlinesoftmax apply`: files, interruptions and wrong options."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from commands import run, run_apart, run_json

from onlinesoftmax.cli.apply import OF_FILES
from onlinesoftmax.files.chunks import STREAMED
from onlinesoftmax.ops import reference


@pytest.fixture
def numbers() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((40, 300)).astype(np.float32)


@pytest.mark.parametrize("axis", [-1, 0])
def test_apply_round_trip(axis: int, numbers: np.ndarray, tmp_path: Path) -> None:
    source, target = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(source, numbers)
    result = run("apply", source, target, "--dim", axis, "--memory", "10kB")
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose(np.load(target), reference.two_pass(numbers, axis), rtol=1e-5)
    assert len(result.stdout.splitlines()) == 1
    assert "softmax of 1 tensor, 12,000 elements" in result.stdout
    assert not result.stderr
    report = run_json("apply", source, target, "--op", "logsumexp", "--dtype", "float64")
    assert report["elements"] == 12000
    assert report["bytes_written"] == 40 * 8
    np.testing.assert_allclose(np.load(target), reference.logsumexp(numbers), rtol=1e-12)


def test_the_operations_of_apply_are_those_of_apply_file() -> None:
    assert OF_FILES == STREAMED


def test_apply_to_chosen_tensors(numbers: np.ndarray, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    source, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    safetensors.save_file({"a": numbers, "b": numbers + 1, "c": np.zeros(3, np.int64)}, source)
    assert run_json("apply", source, target, "--tensor", "a", "--tensor", "b")["tensors"] == 2
    assert set(safetensors.load_file(target)) == {"a", "b"}
    result = run("apply", source, target, "--tensor", "d")
    assert result.exit_code == 2
    assert "has no tensor 'd'" in result.stderr


def test_apply_interrupted_leaves_no_file(numbers: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onlinesoftmax.files.chunks import state_of_chunks

    def interrupt(*arguments: object, **named: object) -> object:
        monkeypatch.setattr("onlinesoftmax.files.transfer.state_of_chunks", state_of_chunks)
        raise KeyboardInterrupt

    monkeypatch.setattr("onlinesoftmax.files.transfer.state_of_chunks", interrupt)
    np.save(tmp_path / "x.npy", numbers)
    result = run("apply", tmp_path / "x.npy", tmp_path / "y.npy")
    assert result.exit_code == 130
    assert result.stderr == f"Interrupted: {tmp_path / 'y.npy'} was not written.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # Its import would take most of the time.
from onlinesoftmax.cli import main
"""


def test_apply_names_a_file_that_stdout_cannot_encode(numbers: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbers)
    names = str(tmp_path / "x.npy"), str(tmp_path / "é.npy")
    found = run_apart("apply", *names, code=f"{WITHOUT_TORCH}main()", PYTHONIOENCODING="ascii:strict")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(str(tmp_path / "\\xe9.npy"))


SIGNALLED = f"""{WITHOUT_TORCH}
import signal
from onlinesoftmax.files import transfer
transfer.state_of_chunks = lambda *arguments, **named: signal.raise_signal(signal.NAME)
main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_apply_ended_by_a_signal_leaves_no_file(name: str, numbers: np.ndarray, tmp_path: Path) -> None:
    if not hasattr(signal, name):
        pytest.skip(f"this system has no {name}")
    np.save(tmp_path / "x.npy", numbers)
    found = run_apart("apply", str(tmp_path / "x.npy"), str(tmp_path / "y.npy"), code=SIGNALLED.replace("NAME", name))
    assert (found.returncode, found.stderr) == (130, f"Interrupted: {tmp_path / 'y.npy'} was not written.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--dim", 2, r"axis 2 is out of range for the array of shape (40, 300): it is -2 to 1"),
        ("--dim", -3, r"axis -3 is out of range for the array of shape (40, 300): it is -2 to 1"),
        ("--op", "cross_entropy", "--op: unknown operation 'cross_entropy'; there are: softmax, log_softmax, logsum"),
        ("--dtype", "int8", "--dtype: unknown dtype 'int8'; there are: float16"),
        ("--memory", 0, "--memory '0': expected a positive number of bytes, as in 600MB or 1.5GiB"),
        ("--memory", "nan", "--memory 'nan': expected a positive number of bytes"),
        ("--memory", "-1MB", "--memory '-1MB': expected a positive number of bytes"),
        ("--memory", "9" * 18 + "GB", "expected a positive number of bytes"),
    ],
)
def test_apply_with_wrong_options_leaves_no_file(
    option: str, value: object, message: str, numbers: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", numbers)
    result = run("apply", tmp_path / "x.npy", tmp_path / "y.npy", option, value)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
