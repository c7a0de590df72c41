"""The benchmark suites by name, and the cases of a suite with what a caller asks for in its place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ...core.task import ITEMSIZE
from ...ops import FORWARD, OPERATIONS
from ..names import Shape, check_names
from .cases import FUSED, MEASURED, REDUCTIONS, Case
from .entries import Fields, Suite, each, powers, rows, with_options
from .heads.cases import LOGPROBS, LOSS, POLICY, TRAINING
from .result import FORMS
from .routing.cases import GATES, ROUTE
from .sampling.cases import ASKED, LOGITS, SAMPLE, TOPK, VERIFY

DISTRIBUTED = "distributed", "distributed-heads"
"""Names of the suites that several processes measure together."""

GRADIENT_OF_ELEMENTS = OPERATIONS[FORWARD[0]].gradient_name

READERS = [name for name in FORWARD if OPERATIONS[name].per_row]
"""Public operations that read every element and write none."""

LOSSES = [name for name in READERS if REDUCTIONS[name]]
"""Public operations with a target per row that are reduced to a scalar."""

TOKENS = [name for name in READERS if OPERATIONS[name].has_target and name not in LOSSES]
"""Public operations with a target per row whose results stay per row."""

RELATIVES = [name for name in MEASURED if name not in (FORWARD[0], GRADIENT_OF_ELEMENTS, *READERS)]
"""The operations near softmax that have no suite of their own."""

OF_ROWS = ("op", "fused", "with_gradient", "reduction", "backend", "strategy", "dim")
"""Options of the command line that suites of heads and of tokens have no use for."""

OF_HEADS: Any = {"dtypes": ("bfloat16",), "repeat_ms": 300, "measures": "head time", "excluded": OF_ROWS}
"""Settings that suites of heads share."""

FEW_HEADS = (256, 16, 1000), (100, 24, 1003)
"""Tokens, hidden and classes of heads that are small enough for a CPU."""

SHORT_ROWS = (4194304, 5), (4194304, 10), (2097152, 17), (1048576, 33), (1048576, 50), (262144, 100)
"""Rows of gates, classifiers and attention over few keys; all but the last in float32 are unaligned."""

LOGITS_OF_MODELS = (1, 128256), (8, 128256), (64, 128256), (512, 128256), (64, 32000)
"""Rows and vocabularies of models that write text."""

DECODED = ["greedy", "top-p 0.9", "all, top 20"]
"""Names of the arguments of `sample` in a step of decoding."""

heads = partial(each, with_gradient=True)
"""Cases with their gradients."""


def gates(gate: str | list[str], *shapes: Shape) -> tuple[Fields, ...]:
    """Cases of routing, alone and with a gradient."""
    return each(ROUTE, *shapes, gate=gate, with_gradient=[False, True])


def tokens(operation: str, kinds: Sequence[str], *shapes: Shape) -> tuple[Fields, ...]:
    """Cases of a function of logits, for each kind of logits and for everything that is asked of the function."""
    return each(operation, *shapes, asked=[*ASKED[operation]], logits=[*kinds])


SUITES: dict[str, Suite] = {
    "forward": Suite(
        "softmax of batches and vocabularies, unaligned and short rows, another dimension",
        # Shapes of published benchmarks, unaligned rows, rows of a few classes, a dimension that is not the last.
        (*rows(
            (1048576, 64), (524288, 128), (262144, 256), (131072, 512), (65536, 1000), (65536, 1024), (32768, 2048),
            (16384, 4096), (8192, 8192), (4096, 16384), (4096, 32768), (4096, 50256), (4096, 50257), (2048, 65536),
            (2048, 128256), (1024, 262144), (256, 1 << 20), (16, 1 << 22), (131072, 1023), (65536, 1025),
            (16384, 8191), (4194304, 5), (4194304, 10), (1048576, 33), (262144, 197),
        ), *rows((32, 512, 4096), dim=1)),
        few=rows((64, 512), (1024, 1024), (256, 16384), (1024, 1023)),
    ),
    "rows1024": Suite(
        # Small batches have few bytes to hide the time of a launch.
        "1024 rows of 512 to 32768 columns, with a sentence about each",
        rows(*powers(1024, 9, 15)), few=rows(*powers(1024, 9, 15, 3)), sentences=True,
    ),
    "lengths": Suite(
        # Nobody chose these lengths for a kernel; most rows are unaligned.
        "softmax of lengths that are no powers of two",
        rows(
            (2064888, 65), (1056832, 127), (1342177, 100), (300000, 199), (671088, 200), (526344, 255), (522247, 257),
            (268435, 500), (261632, 513), (223696, 600), (172738, 777), (131072, 1023), (65536, 2049), (32760, 4097),
            (10872, 12345), (8192, 16383), (6710, 20001),
        ),
        few=rows((1024, 65), (1024, 1025), (256, 12345)),
    ),
    "single-row": Suite(
        "one row of 2^16 to 2^30 elements", rows(*powers(1, 16, 30)), few=rows(*powers(1, 16, 22, 3)),
    ),
    "long-rows": Suite(
        # On cache lines and beside them; the last three shapes do not fit on chip.
        "rows that many multiprocessors share",
        rows(
            (256, 1 << 20), (16, 1 << 22), (16, (1 << 22) + 8), (64, 3000001), (64, 3000008), (3, 100000007),
            (1, 1 << 26), (1, 1 << 28),
        ),
        few=rows((4, 1 << 20), (2, (1 << 20) + 8)),
    ),
    "calls": Suite(
        # In JAX, one program makes the calls, so that they share the time of its launch.
        "softmax called 8 or 32 times, each time of the result before",
        rows((1, 1 << 24), calls=32) + rows(
            (1, 1 << 28), (16, 1 << 22), (64, 3000001), (256, 1 << 20), (300000, 199), (131072, 1023), (6710, 20001),
            calls=8,
        ),
        few=rows((1, 1 << 16), calls=32) + rows((256, 65), calls=8),
    ),
    "short-rows": Suite(
        # As many bytes as keep a GPU busy, and losses over as few classes.
        "softmax of a few columns, its gradient, and losses with theirs",
        each([FORWARD[0], GRADIENT_OF_ELEMENTS], *SHORT_ROWS)
        + each([*LOSSES, *TOKENS], *SHORT_ROWS[1:4:2], with_gradient=True),
        few=each([FORWARD[0], GRADIENT_OF_ELEMENTS], (4096, 5), (1024, 33))
        + each([*LOSSES, *TOKENS], (1024, 10), with_gradient=True),
        repeat_ms=50,
    ),
    "gradients": Suite(
        # 2^27 elements in rows of every length, and vocabularies.
        "the gradient of softmax: reads y and dy, writes dx",
        each(
            [GRADIENT_OF_ELEMENTS], *((1 << 27 - k, 1 << k) for k in range(8, 16)), (2048, 128256), (1024, 262144),
        ),
        few=each([GRADIENT_OF_ELEMENTS], (1024, 1024), (256, 16384)),
    ),
    "operations": Suite(
        "log-softmax, its gradient, and the gradient of logsumexp",
        each(RELATIVES, (65536, 1024), (8192, 8192), (2048, 128256), (1, 1 << 24)),
        few=each(RELATIVES, (1024, 1024)),
    ),
    "fused": Suite(
        "softmax with score options, beside plain softmax",
        with_options((16384, 4096), (65536, 1024), (4096, 32768), causal=(64, 1024, 1024)),
        few=with_options((1024, 1024), causal=(4, 256, 256)),
    ),
    "cross-entropy": Suite(
        # A mean, and losses of rows that the caller weights.
        "cross-entropy with its gradient, for the vocabularies of models",
        each(
            LOSSES, (8192, 128256), (4096, 50257), (8192, 32000), (4096, 262144), (16384, 4096), with_gradient=True,
        ) + each(LOSSES, (8192, 128256), (8192, 32000), with_gradient=True, reduction="none"),
        few=each(LOSSES, (256, 4096), (64, 32000), with_gradient=True)
        + each(LOSSES, (64, 32000), with_gradient=True, reduction="none"),
    ),
    "token-logprobs": Suite(
        # As reinforcement learning differentiates them.
        "log-probabilities and entropies with their gradient",
        each(TOKENS, (8192, 128256), (4096, 151936), (8192, 32000), with_gradient=True),
        few=each(TOKENS, (256, 4096), (64, 32000), with_gradient=True),
    ),
    "read-only": Suite(
        "one read of the input, without a gradient",
        each(READERS, (65536, 1024), (8192, 8192), (8192, 32000), (512, 151936), (4096, 151936), (2048, 128256)),
        few=each(READERS, (1024, 1024), (64, 32000)),
    ),
    "host": Suite(
        # So few elements that a call costs its launch.
        "host time of a call: plain, with out=, with a gradient, and the bare launch",
        each(FORWARD, (64, 512)), few=each(FORWARD[::3], (64, 512)),
        dtypes=("bfloat16",), measures="host time", excluded=("fused", "with_gradient"),
    ),
    "cold": Suite(
        # Rows that one block holds and longer ones, and a loss with its gradient; later calls have other shapes.
        "the first call of a fresh process, of a new number of rows, of a new length",
        rows((1024, 1000), (256, 32000)) + each(LOSSES, (256, 32000), with_gradient=True),
        few=rows((1024, 1000)), dtypes=("bfloat16",), measures="first calls", excluded=("fused", "repeat"),
    ),
    "cpu": Suite(
        "the time that our layer adds to PyTorch on a CPU, with many repetitions",
        rows((64, 512), (1024, 64), (256, 256), (1024, 1024), (4096, 1024), (1024, 16384)),
        few=rows((64, 512), (1024, 1024), (256, 16384)), dtypes=("float32", "bfloat16"), repeat_ms=1000,
    ),
    "linear-cross-entropy": Suite(
        # Tokens, hidden and classes of models; the last hidden size and vocabulary are not aligned.
        "the head of a language model and its loss, with both gradients",
        heads(
            LOSS, (4096, 4096, 128256), (8192, 4096, 128256), (8192, 2304, 256000), (8192, 2048, 151936),
            (8192, 5120, 152064), (4096, 2560, 262208), (4096, 768, 50257),
        ),
        few=heads(LOSS, *FEW_HEADS), **OF_HEADS,
    ),
    "linear-token-logprobs": Suite(
        "log-probabilities and entropies of a head, with both gradients",
        heads(LOGPROBS, (4096, 4096, 128256), (8192, 4096, 128256), (8192, 2048, 151936), (4096, 768, 50257)),
        few=heads(LOGPROBS, *FEW_HEADS), **OF_HEADS,
    ),
    "sampling": Suite(
        "from logits to tokens: greedy, without a filter, top-k, top-p, and all filters with 20 log-probabilities",
        tokens(SAMPLE, LOGITS, *LOGITS_OF_MODELS), few=tokens(SAMPLE, LOGITS, (3, 1000)),
        dtypes=("float32", "bfloat16"), repeat_ms=30, measures="token time", excluded=OF_ROWS,
    ),
    "topk": Suite(
        "the 20, 50 and 1024 largest scores of each row, with their log-probabilities",
        tokens(TOPK, LOGITS[::2], *LOGITS_OF_MODELS), few=tokens(TOPK, LOGITS[:1], (3, 2000)),
        dtypes=("float32", "bfloat16"), repeat_ms=30, measures="token time", excluded=OF_ROWS,
    ),
    "verify": Suite(
        "four drafts of each row and the logits of both models: which drafts stay, and the token that follows",
        tokens(VERIFY, LOGITS[:1], (1, 5, 128256), (8, 5, 128256), (64, 5, 128256)),
        few=tokens(VERIFY, LOGITS[:1], (3, 3, 1000)),
        dtypes=("float32",), repeat_ms=30, measures="token time", excluded=OF_ROWS,
    ),
    "route": Suite(
        # Tokens of a training and of a decoding step; the gates of Qwen3-MoE, DeepSeek-V2, DeepSeek-V3 and GPT-OSS.
        "from the logits of a gate to experts, weights and counts, alone and with the gradient of both losses",
        gates("top 8", (65536, 256), (65536, 384), (1 << 20, 128), (512, 256), (65536, 1000))
        + gates("top 6, not normalized", (65536, 64)) + gates("top 8 of 4 groups", (65536, 256), (64, 256))
        + gates("top 4 first", (65536, 128)),
        few=gates([*GATES], (64, 40)),
        dtypes=("float32", "bfloat16"), repeat_ms=50, measures="gate time", excluded=OF_ROWS,
    ),
    "training-step": Suite(
        # The classes of Llama 3 and of Qwen2.5.
        "steps of a decoder with random weights, of pre-training and of GRPO: forward, backward and optimizer",
        heads(TRAINING, (8192, 2048, 128256), (8192, 2048, 151936), layers=8)
        + heads(TRAINING, (8192, 4096, 128256), (8192, 4096, 151936), layers=4)
        + heads(POLICY, (8192, 2048, 151936), layers=8) + heads(POLICY, (8192, 4096, 128256), layers=4),
        few=heads(TRAINING, (64, 32, 1000), layers=1) + heads(POLICY, (64, 32, 1000), layers=1),
        dtypes=("bfloat16",), repeat_ms=2000, measures="step time", excluded=OF_ROWS,
    ),
    "decoding": Suite(
        # About the sizes of Llama 3.2 1B and of Llama 3.1 8B.
        "steps of decoding with random weights: a token of each row through the decoder, and the next one sampled",
        each(SAMPLE, (1, 128256), (64, 128256), hidden=2048, layers=16, asked=DECODED)
        + each(SAMPLE, (1, 128256), (64, 128256), hidden=4096, layers=32, asked=DECODED),
        few=each(SAMPLE, (3, 1000), hidden=32, layers=1, asked=DECODED),
        dtypes=("bfloat16",), repeat_ms=200, measures="decoding time", excluded=OF_ROWS,
    ),
    DISTRIBUTED[0]: Suite(
        "rows that are sharded over the processes of torchrun",
        each(LOSSES, (8192, 128256), (8192, 32000), (4096, 262144), with_gradient=True)
        + rows((1, 1 << 30), (1, 1 << 24), (8192, 128256), (64, 128256))
        + each(TOKENS, (8192, 128256), with_gradient=True),
        few=each(LOSSES, (64, 32000), with_gradient=True) + rows((1, 1 << 20))
        + each(TOKENS, (64, 32000), with_gradient=True),
        dtypes=("bfloat16",), measures="sharded time", excluded=("fused",),
    ),
    DISTRIBUTED[1]: Suite(
        "heads whose classes are sharded over the processes of torchrun, with both gradients",
        heads(LOSS, (8192, 4096, 128256)) + heads(LOGPROBS, (8192, 4096, 128256)),
        few=heads(LOSS, (128, 16, 1003)) + heads(LOGPROBS, (128, 16, 1003)), **OF_HEADS,
    ),
}  # fmt: skip
"""The suites by name; shapes of those in DISTRIBUTED are those of the whole input."""


def suite_of(name: str, quick: bool = False) -> Suite:
    """The suite of this name, as it is or as --quick measures it.

    Raises:
        ValueError: there is no such suite.
    """
    check_names("suite", [name], SUITES)
    return SUITES[name].quick if quick else SUITES[name]


def cases(
    suite: Suite,
    operations: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    dim: int | None = None,
    dtypes: Sequence[str] = (),
    fused: Sequence[str] = (),
    with_gradient: bool = False,
    reduction: str = "",
) -> list[Case]:
    """The cases of a suite; what is given replaces what the suite says.

    Args:
        suite: A suite, as `suite_of` finds it.
        operations: Names in MEASURED.
        shapes: Shapes of the input.
        dim: The softmax dimension of these shapes; the last by default.
        dtypes: Names of dtypes.
        fused: Names of score options.
        with_gradient: True for calls with their gradient through autograd.
        reduction: "mean" or "none", for operations that have a reduction.

    Raises:
        ValueError: a name is unknown, dim is out of range or comes without shapes, or a case makes no sense.

    Example:
        >>> suite, fused = SUITES["forward"], ["mask", "scale"]
        >>> [str(case) for case in cases(suite, shapes=[(4, 8)], dtypes=["float32"], fused=fused)]
        ['4x8 scale+mask']
    """
    check_names("operation", operations, MEASURED)
    check_names("dtype", dtypes, ITEMSIZE)
    check_names("score option", fused, FUSED)
    if dim is not None and not shapes:
        raise ValueError("a dim needs a shape: each shape of a suite has its own")
    places = [{"shape": shape, "dim": _axis(-1 if dim is None else dim, shape)} for shape in shapes]
    given: dict[str, Any] = {"fused": tuple(name for name in FUSED if name in fused)} if fused else {}
    given |= {"with_gradient": True} if with_gradient else {}
    given |= {"reduction": reduction} if reduction else {}
    kind = FORMS[suite.measures].cases

    def fields(entry: Fields, operation: str) -> Fields:
        # The reduction of an entry is that of its own operation.
        others = {} if operation in ("", entry["operation"]) else {"operation": operation, "reduction": ""}
        return entry | others | given

    found = [
        kind(dtype=dtype, **fields(entry, operation) | place)
        for operation in operations or [""] for dtype in dtypes or suite.dtypes
        for entry in suite.entries for place in places or [{}]
    ]  # fmt: skip
    # Entries that differ only in what was replaced are one case now.
    return list(dict.fromkeys(found))


def _axis(dim: int, shape: Shape) -> int:
    if not -len(shape) <= dim < len(shape):
        sizes = "x".join(map(str, shape))
        raise ValueError(f"dim {dim} is out of range for {sizes}: it must be from {-len(shape)} to {len(shape) - 1}")
    return dim % len(shape)
