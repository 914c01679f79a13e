"""The public functions: check the call, choose a backend, run."""

from typing import Any

from xlogprobs import contract
from xlogprobs.accurate import Array
from xlogprobs.backend import Backend, backend_for
from xlogprobs.contract import InvalidIds


def logprobs(
    logits: Array,
    ids: Any,
    *,
    temperature: Any = 1.0,
    ignore_index: int | None = None,
    invalid_ids: InvalidIds = "auto",
    inplace_backward: bool = False,
    _backend: Backend | None = None,
) -> Array:
    """Log-probability of each id under softmax(logits / temperature), in nats.

    ``logprob = x[id] / T - log(sum_v exp(x[v] / T))``, evaluated as ``(x[id] - m) / T - log1p(r)`` with m the largest
    logit and r the sum of ``exp((x - m) / T)`` over all entries but one that attains m.

    Parameters
    ----------
    logits
        Real floating array (..., V), V >= 1, of NumPy, torch, JAX or any array-API library; float16, bfloat16,
        float32 or float64, any strides. It is read once and never written to.
    ids
        Integers of any width, of shape logits.shape[:-1] (one per position) or (*logits.shape[:-1], K); of the same
        library and device as the logits, or NumPy, or (nested) Python ints.
    temperature
        A number, or one per position with shape logits.shape[:-1]. Half-precision logits are widened before the
        division.
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
        logits: 1e-12 * max(1, |value|)). A row that holds NaN or +inf, or no finite entry, gives NaN.

    Raises
    ------
    TypeError
        A dtype or a kind of object that the call does not take, or a mix of libraries.
    ValueError
        A shape, device, temperature or option that does not fit; logits that inplace_backward can't overwrite.
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

    References
    ----------
    The merge of block maxima and sums is the online softmax of Milakov and Gimelshein (arXiv:1805.02867).
    """
    backend = _backend or backend_for(logits)
    call = contract.check(backend, logits, ids, temperature, ignore_index, invalid_ids, inplace_backward)
    return backend.logprobs(call)
