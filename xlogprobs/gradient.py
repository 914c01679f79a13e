"""The backward pass of every differentiable statistic, in one pass over the row.

With s_v the difference of z_v from the row's maximum, p = softmax(z), L = log1p(r) and H the entropy:

    d logprob_k / d z_v = [v = id_k] - p_v          d lse / d z_v = p_v          d H / d z_v = -p_v (s_v - L + H)

so for upstream gradients g (N, K), g_lse and g_entropy the gradient of z is ``own_v + p_v (a + b s_v)`` with

    own_v = sum of the g_k whose id is v        a = g_lse - sum of g_k - g_entropy (H - L)        b = -g_entropy

and that of the logits is this times dz / dx, which `xlogprobs.transforms.slope` knows. It is written once over the
whole row without the ids' own share, then the entries at the ids are set to their full value, so that each entry is
rounded to the logits' dtype once and repeated ids add up without an order of addition.
"""

from typing import Any, NamedTuple

from xlogprobs.accurate import Array
from xlogprobs.contract import IGNORED, INVALID
from xlogprobs.summary import Primitives, Summary, has_distribution, held
from xlogprobs.transforms import Numbers, Point, Rows, distance, numbers, slope, value_of


class Upstream(NamedTuple):
    """Gradients of the results, None for a result that has none."""

    logprob: Array | None = None
    """(N, K)"""
    entropy: Array | None = None
    """(N,)"""
    lse: Array | None = None
    """(N,)"""


class RowGradient(NamedTuple):
    """``row`` (N, V) everywhere but at the columns (N, K), where the gradient is ``at_columns``; both None where no
    id has a gradient."""

    row: Array
    columns: Array | None
    at_columns: Array | None


class Weights(NamedTuple):
    """What a row multiplies: (N,) a and b, and (N, K) the ids' own gradients, invalid ones NaN."""

    a: Array
    b: Array | None
    scored: Array | None


def gradient(
    x: Array, ids: Array | None, upstream: Upstream, summary: Summary, transforms: Rows, prim: Primitives
) -> RowGradient:
    """Gradient with respect to ``x`` (N, V), in float32 or wider; ``ids`` (N, K) are encoded."""
    xp = prim.xp
    by = numbers(transforms).map(lambda number: number[:, None])
    mask, bias = transforms.over_vocabulary(xp, x.shape[0])
    weigh = weights(ids, upstream, summary, prim)
    row = _share(value_of(prim, x, mask, by), bias, by, weigh, summary, prim)
    active = None if ids is None else xp.any(ids != IGNORED, axis=-1)[:, None]
    if active is not None:
        row = xp.where(active, row, 0)
    if ids is None or weigh.scored is None:
        return RowGradient(row, None, None)
    columns = xp.where(ids < 0, 0, ids)
    entries, kept, biases = (None if array is None else prim.take(xp, array, columns) for array in (x, mask, bias))
    # an ignored id stands on column 0 and takes no share there: it sets column 0 to its own right value
    same = (columns[:, :, None] == ids[:, None, :]) | (ids == INVALID)[:, None, :]
    scored = weigh.scored[:, None, :]
    own = xp.sum(xp.where(same, scored, 0), axis=-1)
    at_columns = _share(value_of(prim, entries, kept, by), biases, by, weigh, summary, prim, own)
    return RowGradient(row, columns, xp.where(active, at_columns, 0))


def weights(ids: Array | None, upstream: Upstream, summary: Summary, prim: Primitives) -> Weights:
    xp = prim.xp
    a, b, scored = xp.zeros_like(summary.max), None, None
    if upstream.logprob is not None and ids is not None:
        g = upstream.logprob
        nan, zero = xp.full_like(g, float("nan")), xp.zeros_like(g)
        scored = xp.where(ids == IGNORED, zero, xp.where(ids == INVALID, nan, g))
        a = a - xp.sum(scored, axis=-1)
    if upstream.lse is not None:
        a = a + upstream.lse
    if upstream.entropy is not None:
        b = -upstream.entropy
        # H - L = -t / (1 + r)
        a = a + upstream.entropy * xp.astype(summary.moment / (1 + summary.rest), summary.max.dtype)
    return Weights(a, b, scored)


def _share(
    v: Array,
    bias: Array | None,
    by: Numbers,
    weigh: Weights,
    summary: Summary,
    prim: Primitives,
    own: Array | None = None,
) -> Array:
    """``(own + p (a + b s)) dz/dx`` of the entries ``v`` (N, any); 0 for one of probability 0."""
    xp = prim.xp
    s = distance(prim, Point(v, bias), summary.point.column(), by)
    weight = (weigh.a * inverse(xp, summary))[:, None]
    if weigh.b is not None:
        weight = weight + (weigh.b * inverse(xp, summary))[:, None] * held(xp, s)
    factor = slope(prim, prim.widen(xp, v), by)
    if by.inner is None and factor is not None:  # a number of each row: multiplied there
        weight, own = weight * factor, None if own is None else own * factor
        factor = None
    share = weight * prim.exp(xp, s)
    share = share if own is None else own + share
    share = share if factor is None else share * factor
    gone = (v == -float("inf")) & (summary.max != -float("inf"))[:, None]
    if own is None and by.inner is None:
        return share  # e^-inf is 0 already
    return xp.where(gone, 0, share)


def inverse(xp: Any, summary: Summary) -> Array:
    """1 / (1 + r), NaN for a row without a distribution."""
    found: Any = xp.astype(1.0 / (1.0 + summary.rest), summary.max.dtype)
    return xp.where(has_distribution(xp, summary), found, float("nan"))
