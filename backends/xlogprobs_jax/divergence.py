"""KL divergence of rows with its derivative, as `xlogprobs_jax.derivatives` has it of the statistics.

With c = log1p(r) - log1p(r') + KL, s and p of the logits, s' and q of the reference,

    d KL = sum p (s - s' - c) dz + sum (q - p) dz'

c, 1 / (1 + r) and 1 / (1 + r') are results of the same function, so that this can be differentiated again.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from xlogprobs.divergence import kl_of_rows
from xlogprobs.gradient import inverse
from xlogprobs.summary import widen
from xlogprobs.transforms import Numbers, Point, Rows, numbers
from xlogprobs_jax.derivatives import of_entries
from xlogprobs_jax.lowering import layout, primitives


class Found(NamedTuple):
    """The divergence, and what its derivatives are made of, (N,) each."""

    kl: Any
    excess: Any
    """log1p(r) - log1p(r')"""
    inverse: Any
    ref_inverse: Any
    top: Point
    """The largest entry; its tangent is 0, since differences from any fixed entry serve as well."""
    ref_top: Point


@jax.custom_jvp
def rows_with_derivative(x: Any, y: Any, transforms: Rows) -> Found:
    kl, own, other = kl_of_rows(x, y, transforms, layout(x.shape[1]), primitives(x))
    # XLA compiles the two sides to different code, which would keep a row at 1e-8 from itself; NaN stays NaN
    kl = jnp.where(jnp.all(widen(jnp, x) == widen(jnp, y), axis=-1), kl * 0, kl)
    excess = (jnp.log1p(own.rest) - jnp.log1p(other.rest)).astype(kl.dtype)
    return Found(kl, excess, inverse(jnp, own), inverse(jnp, other), own.point, other.point)


@partial(rows_with_derivative.defjvp, symbolic_zeros=True)
def _tangent_of_rows(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Found, Found]:
    x, y, transforms = primals
    found = rows_with_derivative(x, y, transforms)
    x_dot, y_dot, transforms_dot = jax.tree.map(lambda dot: None if isinstance(dot, SymbolicZero) else dot, tangents)
    bias_dot = None if transforms.bias is None else transforms_dot.bias.values
    mean, ref_mean, crossed, moved = _sums(x, y, transforms, found, x_dot, y_dot, numbers(transforms_dot), bias_dot)
    still = jax.tree.map(jnp.zeros_like, found)
    change = still._replace(
        kl=crossed - (found.excess + found.kl) * mean + ref_mean - moved,
        excess=mean - ref_mean,
        inverse=-found.inverse * mean,
        ref_inverse=-found.ref_inverse * ref_mean,
    )
    return found, change


@jax.checkpoint
def _sums(
    x: Any, y: Any, transforms: Rows, found: Found, x_dot: Any, y_dot: Any, by_dot: Numbers, bias_dot: Any
) -> tuple[Any, Any, Any, Any]:
    """Sums of p dz, q dz', p (s - s') dz and p dz'."""
    active = jnp.ones(len(x), bool)
    _, s, p, dz = of_entries(x, transforms, active, found.inverse, found.top, x_dot, by_dot, bias_dot)
    _, ref_s, q, ref_dz = of_entries(y, transforms, active, found.ref_inverse, found.ref_top, y_dot, by_dot, bias_dot)
    terms = p * dz, q * ref_dz, p * (s - ref_s) * dz, p * ref_dz
    mean, ref_mean, crossed, moved = (jnp.sum(term, axis=-1) for term in terms)
    return mean, ref_mean, crossed, moved
