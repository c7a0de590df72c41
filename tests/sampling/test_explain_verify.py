"""`explain` of `verify`: its launches, or why no kernel takes a call; bytes, floor, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.core.device import KNOWN
from onlinesoftmax.explanation.verification import EAGER

SHAPE = (64, 5, 128256)


def explained(x: Any = SHAPE, **given: Any) -> Any:
    return osm.explain(x, operation="verify", **{"device": "h100"} | given)


FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", "jax"])


@FRAMEWORKS
def test_launches(framework: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    both = explained(draft_logits=True, top_p=0.9, framework=framework)
    assert both.name == "verify.cuh"
    assert [(each.name, each.rows) for each in both.kernel.launches] == [
        ("sample.cuh", 320), ("sample.cuh", 256), ("verify.cuh", 64),
    ]  # fmt: skip
    assert both.reason == (
        "sample.cuh finds first what both models keep at each position, in two reads of the logits, the second from "
        "the L2 cache"
    )
    alone = explained(framework=framework)
    assert [each.name for each in alone.kernel.launches] == ["sample.cuh", "verify.cuh"]
    assert (
        alone.reason == "sample.cuh finds first what the target model keeps at each position, in one read of the logits"
    )
    assert [(each.name, each.why_not) for each in alone.others] == [(EAGER[framework], "kernels take the call")]
    # Without drafts, the logits of the draft model are empty.
    assert len(explained((64, 1, 1000), draft_logits=True, framework=framework).kernel.launches) == 2


@FRAMEWORKS
@pytest.mark.parametrize(
    ("words", "given"),
    [("and the logits have float64", {"dtype": "float64"}), ("CPU is no NVIDIA GPU", {"device": "cpu"})],
)
def test_what_no_kernel_takes(words: str, given: dict[str, Any], framework: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    found = explained(framework=framework, **given)
    assert (found.kernel, found.name) == (None, EAGER[framework])
    assert words in found.others[0].why_not
    assert found.as_dict()["kernel"] is None


def test_bytes_and_floor_by_hand() -> None:
    found = explained(dtype="bfloat16", top_k=50, draft_logits=True)
    # Nine positions of logits; number of accepted drafts and validity of a row, five tokens with log-probabilities.
    assert found.bytes == 64 * (9 * 128256 * 2 + 8 + 1 + 5 * (8 + 4))
    assert found.floor_us == pytest.approx(found.bytes / KNOWN["h100"].bandwidth / 1e3)
    text, (first, *_, last) = str(found), found.kernel.launches
    assert "verify of 64 x 4 drafts of 128256 tokens, bfloat16 with top_k, draft_logits on NVIDIA H100" in text
    assert f"3 launches: sample.cuh 320 x {first.blocks} blocks of {first.threads} threads, sample.cuh 256 x" in text
    assert found.as_dict()["kernel"]["launches"][-1] == last._asdict()
    assert explained(dtype="bfloat16").bytes == 64 * (5 * 128256 * 2 + 8 + 1 + 5 * (8 + 4))


def test_tensors() -> None:
    found = explained(torch.zeros(7, 3, 2, 100)[..., ::2], top_p=torch.ones(7, 3), top_k=0)
    assert (found.problem.rows, found.problem.n, found.problem.filters) == (21, 1, ("top_p",))
    assert found.reason.startswith("PyTorch copies the logits, so that those of a position are adjacent; then")


@FRAMEWORKS
@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("verify() has no outputs, dim, softcap, top_logprobs here", {
            "outputs": ("y",), "dim": 0, "softcap": 3.0, "top_logprobs": 2
        }),
        ("top_p must be at least 0, got -0.1", {"top_p": -0.1}),
        ("target_logits must have shape (..., n + 1, tokens)", {"x": (5,)}),
    ],
)  # fmt: skip
def test_mistakes_are_named(words: str, given: dict[str, Any], framework: str) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the words are compared below
        explained(framework=framework, **given)
    assert words in str(raised.value)


@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 3, 0)])
def test_arrays_of_jax_without_positions_or_tokens(shape: tuple[int, ...]) -> None:
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    with pytest.raises(ValueError, match="target_logits must have shape"):
        explained(jnp.zeros(shape))


def test_other_operations_have_no_drafts() -> None:
    for operation in ("sample", "softmax"):
        with pytest.raises(ValueError, match="has no draft_logits here; draft_logits is an argument of verify"):
            osm.explain((64, 128), operation=operation, draft_logits=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("draft", "dtype"), [(True, torch.float32), (False, torch.bfloat16), (True, torch.float64)])
def test_a_call_runs_what_explain_says(draft: bool, dtype: torch.dtype) -> None:
    x, drafts = torch.randn(3, 3, 1000, device="cuda", dtype=dtype), torch.zeros(3, 2, dtype=torch.long, device="cuda")
    given = (x, drafts, x[:, 1:]) if draft else (x, drafts)
    osm.verify(*given, seed=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        osm.verify(*given, seed=1)
        torch.cuda.synchronize()
    names = {"sample_kernel": "sample.cuh", "verify_kernel": "verify.cuh"}
    events = [
        (file, event.count) for event in profile.key_averages() for name, file in names.items() if name in event.key
    ]
    launched = [file for file, count in sorted(events) for _ in range(count)]
    kernel = explained(x, draft_logits=draft, device=None).kernel
    assert launched == ([each.name for each in kernel.launches] if kernel else [])
