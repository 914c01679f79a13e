"""Ascend NPU: what torch_npu offers where its Inductor is missing.

Chosen by the device type "npu", which torch_npu gives its tensors. Source of the operator's signature: the Ascend
documentation of torch_npu.npu_cross_entropy_loss; it takes logits (N, C) and int64 labels (N,) and nothing of more
dimensions.
"""

import functools
import importlib
import importlib.util
from typing import Any

import torch

from xlogprobs.accurate import Pair
from xlogprobs.contract import IGNORED, INVALID
from xlogprobs.summary import Summary, summarize
from xlogprobs_torch import compiled


@functools.cache
def compiler() -> str | None:
    """The torch.compile backend of torch_npu, None where it brings none: its Inductor needs Triton for Ascend."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    has_inductor = importlib.util.find_spec("torch_npu._inductor") is not None
    return "inductor" if has_inductor and importlib.util.find_spec("triton") is not None else None


@functools.cache
def fused_operator() -> Any | None:
    if importlib.util.find_spec("torch_npu") is None:
        return None
    return getattr(importlib.import_module("torch_npu"), "npu_cross_entropy_loss", None)


def fused_only(x: torch.Tensor) -> bool:
    """Whether torch_npu's fused cross-entropy is the way to run these rows."""
    return x.device.type == "npu" and compiler() is None and fused_operator() is not None and x.dtype != torch.float64


def fused_logprobs(x: torch.Tensor, ids: torch.Tensor, temperature: Pair | None) -> torch.Tensor:
    """Log-probabilities (N, K) of encoded ids (N, K): minus the first output of the fused loss, one call an id."""
    operator: Any = fused_operator()
    scaled = x.float() if temperature is None else x.float() / temperature[0][:, None]
    safe = ids.clamp_min(0)
    columns = [-operator(scaled, safe[:, k].contiguous(), reduction="none")[0].reshape(-1) for k in range(ids.shape[1])]
    result = torch.stack(columns, dim=1)
    # the operator states no result for a row without a distribution: say NaN, as everywhere
    supported = torch.isfinite(scaled.amax(-1, keepdim=True))
    result = torch.where(supported, result, torch.full_like(result, float("nan")))
    result = torch.where(ids == INVALID, torch.full_like(result, float("nan")), result)
    return torch.where(ids == IGNORED, torch.zeros_like(result), result).clamp_max(0)


def summary(x: torch.Tensor, temperature: Pair | None) -> Summary:
    """The rows' summary for the backward pass, by the core eagerly."""
    return summarize(x, temperature, compiled.layout(x.shape[1], x.device), compiled.primitives(x.device))
