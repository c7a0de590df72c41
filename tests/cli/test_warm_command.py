"""The command `warm`: kernels that are compiled before the calls that need them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import needs_nvrtc, run, run_apart, run_json

import onlinesoftmax as osm
from onlinesoftmax.cli.warm import FUNCTIONS
from onlinesoftmax.core.device import known
from onlinesoftmax.kernels.cuda import compile
from onlinesoftmax.kernels.registry import unavailable
from onlinesoftmax.kernels.request import Request

torch = pytest.importorskip("torch", reason="warm needs torch")


@needs_nvrtc
def test_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onlinesoftmax.core.cache.cache_folder", lambda: tmp_path)
    command = ("warm", "4x64", "4x64", "--dtype", "float32", "--device", "h100")
    for result in ("compiled", "was there"):
        found = run_json(*command)["kernels"]
        assert [(each["kernel"], each["result"]) for each in found] == [
            ("softmax of 4 x 64 float32 on NVIDIA H100 SXM5: cuda/row", result)
        ]
    [entry] = tmp_path.glob("*.cubin")
    assert entry.stat().st_size > 1000


@needs_nvrtc
def test_each_kernel_has_a_name_and_calls_that_share_one_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinesoftmax.core.cache.cache_folder", lambda: tmp_path)

    def build(source: str, arch: str) -> tuple[bytes, str, None]:
        """The test above compiles a kernel, and tests/kernels those of sampling, which take NVRTC seconds."""
        compile.compiled += 1
        return source.encode(), "", None

    monkeypatch.setattr(compile, "build", build)
    command = "warm 4x64 5x64 --op sample --op token_logprobs --with-gradient --dtype float32 --device h100"
    found = run_json(*command.split())["kernels"]
    names = [each["kernel"] for each in found]
    assert len(set(names)) == len(names)
    assert "sample of 4 x 64 float32 on NVIDIA H100 SXM5: without a filter" in names
    shared = {each["kernel"]: each["result"] for each in found if each["result"] != "compiled"}
    assert len(list(tmp_path.glob("*.cubin"))) == len(found) - len(shared)
    name = "token_logprobs of 5 x 64 float32 on NVIDIA H100 SXM5: cuda/row"
    assert shared[name] == "shares that of token_logprobs of 4 x 64 float32"


def test_a_kernel_that_shares_one_that_failed_has_failed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from onlinesoftmax.lab import warm

    def refuse(*_: object) -> str:
        raise RuntimeError("the compiler is missing")

    monkeypatch.setattr(warm, "compile_program", refuse)
    command = "warm 4x64 5x64 --op sample --dtype float32 --device h100 --json"
    result = run(*command.split())
    kernels = json.loads(result.stdout)["kernels"]
    assert result.exit_code == 1
    assert any(each["result"].startswith("shares that of") for each in kernels)
    assert all(each["failed"] for each in kernels)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("4x5 --device cpu", "name the one that the image will run on, as in --device h100"),
        ("4x5 --device l40s", "unknown device 'l40s'; known devices: h200"),
        ("4x5 --op sotfmax --device h100", "--op: unknown operation 'sotfmax'; there are: softmax, "),
        ("4x5 --op sample --dtype float64 --device h100", "sample: kernels read float32"),
        ("4x5 --dim 2 --device h100", "Dimension out of range"),
        ("4x5 --op sample --with-gradient --device h100", "--with-gradient: of no use to sample, but to softmax, "),
        ("4x5 --reduction sum --device h100", "--reduction: of no use to softmax, but to cross_entropy"),
        ("4x5 --op sample --op cross_entropy --dim 0 --device h100", "--dim: of no use to sample, cross_entropy, "),
    ],
)
def test_what_cannot_be_warmed(arguments: str, words: str) -> None:
    result = run("warm", *arguments.split())
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("variable", ["ONLINESOFTMAX_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_folder_that_is_a_file_is_told_with_its_variable(variable: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    default = {"ONLINESOFTMAX_CACHE": ""} if variable == "XDG_CACHE_HOME" else {}
    result = run_apart("warm", "4x5", "--device", "h200", **default, **{variable: str(tmp_path / "file")})
    assert result.returncode == 2
    assert result.stderr.startswith(f"Error: {tmp_path}/file")
    assert result.stderr.endswith(f" (from {variable}) cannot be written: Not a directory\n")


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "with gradient"])
@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "sample"])
def test_the_tasks_are_those_of_a_call(function: str, gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call on a CPU, whose kernels the interpreter runs, makes the tasks that are compiled for a GPU."""
    from onlinesoftmax.lab.warm import Asked, programs
    from onlinesoftmax.torch import loss_kernels, prepare

    if reason := unavailable("triton"):
        pytest.skip(reason)
    made: list[Request] = []

    def recorded(*fields: Any, **more: Any) -> Request:
        made.append(Request(*fields, **more))
        return made[-1]

    x = torch.randn(5, 24, requires_grad=gradient)
    inputs = [x, torch.zeros(5, dtype=torch.long)][: 2 if "token" in function or "entropy" in function else 1]
    monkeypatch.setattr(prepare, "Request", recorded)
    prepare.PREPARED_CALLS.clear()
    found = getattr(osm, function)(*inputs, **({} if len(inputs) == 2 else {"dim": -1}), backend="triton")
    results = [found] if isinstance(found, torch.Tensor) else [t for t in found if t is not None]
    if gradient:
        torch.autograd.grad(results, x, [torch.ones_like(y) for y in results])
    of_call, made[:] = made[:], []
    assert {request.operation.name for request in of_call} >= {function}
    # The interpreter takes no kernel that writes the mean itself.
    monkeypatch.setattr(loss_kernels, "MOST_ROWS_IN_ONE_LAUNCH", 0)
    warmed = [p.request for p in programs(Asked(function, (5, 24), "float32", gradient=gradient), known("h200"))]
    of_warm = [(request.task, request.follows_divisor) for request in warmed if request is not None]
    for request in of_call:
        assert (request.task, request.follows_divisor) in of_warm


@pytest.mark.gpu
def test_calls_after_warm_compile_nothing(tmp_path: Path) -> None:
    if not torch.cuda.is_available() or unavailable("cuda") is not None:
        pytest.skip("needs an NVIDIA GPU")
    shapes, ops = ("64x4096", "8192x32000", "1x1048576"), ("softmax", "cross_entropy", "token_logprobs", "sample")
    chosen = [part for op in ops for part in ("--op", op)]
    warmed = run_apart("warm", *shapes, *chosen, "--with-gradient", "--json", ONLINESOFTMAX_CACHE=str(tmp_path))
    assert warmed.returncode == 0, warmed.stderr
    found = run_apart(code=CALLS, ONLINESOFTMAX_CACHE=str(tmp_path))
    assert json.loads(found.stdout or "null") == 0, found.stderr


CALLS = """
import torch, onlinesoftmax as osm
from onlinesoftmax.kernels.cuda import compile
for shape in ((64, 4096), (8192, 32000), (1, 1 << 20)):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    target = torch.zeros(shape[0], dtype=torch.long, device="cuda")
    osm.sample(x, seed=0), osm.sample(x, seed=0, top_k=5)
    x.requires_grad_()
    y = osm.softmax(x, -1)
    y.backward(torch.ones_like(y))
    osm.cross_entropy(x, target).backward()
    found = osm.token_logprobs(x, target)
    found.logprob.backward(torch.ones_like(found.logprob))
torch.cuda.synchronize()
print(compile.compiled)
"""
