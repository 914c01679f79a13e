"""Stored logits: every format read in pieces, scored as in memory, written whole or not at all."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xlogprobs import TokenStats, logprobs, scoring, token_stats
from xlogprobs.scoring import Scores, check_output, score, write_scores
from xlogprobs.stored import InputError, MappedTensor, open_logits

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy comes from ml_dtypes")
safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="the files are made with safetensors")

SMOLLM2 = Path(__file__).parent / "data" / "smollm2.safetensors"
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
FORMATS = ("safetensors", "npz", "npz compressed", "npy")
WANTED = ("logprob", "entropy", "lse", "rank")
ZEROS = Scores(TokenStats(np.zeros(3, np.float32)), np.arange(3), np.zeros(3, bool))
READABLE = [(kind, dtype) for kind in FORMATS for dtype in DTYPES if dtype != "bfloat16" or kind == "safetensors"]


def make(shape=(2, 5, 37), dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal(shape)).astype(DTYPES[dtype])
    return logits, rng.integers(0, shape[-1], shape[:-1])


def store(folder, kind, logits, ids, metadata=None):
    """Write a file and return the arguments of `open_logits`."""
    if kind == "npy":
        np.save(folder / "logits.npy", logits)
        np.save(folder / "ids.npy", ids)
        return folder / "logits.npy", folder / "ids.npy"
    path = folder / f"stored.{kind.split()[0]}"
    if kind == "safetensors":
        safetensors_numpy.save_file({"logits": np.asarray(logits, order="C"), "ids": ids}, path, metadata)
        return (path,)
    extra = {"metadata": np.array(json.dumps(metadata))} if metadata else {}
    (np.savez_compressed if "compressed" in kind else np.savez)(path, logits=logits, ids=ids, **extra)
    return (path,)


def exact(logits, ids, temperature=1.0, scale=1.0, softcap=None, top_k=0):
    """All statistics in float64, by log1p of everything but one maximum."""
    z = logits.astype(np.float64) * scale
    z = (z if softcap is None else softcap * np.tanh(z / softcap)) / temperature
    top = z.argmax(-1, keepdims=True)
    shifted = z - np.take_along_axis(z, top, -1)
    rest = np.exp(shifted)
    np.put_along_axis(rest, top, 0.0, -1)
    log_rest = np.log1p(rest.sum(-1))
    logprob = shifted - log_rest[..., None]
    own = np.take_along_axis(logprob, ids[..., None], -1)
    entropy = log_rest - (rest * shifted).sum(-1) / (1 + rest.sum(-1))
    lse = np.take_along_axis(z, top, -1)[..., 0] + log_rest
    top_ids = np.argsort(-z, axis=-1, kind="stable")[..., :top_k]
    rank = 1 + (logprob > own).sum(-1)
    return TokenStats(own[..., 0], entropy, lse, rank, np.take_along_axis(logprob, top_ids, -1), top_ids)


def assert_within_bound(found, reference):
    for name, out, expected in zip(TokenStats._fields, found, reference, strict=True):
        if name in ("rank", "top_ids"):
            np.testing.assert_array_equal(out, expected, strict=True)
        else:
            assert within_bound(out, expected), name


def within_bound(out, reference):
    return np.all(np.abs(out - reference) <= np.maximum(1e-6, np.spacing(np.abs(reference).astype(np.float32))))


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of two rows or so, that end in the middle of a sequence."""
    monkeypatch.setattr(scoring, "PIECE_BYTES", 37 * 2 * 6)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("kind", "dtype"), READABLE)
def test_every_format_and_dtype_gives_the_exact_value(tmp_path, kind, dtype):
    logits, ids = make(dtype=dtype)
    scores = score(open_logits(*store(tmp_path, kind, logits, ids)), want=WANTED, top_k=4)
    for values in (scores.stats.logprob, scores.stats.entropy, scores.stats.lse, scores.stats.top_logprobs):
        assert values.dtype == (np.float64 if dtype == "float64" else np.float32)
    np.testing.assert_array_equal(scores.ids, ids)
    assert_within_bound(scores.stats, exact(logits, ids, top_k=4))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("kind", "dtype"), READABLE)
def test_pieces_have_the_same_bits_as_the_whole(tmp_path, kind, dtype):
    logits, ids = make(dtype=dtype)
    scores = score(open_logits(*store(tmp_path, kind, logits, ids)), want=WANTED, top_k=4)
    for found, whole in zip(scores.stats, token_stats(logits, ids, top_k=4), strict=True):
        np.testing.assert_array_equal(found, whole, strict=True)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["npz", "npz compressed", "npy"])
@pytest.mark.parametrize("layout", ["fortran order", "big-endian"])
def test_layouts_of_numpy_files_are_read_in_c_order(tmp_path, kind, layout):
    logits, ids = make()
    laid_out = np.asfortranarray(logits) if layout == "fortran order" else logits.astype(">f4")
    scores = score(open_logits(*store(tmp_path, kind, laid_out, np.asfortranarray(ids).astype(">i4"))))
    np.testing.assert_array_equal(scores.stats.logprob, logprobs(logits, ids))
    np.testing.assert_array_equal(scores.ids, ids)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(7,), (0, 7), (3, 0, 7), (2, 1, 3, 7)])
def test_any_rank_and_empty_batches_are_read(tmp_path, kind, shape):
    logits, ids = make(shape)
    scores = score(open_logits(*store(tmp_path, kind, logits, ids)), want=WANTED, top_k=2)
    for found, whole in zip(scores.stats, token_stats(logits, ids, top_k=2), strict=True):
        np.testing.assert_array_equal(found, whole, strict=True)
    assert scores.positions == ids.size


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "ids_dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
)
def test_ids_are_read_in_every_integer_dtype(tmp_path, kind, ids_dtype):
    logits, ids = make()
    stored = open_logits(*store(tmp_path, kind, logits, ids.astype(ids_dtype)))
    np.testing.assert_array_equal(stored.ids, ids.astype(ids_dtype), strict=True)
    np.testing.assert_array_equal(score(stored).stats.logprob, logprobs(logits, ids))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("backend", "module"), [("torch", "torch"), ("jax", "jax"), ("array-api", "array_api_strict")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_agree_with_numpy_on_stored_logits(tmp_path, backend, module, dtype):
    pytest.importorskip(module, reason=f"{module} is not installed")
    logits, ids = make(dtype=dtype)
    stored = open_logits(*store(tmp_path, "safetensors", logits, ids))
    scores = score(stored, want=WANTED, top_k=3, backend=backend, temperature=0.7)
    limit = 1e-12 if dtype == "float64" else 1e-6
    for found, reference in zip(scores.stats, exact(logits, ids, 0.7, top_k=3), strict=True):
        kind = reference.dtype if reference.dtype.kind == "i" or dtype == "float64" else np.float32
        assert found.dtype == kind
        np.testing.assert_allclose(found, reference, rtol=limit, atol=limit)


def test_real_logits_are_scored_within_the_bound():
    stored = open_logits(SMOLLM2)
    whole = safetensors_numpy.load_file(SMOLLM2)
    scores = score(stored, want=WANTED, top_k=5)
    reference = exact(whole["logits"], whole["ids"], top_k=5)
    assert_within_bound(scores.stats, reference)
    assert scores.sum == pytest.approx(reference.logprob.sum(), abs=1e-5)
    assert scores.perplexity == pytest.approx(np.exp(-reference.logprob.mean()), rel=1e-6)
    assert scores.mean_entropy == pytest.approx(reference.entropy.mean(), abs=1e-6)
    assert scores.greedy_share == np.mean(reference.rank == 1)
    assert len(stored.tokens()) == scores.positions == 57


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "transforms",
    [{"temperature": 0.25}, {"scale": -0.5}, {"softcap": 2.0}, {"temperature": 0.6, "scale": 1.5, "softcap": 5.0}],
)
def test_every_statistic_is_of_the_transformed_logits(tmp_path, transforms):
    logits, ids = make()
    scores = score(open_logits(*store(tmp_path, "npy", logits, ids)), want=WANTED, top_k=3, **transforms)
    assert_within_bound(scores.stats, exact(logits, ids, top_k=3, **transforms))


@pytest.mark.parametrize("want", [(), ("entropy",), ("lse", "rank"), WANTED])
@pytest.mark.parametrize("top_k", [0, 2])
def test_what_is_not_asked_for_is_none(tmp_path, want, top_k):
    scores = score(open_logits(*store(tmp_path, "npy", *make())), want=want, top_k=top_k)
    found = {name for name, values in scores.stats._asdict().items() if values is not None}
    assert found == {*want, *(("top_ids", "top_logprobs") if top_k else ())}
    assert {scores.sum is None, scores.mean is None, scores.perplexity is None} == {"logprob" not in want}
    assert (scores.mean_entropy is None) == ("entropy" not in want)
    assert (scores.greedy_share is None) == ("rank" not in want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"temperature": value}, f"temperature is {value}; expected finite and positive") for value in (0.0, -1.0)),
        *(({"temperature": value}, f"temperature is {value}; expected finite") for value in (math.nan, math.inf)),
        ({"softcap": 0.0}, "softcap is 0.0; expected finite and positive"),
        ({"scale": math.inf}, "scale is inf; expected finite"),
        ({"want": ["logprob", "ranks"]}, "want has 'ranks'; expected any of 'logprob', 'entropy', 'lse', 'rank'"),
        ({"top_k": 38}, r"top_k is 38; logits of shape \(2, 5, 37\) take a top_k from 0 to 37"),
        ({"top_k": -1}, "top_k is -1; "),
    ],
)
def test_an_option_that_does_not_fit_is_refused_before_any_work(tmp_path, options, message):
    def progress(done, total):
        pytest.fail("logits were read")

    with pytest.raises(InputError, match=message):
        score(open_logits(*store(tmp_path, "npy", *make())), progress=progress, **options)


def test_ignored_positions_count_for_nothing(tmp_path):
    logits, ids = make()
    ids[0, 1] = ids[1, 4] = -100
    logits[0, 1] = np.nan
    ids[1, 0] = logits[1, 0].argmax()
    scores = score(open_logits(*store(tmp_path, "npz", logits, ids)), want=WANTED, top_k=2, ignore_index=-100)
    kept = ids != -100
    np.testing.assert_array_equal(scores.ignored, ~kept)
    for name, values in scores.stats._asdict().items():
        assert (values[~kept] == (-1 if name == "top_ids" else 0)).all(), name
    reference = exact(logits[kept], ids[kept])
    assert scores.positions == 8
    assert scores.sum == pytest.approx(reference.logprob.sum(), abs=1e-5)
    assert scores.mean == pytest.approx(reference.logprob.mean(), abs=1e-6)
    assert scores.perplexity == pytest.approx(np.exp(-reference.logprob.mean()), rel=1e-6)
    assert scores.mean_entropy == pytest.approx(reference.entropy.mean(), abs=1e-6)
    assert scores.greedy_share == np.mean(reference.rank == 1) > 0


def test_without_positions_the_mean_is_nan(tmp_path):
    logits, ids = make()
    scores = score(open_logits(*store(tmp_path, "npz", logits, np.full_like(ids, -1))), want=WANTED, ignore_index=-1)
    assert (scores.positions, scores.sum) == (0, 0.0)
    assert np.isnan([scores.mean, scores.perplexity, scores.mean_entropy, scores.greedy_share]).all()


def test_a_perplexity_beyond_float64_is_infinite():
    scores = Scores(TokenStats(np.array([-1e4, -np.inf])), np.array([0, 1]), np.array([False, False]))
    assert scores.perplexity == np.inf


@pytest.mark.parametrize(("wrong", "advice"), [(37, ""), (-100, "; to leave such positions out: --ignore-index -100")])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path, wrong, advice):
    logits, ids = make()
    ids[1, 3] = wrong
    with pytest.raises(InputError) as error:
        score(open_logits(*store(tmp_path, "safetensors", logits, ids)))
    assert str(error.value).endswith(f"ids[1, 3] is {wrong}, outside [0, 37){advice}")


def test_progress_counts_the_rows_up_to_all(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "PIECE_BYTES", 4 * 37 * 4)
    seen = []
    score(open_logits(*store(tmp_path, "npz", *make())), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 10), (8, 10), (10, 10)]


@pytest.mark.parametrize("kind", ["npz", "npz compressed", "npy"])
def test_bfloat16_that_numpy_stored_as_raw_bytes_is_refused(tmp_path, kind):
    logits, ids = make(dtype="bfloat16")
    with pytest.raises(InputError, match=r"cannot name bfloat16\. Store bfloat16 logits as \.safetensors"):
        open_logits(*store(tmp_path, kind, logits, ids))


@pytest.mark.parametrize("kind", FORMATS)
def test_ids_of_another_shape_are_refused_with_the_shape_they_should_have(tmp_path, kind):
    logits, ids = make()
    with pytest.raises(InputError, match=r"ids have shape \(2, 4\); .* \(2, 5, 37\) take ids of shape \(2, 5\)"):
        open_logits(*store(tmp_path, kind, logits, np.ascontiguousarray(ids[:, :4])))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("logits", "ids", "message"),
    [
        (np.zeros((2, 3), np.int32), np.zeros(2, np.int64), "logits are int32; expected float16, bfloat16"),
        (np.zeros((2, 3), np.float32), np.zeros(2, np.float32), "ids are float32; expected integers"),
        (np.zeros((2, 0), np.float32), np.zeros(2, np.int64), r"expected \(..., V\) with V at least 1"),
        (np.array(0.0, np.float32), np.array(0), r"expected \(..., V\) with V at least 1"),
    ],
)
def test_dtypes_and_shapes_that_do_not_fit_are_refused(tmp_path, kind, logits, ids, message):
    with pytest.raises(InputError, match=message):
        open_logits(*store(tmp_path, kind, logits, ids))


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_missing_names_are_listed_beside_those_found(tmp_path, kind):
    path = tmp_path / f"other.{kind}"
    arrays = {"logits": np.zeros((2, 3), np.float32), "labels": np.zeros(2, np.int64)}
    if kind == "npz":
        np.savez(path, **arrays)
    else:
        safetensors_numpy.save_file(arrays, path)
    with pytest.raises(InputError) as error:
        open_logits(path)
    message = str(error.value)
    assert "has no `ids`; it holds" in message
    assert "logits float32 (2, 3)" in message
    assert "labels int64 (2,)" in message


def test_tensors_of_other_dtypes_beside_the_logits_do_no_harm(tmp_path):
    torch = pytest.importorskip("torch", reason="torch writes the dtypes that NumPy has not")
    from safetensors.torch import save_file

    logits, ids = make()
    scales = torch.ones(3, dtype=torch.float8_e4m3fn)
    save_file(
        {"logits": torch.from_numpy(logits), "ids": torch.from_numpy(ids), "scales": scales}, tmp_path / "a.safetensors"
    )
    np.testing.assert_array_equal(score(open_logits(tmp_path / "a.safetensors")).stats.logprob, logprobs(logits, ids))
    save_file({"logits": scales, "ids": torch.zeros((), dtype=torch.int64)}, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match="logits are F8_E4M3; expected float16"):
        open_logits(tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.npz",), "there is no file"),
        ((".",), "is a folder"),
        (("logits.npy",), "name the file with its ids, --ids ids.npy"),
        (("logits.npy", "nothing.npy"), "there is no file nothing.npy"),
        (("stored.npz", "ids.npy"), "--ids goes with logits in a .npy file"),
        (("logits.txt",), "expected a .safetensors, .npz or .npy file"),
    ],
)
def test_files_that_cannot_be_meant_are_refused(tmp_path, monkeypatch, arguments, message):
    store(tmp_path, "npy", *make())
    store(tmp_path, "npz", *make())
    (tmp_path / "logits.txt").write_text("0.5")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        open_logits(*arguments)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("kept", [0, 5, 12, 100, 1400])
def test_a_file_cut_short_is_refused(tmp_path, kind, kept):
    path, *ids = store(tmp_path, kind, *make((2, 5, 37), "float32"))
    data = path.read_bytes()
    assert kept < len(data)
    path.write_bytes(data[:kept])
    with pytest.raises(InputError, match=path.name):
        score(open_logits(path, *ids))


@pytest.mark.parametrize("kind", FORMATS)
def test_bytes_of_something_else_are_refused(tmp_path, kind):
    path, *ids = store(tmp_path, kind, *make())
    path.write_bytes(b"\x10\0\0\0\0\0\0\0" + b"not a tensor at all, whatever its name may say")
    with pytest.raises(InputError, match="is not a"):
        open_logits(path, *ids)


def test_a_damaged_compressed_member_is_named(tmp_path):
    (path,) = store(tmp_path, "npz compressed", *make((50, 37)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"logits\.npy is damaged"):
        score(open_logits(path))


def written(folder, scores, suffix):
    """What a file of scores holds: arrays and metadata, or a list of the lines' fields."""
    out = folder / f"out.{suffix}"
    write_scores(out, scores)
    if suffix == "safetensors":
        from safetensors import safe_open

        with safe_open(out, "np") as file:
            return file.get_tensors(), file.metadata()
    if suffix == "npz":
        with np.load(out) as file:
            arrays = dict(file)
        return arrays, json.loads(str(arrays.pop("metadata")))
    with out.open(encoding="utf-8", newline="") as file:
        return [json.loads(line) for line in file] if suffix == "jsonl" else list(csv.reader(file))


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(7,), (0, 7), (2, 5, 7)])
@pytest.mark.parametrize(("want", "top_k"), [(("logprob",), 0), (("rank", "entropy", "lse"), 3)])
def test_written_arrays_read_back_with_the_metadata(tmp_path, suffix, dtype, shape, want, top_k):
    logits, ids = make(shape, dtype)
    metadata = {"tokens": json.dumps([f"tok {i}" for i in range(ids.size)]), "model": "none"}
    scores = score(open_logits(*store(tmp_path, suffix, logits, ids, metadata)), want=want, top_k=top_k)
    assert scores.metadata == metadata
    back, kept = written(tmp_path, scores, suffix)
    assert kept == metadata
    expected = {name: values for name, values in scores.stats._asdict().items() if values is not None}
    if "logprob" in want:
        expected["logprobs"] = expected.pop("logprob")
    assert back.keys() == {"ids", *expected}
    for name, values in {"ids": ids, **expected}.items():
        np.testing.assert_array_equal(back[name], values, strict=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(7,), (0, 7), (4, 7), (0, 3, 7), (2, 5, 7)])
@pytest.mark.parametrize(("want", "top_k"), [(("logprob",), 0), (("rank", "entropy", "lse"), 3)])
def test_lines_of_csv_and_jsonl_hold_every_value_of_a_token(tmp_path, dtype, shape, want, top_k):
    logits, ids = make(shape, dtype)
    texts = [f"tok {i}" for i in range(ids.size)]
    stored = open_logits(*store(tmp_path, "npz", logits, ids, {"tokens": json.dumps(texts)} if shape[0] else None))
    scores = score(stored, want=want, top_k=top_k)
    lines = written(tmp_path, scores, "jsonl")
    header, *rows = written(tmp_path, scores, "csv")
    places = list(np.ndindex(ids.shape))
    assert len(rows) == len(lines) == len(places)
    named = [dict(zip(header, row, strict=True)) for row in rows]
    axes = len(ids.shape)
    fields = {"id": ids, **{name: values for name, values in scores.stats._asdict().items() if values is not None}}
    for i, (place, line, row) in enumerate(zip(places, lines, named, strict=True)):
        assert line.pop("position") == (list(place) if axes > 1 else i)
        indices = [row.pop(f"position_{axis + 1}") for axis in range(axes)] if axes > 1 else [row.pop("position")]
        assert indices == [str(index) for index in place or (0,)]
        assert line.pop("token") == row.pop("token") == texts[i]
        assert line.keys() == fields.keys()
        for name, values in fields.items():
            kind = float if values.dtype.kind == "f" else int
            single = name.removesuffix("s")
            many = name.startswith("top")
            cells = [row.pop(f"{single}_{k + 1}") for k in range(top_k)] if many else row.pop(name)
            assert not {type(entry) for entry in np.ravel(line[name]).tolist()} - {kind}
            for found in (line[name], [kind(cell) for cell in cells] if many else kind(cells)):
                np.testing.assert_array_equal(np.array(found, values.dtype), values[place])
        assert row == {}


def test_an_empty_csv_has_its_header(tmp_path):
    scores = score(open_logits(*store(tmp_path, "npy", *make((0, 3, 7)))), want=["rank"], top_k=2)
    header = "position_1,position_2,id,rank,top_logprob_1,top_logprob_2,top_id_1,top_id_2"
    assert written(tmp_path, scores, "csv") == [header.split(",")]
    assert written(tmp_path, scores, "jsonl") == []


def test_floats_are_written_in_the_fewest_digits_that_give_them_back(tmp_path):
    logprob = np.array([-0.1, -1e-30, 0.0, -16777216.0], np.float32)
    scores = Scores(TokenStats(logprob), np.arange(4), np.zeros(4, bool))
    digits = ["-0.1", "-1e-30", "0.0", "-16777216.0"]
    assert [row[-1] for row in written(tmp_path, scores, "csv")[1:]] == digits
    assert [line["logprob"] for line in written(tmp_path, scores, "jsonl")] == [float(text) for text in digits]


def test_special_values_and_ignored_positions_have_spellings_of_their_own(tmp_path):
    values = np.array([np.nan, np.inf, -np.inf, 0.0], np.float32)
    top = TokenStats(values, rank=np.array([0, 2, 3, 0]), top_ids=np.full((4, 2), -1))
    scores = Scores(top, np.array([1, 2, 3, -100]), np.array([False, False, False, True]))
    rows = written(tmp_path, scores, "csv")
    assert rows[0] == ["position", "id", "logprob", "rank", "top_id_1", "top_id_2"]
    assert [row[2] for row in rows[1:]] == ["NaN", "inf", "-inf", ""]
    assert rows[4] == ["3", "-100", "", "", "", ""]
    text = (tmp_path / "out.csv").read_text()
    read = np.genfromtxt(text.splitlines(), delimiter=",", names=True)
    np.testing.assert_array_equal(read["logprob"], [np.nan, np.inf, -np.inf, np.nan])
    lines = written(tmp_path, scores, "jsonl")
    assert lines[3] == {"position": 3, "id": -100, "logprob": None, "rank": None, "top_ids": [None, None]}
    np.testing.assert_array_equal([line["logprob"] for line in lines[:3]], values[:3])
    spelled = [line.split('"logprob": ')[1].split(",")[0] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert spelled == ["NaN", "Infinity", "-Infinity", "null"]


def test_any_text_of_a_token_comes_back(tmp_path):
    texts = ["\n", "\r", "a,b", '"', "", " é ", "\u2028", "=1+1"]
    scores = Scores(TokenStats(np.zeros(8)), np.arange(8), np.zeros(8, bool), texts)
    assert [row[2] for row in written(tmp_path, scores, "csv")[1:]] == texts
    assert [line["token"] for line in written(tmp_path, scores, "jsonl")] == texts
    half = Scores(TokenStats(np.zeros(1)), np.arange(1), np.zeros(1, bool), ["\ud83d"])
    assert written(tmp_path, half, "csv")[1][2] == "\\ud83d"
    assert written(tmp_path, half, "jsonl")[0]["token"] == "\ud83d"


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "csv", "jsonl"])
@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, suffix, failure, step):
    out = tmp_path / f"out.{suffix}"
    out.write_bytes(b"old")

    def fail(*_):
        raise failure

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(failure)):
        write_scores(out, ZEROS)
    assert out.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [out.name]


def test_output_is_as_readable_as_any_new_file(tmp_path):
    out, other = tmp_path / "out.safetensors", tmp_path / "other"
    write_scores(out, ZEROS)
    other.touch()
    assert out.stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("out.txt", "ends in .safetensors, .npz, .csv or .jsonl"),
        ("nowhere/out.npz", "there is no folder"),
        ("folder.npz", "is a folder"),
        ("stored.npz", "would overwrite an input"),
        ("link.npz", "would overwrite an input"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_beforehand(tmp_path, output, message):
    (source,) = store(tmp_path, "npz", *make())
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "link.npz").symlink_to(source)
    with pytest.raises(InputError, match=message):
        check_output(tmp_path / output, source)


@pytest.mark.parametrize("tokens", ['["a", "b"]', '{"a": 1}', "no json", "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]", "null"])
def test_tokens_that_do_not_match_the_ids_are_refused(tmp_path, tokens):
    stored = open_logits(*store(tmp_path, "safetensors", *make(), {"tokens": tokens}))
    with pytest.raises(InputError, match="`tokens` is not a JSON list of 10 strings"):
        stored.tokens()


@pytest.mark.parametrize("nested", [False, True])
def test_tokens_may_be_flat_or_nested_as_the_ids(tmp_path, nested):
    tokens = [[f"{b}.{s}" for s in range(5)] for b in range(2)]
    flat = [token for row in tokens for token in row]
    stored = open_logits(*store(tmp_path, "npz", *make(), {"tokens": json.dumps(tokens if nested else flat)}))
    assert stored.tokens() == flat


def test_a_chunk_is_a_map_of_the_file_and_not_a_copy(tmp_path):
    logits, _ = make()
    np.save(tmp_path / "a.npy", logits)
    tensor = MappedTensor(tmp_path / "a.npy", logits.dtype, logits.shape, 128)
    chunks = list(tensor.chunks(100))
    np.testing.assert_array_equal(np.concatenate(chunks), logits.reshape(-1))
    assert not any(chunk.flags.owndata or chunk.flags.writeable for chunk in chunks)


MEMORY = """
import sys
from xlogprobs.scoring import score
from xlogprobs.stored import open_logits
scores = score(open_logits(*sys.argv[1:]), want=["logprob", "entropy", "lse", "rank"], top_k=5)
assert not {"torch", "jax"} & set(sys.modules)
with open("/proc/self/status") as status:
    (peak,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(scores.positions, peak)
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM is in Linux's /proc")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("safetensors", "bfloat16"),
        ("safetensors", "float32"),
        ("npz", "float32"),
        ("npz compressed", "float32"),
        ("npy", "float32"),
    ],
)
def test_memory_is_bounded_whatever_the_size_of_the_file(tmp_path, kind, dtype):
    vocab = 131072
    rows = (400 << 20) // (vocab * np.dtype(DTYPES[dtype]).itemsize)
    logits = np.broadcast_to(make((vocab,), dtype)[0], (rows, vocab))
    path, *ids = store(tmp_path, kind, logits, np.zeros(rows, np.int64))
    run = subprocess.run([sys.executable, "-c", MEMORY, path, *ids], capture_output=True, text=True, check=True)
    positions, peak = map(int, run.stdout.split())
    assert positions == rows
    assert peak < 200 << 10
