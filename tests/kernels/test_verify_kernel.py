"""The kernel that verifies drafts gives what PyTorch's operations give, token for token, however a row is cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from cuda_simulator import simulate_own
from hard_logits import assert_same_samples, hard_rows, parameters
from onlinesoftmax.kernels.cuda import compile
from onlinesoftmax.sampling.kernels import source, unfiltered_launch, verify
from pairs import rest_exhaustive

Tensor = torch.Tensor

OPERANDS: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "offset": 0}


def word_of(name: str, value: Any) -> int:
    """A parameter that is the same for all rows, as the kernels get it; 0 for a tensor."""
    if isinstance(value, Tensor):
        return 0
    forms: dict[str, Any] = {"temperature": "<f", "top_p": "<d", "min_p": "<d"}
    return source.bits_of(value, forms[name]) if name in forms else int(value)


def positions(x: Tensor, folder: Path, given: dict[str, Any], first: bool) -> dict[str, Tensor]:
    """Findings of sample.cuh on the positions (rows, n, tokens) of a model, by the names of the fields of verify.cuh.

    A block has a fourth of its threads, and reads a row alone: test_sample_kernel.py cuts rows.
    """
    rows, n, cols = x.shape
    of_model = {name: torch.zeros(rows * n, dtype=torch.int64) for name in ("largest", "key", "sampled")}
    of_model["sum"] = torch.zeros(rows * n, dtype=torch.float64)
    of_model |= {"x": x.view(rows * n, cols), "valid": torch.zeros(rows * n, dtype=torch.bool)}
    names = {"token": "sampled", "top_tokens": "largest", "kept_key": "key", "kept_sum": "sum", "valid": "valid"}
    memory = {name: of_model[field] for name, field in names.items()}
    memory |= {name: torch.zeros(rows * n) for name in ("logprob", "lse", "top_logprobs")}
    memory |= {"x": x, "kept": torch.zeros(rows * n, dtype=torch.int64)}
    memory |= {name: t for name, t in given.items() if isinstance(t, Tensor)}
    words = (word_of(name, value) for name, value in given.items())
    shape = source.Shape(str(x.dtype).removeprefix("torch."), 1, 512, 2, unfiltered_launch.is_aligned(x[0]), 0)
    numbers = cols, cols, source.slice_of(cols, 1), first, 0, 1, n, 0, *words
    simulate_own(source.KERNEL, shape, memory, numbers, rows * n, folder, divisor=4)
    return of_model


def simulated(
    target: Tensor, drafts: Tensor, draft: Tensor | None, cluster: int, folder: Path, ties: str = "keep",
    found: dict[int, dict[str, Tensor]] | None = None, **given: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Results of the kernels, by name; `found` keeps the findings on the positions of a tensor under its id."""
    rows, places, cols = target.shape
    given, found = OPERANDS | given, {} if found is None else found
    for x in (target, draft):
        if x is not None and id(x) not in found:
            found[id(x)] = positions(x, folder, given, ties == "first")
    of_target, of_draft = found[id(target)], {} if draft is None else found[id(draft)]
    memory = {f"target_{name}": t for name, t in of_target.items() if name != "sampled"}
    memory |= {f"draft_{name}": t for name, t in of_draft.items() if name != "sampled"}
    memory |= {"sampled": of_target["sampled"], "drafts": drafts}
    out = {"accepted": torch.full((rows,), 77), "valid": torch.zeros(rows, dtype=torch.bool)}
    out |= {"tokens": torch.full((rows, places), 77), "logprobs": torch.full((rows, places), 77.0)}
    some = {name: given[name] for name in ("temperature", "min_p", "seed", "offset")}
    memory |= {name: t for name, t in some.items() if isinstance(t, Tensor)}
    aligned = all(unfiltered_launch.is_aligned(x[0]) for x in (target, draft) if x is not None)
    shape = verify.Shape(str(target.dtype).removeprefix("torch."), cluster, 64, aligned, draft is not None)
    words = (word_of(name, value) for name, value in some.items())
    numbers = cols, cols, cols, source.slice_of(cols, cluster), places - 1, 0, *words
    simulate_own(verify.KERNEL, shape, memory | out, numbers, rows, folder)
    return out


def check(
    target: Tensor, drafts: Tensor, draft: Tensor | None, cluster: int, folder: Path, found: Any = None, **given: Any
) -> Tensor:
    """Compare the kernels with PyTorch's operations; returns how many drafts are accepted."""
    got = simulated(target, drafts, draft, cluster, folder, found=found, **given)
    want = osm.verify(target, drafts, draft, **given)
    assert_same_samples(got, want._asdict())
    return want.accepted


def near(target: Tensor, distance: float) -> Tensor:
    """Logits of a draft model that is near the target model."""
    noise = torch.randn(*target[:, :-1].shape, generator=torch.Generator().manual_seed(5))
    return (target[:, :-1].float() + distance * noise).to(target.dtype)


def drafts_of(draft: Tensor, **given: Any) -> Tensor:
    """Tokens that were sampled from the logits of the draft model."""
    tokens = [osm.sample(draft[:, i], **given | {"offset": given["offset"] + i}).token for i in range(draft.shape[1])]
    return torch.stack(tokens, 1)


FILTERS: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.8, "ties": "first"}, {"top_k": 50, "min_p": 0.1}]


@pytest.mark.parametrize(
    ("cols", "cluster", "filters"),
    rest_exhaustive((*one, filters) for one in ((100, 1), (1001, 2), (3000, 16)) for filters in FILTERS), ids=str,
)  # fmt: skip
def test_tokens_are_those_of_the_formulas(cols: int, cluster: int, filters: dict[str, Any], folder: Path) -> None:
    target = torch.randn(8, 4, cols, generator=torch.Generator().manual_seed(cols)) * 2
    temperature = torch.tensor([1.0, 0.5, 0.0, 2.0] * 2)
    given = {"temperature": temperature, "seed": torch.arange(8), "offset": torch.arange(8) * 2**33, **filters}
    draft = near(target, 0.5)
    drafts = drafts_of(draft, **given)
    drafts[5, 2], drafts[6, 0], drafts[7, 1] = -1, cols, cols // 2
    accepted = check(target, drafts, draft, cluster, folder, **given)
    assert accepted.unique().numel() > 2
    check(target, drafts, None, cluster, folder, **given)
    check(
        target, drafts, target[:, :-1].contiguous(), cluster, folder, seed=3, temperature=0.7, offset=2**40, **filters
    )
    check(target[:, :1].contiguous(), drafts[:, :0], None, cluster, folder, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)])
def test_16_bit_logits_and_rows_that_are_not_aligned(dtype: torch.dtype, folder: Path) -> None:
    for cols in (777, 1024):
        target = (torch.randn(4, 3, cols, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
        draft = near(target, 0.5)
        given: dict[str, Any] = {"seed": torch.arange(4), "offset": 3, "top_p": 0.9}
        check(target, drafts_of(draft, **given), draft, 2, folder, **given)


def test_odd_rows_and_parameters(folder: Path) -> None:
    """Rows with ties, infinities and NaN, in each of the models."""
    rows = torch.from_numpy(hard_rows())
    count, cols = rows.shape
    given = {name: torch.from_numpy(t) for name, t in parameters(count).items()}
    given["temperature"] = given["temperature"].float()
    for moved in (0, 1, 7):
        target = torch.stack([rows, rows.roll(moved, 0), rows.roll(2 * moved, 0)], 1)
        same, draft = target[:, :2].contiguous(), target[:, :2].roll(3, 0).contiguous()
        drafts = torch.stack([rows.argmax(1), torch.arange(count) % (cols + 2) - 1], 1)
        for cluster, ties in ((1, "keep"), (2, "first")):
            found: dict[int, dict[str, Tensor]] = {}
            for logits in (draft, same, None):
                check(target, drafts, logits, cluster, folder, found, ties=ties, **given)


@pytest.mark.parametrize("temperature", [1.0, 3e38, 1e-6, 1e-38, 1e-45])
def test_scores_at_the_limits_of_rounding(temperature: float, folder: Path) -> None:
    inf = torch.inf
    rows = torch.tensor([
        [3.4e38, -3.4e38, -3.4e38, -3.4e38], [1000.0, 1e-15, 0.0, -1.0], [1e30, 2.0, 1.0, 0.0], [inf, inf, 0.0, 1.0],
        [0.0, -90.0, -100.0, -110.0], [-50.0, -50.0, -50.0, 0.0], [0.0, -2e-39, -1e-45, -3e-45],
    ])  # fmt: skip
    target, found = rows.unsqueeze(1).expand(7, 2, 4).contiguous(), {}
    models = *(rows.roll(moved, 0).unsqueeze(1).contiguous() for moved in (0, 1, 3)), None
    for draft, drafted in itertools.product(models, range(4)):
        drafts = torch.full((7, 1), drafted)
        check(target, drafts, draft, 1, folder, found, seed=torch.arange(7), temperature=temperature)


def test_models_that_hardly_differ(folder: Path) -> None:
    """Only tokens with small probabilities, or rounding errors, are left of p - q."""
    target = torch.randn(6, 2, 2000, generator=torch.Generator().manual_seed(4)) * 3
    draft = target[:, :1].clone()
    draft[:3] += torch.randn(3, 1, 2000, generator=torch.Generator().manual_seed(5)) * 1e-5
    draft[4, 0, 1500:], draft[5, 0, 1999] = -torch.inf, -5.0
    # No token of the draft model: the first draft is always replaced.
    for top_k in (0, 1000):
        drafts = target[:, :1].argmin(2)
        check(target, drafts, draft, 2, folder, seed=torch.arange(6), top_k=top_k)


@pytest.mark.parametrize(
    ("arch", "cluster", "dtype", "aligned", "draft"),
    rest_exhaustive(
        (*one, *more)
        for one in (("sm_80", 1), ("sm_90", 16), ("sm_100", 8))
        for more in itertools.product(("float32", "bfloat16"), (True, False), (True, False))
    ),
)  # fmt: skip
def test_the_kernel_compiles_without_spills(
    arch: str, cluster: int, dtype: str, aligned: bool, draft: bool, log_of: Any
) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
    shape = verify.Shape(dtype, cluster, 512, aligned, draft)
    assert compile.usage(log_of(verify.KERNEL.source(shape), arch))["spills"] == 0
