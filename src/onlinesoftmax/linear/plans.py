"""The plan of a head without logits: how many tokens or columns of the logits exist at a time.

    stored    all logits exist once, and their gradient replaces them             three products
    tokens    the logits of a chunk of tokens; the gradient of the weight is      three products; four where
              added up in float32                                                  the gradient has to wait
    columns   a chunk of columns for all tokens; each slice of the gradient of     four products
              the weight is complete, and rounded once

A product is one of input × weight (twice if the logits are made again), gradient × weight and gradient × input.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

CHUNK_BYTES = 1_100_000_000
"""Bytes of the logits of a chunk of tokens, where the caller does not bound the memory.

Each chunk reads and writes the float32 gradient of the weight once, so few chunks are fast.
"""

COLUMN_BYTES = 256 << 20
"""Bytes of the logits of a chunk of columns.

With what the L2 cache of an H100 keeps, 32 MB, products were small and launches many: 1.5 times the time of four
products, for 8192 tokens, 4096 hidden and 128256 classes.
"""

FEWEST_TOKENS = 128
"""Fewest tokens of a chunk: with fewer, reading and writing the weight's gradient takes longer than the product."""

FEWEST_COLUMNS = 256
"""Fewest columns of a chunk: with fewer, a product does not fill a GPU."""


class LinearPlan(NamedTuple):
    """How the logits of a head are cut.

    Attributes:
        name: "stored", "tokens" or "columns".
        chunk: Tokens or columns of a chunk.
        chunks: Number of chunks.
        products: Number of products of tokens × hidden × classes, forward and backward together.
        bytes: Bytes of all buffers beside the results and the gradients.
        reason: One sentence: why this plan.
    """

    name: Literal["stored", "tokens", "columns"]
    chunk: int
    chunks: int
    products: int
    bytes: int
    reason: str


class LinearProblem(NamedTuple):
    """What a plan depends on.

    Attributes:
        tokens, hidden, classes: Sizes of the input and the weight.
        itemsize: Bytes of an element of the logits.
        wide: Bytes of an element of a float32 or float64 sum.
        waits: True where the gradient of each token's result is known only in the backward pass.
        of_input, of_weight: True where the gradient of the input, of the weight is wanted.
        cuts: The plans that may cut the logits, where they do not fit: "tokens" needs whole rows in a chunk, "columns"
            needs statistics that merge.
    """

    tokens: int
    hidden: int
    classes: int
    itemsize: int
    wide: int
    waits: bool
    of_input: bool
    of_weight: bool
    cuts: tuple[str, ...]


def plan_of(problem: LinearProblem, memory: int | None) -> LinearPlan:
    """The plan of a problem whose buffers take at most `memory` bytes.

    Raises:
        ValueError: no plan fits; the message says what the smallest chunk takes.
    """
    tokens, hidden, classes, itemsize, wide, waits, _, of_weight, cuts = problem
    token_bytes, sum_bytes = max(classes * itemsize, 1), classes * hidden * wide * of_weight
    if tokens * token_bytes <= (CHUNK_BYTES if memory is None else memory):
        reason = f"the logits of all {tokens} tokens fit"
        return LinearPlan("stored", max(tokens, 1), 1, 3, tokens * token_bytes, reason)
    fits = (CHUNK_BYTES if memory is None else memory - sum_bytes) // token_bytes
    if "columns" in cuts and (waits or fits < FEWEST_TOKENS):
        columns = _columns(problem, memory)
        if memory is None or columns.bytes <= memory:
            return columns
        if "tokens" not in cuts:
            raise ValueError(
                f"memory is {memory} bytes, and {columns.chunk} columns of all tokens take {columns.bytes}"
            )
    # Whole tiles of a product where there are several, and chunks of one size, so that the last is not a small product.
    chunk = max(fits // FEWEST_TOKENS * FEWEST_TOKENS or fits, 1)
    chunks = _ceil(tokens, chunk)
    chunk = _ceil(tokens, chunks)
    needed = chunk * token_bytes + sum_bytes
    if memory is not None and needed > memory:
        beside = " with the gradient of the weight" if of_weight else ""
        raise ValueError(f"memory is {memory} bytes, and one token{beside} takes {needed}")
    reason = f"the logits of all tokens would take {tokens * token_bytes} bytes"
    return LinearPlan("tokens", chunk, chunks, 3 + waits, needed, reason)


TILE = 64
"""Columns of a tile of a product."""


def _columns(problem: LinearProblem, memory: int | None) -> LinearPlan:
    tokens, hidden, classes, itemsize, wide, waits, of_input = problem[:7]
    column_bytes, sum_bytes = max(tokens * itemsize, 1), tokens * hidden * wide * of_input
    size = COLUMN_BYTES if memory is None else min(COLUMN_BYTES, memory - sum_bytes)
    # Rounding up to whole tiles may add one.
    chunks = _ceil(classes, max(size // column_bytes - TILE, FEWEST_COLUMNS))
    chunk = min(classes, _ceil(_ceil(classes, chunks), TILE) * TILE)
    why = "the gradient is known only in the backward pass" if waits else "a float32 gradient does not fit"
    reason = f"the logits of all tokens do not fit, and {why}"
    return LinearPlan("columns", chunk, _ceil(classes, chunk), 4, chunk * column_bytes + sum_bytes, reason)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
