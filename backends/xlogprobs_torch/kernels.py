"""On a CPU where Numba is installed: the kernels of xlogprobs_cpu, on the memory of the tensors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from xlogprobs_cpu import core

from xlogprobs.contract import Transforms, Want
from xlogprobs.gradient import Upstream
from xlogprobs.summary import Summary
from xlogprobs.transforms import Rows

Maybe = torch.Tensor | None


def serves(logits: torch.Tensor) -> bool:
    return logits.device.type == "cpu" and core.serves() and not logits.is_neg()  # NumPy has no lazy negation


def forward(views: Iterator[torch.Tensor], ids: Maybe, transforms: Rows, want: Want) -> list[Maybe]:
    """Statistics and summaries (maximum, its bias, rest, moment) of rows, those of ``views`` (N, V) one after the
    other; None for what is not asked for."""
    parts: list[tuple[Any, ...]] = []
    for x, where in _placed(views):
        found, summary = core.statistics(
            shared(x), _part(ids, where), transforms.of(where), want, torch.get_num_threads()
        )
        parts.append((*found, summary.max, summary.bias, summary.rest, summary.moment))
    return [
        None if arrays[0] is None else torch.from_numpy(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
        for arrays in zip(*parts, strict=True)
    ]


def backward(
    views: Iterator[torch.Tensor],
    ids: Maybe,
    upstream: Upstream,
    summary: Summary,
    transforms: Rows,
    out: Maybe,
) -> None:
    """Writes the gradient into ``out`` (N, V); into the views themselves where it is None."""
    for x, where in _placed(views):
        result = x if out is None else out[where]
        own = Upstream(*(_part(each, where) for each in upstream))
        its = Summary(*(_part(each, where) for each in summary))
        threads = torch.get_num_threads()
        core.gradient(shared(x), _part(ids, where), own, its, transforms.of(where), shared(result), threads)


def rank(views: Iterator[torch.Tensor], ids: torch.Tensor, transforms: Rows, out: torch.Tensor) -> None:
    for x, where in _placed(views):
        found = core.rank(shared(x), _part(ids, where), transforms.of(where), torch.get_num_threads())
        out[where] = torch.from_numpy(found)


def rows_of(logits: torch.Tensor, transforms: Transforms) -> Rows:
    """The transforms of all rows, in NumPy."""
    given = Transforms(*(None if each is None else _numbers(each) for each in transforms))
    like = np.empty(0, np.float64 if logits.dtype == torch.float64 else np.float32)
    return core.rows_of(given, tuple(logits.shape), like)


def shared(tensor: torch.Tensor) -> Any:
    """A NumPy array on the memory of a tensor; bfloat16 as its bits."""
    tensor = tensor.detach()
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _numbers(tensor: Any) -> Any:
    """A bias, mask or number in NumPy, which has no bfloat16."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _part(tensor: Any, where: slice) -> Any:
    return None if tensor is None else tensor[where].numpy()


def _placed(views: Iterator[torch.Tensor]) -> Iterator[tuple[torch.Tensor, slice]]:
    """Where each view stands among all rows."""
    first = 0
    for view in views:
        yield view, slice(first, first + view.shape[0])
        first += view.shape[0]
