"""The table of docs/performance.md that says where other libraries were measured, or why not."""

from __future__ import annotations

from typing import NamedTuple

from .markdown import table
from .records import Records

LATER = "not yet"


class Peer(NamedTuple):
    """A function of another library.

    Attributes:
        library: The library.
        function: Its function.
        works: How it works, as its source says.
        who: Its name in records; empty for one that no suite has.
        suite: The suite.
        why: The reason where no record has it.
    """

    library: str
    function: str
    works: str
    who: str = ""
    suite: str = ""
    why: str = LATER


PEERS = (
    Peer("Liger", "liger_cross_entropy", "one kernel writes the gradient over the logits", "liger", "cross-entropy"),
    Peer("quack", "quack.cross_entropy", "forward keeps the logsumexp, backward reads again", "quack", "cross-entropy"),
    Peer(
        "flash-attn", "CrossEntropyLoss", "forward keeps the logsumexp, backward reads again", "flash-attn",
        "cross-entropy", f"{LATER}; its import needs the compiled kernels of attention",
    ),
    Peer(
        "Transformer Engine", "parallel_cross_entropy",
        "forward reads twice and writes a float32 gradient; backward compares a number on the host",
        "transformer-engine", "cross-entropy",
    ),
    Peer(
        "TRL", "selective_log_softmax_and_entropy", "a kernel for each direction; each reads the logits once", "trl",
        "token-logprobs",
    ),
    Peer(
        "Liger", "fused_selective_log_softmax", "log-probabilities without gradient and entropy",
        why="no: the suites ask for both",
    ),
    Peer(
        "Liger", "liger_fused_linear_cross_entropy", "chunks of tokens", "liger", "linear-cross-entropy",
    ),
    Peer(
        "quack", "chunked_linear_cross_entropy", "chunks of tokens, or a product that stores scaled exponentials",
        "quack", "linear-cross-entropy",
    ),
    Peer(
        "Liger", "LigerFusedLinearScaledCrossEntropyFunction",
        "losses and entropies in kernels for compute capability 9.0, elsewhere in chunks of 512 tokens", "liger",
        "linear-token-logprobs", f"{LATER}; for compute capability 9.0 it needs the package nvidia-cutlass-dsl",
    ),
    Peer(
        "Megatron-LM", "vocab_parallel_cross_entropy",
        "PyTorch's operations on float32 logits, three all-reduces", "megatron", "distributed",
    ),
    Peer(
        "Transformer Engine", "parallel_cross_entropy", "an all-gather of states", "transformer-engine", "distributed",
    ),
    Peer(
        "flash-attn", "CrossEntropyLoss", "an all-gather of logsumexps, an all-reduce of losses", "flash-attn",
        "distributed",
    ),
    Peer(
        "Liger", "LigerVocabParallelCrossEntropy", "keeps float32 exponentials; three all-reduces", "liger",
        "distributed",
    ),
    Peer(
        "FlashInfer", "sampling_from_probs", "a softmax, then one kernel that samples; others with filters",
        "flashinfer", "sampling",
    ),
    Peer("FlashInfer", "top_k", "a radix select", "flashinfer", "topk"),
)  # fmt: skip


def peers_table(records: Records) -> str:
    """Each function with the records that have it, or the reason why none has."""
    header = ("library", "function", "how it works", "measured in")
    return table(header, [[peer.library, f"`{peer.function}`", peer.works, _measured(peer, records)] for peer in PEERS])


def _measured(peer: Peer, records: Records) -> str:
    said = []
    for record in records:
        if not peer.who or record.name.partition("-")[2] != f"{peer.suite}.json":
            continue
        found = [result.status for case in record.results for result in case.results if result.who == peer.who]
        if "ok" in found:
            said.append(f"`{record.name}`: {found.count('ok')} of {len(found)} cases")
        elif reason := record.content["absent"].get(peer.who):
            said.append(f"`{record.name}`: {reason.partition(': ')[0]}")
    return "; ".join(said) or peer.why
