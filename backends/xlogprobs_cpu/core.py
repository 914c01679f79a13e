"""The core with these kernels for its summary and its gradient, on NumPy arrays: what the backends call."""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import xlogprobs_cpu as kernels
from xlogprobs.backend import Statistics, statistics_of_rows
from xlogprobs.contract import IGNORED, Want
from xlogprobs.gradient import Upstream, weights
from xlogprobs.summary import Layout, Primitives, Summary
from xlogprobs.transforms import Rows, Shared, wide

Array = NDArray[Any]

_on: contextvars.ContextVar[bool] = contextvars.ContextVar("xlogprobs_cpu", default=True)
QUIET = np.errstate(all="ignore")  # infinities and NaNs have defined results here


@contextmanager
def disabled() -> Iterator[None]:
    """Within it, the backends run as they do where Numba is not installed: to compare, and to measure."""
    token = _on.set(False)
    try:
        yield
    finally:
        _on.reset(token)


def serves() -> bool:
    """Whether calls on arrays in a CPU's memory run through the kernels."""
    return kernels.available() and _on.get()


def widen(xp: Any, x: Array) -> Array:
    """bfloat16 may come as its bits."""
    if x.dtype.itemsize > 2:
        return x
    if x.dtype == np.float16:
        return x.astype(np.float32)
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@QUIET
def statistics(
    x: Array, ids: Array | None, transforms: Rows, want: Want, threads: int | None = None
) -> tuple[Statistics, Summary]:
    """`xlogprobs.backend.statistics_of_rows` of all rows (N, V) at once."""

    def summarize(x: Array, transforms: Rows, layout: Layout, prim: Primitives, moment: bool) -> Summary:
        found = kernels.summarize(x, _of_kernels(transforms), moment, threads)
        bias = None if found.bias_at_max is None else found.bias_at_max.astype(found.max.dtype)
        return Summary(found.max, found.rest, None, bias, found.t)

    prim = Primitives(np, widen=widen, summarize=summarize)
    return statistics_of_rows(x, ids, transforms, Layout(x.shape[1], x.shape[1]), prim, want)


@QUIET
def gradient(
    x: Array,
    ids: Array | None,
    upstream: Upstream,
    summary: Summary,
    transforms: Rows,
    out: Array,
    threads: int | None = None,
) -> None:
    """Writes `xlogprobs.gradient.gradient` into ``out``, which may be ``x``."""
    rows = len(x)
    weigh = weights(ids, upstream, summary, Primitives(np))
    scored = np.empty((rows, 0)) if weigh.scored is None else weigh.scored
    columns = np.empty((rows, 0), np.int64) if ids is None else ids
    if ids is not None and weigh.scored is None:
        scored = np.zeros(ids.shape)  # the ids say which rows are ignored
    found = kernels.Summary(summary.max, summary.bias, summary.rest, summary.moment)
    kernels.gradient(x, columns, scored, found, _of_kernels(transforms), weigh.a, weigh.b, out, threads)


@QUIET
def rank(x: Array, ids: Array, transforms: Rows, threads: int | None = None) -> Array:
    """`xlogprobs.backend.rank_of_rows` (N, K)."""
    # a row without a distribution has no rank, which its summary knows
    statistics_, _ = statistics(x, None, transforms, Want(logprob=False, lse=True), threads)
    assert statistics_.lse is not None
    ordered = np.isfinite(statistics_.lse)[:, None] & (ids >= 0) & np.any(ids != IGNORED, axis=-1)[:, None]
    above = kernels.count_greater(x, np.where(ordered, ids, -1), _of_kernels(transforms), threads)
    return np.where(ordered, above + 1, 0)


def _of_kernels(transforms: Rows) -> kernels.RowTransforms:
    temperature, inner, unit = (
        None if pair is None else wide(np, pair) for pair in (transforms.temperature, transforms.inner, transforms.unit)
    )
    (bias, bias_row), (mask, mask_row) = (_matrix(shared) for shared in (transforms.bias, transforms.mask))
    return kernels.RowTransforms(temperature, transforms.sign, inner, bias, unit, mask, bias_row, mask_row)


def _matrix(shared: Shared | None) -> tuple[Array | None, Array | None]:
    if shared is None:
        return None, None
    return (shared.values[None, :] if shared.values.ndim == 1 else shared.values), shared.row
