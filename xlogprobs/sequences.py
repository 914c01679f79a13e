"""Next-token alignment: the logits at position t - 1 score token t, within one sequence.

The targets are shifted to the logits, never the logits to the tokens: N integers move instead of N * V numbers. Two
tokens belong to one sequence where neither the attention mask nor the number of the packed sequence changes between
them.
"""

from collections.abc import Collection
from typing import Any

from xlogprobs import contract
from xlogprobs.accurate import Array
from xlogprobs.api import WANTED, TokenStats, logprobs, token_stats
from xlogprobs.backend import Backend, backend_for, numpy_backend
from xlogprobs.contract import IGNORED, INVALID, InvalidIds
from xlogprobs.summary import device_of


def next_token_logprobs(
    logits: Array,
    input_ids: Any,
    *,
    attention_mask: Any = None,
    cu_seqlens: Any = None,
    temperature: Any = 1.0,
    scale: Any = 1.0,
    softcap: Any = None,
    bias: Any = None,
    mask: Any = None,
    ignore_index: int | None = None,
    invalid_ids: InvalidIds = "auto",
    inplace_backward: bool = False,
) -> Array:
    """Log-probability of each token given the tokens before it, aligned to the tokens.

    ``result[..., t] = log softmax(logits[..., t - 1, :] / T)[input_ids[..., t]]``, and 0.0 for the first token of each
    sequence, which nothing predicts, and for padding. No token is scored by the logits of another sequence. The logits
    are read once, as they are: no shifted copy is made, and those that predict no token of their sequence get a
    gradient of exactly 0, whatever they hold.

    Parameters
    ----------
    logits
        (..., T, V), as a causal model gives them for input_ids; otherwise as for `logprobs`.
    input_ids
        Integers (..., T), of the kinds that `logprobs` takes: an array of the logits' library, NumPy or nested lists.
    attention_mask
        Integers or booleans (..., T): 0 is padding, left, right or between; a run of one other value is a sequence, so
        that a token behind padding is a first token, and 1 1 1 2 2 marks two packed sequences. Arrays as for input_ids.
    cu_seqlens
        Integers (S + 1,): the boundaries of S packed sequences, from 0 to T, not decreasing; equal ones are an empty
        sequence. For logits (T, V) or (1, T, V). With an attention_mask, both divide.
    temperature
        A number, or one per position with shape logits.shape[:-1]. It belongs to the logits, not to the token they
        predict: ``temperature[..., t]`` divides ``logits[..., t, :]``, from which token t + 1 was drawn. One
        temperature per sequence, repeated over its tokens, is the same either way.
    scale, softcap, bias, mask
        As for `logprobs`, and of the logits as the temperature is.
    ignore_index
        Tokens of this id give 0.0 and no gradient. They still are tokens: the next one has its prediction.
    invalid_ids
        As for `logprobs`: what an id outside [0, V) gives. Tokens without a prediction (first ones, padding) may hold
        any id.
    inplace_backward
        As for `logprobs`.

    Returns
    -------
    array
        The shape of input_ids; dtype, library, device and accuracy as those of `logprobs`. A sequence has the same bits
        alone, padded and packed.

    Raises
    ------
    TypeError
        A dtype or a kind of object that the call does not take, or a mix of libraries.
    ValueError
        A shape, device, temperature or option that does not fit; cu_seqlens that are no boundaries. Where these cannot
        be read (traced code, accelerators), every entry is NaN instead.
    IndexError
        An id outside the vocabulary, at its position in input_ids (see invalid_ids).

    Examples
    --------
    A padded batch, and the same two sequences packed:

    >>> import numpy as np
    >>> from xlogprobs import next_token_logprobs
    >>> logits = np.log(np.array([0.1, 0.2, 0.7], dtype=np.float32))
    >>> padded = next_token_logprobs(
    ...     np.broadcast_to(logits, (2, 3, 3)), [[0, 1, 2], [2, 1, 0]], attention_mask=[[1, 1, 1], [1, 1, 0]]
    ... )
    >>> np.exp(padded).round(4)
    array([[1. , 0.2, 0.7],
           [1. , 0.2, 1. ]], dtype=float32)
    >>> packed = next_token_logprobs(np.broadcast_to(logits, (5, 3)), [0, 1, 2, 2, 1], cu_seqlens=[0, 3, 5])
    >>> np.exp(packed).round(4)
    array([1. , 0.2, 0.7, 1. , 0.2], dtype=float32)
    """
    backend = backend_for(logits)
    targets = next_token_ids(backend, logits, input_ids, attention_mask, cu_seqlens, ignore_index, invalid_ids)
    out = logprobs(
        logits,
        targets,
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        bias=bias,
        mask=mask,
        ignore_index=IGNORED,
        invalid_ids="nan",
        inplace_backward=inplace_backward,
    )
    return backend.namespace(out).roll(out, 1, axis=-1)  # the last position has no target: its 0.0 comes first


def next_token_stats(
    logits: Array,
    input_ids: Any,
    want: Collection[str] = WANTED,
    top_k: int = 0,
    *,
    attention_mask: Any = None,
    cu_seqlens: Any = None,
    temperature: Any = 1.0,
    scale: Any = 1.0,
    softcap: Any = None,
    bias: Any = None,
    mask: Any = None,
    ignore_index: int | None = None,
    invalid_ids: InvalidIds = "auto",
    inplace_backward: bool = False,
) -> TokenStats:
    """`token_stats` of each token given the tokens before it, aligned to the tokens as by `next_token_logprobs`.

    Entry t of every field is of the distribution that ``logits[..., t - 1, :]`` give, from which token t was drawn:
    ``entropy[..., t]`` is how open that choice was. First tokens and padding have 0.0, rank 0 and top ids -1.

    Parameters
    ----------
    logits, input_ids, attention_mask, cu_seqlens, temperature, scale, softcap, bias, mask, ignore_index, invalid_ids
        As for `next_token_logprobs`.
    want, top_k, inplace_backward
        As for `token_stats`.

    Returns
    -------
    TokenStats
        Fields of the shape of input_ids, top_logprobs and top_ids with k more.

    Raises
    ------
    TypeError, ValueError, IndexError
        As for `next_token_logprobs` and `token_stats`.

    Examples
    --------
    >>> import numpy as np
    >>> from xlogprobs import next_token_stats
    >>> stats = next_token_stats(np.zeros((1, 3, 4), np.float32), [[1, 2, 3]], want=("logprob", "entropy"))
    >>> np.exp(stats.entropy).round(3)
    array([[1., 4., 4.]], dtype=float32)
    """
    backend = backend_for(logits)
    targets = next_token_ids(backend, logits, input_ids, attention_mask, cu_seqlens, ignore_index, invalid_ids)
    found = token_stats(
        logits,
        targets,
        want,
        top_k,
        temperature=temperature,
        scale=scale,
        softcap=softcap,
        bias=bias,
        mask=mask,
        ignore_index=IGNORED,
        invalid_ids="nan",
        inplace_backward=inplace_backward,
    )
    xp, tokens = backend.namespace(logits), len(logits.shape) - 2
    return TokenStats(*(None if field is None else xp.roll(field, 1, axis=tokens) for field in found))


def next_token_ids(
    backend: Backend,
    logits: Array,
    input_ids: Any,
    attention_mask: Any,
    cu_seqlens: Any,
    ignore_index: int | None,
    invalid_ids: InvalidIds,
) -> Array:
    """The id that each position of the logits predicts, encoded: IGNORED at the end of a sequence and in padding.

    Encoded ids are ids like any other to a call with ``ignore_index=IGNORED, invalid_ids="nan"``.
    """
    contract.check_logits(backend, logits)
    contract.check_options(ignore_index, invalid_ids)
    ids, source = contract.check_integers(backend, "input_ids", input_ids, logits)
    contract.check_tokens(logits, "input_ids", ids)
    count = ids.shape[-1]

    # a code for every token, from each argument in its own library: 0 where it leaves the token as it is
    codes = [(_encode(source.namespace(ids), ids, logits.shape[-1], ignore_index), source)]
    if attention_mask is not None:
        kinds = ("bool", *contract.INTEGERS)
        mask, owner = contract.check_integers(backend, "attention_mask", attention_mask, logits, dtypes=kinds)
        contract.check_tokens(logits, "attention_mask", mask)
        codes.append((_code_of_mask(owner.namespace(mask), mask), owner))
    if cu_seqlens is not None:
        boundaries, owner = contract.check_integers(backend, "cu_seqlens", cu_seqlens, logits)
        contract.check_packed(logits, boundaries)
        if owner.readable(boundaries):
            boundaries, owner = owner.to_numpy(boundaries), numpy_backend()
            contract.check_boundaries(boundaries, count)
        codes.append((_code_of_boundaries(owner.namespace(boundaries), boundaries, count), owner))

    # NumPy's operations on what is in memory start sooner than another library's
    together = numpy_backend() if all(owner.readable(code) for code, owner in codes) else backend
    tokens, *others = (_moved(code, owner, together, logits) for code, owner in codes)
    xp = together.namespace(tokens)
    for code in others:
        tokens = xp.where(code == 0, tokens, code)
    contract.refuse_invalid("input_ids", ids, source, tokens, together, logits, ignore_index, invalid_ids)
    return xp.roll(tokens, -1, axis=-1)


def _moved(code: Array, owner: Backend, to: Backend, like: Array) -> Array:
    if owner is to:
        return code
    return owner.to_numpy(code) if to is numpy_backend() else to.from_numpy(code, like)


def _encode(xp: Any, ids: Array, vocab: int, ignore_index: int | None) -> Array:
    code = contract.encode(xp, ids, vocab, ignore_index)
    first = xp.arange(code.shape[-1], device=device_of(code)) == 0
    return xp.where(first, IGNORED, code)


def _code_of_mask(xp: Any, mask: Array) -> Array:
    """IGNORED for padding and for the first token of each run of one value."""
    runs = contract.signed(xp, mask)
    return _code(xp, (runs != 0) & (runs == xp.roll(runs, 1, axis=-1)))


def _code_of_boundaries(xp: Any, boundaries: Array, count: int) -> Array:
    """IGNORED for the first token of each packed sequence; INVALID for every token if these are no boundaries."""
    boundaries = contract.signed(xp, boundaries)
    position = xp.arange(count, dtype=boundaries.dtype, device=device_of(boundaries))
    number = xp.searchsorted(boundaries, position, side="right")
    code = _code(xp, number == xp.roll(number, 1, axis=-1))
    valid = (boundaries[0] == 0) & (boundaries[-1] == count) & xp.all(boundaries[1:] >= boundaries[:-1])
    return xp.where(valid, code, INVALID)


def _code(xp: Any, continues: Array) -> Array:
    """0 where a token continues the sequence of the token before it, else IGNORED."""
    code = xp.zeros_like(continues, dtype=xp.int32)
    return xp.where(continues, code, code + IGNORED)
