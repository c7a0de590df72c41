"""`explain` of `route`: the kernel that takes a call, or why none does; bytes, floor, errors."""

from __future__ import annotations

from typing import Any

import pytest

import onlinesoftmax as osm
from onlinesoftmax.core.device import KNOWN
from onlinesoftmax.explanation.sampling import EAGER

SHAPE = (65536, 256)


def explained(x: Any = SHAPE, **given: Any) -> Any:
    return osm.explain(x, operation="route", **{"k": 8} | given)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("the logits have float64", {"dtype": "float64", "device": "h100"}),
        ("CPU is no NVIDIA GPU", {"device": "cpu"}),
        ("have no bound", {"score": "identity", "prob_sums": True, "device": "h100"}),
    ],
)
def test_pytorch_takes_what_no_kernel_takes(words: str, given: dict[str, Any]) -> None:
    found = explained(**given)
    assert (found.kernel, found.name) == (None, EAGER["torch"])
    assert words in found.others[0].why_not


def test_bytes_and_floor_by_hand() -> None:
    found = explained(
        (4, 1024, 256), dtype="bfloat16", score="sigmoid", groups=8, group_k=4, bias=(256,), device="h100"
    )
    # Weights, experts and lse of a token; and the counts of four sequences.
    assert found.bytes == 4096 * (256 * 2 + 8 * (4 + 4) + 4) + 4 * 256 * 4
    assert found.floor_us == pytest.approx(found.bytes / KNOWN["h100"].bandwidth / 1e3)
    text = str(found)
    assert "route of 4096 x 256 bfloat16: k=8, score=sigmoid, groups=8, group_k=4, bias, on NVIDIA H100" in text
    assert (
        f"4 x {found.kernel.blocks} blocks of {found.kernel.threads} threads, {found.kernel.lanes} for a token" in text
    )
    assert found.as_dict()["problem"]["rule"]["score"] == "sigmoid"
    assert explained(prob_sums=True, device="h100").bytes - explained(device="h100").bytes == 256 * 4


@pytest.mark.parametrize(
    ("error", "words", "given"),
    [
        (ValueError, "route() has no dim, top_p here", {"dim": 0, "top_p": 0.9}),
        (ValueError, "k must be from 1 to the 256 experts, got 300", {"k": 300}),
        (TypeError, "k must be an int, not NoneType", {"k": None}),
        (ValueError, "groups must divide", {"groups": 3, "group_k": 1}),
        (ValueError, "bias must have one number for each expert", {"bias": (4,)}),
    ],
)
def test_mistakes_are_named(error: type[Exception], words: str, given: dict[str, Any]) -> None:
    with pytest.raises(error) as raised:
        explained(device="h100", **given)
    assert words in str(raised.value)


def test_in_jax() -> None:
    """The kernel, the bytes and the mistakes are those of the function for JAX arrays."""
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    given: dict[str, Any] = {"bias": (256,), "score": "sigmoid", "dtype": "bfloat16", "device": "h100"}
    found, in_torch = explained(framework="jax", **given), explained(**given)
    assert (found.kernel, found.bytes) == (in_torch.kernel, in_torch.bytes)
    assert found.others[0].name == EAGER["jax"]
    no_kernel = explained(jnp.zeros((4, 16)), device="cpu")
    assert (no_kernel.name, no_kernel.problem.framework) == (EAGER["jax"], "jax")
    with pytest.raises(ValueError, match="bias must have one number for each expert"):
        explained(framework="jax", bias=(4,))


def test_no_other_operation_has_a_gate() -> None:
    with pytest.raises(ValueError, match=r"softmax\(\) has no k, prob_sums here"):
        osm.explain((4, 5), k=2, prob_sums=True)  # type: ignore[call-overload]  # the mistake
