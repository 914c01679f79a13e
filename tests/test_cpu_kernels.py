"""The kernels of xlogprobs_cpu against the definition in extended precision."""

import multiprocessing
import os
import platform
import re
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba", reason="numba is not installed")

import llvmlite.binding
import numba
import xlogprobs_cpu
from xlogprobs_cpu import RowTransforms, count_greater, gradient, kernels, rows, summarize

from xlogprobs.parity import bound, gradient_bound

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
ROWS = 6
NO_TRANSFORMS = RowTransforms()


def rng(seed=0):
    return np.random.default_rng(seed)


def logits_of(rows, vocab, dtype=np.float32, scale=4.0, seed=0):
    return (rng(seed).standard_normal((rows, vocab)) * scale).astype(dtype)


def some(name, vocab, rows=ROWS, seed=1):
    """Transforms of each kind; what a softcap of 5 and a temperature T make: inner = 5 and T / 5."""
    r = rng(seed)
    temperature = r.uniform(0.3, 2.0, rows)
    sign = np.array([1.0, -1.0, 1.0, -1.0, 0.0, 1.0] * rows)[:rows]
    mask = r.random((rows, vocab)) < 0.7
    mask[:, -1] = True
    bias = r.standard_normal((rows, vocab)).astype(np.float32)
    inner = np.full(rows, 5.0)
    return {
        "plain": NO_TRANSFORMS,
        "temperature": RowTransforms(temperature),
        "signed and masked": RowTransforms(temperature, sign, mask=mask),
        "softcap": RowTransforms(temperature / 5, inner=inner),
        "bias": RowTransforms(temperature, bias=bias),
        "all": RowTransforms(temperature / 5, sign, inner, bias, np.full(rows, 0.2), mask),
    }[name]


KINDS = ["plain", "temperature", "signed and masked", "softcap", "bias", "all"]
# all kinds of one dtype, and the least and the most of the others: each combination is compiled
CALLS = [(np.float32, kind) for kind in KINDS] + [(dtype, kind) for dtype in DTYPES[1:] for kind in ("plain", "all")]
each_call = pytest.mark.parametrize(
    ("dtype", "kind"), [pytest.param(*call, id=f"{np.dtype(call[0]).name} {call[1]}") for call in CALLS]
)


class Exact:
    """Rows by the definition, in extended precision, relative to the reference that a summary names."""

    def __init__(self, x, transforms, summary=None):
        t = transforms
        wide = np.asarray(x).astype(np.float32 if x.dtype.itemsize == 2 else x.dtype).astype(np.longdouble)
        column = lambda a, default=1.0: np.longdouble(default) if a is None else np.asarray(a, np.longdouble)[:, None]  # noqa: E731
        rows_of = lambda a, which: a if which is None else a[which]  # noqa: E731
        with np.errstate(all="ignore"):
            v = np.where(wide == -np.inf, wide, wide * column(t.sign))
            if t.mask is not None:
                v = np.where(rows_of(t.mask, t.mask_row), v, -np.inf)
            self.slope = np.ones_like(v)
            if t.inner is not None:
                a = v / column(t.inner)
                self.slope = 1 / np.cosh(np.clip(a, -1000, 1000)) ** 2 / column(t.inner)
            offset = np.zeros_like(v)
            if t.bias is not None:
                offset = np.broadcast_to(rows_of(t.bias, t.bias_row), v.shape).astype(np.longdouble) * column(
                    t.bias_unit
                )
            z = (v if t.inner is None else np.where(v == -np.inf, v, np.tanh(a))) + offset
            best = np.argmax(z, axis=1)[:, None]
            pick = lambda a: np.take_along_axis(a, best, 1)  # noqa: E731
            rise = v - pick(v)
            if t.inner is not None:
                b = pick(v) / column(t.inner)
                rise = np.where(v == -np.inf, v, np.tanh(a - b) * (1 - np.tanh(a) * np.tanh(b)))
            self.s = (rise + offset - pick(offset)) / column(t.temperature)
            self.v, self.z, self.held = v, z, z != -np.inf
            self.terms = np.exp(self.s)
            others = self.terms.copy()
            np.put_along_axis(others, best, 0.0, 1)
            self.rest = others.sum(1)
            self.t = np.where(self.s == -np.inf, 0, self.terms * self.s).sum(1)
            self.slope = np.where(self.held, self.slope * column(t.sign) / column(t.temperature), 0)
        self.is_distribution = np.isfinite(pick(z))[:, 0] & ~np.any(np.isnan(v) | (v == np.inf), axis=1)

    def logprob(self):
        return np.where(self.is_distribution[:, None], self.s - np.log1p(self.rest)[:, None], np.nan)

    def gradient(self, ids, upstream, alpha, beta):
        own = np.zeros_like(self.s)
        for k in range(ids.shape[1]):
            here = np.flatnonzero(ids[:, k] >= 0)
            np.add.at(own, (here, ids[here, k]), upstream[here, k])
        p = self.terms / (1 + self.rest)[:, None]
        slant = alpha[:, None] + (0 if beta is None else beta[:, None] * np.maximum(self.s, -1000))
        return self.slope * (own + p * slant)


def is_close_summary(summary, exact, dtype):
    """The contract's bounds, on what the summary makes of every entry's log-probability."""
    wide = np.dtype(dtype) == np.float64
    there = exact.is_distribution
    assert np.all(np.isnan(summary.max[~there]) | np.isinf(summary.max[~there]))
    rest, expected = summary.rest[there], exact.rest[there]
    assert np.all(np.abs(rest - expected) <= (1e-12 if wide else 1e-6) * (1 + expected))
    assert np.all(np.abs(rest - expected) <= (1e-11 if wide else 1e-5) * expected + 1e-30)
    found = exact.s[there] - np.log1p(rest)[:, None]
    with np.errstate(over="ignore"):
        allowed = bound(exact.logprob()[there].astype(np.float64), np.float64 if wide else np.float32)
    distance = np.where(np.isinf(found), 0, np.abs(found - np.where(np.isinf(found), 0, exact.logprob()[there])))
    assert np.all(distance <= allowed)
    if summary.t is not None:
        entropy = np.log1p(rest) - summary.t[there] / (1 + rest)
        expected = np.log1p(expected) - exact.t[there] / (1 + expected)
        assert np.all(np.abs(entropy - expected) <= (1e-12 if wide else 1e-6) * np.maximum(1, expected))


@each_call
def test_summaries_are_within_the_bound(dtype, kind):
    for vocab in (1, 7, 1000, 50257):
        x, transforms = logits_of(ROWS, vocab, dtype), some(kind, vocab)
        summary = summarize(x, transforms, want_t=True)
        exact = Exact(x, transforms)
        is_close_summary(summary, exact, dtype)
        assert summary.max.dtype == (np.float64 if dtype == np.float64 else np.float32)
        assert np.all(np.any(summary.max[:, None] == exact.v, axis=1))


@each_call
def test_gradients_are_within_the_bound_and_the_same_in_place(dtype, kind):
    vocab = 3001
    x, transforms = logits_of(ROWS, vocab, dtype), some(kind, vocab)
    ids, upstream = rng(2).integers(0, vocab, (ROWS, 3)), rng(3).standard_normal((ROWS, 3))
    ids[1] = ids[1, 0]  # repeated ids add up
    ids[2, 1] = -1
    alpha = -np.where(ids == -1, 0, upstream).sum(1)
    beta = None if kind in ("plain", "temperature") else rng(4).standard_normal(ROWS) * 0.1
    summary, out = summarize(x, transforms), np.empty_like(x)
    gradient(x, ids, upstream, summary, transforms, alpha, beta, out)
    expected = Exact(x, transforms).gradient(ids, upstream, alpha, beta).astype(np.float64)
    assert out.dtype == x.dtype
    allowed = gradient_bound(expected, upstream, 0.05, dtype)
    assert np.all(np.abs(out.astype(np.float64) - expected) <= allowed)
    gradient(x, ids, upstream, summary, transforms, alpha, beta, x)
    assert x.tobytes() == out.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab", [7, 5000, 151936])
@pytest.mark.parametrize("far", [5.0, 20.0, 60.0])
def test_what_a_peaked_row_leaves_keeps_its_relative_accuracy(vocab, far, dtype):
    x = logits_of(3, vocab, dtype, scale=1.0) - dtype(far)
    x[:, vocab // 2] = 0
    x[1, :] = np.where(np.arange(vocab) == vocab - 1, 0.0, -far - 1 / 3)
    summary = summarize(x)
    expected = Exact(x, NO_TRANSFORMS).rest
    assert np.all(np.abs(summary.rest - expected) <= (1e-5 if dtype == np.float32 else 1e-12) * expected)


def test_terms_below_the_smallest_float_still_count():
    x = np.full((1, 200000), -88.5, np.float32)
    x[0, [0, 5]] = 0.0, -69.0
    is_close_summary(summarize(x, want_t=True), Exact(x, NO_TRANSFORMS), np.float32)


@pytest.mark.parametrize("ties", [2, 3, 5000])
def test_of_ties_all_but_one_are_left(ties):
    x = np.full((1, 5000), -40.0, np.float32)
    x[0, -ties:] = 12.5
    assert summarize(x).rest[0] == pytest.approx(ties - 1, abs=1e-12)


@pytest.mark.parametrize("offset", [1e2, 1e4, 1e7, -1e7])
@pytest.mark.parametrize("kind", ["plain", "temperature", "bias"])
def test_a_common_offset_costs_nothing(offset, kind):
    x = logits_of(ROWS, 3000) + np.float32(offset)
    transforms = some(kind, 3000)
    is_close_summary(summarize(x, transforms, want_t=True), Exact(x, transforms), np.float32)


def test_spreads_and_subnormals_do_not_overflow():
    largest = np.finfo(np.float32).max
    x = np.zeros((4, 3000), np.float32)
    x[0, :2] = largest, -largest
    x[1] = -largest
    x[2] = np.float32(1e-45) * np.arange(3000)
    x[3, ::2] = -np.inf
    summary = summarize(x, want_t=True)
    assert np.isfinite(summary.rest).all()
    is_close_summary(summary, Exact(x, NO_TRANSFORMS), np.float32)


def test_a_softcap_holds_at_any_size():
    x = logits_of(4, 2000) * np.array([1.0, 100.0, 1e4, 1e30], np.float32)[:, None]
    for cap in (1e-3, 5.0, 30.0, 1e6, 1e30):
        transforms = RowTransforms(np.full(4, 1 / cap), inner=np.full(4, cap))
        is_close_summary(summarize(x, transforms, want_t=True), Exact(x, transforms), np.float32)


def special_rows(vocab=2500):
    x = logits_of(9, vocab)
    x[0, 3] = np.nan
    x[1, -1] = -np.nan
    x[2, vocab // 2] = np.inf
    x[3] = -np.inf
    x[4, :2000] = -np.inf
    x[5, 1:] = -np.inf
    x[6] = np.nan
    x[7, 5], x[7, 6] = np.inf, np.nan
    return x


@pytest.mark.parametrize("kind", ["plain", "softcap", "bias", "all"])
def test_nan_and_infinities_stay_in_their_row(kind):
    x = special_rows()
    transforms = some(kind, x.shape[1], len(x))
    if transforms.sign is not None:
        transforms = transforms._replace(sign=np.ones(len(x)), mask=np.ones(x.shape, bool))
    summary = summarize(x, transforms, want_t=True)
    is_close_summary(summary, Exact(x, transforms), np.float32)
    assert summary.max[3] == -np.inf
    assert np.isfinite(summary.rest[[4, 5, 8]]).all()


def test_masked_entries_may_hold_anything():
    x, mask = special_rows(), np.ones((9, 2500), bool)
    mask[~np.isfinite(x) & (x != -np.inf)] = False
    transforms = RowTransforms(mask=mask)
    summary = summarize(x, transforms)
    clean = np.where(mask, x, -np.inf).astype(np.float32)
    assert np.array_equal(summary.rest, summarize(clean).rest)
    ids = np.zeros((9, 1), np.int64)
    out = np.empty_like(x)
    gradient(x, ids, np.ones((9, 1)), summary, transforms, -np.ones(9), None, out)
    held = np.isfinite(summary.max) & (np.arange(9) != 3)
    assert np.all(out[held][~mask[held]] == 0)
    assert np.isfinite(out[held]).all()


def test_ignored_invalid_and_impossible_rows_of_a_gradient():
    x = special_rows()
    ids = np.tile(np.array([[4, 7]]), (9, 1))
    ids[0] = ids[3] = -1
    ids[4] = 2100, -2
    ids[5] = 0, 3
    out = np.full_like(x, 7.0)
    gradient(x, ids, np.ones((9, 2)), summarize(x), NO_TRANSFORMS, np.full(9, -2.0), None, out)
    assert np.all(out[[0, 3]] == 0)
    assert np.isnan(out[[1, 2, 6, 7]]).all()
    assert np.isnan(out[4, 2000:]).all()
    assert np.all(out[4, :2000] == 0)
    assert np.all(out[5] == np.where(np.arange(2500) == 0, -1.0, 0.0))  # the share of an impossible id is lost
    assert np.isfinite(out[8]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_a_gradient_is_rounded_to_nearest_even_with_every_special_value(dtype):
    """Through a row of one kept entry and ids without probability: out = own, so any value can be written."""
    info = ml_dtypes.finfo(dtype)
    values = rng().standard_normal(500) * np.exp2(rng(1).integers(-30, 18, 500))
    edges = [info.max, info.tiny, np.inf, 65519.0, 65520.0, 2.0**-24, 2.0**-25 * 3, 2.0**-26]
    values = np.r_[values, edges].astype(np.float32)
    x = np.zeros((len(values), 2), dtype)
    summary = summarize(x)
    out = np.empty_like(x)
    zero = np.zeros(len(values))
    gradient(x, np.zeros((len(x), 1), int), values[:, None], summary, NO_TRANSFORMS, zero, None, out)
    with np.errstate(over="ignore"):
        assert np.array_equal(out[:, 0], values.astype(dtype))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_every_half_precision_number_is_widened_exactly(dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)[:, None]
    expected = np.where(x[:, 0] == np.inf, np.nan, x[:, 0].astype(np.float32))
    assert np.array_equal(summarize(x).max, expected, equal_nan=True)


@pytest.mark.parametrize("kind", ["plain", "bias", "softcap"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ranks_count_what_stands_above(dtype, kind):
    x = np.round(logits_of(ROWS, 3000, dtype) * 8) / 8  # ties
    x[0, ::3] = -np.inf
    transforms = some(kind, 3000)
    columns = np.c_[rng(5).integers(0, 3000, (ROWS, 3)), np.argmax(x, 1), np.full(ROWS, -1)]
    z = Exact(x, transforms)
    z = z.v if kind != "bias" else z.z.astype(dtype)
    expected = (z[:, None, :] > np.take_along_axis(z, np.maximum(columns, 0), 1)[:, :, None]).sum(-1)
    expected = np.where(columns < 0, 0, expected)
    assert np.array_equal(count_greater(x, columns, transforms), expected)
    together, alone = summarize(x, transforms, True, columns=columns), summarize(x, transforms, True)
    assert np.array_equal(together.above, expected)
    for one, other in zip(together[:4], alone[:4], strict=True):
        assert one is other is None or one.tobytes() == other.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_row_depend_on_the_row_alone(kind):
    """Alone, at any place, in any memory layout, on any number of threads; forward and backward."""
    vocab, count = 5001, 40
    x = logits_of(count, vocab)
    transforms = some(kind, vocab, count)
    ids, upstream = rng(2).integers(0, vocab, (count, 2)), rng(3).standard_normal((count, 2))

    def result(x, part=slice(None), threads=None):
        t = RowTransforms(*(None if a is None else a[part] for a in transforms))
        summary, out = summarize(x, t, True, threads), np.empty_like(x)
        gradient(x, ids[part], upstream[part], summary, t, -upstream[part].sum(1), summary.rest * 0.01, out, threads)
        return [np.ascontiguousarray(a).tobytes() for a in (*(s for s in summary if s is not None), out)]

    every = result(x)
    assert every == result(x, threads=1) == result(x, threads=3)
    assert every == result(np.asfortranarray(x))
    wide = np.zeros((2 * count, vocab + 7), np.float32)
    wide[::-2, 3:-4] = x
    assert every == result(wide[::-2, 3:-4])
    unaligned = np.frombuffer(b"\0" + x.tobytes() + b"\0\0\0", np.uint8)[1:-3].view(np.float32).reshape(x.shape)
    assert every == result(unaligned)
    assert every == result(x.astype(">f4"))[:-1] + every[-1:]
    for part in (slice(7, 8), slice(3, 5), slice(11, 40)):
        piece = result(np.array(x[part]), part)
        for found, whole in zip(piece, every, strict=True):
            row = len(whole) // count
            assert found == whole[part.start * row : part.stop * row]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads the assembly of x86-64")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["summarize", "gradient", "gradient in place"])
def test_the_polynomial_runs_in_the_widest_vectors(name, dtype, monkeypatch):
    function, *in_place = name.split(maxsplit=1)
    compiled = numba.njit(nogil=True, error_model="numpy")(getattr(kernels, function).py_func)
    monkeypatch.setattr(kernels, function, compiled)
    x = logits_of(ROWS, 300, dtype)
    summary = summarize(x)
    if function == "gradient":
        out = x if in_place else np.empty_like(x)
        gradient(x, np.zeros((ROWS, 1), int), np.ones((ROWS, 1)), summary, NO_TRANSFORMS, -np.ones(ROWS), None, out)
    features = llvmlite.binding.get_host_cpu_features()
    register = "zmm" if features.get("avx512f") else "ymm" if features.get("avx2") else "xmm"
    (assembly,) = compiled.inspect_asm().values()
    multiplied = [line for line in assembly.splitlines() if re.search(r"\b(v?mulps|vfmadd\d+ps)\b", line)]
    assert sum(f"%{register}" in line for line in multiplied) >= 6, multiplied


def test_a_strided_output_is_written_where_it_lies():
    x = logits_of(5, 800)
    ids, summary = np.zeros((5, 1), int), summarize(x)
    plain, wide, turned = np.empty_like(x), np.zeros((5, 1600), np.float32), np.array(x, order="F")
    for out in (plain, wide[:, ::2]):
        gradient(x, ids, np.ones((5, 1)), summary, NO_TRANSFORMS, -np.ones(5), None, out)
    gradient(turned, ids, np.ones((5, 1)), summary, NO_TRANSFORMS, -np.ones(5), None, turned)
    assert np.array_equal(plain, wide[:, ::2])
    assert np.array_equal(plain, turned)
    assert not wide[:, 1::2].any()


def test_rows_of_bias_and_mask_are_shared_by_number():
    vocab, r = 900, rng()
    x, which = logits_of(ROWS, vocab), np.array([2, 0, 1, 1, 2, 0])
    bias, mask = r.standard_normal((3, vocab)).astype(np.float32), r.random((3, vocab)) < 0.5
    by_row = RowTransforms(bias=bias[which], mask=mask[which])
    for shared in (
        RowTransforms(bias=bias, bias_row=which, mask=mask, mask_row=which),
        RowTransforms(bias=np.asfortranarray(bias), bias_row=which, mask=np.asfortranarray(mask), mask_row=which),
    ):
        for found, expected in zip(summarize(x, shared), summarize(x, by_row), strict=True):
            assert np.array_equal(found, expected)
    one = RowTransforms(bias=bias[:1], mask=mask[:1])
    same = RowTransforms(bias=np.repeat(bias[:1], ROWS, 0), mask=np.repeat(mask[:1], ROWS, 0))
    across = RowTransforms(bias=np.broadcast_to(bias[:1], x.shape), mask=np.broadcast_to(mask[:1], x.shape))
    expected = summarize(x, same).rest
    assert np.array_equal(summarize(x, one).rest, expected)
    assert np.array_equal(summarize(x, across).rest, expected)
    column = RowTransforms(mask=np.broadcast_to(np.ones((ROWS, 1), bool), x.shape))
    assert np.array_equal(summarize(x, column).rest, summarize(x).rest)


def test_uint16_is_bfloat16_and_other_dtypes_are_refused():
    x = logits_of(3, 100, ml_dtypes.bfloat16)
    assert np.array_equal(summarize(x).rest, summarize(x.view(np.uint16)).rest)
    with pytest.raises(TypeError, match="x is int32; expected float16"):
        summarize(np.zeros((1, 2), np.int32))


def test_an_input_is_never_written_to_and_may_be_read_only():
    x = logits_of(4, 3000)
    before = x.tobytes()
    x.flags.writeable = False
    out = np.empty_like(x)
    gradient(x, np.zeros((4, 1), int), np.ones((4, 1)), summarize(x), NO_TRANSFORMS, -np.ones(4), None, out)
    assert x.tobytes() == before


def test_empty_batches_work():
    x = np.empty((0, 5), np.float32)
    assert summarize(x).rest.shape == (0,)
    gradient(x, np.empty((0, 1), int), np.empty((0, 1)), summarize(x), NO_TRANSFORMS, np.empty(0), None, x)
    assert count_greater(x, np.empty((0, 2), int), NO_TRANSFORMS).shape == (0, 2)


# -- threads and processes

MANY = logits_of(64, 20000)


def test_sixteen_callers_share_the_threads():
    expected, start = summarize(MANY).rest, threading.Barrier(16)

    def call(_):
        start.wait()
        return summarize(MANY, threads=2).rest

    with ThreadPoolExecutor(16) as pool:
        assert all(np.array_equal(found, expected) for found in pool.map(call, range(16)))
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("xlogprobs-cpu")]
    assert len(ours) <= max(2, xlogprobs_cpu.num_threads())


def _rest(queue):
    queue.put(summarize(MANY, threads=2).rest)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_child_process_calls(method):
    expected = summarize(MANY, threads=2).rest
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_rest, args=(queue,))
    child.start()
    assert np.array_equal(queue.get(timeout=60), expected)
    child.join(60)
    assert child.exitcode == 0


def test_an_interrupt_stops_every_thread_and_leaves_a_clean_state(monkeypatch):
    monkeypatch.setattr(rows, "PIECE", 1 << 14)
    running, interrupted = [], threading.Event()

    def run(first, stop):
        running.append(first)
        if threading.current_thread() is threading.main_thread():
            interrupted.set()
            raise KeyboardInterrupt
        assert interrupted.wait(60)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        rows.over_rows(run, 64, 1 << 14, 2)
    count = len(running)
    assert count < 64
    assert np.array_equal(summarize(MANY, threads=2).rest, summarize(MANY, threads=1).rest)
    assert len(running) == count  # nothing went on in the background


def test_an_error_in_another_thread_is_raised():
    def run(first, stop):
        if threading.current_thread() is not threading.main_thread():
            raise OSError("in a thread")
        threading.Event().wait(0.01)

    with pytest.raises(OSError, match="in a thread"):
        rows.over_rows(run, 64, 1 << 19, 2)


def test_the_number_of_threads_is_the_argument_or_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert xlogprobs_cpu.num_threads() == 1
    try:
        xlogprobs_cpu.set_num_threads(3)
        assert xlogprobs_cpu.num_threads() == 3
        with pytest.raises(ValueError, match="count is 0"):
            xlogprobs_cpu.set_num_threads(0)
    finally:
        xlogprobs_cpu.set_num_threads(None)
    assert xlogprobs_cpu.num_threads() == 1


SCRIPT = """
    import numpy as np, xlogprobs_cpu
    from xlogprobs_cpu import RowTransforms, kernels
    x = (np.random.default_rng(0).standard_normal((3, 1500)) * 4).astype(np.float16)
    x[0, 0] = 60
    transforms = RowTransforms(np.full(3, 0.1), inner=np.full(3, 10.0))
    summary, out = xlogprobs_cpu.summarize(x, transforms, want_t=True), np.empty_like(x)
    xlogprobs_cpu.gradient(x, np.zeros((3, 1), int), np.ones((3, 1)), summary, transforms, -np.ones(3), None, out)
    wide = np.tanh(x / np.float64(10)) * 10
    e = np.exp(wide - wide.max(1, keepdims=True))
    assert np.allclose(summary.rest, e.sum(1) - 1, rtol=1e-5)
    expected = ((np.arange(1500) == 0) - e / e.sum(1, keepdims=True)) * (1 - (wide / 10) ** 2)
    assert np.allclose(out.astype(float), expected, rtol=1e-3, atol=1e-6)
    cache = type(kernels.summarize._cache).__name__
    print(cache, *(sum(count.values()) for count in kernels.summarize.stats[1:]))
"""


def run_script(directory, **environment):
    root = Path(xlogprobs_cpu.__file__).parents[1]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment = {"PYTHONPATH": os.pathsep.join([str(directory), str(root), str(root.parent)]), **environment}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_second_process_loads_what_the_first_compiled(tmp_path):
    assert run_script(tmp_path, NUMBA_CACHE_DIR=str(tmp_path)) == ["FunctionCache", "0", "1"]
    assert run_script(tmp_path, NUMBA_CACHE_DIR=str(tmp_path)) == ["FunctionCache", "1", "0"]


def test_kernels_compile_where_no_folder_can_be_written(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import numba.core.caching as c; c.CacheImpl._locator_classes = []")
    assert run_script(tmp_path)[0] == "NullCache"


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="processors named are x86-64")
@pytest.mark.parametrize("processor", ["haswell", "generic"])
def test_code_for_older_processors_is_right(processor, tmp_path):
    assert run_script(tmp_path, NUMBA_CPU_NAME=processor, NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=str(tmp_path)) == [
        "FunctionCache",
        "0",
        "1",
    ]
