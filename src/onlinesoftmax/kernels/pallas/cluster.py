"""Strategy `cluster`: the blocks of a thread-block cluster hold one row, and read each other's states.

These kernels are compiled by Mosaic GPU, not by Triton: bulk copies (TMA) move a slice of a row to shared memory and
back.  Mosaic has no interpreter for clusters.  So the arithmetic stands in formulas.py and state.py, and the division
of a row in bounds.py, where it is tested on every machine; this file has the copies and the barriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from ...core.arrays import Array
from ...planner.plan import Plan
from ...planner.strategies.pallas import CLUSTER_THREADS
from .bounds import SliceBounds, pieces_of
from .formulas import Op, RowConstants
from .operands import Operands
from .state import State, Tiles

WRITTEN_ELEMENTS = 32
"""Elements that a thread writes between two barriers."""


class Slice(NamedTuple):
    """A block's slice in shared memory.

    The slice arrives in pieces.  A piece is reduced while later ones are on their way.  An operation that reduces
    nothing also stores it meanwhile.  A tile has 16 bytes for each thread.  A piece is a whole number of tiles; only
    where the slice is not, its last tile overlaps the tile before.

    Attributes:
        op: The operation.
        refs: Shared memory of each input; the output overwrites the first input.
        bounds: Place of the slice in the arrays.
        accumulator: Dtype of the computation.
        pieces: Beginning and end of each piece, in slice columns.
        loaded: One barrier per piece, which opens when the piece has arrived.
    """

    op: Op
    refs: tuple[Any, ...]
    bounds: SliceBounds
    accumulator: Any
    pieces: Sequence[tuple[int, int]]
    loaded: Any

    @property
    def tile(self) -> int:
        """Columns of a tile."""
        return CLUSTER_THREADS * self.bounds.vector

    def _layout(self, columns: int) -> Any:
        return mosaic.Layout.WG_STRIDED((columns,), vec_size=self.bounds.vector)

    def load_from_shared(self, at: Array | int, columns: int) -> tuple[Array, Array]:
        """(a, b) of `columns` slice columns from column `at` on."""
        a, *b = (mosaic.layout_cast(ref[pl.ds(at, columns)], self._layout(columns)) for ref in self.refs)
        return a, b[0] if b else a

    def load_owned(self, at: int) -> tuple[Array, Array]:
        """(a, b) of the tile at column `at`; columns that another block or tile reduces become neutral elements."""
        column = mosaic.broadcasted_iota(jnp.int32, (self.tile,), 0, layout=self._layout(self.tile))
        first, end = self.bounds.owned(at, self.tile)
        owned = column >= first
        if self.bounds.unaligned:
            owned &= column < end
        pair = self.load_from_shared(at, self.tile)
        a, b = (jnp.where(owned, t, jnp.asarray(n, t.dtype)) for t, n in zip(pair, (self.op.neutral, 0.0), strict=True))
        return a, b

    def tiles(self, piece: int, overlap: bool) -> Tiles:
        """The tiles of a piece; `overlap` is True where the slice may overlap the slice before it."""
        edges, inner = self.bounds.tiles(*self.pieces[piece], self.tile, overlap)
        return Tiles(
            [partial(self.load_owned, at) for at in edges],
            lambda i: self.load_from_shared(i * self.tile, self.tile), inner.start, inner.stop,
        )  # fmt: skip

    def start_loads(self, arrays: tuple[Any, ...]) -> None:
        """Start the copies of all pieces to shared memory."""
        for piece, (start, stop) in enumerate(self.pieces):
            for array, ref in zip(arrays, self.refs, strict=True):
                mosaic.copy_gmem_to_smem(
                    self.bounds.place(array, start, stop - start), ref.at[pl.ds(start, stop - start)],
                    self.loaded.at[piece], oob_mode=mosaic.OOBFillMode.PROMISE_IN_BOUNDS,
                )  # fmt: skip

    def state(self, overlap: bool) -> State:
        """The state of the slice, merged from the states of its pieces."""
        states = []
        for piece in range(len(self.pieces)):
            mosaic.barrier_wait(self.loaded.at[piece])
            with jax.enable_x64(self.op.exact):
                states.append(self.op.of_tiles(self.tiles(piece, overlap), self.accumulator))
        with jax.enable_x64(self.op.exact):
            parts = self.op.merge(*states) if len(states) > 1 else states[0]
            dtypes = self.op.slice_dtypes(self.accumulator)
            return tuple(part.astype(dtype) for part, dtype in zip(parts, dtypes, strict=True))

    def store(self, constants: RowConstants, array: Any) -> None:
        """Compute the output in shared memory and copy it to the array; unaligned ends are stored by the threads."""
        at, columns = self.bounds.whole
        for piece, (start, stop) in enumerate(self._stored):
            if not self.op.reduces:
                mosaic.barrier_wait(self.loaded.at[piece])
            self._compute(start, stop, constants)
            mosaic.commit_smem()
            begin, end = max(start, at), min(stop, at + columns)
            there = self.bounds.place(array, begin, end - begin)
            mosaic.copy_smem_to_gmem(self.refs[0].at[pl.ds(begin, end - begin)], there)
        layout = mosaic.Layout.WG_STRIDED((CLUSTER_THREADS,), vec_size=1)
        for end in self.bounds.ends(CLUSTER_THREADS):
            # One element per thread.
            y = mosaic.layout_cast(self.refs[0][pl.ds(end, CLUSTER_THREADS)], layout)
            self.bounds.place(array, end, CLUSTER_THREADS)[...] = y

    @property
    def _stored(self) -> Sequence[tuple[int, int]]:
        """Beginning and end of each part of the slice that is copied to the array as soon as it is computed.

        If the operation reduces the row, the whole slice has arrived.  A part is then as large as one write, so that
        the first bytes leave early.  The last part has at least a whole tile, because its last tile may overlap the
        one before.
        """
        if not self.op.reduces:
            return self.pieces
        most, length = CLUSTER_THREADS * WRITTEN_ELEMENTS, self.pieces[-1][1]
        return list(pairwise([*range(0, max(length - self.tile, 1), most), length]))

    def _compute(self, start: int, stop: int, constants: RowConstants) -> None:
        """Compute the output of a piece in place of the first input."""
        # The last tile overlaps the tile before it, so it is read before that tile is overwritten.
        last = self.load_from_shared(stop - self.tile, self.tile) if stop % self.tile else None
        whole = stop // self.tile * self.tile
        # Mosaic puts a barrier before and after each write, so each write is large.
        most = CLUSTER_THREADS * WRITTEN_ELEMENTS
        for at in range(start, whole, most):
            self._overwrite(at, self.load_from_shared(at, min(most, whole - at)), constants)
        if last:
            self._overwrite(stop - self.tile, last, constants)

    def _overwrite(self, at: int, pair: tuple[Array, Array], constants: RowConstants) -> None:
        a, b = (t.astype(self.accumulator) for t in pair)
        column = None
        if constants.target is not None:
            # The target is given as a column of the slice, and `at` is the first column here.
            column = at + mosaic.broadcasted_iota(jnp.int32, (a.size,), 0, layout=self._layout(a.size))
        self.refs[0][pl.ds(at, a.size)] = self.op.output(a, b, constants, column).astype(self.refs[0].dtype)


def cluster_kernel(*refs: Any, operands: Operands, length: int, size: int, pieces: Sequence[tuple[int, int]]) -> None:
    """One block owns `length` adjacent columns of a row in its shared memory; `size` blocks share the row.

    Chosen: a row does not fit the registers of one program, on compute capability 9.0 or later.
    Bytes: one read, one write; states travel through distributed shared memory.
    Limits: no score options, which would need scores in shared memory.
    """
    op, inputs = operands.op, operands.op.operation.inputs
    exchanged = len(op.slice_dtypes(operands.accumulator))
    *arguments, loaded, arrived = refs
    scratch = len(arguments) - inputs - exchanged
    held, states = tuple(arguments[scratch : scratch + inputs]), tuple(arguments[scratch + inputs :])
    reads, elements, rows = operands.sides(tuple(arguments[:scratch]))
    row, rank = jax.lax.axis_index("row"), jax.lax.axis_index("rank")
    bounds = SliceBounds.of(row, rank, operands.rows, operands.cols, length, 16 // held[0].dtype.itemsize)
    slice_ = Slice(op, held, bounds, operands.accumulator, pieces, loaded)
    slice_.start_loads(reads[:inputs])
    row_values = {
        name: ref[row] for name, ref in zip(op.row_operand_names, operands.row_operand_refs(reads), strict=True)
    }
    if op.reduces and row_values:
        column = jnp.clip(row_values["target"], 0, operands.cols - 1)
        z_target = reads[0][row * operands.cols + column] if bounds.unaligned else reads[0][row, column]
        z_target = z_target.astype(operands.accumulator)
        op = op.at_target(row_values["target"], z_target, operands.cols, row_values.get("dy"))
        slice_ = slice_._replace(op=op)
    if op.reduces:
        state = slice_.state(size * length > operands.cols)
        with jax.enable_x64(op.exact):
            if size > 1:
                state = _merge_cluster(state, op, states, arrived, size)
            state = tuple(part.astype(operands.accumulator) for part in state)
    if rows:

        @pl.when(rank == 0)
        def _() -> None:
            for ref, value in zip(rows, op.row_results(state), strict=True):
                ref[row] = value.astype(ref.dtype)

    for y_ref in elements:
        constants = op.row_constants(state) if op.reduces else op.given_constants(tuple(row_values.values()))
        slice_.store(_in_slice(constants, bounds), y_ref)
    if op.reduces and size > 1:
        # No block leaves while another may still read its state.
        mosaic.barrier_wait(arrived)
    mosaic.wait_smem_to_gmem(0, wait_read_only=True)


def _in_slice(constants: RowConstants, bounds: SliceBounds) -> RowConstants:
    """The constants, with the target as a column of the slice."""
    if constants.target is None:
        return constants
    return constants._replace(target=constants.target + (bounds.row_begin - bounds.first))


def _merge_cluster(state: State, op: Op, refs: tuple[Any, ...], arrived: Any, size: int) -> State:
    """The state of a row, merged from the states of its slices.

    A part of a state is one number in shared memory, which all threads of a warp read at once.  An array with one
    element per thread would mean 128 times as many bytes between the blocks.
    """
    layout = mosaic.Layout.WG_STRIDED((CLUSTER_THREADS,), vec_size=1)
    for ref, part in zip(refs, state, strict=True):
        ref[...] = part
    # A few threads arrive at the barrier for the block, so all threads must have stored before.
    mosaic.commit_smem()
    mosaic.barrier_arrive(arrived)
    mosaic.barrier_wait(arrived)
    found = [
        tuple(mosaic.cluster_ref(ref, {"rank": jnp.int32(rank)})[...] for ref in refs) for rank in range(size)
    ]  # fmt: skip
    # The block must not arrive a second time before all its threads have read the states: the other blocks may then
    # end, and their shared memory with them.  A barrier alone does not wait for loads whose values are used later, and
    # launches failed on an H200.  This maximum over all threads, which all give the same number, uses the values.
    state = tuple(jnp.max(mosaic.layout_cast(jnp.full((CLUSTER_THREADS,), part), layout)) for part in op.merge(*found))
    mosaic.barrier_arrive(arrived)
    return state


def run(operands: Operands, arrays: list[Array], out: list[Any], plan: Plan, interpret: bool) -> list[Array]:
    """Run the operation on matrices."""
    op, size, length, inputs = operands.op, plan.splits, plan.block, operands.op.operation.inputs
    itemsize = arrays[0].dtype.itemsize
    # Each piece costs a reduction of its own, which pays off for operations that write elements.
    tile = CLUSTER_THREADS * (16 // itemsize)
    pieces = pieces_of(length, tile, itemsize * inputs) if op.writes_elements else [(0, length)]
    with jax.enable_x64(op.exact):
        states = [mosaic.SMEM((), dtype) for dtype in op.slice_dtypes(operands.accumulator)]
    kernel = mosaic.kernel(
        partial(cluster_kernel, operands=operands, length=length, size=size, pieces=pieces),
        out_type=tuple(out), grid=(operands.rows,), grid_names=("row",), cluster=(size,), cluster_names=("rank",),
        scratch_types=[
            *(mosaic.SMEM((length,), t.dtype) for t in arrays[:inputs]), *states,
            mosaic.Barrier(num_arrivals=inputs, num_barriers=len(pieces)),
            mosaic.ClusterBarrier(collective_axes=("rank",)),
        ],
        compiler_params=mosaic.CompilerParams(
            # The approximate exp is wrong by a few units of float32.
            approx_math=itemsize == 2 and not (op.exact and op.reduces),
            lowering_semantics=mosaic.LoweringSemantics.Warpgroup,
        ),
        kernel_name="onlinesoftmax_cluster",
    )  # fmt: skip
    result: list[Array] = list(kernel(*arrays))
    return result
