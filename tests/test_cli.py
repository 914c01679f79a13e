"""The command line: what it prints, and its exit codes."""

import csv
import dataclasses
import json
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command line needs typer")
pytest.importorskip("rich", reason="the command line needs rich")

from typer.testing import CliRunner

import xlogprobs
from xlogprobs import commands, logprobs, token_stats
from xlogprobs.commands import app, statistic_text

ROOT = Path(__file__).parent.parent
SMOLLM2 = str(ROOT / "tests" / "data" / "smollm2.safetensors")


@pytest.fixture(autouse=True)
def plain_wide_output(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def cells(result):
    """The table's body, a list of its cells for each line."""
    lines = [line for line in result.stdout.splitlines() if line.startswith(("│", "|"))]
    return [[cell.strip() for cell in line.strip("│|").replace("|", "│").split("│")] for line in lines]


def totals(result):
    lines = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2 and line[0][0].isalpha()}


@pytest.fixture
def stored(tmp_path):
    """Write an .npz of logits of some shape, and return its path, the logits and the ids."""

    def write(shape=(2, 5, 11), ids=None, **arrays):
        rng = np.random.default_rng(1)
        logits = rng.standard_normal(shape).astype(np.float32)
        ids = rng.integers(0, shape[-1], shape[:-1]) if ids is None else ids
        path = tmp_path / "stored.npz"
        np.savez(path, logits=logits, ids=ids, **arrays)
        return path, logits, ids

    return write


def test_score_prints_every_position_of_the_real_file_with_its_token():
    result = run("score", SMOLLM2)
    assert result.exit_code == 0, result.output
    table = cells(result)
    assert len(table) == 57
    assert table[3][:3] == ["3", "283", "' m'"]
    assert float(table[0][3]) == pytest.approx(-16.667498, abs=1e-6)
    assert table[25] == ["25", "878", "'ily'", "-7.516e-05"]
    assert "left out" not in result.stdout
    figures = totals(result)
    assert float(figures["sum"]) == pytest.approx(sum(float(row[3]) for row in table), abs=1e-4)
    assert float(figures["perplexity"]) == pytest.approx(np.exp(-float(figures["mean"])), rel=1e-5)
    assert figures["positions"] == "57"
    assert figures["time"].endswith(" s")


DECIMAL = re.compile(r"-?\d+\.\d+(?:e[+-]\d+)?")


def same_line(shown, printed):
    """Whether two lines have the same text, and decimals that differ by a unit in the last place at most.

    A float32 differs by one ulp between processors, which now and then turns the last digit over.
    """
    pairs = list(zip(DECIMAL.findall(shown), DECIMAL.findall(printed), strict=False))
    return DECIMAL.sub("#", shown) == DECIMAL.sub("#", printed) and all(
        abs(Decimal(a) - Decimal(b)) <= Decimal((0, (1,), Decimal(a).as_tuple().exponent)) for a, b in pairs
    )


def test_the_readme_shows_what_score_prints(tmp_path, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^xlogprobs (score [^\n]*)\n```\n.*?^```text\n(.*?)^```", readme, re.M | re.S)
    assert len(examples) == readme.count("\nxlogprobs score ") > 1
    (tmp_path / "tests").symlink_to(ROOT / "tests", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    for command, shown in examples:
        printed = [line.rstrip() for line in run(*command.split()).stdout.splitlines()]
        missing = [line for line in shown.splitlines() if not any(same_line(line, other) for other in printed)]
        assert missing == ["  ..."] * shown.count("  ...\n")


def test_lines_differ_by_more_than_a_unit_in_the_last_place():
    assert same_line("sum  -146.229148", "sum  -146.229149")
    assert same_line("│ -1.938e-04 │", "│ -1.939e-04 │")
    assert not same_line("sum  -146.229148", "sum  -146.229150")
    assert not same_line("│ -1.938e-04 │", "│ -1.938e-05 │")
    assert not same_line("│ 1571 │ -0.5 │", "│ 1572 │ -0.5 │")
    assert not same_line("sum  -1.5", "mean -1.5")


def test_token_text_is_shown_as_a_literal(stored):
    tokens = ["\n", " a ", "[bold]", ":smile:", "\x1b[31m", "'", "|", "é", "", "b"]
    path, _, _ = stored(metadata=np.array(json.dumps({"tokens": json.dumps(tokens)})))
    output = run("score", path).stdout
    for text in ("'\\n'", "' a '", "'[bold]'", "':smile:'", "'\\x1b[31m'", '"\'"', "''"):
        assert text in output
    assert "\x1b" not in output


def test_without_tokens_there_is_no_token_column(stored):
    result = run("score", stored()[0])
    assert "token" not in result.stdout
    assert all(len(row) == 3 for row in cells(result))


def test_a_position_in_a_batch_is_shown_with_all_its_indices(stored):
    path, logits, ids = stored()
    table = cells(run("score", path))
    assert [row[0] for row in table] == [f"({b}, {s})" for b in range(2) for s in range(5)]
    assert [float(row[2]) for row in table] == pytest.approx(logprobs(logits, ids).ravel().tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("size", "options", "shown", "left_out"),
    [
        (64, (), list(range(64)), None),
        (2000, (), [*range(32), *range(1968, 2000)], "1,936"),
        (10, ("--rows", 3), [0, 1, 9], "7"),
        (10, ("--rows", 1), [0], "9"),
        (10, ("--rows", 10), list(range(10)), None),
        (10, ("--rows", 0), [], None),
        (0, (), [], None),
    ],
)
def test_a_long_table_shows_head_and_tail_and_says_what_it_leaves_out(stored, size, options, shown, left_out):
    result = run("score", stored((size, 11))[0], *options)
    assert result.exit_code == 0, result.output
    assert [int(row[0]) for row in cells(result)] == shown
    assert ("left out" in result.stdout) == (left_out is not None)
    if left_out:
        assert (
            f"{left_out} positions after the first {(len(shown) + 1) // 2} left out; --rows {size} shows all"
            in result.stdout
        )
    assert totals(result)["positions"] == str(size) if size < 1000 else f"{size:,}"


def test_ignored_positions_are_shown_as_ignored_and_not_counted(stored):
    path, logits, ids = stored((4, 11), np.array([3, -100, 5, -100]))
    result = run("score", path, "--ignore-index", -100)
    assert [row[2] for row in cells(result)][1::2] == ["ignored", "ignored"]
    figures = totals(result)
    assert figures["positions"] == "2 (2 ignored)"
    assert float(figures["sum"]) == pytest.approx(logprobs(logits[::2], ids[::2]).sum(), abs=2e-6)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(-7.516e-05), "-7.516e-05"),
        (np.float32(-1e-30), "-1.000e-30"),
        (np.float32(-0.0012124), "-0.001212"),
        (np.float32(-16.66749849), "-16.667498"),
        (np.float32(-1.5e8), "-1.500e+08"),
        (np.float32(0.0), "0.000000"),
        (np.float32(-np.inf), "-inf"),
        (np.float32(np.nan), "nan"),
        (np.int64(151936), "151936"),
    ],
)
def test_nats_show_at_least_four_digits_whatever_their_size_and_ranks_all(value, text):
    assert statistic_text(value) == text


def test_every_statistic_has_a_column_and_a_figure(stored):
    path, logits, ids = stored()
    ids[0, 0] = logits[0, 0].argmax()
    np.savez(path, logits=logits, ids=ids)
    transforms = {"temperature": 0.7, "scale": 1.5, "softcap": 3.0}
    options = [f"--{name}={value}" for name, value in transforms.items()]
    result = run("score", path, "--want", "rank, lse,entropy,logprob", *options)
    assert result.exit_code == 0, result.output
    assert re.search("position.* id.* logprob.* entropy.* lse.* rank", result.stdout)
    expected = token_stats(logits, ids, **transforms)
    table = cells(result)
    for column, values in enumerate((expected.logprob, expected.entropy, expected.lse, expected.rank), 2):
        assert [float(row[column]) for row in table] == pytest.approx(values.ravel().tolist(), abs=1e-6)
    assert all(row[5].isdigit() for row in table)
    figures = totals(result)
    assert float(figures["mean entropy"]) == pytest.approx(expected.entropy.mean(), abs=1e-6)
    assert float(figures["mean"]) == pytest.approx(expected.logprob.mean(), abs=1e-6)
    assert figures["rank 1"] == f"{(expected.rank == 1).mean():.1%}" != "0.0%"


def test_only_what_is_wanted_is_shown(stored):
    result = run("score", stored()[0], "--want", "entropy")
    assert {len(row) for row in cells(result)} == {3}
    assert totals(result).keys() == {"mean entropy", "positions", "time"}


@pytest.mark.parametrize("want", ["logprob,entropy", "entropy"])
def test_the_likeliest_ids_stand_below_each_position_with_their_logprobs(stored, want):
    path, logits, ids = stored((4, 11), np.array([3, -100, 5, 6]))
    result = run("score", path, "--want", want, "--top-k", 2, "--ignore-index", -100, "--rows", 3)
    expected = token_stats(logits, ids, top_k=2, ignore_index=-100)
    table = cells(result)
    assert [row[0] for row in table] == ["0", "top 1", "top 2", "1", "3", "top 1", "top 2"]
    for first, position in ((1, 0), (5, 3)):
        likely = table[first : first + 2]
        assert [int(row[1]) for row in likely] == expected.top_ids[position].tolist()
        assert [float(row[2]) for row in likely] == pytest.approx(expected.top_logprobs[position].tolist(), abs=1e-6)
        assert [row[3] for row in likely] == ["", ""]
        assert (table[first - 1][2] == "") == (want == "entropy")
    assert "ignored" in table[3]
    assert "1 positions after the first 2 left out" in result.stdout


def test_every_statistic_of_a_batch_fits_80_columns(monkeypatch, stored):
    monkeypatch.setenv("COLUMNS", "80")
    tokens = json.dumps({"tokens": json.dumps(["a rather long token"] * 220)})
    path, logits, ids = stored((20, 11, 5000), metadata=np.array(tokens))
    result = run("score", path, "--want", "logprob,entropy,lse,rank", "--top-k", 1, "--scale", 1000)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    expected = token_stats(logits, ids, scale=1000)
    (last,) = (row for row in cells(result) if row[0] == "(19, 10)")
    assert last[3:] == [statistic_text(values[19, 10]) for values in expected[:4]]


@pytest.mark.parametrize("name", ["out.safetensors", "out.npz"])
def test_output_holds_the_logprobs_the_ids_and_the_metadata(tmp_path, name):
    safetensors = pytest.importorskip("safetensors", reason="reads the output")
    out = tmp_path / name
    result = run("score", SMOLLM2, "-o", out, "--rows", 0)
    assert result.exit_code == 0, result.output
    assert name in result.stdout.replace("\n", "")
    with safetensors.safe_open(SMOLLM2, "np") as file:
        metadata, ids = file.metadata(), file.get_tensor("ids")
    if name.endswith("npz"):
        with np.load(out) as file:
            back, kept = dict(file), json.loads(str(file["metadata"]))
    else:
        with safetensors.safe_open(out, "np") as file:
            back, kept = file.get_tensors(), file.metadata()
    assert kept == metadata
    np.testing.assert_array_equal(back["ids"], ids)
    assert back["logprobs"].dtype == np.float32
    assert float(totals(result)["sum"]) == pytest.approx(back["logprobs"].sum(dtype=np.float64), abs=1e-6)


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl"])
def test_output_as_text_holds_a_line_for_each_token(tmp_path, name):
    out = tmp_path / name
    result = run("score", SMOLLM2, "-o", out, "--rows", 0, "--want", "entropy,rank", "--top-k", 2)
    assert result.exit_code == 0, result.output
    with out.open(newline="") as file:
        lines = list(csv.DictReader(file)) if name.endswith("csv") else [json.loads(line) for line in file]
    assert [int(line["position"]) for line in lines] == list(range(57))
    assert (int(lines[25]["id"]), lines[25]["token"]) == (878, "ily")
    figures = totals(result)
    assert figures["mean entropy"] == f"{np.mean([float(line['entropy']) for line in lines]):.6f}"
    assert figures["rank 1"] == f"{np.mean([int(line['rank']) == 1 for line in lines]):.1%}"
    tops = [line["top_ids"] if "top_ids" in line else [line["top_id_1"], line["top_id_2"]] for line in lines]
    assert [line["id"] == top[0] for line, top in zip(lines, tops, strict=True)] == [
        int(line["rank"]) == 1 for line in lines
    ]


def test_an_npy_pair_is_scored(tmp_path, stored):
    _, logits, ids = stored((3, 11))
    np.save(tmp_path / "logits.npy", logits)
    np.save(tmp_path / "ids.npy", ids)
    result = run("score", tmp_path / "logits.npy", "--ids", tmp_path / "ids.npy", "--temperature", 2)
    expected = logprobs(logits, ids, temperature=2.0)
    assert [float(row[2]) for row in cells(result)] == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.npz",), "there is no file nothing.npz"),
        (("stored.npz", "-o", "out.txt"), "ends in .safetensors, .npz, .csv or .jsonl"),
        (("stored.npz", "-o", "nowhere/out.npz"), "there is no folder"),
        (("stored.npz", "-o", "stored.npz"), "would overwrite an input"),
        (("stored.npz", "--temperature", 0), "temperature is 0.0; expected finite and positive"),
        (("stored.npz", "--softcap", -1), "softcap is -1.0; expected finite and positive"),
        (("stored.npz", "--want", "logprob,ranks"), "want has 'ranks'; expected any of 'logprob', 'entropy', 'lse'"),
        (("stored.npz", "--want", ""), "want has ''; expected any of"),
        (("stored.npz", "--top-k", 12), "top_k is 12; logits of shape (2, 5, 11) take a top_k from 0 to 11"),
        (("stored.npz", "--top-k", -1), "top_k is -1; "),
        (("unnamed.npz",), "has no `logits` and no `ids`; it holds a float64 (3, 4), b int64 (3,)"),
        (("outside.npz",), "ids[1] is 11, outside [0, 11)"),
    ],
)
def test_a_call_that_has_to_change_exits_with_2_and_one_line(tmp_path, monkeypatch, stored, arguments, message):
    np.savez(tmp_path / "unnamed.npz", a=np.zeros((3, 4)), b=np.zeros(3, np.int64))
    np.savez(tmp_path / "outside.npz", logits=np.zeros((2, 11)), ids=np.array([0, 11]))
    stored()
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    result = run("score", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("xlogprobs: ")
    assert message in result.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ImportError('--backend torch needs torch: pip install "xlogprobs[torch]"'), 'pip install "xlogprobs[torch]"'),
    ],
)
def test_a_run_that_fails_exits_with_1_and_one_line(monkeypatch, stored, failure, message):
    def fail(*_, **__):
        raise failure

    monkeypatch.setattr(commands, "score_stored", fail)
    result = run("score", stored()[0])
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_an_interrupted_run_writes_nothing(tmp_path, monkeypatch, stored):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    path, _, _ = stored()
    monkeypatch.setattr("os.replace", interrupt)
    result = run("score", path, "-o", tmp_path / "out.npz")
    assert result.exit_code not in (0, 2)
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("terminal", "options", "expected"), [(True, (), True), (True, ("-q",), False), (False, (), False)]
)
def test_progress_goes_to_standard_error_of_a_terminal_only(monkeypatch, stored, terminal, options, expected):
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    result = run("score", stored()[0], *options)
    assert ("scoring" in result.stderr) == expected
    assert "scoring" not in result.stdout


def test_info_names_every_backend_and_why_one_is_missing(monkeypatch):
    monkeypatch.setattr(
        xlogprobs,
        "backends",
        lambda: [
            xlogprobs.BackendInfo("numpy", True, "2.4", ["cpu"], "row pieces over 2 threads"),
            xlogprobs.BackendInfo("torch", False, why_not='torch is not installed: pip install "xlogprobs[torch]"'),
        ],
    )
    result = run("info")
    assert cells(result) == [
        ["numpy", "2.4", "cpu", "row pieces over 2 threads", ""],
        ["torch", "not installed", "-", "-", 'torch is not installed: pip install "xlogprobs[torch]"'],
    ]


def test_info_shows_the_backends_of_this_machine():
    result = run("info")
    assert result.exit_code == 0, result.output
    assert [row[0] for row in cells(result) if row[0]] == [backend.name for backend in xlogprobs.backends()]


@pytest.fixture
def measure_one_case(monkeypatch):
    """Cut the parity matrix down to its first case and the NumPy columns, after a change to these."""
    measure = commands.parity_matrix.measure
    numpy_columns = [column for column in commands.parity_matrix.COLUMNS if column.backend == "numpy"]
    first = commands.parity_matrix.cases(True)[:1]

    def cut_down(**change):
        columns = [dataclasses.replace(column, **change) for column in numpy_columns]
        monkeypatch.setattr(
            commands.parity_matrix,
            "measure",
            lambda quick, **options: measure(quick, columns=columns, rows=first, **options),
        )

    assert numpy_columns
    return cut_down


def test_parity_prints_its_matrix(measure_one_case):
    measure_one_case()
    result = run("parity", "--quick")
    assert result.exit_code == 0, result.output
    assert "numpy" in result.stdout


def test_parity_prints_json_and_nothing_else(measure_one_case):
    measure_one_case()
    result = run("parity", "--quick", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_parity_exits_with_1_where_a_result_is_outside_the_bound(measure_one_case, options):
    measure_one_case(compute=lambda column, quantity, inputs: np.zeros(inputs.arrays["ids"].shape, np.float32))
    result = run("parity", "--quick", *options)
    assert result.exit_code == 1
    assert "FAIL" in result.stdout


def test_version_is_the_package_version():
    assert run("--version").stdout.strip() == f"xlogprobs {xlogprobs.__version__}"


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_python_dash_m_runs_the_command_line():
    result = python("-m", "xlogprobs", "score", SMOLLM2, "--rows", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert "perplexity  13.0062" in result.stdout


def test_score_with_numpy_needs_neither_torch_nor_jax():
    program = f"""
import sys
sys.modules.update(torch=None, jax=None)
sys.argv = ["xlogprobs", "score", {SMOLLM2!r}, "--rows", "0"]
from xlogprobs.cli import main
main()
"""
    result = python("-c", program)
    assert (result.returncode, result.stderr) == (0, "")
    assert "perplexity  13.0062" in result.stdout


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_backend_that_is_not_installed_is_named_with_its_install_command(backend):
    program = f"""
import sys
sys.modules[{backend!r}] = None
sys.argv = ["xlogprobs", "score", {SMOLLM2!r}, "--backend", {backend!r}]
from xlogprobs.cli import main
main()
"""
    result = python("-c", program)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f'xlogprobs: --backend {backend} needs {backend}: pip install "xlogprobs[{backend}]"\n'


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_what_to_install(missing):
    program = f"""
import sys
sys.modules[{missing!r}] = None
from xlogprobs.cli import main
main()
"""
    result = python("-c", program)
    assert result.returncode == 1
    assert result.stderr == f'xlogprobs: the command line needs {missing}: pip install "xlogprobs[cli]"\n'
