"""Ascend NPU: the compiler that torch_npu brings, and its fused cross-entropy where there is none.

Chosen by the device type "npu", which torch_npu gives its tensors. No NPU was at hand when this was written: the
choice and the calls are tested on a stand-in device. What torch_npu offers is stated in its own sources and manual:
`torch_npu._inductor` registers Inductor's code generation for npu when it is imported (it needs Triton for Ascend);
the other compiler, the graph engine behind backend="npu", is left out, since without it torch_npu registers a
stand-in of that name which compiles nothing.
"""

import functools
import importlib
import importlib.util
from typing import Any

import array_api_compat.torch as xp
import torch

from xlogprobs.accurate import Pair, difference, divide, two_sum
from xlogprobs.contract import IGNORED, INVALID, Want
from xlogprobs.transforms import PLAIN, Rows


@functools.cache
def compiler() -> str | None:
    """The torch.compile backend for npu, None where torch_npu brings none that works here."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    try:
        importlib.import_module("torch_npu._inductor")
        from torch._inductor.codegen.common import get_scheduling_for_device
    except Exception:  # of any kind: it patches Inductor and Triton as it is imported
        return None
    return "inductor" if get_scheduling_for_device("npu") is not None else None


@functools.cache
def fused_operator() -> Any | None:
    """torch_npu.npu_cross_entropy_loss, None where there is none."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    return getattr(importlib.import_module("torch_npu"), "npu_cross_entropy_loss", None)


def execution() -> str:
    """How calls on an NPU run."""
    if name := compiler():
        return f"torch.compile ({name})"
    return "torch_npu.npu_cross_entropy_loss" if fused_operator() is not None else "eager"


def takes(x: torch.Tensor, transforms: Rows, want: Want) -> bool:
    """Whether the fused operator is there for rows of this dtype, and gives what is wanted of them."""
    plain = transforms._replace(temperature=None) == PLAIN and want._replace(rank=False) == Want()
    return plain and fused_operator() is not None and x.dtype != torch.float64


def fused_logprobs(x: torch.Tensor, ids: torch.Tensor, temperature: Pair | None) -> torch.Tensor:
    """Log-probabilities (N, K) of encoded ids (N, K), from one call of the fused loss.

    The operator takes logits (N, V), 0 < N <= 200000, and int64 labels (N,) in [0, V), and returns (loss, log_prob,
    zloss, lse_for_zloss), the loss in the dtype of the logits. With the row's maximum taken off and its place as the
    label, the negated loss is -log1p(r): any number of ids is then finished from it, with a single rounding more.
    """
    operator: Any = fused_operator()
    wide = x.float()
    top, best = wide.max(-1, keepdim=True)
    shift = torch.where(top == -float("inf"), torch.zeros_like(top), top)
    scaled = wide - shift
    if temperature is not None:
        scaled = scaled / temperature[0][:, None]
    log_rest = -operator(scaled, best.reshape(-1), reduction="none")[0].reshape(-1, 1)
    high, low = difference(xp, wide.gather(1, ids.clamp_min(0)), shift)
    if temperature is not None:
        high, low = divide(xp, (high, low), (temperature[0][:, None], temperature[1][:, None]))
    rounded, error = two_sum(high, log_rest)
    result = torch.where(torch.isfinite(rounded), rounded + (error + low), rounded)
    # the manual states no result for a row without a distribution
    supported = torch.isfinite(top)
    result = torch.where(supported & (ids != INVALID), result, torch.full_like(result, float("nan")))
    return torch.where(ids == IGNORED, torch.zeros_like(result), result.clamp_max(0))
