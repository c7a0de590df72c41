"""The softmax family over an iterable of chunks.

The states of the chunks merge into the state of the row. With the state of the row, each chunk can be
normalised on its own. So a row of any length needs memory for one chunk only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..core.arrays import Array
from ..core.state import State
from ..ops import FORWARD, OPERATIONS

STREAMED: tuple[str, ...] = tuple(name for name in FORWARD if hasattr(State, name))
"""Operations that run over chunks: those that `State` has as methods."""

PER_ELEMENT: tuple[str, ...] = tuple(name for name in STREAMED if not OPERATIONS[name].per_row)
"""Operations of STREAMED that return one chunk for each input chunk."""


def state_of_chunks(chunks: Iterable[Array], dim: int = -1) -> State:
    """Return the state of one row, or of many rows at once, that arrive in chunks.

    The function holds at most one chunk and log2(number of chunks) states in memory.

    Args:
        chunks: Floating-point NumPy, torch or JAX arrays of one library; at least one. Their shapes may differ along
            `dim` only. A float64 chunk does not go with chunks of narrower dtypes.
        dim: Dimension along which the rows were cut. The function reduces this dimension.

    Returns:
        The state that `State.of` returns for the concatenated chunks, up to rounding.

    Raises:
        ValueError: there are no chunks, or a chunk does not fit the first one.
        TypeError: `chunks` is not iterable, or a chunk is not a floating-point array.
        IndexError: dim is out of range.

    Example:
        >>> import numpy as np
        >>> state = state_of_chunks(np.full(1000, k, np.float32) for k in range(3))
        >>> round(float(state.logsumexp()), 4)  # log(1000 * (exp(0) + exp(1) + exp(2)))
        9.3154
    """
    # States merge like the carries of a binary counter. The merges form a balanced tree, so the rounding
    # error grows with the logarithm of the number of chunks.
    states: list[State] = []
    for count, chunk in enumerate(_iterator("state_of_chunks: chunks", chunks), 1):
        state = State.of(chunk, dim)
        m = states[0].m if states else state.m
        if (state.m.shape, state.m.dtype) != (m.shape, m.dtype):
            raise ValueError(
                f"state_of_chunks: chunk {count - 1} of shape {tuple(chunk.shape)} and dtype {chunk.dtype} does not "
                f"fit the chunks before it, whose states have shape {tuple(m.shape)} and dtype {m.dtype}"
            )
        states.append(state)
        trailing_zeros = (count & -count).bit_length() - 1
        for _ in range(trailing_zeros):
            right = states.pop()
            states.append(states.pop().merge(right))
    if not states:
        raise ValueError("state_of_chunks: there are no chunks")
    return State.merge_all(states)


def softmax_chunks(
    chunks: Callable[[], Iterable[Array]], dim: int = -1, *, operation: str = "softmax"
) -> Iterator[Array]:
    """Yield the softmax or log-softmax of rows that arrive in chunks: one output chunk for each input chunk.

    Args:
        chunks: Function that returns the chunks, as `state_of_chunks` takes them. It is called twice and must
            return the same chunks both times: the first pass computes the state, the second pass the results. An
            iterator that the first pass has used up is an error.
        dim: Dimension along which the rows were cut. The function normalises along this dimension.
        operation: "softmax" or "log_softmax".

    Yields:
        Arrays with the kind, shape and dtype of the input chunks. They are computed in float32, or in float64
        for float64 input.

    Raises:
        ValueError: there are no chunks, a chunk does not fit the others, the second pass has other chunks than the
            first, or the operation is unknown.
        TypeError: `chunks` is no function that returns an iterable, or a chunk is not a floating-point array.
        IndexError: dim is out of range.

    Source:
        The two-pass algorithm of Milakov and Gimelshein, arXiv:1805.02867.

    Example:
        >>> import numpy as np
        >>> row = np.arange(10, dtype=np.float32)
        >>> parts = softmax_chunks(lambda: np.array_split(row, 3))
        >>> round(float(np.concatenate(list(parts)).sum()), 6)
        1.0
    """
    if operation not in PER_ELEMENT:
        names = " or ".join(map(repr, PER_ELEMENT))
        raise ValueError(f"softmax_chunks: unknown operation {operation!r}; it must be {names}")
    if not callable(chunks):
        raise TypeError(
            f"softmax_chunks: chunks must be a function that returns the chunks, not {type(chunks).__name__}"
        )
    sizes: list[int] = []
    first = chunks()
    state = state_of_chunks(_measured(_iterator("softmax_chunks: chunks()", first), dim, sizes), dim)
    second, left = chunks(), sum(sizes)
    if second is first and iter(second) is second:
        raise ValueError("softmax_chunks: chunks() returned one iterator twice; it must return a new one in every call")
    for chunk in second:
        result = getattr(state, operation)(chunk)
        left -= _size(chunk, dim)
        if left < 0:
            break
        yield result
    if left:
        raise ValueError(
            f"softmax_chunks: the second call of chunks() returned {'fewer' if left > 0 else 'more'} elements than the "
            f"first, which returned {sum(sizes)} along dim {dim}; every call must return the same chunks"
        )


def _iterator(what: str, chunks: Iterable[Array]) -> Iterator[Array]:
    try:
        return iter(chunks)
    except TypeError:
        raise TypeError(f"{what} must be an iterable of arrays, not {type(chunks).__name__}") from None


def _measured(chunks: Iterable[Array], dim: int, sizes: list[int]) -> Iterator[Array]:
    """The chunks; appends the size of each along `dim` to `sizes`."""
    for chunk in chunks:
        yield chunk
        sizes.append(_size(chunk, dim))


def _size(chunk: Array, dim: int) -> int:
    return int(chunk.shape[dim]) if chunk.ndim else 1
