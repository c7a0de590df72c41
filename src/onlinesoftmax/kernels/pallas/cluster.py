"""Strategy `cluster`: the blocks of a thread-block cluster hold one row, and read each other's states.

These kernels go through Mosaic GPU, not Triton: bulk copies bring a slice of a row to shared memory and take it away.
Mosaic has no interpreter for clusters, so what is computed of a slice is in ops.py and state.py, and how a row is cut
in cut.py, where it is tested on every machine; here is only who holds which columns, and who waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from ...core.arrays import Array
from ...planner.plan import Plan
from ...planner.strategies.pallas import CLUSTER_THREADS
from .cut import Cut, pieces_of
from .operands import Operands
from .ops import Op, Term
from .state import State, Tiles

WRITTEN_ELEMENTS = 32
"""Elements that a thread writes between two barriers."""


class Slice(NamedTuple):
    """A block's columns in shared memory, in tiles of 16 bytes a thread; the last begins earlier, as slices do.

    They arrive in pieces of whole tiles, each of which is reduced while others are on their way, and leave in the same.

    Attributes:
        op: What is done with them.
        refs: Those of each input; the output takes the place of the first.
        cut: Where they lie in the array.
        accumulator: The dtype that is computed in.
        pieces: Where each piece begins and ends.
        loaded: A barrier for each piece.
    """

    op: Op
    refs: tuple[Any, ...]
    cut: Cut
    accumulator: Any
    pieces: Sequence[tuple[int, int]]
    loaded: Any

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
        first, end = self.cut.counted(at, self.tile)
        here = column >= first
        if self.cut.ragged:
            here &= column < end
        nothing = 0 if self.op.sums else -jnp.inf
        a, b = (jnp.where(here, t, jnp.asarray(nothing, t.dtype)) for t in self.held(at, self.tile))
        return a, b

    def tiles(self, piece: int, overlap: bool) -> Tiles:
        """All of a piece, each column once; `overlap` where some of the slice count in the one before."""
        edges, inner = self.cut.tiles(*self.pieces[piece], self.tile, overlap)
        return Tiles(
            [partial(self.counted, at) for at in edges], lambda i: self.held(i * self.tile, self.tile),
            inner.start, inner.stop,
        )  # fmt: skip

    def load(self, arrays: tuple[Any, ...]) -> None:
        """Have its pieces brought here."""
        for piece, (start, stop) in enumerate(self.pieces):
            for array, ref in zip(arrays, self.refs, strict=True):
                mosaic.copy_gmem_to_smem(
                    self.cut.place(array, start, stop - start), ref.at[pl.ds(start, stop - start)],
                    self.loaded.at[piece], oob_mode=mosaic.OOBFillMode.PROMISE_IN_BOUNDS,
                )  # fmt: skip

    def state(self, overlap: bool) -> State:
        """Its state, from those of its pieces."""
        states = []
        for piece in range(len(self.pieces)):
            mosaic.barrier_wait(self.loaded.at[piece])
            with jax.enable_x64(self.op.exact):
                states.append(self.op.of_tiles(self.tiles(piece, overlap), self.accumulator))
        with jax.enable_x64(self.op.exact):
            m, l = self.op.merge_slices(states) if len(states) > 1 else states[0]
            return m, l.astype(self.op.slice_dtype(self.accumulator))

    def finish(self, term: Term, array: Any) -> None:
        """Put the output in place of the first input and take it away: what is not whole 16 bytes by elements."""
        at, columns = self.cut.whole
        for piece, (start, stop) in enumerate(self.pieces):
            if not self.op.reduces:
                mosaic.barrier_wait(self.loaded.at[piece])
            self._finish(start, stop, term)
            mosaic.commit_smem()
            begin, end = max(start, at), min(stop, at + columns)
            there = self.cut.place(array, begin, end - begin)
            mosaic.copy_smem_to_gmem(self.refs[0].at[pl.ds(begin, end - begin)], there)
        layout = mosaic.Layout.WG_STRIDED((CLUSTER_THREADS,), vec_size=1)
        for edge in self.cut.edges(CLUSTER_THREADS):
            # One a thread.
            y = mosaic.layout_cast(self.refs[0][pl.ds(edge, CLUSTER_THREADS)], layout)
            self.cut.place(array, edge, CLUSTER_THREADS)[...] = y

    def _finish(self, start: int, stop: int, term: Term) -> None:
        """Put the output of a piece in its place."""
        # Read before what it shares with the tile before it is written.
        last = self.held(stop - self.tile, self.tile) if stop % self.tile else None
        whole = stop // self.tile * self.tile
        # Mosaic has a barrier before and after what is written, so it is much at a time.
        most = CLUSTER_THREADS * WRITTEN_ELEMENTS
        for at in range(start, whole, most):
            self._write(at, self.held(at, min(most, whole - at)), term)
        if last:
            self._write(stop - self.tile, last, term)

    def _write(self, at: int, pair: tuple[Array, Array], term: Term) -> None:
        a, b = (t.astype(self.accumulator) for t in pair)
        self.refs[0][pl.ds(at, a.size)] = self.op.finish(a, b, term).astype(self.refs[0].dtype)


def cluster_kernel(*refs: Any, operands: Operands, length: int, size: int, pieces: Sequence[tuple[int, int]]) -> None:
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
    slice_ = Slice(op, held, cut, operands.accumulator, pieces, loaded)
    slice_.load(reads[:inputs])
    if op.reduces:
        state = slice_.state(size * length > operands.cols)
        with jax.enable_x64(op.exact):
            if size > 1:
                state = _of_cluster(state, op, states_m, states_l, arrived, size)
            state = tuple(part.astype(operands.accumulator) for part in state)
    if op.per_row:

        @pl.when(rank == 0)
        def _() -> None:
            for ref, part in zip(writes, op.parts(state), strict=True):
                ref[row] = part
    else:
        slice_.finish(op.term(state) if op.reduces else op.given(*(ref[row] for ref in reads[inputs:])), writes[0])
    if op.reduces and size > 1:
        # None leaves while another may still read its state.
        mosaic.barrier_wait(arrived)
    mosaic.wait_smem_to_gmem(0, wait_read_only=True)


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
    state = jnp.max(m), jnp.max(l)
    # All threads have met in these reductions, and so have read.
    mosaic.barrier_arrive(arrived)
    return state


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """The operation on matrices."""
    op, size, length = operands.op, plan.splits, plan.block
    inputs = 2 if op.sums else 1
    dtypes = operands.accumulator, op.slice_dtype(operands.accumulator)
    itemsize = arrays[0].dtype.itemsize
    # A piece costs a reduction, which is worth it where it is stored while others are finished.
    pieces = [(0, length)] if op.per_row else pieces_of(length, CLUSTER_THREADS * (16 // itemsize), itemsize * inputs)
    with jax.enable_x64(op.exact):
        states = [mosaic.SMEM((CLUSTER_THREADS,), dtype) for dtype in dtypes]
    kernel = mosaic.kernel(
        partial(cluster_kernel, operands=operands, length=length, size=size, pieces=pieces),
        out_type=tuple(out), grid=(operands.rows,), grid_names=("row",), cluster=(size,), cluster_names=("rank",),
        scratch_types=[
            *(mosaic.SMEM((length,), t.dtype) for t in arrays[:inputs]), *states,
            mosaic.Barrier(num_arrivals=inputs, num_barriers=len(pieces)),
            mosaic.ClusterBarrier(collective_axes=("rank",)),
        ],
        compiler_params=mosaic.CompilerParams(
            # Its exp is off by some units, which 16 bits do not show.
            approx_math=itemsize == 2, lowering_semantics=mosaic.LoweringSemantics.Warpgroup,
        ),
        kernel_name="onlinesoftmax_cluster",
    )  # fmt: skip
    result: list[Array] = list(kernel(*arrays))
    return result
