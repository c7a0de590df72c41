"""The kernel that samples gives what PyTorch's operations give, token for token, however a row is cut."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onlinesoftmax as osm
from cuda_simulator import simulate_own
from hard_logits import assert_same_samples
from onlinesoftmax.core.device import KNOWN, Device
from onlinesoftmax.kernels.cuda import compile
from onlinesoftmax.sampling.arguments import checked_logits, checked_parameters
from onlinesoftmax.sampling.eager import FUNCTIONS
from onlinesoftmax.sampling.formulas import distribution_of, reaching_min_p
from onlinesoftmax.sampling.kernels import source, unfiltered_launch
from onlinesoftmax.sampling.keys import ordered
from onlinesoftmax.sampling.philox import LOW
from pairs import rest_exhaustive

Tensor = torch.Tensor

FILTERS: list[dict[str, Any]] = [
    {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}, {"top_p": 0.0},
]  # fmt: skip
EXTREMES = [2.0, 1.0, -0.0, 0.0, 5.0, 5.0, 1.0, 2.0, -torch.inf, 5.0]


def simulated(
    x: Tensor, cluster: int, folder: Path, top: int, lists: source.Lists = source.LONG, **given: Any
) -> dict[str, Tensor]:
    """Results of the kernel, by name."""
    rows, cols = x.shape
    aligned = unfiltered_launch.is_aligned(x)
    # Shared memory holds the slices of several blocks.
    tiles = -(-source.slice_of(cols, cluster) // (512 * source.TOKENS)) if aligned and cluster > 1 else 0
    threads, resident = (512, 2) if lists == source.LONG else (256, 4)
    k = given.get("top_k", 0)
    by_mass = isinstance(k, Tensor) or not 0 < k < cols
    dtype = str(x.dtype).removeprefix("torch.")
    shape = source.Shape(dtype, cluster, threads, resident, aligned, tiles, lists, by_mass)
    dtypes = dict.fromkeys(("token", "kept", "top_tokens", "kept_key"), torch.int64) | {"kept_sum": torch.float64}
    operands = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "offset": 0}
    operands |= {name: value for name, value in given.items() if name in operands}
    tensors = {name: value for name, value in operands.items() if isinstance(value, Tensor)}
    names = (*osm.sampling.Sampled._fields, "kept_key", "kept_sum")
    shapes = {name: (rows, top) if name.startswith("top_") else (rows,) for name in names}
    out = {name: torch.empty(size, dtype=dtypes.get(name, torch.float32)) for name, size in shapes.items()}
    out["valid"] = torch.empty(rows, dtype=torch.bool)
    flags = given.get("ties") == "first", given.get("logprobs") == "raw"
    narrow = sum(flag for name, flag in source.NARROW.items() if name in tensors and tensors[name].dtype.itemsize == 4)
    others = 1, narrow, *(0 if name in tensors else _number(name, operands[name]) for name in operands)
    numbers = x.stride(0), cols, source.slice_of(cols, cluster), *flags, top, *others
    memory = {name: t for name, t in {"x": x, **tensors, **out}.items() if name in source.POINTERS}
    simulate_own(source.KERNEL, shape, memory, numbers, rows, folder)
    return out


def _number(name: str, value: Any) -> int:
    """A parameter that is the same for all rows, as the kernel gets it."""
    forms: dict[str, Any] = {"temperature": "<f", "top_p": "<d", "min_p": "<d"}
    return source.bits_of(value, forms[name]) if name in forms else int(value)


def check(x: Tensor, cluster: int, folder: Path, top: int, lists: source.Lists = source.LONG, **given: Any) -> None:
    got = simulated(x, cluster, folder, top, lists, **given)
    assert_same_samples(got, osm.sample(x, top_logprobs=top, **given)._asdict())
    cols = x.shape[1]
    filters = {name: given.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    filters["temperature"] = given.get("temperature", 1.0)
    parameters = checked_parameters(
        checked_logits("sample", x, 1, 1.0, None, None, None), *filters.values(), given.get("ties", "keep")
    )
    columns = parameters.map(lambda t: t[:, None])
    order = FUNCTIONS.order(x.float(), columns.is_filtered())
    want = distribution_of(FUNCTIONS, x.float(), order, columns)
    valid = want.valid.squeeze(1)
    # Sort keys are unsigned: one with the sign of the other bit pattern has the order of signed numbers.
    keys = (ordered(torch, x.float()).long() << 32) + (LOW - torch.arange(cols))
    z, temperature = want.z, want.temperature
    kept = (keys >= (got["kept_key"] ^ -(1 << 63)).unsqueeze(1)) & (z > -torch.inf)
    kept = reaching_min_p(FUNCTIONS, kept, z, temperature, columns)
    assert torch.equal(kept[valid], want.kept[valid])
    assert torch.equal(got["kept_sum"].log().unsqueeze(1)[valid], want.log_sum[valid])


@pytest.mark.parametrize(
    ("cols", "cluster", "filters"),
    rest_exhaustive((*one, filters) for one in ((100, 1), (1001, 2), (3000, 16)) for filters in FILTERS), ids=str,
)  # fmt: skip
def test_tokens_are_those_of_the_formulas(cols: int, cluster: int, filters: dict[str, Any], folder: Path) -> None:
    x = torch.randn(4, cols, generator=torch.Generator().manual_seed(cols)) * 3
    rows = {
        "temperature": torch.tensor([1.0, 0.5, 0.0, 2.0]),
        "seed": torch.arange(4),
        "offset": torch.arange(4) * 2**33,
    }
    check(x, cluster, folder, 7, **rows, **filters)
    narrow = {
        name: torch.full((4,), value).to(unfiltered_launch.NARROW_DTYPES[name != "top_k"])
        for name, value in filters.items()
    }
    check(x, cluster, folder, 7, seed=5, offset=2**40, temperature=0.7, **narrow)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_and_rows_that_are_not_aligned(dtype: torch.dtype, folder: Path) -> None:
    x = (torch.randn(3, 777, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    check(x[:, 1:], 2, folder, 0, seed=torch.arange(3), top_p=0.7)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
def test_short_lists(filters: dict[str, Any], folder: Path) -> None:
    # A row of equal scores, one without top_k, and one whose top_k has no room are right too.
    x = torch.randn(5, 6000, generator=torch.Generator().manual_seed(3)) * 2
    x[1] = 1.0
    top_k, seed = torch.tensor([50, 50, 0, 1000, 128]), torch.arange(5)
    check(x, 1, folder, 20, source.SHORT, seed=seed, top_k=top_k, **filters)


TIED = {"top_k": 2}, {"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.9, "min_p": 0.3}


@pytest.mark.parametrize(("filters", "ties"), rest_exhaustive(itertools.product(TIED, ("keep", "first"))), ids=str)
def test_ties_and_rows_without_a_distribution(filters: dict[str, Any], ties: str, folder: Path) -> None:
    inf, nan = torch.inf, torch.nan
    rows = [EXTREMES, [1.0] * 10, [-inf] * 10, [0.0] * 9 + [nan], [inf, 1.0, inf] + [0.0] * 7, [3.0] + [-inf] * 9]
    x = torch.tensor([*rows, EXTREMES, EXTREMES])
    temperature = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 0.0])
    for cluster in (1, 2):
        check(x, cluster, folder, 3, seed=torch.arange(8), temperature=temperature, ties=ties, **filters)


@pytest.mark.parametrize(
    "row",
    [
        # A difference that float32 does not have, scores that differ from the largest by the same float64, and scores
        # whose masses are at the bounds of the polynomial.
        [3.4e38, -3.4e38, -3.4e38, -3.4e38], [1000.0, 1e-15, 0.0, -1.0], [1e30, 2.0, 1.0, 0.0],
        [0.0, -0.34657156467, -0.34657159448, -1.0],
    ],
)  # fmt: skip
@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.7071082592010498}, {}], ids=str)
def test_scores_at_the_limits_of_rounding(row: list[float], filters: dict[str, Any], folder: Path) -> None:
    for temperature in (1.0, 3e38):
        check(torch.tensor([row]), 1, folder, 2, seed=torch.tensor([5]), temperature=temperature, **filters)


def test_raw_log_probabilities_and_extreme_temperatures(folder: Path) -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)) * 5
    temperature, below_0 = torch.tensor([1e-6, 1e-38, 1e6, 0.0]), torch.tensor([-1.0, 0.5, -0.1, 0.0]).double()
    check(x, 2, folder, 4, seed=torch.arange(4), temperature=temperature, top_k=20, logprobs="raw")
    check(x, 2, folder, 4, seed=torch.arange(4), temperature=temperature, top_p=0.9, logprobs="raw")
    check(x, 2, folder, 0, seed=torch.arange(4), temperature=temperature)
    check(x, 2, folder, 0, seed=torch.arange(4), temperature=temperature, min_p=below_0)
    check(x * 1e30, 2, folder, 0, seed=torch.arange(4), temperature=temperature, top_p=0.9)
    # Keys that float32 does not have, in more tiles than one.
    wide = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3))
    check(wide, 1, folder, 0, seed=torch.arange(2), temperature=3e38)


@pytest.mark.parametrize(
    ("arch", "cluster", "by_mass"),
    [
        # The test below compiles kernels of one block, with and without code for rows without top_k.
        pytest.param("sm_80", 1, True, marks=pytest.mark.exhaustive), ("sm_90", 16, True),
        pytest.param("sm_100", 8, False, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_the_kernel_compiles(arch: str, cluster: int, by_mass: bool, log_of: Any) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
    log = log_of(source.KERNEL.source(source.Shape("float32", cluster, 512, 1, True, 4, by_mass=by_mass)), arch)
    assert not compile.usage(log)["spills"]


@pytest.mark.parametrize(
    ("shape", "forms"), [((512, 2, True, 0), 3), ((256, 4, True, 0, source.SHORT, False), 1)], ids=["long", "short"]
)
def test_the_loop_of_many_rows_keeps_its_numbers_in_registers(
    shape: tuple[Any, ...], forms: int, log_of: Any
) -> None:  # fmt: skip
    pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
    log = log_of(source.KERNEL.source(source.Shape("float32", 1, *shape)), "sm_90")
    loops = re.findall(r"Function properties for \S*read_slice\S*\n.*?(\d+) bytes spill stores", log)
    assert loops == ["0"] * forms


@pytest.mark.parametrize(
    "filters", [{"top_k": 40}, {"top_k": 2000}, {"top_p": 0.6}, {"top_p": 0.9, "min_p": 0.5}, {"min_p": 0.9}], ids=str
)
def test_rows_whose_candidates_come_late_or_do_not_fit_a_list(filters: dict[str, Any], folder: Path) -> None:
    # Rows that are not aligned, and rows whose slices shared memory holds.
    for cols, ties in ((17_001, "keep"), (17_004, "first")):
        noise = torch.randn(4, cols, generator=torch.Generator().manual_seed(4))
        # Rising scores; scores that are equal or differ little; scores that are larger behind the first tiles.
        late = torch.where(torch.arange(cols) % 8_504 < 4096, noise[3] - 8, noise[3])
        x = torch.stack([torch.linspace(-4, 4, cols), torch.ones(cols), (noise[2] * 2).round(), late])
        check(x, 2, folder, 3, seed=torch.arange(4), ties=ties, **filters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_tokens_with_nearly_all_the_mass(dtype: torch.dtype, folder: Path) -> None:
    # Their places in the bins matter for the threshold; of 16-bit scores, a bin has none or many.
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(6, 12_000, generator=generator) * 2.5
    x[:3, torch.randint(12_000, (30,), generator=generator)] += 12
    x[3:] = -torch.linspace(1, 2, 3).unsqueeze(1) * (torch.rand(3, 12_000, generator=generator).argsort(1) + 1).log()
    for cluster, p in ((1, 0.99), (2, 0.9), (2, 0.999)):
        check(x.to(dtype), cluster, folder, 0, seed=torch.arange(6), top_p=p)


def test_a_row_without_rivals_is_read_again(folder: Path) -> None:
    # float32 does not hold the distances of these scores, divided by the temperature.
    x = torch.zeros(2, 9_000)
    x[:, 5], x[1, 8_500] = 30.0, 60.0
    for cluster in (1, 2):
        check(x, cluster, folder, 0, seed=torch.arange(2), temperature=1e-37, top_p=0.9)


def test_a_list_that_overflows_does_not_hide_the_rest_of_the_slice(folder: Path) -> None:
    # Two tiles of equal scores fill the list; what follows them is larger, or NaN.
    x = torch.full((3, 8_400), -1e4)
    x[0, 8_300], x[1, 8_350], x[2, 8_399] = 3.0, torch.nan, torch.inf
    for filters in ({"top_k": 5}, {"top_k": 5, "top_p": 0.5}):
        check(x, 1, folder, 2, seed=torch.arange(3), **filters)


def test_more_equal_scores_than_a_list_can_sort(folder: Path) -> None:
    # The blocks have room for their keys, and block 0 for all, but not for the next power of two.
    for temperature in (0.0, 1.0):
        check(torch.zeros(1, 9_600), 8, folder, 3, seed=torch.tensor([1]), top_k=50, temperature=temperature)


@pytest.mark.parametrize(
    ("steps", "cols", "ties"),
    rest_exhaustive((*one, ties) for one in ((2, 16_000), (16, 16_000), (256, 48_000)) for ties in ("keep", "first")),
)
def test_many_equal_scores_at_the_threshold(steps: int, cols: int, ties: str, folder: Path) -> None:
    # With 2 steps in a unit, a list does not hold them; with 16, it does, but a warp does not; with 256, a list has
    # several scores, and a warp does not hold those that equal one of them.
    x = (torch.randn(1, cols, generator=torch.Generator().manual_seed(8)) * steps).round() / steps
    check(x, 2, folder, 0, seed=torch.tensor([1]), top_p=0.9, ties=ties)


def test_a_block_of_masked_tokens(folder: Path) -> None:
    # It has no threshold for the others, and no sum of masses.
    x = torch.randn(2, 24_000, generator=torch.Generator().manual_seed(7))
    x[0, :12_000], x[1, 12_000:] = -torch.inf, -torch.inf
    for filters in ({"top_k": 50}, {"top_p": 0.9}):
        check(x, 2, folder, 0, seed=torch.arange(2), **filters)


def test_few_rows_have_many_blocks() -> None:
    hopper, ampere, ada = (KNOWN[name] for name in ("h100", "a100", "l4"))

    def cut(rows: int, cols: int, device: Device, aligned: bool = True, listed: int | None = None) -> tuple[int, ...]:
        shape = source.shape_of(rows, cols, "float32", aligned, device, listed)
        assert shape is not None
        assert shape.dynamic_bytes + source.declared_bytes(shape.cluster) <= device.shared_memory
        return shape.cluster, shape.threads, shape.resident, shape.tiles

    assert cut(1, 128256, hopper) == (16, 512, 1, 2)
    assert cut(1, 128256, hopper, aligned=False) == (16, 512, 1, 0)
    assert cut(4, 128256, hopper)[0] == 16
    assert cut(5, 128256, hopper)[0] == cut(1, 128256, replace(hopper, multiprocessors=78))[0] == 8
    assert cut(8, 128256, hopper) == (8, 512, 1, 4)
    # An H100 has places for 30 clusters of 4, and more than that share multiprocessors.
    assert cut(29, 128256, hopper) == (4, 512, 1, 0)
    assert cut(32, 128256, hopper) == (4, 512, 2, 0)
    assert cut(64, 128256, hopper) == (2, 512, 1, 0)
    assert cut(1024, 128256, hopper) == (1, 512, 2, 0)
    assert cut(1024, 128256, hopper, listed=128) == (1, 256, 4, 0)
    assert cut(1024, 128256, hopper, listed=129) == (1, 512, 2, 0)
    assert cut(64, 128256, hopper, listed=128) == (2, 512, 1, 0)
    # Two blocks of a cluster of 8 do not fit the shared memory of a multiprocessor.
    assert cut(20, 128256, hopper) == (4, 512, 1, 0)
    assert cut(1, 1 << 20, ampere) == (1, 512, 1, 0)
    assert cut(1, 100, ada) == (1, 256, 1, 1)
    assert source.shape_of(1, 100, "float32", True, replace(ada, shared_memory=48 << 10)) is None
    assert source.shape_of(1 << 31, 100, "float32", True, hopper) is None


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [*FILTERS, {"top_k": 1000}, {"top_k": 3000, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 128256), (64, 32000), (300, 50257), (3, 262208)])
def test_a_gpu_samples_the_tokens_of_a_cpu(rows: int, cols: int, filters: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(rows, cols, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
        seed, temperature = torch.arange(rows), torch.linspace(0.2, 2.0, rows)
        want = osm.sample(x, seed=seed, temperature=temperature, top_logprobs=5, **filters)
        got = osm.sample(x.cuda(), seed=seed.cuda(), temperature=temperature.cuda(), top_logprobs=5, **filters)
        assert_same_samples(got._asdict(), want._asdict())


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [{"top_k": 50}, {"top_k": 1000}, {"top_p": 0.9}, {"min_p": 0.2}], ids=str)
def test_a_gpu_takes_rows_whose_candidates_do_not_fit_a_list(filters: dict[str, Any]) -> None:
    cols = 128_256
    noise = torch.randn(3, cols, generator=torch.Generator().manual_seed(4))
    late = torch.where(torch.arange(cols) % (cols // 8) < 4096, noise[2] - 8, noise[2])
    x = torch.stack([torch.linspace(-4, 4, cols), torch.ones(cols), (noise[1] * 2).round(), late])
    seed = torch.arange(4)
    for ties in ("keep", "first"):
        want = osm.sample(x, seed=seed, ties=ties, top_logprobs=3, **filters)
        got = osm.sample(x.cuda(), seed=seed.cuda(), ties=ties, top_logprobs=3, **filters)
        for name in ("token", "kept", "valid", "top_tokens"):
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
