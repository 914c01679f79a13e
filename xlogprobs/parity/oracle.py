"""The float64 oracle and the bound that the contract puts on a result's distance from it."""

from typing import Any

import numpy as np

from xlogprobs.accurate import Array

CONFIDENT = -1e-3
NEGLIGIBLE = -1e-30


def reference(logits: Array, ids: Array, *, temperature: Array = 1.0) -> Array:
    """Log-probabilities in float64, with the accuracy of log1p where the token is confident.

    ``(x_t - m) / T - log1p(sum of e^((x - m) / T) over all entries but one that attains m)``, with m the maximum.

    Arguments:
        logits: (..., V) NumPy array of any real floating dtype, ml_dtypes.bfloat16 included; widened first.
        ids: integers (...) or (..., K), all within [0, V).
        temperature: a number, or one per position (...).

    Returns:
        float64 array of the shape of ``ids``; NaN for a row that holds NaN or +inf, or nothing but -inf.

    Raises:
        IndexError: an id outside [0, V).

    >>> reference(np.zeros((2, 4), np.float32), np.array([0, 3])).round(4)
    array([-1.3863, -1.3863])
    """
    x, ids = np.asarray(logits).astype(np.float64), np.asarray(ids).astype(np.int64)
    if np.any((ids < 0) | (ids >= x.shape[-1])):
        raise IndexError(f"ids lie in [{ids.min()}, {ids.max()}]; logits of shape {x.shape} take ids in [0, V)")
    spread = np.asarray(temperature, np.float64)[..., None]
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.max(x, axis=-1, keepdims=True)
        columns = ids[..., None] if ids.ndim < x.ndim else ids
        distance = (np.take_along_axis(x, columns, axis=-1) - largest) / spread
        terms = np.exp((x - largest) / spread)
        np.put_along_axis(terms, np.argmax(x, axis=-1, keepdims=True), 0.0, axis=-1)
        exact = distance - np.log1p(np.sum(terms, axis=-1, keepdims=True))
    return np.where(np.isfinite(largest), exact, np.nan).reshape(ids.shape)


def gradient(logits: Array, ids: Array, upstream: Array, *, temperature: float = 1.0) -> Array:
    """Gradient of ``sum(upstream * logprobs)`` with respect to the logits, in float64.

    ``(sum of g_k over the ids at v - G p_v) / T`` with G the sum of a position's g_k; 0 where a logit is -inf, NaN in
    rows without a distribution. Arguments and errors as for `reference`; upstream has the shape of ids.

    >>> gradient(np.zeros((1, 4), np.float32), np.array([0]), np.array([1.0]))
    array([[ 0.75, -0.25, -0.25, -0.25]])
    """
    x = np.asarray(logits).astype(np.float64)
    columns, g = (a[..., None] if np.ndim(ids) < x.ndim else np.asarray(a) for a in (ids, upstream))
    flat, total = np.zeros((x.size // x.shape[-1], x.shape[-1])), g.astype(np.float64).sum(axis=-1, keepdims=True)
    rows = np.arange(len(flat))[:, None]
    np.add.at(flat, (rows, columns.reshape(len(flat), -1)), g.reshape(len(flat), -1))
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.max(x, axis=-1, keepdims=True)
        every = np.broadcast_to(np.arange(x.shape[-1]), x.shape)
        p = np.exp(reference(x, every, temperature=np.full(x.shape[:-1], temperature)))
        found = (flat.reshape(x.shape) - total * p) / temperature
    return np.where(np.isfinite(largest), np.where(x == -np.inf, 0.0, found), np.nan)


def gradient_bound(reference: Array, upstream: Array, temperature: float, dtype: Any) -> Array:
    """How far a gradient of ``dtype`` may be from ``reference``: ``1e-6 max(1, |upstream| / T)`` (float64: 1e-12), and
    in half precision one rounding more.

    >>> gradient_bound(np.array([[0.5, -0.5]]), np.array([2.0]), 1.0, np.float32)
    array([[2.e-06, 2.e-06]])
    """
    r = np.asarray(reference, np.float64)
    largest = np.abs(upstream).reshape(*r.shape[:-1], -1).max(axis=-1, keepdims=True)
    small = 1e-12 if np.dtype(dtype) == np.float64 else 1e-6
    allowed = np.broadcast_to(small * np.maximum(1.0, largest / min(1.0, temperature)), r.shape)
    return allowed + rounding(r, dtype)


def rounding(reference: Array, dtype: Any) -> Array:
    """What one rounding to half precision may cost: half a unit in the last place; 0 for wider types."""
    if np.dtype(dtype).itemsize > 2:
        return np.zeros(np.shape(reference))
    return ulp(reference, dtype) / 2


def bound(reference: Array, dtype: Any = np.float32) -> Array:
    """How far a result of ``dtype`` (float32 or float64) may be from ``reference``, by the contract.

    float32: ``max(1e-6, one ulp)``, and for a confident token (-1e-3 < r <= -1e-30) at most ``1e-5 |r|``.
    float64: ``1e-12 max(1, |r|)``. Infinities and NaNs must agree exactly; the bound given there is 1.

    >>> bound(np.array([-20.0, -1.0, -1e-4]))
    array([1.90734863e-06, 1.00000000e-06, 1.00000000e-09])
    """
    r = np.asarray(reference, np.float64)
    magnitude = np.where(np.isfinite(r), np.abs(r), 1.0)
    if np.dtype(dtype) == np.float64:
        return 1e-12 * np.maximum(1.0, magnitude)
    allowed = np.maximum(1e-6, ulp(r, np.float32))
    confident = (r > CONFIDENT) & (r <= NEGLIGIBLE)
    return np.where(confident, np.minimum(allowed, 1e-5 * magnitude), allowed)


def ulp(reference: Array, dtype: Any = np.float32) -> Array:
    """The spacing of ``dtype`` at ``reference``, at least that at 1e-30: below it nothing relative is promised."""
    r = np.abs(np.asarray(reference, np.float64))
    if np.dtype(dtype).itemsize == 2:
        digits, smallest = (10, -14) if np.dtype(dtype) == np.float16 else (7, -126)
        exponent = np.frexp(np.where(np.isfinite(r), r, 1.0))[1] - 1
        return np.exp2(np.maximum(np.where(r == 0, smallest, exponent), smallest) - digits)
    limit = float(np.finfo(dtype).max)
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
