"""The matrix's columns: each way to compute log-probabilities, from NumPy arrays to NumPy arrays."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from xlogprobs.accurate import Array
from xlogprobs.api import logprobs
from xlogprobs.backend import ArrayApiBackend, load
from xlogprobs.parity.distributions import REAL_VOCAB, Case, absent

PEER_VOCABS = (50257, 151936, REAL_VOCAB)


@dataclass(frozen=True)
class Column:
    """One way to compute log-probabilities: a backend, how it runs, and on which device.

    ``compute(column, logits, ids, temperature)`` takes and returns NumPy arrays. A peer is another library's
    formula, shown for comparison and bound by nothing.
    """

    backend: str
    execution: str
    device: str
    compute: Callable[["Column", Array, Array, float], Array] = field(repr=False)
    peer: bool = False
    differentiate: Callable[["Column", Array, Array, Array, float], Array] | None = field(default=None, repr=False)
    """``(column, logits, ids, upstream, temperature)`` to the gradient of the logits."""

    def __str__(self) -> str:
        return f"{self.backend} {self.execution} {self.device}"

    def available(self) -> str | None:
        """Why this column cannot run here, or None."""
        match self.backend.split()[0], self.device:
            case "array-api-strict", _:
                return absent("array_api_strict", "test")
            case "torch", device:
                return absent("torch", "torch") or _torch_lacks(device, compiled=self.execution == "compiled")
            case "jax", device:
                return absent("jax", "jax") or _jax_lacks(device)
        return None

    def lacks(self, case: Case) -> str | None:
        """Why this column cannot take this case though it runs here, or None."""
        if self.backend == "array-api-strict" and case.dtype in ("float16", "bfloat16"):
            return f"not run: array-api-strict has no {case.dtype}"
        if case.quantity == "gradient" and self.differentiate is None:
            return f"not run: {self.backend} {self.execution} has no gradients"
        if self.peer and (case.vocab not in PEER_VOCABS or len(case.shape) != 1 or case.ids_per_position):
            return "not run: peers are shown for flat batches of large vocabularies"
        return None

    def run(self, logits: Array, ids: Array, temperature: float = 1.0) -> Array:
        """Log-probabilities of NumPy ``logits`` and ``ids``, computed this column's way, as a NumPy array."""
        return self.compute(self, logits, ids, temperature)

    def gradient(self, logits: Array, ids: Array, upstream: Array, temperature: float = 1.0) -> Array:
        """The gradient of the logits for NumPy ``upstream`` gradients, as a NumPy array of the logits' dtype."""
        if self.differentiate is None:
            raise ValueError(f"{self} has no gradients")
        return self.differentiate(self, logits, ids, upstream, temperature)


def _torch_lacks(device: str, *, compiled: bool) -> str | None:
    import torch

    if device != "cpu":
        module = getattr(torch, device, None)
        if module is None or not module.is_available():
            return f"not run here: no {device.upper()} device"
    elif compiled:
        info = load("torch").info()
        # without a compiler the library runs eagerly: that is the eager column
        return None if info.execution.startswith("torch.compile") else f"not run here: {info.why_not}"
    return None


def _jax_lacks(device: str) -> str | None:
    import jax

    try:
        jax.devices(device)
    except RuntimeError:
        return f"not run here: no {device.upper()} device"
    return None


def _generic(logits: Array, ids: Array, temperature: float) -> Array:
    return logprobs(logits, ids, temperature=temperature, _backend=ArrayApiBackend())


def _library(logits: Array, ids: Array, temperature: float) -> Array:
    return logprobs(logits, ids, temperature=temperature)


def _with_strict(column: Column, logits: Array, ids: Array, temperature: float) -> Array:
    import array_api_strict as xp

    return np.asarray(_generic(xp.asarray(logits), xp.asarray(ids), temperature))


def _with_numpy(column: Column, logits: Array, ids: Array, temperature: float) -> Array:
    return np.asarray((_generic if column.execution == "array-api" else _library)(logits, ids, temperature))


def _with_torch(column: Column, logits: Array, ids: Array, temperature: float) -> Array:
    x, targets = torch_array(logits, column.device), torch_array(ids, column.device)
    with _execution(column):
        out = (_generic if column.execution == "array-api" else _library)(x, targets, temperature)
    return out.cpu().numpy()


def _torch_gradient(column: Column, logits: Array, ids: Array, upstream: Array, temperature: float) -> Array:
    import torch

    x, targets, g = (torch_array(array, column.device) for array in (logits, ids, upstream))
    with _execution(column):
        (found,) = torch.autograd.grad(_library(x.requires_grad_(), targets, temperature), x, g)
    found = found.cpu()
    return found.view(torch.uint16).numpy().view(logits.dtype) if found.dtype == torch.bfloat16 else found.numpy()


@contextmanager
def _execution(column: Column) -> Iterator[None]:
    """As the column's name says: eager, or compiled and nothing else."""
    import torch

    with torch.compiler.set_stance("force_eager") if column.execution == "eager" else nullcontext():
        yield
    if column.execution == "compiled" and (reason := _torch_lacks(column.device, compiled=True)):
        raise RuntimeError(f"ran eagerly ({reason})")


def torch_array(array: Array, device: str = "cpu") -> Array:
    """A torch tensor with the values of a NumPy array; bfloat16 crosses by its bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.tensor(array.view(np.uint16)).view(torch.bfloat16).to(device)
    return torch.tensor(array).to(device)


def _with_jax(column: Column, logits: Array, ids: Array, temperature: float) -> Array:
    import jax

    device = jax.devices(column.device)[0]
    with jax.enable_x64(True) if logits.dtype == np.float64 else nullcontext():
        x, targets = jax.device_put(logits, device), jax.device_put(ids, device)
        if column.execution == "user's jit":
            return np.asarray(_jitted(temperature)(x, targets))
        with jax.disable_jit() if column.execution == "eager" else nullcontext():
            return np.asarray(_library(x, targets, temperature))


def _jax_gradient(column: Column, logits: Array, ids: Array, upstream: Array, temperature: float) -> Array:
    import jax

    device = jax.devices(column.device)[0]
    with jax.enable_x64(True) if logits.dtype == np.float64 else nullcontext():
        x, targets, g = (jax.device_put(array, device) for array in (logits, ids, upstream))
        if column.execution == "user's jit":
            return np.asarray(_jitted(temperature, gradient=True)(x, targets, g))
        with jax.disable_jit() if column.execution == "eager" else nullcontext():
            return np.asarray(_pullback(x, targets, g, temperature=temperature))


def _pullback(x: Array, ids: Array, upstream: Array, temperature: float) -> Array:
    import jax

    return jax.vjp(lambda x: _library(x, ids, temperature), x)[1](upstream)[0]


@cache
def _jitted(temperature: float, *, gradient: bool = False) -> Any:
    import jax

    return jax.jit(partial(_pullback if gradient else _library, temperature=temperature))


def _log_softmax(x: Array, ids: Array, temperature: float) -> Array:
    return (x / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def _cross_entropy(x: Array, ids: Array, temperature: float) -> Array:
    import torch

    return -torch.nn.functional.cross_entropy(x / temperature, ids, reduction="none")


@cache
def _compiled_peer(formula: Callable[..., Array], vocab: int, dtype: str) -> Any:
    import torch

    # a code object of its own: Dynamo keeps at most eight graphs for one and then runs eagerly
    return torch.compile(types.FunctionType(formula.__code__.replace(), formula.__globals__))


def _with_peer(formula: Callable[..., Array], column: Column, logits: Array, ids: Array, temperature: float) -> Array:
    x = torch_array(logits, column.device)
    wide = x if logits.dtype == np.float64 else x.float()
    compiled = _compiled_peer(formula, logits.shape[-1], logits.dtype.name)
    return compiled(wide, torch_array(ids, column.device), temperature).cpu().numpy()


COLUMNS = (
    Column("array-api-strict", "eager", "cpu", _with_strict),
    Column("numpy", "eager", "cpu", _with_numpy),
    Column("numpy", "array-api", "cpu", _with_numpy),
    Column("torch", "eager", "cpu", _with_torch, differentiate=_torch_gradient),
    Column("torch", "compiled", "cpu", _with_torch, differentiate=_torch_gradient),
    Column("torch", "array-api", "cpu", _with_torch),
    Column("jax", "eager", "cpu", _with_jax, differentiate=_jax_gradient),
    Column("jax", "compiled", "cpu", _with_jax, differentiate=_jax_gradient),
    Column("jax", "user's jit", "cpu", _with_jax, differentiate=_jax_gradient),
    Column("torch", "compiled", "cuda", _with_torch, differentiate=_torch_gradient),
    Column("torch", "compiled", "npu", _with_torch, differentiate=_torch_gradient),
    Column("jax", "compiled", "gpu", _with_jax, differentiate=_jax_gradient),
)
PEERS = (
    Column("torch log_softmax", "compiled", "cpu", partial(_with_peer, _log_softmax), peer=True),
    Column("torch -cross_entropy", "compiled", "cpu", partial(_with_peer, _cross_entropy), peer=True),
)
