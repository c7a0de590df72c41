"""Rows of logits that are hard to sample from, their parameters, and what torch tensors give for them."""

from __future__ import annotations

from typing import Any

import numpy as np

import onlinesoftmax as osm

COLUMNS = 41


def hard_rows() -> np.ndarray:
    """Rows with ties, infinities, NaN and zeros of both signs, (18, 41)."""
    rng = np.random.default_rng(5)
    z = (rng.normal(size=(18, COLUMNS)) * np.resize([0.1, 1, 3, 10], 18)[:, None]).astype(np.float32)
    z[::2] = z[::2].round()
    z[1:9, ::3] = -np.inf
    z[9, 5], z[10, 6], z[11] = np.inf, np.nan, -np.inf
    z[12], z[13, ::2] = np.resize([0.0, -0.0, 1e-40], COLUMNS), np.inf
    z[14] = -100.0
    z[14, 7] = 1000.0
    return z


def parameters(count: int) -> dict[str, np.ndarray]:
    """Every parameter for each of some rows."""
    rng = np.random.default_rng(6)
    return {
        "temperature": rng.choice([0, 1e-6, 0.5, 1, 1.3, 1e6, -1, np.nan], count, p=[0.1, *[0.16] * 5, 0.05, 0.05]),
        "top_k": rng.choice([-1, 0, 1, 2, 5, 20, COLUMNS, 1000], count),
        "top_p": rng.choice([0, 1e-9, 0.3, 0.9, 0.999999, 1.0, 2.0], count),
        "min_p": rng.choice([0, 1e-4, 0.5, 1.0], count),
        "seed": rng.integers(0, 2**63 - 1, count),
        "offset": rng.integers(0, 2**40, count),
    }


def by_torch(logits: Any, seed: Any, **given: Any) -> Any:
    """The result for torch tensors of the same numbers."""
    import torch

    given = {"seed": seed, **given}
    as_tensor = {name: torch.from_numpy(np.array(t)) if isinstance(t, np.ndarray) else t for name, t in given.items()}
    logits = torch.from_numpy(np.array(logits, np.float64 if logits.dtype == np.float64 else np.float32))
    return osm.sample(logits, **as_tensor)


def verify_by_torch(target: Any, drafts: Any, draft: Any, seed: Any, **given: Any) -> Any:
    """`verify` of torch tensors of the same numbers, of which some drafts stay and some do not."""
    import torch

    def as_tensor(t: Any) -> Any:
        return torch.from_numpy(t) if isinstance(t, np.ndarray) else t

    given = {name: as_tensor(t) for name, t in given.items()}
    found = osm.verify(as_tensor(target), as_tensor(drafts), as_tensor(draft), seed=as_tensor(seed), **given)
    assert 5 < int(found.accepted.sum()) < 110
    return found


def assert_same_samples(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Equal tokens and numbers of torch tensors; log-probabilities equal up to the last bits of float32."""
    for name, expected in want.items():
        if expected is not None:
            found = got[name].cpu()
            allowed = 1e-6 if expected.is_floating_point() else 0.0
            assert found.allclose(expected, allowed, allowed, equal_nan=True), name


def assert_same(got: Any, want: Any, integers: type = np.int64) -> None:
    """Equal tokens and numbers, in this dtype; log-probabilities equal up to the last bits of their dtype."""
    for name in got._fields:
        a, b = getattr(got, name), getattr(want, name)
        if isinstance(b, tuple):
            assert_same(a, b, integers)
        elif b is None:
            assert a is None, name
        elif b.is_floating_point():
            a, b = np.asarray(a), b.numpy()
            assert a.shape == b.shape, name
            # XLA has no subnormals.
            np.testing.assert_allclose(a, b, 2 * np.finfo(a.dtype).eps, 2.0**-50, err_msg=name)
        else:
            assert a.dtype in (integers, bool), name
            np.testing.assert_array_equal(np.asarray(a), b.numpy(), err_msg=name)
