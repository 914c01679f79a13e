"""Who runs a call: the protocol of a backend, the generic array-API backend, and the look-up by array type.

A backend is found through the entry-point group ``xlogprobs.backends`` under the name of its array library, and is
loaded only once an array of that library, which must then be imported, is passed in.
"""

import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import array_api_compat
import numpy as np

from xlogprobs.accurate import Array
from xlogprobs.contract import IGNORED, INVALID, Call, Want
from xlogprobs.divergence import kl_of_rows
from xlogprobs.summary import Layout, Primitives, Summary, finish, finish_entropy, finish_lse, summarize
from xlogprobs.transforms import Point, Rows, arithmetic, key, numbers, rows_of_call, value_of

GROUP = "xlogprobs.backends"
# for libraries on top of NumPy: infinities and NaNs have defined results here
QUIET = np.errstate(all="ignore")
PIECE = 1 << 20  # entries worked on at once in eager code: 4 MB in float32
DISTRIBUTIONS = {"jaxlib": "jax"}  # an array's top-level module -> the library it belongs to

_loaded: "dict[str, Backend]" = {}


@dataclass(frozen=True)
class BackendInfo:
    """What `backends` says of one backend on this machine."""

    name: str
    installed: bool
    version: str | None = None
    devices: list[str] = field(default_factory=list)
    execution: str = ""
    why_not: str | None = None


class Statistics(NamedTuple):
    """What a call asked for, None for the rest."""

    logprob: Array | None = None
    """Of the shape of the ids."""
    entropy: Array | None = None
    """One per position."""
    lse: Array | None = None
    rank: Array | None = None
    """As `Backend.rank`; None also where a read of its own costs no more."""


class Backend(Protocol):
    """Owns an array type and says how the core's functions run there."""

    name: str

    def namespace(self, array: Array) -> Any: ...
    def dtype_name(self, array: Array) -> str: ...
    def device(self, array: Array) -> Any:
        """Where the array lives, None where that is not known yet."""
        ...

    def readable(self, array: Array) -> bool:
        """Whether the values can be read without waiting for a device."""
        ...

    def traced(self, array: Array) -> bool:
        """Whether there are no values yet."""
        ...

    def differentiable(self, array: Array) -> bool:
        """Whether a derivative with respect to this array may be asked for."""
        ...

    def from_numpy(self, array: Any, like: Array) -> Array: ...
    def to_numpy(self, array: Array) -> Any: ...
    def check_inplace_backward(self, logits: Array) -> None:
        """ValueError where the backward pass can't overwrite the logits."""
        ...

    def statistics(self, call: Call) -> Statistics: ...
    def rank(self, call: Call) -> Array:
        """Of the shape of the ids: 1 + the number of entries above an id's own, 0 for an id without a rank."""
        ...

    def top_ids(self, call: Call, count: int) -> Array:
        """(..., count): the largest entries, in order; -1 where a row has no distribution or is ignored."""
        ...

    def kl_divergence(self, call: Call, ref_logits: Array) -> Array:
        """One per position; the call's transforms are those of both logits."""
        ...

    def info(self) -> BackendInfo: ...


def statistics_of_rows(
    x: Array, ids: Array | None, transforms: Rows, layout: Layout, prim: Primitives, want: Want
) -> tuple[Statistics, Summary]:
    """Statistics of the rows of ``x`` (N, V) and of encoded ``ids`` (N, K), and the rows' summaries."""
    xp = prim.xp
    summary = summarize(x, transforms, layout, prim, moment=want.entropy)
    logprob = entropy = lse = None
    if want.logprob and ids is not None:
        at = points(x, xp.where(ids < 0, 0, ids), transforms, prim)
        logprob = finish(at, summary, transforms, layout.vocab, prim)
        logprob = xp.where(ids == INVALID, float("nan"), logprob)
        logprob = xp.where(ids == IGNORED, 0, logprob)
    if want.entropy:
        entropy = _of_active(xp, ids, finish_entropy(summary, layout.vocab, prim))
    if want.lse:
        lse = _of_active(xp, ids, finish_lse(summary, transforms, layout.vocab, prim))
    return Statistics(logprob, entropy, lse), summary


def points(x: Array, columns: Array, transforms: Rows, prim: Primitives) -> Point:
    """The entries of ``x`` (N, V) at columns (N, K)."""
    by = numbers(transforms).map(lambda number: number[:, None])
    arrays = x, *transforms.over_vocabulary(prim.xp, x.shape[0])
    value, mask, bias = (None if array is None else prim.take(prim.xp, array, columns) for array in arrays)
    return Point(value_of(prim, value, mask, by), bias)


def order_of_rows(x: Array, ids: Array | None, transforms: Rows, prim: Primitives) -> tuple[Array, Array]:
    """What orders the entries of each row, (N, V), and which rows have an order: they have a distribution, and an id
    that is not ignored."""
    xp = prim.xp
    by = numbers(transforms).map(lambda number: number[:, None])
    mask, bias = transforms.over_vocabulary(prim.xp, x.shape[0])
    order = key(prim, Point(prim.widen(xp, value_of(prim, x, mask, by)), bias), by)
    largest = xp.max(order, axis=-1)
    numbers_of_row = [number for number in numbers(transforms) if number is not None]
    ordered = xp.isfinite(largest)
    for number in numbers_of_row:
        ordered = ordered & ~xp.isnan(number)
    return order, ordered if ids is None else ordered & xp.any(ids != IGNORED, axis=-1)


def rank_of_rows(x: Array, ids: Array, transforms: Rows, prim: Primitives) -> Array:
    xp = prim.xp
    order, ordered = order_of_rows(x, ids, transforms, prim)
    own = prim.take(xp, order, xp.where(ids < 0, 0, ids))
    above = [xp.sum(xp.astype(order > own[:, k, None], xp.int32), axis=-1, dtype=xp.int32) for k in range(ids.shape[1])]
    if not above:
        return xp.zeros_like(ids)
    rank = 1 + xp.stack(above, axis=-1)
    return xp.where(ordered[:, None] & (ids >= 0), rank, 0)


def top_ids_of_rows(x: Array, ids: Array | None, transforms: Rows, count: int, prim: Primitives) -> Array:
    xp = prim.xp
    order, ordered = order_of_rows(x, ids, transforms, prim)
    order = xp.where(ordered[:, None], order, 0)
    top = prim.top(xp, order, count)
    return xp.where(ordered[:, None], top, -1)


def _of_active(xp: Any, ids: Array | None, values: Array) -> Array:
    """0 for a row all of whose ids are ignored."""
    if ids is None:
        return values
    return xp.where(xp.any(ids != IGNORED, axis=-1), values, 0)


class ArrayApiBackend:
    """The core as it stands, eagerly, on any array that follows the array API standard."""

    name = "array-api"
    width = 1024

    def namespace(self, array: Array) -> Any:
        return array_api_compat.array_namespace(array)

    def dtype_name(self, array: Array) -> str:
        return str(array.dtype).rsplit(".", 1)[-1]

    def device(self, array: Array) -> Any:
        return array_api_compat.device(array)

    def readable(self, array: Array) -> bool:
        return not self.traced(array) and "cpu" in str(self.device(array)).lower()

    def traced(self, array: Array) -> bool:
        return False

    def differentiable(self, array: Array) -> bool:
        return False

    def from_numpy(self, array: Any, like: Array) -> Array:
        return self.namespace(like).asarray(np.asarray(array, order="C"), device=self.device(like))

    def to_numpy(self, array: Array) -> Any:
        return np.asarray(array)

    def check_inplace_backward(self, logits: Array) -> None:
        raise ValueError(
            "inplace_backward=True overwrites the logits of torch in its backward pass; logits is an array of"
            f" {type(logits).__module__.split('.')[0]}, which has no such pass"
        )

    def has_float64(self, x: Array) -> bool:
        xp = self.namespace(x)
        try:
            return bool(xp.zeros((), dtype=xp.float64, device=self.device(x)).dtype == xp.float64)
        except Exception:
            return False

    def primitives(self, x: Array) -> Primitives:
        return Primitives(self.namespace(x), has_float64=self.has_float64(x))

    def layout(self, vocab: int) -> Layout:
        return Layout(vocab, self.width)

    def transforms(self, call: Call, like: Array) -> Rows:
        return rows_of_call(
            self.namespace(like),
            call.transforms,
            tuple(call.logits.shape),
            like,
            lambda row: self.from_numpy(row, like),
        )

    @QUIET
    def statistics(self, call: Call) -> Statistics:
        layout, prim = self.layout(call.logits.shape[-1]), self.primitives(call.logits)
        pieces = [statistics_of_rows(*piece, layout, prim, call.want)[0] for piece in self.pieces(call)]
        dtype = arithmetic(prim.xp, call.logits)
        shapes = call.shape_of_ids, call.positions, call.positions
        return Statistics(
            *(
                self._joined(call, [piece[n] for piece in pieces], shape, dtype) if wanted else None
                for n, (wanted, shape) in enumerate(zip(call.want, shapes, strict=False))
            )
        )

    @QUIET
    def rank(self, call: Call) -> Array:
        prim = self.primitives(call.logits)
        pieces = [rank_of_rows(*piece, prim) for piece in self.pieces(call)]
        return self._joined(call, pieces, call.shape_of_ids, prim.xp.int64)

    @QUIET
    def top_ids(self, call: Call, count: int) -> Array:
        prim = self.primitives(call.logits)
        pieces = [top_ids_of_rows(x, ids, transforms, count, prim) for x, ids, transforms in self.pieces(call)]
        return self._joined(call, pieces, (*call.positions, count), prim.xp.int64)

    @QUIET
    def kl_divergence(self, call: Call, ref_logits: Array) -> Array:
        layout, prim = self.layout(call.logits.shape[-1]), self.primitives(call.logits)
        others = (x for x, *_ in self.pieces(call._replace(logits=ref_logits)))
        pieces = [
            kl_of_rows(x, y, transforms, layout, prim)[0]
            for (x, _, transforms), y in zip(self.pieces(call), others, strict=True)
        ]
        return self._joined(call, pieces, call.positions, arithmetic(prim.xp, call.logits))

    def pieces(self, call: Call) -> Iterator[tuple[Array, Array | None, Rows]]:
        """Rows (N, V), their ids (N, K) and transforms, a cache-sized part of the call at a time."""
        xp, vocab = self.namespace(call.logits), call.logits.shape[-1]
        x = xp.reshape(call.logits, (-1, vocab))
        ids = None if call.ids is None else xp.reshape(call.ids, (call.rows, call.many))
        transforms = self.transforms(call, x)
        for part in row_slices(x.shape[0], vocab):
            yield x[part, :], None if ids is None else ids[part, :], transforms.of(part)

    def _joined(self, call: Call, pieces: list[Any], shape: tuple[int, ...], dtype: Any) -> Array:
        xp = self.namespace(call.logits)
        empty = xp.zeros((0,), dtype=dtype, device=self.device(call.logits))
        return xp.reshape(xp.concat(pieces) if pieces else empty, tuple(shape))

    def info(self) -> BackendInfo:
        return BackendInfo(
            self.name, True, array_api_compat.__version__, ["the array's own"], "the core, eagerly, in row pieces"
        )


def row_slices(rows: int, vocab: int) -> Iterator[slice]:
    """Slices of the rows, of about `PIECE` entries each."""
    step = max(1, PIECE // vocab)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def array_library(value: Any) -> str | None:
    """Name of the library that ``value`` is an array of, None for anything that is no array."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    for kind in type(value).__mro__:
        module = kind.__module__.split(".")[0]
        module = DISTRIBUTIONS.get(module, module)
        if _has_backend(module):
            return module
    return type(value).__module__.split(".")[0]


def load(name: str) -> Backend:
    """The backend of a library, made once."""
    _import(name)
    return _loaded[name]


def _import(name: str) -> bool:
    if name not in _loaded:
        _loaded[name] = _entry_points()[name].load()()
    return True


@functools.cache
def _entry_points() -> dict[str, Any]:
    import importlib.metadata  # a third of this package's own import, with the mail parser that it brings

    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def _has_backend(library: str) -> bool:
    return library in _entry_points()


# What torch.compiler.assume_constant_result sets, without an import of torch: the first call of a process may stand
# inside a user's torch.compile, which can trace neither the search for backends nor the import of one.
_import._dynamo_marked_constant = True  # type: ignore[attr-defined]
_has_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def numpy_backend() -> Backend:
    return load("numpy")


def backend_for(logits: Any) -> Backend:
    """The backend that owns ``logits``; the generic one where its library follows the array API standard."""
    library = array_library(logits)
    if library is None:
        raise TypeError(
            f"logits is a {type(logits).__name__}; expected an array of NumPy, torch, JAX or an array-API library"
        )
    if _has_backend(library) and library in sys.modules:
        return load(library)
    if not array_api_compat.is_array_api_obj(logits):
        raise TypeError(f"logits is a {library}.{type(logits).__name__}, which does not follow the array API standard")
    return ArrayApiBackend()


def backends() -> list[BackendInfo]:
    """What is installed and what runs here, one `BackendInfo` per backend.

    Unlike a call of `logprobs`, this imports every installed array library, to ask it for its devices.

    >>> from xlogprobs import backends
    >>> [info.name for info in backends() if info.installed][:2]
    ['array-api', 'numpy']
    """
    found = [ArrayApiBackend().info()]
    for name in sorted(_entry_points(), key=lambda name: (name != "numpy", name)):
        if importlib.util.find_spec(name) is None:
            why = f'{name} is not installed: pip install "xlogprobs[{name}]"'
            found.append(BackendInfo(name, False, why_not=why))
            continue
        found.append(load(name).info())
    return found
