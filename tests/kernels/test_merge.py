"""The small kernels of sharded rows, in CUDA on simulated threads and in Triton's interpreter, against float64."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contract import DEVICE
from cuda_simulator import launch_sharded, simulate_sharded
from kernels.test_reduction import as_array
from onlinesoftmax.kernels import registry
from onlinesoftmax.kernels.cuda import merge as cuda
from onlinesoftmax.kernels.sharded import ShardedRows
from onlinesoftmax.torch.prepare import INTEGERS

CLASSES, IGNORED = 40, 7
PROCESSES = (1, 2, 5)
FLOATS = ("float16", "bfloat16", "float32", "float64")

FORMS: tuple[dict[str, Any], ...] = (
    {"loss": True, "names": ("y", "m", "l")},
    {"loss": True, "names": ("y",), "z_loss": 0.3, "weight": "float16"},
    {"loss": True, "names": ("y", "m", "l"), "smoothing": 0.2, "scale": 0.5, "z_loss": 0.1},
    {"names": ("y", "lse", "entropy", "m", "l")},
    {"names": ("y", "lse")},
    {"names": ("lse", "m", "l")},
)


def cells() -> list[Any]:
    """Every form with every number of processes; dtypes and numbers of rows take turns."""
    found = []
    for i, form in enumerate(FORMS):
        for j, processes in enumerate(PROCESSES):
            accumulator = ("float32", "float64")[(i + j) % 2]
            result = FLOATS[(i + j) % 3] if accumulator == "float32" else "float64"
            given = {**form, "names": ("states", "target", *(("weight",) if "weight" in form else ()), *form["names"])}
            one = ShardedRows(
                (1, 33, 300)[(i + j) % 3], processes, accumulator, result, INTEGERS[(i + j) % 5], classes=CLASSES,
                ignore_index=IGNORED, **given,
            )  # fmt: skip
            found.append(pytest.param(one, id=f"{'+'.join(form['names'])}-{i}-{processes}-{accumulator}"))
    return found


def cuts_of(processes: int) -> list[int]:
    """First column of each process, and the end; the second process has none where there are more than two."""
    return {1: [0, CLASSES], 2: [0, 13, CLASSES], 5: [0, 13, 13, 20, 39, CLASSES]}[processes]


def rows_of(one: ShardedRows) -> dict[str, torch.Tensor]:
    """Scores with outliers and rows that are hard, targets of all kinds, and the states of all processes."""
    random = torch.Generator().manual_seed(one.rows)
    z = 5 * torch.randn(one.rows, CLASSES, generator=random, dtype=torch.float64)
    z[::7] += 1000
    z[1::11, :13], z[2::11, 13:], z[3::11] = -torch.inf, -torch.inf, -torch.inf
    z[4::11, 3], z[5::11, 20] = torch.inf, torch.nan
    target = torch.randint(CLASSES, (one.rows,), generator=random)
    target[1::11] = 5
    target[5::13], target[6::13], target[7::13] = IGNORED, CLASSES, -1
    weight = torch.rand(CLASSES, generator=random, dtype=torch.float64)
    states = []
    cuts = cuts_of(one.processes)
    for first, end in itertools.pairwise(cuts):
        part = z[:, first:end]
        limits = torch.finfo(torch.float32)
        m = part.amax(1) if end > first else z.new_full((one.rows,), -torch.inf)
        m = m.clamp(limits.min, limits.max)
        terms = (part - m[:, None]).exp()
        l = terms.sum(1)
        inside = (target >= first) & (target < end)
        index = (target - first).clamp(0, max(0, end - first - 1))[:, None]
        chosen = part.gather(1, index)[:, 0] if end > first else m
        below = ((part - m[:, None]).clamp(min=-1000) * terms).where(terms != 0, 0).sum(1)
        numbers = {"m": m, "l": l, "logprob": (chosen - m - l.log()).where(inside, torch.nan)}
        numbers |= {"entropy": l.log() - below / l, "weighted": part.sum(1)}
        states.append(torch.stack([numbers[name] for name in one.sent]))
    found = {"target": target.to(getattr(torch, one.target)), "states": torch.stack(states), "scores": z}
    found["states"] = found["states"].to(getattr(torch, one.accumulator))
    if one.weight:
        found["weight"] = weight.to(getattr(torch, one.weight))
    return found


def expected(one: ShardedRows, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs in float64, from the scores."""
    z, target = given["scores"], given["target"].long()
    inside = (target >= 0) & (target < CLASSES)
    lse = z.logsumexp(1)
    logprob = z.gather(1, target.where(inside, 0)[:, None])[:, 0] - lse
    logprob = logprob.where(inside & lse.isfinite(), torch.nan)
    p = (z - lse[:, None]).exp()
    found = {"lse": lse, "y": logprob, "m": z.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)}
    found["entropy"] = -(p * (z - lse[:, None])).where(p != 0, 0).sum(1).where(lse.isfinite(), torch.nan)
    limits = torch.finfo(torch.float32)
    found["m"] = found["m"].clamp(limits.min, limits.max)
    found["l"] = (z - found["m"][:, None]).exp().sum(1)
    if one.loss:
        own = 1 - one.smoothing
        weight = given["weight"].double()[target.where(inside, 0)] if one.weight else 1.0
        loss = -own * weight * logprob + one.z_loss * lse * lse
        if one.smoothing:
            loss = loss + one.smoothing * (lse - z.mean(1))
        found["y"] = loss.where(inside, torch.nan).masked_fill(target == IGNORED, 0.0)
    return found


def close(name: str, found: torch.Tensor, want: torch.Tensor, one: ShardedRows) -> None:
    """A unit of the result, and some of the accumulator for numbers up to 1000, which are squared in a z-loss."""
    wide = torch.finfo(getattr(torch, one.accumulator)).eps
    size = 1e3 if not one.z_loss else 1e6
    tolerance = max(torch.finfo(found.dtype).eps, wide)
    torch.testing.assert_close(
        found.double(), want, rtol=tolerance, atol=4 * size * wide, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


Run = Callable[[str, ShardedRows, dict[str, torch.Tensor]], None]


@pytest.fixture(params=["cuda", "triton"])
def run(request: pytest.FixtureRequest) -> Run:
    """A function that runs a kernel on tensors of the CPU, in place."""
    folder = request.getfixturevalue("folder") if request.param == "cuda" else None

    def by_simulator(kernel: str, one: ShardedRows, tensors: dict[str, torch.Tensor]) -> None:
        simulate_sharded(kernel, one, {name: as_array(tensors[name]) for name in one.names}, folder)

    def by_triton(kernel: str, one: ShardedRows, tensors: dict[str, torch.Tensor]) -> None:
        on_device = {name: tensors[name].to(DEVICE) for name in one.names}
        registry.small_kernels("triton", "merge").bind(kernel, one)(on_device)
        for name in one.names:
            tensors[name].copy_(on_device[name])

    return by_simulator if request.param == "cuda" else by_triton


@pytest.mark.parametrize("one", cells())
def test_merge(one: ShardedRows, run: Run) -> None:
    given, want = rows_of(one), expected(one, rows_of(one))
    outputs = {}
    for name in set(one.names) - {"states", "target", "weight"}:
        dtype = getattr(torch, one.result if name in ("y", "lse") else one.accumulator)
        outputs[name] = torch.full((one.rows,), 7e3, dtype=dtype)
    run("merge", one, given | outputs)
    for name, found in outputs.items():
        # A row with NaN has any m.
        rows = ~given["scores"].isnan().any(1) if name == "m" else slice(None)
        close(name, found[rows], want[name].to(found.dtype).double()[rows], one)


INCOMING: tuple[dict[str, Any], ...] = (
    {"loss": True, "scalar": True, "names": ("dy",)},
    {"loss": True, "scalar": True, "names": ("dy", "count"), "z_loss": 0.3, "weight": "bfloat16"},
    {"loss": True, "names": ("dy",), "smoothing": 0.2, "scale": 0.5, "z_loss": 0.1},
    {"names": ("dy",)}, {"names": ("dlse",)}, {"names": ("dy", "dlse")}, {"names": ()},
)  # fmt: skip


def incoming_cells() -> list[Any]:
    found = []
    for i, form in enumerate(INCOMING):
        accumulator = ("float32", "float64")[i // 2 % 2]
        names = ("target", "m", "l", *(("weight",) if "weight" in form else ()), *form["names"], "to_y", "to_lse")
        given = {**form, "names": (*names, *(("to_flat",) if "smoothing" in form else ()))}
        result = FLOATS[i % 3] if accumulator == "float32" else "float64"
        one = ShardedRows(
            (300, 1, 33)[i % 3], 0, accumulator, result, INTEGERS[i % 5], first=13, cols=10, classes=CLASSES,
            ignore_index=IGNORED, **given,
        )  # fmt: skip
        found.append(pytest.param(one, id=f"{'+'.join(form['names'])}-{i}"))
    return found


@pytest.mark.parametrize("one", incoming_cells())
def test_incoming(one: ShardedRows, run: Run) -> None:
    random = torch.Generator().manual_seed(3)
    given = rows_of(one._replace(processes=1, names=()))
    wide, result = getattr(torch, one.accumulator), getattr(torch, one.result)
    state = expected(one, given)
    given |= {name: state[name].to(wide) for name in ("m", "l")}
    for name in ("dy", "dlse"):
        size = 1 if one.scalar and name == "dy" else one.rows
        given[name] = torch.randn(size, generator=random, dtype=torch.float64).to(result)
    given["count"] = torch.tensor([torch.nan, 3.0], dtype=wide)
    outputs = {name: torch.full((one.rows,), 7e3, dtype=wide) for name in ("to_y", "to_lse", "to_flat")}
    run("incoming", one, given | outputs)
    target = given["target"].long()
    inside, here = (target >= 0) & (target < CLASSES), (target >= 13) & (target < 23)
    zero = torch.zeros(one.rows, dtype=torch.float64)
    dy = given["dy"].double() if "dy" in one.names else zero
    dlse, flat = given["dlse"].double() if "dlse" in one.names else zero, zero
    if one.loss:
        valid = inside & (target != IGNORED)
        dy = (dy / 3 if "count" in one.names else dy).expand(one.rows)
        lse = given["m"].double() + given["l"].double().log()
        dlse = (dy * (2 * one.z_loss * lse if one.z_loss else 0) + dy * one.smoothing).where(valid, 0)
        flat = (0.5 * dy * one.smoothing / CLASSES).where(valid, 0)
        weight = given["weight"].double()[target.where(inside, 0)] if one.weight else 1.0
        dy = (-(1 - one.smoothing) * weight * dy).where(valid, 0)
    dy = dy.where(inside, 0)
    close("to_y", outputs["to_y"], dy.to(wide).double(), one)
    close("to_lse", outputs["to_lse"], (dlse - dy.where(~here, 0)).to(wide).double(), one)
    if one.smoothing:
        close("to_flat", outputs["to_flat"], flat.to(wide).double(), one)


def test_a_launch_passes_what_the_kernel_reads(folder: Path, launch_on_host: Any) -> None:
    """The launch for a GPU, with a driver that runs the kernel on the host; its second call passes other tensors."""
    one = cells()[0].values[0]._replace(rows=300, processes=2)
    assert isinstance(one, ShardedRows)

    def run(parameter: int, blocks: int) -> None:
        assert blocks == 3
        launch_sharded("merge", one, parameter, folder)

    launch_on_host(run)
    bound, given = cuda.bind("merge", one), rows_of(one)
    for _ in range(2):
        wide = getattr(torch, one.accumulator)
        outputs = {name: torch.full((one.rows,), 7e3, dtype=wide) for name in ("m", "l")}
        outputs["y"] = torch.full((one.rows,), 7e3).to(getattr(torch, one.result))
        bound(given | outputs)
        for name in ("y", "l"):
            close(name, outputs[name], expected(one, given)[name].to(outputs[name].dtype).double(), one)


def test_cuda_compiles_without_spills(log_of: Any) -> None:
    """Architectures take turns."""
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    for i, cell in enumerate((*cells()[::2], *incoming_cells())):
        log = log_of(cuda.source(cell.values[0].kind), ("sm_80", "sm_90", "sm_100")[i % 3])
        stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert stacks == [("0", "0", "0")] * 2
        assert all(int(used) <= 64 for used in re.findall(r"Used (\d+) registers", log))
