"""Loops over pieces of rows, compiled by Numba: the summary, the gradient and the count behind a rank.

One source serves every call. An argument that is None is None at compile time, so Numba removes what depends on it,
and each combination of dtype and transforms in use has machine code of its own, cached on disk.

A row is read in blocks that stay in the first-level cache: the block's maximum, then its sum of e^s, with s relative to
the largest entry so far, the reference. Sums inside a block are of the arithmetic type, sums over blocks float64. The
reference's own 1 stays in the sum and is subtracted; only where what is left is below 1 is its block summed again
without it (as in `xlogprobs.summary`). Softcap and bias are float64 up to s.

Three things let the compiler vectorise the loops and keep their results:

- Floats are ordered as integers: the bits of a negative number, all but its sign inverted, sort as signed integers.
  NaN with a sign sorts lowest, but it makes the sum NaN.
- e^s is inlined: 2^n e^f with n the integer nearest to s / ln 2 and f the remainder, after W. J. Cody and W. Waite,
  "Software Manual for the Elementary Functions" (1980). Adding 1.5 * 2^23 rounds to n and leaves it in the low bits.
- Only the sum may be reordered (``reassoc``), only the exponential fused (``contract``).

Half precision comes as integers of its bits: uint16 is bfloat16, int16 is float16.
"""

from collections.abc import Callable
from math import exp, inf, nan
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

BLOCK = 1024  # columns of a block
AHEAD = 1024  # bytes between where a row is read and where it is asked for
NONE = -1  # no such column
IGNORED, INVALID = -1, -2  # as in xlogprobs.contract


def compiled(fastmath: Any = False, **options: Any) -> Callable[[Any], Any]:
    """Numba's compiler; without a cache where no folder can be written."""

    def compile(function: Any) -> Any:
        settings = {"nogil": True, "error_model": "numpy", "fastmath": fastmath, **options}
        try:
            return njit(cache=True, **settings)(function)
        except RuntimeError:
            return njit(**settings)(function)

    return compile


inlined = njit(nogil=True, error_model="numpy", forceinline=True)
called = njit(nogil=True, error_model="numpy")
INLINED = {"error_model": "numpy", "forceinline": True}
FUSED = {"error_model": "numpy", "forceinline": True, "fastmath": {"contract"}}

WORD = ir.IntType(32)


def by_type(choose: Callable[..., Any]) -> Any:
    """A function that, given its arguments' types, chooses what is compiled. (A branch on None inside compiled code
    would still give its variables the types of both sides.)"""

    def chosen(*arguments: Any) -> Any:
        raise NotImplementedError("compiled code only")

    overload(chosen, jit_options=INLINED, strict=False)(choose)
    return chosen


def is_none(kind: Any) -> bool:
    return bool(kind == types.none)


# -- values and their bits


@intrinsic
def _pointer(context: Any, address: Any, kind: Any) -> Any:
    pointer = types.CPointer(kind)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], target.get_value_type(pointer))

    return pointer(address, kind), generate


@inlined
def elements(address, count, kind):
    """``count`` neighbours in memory, of the type of the scalar ``kind``."""
    return carray(_pointer(address, kind), (count,))


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask for the 64 bytes at ``address``, which need not be anybody's memory."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        to_read, keep, data = WORD(0), WORD(3), WORD(1)
        builder.call(function, [builder.inttoptr(arguments[0], pointer), to_read, keep, data])
        return target.get_dummy_value()

    return types.void(address), generate


@intrinsic
def prefer_wide_vectors(context: Any) -> Any:
    """Let the function that calls it use registers of 512 bits where there are some: for most processors of Intel, LLVM
    stays at 256, a rule for code that is now and then a vector. (llvmlite knows no such attribute: hence ``set.add``.)
    """

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return target.get_dummy_value()

    return types.void(), generate


@intrinsic
def widen(context: Any, value: Any) -> Any:
    """Half precision to float32, other values as they are."""
    half = value in (types.uint16, types.int16)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if value == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(arguments[0], WORD), WORD(16)), ir.FloatType())
        if value == types.int16:
            return _float_of_half(builder, builder.zext(arguments[0], WORD))
        return arguments[0]

    return (types.float32 if half else value)(value), generate


@intrinsic
def narrow(context: Any, value: Any, kind: Any) -> Any:
    """``value`` rounded to the type of ``kind``, half precision as its bits."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if kind in (types.float32, types.float64):
            return target.cast(builder, arguments[0], value, kind)
        number = target.cast(builder, arguments[0], value, types.float32)
        bits = _half(builder, number) if kind == types.int16 else _bfloat16(builder, number)
        return builder.trunc(bits, ir.IntType(16))

    return kind(value, kind), generate


# Shifts and additions, and not LLVM's conversions: those call a library that is missing where the processor has no
# instruction, or has one for single numbers only.


def _float_of_half(builder: Any, bits: Any) -> Any:
    magnitude = builder.shl(builder.and_(bits, WORD(0x7FFF)), WORD(13))
    number = builder.fmul(builder.bitcast(magnitude, ir.FloatType()), ir.FloatType()(2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, WORD(0x7C00 << 13))
    number = builder.select(special, builder.or_(magnitude, WORD(0x7F800000)), builder.bitcast(number, WORD))
    sign = builder.shl(builder.and_(bits, WORD(0x8000)), WORD(16))
    return builder.bitcast(builder.or_(number, sign), ir.FloatType())


def _half(builder: Any, number: Any) -> Any:
    bits = builder.bitcast(number, WORD)
    magnitude = builder.and_(bits, WORD(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, WORD(13)), WORD(1))
    normal = builder.add(builder.sub(magnitude, WORD((127 - 15) << 23)), builder.add(odd, WORD(0xFFF)))
    normal = builder.lshr(normal, WORD(13))
    # adding 1/2 rounds to a multiple of 2^-24, the least half, and leaves it in the low bits
    tiny = builder.fadd(builder.bitcast(magnitude, ir.FloatType()), ir.FloatType()(0.5))
    tiny = builder.sub(builder.bitcast(tiny, WORD), WORD(126 << 23))
    special = builder.select(builder.icmp_unsigned(">", magnitude, WORD(0x7F800000)), WORD(0x7E00), WORD(0x7C00))
    result = builder.select(builder.icmp_unsigned("<", magnitude, WORD((127 - 14) << 23)), tiny, normal)
    result = builder.select(builder.icmp_unsigned(">=", magnitude, WORD((127 + 16) << 23)), special, result)
    return builder.or_(result, builder.lshr(builder.and_(bits, WORD(0x80000000)), WORD(16)))


def _bfloat16(builder: Any, number: Any) -> Any:
    bits = builder.bitcast(number, WORD)
    odd = builder.and_(builder.lshr(bits, WORD(16)), WORD(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, WORD(0x7FFF))), WORD(16))
    quiet = builder.or_(builder.lshr(bits, WORD(16)), WORD(0x40))
    return builder.select(builder.fcmp_unordered("uno", number, number), quiet, rounded)


@intrinsic
def same(context: Any, value: Any, like: Any) -> Any:
    """``value`` in the floating type of ``like``."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return target.cast(builder, arguments[0], value, like)

    return like(value, like), generate


@intrinsic
def choose(context: Any, condition: Any, value: Any, other: Any) -> Any:
    """``value if condition else other``, of one type and without a branch, which would keep a loop from vectors."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(target.cast(builder, arguments[0], condition, types.boolean), *arguments[1:])

    return value(condition, value, value), generate


@intrinsic
def key(context: Any, value: Any) -> Any:
    """A signed integer that sorts as the float does; its own inverse by `from_key`."""
    integer = types.int32 if value == types.float32 else types.int64

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(integer.bitwidth)
        return _flip(builder, builder.bitcast(arguments[0], word), word)

    return integer(value), generate


@intrinsic
def from_key(context: Any, value: Any) -> Any:
    real = types.float32 if value == types.int32 else types.float64

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(value.bitwidth)
        return builder.bitcast(_flip(builder, arguments[0], word), target.get_value_type(real))

    return real(value), generate


def _flip(builder: Any, bits: Any, word: Any) -> Any:
    sign = builder.ashr(bits, word(word.width - 1))
    return builder.xor(bits, builder.and_(sign, word((1 << (word.width - 1)) - 1)))


@intrinsic
def power_of_two(context: Any, shifted: Any) -> Any:
    """2^(n - bias), from a float that holds n in its low bits."""
    mantissa = 23 if shifted == types.float32 else 52

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(shifted.bitwidth)
        bits = builder.shl(builder.bitcast(arguments[0], word), word(mantissa))
        return builder.bitcast(bits, target.get_value_type(shifted))

    return shifted(shifted), generate


# -- the exponential

LOG2_E, LN2 = 1.4426950408889634, 0.6931471805599453
# Fitted to e^f on [-0.3475, 0.3475] in relative error, each rounded to float32 before the next was fitted; the largest
# relative error is 3.8e-9 before rounding.
C6, C5, C4, C3 = (
    np.float32(c) for c in (0.0013863489730283618, 0.008367620408535004, 0.04166724532842636, 0.16666533052921295)
)
HALF, ONE = np.float32(0.5), np.float32(1.0)
UNIT = 2.0**-60  # of sums: e^s 2^60 lets float32 reach from 1 down to e^-128
FARTHEST = -1000.0  # of s, where it is a factor of e^s


def polynomial(f: Any) -> Any:
    """e^f of a remainder, |f| < 0.3475; exactly 1 at 0."""


@overload(polynomial, jit_options=FUSED, strict=False)
def _polynomial(f: Any) -> Any:
    if f == types.float32:
        return lambda f: (((((C6 * f + C5) * f + C4) * f + C3) * f + HALF) * f + ONE) * f + ONE
    return lambda f: expm1_ratio(f, f) * f + 1.0


@njit(**FUSED)
def taylor(f):
    """(e^f - 1) / f in float64 to 1e-9, |f| < 0.3475."""
    p = f * (1 / 40320.0) + 1 / 5040.0
    p = p * f + 1 / 720.0
    p = p * f + 1 / 120.0
    p = p * f + 1 / 24.0
    p = p * f + 1 / 6.0
    p = p * f + 0.5
    return p * f + 1.0


def expm1_ratio(f: Any, like: Any) -> Any:
    """(e^f - 1) / f in float64, as exact as the arithmetic type ``like`` asks for."""


@overload(expm1_ratio, jit_options=FUSED, strict=False)
def _expm1_ratio(f: Any, like: Any) -> Any:
    if like == types.float32:
        return lambda f, like: taylor(f)

    def long(f, like):
        p = f * (1 / 87178291200.0) + 1 / 6227020800.0
        p = p * f + 1 / 479001600.0
        p = p * f + 1 / 39916800.0
        p = p * f + 1 / 3628800.0
        p = p * f + 1 / 362880.0
        p = p * f + 1 / 40320.0
        p = p * f + 1 / 5040.0
        p = p * f + 1 / 720.0
        p = p * f + 1 / 120.0
        p = p * f + 1 / 24.0
        p = p * f + 1 / 6.0
        p = p * f + 0.5
        return p * f + 1.0

    return long


def traits(like: Any) -> Any:
    """Of an arithmetic type: what rounds to an integer and leaves it, as an exponent, in the low bits; the least s of
    an exponential and of one in `UNIT`; the factor that splits a float64 so that n times the first part is exact; the
    largest number."""


@overload(traits, strict=False)
def _traits(like: Any) -> Any:
    if like == types.float32:
        return lambda like: (1.5 * 2.0**23 + 127, -87.0, -128.0, 2.0**41 + 1, 3.4028234663852886e38)
    return lambda like: (1.5 * 2.0**52 + 1023, -700.0, -740.0, 2.0**20 + 1, 1e300)


@inlined
def scale_of(temperature, n, unit, like):
    """What `exponential` needs of a row's temperature, in the type of ``like``: log2(e) / T, T ln 2 in two parts,
    1 / T, the least distance, and what rounds to an integer. ``unit`` is None for e^s itself."""
    t = 1.0
    if temperature is not None:
        t = temperature[n]
    round_, least, unit_least, splitter, largest = traits(like)
    if unit is not None:
        round_, least = round_ + 60, unit_least
    step = min(t * LN2, largest / 2)
    high = step * splitter - (step * splitter - step)
    return (
        same(min(LOG2_E / t, largest), like),
        same(high, like),
        same(step - high, like),
        same(min(1 / t, largest), like),
        same(max(least * t, -largest), like),
        same(round_, like),
    )


@njit(**FUSED)
def exponential(d, scale, temperature):
    """e^(d / T) of a distance d <= 0; 0 where that is out of reach."""
    rate, high, low, inverse, least, round_ = scale
    shifted = d * rate + round_
    n = shifted - round_
    f = (d - n * high) - n * low
    if temperature is not None:
        f = f * inverse
    e = polynomial(f) * power_of_two(shifted)
    return choose(d < least, same(0.0, e), e)


# -- an entry of a row


@inlined
def entry(x, j, sign, mask):
    """v: the logit, widened, signed and masked."""
    v = widen(x[j])
    if sign is not None:
        v = choose(abs(v) == inf, v, v * sign)  # what is infinite is judged before any transform
    if mask is not None:
        v = choose(mask[j] != 0, v, same(-inf, v))
    return v


@njit(**FUSED)
def cap_at(top, inner):
    """What `softcap` needs of a reference ``top``, in float64. Beyond 170, tanh is 1 to 1e-147, and e^680 finite."""
    limit = 170.0 * inner
    held = max(min(same(top, 0.0), limit), -limit)
    w = exp(-2.0 * held / inner)
    return held, 2.0 / inner, limit, w, 2.0 * w / (1.0 + w)


@njit(**FUSED)
def softcap(v, cap):
    """tanh a - tanh b and 1 - tanh^2 a in float64, for a = v / inner and b that of the reference.

    With e = e^(2 (a - b)) and w = e^(-2 b), the difference is 2 w / (1 + w) * (e - 1) / (e + w), whose terms are exact
    relative to themselves, and the slope 4 e w / (e + w)^2.
    """
    held, rate, limit, w, share = cap
    wide = same(v, 0.0)
    u = (min(wide, limit) - held) * rate
    u = choose(u > -700.0, u, -700.0)
    shifted = u * LOG2_E + (1.5 * 2.0**52 + 1023)
    n = shifted - (1.5 * 2.0**52 + 1023)
    f = (u - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    power = power_of_two(shifted)
    less = power * (expm1_ratio(f, v) * f)
    e, inverse = power + less, 1.0 / (power + less + w)
    difference = share * (less + (power - 1.0)) * inverse + (wide - wide)  # NaN of an infinite logit
    return choose(wide == -inf, wide, difference), 4.0 * e * w * inverse * inverse


@by_type
def of_distance(temperature: Any, cap: Any, bias: Any) -> Any:
    """The temperature that is left for `exponential`: with softcap or bias, `distance` is the whole of s."""
    if is_none(cap) and is_none(bias):
        return lambda temperature, cap, bias: temperature
    return lambda temperature, cap, bias: None


@by_type
def distance(v: Any, offset: Any, top: Any, bias_top: Any, cap: Any, unit: Any, inverse: Any) -> Any:
    """(d, z, slope): what `exponential` takes, in the arithmetic type; what orders the entries, v or with a bias s in
    float64; and the slope of y in v, None without a softcap."""

    def biased(v, offset, top, bias_top, cap, unit, inverse):
        s = (same(v, 0.0) - same(top, 0.0) + (offset - bias_top) * unit) * inverse
        return same(s, v), s, None

    def capped(v, offset, top, bias_top, cap, unit, inverse):
        y, slope = softcap(v, cap)
        return same(y * inverse, v), v, slope

    def both(v, offset, top, bias_top, cap, unit, inverse):
        y, slope = softcap(v, cap)
        s = (y + (offset - bias_top) * unit) * inverse
        return same(s, v), s, slope

    if is_none(cap):
        return (lambda v, offset, top, bias_top, cap, unit, inverse: (v - top, v, None)) if is_none(offset) else biased
    return capped if is_none(offset) else both


@by_type
def offset_at(bias: Any, j: Any) -> Any:
    if is_none(bias):
        return lambda bias, j: None
    return lambda bias, j: same(bias[j], 0.0)


# -- a block of a row: arrays of its columns, since the compiler knows the sign of an index that counts from 0


@by_type
def columns(row: Any, first: Any, stop: Any) -> Any:
    if is_none(row):
        return lambda row, first, stop: None
    return lambda row, first, stop: row[first:stop]


@njit(error_model="numpy", forceinline=True, fastmath={"reassoc"})
def add(a, b):
    return a + b


@called
def block_sums(x, sign, mask, bias, unit, top, bias_top, cap, inverse, scale, spread, moment):
    """The `key` of the block's largest, its sum of e^s and, unless ``moment`` is None, that of e^s s."""
    prefer_wide_vectors()
    total, product = same(0.0, top), same(0.0, top)
    most = key(lowest(top, bias))
    for j in range(x.size):
        v = entry(x, j, sign, mask)
        d, z, _ = distance(v, offset_at(bias, j), top, bias_top, cap, unit, inverse)
        e = exponential(d, scale, spread)
        most = max(most, key(z))
        total = add(total, e)
        if moment is not None:
            product = add(product, e * max(d, scale[4]))
    return most, same(total, 0.0) * UNIT, same(product, 0.0) * (UNIT * scale[3])


@called
def place(most, x, sign, mask, bias, unit, top, bias_top, cap, inverse):
    """The first column whose `key` is ``most``."""
    prefer_wide_vectors()
    found = x.size
    for j in range(x.size):
        _, z, _ = distance(entry(x, j, sign, mask), offset_at(bias, j), top, bias_top, cap, unit, inverse)
        found = min(found, choose(key(z) == most, j, x.size))
    return found


@by_type
def lowest(top: Any, bias: Any) -> Any:
    """-inf in the type of what orders the entries."""
    if is_none(bias):
        return lambda top, bias: same(-inf, top)
    return lambda top, bias: -inf


@by_type
def level(top: Any, bias: Any) -> Any:
    """The reference's own place in the order."""
    if is_none(bias):
        return lambda top, bias: top
    return lambda top, bias: 0.0


@by_type
def shift(old: Any, old_bias: Any, top: Any, bias_top: Any, bias: Any, cap: Any, unit: Any, inverse: Any) -> Any:
    """The `distance` of the reference before from the one now."""
    if is_none(bias):
        return lambda old, old_bias, top, bias_top, bias, cap, unit, inverse: distance(
            old, None, top, bias_top, cap, unit, inverse
        )[0]
    return lambda old, old_bias, top, bias_top, bias, cap, unit, inverse: distance(
        old, old_bias, top, bias_top, cap, unit, inverse
    )[0]


@by_type
def leader_of(
    most: Any, x: Any, sign: Any, mask: Any, bias: Any, unit: Any, top: Any, bias_top: Any, cap: Any, inverse: Any
) -> Any:
    """v and bias of the entry whose `key` is ``most``."""

    def found(most, x, sign, mask, bias, unit, top, bias_top, cap, inverse):
        column = place(most, x, sign, mask, bias, unit, top, bias_top, cap, inverse)
        return entry(x, column, sign, mask), same(bias[column], 0.0)

    if is_none(bias):
        return lambda most, x, sign, mask, bias, unit, top, bias_top, cap, inverse: (from_key(most), 0.0)
    return found


# -- rows


@inlined
def ask_for(block, address):
    """`prefetch` as many bytes as ``block`` has: the processor itself looks less far ahead than a block lasts."""
    for byte in range(0, block.size * block.itemsize, 64):
        prefetch(address + byte)


@by_type
def row_at(memory: Any, n: Any, which: Any, vocab: Any) -> Any:
    """Row n, or row ``which[n]``, of a matrix given as (address, bytes from row to row, a scalar of its type)."""
    if is_none(memory):
        return lambda memory, n, which, vocab: None
    if is_none(which):
        return lambda memory, n, which, vocab: elements(memory[0] + n * memory[1], vocab, memory[2])
    return lambda memory, n, which, vocab: elements(memory[0] + which[n] * memory[1], vocab, memory[2])


@by_type
def value_at(values: Any, n: Any, default: Any) -> Any:
    if is_none(values):
        return lambda values, n, default: default
    return lambda values, n, default: values[n]


@by_type
def sign_at(sign: Any, n: Any, like: Any) -> Any:
    if is_none(sign):
        return lambda sign, n, like: None
    return lambda sign, n, like: same(sign[n], like)


@by_type
def cap_of(top: Any, inner: Any, n: Any) -> Any:
    if is_none(inner):
        return lambda top, inner, n: None
    return lambda top, inner, n: cap_at(top, inner[n])


@compiled()
def summarize(
    part,
    x,
    temperature,
    sign,
    inner,
    bias,
    bias_row,
    bias_unit,
    mask,
    mask_row,
    ids,
    tops,
    bias_tops,
    rests,
    moments,
    counts,
):
    """Summary of the rows ``part`` (first, stop, V) into ``tops``, ``bias_tops``, ``rests`` and ``moments``; unless
    ``ids`` is None, also `count_greater` into ``counts``."""
    prefer_wide_vectors()
    first, stop, vocab = part
    spread = of_distance(temperature, inner, bias)
    for n in range(first, stop):
        logits, kept, added = (
            row_at(x, n, None, vocab),
            row_at(mask, n, mask_row, vocab),
            row_at(bias, n, bias_row, vocab),
        )
        top, bias_top = same(0.0, tops[0]), 0.0
        side, unit, inverse = sign_at(sign, n, top), value_at(bias_unit, n, 1.0), 1.0 / value_at(temperature, n, 1.0)
        scale, cap = scale_of(spread, n, UNIT, top), cap_of(top, inner, n)
        tempered = 1.0 / value_at(spread, n, 1.0)
        others, best, moment, leader = 0.0, 0.0, 0.0, NONE
        bar = key(lowest(top, added))
        ordered = cap_of(0.0, inner, n)
        if ids is not None:
            for k in range(ids.shape[1]):
                counts[n, k] = 0
        for begin in range(0, vocab, BLOCK):
            block, keep = columns(logits, begin, begin + BLOCK), columns(kept, begin, begin + BLOCK)
            biases = columns(added, begin, begin + BLOCK)
            ask_for(block, x[0] + n * x[1] + begin * block.itemsize + AHEAD)
            most, total, product = block_sums(
                block, side, keep, biases, unit, top, bias_top, cap, inverse, scale, spread, moments
            )
            if ids is not None:
                for k in range(ids.shape[1]):
                    if ids[n, k] >= 0:
                        mark = height(logits, ids[n, k], side, kept, added, unit, ordered)
                        counts[n, k] += above(mark, block, side, keep, biases, unit, ordered)[0]
            if most <= bar:
                others, moment = others + total, moment + product
                continue
            # the block holds a new reference: what was summed before moves there, and the block is summed again
            old, old_bias = same(top, 0.0), bias_top
            top, bias_top = leader_of(most, block, side, keep, biases, unit, top, bias_top, cap, inverse)
            cap = cap_of(top, inner, n)
            if leader != NONE:
                step = shift(old, old_bias, same(top, 0.0), bias_top, added, cap, unit, inverse) * tempered
                step = step if step > FARTHEST else FARTHEST
                weight = exp(step)
                moment, others = weight * (moment + step * (others + best)), weight * (others + best)
            most, best, product = block_sums(
                block, side, keep, biases, unit, top, bias_top, cap, inverse, scale, spread, moments
            )
            leader, bar, moment = begin, key(level(top, added)), moment + product
        rest = others + best - 1.0
        if leader == NONE:
            rest = others
        elif rest < 1.0:
            block, keep = columns(logits, leader, leader + BLOCK), columns(kept, leader, leader + BLOCK)
            biases = columns(added, leader, leader + BLOCK)
            column = place(bar, block, side, keep, biases, unit, top, bias_top, cap, inverse)
            rest = others
            for start, end in ((0, column), (column + 1, block.size)):
                most, total, product = block_sums(
                    columns(block, start, end),
                    side,
                    columns(keep, start, end),
                    columns(biases, start, end),
                    unit,
                    top,
                    bias_top,
                    cap,
                    inverse,
                    scale,
                    spread,
                    None,
                )
                rest = rest + total
        tops[n] = (top if rest == rest else same(nan, top)) if leader != NONE else same(rest - inf, top)
        rests[n] = rest
        if bias_tops is not None:
            bias_tops[n] = bias_top
        if moments is not None:
            moments[n] = moment
        if ids is not None and not abs(tops[n]) < inf:
            for k in range(ids.shape[1]):
                counts[n, k] = counts[n, k] if ids[n, k] < 0 else -1


@by_type
def sloped(value: Any, slope: Any) -> Any:
    if is_none(slope):
        return lambda value, slope: value
    return lambda value, slope: value * slope


@by_type
def is_held(v: Any, offset: Any) -> Any:
    """Whether an entry of a row with a distribution has a probability."""
    if is_none(offset):
        return lambda v, offset: v != -inf
    return lambda v, offset: (v != -inf) & (offset != -inf)


@by_type
def target(logits: Any, out: Any, n: Any, vocab: Any) -> Any:
    if is_none(out):
        return lambda logits, out, n, vocab: logits
    return lambda logits, out, n, vocab: row_at(out, n, None, vocab)


@by_type
def source(logits: Any, out: Any) -> Any:
    """What `fill_row` reads: None where that is what it writes. (Given the same array twice, a loop compiled for two
    would find at run time that they overlap, and go one by one.)"""
    if is_none(out):
        return lambda logits, out: None
    return lambda logits, out: logits


@by_type
def either(array: Any, default: Any) -> Any:
    if is_none(array):
        return lambda array, default: default
    return lambda array, default: array


@called
def fill_row(result, kind, x, sign, mask, bias, unit, top, bias_top, cap, inverse, scale, spread, weight, linear, beta):
    """e^s * (weight + linear * s), times the slope."""
    prefer_wide_vectors()
    x = either(x, result)
    for j in range(x.size):
        d, _, slope = distance(entry(x, j, sign, mask), offset_at(bias, j), top, bias_top, cap, unit, inverse)
        e = exponential(d, scale, spread)
        value = e * weight if beta is None else e * (weight + linear * max(d, scale[4]))
        result[j] = narrow(sloped(value, slope), kind)


@compiled()
def gradient(
    part,
    x,
    out,
    temperature,
    sign,
    inner,
    bias,
    bias_row,
    bias_unit,
    mask,
    mask_row,
    tops,
    bias_tops,
    rests,
    ids,
    upstream,
    alpha,
    beta,
):
    """Gradient of the rows ``part`` into ``out``, which None makes ``x`` itself."""
    prefer_wide_vectors()
    first, stop, vocab = part
    spread = of_distance(temperature, inner, bias)
    many = ids.shape[1]
    saved = np.empty(many, tops.dtype)
    for n in range(first, stop):
        logits, kept, added = (
            row_at(x, n, None, vocab),
            row_at(mask, n, mask_row, vocab),
            row_at(bias, n, bias_row, vocab),
        )
        result = target(logits, out, n, vocab)
        top = tops[n]
        has_distribution = top - top == 0.0 and rests[n] == rests[n]
        ignored = invalid = 0
        for k in range(many):
            ignored += ids[n, k] == IGNORED
            invalid += ids[n, k] == INVALID
        if many > 0 and ignored == many:
            for j in range(vocab):
                result[j] = narrow(same(0.0, top), x[2])
            continue
        bias_top = value_at(bias_tops, n, 0.0)
        side, unit, inverse = sign_at(sign, n, top), value_at(bias_unit, n, 1.0), 1.0 / value_at(temperature, n, 1.0)
        scale, cap = scale_of(spread, n, None, top), cap_of(top, inner, n)
        factor = inverse * value_at(sign, n, 1.0) / value_at(inner, n, 1.0)
        share = factor / (1.0 + rests[n]) if has_distribution else nan
        weight = share * alpha[n]
        linear = share * value_at(beta, n, 0.0) / value_at(spread, n, 1.0)
        if invalid > 0 and has_distribution:
            for j in range(vocab):
                held = is_held(entry(logits, j, side, kept), offset_at(added, j))
                result[j] = narrow(choose(held, same(nan, top), same(0.0, top)), x[2])
            continue
        for k in range(many):
            saved[k] = entry(logits, max(ids[n, k], 0), side, kept)
        fill_row(
            result,
            x[2],
            source(logits, out),
            side,
            kept,
            added,
            unit,
            top,
            bias_top,
            cap,
            inverse,
            scale,
            spread,
            same(weight, top),
            same(linear, top),
            beta,
        )
        for k in range(many):
            j = ids[n, k]
            if j < 0 or not has_distribution:
                continue
            own = 0.0
            for other in range(many):
                own += upstream[n, other] if ids[n, other] == j else 0.0
            offset = offset_at(added, j)
            d, _, slope = distance(saved[k], offset, top, bias_top, cap, unit, inverse)
            e = same(exponential(d, scale, spread), 0.0)
            value = e * (weight + linear * same(max(d, scale[4]), 0.0)) + own * factor
            held = is_held(saved[k], offset)
            result[j] = narrow(same(sloped(value, slope) if held else 0.0, 0.0), x[2])


@compiled()
def count_greater(part, x, sign, inner, bias, bias_row, bias_unit, mask, mask_row, like, ids, counts):
    """For the rows ``part``: how many entries stand strictly above the one at each id; 0 for a negative id, -1 in a row
    without an order."""
    prefer_wide_vectors()
    first, stop, vocab = part
    for n in range(first, stop):
        logits, kept, added = (
            row_at(x, n, None, vocab),
            row_at(mask, n, mask_row, vocab),
            row_at(bias, n, bias_row, vocab),
        )
        side, unit, cap = sign_at(sign, n, like), value_at(bias_unit, n, 1.0), cap_of(0.0, inner, n)
        wrong = 0
        for k in range(ids.shape[1]):
            counts[n, k] = 0
        for begin in range(0, vocab, BLOCK):
            block, keep = columns(logits, begin, begin + BLOCK), columns(kept, begin, begin + BLOCK)
            biases = columns(added, begin, begin + BLOCK)
            for k in range(ids.shape[1]):
                if ids[n, k] >= 0:
                    mark = height(logits, ids[n, k], side, kept, added, unit, cap)
                    higher, unordered = above(mark, block, side, keep, biases, unit, cap)
                    counts[n, k] += higher
                    wrong += unordered
        for k in range(ids.shape[1]):
            if ids[n, k] >= 0:
                nothing = counts[n, k] == 0 and height(logits, ids[n, k], side, kept, added, unit, cap) == -inf
                counts[n, k] = -1 if wrong > 0 or nothing else counts[n, k]


@by_type
def height(x: Any, j: Any, sign: Any, mask: Any, bias: Any, unit: Any, cap: Any) -> Any:
    """What ranks go by: v, or with a bias y + bias * k, rounded to the arithmetic type."""

    def biased(x, j, sign, mask, bias, unit, cap):
        v = entry(x, j, sign, mask)
        return same(distance(v, offset_at(bias, j), same(0.0, v), 0.0, cap, unit, 1.0)[1], v)

    return (lambda x, j, sign, mask, bias, unit, cap: entry(x, j, sign, mask)) if is_none(bias) else biased


@called
def above(mark, x, sign, mask, bias, unit, cap):
    """How many entries are higher than ``mark``, and how many are +inf or NaN."""
    prefer_wide_vectors()
    count = unordered = 0
    for j in range(x.size):
        here = height(x, j, sign, mask, bias, unit, cap)
        count += here > mark
        unordered += not here < inf
    return count, unordered
