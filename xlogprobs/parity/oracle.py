"""The float64 oracle and the bound that the contract puts on a result's distance from it.

The transforms of every function here are those of the public ones: numbers or one per position for temperature, scale
and softcap, arrays that broadcast to the logits for bias and mask.
"""

from typing import Any, NamedTuple

import numpy as np

from xlogprobs.accurate import Array

CONFIDENT = -1e-3
NEGLIGIBLE = -1e-30


class Distribution(NamedTuple):
    """Of softmax(z), with the vocabulary last; NaN in rows that are no distribution."""

    logprobs: Array
    """(..., V)"""
    lse: Array
    """(...); -inf for a row that keeps no finite entry."""
    order: Array
    """(..., V): what ranks go by."""


def distribution(
    logits: Array, temperature: Any = 1.0, scale: Any = 1.0, softcap: Any = None, bias: Any = None, mask: Any = None
) -> Distribution:
    """``z = (softcap * tanh(scale * x / softcap) + bias) / temperature``, -inf where not mask, and its softmax.

    ``log p = (z - m) - log1p(sum of e^(z - m) over all entries but one that attains m)``, with m the largest z. What
    differences can be taken of before a rounding, is: then a common offset costs nothing.
    """
    given = np.asarray(logits)
    narrow = np.float64 if given.dtype == np.float64 else np.float32
    x = given.astype(np.float64)
    t, s = (np.asarray(number, np.float64)[..., None] for number in (temperature, scale))
    cap = None if softcap is None else np.asarray(softcap, np.float64)[..., None]
    b = np.zeros(()) if bias is None else np.asarray(bias).astype(narrow).astype(np.float64)
    b, kept = np.broadcast_to(b, x.shape), np.broadcast_to(True if mask is None else mask, x.shape)
    with np.errstate(all="ignore"):
        broken = np.any(kept & (np.isnan(x + b) | (x == np.inf) | (b == np.inf)), axis=-1, keepdims=True)
        possible = kept & (x != -np.inf) & (b != -np.inf)
        level = s * x if cap is None else cap * np.tanh(s * x / cap)
        # softcap reorders nothing, so without a bias the order is that of the logits, or with a scale < 0 the reverse
        order = np.sign(s) * x if bias is None else (level.astype(narrow) + b.astype(narrow)).astype(np.float64)
        order = np.where(possible, order, -np.inf)
        top = np.argmax(np.where(broken, 0.0, order), axis=-1, keepdims=True)

        def above_top(values: Array) -> Array:
            return values - np.take_along_axis(values, top, axis=-1)

        apart = (s * above_top(x) if cap is None else above_top(level)) + above_top(b)
        apart = np.where(possible, apart / t, -np.inf)
        terms = np.exp(apart)
        np.put_along_axis(terms, top, 0.0, axis=-1)
        log_sum = np.log1p(np.sum(terms, axis=-1, keepdims=True))
        lse = np.take_along_axis((level + b) / t, top, axis=-1) + log_sum
        empty = ~np.any(possible, axis=-1, keepdims=True)
        lse = np.where(broken, np.nan, np.where(empty, -np.inf, lse))[..., 0]
        none = broken | empty
        return Distribution(np.where(none, np.nan, apart - log_sum), lse, np.where(none, np.nan, order))


def reference(logits: Array, ids: Array, **transforms: Any) -> Array:
    """Log-probabilities in float64, with the accuracy of log1p where the token is confident.

    Arguments:
        logits: (..., V) NumPy array of any real floating dtype, ml_dtypes.bfloat16 included; widened first.
        ids: integers (...) or (..., K), all within [0, V).
        transforms: temperature, scale, softcap, bias, mask.

    Returns:
        float64 array of the shape of ``ids``; NaN for a row that keeps NaN or +inf, or nothing but -inf.

    Raises:
        IndexError: an id outside [0, V).

    >>> reference(np.zeros((2, 4), np.float32), np.array([0, 3])).round(4)
    array([-1.3863, -1.3863])
    """
    return _at(distribution(logits, **transforms).logprobs, ids)


def entropy(logits: Array, **transforms: Any) -> Array:
    """``-sum of p log p`` (...), where an entry of probability 0 adds 0.

    >>> np.exp(entropy(np.zeros((2, 4), np.float32)))
    array([4., 4.])
    """
    log_p = distribution(logits, **transforms).logprobs
    return -_mean(log_p, log_p)


def lse(logits: Array, **transforms: Any) -> Array:
    """``log(sum of e^z)`` (...).

    >>> lse(np.zeros((2, 4), np.float32)).round(4)
    array([1.3863, 1.3863])
    """
    return distribution(logits, **transforms).lse


def rank(logits: Array, ids: Array, **transforms: Any) -> Array:
    """1 + the number of entries above that of the id; 0 in a row that has no distribution.

    >>> rank(np.array([[3.0, 5.0, 3.0]]), np.array([[0, 1, 2]]))
    array([[2, 1, 2]])
    """
    order = distribution(logits, **transforms).order
    own = _at(order, ids)
    each = own if own.ndim == order.ndim else own[..., None]
    above = [np.sum(order > each[..., k, None], axis=-1) for k in range(each.shape[-1])]
    found = np.stack(above, axis=-1).reshape(own.shape) if above else np.zeros(own.shape)
    return np.where(np.isnan(own), 0, found + 1).astype(np.int64)


def top_ids(logits: Array, count: int, **transforms: Any) -> Array:
    """The ids (..., count) of the largest entries, equal ones in ascending order; -1 in a row without a distribution.

    >>> top_ids(np.array([[3.0, 5.0, 3.0, 2.0]]), 3)
    array([[1, 0, 2]])
    """
    order = distribution(logits, **transforms).order
    found = np.argsort(-order, axis=-1, kind="stable")[..., :count]
    return np.where(np.isnan(order[..., :1]), -1, found)


def kl(logits: Array, ref_logits: Array, **transforms: Any) -> Array:
    """``KL(p || q) = sum of p (log p - log q)`` (...): 0 where p is 0, +inf where q alone is.

    >>> kl(np.log(np.array([[0.5, 0.5, 0.0]]) + 1e-300), np.log(np.array([[0.25, 0.5, 0.25]]))).round(4)
    array([0.3466])
    """
    p, q = (distribution(x, **transforms).logprobs for x in (logits, ref_logits))
    with np.errstate(invalid="ignore"):
        return _mean(p, p - q)


def gradient(
    logits: Array,
    ids: Array,
    upstream: Array,
    *,
    of_entropy: Array | None = None,
    of_lse: Array | None = None,
    **transforms: Any,
) -> Array:
    """Gradient of ``sum(upstream * logprob) + sum(of_entropy * H) + sum(of_lse * lse)`` in the logits, in float64.

    ``(own_v - G p_v - g_entropy p_v (log p_v + H) + g_lse p_v) dz/dx`` with own_v the sum of the g_k over the ids
    at v, G the sum of all g_k and ``dz/dx = scale (1 - tanh^2) / temperature``; 0 where an entry has probability 0 by
    -inf or mask, NaN in rows without a distribution.

    >>> gradient(np.zeros((1, 4), np.float32), np.array([0]), np.array([1.0]))
    array([[ 0.75, -0.25, -0.25, -0.25]])
    """
    of = distribution(logits, **transforms)
    shape, vocab = of.logprobs.shape, of.logprobs.shape[-1]
    columns, g = (a[..., None] if np.ndim(ids) < len(shape) else np.asarray(a) for a in (ids, upstream))
    flat, rows = np.zeros((of.lse.size, vocab)), np.arange(of.lse.size)[:, None]
    np.add.at(flat, (rows, columns.reshape(len(flat), -1)), g.reshape(len(flat), -1))
    impossible = of.logprobs == -np.inf
    log_p = np.where(impossible, 0.0, of.logprobs)
    with np.errstate(invalid="ignore"):
        p = np.exp(of.logprobs)
        found = flat.reshape(shape) - g.astype(np.float64).sum(axis=-1, keepdims=True) * p
        if of_entropy is not None:
            found -= of_entropy[..., None] * p * (log_p - _mean(of.logprobs, log_p)[..., None])
        if of_lse is not None:
            found += of_lse[..., None] * p
        found = np.where(impossible, 0.0, found * _slope(logits, **transforms))
    return np.where(np.isnan(of.logprobs), np.nan, found)


def _slope(
    logits: Array, temperature: Any = 1.0, scale: Any = 1.0, softcap: Any = None, bias: Any = None, mask: Any = None
) -> Array:
    """dz/dx, which neither bias nor mask enters."""
    t, s = (np.asarray(number, np.float64)[..., None] for number in (temperature, scale))
    if softcap is None:
        return s / t
    e = np.exp(-2 * np.abs(s * np.asarray(logits).astype(np.float64) / np.asarray(softcap, np.float64)[..., None]))
    return s / t * 4 * e / (1 + e) ** 2  # 1 - tanh^2, without the cancellation


def _at(values: Array, ids: Array) -> Array:
    """Entries of (..., V) at ids (...) or (..., K)."""
    ids, vocab = np.asarray(ids).astype(np.int64), values.shape[-1]
    if np.any((ids < 0) | (ids >= vocab)):
        raise IndexError(f"ids lie in [{ids.min()}, {ids.max()}]; logits of shape {values.shape} take ids in [0, V)")
    columns = ids[..., None] if ids.ndim < values.ndim else ids
    return np.take_along_axis(values, columns, axis=-1).reshape(ids.shape)


def _mean(log_p: Array, values: Array) -> Array:
    """Mean of ``values`` under p; an entry of probability 0 adds 0."""
    with np.errstate(invalid="ignore"):
        p = np.exp(log_p)
        return np.sum(np.where(p == 0, 0.0, p * values), axis=-1)


def gradient_bound(reference: Array, upstream: Array, slope: Any, dtype: Any) -> Array:
    """How far a gradient of ``dtype`` may be from ``reference``: ``1e-6 max(1, |upstream| max(1, slope))`` (float64:
    1e-12) with slope the largest dz/dx, |scale| / T, and in half precision one rounding more.

    >>> gradient_bound(np.array([[0.5, -0.5]]), np.array([2.0]), 1.0, np.float32)
    array([[2.e-06, 2.e-06]])
    """
    r = np.asarray(reference, np.float64)
    largest = np.abs(upstream).reshape(*r.shape[:-1], -1).max(axis=-1, keepdims=True)
    small = 1e-12 if np.dtype(dtype) == np.float64 else 1e-6
    allowed = np.broadcast_to(small * np.maximum(1.0, largest * np.maximum(1.0, slope)), r.shape)
    return allowed + rounding(r, dtype)


def rounding(reference: Array, dtype: Any) -> Array:
    """What one rounding to half precision may cost: half a unit in the last place; 0 for wider types."""
    if np.dtype(dtype).itemsize > 2:
        return np.zeros(np.shape(reference))
    return ulp(reference, dtype) / 2


def bound(reference: Array, dtype: Any = np.float32, quantity: str = "logprob") -> Array:
    """How far a result of ``dtype`` may be from ``reference``, by the contract.

    float32: ``max(1e-6, one ulp)``, and for the logprob of a confident token (-1e-3 < r <= -1e-30) at most
    ``1e-5 |r|``; for entropy and KL ``1e-6 max(1, |r|)``. float64: ``1e-12 max(1, |r|)``. Integers are equal or wrong:
    the bound given for them lies between. Infinities and NaNs must agree exactly; the bound given there is 1.

    >>> bound(np.array([-20.0, -1.0, -1e-4]))
    array([1.90734863e-06, 1.00000000e-06, 1.00000000e-09])
    """
    r = np.asarray(reference, np.float64)
    if np.dtype(dtype).kind == "i":
        return np.full(r.shape, 0.5)
    magnitude = np.where(np.isfinite(r), np.abs(r), 1.0)
    if np.dtype(dtype) == np.float64:
        return 1e-12 * np.maximum(1.0, magnitude)
    if quantity in ("entropy", "KL"):
        return 1e-6 * np.maximum(1.0, magnitude)
    allowed = np.maximum(1e-6, ulp(r, np.float32))
    confident = (quantity == "logprob") & (r > CONFIDENT) & (r <= NEGLIGIBLE)
    return np.where(confident, np.minimum(allowed, 1e-5 * magnitude), allowed)


def ulp(reference: Array, dtype: Any = np.float32) -> Array:
    """The spacing of ``dtype`` at ``reference``, at least that at 1e-30: below it nothing relative is promised."""
    if np.dtype(dtype).kind == "i":
        return np.ones(np.shape(reference))
    r = np.abs(np.asarray(reference, np.float64))
    if np.dtype(dtype).itemsize == 2:
        digits, smallest = (10, -14) if np.dtype(dtype) == np.float16 else (7, -126)
        exponent = np.frexp(np.where(np.isfinite(r), r, 1.0))[1] - 1
        return np.exp2(np.maximum(np.where(r == 0, smallest, exponent), smallest) - digits)
    limit = float(np.nextafter(np.finfo(dtype).max, 0, dtype=dtype))  # the spacing at the largest number overflows
    magnitude = np.clip(np.where(np.isfinite(r), r, 1.0), -NEGLIGIBLE, limit)
    return np.spacing(magnitude.astype(dtype)).astype(np.float64)


def rounded(reference: Array, dtype: Any = np.float32) -> Array:
    """``reference`` as the nearest value of ``dtype``: -inf where it lies beyond its range."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(reference, np.float64).astype(dtype)


def difference(a: Array, b: Array) -> Array:
    """``|a - b|`` in float64; 0 where both are the same infinity or both NaN, inf where only one of them is."""
    a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a - b)
    apart = np.where(np.isnan(apart), np.inf, apart)
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, apart)


def error(out: Array, reference: Array) -> Array:
    """``|out - reference|``, a reference beyond the range of ``out`` read as the infinity that it rounds to."""
    nearest = rounded(reference, out.dtype)
    return difference(out, np.where(np.isinf(nearest), nearest, reference))


def identical(a: Array, b: Array) -> Array:
    """Where ``a`` and ``b`` are the same number (0.0 and -0.0 are) or both NaN."""
    return (a == b) | (np.isnan(a) & np.isnan(b))
