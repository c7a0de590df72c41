"""The way that a call of `sample` would take (sampling/), and why not another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..core.device import Device
from ..core.task import ITEMSIZE
from ..kernels import registry
from ..sampling.kernels import unfiltered
from ..sampling.kernels.source import MOST_TOP, SHORT, Shape, shape_of
from ..sampling.kernels.which_kernel import is_unfiltered, lists_at_most, needs_more_memory, refusal
from ..sampling.rules import checked_parameters
from .rows import described, sizes_of
from .ways import EAGER, OtherWay, WayExplanation, why_no_cuda

SAMPLE = "sample"

FILTERS = ("top_k", "top_p", "min_p")


INTEGER_BYTES = {"torch": 8, "jax": 4}
"""Bytes of a token or a count in the result, by framework."""

UNFILTERED, FILTERED = "unfiltered.cuh", "sample.cuh"
"""Names of the kernels: their files in sampling/kernels."""


class Asked(NamedTuple):
    """The part of a call that its way depends on.

    Attributes:
        rows, tokens: Sizes of the logits.
        dtype: Name of their dtype.
        framework: "torch" or "jax".
        adjacent: True if no copy is counted: the logits of a row are adjacent in memory, and one stride leads from row
            to row.  Always True for JAX, whose arrays have no strides.
        filters: Names of the filters that are given.
        top: Number of the largest log-probabilities that are returned.
        listed: As Parameters.listed.
        options: Names of the score options that are given.
    """

    rows: int
    tokens: int
    dtype: str
    framework: str
    adjacent: bool
    filters: tuple[str, ...]
    top: int
    listed: int | None
    options: tuple[str, ...]


class Kernel(NamedTuple):
    """The kernel of a call.

    Attributes:
        name: Its name.
        blocks: Blocks of a row.
        threads: Threads of a block.
        form: How blocks share multiprocessors and memory, in words; kernels of the same sizes may differ in it.
        reason: One sentence: why it takes the call.
    """

    name: str
    blocks: int
    threads: int
    form: str
    reason: str


@dataclass(frozen=True, repr=False)
class SampleExplanation(WayExplanation):
    """The result of `explain` for `sample`; `str()` of it is a text to read."""

    function = SAMPLE
    problem: Asked
    kernel: Kernel | None

    @property
    def name(self) -> str:
        """Name of the kernel, or that of EAGER."""
        return self.kernel.name if self.kernel else EAGER[self.problem.framework]

    @property
    def asked(self) -> str:
        """The call in one line."""
        q = self.problem
        listed = [f"top_logprobs={q.top}"] if q.top else []
        given = ", ".join([*q.filters, *listed, *q.options])
        return f"{SAMPLE} of {q.rows} x {q.tokens} {q.dtype}{f' with {given}' if given else ''} on {self.device.name}"

    @property
    def read_bytes(self) -> int:
        """The bytes of the logits."""
        return self.problem.rows * self.problem.tokens * ITEMSIZE[self.problem.dtype]

    @property
    def written_bytes(self) -> int:
        """The bytes of token, log-probability, lse, kept and valid, and of the listed tokens."""
        wide, integer = 8 if self.problem.dtype == "float64" else 4, INTEGER_BYTES[self.problem.framework]
        return self.problem.rows * (1 + 2 * (integer + wide) + self.problem.top * (integer + wide))

    @property
    def launch(self) -> str:
        """The blocks and threads of the kernel."""
        assert self.kernel is not None
        blocks = f"{self.problem.rows} x {self.kernel.blocks} blocks of {self.kernel.threads} threads"
        return ", ".join(filter(None, (blocks, self.kernel.form)))


def described_sample(x: Any, dim: int, dtype: Any, asked: dict[str, Any], options: dict[str, Any]) -> Asked:
    """Return the properties that decide the way of a call on torch tensors; the checks are those of the function.

    Args:
        x: Logits: a tensor or a shape.
        dim: The dimension of the tokens.
        dtype: Dtype of a shape.
        asked: top_k, top_p, min_p and top_logprobs, as in the function.
        options: softcap, bias and mask, as in the function; a bias and a mask may be shapes.
    """
    with registry.needing("torch", "sampling"):
        import torch

        from ..sampling import arguments

    shape, like = described(x, dtype)
    x = x if torch.is_tensor(x) else shape
    bias, mask = (without_data(options[name], its) for name, its in (("bias", like.dtype), ("mask", "bool")))
    logits = arguments.checked_logits(SAMPLE, without_data(x, like.dtype), dim, 1.0, options["softcap"], bias, mask)
    k, p, least = (without_data(asked[name]) for name in FILTERS)
    parameters = arguments.checked_parameters(logits, 1.0, k, p, least, "keep")
    given = tuple(name for name in FILTERS if getattr(parameters, name) is not None)
    top = arguments.checked_count(logits, "top_logprobs", asked["top_logprobs"], 0)
    sizes = math.prod(logits.rows), logits.tokens
    adjacent, listed = is_in_rows(logits.x.movedim(logits.dim, -1)), parameters.listed(top)
    return Asked(*sizes, like.dtype, "torch", adjacent, given, top, listed, logits.options.given)


def is_in_rows(x: Any) -> bool:
    """True where the elements of a row, the last dimension, are adjacent, and one distance leads from row to row."""
    try:
        return bool(x.view(math.prod(x.shape[:-1]), x.shape[-1]).stride(1) == 1)
    except RuntimeError:
        return False


def without_data(t: Any, dtype: str = "") -> Any:
    """A tensor without its data, or, with a dtype, one of a shape; another value as it is."""
    import torch

    if dtype and isinstance(t, (tuple, list)):
        return torch.empty(sizes_of("bias or mask", t), dtype=getattr(torch, dtype), device="meta")
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") if torch.is_tensor(t) else t


def sample_in_jax(x: Any, axis: int, dtype: Any, asked: dict[str, Any], options: dict[str, Any]) -> Asked:
    """The properties that decide the way of a call on arrays of JAX; arguments as for `described_sample`."""
    with registry.needing("jax", "sampling"):
        import jax

        from ..jax.prepare import options_of
        from ..jax.sampling import arguments

    shape, like = described(x, dtype)
    given: list[tuple[str, ...]] = []

    def scores(x: Any, bias: Any, where: Any) -> Any:
        rows = arguments.checked_rows(SAMPLE, x, axis, options_of(SAMPLE, 1.0, options["softcap"], bias, where))
        given.append(rows.options.given)
        return rows.x

    def without_data(name: str, dtype: str) -> Any:
        t = options[name]
        return jax.ShapeDtypeStruct(sizes_of(name, t), dtype) if isinstance(t, (tuple, list)) else t

    # The checks need no dtype but a floating one, and JAX may lack float64.
    logits = jax.ShapeDtypeStruct(shape, "float32")
    *rows, tokens = jax.eval_shape(scores, logits, without_data("bias", "float32"), without_data("mask", "bool")).shape
    of_rows = partial(arguments.checked_of_rows, SAMPLE, tuple(rows))
    k, p, least = (asked[name] for name in FILTERS)
    parameters = checked_parameters(SAMPLE, tokens, of_rows, 1.0, (k, p, least), "keep")
    filtering = tuple(name for name in FILTERS if getattr(parameters, name) is not None)
    top = arguments.checked_count(SAMPLE, "top_logprobs", asked["top_logprobs"], tokens)
    return Asked(math.prod(rows), tokens, like.dtype, "jax", True, filtering, top, parameters.listed(top), given[0])


def explain_sample(problem: Asked, device: Device, named: bool) -> SampleExplanation:
    """The way of a call, and why not another.

    Args:
        problem: What the way depends on.
        device: The device.
        named: True for a device that this machine need not have.
    """
    found = _kernel(problem, device, named)
    if isinstance(found, str):
        return SampleExplanation(problem, device, None, "no kernel takes the call", (OtherWay("a kernel", found),))
    if found.name == UNFILTERED:
        other = OtherWay(FILTERED, "nothing is asked for that needs a list of tokens")
    else:
        asked = [*problem.filters, *(["top_logprobs"] if problem.top else [])]
        other = OtherWay(UNFILTERED, f"it has no {', '.join(asked)}")
    return SampleExplanation(
        problem, device, found, found.reason, (other, OtherWay(EAGER[problem.framework], "a kernel takes the call"))
    )


def _kernel(problem: Asked, device: Device, named: bool) -> Kernel | str:
    """The kernel of a call; or, in one sentence, why none takes it."""
    if reason := why_no_cuda(problem.framework, device, named):
        return reason
    dtype, before = problem.dtype, ""
    if not problem.adjacent:
        before = "PyTorch copies the logits, so that those of a row are adjacent; then "
    if problem.options:
        dtype = "float64" if dtype == "float64" else "float32"
        before = f"{'PyTorch' if problem.framework == 'torch' else 'XLA'} writes the scores in {dtype}; then "
    rows, tokens, filters, top = problem.rows, problem.tokens, problem.filters, problem.top
    if reason := refusal(dtype, rows, device):
        return reason
    if is_unfiltered(bool(filters), top):
        shape = unfiltered.shape_of(rows, tokens, dtype, True, False, device)
        reason = f"{before}one read of the logits, of which nothing is held"
        return Kernel(UNFILTERED, shape.cluster, shape.threads, "", reason)
    if top > MOST_TOP:
        return lists_at_most(MOST_TOP)
    filtered = shape_of(rows, tokens, dtype, True, device, problem.listed)
    if filtered is None:
        return needs_more_memory(device)
    reason = f"{before}it lists the largest tokens, in {reads_of(filters)}"
    return Kernel(FILTERED, filtered.cluster, filtered.threads, _form_of(filtered), reason)


def _form_of(shape: Shape) -> str:
    """Kernel.form of a kernel with filters."""
    places = f"{shape.resident} on a multiprocessor" if shape.resident > 1 else "each alone on its multiprocessor"
    held = ", its logits in shared memory" if shape.tiles else ""
    return f"{places}{held}{', with short lists' if shape.lists is SHORT else ''}"


def reads_of(filters: tuple[str, ...]) -> str:
    """How often sample.cuh reads the logits, in words."""
    # Without top_k all tokens may be kept, so masses are added up when a bound of the threshold is known.
    again = filters and "top_k" not in filters
    return "two reads of the logits, the second from the L2 cache" if again else "one read of the logits"
