"""The matrix's rows: batches of logits, each made from its own description."""

import zlib
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from xlogprobs.accurate import Array

DTYPES = ("float16", "bfloat16", "float32", "float64")
VOCABS = (1, 7, 130, 2049, 32768, 50257, 151936)
DISTRIBUTIONS = (
    "normal 1",
    "normal 3",
    "normal 10",
    "peaked",
    "equal",
    "offset 1e4",
    "masked",
    "heavy-tailed",
    "NaN and +inf",
)
REAL = "SmolLM2"
REAL_VOCAB = 49152
GRADIENT_DISTRIBUTIONS = ("normal 3", "peaked", "offset 1e4", "masked", REAL)
GRADIENT_VOCABS = (7, 50257, REAL_VOCAB)
REAL_FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "smollm2.safetensors"


@dataclass(frozen=True)
class Case:
    """One batch of logits, made from its own description: the same on every machine and in every order."""

    dtype: str
    vocab: int
    distribution: str
    shape: tuple[int, ...]
    temperature: float = 1.0
    ids_per_position: int | None = None
    quantity: str = "logprob"
    """What is computed of it: "logprob", or "gradient", of the logits, for the upstream gradients of `upstream`."""

    def __str__(self) -> str:
        shape = "x".join(map(str, (*self.shape, self.vocab)))
        many = f" K={self.ids_per_position}" if self.ids_per_position else ""
        of = f"{self.quantity} of " if self.quantity != "logprob" else ""
        return f"{of}{self.distribution} {self.dtype} {shape}{many} T={self.temperature}"

    @property
    def result_dtype(self) -> Any:
        if self.quantity == "gradient":
            return _dtype(self.dtype)
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    def missing(self) -> str | None:
        """Why this case cannot be made here, or None."""
        if self.distribution != REAL:
            return absent("ml_dtypes", "cli") if self.dtype == "bfloat16" else None
        if not REAL_FILE.is_file():
            return "not run here: the SmolLM2 logits are in the repository, not in the wheel"
        return absent("ml_dtypes", "cli") or absent("safetensors", "cli")

    def arrays(self) -> tuple[Array, Array]:
        """logits (*shape, V) and ids (*shape) or (*shape, K) as NumPy arrays."""
        if self.distribution == REAL:
            logits, ids = _real()
            return logits.astype(_dtype(self.dtype)), ids
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        rows = int(np.prod(self.shape))
        columns = self.ids_per_position or 1
        ids = rng.integers(0, self.vocab, (rows, columns))
        ids[:1], ids[1:2] = self.vocab - 1, 0
        logits = _draw(rng, self.distribution, rows, self.vocab, ids)
        shape = self.shape if self.ids_per_position is None else (*self.shape, columns)
        return logits.reshape(*self.shape, self.vocab).astype(_dtype(self.dtype)), ids.reshape(shape)

    def upstream(self) -> Array:
        """Upstream gradients of the shape of the ids, in the dtype of the log-probabilities."""
        shape = self.shape if self.ids_per_position is None else (*self.shape, self.ids_per_position)
        drawn = np.random.default_rng(zlib.crc32(str(self).encode()) + 1).standard_normal(shape)
        return drawn.astype(np.float64 if self.dtype == "float64" else np.float32)


def _draw(rng: np.random.Generator, distribution: str, rows: int, vocab: int, ids: Array) -> Array:
    x = rng.standard_normal((rows, vocab))
    each = np.arange(rows)
    match distribution.split():
        case ["normal", deviation]:
            x *= float(deviation)
        case ["peaked"]:
            # the target is the peak in every other row, elsewhere it faces one
            at = np.where(each % 2, rng.integers(0, vocab, rows), ids[:, 0])
            x[each, at] = np.max(x, axis=-1) + np.linspace(12.0, 30.0, rows)
        case ["equal"]:
            x[:] = np.array([-10.0, 0.0, 3.25, 1e4])[each % 4, None]
        case ["offset", offset]:
            x += float(offset)
        case ["masked"]:
            # half of the entries, the target's own in row 0, all of row 2
            keep = rng.random((rows, vocab)) < 0.5
            keep[each, ids[:, 0]] = each != 0
            x[~keep | (each == 2)[:, None]] = -np.inf
        case ["heavy-tailed"]:
            x = rng.standard_t(2, (rows, vocab))
        case ["NaN", *_]:
            for row, value in enumerate((np.nan, np.inf, np.nan, np.inf)):
                x[row : row + 1, int(ids[row, 0]) if row < 2 else vocab // 2] = value
        case _:
            raise ValueError(f"distribution is {distribution!r}; known are {', '.join((*DISTRIBUTIONS, REAL))}")
    return x


@cache
def _real() -> tuple[Array, Array]:
    import ml_dtypes  # noqa: F401  registers the name bfloat16 with NumPy
    from safetensors.numpy import load_file

    stored = load_file(REAL_FILE)
    return stored["logits"], stored["ids"]


def _dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def rows_for(vocab: int) -> int:
    """Rows of a case: more where the vocabulary is small."""
    return 24 if vocab <= 2049 else 8 if vocab <= 50257 else 4


def cases(quick: bool = False) -> list[Case]:
    """The matrix's rows; ``quick`` keeps two vocabularies and two dtypes (a compiler needs seconds for each pair)."""
    vocabs = (7, 50257) if quick else VOCABS
    dtypes = ("bfloat16", "float32") if quick else DTYPES
    plain = [
        Case(dtype, vocab, distribution, (rows_for(vocab),))
        for dtype in dtypes
        for vocab in vocabs
        for distribution in DISTRIBUTIONS
    ]
    tempered = [
        Case(dtype, vocab, distribution, (rows_for(vocab),), 0.7)
        for dtype in dtypes
        for vocab in (7, 50257)
        for distribution in DISTRIBUTIONS
    ]
    shaped = [
        Case(dtype, vocab, "normal 3", shape, 1.0, many)
        for dtype in dtypes
        for vocab in (7, 50257)
        for shape, many in (((), None), ((2, 3), None), ((4,), 3))
    ]
    real = [
        Case(dtype, REAL_VOCAB, REAL, (57,), temperature)
        for dtype in ("bfloat16", "float32")
        for temperature in (1.0, 0.7)
    ]
    gradients = [
        replace(case, quantity="gradient")
        for case in (*plain, *tempered, *shaped, *real)
        if case.distribution in GRADIENT_DISTRIBUTIONS and case.vocab in GRADIENT_VOCABS
    ]
    return [*plain, *tempered, *shaped, *real, *gradients]


def absent(module: str, extra: str) -> str | None:
    """Why ``module`` cannot be used, or None."""
    return None if find_spec(module) else f"not run here: no {module} (pip install 'xlogprobs[{extra}]')"
