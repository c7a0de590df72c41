"""The command line: the text, the JSON and the exit code of every command; one sentence for each wrong argument."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import NOT_PLAIN, needs_torch, needs_triton, run, run_apart, run_json

import onlinesoftmax
from onlinesoftmax.cli import build, output
from onlinesoftmax.cli.apply import OF_FILES
from onlinesoftmax.cli.doctor import device_facts
from onlinesoftmax.core.device import known
from onlinesoftmax.core.task import ITEMSIZE
from onlinesoftmax.kernels.registry import unavailable
from onlinesoftmax.ops import OPERATIONS

COMMANDS = ("doctor", "verify", "bench", "explain", "warm", "apply", "report")

# Help, version, start-up


HELP = """
import sys
from typer.testing import CliRunner
from onlinesoftmax.cli import build
for command in sys.argv[1:]:
    print("=====", CliRunner().invoke(build(), [*command.split(), "--help"]).output)
print("LOADED", *[m for m in ("torch", "triton", "jax", "rich") if m in sys.modules])
"""


def test_help_has_an_example_and_loads_no_framework() -> None:
    result = run_apart("", *COMMANDS, code=HELP)
    assert result.returncode == 0, result.stderr
    assert not NOT_PLAIN & set(result.stdout)
    shown, _, loaded = result.stdout.partition("LOADED")
    assert not loaded.strip()
    _, everything, *each = shown.split("=====")
    assert all(f"\n  {command}" in everything for command in COMMANDS)
    for command, text in zip(COMMANDS, each, strict=True):
        assert f"onlinesoftmax {command}" in text.partition("Example")[2]


@pytest.mark.parametrize(
    ("command", "operations"), [("explain", OPERATIONS), ("verify", OPERATIONS), ("apply", OF_FILES)]
)
def test_help_names_every_operation_and_dtype(command: str, operations: Iterable[str]) -> None:
    shown = " ".join(run(command, "--help").stdout.split())
    assert ", ".join(operations) in shown
    assert ", ".join(ITEMSIZE) in shown


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"onlinesoftmax {onlinesoftmax.__version__}\n")
    apart = run_apart("--version")
    assert (apart.returncode, apart.stdout, apart.stderr) == (0, result.stdout, "")


def test_missing_typer_is_one_sentence() -> None:
    result = run_apart(code="import sys; sys.modules['typer'] = None; from onlinesoftmax.cli import main; main()")
    assert result.returncode == 2
    assert result.stderr == "The command line needs typer: pip install 'onlinesoftmax[cli]'\n"
    assert not result.stdout


# doctor


def test_doctor_as_json() -> None:
    found = run_json("doctor")
    assert {backend["name"]: backend["usable"] for backend in found["backends"]}["eager"] is True
    assert found["versions"]["onlinesoftmax"] == onlinesoftmax.__version__
    assert {"python", "numpy", "torch", "triton", "jax", "cuda-core", "safetensors"} <= set(found["versions"])
    assert {"name", "kind", "multiprocessors", "bandwidth", "arch", "source"} <= set(found["device"])
    assert "h200" in [device["key"] for device in found["known"]]


def test_doctor_as_text() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert not NOT_PLAIN & set(result.stdout)
    for word in ("Backends", "triton", "eager", "usable", "Versions", "bandwidth", "h200"):
        assert word in result.stdout


def test_doctor_survives_a_broken_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> str | None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("onlinesoftmax.kernels.registry.unavailable", broken)
    assert "libcudart" in run_json("doctor")["backends"][0]["why"]


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_device_facts_are_those_of_the_device(name: str) -> None:
    device = known(name)
    facts = dict(device_facts(device))
    assert facts["name"] == device.name
    assert ("cores" in facts) == (name == "cpu")
    assert ("shared memory" in facts) == (name == "h200")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals of this kind")
def test_a_terminal_gets_tables() -> None:
    terminal, end = os.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(onlinesoftmax.__file__).parents[1]), "TERM": "xterm", "COLUMNS": "100"}
    program = [sys.executable, "-m", "onlinesoftmax", "explain", "4x8", "--device", "h200", "--no-compile"]
    process = subprocess.Popen(program, stdout=end, stderr=end, env=env)
    os.close(end)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that the other end was closed
            break
        if not part:
            break
        shown += part
    os.close(terminal)
    assert process.wait() == 0
    assert "───" in shown.decode()


def test_a_narrow_terminal_loses_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is longer than the last column is cut into lines."""
    from rich.console import Console

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(output, "_console", lambda: Console(width=22, force_terminal=False))
    output.table(("backend", "state", "why"), [("cuda", "usable", "multiprocessors")])
    output.facts([("why", "elements-of-one-row")])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "".join(line.split()[-1] for line in shown.splitlines()[2:-2]) == "multiprocessors"


# verify


@needs_torch
def test_verify_as_json() -> None:
    found = run_json(
        "verify", "--quick", "--backend", "eager", "--op", "softmax", "--op", "logsumexp", "--dtype", "float32"
    )
    assert found["passed"] is True
    assert [(cell["operation"], cell["result"]) for cell in found["cells"]] == [
        ("softmax", "pass"),
        ("logsumexp", "pass"),
    ]
    for cell in found["cells"]:
        assert cell["cases"] >= 4
        assert cell["slack"] == 1
        assert 0 < cell["error"] <= cell["pytorch_error"]
        assert 0 < cell["of_allowed"] <= 1


@needs_triton
@pytest.mark.parametrize("operation", [pytest.param("softmax", marks=pytest.mark.exhaustive), "softmax_backward"])
def test_verify_runs_every_strategy_here(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from onlinesoftmax.lab import verify as verification

    # The contract runs every input; here each strategy must run, be counted, and be shown.
    few = [case for case in verification.CASES if case.name in ("3 x 1000", "middle dimension")]
    monkeypatch.setattr(verification, "CASES", few)
    result = run("verify", "--op", operation, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert not result.stderr
    assert not NOT_PLAIN & set(result.stdout)
    pairs = ["triton/row", "triton/looped", "triton/split", "triton/column", "eager/row"]
    pairs += [f"cuda/{strategy}" for strategy in ("row", "cluster", "grid", "looped") if unavailable("cuda") is None]
    pairs += [f"pallas/{strategy}" for strategy in ("row", "looped", "split") if importlib.util.find_spec("jaxlib")]
    pairs += ["pallas/cluster"] if unavailable("cuda") is None and importlib.util.find_spec("absl") else []
    for pair in pairs:
        [line] = [line for line in result.stdout.splitlines() if line.startswith(f"  {pair} ")]
        assert line.endswith("pass")
    assert f"{len(pairs)} passed, 0 failed" in result.stdout


@pytest.mark.early
@needs_triton
def test_verify_turns_the_interpreter_on_by_itself() -> None:
    arguments = ("--quick", "--device", "cpu", "--backend", "triton", "--strategy", "column", "--op", "logsumexp")
    result = run_apart("verify", *arguments, "--dtype", "float32", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["interpreter"] is True
    assert [(cell["strategy"], cell["result"]) for cell in found["cells"]] == [("column", "pass")]


@needs_torch
@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda y, x: y * 1.01, "PyTorch's own"),
        (lambda y, x: y.nan_to_num(0.0), "0.0 at (1, 0), where PyTorch has nan"),
        (lambda y, x: y.double(), "torch.float64"),
        (lambda y, x: (x.add_(1), y)[1], "the input was changed"),
        (lambda y, x: 1 // 0, "ZeroDivisionError"),
    ],
    ids=["inexact", "specials", "dtype", "input changed", "crash"],
)
def test_verify_fails_what_is_wrong(break_it: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = onlinesoftmax.softmax
    monkeypatch.setattr("onlinesoftmax.api.softmax", lambda x, dim, **how: break_it(right(x, dim, **how), x))
    arguments = ("verify", "--quick", "--backend", "eager", "--op", "softmax", "--dtype", "float32")
    result = run(*arguments)
    assert result.exit_code == 1
    assert "FAIL eager/row softmax float32" in result.stdout
    assert words in result.stdout
    assert run_json(*arguments, code=1)["passed"] is False


@needs_triton
def test_verify_says_why_nothing_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from onlinesoftmax.lab import verify as verification

    monkeypatch.setattr(verification, "CASES", verification.CASES[:2])
    arguments = ("verify", "--backend", "triton", "--strategy", "column", "--op", "softmax", "--dtype", "float32")
    [cell] = run_json(*arguments)["cells"]
    assert (cell["result"], cell["cases"], cell["refused"]) == ("skipped", 0, 2)
    assert "skipped triton/column softmax float32: the elements of a row are neighbours" in run(*arguments).stdout


@needs_torch
def test_verify_leaves_out_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"cuda": "no GPU of any kind", "triton": "no GPU of any kind", "eager": None}
    monkeypatch.setattr("onlinesoftmax.kernels.registry.unavailable", absent.get)
    monkeypatch.setattr("onlinesoftmax.lab.jax_on_torch.unavailable", lambda device: "no GPU of any kind")
    found = run_json("verify", "--quick", "--strategy", "row", "--op", "softmax", "--dtype", "float32")
    assert found["unavailable"] == dict.fromkeys(("cuda", "triton", "pallas"), "no GPU of any kind")
    assert [cell["backend"] for cell in found["cells"]] == ["eager"]
    for asked in (("--backend", "triton"), ("--strategy", "split")):
        result = run("verify", "--quick", *asked)
        assert result.exit_code == 2
        assert "no GPU of any kind" in result.stderr


# Wrong arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("explain", "Missing argument 'SHAPE'"),
        ("explain 12y5", "shape '12y5'"),
        ("explain 12x0", "at least 1"),
        ("explain 12x5 --dtype int8", "unknown dtype 'int8'"),
        ("explain 12x5 --dtype fp32", "; did you mean float32?"),
        ("apply x.npy y.npy --dtype half", "; did you mean float16?"),
        ("explain 12x5 --device h20", "unknown device 'h20'; known devices: h200"),
        ("explain 12x5 --op softplus", "unknown operation 'softplus'"),
        ("explain 12x5 --op softmx", "; did you mean softmax?"),
        ("report --device l40s", "; did you mean l4?"),
        ("explain 12x5 --device l40s", "(by its name: l4)"),
        ("explain 12x5 --op cross_entropy --outputs loss,z", "--outputs: unknown output 'z'; there are: y, "),
        ("explain 12x5 --operation softmax", "No such option: --operation; did you mean --op?"),
        ("explain 12x5 --gpu h200", "No such option: --gpu; did you mean --device?"),
        ("explain 12x5 --axis 0", "No such option: --axis; did you mean --dim?"),
        ("report --gpus h100", "No such option: --gpus; did you mean --device?"),
        ("report --output page.html", "No such option: --output; did you mean --out?"),
        ("warm 12x5 --strategy row", "No such option: --strategy"),
        ("explain 12x5 --dim 2", "out of range"),
        ("explain 12x5 --bias 7", "bias of shape (7,) does not broadcast"),
        ("explain 12x5 --mask 4y5", "shape '4y5'"),
        ("explain 12x5 --bias=", "--bias is empty"),
        ("explain 12x5 --fully-masked one", "--fully-masked: unknown result 'one'; there are: nan, zero"),
        ("explain 12x5 --causal --framework jax", "no causal mask"),
        ("explain 12x5 --framework mxnet", "unknown framework 'mxnet'"),
        ("explain 12x5 --backend pallas", "backend 'pallas' needs the framework 'jax'; there are: cuda, triton, eager"),
        ("explain 12x5 --strategy tree", "unknown strategy 'tree'"),
        ("explain 12x5 --device h200 --strategy column", "the elements of a row are neighbours"),
        ("explain 12x5 --device cpu --backend triton", "need an NVIDIA GPU"),
        ("explain 12x5 --device h200 --ptx --no-compile", "--ptx needs the compiled kernels"),
        ("explain 12x5 --op linear_cross_entropy", "--op linear_cross_entropy needs --classes"),
        ("explain 12x5 --op route", "Error: --op route needs --k, the number of experts of a token"),
        ("explain 12x5 --op linear_cross_entropy --classes 7 --memory 6XB", "--memory '6XB': expected a positive"),
        ("explain 12x5 --op linear_cross_entropy --classes 7 --memory 1", "memory is 1 bytes, and one token"),
        ("explain 12x5 --op linear_token_loss --classes 7 --gradients x", "unknown gradient 'x'"),
        ("explain 12x5 --op linear_token_loss --classes 7 --gradients none,input", "--gradients: none stands alone"),
        ("explain 12x5 --op linear_token_loss --classes 7 --ptx", "--ptx: name an operation"),
        ("explain 12x5 --classes 7", "Error: --classes is an option of --op linear_cross_entropy or linear_"),
        ("explain 12x5 --top-p 0.9", "Error: --top-p is an option of --op sample"),
        ("explain 12x5 --top-logprobs 3 --min-p 0", "--min-p is an option of --op sample or verify; --top-logprobs is"),
        ("explain 12x5 --op route --k 2 --top-p 0.9", "Error: --top-p is an option of --op sample"),
        ("explain 12x5 --group-k 2 --score sigmoid", "--score is an option of --op route; --group-k is an option of"),
        ("explain 12x5 --op sample --prob-sums", "Error: --prob-sums is an option of --op route"),
        ("explain 12x5 --op sample --acc-dtype float32", "Error: --acc-dtype is an option of --op linear_"),
        ("explain 12x5 --op sample --batch-invariant", "Error: --op sample has no --batch-invariant"),
        ("explain 12x5 --bias 4y", "Error: --bias: shape '4y': expected sizes"),
        ("bench --reduction sum", "unknown reduction 'sum'; there are: mean, none"),
        ("explain 12x5 --op linear_token_loss --classes 7 --framework jax", "_loss has no --framework jax"),
        ("explain 12x5 --device h100 --device a100", "Error: --device is given 2 times, and explain takes one: run"),
        ("apply '' y.npy", "Error: IN is empty"),
        ("apply x.npy ''", "Error: OUT is empty"),
        ("report --out ''", "Error: --out is empty"),
        ("apply x.npy y.npy --dim 0 --dim 1", "Error: --dim is given 2 times, and apply takes one: run it once for"),
        ("apply missing.npy y.npy", "missing.npy: cannot be read: No such file or directory"),
        ("apply x.txt y.txt", "x.txt"),
        ("apply missing.npy", "Missing argument 'OUT'"),
        ("apply missing.npy y.npy --memory nan", "--memory 'nan': expected a positive number of bytes"),
        pytest.param("verify --dtype float8", "unknown dtype 'float8'", marks=needs_torch),
        pytest.param("verify --op softplus", "unknown operation 'softplus'", marks=needs_torch),
        pytest.param("verify --backend metal", "unknown backend 'metal'", marks=needs_torch),
        pytest.param("verify --strategy tree", "unknown strategy 'tree'", marks=needs_torch),
        pytest.param("verify --device tpu", "unknown device 'tpu'", marks=needs_torch),
        pytest.param("verify --backend eager --strategy split", "eager has no strategy split", marks=needs_torch),
    ],
)
def test_wrong_arguments_are_a_sentence(arguments: str, words: str) -> None:
    result = run(*(argument.strip("'") for argument in arguments.split()))
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout
    assert result.exception is None or isinstance(result.exception, SystemExit)


@needs_torch
@pytest.mark.parametrize("command", ["apply x.npy y.npy", "bench --suite distributed --device cpu --quick"])
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "many", "RANK": "0"}, "WORLD_SIZE='many' is set, and is no number"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK='-1' is set, and is no number"),
        ({"WORLD_SIZE": "2"}, "RANK is not: start the processes with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "a rank is less than the number of processes"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not: start the processes with torchrun"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999999"},
            "cannot form a group",
        ),
    ],
)
def test_wrong_variables_of_torchrun_are_a_sentence(
    command: str, variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run(*command.split())
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


# Completion, and one name for one thing


COMPLETE = """
import json, os, sys
from onlinesoftmax.cli import main
for variables in json.loads(sys.argv.pop()):
    os.environ.update(variables)
    try:
        main()
    except SystemExit as left:
        assert not left.code, left.code
"""


def test_shells_complete_commands_and_values() -> None:
    found = {
        ("bash", "onlinesoftmax explain 4x5 --op linear_cross"): "linear_cross_entropy",
        ("zsh", "onlinesoftmax explain 4x5 --outputs loss,tot"): "_arguments '*: :((\"loss,total_loss\"))'",
        ("fish", "onlinesoftmax war"): "warm\tCompile the kernels of some calls, as for an image.",
    }
    variables = [
        {
            "_ONLINESOFTMAX_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words, "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1), "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        for shell, words in found
    ]  # fmt: skip
    result = run_apart(json.dumps(variables), code=COMPLETE)
    assert result.stdout.splitlines() == list(found.values()), result.stderr


def test_an_option_has_one_name() -> None:
    """One parameter has one long name in all commands, and a long name is one parameter."""
    flags: dict[str, set[str]] = {}
    for command in typer.main.get_command(build()).commands.values():  # type: ignore[attr-defined]  # it is a group
        for option in command.params:
            for name in [name for name in option.opts if name.startswith("--")]:
                flags.setdefault(option.name, set()).add(name)
    assert {name: names for name, names in flags.items() if len(names) > 1} == {}
    every = [name for names in flags.values() for name in names]
    assert len(every) == len(set(every))
