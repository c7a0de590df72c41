"""Pallas plans for an H200, and the programs that JAX lowers for a GPU that is not there."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_pallas import DTYPES, FORWARD, ON_GPU, OUTPUTS, STRATEGIES, covering

import onlinesoftmax.jax as osj
from onlinesoftmax import PlanError
from onlinesoftmax.core.device import known
from onlinesoftmax.core.options import PLAIN, ScoreOptions
from onlinesoftmax.core.task import ANY, Choice
from onlinesoftmax.jax import custom_op
from onlinesoftmax.jax.signature import Signature
from onlinesoftmax.kernels import pallas
from onlinesoftmax.planner.plan import Plan


def shapes(*sizes: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def plan_of_softmax(x: Any, device: str = "h200", choice: Choice = ANY, options: ScoreOptions = PLAIN) -> Plan:
    return custom_op.plan_for(Signature("softmax", ("y",), options, choice=choice), {"x": x}, known(device))


@pytest.mark.parametrize(
    ("rows", "cols", "strategy"),
    [
        (65536, 64, "row"),
        (65536, 1024, "looped"),
        (16384, 2049, "row"),
        (16384, 4095, "row"),
        (16384, 5001, "cluster"),
        (16384, 4096, "cluster"),
        (4096, 16384, "cluster"),
        (2048, 128256, "cluster"),
        (4096, 50257, "cluster"),
        (1, 1 << 24, "split"),
    ],
)
def test_pallas_plans_for_an_h200(rows: int, cols: int, strategy: str) -> None:
    plan = plan_of_softmax(shapes(rows, cols), choice=Choice("pallas"))
    assert (plan.backend, plan.strategy) == ("pallas", strategy)


def test_what_no_kernel_takes_goes_to_xla_or_is_refused() -> None:
    wide = shapes(1, (1 << 31) + 1)
    # CUDA kernels have indices of 64 bits.
    assert plan_of_softmax(wide).backend == "cuda"
    assert plan_of_softmax(shapes(4, 4, dtype="float8_e5m2")).backend == "eager"
    with pytest.raises(PlanError, match="a kernel's indices end at"):
        plan_of_softmax(wide, choice=Choice("pallas"))
    with pytest.raises(PlanError, match="does not fit the registers"):
        osj.softmax(jnp.zeros((1, 1 << 17)), backend="pallas", strategy="row")


def lowered(function: Any, *arguments: Any) -> str:
    """The program for CUDA, on a machine that need not have it."""
    program: str = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return program


def launches(program: str) -> int:
    """Launches of kernels in a lowered program.  JAX 0.11 writes a kernel once, as a function that is called."""
    _, *parts = re.split(r"\n  func\.func \w+ @([^(]+)\(", program)
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))

    def within(name: str) -> int:
        own = re.findall("custom_call @(?:mosaic_gpu|.*triton)", bodies[name])
        return len(own) + sum(within(callee) for callee in re.findall(r"= call @([^(]+)\(", bodies[name]))

    return within("main")


NEEDS_A_GPU = jax.__version_info__ >= (0, 11) and not ON_GPU


@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 lowers Triton kernels only where there is a GPU")
@pytest.mark.parametrize(("strategy", "name", "dtype"), covering(STRATEGIES, FORWARD, DTYPES))
def test_every_operation_lowers_for_cuda(strategy: str, name: str, dtype: str) -> None:
    x, where = shapes(64, 6, 4096, dtype=dtype), jax.ShapeDtypeStruct((64, 1, 4096), jnp.bool_)
    call = partial(getattr(osj, name), axis=-1, backend="pallas", strategy=strategy)
    fused = lowered(lambda x, w: call(x, where=w, softcap=3.0), x, where)
    # This program has the kernels of both directions.
    gradient = lowered(jax.grad(lambda x: jnp.sum(call(x) ** 2)), x)
    for program in (fused, gradient):
        assert re.search(f"triton.*onlinesoftmax_{strategy}|onlinesoftmax_{strategy}.*triton", program, re.DOTALL)


@pytest.mark.skipif(find_spec("absl") is None, reason="JAX's Mosaic needs absl-py")
@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 asks for a device to lower for")
@pytest.mark.parametrize(("name", "cols", "dtype"), covering(FORWARD, (8192, 17408, 50257, 128256), DTYPES))
def test_clusters_lower_for_cuda(name: str, cols: int, dtype: str) -> None:
    x = shapes(64, cols, dtype=dtype)
    call = partial(getattr(osj, name), axis=-1, backend="pallas", strategy="cluster")
    # This program has the kernels of both directions.
    program = lowered(jax.grad(lambda x: jnp.sum(call(x) ** 2)), x)
    assert launches(program) == 2


def loss(x: Any, target: Any, **forced: Any) -> Any:
    return jnp.sum(osj.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.1, **forced))


def results(x: Any, target: Any, **forced: Any) -> Any:
    return sum(jnp.sum(part) for part in osj.token_logprobs(x, target, **forced))


@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 lowers Triton kernels only where there is a GPU")
@pytest.mark.parametrize(("strategy", "function", "dtype"), covering(STRATEGIES, (loss, results), DTYPES))
def test_operations_with_a_target_lower_for_cuda(strategy: str, function: Any, dtype: str) -> None:
    x, target = shapes(16, 4096, dtype=dtype), shapes(16, dtype="int32")
    program = lowered(jax.grad(partial(function, backend="pallas", strategy=strategy)), x, target)
    assert re.search(f"triton.*onlinesoftmax_{strategy}|onlinesoftmax_{strategy}.*triton", program, re.DOTALL)


@pytest.mark.skipif(find_spec("absl") is None, reason="JAX's Mosaic needs absl-py")
@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 asks for a device to lower for")
@pytest.mark.parametrize(
    ("function", "cols", "dtype"), covering((loss, results), (8192, 50257), DTYPES, met_in=lambda cell: cell[:2])
)
def test_clusters_of_operations_with_a_target_lower_for_cuda(function: Any, cols: int, dtype: str) -> None:
    x, target = shapes(64, cols, dtype=dtype), shapes(64, dtype="int32")
    program = lowered(jax.grad(partial(function, backend="pallas", strategy="cluster")), x, target)
    assert launches(program) == 2


@pytest.mark.skipif(find_spec("absl") is None, reason="JAX's Mosaic needs absl-py")
@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 asks for a device to lower for")
@pytest.mark.parametrize(("strategy", "cols", "dtype"), covering((*STRATEGIES, "cluster"), (4096, 8185), DTYPES))
def test_a_scalar_loss_and_its_gradient_are_one_call_of_a_kernel(strategy: str, cols: int, dtype: str) -> None:
    x, target = shapes(64, cols, dtype=dtype), shapes(64, dtype="int32")
    more = {"label_smoothing": 0.1, "z_loss": 0.1} | ({} if strategy == "cluster" else {"scale": 2.0, "softcap": 9.0})
    call = partial(osj.cross_entropy, reduction="mean", ignore_index=0, backend="pallas", strategy=strategy, **more)
    program = lowered(jax.value_and_grad(call), x, target)
    # `split` has one launch for the states, and one that writes.  Float16 has one for the loss, one for the gradient,
    # which waits for the factor of a gradient scaler.
    expected = 2 if strategy == "split" or dtype == "float16" else 1
    assert launches(program) == expected


@pytest.mark.skipif(find_spec("absl") is None, reason="JAX's Mosaic needs absl-py")
@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 asks for a device to lower for")
@pytest.mark.parametrize(("name", "cols", "dtype"), covering(FORWARD, (50257,), DTYPES, met_in=lambda cell: cell[1:2]))
def test_several_outputs_lower_for_cuda(name: str, cols: int, dtype: str) -> None:
    x = shapes(64, cols, dtype=dtype)
    call = Signature(name, OUTPUTS[name], choice=Choice("pallas", "cluster"))
    plan = custom_op.plan_for(call, {"x": x}, known("h200"))
    program = lowered(lambda x: pallas.run(name, {"x": x}, plan, False, outputs=call.outputs), x)
    assert re.search("mosaic_gpu.*onlinesoftmax_cluster", program, re.DOTALL)


@pytest.mark.skipif(find_spec("absl") is None, reason="JAX's Mosaic needs absl-py")
@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 asks for a device to lower for")
@pytest.mark.parametrize(
    ("strategy", "name", "axis"),
    covering((*STRATEGIES, "cluster"), (*FORWARD, "loss", "results"), ("rows", "columns")),
)
def test_operations_on_shards_lower_for_cuda(strategy: str, name: str, axis: str) -> None:
    """Under shard_map a constant of a kernel varies over the devices; Mosaic takes such a constant not everywhere."""
    spec = P("v") if axis == "rows" else P(None, "v")
    more = {"backend": "pallas", "strategy": strategy} | ({} if axis == "rows" else {"axis_name": "v"})
    calls = {
        "loss": lambda x, t: osj.cross_entropy(x, t, label_smoothing=0.1, z_loss=0.1, **more),
        "results": lambda x, t: jnp.stack(osj.token_logprobs(x, t, **more)).sum(0),
    }
    call = calls.get(name, lambda x, t: getattr(osj, name)(x, -1, **more))
    per_row = name in ("loss", "results", "logsumexp")
    mapped = jax.shard_map(
        call,
        mesh=jax.make_mesh((1,), ("v",), axis_types=(AxisType.Auto,)),
        in_specs=(spec, P("v") if axis == "rows" else P()),
        out_specs=(P("v") if axis == "rows" else P()) if per_row else spec,
    )
    program = lowered(jax.grad(lambda x, t: jnp.sum(mapped(x, t) ** 2)), shapes(16, 8192), shapes(16, dtype="int32"))
    assert re.search("mosaic_gpu|triton", program)


def test_what_a_cluster_refuses() -> None:
    def refused(device: str, x: Any, options: ScoreOptions = PLAIN) -> str:
        with pytest.raises(PlanError) as error:
            plan_of_softmax(x, device, Choice("pallas", "cluster"), options)
        return str(error.value)

    assert "50257 bfloat16 elements are not whole 16 bytes" in refused("h200", shapes(7, 50257))
    assert "clusters of blocks need compute capability 9.0" in refused("a100", shapes(8, 8192))
    assert "take logits as they are" in refused("h200", shapes(8, 8192), options=ScoreOptions(softcap=2.0))
    assert "shorter than a tile of 1024" in refused("h200", shapes(8, 512))
    assert "more than the shared memory of 16 blocks" in refused("h200", shapes(8, 1 << 23))


@pytest.mark.skipif(NEEDS_A_GPU, reason="JAX 0.11 lowers Triton kernels only where there is a GPU")
def test_one_program_for_two_platforms() -> None:
    traced = jax.jit(osj.softmax).trace(shapes(4096, 1024))
    assert re.search("triton|mosaic_gpu", traced.lower(lowering_platforms=("cuda",)).as_text())
    assert not re.search("triton|mosaic_gpu", traced.lower(lowering_platforms=("cpu",)).as_text())
