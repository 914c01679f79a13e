"""Who runs a call: the protocol of a backend, the generic array-API backend, and the look-up by array type.

A backend is found through the entry-point group ``xlogprobs.backends`` under the name of its array library, and is
loaded only once an array of that library, which must then be imported, is passed in.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import array_api_compat
import numpy as np

from xlogprobs.accurate import Array
from xlogprobs.contract import IGNORED, INVALID, Call, temperature_pair
from xlogprobs.summary import Layout, Primitives, Summary, finish, summarize

GROUP = "xlogprobs.backends"
PIECE = 1 << 20  # entries worked on at once in eager code: 4 MB in float32
ENTRY_POINTS = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
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

    def logprobs(self, call: Call) -> Array:
        """Log-probabilities of the shape of the ids."""
        ...

    def info(self) -> BackendInfo: ...


def logprob_rows(
    x: Array, ids: Array, temperature: tuple[Array, Array] | None, layout: Layout, prim: Primitives
) -> tuple[Array, Summary]:
    """Log-probabilities of encoded ``ids`` (N, K) under the rows of ``x`` (N, V), and the rows' summaries."""
    xp = prim.xp
    summary = summarize(x, temperature, layout, prim)
    entries = prim.take(xp, x, xp.where(ids < 0, xp.zeros_like(ids), ids))
    logprob = finish(entries, summary, temperature, layout.vocab, prim)
    logprob = xp.where(ids == INVALID, xp.full_like(logprob, float("nan")), logprob)
    return xp.where(ids == IGNORED, xp.zeros_like(logprob), logprob), summary


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

    def logprobs(self, call: Call) -> Array:
        xp, vocab = self.namespace(call.logits), call.logits.shape[-1]
        x = xp.reshape(call.logits, (-1, vocab))
        ids = xp.reshape(call.ids, (call.rows, call.many))
        pair = temperature_pair(xp, call.temperature, x.shape[0], x)
        layout, prim = self.layout(vocab), self.primitives(x)
        with np.errstate(all="ignore"):  # for libraries on top of NumPy: infinities and NaNs have defined results here
            pieces = [
                logprob_rows(x[part, :], ids[part, :], pair and (pair[0][part], pair[1][part]), layout, prim)[0]
                for part in row_slices(x.shape[0], vocab)
            ]
        dtype = xp.float64 if x.dtype == xp.float64 else xp.float32
        flat = xp.concat(pieces) if pieces else xp.zeros((0, call.many), dtype=dtype, device=self.device(x))
        return xp.reshape(flat, call.ids.shape)

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
        if module in ENTRY_POINTS:
            return module
    return type(value).__module__.split(".")[0]


def load(name: str) -> Backend:
    """The backend of a library, made once."""
    _import(name)
    return _loaded[name]


def _import(name: str) -> bool:
    if name not in _loaded:
        _loaded[name] = ENTRY_POINTS[name].load()()
    return True


# What torch.compiler.assume_constant_result sets, without an import of torch: the first call of a process may stand
# inside a user's torch.compile, which can't trace the import of a backend.
_import._dynamo_marked_constant = True  # type: ignore[attr-defined]


def numpy_backend() -> Backend:
    return load("numpy")


def backend_for(logits: Any) -> Backend:
    """The backend that owns ``logits``; the generic one where its library follows the array API standard."""
    library = array_library(logits)
    if library is None:
        raise TypeError(
            f"logits is a {type(logits).__name__}; expected an array of NumPy, torch, JAX or an array-API library"
        )
    if library in ENTRY_POINTS and library in sys.modules:
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
    for name in sorted(ENTRY_POINTS, key=lambda name: (name != "numpy", name)):
        if importlib.util.find_spec(name) is None:
            why = f'{name} is not installed: pip install "xlogprobs[{name}]"'
            found.append(BackendInfo(name, False, why_not=why))
            continue
        found.append(load(name).info())
    return found
