"""The public functions: check the call, choose a backend, run."""

from collections.abc import Collection
from typing import Any, NamedTuple

from xlogprobs import contract
from xlogprobs.accurate import Array
from xlogprobs.backend import Backend, Statistics, backend_for
from xlogprobs.contract import IGNORED, INVALID, Call, InvalidIds, Want


def logprobs(
    logits: Array,
    ids: Any,
    *,
    temperature: Any = 1.0,
    scale: Any = 1.0,
    softcap: Any = None,
    bias: Any = None,
    mask: Any = None,
    ignore_index: int | None = None,
    invalid_ids: InvalidIds = "auto",
    inplace_backward: bool = False,
    _backend: Backend | None = None,
) -> Array:
    """Log-probability of each id under softmax(z), in nats; z is logits / temperature, or with all transforms

    ``z = (softcap * tanh(scale * logits / softcap) + bias) / temperature``, -inf where the mask is False.

    ``logprob = z[id] - log(sum_v exp(z[v]))``, evaluated as ``s[id] - log1p(r)`` with s the differences of z from its
    largest entry and r the sum of ``exp(s)`` over all entries but one that attains it.

    Parameters
    ----------
    logits
        Real floating array (..., V), V >= 1, of NumPy, torch, JAX or any array-API library; float16, bfloat16,
        float32 or float64, any strides. It is read once and never written to.
    ids
        Integers of any width, of shape logits.shape[:-1] (one per position) or (*logits.shape[:-1], K); of the same
        library and device as the logits, or NumPy, or (nested) Python ints.
    temperature, scale
        A number, or one per position with shape logits.shape[:-1]; a temperature is finite and positive, a scale
        finite. Half-precision logits are widened before any transform.
    softcap
        A number or one per position, finite and positive, or None for no cap.
    bias
        Real numbers (V,), or of a shape that broadcasts to the logits. Added in the arithmetic type, so float64 biases
        of narrower logits are rounded to float32.
    mask
        Booleans (V,), or of a shape that broadcasts to the logits: True for the entries to keep. The others have
        probability 0, whatever they hold. A replayed top-k or top-p choice is such a mask.
    ignore_index
        An id that marks positions without a target (padding, prompts): these give 0.0 and a zero gradient, whatever
        their logits hold.
    invalid_ids
        What an id outside [0, V) gives: "raise" an IndexError that names the first, "nan", or "auto": raise where
        the values can be read without waiting for a device (NumPy, CPU arrays outside traced code), NaN elsewhere.
    inplace_backward
        torch only: the backward pass overwrites the logits with their gradient and so takes no memory. The logits
        must then be the result of an operation, not a leaf, and nothing else may need their values afterwards:
        autograd says so ("modified by an inplace operation") where it saved them for something. `.data`, aliases of
        other libraries and hooks that read the logits go unnoticed.

    Returns
    -------
    array
        The shape of ids; float32 for half and single precision logits, float64 for float64; same library and device
        as the logits; at most 0. Within max(1e-6, one float32 ulp) of the exact value on every backend (float64
        logits: 1e-12 * max(1, |value|)). A row that holds NaN or +inf among its kept entries, or no finite one,
        gives NaN. A logit of -inf has probability 0 under any transform.

    Raises
    ------
    TypeError
        A dtype or a kind of object that the call does not take, or a mix of libraries.
    ValueError
        A shape, device, number or option that does not fit; a scale, softcap or bias that requires a gradient; logits
        that inplace_backward can't overwrite.
    IndexError
        An id outside the vocabulary (see invalid_ids).

    Examples
    --------
    >>> import numpy as np
    >>> from xlogprobs import logprobs
    >>> logits = np.log(np.array([[0.1, 0.2, 0.7], [0.25, 0.25, 0.5]], dtype=np.float32))
    >>> np.exp(logprobs(logits, [2, 0])).round(4)
    array([0.7 , 0.25], dtype=float32)
    >>> logprobs(logits, [[0, 2], [1, 1]]).shape
    (2, 2)
    >>> logprobs(logits, [2, -100], ignore_index=-100)[1]
    np.float32(0.0)
    >>> np.exp(logprobs(logits, [1, 1], mask=[True, True, False])).round(4)
    array([0.6667, 0.5   ], dtype=float32)

    References
    ----------
    The merge of block maxima and sums is the online softmax of Milakov and Gimelshein (arXiv:1805.02867).
    """
    backend = _backend or backend_for(logits)
    transforms = {"temperature": temperature, "scale": scale, "softcap": softcap, "bias": bias, "mask": mask}
    call = contract.check(backend, logits, ids, transforms, ignore_index, invalid_ids, Want(), inplace_backward)
    return backend.statistics(call).logprob


def logprobs_and_entropy(
    logits: Array,
    ids: Any,
    *,
    temperature: Any = 1.0,
    scale: Any = 1.0,
    softcap: Any = None,
    bias: Any = None,
    mask: Any = None,
    ignore_index: int | None = None,
    invalid_ids: InvalidIds = "auto",
    inplace_backward: bool = False,
    _backend: Backend | None = None,
) -> tuple[Array, Array]:
    """`logprobs` and `entropy` of the same distribution, in one read of the logits.

    Arguments and errors are those of `logprobs`.

    Returns
    -------
    (logprob, entropy)
        logprob of the shape of ids, entropy of shape logits.shape[:-1]; both differentiable. A position whose ids are
        all ignored has entropy 0.0, and contributes nothing to the gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from xlogprobs import logprobs_and_entropy
    >>> logprob, entropy = logprobs_and_entropy(np.zeros((2, 4), np.float32), [0, 3])
    >>> np.exp(entropy).round(4)
    array([4., 4.], dtype=float32)
    """
    backend = _backend or backend_for(logits)
    transforms = {"temperature": temperature, "scale": scale, "softcap": softcap, "bias": bias, "mask": mask}
    want = Want(entropy=True)
    call = contract.check(backend, logits, ids, transforms, ignore_index, invalid_ids, want, inplace_backward)
    found = backend.statistics(call)
    return found.logprob, found.entropy


def entropy(
    logits: Array,
    *,
    temperature: Any = 1.0,
    scale: Any = 1.0,
    softcap: Any = None,
    bias: Any = None,
    mask: Any = None,
    _backend: Backend | None = None,
) -> Array:
    """Entropy of softmax(z) in nats, with z the transformed logits as for `logprobs`.

    ``H = -sum_v p_v log p_v = log1p(r) - t / (1 + r)``, with s the differences of z from its largest entry, r the sum
    of ``exp(s)`` over all entries but one that attains it, and t the sum of ``exp(s) * s``: neither term is negative,
    and entries of probability 0 add nothing.

    Parameters
    ----------
    logits, temperature, scale, softcap, bias, mask
        As for `logprobs`, with its errors.

    Returns
    -------
    array
        Shape logits.shape[:-1]; dtype, library and device as `logprobs`; from 0 to log V, within
        ``1e-6 * max(1, H)`` of the exact value (float64 logits: 1e-12). NaN for a row without a distribution.
        Differentiable.

    Examples
    --------
    >>> import numpy as np
    >>> from xlogprobs import entropy
    >>> bool(np.isclose(entropy(np.zeros(8, np.float32)), np.log(8)))
    True
    >>> entropy(np.array([0.0, -np.inf], np.float32))
    array(0., dtype=float32)
    """
    backend = _backend or backend_for(logits)
    transforms = {"temperature": temperature, "scale": scale, "softcap": softcap, "bias": bias, "mask": mask}
    call = contract.check(backend, logits, None, transforms, None, "auto", Want(logprob=False, entropy=True))
    return backend.statistics(call).entropy


class TokenStats(NamedTuple):
    """Statistics of tokens and of the distributions that they are drawn from; None for what was not asked for."""

    logprob: Array | None = None
    """Log-probability of each id, of the shape of the ids."""
    entropy: Array | None = None
    """Entropy of the distribution, logits.shape[:-1]."""
    lse: Array | None = None
    """log(sum_v exp(z_v)), logits.shape[:-1]."""
    rank: Array | None = None
    """1 + the number of entries above the id's own, integers of the shape of the ids; 0 for an id without a rank."""
    top_logprobs: Array | None = None
    """The k largest log-probabilities in descending order, (*logits.shape[:-1], k)."""
    top_ids: Array | None = None
    """Their ids, equal ones in ascending order; -1 where there is no order."""


WANTED = ("logprob", "entropy", "lse", "rank")


def token_stats(
    logits: Array,
    ids: Any = None,
    want: Collection[str] = WANTED,
    top_k: int = 0,
    *,
    temperature: Any = 1.0,
    scale: Any = 1.0,
    softcap: Any = None,
    bias: Any = None,
    mask: Any = None,
    ignore_index: int | None = None,
    invalid_ids: InvalidIds = "auto",
    inplace_backward: bool = False,
    _backend: Backend | None = None,
) -> TokenStats:
    """Every statistic of a token at once: log-probability, entropy, lse, rank and the k likeliest alternatives.

    Parameters
    ----------
    logits, temperature, scale, softcap, bias, mask, ignore_index, invalid_ids, inplace_backward
        As for `logprobs`. All statistics are of the same transformed logits z.
    ids
        As for `logprobs`; None where neither "logprob" nor "rank" is wanted.
    want
        Any of "logprob", "entropy", "lse" and "rank".
    top_k
        How many of the likeliest ids to return, from 0 (none) to V.

    Returns
    -------
    TokenStats
        logprob, entropy and lse come from one read of the logits and are differentiable, as top_logprobs are; rank
        comes from the same read where the CPU kernels run, else it and top_ids take one of their own. rank is 1 for
        the greedy choice, and ties share the best rank. A position whose ids are all ignored has 0.0 and rank 0
        (top_ids -1) everywhere; a row without a distribution NaN, rank 0 and top_ids -1, but a row of nothing but
        -inf has lse -inf.

    Raises
    ------
    TypeError, ValueError, IndexError
        As for `logprobs`; ValueError for an unknown name in ``want``, for a logprob or rank without ids, and for a
        top_k outside [0, V].

    Examples
    --------
    >>> import numpy as np
    >>> from xlogprobs import token_stats
    >>> logits = np.log(np.array([[0.1, 0.2, 0.7], [0.25, 0.25, 0.5]], dtype=np.float32))
    >>> stats = token_stats(logits, [1, 0], want=("logprob", "rank"), top_k=2)
    >>> stats.rank
    array([2, 2])
    >>> stats.top_ids
    array([[2, 1],
           [2, 0]])
    >>> np.exp(stats.top_logprobs).round(4)
    array([[0.7 , 0.2 ],
           [0.5 , 0.25]], dtype=float32)
    """
    backend = _backend or backend_for(logits)
    transforms = {"temperature": temperature, "scale": scale, "softcap": softcap, "bias": bias, "mask": mask}
    wanted = contract.check_want(want, ids, WANTED)
    flags = Want(*(name in wanted for name in WANTED))
    call = contract.check(backend, logits, ids, transforms, ignore_index, invalid_ids, flags, inplace_backward)
    contract.check_top_k(top_k, logits)
    if top_k == 0:
        found = backend.statistics(call) if any(flags[:3]) else Statistics()
        rank = backend.rank(call) if flags.rank and found.rank is None else found.rank
        return TokenStats(*found[:3], rank)
    rank = backend.rank(call) if flags.rank else None
    top_ids = backend.top_ids(call, top_k)
    xp = backend.namespace(logits)
    found = backend.statistics(_with_alternatives(xp, call, top_ids))
    logprob: Any = found.logprob
    own = xp.reshape(logprob[..., : call.many], call.shape_of_ids) if flags.logprob else None
    return TokenStats(own, found.entropy, found.lse, rank, logprob[..., call.many :], top_ids)


def _with_alternatives(xp: Any, call: Call, top_ids: Array) -> Call:
    """The call with the top ids beside its own, as more ids of the same positions."""
    ids = xp.where(top_ids < 0, INVALID, top_ids)
    if call.ids is not None:
        own = xp.astype(xp.reshape(call.ids, (*call.positions, call.many)), ids.dtype)
        ignored = xp.all(own == IGNORED, axis=-1)[..., None]
        ids = xp.concat([own, xp.where(ignored, IGNORED, ids)], axis=-1)
    return call._replace(ids=ids, want=call.want._replace(logprob=True, rank=False))


def kl_divergence(
    logits: Array,
    ref_logits: Array,
    *,
    temperature: Any = 1.0,
    scale: Any = 1.0,
    softcap: Any = None,
    bias: Any = None,
    mask: Any = None,
    _backend: Backend | None = None,
) -> Array:
    """KL(softmax(z) || softmax(z_ref)) of each position, in nats; swap the arguments for the reverse divergence.

    ``KL = sum_v p_v (log p_v - log q_v)`` with p and q the distributions of the logits and of ref_logits, both under
    the same transforms. An entry with p = 0 adds nothing, whatever q is; one with p > 0 and q = 0 makes it infinite.
    Each of the two is read once, and no array of their size is made.

    Parameters
    ----------
    logits, ref_logits
        Real floating arrays (..., V) of one shape, library and device, as for `logprobs`. Their dtypes may differ,
        but both or neither are float64.
    temperature, scale, softcap, bias, mask
        As for `logprobs`, applied to both.

    Returns
    -------
    array
        Shape logits.shape[:-1]; dtype, library and device as `logprobs`; at least 0, and 0 for two equal rows; within
        ``1e-6 * max(1, KL)`` of the exact value (float64: 1e-12). NaN where either row has no distribution.
        Differentiable with respect to both.

    Raises
    ------
    TypeError, ValueError
        As for `logprobs`; ValueError for shapes or devices that differ.

    Examples
    --------
    >>> import numpy as np
    >>> from xlogprobs import kl_divergence
    >>> p, q = (np.log(np.array(row, np.float32)) for row in ([0.5, 0.5], [0.25, 0.75]))
    >>> kl_divergence(p, q).round(6), kl_divergence(p, p)
    (np.float32(0.143841), array(0., dtype=float32))
    """
    backend = _backend or backend_for(logits)
    transforms = {"temperature": temperature, "scale": scale, "softcap": softcap, "bias": bias, "mask": mask}
    contract.check_pair_of_logits(backend, logits, ref_logits)
    call = contract.check(backend, logits, None, transforms, None, "auto", Want(logprob=False))
    return backend.kl_divergence(call, ref_logits)
