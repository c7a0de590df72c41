"""The masses that top_p adds, which PyTorch's operations, the formulas and the kernels share.

A mass is nearly exp(x / T) of a float32 score x at the temperature T, in a unit that the row's largest score decides.
It is a whole number, so a sum does not depend on its order.  The rate is log2(e) / T, rounded to float32 and at most
LARGEST_FLOAT32; float64 holds the product of a score and the rate exactly:

    x * rate = n + f: n is a whole number, and f, from 0 to 1, is rounded to a multiple of 2^-FRACTION_BITS.
    p is the polynomial POWER_OF_TWO in 1 + f, nearly 2^f, by Horner's rule; each step, a product and a sum, is rounded
        once, to float32.  float64 holds the product and the sum exactly, so no fused multiply-add is needed.
    The mass is p * 2^(n - N) in units of 2^-MASS_BITS, rounded down; N is the n of the row's largest score.

p is a multiple of 2^-FRACTION_BITS.  So masses up to 16 octaves below the largest are not rounded, whatever the largest
score is.  The mass of NaN is 0, and that of -inf beside a larger score; beside +inf, that of a finite score.
"""

MASS_BITS = 39
"""Fraction bits of a mass: that of a score in the octave of the largest one is from 2^MASS_BITS to twice as much."""

FRACTION_BITS = 23
"""Fraction bits of f and of p: a float32 number from 1 to 2 has as many."""

MOST_TOKENS = (1 << 62 - MASS_BITS) - 1
"""Tokens whose masses fit into an int64 together."""

POWER_OF_TWO = (
    0.49830055236816406, 0.3537217974662781, 0.10785605013370514, 0.03864787891507149, -0.00040559808257967234,
    0.001879318617284298,
)  # fmt: skip
"""Coefficients of a polynomial in g for 2^(g - 1), g from 1 to 2; its relative error in float32 is 2e-7.

It is exact at both ends, and rises, so masses rise with the scores.
"""
