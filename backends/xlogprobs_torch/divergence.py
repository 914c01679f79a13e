"""KL divergence of two sets of logits: the core's pass over both, compiled, behind an autograd boundary of its own."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from xlogprobs.contract import Transforms
from xlogprobs.divergence import kl_gradient, kl_of_rows
from xlogprobs.summary import Summary
from xlogprobs.transforms import Rows
from xlogprobs_torch import boundary, compiled, derivatives

Maybe = torch.Tensor | None
Numbers = tuple[Maybe, ...]  # of a summary: max, bias, rest


def kl_divergence(logits: torch.Tensor, ref_logits: torch.Tensor, transforms: Transforms) -> torch.Tensor:
    if torch.compiler.is_compiling():
        boundary.refuse_temperature_gradient(transforms.temperature)
        result: torch.Tensor = _operator(logits, ref_logits, *transforms)[0]
        return result
    given = Transforms(*(boundary.savable(tensor) for tensor in _tensors(transforms)))
    if boundary.is_forward_over_forward():
        return _plain_kl(logits, ref_logits, given)
    return _Boundary.apply(logits, ref_logits, *given)[0]  # type: ignore[no-untyped-call,no-any-return]


def _tensors(transforms: Transforms) -> tuple[Any, ...]:
    return transforms


def _outputs(logits: torch.Tensor, ref_logits: torch.Tensor, bias: Maybe) -> tuple[torch.Tensor, ...]:
    """Memory for the divergences, and for maximum, bias and rest of both summaries; without a bias, that is empty."""
    arithmetic = torch.float64 if logits.dtype == torch.float64 else torch.float32
    wide = torch.float64 if compiled.has_float64(logits.device) else torch.float32
    positions = logits.shape[:-1]
    one = [(positions, arithmetic), ((0,) if bias is None else positions, arithmetic), (positions, wide)]
    return tuple(logits.new_empty(shape, dtype=dtype) for shape, dtype in [(positions, arithmetic), *one, *one])


def _forward(logits: torch.Tensor, ref_logits: torch.Tensor, transforms: Transforms) -> tuple[torch.Tensor, ...]:
    with boundary.normalised(logits):
        outputs = _outputs(logits, ref_logits, transforms.bias)
        flat, whole = [each.view(-1) for each in outputs], boundary.rows_of(logits, transforms)
        for x, y, where in _pieces(logits, ref_logits):
            found = compiled.run(_kl, x, boundary.part_of(whole, where), y)
            for output, value in zip(flat, found, strict=True):
                if value is not None:
                    output[where] = value
        return outputs


def _backward(
    upstream: torch.Tensor, logits: torch.Tensor, ref_logits: torch.Tensor, transforms: Transforms, *saved: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    with boundary.normalised(logits):
        vocab, whole = logits.shape[-1], boundary.rows_of(logits, transforms)
        results = boundary.fresh(logits), boundary.fresh(ref_logits)
        of_rows = boundary.normal(upstream).reshape(-1)
        # what is empty but for an empty batch is not there
        numbers = [each.reshape(-1) if each.numel() else None for each in map(boundary.normal, saved)]
        for x, y, where in _pieces(logits, ref_logits):
            own = tuple(None if each is None else each[where] for each in numbers)
            out = tuple(result.view(-1, vocab)[where] for result in results)
            part = boundary.part_of(whole, where)
            compiled.run(_kl_backward, x, part, y, of_rows[where].contiguous(), own, out)
        return results


def _pieces(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
    """Contiguous pieces of the rows of both, and where they stand among all rows."""
    first, vocab = 0, x.shape[-1]
    for rows, other_rows in _row_views(boundary.normal(x), boundary.normal(y)):
        for part in compiled.pieces(rows.shape[0], vocab, rows.device, True):
            where = slice(first + part.start, first + part.stop)
            yield boundary.plain(rows[part]), boundary.plain(other_rows[part]), where
        first += rows.shape[0]


def _row_views(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views (N, V) that together are all rows in order: one pair where the strides of both allow it."""
    vocab = x.shape[-1]
    if x.ndim <= 2 or x.numel() == 0:
        yield x.reshape(-1, vocab), y.reshape(-1, vocab)
        return
    try:
        yield x.view(-1, vocab), y.view(-1, vocab)
    except RuntimeError:
        for part, other in zip(x, y, strict=True):
            yield from _row_views(part, other)


def _kl(x: torch.Tensor, transforms: Rows, y: torch.Tensor) -> tuple[Any, ...]:
    kl, summary, other = kl_of_rows(x, y, *_terms(x, transforms))
    return kl, summary.max, summary.bias, summary.rest, other.max, other.bias, other.rest


def _kl_backward(
    x: torch.Tensor,
    transforms: Rows,
    y: torch.Tensor,
    upstream: torch.Tensor,
    numbers: Numbers,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    kl, maximum, bias, rest, ref_maximum, ref_bias, ref_rest = numbers
    own, other = Summary(maximum, rest, None, bias), Summary(ref_maximum, ref_rest, None, ref_bias)
    wide, _, prim = _terms(x, transforms)
    found = kl_gradient(x, y, upstream, kl, own, other, wide, prim)
    for result, gradient in zip(out, found, strict=True):
        result.copy_(gradient)


def _terms(x: torch.Tensor, transforms: Rows) -> tuple[Rows, Any, Any]:
    layout, prim = compiled.layout(x.shape[1], x.device), compiled.primitives(x.device, x.dtype)
    return compiled.widened(transforms, x), layout, prim


class _Boundary(torch.autograd.Function):
    """Of a call outside torch.compile. What it saves: its arguments, and a few numbers a row."""

    @staticmethod
    def forward(logits: torch.Tensor, ref_logits: torch.Tensor, *transforms: Maybe) -> Any:
        return _forward(logits, ref_logits, Transforms(*transforms))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output)
        ctx.save_for_forward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, upstream: Maybe, *_: Any) -> Any:
        if upstream is None:
            return (None,) * 7
        logits, ref_logits, transforms, saved = _unpacked(ctx.saved_tensors)
        again = torch.is_grad_enabled() or boundary.is_batched(upstream) or forward_ad._current_level >= 0
        if again or ctx.needs_input_grad[2]:
            of_both = _gradient(logits, ref_logits, transforms, upstream)
        else:
            of_both = *_backward(upstream, logits, ref_logits, transforms, *saved), None
        return *of_both, *(None,) * 4

    @staticmethod
    def jvp(ctx: Any, tangent: Maybe, ref_tangent: Maybe, of_temperature: Maybe, *_: None) -> Any:
        logits, ref_logits, transforms, _saved = _unpacked(ctx.saved_tensors)
        change = _tangent(logits, ref_logits, transforms, tangent, ref_tangent, of_temperature)
        return change, *(None,) * 6

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        logits, ref_logits, given = boundary.batch_first(info.batch_size, in_dims, *inputs)
        found = _Boundary.apply(logits, ref_logits, *given)  # type: ignore[no-untyped-call]
        return found, tuple(0 if each.ndim > 1 or each.numel() else None for each in found)


def _unpacked(saved: Any) -> tuple[torch.Tensor, torch.Tensor, Transforms, tuple[torch.Tensor, ...]]:
    return saved[0], saved[1], Transforms(*saved[2:7]), saved[7:]


def _plain_kl(logits: torch.Tensor, ref_logits: torch.Tensor, transforms: Transforms) -> torch.Tensor:
    """The divergence as plain torch operations, which torch can differentiate, run forward, or vectorise."""
    log_p, log_q = (
        derivatives.transformed(x if x.dtype == torch.float64 else x.float(), transforms)[0].log_softmax(-1)
        for x in (logits, ref_logits)
    )
    gone = log_p == -float("inf")  # replaced before anything infinite is computed of it: its derivatives are 0
    held, other = torch.where(gone, 0, log_p), torch.where(gone, 0, log_q)
    return torch.where(gone, 0, held.exp() * (held - other)).sum(-1)


def _gradient(
    logits: torch.Tensor, ref_logits: torch.Tensor, transforms: Transforms, upstream: torch.Tensor
) -> tuple[Maybe, ...]:
    """Gradients with respect to both logits and the temperature, by plain operations."""
    temperature = _tensors(transforms)[0]
    by_temperature = temperature is not None and temperature.is_floating_point()
    function, primals = _of(logits, ref_logits, transforms, (True, True, by_temperature))
    found = torch.func.vjp(function, *primals)[1](upstream)
    return found[0], found[1], found[2] if len(found) > 2 else None


def _tangent(logits: torch.Tensor, ref_logits: torch.Tensor, transforms: Transforms, *tangents: Maybe) -> torch.Tensor:
    """Change of the divergence: the transpose of the gradient's map, as in `derivatives.tangent`."""
    function, primals = _of(logits, ref_logits, transforms, tuple(each is not None for each in tangents))
    output, pull, *_ = torch.func.vjp(function, *primals)
    _, push, *_ = torch.func.vjp(pull, torch.zeros_like(output))
    change: torch.Tensor = push(tuple(each for each in tangents if each is not None))[0]
    return change


def _of(
    logits: torch.Tensor, ref_logits: torch.Tensor, transforms: Transforms, by: tuple[bool, ...]
) -> tuple[Any, Any]:
    """The divergence as a function of those arguments that it is differentiated by, and where it is taken."""
    arguments: tuple[Any, ...] = logits, ref_logits, transforms.temperature

    def function(*primals: torch.Tensor) -> torch.Tensor:
        given = iter(primals)
        x, y, temperature = (next(given) if chosen else own for own, chosen in zip(arguments, by, strict=True))
        return _plain_kl(x, y, transforms._replace(temperature=temperature))

    return function, [argument for argument, chosen in zip(arguments, by, strict=True) if chosen]


# Graphs that a user's compiler has cached on disk hold the shapes of these results: if they change, so must the name.
@torch.library.custom_op("xlogprobs::kl_divergence", mutates_args=())
def _operator(
    logits: torch.Tensor,
    ref_logits: torch.Tensor,
    temperature: torch.Tensor | None,
    scale: torch.Tensor | None,
    softcap: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(logits, ref_logits, Transforms(temperature, scale, softcap, bias, mask))  # type: ignore[return-value]


@_operator.register_fake
def _(logits: torch.Tensor, ref_logits: torch.Tensor, *transforms: Maybe) -> tuple[torch.Tensor, ...]:
    return _outputs(logits, ref_logits, transforms[3])


@torch.library.custom_op("xlogprobs::kl_divergence_backward", mutates_args=())
def _backward_operator(
    upstream: torch.Tensor,
    logits: torch.Tensor,
    ref_logits: torch.Tensor,
    temperature: torch.Tensor | None,
    scale: torch.Tensor | None,
    softcap: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    saved: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(upstream, logits, ref_logits, Transforms(temperature, scale, softcap, bias, mask), *saved)


@_backward_operator.register_fake
def _(_: torch.Tensor, logits: torch.Tensor, ref_logits: torch.Tensor, *__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    of_logits, of_ref_logits = (
        torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (logits, ref_logits)
    )
    return of_logits, of_ref_logits


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _operator_backward(ctx: Any, upstream: torch.Tensor, *_: Any) -> Any:
    logits, ref_logits, transforms, saved = _unpacked(ctx.saved_tensors)
    return *_backward_operator(upstream, logits, ref_logits, *transforms, list(saved)), *(None,) * 5


_operator.register_autograd(_operator_backward, setup_context=_save)
