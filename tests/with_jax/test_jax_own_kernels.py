"""Sampling and routing in JAX by kernels, on a simulated GPU and on a real one, beside XLA's formulas on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from simulated_gpu import simulated_gpu

import onlinesoftmax.jax as osj
from onlinesoftmax.jax import cuda_call, kernel_or_formula
from onlinesoftmax.kernels.cuda import xla_handler

Run = Callable[[Callable[..., Any], Any], Any]
"""run(function, operands) is the result of a compiled function where the kernels run."""


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The simulated GPU, or the one of this machine."""
    if request.param == "gpu":
        yield "gpu"
        return
    with simulated_gpu(request, monkeypatch):
        yield "simulated"


def cases(every: Sequence[Any], simulated: Sequence[int]) -> Any:
    """The cases of a test: all of them on a GPU, and some, by their numbers, on the simulated one."""
    found = [pytest.param("gpu", case, marks=pytest.mark.gpu) for case in every]
    found += [pytest.param("simulated", every[i]) for i in simulated]
    return pytest.mark.parametrize(("place", "given"), found, indirect=["place"], ids=_named)


def _named(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value)) or "plain"


PLACES = pytest.mark.parametrize("place", ["simulated", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)


def both(
    function: Callable[..., Any], *operands: Any, calls: int = 1, reference: Callable[..., Any] | None = None
) -> tuple[Any, Any]:
    """The results of a compiled function by kernels, and by XLA's operations on the CPU.

    Its program for the GPU calls as many kernels as it should.  A function with a mesh of the GPU needs a reference
    that runs on the CPU.
    """
    reference = reference or function
    compiled = jax.jit(function)
    text = compiled.lower(*operands).as_text()
    assert text.count(f"@{cuda_call.TARGET}(") + text.count(f'call_target_name = "{cuda_call.TARGET}"') == calls
    ours = jax.device_get(compiled(*operands))
    with jax.default_device(jax.devices("cpu")[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_handler, "unavailable", lambda: "the reference runs formulas")
        wanted = jax.device_get(
            jax.jit(lambda *given: reference(*given))(*jax.device_put(operands, jax.devices("cpu")[0]))
        )
    return ours, wanted


def check(results: tuple[Any, Any], error: float = 2e-5) -> None:
    """Integers are equal, and numbers nearly."""
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        if got.dtype.kind in "iub":
            np.testing.assert_array_equal(got, want)
        else:
            rough = 2**-7 if got.dtype == jnp.bfloat16 else error
            np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=rough, atol=rough)


def logits(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 2, dtype)


def hard(*shape: int) -> jax.Array:
    """Rows with NaN, infinities and ties."""
    x = np.array(logits(*shape))
    x[0, 3], x[1, 5], x[2], x[3] = np.nan, np.inf, -np.inf, np.round(x[3])
    return jnp.asarray(x)


SAMPLED: list[dict[str, Any]] = [
    {}, {"logprobs": "raw", "temperature": 0.7}, {"top_k": 20}, {"top_p": 0.8, "ties": "first"},
    {"top_k": np.array([5, 0, 1, 40, 3]), "top_p": 0.9, "min_p": 0.01, "top_logprobs": 4, "return_support": 30},
    {"temperature": np.array([0.0, 1.0, 0.5, 2.0, 0.0]), "softcap": 5.0, "return_support": 3, "top_k": 3},
]  # fmt: skip


@cases(SAMPLED, [0, 4])
def test_sampled_tokens(given: dict[str, Any], place: str) -> None:
    seeds = np.array([3, 2**40 + 1, 5, 6, 7])
    for x in (hard(5, 1003), logits(5, 2048, dtype="bfloat16"))[: 1 if place == "simulated" else 2]:
        check(both(lambda x: osj.sample(seeds, x, offset=2, **given), x))


@PLACES
def test_transformed_samples(place: str) -> None:
    x, keys = logits(2, 3, 500), jax.random.split(jax.random.key(1), 6).reshape(2, 3)
    f = partial(osj.sample, top_k=7)
    check(both(jax.vmap(f), keys, x))
    if place == "simulated":
        return
    check(both(f, keys, x))
    check(both(jax.vmap(f, in_axes=(0, None)), keys[0], x[0, 0]))
    check(both(jax.vmap(partial(osj.sample, axis=0), in_axes=(None, 1)), 5, x[0]))
    mesh = jax.make_mesh((1,), ("v",), axis_types=(AxisType.Auto,))
    check(both(jax.shard_map(f, mesh=mesh, in_specs=(P("v"), P("v")), out_specs=P("v")), keys, x, reference=f))
    large = logits(64, 128256, dtype="bfloat16")
    check(both(partial(osj.sample, top_k=50, top_p=0.9), 7 * np.arange(64), large))


def drafted(*shape: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits of a target model (..., n + 1, tokens), drafts, of which some are no tokens, and logits of their model."""
    target = np.array(logits(*shape))
    draft = target[..., :-1, :] + np.array(logits(*shape, seed=1))[..., :-1, :] / 4
    drafts = draft.argmax(-1)
    drafts[0, -1], drafts[1, 0] = -1, shape[-1]
    target[2, 1, 3] = np.nan
    return jnp.asarray(target, dtype), jnp.asarray(drafts), jnp.asarray(draft, dtype)


VERIFIED: list[dict[str, Any]] = [
    {}, {"top_k": 20, "temperature": 0.7}, {"top_p": 0.8, "ties": "first"},
    {"top_k": np.array([5, 0, 1, 40, 3]), "top_p": 0.9, "min_p": np.array([0.01, 0, 1e-4, 0.1, 0.5]),
     "temperature": np.array([1.0, 0.5, 1.5, 0.0, 2.0])},
]  # fmt: skip


@cases(VERIFIED, [3])
def test_verified_drafts(given: dict[str, Any], place: str) -> None:
    """With logits of the draft model, in another dtype or in the same, without them, and without drafts."""
    f = partial(osj.verify, np.array([3, 2**40 + 1, 5, 6, 7]), offset=np.arange(5), **given)
    target, drafts, draft = drafted(5, 4, 1003)
    check(both(f, target, drafts, draft.astype("float16"), calls=3))
    if place == "simulated":
        return
    check(both(f, target, drafts, calls=2))
    check(both(f, target[:, :1], drafts[:, :0], draft[:, :0], calls=2))
    check(both(f, target, drafts, draft, calls=3))
    check(both(f, *drafted(5, 3, 2048, dtype="bfloat16"), calls=3))


@PLACES
def test_transformed_verifications(place: str) -> None:
    target, drafts, draft = (t.reshape(3, 2, *t.shape[1:]) for t in drafted(6, 3, 500))
    keys = jax.random.split(jax.random.key(1), 6).reshape(3, 2)
    f = partial(osj.verify, top_k=7)
    check(both(jax.vmap(f), keys, target, drafts, calls=2))
    if place == "simulated":
        return
    check(both(f, keys, target, drafts, draft, calls=3))
    check(both(jax.vmap(f, in_axes=(None, 0, None, 1)), 5, target, drafts[0], jnp.moveaxis(draft, 0, 1), calls=3))
    mesh = jax.make_mesh((1,), ("v",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(f, mesh=mesh, in_specs=(P("v"),) * 4, out_specs=P("v"))
    check(both(sharded, keys, target, drafts, draft, calls=3, reference=f))
    check(both(partial(osj.verify, top_p=0.9), 7 * np.arange(64), *drafted(64, 5, 128256), calls=3))


TOPS: list[dict[str, Any]] = [
    {"k": 20}, {"k": 0}, {"k": 1, "scale": 0.5, "softcap": 4.0}, {"k": 500, "where": np.arange(700) % 3 > 0},
]  # fmt: skip


@cases(TOPS, [0])
def test_largest_log_probabilities(given: dict[str, Any], place: str) -> None:
    target = np.array([1, 699, -1, 700])

    def listed(x: Any) -> Any:
        return osj.topk_logprobs(x, target=target, **given), osj.topk_logprobs(x, **given)

    for x in (hard(4, 700), logits(4, 700, dtype="bfloat16")):
        check(both(listed, x, calls=2))


@PLACES
def test_gradients_of_the_largest_log_probabilities(place: str) -> None:
    def loss(x: Any) -> Any:
        found = osj.topk_logprobs(x, 5, target=jnp.zeros(x.shape[:-1], int), scale=0.5)
        numbers = [t for t in found if t is not None and jnp.issubdtype(t.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(t) * i) for i, t in enumerate(numbers, 1))

    x = logits(3, 4, 70)
    check(both(jax.value_and_grad(loss), x))
    if place == "simulated":
        return
    check(both(jax.vmap(jax.grad(loss)), x))
    check(both(lambda x: jax.jvp(loss, (x,), (jnp.cos(x),)), x))
    check(both(lambda x: jax.hessian(loss)(x[0, 0]), x))


BIAS = np.linspace(-1, 1, 24, dtype=np.float32)
ROUTED: list[dict[str, Any]] = [
    {}, {"score": "sigmoid", "bias": BIAS, "groups": 4, "group_k": 2, "scale": 2.5},
    {"score": "sqrtsoftplus", "renormalize": False}, {"order": "topk_first", "renormalize": False},
    {"where": np.arange(16) % 3 > 0}, {"indices": np.arange(64).reshape(16, 4) % 25 - 1},
]  # fmt: skip


@cases(ROUTED, [1, 5])
def test_routed_tokens(given: dict[str, Any], place: str) -> None:
    """Experts, weights, sums, losses, and gradients."""

    def routed(x: Any) -> Any:
        return osj.route(x, 4, prob_sums=True, dense=True, **given)

    def loss(x: Any) -> Any:
        found = routed(x)
        both = osj.load_balancing_loss(found) + osj.router_z_loss(found)
        return both + jnp.sum(jnp.sin(found.weights)), found

    check(both(jax.value_and_grad(loss, has_aux=True), logits(16, 24), calls=2))
    if "indices" not in given and place == "gpu":
        check(both(jax.value_and_grad(loss, has_aux=True), logits(2, 16, 24, dtype="bfloat16"), calls=2))
        check(both(routed, hard(16, 24)))


@PLACES
def test_transformed_routes(place: str) -> None:
    def loss(x: Any, **given: Any) -> Any:
        found = osj.route(x, 3, prob_sums=True, bias=BIAS, **given)
        return jnp.sum(found.weights**2) + osj.load_balancing_loss(found)

    x = logits(3, 8, 24)
    check(both(jax.vmap(jax.value_and_grad(loss)), x, calls=2))
    if place == "simulated":
        return
    check(both(lambda x: jax.vmap(jax.grad(loss))(x[0]), x, calls=2))
    check(both(jax.value_and_grad(jax.checkpoint(loss)), x, calls=3))
    check(both(lambda x: jax.jvp(loss, (x,), (jnp.cos(x),)), x))
    check(both(lambda x: jax.hessian(loss)(x[0, :2]), x))
    mesh = jax.make_mesh((1,), ("t",), axis_types=(AxisType.Auto,))
    f = jax.grad(loss)
    check(both(jax.shard_map(f, mesh=mesh, in_specs=P("t"), out_specs=P("t")), x, calls=2, reference=f))
    check(both(lambda x: osj.route(x[0, 0], 3, counts=True), x))
    check(both(jax.grad(lambda x: osj.router_z_loss(osj.route(x, 8))), logits(65536, 256), calls=2))


def lowered(function: Any, *operands: Any) -> str:
    """The program of a function for an NVIDIA GPU, which need not be there."""
    return str(jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text())


def test_programs_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for no known GPU, of `jax.export`, and without cuda-core have XLA's operations."""
    x = jax.ShapeDtypeStruct((64, 640), jnp.float32)

    def verify(x: Any) -> Any:
        return osj.verify(3, x, jnp.zeros((63,), int), x[1:])

    calls = {
        partial(osj.sample, 3, top_k=4): 1,
        partial(osj.topk_logprobs, k=4): 1,
        partial(osj.route, k=4): 1,
        verify: 3,
    }
    named = AbstractMesh((1,), ("a",), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
    monkeypatch.setattr(kernel_or_formula, "to_lower_for", lambda: kernel_or_formula.UNNAMED_GPU)
    for call in calls:
        assert cuda_call.TARGET not in lowered(call, x)
    monkeypatch.undo()
    jax.clear_caches()
    with jax.sharding.use_abstract_mesh(named):
        for call, number in calls.items():
            assert lowered(call, x).count(cuda_call.TARGET) == number
            exported = jax.export.export(jax.jit(call), platforms=["cuda"])(x)
            assert cuda_call.TARGET not in exported.mlir_module()
        jax.clear_caches()
        monkeypatch.setattr(xla_handler, "unavailable", lambda: "cuda.core is not installed")
        for call in calls:
            assert cuda_call.TARGET not in lowered(call, x)
