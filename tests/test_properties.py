"""What holds of every distribution, for rows that hypothesis draws, on every library.

The vocabulary and the number of rows are fixed, so that what a library compiles for them is compiled once.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from xlogprobs import entropy, kl_divergence, logprobs, token_stats

pytestmark = pytest.mark.usefixtures("torch_runs_eagerly")

ROWS, V = 3, 7
EVERY = np.tile(np.arange(V), (ROWS, 1))
few_examples = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the library is the same for all examples
)

# normal spreads, ties, far offsets, the ends of float32, and entries of probability 0
entries = st.one_of(
    st.floats(-30, 30, width=32, allow_subnormal=False),
    st.integers(-3, 3).map(float),
    st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False),
    st.just(-np.inf),
)


def rows(elements=entries):
    """Logits (ROWS, V) with at least one finite entry a row."""
    drawn = hnp.arrays(np.float32, (ROWS, V), elements=elements, fill=st.nothing())
    return drawn.map(lambda x: np.where(np.isfinite(x).any(axis=-1, keepdims=True), x, np.float32(0)))


# on a grid of 1/4, where adding 2^k is exact up to 2^20
steps = st.integers(-400, 400).map(lambda n: n / 4)
kept = hnp.arrays(np.bool_, (ROWS, V)).map(lambda keep: keep | (np.arange(V) == 2))
# never 1, which is no transform, nor negative: those are other graphs to compile
numbers = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.125, 0.875),
        "scale": st.floats(0.125, 0.875),
        "softcap": st.floats(0.5, 64),
    },
)


@few_examples
@given(rows(), numbers)
def test_log_probabilities_are_at_most_0_and_their_exponentials_add_up_to_1(library, logits, transforms):
    out = library.tonumpy(logprobs(library.asarray(logits), library.asarray(EVERY), **transforms))
    assert (out <= 0).all()
    np.testing.assert_allclose(np.exp(out.astype(np.float64)).sum(-1), 1, rtol=0, atol=V * 1e-6)


@few_examples
@given(rows(), numbers)
def test_entropy_is_from_0_to_log_v(library, logits, transforms):
    out = library.tonumpy(entropy(library.asarray(logits), **transforms))
    assert (out >= 0).all()
    assert (out <= np.float32(np.log(V))).all()


@few_examples
@given(rows(), numbers)
def test_entropy_is_the_mean_of_minus_the_log_probabilities(library, logits, transforms):
    found = token_stats(library.asarray(logits), library.asarray(EVERY), ("logprob", "entropy"), **transforms)
    log_p = library.tonumpy(found.logprob).astype(np.float64)
    p = np.exp(log_p)
    mean = -np.sum(p * np.where(p == 0, 0, log_p), axis=-1)
    np.testing.assert_allclose(library.tonumpy(found.entropy), mean, rtol=1e-5, atol=V * 1e-6)


@few_examples
@given(rows(st.floats(-30, 30, width=32, allow_subnormal=False)), kept)
def test_masked_less_full_is_minus_the_log_of_the_kept_mass(library, logits, keep):
    given_logits, ids = library.asarray(logits), library.asarray(EVERY)
    full = library.tonumpy(logprobs(given_logits, ids)).astype(np.float64)
    masked = library.tonumpy(logprobs(given_logits, ids, mask=library.asarray(keep))).astype(np.float64)
    mass = np.sum(np.exp(full), axis=-1, where=keep, keepdims=True)
    assert (masked[~keep] == -np.inf).all()
    apart = np.where(keep, masked, 0) - np.where(keep, full, 0)
    np.testing.assert_allclose(apart, np.where(keep, -np.log(mass), 0), rtol=1e-6, atol=1e-5)


@few_examples
@given(rows(st.one_of(steps, st.just(-np.inf))), st.integers(0, 20), st.sampled_from([-1, 1]), numbers)
def test_a_common_offset_moves_lse_alone(library, logits, power, sign, transforms):
    del transforms["softcap"]  # which does not commute with an offset
    offset = np.float32(sign * 2.0**power)
    ids = library.asarray(EVERY)
    here = token_stats(library.asarray(logits), ids, top_k=V, **transforms)
    there = token_stats(library.asarray(logits + offset), ids, top_k=V, **transforms)
    for name in ("logprob", "entropy", "rank", "top_logprobs", "top_ids"):
        before, after = (library.tonumpy(getattr(stats, name)) for stats in (here, there))
        np.testing.assert_allclose(after, before, rtol=0 if after.dtype.kind == "i" else 1e-6, atol=0, err_msg=name)
    moved = library.tonumpy(there.lse).astype(np.float64) - library.tonumpy(here.lse)
    distance = offset * transforms["scale"] / transforms["temperature"]
    np.testing.assert_allclose(moved, distance, rtol=1e-6, atol=1e-4)


@few_examples
@given(rows(), st.permutations(range(V)), numbers)
def test_a_permutation_of_the_vocabulary_permutes_the_results(library, logits, order, transforms):
    order = np.array(order)
    here = token_stats(library.asarray(logits), library.asarray(EVERY), **transforms)
    there = token_stats(library.asarray(logits[:, order]), library.asarray(EVERY), **transforms)
    for name in ("logprob", "rank", "entropy", "lse"):
        before, after = (library.tonumpy(getattr(stats, name)) for stats in (here, there))
        before = before[:, order] if before.ndim == 2 else before
        if name == "rank":
            np.testing.assert_array_equal(after, before)
        else:
            np.testing.assert_allclose(after, before, rtol=2e-6, atol=2e-6, err_msg=name)


@few_examples
@given(rows(), numbers)
def test_top_k_of_v_is_every_id_once_and_agrees_with_the_ranks(library, logits, transforms):
    found = token_stats(library.asarray(logits), library.asarray(EVERY), ("logprob", "rank"), top_k=V, **transforms)
    logprob, rank, top, ids = (
        library.tonumpy(out) for out in (found.logprob, found.rank, found.top_logprobs, found.top_ids)
    )
    np.testing.assert_array_equal(np.sort(ids, axis=-1), EVERY)
    np.testing.assert_array_equal(np.take_along_axis(logprob, ids, axis=-1), top)
    ranks = np.take_along_axis(rank, ids, axis=-1)
    # the rank of an id is the place of the first of its ties, which stand in the order of their ids
    for place in range(1, V):
        tied = ranks[:, place] == ranks[:, place - 1]
        assert (tied | (ranks[:, place] == place + 1)).all()
        assert (ids[:, place] > ids[:, place - 1])[tied].all()
    assert (top[:, :-1] >= top[:, 1:]).all()


@few_examples
@given(rows(st.floats(-30, 30, width=32, allow_subnormal=False)), rows(st.floats(-30, 30, width=32)), numbers)
def test_the_kl_divergence_is_at_least_0_and_0_for_a_row_itself(library, logits, reference, transforms):
    x, y = library.asarray(logits), library.asarray(reference)
    assert (library.tonumpy(kl_divergence(x, y, **transforms)) >= 0).all()
    np.testing.assert_array_equal(library.tonumpy(kl_divergence(x, x, **transforms)), np.zeros(ROWS))


@few_examples
@given(rows(), numbers)
def test_the_kl_divergence_of_any_row_from_itself_is_0(library, logits, transforms):
    x = library.asarray(logits)
    np.testing.assert_array_equal(library.tonumpy(kl_divergence(x, x, **transforms)), np.zeros(ROWS))


@few_examples
@given(rows(st.floats(-20, 20, width=32)), kept)
def test_the_kl_divergence_from_the_full_distribution_is_minus_the_log_of_the_kept_mass(library, logits, keep):
    masked = np.where(keep, logits, np.float32(-np.inf))
    full = library.tonumpy(logprobs(library.asarray(logits), library.asarray(EVERY))).astype(np.float64)
    mass = np.sum(np.exp(full), axis=-1, where=keep)
    out = library.tonumpy(kl_divergence(library.asarray(masked), library.asarray(logits)))
    np.testing.assert_allclose(out, -np.log(mass), rtol=1e-5, atol=1e-5)
