"""Score the ids of stored logits, a piece of rows at a time, and write the results. No terminal code."""

import csv
import io
import json
import math
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import numpy as np

from xlogprobs.accurate import Array
from xlogprobs.api import WANTED, TokenStats, token_stats
from xlogprobs.contract import check_top_k, check_want, number_value
from xlogprobs.stored import InputError, StoredLogits

PIECE_BYTES = 16 << 20


class Library(StrEnum):
    """The array library that computes."""

    NUMPY = "numpy"
    TORCH = "torch"
    JAX = "jax"
    ARRAY_API = "array-api"


@dataclass(frozen=True)
class Scores:
    """Statistics of stored tokens, and what they come to over all positions that are not ignored.

    ``stats`` is what `xlogprobs.token_stats` gives, in NumPy: float32, or float64 for float64 logits; rank and top_ids
    int64; 0 (top_ids -1) where ``ignored`` (...). ``ids`` (...), ``tokens`` (their texts in C order, where the file has
    them) and ``metadata`` are the input's. A figure is None where its statistic was not asked for, and a mean NaN
    without positions.
    """

    stats: TokenStats
    ids: Array
    ignored: Array
    tokens: list[str] | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """The number of positions that count."""
        return int(self.ids.size - np.count_nonzero(self.ignored))

    @property
    def sum(self) -> float | None:
        """The log-probability of all ids together, added in float64."""
        return self._sum(self.stats.logprob)

    @property
    def mean(self) -> float | None:
        """``sum / positions``."""
        return self._mean(self.stats.logprob)

    @property
    def perplexity(self) -> float | None:
        """``exp(-mean)``; inf where that overflows."""
        if self.mean is None:
            return None
        with np.errstate(over="ignore"):
            return float(np.exp(-np.float64(self.mean)))

    @property
    def mean_entropy(self) -> float | None:
        """The mean entropy of the positions."""
        return self._mean(self.stats.entropy)

    @property
    def greedy_share(self) -> float | None:
        """The share of ids of rank 1."""
        return self._mean(None if self.stats.rank is None else self.stats.rank == 1)

    def _sum(self, values: Array | None) -> float | None:
        return None if values is None else float(np.sum(values, where=~self.ignored, dtype=np.float64))

    def _mean(self, values: Array | None) -> float | None:
        total = self._sum(values)
        if total is None:
            return None
        return total / self.positions if self.positions else math.nan


def score(
    stored: StoredLogits,
    *,
    want: Collection[str] = ("logprob",),
    top_k: int = 0,
    backend: str = "numpy",
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score the ids of stored logits with `xlogprobs.token_stats`, a piece of rows at a time.

    Parameters
    ----------
    stored
        What `xlogprobs.stored.open_logits` returns.
    want, top_k
        The statistics, as in `xlogprobs.token_stats`.
    backend
        "numpy", "torch", "jax" or "array-api" (array-api-strict, which has no half precision: pieces are widened to
        float32 for it): the library that each piece is converted to.
    temperature, scale, softcap
        Numbers, as in `xlogprobs.logprobs`.
    ignore_index
        As in `xlogprobs.logprobs`.
    progress
        Called with the number of rows done and of all rows after each piece.

    Raises
    ------
    InputError
        An id outside the vocabulary, with its position; an unknown statistic; a top_k outside [0, V]; a number that
        `xlogprobs.logprobs` does not take; metadata ``tokens`` that do not fit the ids.
    ImportError
        A library that is not installed, with the command that installs it.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from xlogprobs.stored import open_logits
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/two.npz", logits=np.array([[0, 1, 2, 3.0], [0, 2, 0, 1]]), ids=np.array([3, 0]))
    ...     scores = score(open_logits(f"{folder}/two.npz"), want=["logprob", "rank"], top_k=1)
    >>> scores.stats.rank
    array([1, 3])
    >>> scores.stats.top_ids
    array([[3],
           [1]])
    >>> scores.greedy_share
    0.5
    """
    dtype, vocab = stored.logits.dtype, stored.logits.shape[-1]
    ignored = np.zeros(stored.ids.shape, bool) if ignore_index is None else np.asarray(stored.ids == ignore_index)
    _check_range(stored, ignored)
    transforms: dict[str, Any] = {"temperature": temperature, "scale": scale, "softcap": softcap}
    try:
        check_want(want, stored.ids, WANTED)
        check_top_k(top_k, stored.logits)
        for name, number in transforms.items():
            if number is not None:
                number_value(name, number, narrow=dtype.itemsize < 8)
    except ValueError as error:
        raise InputError(str(error)) from None
    tokens = stored.tokens()
    library = _load(Library(backend), dtype)
    rows = max(1, PIECE_BYTES // (vocab * dtype.itemsize))
    ids = stored.ids.reshape(-1)
    pieces: list[TokenStats] = []
    done = 0
    with library.context:
        for chunk in stored.logits.chunks(rows * vocab):
            piece = chunk.reshape(-1, vocab).astype(dtype.newbyteorder("="), copy=False)
            stop = done + len(piece)
            found = token_stats(
                library.convert(piece), ids[done:stop], want, top_k, ignore_index=ignore_index, **transforms
            )
            pieces.append(TokenStats(*(None if part is None else library.to_numpy(part) for part in found)))
            done = stop
            if progress is not None:
                progress(done, ids.size)
    stats = TokenStats(*(_joined(parts, stored.ids.shape) for parts in zip(*pieces, strict=True)))
    return Scores(stats, stored.ids, ignored, tokens, stored.metadata)


def _joined(parts: tuple[Array, ...], positions: tuple[int, ...]) -> Array | None:
    if parts[0] is None:
        return None
    whole: Array = np.concatenate(parts)
    whole = whole.astype(np.int64, copy=False) if whole.dtype.kind == "i" else whole  # int32 from JAX
    return whole.reshape(positions + whole.shape[1:])


def check_output(path: str | os.PathLike[str], *inputs: str | os.PathLike[str]) -> None:
    """Raise `InputError` where `write_scores` could not write, or would overwrite an input, before any work is done."""
    target = Path(os.path.realpath(path))
    if target.suffix not in _WRITERS:
        *suffixes, last = _WRITERS
        raise InputError(f"output {path}: expected a name that ends in {', '.join(suffixes)} or {last}")
    if not target.parent.is_dir():
        raise InputError(f"output {path}: there is no folder {target.parent}")
    if target.is_dir():
        raise InputError(f"output {path} is a folder")
    if target.exists() and any(target.samefile(source) for source in inputs):
        raise InputError(f"output {path} would overwrite an input")
    if target.suffix == ".safetensors":
        _safetensors_save()


def write_scores(path: str | os.PathLike[str], scores: Scores) -> None:
    """Write ids and statistics to a ``.safetensors``, ``.npz``, ``.csv`` or ``.jsonl`` file, whole or not at all.

    The first two hold the metadata and arrays: ``ids``, ``logprobs``, and every other statistic under its name in
    `xlogprobs.TokenStats`. The last two have a line for each token: its ``position``, its ``id``, its ``token`` where
    the file has texts, and its statistics. Several values are a list in ``.jsonl``, and numbered columns in ``.csv``
    (top_id_1, top_id_2, ...). Floats have the fewest digits that give their value back; others are NaN, inf and -inf in
    ``.csv``, and NaN, Infinity and -Infinity in ``.jsonl``, as Python's json reads and writes them. The statistics of
    an ignored position are empty, and null.

    The bytes go to a temporary file in the same folder that replaces ``path`` once it is complete; on an error or an
    interrupt it is removed and what was at ``path`` stays.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            _WRITERS[target.suffix](file, scores)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_safetensors(file: IO[bytes], scores: Scores) -> None:
    file.write(_safetensors_save()(_arrays(scores), scores.metadata or None))


def _write_npz(file: IO[bytes], scores: Scores) -> None:
    arrays = _arrays(scores)
    if scores.metadata:
        arrays["metadata"] = np.array(json.dumps(scores.metadata))
    np.savez(file, **arrays)


def _arrays(scores: Scores) -> dict[str, Array]:
    stats = scores.stats._asdict()
    named = {"ids": scores.ids, "logprobs": stats.pop("logprob"), **stats}
    return {name: np.asarray(array, order="C") for name, array in named.items() if array is not None}


def _write_csv(file: IO[bytes], scores: Scores) -> None:
    # the text of a token may be half a surrogate pair, which UTF-8 can't hold
    text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="")
    writer = csv.writer(text)
    fields = _fields(scores)
    writer.writerow(column for name, values in fields.items() for column in _columns(name, values))
    for record in _records(scores, fields):
        entries = (entry for value in record for entry in (value if isinstance(value, list) else [value]))
        writer.writerow("NaN" if entry != entry else entry for entry in entries)  # Polars takes Python's nan for a text
    text.detach()


def _write_jsonl(file: IO[bytes], scores: Scores) -> None:
    fields = _fields(scores)
    for record in _records(scores, fields):
        file.write(json.dumps(dict(zip(fields, record, strict=True))).encode() + b"\n")


_WRITERS: dict[str, Callable[[IO[bytes], Scores], None]] = {
    ".safetensors": _write_safetensors,
    ".npz": _write_npz,
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}


def _fields(scores: Scores) -> dict[str, Array]:
    """What a line of text says of each of N tokens: arrays (N,), or (N, K) for K values a token."""
    size, positions = scores.ids.size, scores.ids.shape
    place = np.arange(size) if len(positions) < 2 else np.indices(positions).reshape(len(positions), size).T
    texts = {} if scores.tokens is None else {"token": np.array(scores.tokens, object)}
    stats = {
        name: values.reshape(size, *values.shape[len(positions) :])
        for name, values in scores.stats._asdict().items()
        if values is not None
    }
    return {"position": place, "id": scores.ids.reshape(size), **texts, **stats}


def _columns(name: str, values: Array) -> list[str]:
    return [name] if values.ndim == 1 else [f"{name.removesuffix('s')}_{k + 1}" for k in range(values.shape[1])]


def _records(scores: Scores, fields: dict[str, Array]) -> Iterator[list[Any]]:
    """The fields of each token in turn, as Python's strings, numbers, lists and None."""
    for ignored, *values in zip(scores.ignored.reshape(-1), *fields.values(), strict=True):
        yield [
            _plain(value, ignored and name in TokenStats._fields) for name, value in zip(fields, values, strict=True)
        ]


def _plain(value: Any, left_out: bool) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(entry, left_out) for entry in value]
    if left_out:
        return None
    if isinstance(value, np.floating):
        return float(str(value))  # -0.1 of float32, where float(value) is -0.10000000149011612
    return value if isinstance(value, str) else int(value)


def _safetensors_save() -> Callable[..., bytes]:
    try:
        from safetensors import numpy as safetensors_numpy
    except ModuleNotFoundError as error:
        raise ImportError('writing .safetensors needs safetensors: pip install "xlogprobs[cli]"') from error
    save: Callable[..., bytes] = safetensors_numpy.save
    return save


def _check_range(stored: StoredLogits, ignored: Array) -> None:
    vocab = stored.logits.shape[-1]
    wrong = ((stored.ids < 0) | (stored.ids >= vocab)) & ~ignored
    if not wrong.any():
        return
    first = tuple(int(i) for i in np.unravel_index(np.argmax(wrong), wrong.shape))
    advice = "" if int(stored.ids[first]) >= 0 else f"; to leave such positions out: --ignore-index {stored.ids[first]}"
    raise InputError(f"{stored.path}: ids{list(first) or ''} is {stored.ids[first]}, outside [0, {vocab}){advice}")


@dataclass(frozen=True)
class _Conversion:
    convert: Callable[[Array], Array]
    to_numpy: Callable[[Array], Array] = np.asarray
    context: AbstractContextManager[Any] = field(default_factory=nullcontext)


def _load(library: Library, dtype: Any) -> _Conversion:
    package = {Library.ARRAY_API: "array-api-strict"}.get(library, f'"xlogprobs[{library}]"')
    try:
        return _CONVERSIONS[library](dtype)
    except ModuleNotFoundError as error:
        raise ImportError(f"--backend {library} needs {error.name}: pip install {package}") from error


def _numpy(dtype: Any) -> _Conversion:
    return _Conversion(np.asarray)


def _torch(dtype: Any) -> _Conversion:
    import torch

    def convert(piece: Array) -> Array:
        writable = np.array(piece)  # torch warns of arrays that it could write to and must not, such as a read-only map
        if dtype.name == "bfloat16":
            return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(writable)

    return _Conversion(convert, context=torch.inference_mode())


def _jax(dtype: Any) -> _Conversion:
    import jax

    wide = dtype.itemsize == 8
    moved: Any = jax if hasattr(jax, "enable_x64") else jax.experimental  # in jax 0.8
    return _Conversion(jax.numpy.asarray, context=moved.enable_x64(True) if wide else nullcontext())


def _array_api(dtype: Any) -> _Conversion:
    import array_api_strict

    def convert(piece: Array) -> Array:
        return array_api_strict.asarray(piece.astype(np.float32) if dtype.itemsize == 2 else np.array(piece))

    return _Conversion(convert, np.from_dlpack)


_CONVERSIONS: dict[Library, Callable[[Any], _Conversion]] = {
    Library.NUMPY: _numpy,
    Library.TORCH: _torch,
    Library.JAX: _jax,
    Library.ARRAY_API: _array_api,
}
