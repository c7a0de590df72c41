"""The CUDA kernels in JAX: the call through XLA with kernels that are simulated on the host, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from exact_losses import assert_leaves_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from simulated_gpu import HANDLER, simulated_gpu

import onlinesoftmax.jax as osj
from onlinesoftmax import PlanError, explain
from onlinesoftmax.core.device import known
from onlinesoftmax.core.task import Choice
from onlinesoftmax.jax import cuda_call, custom_op, plans
from onlinesoftmax.jax.device import UNNAMED_GPU
from onlinesoftmax.jax.linear import rows
from onlinesoftmax.kernels.cuda import xla_handler
from onlinesoftmax.kernels.cuda.xla_handler import Launch
from onlinesoftmax.ops import OPERATIONS as DECLARED

OPERATIONS = ("softmax", "log_softmax", "logsumexp")
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "none": ("none", {}),
    "mean": ("mean", {"label_smoothing": 0.1, "z_loss": 1e-3}),
    "each": ("none", {"label_smoothing": 0.1, "z_loss": 1e-3}),
    "scaled": ("none", {"scale": 0.5}),
    "scaled mean": ("mean", {"scale": 0.5}),
    "masked": ("none", {"where": np.arange(9)[:, None] != 4}),
    "capped sum": ("sum", {"softcap": 20.0}),
    "capped": ("none", {"softcap": 20.0, "where": np.arange(9)[:, None] != 4}),
    "scaled rows": ("none", {"scale": np.linspace(0.5, 2, 9, dtype=np.float32)[:, None], "softcap": 5.0}),
    "token_logprobs": ("none", {}),
}
SHAPES = {"row": (9, 199), "looped": (2, 5000), "cluster": (2, 40000), "grid": (2, 40000)}


@pytest.fixture
def simulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with simulated_gpu(request, monkeypatch):
        yield


@pytest.fixture
def place(request: pytest.FixtureRequest) -> None:
    """The simulated GPU, or the one of this machine."""
    if request.param == "simulated":
        request.getfixturevalue("simulated")


def _named(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value)


def cases(names: str, simulated: Sequence[tuple[Any, ...]], on_gpu: Sequence[tuple[Any, ...]]) -> Any:
    """The arguments of a test on the simulated GPU, where each kernel is compiled in a second, and on a GPU."""
    found = [pytest.param("simulated", *case) for case in simulated]
    found += [pytest.param("gpu", *case, marks=pytest.mark.gpu) for case in on_gpu]
    return pytest.mark.parametrize(f"place, {names}", found, indirect=["place"], ids=_named)


def with_specials(x: np.ndarray[Any, Any]) -> jax.Array:
    """Rows as float32, of which the last are only -inf, and have an inf, a NaN and only inf."""
    for i, change in enumerate(((slice(None), -np.inf), (3, np.inf), (5, np.nan), (slice(None), np.inf))[: len(x) - 1]):
        x[-1 - i, change[0]] = change[1]
    return jnp.asarray(x, jnp.float32)


def exact(name: str, x: Any, dy: Any) -> tuple[Any, Any]:
    """The result of an operation along the last axis, and its gradient, in float64."""
    x, dy = (np.asarray(t, np.float64) for t in (x, dy))
    m = x.max(axis=-1, keepdims=True)
    e = np.exp(x - m)
    l = e.sum(axis=-1, keepdims=True)
    p, lse = e / l, m + np.log(l)
    if name == "softmax":
        return p, p * (dy - (p * dy).sum(axis=-1, keepdims=True))
    if name == "log_softmax":
        return x - lse, dy - p * dy.sum(axis=-1, keepdims=True)
    return lse[..., 0], p * dy[..., None]


def most_by_rounding(name: str, x: Any, dy: Any) -> tuple[Any, Any]:
    """What one relative unit of each result may change: the result, and the terms of a gradient that reads it.

    The gradient of softmax reads the result, which is rounded to the dtype; XLA may keep it in float32.
    """
    y, dx = (np.abs(t) for t in exact(name, x, dy))
    if name == "softmax":
        terms = y * np.abs(np.asarray(dy, np.float64))
        dx = terms + y * terms.sum(axis=-1, keepdims=True)
    return y, dx


@cases(
    "strategy, dtype, names",
    [("cluster", "bfloat16", ["logsumexp"]), ("grid", "float16", ["log_softmax"])],
    [(strategy, dtype, OPERATIONS) for strategy in SHAPES for dtype in ("float32", "bfloat16", "float16")],
)
def test_values_and_gradients(place: None, strategy: str, dtype: str, names: Sequence[str]) -> None:
    """No element is farther from the exact value than the worst element of XLA's result, and one unit."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=SHAPES[strategy]) * 4, dtype)
    given = {
        name: jnp.asarray(rng.normal(size=x.shape[:1] if DECLARED[name].per_row else x.shape), dtype) for name in names
    }

    @partial(jax.jit, static_argnames=("backend", "strategy"))
    def program(x: Any, given: Any, backend: str, strategy: str | None) -> Any:
        def both(name: str) -> Any:
            call = partial(getattr(osj, name), axis=-1, backend=backend, strategy=strategy)
            y, backward = jax.vjp(call, x)
            return y, *backward(given[name])

        return {name: both(name) for name in names}

    ours, xla = program(x, given, "cuda", strategy), program(x, given, "eager", None)
    for name in names:
        right, sizes = (values(name, x, given[name]) for values in (exact, most_by_rounding))
        for found, reference, y, size in zip(ours[name], xla[name], right, sizes, strict=True):
            assert found.dtype == x.dtype
            off, most = (np.abs(np.asarray(t, np.float64) - y) for t in (found, reference))
            assert (off <= most.max() + size * float(jnp.finfo(dtype).eps)).all(), (name, off.max(), most.max())


@cases(
    "strategy, dtype, which",
    [("looped", "bfloat16", ["masked", "mean", "token_logprobs", "scaled rows"])],
    [(strategy, ("float32", "bfloat16")[i % 2], LOSSES) for i, strategy in enumerate(SHAPES)],
)
def test_losses(place: None, strategy: str, dtype: str, which: Sequence[str]) -> None:
    """The losses, their gradients and their means, beside XLA's; a label that is ignored has a row with NaN."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(9, SHAPES[strategy][1])) * 4, dtype).at[2, 5].set(jnp.nan)
    labels = jnp.asarray(rng.integers(0, x.shape[1], 9), jnp.int32).at[2].set(-100)

    def loss(name: str, x: Any, **forced: Any) -> Any:
        given = {**forced, "ignore_index": -100}
        if name == "token_logprobs":
            found = jax.tree.leaves(osj.token_logprobs(x, labels, **given))
            return sum(jnp.sum(jnp.cos(t) * i) for i, t in enumerate(found, 1))
        reduction, more = LOSSES[name]
        return jnp.sum(jnp.sin(osj.cross_entropy(x, labels, reduction=reduction, **given, **more)))

    def program(x: Any, **forced: Any) -> Any:
        return [jax.value_and_grad(partial(loss, name, **forced))(x) for name in which]

    found = [
        jax.jit(partial(program, **forced))(x)
        for forced in ({"backend": "cuda", "strategy": strategy}, {"backend": "eager"})
    ]
    exact = {"rtol": 2e-5, "atol": 1e-6} if dtype == "float32" else {"rtol": 2**-6, "atol": 2**-12}
    for ours, xla in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(*(np.asarray(t, np.float32) for t in (ours, xla)), **exact)


@cases("strategy, names", [("row", ["logsumexp"])], [(strategy, OPERATIONS) for strategy in SHAPES])
def test_infinities_and_nan(place: None, strategy: str, names: Sequence[str]) -> None:
    x = with_specials(np.random.default_rng(4).normal(size=(9, SHAPES[strategy][1])))
    found = []
    for backend, forced in (("cuda", strategy), ("eager", None)):
        calls = [partial(getattr(osj, name), axis=-1, scale=0.5, backend=backend, strategy=forced) for name in names]

        @jax.jit
        def program(x: Any, calls: Any = tuple(calls)) -> Any:
            both = [jax.vjp(call, x) for call in calls]
            return [(y, *(backward(jnp.full_like(y, dy)) for dy in (0.0, 1.0))) for y, backward in both]

        found.append(program(x))
    assert_leaves_close(*found)


OPTIONS: dict[str, dict[str, Any]] = {
    "where": {"where": np.arange(199) % 3 > 0}, "rows": {"where": np.arange(9)[:, None] % 4 > 0, "scale": 0.5},
    "softcap": {"softcap": 3.0}, "bias": {"bias": np.linspace(-1, 1, 199, dtype=np.float32), "scale": 2.0},
    "scales": {"scale": np.linspace(0.5, 2, 9, dtype=np.float32)[:, None], "softcap": 5.0},
}  # fmt: skip


@cases(
    "names, which", [(["softmax"], ["where"]), (["logsumexp"], ["softcap"])], [(OPERATIONS, [each]) for each in OPTIONS]
)
def test_score_options(place: None, names: Sequence[str], which: Sequence[str]) -> None:
    """Options and their gradients, also in rows with NaN, whose masked elements are those of XLA."""
    x = with_specials(np.random.default_rng(7).normal(size=(9, 199)))
    given = [(name, OPTIONS[each]) for name in names for each in which]

    def both(name: str, options: Any, backend: str) -> Any:
        def call(x: Any, options: Any) -> Any:
            return getattr(osj, name)(x, -1, **options, backend=backend)

        fixed = {key: t for key, t in options.items() if key not in ("bias", "scale") or isinstance(t, float)}
        arrays = {key: t for key, t in options.items() if key not in fixed}
        y, backward = jax.vjp(lambda x, some: call(x, {**fixed, **some}), x, arrays)
        return y, backward(jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    found = [
        jax.jit(lambda who=who: [both(name, options, who) for name, options in given])() for who in ("cuda", "eager")
    ]
    assert_leaves_close(*found)


@cases("names", [(["softmax"],)], [(OPERATIONS,)])
def test_transforms(place: None, names: Sequence[str]) -> None:
    """The derivatives and the batches of the other backends, and rows under `shard_map`."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 4, 65)), jnp.float32)
    mesh = jax.make_mesh((1,), ("v",), axis_types=(AxisType.Auto,))

    def programs(backend: str) -> Iterator[Any]:
        for name in names:

            def loss(x: Any, name: str = name) -> Any:
                return jnp.sum(jnp.sin(getattr(osj, name)(x, -1, scale=0.5, backend=backend)))

            yield jax.grad(loss)
            yield jax.vmap(jax.value_and_grad(loss))
            yield jax.vmap(loss, in_axes=1)
            yield lambda x, loss=loss: jax.hessian(loss)(x[0, 0])
            yield jax.grad(jax.checkpoint(loss))
            yield lambda x, loss=loss: jax.jvp(loss, (x,), (jnp.cos(x),))
            yield jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P("v"),), out_specs=P("v"))

    found = [jax.jit(lambda x, who=who: [f(x) for f in programs(who)])(x) for who in ("cuda", "eager")]
    assert_leaves_close(*found)
    with jax.disable_jit():
        np.testing.assert_allclose(osj.softmax(x, backend="cuda"), jax.nn.softmax(x), rtol=1e-6)


@cases("function", [("linear_cross_entropy",)], [("linear_cross_entropy",), ("linear_token_logprobs",)])
def test_heads(place: None, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of a head, in a loop over tokens that uses its buffers again."""
    rng = np.random.default_rng(3)
    x, w = (jnp.asarray(rng.normal(size=(rows, 16)), jnp.float32) for rows in (37, 1000))
    target = jnp.arange(37) * 29 % 1000

    def loss(x: Any, w: Any) -> Any:
        found = getattr(osj, function)(x, w, target, softcap=5.0, memory=16 * 1000 * 4)
        return found if function == "linear_cross_entropy" else jnp.sum(found.logprob + found.entropy)

    results = []
    for backend in ("cuda", "eager"):
        monkeypatch.setattr(rows, "CHOICE", Choice(backend))
        jax.clear_caches()
        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        text = step.lower(x, w).as_text()
        assert "while" in text
        assert (cuda_call.TARGET in text) == (backend == "cuda")
        with jax.default_matmul_precision("float32"):
            results.append(step(x, w))
    jax.clear_caches()
    assert_leaves_close(*results, atol=1e-5)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_of_a_launch_is_an_error_of_the_program(
    kind: type[BaseException], simulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(launch: Launch, device: int) -> None:
        raise kind("no such kernel")

    monkeypatch.setattr(HANDLER, "_load", fail)
    text = Launch("none", (0, 1), (), (1, 1, 32, 0, 1, False), b"", b"").text()
    call = jax.ffi.ffi_call(cuda_call.TARGET, jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{kind.__name__}: no such kernel"):
        jax.block_until_ready(jax.jit(lambda x: call(x, launch=text))(jnp.ones(2)))


def test_the_text_of_a_launch() -> None:
    launch = Launch("row_kernel", (0, 1, 40), (64,), (3, 1, 128, 0, 2, True), bytes(range(24)), b"\x7fELF" * 9)
    assert Launch.parse(launch.text()) == launch
    assert launch.text()[:32] != launch._replace(values=bytes(24)).text()[:32]


def test_the_last_result_has_all_mailboxes() -> None:
    launch = Launch("row_kernel", (0, 1, 40), (64,), (3, 1, 128, 0, 2, True), b"", b"")
    assert (launch.mail_bytes, launch.with_mail([5, 6, 4096])) == (128, [5, 6, 4096])
    two = launch._replace(mail=(8, 1024))
    assert (two.mail_bytes, two.with_mail([5, 6, 4096])) == (128 + 1024, [5, 6, 4096, 4096 + 128])
    none = launch._replace(mail=())
    assert (none.mail_bytes, none.with_mail([5, 6])) == (0, [5, 6])


def test_versions_of_the_interface() -> None:
    found = xla_handler.interface()
    assert found is not None
    assert xla_handler.why_unlike(found) is None
    for other in (found._replace(version=(1, 0)), found._replace(functions=("New", *found.functions))):
        assert "do not know the version" in (xla_handler.why_unlike(other) or "")
    assert "has no header" in (xla_handler.why_unlike(xla_handler.Interface.of("")) or "")


def test_explain_says_what_runs() -> None:
    short = explain((64, 5000), framework="jax", device="h100")
    assert short.plan.backend == "pallas"
    assert "takes 14 us of the host's time" in str(short)
    assert explain((64, 3000001), framework="jax", device="h100").plan.backend == "cuda"
    masked = explain((64, 3000001), mask=(64, 3000001), framework="jax", device="h100")
    assert masked.plan.backend == "pallas"
    assert "in another pass" in str(masked)
    moved = explain((64, 3000001), framework="jax", device="h100", dim=0)
    assert moved.plan.backend == "eager"
    assert "move the axis to the end" in str(moved)
    assert explain((3000001, 64), framework="jax", device="h100", dim=0, backend="cuda").plan.backend == "cuda"
    for name in OPERATIONS:
        assert (
            explain((64, 5000), framework="jax", device="h100", backend="cuda", operation=name).plan.backend == "cuda"
        )


def lowered(function: Any, cols: int = 640) -> str:
    """The program of a function for an NVIDIA GPU, which need not be there."""
    x = jax.ShapeDtypeStruct((64, cols), jnp.float32)
    return str(jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text())


def test_a_program_for_a_gpu_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")

    def loss(x: Any) -> Any:
        return osj.logsumexp(x, -1, backend="cuda").sum()

    assert lowered(jax.grad(loss)).count(f"@{cuda_call.TARGET}") == 2
    monkeypatch.setattr(xla_handler, "unavailable", lambda: "cuda.core is not installed")
    with pytest.raises(PlanError, match=r"cuda/row: cuda\.core is not installed"):
        lowered(lambda x: osj.softmax(x, backend="cuda"))


def test_programs_that_call_the_kernels_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows on a known GPU; not columns, a GPU without a name, `jax.export`, or a kernel shorter than launches."""
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")

    def loss(x: Any) -> Any:
        return osj.cross_entropy(x, jnp.zeros(64, int), reduction="mean")

    step, cols = jax.value_and_grad(loss), 1 << 20
    monkeypatch.setattr(custom_op, "to_lower_for", lambda: UNNAMED_GPU)
    assert cuda_call.TARGET not in lowered(step, cols)
    monkeypatch.setattr(custom_op, "to_lower_for", lambda: known("h100"))
    jax.clear_caches()
    assert lowered(step, cols).count(f"@{cuda_call.TARGET}") == 1
    assert cuda_call.TARGET not in lowered(step, 640)
    for backend in (None, "cuda"):
        columns = lowered(partial(osj.softmax, axis=0, backend=backend), cols)
        assert ("custom_call" in columns) == (backend == "cuda")
    assert lowered(jax.grad(lambda x: jnp.sum(osj.softmax(x) ** 2)), cols).count(f"@{cuda_call.TARGET}") == 2
    x = jax.ShapeDtypeStruct((64, cols), jnp.float32)
    checks = [
        jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call"),
        *map(jax.export.DisabledSafetyCheck.custom_call, ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")),
    ]
    exported = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=checks)(x)
    assert cuda_call.TARGET not in exported.mlir_module()
    # On an H100 the kernel takes 160 us, and eight GPUs are launched in 112.
    for gpus, cuda in ((8, True), (16, False)):
        monkeypatch.setattr(plans, "local_gpus", lambda gpus=gpus: gpus)
        jax.clear_caches()
        assert (cuda_call.TARGET in lowered(step, cols)) == cuda
