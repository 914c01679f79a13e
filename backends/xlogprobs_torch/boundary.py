"""The autograd boundary: forward and backward over any strides, and the operator that a user's graph sees.

Outside torch.compile a torch.autograd.Function is the boundary; inside, one opaque operator of torch.library, since
Inductor drops the rounding of half-precision logits that it fuses with their producer.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from xlogprobs.accurate import Pair
from xlogprobs.contract import temperature_pair
from xlogprobs.summary import Summary
from xlogprobs_torch import compiled, npu

import array_api_compat.torch as xp  # isort: skip


def logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """Log-probabilities of encoded int64 ids, of their shape."""
    if torch.compiler.is_compiling():
        result: torch.Tensor = _operator(logits, ids, temperature)[0]
        return result
    if torch.is_grad_enabled() and logits.requires_grad:
        return _Boundary.apply(logits, ids, temperature)[0]  # type: ignore[no-untyped-call,no-any-return]
    return _forward(logits, ids, temperature)[0]


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
            for x, where in _pieces(logits, vocab):
                part = pair and (pair[0][where], pair[1][where])
                if _fused(x):
                    out[where] = npu.fused_logprobs(x, _plain(flat_ids[where]), part)
                    continue  # the operator gives no summary; the backward pass makes its own
                out[where], summary = compiled.forward(x, _plain(flat_ids[where]), part)
                maximum[where], rest[where] = summary.max, summary.rest
        return out.view(ids.shape), maximum, rest


def _backward(
    upstream: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor | None,
    maximum: torch.Tensor,
    rest: torch.Tensor,
) -> torch.Tensor:
    with _normalised(logits):
        rows, vocab, many = _sizes(logits, ids)
        result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if not many:
            return result.zero_()
        flat, flat_ids = result.view(rows, vocab), _normal(ids).reshape(rows, many)
        flat_upstream = _normal(upstream).reshape(rows, many)
        pair = _pair(temperature, rows, logits)
        for x, where in _pieces(logits, vocab):
            part = pair and (pair[0][where], pair[1][where])
            summary = compiled.summary(x, part) if _fused(x) else Summary(maximum[where], rest[where], None)
            flat[where] = compiled.backward(x, _plain(flat_ids[where]), _plain(flat_upstream[where]), summary, part)
        return result


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | None) -> Any:
        out, maximum, rest = _forward(logits, ids, temperature)
        ctx.save_for_backward(logits, ids, temperature, maximum, rest)
        ctx.mark_non_differentiable(maximum, rest)
        return out, maximum, rest

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: torch.Tensor, *_: Any) -> Any:
        logits, ids, temperature, maximum, rest = ctx.saved_tensors
        return _backward(upstream, logits, ids, temperature, maximum, rest), None, None


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
    rows = logits.shape[:-1].numel()
    out = logits.new_empty(ids.shape, dtype=_arithmetic(logits))
    return out, logits.new_empty((rows,), dtype=out.dtype), logits.new_empty((rows,), dtype=wide)


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
    """Contiguous with the strides of its shape: a lone row may be contiguous at any stride, and a graph is not."""
    return piece.contiguous().view(-1).view(piece.shape)


def _pair(temperature: torch.Tensor | None, rows: int, logits: torch.Tensor) -> Pair | None:
    pair = None if temperature is None else temperature_pair(xp, _normal(temperature), rows, logits)
    return pair and (pair[0].to(logits.device), pair[1].to(logits.device))


def _pieces(logits: torch.Tensor, vocab: int) -> Iterator[tuple[torch.Tensor, slice]]:
    """Contiguous pieces of the rows and where they stand among all rows; only a piece is ever copied."""
    first = 0
    for view in _row_views(_normal(logits), vocab):
        for part in compiled.pieces(view.shape[0], vocab, view.device):
            yield _plain(view[part]), slice(first + part.start, first + part.stop)
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
