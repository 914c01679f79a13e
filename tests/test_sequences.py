"""`next_token_logprobs` on every library: each token by the logits before it, within its own sequence."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xlogprobs import logprobs, next_token_logprobs, next_token_stats, parity, token_stats

# where a test takes each library in turn; tests of the compiler say so
pytestmark = pytest.mark.usefixtures("torch_runs_eagerly")

V, T = 40, 12
ANY_LIBRARY = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
lengths = st.lists(st.integers(0, T), min_size=3, max_size=3)
cuts = st.lists(st.integers(0, T), max_size=5).map(lambda cuts: [0, *sorted(cuts), T])


def normal(*shape, dtype="float32", seed=0):
    return (np.random.default_rng(seed).standard_normal((*shape, V)) * 3).astype(dtype)


def some_ids(*shape, seed=1):
    return np.random.default_rng(seed).integers(0, V, shape)


def reference(logits, ids, starts, temperature=1.0):
    """float64, sequence by sequence: (T, V) and (T,), cut before each of ``starts`` as well as at 0."""
    out, bounds = np.zeros(len(ids)), [0, *starts, len(ids)]
    temperature = np.broadcast_to(temperature, ids.shape)
    for first, end in itertools.pairwise(bounds):
        if end - first > 1:
            before, token = slice(first, end - 1), slice(first + 1, end)
            out[token] = parity.reference(logits[before], ids[token], temperature=temperature[before])
    return out


def assert_within_bound(out, exact):
    assert out.shape == exact.shape
    assert (parity.error(out, exact) <= parity.bound(exact, out.dtype)).all()


def alone(library, logits, ids):
    """One unpadded sequence, by `logprobs` of the logits but the last and the tokens but the first."""
    if len(ids) < 2:
        return np.zeros(len(ids), np.float32)
    return np.concatenate(
        [np.zeros(1, np.float32), library.tonumpy(logprobs(library.asarray(logits[:-1]), library.asarray(ids[1:])))]
    )


def run(library, logits, ids, **options):
    arrays = {name: library.asarray(value) for name, value in options.items() if isinstance(value, np.ndarray)}
    return library.tonumpy(next_token_logprobs(library.asarray(logits), library.asarray(ids), **(options | arrays)))


# Alignment


@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (3, 5), (2, 3, 4), (1, 1), (0,), (2, 0), (0, 5)])
def test_an_entry_is_the_log_probability_of_its_token_given_the_tokens_before_it(library, shape):
    logits, ids = normal(*shape), some_ids(*shape)
    given_logits = library.asarray(logits)
    out = next_token_logprobs(given_logits, library.asarray(ids))
    assert type(out) is type(given_logits)
    out = library.tonumpy(out)
    assert out.dtype == np.float32
    exact = np.array(
        [reference(x, i, []) for x, i in zip(logits.reshape(-1, shape[-1], V), ids.reshape(-1, shape[-1]), strict=True)]
        if ids.size
        else []
    )
    assert_within_bound(out, exact.reshape(shape))
    assert (out[..., :1] == 0).all()


def test_shift_crosses_packed_sequences(library):
    logits, ids = normal(5), some_ids(5)
    out = run(library, logits, ids, cu_seqlens=np.array([0, 3, 5]))
    assert_within_bound(out, reference(logits, ids, [3]))
    assert out[0] == out[3] == 0
    other, other_ids = logits.copy(), ids.copy()
    other[2] = np.random.default_rng(5).standard_normal(V)  # the last position of the first sequence
    other_ids[3] = (ids[3] + 1) % V  # the first token of the second
    np.testing.assert_array_equal(run(library, other, other_ids, cu_seqlens=np.array([0, 3, 5])), out)


@ANY_LIBRARY
@given(boundaries=cuts, flat=st.booleans())
def test_packed_sequences_have_the_bits_of_each_alone(library, boundaries, flat):
    logits, ids = normal(T), some_ids(T)
    shape = (T,) if flat else (1, T)
    out = run(library, logits.reshape(*shape, V), ids.reshape(shape), cu_seqlens=np.array(boundaries))
    assert out.shape == shape
    parts = [slice(first, end) for first, end in itertools.pairwise(boundaries)]
    expected = np.concatenate([alone(library, logits[part], ids[part]) for part in parts])
    np.testing.assert_array_equal(out.reshape(-1), expected)
    assert_within_bound(out.reshape(-1), reference(logits, ids, boundaries[1:-1]))


@ANY_LIBRARY
@given(lengths=lengths, rubbish=st.sampled_from([np.nan, np.inf, -np.inf]), kind=st.sampled_from([bool, np.int32]))
def test_left_and_right_padding_give_the_bits_of_each_sequence_alone(library, lengths, rubbish, kind):
    logits, ids = normal(3, T), some_ids(3, T)
    results = {}
    for side in ("left", "right"):
        mask = np.zeros((3, T), kind)
        padded, padded_ids = np.full_like(logits, rubbish), np.full_like(ids, -100)
        for row, length in enumerate(lengths):
            part = slice(T - length, T) if side == "left" else slice(0, length)
            mask[row, part] = 1
            padded[row, part], padded_ids[row, part] = logits[row, :length], ids[row, :length]
        out = run(library, padded, padded_ids, attention_mask=mask)
        assert (out[mask == 0] == 0).all()
        results[side] = [out[row, mask[row] != 0] for row in range(3)]
    for row, length in enumerate(lengths):
        expected = alone(library, logits[row, :length], ids[row, :length])
        np.testing.assert_array_equal(results["left"][row], expected)
        np.testing.assert_array_equal(results["right"][row], expected)


def test_a_token_behind_masked_ones_is_a_first_token(library):
    logits, ids = normal(8), some_ids(8)
    mask = np.array([1, 1, 0, 1, 1, 1, 0, 1])
    out = run(library, logits, ids, attention_mask=mask)
    exact = reference(logits, ids, [2, 3, 6, 7])
    assert_within_bound(out, exact)
    assert out[[0, 2, 3, 6, 7]].tolist() == [0] * 5


def test_a_mask_may_number_packed_sequences(library):
    logits, ids = normal(2, 8), some_ids(2, 8)
    mask = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [2, 2, -1, -1, -1, 0, 7, 7]])
    out = run(library, logits, ids, attention_mask=mask)
    exact = [reference(logits[0], ids[0], [3, 5, 6, 7]), reference(logits[1], ids[1], [2, 5, 6])]
    assert_within_bound(out, np.array(exact))


def test_a_mask_and_boundaries_both_divide(library):
    logits, ids = normal(1, 8), some_ids(1, 8)
    mask, boundaries = np.array([[1, 1, 1, 1, 0, 1, 1, 1]]), np.array([0, 2, 8])
    out = run(library, logits, ids, attention_mask=mask, cu_seqlens=boundaries)
    assert_within_bound(out, reference(logits[0], ids[0], [2, 4, 5])[None])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_dtype_of_the_result_is_that_of_logprobs(library, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed").bfloat16
    logits, ids = normal(2, 6, dtype=dtype), some_ids(2, 6)
    out = run(library, logits, ids)
    assert out.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert_within_bound(out, np.array([reference(logits[row], ids[row], []) for row in range(2)]))


# What is given


@pytest.mark.parametrize("kind", ["uint8", "int16", "uint32", "int32", "uint64", "list", "tuple"])
def test_ids_mask_and_boundaries_are_integers_of_any_width_numpy_or_lists(library, kind):
    logits, ids = normal(1, 6), some_ids(1, 6)
    mask, boundaries = np.array([[1, 1, 1, 1, 1, 0]]), np.array([0, 0, 4, 6])
    exact = reference(logits[0], ids[0], [4, 5])[None]
    if kind in ("list", "tuple"):
        turn = {"list": list, "tuple": tuple}[kind]
        given = [turn(turn(row) for row in array.tolist()) for array in (ids, mask)] + [turn(boundaries.tolist())]
    else:
        given = [array.astype(kind) for array in (ids, mask, boundaries)]
    for lead in (given, [library.asarray(a) if kind not in ("list", "tuple", "uint64") else a for a in given]):
        out = next_token_logprobs(library.asarray(logits), lead[0], attention_mask=lead[1], cu_seqlens=lead[2])
        assert_within_bound(library.tonumpy(out), exact)


def test_nested_lists_without_tokens_are_empty_batches(library):
    logits = library.asarray(normal(2, 0))
    assert next_token_logprobs(logits, [[], []], attention_mask=[[], []]).shape == (2, 0)
    assert next_token_logprobs(logits[0, ...], [], cu_seqlens=[0, 0]).shape == (0,)


def test_nothing_is_written_to(library):
    logits, ids = normal(1, 6), some_ids(1, 6)
    mask, boundaries = np.array([[1, 1, 1, 1, 1, 0]], np.int32), np.array([0, 3, 6], np.int32)
    given = [library.asarray(a) for a in (logits, ids, mask, boundaries)]  # NumPy arrays come read-only
    next_token_logprobs(given[0], given[1], attention_mask=given[2], cu_seqlens=given[3], ignore_index=int(ids[0, 1]))
    for array, original in zip(given, (logits, ids, mask, boundaries), strict=True):
        np.testing.assert_array_equal(library.tonumpy(array), original)


# Temperature


def test_one_temperature_per_position_belongs_to_the_logits(library):
    logits, ids = normal(8), some_ids(8)
    temperature = np.linspace(0.5, 2, 8)
    out = run(library, logits, ids, temperature=temperature.astype(np.float32), cu_seqlens=np.array([0, 3, 8]))
    rounded = temperature.astype(np.float32).astype(np.float64)
    assert_within_bound(out, reference(logits, ids, [3], rounded))
    assert_within_bound(out, reference(logits.astype(np.float64) / rounded[:, None], ids, [3]))
    # given to the tokens instead, the last of them would count and the first would not
    np.testing.assert_array_equal(
        run(library, logits, ids, temperature=np.where(np.arange(8) % 8 == 7, 9, temperature)),
        run(library, logits, ids, temperature=temperature),
    )
    first_changed = run(library, logits, ids, temperature=np.where(np.arange(8) == 0, 9, temperature))
    assert first_changed[1] != run(library, logits, ids, temperature=temperature)[1]


def test_one_temperature_for_all(library):
    logits, ids = normal(8), some_ids(8)
    assert_within_bound(run(library, logits, ids, temperature=0.6), reference(logits, ids, [], 0.6))


# Ignored and invalid ids


@pytest.mark.parametrize("ignore_index", [-100, -1, -2, 5, V, 2**40])
def test_ignored_tokens_give_0_and_the_next_one_keeps_its_prediction(library, ignore_index):
    logits, ids = normal(6), np.array([3, 4, 7, 1, 2, 9])
    exact = reference(logits, ids, [])
    exact[2] = 0
    given = ids.tolist()
    given[2] = ignore_index
    logits[1] = np.nan  # what would have scored it
    out = next_token_logprobs(library.asarray(logits), given, ignore_index=ignore_index)
    assert_within_bound(library.tonumpy(out), exact)


@pytest.mark.parametrize("wrong", [-100, -1, -2, V, 2**31 - 1])
def test_an_invalid_id_is_named_by_its_position_in_input_ids(library, wrong):
    logits, ids = normal(2, 6), some_ids(2, 6)
    ids[1, 3] = wrong
    message = rf"input_ids\[1, 3\] is {wrong}; logits of shape \(2, 6, {V}\) take ids in \[0, {V}\)"
    for options in ({}, {"ignore_index": -7}, {"attention_mask": np.ones((2, 6), bool)}):
        with pytest.raises(IndexError, match=message):
            run(library, logits, ids, **options)
    with pytest.raises(IndexError, match=r" or ignore_index=-7$"):
        run(library, logits, ids, ignore_index=-7)
    out = run(library, logits, ids, invalid_ids="nan")
    assert np.argwhere(np.isnan(out)).tolist() == [[1, 3]]


def test_tokens_without_a_prediction_may_hold_any_id(library):
    logits, ids = normal(8), some_ids(8)
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 0])
    other = ids.copy()
    other[[0, 1, 2, 4, 7]] = [-100, V, -1, -2, V + 1]  # padding, and the first tokens at 2 and 4
    options = {"attention_mask": mask, "cu_seqlens": np.array([0, 4, 8])}
    np.testing.assert_array_equal(run(library, logits, other, **options), run(library, logits, ids, **options))


@pytest.mark.parametrize("ids", [[3, 2**64, 1], [3, -(2**63), 1], [1, 2**32 + 5, 2]], ids=str)
def test_ids_are_not_narrowed_before_they_are_checked(library, ids):
    with pytest.raises(IndexError, match=rf"input_ids\[1\] is {ids[1]};"):
        next_token_logprobs(library.asarray(normal(3)), ids)
    out = next_token_logprobs(library.asarray(normal(3)), ids, attention_mask=[1, 0, 1])
    assert library.tonumpy(out).tolist() == [0, 0, 0]


def test_a_mask_is_not_narrowed_before_it_is_read(library):
    logits, ids = normal(4), some_ids(4)
    mask = np.array([1, 1, 2**32, 2**32])
    out = next_token_logprobs(library.asarray(logits), ids, attention_mask=mask)
    assert_within_bound(library.tonumpy(out), reference(logits, ids, [2]))


# Values that are on an accelerator, which a call does not wait for


@pytest.fixture(params=["torch", "jax"])
def unreadable(request, monkeypatch):
    """A library on the CPU, served as one whose values are on an accelerator."""
    from conftest import make_library

    from xlogprobs.backend import load

    library = make_library(request.param)
    monkeypatch.setattr(type(load(request.param)), "readable", lambda self, array: False)
    if request.param == "torch":
        with library.xp.compiler.set_stance("force_eager"):
            yield library
    else:
        yield library


def test_on_an_accelerator_ids_may_stand_beside_a_mask_in_lists_and_the_other_way_round(unreadable):
    logits, ids = normal(1, 6), some_ids(1, 6)
    exact = reference(logits[0], ids[0], [3, 5])[None]
    mask, boundaries = np.array([[1, 1, 1, 1, 1, 0]]), np.array([0, 3, 6])
    for lists in ({"ids"}, {"mask"}, {"boundaries"}, {"ids", "mask", "boundaries"}, set()):
        given = [
            array.tolist() if name in lists else unreadable.asarray(array)
            for name, array in {"ids": ids, "mask": mask, "boundaries": boundaries}.items()
        ]
        x = unreadable.asarray(logits)
        out = next_token_logprobs(x, given[0], attention_mask=given[1], cu_seqlens=given[2])
        assert_within_bound(unreadable.tonumpy(out), exact)


def test_on_an_accelerator_what_is_wrong_gives_nan(unreadable):
    logits, ids = normal(5), np.array([-1, 2, V, -100, 4])
    out = run(unreadable, logits, ids, ignore_index=-100)
    assert np.isnan(out).tolist() == [False, False, True, False, False]
    with pytest.raises(IndexError, match=rf"input_ids\[2\] is {V}; .* or ignore_index=-100$"):
        run(unreadable, logits, ids, ignore_index=-100, invalid_ids="raise")
    for wrong in ([1, 2, 5], [0, 2, 4], [0, 7, 5], [0, 3, 2, 5]):
        assert np.isnan(run(unreadable, logits, some_ids(5), cu_seqlens=np.array(wrong))).all()
        with pytest.raises(ValueError, match=r"^cu_seqlens"):
            run(unreadable, logits, some_ids(5), cu_seqlens=wrong)


# Messages


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"input_ids": np.zeros((1, 4), int)}, ValueError, r"input_ids has shape \(1, 4\); .* take input_ids of shape"),
        ({"input_ids": np.zeros((1, 5, 1), int)}, ValueError, r"input_ids has shape \(1, 5, 1\); logits of shape \(1,"),
        ({"input_ids": np.zeros((1, 5), np.float32)}, TypeError, "input_ids has dtype float32; expected integers"),
        ({"input_ids": None}, TypeError, "input_ids is a NoneType; expected"),
        ({"input_ids": [[0], [1, 2]]}, ValueError, "input_ids is a list that is no rectangular array"),
        (
            {"attention_mask": np.ones(5, int)},
            ValueError,
            r"attention_mask has shape \(5,\); logits of shape \(1, 5, 40",
        ),
        ({"attention_mask": np.ones((1, 5), np.float32)}, TypeError, "attention_mask has dtype float32; expected bool"),
        ({"attention_mask": "1"}, TypeError, "attention_mask has dtype str"),
        ({"cu_seqlens": [1, 3, 5]}, ValueError, r"cu_seqlens\[0\] is 1; expected 0, where the first sequence begins"),
        (
            {"cu_seqlens": [0, 3, 4]},
            ValueError,
            "cu_seqlens ends with 4; expected 5, the number of tokens in input_ids",
        ),
        ({"cu_seqlens": [0, 3, 2**40]}, ValueError, r"cu_seqlens ends with 1099511627776; expected 5"),
        (
            {"cu_seqlens": [0, 4, 3, 5]},
            ValueError,
            r"cu_seqlens\[2\] is 3 after 4; expected boundaries that do not dec",
        ),
        ({"cu_seqlens": [0, 2**64, 5]}, ValueError, r"cu_seqlens\[2\] is 5 after 18446744073709551616; expected"),
        ({"cu_seqlens": [[0, 5]]}, ValueError, r"cu_seqlens has shape \(1, 2\); expected \(S \+ 1,\), the boundaries"),
        ({"cu_seqlens": []}, ValueError, r"cu_seqlens has shape \(0,\); expected \(S \+ 1,\)"),
        ({"cu_seqlens": [0]}, ValueError, "cu_seqlens ends with 0; expected 5"),
        (
            {"cu_seqlens": np.array([0.0, 5.0], np.float32)},
            TypeError,
            "cu_seqlens has dtype float32; expected integers",
        ),
        ({"temperature": 0}, ValueError, "temperature is 0.0; expected finite and positive"),
        ({"ignore_index": 1.0}, TypeError, "ignore_index is 1.0; expected an int or None"),
        ({"invalid_ids": "drop"}, ValueError, "invalid_ids is 'drop'; expected one of 'auto', 'raise', 'nan'"),
    ],
    ids=str,
)
def test_a_message_names_the_argument_what_came_and_what_was_expected(library, given, kind, message):
    given = {"input_ids": np.zeros((1, 5), int)} | given
    given = {name: library.asarray(v) if isinstance(v, np.ndarray) else v for name, v in given.items()}
    with pytest.raises(kind, match=message):
        next_token_logprobs(library.asarray(normal(1, 5)), **given)


def test_logits_have_the_tokens_of_a_sequence_before_the_vocabulary(library):
    with pytest.raises(ValueError, match=r"logits has shape \(40,\); expected \(\.\.\., T, V\)"):
        next_token_logprobs(library.asarray(normal()), 3)
    with pytest.raises(ValueError, match=r"logits has shape \(2, 5, 40\); with cu_seqlens, expected packed sequences"):
        next_token_logprobs(library.asarray(normal(2, 5)), some_ids(2, 5), cu_seqlens=[0, 5, 10])


@pytest.mark.parametrize("other", ["torch", "jax", "array-api-strict"])
@pytest.mark.parametrize("argument", ["input_ids", "attention_mask", "cu_seqlens"])
def test_a_mix_of_libraries_is_a_type_error_that_names_both(library, other, argument):
    from conftest import make_library

    if library.name == other:
        pytest.skip("no mix")
    foreign = make_library(other).asarray(np.array([0, 1, 4], np.int32))
    with pytest.raises(TypeError, match=rf"{argument} is a .* and logits a .*; expected {argument} from the same"):
        next_token_logprobs(library.asarray(normal(3)), **({"input_ids": [1, 2, 3]} | {argument: foreign}))


# Gradients


@pytest.fixture(params=["torch", "jax"])
def gradient(request):
    """The logits' gradient, in NumPy, of the results weighed by ``upstream``."""
    library = pytest.importorskip(request.param, reason=f"{request.param} is not installed")

    def in_torch(logits, ids, upstream, **options):
        given = library.tensor(logits, requires_grad=True)
        with library.compiler.set_stance("force_eager"):
            (next_token_logprobs(given, ids, **options) * library.tensor(upstream)).sum().backward()
        return given.grad.numpy()

    def in_jax(logits, ids, upstream, **options):
        function = library.grad(lambda x: (next_token_logprobs(x, ids, **options) * upstream).sum())
        return np.asarray(function(library.numpy.asarray(logits)))

    return in_torch if request.param == "torch" else in_jax


@pytest.mark.parametrize("rubbish", [None, np.nan, np.inf, -np.inf])
def test_gradients_reach_the_logits_before_each_token_and_no_others(gradient, rubbish):
    logits, ids = normal(8), some_ids(8)
    mask, boundaries = np.array([0, 1, 1, 1, 1, 1, 1, 0]), np.array([0, 4, 8])
    upstream = np.random.default_rng(3).standard_normal(8).astype(np.float32)
    scoring = np.array([0, 1, 1, 0, 1, 1, 0, 0], bool)  # the ends of the sequences, at 3 and 6, predict nothing
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    following = np.roll(ids, -1)
    exact = np.where(scoring[:, None], (np.eye(V)[following] - p) * np.roll(upstream, -1)[:, None], 0)
    if rubbish is not None:
        logits[~scoring] = rubbish
    found = gradient(logits, ids, upstream, attention_mask=mask, cu_seqlens=boundaries)
    assert (found[~scoring] == 0).all()
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6 * np.abs(upstream).max())


def test_ignored_tokens_have_no_gradient(gradient):
    logits, ids = normal(2, 4), some_ids(2, 4)
    ids[0, 2] = -100
    found = gradient(logits, ids, np.ones((2, 4), np.float32), ignore_index=-100)
    assert (found != 0).any(-1).tolist() == [[True, False, True, False], [True, True, True, False]]


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (1,)])
def test_batches_without_a_prediction_have_gradients(gradient, shape):
    found = gradient(normal(*shape), np.zeros(shape, int), np.ones(shape, np.float32))
    np.testing.assert_array_equal(found, np.zeros((*shape, V), np.float32))


def test_the_backward_pass_may_overwrite_the_logits():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    leaf, ids = torch.tensor(normal(2, 5), requires_grad=True), some_ids(2, 5)
    mask = np.array([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with torch.compiler.set_stance("force_eager"):
        (expected,) = torch.autograd.grad(next_token_logprobs(leaf * 2, ids, attention_mask=mask).sum(), leaf)
        logits = leaf * 2
        out = next_token_logprobs(logits, ids, attention_mask=mask, inplace_backward=True)
        (found,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(found, expected)
    assert torch.equal(logits.detach() * 2, expected)


# Inside the user's own compiler


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def jax():
    return pytest.importorskip("jax", reason="jax is not installed")


def test_inside_torch_compile_as_one_graph_with_a_mask(torch):
    logits, ids = normal(2, 6), some_ids(2, 6)
    mask = np.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    ids[mask == 0] = -100

    def score(x, i, m):
        return next_token_logprobs(x, i, attention_mask=m, temperature=0.7, ignore_index=-100)

    source = torch.tensor(logits, requires_grad=True)
    out = torch.compile(score, fullgraph=True)(source, torch.tensor(ids), torch.tensor(mask))
    exact = np.array([reference(logits[0], ids[0] % V, [1], 0.7), reference(logits[1], ids[1] % V, [3, 4, 5], 0.7)])
    assert_within_bound(out.detach().numpy(), np.where(mask == 0, 0, exact))
    out.sum().backward()
    assert (source.grad != 0).any(-1).tolist() == [[False] + [True] * 4 + [False], [True, True] + [False] * 4]


def test_inside_torch_compile_as_one_graph_with_boundaries(torch):
    logits, ids = normal(6), some_ids(6)

    @torch.compile(fullgraph=True)
    def score(x, i, boundaries):
        return next_token_logprobs(x, i, cu_seqlens=boundaries)

    def given(boundaries):
        return torch.tensor(logits), torch.tensor(ids), torch.tensor(boundaries, dtype=torch.int32)

    for boundaries in ([0, 2, 6], [0, 6, 6], [0, 0, 6]):
        assert_within_bound(score(*given(boundaries)).numpy(), reference(logits, ids, boundaries[1:-1]))
    for wrong in ([1, 2, 6], [0, 2, 5], [0, 7, 6], [0, -1, 6]):
        assert score(*given(wrong)).isnan().all()


def test_inside_torch_func_vmap(torch):
    logits, ids = normal(3, 6), some_ids(3, 6)
    mask = np.arange(6) < np.array([[6], [3], [1]])
    with torch.compiler.set_stance("force_eager"):
        out = torch.func.vmap(lambda x, i, m: next_token_logprobs(x, i, attention_mask=m))(
            torch.tensor(logits), torch.tensor(ids), torch.tensor(mask)
        )
    exact = np.array([reference(logits[row], ids[row], range(length, 6)) for row, length in enumerate((6, 3, 1))])
    assert_within_bound(out.numpy(), exact)


@pytest.mark.parametrize("outer", ["jit", "vmap", "jit of vmap", "scan"])
def test_inside_jax_transformations_with_a_mask(jax, outer):
    logits, ids = normal(3, 6), some_ids(3, 6)
    mask = np.arange(6) < np.array([[6], [3], [1]])
    ids[~mask] = -100
    exact = np.array([reference(logits[row], ids[row] % V, range(length, 6)) for row, length in enumerate((6, 3, 1))])

    def score(x, i, m):
        return next_token_logprobs(x, i, attention_mask=m)

    transformed = {
        "jit": jax.jit(score),
        "vmap": jax.vmap(score),
        "jit of vmap": jax.jit(jax.vmap(score)),
        "scan": lambda *xs: jax.lax.scan(lambda carry, x: (carry, score(*x)), 0, xs)[1],
    }
    out = transformed[outer](*map(jax.numpy.asarray, (logits, ids, mask)))
    assert_within_bound(np.asarray(out), exact)


def test_inside_jax_jit_with_boundaries(jax):
    logits, ids = normal(6), some_ids(6)
    traced = jax.jit(lambda x, i, boundaries: next_token_logprobs(x, i, cu_seqlens=boundaries))
    some_traced = jax.jit(lambda x, boundaries: next_token_logprobs(x, ids, cu_seqlens=boundaries))
    constant = jax.jit(lambda x, i: next_token_logprobs(x, i, cu_seqlens=[0, 2, 6], attention_mask=[1] * 6))
    for boundaries in ([0, 2, 6], [0, 6, 6], [0, 0, 6]):
        exact = reference(logits, ids, boundaries[1:-1])
        assert_within_bound(np.asarray(traced(logits, ids, np.array(boundaries))), exact)
        assert_within_bound(np.asarray(some_traced(logits, np.array(boundaries))), exact)
    assert_within_bound(np.asarray(constant(logits, ids)), reference(logits, ids, [2]))
    for wrong in ([1, 2, 6], [0, 2, 5], [0, 7, 6], [0, -1, 6]):
        assert np.isnan(traced(logits, ids, np.array(wrong))).all()


def test_inside_jax_jit_an_invalid_id_gives_nan_where_it_is_scored(jax):
    logits, ids = normal(5), np.array([-1, 2, V, -100, 4])
    out = jax.jit(lambda x, i: next_token_logprobs(x, i, ignore_index=-100))(logits, ids)
    assert np.isnan(out).tolist() == [False, False, True, False, False]
    with pytest.raises(ValueError, match="invalid_ids='raise' needs the values of input_ids"):
        jax.jit(lambda x, i: next_token_logprobs(x, i, invalid_ids="raise"))(logits, ids)


# Memory: the logits are read where they are


def test_no_copy_of_the_logits_is_made_in_numpy():
    logits, ids = np.zeros((2, 2000, 4096), np.float32), np.zeros((2, 2000), int)
    mask = np.ones((2, 2000), bool)
    next_token_logprobs(logits, ids, attention_mask=mask)  # each thread keeps its buffer
    tracemalloc.start()
    try:
        next_token_logprobs(logits, ids, attention_mask=mask)
        assert tracemalloc.get_traced_memory()[1] < logits.nbytes / 20
    finally:
        tracemalloc.stop()


def test_no_copy_of_the_logits_is_saved_in_torch(torch):
    logits, saved = torch.tensor(normal(4, 6), requires_grad=True), []
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        next_token_logprobs(logits, some_ids(4, 6), attention_mask=np.ones((4, 6), int))
    assert [x.data_ptr() for x in saved if x.numel() >= V] == [logits.data_ptr()]


def test_no_copy_of_the_logits_is_made_in_jax(jax):
    shape = jax.ShapeDtypeStruct((2, 512, 8192), np.float32)
    ids = jax.ShapeDtypeStruct((2, 512), np.int32)
    compiled = jax.jit(lambda x, i, m: next_token_logprobs(x, i, attention_mask=m)).lower(shape, ids, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 2 * 512 * 8192 / 10


# Every statistic


def test_statistics_are_aligned_as_the_log_probabilities_are(library):
    logits, ids = normal(2, 6), some_ids(2, 6)
    mask = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2]])
    given_logits, given_ids = library.asarray(logits), library.asarray(ids)
    stats = next_token_stats(given_logits, given_ids, top_k=2, attention_mask=library.asarray(mask), temperature=0.7)
    plain = token_stats(given_logits, given_ids, want=("entropy", "lse"), top_k=2, temperature=0.7)
    expected = next_token_logprobs(given_logits, given_ids, attention_mask=library.asarray(mask), temperature=0.7)
    np.testing.assert_array_equal(library.tonumpy(stats.logprob), library.tonumpy(expected))
    scored = np.zeros((2, 6), bool)
    scored[:, 1:] = (mask[:, 1:] == mask[:, :-1]) & (mask[:, 1:] != 0)
    for field in ("entropy", "lse", "top_ids"):
        found, own = library.tonumpy(getattr(stats, field)), library.tonumpy(getattr(plain, field))
        np.testing.assert_array_equal(found[:, 1:][scored[:, 1:]], own[:, :-1][scored[:, 1:]])
        assert (found[~scored] == (-1 if field == "top_ids" else 0)).all()
    rank = 1 + (logits[:, :-1] > np.take_along_axis(logits[:, :-1], ids[:, 1:, None], -1)).sum(-1)
    np.testing.assert_array_equal(library.tonumpy(stats.rank)[:, 1:], np.where(scored[:, 1:], rank, 0))
    top = library.tonumpy(stats.top_logprobs)
    assert (top[scored] <= 0).all()
    assert (top[~scored] == 0).all()
