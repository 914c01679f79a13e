"""How the core's row functions run on a device: which sizes are compiled, and what stands in where nothing compiles.

Dynamo keeps at most eight graphs a code object and then falls back to eager in silence. So each (function, V, dtype,
options, rows) has a code object of its own, and every input is normalised before it: two dimensions, contiguous, ids
int64, detached, grad mode, autocast and inference mode off. What else Dynamo would guard a graph on is global state
that the core does not read; the number of threads, which Inductor writes into its code, is part of the key.

On a CPU the row count of a graph is fixed: with a dynamic one, Inductor no longer fuses the maximum and the sum of a
block into one pass over the cache. Rows are worked off in pieces of three sizes, the last of which may overlap the one
before it: no more than three graphs, and mostly one, serve every batch. On an accelerator one graph takes any number
of rows. `policy` says which of the two a kind of device gets. Where nothing compiles, the core runs eagerly on pieces
of the rows.
"""

import threading
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch

from xlogprobs.accurate import Pair
from xlogprobs.backend import logprob_rows
from xlogprobs.gradient import gradient
from xlogprobs.summary import Layout, Primitives, Summary, sum_exp, summarize
from xlogprobs_torch import npu
from xlogprobs_torch.exponential import exp_of_nonpositive

PIECE, LARGE, SMALL = 1 << 23, 256, 8  # entries and rows of the largest piece on a CPU, rows of the middle one
MOST_ROWS = 1 << 16  # of a piece in eager code: a small vocabulary's piece ends there
GLOBAL_GUARDS = frozenset(
    {
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
        "DEFAULT_DEVICE",
        "DETERMINISTIC_ALGORITHMS",
        "GLOBAL_STATE",
        "GRAD_MODE",
        "TORCH_FUNCTION_STATE",
    }
)
NO_FLOAT64 = frozenset({"mps", "npu"})

Rows = Callable[..., Any]

_lock = threading.RLock()
_compiled: dict[tuple[Any, ...], Rows] = {}
_without_compiler: set[str] = set()


class Policy(NamedTuple):
    """How one kind of device is served."""

    fixed_rows: bool
    """A graph for each of a few row counts, not one for any."""
    width: int
    """Of a block."""


def policy(device_type: str) -> Policy:
    """Blocks of a CPU's first-level cache; on an accelerator those that Inductor holds in registers (its persistent
    reductions end at 1024), so that either way each logit comes from memory once."""
    return Policy(True, 496) if device_type == "cpu" else Policy(False, 1024)


def compiles(device: torch.device) -> bool:
    """Whether torch.compile is the way to run there: not on an NPU whose torch_npu brings no compiler, nor after a
    compiler failed."""
    if device.type in _without_compiler:
        return False
    return device.type != "npu" or npu.compiler() is not None


def has_float64(device: torch.device) -> bool:
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type not in NO_FLOAT64


def layout(vocab: int, device: torch.device) -> Layout:
    fixed, width = policy(device.type)
    if fixed and vocab % width == 0 and vocab > width:
        # Blocks that fill the row become one loop with the rows. Inductor then takes it for the loop over rows of the
        # merge, finds the two to differ after it has fused them, and gives up fusing maximum and sum as well.
        width += 16
    return Layout(vocab, width)


def widen(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def take(_: Any, x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return x.gather(1, columns)


def window(_: Any, x: torch.Tensor, row: torch.Tensor, start: torch.Tensor, width: int) -> torch.Tensor:
    """Through a view of all windows, so that Inductor sees contiguous columns and vectorises over them."""
    return x.unfold(1, width, 1)[row, start]


def row_numbers(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device)  # the array API's compares the count, which a graph does not know


def exp(_: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x)


def inlined_exp(_: Any, x: torch.Tensor) -> torch.Tensor:
    return exp_of_nonpositive(x)


def primitives(device: torch.device, dtype: torch.dtype) -> Primitives:
    """Compiled for a CPU, float32 takes the exponential that Inductor inlines.

    Half precision keeps the library's: Inductor does not vectorise a bitcast in its loops over 16-bit numbers.
    """
    inlined = torch.compiler.is_compiling() and device.type == "cpu" and dtype == torch.float32
    chosen = inlined_exp if inlined else exp
    return Primitives(
        xp,
        has_float64=has_float64(device),
        widen=widen,
        take=take,
        window=window,
        exp=chosen,
        sum_exp=partial(sum_exp, exp=chosen),
        row_numbers=row_numbers,
    )


def pieces(rows: int, vocab: int, device: torch.device, overlap: bool) -> Iterator[slice]:
    """Row slices in the sizes that are compiled; they may overlap, since a row's bits do not depend on its piece.

    Rows that are overwritten may not be met twice: without ``overlap``, the last few go one by one.
    """
    if rows == 0:
        return
    if not compiles(device):
        step = max(1, min(MOST_ROWS, PIECE // vocab))
        yield from (slice(first, min(first + step, rows)) for first in range(0, rows, step))
        return
    if not policy(device.type).fixed_rows:
        yield slice(0, rows)
        return
    largest = max(SMALL, min(LARGE, PIECE // vocab))
    whole = rows // largest * largest
    for first in range(0, whole, largest):
        yield slice(first, first + largest)
    size = SMALL if rows >= SMALL else 1
    for first in range(whole, rows, size):
        if first + size <= rows:
            yield slice(first, first + size)
        elif overlap:
            yield slice(rows - size, rows)
        else:
            yield from (slice(row, row + 1) for row in range(first, rows))


def forward(x: torch.Tensor, ids: torch.Tensor, temperature: Pair | None) -> tuple[torch.Tensor, Summary]:
    """Log-probabilities (N, K) and summaries of contiguous rows (N, V)."""
    result: tuple[torch.Tensor, Summary] = _run(_forward, x, ids, temperature)
    return result


def backward(
    x: torch.Tensor,
    ids: torch.Tensor,
    upstream: torch.Tensor,
    summary: Summary,
    temperature: Pair | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Writes the gradient into contiguous ``out`` (N, V) of the dtype of the rows; into the rows where it is None."""
    if out is None:
        columns, at_columns = _run(_backward_in_place, x, ids, upstream, summary, temperature)
    else:
        columns, at_columns = _run(_backward, x, ids, out, upstream, summary, temperature)
    out = x if out is None else out
    # not scatter_, which copies all of a half-precision array to float32 and back
    return out.index_put_((row_numbers(xp, out)[:, None], columns), at_columns)


def summary(x: torch.Tensor, temperature: Pair | None) -> Summary:
    """Summaries of rows (N, V), eagerly."""
    return summarize(x, temperature, layout(x.shape[1], x.device), primitives(x.device, x.dtype))


def _forward(x: torch.Tensor, ids: torch.Tensor, temperature: Pair | None) -> tuple[torch.Tensor, Summary]:
    return logprob_rows(x, ids, temperature, layout(x.shape[1], x.device), primitives(x.device, x.dtype))


def _backward(
    x: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    upstream: torch.Tensor,
    summary: Summary,
    temperature: Pair | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    found = gradient(x, ids, upstream, summary, temperature, primitives(x.device, x.dtype))
    out.copy_(found.row)
    return found.columns, found.at_columns.to(x.dtype)


def _backward_in_place(
    x: torch.Tensor, ids: torch.Tensor, upstream: torch.Tensor, summary: Summary, temperature: Pair | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(x, ids, x, upstream, summary, temperature)


def _run(function: Rows, x: torch.Tensor, ids: torch.Tensor, *rest: Any) -> Any:
    device = x.device
    if not compiles(device):
        return function(x, ids, *rest)
    fixed = policy(device.type).fixed_rows
    has_temperature = rest[-1] is not None
    key = (
        function.__name__, device.type, x.shape[1], x.dtype, ids.shape[1], has_temperature,
        x.shape[0] if fixed else None, torch.get_num_threads() if device.type == "cpu" else None,
    )  # fmt: skip
    arguments = _any_rows(fixed, x, ids, *rest)
    graph = _compiled.get(key)
    if graph is not None:
        return graph(*arguments)
    with _lock:  # one thread compiles, the others of a first call together wait for it
        if key not in _compiled:
            graph = _compile(function, device.type)
            try:
                with warnings.catch_warnings():  # a deprecation inside the compiler is no failure of it
                    warnings.simplefilter("ignore")
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


def _compile(function: Rows, device_type: str) -> Rows:
    backend = (npu.compiler() if device_type == "npu" else None) or "inductor"
    options: dict[str, Any] = {}
    if hasattr(torch.compiler, "skip_guard_on_globals_unsafe"):
        options["guard_filter_fn"] = _without_global_guards
    if device_type == "cpu" and backend == "inductor" and _can_contract():
        options["cpp.enable_floating_point_contract_flag"] = "fast"  # a * b + c in one instruction, rounded once
    return torch.compile(_own_code(function), dynamic=False, fullgraph=True, backend=backend, options=options)


def _can_contract() -> bool:
    """Whether this torch takes a mode of contraction: earlier ones have a bool there."""
    from torch._inductor import config

    return isinstance(getattr(config.cpp, "enable_floating_point_contract_flag", None), str)


def _without_global_guards(guards: list[Any]) -> list[bool]:
    return [guard.guard_type not in GLOBAL_GUARDS for guard in guards]


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
