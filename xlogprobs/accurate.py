"""Arithmetic wider than the device's widest float: a number as an unevaluated sum of two, high + low.

Used where float64 does not exist (JAX without x64, MPS, some NPUs). Sources: T. J. Dekker, "A floating-point
technique for extending the available precision" (1971), for the split and the product; D. E. Knuth, TAOCP vol. 2,
4.2.2, for the sum. Compilers that contract ``a * b + c`` to a fused multiply-add only tighten these bounds;
compilers that reassociate sums would break them, and neither XLA, Inductor nor Triton does by default.
"""

from collections.abc import Callable
from typing import Any

Array = Any
Pair = tuple[Array, Array]

SPLITTER = 4097.0  # 2^12 + 1 cuts a 24-bit significand into two halves of 12 bits
LN2_HIGH = 0.693145751953125  # 16 significant bits, so that k * LN2_HIGH is exact for the k used here
LN2_LOW = 1.42860682030941723212e-6


def two_sum(a: Array, b: Array) -> Pair:
    """``high + low == a + b`` exactly, high the rounded sum (Knuth)."""
    high = a + b
    of_b = high - a
    return high, (a - (high - of_b)) + (b - of_b)


def one_of(a: Array) -> Array:
    """1 in the shape of a finite ``a``, unknown to a compiler: XLA makes (1 + b) - 1 of a constant 1 to b."""
    return a * 0.0 + 1.0


def two_product(a: Array, b: Array) -> Pair:
    """``high + low == a * b`` for float32 without overflow, high the rounded product (Dekker)."""
    high = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    return high, ((a_high * b_high - high) + a_high * b_low + a_low * b_high) + a_low * b_low


def _split(a: Array) -> Pair:
    scaled = a * SPLITTER
    high = scaled - (scaled - a)
    return high, a - high


def divide(xp: Any, numerator: Pair, denominator: Pair) -> Pair:
    """``numerator / denominator`` for pairs: one long division step on the remainder."""
    quotient = numerator[0] / denominator[0]
    product, low = two_product(quotient, denominator[0])
    remainder = ((numerator[0] - product) - low) + (numerator[1] - quotient * denominator[1])
    correction = remainder / denominator[0]
    return quotient, xp.where(xp.isfinite(correction), correction, 0)


def difference(xp: Any, a: Array, b: Array) -> Pair:
    """``a - b`` as a pair; an infinite or NaN difference carries a low part of zero."""
    high, low = two_sum(a, -b)
    return high, xp.where(xp.isfinite(low), low, 0)


def sum_last_axis(xp: Any, terms: Pair) -> Pair:
    """Sum of pairs over the last axis by a balanced tree, so that the order depends on the length alone."""
    high, low = terms
    while (length := high.shape[-1]) > 1:
        half = length // 2
        rounded, error = two_sum(high[..., :half], high[..., half : 2 * half])
        error = error + (low[..., :half] + low[..., half : 2 * half])
        if length % 2:
            rounded = xp.concat([rounded, high[..., 2 * half :]], axis=-1)
            error = xp.concat([error, low[..., 2 * half :]], axis=-1)
        high, low = rounded, error
    return high[..., 0], low[..., 0]


def log1p(xp: Any, value: Pair, largest: int) -> Pair:
    """``log(1 + value)`` as a pair, for ``0 <= value <= largest``.

    ``1 + value = 2^k (1 + f)`` with f in [-0.3, 0.42]; ``k ln 2`` is added as a pair and only ``log1p(f)``, at most
    0.36, is rounded. The power of two is found by comparisons: exp2 and log2 are not exact everywhere. Where
    ``value < 0.41`` k is 0 and f is value itself, which keeps the relative accuracy of a confident token.
    """
    one_plus, low = two_sum(one_of(value[0]), value[0])
    low = low + value[1]
    exponent = xp.zeros_like(one_plus)
    scale = xp.ones_like(one_plus)
    step = 1 << max(0, (max(1, largest).bit_length() - 1)).bit_length()
    while step:
        large = one_plus * scale >= 2.0 ** (step - 0.5)
        exponent = xp.where(large, exponent + step, exponent)
        scale = xp.where(large, scale * 2.0**-step, scale)
        step //= 2
    scaled = (one_plus * scale - 1.0) + low * scale
    fraction = xp.where(exponent == 0, value[0] + value[1], scaled)
    high, error = two_sum(exponent * LN2_HIGH, xp.log1p(fraction))
    return high, error + exponent * LN2_LOW


def subtract(xp: Any, a: Pair, b: Pair) -> Pair:
    """``a - b`` for pairs; an infinite or NaN difference carries a low part of zero."""
    high, low = difference(xp, a[0], b[0])
    rounded, error = two_sum(high, low + (a[1] - b[1]))
    finite = xp.isfinite(rounded)
    return xp.where(finite, rounded, high), xp.where(finite, error, 0)


def multiply(a: Pair, b: Pair) -> Pair:
    high, low = two_product(a[0], b[0])
    return two_sum(high, low + (a[0] * b[1] + a[1] * b[0]))


def repeat(count: int, function: Callable[[Any, Any], Any], state: Any) -> Any:
    """``function(n, state)`` for n = count - 1, ..., 0, each on the state that the one before it left."""
    for n in range(count - 1, -1, -1):
        state = function(n, state)
    return state


def exp(xp: Any, value: Pair, repeat: Callable[..., Any] = repeat) -> Pair:
    """e^value of ``value <= 0``, to 2^-38 relative, for what does not lie far below e^-60 (there: e^-60).

    The Taylor series of e^(value / 128), squared seven times; a compiler may want loops of its own for both.
    """
    far = value[0] < -60.0
    high = xp.where(far, -60.0, value[0]) / 128.0
    low = xp.where(far, 0, value[1]) / 128.0
    one = one_of(high)

    def term(n: Any, total: Pair) -> Pair:  # 1 + x / n * (1 + x / (n + 1) * ...)
        product = multiply(divide(xp, (high, low), (one * (n + 1), one * 0)), total)
        rounded, error = two_sum(one, product[0])
        return two_sum(rounded, error + product[1])

    series: Pair = repeat(12, term, (one, xp.zeros_like(high)))
    squared: Pair = repeat(7, lambda n, total: multiply(total, total), series)
    return squared


def tanh(xp: Any, value: Pair, repeat: Callable[..., Any] = repeat) -> Pair:
    """To about 2^-36 of 1: ``(1 - e) / (1 + e)`` with ``e = exp(-2 |value|)``."""
    sign = xp.where(value[0] < 0, -xp.ones_like(value[0]), xp.ones_like(value[0]))
    e_high, e_low = exp(xp, (value[0] * sign * -2.0, value[1] * sign * -2.0), repeat)
    one = one_of(e_high)
    below, above = two_sum(one, -e_high), two_sum(one, e_high)
    quotient = divide(xp, (below[0], below[1] - e_low), (above[0], above[1] + e_low))
    return quotient[0] * sign, quotient[1] * sign
