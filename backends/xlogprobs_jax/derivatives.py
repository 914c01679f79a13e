"""Statistics of rows with their derivative: a custom_jvp whose tangent keeps nothing of the size of V but its inputs.

With p = softmax(z), s the difference of z from its largest entry, held fixed, and dz the change of the transformed
logits,

    d logprob_k = dz[id_k] - A      d lse = A      d H = E A - B      A = sum p dz      B = sum p s dz      E = sum p s

and dz of an entry, in the terms of `xlogprobs.transforms`,

    dz = (dy + k dbias + bias dk) / T' - z dT' / T'

JAX transposes this to the gradient, and differentiates it again: 1 / (1 + r) and E, from which p and the tangents are
made, are results of the same function, with d log(1 + r) = A and d E = A + B - E A.
"""

import functools
import operator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from xlogprobs.backend import statistics_of_rows
from xlogprobs.contract import IGNORED, INVALID, Want
from xlogprobs.gradient import inverse
from xlogprobs.summary import Primitives, widen
from xlogprobs.transforms import Numbers, Point, Rows, distance, numbers, slope, value_of, wide_value
from xlogprobs_jax.lowering import layout, primitives, take

FEW = 4  # ids a row that are compared with every column


class Found(NamedTuple):
    """The statistics asked for, and what their derivatives are made of; None for the rest."""

    logprob: Any
    """(N, K)"""
    entropy: Any
    """(N,), and so the rest."""
    lse: Any
    inverse: Any
    """1 / (1 + r), NaN for a row without a distribution."""
    mean: Any
    """E, where the entropy is asked for."""
    top: Point
    """The largest entry; its tangent is 0, since differences from any fixed entry serve as well."""


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def rows_with_derivative(want: Want, x: Any, transforms: Rows, ids: Any) -> Found:
    """Statistics of the rows of ``x`` (N, V) and of encoded ``ids`` (N, K) or None."""
    prim = primitives(x)
    found, summary = statistics_of_rows(x, ids, transforms, layout(x.shape[1]), prim, want)
    mean = summary.moment / (1 + summary.rest) if want.entropy else None
    return Found(*found[:3], inverse(jnp, summary), mean, summary.point)


@partial(rows_with_derivative.defjvp, symbolic_zeros=True)
def _tangent_of_rows(want: Want, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Found, Found]:
    x, transforms, ids = primals
    found = rows_with_derivative(want, x, transforms, ids)
    x_dot, transforms_dot, _ = jax.tree.map(lambda dot: None if isinstance(dot, SymbolicZero) else dot, tangents)
    by_dot = numbers(transforms_dot)
    bias_dot = None if transforms.bias is None else transforms_dot.bias.values
    active = jnp.ones(len(x), bool) if ids is None else jnp.any(ids != IGNORED, axis=-1)
    # an ignored row has no derivative, whatever it holds: nothing that follows may be NaN there
    inverse, mean, held = jax.tree.map(
        lambda part: jnp.where(active, part, 0), (found.inverse, found.mean, tuple(found.top))
    )
    top = Point(*held)
    scored = ids if want.logprob else None

    own, mean_change, second = _sums(want.entropy, x, transforms, scored, active, inverse, top, x_dot, by_dot, bias_dot)
    change = found._replace(top=jax.tree.map(jnp.zeros_like, found.top), inverse=-inverse * mean_change)
    if want.logprob:
        each = own - mean_change[:, None]
        # a product, which the gradient of an invalid id passes through as well
        each = each * jnp.where(ids == INVALID, jnp.nan, 1).astype(each.dtype)
        change = change._replace(logprob=jnp.where(ids == IGNORED, 0, each))
    if want.entropy:
        product = mean * mean_change
        change = change._replace(entropy=jnp.where(active, product - second, 0), mean=mean_change + second - product)
    if want.lse:
        change = change._replace(
            lse=jnp.where(active, mean_change + _change_of_top(primitives(x), top, transforms, by_dot), 0)
        )
    return found, change


def _change_of_top(prim: Primitives, top: Point, transforms: Rows, by_dot: Numbers) -> Any:
    """What `_change` leaves out: the change of the largest entry's z with inner, k and T'."""
    by, change = numbers(transforms), jnp.zeros_like(top.value)
    warm: Any = 1 if by.temperature is None else by.temperature
    if by_dot.temperature is not None:
        z = wide_value(prim, top.column(), transforms)
        change = change - (z if prim.has_float64 else z[0])[:, 0] / warm * by_dot.temperature
    if by_dot.unit is not None and top.bias is not None:
        change = change + top.bias / warm * by_dot.unit
    if by_dot.inner is not None:
        change = change + _of_inner(prim, top.value, by) * by_dot.inner
    return change


def _of_inner(prim: Primitives, v: Any, by: Numbers) -> Any:
    """dz of an entry for a change of inner by 1."""
    factor: Any = slope(prim, v, by._replace(sign=None))
    return -v / by.inner * factor


@partial(jax.checkpoint, static_argnums=(0,))
def _sums(
    moment: bool,
    x: Any,
    transforms: Rows,
    ids: Any,
    active: Any,
    inverse: Any,
    top: Point,
    x_dot: Any,
    by_dot: Numbers,
    bias_dot: Any,
) -> tuple[Any, Any, Any]:
    """dz at the ids (N, K), A and B (N,).

    Transposed, this is the gradient. Of a few ids, it is one pass: each column compares itself with the ids, and is
    rounded to the logits' dtype once. Of many, their share is added to the columns afterwards.
    """
    _, s, p, change = of_entries(x, transforms, active, inverse, top, x_dot, by_dot, bias_dot)
    mean_change = jnp.sum(p * change, axis=-1)
    second = jnp.sum(p * s * change, axis=-1) if moment else None
    if ids is None:
        return None, mean_change, second
    columns = jnp.maximum(ids, 0)
    if ids.shape[1] > FEW:
        return take(jnp, change, columns), mean_change, second
    here = [jnp.arange(x.shape[1]) == columns[:, k, None] for k in range(ids.shape[1])]
    return jnp.stack([jnp.sum(jnp.where(at, change, 0), axis=-1) for at in here], axis=-1), mean_change, second


def of_entries(
    x: Any, transforms: Rows, active: Any, inverse: Any, top: Point, x_dot: Any, by_dot: Numbers, bias_dot: Any
) -> tuple[Any, Any, Any, Any]:
    """Which entries have a probability, and their s, p and dz (0 for the others), each (N, V)."""
    prim, rows = primitives(x), len(x)
    by, by_dot = (each.map(lambda number: number[:, None]) for each in (numbers(transforms), by_dot))
    mask, bias = transforms.over_vocabulary(jnp, rows)
    if bias_dot is not None and transforms.bias is not None:
        bias_dot = transforms.bias._replace(values=bias_dot).spread(jnp, rows)
    reference = top.column()
    at = Point(widen(jnp, value_of(prim, x, mask, by)), bias)
    # an entry of probability 0 has no gradient
    alive = functools.reduce(operator.and_, [(part != -jnp.inf) for part in at if part is not None])
    alive = active[:, None] & (alive | (reference.value == -jnp.inf))
    at = Point(*jax.tree.map(lambda part, fixed: jnp.where(alive, part, fixed), tuple(at), tuple(reference)))
    s = distance(prim, at, reference, by)
    p = jnp.where(alive, prim.exp(jnp, s) * inverse[:, None], 0)
    change = _change(prim, jnp.where(alive, widen(jnp, x), 0), at, s, reference, by, x_dot, by_dot, bias_dot)
    return alive, s, p, jnp.where(alive, change, 0)


def _change(
    prim: Primitives,
    x: Any,
    at: Point,
    s: Any,
    reference: Point,
    by: Numbers,
    x_dot: Any,
    by_dot: Numbers,
    bias_dot: Any,
) -> Any:
    """dz of the entries ``at``, less what inner, k and T' change in the reference: so it is the change of s, too."""
    change = jnp.zeros_like(s)
    warm: Any = 1 if by.temperature is None else by.temperature
    if x_dot is not None:
        factor = slope(prim, at.value, by)
        change = widen(jnp, x_dot) if factor is None else widen(jnp, x_dot) * factor
    if by_dot.sign is not None or by_dot.inner is not None:
        factor = slope(prim, at.value, by._replace(sign=None))
        if by_dot.sign is not None:  # the sign of a scale of 0 is the scale itself
            change = change + x * (by_dot.sign if factor is None else by_dot.sign * factor)
        if by_dot.inner is not None:
            own, fixed = (_of_inner(prim, value, by) for value in (at.value, reference.value))
            change = change + (own - fixed) * by_dot.inner
    if bias_dot is not None:
        change = change + bias_dot * ((1 if by.unit is None else by.unit) / warm)
    if by_dot.unit is not None and at.bias is not None and reference.bias is not None:
        change = change + (at.bias - reference.bias) / warm * by_dot.unit
    if by_dot.temperature is not None:
        change = change - s / warm * by_dot.temperature
    return change
