"""JAX: the core under jax.jit, behind a custom_jvp whose tangent is rematerialised.

Works eagerly and inside the user's own jit, vmap, scan and shard_map; needs no x64: where float64 is off, the wide
arithmetic is float32 pairs.
"""

import math
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlogprobs.accurate import Pair
from xlogprobs.backend import ArrayApiBackend, BackendInfo, logprob_rows
from xlogprobs.contract import IGNORED, INVALID, Call, temperature_pair
from xlogprobs.gradient import probability
from xlogprobs.summary import Layout, Primitives, Summary, sum_exp, widen
from xlogprobs.summary import block_sums as core_block_sums

barrier: Any = lax.optimization_barrier

WIDTH = 1024  # about the block width where the vocabulary has no better divisor

WINDOWS = 1 << 17  # entries of the windows that are worked on at once, 0.5 MB in float32
FEW = 4  # ids a row that are compared with every column
FAST = 1 << 15  # columns
SMALL = 1 << 13  # a row from here on is summed by XLA's own reduction, whose code is then the same for any batch


@lru_cache
def block_width(vocab: int) -> int:
    """A width that divides the vocabulary, from 256 to 2048 and nearest to 512 in ratio; `WIDTH` where there is none.

    Blocks of one width are a reshape, which costs XLA nothing; a shorter last one is a slice, which it copies.
    """
    widths = [width for width in range(256, 4097) if vocab % width == 0]
    return min(widths, key=lambda width: abs(math.log(width / 1024))) if widths else WIDTH


@lru_cache
def longest(vocab: int) -> int:
    """The largest divisor of the vocabulary up to which XLA CPU reduces a row in its fast form."""
    return max(width for width in range(1, FAST + 1) if vocab % width == 0)


def cut(xp: Any, x: Any, start: int, count: int, width: int) -> Any:
    """Blocks as rows of a matrix: the form that XLA CPU turns into one vectorised pass.

    The barrier keeps the widening of half-precision logits behind the reshape; before it, XLA would write the whole
    array out in float32.
    """
    columns = x if count * width == x.shape[1] else x[:, start : start + count * width]
    return barrier(jnp.reshape(columns, (x.shape[0] * count, width)))


def take(xp: Any, x: Any, columns: Any) -> Any:
    return jnp.take_along_axis(x, columns, axis=-1, mode="promise_in_bounds")


def window(xp: Any, x: Any, row: Any, start: Any, width: int) -> Any:
    return jax.vmap(lambda row, start: lax.dynamic_slice(x, (row, start), (1, width))[0])(row, start)


def block_sums(x: Any, temperature: Pair | None, layout: Layout, prim: Primitives) -> tuple[Any, Any]:
    """`xlogprobs.summary.block_sums`, each block relative to the maximum of the row.

    XLA CPU makes a maximum and a sum two passes over all of the logits in any case: the first is fastest over long
    blocks, and the sums of one row then need no weights between them.
    """
    rows, vocab = x.shape
    if vocab % layout.width:
        return core_block_sums(x, temperature, layout, prim)
    long = longest(vocab)
    maximum = jnp.max(widen(jnp, jnp.max(cut(jnp, x, 0, vocab // long, long), axis=-1)).reshape(rows, -1), axis=-1)
    count = vocab // layout.width
    spread = None if temperature is None else jnp.repeat(temperature[0], count)
    finite = barrier(jnp.where(maximum == -jnp.inf, 0, maximum))
    total = prim.sum_exp(jnp, cut(jnp, x, 0, count, layout.width), jnp.repeat(finite, count), spread)
    return jnp.broadcast_to(maximum[:, None], (rows, count)), jnp.reshape(total, (rows, count))


def resum(width: int, function: Any, total: Any, x: Any, *arrays: Any) -> Any:
    """Only where a row needs it, and then in pieces, one after the other, so that what ``function`` makes of the
    windows stays small."""
    needed = total < 2
    return lax.cond(
        jnp.any(needed),
        lambda: jnp.where(needed, _in_pieces(x, width, function, *arrays), total - 1),
        lambda: total - 1,
    )


def _in_pieces(x: Any, width: int, function: Any, *arrays: Any) -> Any:
    """``function(x, ...)`` of pieces of the rows, one after the other.

    The logits are carried through the loop behind a barrier: as a constant of it, XLA would widen all of the
    half-precision logits before the loop begins.
    """
    rows = arrays[0].shape[0]
    step = max(1, WINDOWS // width)
    whole = rows // step * step
    if whole < 2 * step:
        return function(x, *arrays)
    pieces = jax.tree.map(lambda array: jnp.reshape(array[:whole], (-1, step, *array.shape[1:])), arrays)

    def body(x: Any, piece: Any) -> Any:
        x, piece = barrier((x, piece))
        return x, function(x, *piece)

    x, result = lax.scan(body, x, pieces)
    result = jnp.reshape(result, whole)
    if whole == rows:
        return result
    last = function(x, *jax.tree.map(lambda array: array[whole:], arrays))
    return jnp.concatenate([result, last])


def tree_sum(xp: Any, terms: Any) -> Any:
    """Sum over the last axis by halves. XLA CPU orders a reduction by the size of the whole array, a tree has one
    order: a row's bits do not depend on the rows beside it."""
    while (length := terms.shape[-1]) > 1:
        half = length // 2
        paired = terms[..., :half] + terms[..., half : 2 * half]
        terms = paired if length % 2 == 0 else jnp.concatenate([paired, terms[..., 2 * half :]], axis=-1)
    return terms[..., 0]


def tree_sum_exp(xp: Any, block: Any, maximum: Any, temperature: Any | None) -> Any:
    scaled = widen(jnp, block) - maximum[..., None]
    return tree_sum(jnp, jnp.exp(scaled if temperature is None else scaled / temperature[..., None]))


def primitives(x: Any) -> Primitives:
    return Primitives(
        jnp,
        has_float64=x.dtype == jnp.float64,
        cut=cut,
        take=take,
        window=window,
        sum_exp=tree_sum_exp if x.shape[1] < SMALL else sum_exp,
        sum_last_axis=tree_sum,
        resum=partial(resum, block_width(x.shape[1])),
        block_sums=block_sums,
    )


def _forward(x: Any, ids: Any, temperature: Pair | None) -> tuple[Any, Summary]:
    return logprob_rows(x, ids, temperature, Layout(x.shape[1], block_width(x.shape[1])), primitives(x))


@jax.custom_jvp
def _logprob_rows(x: Any, temperature: Pair | None, ids: Any) -> Any:
    return _forward(x, ids, temperature)[0]


@partial(_logprob_rows.defjvp, symbolic_zeros=False)
def _tangent_of_rows(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """d logprob_k = dz[id_k] - sum_v p_v dz_v with z = x / T; nothing of the size of V is kept but x itself.

    Transposed, this is the gradient. Of a few ids, it is one pass: each column compares itself with the ids, and is
    rounded to the logits' dtype once. Of many, their share is added to the columns afterwards.
    """
    x, temperature, ids = primals
    out, summary = _forward(x, ids, temperature)
    x_tangent, temperature_tangent, _ = tangents

    @jax.checkpoint
    def tangent(x: Any, temperature: Pair | None, summary: Summary, x_tangent: Any, temperature_tangent: Any) -> Any:
        prim, columns = primitives(x), jnp.maximum(ids, 0)
        active = jnp.any(ids != IGNORED, axis=-1)[:, None]  # an ignored row adds 0 whatever it holds
        p = jnp.where(active, probability(x, summary, temperature, prim), 0)
        wide, held = widen(jnp, x_tangent), take(jnp, x, columns) != -jnp.inf  # a logit of -inf has no gradient
        if ids.shape[1] <= FEW:
            at = jnp.where(held, columns, -1)
            here = [jnp.arange(x.shape[1]) == at[:, k, None] for k in range(ids.shape[1])]
            own = jnp.stack([jnp.sum(jnp.where(where, wide, 0), axis=-1) for where in here], axis=-1)
        else:
            own = jnp.where(held, take(jnp, wide, columns), 0)
        change = own - jnp.sum(p * wide, axis=-1)[:, None]
        if temperature is not None:
            spread = jnp.where(active & (x != -jnp.inf), widen(jnp, x) - summary.max[:, None], 0)
            mean = jnp.sum(p * spread, axis=-1)[:, None]
            warmer = (take(jnp, spread, columns) - mean) / temperature[0][:, None]
            change = (change - warmer * temperature_tangent[0][:, None]) / temperature[0][:, None]
        # a product, which the gradient of an invalid id passes through as well
        change = change * jnp.where(ids == INVALID, jnp.nan, 1).astype(change.dtype)
        return jnp.where(ids == IGNORED, 0, change)

    return out, tangent(x, temperature, summary, x_tangent, temperature_tangent)


def _logprobs(logits: Any, ids: Any, temperature: Any) -> Any:
    vocab = logits.shape[-1]
    # the caller's graph rounds half-precision logits here, as it would for an array that is printed
    x = barrier(jnp.reshape(logits, (-1, vocab)))
    if ids.size == 0:
        return jnp.zeros(ids.shape, jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    rows = math.prod(logits.shape[:-1])
    flat_ids = jnp.reshape(ids, (rows, -1))
    if isinstance(temperature, tuple):  # traced also where it is a number, so that no value compiles anew
        high, low = (jnp.broadcast_to(jnp.reshape(part, -1), (rows,)) for part in temperature)
        pair: Pair | None = (high, low)
    else:
        pair = temperature_pair(jnp, temperature, rows, x)
    # XLA divides by one number, broadcast, with other bits than by one number a row
    pair = barrier(pair)
    if rows == 1:  # XLA compiles a single row to other code, and to other bits: let it have company
        x, flat_ids, pair = jax.tree.map(lambda part: barrier(jnp.concatenate([part, part])), (x, flat_ids, pair))
    return jnp.reshape(_logprob_rows(x, pair, flat_ids)[:rows], ids.shape)


_jitted = jax.jit(_logprobs)


def split(temperature: Any, like: Any) -> tuple[Any, Any]:
    """A float64 temperature in the arithmetic type of the logits, and what that type rounds away."""
    high = np.asarray(temperature, np.float64 if like.dtype == jnp.float64 else np.float32)
    return high, np.asarray(temperature - high.astype(np.float64), high.dtype)


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
        if array.dtype == np.float64:
            return split(array, like)
        return jnp.asarray(array)  # int64 ids become int32 where x64 is off: they are encoded, below V

    def logprobs(self, call: Call) -> Any:
        temperature = call.temperature
        if isinstance(temperature, float):
            temperature = split(np.asarray(temperature), call.logits)
        return _jitted(call.logits, call.ids, temperature)

    def info(self) -> BackendInfo:
        devices = [f"{device.platform} ({device.device_kind})" for device in jax.devices()]
        why = None if any(d.platform != "cpu" for d in jax.devices()) else "gpu, tpu: jax sees no device"
        return BackendInfo(self.name, True, jax.__version__, devices, "jax.jit (XLA)", why)
