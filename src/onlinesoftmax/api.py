"""The public functions: PyTorch's signatures and semantics, on any device; NumPy arrays too."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from . import numpy
from .core.arrays import Array
from .core.call import Call, Settings
from .core.operations import OPERATIONS, Operation
from .core.options import ScoreOptions, checked_options
from .core.task import Choice

_SOFTMAX, _LOG_SOFTMAX, _LOGSUMEXP = (OPERATIONS[name] for name in ("softmax", "log_softmax", "logsumexp"))


def softmax(
    input: Array,
    dim: int = -1,
    *,
    dtype: Any = None,
    scale: Any = 1.0,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    softcap: float | None = None,
    fully_masked: str = "nan",
    out: Any = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    strategy: str | None = None,
) -> Array:
    """exp(z) / sum(exp(z)) along `dim`: `torch.softmax` with a choice of kernel, and with all of this fused:

        z = softcap * tanh(scale * input / softcap) + bias,  and -inf where masked

    Derivatives of every order in `input`, `bias` and `scale`, torch.func, torch.compile, autocast and
    CUDA graphs work as for PyTorch's own function.

    Args:
        input: Floating-point torch tensor or NumPy array of any shape and strides; never copied.
        dim: Dimension to normalise, also counted from the end.
        dtype: Dtype of the result (and of the arithmetic, if wider); that of `input` by default.
            float16 and bfloat16 are accumulated in float32.
        scale: Factor of the input, an inverse temperature: a number, or a 0-d tensor on its device.
        mask: Boolean, broadcasts to the shape of `input`: True keeps, as in `scaled_dot_product_attention`.
        bias: Floating point, broadcasts to the shape of `input`.
        causal: Query i, counted along the dimension before `dim`, keeps keys up to i + keys - queries.
        softcap: Bound on |scale * input|, softly: a positive number.
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
        NotImplementedError: the dtype is not floating point.
        RuntimeError: `out`, `mask`, `bias` or `scale` does not fit.
        ValueError: softcap, fully_masked or causal makes no sense.
        PlanError: what was forced cannot run; the message lists every reason.

    Source:
        Milakov and Gimelshein, arXiv:1805.02867.

    Example:
        >>> import torch
        >>> softmax(torch.zeros(2, 4), dim=1)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500, 0.2500]])
        >>> softmax(torch.zeros(2, 3), causal=True)
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    options = checked_options("softmax", scale, softcap, bias, mask, causal, fully_masked)
    return _run(_SOFTMAX, input, options, dim, dtype, False, out, (backend, strategy, batch_invariant))


def log_softmax(
    input: Array,
    dim: int = -1,
    *,
    dtype: Any = None,
    scale: Any = 1.0,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    softcap: float | None = None,
    fully_masked: str = "nan",
    out: Any = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    strategy: str | None = None,
) -> Array:
    """Z - logsumexp(z) along `dim`: `torch.log_softmax`.  z, arguments and errors as for `softmax`.

    Example:
        >>> import torch
        >>> log_softmax(torch.zeros(3), dim=0)
        tensor([-1.0986, -1.0986, -1.0986])
    """
    options = checked_options("log_softmax", scale, softcap, bias, mask, causal, fully_masked)
    return _run(_LOG_SOFTMAX, input, options, dim, dtype, False, out, (backend, strategy, batch_invariant))


def logsumexp(
    input: Array,
    dim: int | tuple[int, ...] = -1,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    scale: Any = 1.0,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    softcap: float | None = None,
    fully_masked: str = "nan",
    out: Any = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    strategy: str | None = None,
) -> Array:
    """log(sum(exp(z))) along `dim`: `torch.logsumexp`.  z, other arguments and errors as for `softmax`.

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
    options = checked_options("logsumexp", scale, softcap, bias, mask, causal, fully_masked)
    return _run(_LOGSUMEXP, input, options, dim, dtype, keepdim, out, (backend, strategy, batch_invariant))


_torch_runner: ModuleType | None = None
"""torch/dispatch.py, once a torch tensor has been seen."""


def _run(
    operation: Operation, input: Array, options: ScoreOptions | None, dim: Any, dtype: Any, keepdim: bool, out: Any,
    choice: tuple[str | None, str | None, bool],
) -> Any:  # fmt: skip
    """Make the record of a call and pass it on; a usual call is passed on without a record, to save host time."""
    runner = numpy if isinstance(input, np.ndarray) else _torch_runner or _import_torch_runner()
    if options is None and dtype is None and not choice[2]:
        return runner.run_plain(operation, input, dim, keepdim, out, choice)
    return runner.run(Call(operation, input, Settings(dim, dtype, keepdim, Choice(*choice)), options, out))


def _import_torch_runner() -> ModuleType:
    global _torch_runner
    try:
        from .torch import dispatch
    except ImportError as error:
        raise TypeError(
            "input must be a NumPy array or a torch tensor, and torch cannot be imported here "
            f"({error}): pip install 'onlinesoftmax[torch]'"
        ) from None
    _torch_runner = dispatch
    return dispatch
