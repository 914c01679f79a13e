"""The autograd boundary: forward and backward over any strides, and the operator that a user's graph sees.

Outside torch.compile a torch.autograd.Function is the boundary; inside, one opaque operator of torch.library, since
Inductor drops the rounding of half-precision logits that it fuses with their producer.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils.dlpack import from_dlpack

from xlogprobs.accurate import Pair
from xlogprobs.contract import temperature_pair
from xlogprobs.summary import Summary
from xlogprobs_torch import compiled, derivatives, npu

import array_api_compat.torch as xp  # isort: skip

ALIGNMENT = 64  # bytes, torch's own


def logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None, in_place: bool = False
) -> torch.Tensor:
    """Log-probabilities of encoded int64 ids, of their shape; ``in_place`` the gradient overwrites the logits."""
    if torch.compiler.is_compiling():
        if temperature is not None and temperature.requires_grad:
            raise ValueError(
                "temperature requires a gradient, which logprobs computes outside torch.compile only; pass"
                " temperature.detach(), or scale the logits yourself"
            )
        result: torch.Tensor = _operator(logits, ids, temperature)[0]
        return result
    if temperature is not None and temperature.is_inference() and not torch.is_inference_mode_enabled():
        temperature = temperature.clone()  # autograd can't save it as it is
    if _is_forward_over_forward():
        return derivatives.logprobs(logits, ids, temperature)
    return _Boundary.apply(logits, ids, temperature, in_place)[0]  # type: ignore[no-untyped-call,no-any-return]


def check_in_place(logits: torch.Tensor) -> None:
    """ValueError where the gradient must not overwrite the logits, or where no one would notice that it did."""
    why = None
    if torch.compiler.is_compiling():
        why = "inside torch.compile, which plans memory itself"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        why = "under torch.func, which may need the logits again"
    elif not logits.requires_grad or not torch.is_grad_enabled():
        return
    elif logits.is_leaf or (logits._is_view() and logits._base is not None and logits._base.is_leaf):
        why = "as the gradient of a leaf, whose values are yours; logits must be the result of an operation"
    elif _overlaps(logits):
        why = f"into memory that several entries share: shape {tuple(logits.shape)}, strides {logits.stride()}"
    elif torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        why = "under saved_tensors_hooks (offloading, torch.utils.checkpoint), where autograd can't see the change"
    if why:
        raise ValueError(f"inplace_backward=True can't write {why}")


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two entries may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _forward(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, and the rows' maximum and rest (their summary) for the backward pass."""
    with _normalised(logits):
        rows, vocab, many = _sizes(logits, ids)
        wide = torch.float64 if compiled.has_float64(logits.device) else torch.float32
        out = logits.new_empty((rows, many), dtype=_arithmetic(logits))
        maximum = logits.new_empty((rows,), dtype=out.dtype)
        rest = logits.new_empty((rows,), dtype=wide)
        if many:
            flat_ids = _normal(ids).reshape(rows, many)
            pair = _pair(temperature, rows, logits)
            for x, where, _ in _pieces(logits, vocab):
                part = pair and (pair[0][where], pair[1][where])
                if _fused(x):
                    out[where] = npu.fused_logprobs(x, _plain(flat_ids[where]), part)
                    continue  # the operator gives no summary; the backward pass makes its own
                out[where], summary = compiled.forward(x, _plain(flat_ids[where]), part)
                maximum[where], rest[where] = summary.max, summary.rest
        positions = logits.shape[:-1]
        return out.view(ids.shape), maximum.view(positions), rest.view(positions)


def _backward(
    upstream: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor | None,
    maximum: torch.Tensor,
    rest: torch.Tensor,
    in_place: bool = False,
) -> torch.Tensor:
    with _normalised(logits):
        rows, vocab, many = _sizes(logits, ids)
        result = _normal(logits) if in_place else _fresh(logits)
        if not many:
            return result.zero_()
        flat_ids, flat_upstream = _normal(ids).reshape(rows, many), _normal(upstream).reshape(rows, many)
        summaries = Summary(_normal(maximum).reshape(rows), _normal(rest).reshape(rows), None)
        pair = _pair(temperature, rows, logits)
        for x, where, view in _pieces(logits, vocab, overlap=not in_place):
            part = pair and (pair[0][where], pair[1][where])
            summary = (
                compiled.summary(x, part) if _fused(x) else Summary(summaries.max[where], summaries.rest[where], None)
            )
            plain = _plain(flat_ids[where]), _plain(flat_upstream[where])
            if not in_place:
                compiled.backward(x, *plain, summary, part, result.view(rows, vocab)[where])
            elif x.data_ptr() == view.data_ptr():
                compiled.backward(x, *plain, summary, part, None)
            else:
                view.copy_(compiled.backward(x, *plain, summary, part, None))
        if in_place:
            torch.autograd.graph.increment_version(logits)
        return result


class _Boundary(torch.autograd.Function):
    """Of a call outside torch.compile. What it saves: its arguments, and two numbers a row."""

    @staticmethod
    def forward(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None, in_place: bool) -> Any:
        return _forward(logits, ids, temperature)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        logits, ids, temperature, ctx.in_place = inputs
        _, maximum, rest = output
        ctx.mark_non_differentiable(maximum, rest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, ids, temperature, maximum, rest)
        ctx.save_for_forward(logits, ids, temperature, maximum, rest)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor | None, *_: Any) -> Any:
        if upstream is None:
            return None, None, None, None
        logits, ids, temperature, maximum, rest = ctx.saved_tensors
        # differentiable again for create_graph=True and torch.func; plain operations also under vmap and with tangents
        if torch.is_grad_enabled() or _is_batched(upstream) or forward_ad._current_level >= 0:
            if ctx.in_place:
                raise RuntimeError(
                    "the gradient of logprobs(..., inplace_backward=True) can be taken once only: create_graph, vmap"
                    " and forward mode need logits that still hold their values"
                )
            again = derivatives.gradient(logits, ids, temperature, upstream)
            return again[0], None, again[1], None
        of_logits: torch.Tensor | None = None
        of_temperature = None
        if ctx.needs_input_grad[2]:  # first, while the logits hold their values
            of_temperature = derivatives.gradient(logits, ids, temperature, upstream)[1]
        if ctx.needs_input_grad[0]:
            of_logits = _backward(upstream, logits, ids, temperature, maximum, rest, ctx.in_place)
        return of_logits, None, of_temperature, None

    @staticmethod
    def jvp(
        ctx: Any, logits_tangent: torch.Tensor | None, _: None, temperature_tangent: torch.Tensor | None, *__: None
    ) -> Any:
        logits, ids, temperature, *_rest = ctx.saved_tensors
        change = derivatives.tangent(logits, ids, temperature, logits_tangent, temperature_tangent)
        return change, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        """The batch becomes the first axis of every argument."""
        size, (logits, ids, temperature, in_place) = info.batch_size, inputs
        logits, ids = (_first(tensor, dim, size) for tensor, dim in zip((logits, ids), in_dims, strict=False))
        if in_dims[2] is not None:
            temperature = temperature.movedim(in_dims[2], 0)
            if temperature.ndim == 1:  # one number for each call
                temperature = temperature.reshape(-1, *(1,) * (logits.ndim - 2)).expand(logits.shape[:-1])
        elif temperature is not None and temperature.ndim:
            temperature = temperature.expand(logits.shape[:-1])
        return _Boundary.apply(logits, ids, temperature, in_place), (0, 0, 0)  # type: ignore[no-untyped-call]


def _is_batched(tensor: torch.Tensor) -> bool:
    """Whether it stands for many, under torch.func.vmap or is_grads_batched=True (keys FuncTorchBatched, Batched)."""
    return "Batched" in str(torch._C._dispatch_keys(tensor))


def _is_forward_over_forward() -> bool:
    """Whether two or more forward-mode transforms of torch.func run: torch takes a second tangent of its
    autograd.Function for 0, in silence."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    return sum(level.key() == torch._C._functorch.TransformType.Jvp for level in levels) > 1


def _first(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


# Graphs that a user's compiler has cached on disk hold the shapes of these results: if they change, so must the name.
@torch.library.custom_op("xlogprobs::logprobs", mutates_args=())
def _operator(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(logits, ids, temperature)


@_operator.register_fake
def _(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.float64 if compiled.has_float64(logits.device) else torch.float32
    out, positions = logits.new_empty(ids.shape, dtype=_arithmetic(logits)), logits.shape[:-1]
    return out, logits.new_empty(positions, dtype=out.dtype), logits.new_empty(positions, dtype=wide)


@torch.library.custom_op("xlogprobs::logprobs_backward", mutates_args=())
def _backward_operator(
    upstream: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor | None,
    maximum: torch.Tensor,
    rest: torch.Tensor,
) -> torch.Tensor:
    return _backward(upstream, logits, ids, temperature, maximum, rest)


@_backward_operator.register_fake
def _(
    upstream: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor | None,
    maximum: torch.Tensor,
    rest: torch.Tensor,
) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])


def _operator_backward(ctx: Any, upstream: torch.Tensor, *_: Any) -> Any:
    return _backward_operator(upstream, *ctx.saved_tensors), None, None


_operator.register_autograd(_operator_backward, setup_context=_save)


class _normalised:
    """The modes that a graph would otherwise be guarded on: gradients, inference and autocast, all off."""

    def __init__(self, logits: torch.Tensor) -> None:
        device_type = logits.device.type
        self._modes: list[Any] = [torch.inference_mode(False), torch.no_grad()]
        if torch.is_autocast_enabled(device_type):  # torch.autocast itself does not know every device
            self._modes.append(torch.autocast(device_type, enabled=False))

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


def _fresh(logits: torch.Tensor) -> torch.Tensor:
    """Contiguous memory of the shape of the logits, not yet written.

    On a CPU it is NumPy's, which asks the kernel for huge pages: a first write to ordinary pages takes several times
    as long as the gradient itself.
    """
    if logits.device.type != "cpu":
        return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    memory = np.empty(logits.numel() * logits.itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + memory.size - ALIGNMENT]).view(logits.dtype).view(logits.shape)


def _fused(x: torch.Tensor) -> bool:
    """Whether these rows go through the fused operator of torch_npu: on an NPU, where nothing compiles."""
    return x.device.type == "npu" and not compiled.compiles(x.device) and npu.takes(x)


def _sizes(logits: torch.Tensor, ids: torch.Tensor) -> tuple[int, int, int]:
    """Rows, vocabulary, ids a row."""
    return logits.shape[:-1].numel(), logits.shape[-1], ids.shape[-1] if ids.ndim == logits.ndim else 1


def _arithmetic(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _normal(tensor: torch.Tensor) -> torch.Tensor:
    """A plain detached tensor on the same memory, also of a tensor made in inference mode."""
    return from_dlpack(tensor.detach()) if tensor.is_inference() else tensor.detach()


def _plain(piece: torch.Tensor) -> torch.Tensor:
    """(N, any), contiguous with the strides of its shape: a lone row is contiguous at any stride, and a graph not."""
    return piece.contiguous().as_strided(piece.shape, (piece.shape[1], 1))


def _pair(temperature: torch.Tensor | None, rows: int, logits: torch.Tensor) -> Pair | None:
    pair = None if temperature is None else temperature_pair(xp, _normal(temperature), rows, logits)
    return pair and (pair[0].to(logits.device), pair[1].to(logits.device))


def _pieces(
    logits: torch.Tensor, vocab: int, overlap: bool = True
) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
    """Contiguous pieces of the rows, where they stand among all rows, and the views that they are, or copy."""
    first = 0
    for view in _row_views(_normal(logits), vocab):
        for part in compiled.pieces(view.shape[0], vocab, view.device, overlap):
            yield _plain(view[part]), slice(first + part.start, first + part.stop), view[part]
        first += view.shape[0]


def _row_views(logits: torch.Tensor, vocab: int) -> Iterator[torch.Tensor]:
    """Views (N, V) that together are all rows in order: one where the strides allow it."""
    if logits.ndim <= 2 or logits.numel() == 0:
        yield logits.reshape(-1, vocab)
        return
    try:
        yield logits.view(-1, vocab)
    except RuntimeError:
        for part in logits:
            yield from _row_views(part, vocab)
