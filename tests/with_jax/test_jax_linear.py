"""The head of a language model and its loss in one, beside the same formulas on all logits in float64."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
import numpy as np
from jax_heads import (
    CLASSES,
    HIDDEN,
    IN_FLOAT32,
    MEMORY,
    TOKENS,
    assert_same,
    expected,
    head,
    ours_of,
    scores,
    with_gradients,
)

import onlinesoftmax.jax as osj
from onlinesoftmax.core.task import Choice
from onlinesoftmax.jax.linear import rows
from onlinesoftmax.linear import plans

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def _float64() -> Any:
    with jax.enable_x64(True):
        yield


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z_loss": {"z_loss": 0.01, "scale": 0.7},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "scale": -1.3},
    "scale": {"scale": np.linspace(-1, 2, 15).reshape(TOKENS), "softcap": 3.0},
    "weight": {"weight": np.arange(1.0, 41.0), "token_weight": np.arange(15.0).reshape(TOKENS)},
    "everything": {
        "label_smoothing": 0.2, "z_loss": 0.02, "softcap": 4.0, "scale": np.linspace(2, -1, 15).reshape(TOKENS),
        "weight": np.arange(1.0, 41.0) / 40,
        "token_weight": np.arange(15.0).reshape(TOKENS),
    },
}  # fmt: skip


CASES = [
    ("stored", "none", "plain"), ("stored", "none", "everything"), ("tokens", "mean", "smoothing"),
    ("tokens", "mean", "scale"), ("tokens", "mean", "weight"), ("tokens", "mean", "probabilities"),
    ("tokens", "none", "smoothing"), ("columns", "mean", "z_loss"), ("columns", "none", "scale"),
]  # fmt: skip
"""A plan, a reduction and options."""


@pytest.mark.usefixtures("_float64")
def test_cross_entropy() -> None:
    a = head()
    soft = {**a, "target": jax.nn.softmax(jnp.asarray(np.random.default_rng(1).normal(size=(*TOKENS, CLASSES))))}
    soft["target"] = soft["target"].at[..., CLASSES // 2].set(0)
    # A softcap gives a class of -inf a finite score, and smoothing gives it an infinite loss.
    bare = {**a, "b": jnp.zeros(CLASSES)}

    def every(function: Any, has_memory: bool) -> Any:
        found = {}
        for plan, reduction, name in CASES:
            more = {"memory": MEMORY[plan]} if has_memory else {}
            one = partial(function, reduction=reduction, **OPTIONS.get(name, {"z_loss": 0.1}), **more)
            given = soft if name == "probabilities" else a if name in ("plain", "z_loss", "weight") else bare
            found[plan, reduction, name] = with_gradients(one, given)
        return found

    ours, theirs = (jax.jit(partial(every, *how)) for how in ((ours_of, True), (expected, False)))
    assert_same(ours(), theirs())


@pytest.mark.usefixtures("_float64")
def test_log_probabilities_and_losses_of_them() -> None:
    """The results alone and together, and a loss of one's own."""
    a, old = head(), jnp.asarray(np.random.default_rng(2).normal(size=TOKENS))
    bare = {**a, "b": jnp.zeros(CLASSES)}

    def statistics(a: dict[str, Any], **options: Any) -> Any:
        z = scores(a, **options)
        log_p = jax.nn.log_softmax(z)
        p = jnp.exp(log_p)
        logprob = jnp.sum(jnp.where(jax.nn.one_hot(a["target"], CLASSES, dtype=bool), log_p, 0), -1)
        return logprob, -jnp.sum(p * jnp.where(p == 0, 0, log_p), -1), jax.nn.logsumexp(z, -1)

    def own(a: dict[str, Any], **options: Any) -> Any:
        counts = a["target"] >= 0
        return jnp.sum(counts * clipped(*statistics(a, **options), old)) / jnp.sum(counts)

    def every(tokens: Any, loss: Any) -> Any:
        capped: dict[str, Any] = {"scale": -0.9, "softcap": 5.0}
        return [
            *(with_gradients(lambda a, i=i: tokens(a)[i], a) for i in (0, 2)),
            with_gradients(lambda a: jnp.stack(tokens(a, **capped)), bare),
            with_gradients(loss, a), with_gradients(partial(loss, **capped), bare),
        ]  # fmt: skip

    theirs = jax.jit(partial(every, statistics, own))()
    for plan, of_loss in (("stored", "tokens"), ("columns", "stored")):

        def tokens(a: dict[str, Any], **options: Any) -> Any:
            return ours_of(a, osj.linear_token_logprobs, ignore_index=-100, memory=MEMORY[plan], **options)  # noqa: B023  used in the loop

        def loss(a: dict[str, Any], **options: Any) -> Any:
            more = {"linear_bias": a["b"], "memory": MEMORY[of_loss], **options}  # noqa: B023  used in the loop
            return osj.linear_token_loss(a["x"], a["w"], a["target"], clipped, old, **more)

        assert_same(jax.jit(partial(every, tokens, loss))(), theirs)


def clipped(logprob: Any, entropy: Any, lse: Any, old: Any) -> Any:
    """PPO's loss of a token, with an entropy bonus and a penalty of lse."""
    ratio = jnp.exp(logprob - old)
    return -jnp.minimum(ratio * old, jnp.clip(ratio, 0.8, 1.2) * old) - 0.01 * entropy + 1e-3 * lse * lse


@pytest.mark.parametrize("plan", ["tokens", "columns"])
def test_a_token_that_is_ignored_may_hold_nan(plan: str) -> None:
    """Also with z_loss, and a softcap; a target that is no class is NaN without a gradient."""
    a = head("float32")
    dirty = {**a, "x": a["x"].at[1, 2].set(jnp.nan), "b": jnp.zeros(CLASSES, jnp.float32)}
    clean = {**dirty, "x": a["x"].at[1, 2].set(0)}
    dirty["target"], clean["target"] = (t.at[0, 0].set(CLASSES) for t in (a["target"], a["target"]))

    def every(a: dict[str, Any]) -> Any:
        def one(a: dict[str, Any], **more: Any) -> Any:
            y = ours_of(a, memory=IN_FLOAT32[plan], softcap=4.0, **more)
            return jnp.where(jnp.isfinite(y), y, 0) if y.ndim else y

        none, known = ours_of(a, memory=IN_FLOAT32[plan], reduction="none"), lambda y, *_: -jnp.where(y == y, y, 0)
        own = partial(ours_of, function=lambda *some, **more: osj.linear_token_loss(*some, known, **more))
        of_each = partial(one, reduction="none", z_loss=0.1)
        return none, *(with_gradients(f, a) for f in (of_each, one, own))

    ours, theirs = (jax.jit(every)(some) for some in (dirty, clean))
    assert_same(ours, theirs, rtol=1e-6, atol=1e-6)
    none, (_, of_none), (mean, of_mean), (_, of_own) = ours
    assert np.isnan(none).sum() == 1
    assert np.isnan(mean)
    for found in (of_none, of_mean, of_own):
        assert not any(np.isnan(t).any() for t in found.values())
        assert (np.asarray(found["x"])[[0, 1], [0, 2]] == 0).all()


@pytest.mark.parametrize(("count", "classes"), [(0, 13), (7, 1)])
def test_small_sizes(count: int, classes: int) -> None:
    """The mean of no tokens is NaN, and its gradients are 0."""
    a = head("float32", (count,), classes)
    a["target"] = jnp.abs(a["target"]) % classes
    nothing = {**a, "target": jnp.full(count, -100)}

    def every() -> Any:
        ours, theirs = (with_gradients(partial(f, reduction="none"), a) for f in (ours_of, expected))
        return ours, theirs, with_gradients(ours_of, nothing), osj.linear_token_logprobs(a["x"], a["w"], a["target"])

    ours, theirs, (mean, gradients), found = jax.jit(every)()
    assert_same(ours, theirs, rtol=1e-5, atol=1e-5)
    assert np.isnan(mean)
    assert all((t == 0).all() for t in gradients.values())
    assert found.lse.shape == (count,)


def test_many_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """50257 classes and 7 hidden, in chunks of columns."""
    monkeypatch.setattr(plans, "COLUMN_BYTES", 3 * 8192 * 4)
    a = head("float32", (3,), 50257)
    with jax.enable_x64(True):
        wide = {name: t.astype("float64") if name in "xwb" else t for name, t in a.items()}
        theirs = jax.tree.map(np.asarray, jax.jit(partial(with_gradients, expected))(wide))
    ours = jax.jit(partial(with_gradients, partial(ours_of, memory=2 * 50257 * 4)))(a)
    assert_same(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("_float64")
def test_factors_of_zero() -> None:
    """A token of factor 0 may hold NaN in every plan; the mean over classes of weight 0 is NaN with gradients of 0."""
    a, in_columns = head(classes=400), 47_000
    a["x"], factor = a["x"].at[1, 3].set(0), jnp.ones(TOKENS).at[1, 3].set(0)
    nan = a | {"x": a["x"].at[1, 3].set(jnp.nan)}

    def every(reduction: str) -> Any:
        given: dict[str, Any] = {"reduction": reduction, "token_weight": factor}
        ours = [partial(ours_of, **given, ignore_index=None, memory=memory) for memory in (None, in_columns)]
        return with_gradients(partial(expected, **given), a), *[with_gradients(f, nan) for f in ours]

    found = jax.jit(lambda: [every(reduction) for reduction in ("none", "sum")])()
    for theirs, *ours in found:
        for one in ours:
            assert_same(one, theirs)
    none = partial(ours_of, weight=jnp.zeros(CLASSES), z_loss=0.1)
    mean, gradients = jax.jit(lambda: with_gradients(none, head()))()
    assert np.isnan(mean)
    assert all((t == 0).all() for t in gradients.values())


def test_classes_that_are_added_for_fast_products() -> None:
    """In 16 bits 1025 classes become 1088; in one chunk, in chunks of tokens or of columns the results are the same."""
    rng = np.random.default_rng(0)
    # Logits are small integers, so that float16 holds them.
    arrays = {"x": rng.integers(-1, 2, (48, HIDDEN)), "w": rng.integers(-1, 2, (1025, HIDDEN))}
    target = rng.integers(0, 1025, 48)
    # Neither is a class; the second one would be an added one.
    target[3], target[5] = -100, 1030

    def every(a: dict[str, Any], **how: Any) -> Any:
        def tokens(a: dict[str, Any]) -> Any:
            found = osj.linear_token_logprobs(a["x"], a["w"], a["target"], ignore_index=-100, **how)
            return found.logprob + found.entropy - found.lse

        y, found = ours_of({**a, "b": jnp.arange(1025, dtype=a["x"].dtype) % 3}, return_stats=True, z_loss=0.1, **how)
        sums = [with_gradients(f, a, "xw") for f in (partial(ours_of, reduction="sum", **how), tokens)]
        return sums, y, found

    a = {**{name: jnp.asarray(t, "float16") for name, t in arrays.items()}, "target": jnp.asarray(target)}
    with jax.enable_x64(True):
        wide = {name: t.astype("float64") if name in "xw" else t for name, t in a.items()}
        theirs = jax.tree.map(np.asarray, jax.jit(every)(wide))
    for memory in (None, 40_000):
        program = jax.jit(partial(every, memory=memory)).trace(a).lower()
        assert "x1088x" in program.as_text()
        assert_same(program.compile()(a), theirs, rtol=2**-8, atol=2**-10)
    # A scale that is 0 in float32 makes all classes equally likely, and would make an added one NaN.
    assert jnp.allclose(
        osj.linear_token_logprobs(*(a[name] for name in ("x", "w", "target")), scale=1e-46).lse, np.log(1025)
    )


def test_statistics() -> None:
    # With a negative scale, a bias of -inf would be a logit of inf, and every statistic NaN or inf.
    a = {**head("float32"), "b": jnp.arange(40.0) / 9}
    options = {"z_loss": 0.1, "memory": IN_FLOAT32["tokens"]}

    def both() -> Any:
        y, found = ours_of(a, return_stats=True, scale=jnp.full(TOKENS, -2.0), **options)
        z, counts = scores(a, -2.0), a["target"] != -100
        p = jax.nn.softmax(z)
        entropy = -jnp.sum(jnp.where(p == 0, 0, p * jnp.log(p)), -1)
        lse, largest = jax.nn.logsumexp(z, -1), jnp.argmax(z, -1)
        want = lse, 0.1 * lse**2 * counts, entropy, largest, (largest == a["target"]) & counts
        return (y, *found), (ours_of(a, scale=-2.0, **options), *want)

    assert_same(*jax.jit(both)(), rtol=1e-5, atol=1e-5)


def in_float64(a: dict[str, Any]) -> Any:
    """The gradients of the mean on all logits."""
    with jax.enable_x64(True):
        wide = {name: t.astype("float64") if name in "xwb" else t for name, t in a.items()}
        return jax.tree.map(np.asarray, jax.jit(partial(with_gradients, expected))(wide)[1])


def test_the_gradient_of_the_weight_is_rounded_once() -> None:
    """In bfloat16, 32 chunks have the error of one product; with acc_dtype they are rounded 32 times."""
    a = head("bfloat16", (64,), 23)
    exact, two = in_float64(a), 2 * 23 * 2
    calls: list[dict[str, Any]] = [{}, {"memory": two + 23 * 7 * 4}, {"memory": two, "acc_dtype": "bfloat16"}]
    found = jax.jit(lambda a: [with_gradients(partial(ours_of, **some), a, "w")[1]["w"] for some in calls])(a)
    errors = [np.abs(np.asarray(t, "float64") - exact["w"]).max() for t in found]
    assert errors[1] <= errors[0] + np.abs(exact["w"]).max() * 2.0**-9
    assert errors[1] < errors[2] < 32 * errors[0]


def test_a_mean_in_float16_keeps_small_gradients() -> None:
    """With a scaled loss, the gradient of a mean over many tokens is as exact as that of a sum."""
    rng = np.random.default_rng(0)
    # Classes that are no target: float16 has no number as small as 1 / 4096 of their probability.
    bias = np.where(np.arange(1000) < 10, 0, -8)
    arrays = {"x": rng.normal(size=(4096, 8)) / 3, "w": rng.normal(size=(1000, 8)) / 3, "b": bias}
    a = {name: jnp.asarray(t, "float16") for name, t in arrays.items()}
    a["target"] = jnp.asarray(rng.integers(0, 10, 4096))
    dy = np.random.default_rng(5).normal()
    exact = in_float64(a)["w"][10:] * (1024 / dy)

    def scaled(w: Any) -> Any:
        own = osj.linear_token_loss(a["x"], w, a["target"], lambda y, *_: -y, linear_bias=a["b"])
        return (ours_of({**a, "w": w}).astype("float32") + own) * 512

    found = np.asarray(jax.jit(jax.grad(scaled))(a["w"]), "float64")[10:]
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 1e-2


def test_kernels_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, in the loop over tokens."""
    a = head("float32", (7,))
    del a["b"]

    def every(x: Any, w: Any) -> Any:
        return osj.linear_cross_entropy(x, w, a["target"], softcap=3.0, label_smoothing=0.1, memory=4 * 40 * 4)

    theirs = jax.jit(jax.grad(every, (0, 1)))(a["x"], a["w"])
    monkeypatch.setattr(rows, "CHOICE", Choice("pallas", "row"))
    jax.clear_caches()
    assert_same(jax.jit(jax.grad(every, (0, 1)))(a["x"], a["w"]), theirs, rtol=1e-5, atol=1e-6)
    jax.clear_caches()


def program_for_a_gpu() -> Any:
    """Loss and gradients in bfloat16 of 8192 tokens, 2304 hidden and 256000 classes, traced."""
    shapes = [jax.ShapeDtypeStruct((8192, 2304), jnp.bfloat16), jax.ShapeDtypeStruct((256000, 2304), jnp.bfloat16)]
    target = jax.ShapeDtypeStruct((8192,), jnp.int32)
    return jax.jit(jax.value_and_grad(osj.linear_cross_entropy, (0, 1))).trace(*shapes, target)


def test_a_program_for_a_gpu_has_kernels_and_no_more_logits_than_a_chunk() -> None:
    text = program_for_a_gpu().lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" in text
    largest = max(int(rows) for rows in re.findall(r"tensor<(\d+)x256000x\w+>", text))
    assert largest * 256000 * 2 <= plans.CHUNK_BYTES + 256000 * 2304 * 2


@pytest.mark.gpu
def test_the_memory_on_a_gpu() -> None:
    """The logits of a chunk, their gradient beside them, and one float32 sum of the weight's gradient."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU that JAX sees")
    weight = 256000 * 2304
    taken = program_for_a_gpu().lower().compile().memory_analysis().temp_size_in_bytes
    assert taken <= 2 * (plans.CHUNK_BYTES + 2 * weight) + 4 * weight
