"""One definition of a token's log-probability, from torch, JAX, NumPy and any array-API library."""

from xlogprobs.api import TokenStats, entropy, kl_divergence, logprobs, logprobs_and_entropy, token_stats
from xlogprobs.backend import BackendInfo, backends
from xlogprobs.mismatch import Mismatch, mismatch
from xlogprobs.sequences import next_token_logprobs, next_token_stats

__version__ = "0.1.0"
__all__ = [
    "BackendInfo",
    "Mismatch",
    "TokenStats",
    "__version__",
    "backends",
    "entropy",
    "kl_divergence",
    "logprobs",
    "logprobs_and_entropy",
    "mismatch",
    "next_token_logprobs",
    "next_token_stats",
    "token_stats",
]
