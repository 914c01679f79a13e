"""NumPy: the core on cache-sized pieces of rows, over threads."""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from xlogprobs_cpu import core
from xlogprobs_cpu.rows import num_threads, threads

from xlogprobs.backend import (
    ArrayApiBackend,
    BackendInfo,
    Statistics,
    rank_of_rows,
    statistics_of_rows,
    top_ids_of_rows,
)
from xlogprobs.contract import INTEGERS, Call
from xlogprobs.divergence import kl_of_rows
from xlogprobs.summary import LEAST, Primitives, cut
from xlogprobs.summary import block_terms as core_block_terms
from xlogprobs.transforms import Numbers, Point, Rows

PIECE = 1 << 21  # entries of a piece of rows
HALF_PIECE = 1 << 20  # the same in half precision, where a piece is first widened to 4 MB
BUFFER = 1 << 18  # entries of a thread's buffer, 1 MB in float32: in shorter calls the threads wait for Python's lock
GROUP = 64  # columns
NAMES = {np.dtype(name): name for name in ("bool", *INTEGERS, "float16", "float32", "float64")}

_thread = threading.local()


def widen(xp: Any, x: Any, out: Any = None) -> Any:
    """bfloat16 is the upper half of a float32: shifting bits is 8 times faster than the cast of ml_dtypes."""
    if x.dtype.itemsize > 2:
        return x
    out = np.empty(x.shape, np.float32) if out is None else out
    if x.dtype.name == "bfloat16":
        bits = out.view(np.uint32)
        np.copyto(bits, x.view(np.uint16))
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, x)
    return out


def widened_cut(xp: Any, x: Any, start: int, count: int, width: int) -> Any:
    """NumPy has no fast maximum of half-precision numbers: widen once, before it, in a buffer of this thread."""
    columns = x[:, start : start + count * width]
    if x.dtype.itemsize == 2:
        columns = widen(xp, columns, _buffer("widened", columns.shape, np.dtype(np.float32)))
    return cut(xp, columns, 0, count, width)


def window(xp: Any, x: Any, row: Any, start: Any, width: int) -> Any:
    """Through a view of all windows: rows are copied whole."""
    return np.lib.stride_tricks.sliding_window_view(x, width, axis=1)[row, start]


def block_terms(prim: Primitives, at: Point, reference: Point, by: Numbers, moment: bool = False) -> Any:
    """`xlogprobs.summary.block_terms` of (N, count, width), a cache-sized part at a time; without transforms in a
    buffer of this thread, since fresh memory costs page faults."""
    block = at.value
    rows, count, width = block.shape
    found = np.empty((2 if moment else 1, rows, count), block.dtype)
    down, along = max(1, BUFFER // (count * width)), max(1, BUFFER // width)
    plain = by.inner is None and at.bias is None
    for row in range(0, rows, down):
        for first in range(0, count, along):
            part = (slice(row, row + down), slice(first, first + along))
            here = by.map(lambda number: number[part])  # noqa: B023
            from_, to = (Point(*(None if a is None else a[part] for a in point)) for point in (at, reference))
            if not plain:
                found[:, *part] = [sums for sums in core_block_terms(prim, from_, to, here, moment) if sums is not None]
                continue
            s = _buffer("scaled", from_.value.shape, block.dtype)
            np.subtract(from_.value, to.value[..., None], out=s)
            if here.temperature is not None:
                np.divide(s, here.temperature[..., None], out=s)
            if moment:
                e = _buffer("exponentials", s.shape, block.dtype)
                np.exp(s, out=e)
                np.maximum(s, LEAST, out=s)
                np.multiply(s, e, out=s)
                np.sum(s, axis=-1, out=found[1][part])
            else:
                e = np.exp(s, out=s)
            np.sum(e, axis=-1, out=found[0][part])
    return found[0], found[1] if moment else None


def resum(function: Any, total: Any, whole: Any, rowwise: Any) -> Any:
    """Only the rows that need it."""
    rest = total - 1
    needed = np.flatnonzero(total < 2)
    if needed.size:
        rest[needed] = function(whole, tuple(array if array is None else array[needed] for array in rowwise))
    return rest


def top(xp: Any, order: Any, count: int) -> Any:
    """The largest are in those groups of columns whose maxima are among the largest: only their entries are sorted.

    A group's columns stand ``groups`` apart, so that NumPy takes all maxima in long loops.
    """
    rows, vocab = order.shape
    groups = vocab // GROUP
    if groups <= count:
        return np.argsort(-order, axis=1, kind="stable")[:, :count]
    maxima = order[:, : groups * GROUP].reshape(rows, GROUP, groups).max(axis=1)
    limit = np.partition(maxima, groups - count, axis=1)[:, groups - count]
    rest = np.arange(groups * GROUP, vocab)
    found, first = np.empty((rows, count), np.int64), groups * np.arange(GROUP)[:, None]
    for row, (values, largest, least) in enumerate(zip(order, maxima, limit, strict=True)):
        columns = np.sort(np.concatenate([(first + np.flatnonzero(largest >= least)).ravel(), rest]))
        found[row] = columns[np.argsort(-values[columns], kind="stable")[:count]]
    return found


def _buffer(use: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Memory that this thread keeps for one use."""
    size, name = math.prod(shape), f"{use} {dtype.name}"
    memory = getattr(_thread, name, None)
    if memory is None or memory.size < size:
        memory = np.empty(max(size, BUFFER), dtype)
        setattr(_thread, name, memory)
    return memory[:size].reshape(shape)


class NumpyBackend(ArrayApiBackend):
    name = "numpy"
    width = 2048

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        os.register_at_fork(after_in_child=self._forget_pool)

    def _forget_pool(self) -> None:
        self._pool = None  # a child has none of its parent's threads

    def namespace(self, array: Any) -> Any:
        return np

    def dtype_name(self, array: Any) -> str:
        name = NAMES.get(array.dtype)  # NumPy makes the name anew each time, which a small call feels
        return name or str(array.dtype.name)

    def device(self, array: Any) -> str:
        return "cpu"

    def from_numpy(self, array: Any, like: Any) -> Any:
        return array

    def to_numpy(self, array: Any) -> Any:
        return array

    def primitives(self, x: Any) -> Primitives:
        return Primitives(
            np, cut=widened_cut, widen=widen, block_terms=block_terms, window=window, resum=resum, top=top
        )

    def statistics(self, call: Call) -> Statistics:
        if core.serves():
            return core.statistics_of_call(call)
        layout, prim = self.layout(call.logits.shape[-1]), self.primitives(call.logits)

        def run(x: Any, ids: Any, transforms: Rows, part: slice) -> tuple[Any, ...]:
            return statistics_of_rows(x, ids, transforms, layout, prim, call.want)[0][:3]

        wide = np.float64 if call.logits.dtype.itemsize == 8 else np.float32
        logprob = (call.rows, call.many) if call.want.logprob else None
        others = [(call.rows,) if wanted else None for wanted in call.want[1:3]]
        found = self._over_rows(call, run, (logprob, *others), wide)
        shapes = call.shape_of_ids, call.positions, call.positions
        return Statistics(*(a if a is None else a.reshape(shape) for a, shape in zip(found, shapes, strict=True)))

    def rank(self, call: Call) -> Any:
        if core.serves():
            return core.rank_of_call(call)
        prim = self.primitives(call.logits)

        def run(x: Any, ids: Any, transforms: Rows, part: slice) -> tuple[Any, ...]:
            return (rank_of_rows(x, ids, transforms, prim),)

        return self._over_rows(call, run, ((call.rows, call.many),), np.int64)[0].reshape(call.shape_of_ids)

    def top_ids(self, call: Call, count: int) -> Any:
        prim = self.primitives(call.logits)

        def run(x: Any, ids: Any, transforms: Rows, part: slice) -> tuple[Any, ...]:
            return (top_ids_of_rows(x, ids, transforms, count, prim),)

        found = self._over_rows(call, run, ((call.rows, count),), np.int64)[0]
        return found.reshape(*call.positions, count)

    def kl_divergence(self, call: Call, ref_logits: Any) -> Any:
        layout, prim = self.layout(call.logits.shape[-1]), self.primitives(call.logits)
        wide = np.float64 if call.logits.dtype.itemsize == 8 else np.float32

        def run(x: Any, ids: Any, transforms: Rows, part: slice) -> tuple[Any, ...]:
            x, y = widen(np, x), widen(np, native(rows_of(ref_logits, part)))  # `widened_cut` has one buffer
            return (kl_of_rows(x, y, transforms, layout, prim)[0],)

        return self._over_rows(call, run, ((call.rows,),), wide, BUFFER)[0].reshape(call.positions)

    def _over_rows(
        self, call: Call, run: Any, shapes: tuple[Any, ...], dtype: Any, entries: int | None = None
    ) -> list[Any]:
        """Results, (rows, ...) or None, of ``run(x, ids, transforms, part)`` on pieces of the rows, over threads."""
        vocab, rows = call.logits.shape[-1], call.rows
        results = [None if shape is None else np.empty(shape, dtype) for shape in shapes]
        like = np.empty(0, np.float64 if call.logits.dtype.itemsize == 8 else np.float32)
        transforms = self.transforms(call, like)
        ids = None if call.ids is None else call.ids.reshape(rows, call.many)

        def piece(part: slice) -> None:
            x = native(rows_of(call.logits, part))
            # infinities and NaNs have defined results here; NumPy's error state belongs to a thread
            with np.errstate(all="ignore"):
                found = run(x, None if ids is None else ids[part], transforms.of(part), part)
            for result, value in zip(results, found, strict=True):
                if result is not None:
                    result[part] = value

        step = max(1, (entries or (HALF_PIECE if call.logits.dtype.itemsize == 2 else PIECE)) // vocab)
        parts = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
        if len(parts) == 1 or threads() == 1:
            for part in parts:
                piece(part)
        else:
            list(self.pool().map(piece, parts))
        return results

    def pool(self) -> ThreadPoolExecutor:
        pool = self._pool
        if pool is None:
            pool = self._pool = ThreadPoolExecutor(threads(), thread_name_prefix="xlogprobs")
        return pool

    def info(self) -> BackendInfo:
        how = f"kernels of Numba, {num_threads()} threads" if core.serves() else f"in row pieces, {threads()} threads"
        why = None if core.serves() else 'kernels: numba is not installed: pip install "xlogprobs[cpu]"'
        return BackendInfo(self.name, True, np.__version__, ["cpu"], f"the core, {how}", why)


def rows_of(logits: Any, part: slice) -> Any:
    """Rows ``part`` of ``logits.reshape(-1, V)`` without a copy of the other rows, whatever the strides."""
    vocab = logits.shape[-1]
    if logits.ndim == 2:
        return logits[part]
    if logits.ndim < 2 or logits.flags.c_contiguous:
        return logits.reshape(-1, vocab)[part]
    index = np.unravel_index(np.arange(part.start, part.stop), logits.shape[:-1])
    return logits[index]


def native(x: Any) -> Any:
    """In this machine's order of bytes."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
