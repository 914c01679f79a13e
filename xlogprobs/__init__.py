"""One definition of a token's log-probability, from torch, JAX, NumPy and any array-API library."""

from xlogprobs.api import logprobs
from xlogprobs.backend import BackendInfo, backends
from xlogprobs.mismatch import Mismatch, mismatch
from xlogprobs.sequences import next_token_logprobs

__version__ = "0.1.0"
__all__ = ["BackendInfo", "Mismatch", "__version__", "backends", "logprobs", "mismatch", "next_token_logprobs"]
