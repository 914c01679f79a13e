"""`mismatch` on every library: formulae, what the mask keeps out, accuracy, gradients, messages."""

import mpmath
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from xlogprobs import Mismatch, mismatch

CLIP = 0.2
ALWAYS = [name for name in Mismatch._fields if name != "clipped"]


@pytest.fixture(params=["torch", "jax"])
def differentiable(request):
    """The library, and the gradient of one statistic with respect to the log-probabilities, in NumPy."""
    library = pytest.importorskip(request.param, reason=f"{request.param} is not installed")

    def in_torch(field, p, q, mask=None):
        p = library.tensor(p, requires_grad=True)
        getattr(mismatch(p, library.tensor(q), mask), field).backward()
        return p.grad.numpy()

    def in_jax(field, p, q, mask=None):
        q = library.numpy.asarray(q)
        return np.asarray(library.grad(lambda p: getattr(mismatch(p, q, mask), field))(library.numpy.asarray(p)))

    return in_torch if request.param == "torch" else in_jax


def numbers(library, found):
    """The statistics in NumPy float64, by name."""
    return {name: float(library.tonumpy(value)) for name, value in found._asdict().items() if value is not None}


def reference(p, q, mask=None, clip=CLIP):
    """The statistics by their formulae, in float64, k3 in 50 digits."""
    p, q = np.asarray(p).astype(np.float64), np.asarray(q).astype(np.float64)
    kept = np.ones(p.shape, bool) if mask is None else np.asarray(mask) != 0
    d = p[kept] - q[kept]
    w = np.exp(d)
    with mpmath.workdps(50):
        k3 = float(sum((mpmath.expm1(x) - mpmath.mpf(x) for x in d), mpmath.mpf(0)) / len(d))
    return {
        "max_abs": np.abs(d).max(),
        "mean_abs": np.abs(d).mean(),
        "k1": -d.mean(),
        "k2": (d**2 / 2).mean(),
        "k3": k3,
        "ratio": w.mean(),
        "clipped": ((w < 1 - clip) | (w > 1 + clip)).mean(),
        "ess": w.sum() ** 2 / (w**2).sum(),
        "ess_share": w.sum() ** 2 / (w**2).sum() / len(d),
    }


def assert_near(found, expected, spread=0.0, relative=2e-6):
    """``spread``: what the numbers that were added came to, where their sum cancels."""
    for name, value in expected.items():
        allowed = relative * max(abs(value), spread if name == "k1" else 0.0) + 1e-37  # squares below float32
        assert abs(found[name] - value) <= allowed, (name, found[name], value)


def some(*shape, seed=0, apart=0.1, dtype=np.float32):
    """Log-probabilities of a trainer and a sampler."""
    rng = np.random.default_rng(seed)
    p = np.log(rng.uniform(1e-3, 1, shape))
    return p.astype(dtype), (p + apart * rng.standard_normal(shape)).astype(dtype)


# Values


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 33), (2, 3, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_each_statistic_follows_its_formula_over_the_kept_positions(library, shape, masked):
    p, q = some(*shape)
    mask = np.random.default_rng(1).random(shape) < 0.6 if masked else None
    if masked:
        mask = np.array(mask)
        mask[(0,) * len(shape)] = True
    found = mismatch(library.asarray(p), library.asarray(q), mask if mask is None else library.asarray(mask), CLIP)
    assert isinstance(found, Mismatch)
    for value in found:
        assert library.tonumpy(value).dtype == np.float32
        assert library.tonumpy(value).shape == ()
    expected = reference(p, q, mask)
    assert_near(numbers(library, found), expected, spread=expected["mean_abs"])


log_probabilities = st.floats(-80, 0, width=32)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    p=hnp.arrays(np.float32, 16, elements=log_probabilities),
    q=hnp.arrays(np.float32, 16, elements=log_probabilities),
    mask=hnp.arrays(bool, 16),
    rubbish=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]),
)
@example(p=np.zeros(16, np.float32), q=np.full(16, -80, np.float32), mask=np.arange(16) < 1, rubbish=np.nan)
def test_statistics_for_any_log_probabilities(library, p, q, mask, rubbish):
    mask = np.array(mask)
    mask[3] = True
    p, q = np.where(mask, p, np.float32(rubbish)), np.where(mask, q, np.float32(-rubbish))
    found = numbers(library, mismatch(library.asarray(p), library.asarray(q), library.asarray(mask), CLIP))
    expected = reference(p, q, mask)
    on_the_edge = np.abs(np.abs(np.expm1(p[mask].astype(np.float64) - q[mask])) - CLIP) < 1e-6
    if on_the_edge.any():
        del expected["clipped"]
    # an exponent of 160 is rounded to 2^-17 of itself, and its exponential by as much
    assert_near(found, expected, spread=expected["mean_abs"], relative=3e-5)
    assert found["k2"] >= 0
    assert found["k3"] >= 0
    assert 0 < found["ess_share"] <= 1 + 1e-6
    assert found["mean_abs"] <= found["max_abs"] * (1 + 1e-6)


@pytest.mark.parametrize("size", [1e-15, 1e-7, 1e-5, 1e-3, 0.1, 0.5, 0.99, 1.0, 1.01, 3.0, 20.0, 80.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_k3_keeps_its_relative_accuracy_where_the_difference_is_tiny(library, size, sign):
    d = np.float32(sign * size)
    found = numbers(library, mismatch(library.asarray(np.float32([d])), library.asarray(np.float32([0]))))
    with mpmath.workdps(60):
        exact = float(mpmath.expm1(float(d)) - float(d))
    assert abs(found["k3"] - exact) <= 1e-6 * exact
    if size == 1e-5:  # where the formula as it stands has lost four digits
        assert abs(float(np.expm1(d) - d) - exact) > 1e-4 * exact


def test_float64_is_kept_and_half_precision_is_widened_first(library):
    p, q = some(500, dtype=np.float64)
    found = mismatch(library.asarray(p), library.asarray(q))
    assert all(library.tonumpy(value).dtype == np.float64 for value in found if value is not None)
    assert_near(numbers(library, found), {k: v for k, v in reference(p, q).items() if k != "clipped"}, relative=1e-12)
    # the wider of the two decides
    assert library.tonumpy(mismatch(library.asarray(p), library.asarray(q.astype(np.float32))).k1).dtype == np.float64


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_widened_before_the_difference(library, dtype):
    kind = np.float16 if dtype == "float16" else pytest.importorskip("ml_dtypes", reason="no ml_dtypes").bfloat16
    p, q = some(500, dtype=kind)
    expected = reference(p, q)
    for other in (q, q.astype(np.float32)):
        found = mismatch(library.asarray(p), library.asarray(other), clip=CLIP)
        assert library.tonumpy(found.k1).dtype == np.float32
        assert_near(numbers(library, found), expected, spread=expected["mean_abs"])


def test_a_million_positions_add_up_without_loss(library):
    p, q = some(1_000_000)
    found = numbers(library, mismatch(library.asarray(p), library.asarray(q)))
    d = p.astype(np.float64) - q
    np.testing.assert_allclose(found["k2"], (d**2 / 2).mean(), rtol=1e-6)
    np.testing.assert_allclose(found["k3"], (np.expm1(d) - d).mean(), rtol=1e-6)
    np.testing.assert_allclose(found["ratio"], np.exp(d).mean(), rtol=1e-6)
    np.testing.assert_allclose(found["k1"], -d.mean(), rtol=0, atol=1e-6 * np.abs(d).mean())
    np.testing.assert_allclose(found["ess"], np.exp(d).sum() ** 2 / np.exp(2 * d).sum(), rtol=1e-6)


def test_the_estimators_estimate_the_divergence_of_the_sampler_from_the_trainer(library):
    rng = np.random.default_rng(0)
    sampler, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    drawn = rng.choice(3, 200_000, p=sampler)
    divergence = (sampler * np.log(sampler / trainer)).sum()
    given = [library.asarray(np.log(p)[drawn].astype(np.float32)) for p in (trainer, sampler)]
    found = numbers(library, mismatch(*given))
    for name in ("k1", "k3"):
        np.testing.assert_allclose(found[name], divergence, rtol=0.05)
    np.testing.assert_allclose(found["k2"], divergence, rtol=0.1)  # biased, by the cube of the difference
    np.testing.assert_allclose(found["ratio"], 1, atol=5e-3)
    reverse = (trainer * np.log(trainer / sampler)).sum()
    assert abs(found["k3"] - reverse) > 2e-4  # not the other direction


def test_equal_log_probabilities_have_no_mismatch(library):
    p, _ = some(9)
    found = numbers(library, mismatch(library.asarray(p), library.asarray(p), clip=0))
    assert found == dict.fromkeys(ALWAYS, 0.0) | {"clipped": 0.0, "ratio": 1.0, "ess": 9.0, "ess_share": 1.0}


def test_without_clip_there_is_no_clipped_share(library):
    p, q = some(9)
    assert mismatch(library.asarray(p), library.asarray(q)).clipped is None


@pytest.mark.parametrize(("clip", "share"), [(0, 0.75), (0.05, 0.75), (0.15, 0.5), (0.25, 0.25), (0.5, 0.0), (2, 0.0)])
def test_the_clipped_share_counts_ratios_on_both_sides(library, clip, share):
    d = np.log(np.float32([0.7, 0.9, 1.0, 1.2]))
    for given_clip in (clip, np.float32(clip), np.float64(clip)):
        found = mismatch(library.asarray(d), library.asarray(np.zeros(4, np.float32)), clip=given_clip)
        assert float(found.clipped) == share
        assert library.tonumpy(found.clipped).dtype == np.float32


def test_ratios_beyond_the_range_of_float32_still_have_an_effective_sample_size(library):
    for offset in (500.0, -500.0):
        p = np.float32([offset, offset - 1, offset - 30])
        found = numbers(library, mismatch(library.asarray(p), library.asarray(np.zeros(3, np.float32))))
        w = np.exp([0, -1, -30])
        np.testing.assert_allclose(found["ess"], w.sum() ** 2 / (w**2).sum(), rtol=1e-6)
        assert found["ratio"] == (np.inf if offset > 0 else 0)


# Special values


def test_impossible_to_both_sides_is_agreement(library):
    p, q = np.float32([-1, -np.inf, -2]), np.float32([-1.5, -np.inf, -2])
    found = numbers(library, mismatch(library.asarray(p), library.asarray(q), clip=CLIP))
    expected = reference(np.float32([-1, 0, -2]), np.float32([-1.5, 0, -2]))
    assert_near(found, expected, spread=1)


@pytest.mark.parametrize("side", ["trainer", "sampler"])
def test_impossible_to_one_side_alone_is_an_infinite_distance(library, side):
    p, q = np.float32([-1, -np.inf]), np.float32([-1.5, -2])
    if side == "sampler":
        p, q = q, p
    found = numbers(library, mismatch(library.asarray(p), library.asarray(q), clip=CLIP))
    for name in ("max_abs", "mean_abs", "k2", "k3"):
        assert found[name] == np.inf, name
    assert found["clipped"] == 1
    if side == "trainer":
        assert found["k1"] == np.inf
        np.testing.assert_allclose(found["ratio"], np.exp(0.5) / 2, rtol=1e-6)
        np.testing.assert_allclose(found["ess"], 1, rtol=1e-6)
    else:
        assert found["k1"] == -np.inf
        assert found["ratio"] == np.inf
        assert np.isnan(found["ess"])


def test_without_a_possible_token_there_is_no_effective_sample_size(library):
    p, q = np.float32([-np.inf, -np.inf]), np.float32([-1.5, -2])
    found = numbers(library, mismatch(library.asarray(p), library.asarray(q)))
    assert found["ratio"] == 0
    assert np.isnan([found["ess"], found["ess_share"]]).all()


def test_nan_at_a_kept_position_gives_nan_everywhere(library):
    p, q = some(5)
    for position in (0, 4):
        wrong = p.copy()
        wrong[position] = np.nan
        for pair in ((wrong, q), (q, wrong)):
            found = numbers(library, mismatch(*map(library.asarray, pair), clip=CLIP))
            assert all(np.isnan(value) for value in found.values()), found


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3,)])
def test_no_kept_position_gives_nan(library, shape):
    p, q = (np.zeros(shape, np.float32) for _ in "pq")
    found = numbers(library, mismatch(library.asarray(p), library.asarray(q), library.asarray(np.zeros(shape, int)), 1))
    assert list(found) == list(Mismatch._fields)
    assert all(np.isnan(value) for value in found.values()), found


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e38])
def test_nothing_leaks_from_a_masked_position(library, rubbish):
    p, q = some(6)
    mask = np.array([1, 1, 0, 1, 0, 1])
    found = numbers(library, mismatch(library.asarray(p), library.asarray(q), library.asarray(mask), CLIP))
    for values in ((rubbish, -1), (-1, rubbish), (rubbish, rubbish), (rubbish, -rubbish)):
        dirty = [np.where(mask, a, np.float32(value)) for a, value in zip((p, q), values, strict=True)]
        again = numbers(library, mismatch(*map(library.asarray, dirty), library.asarray(mask), CLIP))
        assert again == found


@pytest.mark.parametrize(
    "mask",
    [
        [1, 0, 1],
        [True, False, True],
        (1, 0, 1),
        np.array([1, 0, 1], np.uint8),
        np.array([7, 0, -1]),
        np.array([2**63, 0, 2**32], np.uint64),
    ],
    ids=str,
)
def test_a_mask_is_lists_or_numpy_whatever_the_library(library, mask):
    p, q = some(3)
    found = numbers(library, mismatch(library.asarray(p), library.asarray(q), mask, CLIP))
    assert found == numbers(library, mismatch(library.asarray(p[[0, 2]]), library.asarray(q[[0, 2]]), None, CLIP))


def test_nothing_is_written_to(library):
    p, q = some(6)
    mask = np.array([1, 1, 0, 1, 0, 1], np.int32)
    given = [library.asarray(a) for a in (p, q, mask)]  # NumPy arrays come read-only
    mismatch(*given, clip=CLIP)
    for array, original in zip(given, (p, q, mask), strict=True):
        np.testing.assert_array_equal(library.tonumpy(array), original)


# Gradients: with n kept positions, d k1 = -1 / n, d k2 = d / n, d k3 = (w - 1) / n, d ratio = w / n


@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_are_those_of_the_formulae(differentiable, seed):
    p, q = some(12, seed=seed, apart=0.5)
    p[5] = q[5]  # the first step on fresh samples: the ratio is 1, its gradient too
    p[6] = q[6] + np.float32(1e-5)
    mask = np.arange(12) % 4 != 3
    n, d = mask.sum(), p.astype(np.float64) - q
    w = np.exp(d)
    s, s2 = w[mask].sum(), (w[mask] ** 2).sum()
    expected = {
        "max_abs": np.sign(d) * (np.abs(d) == np.abs(d[mask]).max()),
        "mean_abs": np.sign(d) / n,
        "k1": np.full(12, -1 / n),
        "k2": d / n,
        "k3": np.expm1(d) / n,
        "ratio": w / n,
        "ess": 2 * s * w / s2 - 2 * s**2 * w**2 / s2**2,
        "ess_share": (2 * s * w / s2 - 2 * s**2 * w**2 / s2**2) / n,
    }
    for field, exact in expected.items():
        found = differentiable(field, p, q, mask)
        assert (found[~mask] == 0).all(), field
        smooth = mask & (d != 0) if field == "mean_abs" else mask  # at 0, |d| has the slope that its library gives it
        slack = 2e-6 if "ess" in field else 0
        np.testing.assert_allclose(found[smooth], exact[smooth], rtol=2e-6, atol=slack, err_msg=field)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("level", [0.0, -300.0, 300.0])
def test_no_gradient_leaks_from_a_masked_position(differentiable, rubbish, level):
    p, q = some(6)
    q = q + np.float32(level)
    mask = np.array([1, 1, 0, 1, 0, 1], bool)
    for field in ALWAYS:
        clean = differentiable(field, p, q, mask)
        for values in ((rubbish, -1), (-1, rubbish), (rubbish, -rubbish)):
            dirty = [np.where(mask, a, np.float32(value)) for a, value in zip((p, q), values, strict=True)]
            np.testing.assert_array_equal(differentiable(field, *dirty, mask), clean, err_msg=field)
        assert (clean[~mask] == 0).all(), field


@pytest.mark.parametrize("impossible", [-np.inf, -1e38, -1e5])
def test_a_token_impossible_to_the_trainer_has_the_gradients_of_the_formulae(differentiable, impossible):
    p, q = np.float32([-1, impossible]), np.float32([-1.5, -2])
    for field, exact in {"k1": [-0.5, -0.5], "k3": [np.expm1(0.5) / 2, -0.5], "ratio": [np.exp(0.5) / 2, 0]}.items():
        np.testing.assert_allclose(differentiable(field, p, q), exact, rtol=1e-6, err_msg=field)


@pytest.mark.parametrize("shape", [(0,), (3,)])
def test_no_kept_position_gives_gradients_of_zero(differentiable, shape):
    for field in ALWAYS:
        found = differentiable(field, np.zeros(shape, np.float32), np.ones(shape, np.float32), np.zeros(shape, bool))
        np.testing.assert_array_equal(found, np.zeros(shape, np.float32), err_msg=field)


def test_a_gradient_has_the_dtype_of_its_log_probabilities():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    p = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    mismatch(p, torch.ones(4)).k3.backward()
    assert p.grad.dtype == torch.bfloat16


# Inside the user's own compiler


def test_inside_torch_compile_as_one_graph():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    p, q = some(12)
    mask = np.arange(12) % 4 != 3

    def run(p, q, mask):
        return mismatch(p, q, mask, clip=CLIP)

    source = torch.tensor(p, requires_grad=True)
    found = torch.compile(run, fullgraph=True)(source, torch.tensor(q), torch.tensor(mask))
    assert isinstance(found, Mismatch)
    (gradient,) = torch.autograd.grad(found.k3, source)
    expected = reference(p, q, mask)
    named = {name: float(value.detach()) for name, value in found._asdict().items()}
    assert_near(named, expected, spread=expected["mean_abs"])
    d = p.astype(np.float64) - q
    np.testing.assert_allclose(gradient.numpy(), np.where(mask, np.expm1(d), 0) / mask.sum(), rtol=2e-6)


def test_inside_jax_jit_and_vmap():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    p, q = some(3, 12)
    mask = np.arange(12) % 4 != 3
    jitted = jax.jit(lambda p, q, mask: mismatch(p, q, mask, clip=CLIP))
    rows = jax.vmap(lambda p, q: mismatch(p, q, mask, clip=CLIP))(jax.numpy.asarray(p), jax.numpy.asarray(q))
    assert isinstance(rows, Mismatch)
    for row in range(3):
        expected = reference(p[row], q[row], mask)
        found = jitted(p[row], q[row], mask)
        for statistics in (found, jax.tree.map(lambda x, row=row: x[row], rows)):
            named = {name: float(value) for name, value in statistics._asdict().items()}
            assert_near(named, expected, spread=expected["mean_abs"])


# Messages


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"ref": np.zeros((4, 7), np.float32)}, ValueError, r"ref_logprobs has shape \(4, 7\) and logprobs \(4, 8\)"),
        (
            {"mask": np.ones(8, int)},
            ValueError,
            r"mask has shape \(8,\) and logprobs \(4, 8\); expected the",
        ),
        ({"ref": np.zeros((4, 8), int)}, TypeError, "ref_logprobs has dtype int.*; expected one of float16"),
        ({"p": np.zeros((4, 8), int)}, TypeError, "logprobs has dtype int.*; expected one of float16"),
        ({"mask": np.ones((4, 8), np.float32)}, TypeError, "mask has dtype float32; expected booleans or integers"),
        ({"clip": "0.2"}, TypeError, "clip is '0.2'; expected a number or None"),
        ({"clip": True}, TypeError, "clip is True; expected a number or None"),
        ({"clip": -0.1}, ValueError, "clip is -0.1; expected finite and not negative"),
        ({"clip": float("nan")}, ValueError, "clip is nan; expected finite and not negative"),
    ],
    ids=str,
)
def test_a_message_names_the_argument_what_came_and_what_was_expected(library, given, kind, message):
    zeros = np.zeros((4, 8), np.float32)
    p, q = library.asarray(given.get("p", zeros)), library.asarray(given.get("ref", zeros))
    mask = given.get("mask")
    with pytest.raises(kind, match=message):
        mismatch(p, q, mask if mask is None else library.asarray(mask), given.get("clip"))


@pytest.mark.parametrize("other", ["numpy", "torch", "jax", "array-api-strict"])
@pytest.mark.parametrize("argument", ["ref_logprobs", "mask"])
def test_a_mix_of_libraries_is_a_type_error_that_names_both(library, other, argument):
    from conftest import make_library

    if library.name == other or (argument, other) == ("mask", "numpy"):
        pytest.skip("no mix")
    foreign = make_library(other).asarray(np.ones(4, np.float32 if argument == "ref_logprobs" else np.int32))
    p = library.asarray(np.zeros(4, np.float32))
    with pytest.raises(TypeError, match=rf"{argument} is a .* and logprobs a .*; expected"):
        mismatch(p, **({"ref_logprobs": p} | {argument: foreign}))


@pytest.mark.parametrize("value", [[-1.0, -2.0], -1.0, None], ids=str)
def test_log_probabilities_that_are_no_array_are_a_type_error(value):
    with pytest.raises(TypeError, match=r"^logprobs is .*; expected an array of NumPy, torch, JAX"):
        mismatch(value, np.zeros(2))
    with pytest.raises(TypeError, match=r"^ref_logprobs is .* and logprobs a numpy.ndarray; expected arrays of one"):
        mismatch(np.zeros(2), value)


def test_another_device_is_a_value_error():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    p = torch.zeros(4)
    with pytest.raises(ValueError, match="ref_logprobs is on meta and logprobs on cpu"):
        mismatch(p, torch.zeros(4, device="meta"))
    with pytest.raises(ValueError, match="mask is on meta and logprobs on cpu"):
        mismatch(p, p, torch.ones(4, dtype=torch.int64, device="meta"))
