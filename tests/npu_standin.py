"""A device named npu without the hardware, and a torch_npu to go with it.

Run by test_npu in a process of its own, since the device is registered for good:
``python npu_standin.py compiler,fused calls.pt results.pt``.

The device is PyTorch's PrivateUse1 in its Python form. Its tensors have device npu and no memory that other devices
can read: the bytes lie in CPU tensors, found by a tensor's storage, and every operator runs there. float64 is refused,
as on a device that has none.
"""

import functools
import importlib.machinery
import sys
import types
import warnings
from collections import Counter

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

MOST_ROWS = 200_000  # of npu_cross_entropy_loss, by its manual

VIEWS = {"as_strided", "view", "_reshape_alias", "unfold"}
RESIZING = (
    "abs",
    "arange",
    "arange.start",
    "arange.start_step",
)  # by default these fill a tensor that they first enlarge
META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)

memory: dict[int, torch.Tensor] = {}
calls: Counter[str] = Counter()
_libraries = []


def install(*, compiler: bool = False, broken: bool = False, fused: bool = False) -> None:
    """Register the device, and a torch_npu that brings what is asked for."""
    _setup_privateuseone_for_python_backend("npu", backend_module=_DeviceModule())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run_on_cpu, "PrivateUse1")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in RESIZING:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, functools.partial(_run_on_cpu, operator), "PrivateUse1")
    _libraries.extend((library, aten))
    torch_npu = _module("torch_npu")
    torch_npu.__path__ = []
    if fused:
        torch_npu.npu_cross_entropy_loss = npu_cross_entropy_loss
    if compiler:
        _bring_compiler(broken)
    else:
        torch.compile = _refuse_to_compile


class _DeviceModule(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


def _refuse_to_compile(*_, **__):
    raise AssertionError("torch.compile was called on an NPU without a compiler")


def npu_cross_entropy_loss(
    input,
    target,
    weight=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    lse_square_scale_for_zloss=0.0,
    return_zloss=False,
):
    """The documented signature, types and limits."""
    calls["npu_cross_entropy_loss"] += 1
    if input.device.type != "npu" or target.device.type != "npu":
        raise RuntimeError("npu_cross_entropy_loss: input and target must be on npu")
    if input.dim() != 2 or target.dim() != 1 or input.shape[0] != target.shape[0]:
        raise RuntimeError(f"npu_cross_entropy_loss: [N, C] and [N], got {input.shape} and {target.shape}")
    if not 0 < input.shape[0] <= MOST_ROWS:
        raise RuntimeError(f"npu_cross_entropy_loss: N in (0, {MOST_ROWS}], got {input.shape[0]}")
    if input.dtype not in (torch.float16, torch.bfloat16, torch.float32) or target.dtype != torch.int64:
        raise RuntimeError(f"npu_cross_entropy_loss: {input.dtype} and {target.dtype} are not supported")
    if lse_square_scale_for_zloss or return_zloss or reduction not in ("mean", "sum", "none"):
        raise RuntimeError("npu_cross_entropy_loss: an option that is not supported")
    logits, labels = input.cpu(), target.cpu()
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise RuntimeError("npu_cross_entropy_loss: target out of [0, C)")
    log_prob = torch.log_softmax(logits, -1)
    loss = torch.nn.functional.nll_loss(
        log_prob, labels, weight and weight.cpu(), reduction=reduction, ignore_index=ignore_index
    )
    empty = torch.empty(0, dtype=input.dtype)
    return loss.reshape(-1).to("npu"), log_prob.to("npu"), empty.to("npu"), empty.to("npu")


def _run_on_cpu(op, *args, **kwargs):
    name = op._schema.name.removeprefix("aten::")
    calls[name] += 1
    if name in VIEWS:
        return op.redispatch(META, *args, **kwargs)
    if name == "_copy_from":
        source, target = args[:2]
        on_cpu(target).copy_(on_cpu(source))
        return target
    if name == "_local_scalar_dense":
        calls["read back"] += 1
    arguments = {}

    def argument(value):
        if isinstance(value, torch.Tensor):
            inner = on_cpu(value)
            arguments[id(inner)] = value
            return inner
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value

    args, kwargs = pytree.tree_map(argument, (args, kwargs))
    result = op(*args, **kwargs)
    if not op._schema.is_mutable:
        return pytree.tree_map_only(torch.Tensor, on_npu, result)
    return pytree.tree_map_only(torch.Tensor, lambda inner: arguments[id(inner)], result)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor on the same memory as a tensor of npu; a tensor of the CPU itself."""
    if tensor.device.type != "npu":
        return tensor
    flat = memory[tensor.untyped_storage()._cdata].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def on_npu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.float64:
        raise TypeError("device npu has no float64")
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.empty(length if tensor.numel() else 0, dtype=tensor.dtype)
    flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)
    outer = torch._C._acc.create_empty_tensor(flat.shape, tensor.dtype)
    memory[outer.untyped_storage()._cdata] = flat.view(torch.uint8)
    return torch.ops.aten.as_strided.default.redispatch(META, outer, tensor.shape, tensor.stride(), 0)


def _module(name):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    return module


def _bring_compiler(broken):
    """As torch_npu does: its module registers code generation for npu, and Inductor's entry point is replaced.
    The compiler of the stand-in records a graph and runs it as it is; or fails."""
    from torch._inductor.codegen.common import init_backend_registration, register_backend_for_device
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    _module("torch_npu._inductor")
    init_backend_registration()
    register_backend_for_device("npu", CppScheduling, PythonWrapperCodegen)

    def compile_graph(self, graph, inputs):
        calls["compilations"] += 1
        if broken:
            raise RuntimeError("the stand-in's compiler fails")

        def run(*arguments):
            calls["graph runs"] += 1
            return graph(*arguments)

        return run

    torch._TorchCompileInductorWrapper.__call__ = compile_graph


def run_call(call):
    """One call of logprobs on npu, and where an upstream gradient comes with it, its backward pass."""
    from xlogprobs import logprobs

    calls.clear()
    call = dict(call)
    logits = call.pop("logits").to("npu")
    upstream, transpose = call.pop("upstream", None), call.pop("transpose", False)
    autocast = torch.autocast("npu", enabled=call.pop("autocast", False))
    options = {
        name: value.to("npu") if isinstance(value, torch.Tensor) and value.dtype != torch.float64 else value
        for name, value in call.items()
    }
    logits.requires_grad_(upstream is not None)
    grad = None
    with warnings.catch_warnings(record=True) as said, autocast:
        warnings.simplefilter("always")
        try:
            out = logprobs(logits.transpose(0, 1) if transpose else logits, **options)
            if upstream is not None:
                out.backward(upstream.to("npu"))
                grad = logits.grad.cpu()
        except IndexError as error:
            return {"error": str(error)}
    return {
        "out": out.detach().cpu(),
        "grad": grad,
        "device": out.device.type,
        "calls": dict(calls),
        "warnings": [str(each.message) for each in said if each.category is RuntimeWarning],
    }


def main(brings, calls_file, results_file):
    install(**dict.fromkeys(filter(None, brings.split(",")), True))
    from xlogprobs_torch import npu

    results = {name: run_call(call) for name, call in torch.load(calls_file, weights_only=False).items()}
    torch.save((npu.execution(), results), results_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
