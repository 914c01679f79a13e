"""Kernels for CPUs, compiled by Numba: a faster summary and gradient for the backends whose arrays live there.

NumPy arrays go in and come out; torch and JAX share their memory as such. The mathematics is that of
`xlogprobs.summary` and `xlogprobs.gradient` on transformed logits. A row of logits x gives

    v = x * sign, -inf where masked          y = v, or tanh(v / inner)          s = (y + bias k - its reference's) / T

with the entry of the largest y + bias k as the reference. Numba is imported by the first call.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlogprobs_cpu.rows import num_threads, over_rows, set_num_threads

Array = NDArray[Any]

__all__ = [
    "RowTransforms", "Summary", "available", "count_greater", "gradient", "num_threads", "set_num_threads", "summarize",
]  # fmt: skip

# bfloat16 is also taken as uint16, its bits: so a library without ml_dtypes can share its memory
KINDS = {
    "float32": np.float32(0),
    "float64": np.float64(0),
    "float16": np.int16(0),
    "bfloat16": np.uint16(0),
    "uint16": np.uint16(0),
    "bool": np.uint8(0),
}


class RowTransforms(NamedTuple):
    """What happens to N rows of V logits; None leaves a step out."""

    temperature: Array | None = None
    """(N,) float64: T"""
    sign: Array | None = None
    """(N,) float64 of -1, 0 and 1"""
    inner: Array | None = None
    """(N,) float64: what the softcap's tanh divides by"""
    bias: Array | None = None
    """(R, V) float32 or float64, any strides"""
    bias_unit: Array | None = None
    """(N,) float64: k, else 1"""
    mask: Array | None = None
    """(R, V) bool, any strides: True keeps"""
    bias_row: Array | None = None
    """(N,) int64: which of the R rows of bias; None: row n, or the only one"""
    mask_row: Array | None = None
    """(N,) int64: which of the R rows of mask"""


PLAIN = RowTransforms()


class Summary(NamedTuple):
    """Of each row: v and bias at the reference, the sum of e^s over all entries but the reference, and that of e^s s.

    ``max`` is NaN for a row that holds NaN or +inf, -inf for one without a finite entry.
    """

    max: Array
    bias_at_max: Array | None
    rest: Array
    t: Array | None
    above: Array | None = None
    """As from `count_greater`."""


def available() -> bool:
    """Whether Numba is installed.

    >>> available() in (True, False)
    True
    """
    return importlib.util.find_spec("numba") is not None


def summarize(
    x: Array,
    transforms: RowTransforms = PLAIN,
    want_t: bool = False,
    threads: int | None = None,
    columns: Array | None = None,
) -> Summary:
    """Summary of each row of ``x``: one read, and a row's bits depend on the row alone.

    Arguments:
        x: (N, V), V >= 1, of float32, float64, float16 or bfloat16 (or its bits as uint16), any strides.
        transforms: of the N rows.
        want_t: also sum e^s s.
        threads: at most so many; None for `num_threads`.
        columns: (N, K) integers, to count in the same read what stands above them.

    Returns:
        max (N,) float32, float64 of float64; bias_at_max, rest and t (N,) float64; above (N, K) int64.

    Raises:
        TypeError: another dtype.

    >>> summary = summarize(np.zeros((2, 3), np.float32))
    >>> summary.max, summary.rest
    (array([0., 0.], dtype=float32), array([2., 2.]))
    """
    from xlogprobs_cpu import kernels

    rows = len(x)
    call = _Call(x, transforms)
    top = np.empty(rows, call.arithmetic)
    bias_at_max = None if transforms.bias is None else np.empty(rows)
    rest, t = np.empty(rows), np.empty(rows) if want_t else None
    columns = _own(columns, np.int64)
    above = None if columns is None else np.empty(columns.shape, np.int64)

    def run(first: int, stop: int) -> None:
        logits, bias, bias_row, mask, mask_row, _alive = call.piece(first, stop)
        kernels.summarize(
            (first, stop, call.vocab), logits, call.temperature, call.sign, call.inner, bias, bias_row, call.bias_unit,
            mask, mask_row, columns, top, bias_at_max, rest, t, above,
        )  # fmt: skip

    over_rows(run, rows, call.vocab, threads)
    return Summary(top, bias_at_max, rest, t, above)


def gradient(
    x: Array,
    ids: Array,
    upstream: Array,
    summary: Summary,
    transforms: RowTransforms,
    alpha: Array,
    beta: Array | None,
    out: Array,
    threads: int | None = None,
) -> None:
    """Writes f * (own + p * (alpha + beta * s)) into ``out``, p = e^s / (1 + rest), rounded once to its dtype.

    own sums ``upstream`` over the ids of an entry; f is the derivative of s in x: sign / T, with a softcap
    sign * (1 - y^2) / (inner * T), 0 for an entry of -inf. A row without a distribution gets NaN, one with an id
    INVALID (-2) NaN where it is not -inf, and one whose ids are all IGNORED (-1) zeros, whatever it holds.

    Arguments:
        x: (N, V) as in `summarize`.
        ids: (N, K) integers.
        upstream: (N, K).
        summary, transforms: of the same rows.
        alpha, beta: (N,); beta None for 0.
        out: (N, V) of the dtype of ``x``, any strides; ``x`` itself, or memory apart from it.

    >>> x, out = np.zeros((1, 4), np.float32), np.empty((1, 4), np.float32)
    >>> gradient(x, np.array([[0]]), np.ones((1, 1)), summarize(x), RowTransforms(), np.array([-1.0]), None, out)
    >>> out
    array([[ 0.75, -0.25, -0.25, -0.25]], dtype=float32)
    """
    from xlogprobs_cpu import kernels

    call = _Call(x, transforms)
    ids, upstream = _own(ids, np.int64), _own(upstream, np.float64)
    alpha, beta = _own(alpha, np.float64), _own(beta, np.float64)
    top, bias_at_max, rest = (_own(a, None) for a in (summary.max, summary.bias_at_max, summary.rest))
    in_place = _address(out) == _address(x) and out.strides == x.strides
    direct = _is_plain(out) and (not in_place or call.plain)

    def run(first: int, stop: int) -> None:
        logits, bias, bias_row, mask, mask_row, alive = call.piece(first, stop)
        part = None
        if not in_place:
            part = out[first:stop] if direct else np.empty((stop - first, call.vocab), out.dtype)
        kernels.gradient(
            (first, stop, call.vocab), logits, None if part is None else _memory(part, first), call.temperature,
            call.sign, call.inner, bias, bias_row, call.bias_unit, mask, mask_row, top, bias_at_max, rest, ids,
            upstream, alpha, beta,
        )  # fmt: skip
        if not direct:
            out[first:stop] = alive[0] if part is None else part

    over_rows(run, len(x), call.vocab, threads)


def count_greater(x: Array, columns: Array, transforms: RowTransforms, threads: int | None = None) -> Array:
    """How many entries of a row stand strictly above the one at each column; a negative column gives 0, and a row that
    holds NaN or +inf, or nothing finite, gives -1.

    Entries are compared by v, or with a bias by y + bias * k rounded to the arithmetic type.

    >>> count_greater(np.array([[1.0, 3.0, 2.0]]), np.array([[0, 1, -1]]), RowTransforms())
    array([[2, 0, 0]])
    """
    from xlogprobs_cpu import kernels

    call = _Call(x, transforms)
    columns = _own(columns, np.int64)
    counts = np.empty(columns.shape, np.int64)

    def run(first: int, stop: int) -> None:
        logits, bias, bias_row, mask, mask_row, _alive = call.piece(first, stop)
        kernels.count_greater(
            (first, stop, call.vocab), logits, call.sign, call.inner, bias, bias_row, call.bias_unit, mask, mask_row,
            call.arithmetic(0), columns, counts,
        )  # fmt: skip

    over_rows(run, len(x), call.vocab, threads)
    return counts


class _Call:
    """Arguments as the kernels take them: vectors that are contiguous, matrices as addresses."""

    def __init__(self, x: Array, transforms: RowTransforms) -> None:
        if _kind(x.dtype) is None or x.dtype == bool:
            raise TypeError(f"x is {x.dtype}; expected float16, bfloat16, float32 or float64")
        self.x, self.vocab, self.plain = x, x.shape[1], _is_plain(x)
        self.arithmetic: Any = np.float64 if x.dtype.itemsize == 8 else np.float32
        self.temperature, self.sign, self.inner, self.bias, self.bias_unit, self.mask, bias_row, mask_row = transforms
        self.temperature, self.sign = _own(self.temperature, np.float64), _own(self.sign, np.float64)
        self.inner, self.bias_unit = _own(self.inner, np.float64), _own(self.bias_unit, np.float64)
        self.bias_row, self.mask_row = _own(bias_row, np.int64), _own(mask_row, np.int64)

    def piece(self, first: int, stop: int) -> tuple[Any, Any, Any, Any, Any, list[Array]]:
        """Logits, bias and mask of the rows first .. stop - 1, and what has to stay alive meanwhile."""
        x = self.x[first:stop]
        alive = [x if self.plain else _plain(x)]
        bias, bias_row = self._shared(self.bias, self.bias_row, first, stop, alive)
        mask, mask_row = self._shared(self.mask, self.mask_row, first, stop, alive)
        return _memory(alive[0], first), bias, bias_row, mask, mask_row, alive

    def _shared(self, matrix: Array | None, which: Array | None, first: int, stop: int, alive: list[Array]) -> Any:
        """A matrix of R rows, of which row n takes ``which[n]``."""
        if matrix is None:
            return None, None
        if which is not None and _is_plain(matrix):
            return _memory(matrix, 0), which
        if which is not None:
            matrix = matrix[which[first:stop]]
        elif len(matrix) == 1:
            matrix = np.broadcast_to(matrix[0] if _is_plain(matrix) else _plain(matrix)[0], (stop - first, self.vocab))
        else:
            matrix = matrix[first:stop]
        alive.append(matrix if _is_plain(matrix) else _plain(matrix))
        return _memory(alive[-1], first), None


def _is_plain(matrix: Array) -> bool:
    """Whether the columns of a row are neighbours in memory, ready to be read."""
    neighbours = matrix.strides[1] == matrix.itemsize or matrix.shape[1] == 1
    return bool(neighbours and matrix.flags.aligned and matrix.dtype.isnative)


def _plain(matrix: Array) -> Array:
    return np.array(matrix, matrix.dtype.newbyteorder("="), order="C")


def _memory(matrix: Array, first: int) -> tuple[int, int, Any]:
    """(address of row 0, bytes from row to row, a scalar of the type) of a matrix that begins with row ``first``."""
    stride = matrix.strides[0]
    return _address(matrix) - first * stride, stride, _kind(matrix.dtype)


@functools.cache
def _kind(dtype: Any) -> Any:
    return KINDS.get(dtype.name)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _own(vector: Any, dtype: Any) -> Any:
    """Contiguous and writable, since Numba compiles anew for what is not."""
    if vector is None or (vector.flags.carray and vector.dtype == (dtype or vector.dtype)):
        return vector
    return np.require(vector, dtype, ["C", "W", "A"])
