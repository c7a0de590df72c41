"""The types of arguments and results of the public functions, for type checkers.

A name that is no choice, or an array of another kind than the input, is an error of mypy and pyright
(tests/typed/calls.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

if TYPE_CHECKING:
    from typing import Generic

    import torch
    from numpy.typing import NDArray
    from typing_extensions import NamedTuple

A = TypeVar("A", "torch.Tensor", "NDArray[Any]")
"""A tensor or a NumPy array: all arrays of a call are of one kind, and so is the result."""

Backend = Literal["cuda", "triton", "eager"]
Strategy = Literal["row", "looped", "cluster", "grid", "split", "column"]
FullyMasked = Literal["nan", "zero"]
Reduction = Literal["none", "mean", "sum"]


if TYPE_CHECKING:

    class LossStatistics(NamedTuple, Generic[A]):
        """`LossStatistics` of core/call.py; Python 3.10 has no named tuple with parameters."""

        lse: A
        z_loss: A
        entropy: A
        largest: A
        correct: A

    class TokenLogprobs(NamedTuple, Generic[A]):
        """`TokenLogprobs` of core/call.py."""

        logprob: A
        entropy: A | None
        lse: A


class LossOptions(TypedDict, total=False):
    """Arguments of `cross_entropy` by keyword, but for `return_stats`, on which the type of the result depends."""

    z_loss: float
    scale: Any
    softcap: float | None
    mask: Any
    dtype: Any
    inplace_backward: bool
    batch_invariant: bool
    check: bool
    backend: Backend | None
    strategy: Strategy | None
