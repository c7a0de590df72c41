"""The public functions: PyTorch's signatures and semantics, on any device; NumPy arrays too."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from .core.annotations import A, Backend, FullyMasked, LossOptions, Reduction, Strategy
from .core.arguments import check_flags
from .core.arrays import Array, check_no_jax, is_dtensor
from .core.call import Call, Settings
from .core.declaration import Operation
from .core.options import ScoreOptions, checked_options
from .core.task import ANY, Choice
from .numpy import run as numpy_run
from .numpy.arguments import ARRAY_TYPES
from .ops import OPERATIONS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .core.annotations import LossStatistics, TokenLogprobs

_LOSS_SETTINGS = Settings(1)

_SOFTMAX, _LOG_SOFTMAX, _LOGSUMEXP = (OPERATIONS[name] for name in ("softmax", "log_softmax", "logsumexp"))


def softmax(
    input: A,
    dim: int | tuple[int, ...] = -1,
    *,
    dtype: Any = None,
    scale: Any = 1.0,
    mask: A | None = None,
    bias: A | None = None,
    causal: bool = False,
    softcap: float | None = None,
    fully_masked: FullyMasked = "nan",
    out: Any = None,
    batch_invariant: bool = False,
    backend: Backend | None = None,
    strategy: Strategy | None = None,
) -> A:
    """The softmax exp(z) / sum(exp(z)) along `dim`: `torch.softmax` with score options and a choice of kernel.

    The scores are::

        z = softcap * tanh(scale * input / softcap) + bias,  and -inf where masked

    Derivatives of every order in `input`, `bias` and `scale`, torch.func, torch.compile, autocast and
    CUDA graphs work as for PyTorch's own function.  A DTensor gives a DTensor that is sharded as `input` is; if `dim`
    is sharded, only the states of rows are exchanged (docs/distributed.md).

    Args:
        input: Floating-point torch tensor, DTensor or NumPy array of any shape and strides; never copied for one `dim`.
        dim: Dimension to normalise, also counted from the end; or several, a tuple of them, or () for all.  The
            input is then copied only if their strides do not make one dimension of them.
        dtype: Dtype of the result (and of the arithmetic, if wider); that of `input` by default.
            float16 and bfloat16 are accumulated in float32.
        scale: Factor of the input, an inverse temperature: a number, or a tensor on its device with one number, or one
            for each row: it broadcasts to the shape of `input` and has size 1 along `dim`.
        mask: Boolean, broadcasts to the shape of `input`: True keeps, as in `scaled_dot_product_attention`.
        bias: Floating point, broadcasts to the shape of `input`.
        causal: Query i, counted along the dimension before `dim`, keeps keys up to i + keys - queries.
        softcap: Soft bound on the magnitude of scale * input: a positive number.
        fully_masked: "nan", as PyTorch, or "zero": a row with no score above -inf is zeros, and so is its
            gradient.  (The logsumexp of such a row is -inf in either case.)
        out: Torch tensor to write to: right shape (or empty), dtype and device; may be `input` itself.
        batch_invariant: Give a row the same bits however many rows are beside it, for some speed.
        backend: Force "cuda", "triton" or "eager".  By default the planner chooses.
        strategy: Force "row", "looped", "cluster" or "grid" (CUDA), "split" or "column" (Triton).

    Returns:
        Array of the shape of `input`.  Rows with a NaN, a +inf or nothing but -inf are NaN.

    Raises:
        IndexError: dim is out of range.
        TypeError: an argument is of the wrong type.
        NotImplementedError: the dtype is not floating point, or the argument is not available for a DTensor.
        RuntimeError: `out`, `mask`, `bias` or `scale` does not fit.
        ValueError: softcap, fully_masked or causal makes no sense.
        PlanError: the forced backend or strategy cannot run; the message lists every reason.

    Source:
        Milakov and Gimelshein, arXiv:1805.02867.

    Example:
        >>> import torch
        >>> softmax(torch.zeros(2, 4), dim=1)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500, 0.2500]])
        >>> temperature = torch.tensor([[1.0], [2.0]])
        >>> softmax(torch.tensor([[0.0, 2.0], [0.0, 4.0]]), scale=1 / temperature)
        tensor([[0.1192, 0.8808],
                [0.1192, 0.8808]])
        >>> softmax(torch.zeros(2, 3), causal=True)
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    options = _options("softmax", scale, softcap, bias, mask, causal, fully_masked)
    return _run(_SOFTMAX, input, options, dim, dtype, False, out, (backend, strategy, batch_invariant))


def log_softmax(
    input: A,
    dim: int | tuple[int, ...] = -1,
    *,
    dtype: Any = None,
    scale: Any = 1.0,
    mask: A | None = None,
    bias: A | None = None,
    causal: bool = False,
    softcap: float | None = None,
    fully_masked: FullyMasked = "nan",
    out: Any = None,
    batch_invariant: bool = False,
    backend: Backend | None = None,
    strategy: Strategy | None = None,
) -> A:
    """The logarithm of softmax, z - logsumexp(z), along `dim`: `torch.log_softmax`.

    The scores z, the arguments and the errors are those of `softmax`.

    Example:
        >>> import torch
        >>> log_softmax(torch.zeros(3), dim=0)
        tensor([-1.0986, -1.0986, -1.0986])
    """
    options = _options("log_softmax", scale, softcap, bias, mask, causal, fully_masked)
    return _run(_LOG_SOFTMAX, input, options, dim, dtype, False, out, (backend, strategy, batch_invariant))


def logsumexp(
    input: A,
    dim: int | tuple[int, ...] = -1,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    scale: Any = 1.0,
    mask: A | None = None,
    bias: A | None = None,
    causal: bool = False,
    softcap: float | None = None,
    fully_masked: FullyMasked = "nan",
    out: Any = None,
    batch_invariant: bool = False,
    backend: Backend | None = None,
    strategy: Strategy | None = None,
) -> A:
    """The logsumexp log(sum(exp(z))) along `dim`: `torch.logsumexp`.  z, other arguments and errors as for `softmax`.

    Args:
        dim: A dimension, or several.
        keepdim: Keep the reduced dimensions with size 1.

    Returns:
        Array without the reduced dimensions; -inf where all of a row is, +inf where any of it is.

    Example:
        >>> import torch
        >>> logsumexp(torch.zeros(2, 8))
        tensor([2.0794, 2.0794])
    """
    options = _options("logsumexp", scale, softcap, bias, mask, causal, fully_masked)
    if keepdim is not False:
        check_flags("logsumexp()", keepdim=keepdim)
    return _run(_LOGSUMEXP, input, options, dim, dtype, keepdim, out, (backend, strategy, batch_invariant))


@overload
def cross_entropy(
    input: A, target: A, weight: A | None = None, ignore_index: int = -100, reduction: Reduction = "mean",
    label_smoothing: float = 0.0, *, return_stats: Literal[False] = False, **options: Unpack[LossOptions],
) -> A: ...  # fmt: skip


@overload
def cross_entropy(
    input: A, target: A, weight: A | None = None, ignore_index: int = -100, reduction: Reduction = "mean",
    label_smoothing: float = 0.0, *, return_stats: Literal[True], **options: Unpack[LossOptions],
) -> tuple[A, LossStatistics[A]]: ...  # fmt: skip


def cross_entropy(
    input: A,
    target: A,
    weight: A | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    scale: Any = 1.0,
    softcap: float | None = None,
    mask: A | None = None,
    dtype: Any = None,
    return_stats: bool = False,
    inplace_backward: bool = False,
    batch_invariant: bool = False,
    check: bool = False,
    backend: Backend | None = None,
    strategy: Strategy | None = None,
) -> Any:
    """`torch.nn.functional.cross_entropy` in one pass over the logits, exact, with nothing overwritten.

    The scores and the loss of a row are::

        z = softcap * tanh(scale * input / softcap)
        loss = -weight[target] * log_softmax(z)[target] + z_loss * logsumexp(z)**2

    If the losses are reduced to a scalar and a gradient is wanted, one kernel reads the logits once and writes the
    gradient.  Otherwise backward computes the gradient from the logits.  A gradient that is written so has the dtype of
    the logits before backward multiplies it: a float16 loss that is scaled up against underflow needs the reduction
    "none".  Derivatives of a gradient are computed by PyTorch's operations from the logits.

    Args:
        input: Logits of shape (C), (N, C) or (N, C, d1, ...), a torch tensor with any strides, which is never copied
            and whose gradient has its memory layout, or a NumPy array.  The other arrays are of the same kind.
        target: Class of each row, integers of shape (), (N) or (N, d1, ...); or the probability of each class, in
            the shape of `input`, which PyTorch's operations compute.
        weight: A factor for each class, of shape (C).  With a DTensor as input, target and weight may be DTensors, or
            plain tensors that are whole on every process.
        ignore_index: Target of the rows that count for nothing: no loss, no gradient, no part in a mean.
        reduction: "mean" (over the weights of the targets that count), "sum" or "none".
        label_smoothing: Part of the target that is spread over all classes, from 0 to 1.
        z_loss: Factor, at least 0, of logsumexp(z)**2, which is added to the loss of each row that counts.  In a mean,
            this part is averaged over the rows that count, without their weights.
        scale: Factor of the input, an inverse temperature: a number, or a tensor with one number per row, as for
            `softmax`, which gets no gradient.
        softcap: Soft bound on the magnitude of scale * input: a positive number.
        mask: Boolean, broadcasts to the shape of `input`: True for the classes that are kept.  The others have
            probability 0 and no part of the smoothing, which is spread over the classes that are kept.  A row whose
            target is not kept has the loss inf, and a row without a class that is kept NaN.
        dtype: Dtype of the loss.  Float32 gives the loss of 16-bit logits without rounding it to 16 bits; the gradient
            has the dtype of the logits.
        return_stats: Return (loss, statistics): lse, z_loss, entropy, the largest class and whether it is the target,
            for each row, detached.
        inplace_backward: Allow the gradient to overwrite `input`, which saves its memory.  Autograd raises an error if
            another operation needs the old values; a leaf that requires a gradient is an error on every device.
        batch_invariant: Give a row the same bits however many rows are beside it, for some speed.
        check: Raise an error for a target that is out of range.  The call then waits for the GPU.
        backend, strategy: As for `softmax`.

    Returns:
        The loss, a scalar, or with "none" in the shape of the rows.  Its dtype is `dtype`, or that of `input`, or
        float32 under autocast.  With a DTensor, the mean and the sum are over the rows of all processes, which all have
        the result.  On a GPU a row whose target is out of range has the loss NaN and no gradient.

    Raises:
        TypeError: an argument is of the wrong type.
        RuntimeError: the dtype of `input`, the shape of `weight` or `label_smoothing` is wrong; with
            `inplace_backward`, the gradient is itself to be differentiated.
        ValueError: the shape of `target`, `reduction`, `z_loss` or `softcap` is wrong.
        IndexError: on a CPU, for a NumPy array, or with `check`, a target is out of range.
        PlanError: the forced backend or strategy cannot run; the message lists every reason.

    Example:
        >>> import torch
        >>> cross_entropy(torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.tensor([0, -100]))
        tensor(0.6931)
    """
    scores = _options("cross_entropy", scale, softcap, None, mask, False, "nan")
    if return_stats is not False or batch_invariant is not False:
        check_flags("cross_entropy()", return_stats=return_stats, batch_invariant=batch_invariant)
    runner = _RUNNERS.get(type(input)) or _find_runner("cross_entropy", type(input))
    by_default = backend is None and strategy is None and not batch_invariant and dtype is None
    settings = _LOSS_SETTINGS if by_default else Settings(1, dtype, False, Choice(backend, strategy, batch_invariant))
    # Fields of `Loss` as a tuple: a cached call is found by this tuple and never builds a `Loss`.
    fields = (settings, ignore_index, reduction, label_smoothing, z_loss, scores, inplace_backward)
    if check:
        runner.check_targets(input, target, weight, fields)
    return runner.run_loss(input, target, weight, fields, return_stats)


def token_logprobs(
    logits: A,
    index: A,
    dim: int = -1,
    *,
    ignore_index: int | None = None,
    support: tuple[A, A] | None = None,
    scale: Any = 1.0,
    softcap: float | None = None,
    mask: A | None = None,
    entropy: bool = True,
    batch_invariant: bool = False,
    check: bool = False,
    backend: Backend | None = None,
    strategy: Strategy | None = None,
) -> TokenLogprobs[A]:
    """Log-probability of the chosen token, entropy and logsumexp of each row, in one pass over the logits.

    Each is differentiable in the logits, and one kernel computes the gradient of all three.

    Args:
        logits: Floating-point torch tensor or DTensor with any strides, which is never copied, or a NumPy array.
        index: The chosen token of each row: integers in the shape of `logits` without `dim`.  Or several tokens of each
            row, along `dim`, as in torch.gather: (B, K) for logits of shape (B, V).
        dim: The dimension of the tokens, also counted from the end.
        ignore_index: An index whose logprob is 0 and has no gradient, as of padding; None where there is none.  The
            entropy and lse of its row are as those of any row.
        support: (token_ids, offsets), the tokens that each row is restricted to, as `sample` returns those that it
            kept: integers of shapes (rows * n) and (rows + 1).  Row i, in the order of `logits` without `dim`, has the
            at most n distinct tokens token_ids[offsets[i] : offsets[i + 1]].  Logprob, entropy and lse are those of
            their probabilities, made to add up to 1; the other logits are not read and have the gradient 0.
        scale: Factor of the logits, the inverse temperature: a number, or a tensor with one number per row, as for
            `softmax`, which gets no gradient.
        softcap: Soft bound on the magnitude of scale * logits: a positive number.
        mask: Boolean, broadcasts to the shape of `logits`: True for the tokens that the sampler could choose.
        entropy: Compute the entropy too.
        check: Raise an error for an index, or a token of the support, that is out of range, and for a row with more
            than n tokens.  The call then waits for the GPU.
        batch_invariant, backend, strategy: As for `softmax`.

    Returns:
        The named tuple (logprob, entropy, lse): logprob in the shape of `index`, the others in that of the rows, in
        float32 (float64 for float64 logits).  The logprob is NaN where the index is no token, and -inf where the mask
        or the support excludes the token.  A row whose support is empty, has more than n tokens or one that is out of
        range has the logprob NaN and no gradient.

    Raises:
        RuntimeError: the dtype of `logits` is wrong, or `scale` is a tensor that requires a gradient.
        TypeError, ValueError, IndexError, PlanError: as for `cross_entropy`.

    Example:
        >>> import torch
        >>> found = token_logprobs(torch.zeros(2, 4), torch.tensor([0, 3]))
        >>> found.logprob, found.entropy
        (tensor([-1.3863, -1.3863]), tensor([1.3863, 1.3863]))
        >>> kept = torch.tensor([0, 2, 3, -1]), torch.tensor([0, 2, 3])
        >>> token_logprobs(torch.zeros(2, 4), torch.tensor([0, 3]), support=kept).logprob
        tensor([-0.6931,  0.0000])
    """
    options = _options("token_logprobs", scale, softcap, None, mask, False, "nan")
    if entropy is not True or batch_invariant is not False:
        check_flags("token_logprobs()", entropy=entropy, batch_invariant=batch_invariant)
    runner = _RUNNERS.get(type(logits)) or _find_runner("token_logprobs", type(logits))
    if check:
        runner.check_tokens(logits, index, dim, ignore_index, support)
    by_default = backend is None and strategy is None and not batch_invariant
    choice = ANY if by_default else Choice(backend, strategy, batch_invariant)
    return runner.run_tokens(logits, index, dim, options, entropy, choice, ignore_index, support)


_RUNNERS: dict[type, ModuleType] = {np.ndarray: numpy_run}
"""The module that runs the calls on inputs of this type, once an input of this type has been seen."""


def _options(
    function: str, scale: Any, softcap: Any, bias: Any, mask: Any, causal: Any, fully_masked: Any
) -> ScoreOptions | None:
    """The score options, checked; None where every one is at its default, which costs little host time."""
    nothing = mask is None and bias is None and softcap is None and causal is False and fully_masked == "nan"
    if nothing and scale.__class__ is float and scale == 1.0:
        return None
    return checked_options(function, scale, softcap, bias, mask, causal, fully_masked)


def _run(
    operation: Operation, input: Array, options: ScoreOptions | None, dim: Any, dtype: Any, keepdim: bool, out: Any,
    choice: tuple[str | None, str | None, bool],
) -> Any:  # fmt: skip
    """Make the record of a call and pass it on; a call with few arguments is passed on without one."""
    runner = _RUNNERS.get(type(input)) or _find_runner(operation.name, type(input))
    if choice[2] is not False:
        check_flags(f"{operation}()", batch_invariant=choice[2])
    if options is None and dtype is None and not choice[2]:
        return runner.run_plain(operation, input, dim, keepdim, out, choice)
    return runner.run(Call(operation, input, Settings(dim, dtype, keepdim, Choice(*choice)), options, out))


def _find_runner(function: str, kind: type) -> ModuleType:
    """The module that runs the calls on inputs of this type."""
    check_no_jax(function, kind)
    try:
        if issubclass(kind, ARRAY_TYPES):
            found = numpy_run
        elif is_dtensor(kind):
            from .distributed import dtensor as found  # type: ignore[no-redef]  # the same functions
        else:
            from .torch import run as found  # type: ignore[no-redef]  # the same functions
    except ImportError as error:
        raise TypeError(
            f"{function}() needs a NumPy array or a torch tensor, and torch cannot be imported here ({error}): "
            "pip install 'onlinesoftmax[torch]'"
        ) from None
    _RUNNERS[kind] = found
    return found


if hasattr(sys.modules.get("torch"), "Tensor"):
    # Fill the table now: torch.compile guards on it, and a first call inside a trace would cause a second
    # compilation.  An unsupported torch raises its error at the first call on a tensor.
    with suppress(TypeError):
        _find_runner("softmax", sys.modules["torch"].Tensor)
