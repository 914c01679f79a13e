"""`kl_divergence` on every library: values against float64, special values, transforms, gradients, messages."""

import numpy as np
import pytest

from xlogprobs import kl_divergence

V = 300
TRANSFORMS = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "scale": {"scale": -1.5},
    "softcap": {"softcap": 30.0, "scale": 1.3, "temperature": 0.6},
    "bias and mask": {
        "bias": np.linspace(-3, 2, V).astype(np.float32),
        "mask": np.arange(V) % 3 != 1,
        "softcap": 20.0,
    },
}
pytestmark = pytest.mark.usefixtures("torch_runs_eagerly")


def log_probabilities(x, temperature=1.0, scale=1.0, softcap=None, bias=0.0, mask=None):
    x = np.asarray(x).astype(np.float64)
    with np.errstate(invalid="ignore"):
        z = scale * x
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        z = (z + np.asarray(bias, np.float64)) / temperature
    z = np.where(x == -np.inf, -np.inf, z)
    z = z if mask is None else np.where(mask, z, -np.inf)
    top = z.max(axis=-1, keepdims=True)
    return z - top - np.log(np.sum(np.exp(z - top), axis=-1, keepdims=True))


def reference(x, y, **transforms):
    log_p, log_q = log_probabilities(x, **transforms), log_probabilities(y, **transforms)
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):
        return np.where(p > 0, p * (log_p - log_q), 0.0).sum(axis=-1)


def pair(dtype="float32", rows=6, vocab=V):
    rng = np.random.default_rng(0)
    x = 4 * rng.standard_normal((rows, vocab))
    y = x + 0.3 * rng.standard_normal((rows, vocab))
    x[1] += 1e4
    y[2] = rng.standard_normal(vocab)
    x[3, 5] = x[4, 7] = y[4, 7] = -np.inf  # of probability 0 for one, and for both
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
        return x.astype(ml_dtypes.bfloat16), y.astype(ml_dtypes.bfloat16)
    return x.astype(dtype), y.astype(dtype)


@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_it_is_within_the_bound_of_the_exact_value(library, dtype, transforms):
    x, y = pair(dtype)
    own = {name: library.asarray(v) if isinstance(v, np.ndarray) else v for name, v in transforms.items()}
    found = library.tonumpy(kl_divergence(library.asarray(x), library.asarray(y), **own))
    exact = reference(x, y, **transforms)
    assert found.dtype == ("float64" if dtype == "float64" else "float32")
    assert np.all(np.abs(found - exact) <= (1e-12 if dtype == "float64" else 1e-6) * np.maximum(1, exact))


@pytest.mark.parametrize("vocab", [1, 7, 5000, 50257])
def test_any_vocabulary(library, vocab):
    x, y = pair(rows=6, vocab=max(vocab, 10))
    x, y = x[:, :vocab], y[:, :vocab]
    found = library.tonumpy(kl_divergence(library.asarray(x), library.asarray(y)))
    exact = reference(x, y)
    assert np.all(np.abs(found - exact) <= 1e-6 * np.maximum(1, exact))


def test_a_row_is_at_no_distance_from_itself_and_never_below(library):
    x, _ = pair(rows=64, vocab=5000)
    near = np.nextafter(x, np.float32(np.inf))
    assert np.all(library.tonumpy(kl_divergence(library.asarray(x), library.asarray(x))) == 0)
    assert np.all(library.tonumpy(kl_divergence(library.asarray(x), library.asarray(near))) >= 0)


def test_special_values(library):
    x, y = np.zeros((6, 8), np.float32), np.zeros((6, 8), np.float32)
    y[0, 3] = -np.inf  # possible for x alone
    x[1, 3] = -np.inf  # possible for y alone
    x[2] = -np.inf
    y[3, 0] = np.nan
    y[4, 0] = np.inf
    found = library.tonumpy(kl_divergence(library.asarray(x), library.asarray(y)))
    assert found[0] == np.inf
    np.testing.assert_allclose(found[1], np.log(8 / 7), atol=1e-6)
    assert np.isnan(found[2:5]).all()
    assert found[5] == 0


def test_what_the_mask_leaves_out_may_hold_anything(library):
    x, y = pair()
    mask = np.arange(V) % 2 == 0
    exact = reference(x, y, mask=mask)
    x[:, 1], y[:, 3] = np.nan, np.inf
    found = library.tonumpy(kl_divergence(library.asarray(x), library.asarray(y), mask=library.asarray(mask)))
    assert np.all(np.abs(found - exact) <= 1e-6 * np.maximum(1, exact))


@pytest.mark.parametrize("shape", [(V,), (2, 3, V), (0, V)])
def test_it_has_one_entry_per_position(library, shape):
    x, y = pair()
    x, y = (np.resize(array, shape) for array in (x, y))
    found = library.tonumpy(kl_divergence(library.asarray(x), library.asarray(y)))
    assert found.shape == shape[:-1]
    np.testing.assert_allclose(found, reference(x, y), atol=1e-6, rtol=1e-6)


def test_a_row_has_the_same_bits_in_any_batch(library):
    x, y = pair(rows=7, vocab=9000)
    together = library.tonumpy(kl_divergence(library.asarray(x), library.asarray(y)))
    for row in range(7):
        alone = library.tonumpy(kl_divergence(library.asarray(x[row : row + 1]), library.asarray(y[row : row + 1])))
        assert alone[0] == together[row]


def test_half_precision_of_a_reference_is_widened(library):
    x, y = pair()
    half = y.astype(np.float16)
    if library.name == "array-api-strict":
        pytest.skip("array-api-strict has no float16")
    found = library.tonumpy(kl_divergence(library.asarray(x), library.asarray(half)))
    np.testing.assert_allclose(found, reference(x, half), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("ref", "kind", "message"),
    [
        (np.zeros((2, 4), np.float32), ValueError, r"ref_logits has shape \(2, 4\) and logits \(2, 3\)"),
        (np.zeros((2, 3), np.int32), TypeError, "ref_logits has dtype int32"),
        (np.zeros((2, 3), np.float64), TypeError, "float64 of both or none"),
    ],
)
def test_messages(library, ref, kind, message):
    ref = library.asarray(ref)
    with pytest.raises(kind, match=message):
        kl_divergence(library.asarray(np.zeros((2, 3), np.float32)), ref)


def test_a_mix_of_libraries_is_refused():
    with pytest.raises(TypeError, match="ref_logits is a list"):
        kl_divergence(np.zeros((2, 3), np.float32), [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


def gradients_in_torch(x, y, upstream, transforms):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    own = {name: torch.tensor(v) if isinstance(v, np.ndarray) else v for name, v in transforms.items()}
    a, b = (torch.tensor(array, requires_grad=True) for array in (x, y))
    found = torch.autograd.grad(kl_divergence(a, b, **own), (a, b), torch.tensor(upstream))
    return [gradient.numpy() for gradient in found]


def gradients_in_jax(x, y, upstream, transforms):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    own = {name: jax.numpy.asarray(v) if isinstance(v, np.ndarray) else v for name, v in transforms.items()}
    _, pullback = jax.vjp(lambda x, y: kl_divergence(x, y, **own), jax.numpy.asarray(x), jax.numpy.asarray(y))
    return [np.asarray(gradient) for gradient in pullback(jax.numpy.asarray(upstream))]


@pytest.mark.parametrize("differentiate", [gradients_in_torch, gradients_in_jax], ids=["torch", "jax"])
@pytest.mark.parametrize("transforms", TRANSFORMS.values(), ids=TRANSFORMS)
def test_gradients_of_both(differentiate, transforms):
    """d KL / d z = p (log p - log q - KL), d KL / d z' = q - p, times dz / dx."""
    x, y = pair()
    keep = [0, 1, 2, 4, 5]  # row 3 of y has an entry that x excludes: fine; its own test is below
    x, y = x[keep], y[keep]
    upstream = np.linspace(-1, 2, len(x)).astype(np.float32)
    found = differentiate(x, y, upstream, transforms)
    log_p, log_q = (log_probabilities(array, **transforms) for array in (x, y))
    p, q = np.exp(log_p), np.exp(log_q)
    with np.errstate(invalid="ignore"):
        of_z = np.where(p > 0, p * (log_p - log_q - reference(x, y, **transforms)[:, None]), 0.0), q - p
    scale, softcap = transforms.get("scale", 1.0), transforms.get("softcap")
    for array, expected, gradient in zip((x, y), of_z, found, strict=True):
        wide = array.astype(np.float64)
        with np.errstate(over="ignore"):
            slope = 1.0 if softcap is None else 1 / np.cosh(scale * wide / softcap) ** 2
        slope = scale * slope / transforms.get("temperature", 1.0)
        exact = np.where(wide == -np.inf, 0.0, upstream[:, None] * expected * slope)
        limit = (
            1e-6 * np.maximum(1, np.abs(upstream)[:, None]) * max(1, 1 / transforms.get("temperature", 1.0), abs(scale))
        )
        assert np.all(np.abs(gradient - exact) <= limit * np.maximum(1, reference(x, y, **transforms))[:, None])


@pytest.mark.parametrize("differentiate", [gradients_in_torch, gradients_in_jax], ids=["torch", "jax"])
def test_entries_of_probability_0_have_no_gradient(differentiate):
    x, y = pair()
    of_x, of_y = differentiate(x[3:5], y[3:5], np.ones(2, np.float32), {})
    assert of_x[0, 5] == of_x[1, 7] == of_y[1, 7] == 0
    assert np.isfinite(of_x).all()
    assert np.isfinite(of_y).all()
