"""The mathematics: summarize -> merge -> finish.

A row of logits x, at temperature T, is summed up by

    m = max(x)                 r = sum of e^((x - m) / T) over all entries but one that attains m

and the log-probability of the entry x_t is ``(x_t - m) / T - log1p(r)``. Three choices make this exact:

- one maximum's own 1.0 stays out of the sum, so log1p keeps the relative accuracy of a confident token;
- ``x - m`` comes first: a common offset of 1e7 cancels before anything is rounded, and so does the temperature's
  rounding, which then only touches terms that e^-|x - m| has made small;
- sums inside a block are short, and the sum over blocks is wide (float64, or pairs of `accurate` where there is none).

Blocks are summed with their maximum included, which compilers turn into one vectorised read. Only where the sum of the
block that holds the row's maximum is below 2, and so mostly that maximum's own 1, is that block summed again without
it: any larger sum keeps its accuracy when 1 is taken off.

Entropy takes a third number of the same read,

    t = sum of e^s s  with s = (x - m) / T              entropy = log1p(r) - t / (1 + r)          lse = m / T + log1p(r)

to which an entry of probability 0 adds nothing. The transforms of `xlogprobs.transforms` replace (x - m) / T by their
own difference; the maximum is then the entry that they make largest.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from xlogprobs import accurate
from xlogprobs.accurate import Array
from xlogprobs.transforms import Numbers, Point, Rows, distance, key, numbers, value_of, wide_distance, wide_value

LEAST = -1000.0  # e^LEAST is 0 in float64, too


@dataclass(frozen=True)
class Layout:
    """How a row of ``vocab`` entries is cut: blocks of ``width``, a shorter last one where vocab is no multiple.
    The cut depends on the vocabulary alone, never on the batch: so do the order of summation and the result's bits.
    """

    vocab: int
    width: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", min(self.width, self.vocab))

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """(start, count, width) of each run of equal blocks, together all columns once."""
        whole = self.vocab // self.width
        yield 0, whole, self.width
        if tail := self.vocab - whole * self.width:
            yield whole * self.width, 1, tail


def cut(xp: Any, x: Array, start: int, count: int, width: int) -> Array:
    """Columns of (N, V) as blocks (N, count, width)."""
    return xp.reshape(x[:, start : start + count * width], (x.shape[0], count, width))


def widen(xp: Any, x: Array) -> Array:
    """Half precision to float32; float32 and float64 as they are."""
    return x if x.dtype in (xp.float32, xp.float64) else xp.astype(x, xp.float32)


def take(xp: Any, x: Array, columns: Array) -> Array:
    """Entries of (N, V) at columns (N, K)."""
    return xp.take_along_axis(x, columns, axis=-1)


def window(xp: Any, x: Array, row: Array, start: Array, width: int) -> Array:
    """``width`` columns of rows of (R, V), each from a start of its own."""
    columns = start[:, None] + xp.arange(width, dtype=start.dtype, device=device_of(x))[None, :]
    entries = xp.reshape(row[:, None] * x.shape[1] + columns, (-1,))
    return xp.reshape(xp.take(xp.reshape(x, (-1,)), entries), columns.shape)


def top(xp: Any, order: Array, count: int) -> Array:
    """Columns (N, count) of the largest of each row, in descending order, equal ones by ascending column."""
    return xp.argsort(order, axis=-1, descending=True, stable=True)[:, :count]


def row_numbers(xp: Any, x: Array) -> Array:
    return xp.arange(x.shape[0], device=device_of(x))


def resum(function: Callable[..., Array], total: Array, whole: tuple[Any, ...], rowwise: tuple[Any, ...]) -> Array:
    """``function(whole, rowwise)`` (N,).

    ``rowwise`` are arrays whose first axis is the row, or None, which a backend may cut into pieces; and it need not
    call the function for rows whose ``total`` is 2 or more: there ``total - 1`` serves as well.
    """
    return function(whole, rowwise)


def sum_last_axis(xp: Any, terms: Array) -> Array:
    return xp.sum(terms, axis=-1)


def exp(xp: Any, x: Array) -> Array:
    """e^x of ``x <= 0``."""
    return xp.exp(x)


def block_terms(
    prim: "Primitives", at: Point, reference: Point, by: Numbers, moment: bool = False
) -> tuple[Array, Array | None]:
    """Sums over the last axis of e^s, and of e^s s where the ``moment`` is asked for, with s the difference of z.

    ``at`` has one axis more than ``reference`` and ``by``, the summed one.
    """
    xp = prim.xp
    s = distance(prim, at, reference.column(), by.map(lambda number: number[..., None]))
    e = prim.exp(xp, s)
    return prim.sum(xp, e), prim.sum(xp, e * held(xp, s)) if moment else None


def held(xp: Any, s: Array) -> Array:
    """s where e^s is not 0, and some finite number where it is: their product is 0 there, and not NaN."""
    return xp.where(s < LEAST, LEAST, s)


def device_of(x: Array) -> Any:
    return getattr(x, "device", None)


@dataclass(frozen=True)
class Primitives:
    """What a backend may do its own way; the defaults are the array API's."""

    xp: Any
    has_float64: bool = True
    cut: Callable[[Any, Array, int, int, int], Array] = cut
    widen: Callable[[Any, Array], Array] = widen
    take: Callable[[Any, Array, Array], Array] = take
    window: Callable[[Any, Array, Array, Array, int], Array] = window
    exp: Callable[[Any, Array], Array] = exp
    sum: Callable[[Any, Array], Array] = sum_last_axis
    """Over the entries of a block."""
    block_terms: Callable[..., tuple[Array, Array | None]] = block_terms
    sum_last_axis: Callable[[Any, Array], Array] = sum_last_axis
    row_numbers: Callable[[Any, Array], Array] = row_numbers
    top: Callable[[Any, Array, int], Array] = top
    resum: Callable[..., Array] = resum
    repeat: Callable[..., Any] = accurate.repeat
    """A loop."""
    block_sums: "Callable[[Array, Rows, Layout, Primitives, bool], Blocks] | None" = None
    """In place of `block_sums`."""
    summarize: "Callable[[Array, Rows, Layout, Primitives, bool], Summary] | None" = None
    """In place of `summarize`."""


class Blocks(NamedTuple):
    """Of the blocks of rows, each (N, blocks)."""

    reference: Point
    """The entry that the sums are relative to: the largest of the block, or of any part of the row that holds it."""
    key: Array
    """What orders the references."""
    total: Array
    """Sum of e^s."""
    moment: Array | None
    """Sum of e^s s."""


class Summary(NamedTuple):
    """m, r and t of each row; r is ``rest + rest_low``, rest_low None where rest is float64."""

    max: Array
    rest: Array
    rest_low: Array | None = None
    bias: Array | None = None
    """The maximum's own, where there is a bias."""
    moment: Array | None = None
    """t, where it was asked for."""

    @property
    def point(self) -> Point:
        return Point(self.max, self.bias)


def summarize(x: Array, transforms: Rows, layout: Layout, prim: Primitives, moment: bool = False) -> Summary:
    """Summary of each row of ``x`` (N, V)."""
    if prim.summarize is not None:
        return prim.summarize(x, transforms, layout, prim, moment)
    blocks = (prim.block_sums or block_sums)(x, transforms, layout, prim, moment)
    return summarize_blocks(x, blocks, transforms, layout, prim)


def summarize_blocks(x: Array, blocks: Blocks, transforms: Rows, layout: Layout, prim: Primitives) -> Summary:
    """Summary of the rows whose blocks these are."""
    xp = prim.xp
    largest = xp.max(blocks.key, axis=-1)
    # of the blocks relative to the row's maximum, the largest; if its sum is below 2, it is one that holds the maximum
    # or the sums of the others, too, are 1 or more
    candidates = xp.where(blocks.key == largest[:, None], blocks.total, -1.0)
    best, most = xp.argmax(candidates, axis=-1), xp.max(candidates, axis=-1)
    top = Point(largest)
    if blocks.reference.bias is not None:
        value, bias = (xp.take_along_axis(part, best[:, None], axis=-1)[:, 0] for part in blocks.reference)
        top = Point(value, bias)
    rest = prim.resum(
        lambda whole, rowwise: _without_maximum(whole, rowwise, layout, prim),
        most,
        *_of_best_block(x, best, top, transforms, prim),
    )
    return _merge_blocks(blocks, best, top, rest, transforms, prim)


def block_sums(x: Array, transforms: Rows, layout: Layout, prim: Primitives, moment: bool = False) -> Blocks:
    """Each block relative to its own largest entry."""
    found = []
    for part in layout.parts():
        at, reference, order, by = part_of_rows(x, transforms, part, prim)
        total, second = prim.block_terms(prim, at, finite(prim.xp, reference), by, moment)
        # concatenated once where both are the same: twice, Inductor gives up fusing a block's maximum and sums
        own = None if order is reference.value else order
        found.append((reference.value, reference.bias, own, total, second))
    value, bias, order, total, second = joined(prim.xp, x.shape[0], found)
    return Blocks(Point(value, bias), value if order is None else order, total, second)


def part_of_rows(
    x: Array, transforms: Rows, part: tuple[int, int, int], prim: Primitives
) -> tuple[Point, Point, Array, Numbers]:
    """A part of a `Layout`: its entries in blocks, each block's largest one and the key of that, and the numbers of
    each block."""
    xp, rows = prim.xp, x.shape[0]
    start, count, width = part
    block = prim.cut(xp, x, start, count, width)
    mask, bias = (
        None if shared is None else prim.cut(xp, shared.spread(xp, rows), start, count, width)
        for shared in (transforms.mask, transforms.bias)
    )
    shape = block.shape[:-1]
    by = Numbers(*(_per_block(xp, number, count, shape) for number in numbers(transforms)))
    columns = by.map(lambda number: number[..., None])
    at = Point(value_of(prim, block, mask, columns), bias)
    return at, *largest_of(prim, at, columns), by


def joined(xp: Any, rows: int, parts: Sequence[tuple[Array | None, ...]]) -> list[Array]:
    """Arrays of one number a block, of each part, as arrays (N, blocks) of all parts."""
    columns = [[None if array is None else xp.reshape(array, (rows, -1)) for array in part] for part in parts]
    return [
        arrays[0] if arrays[0] is None or len(arrays) == 1 else xp.concat(arrays, axis=-1)
        for arrays in (list(of_parts) for of_parts in zip(*columns, strict=True))
    ]


def _per_block(xp: Any, number: Array | None, count: int, shape: tuple[int, ...]) -> Array | None:
    """A number of each row (N,) as one of each block."""
    return None if number is None else xp.reshape(xp.broadcast_to(number[:, None], (number.shape[0], count)), shape)


def largest_of(prim: Primitives, at: Point, by: Numbers) -> tuple[Point, Array]:
    """The largest entry of the last axis, and the key by which it is."""
    xp = prim.xp
    if at.bias is None:
        maximum = prim.widen(xp, xp.max(at.value, axis=-1))
        return Point(maximum), maximum
    at = Point(prim.widen(xp, at.value), at.bias)
    order = key(prim, at, by)
    index = xp.argmax(order, axis=-1)[..., None]
    value, bias, largest = (xp.take_along_axis(part, index, axis=-1)[..., 0] for part in (*at, order))
    return Point(value, bias), largest


def _of_best_block(
    x: Array, best: Array, top: Point, transforms: Rows, prim: Primitives
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of `_without_maximum`: arrays as they are, and arrays of the rows."""
    row = prim.row_numbers(prim.xp, x)
    (mask, mask_row), (bias, bias_row) = (
        (None, None) if shared is None else shared.rows_of(row) for shared in (transforms.mask, transforms.bias)
    )
    return (x, mask, bias), (row, mask_row, bias_row, best, *finite(prim.xp, top), *numbers(transforms))


def _without_maximum(whole: tuple[Any, ...], rowwise: tuple[Any, ...], layout: Layout, prim: Primitives) -> Array:
    """The best block's sum less 1: the terms below the row's maximum, and its ties but one."""
    xp = prim.xp
    x, mask, bias = whole
    row, mask_row, bias_row, best, top, top_bias, *rest = rowwise
    by = Numbers(*rest).map(lambda number: number[:, None])
    start = best * layout.width
    first = xp.where(start > layout.vocab - layout.width, layout.vocab - layout.width, start)
    values, kept, biases = (
        None if array is None else prim.window(xp, array, rows, first, layout.width)
        for array, rows in ((x, row), (mask, mask_row), (bias, bias_row))
    )
    s = distance(prim, Point(value_of(prim, values, kept, by), biases), Point(top, top_bias).column(), by)
    # the last block's window begins in the block before it, where vocab is no multiple of width
    own = xp.arange(layout.width, dtype=start.dtype, device=device_of(x))[None, :] >= (start - first)[:, None]
    zero, one = xp.zeros_like(s), xp.ones_like(s)
    below = prim.sum_last_axis(xp, xp.where(own & (s != 0), xp.exp(s), zero))
    ties = xp.sum(xp.where(own & (s == 0), one, zero), axis=-1)
    return below + (ties - 1)


def _merge_blocks(blocks: Blocks, best: Array, top: Point, rest: Array, transforms: Rows, prim: Primitives) -> Summary:
    """With d_b the distance of a block's reference from the row's maximum, and s_b, t_b the block's sums:

    R = sum of e^d_b s_b over the blocks but the best, plus the best block's r;  T = sum of e^d_b (t_b + d_b s_b).
    """
    xp, total, second = prim.xp, blocks.total, blocks.moment
    others = xp.arange(total.shape[-1], dtype=best.dtype, device=device_of(total))[None, :] != best[:, None]
    apart = wide_distance(prim, blocks.reference, finite(xp, top), transforms)
    if prim.has_float64:
        wide = xp.float64
        weight, total = xp.exp(apart), xp.astype(total, wide)
        terms = weight * total
        r = xp.sum(xp.where(others, terms, 0), axis=-1) + xp.astype(rest, wide)
        t = None
        if second is not None:
            t = xp.sum(weight * (xp.astype(second, wide) + held(xp, apart) * total), axis=-1)
        return Summary(top.value, r, None, top.bias, t)
    high, low = apart
    weight = xp.exp(high)
    term, error = accurate.two_product(weight, total)
    error = error + weight * low * total
    zero = xp.zeros_like(term)
    row_high, row_low = accurate.sum_last_axis(xp, (xp.where(others, term, zero), xp.where(others, error, zero)))
    r_high, error = accurate.two_sum(row_high, rest)
    t = None
    if second is not None:
        t = accurate.sum_last_axis(xp, (weight * (second + held(xp, high) * total), zero))[0]
    return Summary(top.value, r_high, row_low + error, top.bias, t)


def finish(at: Point, summary: Summary, transforms: Rows, vocab: int, prim: Primitives) -> Array:
    """Log-probabilities (N, K) of the entries ``at`` (N, K), in the arithmetic type."""
    xp = prim.xp
    value = prim.widen(xp, at.value)
    apart = wide_distance(prim, Point(value, at.bias), summary.point, transforms)
    if prim.has_float64:
        logprob = xp.astype(apart - xp.log1p(summary.rest)[:, None], value.dtype)
    else:
        log_high, log_low = accurate.log1p(xp, (summary.rest, summary.rest_low), vocab)
        logprob = _rounded_difference(xp, apart, (log_high[:, None], log_low[:, None]))
    # nothing exceeds the maximum, though the order of biased entries is that of rounded keys
    logprob = xp.where(logprob > 0, 0, logprob)
    return xp.where(has_distribution(xp, summary)[:, None], logprob, float("nan"))


def finish_lse(summary: Summary, transforms: Rows, vocab: int, prim: Primitives) -> Array:
    """``lse = z_max + log1p(r)`` (N,): -inf for a row without a finite entry, NaN where there is NaN or +inf."""
    xp = prim.xp
    top = wide_value(prim, summary.point.column(), transforms)
    if prim.has_float64:
        lse = xp.astype(top[:, 0] + xp.log1p(summary.rest), summary.max.dtype)
    else:
        log_high, log_low = accurate.log1p(xp, (summary.rest, summary.rest_low), vocab)
        lse = _rounded_difference(xp, (top[0][:, 0], top[1][:, 0]), (-log_high, -log_low))
    z = top[:, 0] if prim.has_float64 else top[0][:, 0]
    lse = xp.where(has_distribution(xp, summary), lse, float("nan"))
    return xp.where(z == -float("inf"), -float("inf"), lse)


def finish_entropy(summary: Summary, vocab: int, prim: Primitives) -> Array:
    """``log1p(r) - t / (1 + r)`` (N,), both terms at least 0."""
    xp = prim.xp
    if prim.has_float64:
        entropy = xp.astype(xp.log1p(summary.rest) - summary.moment / (1 + summary.rest), summary.max.dtype)
    else:
        log_high, log_low = accurate.log1p(xp, (summary.rest, summary.rest_low), vocab)
        entropy = log_high + (log_low - summary.moment / (1 + summary.rest))
    limit = xp.full_like(entropy, math.log(vocab))
    entropy = xp.where(entropy > limit, limit, entropy)
    return xp.where(has_distribution(xp, summary), entropy, float("nan"))


def _rounded_difference(xp: Any, a: accurate.Pair, b: accurate.Pair) -> Array:
    """``a - b`` of pairs, rounded once."""
    rounded, error = accurate.two_sum(a[0], -b[0])
    exact = rounded + (error + (a[1] - b[1]))
    return xp.where(xp.isfinite(rounded), exact, rounded)


def has_distribution(xp: Any, summary: Summary) -> Array:
    """Not for a row that holds +inf, though a difference to its maximum may be -inf, nor NaN, nor nothing finite."""
    held = xp.isfinite(summary.max)
    return held if summary.bias is None else held & xp.isfinite(summary.bias)


def finite(xp: Any, point: Point) -> Point:
    """0 in place of -inf, for a block without a finite entry: its terms are then e^-inf = 0 and not NaN."""
    return Point(*(None if part is None else xp.where(part == -float("inf"), 0, part) for part in point))
