"""The backward pass: d logprob_k / d x_v = ([v = id_k] - p_v) / T.

For upstream gradients g (N, K) the logits' gradient is ``(sum of g_k over the k with id_k = v  -  G p_v) / T`` with
``G = sum of g_k``. It is written once over the whole row without the ids' own share, then the entries at the ids
are set to their full value, so that each entry is rounded to the logits' dtype once and repeated ids add up without
an order of addition.
"""

from typing import Any, NamedTuple

from xlogprobs.accurate import Array, Pair
from xlogprobs.contract import IGNORED, INVALID
from xlogprobs.summary import Primitives, Summary


class RowGradient(NamedTuple):
    """``row`` (N, V) everywhere but at the columns (N, K), where the gradient is ``at_columns``."""

    row: Array
    columns: Array
    at_columns: Array


def gradient(
    x: Array, ids: Array, upstream: Array, summary: Summary, temperature: Pair | None, prim: Primitives
) -> RowGradient:
    """Gradient of the log-probabilities of ``ids`` (N, K) with respect to ``x`` (N, V), in float32 or wider."""
    xp = prim.xp
    zero = xp.zeros_like(upstream)
    scored = xp.where(ids == IGNORED, zero, xp.where(ids == INVALID, xp.full_like(upstream, float("nan")), upstream))
    active = xp.any(ids != IGNORED, axis=-1)[:, None]
    share = xp.sum(scored, axis=-1)[:, None]
    columns = xp.where(ids < 0, xp.zeros_like(ids), ids)
    entries = prim.take(xp, x, columns)
    # an ignored id stands on column 0 and takes no share there: it sets column 0 to its own right value
    same = (columns[:, :, None] == ids[:, None, :]) | (ids == INVALID)[:, None, :]
    own = xp.sum(xp.where(same, scored[:, None, :], xp.zeros_like(scored)[:, None, :]), axis=-1)
    weight = -share * _inverse(xp, summary)[:, None]
    if temperature is not None:
        own, weight = own / temperature[0][:, None], weight / temperature[0][:, None]
    row = weight * _relative(x, summary, temperature, prim)
    at_columns = own + weight * _relative(entries, summary, temperature, prim)
    held = (entries != -float("inf")) | (summary.max == -float("inf"))[:, None]
    at_columns = xp.where(~held, xp.zeros_like(at_columns), at_columns)
    return RowGradient(
        xp.where(active, row, xp.zeros_like(row)), columns, xp.where(active, at_columns, xp.zeros_like(at_columns))
    )


def probability(x: Array, summary: Summary, temperature: Pair | None, prim: Primitives) -> Array:
    """softmax of the rows that ``summary`` sums up, at the entries ``x`` (N, any)."""
    return _relative(x, summary, temperature, prim) * _inverse(prim.xp, summary)[:, None]


def _relative(x: Array, summary: Summary, temperature: Pair | None, prim: Primitives) -> Array:
    """e^((x - m) / T)"""
    scaled = prim.widen(prim.xp, x) - summary.max[:, None]
    if temperature is not None:
        scaled = scaled / temperature[0][:, None]
    return prim.exp(prim.xp, scaled)


def _inverse(xp: Any, summary: Summary) -> Array:
    """1 / (1 + r), NaN for a row without a distribution."""
    inverse: Any = xp.astype(1.0 / (1.0 + summary.rest), summary.max.dtype)
    return xp.where(xp.isfinite(summary.max), inverse, xp.full_like(inverse, float("nan")))
