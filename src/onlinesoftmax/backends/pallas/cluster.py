"""Strategy `cluster`: the blocks of a thread-block cluster hold one row, and read each other's states.

These kernels go through Mosaic GPU, not Triton: bulk copies bring a slice of a row to shared memory and take it away.
Mosaic has no interpreter for clusters, so what is computed of a slice is in ops.py and state.py, where it is tested
on every machine; here is only who holds which columns, and who waits for whom.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...arrays import Array
from ...candidates.pallas import CLUSTER_THREADS
from ...plan import Plan
from .operands import Operands
from .ops import Op
from .state import State, Tiles


class Cut(NamedTuple):
    """How a block's slice lies in the array: as its row, or as one long vector where rows begin anywhere.

    Slices are of whole 16 bytes, all of one length.  The last of a row begins earlier, and a ragged row's first and
    last hold neighbours' elements too: what others count, or is none of this row, is before `before` or after `after`.

    Attributes:
        ragged: Whether rows begin anywhere.
        row: Which row.
        begin, end: Where it begins and ends: in itself, or in the array if ragged.
        first: Where the slice begins, in the same.
        before, after: Of the slice, what counts here.
        length, vector: Elements of a slice, and of 16 bytes.
    """

    ragged: bool
    row: Array
    begin: Array | int
    end: Array | int
    first: Array
    before: Array
    after: Array
    length: int
    vector: int

    @classmethod
    def of(cls, cols: int, vector: int, row: Array, rank: Array, length: int, size: int) -> Cut:
        """The slice of a block."""
        ragged = bool(cols % vector)
        begin = row * cols if ragged else 0
        end = begin + cols
        low, high = begin // vector * vector, -(-end // vector) * vector
        mine = low + rank * length
        first = jnp.minimum(mine, high - length)
        return cls(ragged, row, begin, end, first, jnp.maximum(mine, begin) - first, end - first, length, vector)

    def place(self, array: Any, at: int, columns: int) -> Any:
        """Columns of the slice, in the array."""
        place = pl.ds(self.first + at, columns)
        return array.at[place] if self.ragged else array.at[self.row, place]

    def write(self, slice_: Any, array: Any) -> None:
        """The slice to the array: of a ragged row, what lies in it of the 16 bytes at either end by themselves."""
        from jax.experimental.pallas import mosaic_gpu as mosaic

        if not self.ragged:
            mosaic.copy_smem_to_gmem(slice_, self.place(array, 0, self.length))
            return
        vector, inner = self.vector, self.length - 2 * self.vector
        mosaic.copy_smem_to_gmem(slice_.at[pl.ds(vector, inner)], self.place(array, vector, inner))
        for end in (0, self.length - vector):
            for at in range(end, end + vector):
                place = self.first + at

                @pl.when((place >= self.begin) & (place < self.end))
                def _(at: int = at, place: Array = place) -> None:
                    array[place] = slice_[at]


WRITTEN_ELEMENTS = 32
"""Elements that a thread writes between two barriers."""


def cluster_kernel(*refs: Any, operands: Operands, length: int, size: int) -> None:
    """One block: `length` neighbouring columns of a row, in its shared memory; `size` blocks a row.

    Chosen: rows that one program's registers do not hold, on Hopper and later.
    Bytes: one read, one write; states travel through distributed shared memory.
    Limits: logits alone, without what is fused at load.
    """
    from jax.experimental.pallas import mosaic_gpu as mosaic

    op, inputs = operands.op, 2 if operands.op.sums else 1
    reads, writes = operands.sides(refs[: -inputs - 4])
    slices, (states_m, states_l, loaded, arrived) = refs[-inputs - 4 : -4], refs[-4:]
    row, rank = jax.lax.axis_index("row"), jax.lax.axis_index("rank")
    vector = 16 // slices[0].dtype.itemsize
    cut = Cut.of(operands.cols, vector, row, rank, length, size)
    for x, slice_ in zip(reads[:inputs], slices, strict=True):
        mosaic.copy_gmem_to_smem(cut.place(x, 0, length), slice_, loaded, oob_mode=mosaic.OOBFillMode.PROMISE_IN_BOUNDS)
    mosaic.barrier_wait(loaded)

    # A tile is 16 bytes a thread; the last begins earlier as well.
    tile = CLUSTER_THREADS * vector
    whole = length // tile * tile
    last = [length - tile] if whole < length else []

    def layout(columns: int) -> Any:
        return mosaic.Layout.WG_STRIDED((columns,), vec_size=vector)

    def held(at: int | Array, columns: int = tile) -> tuple[Array, Array]:
        """The columns of the slice from one on."""
        a, *b = (mosaic.layout_cast(slice_[pl.ds(at, columns)], layout(columns)) for slice_ in slices)
        return a, b[0] if b else a

    def counting(at: int) -> tuple[Array, Array]:
        """A tile, without what counts elsewhere."""
        column = mosaic.broadcasted_iota(jnp.int32, (tile,), 0, layout=layout(tile))
        here = column >= jnp.maximum(cut.before - at, -at % tile)
        if cut.ragged:
            here &= column < cut.after - at
        nothing = 0 if op.sums else -jnp.inf
        a, b = (jnp.where(here, t, jnp.asarray(nothing, t.dtype)) for t in held(at))
        return a, b

    if op.reduces:
        # Of the tiles, the first holds what others count, the last what it shares with the one before.
        first, ends = int(cut.ragged or size * length > operands.cols), int(cut.ragged and not last)
        edges = sorted({*[0][:first], *[length - tile][: ends + len(last)]})
        inner = range(first, max(first, whole // tile - ends))
        parts = Tiles([partial(counting, at) for at in edges], lambda i: held(i * tile), inner.start, inner.stop)
        with jax.enable_x64(op.exact):
            state = op.of_tiles(parts, operands.accumulator)
            if size > 1:
                state = _of_cluster(state, op, states_m, states_l, arrived, size)
            state = tuple(part.astype(operands.accumulator) for part in state)
    else:
        state = reads[inputs][row], reads[inputs + 1][row]
    if op.per_row:

        @pl.when(rank == 0)
        def _() -> None:
            for ref, part in zip(writes, op.parts(state), strict=True):
                ref[row] = part
    else:
        term = op.term(state)

        def write(at: int, tiles: tuple[Array, Array]) -> None:
            a, b = (t.astype(operands.accumulator) for t in tiles)
            y = op.finish(a, b, term)
            slices[0][pl.ds(at, y.size)] = y.astype(slices[0].dtype)

        # Read before what it shares with the tile before it is written.
        kept = [held(at) for at in last]
        # Mosaic has a barrier before and after what is written, so it is much at a time.
        for at in range(0, whole, CLUSTER_THREADS * WRITTEN_ELEMENTS):
            write(at, held(at, min(CLUSTER_THREADS * WRITTEN_ELEMENTS, whole - at)))
        for at, tiles in zip(last, kept, strict=True):
            write(at, tiles)
        mosaic.commit_smem()
        cut.write(slices[0], writes[0])
    if op.reduces and size > 1:
        # None leaves while another may still read its state.
        mosaic.barrier_arrive(arrived)
        mosaic.barrier_wait(arrived)
    mosaic.wait_smem_to_gmem(0)


def _of_cluster(state: State, op: Op, states_m: Any, states_l: Any, arrived: Any, size: int) -> State:
    """The state of a row, from those of its slices: as many times as there are threads, which is how one is sent."""
    from jax.experimental.pallas import mosaic_gpu as mosaic

    layout = mosaic.Layout.WG_STRIDED((CLUSTER_THREADS,), vec_size=1)
    for ref, part in zip((states_m, states_l), state, strict=True):
        ref[...] = mosaic.layout_cast(jnp.full((CLUSTER_THREADS,), part), layout)
    # A few threads arrive for all, so all must have stored.
    mosaic.commit_smem()
    mosaic.barrier_arrive(arrived)
    mosaic.barrier_wait(arrived)
    found = [
        tuple(
            mosaic.layout_cast(mosaic.cluster_ref(ref, {"rank": jnp.int32(rank)})[...], layout)
            for ref in (states_m, states_l)
        )
        for rank in range(size)
    ]
    m, l = op.merge_slices(found)
    return jnp.max(m), jnp.max(l)


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """The operation on matrices."""
    from jax.experimental.pallas import mosaic_gpu as mosaic

    op, size, length = operands.op, plan.splits, plan.block
    inputs = 2 if op.sums else 1
    shapes = out
    if operands.cols % (16 // arrays[0].dtype.itemsize):
        arrays = [t.reshape(-1) for t in arrays]
        out = [jax.ShapeDtypeStruct((to.size,), to.dtype) for to in out]
    dtypes = operands.accumulator, op.slice_dtype(operands.accumulator)
    with jax.enable_x64(op.exact):
        states = [mosaic.SMEM((CLUSTER_THREADS,), dtype) for dtype in dtypes]
    kernel = mosaic.kernel(
        partial(cluster_kernel, operands=operands, length=length, size=size),
        out_type=tuple(out), grid=(operands.rows,), grid_names=("row",), cluster=(size,), cluster_names=("rank",),
        scratch_types=[
            *(mosaic.SMEM((length,), t.dtype) for t in arrays[:inputs]), *states,
            mosaic.Barrier(num_arrivals=inputs), mosaic.ClusterBarrier(collective_axes=("rank",)),
        ],
        compiler_params=mosaic.CompilerParams(
            # Its exp is off by some units, which 16 bits do not show.
            approx_math=arrays[0].dtype.itemsize == 2, lowering_semantics=mosaic.LoweringSemantics.Warpgroup,
        ),
        kernel_name="onlinesoftmax_cluster",
    )  # fmt: skip
    result: list[Array] = list(kernel(*arrays))
    return [y.reshape(to.shape) for y, to in zip(result, shapes, strict=True)]
