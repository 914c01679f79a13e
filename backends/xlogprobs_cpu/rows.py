"""Pieces of rows over threads: the calling thread and those of one pool."""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

PIECE = 1 << 19  # entries of a piece of rows
ALONE = 1 << 17  # entries that one thread has done before another has woken up

_lock = threading.Lock()
_wanted: int | None = None
_pool: tuple[int, ThreadPoolExecutor] | None = None


def _forget_pool() -> None:
    """A child has none of its parent's threads, and its lock may have been held."""
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_pool)


def set_num_threads(count: int | None) -> None:
    """Threads of later calls; None: ``OMP_NUM_THREADS``, else as many as this process may run on.

    Raises:
        ValueError: fewer than 1.
    """
    global _wanted
    if count is not None and count < 1:
        raise ValueError(f"count is {count}; expected at least 1, or None")
    _wanted = count


def num_threads() -> int:
    """Threads that a call uses where its rows are enough for them.

    >>> num_threads() >= 1
    True
    """
    return _wanted or threads()


def over_rows(run: Callable[[int, int], None], rows: int, vocab: int, count: int | None = None) -> None:
    """``run(first, stop)`` of pieces that together are all rows, on up to ``count`` threads."""
    step = max(1, PIECE // vocab)
    count = 1 if rows * vocab < ALONE else count or num_threads()
    if count == 1:
        for first in range(0, rows, step):  # an interrupt comes through between two pieces
            run(first, min(first + step, rows))
        return
    step = min(step, -(-rows // count))
    count = min(count, -(-rows // step))
    # A thread has a share of neighbouring rows, then helps with the others': two that take turns would begin the same
    # new pages, which the system then clears twice. The next of a count is one step under the interpreter's lock.
    bounds = [rows * n // count for n in range(count + 1)]
    shares = [(itertools.count(first, step), stop) for first, stop in itertools.pairwise(bounds)]

    def work(own: int) -> None:
        for firsts, stop in shares[own:] + shares[:own]:
            for first in itertools.takewhile(stop.__gt__, firsts):
                run(first, min(first + step, stop))

    pool = _pool_of(count - 1)
    others = [pool.submit(work, own) for own in range(1, count)]
    try:
        work(0)
    finally:
        for firsts, stop in shares:  # after an exception, nothing is left to do
            for _ in itertools.takewhile(stop.__gt__, firsts):
                pass
        running = [other for other in others if not other.cancel()]
        wait(running)
    for other in running:
        other.result()


def _pool_of(size: int) -> ThreadPoolExecutor:
    """The one pool, of at least ``size`` threads."""
    global _pool
    with _lock:
        if _pool is None or _pool[0] < size:
            _pool = size, ThreadPoolExecutor(size, thread_name_prefix="xlogprobs-cpu")
        return _pool[1]


def threads() -> int:
    """Threads to use: OMP_NUM_THREADS where it is set, and never more than this process may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return max(1, min(allowed, int(wanted))) if wanted.isdigit() and int(wanted) else allowed
