"""Stored logits: every format read in pieces, scored as in memory, written whole or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xlogprobs import logprobs, scoring
from xlogprobs.scoring import Scores, check_output, score, write_scores
from xlogprobs.stored import InputError, MappedTensor, open_logits

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy comes from ml_dtypes")
safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="the files are made with safetensors")

SMOLLM2 = Path(__file__).parent / "data" / "smollm2.safetensors"
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
FORMATS = ("safetensors", "npz", "npz compressed", "npy")
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


def exact(logits, ids, temperature=1.0):
    """The log-probability in float64, by log1p of everything but one maximum."""
    z = logits.astype(np.float64) / temperature
    top = z.argmax(-1, keepdims=True)
    shifted = z - np.take_along_axis(z, top, -1)
    rest = np.exp(shifted)
    np.put_along_axis(rest, top, 0.0, -1)
    return np.take_along_axis(shifted, ids[..., None], -1)[..., 0] - np.log1p(rest.sum(-1))


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
    scores = score(open_logits(*store(tmp_path, kind, logits, ids)))
    assert scores.logprobs.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert scores.logprobs.shape == ids.shape
    np.testing.assert_array_equal(scores.ids, ids)
    assert within_bound(scores.logprobs, exact(logits, ids))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("kind", "dtype"), READABLE)
def test_pieces_have_the_same_bits_as_the_whole(tmp_path, kind, dtype):
    logits, ids = make(dtype=dtype)
    scores = score(open_logits(*store(tmp_path, kind, logits, ids)))
    np.testing.assert_array_equal(scores.logprobs, logprobs(logits, ids), strict=True)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["npz", "npz compressed", "npy"])
@pytest.mark.parametrize("layout", ["fortran order", "big-endian"])
def test_layouts_of_numpy_files_are_read_in_c_order(tmp_path, kind, layout):
    logits, ids = make()
    laid_out = np.asfortranarray(logits) if layout == "fortran order" else logits.astype(">f4")
    scores = score(open_logits(*store(tmp_path, kind, laid_out, np.asfortranarray(ids).astype(">i4"))))
    np.testing.assert_array_equal(scores.logprobs, logprobs(logits, ids))
    np.testing.assert_array_equal(scores.ids, ids)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(7,), (0, 7), (3, 0, 7), (2, 1, 3, 7)])
def test_any_rank_and_empty_batches_are_read(tmp_path, kind, shape):
    logits, ids = make(shape)
    scores = score(open_logits(*store(tmp_path, kind, logits, ids)))
    np.testing.assert_array_equal(scores.logprobs, logprobs(logits, ids))
    assert scores.positions == ids.size


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "ids_dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
)
def test_ids_are_read_in_every_integer_dtype(tmp_path, kind, ids_dtype):
    logits, ids = make()
    stored = open_logits(*store(tmp_path, kind, logits, ids.astype(ids_dtype)))
    np.testing.assert_array_equal(stored.ids, ids.astype(ids_dtype), strict=True)
    np.testing.assert_array_equal(score(stored).logprobs, logprobs(logits, ids))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("backend", "module"), [("torch", "torch"), ("jax", "jax"), ("array-api", "array_api_strict")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_agree_with_numpy_on_stored_logits(tmp_path, backend, module, dtype):
    pytest.importorskip(module, reason=f"{module} is not installed")
    logits, ids = make(dtype=dtype)
    stored = open_logits(*store(tmp_path, "safetensors", logits, ids))
    scores = score(stored, backend=backend, temperature=0.7)
    assert scores.logprobs.dtype == (np.float64 if dtype == "float64" else np.float32)
    limit = 1e-12 if dtype == "float64" else 1e-6
    np.testing.assert_allclose(scores.logprobs, exact(logits, ids, 0.7), rtol=limit, atol=limit)


def test_real_logits_are_scored_within_the_bound():
    stored = open_logits(SMOLLM2)
    whole = safetensors_numpy.load_file(SMOLLM2)
    scores = score(stored)
    assert scores.logprobs.dtype == np.float32
    reference = exact(whole["logits"], whole["ids"])
    assert within_bound(scores.logprobs, reference)
    assert scores.sum == pytest.approx(reference.sum(), abs=1e-5)
    assert scores.perplexity == pytest.approx(np.exp(-reference.mean()), rel=1e-6)
    assert len(stored.tokens()) == scores.positions == 57


def test_temperature_divides_the_logits(tmp_path):
    logits, ids = make()
    scores = score(open_logits(*store(tmp_path, "npy", logits, ids)), temperature=0.25)
    assert within_bound(scores.logprobs, exact(logits, ids, 0.25))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_not_finite_and_positive_is_refused(tmp_path, temperature):
    with pytest.raises(InputError, match="temperature is"):
        score(open_logits(*store(tmp_path, "npy", *make())), temperature=temperature)


def test_ignored_positions_count_for_nothing(tmp_path):
    logits, ids = make()
    ids[0, 1] = ids[1, 4] = -100
    logits[0, 1] = np.nan
    scores = score(open_logits(*store(tmp_path, "npz", logits, ids)), ignore_index=-100)
    kept = ids != -100
    np.testing.assert_array_equal(scores.ignored, ~kept)
    assert (scores.logprobs[~kept] == 0).all()
    reference = exact(logits[kept], ids[kept])
    assert scores.positions == 8
    assert scores.sum == pytest.approx(reference.sum(), abs=1e-5)
    assert scores.mean == pytest.approx(reference.mean(), abs=1e-6)
    assert scores.perplexity == pytest.approx(np.exp(-reference.mean()), rel=1e-6)


def test_without_positions_the_mean_is_nan(tmp_path):
    logits, ids = make()
    scores = score(open_logits(*store(tmp_path, "npz", logits, np.full_like(ids, -1))), ignore_index=-1)
    assert (scores.positions, scores.sum) == (0, 0.0)
    assert np.isnan(scores.mean)
    assert np.isnan(scores.perplexity)


def test_a_perplexity_beyond_float64_is_infinite():
    scores = Scores(np.array([-1e4, -np.inf]), np.array([0, 1]), np.array([False, False]))
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
    np.testing.assert_array_equal(score(open_logits(tmp_path / "a.safetensors")).logprobs, logprobs(logits, ids))
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


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(7,), (0, 7), (2, 5, 7)])
def test_written_scores_read_back_with_the_metadata(tmp_path, suffix, dtype, shape):
    logits, ids = make(shape, dtype)
    metadata = {"tokens": json.dumps([f"tok {i}" for i in range(ids.size)]), "model": "none"}
    scores = score(open_logits(*store(tmp_path, suffix, logits, ids, metadata)))
    assert scores.metadata == metadata
    out = tmp_path / f"out.{suffix}"
    write_scores(out, scores)
    if suffix == "safetensors":
        from safetensors import safe_open

        with safe_open(out, "np") as file:
            back, kept = file.get_tensors(), file.metadata()
    else:
        with np.load(out) as file:
            back, kept = {name: file[name] for name in ("logprobs", "ids")}, json.loads(str(file["metadata"]))
    assert kept == metadata
    np.testing.assert_array_equal(back["logprobs"], scores.logprobs, strict=True)
    np.testing.assert_array_equal(back["ids"], ids, strict=True)


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, suffix, failure, step):
    out = tmp_path / f"out.{suffix}"
    out.write_bytes(b"old")

    def fail(*_):
        raise failure

    monkeypatch.setattr(os, step, fail)
    scores = Scores(np.zeros(3, np.float32), np.arange(3), np.zeros(3, bool))
    with pytest.raises(type(failure)):
        write_scores(out, scores)
    assert out.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [out.name]


def test_output_is_as_readable_as_any_new_file(tmp_path):
    out, other = tmp_path / "out.safetensors", tmp_path / "other"
    write_scores(out, Scores(np.zeros(3, np.float32), np.arange(3), np.zeros(3, bool)))
    other.touch()
    assert out.stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("out.csv", "ends in .safetensors or .npz"),
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
scores = score(open_logits(*sys.argv[1:]))
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
