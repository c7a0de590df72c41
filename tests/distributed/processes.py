"""Real processes over gloo: the functions that each of them runs."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import onlinesoftmax as osm
import triton_interpreter
from onlinesoftmax.core.processes import gathered
from onlinesoftmax.distributed import mailboxes
from pairs import with_every_pair

sharded = osm.distributed

COLS = 37
"""Columns of a whole row."""


def device() -> torch.device:
    """The device of this process: its GPU under NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", dist.get_rank())
    return torch.device("cpu")


def kernels_run() -> bool:
    """True on a GPU, and where Triton's interpreter takes CPU tensors: tests/conftest.py turns it off beside a GPU."""
    return device().type == "cuda" or not torch.cuda.is_available()


def random(*shape: int, seed: int, normal: bool = True) -> torch.Tensor:
    """The same random numbers on every process, and on every device."""
    make = torch.randn if normal else torch.rand
    return make(shape, generator=torch.Generator().manual_seed(seed)).to(device())


LOSS_OPTIONS = {
    "reduction": ("mean", "sum", "none"), "weighted": (False, True), "label_smoothing": (0.0, 0.1),
    "z_loss": (0.0, 0.01), "scale": (1.0, -0.5), "softcap": (None, 5.0),
}  # fmt: skip


KERNELS, EAGER = {"backend": "triton"}, {"backend": "eager"}
"""Arguments for kernels, on a CPU by Triton's interpreter, and for PyTorch's operations."""

PRELOADED = [
    __name__,
    *(f"{__package__}.{name}" for name in ("benchmark", "dtensors", "fast_path", "files", "fsdp", "passes")),
    *(f"{__package__}.{name}" for name in ("sampling", "sharded_heads")),
    *(f"onlinesoftmax.kernels.triton.{name}" for name in ("split", "merge", "reduction")),
    "triton.experimental.gluon", "typer.main", "onlinesoftmax.cli.bench", "torch._dynamo.backends.debugging",
    "torch._inductor.lowering", "torch.fx.experimental.symbolic_shapes",
]  # fmt: skip
"""The checks, and modules that they import in a call; a compilation and torch.autograd.grad import the last three.

The server leaves out a module that it does not find.
"""


def team(check: Callable[[Path], None], size: int, folder: Path) -> None:
    """Run check(folder) in so many processes."""
    run(functools.partial(_in_folder, check, folder), tuple(range(size + 1)), folder)


def _in_folder(check: Callable[[Path], None], folder: Path, *_: int) -> None:
    check(folder)


def as_torchrun(check: Callable[[Path], None], size: int, folder: Path) -> None:
    """Run check(folder) in so many processes with the variables that torchrun sets; check makes the group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(size)}
    _start(_with_variables, (check, folder, where), size)


def _with_variables(rank: int, check: Callable[[Path], None], folder: Path, where: dict[str, str]) -> None:
    _prepare()
    os.environ.update(where, RANK=str(rank))
    check(folder)


def run(
    check: Callable[..., None], cuts: tuple[int, ...], folder: Path, backend: str = "gloo", exchange: str = "collective"
) -> None:
    """Run check(first, end) in a process for each slice of the columns between two cuts.

    Args:
        check: The function.
        cuts: The cuts.
        folder: Where the processes find each other.
        backend: Backend of the process group.
        exchange: How calls exchange states if they do not say it; peer memory needs GPUs.
    """
    _start(_one, (check, cuts, str(folder / "store"), backend, exchange), len(cuts) - 1)


def run_in_turn(checks: tuple[Callable[..., None], ...], *arguments: Any) -> None:
    """Run check(first, end) for each check in the same processes, of which a start takes longer than most checks.

    Args:
        checks: The functions.
        arguments: The other arguments of `run`.
    """
    run(functools.partial(_in_turn, checks), *arguments)


def _in_turn(checks: tuple[Callable[..., None], ...], first: int, end: int) -> None:
    for check in checks:
        check(first, end)


def _start(function: Callable[..., None], arguments: tuple[Any, ...], size: int) -> None:
    # A server forks the processes from one that has already imported what takes long.  A process that has used CUDA
    # must not be forked.
    how = "spawn" if torch.cuda.is_available() else "forkserver"
    if how == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOADED)
        # The server has its modules from these folders; it does not get the search path of this process.
        folders = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
        with mock.patch.dict(os.environ, {"PYTHONPATH": folders}):
            forkserver.ensure_running()
    mp.start_processes(function, arguments, nprocs=size, start_method=how)


def _prepare() -> None:
    """Prepare this process, which a server has forked, for a check."""
    # A collection passes all objects of the server's modules, and copies their memory into this process.
    gc.freeze()
    gc.set_threshold(100000, 20, 20)
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        triton_interpreter.patch()


def _one(rank: int, check: Callable[..., None], cuts: tuple[int, ...], store: str, backend: str, exchange: str) -> None:
    _prepare()
    how: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": len(cuts) - 1}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        # The processes compile the kernels between two exchanges.
        how |= {"timeout": timedelta(minutes=5), "device_id": torch.device("cuda", rank)}
    else:
        how["timeout"] = timedelta(seconds=20)
    if exchange == "collective":
        mailboxes.MOST_PROCESSES = 1
    dist.init_process_group(backend, **how)
    check(cuts[rank], cuts[rank + 1])
    dist.destroy_process_group()


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, targets, weights): one target is ignored, and one row has a large offset."""
    x, target = (3 * random(6, COLS, seed=5)).to(dtype), torch.tensor([0, 36, -100, 19, 20, 7], device=device())
    x[1] += 50.0
    return x, target, random(COLS, seed=6, normal=False).to(dtype)


def close(ours: torch.Tensor, whole: torch.Tensor, exact: torch.Tensor, size: float = 1.0) -> None:
    """At most as far from float64 as one process, and a unit in the last place of it and of a number of this size.

    The size is that of the largest term, as it was accumulated.  The expected values are float64, so beside float64
    results they have rounding errors of the same size.
    """
    assert ours.dtype == whole.dtype
    assert ours.shape == exact.shape
    if not ours.numel():
        return
    error, theirs = (ours.double() - exact).abs(), (whole.double() - exact).abs().max()
    eps = torch.finfo(ours.dtype).eps
    wide = torch.finfo(torch.promote_types(ours.dtype, torch.float32)).eps
    unit = (eps * exact.abs() + size * wide) * (2 if ours.dtype == torch.float64 else 1)
    assert (error <= theirs + unit).all(), f"error {error.max():.2e}, one process {theirs:.2e}"


def same_everywhere(t: torch.Tensor) -> None:
    """The same bits on every process."""
    parts = gathered(t.detach(), dist.group.WORLD)
    assert all(torch.equal(part, parts[0]) for part in parts)


def a_gradient_scaler_reaches_float16(first: int, end: int, given: dict[str, Any]) -> None:
    """A twelfth of a small probability is 0 in float16; times the factor of the scaler it is not."""
    x, target = random(12, COLS, seed=8) / 3 - 12, torch.arange(12) % 5
    x[:, :5] += 12
    for reduction, factor in (("mean", 16384.0), ("sum", 64.0)):
        local, whole = x[:, first:end].half().requires_grad_(), x.half().double().requires_grad_()
        exact = torch.autograd.grad(
            factor * torch.nn.functional.cross_entropy(whole, target.to(device()), reduction=reduction), whole
        )[0][:, max(first, 5) : end]
        loss = sharded.cross_entropy(local, target.to(device()), reduction=reduction, dtype=torch.float32, **given)
        (dx,) = torch.autograd.grad(factor * loss, local)
        assert (dx[:, max(5 - first, 0) :].double() - exact).norm() <= 2e-3 * exact.norm()


class Agreed(NamedTuple):
    """Results that agree with those of one process.

    Attributes:
        leaf: The local logits.
        results: Our results.
        dys: The gradients of the results.
        gradient: The gradient of the leaf.
    """

    leaf: torch.Tensor
    results: tuple[torch.Tensor, ...]
    dys: list[torch.Tensor]
    gradient: torch.Tensor


def agrees(
    name: str, x: torch.Tensor, columns: tuple[int, int], tensors: tuple[Any, ...] = (),
    options: dict[str, Any] | None = None, *, dim: int = 1, ours: Any = (), theirs: Any = (), alone: bool = False,
    again: bool = False, sizes: tuple[float | None, float] = (60.0, 8.0),
) -> Agreed:  # fmt: skip
    """Call a function on the local columns, with a gradient, and compare with one process and with float64.

    Args:
        name: Name of the function.
        x: Whole logits.
        columns: First column of this process, and the end.
        tensors: The other positional arguments; floating-point ones are float64 in the exact call.
        options: Keyword arguments of all calls; a mask is cut for ours.
        dim: The softmax dimension.
        ours, theirs: Further keyword arguments of our call, and of those of one process.
        alone: Compare the gradient of each result alone, too.
        again: Keep the graphs, for another gradient; without them, a gradient may be written in place.
        sizes: Sizes of the terms of results and of gradients, for `close`; that of results follows from them if None.
    """

    def cut(t: torch.Tensor) -> torch.Tensor:
        return t.narrow(dim, columns[0], columns[1] - columns[0]) if t.shape == x.shape else t

    options = options or {}
    local = {key: cut(value) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    wide = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors]
    exact = {key: value for key, value in options.items() if key != "dtype"}
    leaves = [t.clone().requires_grad_() for t in (cut(x), x, x.double())]
    found = (
        getattr(sharded, name)(leaves[0], *tensors, **local, **dict(ours)),
        getattr(osm, name)(leaves[1], *tensors, **options, **dict(theirs)),
        getattr(osm, name)(leaves[2], *wide, **exact, **EAGER),
    )
    each = [(ys,) if isinstance(ys, torch.Tensor) else tuple(y for y in ys if y is not None) for ys in found]
    dys = []
    for i, (y, own, want) in enumerate(zip(*each, strict=True)):
        if want.shape != x.shape:
            same_everywhere(y)
        size = sizes[0] or 4 * float(want.detach().abs().max().clamp(min=15))
        close(y.detach(), cut(own.detach()), cut(want.detach()), size)
        dys.append(random(*want.shape, seed=1 + i, normal=False).to(y.dtype))
    gradients = []
    for some in (slice(0, len(dys)), *(slice(i, i + 1) for i in range(len(dys)) if alone)):
        dxs = [
            torch.autograd.grad(ys[some], leaf, [convert(dy).to(ys[0].dtype) for dy in dys[some]], alone or again)[0]
            for ys, leaf, convert in zip(each, leaves, (cut, torch.clone, torch.clone), strict=True)
        ]
        close(dxs[0], cut(dxs[1]), cut(dxs[2]), sizes[1])
        gradients.append(dxs[0])
    return Agreed(leaves[0], each[0], [cut(dy) for dy in dys], gradients[0])


def losses_are_those_of_one_process(first: int, end: int) -> None:
    """Every two options meet; on two GPUs, every combination in float32."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, target, weights = inputs(dtype)
        product = [dict(zip(LOSS_OPTIONS, one, strict=True)) for one in itertools.product(*LOSS_OPTIONS.values())]
        whole = dtype == torch.float32 and dist.get_world_size() == 2 and device().type == "cuda"
        for options in product if whole else with_every_pair(product, lambda one: tuple(one.items())):
            weight = weights if options.pop("weighted") else None
            if dtype == torch.bfloat16 and options["z_loss"]:
                options["dtype"] = torch.float32
            agrees("cross_entropy", x, (first, end), (target, weight), options)


def log_probabilities_are_those_of_one_process(first: int, end: int) -> None:
    """All three statistics with their gradients, and a mask that keeps the chosen token."""
    x, target, _ = inputs(torch.float32)
    index = target.clamp(min=0)
    mask = (random(*x.shape, seed=2, normal=False) < 0.7).scatter(1, index[:, None], True)
    for options in ({}, {"mask": mask}, {"scale": 0.5, "softcap": 10.0}):
        agrees("token_logprobs", x, (first, end), (index,), options, sizes=(60.0, 16.0))


def softmax_and_its_like_are_those_of_one_process(first: int, end: int) -> None:
    """Rows along any dimension, with scores, and their gradients."""
    names, caps = ("softmax", "log_softmax", "logsumexp"), (None, 4.0)
    calls = [*itertools.product(names, (0, 1, -1), (torch.float32, torch.bfloat16), caps)]
    for name, dim, dtype, cap in calls if device().type == "cuda" else with_every_pair(calls, lambda call: call):
        shape = [3, 4, 5]
        shape[dim] = COLS
        x = (5 * random(*shape, seed=3)).to(dtype)
        agrees(name, x, (first, end), (dim,), {"softcap": cap}, dim=dim, sizes=(20.0, 64.0))


def narrow_targets(first: int, end: int) -> None:
    """A target minus the first column of a process may not fit in the dtype of the target."""
    cols = 300 * dist.get_world_size()
    x, first = random(6, cols, seed=13), 300 * dist.get_rank()
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        target = torch.tensor([0, 5, 100, 127, 44, 45], device=device()).to(dtype)
        want = torch.nn.functional.cross_entropy(x, target.long())
        torch.testing.assert_close(sharded.cross_entropy(x[:, first : first + 300], target), want)


def hard_rows_are_those_of_one_process(first: int, end: int) -> None:
    """Ignored rows with NaN, an infinite score, a row of only -inf, targets out of range, K-dimensional input."""
    x = random(7, COLS, seed=7)
    x[0], x[1, 30], x[2], x[3, 5] = torch.nan, torch.inf, -torch.inf, -torch.inf
    target = torch.tensor([-100, 1, 2, 5, COLS, -3, 0], device=device())
    local = x[:, first:end].clone().requires_grad_()
    rows = sharded.cross_entropy(local, target, reduction="none", z_loss=0.1)
    whole, inside = x.clone().requires_grad_(), (target >= 0) & (target < COLS)
    # PyTorch's operations raise an error for a target out of range, so these rows are ignored here.
    want = osm.cross_entropy(whole, target.where(inside, -100), reduction="none", z_loss=0.1)
    torch.testing.assert_close(rows, want.where(inside | (target == -100), torch.nan), equal_nan=True)
    (found,) = torch.autograd.grad(rows, local, torch.ones_like(rows))
    (theirs,) = torch.autograd.grad(want[6], whole)
    torch.testing.assert_close(found[6], theirs[6, first:end])
    assert (found[[0, 4, 5]] == 0).all()
    images, classes = random(2, COLS, 3, 2, seed=8), torch.full((2, 3, 2), 36, device=device())
    torch.testing.assert_close(
        sharded.cross_entropy(images[:, first:end], classes), torch.nn.functional.cross_entropy(images, classes)
    )
    for _ in range(3):
        again = sharded.cross_entropy(local, target, reduction="none", z_loss=0.1)
        assert torch.equal(again.nan_to_num(), rows.nan_to_num())


def one_local_shape_in_two_rows(first: int, end: int) -> None:
    """Shards of one shape here belong to rows of different lengths: a process sees the length in each call anew."""
    last = dist.get_rank() == dist.get_world_size() - 1
    for more in (0, 3, 0, 5):
        x = random(4, COLS + more, seed=9)
        local, target = x[:, first : end + more * last], torch.tensor([0, 5, 36, COLS + more - 1], device=device())
        want = torch.nn.functional.cross_entropy(x, target, label_smoothing=0.1)
        torch.testing.assert_close(sharded.cross_entropy(local, target, label_smoothing=0.1), want)
        shards = sharded.Shards.of(local)
        assert shards == sharded.Shards(first, end - first + more * last, COLS + more)
        known = sharded.cross_entropy(local, target, label_smoothing=0.1, shards=shards)
        torch.testing.assert_close(known, want)
        torch.testing.assert_close(sharded.softmax(local, shards=shards), x.softmax(1)[:, first : end + more * last])


def states_merge_over_processes(first: int, end: int) -> None:
    """States of torch tensors and of NumPy arrays, with an accumulator, and the identity on an empty process."""
    x = 9 * random(4, COLS, seed=10).double()
    # NCCL does not take arrays of the CPU.
    arrays = () if x.is_cuda else (torch.Tensor.numpy,)
    for convert in (torch.Tensor.float, torch.Tensor.double, *arrays):
        whole, local = convert(x), convert(x[:, first:end])
        want, found = (osm.State.of(t, 1, weights={"x": t}) for t in (whole, local))
        found = found.all_reduce()
        same_everywhere(torch.as_tensor(found.l))
        for name in ("m", "l", "sums"):
            mine, theirs = (getattr(state, name) for state in (found, want))
            if name == "sums":
                mine, theirs = mine["x"], theirs["x"]
            assert type(mine) is type(theirs)
            torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(theirs))


CHECKS: tuple[Callable[..., Any], ...] = (
    losses_are_those_of_one_process, log_probabilities_are_those_of_one_process,
    softmax_and_its_like_are_those_of_one_process, hard_rows_are_those_of_one_process, one_local_shape_in_two_rows,
    states_merge_over_processes, narrow_targets,
)  # fmt: skip


def everything(first: int, end: int) -> None:
    """All checks, one after the other: starting processes takes longer than each."""
    for check in CHECKS:
        check(first, end)
