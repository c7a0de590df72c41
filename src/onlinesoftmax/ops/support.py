"""Log-probabilities of truncated distributions, for any array library, passed as `xp`.

A support has the tokens that a sampler kept: row i has token_ids[offsets[i] : offsets[i + 1]].  The logits of these
tokens are gathered to n places of each row, and the call runs on them alone: it reads no other logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..core.arguments import Library, check_range
from ..core.arrays import Array
from ..core.options import ScoreOptions

Support = tuple[Array, Array]
"""(token_ids, offsets)."""


class Truncated(NamedTuple):
    """A call on the tokens of a support.

    Attributes:
        x: Their logits, n of each row along the dimension of the tokens.
        index: Place of each target among them; -1 where it is none of them.
        options: The score options; the mask is False in the places without a token.
        outside: True where the target is a token that the support lacks.
    """

    x: Array
    index: Array
    options: ScoreOptions
    outside: Array


def checked_support(library: Library, caller: str, x: Array, axis: int, support: Any) -> tuple[Array, Array, int]:
    """(token_ids, offsets, n) after the checks that read no values; n is the number of places of each row.

    Args:
        library: The library of the arrays.
        caller: The public function, for errors.
        x: The logits.
        axis: The dimension of the tokens, counted from 0.
        support: The argument of the caller.
    """
    if not isinstance(support, (tuple, list)) or len(support) != 2:
        raise TypeError(f"{caller}: support must be a tuple (token_ids, offsets), got {type(support).__name__}")
    rows = math.prod(x.shape[:axis]) * math.prod(x.shape[axis + 1 :])
    for name, array in zip(("token_ids", "offsets"), support, strict=True):
        argument = f"support's {name}"
        library.check_array(caller, argument, array, x)
        if library.kind_of(array) != "integer":
            raise RuntimeError(f"{caller}: {argument} must have an integer dtype, got {array.dtype}")
        if array.ndim != 1:
            raise ValueError(f"{caller}: {argument} must have one dimension, got shape {tuple(array.shape)}")
    token_ids, offsets = support
    if offsets.shape[0] != rows + 1:
        raise ValueError(
            f"{caller}: support's offsets must have rows + 1 = {rows + 1} elements, got {offsets.shape[0]}"
        )
    if token_ids.shape[0] % max(rows, 1):
        raise ValueError(
            f"{caller}: support's token_ids must have as many places for each of the {rows} rows, "
            f"got {token_ids.shape[0]}; fill up with -1"
        )
    if not token_ids.shape[0]:
        # No row has a token.  With one unused place, the entropy of a row is NaN; that of no columns would be 0.
        token_ids = offsets[1:] * 0 - 1
    # A row without tokens has no place, as nothing can be gathered.
    return token_ids, offsets, token_ids.shape[0] // max(rows, 1) if x.shape[axis] else 0


def check_values(name: str, xp: Any, support: Support, places: Array, tokens: int) -> None:
    """Raise an error for a row that has too many tokens, an offset that is out of range, or an id that is no token.

    Args:
        name: Name of the argument after that of the function.
        xp: The array library.
        support: Token ids and offsets, int64.
        places: 0 to n - 1.
        tokens: Number of tokens.

    Raises:
        IndexError: a row, an offset or an id is wrong; the message has its position.
    """
    ids, used, count = _ids_of_rows(xp, support, places)
    most = len(places)
    wrong = (count < 0) | (count > most)
    if wrong.any():
        row = int((wrong * 1).reshape(-1).argmax())
        raise IndexError(f"{name} has {int(count[row, 0])} tokens of row {row}, which is not from 0 to {most}")
    length, offsets = support[0].shape[0], support[1]
    check_range(f"{name}'s offsets", offsets, length + 1, (offsets < 0) | (offsets > length))
    check_range(f"{name}'s token_ids", ids, tokens, used & ~_are_tokens(ids, tokens))


def truncated(
    xp: Any, take: Callable[..., Array], x: Array, index: Array, axis: int, options: ScoreOptions | None,
    support: Support, places: Array,
) -> Truncated:  # fmt: skip
    """The call on the tokens of a support.

    Args:
        xp: The array library.
        take: take(array, indices, axis): `take_along_axis` of the library.
        x: The logits.
        index: A token of each row, or several along `axis`, in a dtype that has the number of tokens.
        axis: The dimension of the tokens, counted from 0.
        options: The score options.
        support: Token ids and offsets, int64.
        places: 0 to n - 1.
    """
    tokens, options = x.shape[axis], options or ScoreOptions()
    ids, used, count = _ids_of_rows(xp, support, places)
    # A row with too many tokens, or with an id that is no token, has none.
    used = used & ((count <= len(places)) & (_are_tokens(ids, tokens) | ~used).all(1)[:, None])
    # A gradient adds zeros for the unused places: to many columns, as additions to one wait for each other on a GPU.
    ids = xp.where(used, ids, places % max(tokens, 1))
    shape = *x.shape[:axis], *x.shape[axis + 1 :], len(places)
    ids, used = ids.reshape(shape), used.reshape(shape)
    targets = index if index.ndim == x.ndim else index.reshape(*x.shape[:axis], 1, *x.shape[axis + 1 :])
    # torch.func.vmap has no rule for torch.moveaxis.
    move = getattr(xp, "movedim", None) or xp.moveaxis
    place = _places_of(xp, move(targets, axis, -1), ids, used, places)
    place = move(place, -1, axis).reshape(index.shape)
    ids, used = move(ids, -1, axis), move(used, -1, axis)
    if options.mask is not None:
        used = used & take(xp.broadcast_to(options.mask, x.shape), ids, axis)
    outside = _are_tokens(index, tokens) & (place < 0)
    return Truncated(take(x, ids, axis), place, options._replace(mask=used), outside)


def excluding(xp: Any, logprob: Array, lse: Array, outside: Array, axis: int) -> Array:
    """The log-probabilities, which are -inf where a target is outside the support of a row that has a distribution."""
    finite = xp.isfinite(lse)
    if outside.ndim > finite.ndim:
        finite = finite.reshape(*outside.shape[:axis], 1, *outside.shape[axis + 1 :])
    found: Array = xp.where(outside & finite, -xp.inf, logprob)
    return found


def _ids_of_rows(xp: Any, support: Support, places: Array) -> tuple[Array, Array, Array]:
    """(ids (rows, n), True for the places that have one, number of ids of each row (rows, 1))."""
    token_ids, offsets = support
    first = offsets[:-1, None]
    count = offsets[1:, None] - first
    # Offsets that are wrong must read no other memory, and no other row's ids.
    at = first + places
    inside = at.clip(0, max(token_ids.shape[0] - 1, 0))
    return xp.where(at == inside, token_ids[inside], -1), places < count, count


def _are_tokens(ids: Array, tokens: int) -> Array:
    found: Array = (ids >= 0) & (ids < tokens)
    return found


def _places_of(xp: Any, targets: Array, ids: Array, used: Array, places: Array) -> Array:
    """The place of each target (..., k) among the ids (..., n) of its row; -1 where it is none of them."""
    if not len(places):
        return targets * 0 - 1
    equal = (targets[..., None] == ids[..., None, :]) & used[..., None, :]
    return xp.amax(xp.where(equal, places, -1), -1)
