"""KL(softmax(z) || softmax(z')) of two sets of logits, in one read of each.

With s, s' the differences of z and z' from their own maxima, r and r' their sums as in `xlogprobs.summary`, and

    u = sum of e^s (s - s')        KL = u / (1 + r) - log1p(r) + log1p(r')

Blocks merge as those of an entropy do. An entry of probability 0 under z adds nothing; one that only z' excludes makes
the divergence infinite.

    d KL / d z_v = p_v (s_v - s'_v - log1p(r) + log1p(r') - KL)        d KL / d z'_v = q_v - p_v
"""

from typing import Any

from xlogprobs import accurate
from xlogprobs.accurate import Array
from xlogprobs.gradient import inverse
from xlogprobs.summary import (
    Blocks,
    Layout,
    Primitives,
    Summary,
    finite,
    has_distribution,
    joined,
    part_of_rows,
    summarize_blocks,
)
from xlogprobs.transforms import Numbers, Point, Rows, distance, numbers, slope, value_of, wide_distance


def kl_of_rows(
    x: Array, y: Array, transforms: Rows, layout: Layout, prim: Primitives
) -> tuple[Array, Summary, Summary]:
    """Divergence (N,) of rows ``x`` from rows ``y`` (N, V) in the arithmetic type, and the summaries of both."""
    xp = prim.xp
    found = []
    for part in layout.parts():
        at, reference, order, by = part_of_rows(x, transforms, part, prim)
        other, other_reference, other_order, _ = part_of_rows(y, transforms, part, prim)
        total, other_total, cross = block_cross(prim, at, finite(xp, reference), other, finite(xp, other_reference), by)
        found.append((*reference, order, total, *other_reference, other_order, other_total, cross))
    *both, cross = joined(xp, x.shape[0], found)
    blocks, others = (Blocks(Point(of[0], of[1]), of[2], of[3], None) for of in (both[:4], both[4:]))
    summary = summarize_blocks(x, blocks, transforms, layout, prim)
    reference_summary = summarize_blocks(y, others, transforms, layout, prim)
    u = _merge(blocks, others, cross, summary, reference_summary, transforms, prim)
    return _finish(u, summary, reference_summary, layout.vocab, prim), summary, reference_summary


def block_cross(
    prim: Primitives, at: Point, reference: Point, other: Point, other_reference: Point, by: Numbers
) -> tuple[Array, Array, Array]:
    """Sums over the last axis of e^s, of e^s' and of e^s (s - s')."""
    xp, columns = prim.xp, by.map(lambda number: number[..., None])
    s = distance(prim, at, reference.column(), columns)
    other_s = distance(prim, other, other_reference.column(), columns)
    e = prim.exp(xp, s)
    return prim.sum(xp, e), prim.sum(xp, prim.exp(xp, other_s)), prim.sum(xp, _times(xp, e, s - other_s))


def _times(xp: Any, weight: Array, value: Array) -> Array:
    """``weight * value``, 0 where the weight is, whatever the value."""
    return xp.where(weight == 0, 0, weight * value)


def _merge(
    blocks: Blocks,
    others: Blocks,
    cross: Array,
    summary: Summary,
    other_summary: Summary,
    transforms: Rows,
    prim: Primitives,
) -> Any:
    """U = sum of e^d_b (u_b + (d_b - d'_b) s_b), d_b and d'_b the distances of a block's references from the rows'."""
    xp = prim.xp
    apart = wide_distance(prim, blocks.reference, finite(xp, summary.point), transforms)
    other_apart = wide_distance(prim, others.reference, finite(xp, other_summary.point), transforms)
    if prim.has_float64:
        total, cross = xp.astype(blocks.total, xp.float64), xp.astype(cross, xp.float64)
        weight = xp.exp(apart)
        share = weight * total
        return xp.sum(_times(xp, weight, cross) + _times(xp, share, apart - other_apart), axis=-1)
    weight = xp.exp(apart[0])
    share = weight * blocks.total
    between = accurate.subtract(xp, apart, other_apart)
    terms = _times(xp, weight, cross) + _times(xp, share, between[0])
    return accurate.sum_last_axis(xp, (terms, _times(xp, share, between[1])))


def _finish(u: Any, summary: Summary, other: Summary, vocab: int, prim: Primitives) -> Array:
    xp = prim.xp
    if prim.has_float64:
        kl = u / (1 + summary.rest) - (xp.log1p(summary.rest) - xp.log1p(other.rest))
        kl = xp.astype(kl, summary.max.dtype)
    else:
        logs = (accurate.log1p(xp, (part.rest, part.rest_low), vocab) for part in (summary, other))
        one_plus, low = accurate.two_sum(accurate.one_of(summary.rest), summary.rest)
        mean = accurate.divide(xp, u, (one_plus, low + summary.rest_low))
        high, low = accurate.subtract(xp, mean, accurate.subtract(xp, *logs))
        kl = high + low
    kl = xp.where(kl < 0, 0, kl)
    known = has_distribution(xp, summary) & has_distribution(xp, other)
    return xp.where(known, kl, float("nan"))


def kl_gradient(
    x: Array,
    y: Array,
    upstream: Array,
    kl: Array,
    summary: Summary,
    other: Summary,
    transforms: Rows,
    prim: Primitives,
) -> tuple[Array, Array]:
    """Gradients with respect to ``x`` and ``y`` for upstream gradients (N,), in float32 or wider."""
    xp = prim.xp
    by = numbers(transforms).map(lambda number: number[:, None])
    mask, bias = transforms.over_vocabulary(xp, x.shape[0])
    v, w = (value_of(prim, entries, mask, by) for entries in (x, y))
    s = distance(prim, Point(v, bias), summary.point.column(), by)
    other_s = distance(prim, Point(w, bias), other.point.column(), by)
    p = prim.exp(xp, s) * inverse(xp, summary)[:, None]
    q = prim.exp(xp, other_s) * inverse(xp, other)[:, None]
    mean = xp.astype(xp.log1p(summary.rest) - xp.log1p(other.rest), kl.dtype) + kl
    of_x = upstream[:, None] * _times(xp, p, s - other_s - mean[:, None])
    of_y = upstream[:, None] * (q - p)
    return _through(of_x, v, by, prim), _through(of_y, w, by, prim)


def _through(share: Array, v: Array, by: Numbers, prim: Primitives) -> Array:
    factor = slope(prim, prim.widen(prim.xp, v), by)
    share = share if factor is None else share * factor
    return prim.xp.where(v == -float("inf"), 0, share)
