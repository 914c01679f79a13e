"""What a call may be. Every check of the public functions and every error message is here."""

import itertools
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from xlogprobs.accurate import Array

if TYPE_CHECKING:
    from xlogprobs.backend import Backend

InvalidIds = Literal["auto", "raise", "nan"]

IGNORED = -1  # an id equal to ignore_index, as the backends see it
INVALID = -2  # any other id outside the vocabulary

# The temperatures that float32 arithmetic holds, the half of each included, where subnormal numbers are flushed to 0
COLDEST, HOTTEST = 2 * float(np.finfo(np.float32).smallest_normal), float(np.finfo(np.float32).max)

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Transforms(NamedTuple):
    """The transforms of a call, checked; None is the identity.

    Numbers are floats, or arrays of shape () or logits.shape[:-1]; bias and mask broadcast to the logits.
    """

    temperature: float | Array | None = None
    scale: float | Array | None = None
    softcap: float | Array | None = None
    bias: Array | None = None
    mask: Array | None = None


class Want(NamedTuple):
    """The statistics that a call asks for."""

    logprob: bool = True
    entropy: bool = False
    lse: bool = False
    rank: bool = False
    """Backends that have it from the same read give it with the others; the rest leave it to `Backend.rank`."""


class Call(NamedTuple):
    """A call that passed every check, in the form that a backend runs."""

    logits: Array
    ids: Array | None
    """logits.shape[:-1] or (*logits.shape[:-1], K) in [0, V), or IGNORED, or INVALID."""
    transforms: Transforms = Transforms()
    want: Want = Want()
    inplace_backward: bool = False

    @property
    def rows(self) -> int:
        return math.prod(self.logits.shape[:-1])

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(self.logits.shape[:-1])

    @property
    def shape_of_ids(self) -> tuple[int, ...]:
        return (*self.positions, 0) if self.ids is None else tuple(self.ids.shape)

    @property
    def many(self) -> int:
        """Ids a row: K, or 1."""
        if self.ids is None:
            return 0
        return int(self.ids.shape[-1]) if len(self.ids.shape) == len(self.logits.shape) else 1


def check(
    backend: "Backend",
    logits: Array,
    ids: Any,
    transforms: dict[str, Any],
    ignore_index: int | None,
    invalid_ids: InvalidIds,
    want: Want = Want(),  # noqa: B008
    inplace_backward: bool = False,
) -> Call:
    """``ids`` may be None where ``want`` asks for no logprob; ``transforms`` are those given, by their names."""
    check_logits(backend, logits)
    check_options(ignore_index, invalid_ids)
    encoded = None if ids is None and not want.logprob else check_ids(backend, logits, ids, ignore_index, invalid_ids)
    if inplace_backward:
        backend.check_inplace_backward(logits)
    return Call(logits, encoded, check_transforms(backend, logits, **transforms), want, inplace_backward)


def check_ids(backend: "Backend", logits: Array, ids: Any, ignore_index: int | None, invalid_ids: InvalidIds) -> Array:
    """The ids, encoded, in the library of the logits."""
    from xlogprobs.backend import numpy_backend

    raw, source = check_integers(backend, "ids", ids, logits)
    shape, positions = tuple(raw.shape), tuple(logits.shape[:-1])
    if shape != positions and shape[:-1] != positions:
        many = f"({', '.join([*map(str, positions), 'K'])})"
        raise ValueError(
            f"ids has shape {shape}; logits of shape {tuple(logits.shape)} take ids of shape {positions} or {many}"
        )
    if source.readable(raw):  # NumPy's operations on what is in memory start sooner than another library's
        raw, source = source.to_numpy(raw), numpy_backend()
    encoded = encode(source.namespace(raw), raw, logits.shape[-1], ignore_index)
    refuse_invalid("ids", raw, source, encoded, source, logits, ignore_index, invalid_ids)
    return encoded if source is backend else backend.from_numpy(encoded, logits)


def check_options(ignore_index: int | None, invalid_ids: InvalidIds) -> None:
    if invalid_ids not in get_args(InvalidIds):
        raise ValueError(
            f"invalid_ids is {invalid_ids!r}; expected one of {', '.join(map(repr, get_args(InvalidIds)))}"
        )
    if ignore_index is not None and (isinstance(ignore_index, bool) or not hasattr(ignore_index, "__index__")):
        raise TypeError(f"ignore_index is {_what(ignore_index)}; expected an int or None")


def check_want(want: Any, ids: Any, known: tuple[str, ...]) -> frozenset[str]:
    names = (want,) if isinstance(want, str) else tuple(want)
    for name in names:
        if name not in known:
            raise ValueError(f"want has {name!r}; expected any of {', '.join(map(repr, known))}")
        if ids is None and name in ("logprob", "rank"):
            raise ValueError(f"want has {name!r}, which is a statistic of ids; pass ids, or want without it")
    return frozenset(names)


def check_top_k(top_k: Any, logits: Array) -> None:
    if isinstance(top_k, bool) or not hasattr(top_k, "__index__"):
        raise TypeError(f"top_k is {_what(top_k)}; expected an int")
    if not 0 <= top_k <= logits.shape[-1]:
        raise ValueError(
            f"top_k is {top_k}; logits of shape {tuple(logits.shape)} take a top_k from 0 to {logits.shape[-1]}"
        )


def check_logits(backend: "Backend", logits: Array) -> None:
    dtype = backend.dtype_name(logits)
    if dtype not in FLOATS:
        raise TypeError(f"logits has dtype {dtype}; expected one of {', '.join(FLOATS)}")
    if len(logits.shape) == 0:
        raise ValueError("logits has shape (); expected (..., V) with the vocabulary last")
    if logits.shape[-1] == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}: the vocabulary (last axis) is empty")


def check_pair_of_logits(backend: "Backend", logits: Array, ref_logits: Any) -> None:
    from xlogprobs.backend import array_library

    check_logits(backend, logits)
    if array_library(ref_logits) != array_library(logits):
        raise TypeError(f"ref_logits is {_what(ref_logits)} and logits {_what(logits)}; expected one library")
    own, dtype = backend.dtype_name(ref_logits), backend.dtype_name(logits)
    if own not in FLOATS or (own == "float64") != (dtype == "float64"):
        raise TypeError(f"ref_logits has dtype {own} and logits {dtype}; expected floats, and float64 of both or none")
    if tuple(ref_logits.shape) != tuple(logits.shape):
        raise ValueError(
            f"ref_logits has shape {tuple(ref_logits.shape)} and logits {tuple(logits.shape)}; expected the same shape"
        )
    _check_device(backend, "ref_logits", ref_logits, logits)


def check_integers(
    backend: "Backend",
    name: str,
    value: Any,
    like: Array,
    like_name: str = "logits",
    dtypes: tuple[str, ...] = INTEGERS,
) -> tuple[Array, "Backend"]:
    """An argument of the kinds that ids may be, as an array, and the backend that owns it."""
    from xlogprobs.backend import array_library, numpy_backend

    library = array_library(value)
    if library is None or library == "numpy":
        source = backend if array_library(like) == "numpy" else numpy_backend()
        value = _from_python(name, value) if library else _python_integers(name, value)
    elif library == array_library(like):
        source = backend
        _check_device(backend, name, value, like, like_name)
    else:
        raise TypeError(
            f"{name} is {_what(value)} and {like_name} {_what(like)};"
            f" expected {name} from the same library, NumPy or Python ints"
        )
    dtype = source.dtype_name(value)
    if dtype not in (*dtypes, "object"):
        expected = "booleans or integers" if "bool" in dtypes else "integers"
        raise TypeError(f"{name} has dtype {dtype}; expected {expected}")
    return value, source


def encode(xp: Any, ids: Array, vocab: int, ignore_index: int | None) -> Array:
    """Ids in [0, vocab) as signed integers, IGNORED where they equal ignore_index, INVALID elsewhere.

    Nothing is narrowed before it is compared. An unsigned id beyond the signed range wraps to a negative one, which is
    no valid id either; ignore_index is wrapped alike where the ids' own type can hold it, and matches nothing else.
    """
    if ids.dtype == object:
        return _encode_python(ids, vocab, ignore_index)
    signed = xp.astype(ids, _signed(xp, ids.dtype), copy=False)
    valid = (signed >= 0) & (signed < (vocab if vocab < 1 << 31 else min(vocab, xp.iinfo(signed.dtype).max)))
    code = xp.where(valid, signed, INVALID)
    if ignore_index is None:
        return code
    limits, held = xp.iinfo(signed.dtype), xp.iinfo(ids.dtype)
    if held.min <= int(ignore_index) <= held.max:
        wrapped = (int(ignore_index) - limits.min) % (1 << limits.bits) + limits.min
        code = xp.where(signed == wrapped, IGNORED, code)
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
    name: str,
    raw: Array,
    source: "Backend",
    encoded: Array,
    owner: "Backend",
    logits: Array,
    ignore_index: int | None,
    invalid_ids: InvalidIds,
) -> None:
    """IndexError for the first of the ``encoded`` ids that is INVALID, where the values can be read.

    ``raw``, the ids as they came under ``name``, belong to ``source``, the encoded ones to ``owner``.
    """
    if invalid_ids == "nan":
        return
    readable = owner.readable(encoded)
    if invalid_ids == "raise" and not readable and owner.traced(encoded):
        raise ValueError(
            f"invalid_ids='raise' needs the values of {name}, which traced code does not have; use 'nan', or check"
            " outside"
        )
    if not readable and invalid_ids == "auto":
        return
    wrong = owner.to_numpy(encoded) == INVALID
    if not wrong.any():
        return
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    value = int(source.to_numpy(raw)[first])
    at = f"{name}[{', '.join(map(str, first))}]" if first else name
    ignored = "" if ignore_index is None else f" or ignore_index={ignore_index}"
    raise IndexError(
        f"{at} is {value}; logits of shape {tuple(logits.shape)} take ids in [0, {logits.shape[-1]}){ignored}"
    )


def check_transforms(
    backend: "Backend",
    logits: Array,
    temperature: Any = 1.0,
    scale: Any = 1.0,
    softcap: Any = None,
    bias: Any = None,
    mask: Any = None,
) -> Transforms:
    return Transforms(
        check_number(backend, logits, "temperature", temperature),
        check_number(backend, logits, "scale", scale),
        None if softcap is None else check_number(backend, logits, "softcap", softcap),
        None if bias is None else check_over_vocabulary(backend, logits, "bias", bias),
        None if mask is None else check_over_vocabulary(backend, logits, "mask", mask),
    )


def check_over_vocabulary(backend: "Backend", logits: Array, name: str, value: Any) -> Array:
    """bias or mask, as an array of the logits' library that broadcasts to them."""
    array, source = check_array(backend, logits, name, value)
    dtype = source.dtype_name(array)
    if name == "mask" and dtype != "bool":
        raise TypeError(f"mask has dtype {dtype}; expected booleans, True for the entries to keep")
    if name == "bias" and dtype not in FLOATS + INTEGERS:
        raise TypeError(f"bias has dtype {dtype}; expected real numbers")
    own, shape = tuple(array.shape), tuple(logits.shape)
    if len(own) > len(shape) or any(a not in (1, b) for a, b in zip(reversed(own), reversed(shape), strict=False)):
        raise ValueError(f"{name} has shape {own}, which does not broadcast to the logits' shape {shape}")
    if name == "bias":
        refuse_gradient(source, name, array)
        if source is not backend:
            array = array.astype(np.float64 if backend.dtype_name(logits) == "float64" else np.float32)
    return array if source is backend else backend.from_numpy(array, logits)


def refuse_gradient(source: "Backend", name: str, array: Array) -> None:
    if source.differentiable(array):
        raise ValueError(
            f"{name} requires a gradient, which is computed for the logits and the temperature only; pass"
            f" {name}.detach(), or apply the {name} to the logits yourself"
        )


def check_array(backend: "Backend", logits: Array, name: str, value: Any) -> tuple[Array, "Backend"]:
    """An argument that is no ids, as an array, and the backend that owns it."""
    from xlogprobs.backend import array_library, numpy_backend

    library = array_library(value)
    if library is None or library == "numpy":
        return _from_python(name, value), numpy_backend()
    if library != array_library(logits):
        raise TypeError(f"{name} is {_what(value)} and logits {_what(logits)}; expected one library")
    if value.shape != ():
        _check_device(backend, name, value, logits)
    return value, backend


def check_number(backend: "Backend", logits: Array, name: str, value: Any) -> float | Array | None:
    """temperature, scale or softcap: None for 1 (but not of a softcap), a float for a number, an array of
    logits.shape[:-1] for one per position."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, bytes, complex)):
        raise TypeError(f"{name} is {_what(value)}; expected a number, or one per position")
    narrow = backend.dtype_name(logits) != "float64"
    if isinstance(value, (int, float)):
        return number_value(name, value, narrow)
    array, source = check_array(backend, logits, name, value)
    dtype = source.dtype_name(array)
    if dtype not in FLOATS + INTEGERS:
        raise TypeError(f"{name} has dtype {dtype}; expected real numbers")
    shape, positions = tuple(array.shape), tuple(logits.shape[:-1])
    if shape not in ((), positions):
        raise ValueError(
            f"{name} has shape {shape}; logits of shape {tuple(logits.shape)} take a number or shape {positions}"
        )
    if name != "temperature":
        refuse_gradient(source, name, array)
    if source.readable(array):
        values = source.to_numpy(array).astype(np.float64)
        if shape == () and not source.differentiable(array):
            return number_value(name, float(values), narrow)
        wrong = ~is_valid(name, values, narrow)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            at = f"{name}[{', '.join(map(str, first))}]" if first else name
            raise ValueError(_not_valid(name, at, values[first], narrow))
    return array if source is backend else backend.from_numpy(array, logits)


def _check_device(backend: "Backend", name: str, array: Array, like: Array, like_name: str = "logits") -> None:
    own, expected = backend.device(array), backend.device(like)
    if own is not None and expected is not None and own != expected:
        raise ValueError(f"{name} is on {own} and {like_name} on {expected}; move one to the other")


def number_value(name: str, value: float, narrow: bool) -> float | None:
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not is_valid(name, value, narrow):
        raise ValueError(_not_valid(name, name, value, narrow))
    return None if value == 1.0 and name != "softcap" else value


def is_valid(name: str, values: Any, narrow: bool) -> Any:
    """Whether ``values`` are finite, and of a temperature or softcap positive, in the arithmetic type."""
    if name == "scale":
        return abs(values) <= (HOTTEST if narrow else np.finfo(np.float64).max)
    return (values >= COLDEST) & (values <= HOTTEST) if narrow else (values > 0) & (values < math.inf)


def _not_valid(name: str, at: str, value: float, narrow: bool) -> str:
    if name == "scale":
        return f"{at} is {value}; expected finite{' in float32' if narrow and math.isfinite(value) else ''}"
    in_float32 = f" in float32, from {COLDEST:.3g} to {HOTTEST:.3g}" if narrow and 0 < value < math.inf else ""
    return f"{at} is {value}; expected finite and positive{in_float32}"


def _python_integers(name: str, value: Any) -> Any:
    """Python ints as an array; one of objects where no integer type holds them all, or where there are none."""
    if _rectangular(name, value).dtype.kind in "Of":
        exact = np.asarray(value, dtype=object)
        if all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in exact.flat):
            return exact
    return _from_python(name, value)


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


def signed(xp: Any, array: Array) -> Array:
    """Integers in a signed type, in which libraries compare and search; booleans as 0 and 1; objects as they are."""
    if array.dtype == object:
        return array
    return xp.astype(array, xp.int32 if array.dtype == xp.bool else _signed(xp, array.dtype), copy=False)


def check_tokens(logits: Array, name: str, array: Array) -> None:
    """``array`` has one entry for each token of a sequence."""
    shape, positions = tuple(logits.shape), tuple(logits.shape[:-1])
    if not positions:
        raise ValueError(f"logits has shape {shape}; expected (..., T, V) with the tokens before the vocabulary")
    if tuple(array.shape) != positions:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; logits of shape {shape} take {name} of shape {positions}"
        )


def check_packed(logits: Array, boundaries: Array) -> None:
    """``boundaries``: cu_seqlens."""
    if math.prod(logits.shape[:-2]) != 1:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}; with cu_seqlens, expected packed sequences, (T, V) or (1, T, V)"
        )
    if len(boundaries.shape) != 1 or boundaries.shape[0] == 0:
        raise ValueError(
            f"cu_seqlens has shape {tuple(boundaries.shape)}; expected (S + 1,), the boundaries of S sequences"
        )


def check_boundaries(boundaries: Any, tokens: int) -> None:
    """``boundaries``: cu_seqlens in NumPy."""
    values = [int(value) for value in boundaries]
    if values[0] != 0:
        raise ValueError(f"cu_seqlens[0] is {values[0]}; expected 0, where the first sequence begins")
    for index, (before, value) in enumerate(itertools.pairwise(values), 1):
        if value < before:
            raise ValueError(f"cu_seqlens[{index}] is {value} after {before}; expected boundaries that do not decrease")
    if values[-1] != tokens:
        raise ValueError(f"cu_seqlens ends with {values[-1]}; expected {tokens}, the number of tokens in input_ids")


def check_mismatch(logprobs: Any, ref_logprobs: Any, clip: Any) -> None:
    """What `mismatch` asks of its arrays before a backend is chosen, and of ``clip``."""
    from xlogprobs.backend import array_library

    library, reference = array_library(logprobs), array_library(ref_logprobs)
    if library is None:
        raise TypeError(
            f"logprobs is {_what(logprobs)}; expected an array of NumPy, torch, JAX or an array-API library"
        )
    if reference != library:
        raise TypeError(
            f"ref_logprobs is {_what(ref_logprobs)} and logprobs {_what(logprobs)}; expected arrays of one library"
        )
    if clip is None:
        return
    if isinstance(clip, bool) or not isinstance(clip, (int, float, np.integer, np.floating)):
        raise TypeError(f"clip is {_what(clip)}; expected a number or None")
    if not 0 <= clip < math.inf:
        raise ValueError(f"clip is {clip}; expected finite and not negative")


def check_pair(backend: "Backend", logprobs: Array, ref_logprobs: Array, mask: Array | None) -> None:
    for name, array in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        dtype = backend.dtype_name(array)
        if dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {dtype}; expected one of {', '.join(FLOATS)}")
    for name, other in (("ref_logprobs", ref_logprobs), ("mask", mask)):
        if other is not None and tuple(other.shape) != tuple(logprobs.shape):
            raise ValueError(
                f"{name} has shape {tuple(other.shape)} and logprobs {tuple(logprobs.shape)}; expected the same shape"
            )
    _check_device(backend, "ref_logprobs", ref_logprobs, logprobs, "logprobs")
