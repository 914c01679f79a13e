"""How the core's row functions run on a device: which sizes are compiled, and what stands in where nothing compiles.

Dynamo keeps at most eight graphs a code object and then falls back to eager in silence. So each (function, form of its
arguments, rows) has a code object of its own; the form is which arguments are there, their dtypes, and their shapes but
for the rows. Every input is normalised before it: two dimensions, contiguous, ids int64, detached, grad mode, autocast
and inference mode off. What else Dynamo would guard a graph on is global state
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
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch

from xlogprobs.backend import order_of_rows, points, rank_of_rows, statistics_of_rows
from xlogprobs.contract import Want
from xlogprobs.gradient import Upstream, gradient
from xlogprobs.summary import Layout, Primitives, Summary, cut, summarize
from xlogprobs.transforms import Rows, Shared, key, numbers
from xlogprobs_torch import npu
from xlogprobs_torch.exponential import exp_of_nonpositive

PIECE, LARGE, SMALL = 1 << 23, 256, 8  # entries and rows of the largest piece on a CPU, rows of the middle one
BLOCK = 64  # entries whose largest is found first, on the way to the largest of a row
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

Function = Callable[..., Any]

_lock = threading.RLock()
_compiled: dict[tuple[Any, ...], Function] = {}
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


def top(_: Any, order: torch.Tensor, count: int) -> torch.Tensor:
    """torch.topk leaves the order of equal entries open. What it finds the smallest of the largest to be, is exact: the
    columns are then those above it and the first that equal it, found as the largest of a number of each column."""
    vocab = order.shape[1]
    least = order.topk(count).values[:, -1:]
    backwards = torch.arange(vocab, 0, -1, dtype=torch.int32, device=order.device)
    columns = (
        torch.where(order > least, backwards + vocab, torch.where(order == least, backwards, 0)).topk(count).indices
    )
    values = order.gather(1, columns) + 0.0  # a sort by bits would put -0.0 after 0.0
    return columns.gather(1, values.sort(dim=1, descending=True, stable=True).indices)


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
        row_numbers=row_numbers,
        top=top,
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


def forward(x: torch.Tensor, ids: torch.Tensor | None, transforms: Rows, want: Want) -> tuple[Any, ...]:
    """Of contiguous rows (N, V): logprob, entropy, lse, and the summaries' max, bias, rest and moment."""
    result: tuple[Any, ...] = run(_forward, x, transforms, ids, want)
    return result


def backward(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    upstream: Upstream,
    summary: Summary,
    transforms: Rows,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Writes the gradient into contiguous ``out`` (N, V) of the dtype of the rows; into the rows where it is None."""
    if out is None:
        columns, at_columns = run(_backward_in_place, x, transforms, ids, upstream, summary)
        out = x
    else:
        columns, at_columns = run(_backward, x, transforms, ids, upstream, summary, out)
    if columns is None:
        return out
    # not scatter_, which copies all of a half-precision array to float32 and back
    return out.index_put_((row_numbers(xp, out)[:, None], columns), at_columns)


def rank(x: torch.Tensor, ids: torch.Tensor, transforms: Rows) -> torch.Tensor:
    """(N, K)"""
    result: torch.Tensor = run(_rank, x, transforms, ids)
    return result


def top_ids(x: torch.Tensor, ids: torch.Tensor | None, transforms: Rows, count: int) -> torch.Tensor:
    """(N, count), from the largest of each block.

    The first ``count`` entries, largest first and equal ones by column, lie in the first ``count`` blocks, ordered by
    their largest alike: any other block has ``count`` blocks before it, and in each an entry that comes before all of
    its own.
    """
    largest, ordered = run(_largest_of_blocks, x, transforms, ids)
    blocks = top(xp, largest, min(count, largest.shape[1])).sort(-1).values
    columns = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=x.device)).flatten(1)
    columns, vocab = columns[:, : x.shape[1]], x.shape[1]
    order = _order_at(x, columns.clamp_max(vocab - 1), transforms)
    order = torch.where(ordered[:, None] & (columns < vocab), order, -float("inf"))
    found: torch.Tensor = torch.where(ordered[:, None], columns.gather(1, top(xp, order, count)), -1)
    return found


def summary(x: torch.Tensor, transforms: Rows) -> Summary:
    """Summaries of rows (N, V), eagerly."""
    return summarize(x, widened(transforms, x), layout(x.shape[1], x.device), primitives(x.device, x.dtype))


def widened(transforms: Rows, x: torch.Tensor) -> Rows:
    """With the bias in the arithmetic type."""
    if transforms.bias is None:
        return transforms
    values, row = transforms.bias
    return transforms._replace(
        bias=Shared(values.to(torch.float64 if x.dtype == torch.float64 else torch.float32), row)
    )


def _forward(x: torch.Tensor, transforms: Rows, ids: torch.Tensor | None, want: Want) -> tuple[Any, ...]:
    prim = primitives(x.device, x.dtype)
    statistics, summary = statistics_of_rows(x, ids, widened(transforms, x), layout(x.shape[1], x.device), prim, want)
    return *statistics, summary.max, summary.bias, summary.rest, summary.moment


def _backward(
    x: torch.Tensor,
    transforms: Rows,
    ids: torch.Tensor | None,
    upstream: Upstream,
    summary: Summary,
    out: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    found = gradient(x, ids, upstream, summary, widened(transforms, x), primitives(x.device, x.dtype))
    out.copy_(found.row)
    return found.columns, None if found.at_columns is None else found.at_columns.to(x.dtype)


def _backward_in_place(
    x: torch.Tensor, transforms: Rows, ids: torch.Tensor | None, upstream: Upstream, summary: Summary
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return _backward(x, transforms, ids, upstream, summary, x)


def _rank(x: torch.Tensor, transforms: Rows, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = rank_of_rows(x, ids, widened(transforms, x), primitives(x.device, x.dtype))
    return found


def _largest_of_blocks(
    x: torch.Tensor, transforms: Rows, ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    order, ordered = order_of_rows(x, ids, widened(transforms, x), primitives(x.device, x.dtype))
    whole = x.shape[1] // BLOCK * BLOCK
    largest = [cut(xp, order, 0, whole // BLOCK, BLOCK).amax(-1)] if whole else []
    if whole < x.shape[1]:
        largest.append(order[:, whole:].amax(-1, keepdim=True))
    return torch.where(ordered[:, None], torch.cat(largest, 1), 0), ordered


def _order_at(x: torch.Tensor, columns: torch.Tensor, transforms: Rows) -> torch.Tensor:
    """What orders the entries at columns (N, any)."""
    prim, transforms = primitives(x.device, x.dtype), widened(transforms, x)
    at = points(x, columns, transforms, prim)
    order: torch.Tensor = key(
        prim, at._replace(value=widen(xp, at.value)), numbers(transforms).map(lambda number: number[:, None])
    )
    return order


def run(function: Function, x: torch.Tensor, transforms: Rows, *rest: Any) -> Any:
    device, arguments = x.device, (x, transforms, *rest)
    if not compiles(device):
        return function(*arguments)
    fixed = policy(device.type).fixed_rows
    _any_rows(arguments, fixed)
    key = (
        function.__name__, device.type, _form(arguments),
        x.shape[0] if fixed else None, torch.get_num_threads() if device.type == "cpu" else None,
    )  # fmt: skip
    graph = _compiled.get(key)
    if graph is not None:
        return graph(*arguments)
    with _lock:  # one thread compiles, the others of a first call together wait for it
        if key not in _compiled:
            graph = _compile(function, device.type, transforms)
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


def _form(argument: Any) -> Any:
    """What a graph depends on but the rows, which are the first axis."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape[1:]
    return tuple(map(_form, argument)) if isinstance(argument, tuple) else argument


def _compile(function: Function, device_type: str, transforms: Rows) -> Function:
    backend = (npu.compiler() if device_type == "npu" else None) or "inductor"
    options: dict[str, Any] = {}
    if hasattr(torch.compiler, "skip_guard_on_globals_unsafe"):
        options["guard_filter_fn"] = _without_global_guards
    # a product that a softcap or a bias adds to more than one sum is contracted in one graph and not in another, and an
    # entry's bits would change with the number of rows
    plain = transforms.inner is None and transforms.bias is None
    if device_type == "cpu" and backend == "inductor" and plain and _can_contract():
        options["cpp.enable_floating_point_contract_flag"] = "fast"  # a * b + c in one instruction, rounded once
    return torch.compile(_own_code(function), dynamic=False, fullgraph=True, backend=backend, options=options)


def _can_contract() -> bool:
    """Whether this torch takes a mode of contraction: earlier ones have a bool there."""
    from torch._inductor import config

    return isinstance(getattr(config.cpp, "enable_floating_point_contract_flag", None), str)


def _without_global_guards(guards: list[Any]) -> list[bool]:
    return [guard.guard_type not in GLOBAL_GUARDS for guard in guards]


def _own_code(function: Function) -> Function:
    """The same function with a code object that no other graph counts against."""
    code = function.__code__
    return types.FunctionType(code.replace(co_name=code.co_name), function.__globals__, code.co_name)


def _any_rows(argument: Any, fixed: bool) -> None:
    """Marks the dimensions that a graph should take any number of: those of rows unless they are fixed, and what rows
    share by a number of each."""
    if isinstance(argument, Shared):
        if argument.row is not None:
            torch._dynamo.decorators.mark_unbacked(argument.values, 0)
        if fixed or argument.values.ndim == 1:  # the first dimension is then fixed, or the vocabulary
            return
    if isinstance(argument, tuple):
        for each in argument:
            _any_rows(each, fixed)
    elif isinstance(argument, torch.Tensor) and not fixed:
        torch._dynamo.decorators.mark_unbacked(argument, 0)
