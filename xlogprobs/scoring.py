"""Score the ids of stored logits, a piece of rows at a time, and write the results. No terminal code."""

import json
import math
import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from xlogprobs.accurate import Array
from xlogprobs.api import logprobs
from xlogprobs.contract import number_value
from xlogprobs.stored import InputError, StoredLogits

PIECE_BYTES = 32 << 20


class Library(StrEnum):
    """The array library that computes."""

    NUMPY = "numpy"
    TORCH = "torch"
    JAX = "jax"
    ARRAY_API = "array-api"


@dataclass(frozen=True)
class Scores:
    """Log-probabilities and what they come to over all positions that are not ignored.

    ``logprobs`` (...) are float32, or float64 for float64 logits, and 0 where ``ignored`` (...); ``ids`` (...) and
    ``metadata`` are the input's.
    """

    logprobs: Array
    ids: Array
    ignored: Array
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """The number of positions that count."""
        return int(self.ids.size - np.count_nonzero(self.ignored))

    @property
    def sum(self) -> float:
        """The log-probability of all ids together, added in float64."""
        return float(np.sum(self.logprobs, where=~self.ignored, dtype=np.float64))

    @property
    def mean(self) -> float:
        """``sum / positions``; NaN without positions."""
        return self.sum / self.positions if self.positions else math.nan

    @property
    def perplexity(self) -> float:
        """``exp(-mean)``; inf where that overflows."""
        with np.errstate(over="ignore"):
            return float(np.exp(-np.float64(self.mean)))


def score(
    stored: StoredLogits,
    *,
    backend: str = "numpy",
    temperature: float = 1.0,
    ignore_index: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score the ids of stored logits with `xlogprobs.logprobs`, a piece of rows at a time.

    Parameters
    ----------
    stored
        What `xlogprobs.stored.open_logits` returns.
    backend
        "numpy", "torch", "jax" or "array-api" (array-api-strict, which has no half precision: pieces are widened to
        float32 for it): the library that each piece is converted to.
    temperature, ignore_index
        As in `xlogprobs.logprobs`.
    progress
        Called with the number of rows done and of all rows after each piece.

    Raises
    ------
    InputError
        An id outside the vocabulary, with its position, or a temperature that is not finite and positive.
    ImportError
        A library that is not installed, with the command that installs it.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from xlogprobs.stored import open_logits
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/two.npz", logits=np.zeros((2, 4)), ids=np.array([3, 0]))
    ...     score(open_logits(f"{folder}/two.npz")).perplexity
    4.0
    """
    dtype, vocab = stored.logits.dtype, stored.logits.shape[-1]
    ignored = np.zeros(stored.ids.shape, bool) if ignore_index is None else np.asarray(stored.ids == ignore_index)
    _check_range(stored, ignored)
    try:
        number_value("temperature", temperature, narrow=dtype.itemsize < 8)
    except ValueError as error:
        raise InputError(str(error)) from None
    library = _load(Library(backend), dtype)
    rows = max(1, PIECE_BYTES // (vocab * dtype.itemsize))
    ids = stored.ids.reshape(-1)
    out = np.empty(ids.size, np.float64 if dtype.itemsize == 8 else np.float32)
    done = 0
    with library.context:
        for chunk in stored.logits.chunks(rows * vocab):
            piece = chunk.reshape(-1, vocab).astype(dtype.newbyteorder("="), copy=False)
            stop = done + len(piece)
            values = logprobs(
                library.convert(piece), ids[done:stop], temperature=temperature, ignore_index=ignore_index
            )
            out[done:stop] = library.to_numpy(values)
            done = stop
            if progress is not None:
                progress(done, ids.size)
    return Scores(out.reshape(stored.ids.shape), stored.ids, ignored, stored.metadata)


def check_output(path: str | os.PathLike[str], *inputs: str | os.PathLike[str]) -> None:
    """Raise `InputError` where `write_scores` could not write, or would overwrite an input, before any work is done."""
    target = Path(os.path.realpath(path))
    if target.suffix not in {".safetensors", ".npz"}:
        raise InputError(f"output {path}: expected a name that ends in .safetensors or .npz")
    if not target.parent.is_dir():
        raise InputError(f"output {path}: there is no folder {target.parent}")
    if target.is_dir():
        raise InputError(f"output {path} is a folder")
    if target.exists() and any(target.samefile(source) for source in inputs):
        raise InputError(f"output {path} would overwrite an input")
    if target.suffix == ".safetensors":
        _safetensors_save()


def write_scores(path: str | os.PathLike[str], scores: Scores) -> None:
    """Write ``logprobs``, ``ids`` and the metadata to a ``.safetensors`` or ``.npz`` file, whole or not at all.

    The bytes go to a temporary file in the same folder that replaces ``path`` once it is complete; on an error or an
    interrupt it is removed and what was at ``path`` stays.
    """
    target = Path(os.path.realpath(path))
    arrays: dict[str, Array] = {name: np.asarray(getattr(scores, name), order="C") for name in ("logprobs", "ids")}
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if target.suffix == ".npz":
                if scores.metadata:
                    arrays["metadata"] = np.array(json.dumps(scores.metadata))
                np.savez(file, **arrays)
            else:
                file.write(_safetensors_save()(arrays, scores.metadata or None))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
