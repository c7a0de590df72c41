"""The checks of the score options that need no framework."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import onlinesoftmax as osm
from onlinesoftmax.core.options import ScoreOptions, checked_options

NUMBERS = [int, float, Fraction, np.int64, np.float16, np.float32, np.float64]


def options(scale: Any = 1.0, softcap: Any = None) -> ScoreOptions | None:
    return checked_options("softmax", scale, softcap, None, None, False, "nan")


@pytest.mark.parametrize("number", NUMBERS)
def test_every_kind_of_number_is_a_scale_and_a_softcap(number: type) -> None:
    assert options(number(1)) is None
    found = options(number(2), number(3))
    assert found == ScoreOptions(2.0, 3.0)
    assert type(found.scale) is type(found.softcap) is float


@pytest.mark.parametrize("number", NUMBERS)
def test_a_scale_of_one_changes_no_bit(number: type) -> None:
    x = np.random.default_rng(0).normal(size=(4, 37)).astype(np.float16)
    np.testing.assert_array_equal(osm.softmax(x, scale=number(1)), osm.softmax(x))


@pytest.mark.parametrize("value", [True, np.True_, "2", 1j, np.complex64(1)])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="softcap must be a number or None"):
        options(softcap=value)
    if not hasattr(value, "dtype"):  # the module of the input's framework checks arrays
        with pytest.raises(TypeError, match="scale must be a number or a tensor"):
            options(value)
