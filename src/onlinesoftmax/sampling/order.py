"""The largest scores of rows, ties by the lower column: exact, and the same on every device."""

from __future__ import annotations

import torch

from ..torch.fast_path import is_transformed
from ..torch.formulas import PLAIN_TYPES
from ..torch.gradients import is_traced
from .keys import ordered

Tensor = torch.Tensor

_LOW = 0xFFFFFFFF


def largest(z: Tensor, k: int) -> Tensor:
    """Columns of the k largest scores of each row, (rows, k) int64: by falling size, ties by the lower column.

    NaN counts as the largest score.

    Args:
        z: Scores (rows, columns).
        k: From 0 to the number of columns.
    """
    columns = z.shape[1]
    if 0 < k < columns and z.shape[0] and is_readable(z):
        return _largest_on_cpu(z, k)
    # PyTorch 2.11 has no rule of vmap for the bits of a tensor.
    if z.dtype == torch.float64 or columns > _LOW or k == columns or is_transformed():
        return torch.sort(z, dim=-1, descending=True, stable=True).indices[:, :k]
    # torch.topk promises no order of equal numbers.  A score and its column in one integer are never equal to others.
    keys = (ordered(torch, z.float()).long() << 32) + (_LOW - torch.arange(columns, device=z.device))
    return _LOW - (keys.topk(k, -1).values & _LOW)


def is_readable(t: Tensor) -> bool:
    """True for a tensor whose values the host can read without waiting: on a CPU, outside of traces and transforms."""
    return t.is_cpu and type(t) in PLAIN_TYPES and not is_traced(t) and not is_transformed()


def _largest_on_cpu(z: Tensor, k: int) -> Tensor:
    """`largest` by torch.topk, which promises no order of equal scores; the values of tensors are read."""
    values, found = z.topk(k + 1, -1)
    # If all scores of all rows fall, none are equal or NaN.  Differences of infinite scores are NaN.
    if values.diff().amax().item() < 0:
        return found[:, :k]
    # NaN comes first, so a NaN follows a NaN.
    same, found = (values[:, 1:] == values[:, :-1]) | values[:, 1:].isnan(), found[:, :k]
    rows = same.any(1).nonzero().squeeze(1)
    if not len(rows):
        return found
    # Of the rows with equal scores: the group of each token, by falling score.
    group = torch.nn.functional.pad(~same[rows, : k - 1], (1, 0)).cumsum(1)
    columns = (group * z.shape[1] + found[rows]).sort(1).values % z.shape[1]
    tied = same[rows, k - 1]
    if tied.any():
        # Tokens that equal the last one, and the one behind it: those with the lowest ids.
        of, above = rows[tied], (group != group[:, -1:]).sum(1)[tied]
        last = values[of, k - 1 : k]
        equal = z[of] == last if not last.isnan().any() else (z[of] == last) | (z[of].isnan() & last.isnan())
        row, column = equal.nonzero(as_tuple=True)
        count = row.bincount(minlength=len(of))
        place = above[row] + torch.arange(len(row)) - (count.cumsum(0) - count)[row]
        fits = place < k
        columns[tied.nonzero().squeeze(1)[row[fits]], place[fits]] = column[fits]
    found[rows] = columns
    return found


def rank_of(z: Tensor, target: Tensor) -> Tensor:
    """The rank of a column of each row in the order of `largest`, from 1; 0 where the target is no column.

    Args:
        z: Scores (rows, columns).
        target: A column of each row, (rows,) int64.
    """
    columns = torch.arange(z.shape[1], device=z.device)
    inside = (target >= 0) & (target < z.shape[1])
    at = target.where(inside, 0).unsqueeze(1)
    return (number_before(z, z.gather(1, at), columns, at).squeeze(1) + 1).where(inside, 0)


def number_before(z: Tensor, score: Tensor, tokens: Tensor, token: Tensor) -> Tensor:
    """How many scores of each row come before that of a token in the order of `largest`, (rows, 1) int64.

    Args:
        z: Scores (rows, columns).
        score: Score of the token, (rows, 1).
        tokens: Token ids of the columns, (columns,).
        token: Its token id, (rows, 1).
    """
    above = (z > score) | (z.isnan() & ~score.isnan())
    equal = (z == score) | (z.isnan() & score.isnan())
    return (above | (equal & (tokens < token))).sum(1, keepdim=True)
