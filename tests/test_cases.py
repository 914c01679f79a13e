"""Faults that users of other libraries reported, each as a small input; a test's name is the kind of fault."""

import numpy as np
import pytest

from xlogprobs import entropy, logprobs, logprobs_and_entropy, parity, token_stats

# where a test takes each library in turn; `torch` is for what the compiler may break
pytestmark = pytest.mark.usefixtures("torch_runs_eagerly")

V = 300


@pytest.fixture(params=["eager", "compiled"])
def torch(request):
    """torch, with and without its compiler."""
    module = pytest.importorskip("torch", reason="torch is not installed")
    with module.compiler.set_stance("force_eager" if request.param == "eager" else "default"):
        yield module
    if request.param == "compiled":
        from xlogprobs_torch import compiled

        assert not compiled._without_compiler, "ran eagerly"


def normal(*shape, dtype="float32", deviation=3.0, seed=0):
    array = np.random.default_rng(seed).standard_normal(shape) * deviation
    if dtype == "bfloat16":
        return array.astype(pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed").bfloat16)
    return array.astype(dtype)


def assert_exact(library, logits, ids, temperature=1.0):
    out = library.tonumpy(logprobs(library.asarray(logits), library.asarray(ids), temperature=temperature))
    assert_within_bound(out, parity.reference(logits, ids, temperature=temperature))


def assert_within_bound(out, exact, quantity="logprob"):
    off, allowed = parity.error(out, exact), parity.bound(exact, out.dtype, quantity)
    assert out.shape == exact.shape
    assert (off <= allowed).all(), f"{(off / allowed).max():.3g} x bound"


def test_a_call_changes_its_input(library):
    logits = normal(8, V)
    given = library.asarray(logits)
    before = library.tonumpy(logprobs(given, [1] * 8))
    tempered = library.tonumpy(logprobs(given, [1] * 8, temperature=0.7))
    assert library.tonumpy(given).tobytes() == logits.tobytes()
    np.testing.assert_array_equal(library.tonumpy(logprobs(given, [1] * 8)), before)
    np.testing.assert_array_equal(library.tonumpy(logprobs(given, [1] * 8, temperature=0.7)), tempered)


def test_a_call_changes_its_input_in_torch(torch):
    logits = torch.from_numpy(normal(8, V))
    copy, version = logits.clone(), logits._version
    logprobs(logits, torch.ones(8, dtype=torch.int64), temperature=0.7)
    assert logits._version == version
    assert torch.equal(logits, copy)


def test_a_call_changes_its_input_between_logprob_and_entropy(library):
    logits = normal(8, V)
    given = library.asarray(logits)

    def logprob_of_it():
        return library.tonumpy(logprobs(given, [1] * 8, temperature=0.7))

    def entropy_of_it():
        return library.tonumpy(entropy(given, temperature=0.7))

    first = logprob_of_it(), entropy_of_it()
    second = entropy_of_it(), logprob_of_it()
    assert library.tonumpy(given).tobytes() == logits.tobytes()
    for one, other in zip(first, reversed(second), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("offset", [1e2, 1e4, 1e7])
def test_entropy_drifts_with_a_large_common_offset(library, offset):
    logits = (normal(64, V) + offset).astype(np.float32)
    out = library.tonumpy(entropy(library.asarray(logits)))
    assert_within_bound(out, parity.entropy(logits), "entropy")


def test_entropy_is_0_times_minus_infinity(library):
    out = library.tonumpy(entropy(library.asarray(np.array([[0, -np.inf], [-np.inf, -3e38]], np.float32))))
    np.testing.assert_array_equal(out, [0, 0])
    if "float16" not in library.lacks:
        extremes = library.asarray(np.array([65504, -65504], np.float16))
        assert library.tonumpy(entropy(extremes)) == 0


@pytest.mark.parametrize("row", [np.array([0, -np.inf], np.float32), np.array([65504, -65504], np.float16)], ids=str)
def test_entropy_is_0_times_minus_infinity_in_its_gradient(torch, row):
    logits = torch.from_numpy(np.tile(row, (3, 1))).requires_grad_()
    entropy(logits).sum().backward()
    np.testing.assert_array_equal(logits.grad.numpy(), np.zeros((3, 2)))


@pytest.mark.parametrize("row", [np.array([0, -np.inf], np.float32), np.array([65504, -65504], np.float16)], ids=str)
def test_entropy_is_0_times_minus_infinity_in_its_gradient_in_jax(row):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    gradient = jax.grad(lambda x: entropy(x).sum())(jax.numpy.asarray(np.tile(row, (3, 1))))
    np.testing.assert_array_equal(np.asarray(gradient), np.zeros((3, 2)))


@pytest.mark.parametrize("offset", [1e2, 1e4, 1e7])
def test_a_large_common_offset(library, offset):
    assert_exact(library, (normal(64, V) + offset).astype(np.float32), np.arange(64))


def test_three_equal_logits_of_1e8(library):
    out = logprobs(library.asarray(np.full((1, 3), 1e8, np.float32)), [[0, 1, 2]])
    np.testing.assert_allclose(library.tonumpy(out), np.full((1, 3), -np.log(3)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocab", [2048, 3000, 5])
def test_the_first_block_is_all_minus_infinity(library, vocab):
    logits = normal(8, vocab)
    logits[:, : vocab // 2 if vocab > 5 else 4] = -np.inf
    logits[1, : vocab - 1] = -np.inf
    ids = np.array([vocab - 1, vocab - 1, 0, 1, vocab - 1, 2, 3, vocab - 1])
    assert_exact(library, logits, ids)


def test_the_first_block_is_all_minus_infinity_in_torch(torch):
    logits = normal(8, 1300)
    logits[:, :1024] = -np.inf
    ids = np.array([1299, 0, 1024, 1100, 3, 1299, 1298, 1023])
    assert_within_bound(logprobs(torch.from_numpy(logits), ids).numpy(), parity.reference(logits, ids))


def test_a_vocabulary_smaller_than_a_block(library):
    assert_exact(library, normal(4, 5), np.array([0, 1, 2, 4]))


@pytest.mark.parametrize("ignore_index", [None, -100])
def test_a_row_of_minus_infinity_in_a_batch_of_4(library, ignore_index):
    logits = normal(4, V)
    logits[2] = -np.inf
    ids = np.array([1, 2, 3 if ignore_index is None else -100, 4])
    out = library.tonumpy(logprobs(library.asarray(logits), library.asarray(ids), ignore_index=ignore_index))
    others = [0, 1, 3]
    np.testing.assert_array_equal(out[2], np.nan if ignore_index is None else 0.0)
    assert_within_bound(out[others], parity.reference(logits[others], ids[others]))


@pytest.mark.full  # 4 GB are read, from a sparse file
def test_int32_offset_overflow_over_more_than_2_to_the_31_elements(tmp_path):
    vocab = 32768
    rows = 2**31 // vocab + 2
    logits = np.memmap(tmp_path / "logits", np.float16, "w+", shape=(rows, vocab))
    last = normal(2, vocab, dtype="float16")
    logits[-2:] = last
    ids = np.full(rows, 7)
    out = logprobs(logits, ids)
    assert_within_bound(out[-2:], parity.reference(last, ids[-2:]))
    np.testing.assert_allclose(out[:-2], -np.log(vocab), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_int32_offset_overflow_between_rows_2_to_the_31_elements_apart(tmp_path, name):
    apart = 2**31 + 64
    storage = np.memmap(tmp_path / "logits", np.float16, "w+", shape=(2 * apart,))  # sparse: two pages are written
    rows = storage.reshape(2, apart)[:, :V]
    rows[:] = logits = normal(2, V, dtype="float16")
    if name == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        with torch.compiler.set_stance("force_eager"):
            out = logprobs(torch.from_numpy(np.asarray(rows)), [5, 6]).numpy()
    else:
        out = logprobs(rows, [5, 6])
    assert_within_bound(out, parity.reference(logits, np.array([5, 6])))


@pytest.mark.parametrize("view", ["padded", "transposed", "expanded", "every second row"])
def test_the_row_stride_is_not_the_vocabulary(torch, view):
    base = torch.from_numpy(normal(16, 512))
    logits = {
        "padded": lambda: base[:8, :V],
        "transposed": lambda: base.flatten()[: 8 * V].view(V, 8).t(),
        "expanded": lambda: base[0, :V].expand(8, V),
        "every second row": lambda: base[::2, :V],
    }[view]()
    ids = torch.arange(8)
    assert_within_bound(logprobs(logits, ids).numpy(), parity.reference(logits.numpy(), ids.numpy()))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64"])
def test_id_dtypes(library, dtype):
    if library.name == "jax" and dtype == "int64":
        pytest.skip("jax has int64 with x64 alone")
    ids = np.minimum(np.arange(256), np.iinfo(dtype).max).astype(dtype)
    assert_exact(library, normal(256, V), ids)


def test_labels_are_not_16_byte_aligned(library):
    buffer = np.arange(9)
    ids = buffer[1:] if library.name in ("numpy", "torch") else library.asarray(buffer)[1:]
    logits = normal(8, V)
    assert_within_bound(
        library.tonumpy(logprobs(library.asarray(logits), ids)), parity.reference(logits, np.arange(1, 9))
    )


def test_labels_are_not_16_byte_aligned_in_torch(torch):
    logits, buffer = normal(8, V), torch.arange(9)
    out = logprobs(torch.from_numpy(logits), buffer[1:]).numpy()
    assert_within_bound(out, parity.reference(logits, np.arange(1, 9)))


@pytest.mark.parametrize("wrong", [-100, -1, V, V + 3])
def test_a_compiled_negative_index_wraps(torch, wrong):
    logits, ids = torch.from_numpy(normal(8, V)), torch.tensor([1, 2, wrong, 4, 5, 6, 7, 8])
    with pytest.raises(IndexError, match=rf"ids\[2\] is {wrong}"):
        logprobs(logits, ids)
    out = logprobs(logits, ids, invalid_ids="nan")
    assert out.isnan().tolist() == [False, False, True] + [False] * 5


@pytest.mark.parametrize("wrong", [-100, -1, V, V + 3])
def test_a_negative_index_wraps_in_jax_jit(wrong):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    out = jax.jit(logprobs)(jax.numpy.asarray(normal(3, V)), jax.numpy.asarray([1, wrong, 2]))
    assert np.isnan(np.asarray(out)).tolist() == [False, True, False]


@pytest.mark.parametrize("vocab", [130, 2049, 50257])
def test_a_padded_vocabulary_is_counted_in_entropy_and_ranks(library, vocab):
    logits = np.full((3, vocab), -10, np.float32)
    found = token_stats(library.asarray(logits), [0, vocab // 2, vocab - 1], top_k=2)
    np.testing.assert_allclose(library.tonumpy(found.entropy), np.log(vocab), rtol=0, atol=1e-6 * np.log(vocab))
    np.testing.assert_array_equal(library.tonumpy(found.rank), [1, 1, 1])
    np.testing.assert_array_equal(library.tonumpy(found.top_ids), [[0, 1]] * 3)


@pytest.mark.parametrize("vocab", [130, 2049, 50257])
def test_a_padded_vocabulary_is_counted(library, vocab):
    logits = np.full((3, vocab), -10, np.float32)
    out = library.tonumpy(logprobs(library.asarray(logits), [0, vocab // 2, vocab - 1]))
    np.testing.assert_allclose(out, -np.log(vocab), rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocab", [130, pytest.param(2049, marks=pytest.mark.full)])
def test_a_padded_vocabulary_is_counted_in_torch(torch, vocab):
    logits = torch.full((1, vocab), -10.0)
    out = logprobs(logits, [vocab - 1]).numpy()
    np.testing.assert_allclose(out, -np.log(vocab), rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.6, 0.7])
def test_raw_logprobs_or_logprob_over_t_are_taken_as_tempered(library, temperature):
    logits, ids = normal(8, V), np.arange(8)
    assert_exact(library, logits, ids, temperature)
    tempered = library.tonumpy(logprobs(library.asarray(logits), ids, temperature=temperature))
    raw = library.tonumpy(logprobs(library.asarray(logits), ids))
    for mistaken in (raw, raw / temperature):
        assert np.abs(tempered - mistaken).max() > 0.1


def test_entropy_ignores_the_temperature(library):
    logits, ids = normal(8, V), np.arange(8)
    joint = logprobs_and_entropy(library.asarray(logits), library.asarray(ids), temperature=0.6)
    logprob, found = (library.tonumpy(out) for out in joint)
    assert_within_bound(logprob, parity.reference(logits, ids, temperature=0.6))
    assert_within_bound(found, parity.entropy(logits, temperature=0.6), "entropy")
    assert np.abs(found - parity.entropy(logits)).min() > 0.1


def test_softcap_formula_or_order(library):
    logits = np.array([[124, 0, -40, 60]], np.float32)
    found = token_stats(
        library.asarray(logits), [[0, 1, 2, 3]], ("logprob", "lse"), softcap=30, scale=0.25, temperature=0.6
    )
    z = 30 * np.tanh(0.25 * logits.astype(np.float64) / 30) / 0.6  # scale, then the cap, then the temperature
    lse = np.log(np.exp(z).sum(-1))
    assert_within_bound(library.tonumpy(found.logprob), z - lse[:, None])
    assert_within_bound(library.tonumpy(found.lse), lse, "lse")
    mistaken = [30 * np.tanh(0.25 * logits / 0.6 / 30), 0.25 * 30 * np.tanh(logits / 30.0) / 0.6]
    for wrong in mistaken:
        assert np.abs(np.log(np.exp(wrong).sum(-1)) - lse).max() > 0.1


def test_softcap_of_124_at_30(library):
    found = token_stats(library.asarray(np.array([124], np.float32)), want="lse", softcap=30)
    assert_within_bound(library.tonumpy(found.lse), np.array(30 * np.tanh(124 / 30)), "lse")


@pytest.mark.parametrize("logit", [2000, -2000, 3e38])
def test_tanh_through_exp_overflows(library, logit):
    found = token_stats(library.asarray(np.array([[logit]], np.float32)), want="lse", softcap=30)
    np.testing.assert_array_equal(library.tonumpy(found.lse), [30 * np.sign(logit)])


def test_top_k_repeats_the_sampled_token_or_orders_ties_at_random(library):
    name = "float32" if "bfloat16" in library.lacks else "bfloat16"
    logits = normal(8, V, dtype=name)
    third = np.sort(logits.astype(np.float32), axis=-1)[:, -3, None]
    logits[:, 20:200:10] = third.astype(logits.dtype)  # many tie at the k-th place
    found = token_stats(library.asarray(logits), np.full(8, 20), ("logprob", "rank"), top_k=5)
    ids = library.tonumpy(found.top_ids)
    np.testing.assert_array_equal(ids, np.argsort(-logits.astype(np.float64), axis=-1, kind="stable")[:, :5])
    assert all(len(set(row)) == 5 for row in ids.tolist())
    np.testing.assert_array_equal(library.tonumpy(found.rank), parity.rank(logits, np.full(8, 20)))


def test_bfloat16_is_divided_by_t_in_bfloat16(library):
    logits = normal(8, V, dtype="bfloat16", deviation=10)
    given = library.asarray(logits)
    wide = library.asarray(logits.astype(np.float32))
    out = library.tonumpy(logprobs(given, np.arange(8), temperature=0.7))
    assert_within_bound(out, parity.reference(logits.astype(np.float32), np.arange(8), temperature=0.7))
    assert_within_bound(
        library.tonumpy(logprobs(wide, np.arange(8), temperature=0.7)),
        parity.reference(logits, np.arange(8), temperature=0.7),
    )


def test_bfloat16_is_divided_by_t_in_bfloat16_in_torch(torch):
    logits = normal(8, V, dtype="bfloat16", deviation=10)
    out = logprobs(parity.torch_array(logits), np.arange(8), temperature=0.7).numpy()
    assert_within_bound(out, parity.reference(logits, np.arange(8), temperature=0.7))


def test_every_statistic_depends_on_the_batch(library):
    logits, ids, mask = normal(9, V), np.arange(9), np.random.default_rng(2).random((9, V)) < 0.7

    def run(part):
        found = token_stats(
            *(library.asarray(a[part]) for a in (logits, ids)), top_k=3, mask=library.asarray(mask[part]), softcap=30
        )
        return [library.tonumpy(out) for out in found]

    together = run(slice(None))
    for size in (1, 3):
        parts = [run(slice(first, first + size)) for first in range(0, 9, size)]
        for *pieces, whole in zip(*parts, together, strict=True):
            np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_the_result_depends_on_the_batch(library):
    logits, ids = normal(64, V), np.arange(64)

    def run(part):
        return library.tonumpy(logprobs(library.asarray(logits[part]), ids[part])).view(np.uint32)

    together = run(slice(None))
    for size in (1, 2, 3, 7):
        parts = [run(slice(first, first + size)) for first in range(0, 64, size)]
        np.testing.assert_array_equal(np.concatenate(parts), together)


def test_the_result_depends_on_the_batch_in_torch(torch):
    logits, ids = torch.from_numpy(normal(64, V)), torch.arange(64)
    together = logprobs(logits, ids)
    for size in (1, 2, 3, 7):
        parts = [logprobs(x, i) for x, i in zip(logits.split(size), ids.split(size), strict=True)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_1_d_logits_and_empty_batches_have_every_statistic(library, shape):
    ids = np.zeros(shape, np.int32)
    found = token_stats(library.asarray(normal(*shape, V)), library.asarray(ids), top_k=2, temperature=0.6)
    assert [tuple(out.shape) for out in found] == [shape] * 4 + [(*shape, 2)] * 2


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_1_d_logits_and_empty_batches(library, shape):
    ids = np.zeros(shape, np.int32)
    out = library.tonumpy(logprobs(library.asarray(normal(*shape, V)), library.asarray(ids)))
    assert out.shape == shape
    assert out.dtype == np.float32


def test_0_d_and_scalar_promotion(torch):
    logits = normal(8, V)
    for temperature in (torch.tensor(0.7, dtype=torch.float64), np.float64(0.7), torch.tensor(2)):
        out = logprobs(torch.from_numpy(logits), np.arange(8), temperature=temperature)
        assert out.dtype == torch.float32
        exact = parity.reference(logits, np.arange(8), temperature=np.float64(temperature))
        assert_within_bound(out.numpy(), exact)


def test_silent_float64_to_float32_under_jax():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.config.jax_enable_x64:
        pytest.skip("x64 is on")
    logits, ids = normal(500, V, deviation=10), np.arange(500) % V
    # what this library is handed in float64 keeps its accuracy: a temperature
    temperature = np.random.default_rng(2).uniform(0.3, 2, 500)
    out = logprobs(jax.numpy.asarray(logits), ids, temperature=temperature)
    assert_within_bound(np.asarray(out), parity.reference(logits, ids, temperature=temperature))
    # float64 logits in NumPy are answered by NumPy in float64, and never pass through JAX
    out = logprobs(logits.astype(np.float64), ids)
    assert out.dtype == np.float64
    assert_within_bound(out, parity.reference(logits, ids))
    # a mix of the two is refused
    with pytest.raises(TypeError, match=r"ids is a .* and logits a numpy.ndarray"):
        logprobs(logits.astype(np.float64), jax.numpy.asarray(ids))


@pytest.mark.parametrize("outer", ["jit", "vmap", "grad", "scan", "shard_map"])
def test_a_tracer_is_not_recognised(outer):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    logits, ids = normal(4, V), np.arange(4)
    x, i = jax.numpy.asarray(logits), jax.numpy.asarray(ids)
    if outer == "grad":
        gradient = np.asarray(jax.grad(lambda x: logprobs(x, i).sum())(x))
        weights = np.exp(logits.astype(np.float64))
        exact = np.eye(V)[ids] - weights / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(gradient, exact, rtol=0, atol=1e-6)
        return
    mesh, part = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",)), jax.sharding.PartitionSpec("rows")
    transformed = {
        "jit": lambda: jax.jit(logprobs)(x, i),
        "vmap": lambda: jax.vmap(logprobs)(x, i),
        "scan": lambda: jax.lax.scan(lambda carry, row: (carry, logprobs(*row)), 0, (x, i))[1],
        "shard_map": lambda: jax.shard_map(logprobs, mesh=mesh, in_specs=(part, part), out_specs=part)(x, i),
    }
    assert_within_bound(np.asarray(transformed[outer]()), parity.reference(logits, ids))
