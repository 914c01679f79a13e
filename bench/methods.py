"""The ways of computing token log-probabilities that are measured, each as a function of prepared inputs."""

from collections.abc import Callable
from typing import Any

import numpy as np

Method = Callable[[Any, Any], Any]

LIMIT = "read limit"
OURS = "xlogprobs"


class Library:
    """Inputs, methods and the end of a call, for one array library."""

    baseline: str

    def inputs(self, rows: int, vocab: int, dtype: str) -> tuple[Any, Any]:
        raise NotImplementedError

    def methods(self) -> dict[str, Method]:
        raise NotImplementedError

    def finish(self, result: Any) -> Any:
        return result


def _random(rows: int, vocab: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(42)
    return rng.standard_normal((rows, vocab), dtype=np.float32), rng.integers(0, vocab, rows)


class Torch(Library):
    baseline = "-cross_entropy, torch.compile"

    def inputs(self, rows: int, vocab: int, dtype: str) -> tuple[Any, Any]:
        import torch

        logits, ids = _random(rows, vocab)
        return torch.from_numpy(logits).to(getattr(torch, dtype)), torch.from_numpy(ids)

    def methods(self) -> dict[str, Method]:
        import torch

        from xlogprobs import logprobs

        @torch.compile
        def cross_entropy(logits: Any, ids: Any) -> Any:
            return -torch.nn.functional.cross_entropy(logits.float(), ids, reduction="none")

        def log_softmax(logits: Any, ids: Any) -> Any:
            return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, None])[:, 0]

        return {
            LIMIT: lambda logits, ids: logits.amax(-1),
            self.baseline: cross_entropy,
            "log_softmax, gather": log_softmax,
            OURS: logprobs,
        }


class Jax(Library):
    baseline = "-optax cross-entropy, jax.jit"

    def inputs(self, rows: int, vocab: int, dtype: str) -> tuple[Any, Any]:
        import jax.numpy as jnp

        logits, ids = _random(rows, vocab)
        return jnp.asarray(logits).astype(dtype), jnp.asarray(ids)

    def methods(self) -> dict[str, Method]:
        import jax
        import optax

        from xlogprobs import logprobs

        return {
            LIMIT: jax.jit(lambda logits, ids: logits.max(-1)),
            self.baseline: jax.jit(lambda x, ids: -optax.softmax_cross_entropy_with_integer_labels(x, ids)),
            OURS: logprobs,
        }

    def finish(self, result: Any) -> Any:
        return result.block_until_ready()


class NumPy(Library):
    baseline = "textbook formula"

    def inputs(self, rows: int, vocab: int, dtype: str) -> tuple[Any, Any]:
        import ml_dtypes

        logits, ids = _random(rows, vocab)
        return logits.astype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype), ids

    def methods(self) -> dict[str, Method]:
        from xlogprobs import logprobs

        def textbook(logits: Any, ids: Any) -> Any:
            wide = logits.astype(np.float32, copy=False)
            shifted = wide - wide.max(axis=-1, keepdims=True)
            log_softmax = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
            return np.take_along_axis(log_softmax, ids[:, None], axis=-1)[:, 0]

        def read(logits: Any, ids: Any) -> Any:
            bits = logits.view(np.int16 if logits.itemsize == 2 else np.int32)  # NumPy has no fast bfloat16 maximum
            return bits.max(axis=-1)

        return {LIMIT: read, self.baseline: textbook, OURS: logprobs}


LIBRARIES: dict[str, Library] = {"numpy": NumPy(), "torch": Torch(), "jax": Jax()}
