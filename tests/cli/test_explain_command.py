"""The command `explain`: options, plans, compiled kernels and listings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import NOT_PLAIN, needs_nvrtc, needs_triton, run, run_apart, run_json

import onlinesoftmax


@pytest.mark.parametrize("device", ["h200", "h100", "a100", "l4", "RTX 4090", "b200"])
def test_explain_as_json(device: str) -> None:
    found = run_json("explain", "4096x50257", "--dtype", "bfloat16", "--device", device, "--no-compile")
    assert found["problem"]["rows"] == 4096
    assert found["plan"]["estimate_us"] >= found["plan"]["floor_us"] > 0
    assert found["plan"]["reason"]
    assert {other["why_not"][:6] for other in found["others"]}
    assert found["kernels"] == []


def test_explain_as_text() -> None:
    result = run("explain", "32x512x4096", "--dim", "1", "--device", "h200", "--op", "logsumexp", "--no-compile")
    assert result.exit_code == 0, result.output
    assert not NOT_PLAIN & set(result.stdout)
    for words in ("logsumexp of 131072 x 512 float32 on NVIDIA H200", "triton/column", "floor", "Why not another?"):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("arguments", "options", "read"),
    [
        ("--mask 4096x1024", ["mask"], (2 + 1) * 4096 * 1024),
        ("--bias 1024 --scale 0.5 --softcap 30", ["scale", "softcap", "bias"], 2 * 4096 * 1024 + 2 * 1024),
        ("--causal --fully-masked zero", ["causal"], 2 * 4096 * 1024),
        ("--op softmax_backward --scale 2", ["scale"], 2 * 2 * 4096 * 1024),
        ("--op log_softmax --batch-invariant", [], 2 * 4096 * 1024),
    ],
)
def test_explain_knows_what_a_call_can_ask_for(arguments: str, options: list[str], read: int) -> None:
    command = ("explain", "4096x1024", "--dtype", "bfloat16", "--device", "h200", "--no-compile", *arguments.split())
    found = run_json(*command)
    assert found["score_options"] == options
    assert found["plan"]["bytes_moved"] == read + 2 * 4096 * 1024
    heading = run(*command).stdout.splitlines()[0]
    assert (f" with {', '.join(options)} on " in heading) == bool(options)


def test_explain_is_the_function_of_that_name() -> None:
    found = run_json("explain", "64x32x32", "--causal", "--bias", "32", "--batch-invariant", "--device", "h200",
                     "--no-compile")  # fmt: skip
    right = onlinesoftmax.explain((64, 32, 32), causal=True, bias=(32,), batch_invariant=True, device="h200")
    assert found["plan"] == json.loads(json.dumps(right.plan.as_dict()))


def test_explain_of_a_head() -> None:
    command = "explain 8192x4096 --op linear_cross_entropy --classes 128256 --dtype bfloat16 --device h100"
    result = run(*command.split(), "--memory", "600MB")
    assert result.exit_code == 0, result.output
    for words in ("9 chunks of 16000 columns", "tera-operations/s", "Why not another?", "one token with the gradient"):
        assert words in result.stdout
    found = run_json(*command.split(), "--gradients", "none")
    head = {"operation": "linear_cross_entropy", "linear_weight": (128256, 4096), "gradients": ()}
    right = onlinesoftmax.explain((8192, 4096), dtype="bfloat16", device="h100", **head)
    assert found == json.loads(json.dumps(right.as_dict()))
    assert found["plan"]["products"] == 1


def test_explain_of_sample() -> None:
    command = "explain 64x128256 --op sample --top-k 50 --top-p 0.9 --top-logprobs 20 --device h100"
    result = run(*command.split())
    assert result.exit_code == 0, result.output
    for words in ("with top_k, top_p, top_logprobs=20 on", "x 128256", "floor", "Why not another?"):
        assert words in result.stdout
    right = onlinesoftmax.explain(
        (64, 128256), operation="sample", top_k=50, top_p=0.9, top_logprobs=20, device="h100"
    )  # fmt: skip
    assert run_json(*command.split()) == json.loads(json.dumps(right.as_dict()))
    refused = run(*command.split(), "--ptx")
    assert refused.exit_code == 2
    assert "--ptx: name an operation of the planner: sample has no such listing" in refused.output


def test_explain_of_verify() -> None:
    command = "explain 64x5x128256 --op verify --draft-logits --top-k 50 --device h100"
    found = run_json(*command.split())
    right = onlinesoftmax.explain((64, 5, 128256), operation="verify", draft_logits=True, top_k=50, device="h100")
    assert found == json.loads(json.dumps(right.as_dict()))
    assert "--draft-logits is an option of --op verify" in run("explain", "64x5", "--draft-logits").output


COMPILE = """
import json, sys
from typer.testing import CliRunner
from onlinesoftmax.cli import build
results = [CliRunner().invoke(build(), command.split()) for command in sys.argv[1:]]
print(json.dumps([(result.exit_code, result.stdout, result.stderr) for result in results]))
"""


@pytest.mark.early
@needs_triton
def test_explain_compiles_triton_kernels_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """One process compiles for all: Triton's compiler is there only where its interpreter is off from the start."""
    commands = (
        "explain 256x1024 --device b200 --backend triton --strategy row --ptx --sass --json",
        "explain 256x1024 --device a100 --backend triton --ttir",
    )
    result = run_apart(*commands, code=COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    (json_code, document, _), (code, text, stderr) = json.loads(result.stdout)
    assert json_code == 0, document
    found = json.loads(document)
    assert found["not_compiled"] is None
    [kernel] = found["kernels"]
    assert kernel["registers"] > 0
    assert 0 < kernel["occupancy"] <= 1
    assert ".target sm_100" in kernel["listings"]["ptx"]
    assert "EXIT" in kernel["listings"]["sass"]
    assert "ttir" not in kernel["listings"]
    assert (code, stderr) == (0, "")
    summary, _, listing = text.partition(": TTIR\n")
    assert "registers" in summary
    assert "tt.func" in listing


@needs_triton
def test_explain_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    result = run("explain", "256x1024", "--device", "h200", "--backend", "triton")
    assert result.exit_code == 0, result.output
    assert "not compiled: TRITON_INTERPRET=1 is set" in result.stdout


CUDA_ROW = ("explain", "256x1024", "--device", "h200", "--backend", "cuda", "--strategy", "row")


@needs_nvrtc
def test_explain_shows_what_nvrtc_makes_of_a_cuda_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    [kernel] = run_json(*CUDA_ROW, "--ptx")["kernels"]
    assert set(kernel["listings"]) == {"ptx"}
    result = run(*CUDA_ROW, "--cuda", "--ptx")
    summary, _, listings = result.stdout.partition("row_kernel: CUDA\n")
    source, _, ptx = listings.partition("row_kernel: PTX\n")
    for words, text in (("occupancy", summary), ("row_kernel(", source), (".target sm_90", ptx)):
        assert words in text
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    for option, words in (("--ttir", "row_kernel has none; it has cuda, ptx"), ("--sass", "nvdisasm: triton contains")):
        result = run(*CUDA_ROW, option)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert f"Error: {option}: " in result.stderr
        assert words in result.stderr
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert "not compiled: cuda.core is not installed: pip" in run(*CUDA_ROW).stdout


def test_a_listing_without_a_kernel_fails() -> None:
    for listing in ("--ptx", "--sass", "--cuda", "--ttir"):
        result = run("explain", "64x64", "--backend", "eager", "--device", "h200", listing)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == (
            f"Error: {listing}: there is no kernel to list: the eager backend has no kernels of ours\n"
        )


def test_outputs_and_too_little_memory_are_shown() -> None:
    arguments = ("explain", "2000000x128256", "--op", "cross_entropy", "--outputs", "y,loss", "--device", "h200")
    result = run(*arguments, "--no-compile")
    assert result.exit_code == 0
    assert result.stdout.startswith("cross_entropy (loss, y) of 2000000 x 128256 float32 on NVIDIA H200\n")
    assert "Warning: NVIDIA H200 is too small: the tensors of this call have 2.1 TB" in result.stderr
    found = run_json(*arguments, "--no-compile")
    assert found["lacks_memory"].startswith("too small: ")
    wrong = run("explain", "64x64", "--outputs", "loss", "--device", "h200")
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1)
    assert "outputs: softmax has no output 'loss'" in wrong.stderr


@pytest.mark.parametrize("classes", ["9" * 30, str(2**58)])
def test_a_weight_that_no_memory_holds(classes: str) -> None:
    result = run("explain", "9x5", "--op", "linear_token_loss", "--classes", classes)
    assert result.exit_code == 2
    assert result.stderr == f"Error: --classes: shape '{classes}x5': more elements than any memory holds\n"
