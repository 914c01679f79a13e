"""The autograd boundary: forward and backward over any strides, and the operators that a user's graph sees.

Outside torch.compile a torch.autograd.Function is the boundary; inside, one opaque operator of torch.library, since
Inductor drops the rounding of half-precision logits that it fuses with their producer. Either takes the transforms as
the user gave them, as tensors; the rows' numbers are made inside.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.utils.dlpack import from_dlpack

from xlogprobs.backend import Statistics
from xlogprobs.contract import Transforms, Want, is_valid
from xlogprobs.gradient import Upstream
from xlogprobs.summary import Summary
from xlogprobs.transforms import Rows, Shared, number_pair, over_vocabulary, rows_of_call
from xlogprobs_torch import compiled, derivatives, kernels, npu

import array_api_compat.torch as xp  # isort: skip

ALIGNMENT = 64  # bytes, torch's own

T = torch.Tensor
Maybe = torch.Tensor | None


def statistics(
    logits: torch.Tensor, ids: Maybe, transforms: Transforms, want: Want, in_place: bool = False
) -> Statistics:
    """What is wanted of logits and encoded int64 ids; ``in_place`` the gradient overwrites the logits."""
    if torch.compiler.is_compiling():
        refuse_temperature_gradient(transforms.temperature)
        found = _operator(logits, ids, *transforms, *want)
    else:
        ids, *given = (savable(tensor) for tensor in (ids, *transforms))
        transforms = Transforms(*given)
        if is_forward_over_forward():
            return derivatives.statistics(logits, ids, transforms, want)
        if _is_differentiated(logits, transforms.temperature):
            found = _Boundary.apply(logits, ids, *transforms, want, in_place)  # type: ignore[no-untyped-call]
        else:
            found = _forward(logits, ids, transforms, want)
    return Statistics(*(each if wanted else None for each, wanted in zip(found[:4], want, strict=True)))


def _is_differentiated(*tensors: Any) -> bool:
    """Whether anything follows what happens to one of them."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def refuse_temperature_gradient(temperature: Any) -> None:
    """Inside torch.compile."""
    if temperature is not None and temperature.requires_grad:
        raise ValueError(
            "temperature requires a gradient, which is computed outside torch.compile only; pass"
            " temperature.detach(), or scale the logits yourself"
        )


def savable(tensor: Any) -> Any:
    """Autograd can't save what was made in inference mode."""
    if tensor is not None and tensor.is_inference() and not torch.is_inference_mode_enabled():
        return tensor.clone()
    return tensor


def rank(logits: torch.Tensor, ids: torch.Tensor, transforms: Transforms) -> torch.Tensor:
    result: torch.Tensor = _rank_operator(logits.detach(), ids, *_detached(transforms))
    return result


def top_ids(logits: torch.Tensor, ids: Maybe, transforms: Transforms, count: int) -> torch.Tensor:
    result: torch.Tensor = _top_operator(logits.detach(), ids, *_detached(transforms), count)
    return result


def _detached(transforms: tuple[Any, ...]) -> tuple[Maybe, ...]:
    return tuple(None if tensor is None else tensor.detach() for tensor in transforms)


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


def _forms(logits: torch.Tensor, ids: Maybe, bias: Maybe, want: Want) -> list[tuple[Any, torch.dtype]]:
    """Shapes and dtypes of the statistics, and of the rows' summaries: maximum, its bias, rest and moment. Empty for
    those that are not asked for."""
    arithmetic = torch.float64 if logits.dtype == torch.float64 else torch.float32
    wide = torch.float64 if compiled.has_float64(logits.device) else torch.float32
    positions = logits.shape[:-1]
    return [
        (ids.shape if want.logprob and ids is not None else (0,), arithmetic),
        (positions if want.entropy else (0,), arithmetic),
        (positions if want.lse else (0,), arithmetic),
        (ids.shape if want.rank and ids is not None else (0,), torch.int64),
        (positions, arithmetic),
        ((0,) if bias is None else positions, arithmetic),
        (positions, wide),
        (positions if want.entropy else (0,), wide),
    ]


def _outputs(logits: torch.Tensor, ids: Maybe, bias: Maybe, want: Want) -> tuple[torch.Tensor, ...]:
    """Memory for them."""
    return tuple(logits.new_empty(shape, dtype=dtype) for shape, dtype in _forms(logits, ids, bias, want))


def _forward(logits: torch.Tensor, ids: Maybe, transforms: Transforms, want: Want) -> tuple[torch.Tensor, ...]:
    """The statistics and the summaries, for the backward pass, of `_forms`."""
    with normalised(logits):
        rows, vocab, many = _sizes(logits, ids)
        flat_ids = _flat(ids, rows, many)
        if kernels.serves(logits) and (ids is None or many):
            views, of_rows = _row_views(normal(logits), vocab), kernels.rows_of(logits, transforms)
            given = kernels.forward(views, flat_ids, of_rows, want)
            forms = _forms(logits, ids, transforms.bias, want)
            return tuple(
                logits.new_empty(shape, dtype=dtype) if found is None else found.view(shape)
                for found, (shape, dtype) in zip(given, forms, strict=True)
            )
        outputs = _outputs(logits, ids, transforms.bias, want)
        if ids is not None and not many:
            return tuple(output.zero_() for output in outputs)
        by_id = {n for n in (0, 3) if want[n]}
        flat = [each.view(rows, many) if n in by_id else each.view(-1) for n, each in enumerate(outputs)]
        whole = rows_of(logits, transforms)
        for x, where, _ in _pieces(logits, vocab):
            part, own = part_of(whole, where), _piece(flat_ids, where)
            if own is not None and want.rank:
                flat[3][where] = compiled.rank(x, own, part)
            if own is not None and _fused(x, part, want):
                flat[0][where] = npu.fused_logprobs(x, own, part.temperature)
                continue  # the operator gives no summary; the backward pass makes its own
            for output, found in zip(flat, compiled.forward(x, own, part, want._replace(rank=False)), strict=True):
                if found is not None:
                    output[where] = found
        return outputs


def _backward(
    upstream: Upstream,
    logits: torch.Tensor,
    ids: Maybe,
    transforms: Transforms,
    summary: tuple[torch.Tensor, ...],
    want: Want,
    in_place: bool = False,
) -> torch.Tensor:
    with normalised(logits):
        rows, vocab, many = _sizes(logits, ids)
        result = normal(logits) if in_place else fresh(logits)
        if ids is not None and not many:
            return result.zero_()
        flat_ids = _flat(ids, rows, many)
        flat_upstream = [_flat(upstream.logprob, rows, many), *(_flat(each, rows) for each in upstream[1:])]
        # what is empty but for an empty batch was not asked for
        numbers = [each.reshape(-1) if each.numel() else None for each in map(normal, summary)]
        maximum, bias, rest, moment = numbers
        whole_summary = Summary(maximum, rest, None, bias, moment)
        of_rows = Upstream(*flat_upstream)
        if kernels.serves(logits):
            views, out = _row_views(normal(logits), vocab), None if in_place else result.view(rows, vocab)
            kernels.backward(views, flat_ids, of_rows, whole_summary, kernels.rows_of(logits, transforms), out)
        else:
            _backward_in_pieces(of_rows, logits, flat_ids, transforms, whole_summary, want, result, in_place)
        if in_place:
            torch.autograd.graph.increment_version(logits)
        return result


def _backward_in_pieces(
    upstream: Upstream,
    logits: torch.Tensor,
    ids: Maybe,
    transforms: Transforms,
    summary: Summary,
    want: Want,
    result: torch.Tensor,
    in_place: bool,
) -> None:
    """Of all rows, one compiled piece after the other."""
    vocab, whole = logits.shape[-1], rows_of(logits, transforms)
    for x, where, view in _pieces(logits, vocab, overlap=not in_place):
        part = part_of(whole, where)
        if _fused(x, part, want):
            its = compiled.summary(x, part)
        else:
            its = Summary(*(None if each is None else each[where] for each in summary))
        arguments = x, _piece(ids, where), Upstream(*(_piece(each, where) for each in upstream)), its
        if not in_place:
            compiled.backward(*arguments, part, result.view(-1, vocab)[where])
        elif x.data_ptr() == view.data_ptr():
            compiled.backward(*arguments, part, None)
        else:
            view.copy_(compiled.backward(*arguments, part, None))


def _rank(logits: torch.Tensor, ids: torch.Tensor, transforms: Transforms) -> torch.Tensor:
    with normalised(logits):
        rows, vocab, many = _sizes(logits, ids)
        out = torch.zeros_like(ids, memory_format=torch.contiguous_format)
        if many and kernels.serves(logits):
            views, of_rows = _row_views(normal(logits), vocab), kernels.rows_of(logits, transforms)
            kernels.rank(views, normal(ids).reshape(rows, many), of_rows, out.view(rows, many))
        else:
            _in_pieces(logits, ids, transforms, out.view(rows, many) if many else None, compiled.rank)
        return out


def _top_ids(logits: torch.Tensor, ids: Maybe, transforms: Transforms, count: int) -> torch.Tensor:
    with normalised(logits):
        rows, _, many = _sizes(logits, ids)
        out = torch.full((*logits.shape[:-1], count), -1, dtype=torch.int64, device=logits.device)
        flat = None if ids is not None and not many else out.view(rows, count)
        _in_pieces(logits, ids, transforms, flat, lambda x, own, part: compiled.top_ids(x, own, part, count))
        return out


def _in_pieces(
    logits: torch.Tensor,
    ids: Maybe,
    transforms: Transforms,
    flat: Maybe,
    function: Callable[[torch.Tensor, Any, Rows], torch.Tensor],
) -> None:
    """Fills ``flat``, rows of a result, by a function of pieces of the rows."""
    if flat is None:
        return
    rows, vocab, many = _sizes(logits, ids)
    flat_ids, whole = _flat(ids, rows, many), rows_of(logits, transforms)
    for x, where, _ in _pieces(logits, vocab):
        flat[where] = function(x, _piece(flat_ids, where), part_of(whole, where))


class _Boundary(torch.autograd.Function):
    """Of a call outside torch.compile. What it saves: its arguments, and a few numbers a row."""

    @staticmethod
    def forward(logits: torch.Tensor, ids: Maybe, *rest: Any) -> Any:
        *transforms, want, _ = rest
        return _forward(logits, ids, Transforms(*transforms), Want(*want))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        *tensors, want, ctx.in_place = inputs
        ctx.want = Want(*want)
        unwanted = [each for each, wanted in zip(output[:3], ctx.want, strict=False) if not wanted]
        ctx.mark_non_differentiable(*unwanted, *output[3:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[4:])
        ctx.save_for_forward(*tensors, *output[4:])

    @staticmethod
    def backward(ctx: Any, *gradients: Maybe) -> Any:
        of_logits, of_temperature = None, None
        upstream = Upstream(*(g if wanted else None for g, wanted in zip(gradients[:3], ctx.want, strict=False)))
        given = [each for each in upstream if each is not None]
        if given:
            logits, ids, transforms, summary = _unpacked(ctx.saved_tensors)
            # differentiable again for create_graph=True and torch.func; plain operations also under vmap and with
            # tangents
            if torch.is_grad_enabled() or any(map(is_batched, given)) or forward_ad._current_level >= 0:
                if ctx.in_place:
                    raise RuntimeError(
                        "the gradient of a call with inplace_backward=True can be taken once only: create_graph, vmap"
                        " and forward mode need logits that still hold their values"
                    )
                of_logits, of_temperature = derivatives.gradient(logits, ids, transforms, upstream)
            else:
                if ctx.needs_input_grad[2]:  # first, while the logits hold their values
                    of_temperature = derivatives.gradient(logits, ids, transforms, upstream)[1]
                if ctx.needs_input_grad[0]:
                    of_logits = _backward(upstream, logits, ids, transforms, summary, ctx.want, ctx.in_place)
        return of_logits, None, of_temperature, *(None,) * 6

    @staticmethod
    def jvp(ctx: Any, logits_tangent: Maybe, _: None, temperature_tangent: Maybe, *__: None) -> Any:
        logits, ids, transforms, _summary = _unpacked(ctx.saved_tensors)
        changes = derivatives.tangent(logits, ids, transforms, ctx.want, logits_tangent, temperature_tangent)
        return *changes, *(None,) * 5

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        *tensors, want, in_place = inputs
        logits, ids, transforms = batch_first(info.batch_size, in_dims, *tensors)
        found = _Boundary.apply(logits, ids, *transforms, want, in_place)  # type: ignore[no-untyped-call]
        return found, tuple(0 if each.ndim > 1 or each.numel() else None for each in found)


def _unpacked(saved: Any) -> tuple[torch.Tensor, Maybe, Transforms, tuple[torch.Tensor, ...]]:
    return saved[0], saved[1], Transforms(*saved[2:7]), saved[7:]


def batch_first(size: int, in_dims: Any, logits: torch.Tensor, ids: Maybe, *transforms: Maybe) -> Any:
    """Arguments under vmap, with the batch as the first axis of each that needs one."""
    logits_dim, ids_dim, *dims = in_dims
    logits = _first(logits, logits_dim, size)
    ids = None if ids is None else _first(ids, ids_dim, size)
    positions, found = logits.shape[:-1], list(transforms)
    for n, (tensor, dim) in enumerate(zip(transforms, dims, strict=False)):
        if tensor is None:
            continue
        own = tensor.ndim - (dim is not None)
        if n < 3:  # a number: one for each call, or one per position
            if dim is not None:
                tensor = tensor.movedim(dim, 0)
                tensor = tensor.reshape(size, *(1,) * (len(positions) - 1 - own), *tensor.shape[1:])
            found[n] = tensor.expand(positions) if dim is not None or own else tensor
        elif dim is not None:  # bias or mask, which broadcast to the logits from the right
            tensor = tensor.movedim(dim, 0)
            found[n] = tensor.reshape(size, *(1,) * (logits.ndim - 1 - own), *tensor.shape[1:])
    return logits, ids, Transforms(*found)


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether it stands for many, under torch.func.vmap or is_grads_batched=True (keys FuncTorchBatched, Batched)."""
    return "Batched" in str(torch._C._dispatch_keys(tensor))


def is_forward_over_forward() -> bool:
    """Whether two or more forward-mode transforms of torch.func run: torch takes a second tangent of its
    autograd.Function for 0, in silence."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    return sum(level.key() == torch._C._functorch.TransformType.Jvp for level in levels) > 1


def _first(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


# Graphs that a user's compiler has cached on disk hold the shapes of these results: if they change, so must the name.
@torch.library.custom_op("xlogprobs::token_stats", mutates_args=())
def _operator(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    temperature: torch.Tensor | None,
    scale: torch.Tensor | None,
    softcap: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    logprob: bool,
    entropy: bool,
    lse: bool,
    rank: bool,
) -> tuple[T, T, T, T, T, T, T, T]:
    transforms = Transforms(temperature, scale, softcap, bias, mask)
    return _forward(logits, ids, transforms, Want(logprob, entropy, lse, rank))  # type: ignore[return-value]


@_operator.register_fake
def _(logits: torch.Tensor, ids: Maybe, *rest: Any) -> tuple[torch.Tensor, ...]:
    *_, bias, _mask, logprob, entropy, lse, rank = rest
    return _outputs(logits, ids, bias, Want(logprob, entropy, lse, rank))


@torch.library.custom_op("xlogprobs::token_stats_backward", mutates_args=())
def _backward_operator(
    of_logprob: torch.Tensor | None,
    of_entropy: torch.Tensor | None,
    of_lse: torch.Tensor | None,
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    temperature: torch.Tensor | None,
    scale: torch.Tensor | None,
    softcap: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    summary: list[torch.Tensor],
    want: list[bool],
) -> torch.Tensor:
    transforms = Transforms(temperature, scale, softcap, bias, mask)
    upstream = Upstream(of_logprob, of_entropy, of_lse)
    return _backward(upstream, logits, ids, transforms, tuple(summary), Want(*want))


@_backward_operator.register_fake
def _(_: Maybe, __: Maybe, ___: Maybe, logits: torch.Tensor, *____: Any) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.want = inputs[7:]
    ctx.save_for_backward(*inputs[:7], *output[4:])


def _operator_backward(ctx: Any, *gradients: Maybe) -> Any:
    logits, ids, transforms, summary = _unpacked(ctx.saved_tensors)
    upstream = [g if wanted else None for g, wanted in zip(gradients[:3], ctx.want, strict=False)]
    result = _backward_operator(*upstream, logits, ids, *transforms, list(summary), list(ctx.want))
    return result, *(None,) * 10


_operator.register_autograd(_operator_backward, setup_context=_save)


@torch.library.custom_op("xlogprobs::rank", mutates_args=())
def _rank_operator(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor | None,
    scale: torch.Tensor | None,
    softcap: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    return _rank(logits, ids, Transforms(temperature, scale, softcap, bias, mask))


@_rank_operator.register_fake
def _(_: torch.Tensor, ids: torch.Tensor, *__: Maybe) -> torch.Tensor:
    return ids.new_empty(ids.shape)


@_rank_operator.register_vmap
def _(info: Any, in_dims: Any, *tensors: Any) -> Any:
    logits, ids, transforms = batch_first(info.batch_size, in_dims, *tensors)
    return _rank_operator(logits, ids, *transforms), 0


@torch.library.custom_op("xlogprobs::top_ids", mutates_args=())
def _top_operator(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    temperature: torch.Tensor | None,
    scale: torch.Tensor | None,
    softcap: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    count: int,
) -> torch.Tensor:
    return _top_ids(logits, ids, Transforms(temperature, scale, softcap, bias, mask), count)


@_top_operator.register_fake
def _(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty((*logits.shape[:-1], rest[-1]), dtype=torch.int64, device=logits.device)


@_top_operator.register_vmap
def _(info: Any, in_dims: Any, *inputs: Any) -> Any:
    *tensors, count = inputs
    logits, ids, transforms = batch_first(info.batch_size, in_dims, *tensors)
    return _top_operator(logits, ids, *transforms, count), 0


class normalised:
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


def fresh(logits: torch.Tensor) -> torch.Tensor:
    """Contiguous memory of the shape of the logits, not yet written.

    On a CPU it is NumPy's, which asks the kernel for huge pages: a first write to ordinary pages takes several times
    as long as the gradient itself.
    """
    if logits.device.type != "cpu":
        return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    memory = np.empty(logits.numel() * logits.itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + memory.size - ALIGNMENT]).view(logits.dtype).view(logits.shape)


def _fused(x: torch.Tensor, transforms: Rows, want: Want) -> bool:
    """Whether these rows go through the fused operator of torch_npu: on an NPU, where nothing compiles."""
    return x.device.type == "npu" and not compiled.compiles(x.device) and npu.takes(x, transforms, want)


def _sizes(logits: torch.Tensor, ids: Maybe) -> tuple[int, int, int]:
    """Rows, vocabulary, ids a row."""
    many = 0 if ids is None else ids.shape[-1] if ids.ndim == logits.ndim else 1
    return logits.shape[:-1].numel(), logits.shape[-1], many


def normal(tensor: torch.Tensor) -> torch.Tensor:
    """A plain detached tensor on the same memory, also of a tensor made in inference mode."""
    return from_dlpack(tensor.detach()) if tensor.is_inference() else tensor.detach()


def plain(piece: torch.Tensor) -> torch.Tensor:
    """(N, any), contiguous with the strides of its shape: a lone row is contiguous at any stride, and a graph not."""
    return piece.contiguous().as_strided(piece.shape, (piece.shape[1], 1))


def _flat(tensor: Maybe, *shape: int) -> Maybe:
    return None if tensor is None else normal(tensor).reshape(shape)


def _piece(flat: Maybe, where: slice) -> Maybe:
    """Of some rows, contiguous."""
    if flat is None:
        return None
    return plain(flat[where]) if flat.ndim == 2 else flat[where].contiguous()


def rows_of(logits: torch.Tensor, transforms: Transforms) -> Rows:
    """The numbers of the rows; bias and mask as they came, without a copy where the strides allow it."""
    logits, shape = normal(logits), tuple(logits.shape)
    rows, narrow = logits.shape[:-1].numel(), logits.dtype != torch.float64

    def number(name: str, tensor: Any) -> Any:
        if tensor is None:
            return None
        if tensor.ndim == 0 and tensor.device.type == "cpu":  # read without waiting for a device
            value = float(tensor)
            return value if is_valid(name, value, narrow) else float("nan")
        return tuple(part.to(logits.device) for part in number_pair(xp, name, normal(tensor), rows, logits))

    def move(row: Any) -> torch.Tensor:
        return torch.tensor(row, device=logits.device)

    names = ("temperature", "scale", "softcap")
    temperature, scale, softcap = (number(name, tensor) for name, tensor in zip(names, transforms, strict=False))
    # in place of the bias, which the compiled functions widen piece by piece, one number stands for its presence
    has_bias = None if transforms.bias is None else logits.new_zeros(1, dtype=torch.float32)
    found = rows_of_call(xp, Transforms(temperature, scale, softcap, has_bias), shape, logits, move)
    bias, mask = (
        None if array is None else over_vocabulary(xp, normal(array), shape, move)
        for array in (transforms.bias, transforms.mask)
    )
    return found._replace(bias=_once(bias), mask=_once(mask))


def _once(shared: Shared | None) -> Shared | None:
    """Contiguous, where rows share it: copied once and not in every piece."""
    if shared is None or (shared.row is None and shared.values.ndim == 2):
        return shared
    return shared._replace(values=shared.values.contiguous())


def part_of(transforms: Rows, where: slice) -> Rows:
    """Those of some rows, contiguous."""
    part = transforms.of(where)
    return part._replace(bias=_own(part.bias), mask=_own(part.mask))


def _own(shared: Shared | None) -> Shared | None:
    if shared is None or shared.values.ndim == 1:
        return shared
    return shared._replace(values=plain(shared.values))


def _pieces(
    logits: torch.Tensor, vocab: int, overlap: bool = True
) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
    """Contiguous pieces of the rows, where they stand among all rows, and the views that they are, or copy."""
    first = 0
    for view in _row_views(normal(logits), vocab):
        for part in compiled.pieces(view.shape[0], vocab, view.device, overlap):
            yield plain(view[part]), slice(first + part.start, first + part.stop), view[part]
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
