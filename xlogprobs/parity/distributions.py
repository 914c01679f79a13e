"""The matrix's rows: batches of logits, each made from its own description."""

import zlib
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from xlogprobs.accurate import Array
from xlogprobs.parity.quantities import GRADIENTS, INTEGERS, STATISTICS, Inputs

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
    "ties",
    "NaN and +inf",
)
REAL = "SmolLM2"
REAL_VOCAB = 49152
GRADIENT_DISTRIBUTIONS = ("normal 3", "peaked", "offset 1e4", "masked", REAL)
GRADIENT_VOCABS = (7, 50257, REAL_VOCAB)
STATISTIC_DISTRIBUTIONS = ("normal 3", "peaked", "ties", "offset 1e4", "masked", "NaN and +inf")
TRANSFORMED = (
    # temperature, transforms, distribution
    (0.6, (), "peaked"),
    (1.0, ("softcap 30",), "normal 10"),
    (0.6, ("softcap 30",), "offset 1e4"),
    (1.0, ("mask",), "peaked"),
    (0.6, ("top-k mask",), "ties"),
    (1.0, ("bias",), "peaked"),
    (1.0, ("scale 0.25",), "normal 10"),
    (0.6, ("scale -2", "softcap 30", "bias", "mask"), "normal 10"),
)
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
    """What is computed of it, one of `xlogprobs.parity.quantities.QUANTITIES`."""
    transforms: tuple[str, ...] = ()
    """Beside the temperature: "scale S" and "softcap C"; "bias"; "mask" or "top-k mask"."""

    def __str__(self) -> str:
        shape = "x".join(map(str, (*self.shape, self.vocab)))
        many = f" K={self.ids_per_position}" if self.ids_per_position else ""
        transforms = "".join(f" {transform}" for transform in self.transforms)
        return f"{self.title} {self.dtype} {shape}{many} T={self.temperature}{transforms}"

    @property
    def title(self) -> str:
        of = f"{self.quantity} of " if self.quantity != "logprob" else ""
        return f"{of}{self.distribution}"

    @property
    def result_dtype(self) -> Any:
        if self.quantity in GRADIENTS:
            return _dtype(self.dtype)
        if self.quantity in INTEGERS:
            return np.dtype(np.int64)
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    def missing(self) -> str | None:
        """Why this case cannot be made here, or None."""
        if self.distribution != REAL:
            return absent("ml_dtypes", "cli") if self.dtype == "bfloat16" else None
        if not REAL_FILE.is_file():
            return "not run here: the SmolLM2 logits are in the repository, not in the wheel"
        return absent("ml_dtypes", "cli") or absent("safetensors", "cli")

    def inputs(self) -> Inputs:
        """logits (*shape, V), ids (*shape) or (*shape, K), and what else the quantity takes, as NumPy arrays."""
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        logits, ids = self._logits_and_ids(rng)
        arrays, numbers = {"logits": logits, "ids": ids}, {"temperature": self.temperature}
        for transform in self.transforms:
            match transform.split():
                case ["scale" | "softcap" as name, number]:
                    numbers[name] = float(number)
                case ["bias"]:
                    arrays["bias"] = 2 * rng.standard_normal(self.vocab, dtype=np.float32)
                case [*kind, "mask"]:
                    arrays["mask"] = _mask(rng, logits, ids, *kind)
                case _:
                    raise ValueError(f"transform is {transform!r}")
        if self.quantity == "KL":
            # the same logits and some noise; the reference of the first row lacks an entry
            reference = logits.astype(np.float64) + rng.standard_normal(logits.shape)
            reference[(0,) * (logits.ndim - 1)][np.argmax(logits.reshape(-1, self.vocab)[0])] = -np.inf
            arrays["ref_logits"] = reference.astype(logits.dtype)
        return Inputs(arrays, numbers, self._upstream(ids.shape))

    def _logits_and_ids(self, rng: np.random.Generator) -> tuple[Array, Array]:
        if self.distribution == REAL:
            logits, ids = _real()
            return logits.astype(_dtype(self.dtype)), ids
        rows = int(np.prod(self.shape))
        columns = self.ids_per_position or 1
        ids = rng.integers(0, self.vocab, (rows, columns))
        ids[:1], ids[1:2] = self.vocab - 1, 0
        logits = _draw(rng, self.distribution, rows, self.vocab, ids)
        shape = self.shape if self.ids_per_position is None else (*self.shape, columns)
        return logits.reshape(*self.shape, self.vocab).astype(_dtype(self.dtype)), ids.reshape(shape)

    def _upstream(self, shape_of_ids: tuple[int, ...]) -> tuple[Array, ...]:
        """In the dtype of the statistics; that of the logprobs has the shape of the ids."""
        rng = np.random.default_rng(zlib.crc32(str(self).encode()) + 1)
        dtype = np.float64 if self.dtype == "float64" else np.float32
        return tuple(
            np.asarray(rng.standard_normal(shape_of_ids if name == "logprob" else self.shape)).astype(dtype)
            for name in GRADIENTS.get(self.quantity, ())
        )


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
        case ["ties"]:
            x = np.round(4 * x) / 4
        case ["NaN", *_]:
            for row, value in enumerate((np.nan, np.inf, np.nan, np.inf)):
                x[row : row + 1, int(ids[row, 0]) if row < 2 else vocab // 2] = value
        case _:
            raise ValueError(f"distribution is {distribution!r}; known are {', '.join((*DISTRIBUTIONS, REAL))}")
    return x


def _mask(rng: np.random.Generator, logits: Array, ids: Array, kind: str = "random") -> Array:
    """Which entries to keep: half of them at random, or the 20 largest of each row; the ids too, but for the first row.

    The third row of a random mask keeps nothing. What row 1 does not keep is then set to NaN.
    """
    x = logits.reshape(-1, logits.shape[-1])
    each, columns = np.arange(len(x))[:, None], ids.reshape(len(x), -1)
    if kind == "top-k":
        largest = np.sort(x.astype(np.float64), axis=-1)[:, -min(20, x.shape[-1]), None]
        keep = x >= largest
    else:
        keep = rng.random(x.shape) < 0.5
    keep[each, columns] = each != 0
    if kind == "random":
        keep[2:3] = False
    x[1:2][~keep[1:2]] = np.nan  # in place: x is a view of the logits
    return keep.reshape(logits.shape)


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
    return [*plain, *tempered, *shaped, *real, *gradients, *_statistics(quick), *_transformed(quick)]


# A compiler builds a graph for each vocabulary, dtype, set of transforms and set of statistics: in the quick matrix
# each of these is met with one or two vocabularies and dtypes.
LARGE, SMALL, OF_REAL = ("float32", 50257), ("float32", 7), ("bfloat16", REAL_VOCAB)
OTHERS = (("float64", 7), ("float64", 2049), ("float16", 2049), ("bfloat16", 50257), ("float32", REAL_VOCAB))


def _statistics(quick: bool) -> list[Case]:
    """Every statistic but logprob, and the gradient of all together, without transforms."""
    found = []
    for dtype, vocab in (SMALL, LARGE, OF_REAL) if quick else (SMALL, LARGE, OF_REAL, *OTHERS):
        for distribution in (REAL,) if vocab == REAL_VOCAB else STATISTIC_DISTRIBUTIONS:
            shape = (57,) if distribution == REAL else (rows_for(vocab),)
            quantities = (*STATISTICS, "KL", *(["joint gradient"] if distribution != "NaN and +inf" else []))
            found += [Case(dtype, vocab, distribution, shape, quantity=quantity) for quantity in quantities]
    many = [Case("float32", 7, "ties", (2, 3), 0.6, 3, quantity) for quantity in ("rank", "joint gradient")]
    return found + many


def _transformed(quick: bool) -> list[Case]:
    """Each set of transforms: logprob and its gradient on logits that try it, and on real ones every quantity."""
    found = []
    for temperature, transforms, distribution in TRANSFORMED:
        for dtype, vocab in (SMALL,) if quick else (SMALL, LARGE, *OTHERS):
            if vocab != REAL_VOCAB:
                case = Case(dtype, vocab, distribution, (rows_for(vocab),), temperature, transforms=transforms)
                quantities = ("logprob", "gradient", *STATISTICS, "joint gradient")
                found += [replace(case, quantity=quantity) for quantity in quantities]
        real = Case(*OF_REAL, REAL, (57,), temperature, transforms=transforms)
        if not quick or transforms in ((), ("softcap 30",), ("top-k mask",)):
            found += [replace(real, quantity=quantity) for quantity in ("logprob", "gradient", "joint gradient", "KL")]
    return found


def absent(module: str, extra: str) -> str | None:
    """Why ``module`` cannot be used, or None."""
    return None if find_spec(module) else f"not run here: no {module} (pip install 'xlogprobs[{extra}]')"
