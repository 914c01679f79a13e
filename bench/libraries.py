"""The array libraries that a case runs on: its inputs, the end of a call, results as NumPy, peak memory."""

import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.case import Case

SEED = 42


@dataclass
class Inputs:
    """What the methods of a case are given. Only those fields are set that its table of methods needs."""

    ids: Any
    logits: Any = None
    source: Any = None
    """The logits once more, where a method may overwrite them."""
    upstream: Any = None
    hidden: Any = None
    weight: Any = None
    grad: Any = None
    """Where the producer of the logits leaves the gradient that reached it."""

    def restore(self) -> None:
        """The logits as they were, before each call and outside the time taken."""
        if self.source is not None:
            self.logits.copy_(self.source)


class Library:
    name: str
    module: str

    def why_not(self, device: str) -> str | None:
        """Why this library can't run on the device here, or None."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        return self.lacks(device)

    def lacks(self, device: str) -> str | None:
        raise NotImplementedError

    def device_name(self, device: str) -> str:
        return processor()

    def inputs(self, case: Case) -> Inputs:
        """Normal logits (or factors of them) and uniform ids, the same at each call."""
        if case.what == "head":
            scale = case.hidden**-0.5
            hidden = self.normal((case.rows, case.hidden), case, 0)
            weight = self.normal((case.vocab, case.hidden), case, 1, scale)
            return Inputs(self.ids(case), hidden=hidden, weight=weight)
        logits = self.normal((*case.shape, case.vocab), case, 0)
        if case.what != "grad":
            return Inputs(self.ids(case), logits)
        upstream = self.upstream(case)
        return Inputs(self.ids(case), logits, source=self.overwritable(logits), upstream=upstream)

    def normal(self, shape: tuple[int, ...], case: Case, stream: int, scale: float = 1.0) -> Any:
        raise NotImplementedError

    def ids(self, case: Case) -> Any:
        raise NotImplementedError

    def upstream(self, case: Case) -> Any:
        """A weight for each token, as an advantage is."""
        raise NotImplementedError

    def overwritable(self, logits: Any) -> Any:
        """A second copy of the logits, where the library can overwrite the first."""
        return None

    def finish(self, result: Any) -> Any:
        """Wait until the result is there."""
        return result

    def numpy(self, array: Any) -> Any:
        return np.asarray(array)

    def peak(self, run: Callable[[], Any], device: str) -> dict[str, int]:
        """Bytes above what is held now, at the highest point of ``run``."""
        return resident_peak(run)


class NumPy(Library):
    name = module = "numpy"

    def lacks(self, device: str) -> str | None:
        return None if device == "cpu" else "NumPy runs on the CPU alone"

    def normal(self, shape: tuple[int, ...], case: Case, stream: int, scale: float = 1.0) -> Any:
        values = np.random.default_rng((SEED, stream)).standard_normal(shape, dtype=np.float32)
        if scale != 1.0:
            values *= scale
        return values if case.dtype == "float32" else values.astype(host_dtype(case.dtype))

    def ids(self, case: Case) -> Any:
        return np.random.default_rng((SEED, 2)).integers(0, case.vocab, case.shape)

    def upstream(self, case: Case) -> Any:
        return np.random.default_rng((SEED, 3)).standard_normal(case.shape, dtype=np.float32)


class Torch(Library):
    name = module = "torch"

    def lacks(self, device: str) -> str | None:
        import torch

        if device == "npu" and importlib.util.find_spec("torch_npu") is not None:
            importlib.import_module("torch_npu")
        module = getattr(torch, device, None)
        if device != "cpu" and (module is None or not module.is_available()):
            return f"torch {torch.__version__} finds no {device} device here"
        return None

    def device_name(self, device: str) -> str:
        import torch

        return processor() if device == "cpu" else str(getattr(torch, device).get_device_name())

    def normal(self, shape: tuple[int, ...], case: Case, stream: int, scale: float = 1.0) -> Any:
        import torch

        generator = torch.Generator(case.device).manual_seed(SEED + stream)
        values = torch.randn(shape, generator=generator, device=case.device)
        if scale != 1.0:
            values *= scale
        return values.to(getattr(torch, case.dtype))

    def ids(self, case: Case) -> Any:
        import torch

        generator = torch.Generator().manual_seed(SEED + 2)
        return torch.randint(case.vocab, case.shape, generator=generator).to(case.device)

    def upstream(self, case: Case) -> Any:
        import torch

        return torch.randn(case.shape, generator=torch.Generator().manual_seed(SEED + 3)).to(case.device)

    def overwritable(self, logits: Any) -> Any:
        return logits.clone()

    def finish(self, result: Any) -> Any:
        import torch

        kind = (result[0] if isinstance(result, tuple) else result).device.type
        if kind != "cpu":
            getattr(torch, kind).synchronize()
        return result

    def numpy(self, array: Any) -> Any:
        return array.detach().cpu().float().numpy()

    def peak(self, run: Callable[[], Any], device: str) -> dict[str, int]:
        import torch

        if device == "cpu":
            return resident_peak(run)
        module = getattr(torch, device)
        gc.collect()
        module.empty_cache()
        module.reset_peak_memory_stats()
        allocated, reserved = module.memory_allocated(), module.memory_reserved()
        self.finish(run())
        return {
            "peak": module.max_memory_allocated() - allocated,
            "reserved": module.max_memory_reserved() - reserved,
        }


class Jax(NumPy):
    """The inputs are made by NumPy and then put on the device."""

    name = module = "jax"

    def lacks(self, device: str) -> str | None:
        import jax

        try:
            jax.devices(device)
        except RuntimeError:
            return f"jax {jax.__version__} finds no {device} device here"
        return None

    def device_name(self, device: str) -> str:
        import jax

        return processor() if device == "cpu" else str(jax.devices(device)[0].device_kind)

    def normal(self, shape: tuple[int, ...], case: Case, stream: int, scale: float = 1.0) -> Any:
        return self._put(super().normal(shape, case, stream, scale), case)

    def ids(self, case: Case) -> Any:
        return self._put(super().ids(case).astype(np.int32), case)

    def upstream(self, case: Case) -> Any:
        return self._put(super().upstream(case), case)

    def _put(self, values: Any, case: Case) -> Any:
        import jax

        return jax.device_put(values, jax.devices(case.device)[0])

    def finish(self, result: Any) -> Any:
        import jax

        return jax.block_until_ready(result)

    def numpy(self, array: Any) -> Any:
        return np.asarray(array).astype(np.float32)

    def peak(self, run: Callable[[], Any], device: str) -> dict[str, int]:
        """XLA's counters can't be reset: on a device, the highest point of the process, whose first large arrays are
        the inputs."""
        if device == "cpu":
            return resident_peak(run)
        import jax

        chosen = jax.devices(device)[0]
        held = chosen.memory_stats()["bytes_in_use"]
        self.finish(run())
        return {"peak": chosen.memory_stats()["peak_bytes_in_use"] - held}


LIBRARIES: dict[str, Library] = {"numpy": NumPy(), "torch": Torch(), "jax": Jax()}


def host_dtype(dtype: str) -> Any:
    if dtype != "bfloat16":
        return np.dtype(dtype)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def resident_peak(run: Callable[[], Any]) -> dict[str, int]:
    """By the kernel's high-water mark of resident memory, which writing 5 to clear_refs lowers to what is held now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    kept = run()
    above = _status("VmHWM") - before
    del kept
    return {"peak": above}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"
