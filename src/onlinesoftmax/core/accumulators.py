"""The accumulators of a state: what a slice of a row keeps beside its maximum m.

An accumulator is an object of `width` arrays, with one value per element of a slice or one per slice:

    identity   makes the accumulator of an empty slice
    reduce     turns accumulators of elements into that of their slice; the constructor makes those of elements
    merge      makes the accumulator of two slices from theirs; associative and commutative
    finish     gives the result of a row

Every kernel language has the accumulators of its operations under the same names.  A fourth accumulator is a class
here, one in each of these languages, and a law in tests/laws.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .arrays import Array

if TYPE_CHECKING:
    from typing_extensions import Self


class Accumulator(ABC):
    """Numbers that a state keeps beside m, for elements or for slices.  A subclass is a dataclass of arrays."""

    width: ClassVar[int] = 1

    def parts(self) -> dict[str, Array]:
        """Its arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    @abstractmethod
    def identity(cls, xp: Any, like: Array, shape: list[int]) -> Self:
        """The accumulator of empty slices, in the accumulator's dtype of `like`."""

    @abstractmethod
    def reduce(self, xp: Any, x: Array, terms: Array, dim: int) -> Self:
        """The accumulator of all elements x along a dimension; their terms are exp(x - m)."""

    @abstractmethod
    def merge(self, other: Self, xp: Any, ours: Array, theirs: Array) -> Self:
        """The accumulator of two slices together; a factor is exp(m of the slice - m of both)."""

    @abstractmethod
    def finish(self, l: Array) -> Array:
        """The result of a row."""

    @staticmethod
    def of_row(xp: Any, values: Array, columns: Array, dim: int) -> Array:
        """The result of whole rows, from what a formula (core/formulas.py) gives for each element: its summand."""
        return xp.sum(values, dim)


@dataclass(frozen=True)
class _Sum(Accumulator):
    value: Array

    @classmethod
    def identity(cls, xp: Any, like: Array, shape: list[int]) -> Self:
        return cls(xp.full(like, shape, 0.0))


class ScaledSum(_Sum):
    """The sum of w * exp(x - m).  Of an element, `value` is the weight w.  The result is the mean of w under softmax.

    An element of -inf is absent, whatever its weight.
    """

    def reduce(self, xp: Any, x: Array, terms: Array, dim: int) -> ScaledSum:
        present = xp.where(x == -np.inf, 0.0, xp.astype(self.value, x.dtype))
        return ScaledSum(xp.sum(_weighted(xp, present, terms), dim))

    def merge(self, other: ScaledSum, xp: Any, ours: Array, theirs: Array) -> ScaledSum:
        return ScaledSum(_weighted(xp, self.value, ours) + _weighted(xp, other.value, theirs))

    def finish(self, l: Array) -> Array:
        return self.value / l


class PlainSum(_Sum):
    """The sum of w, of all elements.  Of an element, `value` is w."""

    def reduce(self, xp: Any, x: Array, terms: Array, dim: int) -> PlainSum:
        return PlainSum(xp.sum(xp.broadcast(xp.astype(self.value, x.dtype), x.shape), dim))

    def merge(self, other: PlainSum, xp: Any, ours: Array, theirs: Array) -> PlainSum:
        return PlainSum(self.value + other.value)

    def finish(self, l: Array) -> Array:
        return self.value


@dataclass(frozen=True)
class Argmax(Accumulator):
    """The index of the largest key, as torch.argmax has it: NaN is the largest, and of equals the first wins.

    Of an element, `key` is any number and `index` its column in the whole row.  The index of an empty slice is -1.
    """

    key: Array
    index: Array

    width = 2

    @classmethod
    def identity(cls, xp: Any, like: Array, shape: list[int]) -> Argmax:
        return cls(xp.full(like, shape, -np.inf), xp.astype(xp.full(like, shape, -1.0), xp.index))

    def reduce(self, xp: Any, x: Array, terms: Array, dim: int) -> Argmax:
        key, index = (xp.broadcast(t, x.shape) for t in (xp.astype(self.key, x.dtype), xp.astype(self.index, xp.index)))
        largest = xp.max(key, dim)
        # The maximum of a slice with NaN is NaN, which equals nothing.
        hit = (key == largest) | (key != key)
        return Argmax(largest, xp.min(xp.where(hit, index, xp.max(index, dim)), dim))

    def merge(self, other: Argmax, xp: Any, ours: Array, theirs: Array) -> Argmax:
        nan, other_nan = self.key != self.key, other.key != other.key
        larger = (self.key > other.key) | (nan & ~other_nan)
        equal = (self.key == other.key) | (nan & other_nan)
        first = (other.index < 0) | ((self.index >= 0) & (self.index < other.index))
        is_ours = larger | (equal & first)
        return Argmax(xp.where(is_ours, self.key, other.key), xp.where(is_ours, self.index, other.index))

    def finish(self, l: Array) -> Array:
        return self.index

    @staticmethod
    def of_row(xp: Any, values: Array, columns: Array, dim: int) -> Array:
        """The column of the largest of the values, which are keys."""
        return Argmax(values, columns).reduce(xp, values, values, dim).index


def _weighted(xp: Any, w: Array, e: Array) -> Array:
    """Return w * e.  An infinite w stays infinite where the positive number e has underflowed to 0.

    So a sum with an infinite weight is the same however the row is cut.
    """
    return xp.where((e == 0) & xp.isinf(w), w, w * e)
