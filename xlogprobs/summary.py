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
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from xlogprobs import accurate
from xlogprobs.accurate import Array, Pair


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
    """``width`` columns of each row of (N, V), from that row's own start; ``row`` is 0 .. N-1."""
    return take(xp, x, start[:, None] + xp.arange(width, dtype=start.dtype, device=device_of(x))[None, :])


def row_numbers(xp: Any, x: Array) -> Array:
    return xp.arange(x.shape[0], device=device_of(x))


def resum(function: Callable[..., Array], total: Array, x: Array, *arrays: Any) -> Array:
    """``function(x, *arrays)`` (N,) of the rows ``x`` (N, V) and arrays whose first axis is the row.

    A backend may cut the arrays (but not ``x``) into pieces, and need not call it for rows whose ``total`` is 2 or
    more: there ``total - 1`` serves as well.
    """
    return function(x, *arrays)


def sum_last_axis(xp: Any, terms: Array) -> Array:
    return xp.sum(terms, axis=-1)


def exp(xp: Any, x: Array) -> Array:
    """e^x of ``x <= 0``."""
    return xp.exp(x)


def sum_exp(
    xp: Any,
    block: Array,
    maximum: Array,
    temperature: Array | None,
    exp: Callable[[Any, Array], Array] = exp,
) -> Array:
    """Sum over the last axis of e^((x - m) / T); ``maximum`` and ``temperature`` have the shape without that axis."""
    scaled = widen(xp, block) - maximum[..., None]
    if temperature is not None:
        scaled = scaled / temperature[..., None]
    return xp.sum(exp(xp, scaled), axis=-1)


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
    sum_exp: Callable[[Any, Array, Array, Array | None], Array] = sum_exp
    sum_last_axis: Callable[[Any, Array], Array] = sum_last_axis
    row_numbers: Callable[[Any, Array], Array] = row_numbers
    resum: Callable[..., Array] = resum
    block_sums: "Callable[[Array, Pair | None, Layout, Primitives], tuple[Array, Array]] | None" = None
    """In place of `block_sums`."""


class Summary(NamedTuple):
    """m and r of each row; r is ``rest + rest_low``, rest_low None where rest is float64."""

    max: Array
    rest: Array
    rest_low: Array | None


def summarize(x: Array, temperature: Pair | None, layout: Layout, prim: Primitives) -> Summary:
    """Summary of each row of ``x`` (N, V).

    ``temperature`` is a pair of (N,) in the arithmetic type (the second part what the first rounded away), or None
    for 1.
    """
    xp = prim.xp
    maximum, total = (prim.block_sums or block_sums)(x, temperature, layout, prim)
    top = xp.max(maximum, axis=-1)
    # of the blocks relative to the row's maximum, the largest; if its sum is below 2, it is one that holds the maximum
    # or the sums of the others, too, are 1 or more
    candidates = xp.where(maximum == top[:, None], total, xp.full_like(total, -1.0))
    best, most = xp.argmax(candidates, axis=-1), xp.max(candidates, axis=-1)

    def without_maximum(x: Array, row: Array, best: Array, top: Array, temperature: Any) -> Array:
        # Any, since Dynamo evaluates the annotations of an inner function, and not Pair | None
        return _without_maximum(x, row, best, top, temperature, layout, prim)

    rest = prim.resum(without_maximum, most, x, prim.row_numbers(xp, x), best, _finite(xp, top), temperature)
    return _merge_blocks(maximum, total, best, top, rest, temperature, prim)


def block_sums(x: Array, temperature: Pair | None, layout: Layout, prim: Primitives) -> tuple[Array, Array]:
    """(N, blocks) each: a maximum m, and the block's sum of e^((x - m) / T).

    Here m is the block's own maximum; it may be that of any part of the row that holds the block, and the largest is
    the row's.
    """
    xp, rows = prim.xp, x.shape[0]
    maxima, sums = [], []
    for start, count, width in layout.parts():
        block = prim.cut(xp, x, start, count, width)
        maximum = prim.widen(xp, xp.max(block, axis=-1))
        spread = None
        if temperature is not None:
            spread = xp.reshape(xp.broadcast_to(temperature[0][:, None], (rows, count)), maximum.shape)
        total = prim.sum_exp(xp, block, _finite(xp, maximum), spread)
        maxima.append(xp.reshape(maximum, (rows, count)))
        sums.append(xp.reshape(total, (rows, count)))
    maximum = maxima[0] if len(maxima) == 1 else xp.concat(maxima, axis=-1)
    total = sums[0] if len(sums) == 1 else xp.concat(sums, axis=-1)
    return maximum, total


def _without_maximum(
    x: Array, row: Array, best: Array, top: Array, temperature: Pair | None, layout: Layout, prim: Primitives
) -> Array:
    """The best block's sum less 1: the terms below the row's maximum, and its ties but one."""
    xp = prim.xp
    start = best * layout.width
    first = xp.where(start > layout.vocab - layout.width, xp.full_like(start, layout.vocab - layout.width), start)
    scaled = prim.widen(xp, prim.window(xp, x, row, first, layout.width)) - top[:, None]
    if temperature is not None:
        scaled = scaled / temperature[0][:, None]
    # the last block's window begins in the block before it, where vocab is no multiple of width
    own = xp.arange(layout.width, dtype=start.dtype, device=device_of(x))[None, :] >= (start - first)[:, None]
    zero, one = xp.zeros_like(scaled), xp.ones_like(scaled)
    below = prim.sum_last_axis(xp, xp.where(own & (scaled < 0), xp.exp(scaled), zero))
    ties = xp.sum(xp.where(own & (scaled == 0), one, zero), axis=-1)
    return below + (ties - 1)


def _merge_blocks(
    maximum: Array, total: Array, best: Array, top: Array, rest: Array, temperature: Pair | None, prim: Primitives
) -> Summary:
    """R = sum of e^((m_b - M) / T) * s_b over the blocks but the best, plus the best block's r."""
    xp = prim.xp
    others = xp.arange(maximum.shape[-1], dtype=best.dtype, device=device_of(maximum))[None, :] != best[:, None]
    if prim.has_float64:
        wide = xp.float64
        distance = xp.astype(maximum, wide) - xp.astype(_finite(xp, top), wide)[:, None]
        if temperature is not None:
            distance = distance / _wide_temperature(xp, temperature)[:, None]
        terms = xp.exp(distance) * xp.astype(total, wide)
        return Summary(
            top, xp.sum(xp.where(others, terms, xp.zeros_like(terms)), axis=-1) + xp.astype(rest, wide), None
        )
    high, low = _distance(xp, maximum, _finite(xp, top)[:, None], temperature)
    weight = xp.exp(high)
    term, error = accurate.two_product(weight, total)
    error = error + weight * low * total
    zero = xp.zeros_like(term)
    row_high, row_low = accurate.sum_last_axis(xp, (xp.where(others, term, zero), xp.where(others, error, zero)))
    high, error = accurate.two_sum(row_high, rest)
    return Summary(top, high, row_low + error)


def finish(entries: Array, summary: Summary, temperature: Pair | None, vocab: int, prim: Primitives) -> Array:
    """Log-probabilities (N, K) of ``entries`` (N, K), the logits at the ids, in the arithmetic type."""
    xp = prim.xp
    value, top = prim.widen(xp, entries), summary.max[:, None]
    if prim.has_float64:
        distance = xp.astype(value, xp.float64) - xp.astype(top, xp.float64)
        if temperature is not None:
            distance = distance / _wide_temperature(xp, temperature)[:, None]
        logprob = xp.astype(distance - xp.log1p(summary.rest)[:, None], value.dtype)
    else:
        high, low = _distance(xp, value, top, temperature)
        log_high, log_low = accurate.log1p(xp, (summary.rest, summary.rest_low), vocab)
        rounded, error = accurate.two_sum(high, -log_high[:, None])
        logprob = rounded + (error + (low - log_low[:, None]))
        logprob = xp.where(xp.isfinite(rounded), logprob, rounded)
    # a row that holds +inf has no distribution, though the difference to its maximum is -inf
    return xp.where(top == float("inf"), xp.full_like(logprob, float("nan")), logprob)


def _distance(xp: Any, value: Array, top: Array, temperature: Pair | None) -> Pair:
    """``(value - top) / T`` as a pair."""
    if temperature is None:
        return accurate.difference(xp, value, top)
    half = accurate.difference(xp, value * 0.5, top * 0.5)  # halves: the difference itself may lie beyond float32
    return accurate.divide(xp, half, (temperature[0][:, None] * 0.5, temperature[1][:, None] * 0.5))


def _finite(xp: Any, maximum: Array) -> Array:
    """0 for a block without a finite entry, so that its terms are e^-inf = 0 and not NaN."""
    return xp.where(maximum == -float("inf"), xp.zeros_like(maximum), maximum)


def _wide_temperature(xp: Any, temperature: Pair) -> Array:
    return xp.astype(temperature[0], xp.float64) + xp.astype(temperature[1], xp.float64)
