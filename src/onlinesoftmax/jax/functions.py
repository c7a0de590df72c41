"""The public functions for JAX, in the conventions of `jax.nn` and, for the losses, of optax: swap the call.

They work under jit, grad, vmap, jvp, checkpoint and shard_map, for derivatives of every order, and need no torch.
For infinities, NaN, empty arrays and rows without an element softmax, log_softmax and logsumexp give what `jax.nn`
gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..core.annotations import FullyMasked, Reduction
from ..core.options import ScoreOptions
from ..core.task import Choice
from ..planner.plan import PlanError
from . import loss_run
from .eager import scores
from .loss_run import TokenLogprobs
from .loss_total import LossReduction
from .prepare import Axis, AxisName, checked_input, is_complex, is_plain, options_of, rows_of
from .run import result

if TYPE_CHECKING:
    from typing_extensions import Unpack

Backend = Literal["cuda", "pallas", "eager"]
Strategy = Literal["row", "cluster", "grid", "looped", "split"]

__all__ = ["TokenLogprobs", "cross_entropy", "log_softmax", "logsumexp", "softmax", "token_logprobs"]


def softmax(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, scale: Any = 1.0, softcap: float | None = None,
    bias: ArrayLike | None = None, backend: Backend | None = None, strategy: Strategy | None = None,
    axis_name: AxisName = None,
) -> Array:  # fmt: skip
    """The softmax exp(z) / sum(exp(z)) along `axis`: `jax.nn.softmax` of scores z.

    The scores are z = softcap * tanh(scale * x / softcap) + bias.

    Args:
        x: Array of numbers of any shape.  Integers are computed in JAX's default floating dtype; float16 and bfloat16
            are accumulated in float32.
        axis: One axis, several, or None for all of them.
        where: Boolean array that broadcasts to x's shape.  Elements where it is False count for nothing, and their
            output is 0; so is the output of a row without an element.
        scale: A number, or a floating-point array of one element, or of one for each row: it broadcasts to the shape
            of the input and has size 1 along `axis`.
        softcap: A positive number that bounds the scores; None for no bound.
        bias: Floating-point array that broadcasts to x's shape.
        backend: Force "cuda" (the CUDA kernels of PyTorch's tensors), "pallas" (kernels for JAX alone; on a CPU they
            are interpreted, which is slow) or "eager" (XLA's operations).  None plans: on NVIDIA GPUs the three
            compete if `axis` is the last one, and XLA runs elsewhere.
        strategy: Force the strategy "row", "cluster", "looped" or "split" of the backend "pallas", or "row", "cluster",
            "grid" or "looped" of the backend "cuda".
        axis_name: Inside `jax.shard_map`, the name of the mesh axis along which `axis` is sharded, or a tuple of
            names; None for whole rows.  x, where and bias are then the parts of one device, and the parts of all
            devices are equally large.  The devices exchange one state per row, of 8 bytes, in one collective, and the
            gradient exchanges one number per row.  A forced backend computes the states of the local part.

    Returns:
        Array of x's shape and floating dtype.  A row whose maximum is infinite is NaN.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: axis is out of range or given twice, where or bias does not broadcast, softcap is not positive,
            or axis_name is not an axis of an enclosing shard_map.
        PlanError: the forced backend or strategy cannot run; the message lists every reason.

    Source:
        Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    Example:
        >>> import jax.numpy as jnp
        >>> print(softmax(jnp.zeros((2, 4))))
        [[0.25 0.25 0.25 0.25]
         [0.25 0.25 0.25 0.25]]
        >>> print(softmax(jnp.zeros(4), where=jnp.arange(4) < 2))
        [0.5 0.5 0.  0. ]

        Rows that are sharded along the axis "v" of a mesh, here of one device:

        >>> import jax
        >>> from functools import partial
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("v",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> of_part, spec = partial(softmax, axis_name="v"), P(None, "v")
        >>> print(jax.shard_map(of_part, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.zeros((1, 4))))
        [[0.25 0.25 0.25 0.25]]
    """
    choice = Choice(backend, strategy)
    return _elementwise("softmax", x, axis, options_of("softmax", scale, softcap, bias, where), choice, axis_name)


def log_softmax(
    x: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *, scale: Any = 1.0, softcap: float | None = None,
    bias: ArrayLike | None = None, backend: Backend | None = None, strategy: Strategy | None = None,
    axis_name: AxisName = None,
) -> Array:  # fmt: skip
    """The log-softmax z - log(sum(exp(z))) along `axis`: `jax.nn.log_softmax` of scores z.

    The scores are z = softcap * tanh(scale * x / softcap) + bias.  The arguments, their shapes and dtypes, the errors
    and the source are those of `softmax`.

    Returns:
        Array of x's shape and floating dtype; -inf where `where` is False.  A row whose maximum is infinite is NaN.

    Raises:
        TypeError, ValueError, PlanError: as for `softmax`.

    Example:
        >>> import jax.numpy as jnp
        >>> print(log_softmax(jnp.zeros(3)))
        [-1.0986123 -1.0986123 -1.0986123]
    """
    choice = Choice(backend, strategy)
    return _elementwise(
        "log_softmax", x, axis, options_of("log_softmax", scale, softcap, bias, where), choice, axis_name
    )


class LogsumexpOptions(TypedDict, total=False):
    """Arguments of `logsumexp` by keyword."""

    scale: Any
    softcap: float | None
    bias: ArrayLike | None
    fully_masked: FullyMasked
    backend: Backend | None
    strategy: Strategy | None
    axis_name: AxisName


@overload
def logsumexp(
    a: ArrayLike, axis: Axis = None, b: ArrayLike | None = None, keepdims: bool = False,
    return_sign: Literal[False] = False, where: ArrayLike | None = None, **options: Unpack[LogsumexpOptions],
) -> Array: ...  # fmt: skip


@overload
def logsumexp(
    a: ArrayLike, axis: Axis = None, b: ArrayLike | None = None, keepdims: bool = False, *,
    return_sign: Literal[True], where: ArrayLike | None = None, **options: Unpack[LogsumexpOptions],
) -> tuple[Array, Array]: ...  # fmt: skip


def logsumexp(
    a: ArrayLike, axis: Axis = None, b: ArrayLike | None = None, keepdims: bool = False, return_sign: bool = False,
    where: ArrayLike | None = None, *, scale: Any = 1.0, softcap: float | None = None, bias: ArrayLike | None = None,
    fully_masked: FullyMasked = "nan", backend: Backend | None = None, strategy: Strategy | None = None,
    axis_name: AxisName = None,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """The logsumexp log(sum(b * exp(z))) along `axis`: `jax.nn.logsumexp` of scores z.

    The scores are z = softcap * tanh(scale * a / softcap) + bias.  The other arguments, the errors and the source are
    those of `softmax`.

    Args:
        a: Array of numbers or booleans, of any shape.
        axis: One axis, several, or None for all of them.
        b: Factors of the terms; an array that broadcasts to a's shape.  With b, and with return_sign, the function of
            `jax.nn` runs.
        keepdims: Keep the reduced axes with size 1.
        return_sign: Return the sign of the sum too.
        fully_masked: Gradient of a row whose scores are all -inf: "nan" as in `jax.nn`, or "zero".  An element that
            `where` leaves out has the gradient 0 in both cases.
        axis_name: As for `softmax`; not with b, return_sign or complex numbers.  The result is the same on every
            device, and its gradient needs no exchange.

    Returns:
        Array without the reduced axes, in a's floating dtype; with return_sign a pair of it and the signs.  A row
        without an element gives -inf.

    Raises:
        TypeError, ValueError: as for `softmax`; or fully_masked is neither of the two, or "zero" with b, return_sign
            or complex numbers.
        PlanError: as for `softmax`; or a kernel is forced with b, return_sign or complex numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> print(logsumexp(jnp.zeros((2, 8)), axis=-1))
        [2.0794415 2.0794415]
    """
    options = options_of("logsumexp", scale, softcap, bias, where)
    if fully_masked not in ("nan", "zero"):
        raise ValueError(f"logsumexp: fully_masked must be 'nan' or 'zero', got {fully_masked!r}")
    if b is not None or return_sign or (is_complex(a) and is_plain(options)):
        if fully_masked == "zero":
            raise ValueError("logsumexp: b, return_sign and complex numbers do not work with fully_masked='zero'")
        if axis_name is not None:
            raise ValueError("logsumexp: b, return_sign and complex numbers do not work with axis_name")
        if backend not in (None, "eager") or strategy not in (None, "row"):
            raise PlanError(
                "logsumexp: b, return_sign and complex numbers have no kernel: leave backend and strategy out"
            )
        z = a
        if not is_plain(options):
            rows = rows_of("logsumexp", checked_input("logsumexp", a), (), options._replace(mask=None))
            z = rows.back(scores(rows.options, rows.x, rows.arrays).astype(rows.x.dtype))
        return jax.nn.logsumexp(z, axis, b, keepdims, return_sign, where)
    rows = rows_of("logsumexp", checked_input("logsumexp", a), axis, options, axis_name)
    y = result(rows, "logsumexp", Choice(backend, strategy), fully_masked == "zero")
    return jnp.expand_dims(y, rows.axes) if keepdims else y


def cross_entropy(
    logits: ArrayLike, labels: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *,
    reduction: Reduction = "none", ignore_index: int | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    scale: Any = 1.0,
    softcap: float | None = None, backend: Backend | None = None, strategy: Strategy | None = None,
    axis_name: AxisName = None,
) -> Array:  # fmt: skip
    """The cross-entropy of every row along `axis`, as in optax, or its mean or sum over the rows.

    With integer labels it is `optax.softmax_cross_entropy_with_integer_labels`, lse(z) - z[label]; with floating
    labels q it is `optax.softmax_cross_entropy`, sum(q * (lse(z) - z)).  The scores are
    z = softcap * tanh(scale * logits / softcap).

    The reductions "mean" and "sum" are the fastest to train with: with integer labels, one pass reads the logits and
    writes the losses and the gradient of the scalar.  The gradient is kept instead of the logits, in their dtype.  A
    float16 loss that is scaled up against underflow needs the reduction "none", because the gradient is stored before
    it is multiplied.  docs/jax.md has the cases in which the logits are read again.  All reductions have derivatives of
    every order.

    Args:
        logits: Floating-point array of any shape.
        labels: Integers of the shape of the logits without `axis`, each the index of a class; with several axes, an
            index into them flattened in their order.  Or a floating-point or boolean array that broadcasts to the
            shape of the logits, with a weight for each class: XLA's operations compute this case.
        axis: One axis, several, or None for all of them.
        where: Boolean array that keeps classes: of the shape of the logits without `axis`, or one that broadcasts to
            their shape.  A class that is left out has probability 0: an integer label there gives inf, and the
            weight of a floating label there counts for nothing.  A row without a class gives 0.
        reduction: "none" for the loss of every row, "mean" or "sum" for a scalar.  A scalar is over the rows of the
            array that is given.  Inside `jax.shard_map`, these are the rows of one device.
        ignore_index: Integer label of the rows that count for nothing: their loss and their gradient are 0, and "mean"
            divides by the number of the other rows.  None where every row counts.  Only with integer labels.
        label_smoothing: Part of each label, from 0 to 1, that is spread evenly over the classes that are kept.
        z_loss: Factor of lse(z)², which is added to every loss.
        scale: A number, or a floating-point array of one element, or of one for each row: it broadcasts to the shape
            of the input and has size 1 along `axis`.
        softcap: A positive number that bounds the scores; None for no bound.
        backend, strategy: As for `softmax`.  Kernels take integer labels, but not `where` with label_smoothing.
        axis_name: Inside `jax.shard_map`, the name of the mesh axis along which `axis` is sharded, or a tuple of
            names; None for whole rows.  Logits, labels with a weight per class, and `where` are then the parts of one
            device, and the parts of all devices are equally large.  Integer labels are the same on these devices and
            count the classes of all devices; of several axes, the first is sharded.  The devices exchange one state
            per row, of 12 bytes, or 16 with label_smoothing, in one collective.  Labels with a weight per class, and
            `where` with label_smoothing, take one or two collectives more.  The gradient needs no exchange, and
            XLA computes it if there is label_smoothing.  Under `shard_map(..., check_vma=False)`, JAX sums the
            gradients of all devices: take the gradient outside of shard_map.

    Returns:
        Array of the shape of the logits without `axis`, or a scalar, in their dtype; float16 and bfloat16 are computed
        and reduced in float32 and rounded once.  The mean of no rows is NaN and their sum 0, as in PyTorch.

        An integer label that is no class, negative or too large, gives NaN and has the gradient 0.
        (optax counts negative labels from the end.)  A row whose maximum is infinite gives NaN.

    Raises:
        TypeError: logits are not floating point, or an argument has the wrong type.
        ValueError: axis is out of range or given twice, labels or where has another shape, a number is out of range,
            there is no such reduction, or ignore_index is given with labels that are not integers.
        PlanError: the forced backend or strategy cannot run; the message lists every reason.

    Source:
        Optax (https://optax.readthedocs.io, losses); z_loss: Chowdhery et al., "PaLM", arXiv:2204.02311, section 5;
        label_smoothing: Szegedy et al., arXiv:1512.00567, section 7; gradients from lse: Wijmans et al., "Cut Your
        Losses in Large-Vocabulary Language Models", arXiv:2411.09009; the gradient in the forward pass: Hsu et al.,
        "Liger Kernel", arXiv:2410.10989.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> print(cross_entropy(jnp.zeros((2, 4)), jnp.array([0, 3])))
        [1.3862944 1.3862944]
        >>> print(jax.grad(cross_entropy)(jnp.zeros(4), 1))
        [ 0.25 -0.75  0.25  0.25]

        The mean over the rows whose label is not -1, and its gradient, in one pass over the logits:

        >>> def loss(logits, labels):
        ...     return cross_entropy(logits, labels, reduction="mean", ignore_index=-1)
        >>> mean, gradient = jax.jit(jax.value_and_grad(loss))(jnp.zeros((3, 4)), jnp.array([0, -1, 3]))
        >>> print(mean)
        1.3862944
        >>> print(gradient)
        [[-0.375  0.125  0.125  0.125]
         [ 0.     0.     0.     0.   ]
         [ 0.125  0.125  0.125 -0.375]]

        Classes that are sharded along the axis "v" of a mesh, here of one device:

        >>> from functools import partial
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("v",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> of_part, specs = partial(cross_entropy, axis_name="v"), (P(None, "v"), P())
        >>> loss = jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=P())
        >>> print(loss(jnp.zeros((2, 4)), jnp.array([0, 3])))
        [1.3862944 1.3862944]
    """
    options = options_of("cross_entropy", scale, softcap, None, where)
    numbers = {"smoothing": label_smoothing, "z_loss": z_loss}
    choice, reduced = Choice(backend, strategy), LossReduction(reduction, ignore_index)
    return loss_run.run_loss(logits, labels, axis, options, numbers, choice, axis_name, reduced)


def token_logprobs(
    logits: ArrayLike, index: ArrayLike, axis: Axis = -1, where: ArrayLike | None = None, *,
    ignore_index: int | None = None, support: tuple[ArrayLike, ArrayLike] | None = None, entropy: bool = True,
    scale: Any = 1.0, softcap: float | None = None, backend: Backend | None = None, strategy: Strategy | None = None,
    axis_name: AxisName = None,
) -> TokenLogprobs:  # fmt: skip
    """The log-probability of one element of every row, with the entropy and the logsumexp of the row.

    One pass over the logits computes the three results, and one pass their gradient, alone or together.  The scores
    are z = softcap * tanh(scale * logits / softcap); a `scale` of 1 / temperature gives what a sampler used.

    Args:
        logits: Floating-point array of any shape.
        index: Integers of the shape of the logits without `axis`, each the index of an element of the row; with
            several axes, an index into them flattened in their order.  Or several elements of each row, along a single
            `axis`, as in jnp.take_along_axis: (B, K) for logits of shape (B, V).
        axis: One axis, several, or None for all of them.
        where: Boolean array that broadcasts to the shape of the logits.  An element where it is False has
            probability 0.
        ignore_index: An index whose logprob is 0 without a gradient, as of padding; None where there is none.
        support: (token_ids, offsets), the elements that each row is restricted to, as for
            `onlinesoftmax.token_logprobs`; with a single axis, and without axis_name.
        entropy: Compute the entropy.
        scale, softcap, backend, strategy: As for `softmax`.
        axis_name: As for `cross_entropy`.  The devices exchange one state per row, of 12 bytes, or 16 with the entropy.

    Returns:
        TokenLogprobs(logprob, entropy, lse) of arrays of the shape of the logits without `axis`, and logprob in the
        shape of the index, in float32 for 16-bit
        logits, else in their dtype; entropy is None where it is not asked for, and in nats.  An index that is no
        element, negative or too large, gives a logprob of NaN without a gradient; lse and entropy do not depend on
        it.  A row whose maximum is infinite has an infinite lse; its logprob and its entropy are NaN.

    Raises:
        TypeError: logits are not floating point, index is not of integers, or an argument has the wrong type.
        ValueError: axis is out of range or given twice, index or where has another shape, softcap is not positive.
        PlanError: the forced backend or strategy cannot run; the message lists every reason.

    Source:
        Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867, with sum(z * exp(z)) as
        a further sum of the state.

    Example:
        >>> import jax.numpy as jnp
        >>> found = token_logprobs(jnp.zeros((2, 4)), jnp.array([0, 3]))
        >>> print(found.logprob, found.entropy, found.lse)
        [-1.3862944 -1.3862944] [1.3862944 1.3862944] [1.3862944 1.3862944]
    """
    options = options_of("token_logprobs", scale, softcap, None, where)
    choice = Choice(backend, strategy)
    if support is not None:
        if axis_name is not None:
            raise ValueError("token_logprobs: support does not work with axis_name")
        with jax.numpy_rank_promotion("allow"):
            return loss_run.run_truncated(logits, index, axis, options, entropy, choice, ignore_index, support)
    return loss_run.run_tokens(logits, index, axis, options, entropy, choice, axis_name, ignore_index)


def _elementwise(
    name: str, x: ArrayLike, axis: Axis, options: ScoreOptions, choice: Choice, axis_name: AxisName
) -> Array:
    """The result of an operation with a value per element, in the shape of x."""
    if is_complex(x) and is_plain(options) and choice.backend in (None, "eager") and axis_name is None:
        found: Array = getattr(jax.nn, name)(x, axis, options.mask)
        return found
    rows = rows_of(name, checked_input(name, x), axis, options, axis_name)
    return rows.back(result(rows, name, choice))
