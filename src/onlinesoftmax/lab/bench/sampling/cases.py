"""A case of sampling, of the largest log-probabilities, or of drafts: logits of a kind, and what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....core.task import ITEMSIZE
from ...names import check_names
from ..cases import LogitsCase

SAMPLE, TOPK, VERIFY = "sample", "topk_logprobs", "verify"

ASKED: dict[str, dict[str, dict[str, Any]]] = {
    SAMPLE: {
        "greedy": {"temperature": 0.0}, "none": {}, "top-k 50": {"top_k": 50}, "top-p 0.9": {"top_p": 0.9},
        "all, top 20": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "top_logprobs": 20},
    },
    TOPK: {f"k {k}": {"k": k} for k in (20, 50, 1024)},
    VERIFY: {"none": {}, "top-k 50": {"top_k": 50}, "top-p 0.9": {"top_p": 0.9}},
}  # fmt: skip
"""The arguments that are measured, by function and by the name that tables show."""

CONTEXT, GROUP = 1024, 4
"""Tokens in the cache of a decoder, with the one that is read; heads that share keys and values, as in Llama 3.1 8B."""

LOGITS = ("normal", "peaked", "zipf")
"""Kinds of logits; `measure.make_logits` says what each is."""


@dataclass(frozen=True)
class TokenCase(LogitsCase):
    """A function from logits (rows, tokens) to tokens; or, for drafts, from those of the target model.

    The logits of the target model are (rows, n + 1, tokens), and those of the draft model (rows, n, tokens).

    Attributes:
        logits: Kind of logits, in LOGITS.
        asked: Name of the arguments, in ASKED of the function.

    Example:
        >>> case = TokenCase("sample", (64, 128256), 1, "float32", asked="top-k 50")
        >>> str(case), case.arguments, case.bytes
        ('64x128256 normal, top-k 50', {'top_k': 50}, 32834304)
        >>> TokenCase("verify", (64, 5, 128256), 2, "float32", asked="none").read_bytes
        295501824
    """

    axes, float64_copies = "rows x tokens", 12
    logits: str = "normal"
    asked: str = ""

    def __post_init__(self) -> None:
        check_names("function", [self.operation], ASKED)
        check_names("kind of logits", [self.logits], LOGITS)
        check_names("arguments", [self.asked], ASKED[self.operation])
        if self.operation != VERIFY:
            super().__post_init__()
        elif len(self.shape) != 3 or self.dim != 2 or self.shape[1] < 2:
            raise ValueError(f"{VERIFY} needs three sizes, rows x (drafts + 1) x tokens, got {self.shape}")
        if self.top > self.shape[-1]:
            raise ValueError(f"{self.operation} with {self.asked}: a row has only {self.shape[-1]} tokens")

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.logits}, {self.asked}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of our function, but for the seeds."""
        return ASKED[self.operation][self.asked]

    @property
    def top(self) -> int:
        """Number of the largest log-probabilities that are returned."""
        return int(self.arguments.get("top_logprobs", self.arguments.get("k", 0)))

    @property
    def read_bytes(self) -> int:
        """Bytes of the logits, of both models where there are two."""
        places = self.shape[1]
        return self.tensor_bytes // places * (2 * places - 1) if self.operation == VERIFY else self.tensor_bytes

    @property
    def write_bytes(self) -> int:
        """Bytes of a token and its log-probability, and of the largest ones."""
        return self.rows * (1 + self.top) * (8 + ITEMSIZE[self.accumulator])

    @property
    def needed_bytes(self) -> int:
        """Bytes that the check takes for each model."""
        return super().needed_bytes * (1 + (self.operation == VERIFY))


@dataclass(frozen=True)
class DecodeCase(TokenCase):
    """A step of decoding: a decoder reads one token of each row, and the next ones are sampled.

    Attributes:
        hidden: Width of the decoder.
        layers: Number of its layers.

    Example:
        >>> case = DecodeCase("sample", (64, 128256), 1, "bfloat16", asked="top-k 50", hidden=2048, layers=16)
        >>> str(case), f"{case.parameters:.2e}"
        ('64 rows, 2048 -> 128256, 16 layers, top-k 50', '1.50e+09')
    """

    hidden: int = 1
    layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("function of decoding", [self.operation], [SAMPLE])

    def __str__(self) -> str:
        rows, tokens = self.shape
        return f"{rows} row{'s' * (rows != 1)}, {self.hidden} -> {tokens}, {self.layers} layers, {self.asked}"

    @property
    def parameters(self) -> int:
        """Number of weights: those of the embedding, of the layers' products, and of the head."""
        # Queries and outputs, keys and values of a quarter of the heads, and three products of four times the width.
        layer = (2 + 2 / GROUP + 3 * 4) * self.hidden**2
        return int(2 * self.shape[1] * self.hidden + self.layers * layer)

    @property
    def needed_bytes(self) -> int:
        """Bytes of the weights and the cache, or of the check."""
        cache = 2 * self.layers * self.rows * CONTEXT * self.hidden // GROUP
        return max(ITEMSIZE[self.dtype] * (self.parameters + cache), super().needed_bytes)
