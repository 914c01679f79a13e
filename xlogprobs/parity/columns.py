"""The matrix's columns: each way to compute a quantity, from NumPy arrays to NumPy arrays."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from xlogprobs.accurate import Array
from xlogprobs.backend import ArrayApiBackend, load
from xlogprobs.parity.distributions import REAL_VOCAB, Case, absent
from xlogprobs.parity.quantities import GRADIENTS, Inputs, computed

WITHOUT_KERNELS = ("KL", "top ids")
PEER_VOCABS = (50257, 151936, REAL_VOCAB)


@dataclass(frozen=True)
class Column:
    """One way to compute a quantity: a backend, how it runs, and on which device.

    ``compute(column, quantity, inputs)`` takes and returns NumPy arrays; of a gradient, that of the logits. A peer is
    another library's formula of log-probabilities, shown for comparison and bound by nothing.
    """

    backend: str
    execution: str
    device: str
    compute: Callable[["Column", str, Inputs], Array] = field(repr=False)
    peer: bool = False
    differentiable: bool = False

    def __str__(self) -> str:
        return f"{self.backend} {self.execution} {self.device}"

    def available(self) -> str | None:
        """Why this column cannot run here, or None."""
        if self.execution == "kernels" and (reason := absent("numba", "cpu")):
            return reason
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
        if case.quantity in GRADIENTS and not self.differentiable:
            return f"not run: {self.backend} {self.execution} has no gradients"
        if self.execution == "kernels" and case.quantity in WITHOUT_KERNELS:
            return f"not run: {self.backend} has no kernels for {case.title}"
        if self.execution == "kernels" and self.backend == "jax" and case.quantity in GRADIENTS:
            return "not run: a gradient of jax is traced, and no kernel runs"
        if self.peer and (case.quantity != "logprob" or case.transforms):
            return f"not run: {self.backend} has no {case.title} {' '.join(case.transforms)}".rstrip()
        if self.peer and (case.vocab not in PEER_VOCABS or len(case.shape) != 1 or case.ids_per_position):
            return "not run: peers are shown for flat batches of large vocabularies"
        return None

    def run(self, quantity: str, inputs: Inputs) -> Array:
        """``quantity`` of NumPy ``inputs``, computed this column's way, as a NumPy array."""
        from xlogprobs_cpu import core

        with nullcontext() if self.execution == "kernels" else core.disabled():
            return self.compute(self, quantity, inputs)


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


def _options(column: Column, inputs: Inputs) -> dict[str, Any]:
    return inputs.numbers | ({"_backend": ArrayApiBackend()} if column.execution == "array-api" else {})


def _with_strict(column: Column, quantity: str, inputs: Inputs) -> Array:
    import array_api_strict as xp

    arrays = {name: xp.asarray(array) for name, array in inputs.arrays.items()}
    return np.asarray(computed(quantity, **arrays, **_options(column, inputs)))


def _with_numpy(column: Column, quantity: str, inputs: Inputs) -> Array:
    return np.asarray(computed(quantity, **inputs.arrays, **_options(column, inputs)))


def _with_torch(column: Column, quantity: str, inputs: Inputs) -> Array:
    import torch

    arrays = {name: torch_array(array, column.device) for name, array in inputs.arrays.items()}
    options = _options(column, inputs)
    with _execution(column):
        if quantity not in GRADIENTS:
            return computed(quantity, **arrays, **options).cpu().numpy()
        x = arrays["logits"].requires_grad_()
        upstream = [torch_array(g, column.device) for g in inputs.upstream]
        (found,) = torch.autograd.grad(computed(quantity, **arrays, **options), x, upstream)
    found = found.cpu()
    if found.dtype == torch.bfloat16:
        return found.view(torch.uint16).numpy().view(inputs.arrays["logits"].dtype)
    return found.numpy()


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


def _with_jax(column: Column, quantity: str, inputs: Inputs) -> Array:
    import jax

    device = jax.devices(column.device)[0]
    with jax.enable_x64(True) if inputs.arrays["logits"].dtype == np.float64 else nullcontext():
        arrays, upstream = jax.device_put((inputs.arrays, inputs.upstream), device)
        if column.execution == "user's jit":
            return np.asarray(_jitted(quantity, tuple(inputs.numbers.items()))(arrays, upstream))
        with jax.disable_jit() if column.execution == "eager" else nullcontext():
            return np.asarray(_in_jax(quantity, inputs.numbers, arrays, upstream))


def _in_jax(quantity: str, numbers: dict[str, float], arrays: dict[str, Array], upstream: tuple[Array, ...]) -> Array:
    if quantity not in GRADIENTS:
        return computed(quantity, **arrays, **numbers)
    import jax

    def of_logits(x: Array) -> Array:
        found = computed(quantity, **arrays | {"logits": x}, **numbers)
        return found if isinstance(found, tuple) else (found,)

    return jax.vjp(of_logits, arrays["logits"])[1](upstream)[0]


@cache
def _jitted(quantity: str, numbers: tuple[tuple[str, float], ...]) -> Any:
    import jax

    return jax.jit(partial(_in_jax, quantity, dict(numbers)))


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


def _with_peer(formula: Callable[..., Array], column: Column, quantity: str, inputs: Inputs) -> Array:
    logits, ids = inputs.arrays["logits"], inputs.arrays["ids"]
    x = torch_array(logits, column.device)
    wide = x if logits.dtype == np.float64 else x.float()
    compiled = _compiled_peer(formula, logits.shape[-1], logits.dtype.name)
    return compiled(wide, torch_array(ids, column.device), inputs.numbers["temperature"]).cpu().numpy()


COLUMNS = (
    Column("array-api-strict", "eager", "cpu", _with_strict),
    Column("numpy", "eager", "cpu", _with_numpy),
    Column("numpy", "array-api", "cpu", _with_numpy),
    Column("numpy", "kernels", "cpu", _with_numpy),
    Column("torch", "kernels", "cpu", _with_torch, differentiable=True),
    Column("jax", "kernels", "cpu", _with_jax),
    Column("torch", "eager", "cpu", _with_torch, differentiable=True),
    Column("torch", "compiled", "cpu", _with_torch, differentiable=True),
    Column("torch", "array-api", "cpu", _with_torch),
    Column("jax", "eager", "cpu", _with_jax, differentiable=True),
    Column("jax", "compiled", "cpu", _with_jax, differentiable=True),
    Column("jax", "user's jit", "cpu", _with_jax, differentiable=True),
    Column("torch", "compiled", "cuda", _with_torch, differentiable=True),
    Column("torch", "compiled", "npu", _with_torch, differentiable=True),
    Column("jax", "compiled", "gpu", _with_jax, differentiable=True),
)
PEERS = (
    Column("torch log_softmax", "compiled", "cpu", partial(_with_peer, _log_softmax), peer=True),
    Column("torch -cross_entropy", "compiled", "cpu", partial(_with_peer, _cross_entropy), peer=True),
)
