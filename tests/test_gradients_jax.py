"""Gradients of JAX: exact, lean, and composable with its transformations."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

from xlogprobs import logprobs  # noqa: E402

V = 11


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def normal(*shape, seed=0, scale=3.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale)


def some_ids(*shape, vocab=V, seed=1):
    return np.random.default_rng(seed).integers(0, vocab, shape)


def plain(logits, ids, temperature=1.0):
    """The definition in jax operations."""
    columns = ids if ids.ndim == logits.ndim else ids[..., None]
    scale = temperature if jnp.ndim(temperature) == 0 else temperature[..., None]
    found = jnp.take_along_axis(jax.nn.log_softmax(logits / scale, -1), columns, -1)
    return found.reshape(ids.shape)


def is_near(found, expected, tolerance=1e-12):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


# one id, few ids a position (compared with every column) and many (added to their columns); T a number or per position
CALLS = [
    pytest.param((4,), 1.0, id="one id"),
    pytest.param((4, 3), 0.6, id="few ids, temperature"),
    pytest.param((4, 9), np.array([0.5, 1.0, 2.0, 0.7]), id="many ids, a temperature per position"),
]


@pytest.mark.parametrize(("shape", "temperature"), CALLS)
def test_every_transformation(shape, temperature):
    logits, ids, weights, change = normal(4, V), some_ids(*shape), normal(*shape, seed=3), normal(4, V, seed=4)
    if len(shape) == 2:
        ids[1] = ids[1, 0]  # repeated ids add up

    def ours(x):
        return logprobs(x, ids, temperature=temperature)

    def theirs(x):
        return plain(x, ids, temperature)

    def total(call):
        return lambda x: (call(x) * weights).sum()

    is_near(jax.grad(total(ours))(logits), jax.grad(total(theirs))(logits))
    is_near(jax.jvp(ours, (logits,), (change,)), jax.jvp(theirs, (logits,), (change,)))
    for found, expected in zip(jax.linearize(ours, logits), jax.linearize(theirs, logits), strict=True):
        is_near(found(change) if callable(found) else found, expected(change) if callable(expected) else expected)
    is_near(jax.hessian(total(ours))(logits), jax.hessian(total(theirs))(logits))
    is_near(jax.jacfwd(jax.jacfwd(total(ours)))(logits), jax.hessian(total(theirs))(logits))
    is_near(jax.grad(jax.checkpoint(total(ours)))(logits), jax.grad(total(theirs))(logits))
    batch = normal(3, 4, V, seed=5)
    is_near(jax.vmap(jax.grad(total(ours)))(batch), jax.vmap(jax.grad(total(theirs)))(batch))
    is_near(jax.jit(jax.grad(total(ours)))(logits), jax.grad(total(theirs))(logits))


@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_temperature_has_its_gradient_number_or_array(shape):
    logits, ids, scale = normal(4, V), some_ids(4), jnp.full(shape, 0.8)
    found = [
        jax.grad(lambda t, call=call: call(t).sum())(scale)
        for call in (
            lambda t: logprobs(logits, ids, temperature=t),
            lambda t: plain(logits, ids, t),
        )
    ]
    is_near(*found)
    found = [
        jax.hessian(lambda t, call=call: call(t).sum())(scale)
        for call in (
            lambda t: logprobs(logits, ids, temperature=t),
            lambda t: plain(logits, ids, t),
        )
    ]
    is_near(*found)


def test_vmap_over_each_argument():
    logits, ids, scale = normal(3, 4, V), some_ids(3, 4), jnp.asarray([0.5, 1.0, 2.0])

    def call(x, i, t):
        return logprobs(x, i, temperature=t)

    expected = jnp.stack([plain(logits[b], ids[b], scale[b]) for b in range(3)])
    is_near(jax.vmap(call)(logits, jnp.asarray(ids), scale), expected)
    is_near(
        jax.vmap(call, in_axes=(None, 0, None))(logits[0], jnp.asarray(ids), 1.0),
        jax.vmap(lambda i: plain(logits[0], i))(ids),
    )
    is_near(jax.vmap(jax.vmap(call, in_axes=(0, 0, None)))(logits, jnp.asarray(ids), scale), expected)


def test_derivatives_where_logits_are_minus_infinity_tie_or_are_ignored():
    logits = jnp.asarray([[1.0, 1.0, 0.0, -np.inf], [np.nan, 0, 0, 0], [2.0, -np.inf, 2.0, 2.0]])
    ids = np.array([0, -100, 2])

    def total(x):
        return logprobs(x, ids, ignore_index=-100).sum()

    expected, slope = np.zeros((3, 4, 3, 4)), np.zeros((3, 4))
    for row in (0, 2):
        p = np.asarray(jax.nn.softmax(logits[row]))
        expected[row, :, row, :] = np.outer(p, p) - np.diag(p)
        slope[row] = np.eye(4)[ids[row]] - p
    is_near(jax.grad(total)(logits), slope)
    is_near(jax.hessian(total)(logits), expected)


def test_an_invalid_id_in_traced_code_gives_its_row_a_gradient_of_nan():
    found = jax.jit(jax.grad(lambda x, i: logprobs(x, i).sum()))(normal(2, V), jnp.asarray([50, 1]))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


@pytest.mark.parametrize("probability", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("many", [1, 6])
def test_half_precision_gradients_of_a_confident_target(probability, dtype, many):
    logits = np.zeros((2, 1000))
    logits[:, 3] = np.log(probability / (1 - probability) * 999)
    logits, ids = jnp.asarray(logits).astype(dtype), np.full((2, many), 3)
    found = jax.grad(lambda x: logprobs(x, ids).sum())(logits)
    expected = jax.grad(lambda x: plain(x, ids).sum())(logits.astype(jnp.float64))
    assert found.dtype == logits.dtype
    np.testing.assert_allclose(np.asarray(found[:, 3], np.float64), expected[:, 3], rtol=0.01)


def test_gradients_accumulate_over_micro_batches_in_a_scan_into_donated_memory():
    weight, hidden, ids = normal(8, 50, scale=0.3), normal(4, 6, 8), jnp.asarray(some_ids(4, 6, vocab=50))

    def loss(weight, hidden, ids, call):
        return -call(hidden @ weight, ids).mean()

    def accumulate(total, weight, call):
        def body(total, batch):
            return total + jax.grad(loss)(weight, *batch, call), None

        return jax.lax.scan(body, total, (hidden, ids))[0]

    expected = accumulate(jnp.zeros_like(weight), weight, plain)
    total = jnp.zeros_like(weight)
    found = jax.jit(accumulate, static_argnums=2, donate_argnums=0)(total, weight, logprobs)
    assert total.is_deleted()
    is_near(found, expected)


def test_donated_logits_may_become_their_gradient():
    with jax.enable_x64(False):
        logits, ids = normal(6, 500).astype(jnp.float32), some_ids(6, vocab=500)
        expected = jax.grad(lambda x: plain(x, ids).sum())(logits)
        found = jax.jit(jax.grad(lambda x: logprobs(x, ids).sum()), donate_argnums=0)(logits)
        assert logits.is_deleted()
        is_near(found, expected, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_a_row_has_the_same_bits_in_any_batch_and_at_any_time(dtype):
    with jax.enable_x64(False):
        logits, ids = normal(64, 9000).astype(dtype), some_ids(64, 2, vocab=9000)
        upstream = normal(64, 2, seed=5).astype(jnp.float32)

        def gradient(part):
            found = jax.grad(lambda x: (logprobs(x, ids[part]) * upstream[part]).sum())(logits[part])
            return np.asarray(found.astype(jnp.float32))

        whole = gradient(slice(None))
        np.testing.assert_array_equal(gradient(slice(None)), whole)
        for rows in (1, 2, 3, 7):
            for first in (0, 31, 64 - rows):
                part = slice(first, first + rows)
                np.testing.assert_array_equal(gradient(part), whole[part])


MEMORY = """
    import sys
    from pathlib import Path
    import jax
    import jax.numpy as jnp
    from xlogprobs import logprobs

    logits = jax.random.normal(jax.random.key(0), (512, 32768)).astype(sys.argv[1])
    ids = jnp.arange(512)
    step = jax.jit(jax.value_and_grad(lambda x: logprobs(x, ids).sum()))

    def status(field):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    jax.block_until_ready(step(logits))
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    jax.block_until_ready(step(logits))
    print((status("VmHWM") - before) / logits.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_and_backward_take_no_more_memory_than_the_gradient(dtype):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(MEMORY), dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1.06


def test_between_forward_and_backward_nothing_of_the_size_of_the_logits_is_kept_but_they():
    with jax.enable_x64(False):
        logits, ids = normal(16, 9000).astype(jnp.float32), jnp.asarray(some_ids(16, vocab=9000))
        kept = jax.tree.leaves(jax.vjp(lambda x: logprobs(x, ids), logits)[1])
        sizes = [leaf.size for leaf in kept if hasattr(leaf, "size") and leaf.size > 16 * 8]
    assert sizes == [logits.size]
