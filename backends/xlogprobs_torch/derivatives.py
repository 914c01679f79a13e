"""The derivatives as torch operations, which torch can differentiate again, run forward, or vectorise.

For double backward, forward mode and torch.func: they hold several arrays of the size of the logits.
"""

from typing import NamedTuple

import torch

from xlogprobs.contract import IGNORED, INVALID


class Rows(NamedTuple):
    """What both directions need of each position."""

    shifted: torch.Tensor
    """(..., V) x - m, 0 where not held."""
    p: torch.Tensor
    """(..., V) softmax(x / T)."""
    columns: torch.Tensor
    """(..., K) in [0, V)."""
    factor: torch.Tensor
    """(..., K) 1 for an id, 0 for an ignored one, NaN for an invalid one."""
    held: torch.Tensor
    """(..., V) not ignored, and not -inf in a row that has a finite entry."""


def logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """The log-probabilities themselves, to the accuracy of torch.log_softmax."""
    rows = _rows(logits, ids, temperature)
    z = rows.shifted if temperature is None else rows.shifted / _scale(temperature, rows.p)
    found = torch.where(rows.held, z, -float("inf")).log_softmax(-1).gather(-1, rows.columns)
    return torch.where(rows.factor == 0, 0, found * rows.factor).view(ids.shape)


def gradient(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None, upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``sum(upstream * logprobs)`` with respect to the logits and the temperature.

    With z = x / T: dz = (sum of g_k over the ids at v) - G p_v, dx = dz / T, dT = -sum_v dz_v (x_v - m) / T^2.
    """
    rows = _rows(logits, ids, temperature)
    scored = torch.where(rows.factor == 0, 0, _many(logits, upstream, ids) * rows.factor)
    dz = torch.zeros_like(rows.p).scatter_add(-1, rows.columns, scored) - scored.sum(-1, keepdim=True) * rows.p
    dz = torch.where(rows.held, dz, 0)
    if temperature is None:
        return dz.to(logits.dtype), None
    scale = _scale(temperature, rows.p)
    dt = -(dz / scale * (rows.shifted / scale)).sum(-1)
    dt = dt if temperature.ndim else dt.sum()
    return (dz / scale).to(logits.dtype), dt.to(temperature.dtype)


def tangent(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor | None,
    logits_tangent: torch.Tensor | None,
    temperature_tangent: torch.Tensor | None,
) -> torch.Tensor:
    """Change of the log-probabilities (shape of ids): dz at the id less the mean of dz under p."""
    rows = _rows(logits, ids, temperature)
    dz = torch.zeros_like(rows.p) if logits_tangent is None else logits_tangent.to(rows.p.dtype)
    if temperature is not None:
        scale = _scale(temperature, rows.p)
        if temperature_tangent is not None:
            dz = dz - rows.shifted / scale * _scale(temperature_tangent, rows.p)
        dz = dz / scale
    dz = torch.where(rows.held, dz, 0)
    change = dz.gather(-1, rows.columns) - (rows.p * dz).sum(-1, keepdim=True)
    return torch.where(rows.factor == 0, 0, change * rows.factor).view(ids.shape)


def _rows(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None) -> Rows:
    x = logits if logits.dtype == torch.float64 else logits.float()
    many = _many(logits, ids, ids)
    active = (many != IGNORED).any(-1, keepdim=True)
    top = torch.where(active, x, 0).detach().amax(-1, keepdim=True)
    held = active & ((x != -float("inf")) | (top == -float("inf")))
    shifted = torch.where(held, x - top, 0)
    z = shifted if temperature is None else shifted / _scale(temperature, x)
    p = torch.where(held, z, -float("inf")).softmax(-1)
    factor = torch.where(many == IGNORED, 0.0, torch.where(many == INVALID, float("nan"), 1.0)).to(x.dtype)
    return Rows(shifted, torch.where(active, p, 0), many.clamp_min(0), factor, held)


def _many(logits: torch.Tensor, tensor: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape of the ids with K last."""
    return tensor if ids.ndim == logits.ndim else tensor.unsqueeze(-1)


def _scale(temperature: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One number, or one per position, against (..., V)."""
    scale = temperature.to(like.dtype)
    return scale.unsqueeze(-1) if scale.ndim else scale.reshape((1,) * like.ndim)
