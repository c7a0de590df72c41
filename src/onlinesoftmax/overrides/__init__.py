"""`override`: PyTorch's softmax functions run ours inside a block, and the code of the model does not change."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ..kernels.registry import needing
from .report import Report

if TYPE_CHECKING:
    from ..core.annotations import Backend
    from .mode import Override

__all__ = ["Report", "override"]


def override(
    *, strict: bool = False, backend: Backend | None = None, leave: Collection[str] = (), linear: bool | int = False,
    memory: int | None = None,
) -> Override:  # fmt: skip
    """Context manager and decorator: PyTorch's softmax, log_softmax, logsumexp and losses run ours.

    The block replaces every spelling of these functions: those in `torch`, in `torch.special` and in
    `torch.nn.functional`, the methods of a tensor, and the modules that call them.  It changes no other function.

    Our function takes a call if a kernel can run the call.  PyTorch runs the others: inputs on a CPU (unless `backend`
    is given), integers, sparse tensors and tensor subclasses, `dim=None`, an `out` that PyTorch must resize, and a
    cross-entropy with class probabilities or with the deprecated arguments `size_average` and `reduce`.

    PyTorch's `linear_cross_entropy` and its module run ours on every device, but for `options`.  With `linear`, a call
    of `torch.nn.functional.linear` with many output features, the head of a language model, returns a tensor that
    stands for the logits and is not computed.  Views, slices and selections of tokens, a cast to float32, a positive
    factor, a softcap and a log_softmax of this tensor are not computed either.  `cross_entropy` and `nll_loss` of it
    run `linear_cross_entropy`; `gather` of one class of each token, logsumexp and our `token_logprobs` run
    `linear_token_logprobs`.  Any other function gets the logits, which are computed then, and `report()` names it.  A
    head under torch.compile or torch.func computes its logits at once; so does a head of fewer than 256 tokens that
    needs no gradient.

    The block does not reach these calls:

    - calls inside other functions of PyTorch, such as `softmin`, `gumbel_softmax`,
      `scaled_dot_product_attention` and `multi_head_attention_forward`, and calls inside TorchScript;
    - calls on other threads: PyTorch keeps its modes per thread, so each thread must enter the block;
    - calls in asyncio tasks that were not started inside the block, while the block waits;
    - calls during backward, where PyTorch turns its modes off; but the forward that torch.utils.checkpoint repeats
      there is inside the block, with `use_reentrant=True` only if the checkpointed function is decorated.

    Inside a block, a call of any PyTorch function takes the host about one microsecond longer, and a call that the
    block takes or leaves about five.  `torch.compile` avoids this: it replaces the calls by our custom operators when
    it traces the model, and the block around the compiled model counts them at that time.  A block inside the compiled
    function works too, but counts nothing.

    Of two nested blocks, the inner one decides first.  A call that the inner block leaves goes on to the outer block,
    as with all modes of PyTorch.  If a block is already open on a thread, entering it again has no effect.  A decorated
    coroutine or generator runs its steps inside the block; the code between its steps is outside.  `torch.compile`
    traces a function with all blocks that are open on the thread, those of other asyncio tasks too.

    Args:
        strict: Raise an error where PyTorch would run the call.
        backend: Force "cuda", "triton" or "eager" for every call that our functions take, on a CPU too.
        leave: Names of functions that the block leaves to PyTorch: "softmax", "log_softmax", "logsumexp",
            "cross_entropy" or "linear_cross_entropy".  `strict` does not forbid them.
        linear: True defers the logits of linear layers with 32000 output features or more; a number is the fewest
            output features of such a layer.
        memory: Most bytes of the logits and sums of a head that exist at a time, as for `linear_cross_entropy`.  The
            report names the plan, and the bytes of the logits where all exist at once.

    Returns:
        An object whose method `report()` gives the number of calls that were taken and left, and the plans of those
        that were taken, as a `Report`.  A decorated function has the method too.

    Raises:
        ModuleNotFoundError: torch is not installed.
        TypeError: strict is not a bool, leave is no collection of names, or the decorated object is a class or an
            asynchronous generator.
        ValueError: there is no such backend or function, or memory is not positive; inside the block, memory is too
            small.
        RuntimeError: with strict=True, inside the block: PyTorch would run the call; the message says why.  A
            block is left that is not open.  Or logits are needed, and the input or the weight of their head has changed
            since its call.
        PlanError: inside the block: the forced backend cannot run the call; the message lists every reason.

    Source:
        `torch.overrides.TorchFunctionMode`, https://pytorch.org/docs/stable/torch.overrides.html.

    Example:
        >>> import torch
        >>> with override() as mode:
        ...     y = torch.softmax(torch.zeros(2), dim=0)
        >>> print(mode.report())
        softmax: PyTorch ran 1 call: input is on the CPU, where PyTorch's own operation runs.

        >>> head, target = torch.nn.Linear(24, 40), torch.zeros(5, dtype=torch.long)
        >>> with override(linear=40) as mode:
        ...     logits = head(torch.ones(5, 24))
        ...     loss = torch.nn.functional.cross_entropy(logits, target)
        >>> print(mode.report())
        linear_cross_entropy: our function took 1 call.
          linear_cross_entropy of 5 x 24 float32 on cpu: stored, 2 products with 40 classes; all logits at once, 800 B

        >>> @override(backend="eager")
        ... def probabilities(logits):
        ...     return torch.nn.functional.softmax(logits, dim=-1)
        >>> probabilities(torch.zeros(2))
        tensor([0.5000, 0.5000])
        >>> print(probabilities.report())
        softmax: our function took 1 call.
    """
    with needing("torch", "onlinesoftmax.override"):
        from .mode import Override
    return Override(strict, backend, leave, linear, memory)
