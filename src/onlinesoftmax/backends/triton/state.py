"""The state (m, l) in Triton: the recurrence, written once for this language.

Every strategy in this folder reduces with `of`, `merge` and `merge_all`, and nothing else.  The
laws these functions obey are the table in tests/laws.py, shared with NumPy, torch and JAX.
"""

import triton
import triton.language as tl


@triton.jit
def shift(m):
    """What is subtracted before exp: m, or 0 where m is infinite and m - m would be NaN."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def of(x, axis: tl.constexpr):
    """The states of the slices of x along `axis`."""
    m = tl.max(x, axis)
    l = tl.sum(tl.exp(x - tl.expand_dims(shift(m), axis)), axis)
    return m, l


@triton.jit
def merge(m_a, l_a, m_b, l_b):
    """The states of two slices laid end to end."""
    m = tl.maximum(m_a, m_b)
    s = shift(m)
    return m, l_a * tl.exp(m_a - s) + l_b * tl.exp(m_b - s)


@triton.jit
def merge_all(m, l, axis: tl.constexpr):
    """The state of all the slices along `axis`."""
    m_all = tl.max(m, axis)
    s = tl.expand_dims(shift(m_all), axis)
    return m_all, tl.sum(l * tl.exp(m - s), axis)
