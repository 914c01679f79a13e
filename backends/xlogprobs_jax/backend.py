"""The backend: what a call is in JAX, and what is compiled of it."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from xlogprobs_cpu import core

from xlogprobs.backend import ArrayApiBackend, BackendInfo, Statistics, rank_of_rows, top_ids_of_rows
from xlogprobs.contract import COLDEST, Call, Transforms, Want
from xlogprobs.transforms import Rows, arithmetic, rows_of_call
from xlogprobs_jax import divergence
from xlogprobs_jax.derivatives import rows_with_derivative
from xlogprobs_jax.lowering import barrier, primitives, rows_in_pieces


def _rows(logits: Any, ids: Any, given: Transforms, positive: bool) -> tuple[Any, Any, Rows]:
    """The logits (N, V), the ids (N, K) and the transforms of their rows; ``positive``: the scale is known to be."""
    rows, vocab = math.prod(logits.shape[:-1]), logits.shape[-1]
    # the caller's graph rounds half-precision logits here, as it would for an array that is printed
    x = barrier(jnp.reshape(logits, (rows, vocab)))
    flat = None if ids is None else jnp.reshape(ids, (rows, -1))
    shape = logits.shape
    if rows == 1:  # XLA compiles a single row to other code, and to other bits: let it have company
        x, flat = jax.tree.map(_twice, (x, flat))
        one_each = jax.tree.map(lambda number: number if jnp.ndim(number) == 0 else _twice(number), given[:3])
        given = Transforms(*one_each, *map(_of_two, given[3:]))
        shape = (2, vocab)
    transforms = rows_of_call(jnp, given, shape, x, jnp.asarray)
    if positive:
        transforms = transforms._replace(sign=None)
    # XLA divides by one number, broadcast, with other bits than by one number a row
    of_rows = barrier(transforms._replace(bias=None, mask=None))
    return x, flat, of_rows._replace(bias=transforms.bias, mask=transforms.mask)


def _twice(part: Any) -> Any:
    return barrier(jnp.concatenate([jnp.atleast_1d(part)] * 2))


def _of_two(array: Any) -> Any:
    """A bias or mask of the row and of its company: one for each, unless it is one for all rows of any batch."""
    return array if array is None or array.ndim <= 1 else _twice(jnp.reshape(array, (1, array.shape[-1])))


@partial(jax.jit, static_argnums=(0, 1))
def _statistics(want: Want, positive: bool, logits: Any, ids: Any, given: Transforms) -> Statistics:
    positions = logits.shape[:-1]
    rows = math.prod(positions)
    shapes = (None if ids is None else ids.shape, positions, positions)
    if rows == 0 or (ids is not None and ids.size == 0):
        zeros = partial(jnp.zeros, dtype=arithmetic(jnp, logits))
        return Statistics(*(zeros(shape) if wanted else None for wanted, shape in zip(want, shapes, strict=False)))
    x, flat, transforms = _rows(logits, ids, given, positive)
    found: Any = rows_with_derivative(want, x, transforms, flat)[: len(shapes)]
    return Statistics(
        *(
            None if array is None else jnp.reshape(array[:rows], shape)
            for array, shape in zip(found, shapes, strict=True)
        )
    )


@partial(jax.jit, static_argnums=0)
def _rank(positive: bool, logits: Any, ids: Any, given: Transforms) -> Any:
    if ids.size == 0:
        return jnp.zeros(ids.shape, int)
    x, flat, transforms = jax.lax.stop_gradient(_rows(logits, ids, given, positive))
    rank = rows_in_pieces(
        lambda x, transforms, ids: rank_of_rows(x, ids, transforms, primitives(x)), x, transforms, flat
    )
    return jnp.reshape(rank[: math.prod(logits.shape[:-1])], ids.shape)


@partial(jax.jit, static_argnums=(0, 1))
def _top_ids(count: int, positive: bool, logits: Any, ids: Any, given: Transforms) -> Any:
    rows = math.prod(logits.shape[:-1])
    shape = (*logits.shape[:-1], count)
    if rows == 0:
        return jnp.zeros(shape, int)
    x, flat, transforms = jax.lax.stop_gradient(_rows(logits, ids, given, positive))

    def top(x: Any, transforms: Rows, ids: Any) -> Any:
        return top_ids_of_rows(x, ids, transforms, count, primitives(x))

    return jnp.reshape(rows_in_pieces(top, x, transforms, flat)[:rows], shape)


@partial(jax.jit, static_argnums=0)
def _kl_divergence(positive: bool, logits: Any, ref_logits: Any, given: Transforms) -> Any:
    rows = math.prod(logits.shape[:-1])
    if rows == 0:
        return jnp.zeros(logits.shape[:-1], arithmetic(jnp, logits))
    x, _, transforms = _rows(logits, None, given, positive)
    y, *_ = _rows(ref_logits, None, Transforms(), positive)
    return jnp.reshape(divergence.rows_with_derivative(x, y, transforms).kl[:rows], logits.shape[:-1])


def split(number: Any, like: Any) -> tuple[Any, Any]:
    """float64 numbers in the arithmetic type of the logits, and what that type rounds away."""
    high = np.asarray(number, np.float64 if like.dtype == jnp.float64 else np.float32)
    return high, np.asarray(number - high.astype(np.float64), high.dtype)


class JaxBackend(ArrayApiBackend):
    name = "jax"

    def namespace(self, array: Any) -> Any:
        return jnp

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype.name)

    def device(self, array: Any) -> Any:
        return None if self.traced(array) else frozenset(array.devices())

    def readable(self, array: Any) -> bool:
        return not self.traced(array) and all(device.platform == "cpu" for device in array.devices())

    def traced(self, array: Any) -> bool:
        return isinstance(array, jax.core.Tracer)

    def differentiable(self, array: Any) -> bool:
        return False

    def from_numpy(self, array: Any, like: Any) -> Any:
        if array.dtype == np.float64 and like.dtype != jnp.float64:
            return split(array, like)
        return jnp.asarray(array)  # int64 ids become int32 where x64 is off: they are encoded, below V

    def statistics(self, call: Call) -> Statistics:
        if (in_memory := self._in_memory(call)) is not None:
            return Statistics(*(self._like(call, each) for each in core.statistics_of_call(in_memory)))
        found: Statistics = _statistics(call.want._replace(rank=False), *self._arguments(call))
        return found

    def rank(self, call: Call) -> Any:
        if (in_memory := self._in_memory(call)) is not None:
            return self._like(call, core.rank_of_call(in_memory))
        return _rank(*self._arguments(call))

    def top_ids(self, call: Call, count: int) -> Any:
        return _top_ids(count, *self._arguments(call))

    def kl_divergence(self, call: Call, ref_logits: Any) -> Any:
        positive, logits, _, given = self._arguments(call)
        return _kl_divergence(positive, logits, ref_logits, given)

    def _in_memory(self, call: Call) -> Call | None:
        """The call in NumPy, on the memory of its arrays, where kernels can run it: untraced, and on one CPU."""
        if not core.serves():
            return None
        arrays = [each for each in (call.logits, call.ids, *call.transforms) if isinstance(each, jax.Array)]
        if any(map(self.traced, arrays)) or len(call.logits.devices()) != 1 or not self.readable(call.logits):
            return None
        ids, *transforms = (
            np.asarray(each) if isinstance(each, jax.Array) else each for each in (call.ids, *call.transforms)
        )
        return call._replace(logits=np.asarray(call.logits), ids=ids, transforms=Transforms(*transforms))

    def _like(self, call: Call, found: Any) -> Any:
        if found is None:
            return None
        return jax.device_put(found, call.logits.sharding) if call.logits.committed else jnp.asarray(found)

    def _arguments(self, call: Call) -> tuple[bool, Any, Any, Transforms]:
        """Numbers are traced, too, so that no new value compiles anew; only the sign of a scale makes other code."""
        given = call.transforms
        positive = isinstance(given.scale, float) and given.scale >= COLDEST
        pairs = {
            name: split(np.asarray(number), call.logits)
            for name, number in zip(Transforms._fields[:3], given[:3], strict=True)
            if isinstance(number, float)
        }
        return positive, call.logits, call.ids, given._replace(**pairs)

    def info(self) -> BackendInfo:
        devices = [f"{device.platform} ({device.device_kind})" for device in jax.devices()]
        execution = "jax.jit (XLA)" + ("; on cpu, outside traced code, the kernels of Numba" if core.serves() else "")
        why = None if any(d.platform != "cpu" for d in jax.devices()) else "gpu, tpu: jax sees no device"
        return BackendInfo(self.name, True, jax.__version__, devices, execution, why)
