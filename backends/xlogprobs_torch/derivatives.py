"""The statistics as plain torch operations, which torch can differentiate, run forward, or vectorise, to any order.

For double backward, forward mode and torch.func: they hold several arrays of the size of the logits. Where an entry has
no share, it is replaced before anything that could be infinite or NaN is computed of it, so that its derivatives are 0.
"""

from collections.abc import Callable
from typing import Any

import torch

from xlogprobs.backend import Statistics
from xlogprobs.contract import IGNORED, INVALID, Transforms, Want
from xlogprobs.gradient import Upstream


def statistics(logits: torch.Tensor, ids: torch.Tensor | None, transforms: Transforms, want: Want) -> Statistics:
    """The statistics themselves, to the accuracy of torch.log_softmax."""
    many = None if ids is None else ids if ids.ndim == logits.ndim else ids.unsqueeze(-1)
    x = logits if logits.dtype == torch.float64 else logits.float()
    active = None if many is None else (many != IGNORED).any(-1, keepdim=True)
    z, base = transformed(x if active is None else torch.where(active, x, 0), transforms)
    log_p = z.log_softmax(-1)
    logprob = entropy = lse = None
    if want.logprob and ids is not None and many is not None:
        factor = torch.where(many == IGNORED, 0.0, torch.where(many == INVALID, float("nan"), 1.0)).to(x.dtype)
        found = log_p.gather(-1, many.clamp_min(0))
        logprob = torch.where(factor == 0, 0, found * factor).view(ids.shape)
    if want.entropy:
        gone = log_p == -float("inf")
        held = torch.where(gone, 0, log_p)
        entropy = -torch.where(gone, 0, held.exp() * held).sum(-1)
    if want.lse:
        lse = z.logsumexp(-1) + base
    if active is not None:
        entropy, lse = (None if each is None else torch.where(active[..., 0], each, 0) for each in (entropy, lse))
    return Statistics(logprob, entropy, lse)


def transformed(x: torch.Tensor, transforms: Transforms) -> tuple[torch.Tensor, torch.Tensor]:
    """z (..., V) less a number of each position (...), and that number."""
    given: tuple[Any, ...] = transforms[:3]
    temperature, scale, softcap = (None if number is None else _column(number, x) for number in given)
    kept = x != -float("inf")
    if transforms.mask is not None:
        kept = kept & transforms.mask
    top = torch.where(kept, x, -float("inf")).detach().amax(-1, keepdim=True)
    kept = kept | (top == -float("inf"))  # a row without a distribution has no derivative but NaN
    z, base = torch.where(kept, x, top), torch.zeros_like(top)
    if softcap is None:  # nothing is lost of a common offset
        z, base = z - top, top
    if scale is not None:
        z, base = z * scale, base * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if transforms.bias is not None:
        z = z + transforms.bias.to(x.dtype)
    if temperature is not None:
        z, base = z / temperature, base / temperature
    return torch.where(kept, z, -float("inf")), base[..., 0]


def gradient(
    logits: torch.Tensor, ids: torch.Tensor | None, transforms: Transforms, upstream: Upstream
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``sum(upstream * statistics)`` with respect to the logits and the temperature."""
    want = Want(*(each is not None for each in upstream))
    temperature: Any = transforms.temperature
    function, primals = _of(
        logits, ids, transforms, want, True, temperature is not None and temperature.is_floating_point()
    )
    _, pull, *_ = torch.func.vjp(function, *primals)
    found = pull(tuple(each for each in upstream if each is not None))
    return found[0], found[1] if len(found) > 1 else None


def tangent(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    transforms: Transforms,
    want: Want,
    logits_tangent: torch.Tensor | None,
    temperature_tangent: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Changes of the statistics, None where not wanted.

    The gradients are linear in their upstream, and the transpose of that map takes the tangents to the changes: torch
    enters no forward mode inside its forward mode.
    """
    tangents = [each for each in (logits_tangent, temperature_tangent) if each is not None]
    function, primals = _of(logits, ids, transforms, want, logits_tangent is not None, temperature_tangent is not None)
    outputs, pull, *_ = torch.func.vjp(function, *primals)
    _, push, *_ = torch.func.vjp(pull, tuple(torch.zeros_like(each) for each in outputs))
    changes = iter(push(tuple(tangents))[0])
    return tuple(next(changes) if wanted else None for wanted in want[:3])


def _of(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    transforms: Transforms,
    want: Want,
    by_logits: bool,
    by_temperature: bool,
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], list[Any]]:
    """The wanted statistics as a function of the logits, the temperature or both, and where it is taken."""

    def function(*primals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(primals)
        x = next(given) if by_logits else logits
        by = transforms._replace(temperature=next(given)) if by_temperature else transforms
        return tuple(each for each in statistics(x, ids, by, want) if each is not None)

    return function, [*([logits] if by_logits else []), *([transforms.temperature] if by_temperature else [])]


def _column(number: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One number, or one per position, against (..., V)."""
    number = number.to(like.dtype)
    return number.unsqueeze(-1) if number.ndim else number.reshape((1,) * like.ndim)
