"""The parity matrix as tests: each column against the float64 oracle and against every other column."""

import io
import json
import shutil
import subprocess
import sys
from functools import cache, lru_cache

import numpy as np
import pytest

from xlogprobs import parity
from xlogprobs.parity import COLUMNS, GRADIENTS, PEERS, REAL, REAL_VOCAB, Case, Column, Inputs, distributions

# a compiler needs seconds for each vocabulary and dtype, and so does JAX op by op; the other pairs are marked full
QUICK = {(7, "float32"), (7, "float64"), (130, "float16"), (50257, "bfloat16"), (REAL_VOCAB, "bfloat16")}
RUN_ON_CPU = [column for column in COLUMNS if column.device == "cpu"]


def by_name(backend, execution="eager", device="cpu"):
    (column,) = (c for c in COLUMNS if (c.backend, c.execution, c.device) == (backend, execution, device))
    return column


def slow(column, case):
    """Whether this cell waits for a compiler that no quick cell has waited for."""
    if column.execution == "kernels" or (column.backend != "jax" and column.execution != "compiled"):
        return False
    if case.quantity == "gradient" and case.dtype in ("float16", "float64"):
        return True
    if case.transforms or case.quantity not in ("logprob", "gradient"):  # a compilation each: of one kind, all at once
        at_once = len(case.transforms) != 1 and (case.vocab, case.dtype) == (7, "float32")
        return column.execution == "eager" or not at_once or case.temperature != 1.0 or len(case.shape) != 1
    flat_and_even = len(case.shape) == 1 and not case.ids_per_position and case.temperature == 1.0
    return (case.vocab, case.dtype) not in QUICK or not (flat_and_even or (case.vocab, case.dtype) == (7, "float32"))


def skip_unless_run(column, case):
    if reason := column.available() or case.missing() or column.lacks(case):
        pytest.skip(f"{column}: {reason}")


@lru_cache(maxsize=2)
def inputs(case):
    return case.inputs()


@lru_cache(maxsize=2)
def exact(case):
    return parity.exact(case.quantity, inputs(case))


@lru_cache(maxsize=2)
def outputs(case):
    """What the columns that have run made of the case."""
    return {}


def output(column, case):
    if column not in outputs(case):
        outputs(case)[column] = column.run(case.quantity, inputs(case))
    return outputs(case)[column]


def fell_back(column):
    if (column.backend, column.execution) != ("torch", "compiled"):
        return False
    from xlogprobs_torch import compiled

    return column.device in compiled._without_compiler


def cells():
    for case in parity.cases():
        for column in COLUMNS:
            if case.quantity in GRADIENTS and not column.differentiable:
                continue
            marks = [pytest.mark.full] if slow(column, case) else []
            yield pytest.param(case, column, id=f"{case}-{column}", marks=marks)


@pytest.mark.parametrize(("case", "column"), list(cells()))
def test_a_cell_is_within_the_bound_of_the_oracle_and_of_every_other_column(case, column):
    skip_unless_run(column, case)
    output(column, case)  # each pair is compared when its later column has run
    cell = parity.compare(column, case, inputs(case), exact(case), outputs(case))
    assert not cell.detail, cell.detail
    assert not fell_back(column), "ran eagerly"
    assert cell.worst <= 1, f"{cell.worst:.3g} x bound from the oracle, {cell.worst_ulp:.3g} ulp"
    assert cell.apart <= 1, f"{cell.apart:.3g} x bound from another column"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "column", [by_name("numpy"), by_name("torch", "compiled"), by_name("jax", "user's jit")], ids=str
)
def test_on_real_logits_no_result_is_off_by_more_than_5e_7_or_0_55_ulp(column, dtype):
    case = Case(dtype, REAL_VOCAB, REAL, (57,))
    skip_unless_run(column, case)
    off = parity.error(output(column, case), exact(case))
    allowed = np.maximum(5e-7, 0.55 * parity.ulp(exact(case)))
    assert (off <= allowed).all(), f"{(off / allowed).max():.3g} times max(5e-7, 0.55 ulp)"


@pytest.mark.parametrize("deviation", [1, 3])
@pytest.mark.parametrize("pieces", [1, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.parametrize("column", RUN_ON_CPU, ids=str)
def test_nine_in_ten_results_on_normal_logits_are_the_rounded_exact_value(column, pieces, deviation):
    same = []
    for piece in range(pieces):
        logits, ids = normal_piece(deviation, piece)
        skip_unless_run(column, Case("float32", 32768, f"normal {deviation}", ids.shape))
        same.append(parity.identical(logprobs_of(column, logits, ids), parity.rounded(exact_piece(deviation, piece))))
    assert np.mean(same) >= 0.9
    assert not fell_back(column)


@lru_cache(maxsize=2)
def normal_piece(deviation, piece, rows=100, vocab=32768):
    rng = np.random.default_rng((deviation, piece))
    logits = rng.standard_normal((rows, vocab), dtype=np.float32) * np.float32(deviation)
    return logits, rng.integers(0, vocab, rows)


@cache
def exact_piece(deviation, piece):
    return parity.reference(*normal_piece(deviation, piece))


def batches():
    for column in RUN_ON_CPU:
        for vocab, dtype in ((1000, "float32"), (1000, "bfloat16"), (50257, "float32"), (50257, "bfloat16")):
            quick = (vocab, dtype) == (50257, "bfloat16") or (
                (column.backend, vocab, dtype) == ("torch", 1000, "float32")
            )
            marks = [] if quick or column.backend not in ("torch", "jax") else [pytest.mark.full]
            yield pytest.param(column, vocab, dtype, id=f"{column}-{vocab}-{dtype}", marks=marks)


@pytest.mark.parametrize(("column", "vocab", "dtype"), list(batches()))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(column, vocab, dtype):
    case = Case(dtype, vocab, "normal 3", (64,))
    skip_unless_run(column, case)
    logits, ids = inputs(case).arrays.values()
    together = bits(logprobs_of(column, logits, ids))
    assert not fell_back(column)
    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(bits(logprobs_of(column, logits[order], ids[order])), together[order])
    for size in (1, 2, 3, 7):
        starts = range(0, 64, size)
        parts = [logprobs_of(column, logits[i : i + size], ids[i : i + size]) for i in starts]
        np.testing.assert_array_equal(bits(np.concatenate(parts)), together, err_msg=f"in batches of {size}")


def logprobs_of(column, logits, ids):
    return column.run("logprob", Inputs({"logits": logits, "ids": ids}))


def bits(out):
    return out.view(np.uint32)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 30.0])
@pytest.mark.parametrize(
    "row",
    [
        [0.0],
        [1.0, 2.0, 3.0],
        [5.0, 5.0, 5.0, 5.0],
        [0.0, -30.0, -40.0],
        [0.0, -np.inf, -3.0],
        [1e4, 1e4 - 2.5, 1e4 + 1.25],
        [-745.0, 745.0, 0.5],
    ],
)
def test_the_oracle_agrees_with_arithmetic_of_50_digits(row, temperature):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(50):
        scaled = [mpmath.mpf(x) / mpmath.mpf(temperature) for x in row]
        total = mpmath.log(mpmath.fsum(mpmath.exp(z) for z in scaled))
        for index, z in enumerate(scaled):
            out = parity.reference(np.array(row), np.array(index), temperature=temperature)
            true = z - total
            if mpmath.isinf(true):
                assert out == -np.inf
            else:
                # 64-bit rounding of z before exp costs |z| units of the last place, below 1e-14 here
                assert abs(mpmath.mpf(float(out)) - true) <= 1e-14 * abs(true) + mpmath.mpf("1e-307")


@pytest.mark.parametrize(
    "transforms",
    [
        {},
        {"temperature": 0.6},
        {"softcap": 30.0, "temperature": 0.6},
        {"softcap": 0.5, "scale": -2.0, "bias": np.array([0.1, -3.0, 2.0])},
        {"bias": np.array([0.0, 1e4, 1e4]), "scale": 0.3},
        {"mask": np.array([True, False, True]), "scale": 3.0},
        {"softcap": 5.0, "mask": np.array([False, True, True]), "bias": np.array([0.0, -np.inf, 0.0])},
    ],
    ids=lambda transforms: " ".join(transforms) or "plain",
)
@pytest.mark.parametrize(
    "row", [[1.0, 2.0, 3.0], [0.0, -np.inf, 0.0], [1e4, 1e4 - 2.5, 1e4 + 1.25], [-90.0, 40.0, 0.5]]
)
def test_the_oracle_of_every_statistic_agrees_with_arithmetic_of_50_digits(row, transforms):
    mpmath = pytest.importorskip("mpmath")
    x, y = np.array(row, np.float64), np.array(row[::-1], np.float64)
    g, of_entropy, of_lse = 0.3, np.array(-1.7), np.array(0.9)
    with mpmath.workdps(50):

        def of_row(values):
            z = [transformed(mpmath, x, n, **transforms) for n, x in enumerate(values)]
            lse = mpmath.log(mpmath.fsum(mpmath.exp(v) for v in z))
            return [v - lse for v in z], lse

        def joint(values):
            logprobs, lse = of_row(values)
            return g * logprobs[2] + of_entropy * entropy(logprobs) + of_lse * lse

        def entropy(logprobs):
            return -mpmath.fsum(mpmath.exp(v) * v for v in logprobs if v != -mpmath.inf)

        p, lse = of_row(row)
        q, _ = of_row(row[::-1])
        support = [(a, b) for a, b in zip(p, q, strict=True) if a != -mpmath.inf]
        kl = mpmath.fsum(mpmath.exp(a) * (a - b) for a, b in support)
        close(mpmath, parity.lse(x, **transforms), lse)
        close(mpmath, parity.entropy(x, **transforms), entropy(p))
        close(mpmath, parity.kl(x, y, **transforms), kl)
        for n, logprob in enumerate(p):
            close(mpmath, parity.reference(x, np.array(n), **transforms), logprob)
        slope = parity.gradient(x, np.array(2), np.array(g), of_entropy=of_entropy, of_lse=of_lse, **transforms)
        for n in range(3):
            if p[2] == -mpmath.inf or row[n] == -np.inf:  # the joint value is infinite, or does not move
                continue
            moved = [joint([mpmath.mpf(v) + step * (m == n) for m, v in enumerate(row)]) for step in (1e-15, -1e-15)]
            # from a central difference of 50 digits, wrong by the step squared
            close(mpmath, slope[n], (moved[0] - moved[1]) / mpmath.mpf(2e-15))


def transformed(mpmath, value, n, temperature=1.0, scale=1.0, softcap=None, bias=None, mask=None):
    if value == -np.inf or (mask is not None and not mask[n]):
        return -mpmath.inf
    z = mpmath.mpf(scale) * mpmath.mpf(value)
    z = z if softcap is None else softcap * mpmath.tanh(z / softcap)
    return (z + (0 if bias is None else mpmath.mpf(bias[n]))) / mpmath.mpf(temperature)


def close(mpmath, out, true):
    if mpmath.isinf(true):
        assert out == float(true)
    else:
        assert abs(mpmath.mpf(float(out)) - true) <= mpmath.mpf(1e-14) * (1 + abs(true))


@pytest.mark.parametrize(
    ("row", "transforms", "ranks", "top"),
    [
        ([3, 5, 3, 2], {}, [2, 1, 2, 4], [1, 0, 2, 3]),
        ([3, 5, 3, 2], {"scale": -1.0}, [2, 4, 2, 1], [3, 0, 2, 1]),
        ([3, 5, 3, 2], {"scale": 0.0}, [1, 1, 1, 1], [0, 1, 2, 3]),
        ([3, -np.inf, 3, 2], {"scale": -1.0}, [2, 4, 2, 1], [3, 0, 2, 1]),
        ([3, 5, 3, 2], {"mask": [True, False, True, True]}, [1, 4, 1, 3], [0, 2, 3, 1]),
        ([3, np.nan, 3, 2], {"mask": [True, False, True, True]}, [1, 4, 1, 3], [0, 2, 3, 1]),
        ([3, 5, 3, 2], {"bias": [1, 0, 2.5, 3]}, [4, 2, 1, 2], [2, 1, 3, 0]),
        ([1e3, 2e3, 3e3, 0], {"softcap": 1.0}, [3, 2, 1, 4], [2, 1, 0, 3]),  # equal when rounded
        ([3, np.nan, 3, 2], {}, [0] * 4, [-1] * 4),
        ([3, np.inf, 3, 2], {"scale": -1.0}, [0] * 4, [-1] * 4),
        ([-np.inf] * 4, {}, [0] * 4, [-1] * 4),
        ([3, 5, 3, 2], {"mask": [False] * 4}, [0] * 4, [-1] * 4),
    ],
    ids=str,
)
def test_the_oracle_orders_by_the_contract(row, transforms, ranks, top):
    x = np.array(row, np.float32)
    assert parity.rank(x, np.arange(4), **transforms).tolist() == ranks
    for count in range(5):
        assert parity.top_ids(x, count, **transforms).tolist() == top[:count]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_oracle_widens_before_it_computes(dtype):
    case = Case(dtype, 130, "normal 10", (5,))
    if reason := case.missing():
        pytest.skip(reason)
    logits, ids = case.inputs().arrays.values()
    wide = parity.reference(logits.astype(np.float64), ids, temperature=0.7)
    np.testing.assert_array_equal(parity.reference(logits, ids, temperature=0.7), wide)


def test_the_oracle_takes_k_ids_and_a_temperature_per_position():
    logits, ids = Case("float64", 7, "normal 3", (2, 3), ids_per_position=4).inputs().arrays.values()
    temperature = np.linspace(0.5, 2.0, 6).reshape(2, 3)
    out = parity.reference(logits, ids, temperature=temperature)
    assert out.shape == (2, 3, 4)
    for at in np.ndindex(2, 3, 4):
        alone = parity.reference(logits[at[:2]], ids[at], temperature=temperature[at[:2]])
        np.testing.assert_allclose(out[at], alone, rtol=1e-15)


@pytest.mark.parametrize(
    "row", [[np.nan, 0.0, 1.0], [np.inf, 0.0, 1.0], [np.inf, np.inf, 0.0], [-np.inf, -np.inf, -np.inf]]
)
def test_the_oracle_gives_nan_for_that_row_alone(row):
    logits = np.array([[0.0, 1.0, 2.0], row, [-np.inf, 0.0, 0.0]])
    out = parity.reference(np.repeat(logits, 3, axis=0), np.tile(np.arange(3), 3)).reshape(3, 3)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all()
    assert out[2, 0] == -np.inf


@pytest.mark.parametrize("bad", [-1, 3, 2**32 + 1])
def test_the_oracle_refuses_an_id_outside_the_vocabulary(bad):
    with pytest.raises(IndexError, match="ids lie in"):
        parity.reference(np.zeros((2, 3)), np.array([0, bad]))


@pytest.mark.parametrize(
    ("value", "dtype", "allowed"),
    [
        (0.0, np.float32, 1e-6),
        (-1.0, np.float32, 1e-6),
        (-20.0, np.float32, 2.0**-19),
        (-1e-3, np.float32, 1e-6),
        (-9e-4, np.float32, 9e-9),
        (-1e-30, np.float32, 1e-35),
        (-9e-31, np.float32, 1e-6),
        (-0.5, np.float64, 1e-12),
        (-1e4, np.float64, 1e-8),
    ],
)
def test_the_bound_is_the_contracts(value, dtype, allowed):
    np.testing.assert_allclose(parity.bound(np.array(value), dtype), allowed, rtol=1e-12)


@pytest.mark.parametrize(
    ("quantity", "value", "dtype", "allowed"),
    [
        ("lse", -9e-4, np.float32, 1e-6),  # there are no confident tokens
        ("lse", 20.0, np.float32, 2.0**-19),
        ("entropy", 1e-4, np.float32, 1e-6),
        ("entropy", 11.5, np.float32, 1.15e-5),
        ("KL", 30.0, np.float32, 3e-5),
        ("KL", 30.0, np.float64, 3e-11),
    ],
)
def test_the_bound_of_other_statistics_is_the_contracts(quantity, value, dtype, allowed):
    np.testing.assert_allclose(parity.bound(np.array(value), dtype, quantity), allowed, rtol=1e-12)


@pytest.mark.parametrize("quantity", ["rank", "top ids"])
def test_ranks_and_top_ids_are_equal_or_wrong(quantity):
    case = Case("float32", 7, "ties", (3,), quantity=quantity)
    columns = [
        Column(name, "eager", "cpu", lambda _, quantity, given, off=off: parity.exact(quantity, given) + off)
        for name, off in (("right", 0), ("off by one", 1))
    ]
    cells = measure(*columns, rows=[case])
    assert [(cells[name].status, cells[name].worst) for name in ("right", "off by one")] == [("FAIL", 0), ("FAIL", 2)]
    assert measure(columns[0], rows=[case])["right"].status == "ok"


@pytest.mark.parametrize(
    ("out", "true", "off"),
    [
        (-np.inf, -np.inf, 0),
        (np.nan, np.nan, 0),
        (-0.0, 0.0, 0),
        (-np.inf, -1e39, 0),  # beyond float32
        (np.float32(-3.4e38), -1e39, np.inf),
        (-np.inf, -1.0, np.inf),
        (np.nan, -np.inf, np.inf),
        (-1.0, np.nan, np.inf),
        (np.inf, -np.inf, np.inf),
        (-1.5, -1.0, 0.5),
    ],
)
def test_infinities_and_nans_must_agree_exactly(out, true, off):
    assert parity.error(np.array(out, np.float32), np.array(true)) == off


@pytest.mark.parametrize("case", parity.cases(), ids=str)
def test_a_case_is_what_its_name_says(case):
    if reason := case.missing():
        pytest.skip(reason)
    arrays, numbers, upstream = inputs(case)
    logits, ids = arrays["logits"], arrays["ids"]
    assert logits.shape == (*case.shape, case.vocab)
    assert logits.dtype.name == case.dtype
    assert ids.shape == (case.shape if case.ids_per_position is None else (*case.shape, case.ids_per_position))
    assert [g.shape for g in upstream] == [ids.shape, case.shape, case.shape][: len(upstream)]
    assert {*arrays, *numbers} - {"logits", "ids", "temperature", "ref_logits"} == {
        "mask" if "mask" in name else name.split()[0] for name in case.transforms
    }
    if case.quantity == "logprob":
        unsupported = np.isnan(exact(case)).any()
        nothing_kept = "masked" in case.distribution or "mask" in case.transforms
        assert case.distribution == "NaN and +inf" or nothing_kept if unsupported else np.isfinite(exact(case)).any()
    # the same again: nothing depends on the order in which cases are made
    for name, array in case.inputs().arrays.items():
        assert array.tobytes() == arrays[name].tobytes()


def test_every_dtype_vocabulary_and_distribution_is_in_the_matrix():
    seen = {(case.dtype, case.vocab, case.distribution) for case in parity.cases()}
    for dtype in parity.DTYPES:
        for vocab in parity.VOCABS:
            assert {(dtype, vocab, name) for name in parity.DISTRIBUTIONS} <= seen
    assert {("bfloat16", REAL_VOCAB, REAL), ("float32", REAL_VOCAB, REAL)} <= seen


def test_where_torch_and_a_compiler_are_there_the_compiled_column_runs():
    pytest.importorskip("torch", reason="torch is not installed")
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler")
    assert by_name("torch", "compiled").available() is None


@pytest.mark.parametrize("column", RUN_ON_CPU, ids=str)
def test_where_its_library_is_installed_a_cpu_column_runs(column):
    library = column.backend.replace("-", "_")
    pytest.importorskip(library, reason=f"{library} is not installed")
    if column.execution != "compiled":
        assert column.available() is None


SMALL = Case("float32", 7, "normal 1", (3,))
ORACLE = Column("oracle", "eager", "cpu", lambda _, quantity, given: parity.exact(quantity, given).astype("f4"))
LATE = Column("late", "eager", "cpu", lambda _, quantity, given: ORACLE.run(quantity, given) + np.float32(3e-6))
NARROW = Column("narrow", "eager", "cpu", lambda _, quantity, given: ORACLE.run(quantity, given).astype("f2"))
RAISES = Column("raises", "eager", "cpu", lambda _, quantity, given: given.arrays["logits"][99])
PEER = Column("late peer", "eager", "cpu", LATE.compute, peer=True)
NO_DEVICE = Column("jax", "compiled", "tpu", ORACLE.compute)


def measure(*columns, rows=(SMALL,)):
    return {cell.column.backend: cell for cell in parity.measure(columns=columns, rows=rows)}


def test_a_column_off_by_three_bounds_fails_and_so_does_its_distance_from_the_others():
    cells = measure(ORACLE, LATE)
    assert cells["late"].status == "FAIL"
    assert cells["late"].worst == pytest.approx(3, rel=0.2)
    assert cells["late"].identical == 0
    assert cells["oracle"].worst < 1 < cells["oracle"].apart


@pytest.mark.parametrize(("column", "said"), [(NARROW, "float16"), (RAISES, "IndexError")], ids=str)
def test_a_wrong_dtype_or_an_exception_is_a_failure_that_says_which(column, said):
    cell = measure(ORACLE, column)[column.backend]
    assert (cell.status, said in cell.detail) == ("FAIL", True)


def test_a_peer_is_shown_and_binds_nobody():
    case = Case("float32", 50257, "normal 1", (3,))
    cells = measure(ORACLE, PEER, rows=[case])
    assert cells["late peer"].status == "peer"
    assert cells["late peer"].worst > 1
    assert cells["oracle"].status == "ok"


def test_a_device_that_is_not_there_is_reported_as_not_run_here():
    pytest.importorskip("jax", reason="jax is not installed")
    cells = parity.measure(columns=(ORACLE, NO_DEVICE), rows=[SMALL])
    assert cells[1].status == "not run here: no TPU device"
    assert "jax compiled tpu: not run here: no TPU device" in shown(cells)


def test_without_the_real_logits_the_table_says_so(monkeypatch, tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    monkeypatch.setattr(distributions, "REAL_FILE", tmp_path / "absent")
    cells = parity.measure(columns=(ORACLE,), rows=[SMALL, Case("bfloat16", REAL_VOCAB, REAL, (57,))])
    assert "SmolLM2 bfloat16: not run here: the SmolLM2 logits are in the repository" in shown(cells)


def test_the_table_has_a_row_per_distribution_and_dtype_and_a_column_per_backend():
    rows = [SMALL, Case("float32", 130, "normal 1", (3,)), Case("float64", 7, "equal", (3,))]
    text = shown(parity.measure(columns=(ORACLE, LATE), rows=rows))
    assert text.count("│ normal 1 float32 ") == 1
    assert text.count("│ equal float64 ") == 1
    assert "oracle eager cpu" in text
    assert "FAIL late eager cpu, normal 1 float32 3x7 T=1.0" in text


def shown(cells):
    rich = pytest.importorskip("rich.console", reason="rich is not installed")
    console = rich.Console(width=200, file=io.StringIO())
    console.print(parity.table(cells))
    return console.file.getvalue()


def test_the_json_is_strict_and_carries_versions_device_and_date():
    cells = parity.measure(columns=(ORACLE, RAISES), rows=[SMALL])
    document = json.loads(parity.to_json(cells), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {"numpy", "python"} <= set(document["versions"])
    assert document["date"].startswith("20")
    assert document["device"]["cpu"]
    fine, failed = document["cells"]
    assert (fine["status"], fine["backend"], fine["vocab"], fine["dtype"]) == ("ok", "oracle", 7, "float32")
    assert (failed["status"], failed["worst"]) == ("FAIL", "nan")


def test_progress_is_told_after_each_case():
    told = []
    parity.measure(columns=(ORACLE,), rows=[SMALL] * 3, progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_peers_are_measured_on_the_real_logits(peer):
    case = Case("bfloat16", REAL_VOCAB, REAL, (57,))
    skip_unless_run(peer, case)
    (cell,) = parity.measure(columns=(peer,), rows=[case])
    assert (cell.status, cell.detail) == ("peer", "")
    assert np.isfinite(cell.worst)  # the same quantity, if not to the same accuracy


def test_the_module_imports_with_numpy_alone():
    absent = ("torch", "jax", "ml_dtypes", "safetensors", "rich", "array_api_strict", "mpmath")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import xlogprobs.parity as p; p.cases()"
    subprocess.run([sys.executable, "-c", code], check=True)
