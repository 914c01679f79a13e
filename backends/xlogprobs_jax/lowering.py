"""The core's primitives in the forms that XLA compiles well and, for a row, always to the same bits."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlogprobs.summary import Blocks, Layout, Primitives, block_terms, finite, sum_last_axis, widen
from xlogprobs.transforms import Numbers, Point, Rows, Shared, key, numbers, value_of

barrier: Any = lax.optimization_barrier

WIDTH = 1024  # about the block width where the vocabulary has no better divisor
WINDOWS = 1 << 17  # entries of the windows that are worked on at once, 0.5 MB in float32
PIECE = 1 << 19  # entries of the rows whose distances are held at once, 2 MB in float32
FAST = 1 << 15  # columns
SMALL = 1 << 13  # a row from here on is summed by XLA's own reduction, whose code is then the same for any batch


@lru_cache
def block_width(vocab: int) -> int:
    """A width that divides the vocabulary, from 256 to 4096 and nearest to 1024 in ratio; `WIDTH` where there is none.

    Blocks of one width are a reshape, which costs XLA nothing; a shorter last one is a slice, which it copies.
    """
    widths = [width for width in range(256, 4097) if vocab % width == 0]
    return min(widths, key=lambda width: abs(math.log(width / 1024))) if widths else WIDTH


@lru_cache
def longest(vocab: int) -> int:
    """The largest divisor of the vocabulary up to which XLA CPU reduces a row in its fast form."""
    return max(width for width in range(1, FAST + 1) if vocab % width == 0)


def layout(vocab: int) -> Layout:
    return Layout(vocab, block_width(vocab))


def primitives(x: Any) -> Primitives:
    return Primitives(
        jnp,
        has_float64=x.dtype == jnp.float64,
        take=take,
        window=window,
        sum=tree_sum if x.shape[1] < SMALL else sum_last_axis,
        sum_last_axis=tree_sum,
        top=top,
        repeat=repeat,
        resum=partial(resum, block_width(x.shape[1])),
        block_sums=block_sums,
    )


def take(xp: Any, x: Any, columns: Any) -> Any:
    return jnp.take_along_axis(x, columns, axis=-1, mode="promise_in_bounds")


def window(xp: Any, x: Any, row: Any, start: Any, width: int) -> Any:
    return jax.vmap(lambda row, start: lax.dynamic_slice(x, (row, start), (1, width))[0])(row, start)


def top(xp: Any, order: Any, count: int) -> Any:
    """XLA puts equal entries in ascending order, but -0.0 behind 0.0."""
    return lax.top_k(jnp.where(order == 0, 0, order), count)[1]


def tree_sum(xp: Any, terms: Any) -> Any:
    """Sum over the last axis by halves. XLA CPU orders a reduction by the size of the whole array, a tree has one
    order: a row's bits do not depend on the rows beside it."""
    while (length := terms.shape[-1]) > 1:
        half = length // 2
        paired = terms[..., :half] + terms[..., half : 2 * half]
        terms = paired if length % 2 == 0 else jnp.concatenate([paired, terms[..., 2 * half :]], axis=-1)
    return terms[..., 0]


def repeat(count: int, function: Callable[[Any, Any], Any], state: Any) -> Any:
    """A loop of XLA: unrolled, it takes XLA some seconds to compile."""
    return lax.fori_loop(0, count, lambda n, state: function((count - 1 - n).astype(state[0].dtype), state), state)


def largest(x: Any) -> Any:
    """Maximum of each row, widened; fastest over long blocks."""
    long = longest(x.shape[1])
    return jnp.max(widen(jnp, jnp.max(as_blocks(x, long), axis=-1)).reshape(x.shape[0], -1), axis=-1)


def as_blocks(x: Any, width: int) -> Any:
    """Blocks as rows of a matrix: the form that XLA CPU turns into one vectorised pass.

    The barrier keeps the widening of half-precision logits behind the reshape; before it, XLA would write the whole
    array out in float32.
    """
    return barrier(jnp.reshape(x, (-1, width)))


def block_sums(x: Any, transforms: Rows, layout: Layout, prim: Primitives, moment: bool = False) -> Blocks:
    """`xlogprobs.summary.block_sums`, each block relative to the largest entry of the row.

    XLA CPU makes a maximum and a sum two passes over all of the logits, and the sums of a row then need no weights
    between them. With a temperature alone both have a vectorised form, which a second sum or another transform would
    lose: there, the exponents of some rows at a time are written out to where the cache still holds them, and each sum
    is a pass of that form over them.
    """
    rows, vocab = x.shape
    only_temperature = all(part is None for part in transforms[1:])
    if only_temperature and not moment and vocab % layout.width == 0:
        count = vocab // layout.width
        order = largest(x)
        reference, second = Point(order), None
        to = jax.tree.map(lambda part: jnp.repeat(part, count), barrier(finite(jnp, reference)))
        by = numbers(transforms).map(lambda number: jnp.repeat(number, count))
        total = jnp.reshape(block_terms(prim, Point(as_blocks(x, layout.width)), to, by)[0], (rows, count))
    else:
        sums = partial(_sums_of_piece, layout, prim, moment)
        reference, order, total, second = rows_in_pieces(sums, x, transforms)
    shape = total.shape
    reference, order = jax.tree.map(lambda part: jnp.broadcast_to(part[:, None], shape), (reference, order))
    return Blocks(reference, order, total, second)


def _sums_of_piece(layout: Layout, prim: Primitives, moment: bool, x: Any, transforms: Rows) -> Any:
    rows = x.shape[0]
    by = numbers(transforms)
    columns = by.map(lambda number: number[:, None])
    mask, bias = (None if array is None else array.spread(jnp, rows) for array in (transforms.mask, transforms.bias))
    at = Point(widen(jnp, value_of(prim, x, mask, columns)), bias)
    reference, order = _largest_of(prim, at, columns)
    by_blocks = replace(prim, sum=partial(_sum_blocks, layout, prim))
    return reference, order, *block_terms(by_blocks, at, finite(jnp, reference), by, moment)


def _largest_of(prim: Primitives, at: Point, by: Numbers) -> tuple[Point, Any]:
    """`xlogprobs.summary.largest_of` by maxima alone, for XLA CPU has no fast argmax."""
    if at.bias is None:
        maximum = largest(at.value)
        return Point(maximum), maximum
    order = key(prim, at, by)
    top = largest(order)
    value = largest(jnp.where(order == top[:, None], at.value, -jnp.inf))
    here = (order == top[:, None]) & (at.value == value[:, None])
    return Point(jnp.where(jnp.isnan(top), top, value), largest(jnp.where(here, at.bias, -jnp.inf))), top


def _sum_blocks(layout: Layout, prim: Primitives, xp: Any, terms: Any) -> Any:
    """(N, V) to (N, blocks)."""
    rows, sums = terms.shape[0], []
    for start, count, width in layout.parts():
        columns = terms if count * width == layout.vocab else terms[:, start : start + count * width]
        sums.append(jnp.reshape(prim.sum(jnp, jnp.reshape(columns, (rows * count, width))), (rows, count)))
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=-1)


def rows_in_pieces(function: Callable[..., Any], x: Any, transforms: Rows, *rowwise: Any) -> Any:
    """``function(x, transforms, *rowwise)`` of some rows at a time, so that what it makes of them stays small."""
    rows, vocab = x.shape

    def piece(whole: Any, rowwise: Any) -> Any:
        x, bias, mask = whole
        row, of_rows, *others = rowwise

        def here(array: Any) -> Any:
            return lax.dynamic_slice_in_dim(array, row[0], len(row))

        def shared(array: Shared | None) -> Shared | None:
            if array is None or (array.row is None and array.values.ndim == 1):
                return array
            return Shared(here(array.values)) if array.row is None else Shared(array.values, here(array.row))

        return function(here(x), of_rows._replace(bias=shared(bias), mask=shared(mask)), *others)

    whole = x, transforms.bias, transforms.mask
    of_rows = transforms._replace(bias=None, mask=None)
    return in_pieces(piece, max(1, PIECE // vocab), whole, (jnp.arange(rows), of_rows, *rowwise))


def resum(width: int, function: Any, total: Any, whole: tuple[Any, ...], rowwise: tuple[Any, ...]) -> Any:
    """Only where a row needs it, and then in pieces, so that what ``function`` makes of the windows stays small."""
    needed = total < 2
    return lax.cond(
        jnp.any(needed),
        lambda: jnp.where(needed, in_pieces(function, max(1, WINDOWS // width), whole, rowwise), total - 1),
        lambda: total - 1,
    )


def in_pieces(function: Callable[..., Any], step: int, whole: Any, rowwise: Any) -> Any:
    """``function(whole, rowwise)``, ``step`` rows after the other; the first axis of ``rowwise`` arrays is the row.

    The arrays of ``whole`` are carried through the loop behind a barrier: as a constant of it, XLA would widen all of
    the half-precision logits before the loop begins.
    """
    rows = len(jax.tree.leaves(rowwise)[0])
    whole_pieces = rows // step * step
    if whole_pieces < 2 * step:
        return function(whole, rowwise)
    pieces = jax.tree.map(lambda array: jnp.reshape(array[:whole_pieces], (-1, step, *array.shape[1:])), rowwise)

    def body(whole: Any, piece: Any) -> Any:
        whole, piece = barrier((whole, piece))
        return whole, function(whole, piece)

    whole, result = lax.scan(body, whole, pieces)
    result = jax.tree.map(lambda array: jnp.reshape(array, (-1, *array.shape[2:])), result)
    if whole_pieces == rows:
        return result
    last = function(whole, jax.tree.map(lambda array: array[whole_pieces:], rowwise))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), result, last)
