"""The laws of the state (m, l), in one table: what makes it safe to cut a row anywhere.

LAWS knows nothing of NumPy, torch, JAX, Triton, CUDA or Pallas.  A language joins with an `Algebra`: a few functions
and a list of dtypes.  tests/core/test_state.py runs the table over the languages that run everywhere.

A law compares the observables logsumexp, softmax and log_softmax, and for rows without NaN also m and l.  In a row with
NaN, m can be anything: NumPy's max keeps a NaN, Triton's drops it, and then l alone carries it.  It also compares the
further accumulators that the language has, each by its entry in accumulator_laws.ACCUMULATORS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from accumulator_laws import ACCUMULATORS
from onlinesoftmax.ops import reference

Native = Any
"""One row, or a slice of one, as an array of the language: shape (n,)."""
State = Any
"""A state as the language holds it."""
Float64 = NDArray[np.float64]


class Algebra(Protocol):
    """One language's version of the state.

    Attributes:
        name: Name of the algebra in the names of the tests.
        dtypes: Names of the element types that it takes.
        examples: Number of examples that each law draws; fewer for a slow language.
        accumulators: Names of the accumulators that its states have beside l, of those in ACCUMULATORS.
    """

    name: str
    dtypes: Sequence[str]
    examples: int
    accumulators: Sequence[str]

    def array(self, values: Float64, dtype: str) -> Native: ...
    def numpy(self, x: Native) -> Float64: ...
    def of(self, x: Native, first: int = 0) -> State: ...
    def identity(self, like: Native) -> State: ...
    def merge(self, a: State, b: State) -> State: ...
    def merge_all(self, states: Sequence[State]) -> State: ...
    def parts(self, state: State) -> tuple[float, float]: ...
    def accumulated(self, state: State, name: str) -> float: ...
    def logsumexp(self, state: State) -> float: ...
    def softmax(self, state: State, x: Native) -> Float64: ...
    def log_softmax(self, state: State, x: Native) -> Float64: ...


@dataclass(frozen=True)
class Case:
    """A row, the positions of its cuts, and the order in which the slices are merged.

    Attributes:
        row: The elements, before they are rounded to the dtype under test.
        cuts: Sorted positions in [0, n]; two that are equal make an empty slice.
        order: For each merge, the indices of the two states to take out; their merge is added at the end.
        dtype: The element type, by name.
    """

    row: tuple[float, ...]
    cuts: tuple[int, ...]
    order: tuple[tuple[int, int], ...]
    dtype: str


@dataclass(frozen=True)
class Law:
    """A name, the strategy that draws a Case for an algebra with these dtypes, and the assertion."""

    name: str
    cases: Callable[[Sequence[str]], st.SearchStrategy[Case]]
    check: Callable[[Algebra, Case], None]

    def test(self, algebra: Algebra) -> None:
        """Draw cases and check them."""

        # Compiling for JAX and CUDA and interpreting for Triton take time, which is no fault of the strategy.
        @settings(max_examples=algebra.examples, suppress_health_check=[HealthCheck.too_slow])
        @given(self.cases(algebra.dtypes))
        def holds(case: Case) -> None:
            self.check(algebra, case)

        holds()


INF = math.inf
MAX_CUTS = 4


@st.composite
def cases(
    draw: st.DrawFn, dtypes: Sequence[str], must: tuple[float, ...] = (), may: tuple[float, ...] = (-INF,)
) -> Case:
    """Rows of 0 to 5 elements near an offset, with outliers 20 times as large and slices of -inf.

    Args:
        must: Values of which at least one is put in every row.
        may: Values that the row may have beside the finite ones.
    """
    size = draw(st.integers(0, 5))
    seed, scale = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from((0.0, 1.0, 4.0)))
    offset = draw(st.sampled_from((0.0, 0.0, 1e4, -1e4)))
    row = offset + outliers(size, seed) * scale
    for value in draw(st.lists(st.sampled_from(may), max_size=2)) if may else ():
        row = np.insert(row, draw(st.integers(0, row.size)), value)
    if -INF in may and draw(st.booleans()):
        start, stop = sorted((draw(st.integers(0, row.size)), draw(st.integers(0, row.size))))
        row[start:stop] = -INF
    if must:
        row = np.insert(row, draw(st.integers(0, row.size)), draw(st.sampled_from(must)))
    cuts = draw(st.lists(st.integers(0, row.size), max_size=MAX_CUTS))
    order = [draw(st.tuples(st.integers(0, MAX_CUTS), st.integers(0, MAX_CUTS))) for _ in cuts]
    return Case(tuple(row.tolist()), tuple(sorted(cuts)), tuple(order), draw(st.sampled_from(dtypes)))


def outliers(size: int, seed: int) -> Float64:
    """Normal numbers, one in eight of them 20 times as large."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(size) * np.where(rng.random(size) < 1 / 8, 20.0, 1.0)


def finite(dtypes: Sequence[str]) -> st.SearchStrategy[Case]:
    return cases(dtypes, may=()).filter(lambda case: len(case.row) > 0)


def no_nan(dtypes: Sequence[str]) -> st.SearchStrategy[Case]:
    return cases(dtypes, may=(-INF, INF))


def anything(dtypes: Sequence[str]) -> st.SearchStrategy[Case]:
    return cases(dtypes, may=(-INF, INF, math.nan))


def with_inf(dtypes: Sequence[str]) -> st.SearchStrategy[Case]:
    return cases(dtypes, must=(INF,), may=(-INF, INF))


def with_nan(dtypes: Sequence[str]) -> st.SearchStrategy[Case]:
    return cases(dtypes, must=(math.nan,), may=(-INF, INF, math.nan))


def long(dtypes: Sequence[str]) -> st.SearchStrategy[Case]:
    """Rows that fill many vector registers; all have one size, because JAX compiles once for each size."""
    rows = st.builds(outliers, st.just(1000), st.integers(0, 2**32 - 1))
    offsets = st.sampled_from((0.0, 1e4, -1e4))
    row = st.builds(lambda values, offset: tuple((values + offset).tolist()), rows, offsets)
    return st.builds(Case, row, st.just(()), st.just(()), st.sampled_from(dtypes))


EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}
"""The distance from 1 to the next number: an ulp, relatively."""

TINY = {"float16": 2**-14, "bfloat16": 2**-126, "float32": 2**-126, "float64": 2**-1022}
"""The smallest normal number: below it an ulp no longer shrinks, and a GPU may write 0."""


def slack(n: int, merges: int, dtype: str) -> float:
    """The relative error that l may have.

    One ulp for each of the n additions, and 4 for each merge: two exps, a product and a sum; then
    4 for the exps and the rounding of m in the end.  An exp of d is off by |d| exp(d) ulp, which is
    below 1 (1/e) whatever d is: that is why no bound grows with the spread of the row.
    """
    accumulator = "float64" if dtype == "float64" else "float32"
    return (n + 4 * merges + 4) * EPS[accumulator]


def assert_near(got: Any, want: Any, tolerance: Any, what: str) -> None:
    """Equal within `tolerance`, element by element; NaN equals NaN and an infinity equals itself."""
    got, want, tolerance = np.broadcast_arrays(np.float64(got), np.float64(want), np.float64(tolerance))
    with np.errstate(invalid="ignore"):
        close = np.isfinite(got) & np.isfinite(want) & (np.abs(got - want) <= tolerance)
        near = (got == want) | (np.isnan(got) & np.isnan(want)) | close
    assert near.all(), f"{what}: got {got[~near]}, want {want[~near]}, tolerance {tolerance[~near]}"


def assert_same_state(algebra: Algebra, got: State, want: State, slack: float, row: Sequence[float]) -> None:
    """The same m exactly, l within `slack`, logsumexp within what that makes of it; NaN rows by logsumexp alone.

    The accumulators within the tolerances for the row.
    """
    lse = algebra.logsumexp(want)
    assert_near(algebra.logsumexp(got), lse, slack * (1 + abs(lse)), "logsumexp")
    if not math.isnan(lse):
        (m_got, l_got), (m, l) = algebra.parts(got), algebra.parts(want)
        assert_near(m_got, m, 0, "m")
        assert_near(l_got, l, slack * l, "l")
    exact = np.array(row, np.float64)
    for name in algebra.accumulators:
        if ACCUMULATORS[name].is_defined(exact):
            tolerance = ACCUMULATORS[name].tolerance(exact, slack)
            assert_near(algebra.accumulated(got, name), algebra.accumulated(want, name), tolerance, name)


def assert_same_rows(got: tuple[Any, Any], want: tuple[Any, Any], slack: float, dtype: str) -> None:
    """(softmax, log_softmax): `slack`, absolute for the log and relative for its exp, and the output's own rounding."""
    (y_got, log_got), (y, log_y) = got, want
    spread = np.where(np.isfinite(log_y), 1 + np.abs(log_y), 1.0)
    assert_near(log_got, log_y, (slack + EPS[dtype]) * spread, "log_softmax")
    assert_near(y_got, y, (slack * spread + EPS[dtype]) * np.nan_to_num(y) + TINY[dtype], "softmax")


def rows_of(algebra: Algebra, state: State, x: Native) -> tuple[Float64, Float64]:
    return algebra.softmax(state, x), algebra.log_softmax(state, x)


def slices(algebra: Algebra, case: Case) -> list[Native]:
    """The slices of the row; always one, even of an empty row."""
    x = algebra.array(np.array(case.row, np.float64), case.dtype)
    bounds = (0, *case.cuts, len(case.row))
    return [x[start:stop] for start, stop in pairwise(bounds)]


def merged(algebra: Algebra, case: Case) -> State:
    """The state of every slice, merged two at a time in the case's order."""
    states = states_of(algebra, case)
    for i, j in case.order:
        first = states.pop(i % len(states))
        states.append(algebra.merge(first, states.pop(j % len(states))))
    return states[0]


def states_of(algebra: Algebra, case: Case) -> list[State]:
    """The state of each slice of the row."""
    firsts = (0, *case.cuts)
    return [algebra.of(part, first) for part, first in zip(slices(algebra, case), firsts, strict=True)]


def whole(algebra: Algebra, case: Case) -> Native:
    return algebra.array(np.array(case.row, np.float64), case.dtype)


def slack_of(case: Case) -> float:
    return slack(len(case.row), len(case.cuts), case.dtype)


def identity_is_neutral(algebra: Algebra, case: Case) -> None:
    x = whole(algebra, case)
    state, nothing = algebra.of(x), algebra.identity(x)
    assert_same_state(algebra, algebra.merge(state, nothing), state, 0, case.row)
    assert_same_state(algebra, algebra.merge(nothing, state), state, 0, case.row)


def identity_is_idempotent(algebra: Algebra, case: Case) -> None:
    nothing = algebra.identity(whole(algebra, case))
    for state in (nothing, algebra.merge(nothing, nothing)):
        assert algebra.parts(state) == (-INF, 0)
        assert algebra.logsumexp(state) == -INF
        for name in algebra.accumulators:
            assert algebra.accumulated(state, name) == ACCUMULATORS[name].empty, name


def empty_is_identity(algebra: Algebra, case: Case) -> None:
    x = whole(algebra, case)
    assert algebra.parts(algebra.of(x[:0])) == algebra.parts(algebra.identity(x)) == (-INF, 0)
    assert algebra.softmax(algebra.of(x), x[:0]).shape == (0,)


def all_minus_inf_is_identity(algebra: Algebra, case: Case) -> None:
    x = algebra.array(np.full(len(case.row) + 1, -INF), case.dtype)
    state = algebra.of(x)
    assert algebra.parts(state) == (-INF, 0)
    for name in algebra.accumulators:
        assert algebra.accumulated(state, name) == ACCUMULATORS[name].all_minus_inf, name
    assert algebra.logsumexp(state) == -INF
    assert np.isnan(rows_of(algebra, state, x)).all()


def merge_is_associative(algebra: Algebra, case: Case) -> None:
    a, b, c = thirds(algebra, case)
    left, right = algebra.merge(algebra.merge(a, b), c), algebra.merge(a, algebra.merge(b, c))
    assert_same_state(algebra, left, right, slack(len(case.row), 4, case.dtype), case.row)


def merge_is_commutative(algebra: Algebra, case: Case) -> None:
    a, b, _ = thirds(algebra, case)
    # Not exact: a compiler may fuse either product into the sum.
    error, both = slack(len(case.row), 2, case.dtype), case.row[: case.cuts[-1] if case.cuts else 0]
    assert_same_state(algebra, algebra.merge(a, b), algebra.merge(b, a), error, both)


def thirds(algebra: Algebra, case: Case) -> list[State]:
    """The states of the row cut in three."""
    first, second = (*case.cuts[:1], *case.cuts[-1:]) or (0, 0)
    return states_of(algebra, Case(case.row, (first, second), (), case.dtype))


def any_cut_is_no_cut(algebra: Algebra, case: Case) -> None:
    x = whole(algebra, case)
    cut, uncut = merged(algebra, case), algebra.of(x)
    # Both sides err, each by at most the slack.
    assert_same_state(algebra, cut, uncut, 2 * slack_of(case), case.row)
    assert_same_rows(rows_of(algebra, cut, x), rows_of(algebra, uncut, x), 2 * slack_of(case), case.dtype)


def slices_normalise_alone(algebra: Algebra, case: Case) -> None:
    state, parts = merged(algebra, case), slices(algebra, case)
    softmax, log_softmax = zip(*(rows_of(algebra, state, part) for part in parts), strict=True)
    together = rows_of(algebra, state, whole(algebra, case))
    # A vector and its remainder may use two exps, each right to an ulp or two.
    got = np.concatenate(softmax), np.concatenate(log_softmax)
    assert_same_rows(got, together, slack(0, 0, case.dtype), case.dtype)


def plus_inf_shows_in_any_cut(algebra: Algebra, case: Case) -> None:
    state = merged(algebra, case)
    assert algebra.parts(state)[0] == INF
    assert algebra.logsumexp(state) == INF
    assert np.isnan(rows_of(algebra, state, whole(algebra, case))).all()


def nan_shows_in_any_cut(algebra: Algebra, case: Case) -> None:
    state = merged(algebra, case)
    assert math.isnan(algebra.logsumexp(state))
    assert np.isnan(rows_of(algebra, state, whole(algebra, case))).all()


def merge_all_is_a_fold(algebra: Algebra, case: Case) -> None:
    states = states_of(algebra, case)
    fold = reduce(algebra.merge, states)
    assert_same_state(algebra, algebra.merge_all(states), fold, 2 * slack_of(case), case.row)


def agrees_with_reference(algebra: Algebra, case: Case) -> None:
    x, state = whole(algebra, case), merged(algebra, case)
    exact, m = algebra.numpy(x), algebra.parts(state)[0]
    lse = reference.logsumexp(exact)
    if not np.isnan(exact).any():
        assert m == np.max(exact, initial=-INF)
    assert_near(algebra.logsumexp(state), lse, slack_of(case) * (1 + abs(lse)), "logsumexp")
    want = reference.two_pass(exact), reference.log_softmax(exact)
    assert_same_rows(rows_of(algebra, state, x), want, slack_of(case), case.dtype)
    for name in algebra.accumulators:
        law = ACCUMULATORS[name]
        if law.is_defined(exact):
            tolerance = law.tolerance(exact, slack_of(case))
            assert_near(algebra.accumulated(state, name), law.of_row(exact), tolerance, name)


def softmax_sums_to_one(algebra: Algebra, case: Case) -> None:
    y = algebra.softmax(merged(algebra, case), whole(algebra, case))
    # The slack of each y is in proportion to 1 - log y, whose mean under y is at most 1 + log n.
    n = len(case.row)
    assert_near(y.sum(), 1, slack_of(case) * (1 + math.log(n)) + EPS[case.dtype] + n * TINY[case.dtype], "sum")


LAWS = [
    Law("identity is neutral", anything, identity_is_neutral),
    Law("identity is idempotent", finite, identity_is_idempotent),
    Law("the empty slice is the identity", finite, empty_is_identity),
    Law("an all -inf slice is the identity", finite, all_minus_inf_is_identity),
    Law("merge is associative", anything, merge_is_associative),
    Law("merge is commutative", anything, merge_is_commutative),
    Law("any cut merged in any order is no cut", no_nan, any_cut_is_no_cut),
    Law("any cut is no cut, NaN included", anything, any_cut_is_no_cut),
    Law("slices can be normalised alone", cases, slices_normalise_alone),
    Law("+inf shows in any cut", with_inf, plus_inf_shows_in_any_cut),
    Law("NaN shows in any cut", with_nan, nan_shows_in_any_cut),
    Law("merge_all is a fold of merge", anything, merge_all_is_a_fold),
    Law("finite rows agree with float64", finite, agrees_with_reference),
    Law("long rows agree with float64", long, agrees_with_reference),
    Law("special rows agree with float64", anything, agrees_with_reference),
    Law("softmax sums to one", finite, softmax_sums_to_one),
]

UNREAL_ARRAYS: list[Any] = [
    np.array([1, 2j]),
    np.array([1.0, 2.0], object),
    np.array([1, 2], "m8[s]"),
    np.array([1, 2], "M8[s]"),
    np.array(["1", "2"]),
    np.array([b"1", b"2"]),
    np.zeros(2, [("float", "f4")]),
    np.ma.array([1.0, 2.0], mask=[False, True]),
    np.ma.array([1.0, 2.0]),
    np.zeros((1, 2)).view(np.matrix),
]
"""Arrays that hold more or other things than real numbers: every function refuses them."""
