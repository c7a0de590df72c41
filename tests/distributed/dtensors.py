"""Calls on DTensors in four processes, on meshes of one and two dimensions, against one process."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import onlinesoftmax as osm
from distributed import processes
from distributed.fast_path import prepared_calls
from distributed.processes import EAGER, KERNELS
from onlinesoftmax.core.call import Settings
from onlinesoftmax.core.options import ScoreOptions
from onlinesoftmax.distributed import dtensor
from onlinesoftmax.distributed.layout import layout_of
from onlinesoftmax.torch.fast_path import PREPARED_CALLS
from onlinesoftmax.torch.loss_arguments import Loss

Placements = tuple[Any, ...]

BY_DIMENSIONS: dict[int, tuple[Placements, ...]] = {
    1: ((Shard(1),), (Shard(0),), (Replicate(),)),
    2: (
        (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Shard(1), Shard(1)),
        (Shard(0), Replicate()), (Shard(0), Shard(0)),
    ),
}  # fmt: skip
"""Placements of an input of shape (rows, columns) on a mesh with so many dimensions."""

ROWS, COLS = 5, 13
"""Neither is divisible by the number of processes."""


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """A mesh with one dimension and a mesh with two, of all processes."""
    half, kind = dist.get_world_size() // 2, processes.device().type
    return init_device_mesh(kind, (2 * half,)), init_device_mesh(kind, (2, half))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (4 * processes.random(*shape, seed=seed)).to(dtype)


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, device=processes.device())


def cut_tensor(t: torch.Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """A DTensor of a tensor that every process has: nothing is sent."""
    return distribute_tensor(t, mesh, placements, src_data_rank=None)


def rows_of(placements: Placements) -> Placements:
    """Placements of a result per row of an input of shape (rows, columns)."""
    return tuple(Replicate() if placement == Shard(1) else placement for placement in placements)


def whole_on(mesh: DeviceMesh) -> Placements:
    """Placements of a tensor of which every process has a copy."""
    return (Replicate(),) * mesh.ndim


def near(found: Any, want: torch.Tensor, placements: Placements) -> None:
    """A DTensor with these placements, and with these values up to rounding."""
    assert type(found) is DTensor
    assert found.placements == placements
    assert found.shape == want.shape
    torch.testing.assert_close(
        found.to_local(), cut_tensor(want.detach(), found.device_mesh, placements).to_local(), equal_nan=True
    )


def agree(
    function: Callable[..., Any], x: torch.Tensor, mesh: DeviceMesh, placements: Placements,
    options: dict[str, Any] | None = None, given: dict[str, Any] | None = None, tensors: tuple[Any, ...] = (),
    again: bool = False,
) -> tuple[Any, Any, torch.Tensor, DTensor]:  # fmt: skip
    """(results of a tensor and of a DTensor, and both inputs), once the results and the gradients agree.

    Args:
        function: The function.
        x: The input.
        mesh, placements: Those of the DTensor.
        options: Keyword arguments of both calls.
        given: Keyword arguments of the call on the DTensor.
        tensors: Further positional arguments.
        again: Keep the graphs, for another gradient.
    """
    whole, cut = x.clone().requires_grad_(), cut_tensor(x, mesh, placements).requires_grad_()
    wants = function(whole, *tensors, **(options or {}))
    founds = function(cut, *tensors, **{**(options or {}), **(given or {})})
    ours, theirs = ((ys,) if isinstance(ys, torch.Tensor) else tuple(ys) for ys in (founds, wants))
    dys = [random(*want.shape, seed=3 + i, dtype=want.dtype) for i, want in enumerate(theirs)]
    for found, want in zip(ours, theirs, strict=True):
        near(
            found, want, placements if want.shape == x.shape else rows_of(placements) if want.dim() else whole_on(mesh)
        )
    aligned = [cut_tensor(dy, mesh, found.placements) for dy, found in zip(dys, ours, strict=True)]
    (dx,) = torch.autograd.grad(theirs, whole, dys, again)
    near(torch.autograd.grad(ours, cut, aligned, again)[0], dx, placements)
    return wants, founds, whole, cut


def softmax_and_its_like(mesh: DeviceMesh, placements: Placements) -> None:
    """The score options as plain tensors and as DTensors; forward and gradients."""
    x = random(ROWS, COLS)
    mask, bias = random(ROWS, COLS, seed=1) > -4, random(1, COLS, seed=2)
    mask[2] = False
    where = cut_tensor(bias, mesh, tuple(Shard(1) if p == Shard(1) else Replicate() for p in placements))
    product: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"mask": mask, "fully_masked": "zero"}, {}),
        ({"bias": bias, "scale": 0.5, "softcap": 5.0}, {"bias": where}),
        ({"causal": True, "dtype": torch.float64}, {}),
        ({"scale": random(ROWS, 1, seed=4), "mask": mask[:1]}, {}),
    ]
    # A third of the pairs with each placement: every pair is among those of some placement on each mesh.
    first = BY_DIMENSIONS[mesh.ndim].index(placements) % 3
    for name, (options, given) in list(itertools.product(("softmax", "log_softmax", "logsumexp"), product))[first::3]:
        agree(getattr(osm, name), x, mesh, placements, options, given, (1,))


def gradients_of_operands(mesh: DeviceMesh, placements: Placements) -> None:
    """The gradients of a bias and of a scale are whole, whatever the bias is: a plain tensor or a DTensor."""
    x, bias, dy = random(ROWS, COLS), random(COLS, seed=1).requires_grad_(), random(ROWS, COLS, seed=3)
    cut, dcut = cut_tensor(x, mesh, placements), cut_tensor(dy, mesh, placements)
    for scale in (random(ROWS, 1, seed=4).requires_grad_(), tensor(0.5).requires_grad_()):
        want = torch.autograd.grad(osm.softmax(x, 1, bias=bias, scale=scale), (bias, scale), dy)
        found = torch.autograd.grad(osm.softmax(cut, 1, bias=bias, scale=scale), (bias, scale), dcut)
        torch.testing.assert_close(found, want)
    sharded = cut_tensor(bias.detach(), mesh, [Replicate()] * mesh.ndim).requires_grad_()
    (mine,) = torch.autograd.grad(osm.softmax(cut, 1, bias=sharded, scale=scale), sharded, dcut)
    torch.testing.assert_close(mine.full_tensor(), want[0])


def losses(mesh: DeviceMesh, placements: Placements) -> None:
    """Every reduction, with plain targets and with DTensors; the mean is over the rows of all processes."""
    x, target, weight = random(ROWS, COLS), tensor([0, 12, -100, 7, 3]), random(COLS, seed=1).abs()
    aligned = cut_tensor(target, mesh, rows_of(placements))
    product: tuple[dict[str, Any], ...] = (
        {}, {"weight": weight, "label_smoothing": 0.1, "z_loss": 0.05}, {"z_loss": 0.01, "scale": 0.5, "softcap": 3.0},
    )  # fmt: skip
    for reduction, options in itertools.product(("mean", "sum", "none"), product):
        for index in (target, aligned) if reduction == "mean" else (aligned,):
            call = functools.partial(osm.cross_entropy, reduction=reduction, **options)
            agree(call, x, mesh, placements, {"target": target}, {"target": index})


def losses_with_a_mask(mesh: DeviceMesh, placements: Placements) -> None:
    """The mask is cut as the rows are.  A loss of sharded classes takes none (`bad_input_is_an_error`)."""
    x, target = random(ROWS, COLS), tensor([0, 12, -100, 7, 3])
    mask = (random(ROWS, COLS, seed=1) > -0.5).scatter(1, target.clamp(min=0)[:, None], True)
    if Shard(1) in placements:
        return
    options = {"mask": mask, "dtype": torch.float64, "label_smoothing": 0.1, "z_loss": 0.1, "scale": random(ROWS, 1)}
    _, found, *_ = agree(osm.cross_entropy, x, mesh, placements, options, tensors=(target,))
    assert found.dtype == torch.float64


def log_probabilities(mesh: DeviceMesh, placements: Placements) -> None:
    x, index = random(ROWS, COLS), tensor([0, 12, 5, 7, 3])
    mask = (random(ROWS, COLS, seed=1) > -4).scatter(1, index[:, None], True)
    for options in ({}, {"mask": mask, "scale": random(ROWS, 1, seed=4)}, {"ignore_index": 5}):
        agree(osm.token_logprobs, x, mesh, placements, options, tensors=(index,))
    assert osm.token_logprobs(cut_tensor(x, mesh, placements), index, entropy=False).entropy is None


def losses_by_kernels(mesh: DeviceMesh, placements: Placements) -> None:
    """Several process groups that shard the classes, and others that shard the rows."""
    if not processes.kernels_run():
        return
    how: Any = {} if processes.device().type == "cuda" else KERNELS
    x, target = random(ROWS, COLS), tensor([0, 12, -100, 7, 3])
    for reduction, options in (("mean", {}), ("sum", {"label_smoothing": 0.1}), ("none", {"z_loss": 0.01})):
        # On a mesh with a dimension of one process, two placements have the same launches.
        PREPARED_CALLS.clear()
        call = functools.partial(osm.cross_entropy, reduction=reduction, **options)
        want, found, whole, cut = agree(call, x, mesh, placements, EAGER, {"backend": None, **how}, (target,), True)
        assert len(prepared_calls()) == bool(cut.to_local().shape[0])
        if Shard(1) not in placements:
            products = []
            for y, leaf in ((found, cut), (want, whole)):
                (dx,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
                products.append(torch.autograd.grad((dx * dx).sum(), leaf)[0])
            near(*products, placements)


def other_ranks_of_tensors(mesh: DeviceMesh) -> None:
    """Images whose classes are dimension 1, keepdim, and 16 bits."""
    for placements in ((Shard(2), Shard(1)), (Shard(0), Shard(1)), (Shard(1), Shard(3))):
        x, target = random(3, 7, 2, 5), random(3, 2, 5, seed=1).abs().long() % 7
        _, _, whole, cut = agree(osm.cross_entropy, x, mesh, placements, tensors=(target,))
        lse = osm.logsumexp(cut, 1, keepdim=True)
        near(lse, whole.logsumexp(1, keepdim=True), tuple(Replicate() if p == Shard(1) else p for p in placements))
    x = random(3, 7, 2, 5)
    cut = cut_tensor(x, mesh, (Shard(0), Shard(3)))
    near(osm.logsumexp(cut, (1, 2)), x.logsumexp((1, 2)), (Shard(0), Shard(1)))
    x = random(ROWS, COLS, dtype=torch.bfloat16)
    cut = cut_tensor(x, mesh, (Shard(0), Shard(1)))
    near(osm.softmax(cut), x.softmax(-1), (Shard(0), Shard(1)))
    near(
        osm.cross_entropy(cut, tensor(range(ROWS))),
        functional.cross_entropy(x, tensor(range(ROWS))),
        whole_on(mesh),
    )


def partial_sums_are_added(mesh: DeviceMesh) -> None:
    """The logits of a row-parallel layer, whose gradient is that of the sum on every process."""
    x = random(ROWS, COLS)
    cut = DTensor.from_local(x / mesh.size(), mesh, (Partial(),)).requires_grad_()
    whole, target = x.clone().requires_grad_(), tensor(range(ROWS))
    want, found = osm.cross_entropy(whole, target), osm.cross_entropy(cut, target)
    near(found, want, (Replicate(),))
    near(torch.autograd.grad(found, cut)[0], torch.autograd.grad(want, whole)[0], (Replicate(),))
    # The checks of targets use the shape of the logits only.
    with CommDebugMode() as exchanges:
        dtensor.check_targets(cut, target, None, Loss(Settings(1), -100, "mean"))
        dtensor.check_tokens(cut, target, 1)
    assert not exchanges.get_total_counts()


def a_process_without_columns(mesh: DeviceMesh) -> None:
    x, target = random(ROWS, mesh.size() - 1), tensor([0] * ROWS)
    for name, tensors in (("softmax", (1,)), ("log_softmax", (1,)), ("logsumexp", (1,)), ("cross_entropy", (target,))):
        agree(getattr(osm, name), x, mesh, (Shard(1),), tensors=tensors)
    agree(osm.token_logprobs, x, mesh, (Shard(1),), tensors=(target,))


def causal_is_a_mask_only_if_needed(mesh: DeviceMesh) -> None:
    """A batch that is sharded keeps `causal`; queries or keys that are sharded need a mask."""
    x = random(4, 3, 5)
    for placements, masked in (
        ((Shard(0), Shard(0)), False), ((Shard(0), Replicate()), False), ((Replicate(), Replicate()), False),
        ((Shard(0), Shard(1)), True), ((Shard(2), Shard(0)), True),
    ):  # fmt: skip
        cut = cut_tensor(x, mesh, placements)
        options = layout_of("softmax", cut, (2,)).options(ScoreOptions(causal=True), cut.device)
        assert options is not None
        assert (options.causal, options.mask is not None) == (not masked, masked), placements
        near(osm.softmax(cut, causal=True), osm.softmax(x, causal=True), placements)


def class_probabilities_and_statistics(mesh: DeviceMesh) -> None:
    """Both if a row dimension is sharded and the softmax dimension is not."""
    x, placements = random(ROWS, COLS), (Shard(0), Replicate())
    cut, likely = cut_tensor(x, mesh, placements), random(ROWS, COLS, seed=1).softmax(1)
    near(osm.cross_entropy(cut, likely), functional.cross_entropy(x, likely), whole_on(mesh))
    # One process has the row, and the others have none.
    one = cut_tensor(x[:1], mesh, placements)
    near(osm.cross_entropy(one, likely[:1]), functional.cross_entropy(x[:1], likely[:1]), whole_on(mesh))
    target = tensor(range(ROWS))
    (want, theirs), (loss, mine) = (osm.cross_entropy(t, target, return_stats=True) for t in (x, cut))
    near(loss, want, whole_on(mesh))
    for name, statistic in mine._asdict().items():
        near(statistic, getattr(theirs, name), placements)


def autocast_is_followed(mesh: DeviceMesh) -> None:
    x, target = random(ROWS, COLS, dtype=torch.bfloat16), tensor(range(ROWS))
    for placements in ((Shard(1),), (Shard(0),)):
        cut = cut_tensor(x, mesh, placements)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            for function in (
                lambda t: osm.cross_entropy(t, target), lambda t: osm.token_logprobs(t, target).logprob,
                osm.softmax, osm.log_softmax, osm.logsumexp,
            ):  # fmt: skip
                assert function(cut).dtype == function(x).dtype


def bad_input_is_an_error(mesh: DeviceMesh, other: DeviceMesh) -> None:
    """Each error is the same on every process, and names the argument."""
    x, target = random(ROWS, COLS), tensor(range(ROWS))
    cut = cut_tensor(x, mesh, (Shard(0), Shard(1)))
    far = cut_tensor(target, other, (Replicate(),))
    calls: tuple[tuple[type[Exception], str, Callable[[], object]], ...] = (
        (NotImplementedError, "out is not available", lambda: osm.softmax(cut, out=cut)),
        (NotImplementedError, "batch_invariant is not", lambda: osm.softmax(cut, batch_invariant=True)),
        (NotImplementedError, "reduce one dim at a time", lambda: osm.logsumexp(cut, (0, 1))),
        (TypeError, "the array is a DTensor", lambda: osm.State.of(cut)),
        (NotImplementedError, "target with class probabilities is not", lambda: osm.cross_entropy(cut, x.softmax(1))),
        (NotImplementedError, "return_stats is not", lambda: osm.cross_entropy(cut, target, return_stats=True)),
        (NotImplementedError, "inplace_backward", lambda: osm.cross_entropy(cut, target, inplace_backward=True)),
        (NotImplementedError, "index with several", lambda: osm.token_logprobs(cut, target[:, None])),
        (NotImplementedError, "support is not", lambda: osm.token_logprobs(cut, target, support=(target, target))),
        (NotImplementedError, "mask is not", lambda: osm.cross_entropy(cut, target, mask=x > 0)),
        (NotImplementedError, "scale as a tensor is not", lambda: osm.cross_entropy(cut, target, scale=tensor(2.0))),
        (NotImplementedError, "dtype=torch.float64", lambda: osm.cross_entropy(cut, target, dtype=torch.float64)),
        (NotImplementedError, "pass dtype=", lambda: osm.softmax(cut.long())),
        (IndexError, "Dimension out of range", lambda: osm.softmax(cut, 2)),
        (ValueError, "target has shape", lambda: osm.cross_entropy(cut, target[:3])),
        (ValueError, "target is on the mesh", lambda: osm.cross_entropy(cut, far)),
        (IndexError, "target is 13 at position 4", lambda: osm.cross_entropy(cut, target + 9, check=True)),
        (IndexError, "index is 13 at position 4", lambda: osm.token_logprobs(cut, target + 9, check=True)),
        (TypeError, "mask is a DTensor, and input is a Tensor", lambda: osm.softmax(x, mask=cut > 0)),
        (TypeError, "target is a DTensor, and input is a Tensor", lambda: osm.cross_entropy(x, far)),
        (RuntimeError, "mask must be boolean", lambda: osm.softmax(cut, mask=x)),
    )
    for kind, message, call in calls:
        with pytest.raises(kind, match=re.escape(message)):
            call()


def different_calls_are_an_error(mesh: DeviceMesh, line: DeviceMesh) -> None:
    """The last process differs from the others, which do not all exchange states with it: all raise the same error."""
    x, target, last = random(ROWS, COLS), tensor(range(ROWS)), dist.get_world_size() - 1
    odd = dist.get_rank() == last
    shards = (Shard(0), Shard(1))
    cut = cut_tensor(x, mesh, shards)
    other = cut_tensor(x.double() if odd else x, mesh, shards)
    turned = cut_tensor(x, mesh, shards[::-1] if odd else shards)
    longer = cut_tensor(random(ROWS, COLS + 9 * odd), mesh, shards)
    calls: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: osm.softmax(other), "float32.*float64"),
        (
            lambda: osm.softmax(turned),
            rf"Shard\(dim=0\), Shard\(dim=1\).*; rank {last}: .*Shard\(dim=1\), Shard\(dim=0\)",
        ),
        (lambda: osm.logsumexp(longer, 1), r"\(5, 13\) float32.*\(5, 22\) float32"),
        (lambda: (osm.log_softmax if odd else osm.softmax)(cut), rf"softmax\(.*; rank {last}: log_softmax\("),
        (lambda: osm.softmax(cut, scale=1 + odd), "options=None.*scale=2.0"),
        (lambda: osm.cross_entropy(cut, target, label_smoothing=odd / 4), "smoothing=0.0.*smoothing=0.25"),
        (lambda: osm.cross_entropy(cut, target, reduction="sum" if odd else "mean"), "'mean'.*'sum'"),
        (lambda: osm.cross_entropy(cut, target, x[0] if odd else None), r"weight=None.*weight=\('\(13,\) float32'"),
        (lambda: osm.cross_entropy(cut, target.int() if odd else target), r"int64.*int32"),
        (lambda: osm.token_logprobs(cut, target, entropy=not odd), "entropy=True.*entropy=False"),
    )
    for call, message in calls:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"the processes make different calls; rank 0: .*" + message):
                call()
            near(osm.softmax(cut), x.softmax(1), shards)
    # On a mesh of two dimensions, a loss that is reduced over rows exchanges something even if rows are whole.
    rows = cut_tensor(x, mesh, (Shard(0), Replicate()))
    with pytest.raises(ValueError, match="the processes make different calls"):
        osm.cross_entropy(rows, target, reduction="sum" if odd else "mean")
    shape = 5, 3 * (last + 1)
    uneven = DTensor.from_local(x[:, : 3 + odd], line, (Shard(1),), run_check=False, shape=shape, stride=(shape[1], 1))
    with pytest.raises(ValueError, match=rf"the local tensors of the processes \[{last}\] have other shapes"):
        osm.softmax(uneven)


def compiled_losses(mesh: DeviceMesh) -> None:
    """One graph with both exchanges; the backend is the cheapest that traces forward and backward."""
    x, target = random(ROWS, COLS), tensor([0, 12, -100, 7, 3])

    def loss(logits: Any) -> Any:
        return osm.cross_entropy(2 * logits, target, backend="triton" if processes.kernels_run() else None)

    placements = (Shard(0), Shard(1))
    cut = cut_tensor(x, mesh, placements).requires_grad_()
    want, found = loss(cut), torch.compile(loss, fullgraph=True, backend="aot_eager")(cut)
    near(found, want.full_tensor(), whole_on(mesh))
    (dx,), (mine,) = torch.autograd.grad(want, cut), torch.autograd.grad(found, cut)
    near(mine, dx.full_tensor(), placements)


def everything(*_: int) -> None:
    line, square = meshes()
    for mesh in (line, square):
        for placements in BY_DIMENSIONS[mesh.ndim]:
            for check in (
                softmax_and_its_like,
                gradients_of_operands,
                losses,
                losses_with_a_mask,
                log_probabilities,
            ):
                try:
                    check(mesh, placements)
                except BaseException as error:
                    raise AssertionError(f"{check.__name__} with {placements} on {mesh}") from error
    for placements in ((Shard(1), Shard(1)), (Shard(0), Shard(1)), (Shard(1), Replicate())):
        losses_by_kernels(square, placements)
    other_ranks_of_tensors(square)
    partial_sums_are_added(line)
    a_process_without_columns(line)
    causal_is_a_mask_only_if_needed(square)
    class_probabilities_and_statistics(square)
    autocast_is_followed(line)
    bad_input_is_an_error(square, line)
    different_calls_are_an_error(square, line)
    compiled_losses(square)
