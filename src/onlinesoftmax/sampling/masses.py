"""Constants of the fixed-point masses, which PyTorch's operations and the kernel share.

A mass is exp((z - m) / temperature), rounded to a multiple of 2^-40: the distance of a score z from the largest, m.
"""

MASS_BITS = 40
"""Fraction bits of a mass.  Sums of integers do not depend on their order, and so the set that top_p keeps does not."""

MOST_TOKENS = (1 << 63 - MASS_BITS) - 1
"""Tokens whose masses fit into an int64 together."""

POWER_OF_TWO = (
    1.0, 0.6931471824645996, 0.24022646248340607, 0.05550328642129898, 0.009618489071726799, 0.0013399930903688073,
    0.0001534581242594868,
)  # fmt: skip
"""Coefficients of a polynomial for 2^f, f from -1/2 to 1/2; its relative error in float32 is 1e-7.

Libraries round an exp differently.  These products and sums are rounded one by one, so all devices get the same masses.
"""
