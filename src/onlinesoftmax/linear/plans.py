"""The plan of a head without logits: how many tokens or columns of the logits exist at a time.

    stored    all logits exist once, and their gradient replaces them; the last columns may lie in the memory of the
              gradient of the weight
    tokens    the logits of a chunk of tokens; the gradient of the weight is added up in float32
    columns   a chunk of columns for all tokens; each slice of the gradient of the weight is complete, and rounded once

A product is one of input × weight, gradient × weight and gradient × input.  `columns`, and losses whose gradient has to
wait, make the logits again for the backward pass, which is one product more.

Each chunk of tokens reads and writes the float32 sum, 8 bytes an element of the weight.  No product writes its last
state in 16 bits: PyTorch's addmm refuses a float32 sum with a result of 16 bits (`_addmm_dtype_out_cuda` of 2.13), and
cublasGemmEx adds to the tensor that it writes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..core.task import ITEMSIZE
from ..core.units import size

Name = Literal["stored", "tokens", "columns"]

CHUNK_BYTES = 1_100_000_000
"""Bytes of logits where the caller does not bound the memory; what `_room` says comes on top."""

COLUMN_BYTES = 256 << 20
"""Bytes of the logits of a chunk of columns.

With what the L2 cache of an H100 keeps, 32 MB, products were small and launches many: 1.5 times the time of four
products, for 8192 tokens, 4096 hidden and 128256 classes.
"""

FEWEST_COLUMNS = 256
"""Fewest columns of a chunk: with fewer, a product does not fill a GPU."""

TOKEN_TILE, COLUMN_TILE = 128, 64
"""Tokens and columns of a tile of a product."""

FEWEST_CLASSES, ROW_BYTES = 1024, 128
"""From so many classes on, rows of logits that do not fill 16 bytes take a multiple of so many, for fast products."""

FEWEST_TOKENS = 1024
"""Fewest tokens of a chunk with a float32 sum of 16-bit products; with fewer, columns are faster.

By bytes and operations, such chunks add 0.24 of three products on an H200 and 0.34 on an H100.  Columns take 0.33 more,
and read the logits once more.
"""


class LinearPlan(NamedTuple):
    """How the logits of a head are cut.

    Attributes:
        name: "stored", "tokens" or "columns".
        chunk: Tokens or columns of a chunk.
        chunks: Number of chunks.
        products: Number of products of tokens × hidden × classes, forward and backward together.
        bytes: Bytes of all buffers beside the results and the gradients.
        keeps: True where the logits stay from the forward to the backward pass.
        reason: One sentence: why this plan.
        apart: With "stored", number of last columns that lie in the memory of the gradient of the weight.  The products
            of these classes come first: the gradient of the input, and their part of the gradient of the weight.
    """

    name: Name
    chunk: int
    chunks: int
    products: int
    bytes: int
    keeps: bool
    reason: str
    apart: int = 0

    def __str__(self) -> str:
        cut = f", {self.chunks} chunks of {self.chunk} {self.name}" if self.chunks > 1 else ""
        return f"{self.name}{cut}, {self.products} product{'' if self.products == 1 else 's'}"

    def told(self, tokens: int, classes: int, dtype: str) -> str:
        """The plan with the number of classes, for the log and for reports; and the bytes of logits that all exist."""
        stored = self.name == "stored" and isinstance(tokens, int)  # a trace may have a symbol
        held = f"; all logits at once, {size(tokens * row_bytes(classes, ITEMSIZE[dtype]))}" if stored else ""
        return f"{self} with {classes} classes{held}"


class Candidate(NamedTuple):
    """A plan that was not chosen.

    Attributes:
        name: Its name.
        plan: The plan; None where the call has none of this name.
        reason: One sentence: why it was not chosen.
    """

    name: Name
    plan: LinearPlan | None
    reason: str


class LinearProblem(NamedTuple):
    """What a plan depends on.

    Attributes:
        tokens, hidden, classes: Sizes of the input and the weight.
        dtype: Name of the dtype of input, weight and logits.
        recorded: True where any gradient is wanted.
        waits: True where the gradient of each token's result is known only in the backward pass.
        of_input, of_weight: True where the gradient of the input, of the weight is wanted.
        cuts: The plans that may cut the logits, where they do not fit: "tokens" needs whole rows in a chunk, "columns"
            needs statistics that merge.
        in_place: True where chunks of tokens add up the gradient of the weight in its own memory and dtype.
        travels: True where the gradient of the input is added up over processes, in a float32 buffer.
        in_two: True where a kernel takes rows whose last columns lie in another tensor.
    """

    tokens: int
    hidden: int
    classes: int
    dtype: str
    recorded: bool
    waits: bool
    of_input: bool
    of_weight: bool
    cuts: tuple[str, ...]
    in_place: bool = False
    travels: bool = False
    in_two: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the logits."""
        return ITEMSIZE[self.dtype]

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits of all tokens."""
        return self.tokens * row_bytes(self.classes, self.itemsize)

    @property
    def result_bytes(self) -> int:
        """Bytes of the gradient of the weight."""
        return self.classes * self.hidden * self.itemsize * self.of_weight

    @property
    def weight_sum_bytes(self) -> int:
        """Bytes of the float32 sum of the weight's gradient; none where the gradient is the sum itself."""
        return 4 * self.classes * self.hidden * (self.itemsize < 4 and self.of_weight and not self.in_place)

    @property
    def input_sum_bytes(self) -> int:
        """Bytes of the float32 sum of the input's gradient; none where the gradient is the sum itself."""
        own = 4 * self.hidden * (self.itemsize < 4 and self.of_input)
        return self.tokens * max(own, self.travel_bytes)

    @property
    def copied_bytes(self) -> int:
        """Bytes of a copy of a token's input, without NaN, where no gradient of the input lends its memory for it."""
        return self.hidden * self.itemsize * (self.of_weight and (not self.of_input or self.travels))

    @property
    def sums_one_product(self) -> bool:
        """True where even one product is written in float32.

        It is rounded once by itself, but in float16 it can be infinite before the divisor of a mean comes.
        """
        return self.dtype == "float16" and not self.keeps

    @property
    def travel_bytes(self) -> int:
        """Bytes of the gradient of the input of one token, as it travels."""
        return self.hidden * max(self.itemsize, 4) * (self.travels and self.of_input)

    @property
    def keeps(self) -> bool:
        """True where logits that are stored stay for the backward pass."""
        return self.waits and "columns" in self.cuts

    @property
    def products(self) -> int:
        """Number of products where none makes logits again."""
        return 1 + self.of_input + self.of_weight


class Function(NamedTuple):
    """A public function with a head.

    Attributes:
        loss: Operation whose kernel writes the loss of each row and the gradient of the logits at once; None where the
            gradient follows from STATISTICS.
        waits: True where the gradient of each token's result always waits for the backward pass.
        cuts: As in LinearProblem.
        reductions: Its reductions; none where it has no such argument.
    """

    loss: str | None
    waits: bool
    cuts: tuple[str, ...]
    reductions: tuple[str, ...]


STATISTICS = "token_logprobs"
"""Operation whose results merge over chunks of columns, and whose gradient follows from the merged results."""

FUNCTIONS = {
    "linear_cross_entropy": Function("cross_entropy", False, ("tokens", "columns"), ("mean", "sum", "none")),
    "linear_token_logprobs": Function(None, True, ("columns",), ()),
    "linear_token_loss": Function(None, False, ("tokens",), ("mean", "sum")),
}
"""The functions by name."""


def row_bytes(classes: int, itemsize: int) -> int:
    """Bytes from one row of logits to the next."""
    taken = classes * itemsize
    return taken if taken % 16 == 0 or classes < FEWEST_CLASSES else _ceil(taken, ROW_BYTES) * ROW_BYTES


def problem_of(
    function: str, sizes: tuple[int, int, int], dtype: str, wanted: tuple[bool, bool, bool], each: bool = False,
    whole_rows: bool = False, in_place: bool = False, travels: bool = False,
) -> LinearProblem:  # fmt: skip
    """The problem of a call.

    Args:
        function: Name in FUNCTIONS.
        sizes: Tokens, hidden and classes.
        dtype: Name of the dtype of the logits.
        wanted: True for each gradient that is wanted: of input, weight and bias.
        each: True where the result is a loss of each token, whose gradient waits for the backward pass.
        whole_rows: True where the result of a token needs the whole row of its logits.
        in_place, travels: As in LinearProblem.
    """
    declared, recorded = FUNCTIONS[function], any(wanted)
    waits = recorded and (declared.waits or each)
    cuts = ("tokens",) if whole_rows else declared.cuts
    return LinearProblem(*sizes, dtype, recorded, waits, wanted[0], wanted[1], cuts, in_place, travels)


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
    slow = tokens.plan is not None and (problem.waits or tokens.plan.chunk < _fewest_tokens(problem))
    order = (stored, columns, tokens) if slow else (stored, tokens, columns)
    chosen = next((each for each in order if each.plan and not each.reason), None)
    if chosen is None or chosen.plan is None:
        raise ValueError((tokens if "tokens" in problem.cuts else columns).reason)
    others = [each for each in order if each is not chosen]
    return chosen.plan, tuple(each._replace(reason=each.reason or _slower(problem, each, chosen)) for each in others)


def _slower(problem: LinearProblem, other: Candidate, chosen: Candidate) -> str:
    """Why a plan that could run was not chosen."""
    if chosen.name == "stored":
        return "all logits fit"
    if other.name == "columns":
        return "the logits would be made again, which is one product more"
    if problem.waits:
        return "the logits would be made again, and the gradient of the weight added up in float32"
    return f"with fewer than {_fewest_tokens(problem)} tokens in a chunk, adding up takes longer than a product"


def _fewest_tokens(problem: LinearProblem) -> int:
    """Fewest tokens of a chunk that are faster than columns; a sum in place moves half the bytes."""
    if problem.itemsize >= 4 or not problem.of_weight:
        return TOKEN_TILE
    return FEWEST_TOKENS // 2 if problem.in_place else FEWEST_TOKENS


def _room(problem: LinearProblem, memory: int | None, summed: bool) -> int:
    """Most bytes of logits, with or without a float32 sum of the weight's gradient beside them.

    The usual memory beyond the gradients is CHUNK_BYTES and one such sum.  Without the sum, logits may take its place;
    with it, the place of the result, which does not exist yet.  Logits that are kept get no more than CHUNK_BYTES.
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
    if taken > room and (apart := _apart(problem, room)):
        own = (problem.classes - apart) * problem.itemsize + _beside_two(problem)
        why = f"{reason}, of which {apart} columns lie where the gradient of the weight will be"
        plan = LinearPlan("stored", problem.tokens, 1, products, problem.tokens * own, False, why, apart)
        return Candidate("stored", plan, "")
    plan = LinearPlan("stored", max(problem.tokens, 1), 1, products, needed, problem.keeps, f"{reason}, which fit")
    return Candidate("stored", plan, "" if taken <= room else f"{reason}, and the limit is {size(max(room, 0))}")


def _beside_two(problem: LinearProblem) -> int:
    """Bytes for each token beside logits in two tensors: the sum of the input's gradient, and a copy of the input."""
    return problem.hidden * max(problem.itemsize, 4) * problem.of_input + problem.copied_bytes


def _apart(problem: LinearProblem, room: int) -> int:
    """Fewest last columns of the logits that must lie where the gradient of the weight will be; 0 where none may.

    They take the place of the other classes, whose products come last.
    """
    if not problem.in_two or problem.waits or not problem.of_weight or problem.sums_one_product:
        return 0
    own = room // problem.tokens - _beside_two(problem)
    first = own // problem.itemsize // COLUMN_TILE * COLUMN_TILE
    apart = problem.classes - first
    return apart if first > 0 and problem.tokens * apart <= first * problem.hidden else 0


def _tokens(problem: LinearProblem, memory: int | None) -> Candidate:
    if "tokens" not in problem.cuts:
        return Candidate("tokens", None, "columns give the gradient of the weight without a float32 sum")
    tokens = max(problem.tokens, 1)
    of_row = row_bytes(problem.classes, problem.itemsize)
    token_bytes = max(of_row + problem.copied_bytes + problem.travel_bytes, 1)
    fits = _room(problem, memory, True) // token_bytes
    if fits < 1:
        beside = " with the gradient of the weight" if problem.weight_sum_bytes else ""
        needed = token_bytes + problem.weight_sum_bytes
        return Candidate("tokens", None, f"memory is {memory} bytes, and one token{beside} takes {needed}")
    if tokens == 1:
        return Candidate("tokens", None, "one token is no more than a chunk")
    # One chunk would be the plan `stored`.
    fits = min(fits, tokens - 1)
    # Whole tiles where there are several, and chunks of nearly one size, so that the last is not a small product.
    most = max(fits // TOKEN_TILE * TOKEN_TILE or fits, 1)
    chunk = _ceil(tokens, _ceil(tokens, most))
    whole = _ceil(chunk, TOKEN_TILE) * TOKEN_TILE
    chunk = min(whole if whole <= most else chunk, tokens)
    needed = chunk * token_bytes + problem.weight_sum_bytes
    products = problem.products + problem.waits
    plan = LinearPlan("tokens", chunk, _ceil(tokens, chunk), products, needed, False, _why(problem))
    return Candidate("tokens", plan, "")


def _columns(problem: LinearProblem, memory: int | None) -> Candidate:
    if "columns" not in problem.cuts:
        return Candidate("columns", None, "the result of a token needs the whole row of its logits")
    column_bytes = max(problem.tokens * problem.itemsize, 1)
    # Where the gradient of the input is the sum itself, it holds the sum from the first chunk on.
    lends = problem.itemsize < 4 and not problem.travels and problem.of_input
    copied = problem.hidden * problem.itemsize * (problem.of_weight and not lends)
    beside = problem.input_sum_bytes + problem.tokens * copied
    most = COLUMN_BYTES if memory is None else min(COLUMN_BYTES, memory - beside)
    # Rounding up to whole tiles may add one.
    chunks = _ceil(problem.classes, max(most // column_bytes - COLUMN_TILE, FEWEST_COLUMNS))
    chunk = min(problem.classes, _ceil(_ceil(problem.classes, chunks), COLUMN_TILE) * COLUMN_TILE)
    needed = problem.tokens * row_bytes(chunk, problem.itemsize) + beside
    products = problem.products + problem.recorded
    plan = LinearPlan("columns", chunk, _ceil(problem.classes, chunk), products, needed, False, _why(problem))
    if memory is not None and needed > memory:
        reason = f"memory is {memory} bytes, and {chunk} columns of all tokens take {needed}"
        return Candidate("columns", None, reason)
    return Candidate("columns", plan, "")


def _why(problem: LinearProblem) -> str:
    return f"the logits of all tokens would take {size(problem.logits_bytes)}"


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
