"""What the matrix asks of a batch of logits: each quantity as the library computes it and as the oracle does."""

from typing import Any, NamedTuple

import numpy as np

from xlogprobs import api
from xlogprobs.accurate import Array
from xlogprobs.parity import oracle

TOP = 8
"""Ids that "top ids" asks for, or V where that is less."""

JOINT = ("logprob", "entropy", "lse")
GRADIENTS = {"gradient": ("logprob",), "joint gradient": JOINT}
"""The statistics whose gradients add up to that of the logits."""
INTEGERS = ("rank", "top ids")
STATISTICS = ("entropy", "lse", *INTEGERS)
QUANTITIES = ("logprob", *STATISTICS, "KL", *GRADIENTS)


class Inputs(NamedTuple):
    """What a quantity is computed from."""

    arrays: dict[str, Array]
    """logits, ids, bias, mask and ref_logits, by the names of the public functions' arguments; ids may be unused."""
    numbers: dict[str, float] = {}  # noqa: RUF012
    """temperature, scale and softcap."""
    upstream: tuple[Array, ...] = ()
    """Gradients of the statistics, where the quantity is a gradient."""


def computed(quantity: str, logits: Array, ids: Array, **options: Any) -> Any:
    """``quantity`` by the library; for a gradient, the statistics to differentiate: one or a tuple."""
    match quantity:
        case "logprob" | "gradient":
            return api.logprobs(logits, ids, **options)
        case "joint gradient":
            return api.token_stats(logits, ids, JOINT, **options)[: len(JOINT)]
        case "entropy" | "lse":
            return getattr(api.token_stats(logits, ids, JOINT, **options), quantity)  # one graph for both
        case "rank":
            return api.token_stats(logits, ids, "rank", **options).rank
        case "top ids":
            return api.token_stats(logits, want=(), top_k=min(TOP, logits.shape[-1]), **options).top_ids
        case "KL":
            return api.kl_divergence(logits, **options)
    raise ValueError(f"quantity is {quantity!r}; known are {', '.join(QUANTITIES)}")


def exact(quantity: str, inputs: Inputs) -> Array:
    """``quantity`` by the oracle."""
    call: dict[str, Any] = inputs.arrays | inputs.numbers
    of_logits = {name: value for name, value in call.items() if name != "ids"}
    match quantity:
        case "logprob":
            return oracle.reference(**call)
        case "entropy":
            return oracle.entropy(**of_logits)
        case "lse":
            return oracle.lse(**of_logits)
        case "rank":
            return oracle.rank(**call)
        case "top ids":
            return oracle.top_ids(count=min(TOP, call["logits"].shape[-1]), **of_logits)
        case "KL":
            return oracle.kl(**of_logits)
        case _:
            of = dict(zip(("upstream", "of_entropy", "of_lse"), inputs.upstream, strict=False))
            return oracle.gradient(**call, **of)


def bound(quantity: str, exact: Array, dtype: Any, inputs: Inputs) -> Array:
    """How far a result of ``dtype`` may be from the ``exact`` one."""
    if quantity not in GRADIENTS:
        return oracle.bound(exact, dtype, quantity)
    positions = exact.shape[:-1]
    largest = np.concatenate([np.abs(g).reshape(*positions, -1) for g in inputs.upstream], axis=-1)
    slope = abs(inputs.numbers.get("scale", 1.0)) / inputs.numbers.get("temperature", 1.0)
    return oracle.gradient_bound(exact, largest, slope, dtype)
