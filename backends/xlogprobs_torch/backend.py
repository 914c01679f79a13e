"""What the core asks of torch: dtypes, devices, whether values can be read, and the call itself."""

import shutil
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from xlogprobs_cpu import core

from xlogprobs.backend import ArrayApiBackend, BackendInfo, Statistics
from xlogprobs.contract import Call, Transforms
from xlogprobs_torch import boundary, compiled, divergence, npu


class TorchBackend(ArrayApiBackend):
    name = "torch"

    def namespace(self, array: Any) -> Any:
        return xp

    def device(self, array: torch.Tensor) -> torch.device:
        return array.device

    def readable(self, array: torch.Tensor) -> bool:
        return array.device.type == "cpu" and not self.traced(array)

    def traced(self, array: torch.Tensor) -> bool:
        return torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(array)

    def differentiable(self, array: torch.Tensor) -> bool:
        if forward_ad._current_level >= 0:
            unpack: Any = forward_ad.unpack_dual
            if unpack(array).tangent is not None:
                return True
        return array.requires_grad

    def from_numpy(self, array: Any, like: torch.Tensor) -> torch.Tensor:
        array = np.asarray(array)
        if not array.flags.writeable or not array.flags.c_contiguous or not array.dtype.isnative:
            array = np.array(array, dtype=array.dtype.newbyteorder("="))
        tensor = torch.from_numpy(array)
        if tensor.dtype == torch.float64 and not compiled.has_float64(like.device):
            return tensor  # a temperature: its float32 pair is made here, then moved
        return tensor.to(like.device)

    def to_numpy(self, array: torch.Tensor) -> Any:
        with temporarily_clear_interpreter_stack():  # inside torch.func, operations on plain tensors give wrapped ones
            array = array.detach().to("cpu").to_dense()
            return (array.float() if array.dtype == torch.bfloat16 else array).numpy()

    def check_inplace_backward(self, logits: torch.Tensor) -> None:
        boundary.check_in_place(logits)

    def statistics(self, call: Call) -> Statistics:
        return boundary.statistics(call.logits, *self._tensors(call), call.want, call.inplace_backward)

    def rank(self, call: Call) -> torch.Tensor:
        return boundary.rank(call.logits, *self._tensors(call))

    def top_ids(self, call: Call, count: int) -> torch.Tensor:
        return boundary.top_ids(call.logits, *self._tensors(call), count)

    def kl_divergence(self, call: Call, ref_logits: torch.Tensor) -> torch.Tensor:
        return divergence.kl_divergence(call.logits, ref_logits, self._tensors(call)[1])

    def _tensors(self, call: Call) -> tuple[Any, Transforms]:
        """The ids and the transforms, numbers as tensors."""
        ids = None if call.ids is None else call.ids.to(torch.int64)
        return ids, Transforms(*(self._tensor(each, call.logits) for each in call.transforms))

    def _tensor(self, value: Any, like: torch.Tensor) -> Any:
        if not isinstance(value, float):
            return value
        number = torch.full((), value, dtype=torch.float64, device="cpu")
        if not torch.compiler.is_compiling():
            return number
        # CUDA graphs of a user's compiler take no tensors of the CPU
        return number.to(device=like.device, dtype=None if compiled.has_float64(like.device) else torch.float32)

    def info(self) -> BackendInfo:
        devices = ["cpu"]
        why: list[str] = []
        if torch.cuda.is_available():
            devices += [f"cuda ({torch.cuda.get_device_name()})"]
        else:
            why.append("cuda: torch sees no device")
        if torch.backends.mps.is_available():
            devices.append("mps")
        if hasattr(torch, "xpu") and torch.xpu.is_available():
            devices.append("xpu")
        if hasattr(torch, "npu") and torch.npu.is_available():
            devices.append(f"npu ({npu.execution()})")
        else:
            why.append("npu: torch_npu is not imported, or sees no device")
        compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
        execution = f"torch.compile (inductor, {compiler})" if compiler else "eager"
        if compiler is None:
            why.append("torch.compile on cpu: no C++ compiler found")
        if core.serves():
            execution += "; on cpu the kernels of Numba"
        return BackendInfo(self.name, True, torch.__version__, devices, execution, "; ".join(why) or None)
