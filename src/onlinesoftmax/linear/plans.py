"""The plan of a head without logits: how many tokens or columns of the logits exist at a time.

    stored    all logits exist once, and their gradient replaces them
    tokens    the logits of a chunk of tokens; the gradient of the weight is added up in float32
    columns   a chunk of columns for all tokens; each slice of the gradient of the weight is complete, and rounded once

A product is one of input × weight, gradient × weight and gradient × input.  `columns` makes the logits again for its
second sweep, which is one product more.  So does a loss of each token that needs whole rows, in its backward pass.

Until the gradient of the weight is written, logits may lie in its memory: the last columns of a first chunk of tokens,
which may be all tokens, or the first chunks of columns, which are then not made again.

Each chunk of tokens reads and writes the float32 sum, 8 bytes an element of the weight.  The last product cannot write
the finished sum in 16 bits, so a conversion follows: PyTorch's addmm refuses a float32 sum with a result of 16 bits
(`_addmm_dtype_out_cuda` of 2.13), and cublasGemmEx adds to the tensor that it writes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..core.task import ITEMSIZE
from ..core.units import size
from .problem import LinearProblem, ceil, row_bytes

Name = Literal["stored", "tokens", "columns"]

CHUNK_BYTES = 1_100_000_000
"""Bytes of logits where the caller does not bound the memory; what `_room` says comes on top."""

COLUMN_BYTES = 256 << 20
"""Bytes of the logits of a chunk of columns.

Chunks of 32 MB, which stay in the L2 cache of an H100, were slower, because their products are small and their launches
many: 1.5 times the time of four products, for 8192 tokens, 4096 hidden and 128256 classes.
"""

FEWEST_COLUMNS = 256
"""The number of chunks is that which chunks of at least so many columns give; evened out, a chunk can be smaller.

With fewer, a product does not fill a GPU.
"""

TOKEN_TILE, COLUMN_TILE = 128, 64
"""Tokens and columns of a tile of a product."""

FEWEST_TOKENS = 1024
"""Fewest tokens of a chunk with a float32 sum of 16-bit products; with fewer, columns are faster.

By bytes and operations, such chunks add 0.24 of three products on an H200 and 0.34 on an H100.  Columns that make all
logits again take 0.33 more, and read the logits once more.  Where they make fewer again, `_fewest_tokens` returns more.
"""

READ_AGAIN = 0.15
"""Least cost of columns, in products: the second read of the logits, and the sums of the input's gradient."""


class LinearPlan(NamedTuple):
    """How the logits of a head are cut.

    Attributes:
        name: "stored", "tokens" or "columns".
        chunk: Tokens or columns of a chunk.
        chunks: Number of chunks.
        products: Number of products of tokens × hidden × classes, forward and backward together; not a whole number
            where the logits of some classes are made again.
        bytes: Bytes of all buffers beside the results and the gradients.
        keeps: True where the logits stay from the forward to the backward pass.
        reason: One sentence: why this plan.
        apart: Number of columns that lie in the memory of the gradient of the weight: with "columns", those of the
            first chunks; else the last ones of the first chunk.
        first: With "tokens", number of tokens of the first chunk, if it is larger because of these columns; else 0.
    """

    name: Name
    chunk: int
    chunks: int
    products: float
    bytes: int
    keeps: bool
    reason: str
    apart: int = 0
    first: int = 0

    def __str__(self) -> str:
        return f"{self.name}{f', {self.cut}' if self.chunks > 1 else ''}, {self.counted}"

    @property
    def cut(self) -> str:
        """The number and the size of the chunks, in words."""
        what = "columns" if self.name == "columns" else "tokens"
        if self.chunks == 1:
            return f"1 chunk of {self.chunk} {what}"
        if self.first:
            return f"{self.chunks} chunks: {self.first} {what}, then {self.chunk} each"
        return f"{self.chunks} chunks of {self.chunk} {what}"

    @property
    def counted(self) -> str:
        """The number of products, in words."""
        return in_words(self.products)

    def told(self, tokens: int, classes: int, dtype: str) -> str:
        """The plan with the number of classes, for the log and for reports; and the bytes of logits that all exist."""
        stored = self.name == "stored" and isinstance(tokens, int)  # under torch.compile, tokens may be a symbol
        held = f"; all logits at once, {size(tokens * row_bytes(classes, ITEMSIZE[dtype]))}" if stored else ""
        return f"{self} with {classes} classes{held}"


def in_words(products: float) -> str:
    """A number of products, rounded to three digits."""
    return "1 product" if round(products, 2) == 1 else f"{products:.3g} products"


class Candidate(NamedTuple):
    """A plan that a call could take, or the reason why it cannot.

    Attributes:
        name: Its name.
        plan: The plan; None where the call has none of this name.
        reason: One sentence: why it was not chosen; empty for one that can run.
    """

    name: Name
    plan: LinearPlan | None
    reason: str


def plan_of(problem: LinearProblem, memory: int | None) -> LinearPlan:
    """The plan of a problem whose buffers take at most `memory` bytes; None for the usual ones.

    Raises:
        ValueError: no plan fits; the message says what the smallest chunk takes.
    """
    return plans_of(problem, memory)[0]


def plans_of(problem: LinearProblem, memory: int | None) -> tuple[LinearPlan, tuple[Candidate, ...]]:
    """The plan of a problem, and the others with the reasons why they were not chosen.

    Raises:
        ValueError: as for `plan_of`.
    """
    stored, tokens, columns = (make(problem, memory) for make in (_stored, _tokens, _columns))
    fewest = _fewest_tokens(problem, columns.plan)
    slow = tokens.plan is not None and (problem.waits or _tokens_at_once(problem, tokens.plan) < fewest)
    order = (stored, columns, tokens) if slow else (stored, tokens, columns)
    chosen = next((each for each in order if each.plan and not each.reason), None)
    if chosen is None or chosen.plan is None:
        raise ValueError((tokens if "tokens" in problem.cuts else columns).reason)
    others = [each for each in order if each is not chosen]
    return chosen.plan, tuple(
        each._replace(reason=each.reason or _slower(problem, each, chosen, fewest)) for each in others
    )


def _slower(problem: LinearProblem, other: Candidate, chosen: Candidate, fewest: int) -> str:
    """Why a plan that could run was not chosen; `fewest` is what `_fewest_tokens` returns."""
    if chosen.name == "stored":
        return "all logits fit"
    if other.name == "columns":
        again = 0 if other.plan is None else other.plan.products - problem.products
        return (
            f"the logits would be made again, which is {in_words(again)} more" if again else "it reads the logits twice"
        )
    if problem.waits:
        return "columns make the logits again as well, but do not add up the gradient of the weight over chunks"
    return f"with fewer than {fewest} tokens in a chunk, adding up takes longer than columns do"


def _tokens_at_once(problem: LinearProblem, plan: LinearPlan) -> float:
    """Tokens of a chunk, or their mean where the first chunk is larger."""
    return problem.tokens / plan.chunks if plan.first else plan.chunk


def _fewest_tokens(problem: LinearProblem, columns: LinearPlan | None) -> int:
    """Fewest tokens of a chunk that are faster than columns; a sum in place moves half the bytes."""
    if problem.itemsize >= 4 or not problem.of_weight:
        return TOKEN_TILE
    again = 1.0 if columns is None else columns.products - problem.products
    return round(FEWEST_TOKENS / max(again, READ_AGAIN) / (2 if problem.in_place else 1))


def _room(problem: LinearProblem, memory: int | None, summed: bool) -> int:
    """Most bytes of logits, with or without a float32 sum of the weight's gradient beside them.

    By default, a call may take CHUNK_BYTES and one float32 sum beyond its gradients.  Without that sum, its bytes are
    free for logits; with it, those of the 16-bit gradient are, which is made when the logits are gone.  Logits that are
    kept for the backward pass get CHUNK_BYTES alone.
    """
    if memory is not None:
        return memory - problem.weight_sum_bytes * summed
    if problem.keeps or not problem.weight_sum_bytes:
        return CHUNK_BYTES
    return CHUNK_BYTES + (problem.result_bytes if summed else problem.weight_sum_bytes)


def _stored(problem: LinearProblem, memory: int | None) -> Candidate:
    summed = problem.sums_one_product
    travels, taken = problem.tokens * problem.travel_bytes, problem.logits_bytes + problem.tokens * problem.copied_bytes
    room = _room(problem, memory, summed) - (0 if memory is None else travels)
    products = problem.products + (problem.waits and not problem.keeps)
    needed = taken + travels + problem.weight_sum_bytes * summed
    reason = f"the logits of all tokens take {size(problem.logits_bytes)}"
    if taken > room and (apart := _apart(problem, room, problem.tokens)):
        own = (problem.classes - apart) * problem.itemsize + _beside_two(problem)
        why = f"{reason}, of which {apart} columns lie where the gradient of the weight will be"
        plan = LinearPlan("stored", problem.tokens, 1, products, problem.tokens * own, False, why, apart)
        return Candidate("stored", plan, "")
    plan = LinearPlan("stored", max(problem.tokens, 1), 1, products, needed, problem.keeps, f"{reason}, which fit")
    # Without a bound, a call whose rows cannot be cut runs in any case.
    fits = taken <= room or (memory is None and problem.tokens < 2 and "columns" not in problem.cuts)
    return Candidate("stored", plan, "" if fits else f"{reason}, and the limit is {size(max(room, 0))}")


def _beside_two(problem: LinearProblem) -> int:
    """Bytes for each token beside logits in two tensors: the sum of the input's gradient, and a copy of the input."""
    return problem.hidden * max(problem.itemsize, 4) * problem.of_input + problem.copied_bytes


def _apart(problem: LinearProblem, room: int, tokens: int) -> int:
    """Fewest last columns of the logits of some first tokens that must lie in the memory of the weight's gradient.

    They take the place of the other classes, whose products come last.  0 where none may lie there.

    Args:
        problem: The problem.
        room: Most bytes of the other columns.
        tokens: Number of the first tokens; with fewer than all, the memory is that of the sum of several chunks.
    """
    if not problem.in_two or not problem.lends:
        return 0
    summed = problem.weight_sum_bytes if tokens < problem.tokens else 0
    bytes_of_class = (summed or problem.result_bytes) // problem.classes
    own = room // tokens - _beside_two(problem)
    first = own // problem.itemsize // COLUMN_TILE * COLUMN_TILE
    apart = problem.classes - first
    fits = tokens * apart * problem.itemsize <= first * bytes_of_class
    return apart if first > 0 and apart > 0 and fits else 0


def _columns_of(problem: LinearProblem, fits: int) -> tuple[int, int]:
    """(columns of a chunk, columns held: those of first chunks that fit where the gradient of the weight will be).

    Args:
        problem: The problem.
        fits: Most columns of a chunk.
    """
    # Rounding up to whole tiles may add one.
    chunks = ceil(problem.classes, max(fits - COLUMN_TILE, FEWEST_COLUMNS))
    chunk = min(problem.classes, ceil(ceil(problem.classes, chunks), COLUMN_TILE) * COLUMN_TILE)
    if not problem.lends or chunk * problem.itemsize % 16:
        return chunk, 0
    held = problem.classes * problem.hidden // max(problem.tokens, problem.hidden)
    # The last chunk may be smaller; its rows must be whole 16 bytes too.
    if held == problem.classes and held % chunk * problem.itemsize % 16 == 0:
        return chunk, held
    # A whole number of chunks fills this memory, unless they would be much smaller for it.
    whole = held // max(ceil(held, max(fits, 1)), 1) // COLUMN_TILE * COLUMN_TILE if held < problem.classes else 0
    chunk = whole if 10 * whole >= 8 * chunk else chunk
    return chunk, held // chunk * chunk


def _tokens(problem: LinearProblem, memory: int | None) -> Candidate:
    if "tokens" not in problem.cuts:
        return Candidate("tokens", None, "columns give the gradient of the weight without a float32 sum")
    tokens = max(problem.tokens, 1)
    of_row = row_bytes(problem.classes, problem.itemsize)
    token_bytes = max(of_row + problem.copied_bytes + problem.travel_bytes, 1)
    fits = _room(problem, memory, True) // token_bytes
    if fits < 1 and memory is not None:
        beside = " with the gradient of the weight" if problem.weight_sum_bytes else ""
        needed = token_bytes + problem.weight_sum_bytes
        return Candidate("tokens", None, f"memory is {memory} bytes, and one token{beside} takes {needed}")
    if tokens == 1:
        return Candidate("tokens", None, "one token is no more than a chunk")
    # One chunk would be the plan `stored`.
    fits = max(min(fits, tokens - 1), 1)
    most = max(fits // TOKEN_TILE * TOKEN_TILE or fits, 1)
    chunk, first, apart = _chunk_of_tokens(problem, _room(problem, memory, True), most)
    needed = max(chunk * token_bytes, first * ((problem.classes - apart) * problem.itemsize + _beside_two(problem)))
    chunks, why = ceil(tokens - first, chunk) + (first > 0), _why(problem)
    if first:
        why += f", and {apart} columns of the first chunk lie where the gradient of the weight will be"
    products, needed = problem.products + problem.waits, needed + problem.weight_sum_bytes
    return Candidate("tokens", LinearPlan("tokens", chunk, chunks, products, needed, False, why, apart, first), "")


def _chunk_of_tokens(problem: LinearProblem, room: int, most: int) -> tuple[int, int, int]:
    """(tokens of a chunk, of a larger first one or 0, columns apart of the first) with at most `most` of a chunk."""
    tokens, chunk = problem.tokens, most
    # The fewest chunks, of which the first, whose products are the fastest, is as large as it can be.
    for others in range(1, ceil(tokens, most) - 1) if problem.in_two and problem.lends else ():
        if apart := _apart(problem, room, tokens - others * chunk):
            while chunk > TOKEN_TILE and (more := _apart(problem, room, tokens - others * (chunk - TOKEN_TILE))):
                apart, chunk = more, chunk - TOKEN_TILE
            return chunk, tokens - others * chunk, apart
    # Whole tiles where there are several, and chunks of nearly one size, so that the last is not a small product.
    chunk = ceil(tokens, ceil(tokens, most))
    whole = ceil(chunk, TOKEN_TILE) * TOKEN_TILE
    return min(whole if whole <= most else chunk, tokens), 0, 0


def _columns(problem: LinearProblem, memory: int | None) -> Candidate:
    if "columns" not in problem.cuts:
        return Candidate("columns", None, "the result of a token needs the whole row of its logits")
    column_bytes = max(problem.tokens * problem.itemsize, 1)
    # With a float32 sum beside it, the gradient of the input can hold the copy of the input until it is rounded.
    holds_copy = problem.itemsize < 4 and not problem.travels and problem.of_input
    copied = problem.hidden * problem.itemsize * (problem.of_weight and not holds_copy)
    beside = problem.input_sum_bytes + problem.tokens * copied
    most = COLUMN_BYTES if memory is None else min(COLUMN_BYTES, memory - beside)
    chunk, held = _columns_of(problem, most // column_bytes)
    needed = problem.tokens * row_bytes(chunk, problem.itemsize) + beside
    again = problem.classes if problem.recorded else 0
    products, why = problem.products + (again - held) / max(problem.classes, 1), _why(problem)
    if held:
        why += f", of which {held} columns lie where the gradient of the weight will be"
    plan = LinearPlan("columns", chunk, ceil(problem.classes, chunk), products, needed, False, why, held)
    if memory is not None and needed > memory:
        reason = f"memory is {memory} bytes, and {chunk} columns of all tokens take {needed}"
        return Candidate("columns", None, reason)
    return Candidate("columns", plan, "")


def _why(problem: LinearProblem) -> str:
    return f"the logits of all tokens would take {size(problem.logits_bytes)}"
