"""One definition of a token's log-probability, from torch, JAX, NumPy and any array-API library."""

from xlogprobs.api import logprobs
from xlogprobs.backend import BackendInfo, backends

__version__ = "0.1.0"
__all__ = ["BackendInfo", "__version__", "backends", "logprobs"]
