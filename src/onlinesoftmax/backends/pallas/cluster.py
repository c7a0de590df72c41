"""Strategy `cluster`: the blocks of a thread-block cluster hold one row, and read each other's states.

These kernels go through Mosaic GPU, not Triton: bulk copies bring a slice of a row to shared memory and take it away.
Mosaic has no interpreter for clusters, so what is computed of a slice is in ops.py and state.py, and how a row is cut
in cut.py, where it is tested on every machine; here is only who holds which columns, and who waits for whom.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from ...arrays import Array
from ...candidates.pallas import CLUSTER_THREADS
from ...plan import Plan
from .cut import Cut
from .operands import Operands
from .ops import Op, Term
from .state import State, Tiles

WRITTEN_ELEMENTS = 32
"""Elements that a thread writes between two barriers."""


class Slice(NamedTuple):
    """A block's columns in shared memory, in tiles of 16 bytes a thread; the last begins earlier, as slices do.

    Attributes:
        op: What is done with them.
        refs: Those of each input; the output takes the place of the first.
        cut: Where they lie in the array.
        accumulator: The dtype that is computed in.
    """

    op: Op
    refs: tuple[Any, ...]
    cut: Cut
    accumulator: Any

    @property
    def tile(self) -> int:
        """Columns of a tile."""
        return CLUSTER_THREADS * self.cut.vector

    def _layout(self, columns: int) -> Any:
        return mosaic.Layout.WG_STRIDED((columns,), vec_size=self.cut.vector)

    def held(self, at: Array | int, columns: int) -> tuple[Array, Array]:
        """(a, b) of columns from one on."""
        a, *b = (mosaic.layout_cast(ref[pl.ds(at, columns)], self._layout(columns)) for ref in self.refs)
        return a, b[0] if b else a

    def counted(self, at: int) -> tuple[Array, Array]:
        """A tile, without what counts elsewhere."""
        column = mosaic.broadcasted_iota(jnp.int32, (self.tile,), 0, layout=self._layout(self.tile))
        here = column >= jnp.maximum(self.cut.before - at, -at % self.tile)
        if self.cut.ragged:
            here &= column < self.cut.after - at
        nothing = 0 if self.op.sums else -jnp.inf
        a, b = (jnp.where(here, t, jnp.asarray(nothing, t.dtype)) for t in self.held(at, self.tile))
        return a, b

    def tiles(self, overlap: bool) -> Tiles:
        """All of it, each column once; `overlap` where some count in the slice before."""
        count, shared = divmod(self.cut.length, self.tile)
        first, last = overlap or self.cut.ragged, shared > 0 or self.cut.ragged
        edges = {at for at, is_edge in ((0, first), (self.cut.length - self.tile, last)) if is_edge}
        start, stop = int(first), count - int(last and not shared)
        return Tiles(
            [partial(self.counted, at) for at in sorted(edges)], lambda i: self.held(i * self.tile, self.tile),
            start, max(start, stop),
        )  # fmt: skip

    def finish(self, term: Term) -> None:
        """Put the output in place of the first input."""
        count, shared = divmod(self.cut.length, self.tile)
        # Read before what it shares with the tile before it is written.
        end = self.cut.length - self.tile
        last = self.held(end, self.tile) if shared else None
        # Mosaic has a barrier before and after what is written, so it is much at a time.
        most = CLUSTER_THREADS * WRITTEN_ELEMENTS
        for at in range(0, count * self.tile, most):
            self._write(at, self.held(at, min(most, count * self.tile - at)), term)
        if last:
            self._write(end, last, term)

    def _write(self, at: int, pair: tuple[Array, Array], term: Term) -> None:
        a, b = (t.astype(self.accumulator) for t in pair)
        self.refs[0][pl.ds(at, a.size)] = self.op.finish(a, b, term).astype(self.refs[0].dtype)

    def load(self, arrays: tuple[Any, ...], loaded: Any) -> None:
        """Bring it here."""
        for array, ref in zip(arrays, self.refs, strict=True):
            place = self.cut.place(array, 0, self.cut.length)
            mosaic.copy_gmem_to_smem(place, ref, loaded, oob_mode=mosaic.OOBFillMode.PROMISE_IN_BOUNDS)
        mosaic.barrier_wait(loaded)

    def store(self, array: Any) -> None:
        """Take the output away: what does not lie in whole 16 bytes by elements, one a thread."""
        mosaic.commit_smem()
        at, columns = self.cut.whole
        mosaic.copy_smem_to_gmem(self.refs[0].at[pl.ds(at, columns)], self.cut.place(array, at, columns))
        layout = mosaic.Layout.WG_STRIDED((CLUSTER_THREADS,), vec_size=1)
        for edge in self.cut.edges(CLUSTER_THREADS):
            y = mosaic.layout_cast(self.refs[0][pl.ds(edge, CLUSTER_THREADS)], layout)
            self.cut.place(array, edge, CLUSTER_THREADS)[...] = y


def cluster_kernel(*refs: Any, operands: Operands, length: int, size: int) -> None:
    """One block: `length` neighbouring columns of a row, in its shared memory; `size` blocks a row.

    Chosen: rows that one program's registers do not hold, on Hopper and later.
    Bytes: one read, one write; states travel through distributed shared memory.
    Limits: logits alone, without what is fused at load.
    """
    op, inputs = operands.op, 2 if operands.op.sums else 1
    reads, writes = operands.sides(refs[: -inputs - 4])
    held, (states_m, states_l, loaded, arrived) = refs[-inputs - 4 : -4], refs[-4:]
    row, rank = jax.lax.axis_index("row"), jax.lax.axis_index("rank")
    cut = Cut.of(row, rank, operands.rows, operands.cols, length, 16 // held[0].dtype.itemsize)
    slice_ = Slice(op, held, cut, operands.accumulator)
    slice_.load(reads[:inputs], loaded)
    if op.reduces:
        with jax.enable_x64(op.exact):
            state = op.of_tiles(slice_.tiles(size * length > operands.cols), operands.accumulator)
            if size > 1:
                state = _of_cluster(state, op, states_m, states_l, arrived, size)
            state = tuple(part.astype(operands.accumulator) for part in state)
    if op.per_row:

        @pl.when(rank == 0)
        def _() -> None:
            for ref, part in zip(writes, op.parts(state), strict=True):
                ref[row] = part
    else:
        slice_.finish(op.term(state) if op.reduces else op.given(*(ref[row] for ref in reads[inputs:])))
        slice_.store(writes[0])
    if op.reduces and size > 1:
        # None leaves while another may still read its state.
        mosaic.barrier_arrive(arrived)
        mosaic.barrier_wait(arrived)
    mosaic.wait_smem_to_gmem(0)


def _of_cluster(state: State, op: Op, states_m: Any, states_l: Any, arrived: Any, size: int) -> State:
    """The state of a row, from those of its slices: as many times as there are threads, which is how one is sent."""
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
    op, size, length = operands.op, plan.splits, plan.block
    inputs = 2 if op.sums else 1
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
    return result
