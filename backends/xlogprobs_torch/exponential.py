"""e^x for x <= 0 in float32, in operations that Inductor vectorises on a CPU.

Inductor calls a function of SLEEF for each vector of exponentials, which costs twice the rest of the loop. Written
out, the exponential is inlined: 2^n e^f with n the integer nearest to x / ln 2, and f the remainder, at most
ln(2) / 2. The scheme (argument reduction by a two-part ln 2, a polynomial, the exponent added to the bits) is that of
W. J. Cody and W. Waite, "Software Manual for the Elementary Functions" (1980).
"""

import torch

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # n * LN2_HIGH is exact for |n| < 2^13
# Fitted to e^f on [-0.3468, 0.3468] in relative error, each coefficient rounded to float32 before the next was
# fitted; the largest relative error is 4.1e-9 before rounding.
COEFFICIENTS = (0.0013899568002671003, 0.008368952199816704, 0.041666846722364426, 0.166665181517601, 0.5, 1.0, 1.0)
SMALLEST = -87.0  # e^-87 = 1.6e-38 is the last that is no subnormal


def exp_of_nonpositive(x: torch.Tensor) -> torch.Tensor:
    """e^x of float32 ``x <= 0`` to one unit in the last place, and 0 for anything below e^-87."""
    held = torch.clamp_min(x, SMALLEST)
    n = torch.round(held * LOG2_E)
    f = (held - n * LN2_HIGH) - n * LN2_LOW
    p = torch.full_like(f, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        p = p * f + coefficient
    result = ((n.to(torch.int32) << 23) + p.view(torch.int32)).view(torch.float32)
    return torch.where(x < SMALLEST, 0.0, result)
