"""The rules for the arguments of sampling that all array libraries share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..core.arguments import Library, check_index, check_options, checked_dim, checked_number, not_floating
from ..core.arrays import Array
from ..core.call import Call, Settings
from ..core.options import LARGEST_FLOAT32, LARGEST_INT64, ScoreOptions, bounds, checked_options, is_number
from ..ops import OPERATIONS
from .masses import MOST_TOKENS

OfRows = Callable[[str, Any, str, float, float], Array]
"""of_rows(argument, value, dtype, low, high) returns a number from low to high, or an array, as an array of all rows.

An error for any other value names the argument.  The values of an array are not read.
"""


class Parameters(NamedTuple):
    """Parameters of rows, contiguous (rows,) arrays; None for a filter that is not given.

    Attributes:
        temperature: Divisor of the scores, float32, so that its product with the noise is exact in float64; 0 for the
            token with the largest score.
        top_k: Number of tokens to keep, int64; all where it is not positive.
        top_p: Probability to keep, float64; all from 1 on.
        min_p: Smallest probability to keep, as a part of the largest, float64.
        first: True to keep, of the tokens that are equal at a threshold, those with the lowest ids; False for all.
        kept: The number of tokens that top_k keeps of each row; None where it differs, or keeps all.
    """

    temperature: Array
    top_k: Array | None
    top_p: Array | None
    min_p: Array | None
    first: bool
    kept: int | None = None

    # No property, which torch.compile of PyTorch 2.10 cannot trace.
    def is_filtered(self) -> bool:
        """True where a filter is given."""
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    def tensors(self) -> dict[str, Array | None]:
        """The parameters by name."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    def listed(self, top: int) -> int | None:
        """Most tokens that are kept of a row, or listed as its `top` largest; None if that is not known."""
        return None if self.kept is None else max(self.kept, top)

    def map(self, function: Callable[[Array], Array]) -> Parameters:
        """The parameters that a function makes of each of them."""
        k, p, least = (None if t is None else function(t) for t in (self.top_k, self.top_p, self.min_p))
        return Parameters(function(self.temperature), k, p, least, self.first, self.kept)


class Logits(NamedTuple):
    """Logits and the name of the public function, for errors.

    Attributes:
        library: Their library.
        name: Name of the function.
        x: Logits.
        dim: Dimension of the tokens, counted from 0.
        options: Score options.
        rows: Shape of the logits without that dimension.
        tokens: Number of tokens of a row, of which the logits may hold a part.
    """

    library: Library
    name: str
    x: Array
    dim: int
    options: ScoreOptions
    rows: tuple[int, ...]
    tokens: int


def checked_part(
    library: Library, name: str, logits: Any, dim: Any, options: tuple[Any, Any, Any, Any], argument: str
) -> Logits:
    """The logits and their score options, if other processes may have more tokens of each row; there may be none.

    Args:
        library: The library of the logits.
        name: Name of the public function.
        logits, dim: Its arguments.
        options: Its arguments scale, softcap, bias and mask.
        argument: Name of the logits.
    """
    caller = f"{name}()"
    library.check_array(caller, argument, logits)
    if type(logits).__name__ == "DTensor":
        raise TypeError(f"{caller}: {argument} is a DTensor, which this function does not take; pass its full_tensor()")
    if library.kind_of(logits) != "floating":
        raise not_floating(caller, argument, logits)
    axis = checked_dim(name, dim, logits.ndim)
    given = checked_options(name, *options, False, "nan")
    check_options(library, Call(OPERATIONS["softmax"], logits, Settings(axis), given, None), name)
    rows = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    tokens = logits.shape[axis] if logits.ndim else 0
    return Logits(library, name, logits, axis, given or ScoreOptions(), rows, tokens)


def check_has_tokens(logits: Logits, argument: str) -> None:
    """Raise an error for logits without a token; `argument` is the name of the logits."""
    if not logits.tokens:
        raise ValueError(f"{logits.name}(): {argument} has no tokens, its shape is {tuple(logits.x.shape)}")


def checked_choice(caller: str, argument: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of these words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{caller}: {argument} must be {' or '.join(map(repr, choices))}, got {value!r}")
    return str(value)


def checked_parameters(
    caller: str, tokens: int, of_rows: OfRows, temperature: Any, filters: tuple[Any, Any, Any], ties: Any
) -> Parameters:
    """Temperature and filters of the rows.  A number that filters nothing is no filter.

    Args:
        caller: Name of the public function, for errors.
        tokens: Number of tokens of a row.
        of_rows: Checks a parameter.
        temperature, ties: The arguments.
        filters: The arguments top_k, top_p and min_p.
    """
    top_k, top_p, min_p = filters
    if tokens > MOST_TOKENS:
        raise ValueError(f"{caller}: rows have {tokens} tokens, and may have {MOST_TOKENS}")
    # A float32 number makes the products with the noise exact.
    divisor = of_rows("temperature", temperature, "float32", 0.0, LARGEST_FLOAT32)
    k = None if top_k is None else of_rows("top_k", top_k, "int64", -1, LARGEST_INT64)
    p = None if top_p is None else of_rows("top_p", top_p, "float64", 0.0, math.inf)
    least = None if min_p is None else of_rows("min_p", min_p, "float64", 0.0, 1.0)
    kept = top_k if is_number(top_k) and 0 < top_k < tokens else None
    if is_number(top_k) and kept is None:
        k = None
    if is_number(top_p) and top_p >= 1:
        p = None
    if is_number(min_p) and not min_p:
        least = None
    first = checked_choice(caller, "ties", ties, ("keep", "first")) == "first"
    return Parameters(divisor, k, p, least, first, kept)


def checked_between(logits: Logits, argument: str, value: Any, whole: bool, low: float, high: float) -> Any:
    """A number from `low` to `high`, an integer where `whole` is True."""
    name, kind, method = logits.name, int if whole else float, "__index__" if whole else "__float__"
    # A symbol of a trace has the type of a number, and cannot be asked for methods.
    plain = type(value) is int or type(value) is kind
    flag = isinstance(value, (bool, np.bool_))
    if not plain and (flag or not hasattr(value, method) or getattr(value, "shape", ()) != ()):
        wanted, array = "an int" if whole else "a number", type(logits.x).__name__
        raise TypeError(f"{name}(): {argument} must be {wanted} or {array}, as logits is, not {type(value).__name__}")
    number = checked_number(logits.library, name, argument, value, kind)
    if not low <= number <= high:
        raise ValueError(f"{name}(): {argument} must be {bounds(low, high)}, got {value}")
    return number


def checked_count(logits: Logits, argument: str, value: Any, low: int) -> int:
    """A number of tokens, at most those of a row."""
    name, tokens = logits.name, logits.tokens
    number: int = checked_number(logits.library, name, argument, value, int)
    if not low <= number <= tokens:
        raise ValueError(f"{name}(): {argument} must be from {low} to the {tokens} tokens of a row, got {value}")
    return number


def checked_target(logits: Logits, target: Any) -> Array | None:
    """A token of each row, or None."""
    if target is not None:
        caller = f"{logits.name}()"
        logits.library.check_array(caller, "target", target, logits.x)
        check_index(logits.library, caller, "target", logits.x, target, logits.rows)
    return target


def check_positions(caller: str, target: Array, tokens: Any, draft: Any) -> None:
    """Raise an error for logits of the target model with a wrong number of positions, if only that number is wrong.

    Args:
        caller: Name of the public function as errors have it.
        target, tokens, draft: The arguments target_logits, draft_tokens and draft_logits of `verify`.
    """
    (*rows, positions), shape = target.shape[:-1], tuple(getattr(tokens, "shape", ()))
    others_agree = draft is None or tuple(getattr(draft, "shape", ()))[:-1] == shape
    if shape and shape[:-1] == tuple(rows) and others_agree and positions != shape[-1] + 1:
        raise ValueError(
            f"{caller}: target_logits must have n + 1 = {shape[-1] + 1} positions for {shape[-1]} drafts, "
            f"got {positions}: one at each draft, and one after the last"
        )


def checked_drafts(target: Any, tokens: Any, draft: Logits | None) -> Any:
    """The logits of the target model with the shape of the rows of drafts as `rows`, after the checks of the drafts.

    Args:
        target: The logits of the target model.
        tokens: The drafted tokens.
        draft: The logits of the draft model, if there are any.
    """
    library, caller = target.library, f"{target.name}()"
    if not target.rows or not target.rows[-1]:
        raise ValueError(f"{caller}: target_logits must have shape (..., n + 1, tokens), got {tuple(target.x.shape)}")
    *rows, places = target.rows
    library.check_array(caller, "draft_tokens", tokens, target.x)
    wanted = (*rows, places - 1)
    check_positions(caller, target.x, tokens, None if draft is None else draft.x)
    if tokens.shape == wanted:
        check_index(library, caller, "draft_tokens", target.x, tokens, wanted)
    else:
        raise ValueError(f"{caller}: draft_tokens has shape {tuple(tokens.shape)}, and must have {wanted}")
    if draft is not None:
        wanted = (*wanted, target.tokens)
        if draft.x.shape != wanted:
            raise ValueError(f"{caller}: draft_logits has shape {tuple(draft.x.shape)}, and must have {wanted}")
        library.check_place(caller, "draft_logits", draft.x, target.x)
    return target._replace(rows=tuple(rows))
