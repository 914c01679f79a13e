"""What a call may be. Every check of the public functions and every error message is here."""

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from xlogprobs.accurate import Array, Pair

if TYPE_CHECKING:
    from xlogprobs.backend import Backend

InvalidIds = Literal["auto", "raise", "nan"]

IGNORED = -1  # an id equal to ignore_index, as the backends see it
INVALID = -2  # any other id outside the vocabulary

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Call(NamedTuple):
    """A call that passed every check, in the form that a backend runs."""

    logits: Array
    ids: Array
    """(*logits.shape[:-1], K) in [0, V), or IGNORED, or INVALID."""
    temperature: float | Array | None
    one_id: bool
    """ids came as one per position: the result has no K."""


def check(
    backend: "Backend",
    logits: Array,
    ids: Any,
    temperature: Any,
    ignore_index: int | None,
    invalid_ids: InvalidIds,
) -> Call:
    check_logits(backend, logits)
    if invalid_ids not in get_args(InvalidIds):
        raise ValueError(f"invalid_ids is {invalid_ids!r}; expected one of {', '.join(map(repr, get_args(InvalidIds)))}")
    if ignore_index is not None and (isinstance(ignore_index, bool) or not hasattr(ignore_index, "__index__")):
        raise TypeError(f"ignore_index is {_what(ignore_index)}; expected an int or None")
    raw, source = check_ids(backend, logits, ids)
    shape, positions = tuple(raw.shape), tuple(logits.shape[:-1])
    one_id = shape == positions
    if not one_id and shape[:-1] != positions:
        many = f"({', '.join([*map(str, positions), 'K'])})"
        raise ValueError(
            f"ids has shape {shape}; logits of shape {tuple(logits.shape)} take ids of shape {positions} or {many}"
        )
    encoded = encode(source.namespace(raw), raw, logits.shape[-1], ignore_index)
    refuse_invalid(source, backend, raw, encoded, logits, ignore_index, invalid_ids)
    if source is not backend:
        encoded = backend.from_numpy(encoded, logits)
    if one_id:
        encoded = encoded[..., None]
    return Call(logits, encoded, check_temperature(backend, logits, temperature), one_id)


def check_logits(backend: "Backend", logits: Array) -> None:
    dtype = backend.dtype_name(logits)
    if dtype not in FLOATS:
        raise TypeError(f"logits has dtype {dtype}; expected one of {', '.join(FLOATS)}")
    if len(logits.shape) == 0:
        raise ValueError("logits has shape (); expected (..., V) with the vocabulary last")
    if logits.shape[-1] == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}: the vocabulary (last axis) is empty")


def check_ids(backend: "Backend", logits: Array, ids: Any) -> tuple[Array, "Backend"]:
    """The ids as an array, and the backend that owns it: NumPy's for NumPy arrays, ints and lists."""
    from xlogprobs.backend import array_library, numpy_backend

    library = array_library(ids)
    if library is None or library == "numpy":
        source = backend if array_library(logits) == "numpy" else numpy_backend()
        ids = _from_python("ids", ids)
        if ids.size == 0 and ids.dtype == np.float64 and library is None:
            ids = ids.astype(np.int64)  # an empty list has no integers to tell its dtype
    elif library == array_library(logits):
        source = backend
        _check_device(backend, "ids", ids, logits)
    else:
        raise TypeError(
            f"ids is {_what(ids)} and logits {_what(logits)}; expected ids from the same library, NumPy or Python ints"
        )
    dtype = source.dtype_name(ids)
    if dtype not in INTEGERS:
        raise TypeError(f"ids has dtype {dtype}; expected integers")
    return ids, source


def encode(xp: Any, ids: Array, vocab: int, ignore_index: int | None) -> Array:
    """Ids in [0, vocab) as signed integers, IGNORED where they equal ignore_index, INVALID elsewhere.

    Nothing is narrowed before it is compared: an id beyond the signed range is a large id, never a negative one.
    """
    unsigned = [getattr(xp, name) for name in ("uint8", "uint16", "uint32", "uint64") if hasattr(xp, name)]
    is_unsigned = ids.dtype in unsigned
    signed = xp.astype(ids, xp.asarray(0, dtype=xp.int64).dtype if ids.dtype != xp.int32 else xp.int32, copy=False)
    largest = xp.iinfo(signed.dtype).max
    if is_unsigned:
        signed = xp.where(signed < 0, xp.full_like(signed, largest), signed)
    valid = (signed >= 0) & (signed < min(vocab, largest))
    code = xp.where(valid, signed, xp.full_like(signed, INVALID))
    if ignore_index is not None and -largest - 1 <= int(ignore_index) < largest:
        code = xp.where(signed == int(ignore_index), xp.full_like(signed, IGNORED), code)
    return code


def refuse_invalid(
    source: "Backend",
    backend: "Backend",
    raw: Array,
    encoded: Array,
    logits: Array,
    ignore_index: int | None,
    invalid_ids: InvalidIds,
) -> None:
    """IndexError for the first id outside the vocabulary, where its value can be read."""
    if invalid_ids == "nan":
        return
    readable = source.readable(encoded)
    if invalid_ids == "raise" and not readable and source.traced(encoded):
        raise ValueError(
            "invalid_ids='raise' needs the values of ids, which traced code does not have; use 'nan', or check outside"
        )
    if not readable and invalid_ids == "auto":
        return
    wrong = source.to_numpy(encoded) == INVALID
    if not wrong.any():
        return
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    value = int(source.to_numpy(raw)[first])
    at = f"ids[{', '.join(map(str, first))}]" if first else "ids"
    ignored = "" if ignore_index is None else f" or ignore_index={ignore_index}"
    raise IndexError(
        f"{at} is {value}; logits of shape {tuple(logits.shape)} take ids in [0, {logits.shape[-1]}){ignored}"
    )


def check_temperature(backend: "Backend", logits: Array, temperature: Any) -> float | Array | None:
    """None for 1, a float for a number, an array of logits.shape[:-1] for one per position."""
    from xlogprobs.backend import array_library, numpy_backend

    if isinstance(temperature, bool) or temperature is None or isinstance(temperature, (str, bytes, complex)):
        raise TypeError(f"temperature is {_what(temperature)}; expected a number, or one per position")
    if isinstance(temperature, (int, float)):
        return _number(float(temperature))
    library = array_library(temperature)
    if library is None or library == "numpy":
        temperature = _from_python("temperature", temperature)
        source = numpy_backend()
    elif library == array_library(logits):
        source = backend
        if temperature.shape != ():
            _check_device(backend, "temperature", temperature, logits)
    else:
        raise TypeError(f"temperature is {_what(temperature)} and logits {_what(logits)}; expected one library")
    dtype = source.dtype_name(temperature)
    if dtype not in FLOATS + INTEGERS:
        raise TypeError(f"temperature has dtype {dtype}; expected real numbers")
    shape, positions = tuple(temperature.shape), tuple(logits.shape[:-1])
    if shape not in ((), positions):
        raise ValueError(
            f"temperature has shape {shape}; logits of shape {tuple(logits.shape)} take a number or shape {positions}"
        )
    if source.readable(temperature):
        values = source.to_numpy(temperature).astype(np.float64)
        if shape == () and not source.differentiable(temperature):
            return _number(float(values))
        wrong = ~(np.isfinite(values) & (values > 0))
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            at = f"temperature[{', '.join(map(str, first))}]" if first else "temperature"
            raise ValueError(f"{at} is {values[first]}; expected finite and positive")
    return temperature if source is backend else backend.from_numpy(temperature, logits)


def _check_device(backend: "Backend", name: str, array: Array, logits: Array) -> None:
    own, expected = backend.device(array), backend.device(logits)
    if own is not None and expected is not None and own != expected:
        raise ValueError(f"{name} is on {own} and logits on {expected}; move one to the other")


def _number(temperature: float) -> float | None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature is {temperature}; expected finite and positive")
    return None if temperature == 1.0 else temperature


def temperature_pair(xp: Any, temperature: float | Array | None, rows: int, like: Array) -> Pair | None:
    """The temperature of each row in the arithmetic type, and what that type rounded away; NaN where it is invalid."""
    if temperature is None:
        return None
    dtype = xp.float64 if like.dtype == xp.float64 else xp.float32
    device = getattr(like, "device", None)
    if isinstance(temperature, float):
        high = temperature if dtype == xp.float64 else float(np.float32(temperature))
        return (
            xp.full((rows,), high, dtype=dtype, device=device),
            xp.full((rows,), temperature - high, dtype=dtype, device=device),
        )
    values = xp.broadcast_to(xp.reshape(temperature, (-1,)), (rows,))
    high = xp.astype(values, dtype)
    low = xp.astype(values - xp.astype(high, values.dtype), dtype) if values.dtype == xp.float64 else high * 0
    valid = (high > 0) & xp.isfinite(high)
    return xp.where(valid, high, xp.full_like(high, float("nan"))), low


def _from_python(name: str, value: Any) -> Any:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name} is {_what(value)} that is no rectangular array: {error}") from None
    if array.dtype == object:
        raise TypeError(f"{name} is {_what(value)}; expected an array, numbers or nested lists of them")
    return array


def _what(value: Any) -> str:
    kind = type(value)
    module = kind.__module__.split(".")[0]
    name = kind.__name__ if module == "builtins" else f"{module}.{kind.__name__}"
    return f"a {name}" if not isinstance(value, (int, float, str)) else f"{value!r}"
