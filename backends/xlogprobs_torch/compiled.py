"""How the core's row functions run on a device: which sizes are compiled, and what stands in where nothing compiles.

Dynamo keeps at most eight graphs a code object and then falls back to eager in silence. So each (function, V, dtype,
options, rows) has a code object of its own, and every input is normalised before it: two dimensions, contiguous, ids
int64, detached, grad mode, autocast and inference mode off.

On a CPU the row count of a graph is fixed: with a dynamic one, Inductor no longer fuses the maximum and the sum of a
block into one pass over the cache. Rows are worked off in pieces of three sizes, the last of which may overlap the one
before it: no more than three graphs, and mostly one, serve every batch. On an accelerator one graph takes any number
of rows.
"""

import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import array_api_compat.torch as xp
import torch

from xlogprobs.accurate import Pair
from xlogprobs.backend import logprob_rows
from xlogprobs.gradient import gradient
from xlogprobs.summary import Layout, Primitives, Summary

PIECE, LARGE, SMALL = 1 << 23, 256, 8  # entries and rows of the largest piece on a CPU, rows of the middle one
NO_FLOAT64 = frozenset({"mps", "npu"})

Rows = Callable[..., Any]

_lock = threading.RLock()
_compiled: dict[tuple[Any, ...], Rows] = {}
_without_compiler: set[str] = set()


def has_float64(device: torch.device) -> bool:
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in NO_FLOAT64


def layout(vocab: int, device: torch.device) -> Layout:
    """Blocks of a CPU's first-level cache; on an accelerator those that Inductor holds in registers (its persistent
    reductions end at 1024), so that either way each logit comes from memory once."""
    return Layout(vocab, 512 if device.type == "cpu" else 1024)


def widen(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def primitives(device: torch.device) -> Primitives:
    return Primitives(xp, has_float64=has_float64(device), widen=widen)


def pieces(rows: int, vocab: int, device: torch.device) -> Iterator[slice]:
    """Row slices in the sizes that are compiled; they may overlap, since a row's bits do not depend on its piece."""
    if rows == 0:
        return
    if device.type != "cpu":
        yield slice(0, rows)
        return
    largest = max(SMALL, min(LARGE, PIECE // vocab))
    whole = rows // largest * largest
    for first in range(0, whole, largest):
        yield slice(first, first + largest)
    size = SMALL if rows >= SMALL else 1
    for first in range(whole, rows, size):
        first = min(first, rows - size)
        yield slice(first, first + size)


def forward(x: torch.Tensor, ids: torch.Tensor, temperature: Pair | None) -> tuple[torch.Tensor, Summary]:
    """Log-probabilities (N, K) and summaries of contiguous rows (N, V)."""
    return _run(_forward, x, ids, temperature)


def backward(
    x: torch.Tensor, ids: torch.Tensor, upstream: torch.Tensor, summary: Summary, temperature: Pair | None
) -> torch.Tensor:
    """Gradient (N, V) in the dtype of the rows."""
    row, columns, at_columns = _run(_backward, x, ids, upstream, summary, temperature)
    return row.scatter_(1, columns, at_columns)


def _forward(x: torch.Tensor, ids: torch.Tensor, temperature: Pair | None) -> tuple[torch.Tensor, Summary]:
    return logprob_rows(x, ids, temperature, layout(x.shape[1], x.device), primitives(x.device))


def _backward(
    x: torch.Tensor, ids: torch.Tensor, upstream: torch.Tensor, summary: Summary, temperature: Pair | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = gradient(x, ids, upstream, summary, temperature, primitives(x.device))
    return found.row.to(x.dtype), found.columns, found.at_columns.to(x.dtype)


def _run(function: Rows, x: torch.Tensor, ids: torch.Tensor, *rest: Any) -> Any:
    device = x.device
    if device.type in _without_compiler:
        return function(x, ids, *rest)
    fixed = device.type == "cpu"
    has_temperature = rest[-1] is not None
    key = (
        function.__name__, device.type, x.shape[1], x.dtype, ids.shape[1], has_temperature, x.shape[0] if fixed else 0
    )  # fmt: skip
    arguments = _any_rows(fixed, x, ids, *rest)
    graph = _compiled.get(key)
    if graph is not None:
        return graph(*arguments)
    with _lock:  # one thread compiles, the others of a first call together wait for it
        if key not in _compiled:
            graph = torch.compile(_own_code(function), dynamic=False if fixed else None, fullgraph=True)
            try:
                result = graph(*arguments)
            except Exception as error:
                result = function(*arguments)  # an error of the call itself, and not of its compilation, shows here
                _without_compiler.add(device.type)
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                warnings.warn(f"xlogprobs runs eagerly on {device.type}: {reason}", RuntimeWarning, stacklevel=2)
                return result
            _compiled[key] = graph
            return result
    return _compiled[key](*arguments)


def _own_code(function: Rows) -> Rows:
    """The same function with a code object that no other graph counts against."""
    code = function.__code__
    return types.FunctionType(code.replace(co_name=code.co_name), function.__globals__, code.co_name)


def _any_rows(fixed: bool, *arguments: Any) -> tuple[Any, ...]:
    """Marks the row dimension, where a graph should take any number of rows."""
    if not fixed:
        for argument in arguments:
            tensors = [argument] if isinstance(argument, torch.Tensor) else [*(argument or ())]
            for tensor in tensors:
                if tensor is not None:
                    torch._dynamo.decorators.mark_unbacked(tensor, 0)
    return arguments
