"""The contract of `logprobs`, rule by rule, on every library, eager and compiled."""

import os
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from xlogprobs_cpu import core

import xlogprobs
from xlogprobs import logprobs, parity

V = 300
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
# each library as it is called, torch also under its compiler, torch and JAX also inside the user's own
# where Numba is installed, a call and a user's torch.compile run its kernels
EAGER = [
    ("numpy", "call"),
    ("numpy", "pieces"),
    ("torch", "call"),
    ("torch", "eager"),
    ("jax", "call"),
    ("array-api-strict", "call"),
]
COMPILED = [("torch", "compiled"), ("torch", "user's torch.compile"), ("jax", "user's jit")]
WITHOUT_KERNELS = ("pieces", "eager", "compiled")


@pytest.fixture
def execution(request, library):
    """How the library runs: `call(function, *arrays)` in the mode that the parameter names."""
    with modes(library, request.param) as run:
        yield run


class modes:
    def __init__(self, library, name):
        self.library, self.name, self.stance = library, name, nullcontext()
        self.kernels = core.disabled() if name in WITHOUT_KERNELS else nullcontext()

    def __enter__(self):
        self.kernels.__enter__()
        if self.library.name == "torch":
            import torch

            self.stance = torch.compiler.set_stance("force_eager" if self.name == "eager" else "default")
            torch._dynamo.reset() if self.name == "user's torch.compile" else None
        self.stance.__enter__()
        return self

    def __exit__(self, *error):
        self.stance.__exit__(*error)
        self.kernels.__exit__(*error)
        if (self.library.name, self.name) == ("torch", "compiled"):
            from xlogprobs_torch import compiled

            assert not compiled._without_compiler, "ran eagerly"

    def __call__(self, function, *arrays):
        if self.name == "user's torch.compile":
            import torch

            return torch.compile(function, fullgraph=True)(*arrays)
        if self.name == "user's jit":
            import jax

            return jax.jit(function)(*arrays)
        return function(*arrays)

    @property
    def traced(self):
        return self.name.startswith("user")


each_library = pytest.mark.parametrize(("library", "execution"), EAGER, indirect=True)
each_way = pytest.mark.parametrize(("library", "execution"), EAGER + COMPILED, indirect=True)


def normal(*shape, dtype="float32", deviation=3.0, seed=0):
    array = np.random.default_rng(seed).standard_normal((*shape, V)) * deviation
    if dtype == "bfloat16":
        return array.astype(pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed").bfloat16)
    return array.astype(dtype)


def some_ids(*shape, seed=1):
    return np.random.default_rng(seed).integers(0, V, shape)


def assert_within_bound(out, exact):
    allowed = parity.bound(exact, out.dtype)
    off = parity.error(out, exact)
    assert out.shape == exact.shape
    assert (off <= allowed).all(), f"{(off / allowed).max():.3g} x bound"


def bits(out):
    return np.ascontiguousarray(out).view(f"u{out.dtype.itemsize}")


# Inputs


@each_library
@pytest.mark.parametrize("many", [None, 1, 5, 0])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (2, 1, 3), (2, 3, 1, 2), (0,), (2, 0), (0, 3, 2)])
def test_ids_are_one_or_k_per_position_and_give_the_shape_of_the_result(library, execution, shape, many):
    logits, ids = normal(*shape), some_ids(*shape, *([] if many is None else [many]))
    for temperature in (1.0, np.full(shape, 0.7)):
        out = logprobs(library.asarray(logits), library.asarray(ids), temperature=temperature)
        assert type(out) is type(library.asarray(logits))
        assert_within_bound(library.tonumpy(out), parity.reference(logits, ids, temperature=temperature))


@each_library
def test_repeated_ids_repeat_their_result(library, execution):
    out = library.tonumpy(logprobs(library.asarray(normal(3)), library.asarray(np.full((3, 4), 7))))
    np.testing.assert_array_equal(out, np.repeat(out[:, :1], 4, axis=1))


@each_library
@pytest.mark.parametrize("dtype", INTEGERS)
def test_ids_may_be_integers_of_any_width(library, execution, dtype):
    rows = 256  # also more rows than a uint8 counts
    with x64(library, dtype):
        logits, ids = normal(rows), (np.arange(rows) % min(V, np.iinfo(dtype).max + 1)).astype(dtype)
        out = library.tonumpy(logprobs(library.asarray(logits), library.asarray(ids)))
    assert_within_bound(out, parity.reference(logits, ids))


def x64(library, dtype):
    """JAX has integers of 64 bits and float64 only where x64 is on."""
    if library.name == "jax" and "64" in dtype:
        import jax

        return jax.enable_x64(True)
    return nullcontext()


@each_library
@pytest.mark.parametrize("dtype", [">i2", ">i4", ">u8", "<i8"])
def test_ids_from_numpy_may_have_any_byte_order(library, execution, dtype):
    logits = normal(3)
    out = library.tonumpy(logprobs(library.asarray(logits), np.array([1, 299, 7], dtype)))
    assert_within_bound(out, parity.reference(logits, np.array([1, 299, 7])))


@each_library
@pytest.mark.parametrize(
    ("shape", "ids"),
    [
        ((), 7),
        ((), np.int64(7)),
        ((), [7, 8]),
        ((3,), [7, 8, 9]),
        ((3,), (7, 8, 9)),
        ((3,), range(3)),
        ((3,), [[7, 8], [9, 10], [11, 12]]),
        ((2, 2), [[7, 8], (np.uint8(9), 10)]),
        ((0,), []),
        ((2, 0), [[], []]),
    ],
    ids=str,
)
def test_ids_may_be_python_ints_or_numpy_arrays(library, execution, shape, ids):
    logits = normal(*shape)
    exact = parity.reference(logits, np.array(ids, np.int64))
    for given in (ids, np.array(ids, np.int16)):
        out = logprobs(library.asarray(logits), given)
        assert type(out) is type(library.asarray(logits))
        assert_within_bound(library.tonumpy(out), exact)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[::-1, ::-1],
        lambda a: a[::2],
        lambda a: np.concatenate([a, a], axis=1)[:, :V],
        lambda a: a[:, ::-1][:, :V],
        lambda a: np.broadcast_to(a[0], (4, *a.shape[1:])),
        lambda a: np.asfortranarray(a),
    ],
    ids=["transposed", "reversed", "every second row", "padded", "reversed columns", "expanded", "Fortran order"],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("lead", [(V,), (2, V)])
def test_numpy_logits_of_any_strides_give_the_bits_of_a_contiguous_copy(view, dtype, lead):
    logits = view(normal(*lead, dtype=dtype)) if len(lead) == 1 else view(normal(*lead, dtype=dtype).swapaxes(0, 1))
    if logits.ndim == 3 and logits.shape[-1] != V:
        logits = logits.swapaxes(0, -1)
    ids = np.arange(int(np.prod(logits.shape[:-1]))).reshape(logits.shape[:-1]) % logits.shape[-1]
    out = logprobs(logits, ids)
    np.testing.assert_array_equal(bits(out), bits(logprobs(np.ascontiguousarray(logits), ids)))
    assert_within_bound(out, parity.reference(logits, ids))


@pytest.mark.parametrize(
    ("library", "execution"),
    [("torch", "eager"), pytest.param("torch", "compiled", marks=pytest.mark.full)],  # its graphs are of 1, 8, 256 rows
    indirect=True,
)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.flatten()[: 9 * V].reshape(V, 9).t(),
        lambda t: t[:, 0, :V],
        lambda t: t[:, :, :V].transpose(0, 1),
        lambda t: t[::2, :, :V],
        lambda t: t[0, 0, :V].expand(8, V),
        lambda t: t[:, :, :V].flip(0).transpose(0, 1),
        lambda t: t[1:, 0, 1 : V + 1],
    ],
    ids=["transposed", "padded", "swapped", "every second row", "expanded", "flipped", "offset"],
)
def test_torch_logits_of_any_strides_give_the_bits_of_a_contiguous_copy(library, execution, view):
    logits = view(library.asarray(np.concatenate([normal(16, 2), normal(16, 2, seed=3)], axis=-1)))
    ids = library.asarray(some_ids(*logits.shape[:-1]))
    same = logprobs(logits.clone(memory_format=library.xp.contiguous_format), ids)
    np.testing.assert_array_equal(bits(library.tonumpy(logprobs(logits, ids))), bits(library.tonumpy(same)))


@each_library
def test_nothing_is_written_to(library, execution):
    logits, ids, temperature = normal(2, 3), some_ids(2, 3, 2), np.full((2, 3), 0.7, np.float32)
    arrays = [library.asarray(a) for a in (logits, ids, temperature)]  # NumPy arrays come read-only
    before = [a._version for a in arrays] if library.name == "torch" else []
    logprobs(arrays[0], arrays[1], temperature=arrays[2], ignore_index=7)
    for given, original in zip(arrays, (logits, ids, temperature), strict=True):
        np.testing.assert_array_equal(library.tonumpy(given), original)
    assert before == [a._version for a in arrays if library.name == "torch"]


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
def test_numpy_logits_of_the_other_byte_order_are_what_they_print(dtype):
    logits = normal(4, dtype=dtype)
    out = logprobs(logits, [1, 2, 3, 4], temperature=[0.5, 1, 2, 3])
    assert out.dtype == (np.float64 if dtype == ">f8" else np.float32)
    exact = parity.reference(logits.astype(np.float64), np.arange(1, 5), temperature=np.array([0.5, 1, 2, 3]))
    assert_within_bound(out, exact)


# Messages: each names the argument, what came and what was expected

LOGITS = np.zeros((4, 8, 7), np.float32)
IDS = np.zeros((4, 8), np.int64)
SHAPES = r"take ids of shape \(4, 8\) or \(4, 8, K\)"


@each_library
@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"ids": np.zeros((4, 7), int)}, ValueError, rf"ids has shape \(4, 7\); logits of shape \(4, 8, 7\) {SHAPES}"),
        ({"ids": np.zeros((1, 8), int)}, ValueError, r"ids has shape \(1, 8\)"),
        ({"ids": np.zeros((8,), int)}, ValueError, r"ids has shape \(8,\)"),
        ({"ids": 3}, ValueError, r"ids has shape \(\)"),
        ({"ids": np.zeros((4, 8, 1, 1), int)}, ValueError, r"ids has shape \(4, 8, 1, 1\)"),
        ({"ids": np.zeros((4, 8))}, TypeError, "ids has dtype float64; expected integers"),
        ({"ids": np.zeros((4, 8), bool)}, TypeError, "ids has dtype bool; expected integers"),
        ({"ids": 1.0}, TypeError, "ids has dtype float64; expected integers"),
        ({"ids": None}, TypeError, "ids is a NoneType; expected"),
        ({"ids": [[0], [1, 2]]}, ValueError, "ids is a list that is no rectangular array"),
        ({"ids": "ab"}, TypeError, "ids has dtype str"),
        ({"temperature": 0}, ValueError, "temperature is 0.0; expected finite and positive"),
        ({"temperature": -1.5}, ValueError, "temperature is -1.5; expected finite and positive"),
        ({"temperature": float("nan")}, ValueError, "temperature is nan"),
        ({"temperature": float("inf")}, ValueError, "temperature is inf"),
        ({"temperature": 10**400}, ValueError, "temperature is inf"),
        ({"temperature": 1e-50}, ValueError, "temperature is 1e-50; expected finite and positive in float32"),
        ({"temperature": 1e39}, ValueError, r"temperature is 1e\+39; expected finite and positive in float32"),
        ({"temperature": np.float64(-1)}, ValueError, "temperature is -1.0"),
        ({"temperature": np.eye(4, 8) + 1e-300}, ValueError, r"temperature\[0, 1\] is 1e-300; expected finite"),
        ({"temperature": np.where(np.eye(4, 8), np.nan, 1)}, ValueError, r"temperature\[0, 0\] is nan; expected"),
        ({"temperature": np.ones((4, 1))}, ValueError, r"temperature has shape \(4, 1\); logits of shape \(4, 8, 7\)"),
        ({"temperature": np.ones((4, 8), bool)}, TypeError, "temperature has dtype bool; expected real numbers"),
        ({"temperature": True}, TypeError, "temperature is True; expected a number"),
        ({"temperature": "hot"}, TypeError, "temperature is 'hot'; expected a number"),
        ({"temperature": None}, TypeError, "temperature is a NoneType; expected a number"),
        ({"temperature": 1j}, TypeError, "temperature is a complex; expected a number"),
        ({"ignore_index": 1.0}, TypeError, "ignore_index is 1.0; expected an int or None"),
        ({"ignore_index": True}, TypeError, "ignore_index is True; expected an int or None"),
        ({"invalid_ids": "drop"}, ValueError, "invalid_ids is 'drop'; expected one of 'auto', 'raise', 'nan'"),
    ],
)
def test_a_message_names_the_argument_what_came_and_what_was_expected(library, execution, given, kind, message):
    with pytest.raises(kind, match=message):
        logprobs(library.asarray(LOGITS), **({"ids": IDS} | given))


@each_library
@pytest.mark.parametrize(
    ("logits", "kind", "message"),
    [
        (np.zeros((4, 0), np.float32), ValueError, r"logits has shape \(4, 0\): the vocabulary \(last axis\) is empty"),
        (np.zeros((), np.float32), ValueError, r"logits has shape \(\); expected \(\.\.\., V\)"),
        (np.zeros((4, 7), np.int32), TypeError, "logits has dtype int32; expected one of float16, bfloat16, float32"),
        (np.zeros((4, 7), bool), TypeError, "logits has dtype bool; expected one of"),
        (np.zeros((4, 7), np.complex64), TypeError, "logits has dtype complex64; expected one of"),
    ],
    ids=["V = 0", "0-d", "int", "bool", "complex"],
)
def test_logits_are_a_real_floating_array_with_a_vocabulary(library, execution, logits, kind, message):
    with pytest.raises(kind, match=message):
        logprobs(library.asarray(logits), [0, 0, 0, 0])


@pytest.mark.parametrize("logits", [[[0.0, 1.0]], None, "ab", 1.5], ids=str)
def test_logits_that_are_no_array_are_a_type_error(logits):
    with pytest.raises(TypeError, match=r"logits is a .*; expected an array of NumPy, torch, JAX"):
        logprobs(logits, 0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("library", "execution"), [("torch", "call"), ("jax", "call")], indirect=True)
def test_8_bit_logits_are_a_type_error(library, execution, dtype):
    logits = library.xp.zeros((2, 7), dtype=getattr(library.xp, dtype))
    with pytest.raises(TypeError, match=f"logits has dtype {dtype}; expected one of"):
        logprobs(logits, [0, 0])


@each_library
@pytest.mark.parametrize("other", ["torch", "jax", "array-api-strict"])
@pytest.mark.parametrize("argument", ["ids", "temperature"])
def test_a_mix_of_libraries_is_a_type_error_that_names_both(library, execution, other, argument):
    from conftest import make_library

    if library.name == other:
        pytest.skip("no mix")
    foreign = make_library(other).asarray(np.ones(4, np.int32))
    with pytest.raises(TypeError, match=rf"{argument} is a .* and logits a .*; expected"):
        logprobs(library.asarray(normal(4)), **({"ids": [0] * 4} | {argument: foreign}))


def test_torch_ids_and_temperature_on_another_device_are_a_value_error():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    logits = torch.zeros(4, 7)
    with pytest.raises(ValueError, match="ids is on meta and logits on cpu"):
        logprobs(logits, torch.zeros(4, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="temperature is on meta and logits on cpu"):
        logprobs(logits, [0] * 4, temperature=torch.ones(4, device="meta"))


def test_strict_ids_on_another_device_are_a_value_error():
    xp = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    ids = xp.zeros(4, dtype=xp.int64, device=xp.Device("device1"))
    with pytest.raises(ValueError, match=r"ids is on .*device1.* and logits on .*CPU_DEVICE"):
        logprobs(xp.zeros((4, 7)), ids)


def test_jax_ids_on_another_device_are_a_value_error_and_the_result_stays_with_the_logits():
    pytest.importorskip("jax", reason="jax is not installed")
    code = """
import jax, jax.numpy as jnp, numpy as np
from xlogprobs import logprobs
first, second = jax.devices()
logits = jax.device_put(jnp.zeros((4, 7)), second)
assert logprobs(logits, [0] * 4).devices() == {second}
assert logprobs(logits, np.zeros(4, int), temperature=np.ones(4) / 3).devices() == {second}
try:
    logprobs(logits, jax.device_put(jnp.zeros(4, int), first))
except ValueError as error:
    assert "ids is on" in str(error), error
else:
    raise AssertionError("no error")
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


# Outputs


@each_way
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_result_is_of_the_logits_library_and_device_and_at_least_float32(library, execution, dtype):
    with x64(library, dtype):
        logits, ids = normal(8, dtype=dtype), some_ids(8)
        given = library.convert(logits) if library.name == "jax" else library.asarray(logits)
        out = execution(logprobs, given, library.asarray(ids))
        assert type(out) is type(given)
        assert out.device == given.device
        result = library.tonumpy(out)
    assert result.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert_within_bound(result, parity.reference(logits, ids))


@each_way
def test_half_precision_is_widened_before_the_temperature(library, execution):
    logits, ids = normal(8, dtype="bfloat16", deviation=10), some_ids(8)
    temperature = np.linspace(0.3, 3, 8).astype(np.float32)
    given = [library.asarray(a) for a in (logits, ids, temperature)]
    out = execution(lambda x, i, t: logprobs(x, i, temperature=t), *given)
    assert_within_bound(library.tonumpy(out), parity.reference(logits, ids, temperature=temperature))


@each_way
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probabilities_of_all_ids_add_up_to_one_and_none_exceeds_it(library, execution, dtype):
    if library.name == "array-api-strict" and dtype == "bfloat16":
        pytest.skip("array-api-strict has no bfloat16")
    logits = normal(8, dtype=dtype, deviation=5)
    logits[0] = 0
    logits[1, 1:] = -40  # confident: 1 - 299 e^-40 is no float32
    logits[2] += np.asarray(1e4).astype(logits.dtype)
    every = np.tile(np.arange(V), (8, 1))
    out = library.tonumpy(execution(logprobs, library.asarray(logits), library.asarray(every)))
    assert (out <= 0).all()
    np.testing.assert_allclose(np.exp(out.astype(np.float64)).sum(-1), 1, rtol=0, atol=2e-6)
    assert_within_bound(out, parity.reference(logits, every))


def test_without_gradients_no_graph_is_made():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    logits = torch.zeros(4, V, requires_grad=True)
    with torch.compiler.set_stance("force_eager"):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert logprobs(logits, [0] * 4).grad_fn is None
        assert logprobs(logits, [0] * 4).grad_fn is not None


# Temperature


@each_library
@pytest.mark.parametrize("given", [0.7, 2, np.float32(0.7), np.float64(0.7), np.int64(3), np.array(0.7), 1e30, 1e-30])
def test_temperature_may_be_a_number_of_any_kind(library, execution, given):
    logits, ids = normal(4), some_ids(4)
    out = library.tonumpy(logprobs(library.asarray(logits), ids, temperature=given))
    assert out.dtype == np.float32
    assert_within_bound(out, parity.reference(logits, ids, temperature=np.float64(given)))


@each_way
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_temperature_may_be_one_per_position_of_any_real_dtype(library, execution, dtype):
    if library.name == "array-api-strict" and dtype == "float16":
        pytest.skip("array-api-strict has no float16")
    logits, ids = normal(2, 4), some_ids(2, 4)
    temperature = np.linspace(0.51, 7, 8).reshape(2, 4).astype(dtype) + np.asarray(dtype == "int32").astype(dtype)
    exact = parity.reference(logits, ids, temperature=temperature)
    of_numpy = logprobs(library.asarray(logits), library.asarray(ids), temperature=temperature)
    assert_within_bound(library.tonumpy(of_numpy), exact)
    given = [library.asarray(a) for a in (logits, ids, temperature)]
    out = execution(lambda x, i, t: logprobs(x, i, temperature=t), *given)
    assert_within_bound(library.tonumpy(out), exact)


@each_library
def test_a_float64_temperature_is_not_rounded_to_float32(library, execution):
    rows = 2000
    logits, ids = normal(rows, deviation=10), some_ids(rows)
    temperature = np.random.default_rng(2).uniform(0.3, 2, rows)
    out = library.tonumpy(logprobs(library.asarray(logits), ids, temperature=temperature))
    assert_within_bound(out, parity.reference(logits, ids, temperature=temperature))


@each_way
def test_a_0_d_temperature_of_the_library_does_not_widen_the_result(library, execution):
    logits, ids = normal(8), some_ids(8)
    temperature = library.xp.asarray(0.75, dtype=library.xp.float32)
    given = [library.asarray(logits), library.asarray(ids), temperature]
    out = library.tonumpy(execution(lambda x, i, t: logprobs(x, i, temperature=t), *given))
    assert out.dtype == np.float32
    assert_within_bound(out, parity.reference(logits, ids, temperature=0.75))


@pytest.mark.parametrize(("library", "execution"), COMPILED[1:], indirect=True)
def test_where_it_cannot_be_read_an_invalid_temperature_gives_nan_for_its_row_alone(library, execution):
    logits, ids = normal(8), some_ids(8)
    temperature = np.array([0, -1, np.inf, np.nan, 1e-45, 0.5, 1, 2], np.float32)
    given = [library.asarray(a) for a in (logits, ids, temperature)]
    out = library.tonumpy(execution(lambda x, i, t: logprobs(x, i, temperature=t), *given))
    assert np.isnan(out[:5]).all()
    assert_within_bound(out[5:], parity.reference(logits[5:], ids[5:], temperature=temperature[5:]))


# Ids that are not in the vocabulary

OUTSIDE = [-1, -100, V, V + 3, 2**15 - 1, 2**31 - 1, -(2**31)]
FAR_OUTSIDE = [2**32 + 5, -(2**32) + 5, 2**63 - 1, -(2**63), 2**63 + 5, 2**64 - 1, 2**64 + 5, -(2**64) + 5]


@each_library
@pytest.mark.parametrize("wrong", OUTSIDE + FAR_OUTSIDE)
def test_an_id_outside_the_vocabulary_is_an_index_error_that_names_it_or_nan(library, execution, wrong):
    logits = normal(2, 2)
    ids = [[5, 6], [wrong, -3]]
    with pytest.raises(IndexError, match=rf"ids\[1, 0\] is {wrong}; logits of shape \(2, 2, 300\) take .*\[0, 300\)$"):
        logprobs(library.asarray(logits), ids)
    with pytest.raises(IndexError, match=rf"ids\[1, 0\] is {wrong}; .* or ignore_index=-3$"):
        logprobs(library.asarray(logits), ids, ignore_index=-3, invalid_ids="raise")
    out = library.tonumpy(logprobs(library.asarray(logits), ids, ignore_index=-3, invalid_ids="nan"))
    np.testing.assert_array_equal(np.isnan(out), [[False, False], [True, False]])
    assert out[1, 1] == 0


@each_library
@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        ("int8", -1),
        ("int8", -128),
        ("int16", V),
        ("uint16", 2**16 - 100),
        ("int32", 2**31 - 1),
        ("int32", -(2**31)),
        ("uint32", 2**31 + 5),
        ("uint32", 2**32 - 100),
        ("int64", 2**32 + 5),
        ("int64", -(2**63)),
        ("int64", 2**63 - 1),
        ("uint64", 2**63 + 5),
        ("uint64", 2**64 - 100),
    ],
)
def test_no_width_of_ids_wraps_or_narrows_into_the_vocabulary(library, execution, dtype, wrong):
    with x64(library, dtype):
        logits, ids = library.asarray(normal(3)), library.asarray(np.array([1, wrong, 2], dtype))
        with pytest.raises(IndexError, match=rf"ids\[1\] is {wrong};"):
            logprobs(logits, ids, ignore_index=-100)
        out = library.tonumpy(logprobs(logits, ids, ignore_index=-100, invalid_ids="nan"))
        np.testing.assert_array_equal(np.isnan(out), [False, True, False])
        ignored = library.tonumpy(logprobs(logits, ids, ignore_index=wrong))
        assert ignored[1] == 0
        np.testing.assert_array_equal(ignored[::2], out[::2])


@each_library
@pytest.mark.parametrize("ignore_index", [2**70, -(2**70), 2**32 + 5, 2**64 - 1, -257])
def test_an_ignore_index_beyond_the_ids_type_matches_nothing(library, execution, ignore_index):
    logits = library.asarray(normal(3))
    expected = library.tonumpy(logprobs(logits, [5, 255, 7]))
    for dtype in ("uint8", "int32"):
        ids = library.asarray(np.array([5, 255, 7], dtype))
        np.testing.assert_array_equal(library.tonumpy(logprobs(logits, ids, ignore_index=ignore_index)), expected)


@each_library
def test_the_first_id_outside_is_named_also_among_k_and_alone(library, execution):
    with pytest.raises(IndexError, match=r"^ids\[1, 0\] is -7; "):
        logprobs(library.asarray(normal(3)), library.asarray(np.array([[1, 2], [-7, 300], [-8, 2]])))
    with pytest.raises(IndexError, match=r"^ids is 300; logits of shape \(300,\) take ids in \[0, 300\)$"):
        logprobs(library.asarray(normal()), 300)


@pytest.mark.parametrize(("library", "execution"), COMPILED[1:], indirect=True)
@pytest.mark.parametrize("invalid_ids", ["auto", "nan"])
def test_in_traced_code_an_id_outside_gives_nan(library, execution, invalid_ids):
    ids = np.array([5, -1, -100, V, V + 3, 2**31 - 1, -(2**31), 299])
    given = library.asarray(normal(8)), library.asarray(ids)
    out = execution(lambda x, i: logprobs(x, i, ignore_index=-100, invalid_ids=invalid_ids), *given)
    out = library.tonumpy(out)
    assert np.isnan(out).tolist() == [False, True, False, True, True, True, True, False]
    assert out[2] == 0


def test_traced_code_cannot_raise_for_an_id():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    with pytest.raises(ValueError, match="invalid_ids='raise' needs the values of ids"):
        jax.jit(lambda x, i: logprobs(x, i, invalid_ids="raise"))(jax.numpy.zeros((2, 7)), jax.numpy.zeros(2, int))


@each_way
def test_an_ignored_position_gives_zero_whatever_its_logits_hold(library, execution):
    logits = normal(8)
    logits[0], logits[1], logits[2], logits[3, 7], logits[4, 7] = np.nan, np.inf, -np.inf, np.nan, -np.inf
    ids = np.array([-100, -100, -100, -100, -100, 7, -100, 8])
    given = library.asarray(logits), library.asarray(ids)
    out = library.tonumpy(execution(lambda x, i: logprobs(x, i, ignore_index=-100), *given))
    assert (out[ids == -100] == 0).all()
    assert_within_bound(out[[5, 7]], parity.reference(logits[[5, 7]], ids[[5, 7]]))


@each_library
def test_an_ignore_index_within_the_vocabulary_is_ignored_too(library, execution):
    out = library.tonumpy(logprobs(library.asarray(normal(2)), [[0, 3], [3, 0]], ignore_index=0))
    assert (out == 0).tolist() == [[True, False], [False, True]]


@each_library
def test_ids_may_be_all_ignored(library, execution):
    out = logprobs(library.asarray(np.full((2, 3, V), np.nan, np.float32)), np.full((2, 3), -100), ignore_index=-100)
    np.testing.assert_array_equal(library.tonumpy(out), np.zeros((2, 3), np.float32))


# Special values


def special():
    """Eight rows and for each, by the contract, its log-probability of ids 3 and 250."""
    big, small = np.finfo(np.float32).max, np.float32(1e-42)
    rows = normal(8)
    rows[0, :290] = -np.inf
    rows[1] = -np.inf
    rows[2, 100] = np.nan
    rows[3, 100] = np.inf
    rows[4] = np.linspace(-1, 1, V) * big
    rows[5] = small
    rows[6] = -np.inf
    rows[6, 3] = -1e30
    rows[7, 3] = -np.inf
    return rows, np.tile([3, 250], (8, 1))


@each_way
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_infinities_nans_and_extremes_have_their_defined_results_row_by_row(library, execution, temperature):
    logits, ids = special()
    given = library.asarray(logits), library.asarray(ids)
    out = library.tonumpy(execution(lambda x, i: logprobs(x, i, temperature=temperature), *given))
    assert out[0, 0] == out[0, 1] == out[6, 1] == out[7, 0] == -np.inf  # of probability 0
    assert np.isnan(out[1:4]).all()  # no support, NaN, +inf
    assert out[6, 0] == 0
    with np.errstate(over="ignore"):
        assert_within_bound(out, parity.reference(logits, ids, temperature=temperature))


@each_way
def test_a_row_without_a_distribution_changes_no_other_row(library, execution):
    logits, ids = normal(8), some_ids(8)

    def run(array):
        return library.tonumpy(execution(logprobs, library.asarray(array), library.asarray(ids)))

    clean = bits(run(logits))
    broken = logits.copy()
    broken[1], broken[3, 5], broken[6, 299] = -np.inf, np.nan, np.inf
    out = run(broken)
    others = [0, 2, 4, 5, 7]
    assert np.isnan(out[[1, 3, 6]]).all()
    np.testing.assert_array_equal(bits(out)[others], clean[others])


@each_library
def test_a_vocabulary_of_one_is_certain(library, execution):
    logits = library.asarray(np.array([[5.0], [-np.inf], [np.inf], [np.nan], [0.0]], np.float32))
    out = library.tonumpy(logprobs(logits, [0] * 5))
    np.testing.assert_array_equal(out, [0, np.nan, np.nan, np.nan, 0])


@each_way
@pytest.mark.parametrize("offset", [1e4, -1e4, 1e7, -1e7])
def test_a_common_offset_costs_nothing(library, execution, offset):
    logits = (np.round(normal(8) * 4) / 4 + offset).astype(np.float32)
    ids = some_ids(8)
    out = library.tonumpy(execution(logprobs, library.asarray(logits), library.asarray(ids)))
    assert_within_bound(out, parity.reference(logits, ids))


@each_way
def test_float16_extremes_do_not_overflow(library, execution):
    if library.name == "array-api-strict":
        pytest.skip("array-api-strict has no float16")
    logits = normal(8, dtype="float16")
    logits[:, :2] = [65504, -65504]
    ids = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    out = library.tonumpy(execution(logprobs, library.asarray(logits), library.asarray(ids)))
    assert_within_bound(out, parity.reference(logits, ids))


@each_library
def test_a_spread_beyond_float32_is_finite_at_a_temperature_that_brings_it_back(library, execution):
    big = np.finfo(np.float32).max
    logits, ids = np.tile(np.float32([big, -big, 0]), (3, 1)), np.array([0, 1, 2])
    for temperature in (2.5, 1e20):
        out = library.tonumpy(logprobs(library.asarray(logits), ids, temperature=temperature))
        assert np.isfinite(out).all()
        assert_within_bound(out, parity.reference(logits, ids, temperature=temperature))


# Reproducibility


@each_way
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_runs_repeat_bit_for_bit_and_rows_keep_their_bits_at_any_position(library, execution, dtype):
    if library.name == "array-api-strict" and dtype == "bfloat16":
        pytest.skip("array-api-strict has no bfloat16")
    logits, ids = normal(8, dtype=dtype), some_ids(8)

    def run(order):
        return bits(library.tonumpy(execution(logprobs, library.asarray(logits[order]), library.asarray(ids[order]))))

    once = run(np.arange(8))
    np.testing.assert_array_equal(run(np.arange(8)), once)
    order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    np.testing.assert_array_equal(run(order), once[order])


IN_A_PROCESS = """
import sys
import numpy as np
from xlogprobs import logprobs
rng = np.random.default_rng(0)
logits = rng.standard_normal((3000, 1300), dtype=np.float32) * 3
ids = rng.integers(0, 1300, 3000)
{convert}
out = np.asarray(logprobs(logits, ids, temperature=0.9))
sys.stdout.buffer.write(out.tobytes())
"""
CONVERT = {
    "numpy": "",
    "torch": "import torch; torch.compiler.set_stance('force_eager'); logits = torch.from_numpy(logits)",
    "jax": "import jax.numpy as jnp; logits = jnp.asarray(logits)",
}


@pytest.mark.parametrize("name", CONVERT)
def test_bits_do_not_depend_on_the_number_of_threads(name):
    pytest.importorskip(name, reason=f"{name} is not installed")
    code, results = IN_A_PROCESS.format(convert=CONVERT[name]), set()
    for threads in ("1", "2", "3"):
        flags = f"--xla_cpu_multi_thread_eigen={'false' if threads == '1' else 'true'}"
        environment = os.environ | {"OMP_NUM_THREADS": threads, "XLA_FLAGS": flags}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=120)
        assert run.returncode == 0, run.stderr.decode()
        results.add(run.stdout)
    assert [len(out) for out in results] == [3000 * 4]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_bits_do_not_depend_on_torch_set_num_threads(mode):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    logits, ids = torch.from_numpy(normal(256)), torch.from_numpy(some_ids(256))
    threads, results = torch.get_num_threads(), []
    try:
        with torch.compiler.set_stance("force_eager" if mode == "eager" else "default"):
            for count in (1, 2):
                torch.set_num_threads(count)
                results.append(bits(logprobs(logits, ids).numpy()))
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(results[0], results[1])


# torch: the user's global state


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_default_dtype_and_autocast_change_nothing(mode):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    logits, ids = torch.from_numpy(normal(8)), torch.from_numpy(some_ids(8))
    with torch.compiler.set_stance("force_eager" if mode == "eager" else "default"):
        plain = logprobs(logits, ids)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(logprobs(logits, ids), plain)
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.equal(logprobs(logits, ids), plain)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["Parameter", "inference tensor", "negative view"])
def test_torch_tensors_of_every_kind_are_read_as_they_print(kind):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    array = normal(8)
    ids = some_ids(8)
    if kind == "Parameter":
        logits = torch.nn.Parameter(torch.from_numpy(array))
    elif kind == "inference tensor":
        with torch.inference_mode():
            logits = torch.from_numpy(array) * 1
    else:
        logits = torch.complex(torch.from_numpy(array), torch.from_numpy(-array)).conj().imag
        assert logits.is_neg()
    with torch.compiler.set_stance("force_eager"):
        out = logprobs(logits, torch.from_numpy(ids)).detach()
    assert_within_bound(out.numpy(), parity.reference(array, ids))


def test_inside_torch_func_vmap_ids_outside_give_nan():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    logits, ids = normal(3, 2), np.array([[1, V], [2, 3], [-1, 4]])
    with torch.compiler.set_stance("force_eager"):
        out = torch.func.vmap(logprobs)(torch.from_numpy(logits), torch.from_numpy(ids)).numpy()
    np.testing.assert_array_equal(np.isnan(out), [[False, True], [False, False], [True, False]])
    inside = ~np.isnan(out)
    assert_within_bound(out[inside], parity.reference(logits, np.where(inside, ids, 0))[inside])


# JAX: the user's own transformations

OUTER = ["jit", "vmap", "vmap of vmap", "scan", "map", "jit of vmap", "vmap over ids", "cond", "disable_jit"]


@pytest.mark.parametrize("outer", OUTER)
def test_inside_jax_transformations_the_result_is_that_of_the_plain_call(outer):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    jnp = jax.numpy
    logits, ids = jnp.asarray(normal(4, 2)), jnp.asarray(some_ids(4, 2))
    plain = np.asarray(logprobs(logits, ids, temperature=0.7))

    def run(x, i):
        return logprobs(x, i, temperature=0.7)

    transformed = {
        "jit": lambda: jax.jit(run)(logits, ids),
        "vmap": lambda: jax.vmap(run)(logits, ids),
        "vmap of vmap": lambda: jax.vmap(jax.vmap(run))(logits, ids),
        "scan": lambda: jax.lax.scan(lambda carry, xs: (carry, run(*xs)), 0, (logits, ids))[1],
        "map": lambda: jax.lax.map(lambda xs: run(*xs), (logits, ids)),
        "jit of vmap": lambda: jax.jit(jax.vmap(run, in_axes=(1, 1), out_axes=1))(logits, ids),
        "vmap over ids": lambda: jax.vmap(lambda i: run(logits, i), in_axes=2, out_axes=2)(ids[..., None])[..., 0],
        "cond": lambda: jax.jit(lambda x, i: jax.lax.cond(i[0, 0] >= 0, run, lambda x, i: i * 1.0, x, i))(logits, ids),
        "disable_jit": lambda: in_context(jax.disable_jit(), lambda: run(logits, ids)),
    }
    out = np.asarray(transformed[outer]())
    assert_within_bound(out, parity.reference(np.asarray(logits), np.asarray(ids), temperature=0.7))
    np.testing.assert_allclose(out, plain, rtol=1e-6)


def in_context(context, run):
    with context:
        return run()


def test_inside_jax_vmap_an_id_outside_gives_nan():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    out = jax.vmap(logprobs)(jax.numpy.asarray(normal(4)), jax.numpy.asarray([1, -1, V, 2]))
    assert np.isnan(np.asarray(out)).tolist() == [False, True, True, False]


def test_numpy_ids_in_jax_traced_code_are_checked_as_it_is_traced():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    with pytest.raises(IndexError, match=r"ids\[1\] is 300"):
        jax.jit(lambda x: logprobs(x, [1, 300]))(jax.numpy.zeros((2, V)))


# Gradients, as far as the values of the call decide them


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_have_the_logits_dtype_and_are_zero_where_ignored_or_impossible(name, dtype):
    library = pytest.importorskip(name, reason=f"{name} is not installed")
    logits, ids = normal(4, dtype=dtype), np.array([5, -100, 7, 0])
    logits[0, 6], logits[1], logits[2, 8] = -np.inf, np.nan, -np.inf
    gradient = gradient_of(library, logits, ids)
    assert str(gradient.dtype).endswith(dtype)
    gradient = np.asarray(gradient.float().numpy() if name == "torch" else gradient).astype(np.float64)
    assert (gradient[1] == 0).all()
    assert gradient[0, 6] == gradient[2, 8] == 0
    assert np.isfinite(gradient).all()
    safe = np.where(np.arange(4)[:, None] == 1, 0, logits.astype(np.float64))
    weights = np.exp(safe - safe.max(-1, keepdims=True))
    exact = np.eye(V)[np.maximum(ids, 0)] - weights / weights.sum(-1, keepdims=True)
    exact[1] = 0
    one_rounding = 2.0**-8 if dtype == "bfloat16" else 0
    assert (np.abs(gradient - exact) <= 1e-6 + one_rounding * np.abs(exact)).all()


def gradient_of(library, logits, ids):
    if library.__name__ == "jax":
        function = library.grad(lambda x: logprobs(x, ids, ignore_index=-100).sum())
        return function(library.numpy.asarray(logits))
    given = parity.torch_array(logits).requires_grad_()
    with library.compiler.set_stance("force_eager"):
        logprobs(given, ids, ignore_index=-100).sum().backward()
    return given.grad


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_empty_batches_have_gradients(name, shape):
    library = pytest.importorskip(name, reason=f"{name} is not installed")
    gradient = gradient_of(library, normal(*shape), np.zeros(shape, int))
    assert tuple(gradient.shape) == (*shape, V)


# What is installed


def test_backends_names_each_with_its_version_devices_and_the_way_it_runs():
    found = {info.name: info for info in xlogprobs.backends()}
    assert {"array-api", "numpy", "torch", "jax"} <= set(found)
    for info in found.values():
        if info.installed:
            assert info.version
            assert info.devices
            assert info.execution
        else:
            assert f'pip install "xlogprobs[{info.name}]"' in info.why_not
