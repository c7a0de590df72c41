"""`explain` of a head: the plan and the kernels of a call, a forecast, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from onlinesoftmax.core.device import KNOWN, matrix_rate
from onlinesoftmax.core.task import Choice
from onlinesoftmax.linear import arguments, rows
from onlinesoftmax.linear.plans import LinearPlan

SIZES, CLASSES = (12, 8), 300
BOUNDS = {"stored": None, "tokens": 6 * CLASSES * 4, "columns": 12 * 256 * 4}
LARGE: dict[str, Any] = {"linear_weight": (128256, 4096), "dtype": "bfloat16", "device": "h100"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[list[LinearPlan], list[Any]]:
    """The plans of the heads and of the kernels that a test calls, in order; Triton's interpreter runs the kernels."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("with a GPU, Triton's interpreter is off")
    from onlinesoftmax.torch import fast_path, prepare

    heads, kernels, plan_of, kernel_of = list[LinearPlan](), list[Any](), arguments.plan_of, prepare.plan_of

    def recorded(found: list[Any], function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            found.append(function(*arguments))
            return found[-1]

        return call

    monkeypatch.setattr(arguments, "plan_of", recorded(heads, plan_of))
    monkeypatch.setattr(prepare, "plan_of", recorded(kernels, kernel_of))
    monkeypatch.setattr(rows, "why_not_kernels", lambda *_: None)
    monkeypatch.setattr(rows, "CHOICE", Choice("triton"))
    fast_path.forget()
    return heads, kernels


@pytest.mark.parametrize(
    ("function", "name", "frozen", "products"),
    [
        ("linear_cross_entropy", "stored", False, 3),
        ("linear_cross_entropy", "tokens", True, 2),
        ("linear_cross_entropy", "columns", False, 3.36),
        ("linear_token_logprobs", "stored", True, 2),
        ("linear_token_logprobs", "columns", True, 3),
        ("linear_token_loss", "tokens", False, 3),
    ],
)
def test_a_call_runs_what_explain_says(
    made: tuple[list[LinearPlan], list[Any]], function: str, name: str, frozen: bool, products: float
) -> None:
    heads, kernels = made
    x, w = torch.randn(SIZES).requires_grad_(), torch.randn(CLASSES, SIZES[1]).requires_grad_(not frozen)
    more = (lambda logprob, entropy, lse: -logprob,) if function == "linear_token_loss" else ()
    found = osm.explain(x, operation=function, linear_weight=w, memory=BOUNDS[name])
    y = getattr(osm, function)(x, w, torch.arange(SIZES[0]), *more, memory=BOUNDS[name])
    (y.logprob.sum() if isinstance(y, tuple) else y).backward()
    # A plan with rows in two tensors, which only a kernel on a GPU takes, is tried first.
    assert heads[-1] == found.plan
    assert (found.plan.name, found.plan.products) == (name, products)
    # Each chunk runs the kernels that are listed, with the plans that the forced backend has for their shapes.
    for q in [kernel.problem for kernel in found.kernels]:
        assert (q.rows, q.cols) == ((SIZES[0], found.plan.chunk) if name == "columns" else (found.plan.chunk, CLASSES))
        right = osm.explain((q.rows, q.cols), operation=q.operation, outputs=q.outputs, backend="triton").plan
        assert (right.strategy, right.variant) in [(plan.strategy, plan.variant) for plan in kernels]


def test_the_forecast_of_a_head_on_an_h100() -> None:
    """By hand: 6 · tokens · hidden · classes operations at the rate of products, and 8 bytes an element and chunk."""
    found = osm.explain((8192, 4096), operation="linear_cross_entropy", memory=3_200_000_000, **LARGE)
    others = {other.name: other for other in found.others}
    rate, h100 = matrix_rate(KNOWN["h100"], 2), KNOWN["h100"]
    assert rate is not None
    assert found.plan.name == "stored"
    assert found.forecast is not None
    (kernel,) = found.kernels
    assert kernel.problem.outputs == ("loss", "y")
    assert found.forecast.products_us == pytest.approx(6 * 8192 * 4096 * 128256 / rate * 1e6)
    assert (found.forecast.logits_us, found.forecast.sums_us) == (kernel.plan.estimate_us, 0)
    # Two chunks: the first writes 4 bytes, the second reads and writes 4, then 4 become 2, which `stored` writes too.
    by_tokens = others["tokens"]
    assert by_tokens.plan is not None
    assert by_tokens.forecast is not None
    assert by_tokens.plan.chunks == 2
    assert by_tokens.forecast.sums_us == pytest.approx(16 * 4096 * 128256 / h100.bandwidth / 1e3)
    # In the memory of the result, the first writes 2, the second reads and writes 2.
    asked: dict[str, Any] = {**LARGE, "operation": "linear_cross_entropy", "acc_dtype": torch.bfloat16}
    in_place = osm.explain((8192, 4096), memory=1_100_000_000, **asked)
    assert (in_place.plan.chunks, in_place.plan.bytes) == (2, 4096 * 128256 * 2)
    assert in_place.forecast is not None
    assert in_place.forecast.sums_us == pytest.approx(4 * 4096 * 128256 / h100.bandwidth / 1e3)
    again = others["columns"].forecast
    assert again is not None
    # The memory of the weight's gradient, half as large as the logits, holds those of 4 of the 8.016 chunks.
    assert again.products_us == pytest.approx((4 - 64000 / 128256) / 3 * found.forecast.products_us)
    assert osm.explain((8, 4), operation="linear_token_loss", linear_weight=(9, 4), device="cpu").forecast is None


def test_the_text_of_a_head_says_what_runs_and_why_no_other() -> None:
    found = osm.explain((2, 4096, 4096), operation="linear_token_logprobs", memory=600_000_000, **LARGE)
    text = str(found)
    for words in (
        "linear_token_logprobs of 8192 x 4096 -> 128256 bfloat16 on NVIDIA H100",
        "8 chunks of 16064 columns", "4, of which one makes the logits again", "397.4 MB",
        "token_logprobs_backward", "not stored: the logits of all tokens take 2.1 GB, and the limit is 600.0 MB",
        "not tokens: columns give the gradient of the weight without a float32 sum", "of the datasheet",
    ):  # fmt: skip
        assert words in text, words
    assert found.as_dict()["plan"]["chunk"] == 16064


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (ValueError, "needs linear_weight", {"linear_weight": None}),
        (ValueError, r"must have shape \(classes, 4096\) for x of shape \(8, 4096\)", {"linear_weight": (128256, 4)}),
        (ValueError, r"linear_bias must have shape \(128256,\)", {"linear_bias": (4,)}),
        (TypeError, "linear_weight must be a tensor or a shape, not int", {"linear_weight": 3}),
        (ValueError, "linear_weight has dtype float32, and x bfloat16", {"linear_weight": torch.zeros(3, 4096)}),
        (TypeError, "memory must be an int", {"memory": 1e9}),
        (ValueError, "memory must be a positive number", {"memory": 0}),
        (ValueError, "memory is 10 bytes, and one token", {"memory": 10}),
        (ValueError, "has no mask, causal here", {"mask": (8, 4), "causal": True}),
        (ValueError, "has no framework='jax' here", {"framework": "jax"}),
        (ValueError, "acc_dtype must be float32 or", {"acc_dtype": "float16"}),
        (ValueError, "has no acc_dtype", {"operation": "linear_token_logprobs", "acc_dtype": "bfloat16"}),
        (ValueError, "has no reduction 'max'", {"reduction": "max"}),
        (ValueError, "unknown gradient 'weight'; there are: input, linear_weight", {"gradients": ["weight"]}),
        (ValueError, r"softmax\(\) has no linear_weight here", {"operation": "softmax"}),
    ],
)
def test_wrong_arguments_of_a_head(error: type[Exception], words: str, change: dict[str, Any]) -> None:
    with pytest.raises(error, match=words):
        osm.explain((8, 4096), **{"operation": "linear_cross_entropy", **LARGE, **change})
