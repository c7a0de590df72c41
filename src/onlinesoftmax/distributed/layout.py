"""Position of a DTensor's rows on its mesh, and the local parts of the tensors that belong to these rows.

A mesh dimension shards the softmax dimension, shards a row dimension, or holds copies.  If it shards the softmax
dimension, its process group exchanges states.  Sizes and offsets follow from the global shape, so no process asks
another one; but processes that exchange something first compare their calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as Sharding

from ..core.agreement import Announcement, connected_by_sockets, kind_of, numbers_of_all
from ..core.arrays import array_kind
from ..core.options import ScoreOptions
from ..core.view import contiguous_strides
from ..torch.fast_path import MOST_ENTRIES
from .shards import Shards

Tensor = torch.Tensor


class MeshLayout(NamedTuple):
    """The position of the rows of a DTensor on its mesh.

    Attributes:
        mesh: The mesh of the DTensor.
        placements: One placement for each mesh dimension; none is Partial.
        shape: Global shape.
        dims: The dimensions that the operation reduces or normalises, counted from 0.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def softmax_groups(self) -> tuple[Any, ...]:
        """Process groups of the mesh dimensions that shard the softmax dimension: a dimension of `dims`."""
        return self._groups(softmax=True)

    @property
    def row_groups(self) -> tuple[Any, ...]:
        """Process groups of the mesh dimensions that shard a row dimension, as data parallelism does."""
        return self._groups(softmax=False)

    def _groups(self, softmax: bool) -> tuple[Any, ...]:
        return tuple(
            self.mesh.get_group(i)
            for i, placement in enumerate(self.placements)
            if placement.is_shard() and (placement.dim in self.dims) == softmax
        )

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and first index of the local part.  `Shard` cuts a dimension as torch.chunk does."""
        shape, first = list(self.shape), [0] * len(self.shape)
        for i, (placement, here) in enumerate(zip(self.placements, self.mesh.get_coordinate(), strict=True)):
            if placement.is_shard():
                size = shape[placement.dim]
                each = -(-size // self.mesh.size(i))
                begin = min(size, each * here)
                shape[placement.dim] = min(size, begin + each) - begin
                first[placement.dim] += begin
        return tuple(shape), tuple(first)

    @property
    def shards(self) -> Shards:
        """The local columns in the whole row."""
        shape, first = self.box
        (dim,) = self.dims
        return Shards(first[dim], shape[dim], self.shape[dim])

    def elements(self, y: Tensor, strides: tuple[int, ...]) -> Tensor:
        """The DTensor of local results with the shape of the input.

        Args:
            y: The local results.
            strides: Global strides of the input.  They are used unless y is contiguous.
        """
        strides = contiguous_strides(self.shape) if y.is_contiguous() else strides
        shape = torch.Size(self.shape)
        return DTensor.from_local(y, self.mesh, self.placements, run_check=False, shape=shape, stride=strides)

    def rows(self, y: Tensor, keepdim: bool = False) -> Tensor:
        """The DTensor of local results per row; processes that share rows have copies.

        Args:
            y: The local results, which may have more dimensions behind those of the rows.
            keepdim: True where `y` has the reduced dimensions with size 1.
        """
        shape = [1 if i in self.dims else n for i, n in enumerate(self.shape) if keepdim or i not in self.dims]
        shape += y.shape[len(shape) :]
        return DTensor.from_local(
            y.contiguous(), self.mesh, self._row_placements(keepdim), run_check=False, shape=torch.Size(shape),
            stride=contiguous_strides(tuple(shape)),
        )  # fmt: skip

    def number(self, y: Tensor) -> Tensor:
        """The DTensor of a number of which every process has a copy."""
        return DTensor.from_local(y, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    def _row_placements(self, keepdim: bool) -> tuple[Any, ...]:
        def of(placement: Any) -> Any:
            if not placement.is_shard():
                return placement
            if placement.dim in self.dims:
                return Replicate()
            return placement if keepdim else Sharding(placement.dim - sum(dim < placement.dim for dim in self.dims))

        return tuple(of(placement) for placement in self.placements)

    def operand(self, name: str, t: Any) -> Any:
        """The local part of a tensor that broadcasts to the input; a number or None is returned as it is.

        Args:
            name: Name of the argument, for errors.
            t: A DTensor, or a plain tensor that is the whole operand on every process.
        """
        if not isinstance(t, Tensor):
            return t
        ahead = len(self.shape) - t.dim()

        def of(placement: Any) -> Any:
            if not placement.is_shard() or placement.dim < ahead:
                return Replicate()
            # A dimension that has size 1 in the input too is cut as that of the input: most processes have none of it.
            broadcasts = t.shape[placement.dim - ahead] == 1 != self.shape[placement.dim]
            return Replicate() if broadcasts else Sharding(placement.dim - ahead)

        wanted = tuple(of(placement) for placement in self.placements)
        # If the input is sharded and the operand is not, each process has a partial sum of the operand's gradient, so
        # the placement is Partial.
        to = tuple(
            Partial() if placement.is_shard() and mine.is_replicate() else mine
            for placement, mine in zip(self.placements, wanted, strict=True)
        )
        return self.local(name, t, wanted, to)

    def per_row(self, name: str, t: Tensor) -> Tensor:
        """The local part of a tensor with one value per row.  Arguments as for `operand`."""
        placements = self._row_placements(False)
        return self.local(name, t, placements, placements)

    def whole(self, name: str, t: Any) -> Any:
        """The whole tensor, or None.  Arguments as for `operand`."""
        if not isinstance(t, Tensor):
            return t
        copies = (Replicate(),) * self.mesh.ndim
        return self.local(name, t, copies, copies)

    def local(self, name: str, t: Tensor, placements: tuple[Any, ...], gradient: tuple[Any, ...]) -> Tensor:
        """The local part of a tensor with these placements, whose gradient has the placements `gradient`."""
        if not isinstance(t, DTensor):
            t = DTensor.from_local(t, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        elif t.device_mesh != self.mesh:
            raise ValueError(f"{name} is on the mesh {t.device_mesh}, and input on {self.mesh}")
        if tuple(t.placements) != placements:
            t = t.redistribute(placements=placements)
        return local_of(t, gradient)

    def options(self, options: ScoreOptions | None, device: Any) -> ScoreOptions | None:
        """The score options of the local part; `causal` becomes a mask if the queries or the keys are sharded."""
        if options is None:
            return None
        options = options.mapped(self.operand)
        if not options.causal or not self._shards_causal_dimensions():
            return options
        seen = self._causal(device)
        mask = seen if options.mask is None else options.mask & seen
        return options._replace(causal=False, mask=mask)

    def _shards_causal_dimensions(self) -> bool:
        (dim,) = self.dims
        return any(placement.is_shard() and placement.dim in (dim - 1, dim) for placement in self.placements)

    def _causal(self, device: Any) -> Tensor:
        """The local part of the causal mask, in a shape that broadcasts to the local input."""
        (dim,) = self.dims
        shape, first = self.box
        keys = first[dim] + torch.arange(shape[dim], device=device)
        queries = first[dim - 1] + torch.arange(shape[dim - 1], device=device)
        seen = keys <= queries[:, None] + (self.shape[dim] - self.shape[dim - 1])
        return seen.reshape(*seen.shape, *(1 for _ in shape[dim + 1 :]))


def layout_of(name: str, x: Any, dims: tuple[int, ...], argument: str = "input") -> MeshLayout:
    """The layout of x, with the placement Replicate for each Partial.  Nothing is exchanged.

    Args:
        name: Name of the public function, for errors.
        x: A DTensor.
        dims: The dimensions that the operation reduces or normalises, counted from 0.
        argument: Name of the argument x, for errors.

    Raises:
        NotImplementedError: a placement is not Shard, Replicate or Partial.
        RuntimeError: this process is not part of the mesh.
    """
    if x.device_mesh.get_coordinate() is None:
        raise RuntimeError(f"{name}(): this process is not part of the mesh {x.device_mesh} of {argument}")
    placements = tuple(Replicate() if placement.is_partial() else placement for placement in x.placements)
    for placement in placements:
        if not placement.is_shard() and not placement.is_replicate():
            raise NotImplementedError(f"{name}(): {argument} has the placement {placement}; redistribute() it to Shard")
    return MeshLayout(x.device_mesh, placements, tuple(x.shape), dims)


def without_partial_sums(x: Any, layout: MeshLayout) -> Any:
    """The input, or its sum if it has partial sums, as PyTorch's own functions do."""
    return x if layout.placements == tuple(x.placements) else x.redistribute(placements=layout.placements)


def compare(
    name: str, x: Any, layout: MeshLayout, arguments: dict[str, Any], over_rows: bool = False, argument: str = "input"
) -> None:
    """Compare a call with those of the other processes of the mesh, if it exchanges something.

    Processes on several hosts do not compare their calls, because a collective would wait for their GPUs.

    Args:
        name: Name of the public function.
        x: The input, a DTensor.
        layout: Its layout.
        arguments: All other arguments by name.
        over_rows: True where the result is reduced over all rows.
        argument: Name of the argument x.

    Raises:
        ValueError: the processes make different calls, or the local part of a process does not have the shape that
            follows from the global shape and the placements; every process raises this error.
    """
    placements, mesh, local = tuple(x.placements), layout.mesh, x._local_tensor
    exchanges = placements != layout.placements or any(
        placement.is_shard() and (over_rows or placement.dim in layout.dims) for placement in placements
    )
    if not exchanges or torch.compiler.is_compiling() or isinstance(local, FakeTensor):
        return
    groups = [mesh.get_group(i) for i in range(mesh.ndim)]
    if not connected_by_sockets(groups, local.device):
        return
    given = tuple(_described({argument: x, **arguments}.items()))
    fits = numbers_of_all(_announced(name, given), local.shape == layout.box[0], groups, local.device)
    if not all(fits):
        ranks = [rank for rank, fit in enumerate(fits) if not fit]
        raise ValueError(
            f"{name}(): {argument} has shape {layout.shape} and placements {placements}, and the local tensors of the "
            f"processes {ranks} have other shapes than these give; here it is {tuple(local.shape)}"
        )


def _described(arguments: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The arguments, hashable, with the fields of records in their places; the values of tensors are not read."""
    for name, value in arguments:
        if value is None or type(value) in (str, bool, float, torch.dtype):
            yield name, value
        elif hasattr(value, "_fields"):
            yield from _described(zip(value._fields, value, strict=True))
        elif isinstance(value, (int, float)):
            yield name, float(value)
        elif array_kind(value):
            yield name, (kind_of(value), *getattr(value, "placements", ()))
        else:
            yield name, value


@lru_cache(MOST_ENTRIES)
def _announced(name: str, given: tuple[tuple[str, Any], ...]) -> Announcement:
    return Announcement.of(name, dict(given))


def local_of(x: Any, gradient: tuple[Any, ...]) -> Tensor:
    """Returns the local tensor of x.  The gradient of the local tensor has the placements `gradient`."""
    local: Tensor = x.to_local(grad_placements=gradient)
    wait = getattr(local, "wait", None)
    # A redistribution may still be under way.
    return local if wait is None else wait()
