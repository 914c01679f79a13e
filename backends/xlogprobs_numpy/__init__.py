"""NumPy: the core on cache-sized pieces of rows, over threads."""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from xlogprobs.backend import ArrayApiBackend, BackendInfo, logprob_rows
from xlogprobs.contract import Call, temperature_pair
from xlogprobs.summary import Primitives, cut

PIECE = 1 << 21  # entries of a piece of rows
HALF_PIECE = 1 << 20  # the same in half precision, where a piece is first widened to 4 MB
BUFFER = 1 << 18  # entries of a thread's buffer, 1 MB in float32: in shorter calls the threads wait for Python's lock

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


def sum_exp(xp: Any, block: Any, maximum: Any, temperature: Any | None) -> Any:
    """`xlogprobs.summary.sum_exp` of (N, count, width) in a buffer of this thread: fresh memory costs page faults."""
    rows, count, width = block.shape
    total = np.empty((rows, count), block.dtype)
    down, along = max(1, BUFFER // (count * width)), max(1, BUFFER // width)
    for row in range(0, rows, down):
        for first in range(0, count, along):
            part = (slice(row, row + down), slice(first, first + along))
            scaled = _buffer("scaled", block[part].shape, block.dtype)
            np.subtract(block[part], maximum[part][..., None], out=scaled)
            if temperature is not None:
                np.divide(scaled, temperature[part][..., None], out=scaled)
            np.exp(scaled, out=scaled)
            np.sum(scaled, axis=-1, out=total[part])
    return total


def resum(function: Any, total: Any, x: Any, *arrays: Any) -> Any:
    """Only the rows that need it."""
    rest = total - 1
    needed = np.flatnonzero(total < 2)
    if needed.size:
        row, best, top, temperature = arrays
        temperature = temperature and (temperature[0][needed], temperature[1][needed])
        rest[needed] = function(x, row[needed], best[needed], top[needed], temperature)
    return rest


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
        return str(array.dtype.name)

    def device(self, array: Any) -> str:
        return "cpu"

    def from_numpy(self, array: Any, like: Any) -> Any:
        return array

    def to_numpy(self, array: Any) -> Any:
        return array

    def primitives(self, x: Any) -> Primitives:
        return Primitives(np, cut=widened_cut, widen=widen, sum_exp=sum_exp, window=window, resum=resum)

    def logprobs(self, call: Call) -> Any:
        vocab, rows = call.logits.shape[-1], call.rows
        dtype = np.float64 if call.logits.dtype.itemsize == 8 else np.float32
        result = np.empty(call.ids.shape, dtype)
        if result.size == 0:
            return result
        layout, prim = self.layout(vocab), self.primitives(call.logits)
        pair = temperature_pair(np, call.temperature, rows, result)
        ids, out = call.ids.reshape(rows, call.many), result.reshape(rows, call.many)

        def run(part: slice) -> None:
            x = rows_of(call.logits, part)
            x = x if x.dtype.isnative else x.astype(dtype)
            # infinities and NaNs have defined results here; NumPy's error state belongs to a thread
            with np.errstate(all="ignore"):
                out[part] = logprob_rows(x, ids[part], pair and (pair[0][part], pair[1][part]), layout, prim)[0]

        step = max(1, (HALF_PIECE if call.logits.dtype.itemsize == 2 else PIECE) // vocab)
        parts = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
        if len(parts) == 1 or threads() == 1:
            for part in parts:
                run(part)
        else:
            list(self.pool().map(run, parts))
        return result

    def pool(self) -> ThreadPoolExecutor:
        pool = self._pool
        if pool is None:
            pool = self._pool = ThreadPoolExecutor(threads(), thread_name_prefix="xlogprobs")
        return pool

    def info(self) -> BackendInfo:
        return BackendInfo(self.name, True, np.__version__, ["cpu"], f"the core in row pieces, {threads()} threads")


def rows_of(logits: Any, part: slice) -> Any:
    """Rows ``part`` of ``logits.reshape(-1, V)`` without a copy of the other rows, whatever the strides."""
    vocab = logits.shape[-1]
    if logits.ndim == 2:
        return logits[part]
    if logits.ndim < 2 or logits.flags.c_contiguous:
        return logits.reshape(-1, vocab)[part]
    index = np.unravel_index(np.arange(part.start, part.stop), logits.shape[:-1])
    return logits[index]


def threads() -> int:
    """Threads to use: OMP_NUM_THREADS where it is set, and never more than this process may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return max(1, min(allowed, int(wanted))) if wanted.isdigit() and int(wanted) else allowed
