"""The transforms that stand between the logits and the softmax, and their derivative.

    z = (softcap * tanh(scale * x / softcap) + bias) / temperature          -inf where the mask does not keep an entry

A row needs few numbers for it. With v the entry after mask and sign, a row's statistics are those of

    z = (y + k * bias) / T'        y = v, or with a softcap tanh(v / inner)

    without a softcap    T' = temperature / |scale|     k = 1 / |scale|
    with one             T' = temperature / softcap     k = 1 / softcap       inner = softcap / |scale|

Only differences of z enter, and they are made of differences of v, which are exact or nearly so: the transformed
logits themselves, rounded, would cost a few units in the last place of z. Special values are judged on the logits: -inf
is an entry of probability 0 under any transform, +inf and NaN are an error of the row.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xlogprobs import accurate, contract
from xlogprobs.accurate import Array, Pair

if TYPE_CHECKING:
    from xlogprobs.summary import Primitives


class Shared(NamedTuple):
    """An array over the vocabulary that rows may share: (V,) for all rows, (N, V) with one of its own for each, or
    (R, V) of which row n has ``values[row[n]]``."""

    values: Array
    row: Array | None = None

    def of(self, part: slice) -> "Shared":
        """That of some of the rows."""
        if self.row is not None:
            return Shared(self.values, self.row[part])
        return Shared(self.values[part, :] if self.values.ndim == 2 else self.values)

    def spread(self, xp: Any, rows: int) -> Array:
        """(N, V); a view where the library has views of a repeated row."""
        if self.row is not None:
            return xp.take(self.values, self.row, axis=0)
        return (
            self.values if self.values.ndim == 2 else xp.broadcast_to(self.values[None, :], (rows, *self.values.shape))
        )

    def rows_of(self, row: Array) -> tuple[Array, Array]:
        """A matrix, and the rows of it that belong to the rows 0 .. N-1 given as ``row``."""
        if self.values.ndim == 1:
            return self.values[None, :], row * 0
        return self.values, row if self.row is None else self.row


class Rows(NamedTuple):
    """The transforms of N rows. Pairs and arrays are (N,); a None is the identity."""

    temperature: Pair | None = None
    """T'"""
    sign: Array | None = None
    """Of the scale: -1, 0 or 1. None where it is known to be positive."""
    inner: Pair | None = None
    bias: Shared | None = None
    unit: Pair | None = None
    """k"""
    mask: Shared | None = None

    def of(self, part: slice) -> "Rows":
        """Those of some of the rows."""
        if self is PLAIN:
            return self
        return Rows(*(_part(field, part) for field in self))

    def over_vocabulary(self, xp: Any, rows: int) -> tuple[Array | None, Array | None]:
        """mask and bias (N, V)."""
        mask, bias = (None if shared is None else shared.spread(xp, rows) for shared in (self.mask, self.bias))
        return mask, bias


def _part(field: Any, part: slice) -> Any:
    if isinstance(field, Shared):
        return field.of(part)
    return (field[0][part], field[1][part]) if isinstance(field, tuple) else None if field is None else field[part]


class Point(NamedTuple):
    """An entry of a row: its v, and its bias."""

    value: Array
    bias: Array | None = None

    def column(self) -> "Point":
        """With one axis more, over which a row's entries run."""
        return Point(self.value[..., None], None if self.bias is None else self.bias[..., None])


class Numbers(NamedTuple):
    """A row's numbers in the arithmetic type, of a shape that broadcasts to its entries."""

    temperature: Array | None = None
    inner: Array | None = None
    unit: Array | None = None
    sign: Array | None = None

    def map(self, function: Any) -> "Numbers":
        return Numbers(*(None if number is None else function(number) for number in self))


PLAIN = Rows()


def rows_of_call(
    xp: Any, call: contract.Transforms, shape: tuple[int, ...], like: Array, move: Callable[[Any], Array]
) -> Rows:
    """The transforms of a call on logits of ``shape``, as those of its rows; numbers may also be pairs of arrays.

    ``move`` brings a NumPy array of integers to the device of ``like``, whose arithmetic type the pairs have.
    """
    rows = math.prod(shape[:-1])
    temperature, scale, softcap = (
        None if number is None else number_pair(xp, name, number, rows, like)
        for name, number in zip(("temperature", "scale", "softcap"), call[:3], strict=True)
    )
    bias, mask = (
        None if array is None else over_vocabulary(xp, array, shape, move) for array in (call.bias, call.mask)
    )
    if bias is not None:
        bias = Shared(xp.astype(bias.values, arithmetic(xp, like), copy=False), bias.row)
    sign, magnitude = None, scale
    if scale is not None and not (isinstance(call.scale, float) and call.scale >= contract.COLDEST):
        zero, one = xp.zeros_like(scale[0]), xp.ones_like(scale[0])
        sign = xp.where(scale[0] > 0, one, xp.where(scale[0] < 0, -one, scale[0]))
        still = xp.abs(scale[0]) < _smallest(xp, scale[0])  # all entries are 0 then, or as good as
        sign = xp.where(still, scale[0], sign)
        magnitude = xp.where(still, one, scale[0] * sign), xp.where(still, zero, scale[1] * sign)
    outer = magnitude if softcap is None else softcap  # what divides the temperature
    inner = softcap if softcap is None or magnitude is None else _quotient(xp, softcap, magnitude)
    unit = None
    if outer is not None:
        one_pair = xp.ones_like(outer[0]), xp.zeros_like(outer[0])
        unit = accurate.divide(xp, one_pair, outer) if bias is not None else None
        temperature = _quotient(xp, one_pair if temperature is None else temperature, outer)
    return Rows(temperature, sign, inner, bias, unit, mask)


def _smallest(xp: Any, number: Array) -> float:
    """The smallest number that has a reciprocal, and a half that is not flushed to 0."""
    return 2 * float(xp.finfo(number.dtype).smallest_normal)


def _quotient(xp: Any, a: Pair, b: Pair) -> Pair:
    """``a / b`` of positive pairs, kept within what can divide: -inf / inf and 0 / 0 would be NaN."""
    high, low = accurate.divide(xp, a, b)
    for limit, beyond in (
        (_smallest(xp, high), high < _smallest(xp, high)),
        (float(xp.finfo(high.dtype).max), xp.isinf(high)),
    ):
        high, low = xp.where(beyond, limit, high), xp.where(beyond, 0, low)
    return high, low


def arithmetic(xp: Any, like: Array) -> Any:
    return xp.float64 if like.dtype == xp.float64 else xp.float32


def number_pair(xp: Any, name: str, number: Any, rows: int, like: Array) -> Pair:
    """A number of each row in the arithmetic type, and what that type rounded away; NaN where it is invalid."""
    dtype = arithmetic(xp, like)
    device = getattr(like, "device", None)
    if isinstance(number, float):
        high = number if dtype == xp.float64 else float(np.float32(number))
        return (
            xp.full((rows,), high, dtype=dtype, device=device),
            xp.full((rows,), number - high, dtype=dtype, device=device),
        )
    if isinstance(number, tuple):
        high, low = (xp.broadcast_to(xp.reshape(part, (-1,)), (rows,)) for part in number)
        return high, low
    values = xp.broadcast_to(xp.reshape(number, (-1,)), (rows,))
    if values.dtype not in (xp.float32, xp.float64):
        values = xp.astype(values, dtype)
    valid = contract.is_valid(name, values, dtype != xp.float64)
    high = xp.astype(values, dtype)
    low = xp.astype(values - xp.astype(high, values.dtype), dtype) if values.dtype == xp.float64 else high * 0
    return xp.where(valid, high, float("nan")), low


def over_vocabulary(xp: Any, array: Array, shape: tuple[int, ...], move: Callable[[Any], Array]) -> Shared:
    """An array that broadcasts to logits of ``shape``, without repeating what rows share."""
    own = (1,) * (len(shape) - array.ndim) + tuple(array.shape)
    if own[-1] != shape[-1]:
        own = (*own[:-1], shape[-1])
        array = xp.broadcast_to(array, own)
    count = math.prod(own[:-1])
    if count == 1:
        return Shared(xp.reshape(array, (shape[-1],)))
    values = xp.reshape(array, (count, shape[-1]))
    if own[:-1] == shape[:-1]:
        return Shared(values)
    row = np.broadcast_to(np.arange(count).reshape(own[:-1]), shape[:-1]).reshape(-1)
    return Shared(values, move(row))


def numbers(transforms: Rows) -> Numbers:
    """(N,) each."""
    pairs = transforms.temperature, transforms.inner, transforms.unit
    temperature, inner, unit = (None if pair is None else pair[0] for pair in pairs)
    return Numbers(temperature, inner, unit, transforms.sign)


def value_of(prim: "Primitives", x: Array, mask: Array | None, by: Numbers) -> Array:
    """v of the entries ``x``, widened where there is a mask or a sign; without either, the entries as they are."""
    xp = prim.xp
    if mask is None and by.sign is None:
        return x
    v = prim.widen(xp, x)
    if by.sign is not None:
        v = xp.where(xp.isinf(v), v, v * by.sign)
    return v if mask is None else xp.where(mask, v, xp.full_like(v, -float("inf")))  # v may be of half precision


def key(prim: "Primitives", at: Point, by: Numbers) -> Array:
    """What orders the entries of a row, float32 or wider: v, or with a bias y / k + bias."""
    if at.bias is None:
        return at.value
    y, bias = at.value, at.bias
    if by.inner is not None:
        y = prim.xp.where(y == -float("inf"), y, prim.xp.tanh(y / by.inner))
    # a product in the sum would be rounded or not, as a compiler happens to contract it; equal entries must stay equal
    return (y if by.unit is None else y / by.unit) + bias


def distance(prim: "Primitives", at: Point, reference: Point, by: Numbers) -> Array:
    """z of ``at`` less z of ``reference``, in the arithmetic type and accurate relative to itself."""
    xp = prim.xp
    if by.inner is None:
        apart = prim.widen(xp, at.value) - reference.value
    else:
        apart = _tanh_apart(prim, prim.widen(xp, at.value), reference.value, by.inner)
    if at.bias is not None:
        bias = at.bias - reference.bias
        apart = apart + (bias if by.unit is None else bias * by.unit)
    return apart if by.temperature is None else apart / by.temperature


def _tanh_apart(prim: "Primitives", v: Array, reference: Array, inner: Array) -> Array:
    """``tanh a - tanh b = tanh(a - b) (1 - tanh a tanh b)``, where neither factor cancels."""
    xp = prim.xp
    q, q_reference = complement(prim, v / inner), complement(prim, reference / inner)
    together = q + q_reference * (1 - q)
    opposite = 1 + (1 - q) * (1 - q_reference)
    bracket = xp.where((v < 0) == (reference < 0), together, opposite)
    return xp.where(v == -float("inf"), v, xp.tanh((v - reference) / inner) * bracket)


def complement(prim: "Primitives", a: Array) -> Array:
    """``1 - |tanh a|``, accurate relative to itself."""
    e = prim.exp(prim.xp, -2 * prim.xp.abs(a))
    return 2 * e / (1 + e)


def slope(prim: "Primitives", v: Array, by: Numbers) -> Array | None:
    """dz / dx of the entries, ``sign / T'`` or ``sign (1 - tanh^2) / (inner T')``; None for 1."""
    factor: Array | None = None
    if by.inner is not None:
        q = complement(prim, v / by.inner)
        factor = q * (2 - q) / by.inner
    if by.sign is not None:
        factor = by.sign if factor is None else factor * by.sign
    if by.temperature is not None:
        factor = 1 / by.temperature if factor is None else factor / by.temperature
    return factor


def wide_level(prim: "Primitives", at: Point, transforms: Rows) -> Any:
    """y + k bias of points (N, any): float64, or a pair where there is none."""
    xp = prim.xp
    if prim.has_float64:
        level = v = xp.astype(at.value, xp.float64)
        if transforms.inner is not None:
            level = xp.where(v == -float("inf"), v, xp.tanh(v / wide(xp, transforms.inner)[:, None]))
        if at.bias is not None:
            bias = xp.astype(at.bias, xp.float64)
            level = level + (bias if transforms.unit is None else bias * wide(xp, transforms.unit)[:, None])
        return level
    pair = at.value, xp.zeros_like(at.value)
    if transforms.inner is not None:
        high, low = accurate.tanh(xp, accurate.divide(xp, pair, _columns(transforms.inner)), prim.repeat)
        gone = at.value == -float("inf")
        pair = xp.where(gone, at.value, high), xp.where(gone, 0, low)
    if at.bias is not None:
        bias = -at.bias, xp.zeros_like(at.bias)
        if transforms.unit is not None:
            product, plain = accurate.multiply(bias, _columns(transforms.unit)), bias[0] * transforms.unit[0][:, None]
            held = xp.isfinite(plain)
            bias = xp.where(held, product[0], plain), xp.where(held, product[1], bias[1])
        pair = accurate.subtract(xp, pair, bias)
    return pair


def wide_distance(prim: "Primitives", at: Point, reference: Point, transforms: Rows) -> Any:
    """z of points (N, any) less z of the rows' reference (N,): float64, or a pair where there is none."""
    xp = prim.xp
    a, b = wide_level(prim, at, transforms), wide_level(prim, reference.column(), transforms)
    if prim.has_float64:
        apart = a - b
        return apart if transforms.temperature is None else apart / wide(xp, transforms.temperature)[:, None]
    if transforms.temperature is None:
        return _apart(xp, a, b, transforms)
    a, b = (a[0] * 0.5, a[1] * 0.5), (b[0] * 0.5, b[1] * 0.5)  # the difference itself may lie beyond float32
    high, low = _columns(transforms.temperature)
    return accurate.divide(xp, _apart(xp, a, b, transforms), (high * 0.5, low * 0.5))


def _apart(xp: Any, a: Pair, b: Pair, transforms: Rows) -> Pair:
    """``a - b``; entries without a softcap and a bias have no low parts, and a compiler much less to do."""
    if transforms.inner is None and transforms.bias is None:
        return accurate.difference(xp, a[0], b[0])
    return accurate.subtract(xp, a, b)


def wide_value(prim: "Primitives", at: Point, transforms: Rows) -> Any:
    """z of points (N, any)."""
    level = wide_level(prim, at, transforms)
    if transforms.temperature is None:
        return level
    if prim.has_float64:
        return level / wide(prim.xp, transforms.temperature)[:, None]
    high, low = _columns(transforms.temperature)
    return accurate.divide(prim.xp, (level[0] * 0.5, level[1] * 0.5), (high * 0.5, low * 0.5))


def wide(xp: Any, pair: Pair) -> Array:
    return xp.astype(pair[0], xp.float64) + xp.astype(pair[1], xp.float64)


def _columns(pair: Pair) -> Pair:
    return pair[0][:, None], pair[1][:, None]
