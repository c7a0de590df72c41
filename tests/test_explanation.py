"""`explain` prints the plan that a call runs, and refuses what no call can ask for."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest

import onlinesoftmax as osm
from onlinesoftmax import explanation
from onlinesoftmax.core.device import KNOWN, known, memory_of
from onlinesoftmax.core.task import Choice
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.planner.facts import plan_facts
from onlinesoftmax.planner.plan import Plan, PlanError
from onlinesoftmax.planner.proposal import Proposal

H200 = known("h200")


@pytest.fixture
def torch_plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans of the calls on torch tensors that a test makes, in order; Triton's interpreter runs them."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("with a GPU, Triton's interpreter is off")
    from onlinesoftmax.torch import fast_path, prepare

    found, plan_of = [], prepare.plan_of

    def recorded(*arguments: Any) -> Plan:
        found.append(plan_of(*arguments))
        return found[-1]

    monkeypatch.setattr(prepare, "plan_of", recorded)
    fast_path.forget()
    return found


@pytest.mark.parametrize(
    ("dim", "arguments"),
    [
        *itertools.product((0, 1), ({}, {"softcap": 3.0}, {"batch_invariant": True})),
        (1, {"causal": True, "fully_masked": "zero"}),
    ],
)
def test_explain_prints_the_plans_of_a_call_and_of_its_gradient(
    torch_plans: list[Plan], dim: int, arguments: dict[str, Any]
) -> None:
    import torch

    asked = {**arguments, "backend": "triton"}
    x = torch.zeros(9, 40)[:, 3:36].requires_grad_()
    y = osm.softmax(x, dim, **asked)
    y.sum().backward()
    assert torch_plans[0] == osm.explain(x, dim, **asked).plan
    # The incoming gradient is one number for all elements, so only the kernel is the same.
    backward = osm.explain(y, dim, operation="softmax_backward", **asked).plan
    assert (torch_plans[1].backend, torch_plans[1].strategy) == (backward.backend, backward.strategy)
    assert torch_plans[1].vector == backward.vector


def test_explain_prints_the_plans_of_jax() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    pytest.importorskip("jaxlib", reason="jax is not installed")
    from onlinesoftmax.jax import custom_op
    from onlinesoftmax.jax.plans import outputs_of
    from onlinesoftmax.jax.signature import Signature

    for device, choice in ((H200, Choice()), (known("cpu"), Choice()), (known("cpu"), Choice("pallas"))):
        name = "h200" if device is H200 else "cpu"
        for operation in ("softmax", "log_softmax", "logsumexp", "cross_entropy", "token_logprobs"):
            for shape in ((2, 4), (8, 1024), (4096, 50257), (1 << 31, 64)):
                operands = {"x": jax.ShapeDtypeStruct(shape, "bfloat16")}
                call = Signature(operation, outputs_of(operation), choice=choice)
                try:
                    right = custom_op.plan_for(call, operands, device)
                except PlanError:
                    assert choice.backend == "pallas"
                    continue
                found = osm.explain(
                    shape, operation=operation, dtype="bfloat16", framework="jax", device=name, backend=choice.backend
                )
                assert found.plan == right, (operation, shape, name, choice)
    assert osm.explain((1 << 31, 64), framework="jax", device="h200").plan.backend == "cuda"
    # A call writes m and l.
    states = osm.explain((8, 1024), operation="logsumexp", framework="jax", device="h200").plan
    assert states.bytes_moved == 4 * 8 * (1024 + 2)


def test_an_array_of_jax_on_a_cpu_is_planned_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where JAX has a GPU.  A tracer, like a shape, counts as an array on the GPU."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    monkeypatch.setattr(explanation, "from_jax", lambda: H200)
    x = jax.device_put(np.ones((64, 128), np.float32), jax.devices("cpu")[0])
    assert osm.explain(x).device.kind == "cpu"
    assert osm.explain((64, 128), framework="jax").device is H200
    found = []
    jax.make_jaxpr(lambda y: found.append(osm.explain(y).device) or y)(x)
    assert found == [H200]


def test_a_faster_plan_than_the_forced_one_is_named() -> None:
    """The reason says why the faster plan was not taken, and only for plans that are faster."""
    forced = osm.explain((4096, 50257), dtype="bfloat16", device="h200", backend="cuda", strategy="looped")
    plans = [other for other in forced.others if isinstance(other, Plan)]
    assert plans[0].estimate_us < forced.plan.estimate_us < plans[-1].estimate_us
    for other in plans:
        faster = other.estimate_us < forced.plan.estimate_us
        assert (", but another plan is forced: " in forced.why_not(other)) == faster


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_no_plan_of_the_forced_backend_is_faster(backend: str) -> None:
    """The plans that the choice allows are listed with the times by which the chosen one won."""
    for rows, cols in ((262144, 197), (65536, 1025), (1, 65536), (4, 50257), (1335, 50257)):
        for dtype in ("bfloat16", "float32"):
            found = osm.explain((rows, cols), dtype=dtype, device="h200", backend=backend)
            others = [o.estimate_us for o in found.others if isinstance(o, Plan) and o.backend == backend]
            assert others
            assert found.plan.estimate_us <= min(others)


def test_a_softcapped_gradient_also_reads_the_logits() -> None:
    """The gradient with a softcap reads one more tensor of the size of x, and its plan is that without a softcap."""
    for operation in ("softmax_backward", "log_softmax_backward"):
        for rows, cols in ((4096, 4096), (7, 32000), (1, 1 << 24), (2048, 128256)):
            asked: dict[str, Any] = {"operation": operation, "dtype": "bfloat16", "device": "a100"}
            options: tuple[dict[str, Any], ...] = ({"scale": 0.5}, {"softcap": 30.0})
            plain, capped = (osm.explain((rows, cols), **asked, **more).plan for more in options)
            assert capped.bytes_moved - plain.bytes_moved == 2 * rows * cols
            assert (capped.strategy, capped.variant) == (plain.strategy, plain.variant)
            assert capped.estimate_us > plain.estimate_us


def test_explain_compares_only_what_the_choice_allows() -> None:
    found = osm.explain((3, 50000), batch_invariant=True, device="h200")
    others = {(other.backend, other.strategy): found.why_not(other) for other in found.others}
    assert others["eager", "row"] == "cannot: the framework's sums depend on the number of rows"
    for other in found.others:
        if isinstance(other, Proposal):
            forced = {"backend": other.backend, "strategy": other.strategy}
            assert osm.explain((3, 50000), batch_invariant=True, device="h200", **forced).plan == other


@pytest.mark.parametrize(
    ("operation", "options"),
    [("softmax", {"scale": 0.5}), ("softmax", {"causal": True}), ("softmax_backward", {}), ("cross_entropy", {})],
)
def test_forced_eager_runs_every_operation_and_option(operation: str, options: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"operation": operation, "device": "h200", **options}
    found = osm.explain((64, 100), backend="eager", **asked)
    assert (found.plan.backend, found.plan.strategy) == ("eager", "row")
    assert osm.explain((64, 100), **asked).plan.backend != "eager"


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_scale_for_each_row_is_read_once_a_row(framework: str) -> None:
    """Four bytes for each row, or for each number of a scale that several rows share."""
    for operation in ("softmax", "cross_entropy"):
        moved = [
            osm.explain(
                (6, 8, 64), operation=operation, scale=scale, framework=framework, device="h200"
            ).plan.bytes_moved
            for scale in (0.5, np.ones((6, 8, 1), "f"), np.ones((8, 1), "f"), np.ones((), "f"))
        ]
        assert [bytes_moved - moved[0] for bytes_moved in moved[1:]] == [4 * 48, 4 * 8, 4]


def test_a_numpy_array_counts_as_its_shape_and_dtype() -> None:
    x = np.zeros((7, 300), np.float16)
    for framework, backends in ((None, {"cuda", "triton"}), ("torch", {"cuda", "triton"}), ("jax", {"pallas", "cuda"})):
        found = osm.explain(x, 0, framework=framework, device="h200")
        assert (found.problem.rows, found.problem.cols, found.problem.dtype) == (300, 7, "float16")
        assert {other.backend for other in found.others} - {"eager", found.plan.backend} <= backends


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"operation": "cross_entropy", "bias": (5, 5)}, ValueError, r"cross_entropy\(\) has no bias"),
        ({"operation": "cross_entropy", "fully_masked": "zero"}, ValueError, r"cross_entropy\(\) has no fully_masked"),
        ({"operation": "cross_entropy_backward", "causal": True}, ValueError, r"cross_entropy\(\) has no causal"),
        ({"framework": "jax", "causal": True, "fully_masked": "zero"}, ValueError, "for JAX has no causal, fully_mask"),
        ({"framework": "jax", "batch_invariant": True}, ValueError, "for JAX has no batch_invariant"),
        ({"dim": "a"}, TypeError, "dim must be an int, not str"),
        ({"x": [0.5, "b"]}, TypeError, "x: a shape has integers, got"),
        ({"x": np.zeros(3, np.complex64)}, ValueError, "x has dtype complex64; dtypes: "),
        ({"device": 3}, TypeError, "device must be the name of a known device, not int"),
        ({"device": ""}, ValueError, "unknown device"),
        ({"dim": True}, TypeError, "dim must be an int, not bool"),
        ({"mask": np.ones((5, 5))}, ValueError, "mask must be boolean, got float64"),
        ({"bias": (1.5,)}, TypeError, "bias or mask: a shape has integers"),
        ({"scale": np.ones(5, "f")}, ValueError, "scale must .* one number per row"),
        ({"framework": "jax", "scale": np.ones((5, 5), "f")}, ValueError, "scale must .* one number per row"),
        ({"scale": np.ones((4, 1), "f")}, ValueError, r"scale of shape \(4, 1\) does not broadcast"),
        ({"x": "5x5"}, TypeError, "x must be a tensor, an array or a shape, not str"),
        ({"x": np.zeros(5, np.float16), "dtype": "bfloat16"}, ValueError, "x has dtype float16"),
        ({"dtype": 3}, TypeError, "dtype must be a dtype or its name, not int"),
        ({"dtype": np.int32}, ValueError, "unknown dtype 'int32'"),
        ({"top_p": 0.9}, ValueError, r"softmax\(\) has no top_p here; top_p is an argument of sample and verify$"),
        ({"operation": "softmx"}, ValueError, r"did you mean softmax\?$"),
        ({"outputs": "y"}, TypeError, "outputs must be a tuple of names, not str"),
        ({"outputs": {"y"}}, TypeError, "outputs must be a tuple of names, not set"),
        ({"outputs": ("y", "loss")}, ValueError, "outputs: softmax has no output 'loss'; there are: y, lse"),
        ({"outputs": ()}, ValueError, "outputs: at least one name is needed"),
    ],
    ids=str,
)
def test_what_explain_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        osm.explain(**{"x": (5, 5), "device": "h200", **arguments})


@pytest.mark.parametrize(
    ("dtype", "aliases"),
    [
        ("float32", "fp32 FP32 f32 float"), ("float16", "fp16 f16 half"), ("bfloat16", "bf16 BF16"),
        ("float64", "fp64 f64 double"),
    ],
)  # fmt: skip
def test_another_name_of_a_dtype_is_answered_with_ours(dtype: str, aliases: str) -> None:
    for alias in aliases.split():
        with pytest.raises(ValueError, match=rf"^unknown dtype '{alias}'; there are: .*; did you mean {dtype}\?$"):
            osm.explain((5, 5), dtype=alias)


def test_the_dtype_and_the_framework_of_a_tensor_are_its_own() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.zeros(3, 5)
    assert osm.explain(x, dtype="float32").problem.dtype == "float32"
    with pytest.raises(ValueError, match="dtype='bfloat16' is for a shape, and x has dtype float32"):
        osm.explain(x, dtype="bfloat16")
    with pytest.raises(ValueError, match="x is an array of torch"):
        osm.explain(x, framework="jax")
    with pytest.raises(TypeError, match=r"x must be a strided tensor, not one of layout torch\.sparse_coo"):
        osm.explain(x.to_sparse())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_explain_of_a_gradient_takes_the_options_of_its_function(operation: str) -> None:
    found = osm.explain((64, 1024), operation=operation, scale=0.5, softcap=3.0, device="h200")
    declaration = OPERATIONS[operation]
    assert ("logits" in found.task.dtypes) == (not declaration.scores)
    if "mask" in declaration.forward.options:
        masked = osm.explain((64, 1024), operation=operation, mask=(64, 1024), device="h200")
        assert ("mask" in masked.task.dtypes) == ("mask" in declaration.options)


@pytest.mark.parametrize(
    ("device", "source"), [("h200", "8192"), ("h100", "8192"), ("a100", "8192 on NVIDIA H200, scaled by bandwidth")]
)
def test_an_estimate_names_the_gpu_that_was_measured_if_it_is_another(device: str, source: str) -> None:
    explained = osm.explain((4096, 8192), dtype="bfloat16", device=device)
    facts = dict(plan_facts(explained.plan, explained.problem, explained.device))
    assert facts["estimate"].endswith(source)


def test_dtypes_of_every_framework_name_the_same_plan() -> None:
    plan = osm.explain((64, 1024), dtype="bfloat16", device="h200").plan
    dtypes: list[Any] = []
    for module in ("torch", "ml_dtypes", "jax.numpy"):
        try:
            dtypes.append(importlib.import_module(module).bfloat16)
        except ImportError:
            continue
    for dtype in dtypes:
        assert osm.explain((64, 1024), dtype=dtype, device="h200").plan == plan
    for dtype in (np.float64, np.dtype("float64"), "float64"):
        assert osm.explain((64, 1024), dtype=dtype, device="h200").problem.dtype == "float64"


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("outputs", [("loss", "y"), ["y", "mean_loss"]])
def test_the_kernel_that_writes_the_gradient_is_explained(outputs: Any, framework: str) -> None:
    shape: dict[str, Any] = {"operation": "cross_entropy", "dtype": "bfloat16", "device": "h200"}
    shape["framework"] = framework
    found = osm.explain((8192, 32000), outputs=outputs, **shape)
    alone = osm.explain((8192, 32000), **shape)
    assert {*found.problem.outputs} == {*outputs}
    assert found.problem.write_bytes - alone.problem.write_bytes == pytest.approx(8192 * 32000 * 2, rel=1e-3)
    assert "cross_entropy (" in str(found)


def test_a_loss_with_its_gradient_runs_the_plan_that_is_explained(torch_plans: list[Plan]) -> None:
    import torch

    x = torch.zeros(9, 40, requires_grad=True)
    osm.cross_entropy(x, torch.zeros(9, dtype=torch.int64), backend="triton").backward()
    told = osm.explain(x, 1, operation="cross_entropy", outputs=("mean_loss", "y"), backend="triton").plan
    # The call also reads its index to ignore, so only the kernel is the same.
    assert (told.strategy, told.blocks) in [(plan.strategy, plan.blocks) for plan in torch_plans]


def test_a_repr_is_one_short_line() -> None:
    found = osm.explain((4096, 1024), dtype="bfloat16", device="h200")
    for each in (found, found.plan, *found.others):
        assert len(repr(each)) < 200
        assert "\n" not in repr(each)
    assert repr(found).startswith("<Explanation softmax of 4096 x 1024 bfloat16 on NVIDIA H200: cuda/row, ")
    assert repr(found.plan).startswith("<Plan cuda/row: ")


@pytest.mark.parametrize("device", [name for name, known in KNOWN.items() if known.kind == "cuda"])
def test_a_shape_that_does_not_fit_the_memory_says_so(device: str) -> None:
    most = memory_of(KNOWN[device])
    assert most is not None
    cols = 1 << 16
    fits, large = (osm.explain((most // (4 * cols) + more, cols), dtype="bfloat16", device=device) for more in (0, 1))
    assert "memory" not in dict(plan_facts(fits.plan, fits.problem, fits.device))
    assert fits.as_dict()["lacks_memory"] is None
    sentence = dict(plan_facts(large.plan, large.problem, large.device))["memory"]
    assert sentence.startswith("too small: the tensors of this call have ")
    assert sentence in str(large)
    assert large.as_dict()["lacks_memory"] == sentence
    assert osm.explain((1 << 40, cols), device="cpu").as_dict()["lacks_memory"] is None
