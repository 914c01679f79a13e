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

# The temperatures that float32 arithmetic holds, the half of each included, where subnormal numbers are flushed to 0
COLDEST, HOTTEST = 2 * float(np.finfo(np.float32).smallest_normal), float(np.finfo(np.float32).max)

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Call(NamedTuple):
    """A call that passed every check, in the form that a backend runs."""

    logits: Array
    ids: Array
    """logits.shape[:-1] or (*logits.shape[:-1], K) in [0, V), or IGNORED, or INVALID."""
    temperature: float | Array | None
    inplace_backward: bool = False

    @property
    def rows(self) -> int:
        return math.prod(self.logits.shape[:-1])

    @property
    def many(self) -> int:
        """Ids a row: K, or 1."""
        return int(self.ids.shape[-1]) if len(self.ids.shape) == len(self.logits.shape) else 1


def check(
    backend: "Backend",
    logits: Array,
    ids: Any,
    temperature: Any,
    ignore_index: int | None,
    invalid_ids: InvalidIds,
    inplace_backward: bool = False,
) -> Call:
    check_logits(backend, logits)
    from xlogprobs.backend import numpy_backend

    if invalid_ids not in get_args(InvalidIds):
        raise ValueError(
            f"invalid_ids is {invalid_ids!r}; expected one of {', '.join(map(repr, get_args(InvalidIds)))}"
        )
    if ignore_index is not None and (isinstance(ignore_index, bool) or not hasattr(ignore_index, "__index__")):
        raise TypeError(f"ignore_index is {_what(ignore_index)}; expected an int or None")
    raw, source = check_ids(backend, logits, ids)
    shape, positions = tuple(raw.shape), tuple(logits.shape[:-1])
    if shape != positions and shape[:-1] != positions:
        many = f"({', '.join([*map(str, positions), 'K'])})"
        raise ValueError(
            f"ids has shape {shape}; logits of shape {tuple(logits.shape)} take ids of shape {positions} or {many}"
        )
    if source.readable(raw):  # NumPy's operations on what is in memory start sooner than another library's
        raw, source = source.to_numpy(raw), numpy_backend()
    encoded = encode(source.namespace(raw), raw, logits.shape[-1], ignore_index)
    refuse_invalid(source, backend, raw, encoded, logits, ignore_index, invalid_ids)
    if source is not backend:
        encoded = backend.from_numpy(encoded, logits)
    if inplace_backward:
        backend.check_inplace_backward(logits)
    return Call(logits, encoded, check_temperature(backend, logits, temperature), inplace_backward)


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
        ids = _from_python("ids", ids) if library else _python_ids(ids)
    elif library == array_library(logits):
        source = backend
        _check_device(backend, "ids", ids, logits)
    else:
        raise TypeError(
            f"ids is {_what(ids)} and logits {_what(logits)}; expected ids from the same library, NumPy or Python ints"
        )
    dtype = source.dtype_name(ids)
    if dtype not in (*INTEGERS, "object"):
        raise TypeError(f"ids has dtype {dtype}; expected integers")
    return ids, source


def encode(xp: Any, ids: Array, vocab: int, ignore_index: int | None) -> Array:
    """Ids in [0, vocab) as signed integers, IGNORED where they equal ignore_index, INVALID elsewhere.

    Nothing is narrowed before it is compared. An unsigned id beyond the signed range wraps to a negative one, which is
    no valid id either; ignore_index is wrapped alike where the ids' own type can hold it, and matches nothing else.
    """
    if ids.dtype == object:
        return _encode_python(ids, vocab, ignore_index)
    signed = xp.astype(ids, _signed(xp, ids.dtype), copy=False)
    limits, held = xp.iinfo(signed.dtype), xp.iinfo(ids.dtype)
    valid = (signed >= 0) & (signed < min(vocab, limits.max))
    code = xp.where(valid, signed, xp.full_like(signed, INVALID))
    if ignore_index is not None and held.min <= int(ignore_index) <= held.max:
        wrapped = (int(ignore_index) - limits.min) % (1 << limits.bits) + limits.min
        code = xp.where(signed == wrapped, xp.full_like(signed, IGNORED), code)
    return code


def _signed(xp: Any, dtype: Any) -> Any:
    """A signed type of at least 32 bits that is not narrower than ``dtype``."""
    if dtype in (xp.int32, xp.int64):
        return dtype
    return xp.int64 if xp.iinfo(dtype).bits == 64 else xp.asarray(0).dtype


def _encode_python(ids: Any, vocab: int, ignore_index: int | None) -> Any:
    code = [IGNORED if i == ignore_index else int(i) if 0 <= i < vocab else INVALID for i in ids.flat]
    return np.array(code, np.int64).reshape(ids.shape)


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
    narrow = backend.dtype_name(logits) != "float64"
    if isinstance(temperature, (int, float)):
        return temperature_number(temperature, narrow)
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
            return temperature_number(float(values), narrow)
        wrong = ~_is_temperature(values, narrow)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            at = f"temperature[{', '.join(map(str, first))}]" if first else "temperature"
            raise ValueError(_not_a_temperature(at, values[first], narrow))
    return temperature if source is backend else backend.from_numpy(temperature, logits)


def _check_device(backend: "Backend", name: str, array: Array, logits: Array) -> None:
    own, expected = backend.device(array), backend.device(logits)
    if own is not None and expected is not None and own != expected:
        raise ValueError(f"{name} is on {own} and logits on {expected}; move one to the other")


def temperature_number(temperature: float, narrow: bool) -> float | None:
    try:
        value = float(temperature)
    except OverflowError:
        value = math.inf
    if not _is_temperature(value, narrow):
        raise ValueError(_not_a_temperature("temperature", value, narrow))
    return None if value == 1.0 else value


def _is_temperature(values: Any, narrow: bool) -> Any:
    """Whether ``values`` are finite and positive in the arithmetic type."""
    return (values >= COLDEST) & (values <= HOTTEST) if narrow else (values > 0) & (values < math.inf)


def _not_a_temperature(at: str, value: float, narrow: bool) -> str:
    in_float32 = f" in float32, from {COLDEST:.3g} to {HOTTEST:.3g}" if narrow and 0 < value < math.inf else ""
    return f"{at} is {value}; expected finite and positive{in_float32}"


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
    if values.dtype not in (xp.float32, xp.float64):
        values = xp.astype(values, dtype)
    valid = _is_temperature(values, dtype != xp.float64)
    high = xp.astype(values, dtype)
    low = xp.astype(values - xp.astype(high, values.dtype), dtype) if values.dtype == xp.float64 else high * 0
    return xp.where(valid, high, xp.full_like(high, float("nan"))), low


def _python_ids(value: Any) -> Any:
    """Python ints as an array; one of objects where no integer type holds them all, or where there are none."""
    if _rectangular("ids", value).dtype.kind in "Of":
        exact = np.asarray(value, dtype=object)
        if all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in exact.flat):
            return exact
    return _from_python("ids", value)


def _rectangular(name: str, value: Any) -> Any:
    try:
        return np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name} is {_what(value)} that is no rectangular array: {error}") from None


def _from_python(name: str, value: Any) -> Any:
    array = _rectangular(name, value)
    if array.dtype == object:
        raise TypeError(f"{name} is {_what(value)}; expected an array, numbers or nested lists of them")
    return array


def _what(value: Any) -> str:
    kind = type(value)
    module = kind.__module__.split(".")[0]
    name = kind.__name__ if module == "builtins" else f"{module}.{kind.__name__}"
    return f"a {name}" if not isinstance(value, (int, float, str)) else f"{value!r}"
