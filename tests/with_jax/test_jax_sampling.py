"""Sampling of JAX arrays gives the tokens of torch tensors, and works in JAX's transformations."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")
pytest.importorskip("torch", reason="the tokens are compared with those of torch tensors")

import jax
import jax.numpy as jnp
import torch

import hard_logits
import onlinesoftmax as osm
import onlinesoftmax.jax as osj
from hard_logits import COLUMNS, by_torch, hard_rows, parameters, verify_by_torch
from onlinesoftmax.core.device import known
from onlinesoftmax.jax.sampling import kernels

assert_same = partial(hard_logits.assert_same, integers=np.int32)


@pytest.mark.parametrize(
    "given", [{"top_logprobs": COLUMNS}, {"ties": "first", "logprobs": "raw", "return_support": 9}]
)
def test_tokens_are_those_of_torch(given: dict[str, Any]) -> None:
    z = np.tile(hard_rows(), (8, 1))
    of_rows = parameters(len(z))
    assert_same(osj.sample(of_rows.pop("seed"), z, **of_rows, **given), by_torch(z, **parameters(len(z)), **given))


def test_without_filters() -> None:
    z, seed = jnp.asarray(hard_rows(), jnp.bfloat16), np.arange(18) + 2**40
    assert_same(osj.sample(seed, z, temperature=0.7), by_torch(z, seed, temperature=0.7))


def test_many_tokens() -> None:
    z = np.random.default_rng(7).normal(size=(1, 151_936)).astype(np.float32) * 3
    given = {"top_p": 0.97, "min_p": 1e-7, "top_logprobs": 20}
    assert_same(osj.sample(3, z, **given), by_torch(z, 3, **given))
    assert osj.sample(1, jnp.ones((2, 1)), top_k=1, top_p=0.0).token.tolist() == [0, 0]


def test_a_number_as_top_k_has_the_kernel_that_it_has_in_pytorch() -> None:
    x = jnp.zeros((3, 40))
    for k, listed in ((7, 7), (40, None), (jnp.array([7, 8, 9]), None)):
        program = jax.make_jaxpr(partial(osj.sample, 0, top_k=k))(x)
        assert [e.params["call"].listed for e in program.eqns if "call" in e.params] == [listed]
    device = known("h100")
    for listed, threads in ((None, 512), (50, 256), (500, 512)):
        operands = {"x": jax.ShapeDtypeStruct((1024, 128256), "float32"), "top_k": jax.ShapeDtypeStruct((), "int32")}
        plan, _ = kernels.sample(False, False, 0, 0, listed, device, operands)
        assert plan == f"sample.cuh, 1 x {threads} threads for a row"


def test_score_options_and_axes() -> None:
    rng = np.random.default_rng(8)
    z, bias = rng.normal(size=(4, 30)).astype(np.float32), rng.normal(size=30).astype(np.float32)
    where, seed = rng.random((4, 30)) > 0.3, np.arange(4)
    want = by_torch(z, seed, bias=bias, mask=where, top_k=5, top_logprobs=6)
    assert_same(osj.sample(seed, z, bias=bias, where=where, top_k=5, top_logprobs=6), want)
    assert_same(osj.sample(seed, z.T, bias=bias[:, None], where=where.T, top_k=5, top_logprobs=6, axis=0), want)


def test_transformations() -> None:
    """A batch of rows, a batch of parameters, a loop over offsets and a derivative have the same tokens."""
    z = jnp.asarray(hard_rows()[14:])
    seed, t, p = np.arange(4), np.array([0.5, 1.0, 2.0, 0.0], np.float32), np.float32(0.9)

    @jax.jit
    def all_of(z: Any, t: Any, p: Any) -> Any:
        f = partial(osj.sample, top_p=p, top_logprobs=2)
        loop = jax.lax.scan(lambda i, _: (i + 1, osj.sample(5, z[0], offset=i).token), 0, length=6)[1]
        slope = jax.grad(lambda x: f(5, x, temperature=x[0]).logprob)(z[0])
        rows, same = (jax.vmap(lambda s, x, t: f(s, x, temperature=t), (0, d, 0)) for d in (0, None))
        cube = f(seed.reshape(2, 2), z.reshape(2, 2, COLUMNS), temperature=t.reshape(2, 2))
        return rows(seed, z, t), same(seed, z[0], t), jax.tree.map(lambda x: x.reshape(4, -1), cube), loop, slope

    rows, same, cube, loop, slope = all_of(z, t, p)
    given = {"temperature": t, "top_p": np.float64(p), "top_logprobs": 2}
    want = by_torch(z, seed, **given)
    assert_same(rows, want)
    assert_same(same, by_torch(np.tile(z[0], (4, 1)), seed, **given))
    assert cube.token.ravel().tolist() == want.token.tolist()
    assert loop.tolist() == by_torch(np.tile(z[0], (6, 1)), 5, offset=np.arange(6)).token.tolist()
    assert not slope.any()


def test_seeds_are_numbers_or_keys() -> None:
    z = jnp.zeros((3, 1000))
    want = int(by_torch(np.zeros(1000, np.float32), 2**62 + 7).token)
    key = jax.random.wrap_key_data(jnp.array([2**30, 7], jnp.uint32))
    assert osj.sample(key, z[0]).token == osj.sample(2**62 + 7, z[0]).token == want
    assert jax.jit(osj.sample)(jax.random.key(7), z[0]).token == osj.sample(jnp.uint32(7), z[0]).token
    for kind in ("threefry2x32", "rbg"):
        keys = jax.random.split(jax.random.key(1, impl=kind), 3)
        assert len({*osj.sample(keys, z).token.tolist()}) == 3


def test_64_bit_types_of_jax_change_no_token() -> None:
    z = hard_rows()
    of_rows = parameters(len(z))
    seed, want = of_rows.pop("seed"), by_torch(z, **parameters(len(z)))
    with jax.enable_x64(True):
        assert_same(osj.sample(jnp.asarray(seed), z, **of_rows), want)
        wide = osj.sample(jnp.asarray(seed), z.astype(np.float64), **of_rows)
        assert wide.logprob.dtype == jnp.float64
        assert_same(wide, by_torch(z.astype(np.float64), seed, **of_rows))


def test_tokens_have_their_probabilities() -> None:
    z, n = jnp.array([0.0, 2.0, 1.0, -1.0, 2.5, -3.0, 1.5, 1.4]), 100_000
    found = osj.sample(jnp.arange(n), jnp.broadcast_to(z, (n, 8)), top_p=0.95, top_logprobs=8)
    p = np.zeros(8)
    p[found.top_tokens[0]] = np.exp(found.top_logprobs[0])
    assert p.sum() == pytest.approx(1.0, abs=1e-6)
    count, inside = np.bincount(found.token, minlength=8), p > 0
    assert not count[~inside].any()
    # With 7 degrees of freedom or fewer, 29.9 is passed with a probability below 0.0001.
    assert ((count - n * p)[inside] ** 2 / (n * p)[inside]).sum() < 29.9


def test_topk_logprobs_are_those_of_torch() -> None:
    z = jnp.asarray(np.delete(hard_rows(), [9, 12, 13], 0), jnp.bfloat16)
    target = np.resize([3, 0, COLUMNS, -1, 40, 12], len(z))
    of_top = jax.jit(partial(osj.topk_logprobs, softcap=20.0, scale=0.5), static_argnums=1)
    got = of_top(z, 6, target=target)
    want = osm.topk_logprobs(
        torch.from_numpy(np.array(z, np.float32)), 6, target=torch.from_numpy(target), softcap=20.0, scale=0.5
    )
    for name in ("indices", "target_rank"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    for name in ("values", "logprobs", "target_logprob", "lse"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-6, err_msg=name)
    assert of_top(z, 0).indices.shape == (len(z), 0)


def test_topk_logprobs_have_gradients() -> None:
    z = np.random.default_rng(9).normal(size=(3, 12)).astype(np.float32)
    target, where = np.array([1, 2, 3]), np.random.default_rng(9).random(12) > 0.2

    def of(found: Any) -> Any:
        return found.values.sum() + (found.logprobs[..., :3] * 2).sum() + (found.lse * found.lse).sum()

    f = partial(osj.topk_logprobs, k=4, target=target)
    got = jax.jit(jax.grad(lambda x: of(f(x, where=where))))(z)
    x = torch.from_numpy(z).requires_grad_()
    of(osm.topk_logprobs(x, 4, target=torch.from_numpy(target), mask=torch.from_numpy(where))).backward()
    np.testing.assert_allclose(got, x.grad, rtol=1e-5, atol=1e-6)
    across, alone = jax.jit(lambda x: (f(x.T, axis=0), jax.vmap(lambda x, t: f(x, target=t))(x, target)))(z)
    np.testing.assert_array_equal(across.indices.T, alone.indices)
    np.testing.assert_array_equal(across.target_rank, alone.target_rank)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_topk_logprobs_is_rounded_once(dtype: str) -> None:
    """That of a likely target is 1 - p, which p in 16 bits would make 0."""
    x = jnp.asarray([[8.0, 0, 0, 0], [3, 9, 1, -2]], dtype)
    total = lambda x: jnp.sum(osj.topk_logprobs(x, 2, target=np.arange(2)).target_logprob)  # noqa: E731  two uses
    ours, wanted = (jax.jit(jax.grad(total))(t) for t in (x, x.astype(jnp.float32)))
    assert ours.dtype == dtype
    limits = jnp.finfo(dtype)
    unit = {"rtol": float(limits.eps), "atol": float(limits.smallest_subnormal)}
    np.testing.assert_allclose(ours.astype(jnp.float32), wanted, **unit)


def test_verify_is_that_of_torch() -> None:
    rng = np.random.default_rng(10)
    target = rng.normal(size=(40, 4, 30)).astype(np.float32) * 2
    target[5, 1, 3] = np.nan
    draft = target[:, :3] + rng.normal(size=(40, 3, 30)).astype(np.float32) * 0.5
    drafts = rng.integers(-1, 31, (40, 3))
    drafts[::2] = np.where(target[::2, :3] == np.nanmax(target[::2, :3], -1, keepdims=True), 1, 0).argmax(-1)
    given = {"temperature": rng.choice([0, 0.5, 1.0], 40), "top_p": rng.choice([0.6, 0.95, 1.0], 40), "offset": 3}
    seed = rng.integers(0, 2**62, 40)
    got = osj.verify(seed, target, drafts, draft, **given)
    assert_same(got, verify_by_torch(target, drafts, draft, seed, **given))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"temperature": jnp.ones(3)}, ValueError, "temperature must be a number or have one for each row"),
        ({"temperature": np.float16("inf")}, ValueError, "temperature must be at least 0 and finite in float32"),
        ({"top_k": jnp.ones(2)}, TypeError, "top_k must be an int"),
        ({"seed": -1}, ValueError, "seed must be at least 0 and less than 2.*63, got -1"),
        ({"seed": None}, TypeError, "seed must be an int"),
        ({"seed": True}, TypeError, "seed must be an int"),
        ({"seed": jax.random.split(jax.random.key(0), 3)}, ValueError, "seed must be a key or have one for each row"),
        ({"ties": "all"}, ValueError, "ties must be 'keep' or 'first'"),
        ({"logprobs": "both"}, ValueError, "logprobs must be 'processed' or 'raw'"),
        ({"top_logprobs": 5}, ValueError, "top_logprobs must be from 0 to the 4 tokens"),
        ({"where": jnp.ones((2, 4))}, ValueError, "where must be boolean"),
        ({"axis": 2}, ValueError, "axis 2 is out of range"),
        ({"axis": None}, TypeError, "axis must be an int"),
        ({"logits": jnp.ones((2, 4), int)}, TypeError, "logits must be floating point"),
        ({"logits": torch.ones(2, 4)}, TypeError, "torch tensor"),
        ({"logits": jnp.ones((2, 0))}, ValueError, "logits has no tokens"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        osj.sample(**{"seed": 1, "logits": jnp.zeros((2, 4)), **given})


def test_a_negative_min_p_keeps_all() -> None:
    assert osj.sample(1, jnp.zeros((1, 4)), min_p=jnp.array([-1.0])).kept.tolist() == [4]


def test_arrays_of_torch_and_integer_logits_are_named() -> None:
    with pytest.raises(TypeError, match="seed must be an int or an array of such, not Tensor"):
        osj.sample(torch.arange(2), jnp.zeros((2, 4)))
    with pytest.raises(TypeError, match="target_logits must be floating point"):
        osj.verify(1, jnp.zeros((2, 3, 5), int), jnp.zeros((2, 2), int))


def test_logits_before_the_seed_are_named() -> None:
    for seed in (7, np.arange(2), jax.random.key(7), jax.random.PRNGKey(7)):
        with pytest.raises(TypeError, match=r"seed comes first, as in jax.random: call sample\(seed, logits, ...\)"):
            osj.sample(jnp.zeros((2, 4)), seed)
        with pytest.raises(TypeError, match=r"call verify\(seed, target_logits, ...\)"):
            osj.verify(np.zeros((2, 3, 5), "float32"), seed, jnp.zeros((2, 2), int))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_words_of_a_key_without_a_type_are_no_seeds(rows: int) -> None:
    with pytest.raises(TypeError, match=r"the two words of a jax\.random\.PRNGKey"):
        osj.sample(jax.random.PRNGKey(7), jnp.zeros((rows, 4)))
    assert osj.sample(np.arange(2), jnp.zeros((2, 4))).token.shape == (2,)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"target_logits must have n \+ 1 = 4 positions for 3 drafts, got 3: "):
        osj.verify(1, jnp.zeros((2, 3, 5)), jnp.zeros((2, 3), int))
    with pytest.raises(ValueError, match="draft_tokens has shape"):
        osj.verify(1, jnp.zeros((2, 3, 5)), jnp.zeros((2, 3), int), jnp.zeros((2, 2, 5)))
    with pytest.raises(ValueError, match="draft_logits has shape"):
        osj.verify(1, jnp.zeros((2, 3, 5)), jnp.zeros((2, 2), int), jnp.zeros((2, 3, 5)))
    with pytest.raises(ValueError, match="target has shape"):
        osj.topk_logprobs(jnp.zeros((2, 5)), 2, target=jnp.zeros(3, int))
