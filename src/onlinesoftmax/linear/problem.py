"""The problem of a head: its sizes, the gradients that are wanted, and the functions that have heads.

plans.py makes a plan of it.
"""

from __future__ import annotations

from typing import NamedTuple

from ..core.task import ITEMSIZE

FEWEST_CLASSES, ROW_BYTES = 1024, 128
"""From so many classes on, rows of logits that do not fill 16 bytes take a multiple of so many, for fast products."""


class LinearProblem(NamedTuple):
    """The facts about a call that its plan depends on.

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
        borrows: False where logits cannot lie in the memory of a gradient, as in JAX.
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
    borrows: bool = True

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
    def lends(self) -> bool:
        """True where the gradient of the weight is made after logits that may lie in its memory, in the same call."""
        known = self.recorded and not self.waits and not self.travels
        return self.borrows and known and self.of_weight and not self.sums_one_product

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
    "linear_token_loss": Function(None, False, ("tokens", "columns"), ("mean", "sum")),
}
"""The functions by name."""


def row_bytes(classes: int, itemsize: int) -> int:
    """Bytes from one row of logits to the next."""
    taken = classes * itemsize
    return taken if taken % 16 == 0 or classes < FEWEST_CLASSES else ceil(taken, ROW_BYTES) * ROW_BYTES


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
    # Chunks of columns have no float32 sum in which the gradient of a float16 weight waits for the divisor of a mean.
    at_once = declared.loss is None and not declared.waits
    whole_rows = whole_rows or (at_once and (travels or dtype == "float16"))
    cuts = ("tokens",) if whole_rows else declared.cuts
    return LinearProblem(*sizes, dtype, recorded, waits, wanted[0], wanted[1], cuts, in_place, travels)


def ceil(a: int, b: int) -> int:
    """The quotient a / b, rounded up."""
    return -(-a // b)
