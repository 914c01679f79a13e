"""What every test file shares: one fixture that hands a test each array library in turn."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

# read when the libraries are first imported, so set before any test module is
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a worker pool would fork a process that runs JAX threads
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and JAX share the accelerator

# raised when torch imports its own compiler; as an error it would read as "there is no compiler"
TORCH_IMPORT = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"

LIBRARIES = ("numpy", "torch", "jax", "array-api-strict")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", TORCH_IMPORT)


@dataclass(frozen=True)
class Library:
    """An array library under test: its namespace and the way from and to NumPy.

    ``asarray`` skips the test where the library has no such dtype; NumPy arrays come out read-only.
    """

    name: str
    xp: Any
    convert: Callable[[np.ndarray], Any]
    lacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def asarray(self, array: Any) -> Any:
        array = np.asarray(array)
        if array.dtype.name in self.lacks:
            pytest.skip(f"{self.name} has no {array.dtype.name}")
        return self.convert(array)

    def tonumpy(self, x: Any) -> np.ndarray:
        """A NumPy array with the same values and, but for torch's bfloat16 (float32 here), the same dtype."""
        if self.name == "torch":
            x = x.detach().cpu()
            return (x.float() if x.dtype == self.xp.bfloat16 else x).numpy()
        return np.asarray(x)


def make_library(name: str) -> Library:
    if name == "numpy":
        return Library(name, np, _read_only)
    if name == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        from xlogprobs.parity import torch_array

        return Library(name, torch, torch_array)
    if name == "jax":
        jax = pytest.importorskip("jax", reason="jax is not installed")
        lacks = () if jax.config.jax_enable_x64 else ("float64",)
        return Library(name, jax.numpy, jax.numpy.asarray, lacks)
    strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    return Library(name, strict, strict.asarray, ("float16", "bfloat16"))


def _read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    """Each array library in turn; a library that is not installed skips with its name."""
    return make_library(request.param)


@pytest.fixture
def without_kernels() -> Iterator[None]:
    """NumPy, torch and JAX as where Numba is not installed."""
    from xlogprobs_cpu import core

    with core.disabled():
        yield


@pytest.fixture
def torch_runs_eagerly(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests that take each library in turn and wait for no compiler."""
    if "library" in request.fixturenames and request.node.callspec.params["library"] == "torch":
        module = pytest.importorskip("torch", reason="torch is not installed")
        with module.compiler.set_stance("force_eager"):
            yield
    else:
        yield
