"""Logits stored in a file, opened without being read: .safetensors, .npz, or .npy with the ids in a second .npy.

Logits are never held in full. A piece of rows is mapped, used and unmapped again, so that the resident memory is that
of a piece whatever the size of the file; a compressed .npz member cannot be mapped and is decompressed piece by piece
instead. Of a .safetensors file, ``safetensors.safe_open`` with its map keeps every page it has read resident, and
without it (``backend="pread"``) reads the whole tensor for each slice: hence the few lines here that read the header.
"""

import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from xlogprobs.accurate import Array

_SAFETENSORS_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip


class InputError(ValueError):
    """A file or an option that cannot be used; the message is one line that says what to change."""


class Tensor(Protocol):
    """An array in a file."""

    @property
    def dtype(self) -> Any:
        """The NumPy dtype of its elements, or the name of one that NumPy has no type for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    def chunks(self, count: int) -> Iterator[Array]:
        """Yield its elements in C order, ``count`` at a time, as 1-D arrays; one empty array if it has none."""


@dataclass(frozen=True)
class MappedTensor:
    """An array that lies in a file as plain bytes; each chunk has a map of its own, dropped with the chunk."""

    path: Path
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    fortran_order: bool = False

    def chunks(self, count: int) -> Iterator[Array]:
        size = math.prod(self.shape)
        if size == 0:
            yield np.empty(0, self.dtype)
        for start in range(0, size, max(count, 1)):
            stop = min(start + count, size)
            if self.fortran_order:
                whole = np.memmap(self.path, self.dtype, "r", self.offset, self.shape, order="F")
                yield whole.flat[start:stop]
            else:
                offset = self.offset + start * self.dtype.itemsize
                yield np.asarray(np.memmap(self.path, self.dtype, "r", offset, (stop - start,)))


@dataclass(frozen=True)
class CompressedTensor:
    """A compressed ``.npz`` member, decompressed chunk by chunk (read in full where it is in Fortran order)."""

    path: Path
    member: str
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    fortran_order: bool = False

    def chunks(self, count: int) -> Iterator[Array]:
        size = math.prod(self.shape)
        if size == 0:
            yield np.empty(0, self.dtype)
        with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as stream:
            stream.read(self.offset)
            step = size if self.fortran_order else max(count, 1)
            for start in range(0, size, step):
                values = self._read(stream, min(step, size - start))
                if self.fortran_order:
                    values = values.reshape(self.shape, order="F").ravel(order="C")
                for first in range(0, len(values), max(count, 1)):
                    yield values[first : first + count]

    def _read(self, stream: IO[bytes], count: int) -> Array:
        wanted = count * self.dtype.itemsize
        try:
            data = stream.read(wanted)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise InputError(f"{self.path}: the member {self.member} is damaged ({error})") from error
        if len(data) < wanted:
            raise InputError(f"{self.path}: the member {self.member} ends before its {self.shape} elements do")
        return np.frombuffer(data, self.dtype)


@dataclass(frozen=True)
class StoredLogits:
    """``logits`` (..., V) left in the file, their ``ids`` (...) in memory, and the file's ``metadata``."""

    path: Path
    logits: Tensor
    ids: Array
    metadata: dict[str, str] = field(default_factory=dict)

    def tokens(self) -> list[str] | None:
        """The text of each id, in C order, from the metadata ``tokens``, a JSON list of strings; None without it."""
        if "tokens" not in self.metadata:
            return None
        try:
            tokens = np.asarray(json.loads(self.metadata["tokens"]), dtype=object).ravel().tolist()
        except ValueError:
            tokens = [None]
        if len(tokens) != self.ids.size or not all(isinstance(token, str) for token in tokens):
            raise InputError(f"{self.path}: the metadata `tokens` is not a JSON list of {self.ids.size} strings")
        return tokens


def open_logits(path: str | os.PathLike[str], ids: str | os.PathLike[str] | None = None) -> StoredLogits:
    """Open stored logits; only the header and the ids are read.

    Parameters
    ----------
    path
        A .safetensors or .npz file that holds ``logits`` (..., V) and ``ids`` (...), or a .npy file of logits. Logits
        are float16, float32, float64 or, in .safetensors, bfloat16; ids are integers. The metadata of an .npz is its
        member ``metadata``: one string, a JSON object of strings.
    ids
        The .npy file with the ids of logits in a .npy file.

    Raises
    ------
    InputError
        A file that is missing, damaged or of another kind, or names, shapes and dtypes other than these.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/two.npz", logits=np.zeros((2, 4)), ids=np.array([3, 0]))
    ...     open_logits(f"{folder}/two.npz").logits.shape
    (2, 4)
    """
    source = _existing(path)
    if source.suffix == ".npy":
        if ids is None:
            raise InputError(f"{source} holds one array: name the file with its ids, --ids ids.npy")
        tensors: dict[str, Tensor] = {"logits": _open_npy(source), "ids": _open_npy(_existing(ids))}
        metadata: dict[str, str] = {}
    elif ids is not None:
        raise InputError(f"--ids goes with logits in a .npy file; {source.name} has to hold its own `ids`")
    elif source.suffix == ".safetensors":
        tensors, metadata = _open_safetensors(source)
    elif source.suffix == ".npz":
        tensors, metadata = _open_npz(source)
    else:
        raise InputError(f"{source}: expected a .safetensors, .npz or .npy file")
    return _checked(source, tensors, metadata)


def _existing(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    if not found.is_file():
        raise InputError(f"{path} is a folder" if found.is_dir() else f"there is no file {path}")
    return found


def _open_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the header: 8 little-endian bytes with its length, then JSON (https://huggingface.co/docs/safetensors)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise InputError(f"{path} is not a complete .safetensors file: it is {size} bytes long")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            tensors = {
                name: _open_safetensor(path, 8 + length, entry["dtype"], entry["shape"], entry["data_offsets"])
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} is not a .safetensors file: its header cannot be read") from error
    return tensors, metadata


def _open_safetensor(path: Path, base: int, dtype: str, shape: list[int], span: list[int]) -> Tensor:
    tensor = MappedTensor(path, _safetensors_dtype(dtype), tuple(shape), base + span[0])
    if isinstance(tensor.dtype, np.dtype):
        if math.prod(shape) * tensor.dtype.itemsize != span[1] - span[0]:
            raise InputError(f"{path} is damaged: {dtype} of shape {tuple(shape)} in {span[1] - span[0]} bytes")
        _check_length(tensor)
    return tensor


def _safetensors_dtype(name: str) -> Any:
    if name != "BF16":
        return np.dtype(_SAFETENSORS_DTYPES[name]) if name in _SAFETENSORS_DTYPES else name
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise ImportError('bfloat16 without torch or jax needs ml_dtypes: pip install "xlogprobs[cli]"') from error
    return np.dtype(ml_dtypes.bfloat16)


def _open_npy(path: Path) -> Tensor:
    with path.open("rb") as file:
        dtype, shape, fortran_order = _npy_header(file, str(path))
        return _check_length(MappedTensor(path, dtype, shape, file.tell(), fortran_order))


def _open_npz(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors: dict[str, Tensor] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.filename.endswith(".npy"):
                    tensors[info.filename.removesuffix(".npy")] = _open_member(path, archive, info)
    except zipfile.BadZipFile as error:
        raise InputError(f"{path} is not a .npz file ({error})") from error
    stored = tensors.pop("metadata", None)
    if stored is None or not isinstance(stored.dtype, np.dtype) or stored.dtype.kind != "U" or stored.shape:
        return tensors, {}
    try:
        metadata = json.loads(str(next(stored.chunks(1))[0]))
    except ValueError:
        metadata = {}
    return tensors, {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _open_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Tensor:
    with archive.open(info) as stream:
        dtype, shape, fortran_order = _npy_header(stream, f"{path}: {info.filename}")
        header = stream.tell()
    if info.compress_type != zipfile.ZIP_STORED:
        return CompressedTensor(path, info.filename, dtype, shape, header, fortran_order)
    with path.open("rb") as file:  # a local header's name and extra field may differ in length from the directory's
        file.seek(info.header_offset + 26)
        name, extra = struct.unpack("<HH", file.read(4))
    offset = info.header_offset + 30 + name + extra + header
    return _check_length(MappedTensor(path, dtype, shape, offset, fortran_order))


def _npy_header(file: IO[bytes], what: str) -> tuple[Any, tuple[int, ...], bool]:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(file)
    except ValueError as error:
        raise InputError(f"{what} is not a .npy file: {error}") from error
    return dtype, shape, fortran_order


def _check_length(tensor: MappedTensor) -> MappedTensor:
    end = tensor.offset + math.prod(tensor.shape) * tensor.dtype.itemsize
    size = tensor.path.stat().st_size
    if end > size:
        raise InputError(f"{tensor.path} is cut short: {size} bytes of at least {end}")
    return tensor


def _checked(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> StoredLogits:
    missing = [name for name in ("logits", "ids") if name not in tensors]
    if missing:
        held = ", ".join(f"{name} {tensor.dtype} {tensor.shape}" for name, tensor in tensors.items()) or "nothing"
        raise InputError(f"{path} has no {' and no '.join(f'`{name}`' for name in missing)}; it holds {held}")
    logits, ids = tensors["logits"], tensors["ids"]
    _check_logits_dtype(path, logits)
    if not isinstance(ids.dtype, np.dtype) or ids.dtype.kind not in "iu":
        raise InputError(f"{path}: ids are {ids.dtype}; expected integers")
    if not logits.shape or logits.shape[-1] == 0:
        raise InputError(f"{path}: logits have shape {logits.shape}; expected (..., V) with V at least 1")
    if ids.shape != logits.shape[:-1]:
        raise InputError(
            f"{path}: ids have shape {ids.shape}; logits of shape {logits.shape} take ids of shape {logits.shape[:-1]}"
        )
    values = np.array(next(ids.chunks(math.prod(ids.shape))), ids.dtype.newbyteorder("=")).reshape(ids.shape)
    return StoredLogits(path, logits, values, metadata)


def _check_logits_dtype(path: Path, logits: Tensor) -> None:
    dtype = logits.dtype
    if isinstance(dtype, np.dtype):
        if dtype.name == "bfloat16" or (dtype.kind == "f" and dtype.itemsize in (2, 4, 8)):
            return
        if dtype.kind == "V":
            raise InputError(
                f"{path}: logits are raw bytes ({dtype}): .npy and .npz cannot name bfloat16. "
                "Store bfloat16 logits as .safetensors, or as float32"
            )
    raise InputError(f"{path}: logits are {dtype}; expected float16, bfloat16, float32 or float64")
