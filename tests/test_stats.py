"""The contract of the statistics and of the transforms, rule by rule, on every library."""

from contextlib import nullcontext

import numpy as np
import pytest
from conftest import LIBRARIES

from xlogprobs import TokenStats, entropy, logprobs, logprobs_and_entropy, parity, token_stats

# where a test takes each library in turn; what a compiler makes of these calls is in the parity matrix
pytestmark = pytest.mark.usefixtures("torch_runs_eagerly")

V = 130
ALL = ("logprob", "entropy", "lse", "rank")
STATISTICS = (*ALL, "top_ids")
EMPTY = {"logprob": 0.0, "entropy": 0.0, "lse": 0.0, "rank": 0, "top_ids": -1, "top_logprobs": 0.0}
UNDEFINED = {"logprob": np.nan, "entropy": np.nan, "lse": np.nan, "rank": 0, "top_ids": -1, "top_logprobs": np.nan}


def normal(*shape, dtype="float32", deviation=3.0, seed=0):
    array = np.random.default_rng(seed).standard_normal((*shape, V)) * deviation
    if dtype == "bfloat16":
        return array.astype(pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed").bfloat16)
    return array.astype(dtype)


def some_ids(*shape, seed=1):
    return np.random.default_rng(seed).integers(0, V, shape)


def random_mask(*shape, seed=2):
    mask = np.random.default_rng(seed).random((*shape, V)) < 0.5
    mask[..., 0] = True
    return mask


BIAS = np.random.default_rng(3).standard_normal(V).astype(np.float32)
MASK = random_mask()
TRANSFORMS = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "scale": {"scale": 0.25},
    "negative scale": {"scale": -1.5},
    "scale 0": {"scale": 0.0},
    "softcap": {"softcap": 30.0},
    "softcap of temperature": {"softcap": 5.0, "temperature": 0.6},
    "bias": {"bias": BIAS},
    "mask": {"mask": MASK},
    "all": {"temperature": 0.6, "scale": -2.0, "softcap": 30.0, "bias": BIAS, "mask": MASK},
}
# JAX compiles each set of transforms for each shape: most are marked full, and in the parity matrix
each_transform = pytest.mark.parametrize(
    ("library", "transforms"),
    [
        pytest.param(
            library,
            transforms,
            id=f"{library}-{name}",
            marks=[pytest.mark.full] if library == "jax" and name not in ("none", "all") else [],
        )
        for library in LIBRARIES
        for name, transforms in TRANSFORMS.items()
    ],
    indirect=["library"],
)


def converted(library, value):
    """Arrays of NumPy as those of the library; what is no array as it is."""
    return library.asarray(value) if isinstance(value, np.ndarray) else value


def stats(library, logits, ids=None, want=ALL, top_k=0, **options):
    """`token_stats` in NumPy arrays."""
    given = {name: converted(library, value) for name, value in options.items()}
    found = token_stats(library.asarray(logits), converted(library, ids), want, top_k, **given)
    return TokenStats(*(None if array is None else library.tonumpy(array) for array in found))


def exact_stats(logits, ids, top_k, **transforms):
    top = parity.top_ids(logits, top_k, **transforms)
    top_logprobs = parity.reference(logits, np.maximum(top, 0), **transforms)
    return TokenStats(
        parity.reference(logits, ids, **transforms),
        parity.entropy(logits, **transforms),
        parity.lse(logits, **transforms),
        parity.rank(logits, ids, **transforms),
        top_logprobs,
        top,
    )


def assert_right(found, exact):
    for name, out, true in zip(TokenStats._fields, found, exact, strict=True):
        if out is not None:
            quantity = "logprob" if name == "top_logprobs" else name
            allowed, off = parity.bound(true, out.dtype, quantity), parity.error(out, true)
            assert out.shape == true.shape, name
            assert (off <= allowed).all(), f"{name}: {(off / allowed).max():.3g} x bound"


def assert_same_bits(found, expected):
    for name, out, other in zip(TokenStats._fields, found, expected, strict=True):
        assert (out is None) == (other is None), name
        if out is not None:
            np.testing.assert_array_equal(bits(out), bits(other), err_msg=name)


def bits(out):
    return np.ascontiguousarray(out).view(f"u{out.dtype.itemsize}")


# Shapes and kinds


@pytest.mark.parametrize("many", [None, 1, 3, 0])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_entropy_lse_and_top_k_are_of_positions_logprob_and_rank_of_ids(library, shape, many):
    logits, ids = normal(*shape), some_ids(*shape, *([] if many is None else [many]))
    found = stats(library, logits, ids, top_k=4)
    assert found.entropy.shape == found.lse.shape == shape
    assert found.logprob.shape == found.rank.shape == ids.shape
    assert found.top_ids.shape == found.top_logprobs.shape == (*shape, 4)
    if many == 0:  # without an id nothing is scored, but then nothing is ignored either
        return
    assert_right(found, exact_stats(logits, ids, 4))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_without_ids_positions_have_their_statistics(library, shape):
    logits = normal(*shape)
    found = stats(library, logits, want=("entropy", "lse"), top_k=2)
    assert found.logprob is found.rank is None
    assert_right(found, exact_stats(logits, np.zeros(shape, int), 2))
    given = library.asarray(logits)
    np.testing.assert_array_equal(library.tonumpy(entropy(given)), found.entropy)
    assert type(entropy(given)) is type(given)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_statistics_are_at_least_float32_and_ranks_and_ids_are_integers(library, dtype):
    with x64(library, dtype):
        logits, ids = normal(4, dtype=dtype), some_ids(4)
        given = library.convert(logits) if library.name == "jax" else library.asarray(logits)
        found = token_stats(given, library.asarray(ids), top_k=3)
        found = TokenStats(*(library.tonumpy(array) for array in found))
    expected = np.float64 if dtype == "float64" else np.float32
    assert {found.logprob.dtype, found.entropy.dtype, found.lse.dtype, found.top_logprobs.dtype} == {np.dtype(expected)}
    assert {found.rank.dtype.kind, found.top_ids.dtype.kind} == {"i"}
    assert_right(found, exact_stats(logits, ids, 3))


def x64(library, dtype):
    if library.name == "jax" and dtype == "float64":
        import jax

        return jax.enable_x64(True)
    return nullcontext()


def test_what_is_not_wanted_is_none(library):
    logits, ids = normal(3), some_ids(3)
    for want in ((), *ALL, ("entropy", "rank"), {"logprob", "lse"}, ["rank"]):
        found = stats(library, logits, ids, want)
        asked = {want} if isinstance(want, str) else set(want)
        assert {name for name, value in zip(TokenStats._fields, found, strict=True) if value is not None} == asked
    found = stats(library, logits, ids, ("lse",), top_k=2)
    assert found.logprob is found.entropy is found.rank is None
    assert (found.lse is None, found.top_ids is None, found.top_logprobs is None) == (False, False, False)


@each_transform
def test_the_functions_agree_whatever_else_is_asked_for(library, transforms):
    logits, ids = normal(4), some_ids(4)
    given = {name: converted(library, value) for name, value in transforms.items()}
    x, i = library.asarray(logits), library.asarray(ids)
    every = stats(library, logits, ids, top_k=3, **transforms)
    both = [library.tonumpy(out) for out in logprobs_and_entropy(x, i, **given)]
    alone = library.tonumpy(logprobs(x, i, **given)), library.tonumpy(entropy(x, **given))
    exact = exact_stats(logits, ids, 3, **transforms)
    assert_right(every, exact)
    for out in ((every.logprob, every.entropy), both, alone):
        assert_right(TokenStats(*out), exact)


# Transforms


@each_transform
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_statistic_is_of_the_transformed_logits(library, transforms, dtype):
    logits, ids = normal(2, 3, dtype=dtype, deviation=8), some_ids(2, 3, 2)
    assert_right(stats(library, logits, ids, top_k=V, **transforms), exact_stats(logits, ids, V, **transforms))


@each_transform
def test_float64_logits_keep_float64_under_every_transform(library, transforms):
    with x64(library, "float64"):
        logits, ids = normal(4, dtype="float64"), some_ids(4)
        given = library.convert(logits) if library.name == "jax" else library.asarray(logits)
        options = {name: converted(library, value) for name, value in transforms.items()}
        found = token_stats(given, library.asarray(ids), top_k=5, **options)
        found = TokenStats(*(library.tonumpy(array) for array in found))
    assert_right(found, exact_stats(logits, ids, 5, **transforms))


def test_the_order_is_scale_softcap_bias_temperature_mask(library):
    logits, ids = np.array([[124.0, -3.0, 40.0, 1.0]], np.float32), np.array([2])
    bias, mask = np.array([1.0, 2.0, -4.0, 0.5], np.float32), np.array([True, True, True, False])
    z = (30 * np.tanh(0.5 * logits.astype(np.float64) / 30) + bias) / 0.6
    weights = np.exp(z[:, :3] - z[:, :3].max())
    found = stats(library, logits, ids, temperature=0.6, scale=0.5, softcap=30, bias=bias, mask=mask)
    p = weights / weights.sum()
    np.testing.assert_allclose(found.logprob, np.log(p[:, 2]), rtol=1e-6)
    np.testing.assert_allclose(found.entropy, -(p * np.log(p)).sum(-1), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.lse, np.log(weights.sum()) + z[:, :3].max(), rtol=1e-6)


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("given", [2, 0.7, np.float32(0.7), np.float64(0.7), np.int64(3), np.array(0.7), 1e30, 1e-30])
def test_scale_and_softcap_may_be_numbers_of_any_kind(library, name, given):
    logits, ids = normal(4), some_ids(4)
    found = stats(library, logits, ids, ("logprob", "entropy"), **{name: given})
    assert found.logprob.dtype == np.float32
    assert_right(found, exact_stats(logits, ids, 0, **{name: np.float64(given)}))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_numbers_may_be_one_per_position_of_any_real_dtype_and_kind_of_array(library, dtype):
    logits, ids = normal(2, 4), some_ids(2, 4)
    scale = np.linspace(-4, 5, 8).reshape(2, 4).astype(dtype)
    softcap, temperature = (np.linspace(low, 9, 8).reshape(2, 4).astype(dtype) for low in (2, 1))
    exact = exact_stats(logits, ids, 6, scale=scale, softcap=softcap, temperature=temperature)
    of_numpy = [{"scale": scale, "softcap": softcap, "temperature": temperature}]
    of_numpy.append({name: array.tolist() for name, array in of_numpy[0].items()})
    for options in of_numpy:
        found = token_stats(library.asarray(logits), library.asarray(ids), top_k=6, **options)
        assert_right(TokenStats(*map(library.tonumpy, found)), exact)
    if not (library.name == "jax" and dtype == "float64"):
        assert_right(stats(library, logits, ids, top_k=6, **of_numpy[0]), exact)


def test_float64_numbers_are_not_rounded_to_float32(library):
    rows = 500
    logits, ids = normal(rows, deviation=10), some_ids(rows)
    rng = np.random.default_rng(2)
    options = {name: rng.uniform(0.4, 2, rows) for name in ("temperature", "scale")} | {"softcap": np.full(rows, 20.1)}
    found = token_stats(library.asarray(logits), library.asarray(ids), **options)
    assert_right(TokenStats(*map(library.tonumpy, found[:4])), exact_stats(logits, ids, 0, **options)[:4] + (None,) * 2)


SHAPES = [(V,), (1, V), (3, V), (1, 3, V), (2, 1, V), (2, 3, V), (1, 1, V)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["library", "numpy", "list"])
def test_bias_and_mask_are_shared_as_they_broadcast(library, shape, kind):
    logits, ids = normal(2, 3), some_ids(2, 3)
    bias, mask = np.random.default_rng(4).standard_normal(shape).astype(np.float32), random_mask(*shape[:-1])
    convert = {"library": library.asarray, "numpy": lambda array: array, "list": lambda array: array.tolist()}[kind]
    for transforms in ({"mask": mask}, {"bias": bias}, {"bias": bias, "mask": mask}):
        given = {name: convert(array) for name, array in transforms.items()}
        found = token_stats(library.asarray(logits), library.asarray(ids), top_k=3, **given)
        found = TokenStats(*map(library.tonumpy, found))
        assert_right(found, exact_stats(logits, ids, 3, **transforms))
        full = {name: np.broadcast_to(array, (2, 3, V)).copy() for name, array in transforms.items()}
        assert_same_bits(found, stats(library, logits, ids, top_k=3, **full))


def test_a_mask_with_one_entry_for_a_row_keeps_the_row_or_nothing(library):
    logits, ids = normal(2, 3), some_ids(2, 3)
    mask = np.array([[[True], [False], [True]], [[False], [True], [True]]])
    assert_right(stats(library, logits, ids, mask=mask), exact_stats(logits, ids, 0, mask=mask)[:4] + (None,) * 2)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_1_d_logits_take_a_bias_and_a_mask(library, shape):
    logits, ids = normal(*shape), some_ids(*shape)
    assert_right(
        stats(library, logits, ids, top_k=2, bias=BIAS, mask=MASK), exact_stats(logits, ids, 2, bias=BIAS, mask=MASK)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "uint8"])
def test_a_bias_of_any_real_dtype_does_not_widen_the_result(library, dtype):
    if dtype == "bfloat16":
        bias = (4 * BIAS).astype(pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed").bfloat16)
    else:
        bias = np.abs(np.round(4 * BIAS)).astype(dtype)
    logits, ids = normal(3), some_ids(3)
    found = token_stats(library.asarray(logits), library.asarray(ids), bias=bias)  # from NumPy
    found = TokenStats(*map(library.tonumpy, found[:4]))
    exact = exact_stats(logits, ids, 0, bias=bias.astype(np.float64))[:4] + (None,) * 2
    assert found.logprob.dtype == np.float32
    assert_right(found, exact)
    if library.name == "jax" and dtype == "float64":
        return
    assert_right(stats(library, logits, ids, bias=bias), exact)


def test_a_bias_of_minus_infinity_excludes_an_entry(library):
    bias, logits, ids = np.where(MASK, 0, -np.inf).astype(np.float32), normal(4), some_ids(4)
    found = stats(library, logits, ids, top_k=V, bias=bias)
    assert_right(found, exact_stats(logits, ids, V, mask=MASK))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bias_that_is_no_number_makes_its_rows_nan(library, bad):
    bias = np.zeros((4, V), np.float32)
    bias[1, 5], bias[2, 5] = bad, -np.inf
    logits, ids = normal(4), some_ids(4)
    found = stats(library, logits, ids, top_k=2, bias=bias)
    assert_right(found, exact_stats(logits, ids, 2, bias=bias))
    assert np.isnan(found.logprob).tolist() == [False, True, False, False]


def test_nothing_is_written_to(library):
    arrays = {"bias": BIAS, "mask": random_mask(2, 3), "scale": np.full((2, 3), -2, np.float32)}
    arrays |= {"softcap": np.full((2, 3), 30, np.float32), "temperature": np.full((2, 3), 0.7, np.float32)}
    logits, ids = normal(2, 3), some_ids(2, 3)
    given = {name: library.asarray(array) for name, array in arrays.items()}  # NumPy arrays come read-only
    x, i = library.asarray(logits), library.asarray(ids)
    token_stats(x, i, top_k=3, **given)
    for after, original in [(x, logits), (i, ids), *((given[name], arrays[name]) for name in arrays)]:
        np.testing.assert_array_equal(library.tonumpy(after), original)


# Messages

LOGITS, IDS = np.zeros((4, 8, 7), np.float32), np.zeros((4, 8), np.int64)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"scale": np.nan}, ValueError, "scale is nan; expected finite"),
        ({"scale": -np.inf}, ValueError, "scale is -inf; expected finite"),
        ({"scale": 1e39}, ValueError, r"scale is 1e\+39; expected finite in float32"),
        ({"scale": True}, TypeError, "scale is True; expected a number, or one per position"),
        ({"scale": "big"}, TypeError, "scale is 'big'; expected a number"),
        ({"scale": None}, TypeError, "scale is a NoneType; expected a number"),
        ({"scale": np.ones(8)}, ValueError, r"scale has shape \(8,\); logits of shape \(4, 8, 7\) take a number or"),
        ({"scale": np.ones((4, 8), bool)}, TypeError, "scale has dtype bool; expected real numbers"),
        ({"scale": np.where(np.eye(4, 8), np.inf, 1)}, ValueError, r"scale\[0, 0\] is inf; expected finite"),
        ({"softcap": 0}, ValueError, "softcap is 0.0; expected finite and positive"),
        ({"softcap": -30.0}, ValueError, "softcap is -30.0; expected finite and positive"),
        ({"softcap": np.inf}, ValueError, "softcap is inf; expected finite and positive"),
        ({"softcap": 1e-40}, ValueError, "softcap is 1e-40; expected finite and positive in float32"),
        ({"softcap": False}, TypeError, "softcap is False; expected a number"),
        ({"softcap": np.eye(4, 8)}, ValueError, r"softcap\[0, 1\] is 0.0; expected finite and positive"),
        ({"softcap": np.ones((4, 8, 1))}, ValueError, r"softcap has shape \(4, 8, 1\); logits of shape"),
        ({"temperature": 0}, ValueError, "temperature is 0.0; expected finite and positive"),
        ({"temperature": np.ones(4)}, ValueError, r"temperature has shape \(4,\); logits of shape"),
        ({"bias": np.zeros(8)}, ValueError, r"bias has shape \(8,\), which does not broadcast to .* \(4, 8, 7\)"),
        ({"bias": np.zeros((3, 1, 7))}, ValueError, r"bias has shape \(3, 1, 7\), which does not broadcast"),
        ({"bias": np.zeros((1, 4, 8, 7))}, ValueError, r"bias has shape \(1, 4, 8, 7\), which does not broadcast"),
        ({"bias": np.zeros(7, bool)}, TypeError, "bias has dtype bool; expected real numbers"),
        ({"bias": np.zeros(7, complex)}, TypeError, "bias has dtype complex128; expected real numbers"),
        ({"bias": "none"}, TypeError, "bias has dtype str"),
        ({"bias": [[0.0], [1.0, 2.0]]}, ValueError, "bias is a list that is no rectangular array"),
        ({"mask": np.ones(7)}, TypeError, "mask has dtype float64; expected booleans, True for the entries to keep"),
        ({"mask": np.ones(7, int)}, TypeError, "mask has dtype int64; expected booleans"),
        ({"mask": [0, 1, 0, 1, 0, 1, 0]}, TypeError, "mask has dtype int64; expected booleans"),
        ({"mask": np.ones((4, 8), bool)}, ValueError, r"mask has shape \(4, 8\), which does not broadcast"),
        ({"mask": np.ones((2, 8, 7), bool)}, ValueError, r"mask has shape \(2, 8, 7\), which does not broadcast"),
        ({"want": "perplexity"}, ValueError, "want has 'perplexity'; expected any of 'logprob', 'entropy', 'lse', 'r"),
        ({"want": ("lse", "top_ids")}, ValueError, "want has 'top_ids'; expected any of"),
        ({"ids": None, "want": ("entropy", "logprob")}, ValueError, "want has 'logprob', which is a statistic of ids"),
        ({"ids": None, "want": "rank"}, ValueError, "want has 'rank', which is a statistic of ids; pass ids"),
        ({"ids": None}, ValueError, "want has 'logprob', which is a statistic of ids"),
        ({"top_k": 8}, ValueError, r"top_k is 8; logits of shape \(4, 8, 7\) take a top_k from 0 to 7"),
        ({"top_k": -1}, ValueError, "top_k is -1; logits of shape"),
        ({"top_k": 2.0}, TypeError, "top_k is 2.0; expected an int"),
        ({"top_k": True}, TypeError, "top_k is True; expected an int"),
        ({"ids": np.zeros((4, 7), int)}, ValueError, r"ids has shape \(4, 7\); logits of shape"),
        (
            {"ids": np.full((4, 8), 7)},
            IndexError,
            r"ids\[0, 0\] is 7; logits of shape \(4, 8, 7\) take ids in \[0, 7\)",
        ),
    ],
)
def test_a_message_names_the_argument_what_came_and_what_was_expected(library, given, kind, message):
    with pytest.raises(kind, match=message):
        token_stats(library.asarray(LOGITS), **({"ids": IDS} | given))


@pytest.mark.parametrize("name", ["scale", "softcap", "bias", "mask"])
@pytest.mark.parametrize("other", ["torch", "jax", "array-api-strict"])
def test_a_mix_of_libraries_is_a_type_error_that_names_both(library, other, name):
    from conftest import make_library

    if library.name == other:
        pytest.skip("no mix")
    foreign = make_library(other).asarray(np.ones(V, bool) if name == "mask" else np.ones(V, np.float32))
    with pytest.raises(TypeError, match=rf"{name} is a .* and logits a .*; expected one library"):
        logprobs(library.asarray(normal(V)), [0] * V, **{name: foreign})


@pytest.mark.parametrize("name", ["scale", "softcap", "bias", "mask"])
def test_an_array_on_another_device_is_a_value_error(name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    value = torch.ones(7, dtype=torch.bool if name == "mask" else torch.float32, device="meta")
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match=f"{name} is on meta and logits on"):
        entropy(torch.zeros(7, 7), **{name: value})


@pytest.mark.parametrize(("name", "bad"), [("scale", [np.nan, np.inf]), ("softcap", [np.nan, np.inf, 0.0, -1.0])])
def test_where_it_cannot_be_read_an_invalid_number_gives_nan_for_its_row_alone(name, bad):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    numbers = np.array([2.0, *bad, 3.0], np.float32)
    logits, ids = normal(len(numbers)), some_ids(len(numbers))
    run = jax.jit(lambda x, i, n: token_stats(x, i, top_k=2, **{name: n}))
    found = TokenStats(*map(np.asarray, run(*map(jax.numpy.asarray, (logits, ids, numbers)))))
    for field, out in found._asdict().items():
        np.testing.assert_array_equal(out[1:-1], np.full_like(out[1:-1], UNDEFINED[field]), err_msg=field)
    ends = [0, -1]
    exact = exact_stats(logits[ends], ids[ends], 2, **{name: numbers[ends]})
    assert_right(TokenStats(*(out[ends] for out in found)), exact)


@pytest.mark.parametrize("scale", [1e-40, -1e-40, 1e-180])
def test_a_scale_below_the_normal_numbers_of_float32_is_0(library, scale):
    logits = normal(2)
    logits[:, 5] = -np.inf
    found = stats(library, logits, [5, 6], ("logprob", "entropy"), scale=scale, bias=BIAS)
    assert_right(found, exact_stats(logits, np.array([5, 6]), 0, scale=0.0, bias=BIAS))


# Ids that are ignored or invalid


def broken_rows():
    """Rows whose logits hold anything, and one (the last) that holds numbers."""
    logits = normal(6)
    logits[0], logits[1], logits[2], logits[3, 7], logits[4, 7] = np.nan, np.inf, -np.inf, np.nan, -np.inf
    return logits


@each_transform
def test_at_an_ignored_position_every_statistic_is_0_whatever_its_logits_hold(library, transforms):
    logits, ids = broken_rows(), np.array([-100] * 5 + [7])
    found = stats(library, logits, ids, top_k=3, ignore_index=-100, **transforms)
    for name, out in found._asdict().items():
        np.testing.assert_array_equal(out[:5], np.full_like(out[:5], EMPTY[name]), err_msg=name)
    last = TokenStats(*(out[5:] for out in found))
    assert_right(last, exact_stats(logits[5:], ids[5:], 3, **transforms))


def test_a_position_is_ignored_where_all_its_ids_are(library):
    logits, ids = normal(3), np.array([[-100, 5], [-100, -100], [6, 7]])
    found = stats(library, logits, ids, top_k=2, ignore_index=-100)
    exact = exact_stats(logits, np.maximum(ids, 0), 2)
    np.testing.assert_array_equal(found.entropy == 0, [False, True, False])
    np.testing.assert_array_equal(found.logprob == 0, ids == -100)
    np.testing.assert_array_equal(found.rank, np.where(ids == -100, 0, exact.rank))
    np.testing.assert_array_equal(found.top_ids, np.where([[False], [True], [False]], -1, exact.top_ids))
    assert_right(
        TokenStats(entropy=found.entropy[::2], lse=found.lse[::2], top_logprobs=found.top_logprobs[::2]),
        TokenStats(*(None if a is None else a[::2] for a in exact)),
    )


def test_an_invalid_id_has_no_logprob_and_no_rank_and_leaves_the_rest(library):
    logits, ids = normal(2), np.array([[5, V], [-1, 6]])
    found = stats(library, logits, ids, top_k=2, invalid_ids="nan")
    exact = exact_stats(logits, np.array([[5, 0], [0, 6]]), 2)
    np.testing.assert_array_equal(np.isnan(found.logprob), [[False, True], [True, False]])
    np.testing.assert_array_equal(found.rank, exact.rank * [[1, 0], [0, 1]])
    rest = TokenStats(None, found.entropy, found.lse, None, found.top_logprobs, found.top_ids)
    assert_right(rest, exact)


# Special values


def special_rows():
    rows = normal(9)
    rows[0, :90] = -np.inf
    rows[1] = -np.inf
    rows[2, 100] = np.nan
    rows[3, 100] = np.inf
    rows[4] = np.linspace(-1, 1, V) * np.finfo(np.float32).max
    rows[5] = np.float32(1e-42)
    rows[6] = -np.inf
    rows[6, 3] = -1e30
    rows[7, 3] = -np.inf
    rows[8] += 1e7
    return rows


@pytest.mark.parametrize(
    "transforms",
    [{}, {"temperature": 3.0}, {"scale": -1.0}, {"scale": 0.0}, {"softcap": 30.0}, {"scale": -2.0, "softcap": 3.0}],
    ids=str,
)
def test_infinities_nans_and_extremes_have_their_defined_results_row_by_row(library, transforms):
    logits, ids = special_rows(), np.tile([3, 120], (9, 1))
    found = stats(library, logits, ids, top_k=4, **transforms)
    assert_right(found, exact_stats(logits, ids, 4, **transforms))
    assert np.isnan(found.entropy).tolist() == [False, True, True, True, False, False, False, False, False]
    assert found.lse[1] == -np.inf
    assert (found.rank[1:4] == 0).all()
    assert (found.top_ids[1:4] == -1).all()


@pytest.mark.parametrize(
    "transforms", [{}, {"scale": -1.0}, {"softcap": 30.0}, {"scale": -2.0, "softcap": 3.0, "bias": BIAS}], ids=str
)
@pytest.mark.parametrize("held", [np.nan, np.inf, -np.inf])
def test_what_the_mask_does_not_keep_may_hold_anything(library, transforms, held):
    logits, ids = normal(4), np.array([3, 4, 5, 0])
    full = stats(library, logits, ids, top_k=4, mask=MASK, **transforms)
    assert_right(full, exact_stats(logits, ids, 4, mask=MASK, **transforms))
    logits[:, ~MASK] = held
    assert_same_bits(stats(library, logits, ids, top_k=4, mask=MASK, **transforms), full)


def test_a_row_that_keeps_nothing_has_no_distribution_and_changes_no_other(library):
    logits, ids, mask = normal(3), np.array([3, 4, 5]), np.array([[True], [False], [True]]) & np.ones(V, bool)
    found = stats(library, logits, ids, top_k=2, mask=mask)
    for name, out in found._asdict().items():
        expected = -np.inf if name == "lse" else UNDEFINED[name]
        np.testing.assert_array_equal(out[1], np.full_like(out[1], expected), err_msg=name)
    clean = stats(library, logits, ids, top_k=2, mask=np.ones((3, V), bool))
    assert_same_bits(TokenStats(*(out[::2] for out in found)), TokenStats(*(out[::2] for out in clean)))


def test_an_entry_that_is_not_kept_has_probability_0(library):
    logits, ids = normal(2), np.tile(np.flatnonzero(~MASK)[:3], (2, 1))
    found = stats(library, logits, ids, mask=MASK)
    assert (found.logprob == -np.inf).all()
    assert (found.rank == 1 + MASK.sum()).all()


def test_one_entry_kept_is_certain(library):
    found = stats(library, normal(2), [[7, 8], [7, 8]], top_k=2, mask=np.arange(V) == 7)
    np.testing.assert_array_equal(found.logprob, [[0, -np.inf]] * 2)
    np.testing.assert_array_equal(found.entropy, [0, 0])
    np.testing.assert_array_equal(found.rank, [[1, 2]] * 2)
    np.testing.assert_array_equal(found.top_ids, [[7, 0]] * 2)


def test_a_scale_of_0_makes_the_kept_entries_equal(library):
    logits = normal(2)
    logits[:, 5] = -np.inf
    found = stats(library, logits, [5, 6], top_k=3, scale=0.0, mask=MASK | (np.arange(V) < 7))
    kept = (MASK | (np.arange(V) < 7)).sum() - 1
    np.testing.assert_allclose(found.entropy, np.log(kept), rtol=1e-6)
    np.testing.assert_array_equal(found.top_ids, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(found.rank, [kept + 1, 1])


@pytest.mark.parametrize("offset", [1e4, -1e7])
def test_a_common_offset_costs_nothing(library, offset):
    logits, ids = (np.round(4 * normal(8)) / 4 + offset).astype(np.float32), some_ids(8)
    assert_right(stats(library, logits, ids, top_k=3), exact_stats(logits, ids, 3))


def test_entropy_is_at_most_log_v_and_at_least_0(library):
    logits = np.zeros((3, V), np.float32)
    logits[1, 3], logits[2] = 200, np.linspace(0, 1e-6, V)
    found = stats(library, logits, want="entropy").entropy
    assert (found <= np.float32(np.log(V))).all()
    assert found[1] == 0
    assert (found >= 0).all()


# Ranks and top-k


def test_ties_share_the_best_rank_and_stand_in_the_order_of_their_ids(library):
    logits = np.array([[1, 3, 2, 3, 3, 0], [5, 5, 5, 5, 5, 5], [0.0, -0.0, 0.0, -0.0, 1, -1]], np.float32)
    found = stats(library, logits, np.tile(np.arange(6), (3, 1)), "rank", top_k=6)
    np.testing.assert_array_equal(found.rank, [[5, 1, 4, 1, 1, 6], [1] * 6, [2, 2, 2, 2, 1, 6]])
    np.testing.assert_array_equal(found.top_ids, [[1, 3, 4, 2, 0, 5], [0, 1, 2, 3, 4, 5], [4, 0, 1, 2, 3, 5]])
    for k in (1, 2, 3):
        np.testing.assert_array_equal(stats(library, logits, want=(), top_k=k).top_ids, found.top_ids[:, :k])


@pytest.mark.parametrize("k", [1, 5, V])
@each_transform
def test_top_k_is_sorted_and_has_the_bits_of_logprobs(library, transforms, k):
    logits = normal(4, dtype="float32").round(0)  # many ties
    found = stats(library, logits, want=(), top_k=k, **transforms)
    assert_right(found, exact_stats(logits, np.zeros(4, int), k, **transforms))
    assert (found.top_logprobs[:, :-1] >= found.top_logprobs[:, 1:]).all()
    own = stats(library, logits, found.top_ids, "logprob", **transforms)
    assert_same_bits(TokenStats(own.logprob), TokenStats(found.top_logprobs))


def test_ranks_are_those_of_the_logits_where_a_softcap_rounds_them_together(library):
    logits = np.array([[1e3, 1e3 + 1, 1e3 - 1, 2e3]], np.float32)
    found = stats(library, logits, [[0, 1, 2, 3]], ("rank", "logprob"), top_k=4, softcap=30, temperature=0.6)
    np.testing.assert_array_equal(found.rank, [[3, 2, 4, 1]])
    np.testing.assert_array_equal(found.top_ids, [[3, 1, 0, 2]])
    np.testing.assert_allclose(found.logprob, np.full((1, 4), -np.log(4)), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ranks_of_half_precision_are_those_of_its_values(library, dtype):
    logits, ids = normal(8, dtype=dtype), some_ids(8, 2)
    assert_right(stats(library, logits, ids, "rank", top_k=20), exact_stats(logits, ids, 20))


def test_the_rank_of_the_first_top_id_is_1(library):
    logits = normal(8).round(0)
    top = stats(library, logits, want=(), top_k=3).top_ids
    rank = stats(library, logits, top, "rank").rank
    assert (rank[:, 0] == 1).all()
    assert (np.diff(rank) >= 0).all()


# Reproducibility


@each_transform
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(library, transforms, dtype):
    logits, ids = normal(6, dtype=dtype), some_ids(6)
    per_row = {"mask": random_mask(6), "bias": np.tile(BIAS, (6, 1))}
    options = {name: per_row.get(name, value) for name, value in transforms.items()}

    def run(rows):
        own = {name: value[rows] if name in per_row else value for name, value in options.items()}
        return stats(library, logits[rows], ids[rows], top_k=3, **own)

    together = run(np.arange(6))
    order = np.array([3, 1, 0, 2, 5, 4])
    assert_same_bits(run(order), TokenStats(*(out[order] for out in together)))
    for size in (1, 3):
        parts = [run(np.arange(first, first + size)) for first in range(0, 6, size)]
        assert_same_bits(TokenStats(*map(np.concatenate, zip(*parts, strict=True))), together)


# Gradients


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_ignored_positions_and_what_is_not_kept_have_no_gradient(name):
    pytest.importorskip(name, reason=f"{name} is not installed")
    logits, ids = normal(4), np.array([5, -100, 7, 0])
    logits[1], mask = np.nan, random_mask(4)
    logits[~mask] = np.nan
    mask[0, 5] = mask[2, 7] = True
    logits[0, 5] = logits[2, 7] = 1.0
    found = joint_gradient(name, logits, ids, mask=mask, ignore_index=-100)
    assert (found[1] == 0).all()
    assert (found[~mask] == 0).all()
    kept = [0, 2, 3]
    ones = np.ones(3)
    exact = parity.gradient(logits[kept], ids[kept], ones, of_entropy=ones, of_lse=ones, mask=mask[kept])
    assert (parity.error(found[kept], exact) <= parity.gradient_bound(exact, ones[:, None], 1.0, np.float32)).all()


def joint_gradient(name, logits, ids, **options):
    def total(x):
        found = token_stats(x, ids, ("logprob", "entropy", "lse"), **options)
        return found.logprob.sum() + found.entropy.sum() + found.lse.sum()

    if name == "jax":
        import jax

        return np.asarray(jax.grad(total)(jax.numpy.asarray(logits)))
    import torch

    x = torch.from_numpy(logits).requires_grad_()
    with torch.compiler.set_stance("force_eager"):
        total(x).backward()
    return x.grad.numpy()


@pytest.mark.parametrize("name", ["scale", "softcap", "bias"])
def test_a_transform_that_requires_a_gradient_is_a_value_error(name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    value = torch.ones(7, requires_grad=True)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(ValueError, match=rf"{name} requires a gradient, .*pass {name}.detach\(\)"),
    ):
        entropy(torch.zeros(7, 7), **{name: value})
    with torch.compiler.set_stance("force_eager"):
        assert entropy(torch.zeros(7, 7), **{name: value.detach()}).shape == (7,)
