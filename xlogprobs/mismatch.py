"""How far two sets of log-probabilities of the same tokens are apart: trainer and sampler, or two backends."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from xlogprobs import contract
from xlogprobs.accurate import Array
from xlogprobs.backend import backend_for
from xlogprobs.summary import device_of

TERMS = 20  # of the series of k3: the next one is below 1e-17 of the sum where |d| < 1


class Mismatch(NamedTuple):
    """Statistics of `mismatch`, each without dimensions. With d = logprobs - ref_logprobs and w = e^d:"""

    max_abs: Array
    """max |d|"""
    mean_abs: Array
    """mean |d|"""
    k1: Array
    """mean of -d"""
    k2: Array
    """mean of d^2 / 2"""
    k3: Array
    """mean of (w - 1) - d"""
    ratio: Array
    """mean of w"""
    clipped: Array | None
    """Share of positions with w outside [1 - clip, 1 + clip]; None without clip."""
    ess: Array
    """Effective sample size (sum w)^2 / sum w^2, from 1 to the number of positions."""
    ess_share: Array
    """ess divided by the number of positions."""


def mismatch(logprobs: Array, ref_logprobs: Array, mask: Any = None, clip: float | None = None) -> Mismatch:
    """Distance of two sets of log-probabilities of the same tokens, over the positions that the mask keeps.

    The tokens were drawn from the distribution of ``ref_logprobs`` (the sampler); ``logprobs`` are those of the
    trainer. With ``d = logprobs - ref_logprobs`` and the importance ratio ``w = e^d``, the means

        k1 = mean(-d)        k2 = mean(d^2 / 2)        k3 = mean(w - 1 - d)

    all estimate KL(ref || logprobs) = E_ref[ref_logprobs - logprobs]: k1 and k3 without bias, k2 and k3 never negative,
    k3 with less variance than k1. For KL(policy || reference model) over tokens of the policy, pass the reference
    model's log-probabilities first.

    Parameters
    ----------
    logprobs
        Real floating array of any shape, of NumPy, torch, JAX or any array-API library.
    ref_logprobs
        An array of the same library, shape and device; its dtype may be another.
    mask
        Booleans or integers of the same shape; positions with False or 0 are left out, whatever they hold, and get a
        gradient of 0. An array of the same library, NumPy or nested lists. None keeps all.
    clip
        A number: also report the share of positions whose ratio w lies outside [1 - clip, 1 + clip].

    Returns
    -------
    Mismatch
        A named tuple (a pytree in JAX) of results without dimensions, of the library of logprobs: float64 if either
        input is, else float32, from the first operation on. All are differentiable, with respect to both inputs.
        Equal infinities are a difference of 0 (both say that the token is impossible). A token impossible to one side
        alone makes max_abs, mean_abs, k2 and k3 inf, and k1 and ratio whatever their formulae say; where no ratio is
        positive, or one is infinite, ess is NaN. NaN at a kept position gives NaN. No kept position: every result is
        NaN, with gradients of 0.

    Raises
    ------
    TypeError
        A dtype or a kind of object that the call does not take, or a mix of libraries.
    ValueError
        Shapes or devices that differ, or a clip that is negative or not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from xlogprobs import mismatch
    >>> trainer = np.array([-1.0, -0.5, -2.0, np.nan], dtype=np.float32)
    >>> sampler = np.array([-1.0, -0.75, -1.5, -1.0], dtype=np.float32)
    >>> found = mismatch(trainer, sampler, mask=[1, 1, 1, 0], clip=0.3)
    >>> print(*(f"{name} {value:.4f}" for name, value in found._asdict().items()), sep="\\n")
    max_abs 0.5000
    mean_abs 0.2500
    k1 0.0833
    k2 0.0521
    k3 0.0469
    ratio 0.9635
    clipped 0.3333
    ess 2.7698
    ess_share 0.9233

    References
    ----------
    k1, k2, k3: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. Effective
    sample size: L. Kish, "Survey Sampling" (1965), for importance weights A. Kong, "A note on importance sampling using
    standardized weights" (1992).
    """
    contract.check_mismatch(logprobs, ref_logprobs, clip)
    backend = backend_for(logprobs)
    xp = backend.namespace(logprobs)
    if mask is not None:
        kinds = ("bool", *contract.INTEGERS)
        mask, owner = contract.check_integers(backend, "mask", mask, logprobs, "logprobs", kinds)
        kept = contract.signed(owner.namespace(mask), mask) != 0
        mask = kept if owner is backend else backend.from_numpy(kept, logprobs)
    contract.check_pair(backend, logprobs, ref_logprobs, mask)
    dtype = xp.float64 if xp.float64 in (logprobs.dtype, ref_logprobs.dtype) else xp.float32
    # infinities and NaNs have defined results here, and traced code no error state
    with nullcontext() if backend.traced(logprobs) else np.errstate(all="ignore"):
        return _statistics(
            xp,
            xp.reshape(xp.astype(logprobs, dtype), (-1,)),
            xp.reshape(xp.astype(ref_logprobs, dtype), (-1,)),
            xp.reshape(xp.ones_like(logprobs, dtype=xp.bool) if mask is None else mask, (-1,)),
            clip,
        )


def _statistics(xp: Any, logprobs: Array, ref_logprobs: Array, mask: Array, clip: float | None) -> Mismatch:
    """`mismatch` of three arrays (N,)."""
    zero = xp.zeros_like(logprobs)
    # before anything is computed: neither a value nor, by 0 * inf, a gradient of what is left out comes through
    counted = mask & ~(xp.isinf(logprobs) & (logprobs == ref_logprobs))
    d = xp.where(counted, logprobs, zero) - xp.where(counted, ref_logprobs, zero)
    count = xp.astype(xp.sum(xp.astype(mask, xp.int32)), d.dtype)
    excess = xp.expm1(d)  # w - 1

    def total(values: Array) -> Array:
        return xp.sum(xp.where(mask, values, zero))

    held = xp.where(mask, d, -float("inf"))
    weight = xp.exp(held - _largest(xp, held))  # w but for a factor, within the range of the type
    ess = xp.sum(weight) ** 2 / xp.sum(weight**2)
    clipped = None
    if clip is not None:
        outside = xp.astype(xp.abs(excess) > float(clip), d.dtype)
        clipped = total(xp.where(xp.isnan(d), d, outside)) / count
    return Mismatch(
        max_abs=_largest(xp, xp.abs(d)) * (count / count),  # 0 / 0 where no position is kept
        mean_abs=total(xp.abs(d)) / count,
        k1=total(-d) / count,
        k2=total(d * d / 2) / count,
        k3=total(_k3(xp, d, excess)) / count,
        ratio=total(xp.exp(d)) / count,
        clipped=clipped,
        ess=ess,
        ess_share=ess / count,
    )


def _k3(xp: Any, d: Array, excess: Array) -> Array:
    """``e^d - 1 - d``; by its series ``d^2 / 2 (1 + d / 3 (1 + d / 4 (...)))`` where the difference would cancel."""
    small = xp.abs(d) < 1
    near = xp.where(small, d, 0)
    series = xp.ones_like(d)
    for n in range(TERMS, 2, -1):
        series = 1 + near / n * series
    infinite = excess == float("inf")  # less d, which may be infinite too
    return xp.where(small, near * near / 2 * series, xp.where(infinite, excess, excess - d))


def _largest(xp: Any, values: Array) -> Array:
    """The maximum of (N,); -inf where N is 0, for which a library has none."""
    return xp.max(xp.concat([values, xp.full((1,), -float("inf"), dtype=values.dtype, device=device_of(values))]))
