"""The core with these kernels for its summary and its gradient, on NumPy arrays: what the backends call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import xlogprobs_cpu as kernels
from xlogprobs.backend import Statistics, statistics_of_rows
from xlogprobs.contract import IGNORED, Call, Transforms, Want
from xlogprobs.gradient import Upstream, weights
from xlogprobs.summary import Layout, Primitives, Summary
from xlogprobs.transforms import PLAIN, Rows, Shared, numbers, rows_of_call, wide

Array = NDArray[Any]

INSTALLED = kernels.available()

_disabled = 0
QUIET = np.errstate(all="ignore")  # infinities and NaNs have defined results here


@contextmanager
def disabled() -> Iterator[None]:
    """Within it, all threads run as where Numba is not installed: to compare, and to measure."""
    global _disabled
    _disabled += 1
    try:
        yield
    finally:
        _disabled -= 1


def serves() -> bool:
    """Whether calls on arrays in a CPU's memory run through the kernels."""
    return INSTALLED and not _disabled


def widen(xp: Any, x: Array) -> Array:
    """bfloat16 may come as its bits."""
    if x.dtype.itemsize > 2:
        return x.astype(x.dtype.newbyteorder("="), copy=False)
    if x.dtype.kind == "f":  # float16 of either byte order; bfloat16 is of kind V, or comes as uint16
        return x.astype(np.float32)
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def statistics_of_call(call: Call) -> Statistics:
    """Of NumPy arrays in shapes of their own."""
    parts = [statistics(x, ids, transforms, call.want)[0] for x, ids, transforms in _pieces(call)]
    shapes = call.shape_of_ids, call.positions, call.positions, call.shape_of_ids
    return Statistics(
        *(
            _joined([part[n] for part in parts], shape) if wanted else None
            for n, (wanted, shape) in enumerate(zip(call.want, shapes, strict=True))
        )
    )


def rank_of_call(call: Call) -> Array:
    return _joined([rank(*piece) for piece in _pieces(call)], call.shape_of_ids)


def _pieces(call: Call) -> Iterator[tuple[Any, Any, Rows]]:
    """Rows (N, V), their ids (N, K) and transforms: all at once where the strides of the logits allow it."""
    ids = None if call.ids is None else call.ids.reshape(call.rows, call.many)
    like = np.empty(0, np.float64 if call.logits.dtype.itemsize == 8 else np.float32)
    transforms, first = rows_of(call.transforms, call.logits.shape, like), 0
    for x in _row_views(call.logits):
        part = slice(first, first + len(x))
        yield x, None if ids is None else ids[part], transforms.of(part)
        first += len(x)


def _row_views(logits: Array) -> Iterator[Array]:
    """Views (N, V) that together are all rows in order."""
    if logits.ndim == 1:
        yield logits[None, :]
        return
    try:
        yield logits.reshape((-1, logits.shape[-1]), copy=False)
    except ValueError:
        for part in logits:
            yield from _row_views(part)


def _joined(parts: list[Any], shape: tuple[int, ...]) -> Array:
    found: Array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return found.reshape(shape)


def rows_of(transforms: Transforms, shape: tuple[int, ...], like: Array) -> Rows:
    """`rows_of_call` in NumPy."""
    if all(each is None for each in transforms):
        return PLAIN
    with np.errstate(all="ignore"):
        return rows_of_call(np, transforms, shape, like, lambda row: row)


def take(xp: Any, x: Array, columns: Array) -> Array:
    return x[np.arange(len(x))[:, None], columns]  # take_along_axis makes the same of it, in three times the time


@QUIET
def statistics(
    x: Array, ids: Array | None, transforms: Rows, want: Want, threads: int | None = None
) -> tuple[Statistics, Summary]:
    """`xlogprobs.backend.statistics_of_rows` of all rows (N, V) at once."""

    above = None

    def summarize(x: Array, transforms: Rows, layout: Layout, prim: Primitives, moment: bool) -> Summary:
        nonlocal above
        found = kernels.summarize(x, _of_kernels(transforms), moment, threads, ids if want.rank else None)
        above = found.above
        bias = None if found.bias_at_max is None else found.bias_at_max.astype(found.max.dtype)
        return Summary(found.max, found.rest, None, bias, found.t)

    prim = Primitives(np, widen=widen, summarize=summarize, take=take)
    found, summary = statistics_of_rows(x, ids, transforms, Layout(x.shape[1], x.shape[1]), prim, want)
    if above is not None and ids is not None:
        found = found._replace(rank=np.where(ids >= 0, above + 1, 0))
    return found, summary


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
    ordered = np.any(ids != IGNORED, axis=-1)
    for number in numbers(transforms):
        ordered = ordered if number is None else ordered & ~np.isnan(number)
    scored = np.where(ordered[:, None], ids, IGNORED)
    above = kernels.count_greater(x, scored, _of_kernels(transforms), threads)
    return np.where(scored >= 0, above + 1, 0)


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
