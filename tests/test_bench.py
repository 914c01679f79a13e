"""The benchmarks run and measure what they say, on cases small enough for every change.

torch runs eagerly here: what compiles is tested elsewhere, and the methods are the same ones.
"""

import contextlib
import importlib.util
import io
import json

import numpy as np
import pytest

pytest.importorskip("rich", reason="rich is not installed")

from rich.console import Console

from bench import __main__ as command
from bench import measure, methods, peers, plots, readme, report, suites
from bench.case import Case
from bench.libraries import LIBRARIES, NumPy, resident_peak

HEAVY = {"trl", "tokamax", "cut_cross_entropy"}  # seconds to import, and warnings of their own on the way
TINY = {"shape": (2, 3), "vocab": 300}
TABLES = [(what, library) for what, table in methods.TABLES.items() for library in table if what != "stats"]


@pytest.fixture(autouse=True)
def light_peers(monkeypatch):
    """Peers that take seconds to import are as if not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name in HEAVY else find(name))


def needed(library):
    return pytest.importorskip(library, reason=f"{library} is not installed")


def eager(library):
    return needed("torch").compiler.set_stance("force_eager") if library == "torch" else contextlib.nullcontext()


def measured(what, library, **fields):
    needed(library)
    pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    hidden = 16 if what == "head" else 0
    shape = (6,) if what == "head" else TINY["shape"]
    case = Case(what, library, **{**TINY, "shape": shape, "hidden": hidden, **fields})
    with eager(library):
        return measure.times(case, 2)


@pytest.mark.parametrize(
    ("what", "library", "dtype"),
    [(*pair, "float32") for pair in TABLES]
    + [(*pair, "bfloat16") for pair in TABLES if pair[0] in ("forward", "grad")],
)
def test_every_method_gives_its_figures_or_the_reason_why_not(what, library, dtype):
    result = measured(what, library, dtype=dtype)
    table = methods.methods(what, library)
    assert [*result["methods"]] == [*table]
    assert any(methods.is_ours(name) for name in table)
    for name, figures in result["methods"].items():
        if "why_not" in figures:
            assert not methods.is_ours(name)
            assert figures["why_not"]
            continue
        assert 0 < figures["quartiles"][0] <= figures["ms"] <= figures["quartiles"][1]
        assert figures["gb_s"] > 0
        if name in methods.LIMITS:
            assert figures["x_limit"] == 1
        elif table[name].per_token:
            assert figures["error"] < (0.1 if dtype == "bfloat16" else 1e-5)
        if what == "small" and name == methods.usual(what, library):
            assert figures["over_usual_us"] == 0
        if methods.is_ours(name) and what != "head":
            assert figures["error_bounds"] <= 1
            assert figures.get("gradient_error_bounds", 0) <= 1
            assert ("gradient_error" in figures) == (what == "grad")


@pytest.mark.parametrize("library", methods.TABLES["stats"])
def test_the_stats_table_measures_token_stats_beside_logprobs(library):
    found = measured("stats", library)["methods"]
    assert [name for name in found if methods.is_ours(name)] == [
        "xlogprobs",
        "xlogprobs.token_stats: logprob, entropy",
        "xlogprobs.token_stats: logprob, entropy, lse",
        "xlogprobs.token_stats: logprob, entropy, rank",
        "xlogprobs, without Numba",
        "xlogprobs, without Numba: logprob, entropy",
        "xlogprobs, without Numba: logprob, entropy, rank",
    ]
    assert all(figures["error_bounds"] <= 1 for name, figures in found.items() if methods.is_ours(name))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_wrong_gradient_shows_as_an_error(library, monkeypatch):
    needed(library)
    wrong = methods.torch_gradient if library == "torch" else methods.jax_gradient
    table = {**methods.methods("grad", library), "twice": wrong(lambda: lambda x, ids: 2 * methods.logprobs(x, ids))}
    monkeypatch.setitem(methods.TABLES["grad"], library, table)
    figures = measured("grad", library)["methods"]["twice"]
    assert figures["error_bounds"] > 1e5
    assert figures["gradient_error_bounds"] > 1e5


def test_logits_to_differentiate_may_be_overwritten_and_are_restored():
    torch = needed("torch")

    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            assert logits._base is None
            ctx.save_for_backward(logits)
            return logits.sum(-1)

        @staticmethod
        def backward(ctx, upstream):
            return ctx.saved_tensors[0].mul_(0).add_(upstream[..., None])

    case = Case("grad", "torch", **TINY)
    inputs = LIBRARIES["torch"].inputs(case)
    before = inputs.logits.clone()
    run = methods.torch_gradient(lambda: lambda logits, ids: Overwrites.apply(logits)).make(inputs)
    _, gradient = run()
    assert gradient.data_ptr() == inputs.logits.data_ptr()
    assert not torch.equal(inputs.logits, before)
    inputs.restore()
    assert torch.equal(inputs.logits, before)


@pytest.mark.parametrize("name", suites.SUITES)
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cases_of_each_suite_have_methods(name, quick, device):
    suite = suites.SUITES[name]
    cases = [case for library in LIBRARIES if suite.takes(library) for case in suite.cases(library, device, quick)]
    assert cases
    for case in cases:
        assert methods.methods(case.what, case.library)
        assert case.device == device
        assert case.rows >= 1
        assert case.logits_bytes <= (1 << 31 if device == "cpu" else 1 << 34)


def test_the_scaling_suite_spans_the_range():
    cases = suites.SUITES["scaling"].cases("torch", "cpu", False)
    assert {1, 65536} <= {case.rows for case in cases if case.series == "rows"}
    assert {1000, 262208} <= {case.vocab for case in cases if case.series == "vocab"}
    assert [(case.rows, case.vocab) for case in cases if case.series == "small"] == [(1, 1000), (8, 32000)]


def test_the_shapes_suite_takes_every_vocabulary():
    cases = suites.SUITES["shapes"].cases("jax", "cpu", False)
    assert {case.vocab for case in cases} == {49152, 50257, 128256, 151936, 262208}
    assert {case.rows for case in cases if "evaluation" in case.series} == {1, 8, 32}


def test_slopes_are_of_log_time_against_log_size():
    def case(rows, ms):
        times = {"linear": {"ms": ms}, "square": {"ms": ms**2}, "absent": {"why_not": "not here"}}
        return {"library": "numpy", "series": "rows", "shape": [rows], "vocab": 1 << 13, "methods": times}

    cases = [case(1, 7.0), *(case(rows, float(rows)) for rows in (1024, 4096, 16384))]
    found = {line["method"]: line["slope"] for line in suites.slopes(cases)}
    assert found == {"linear": 1.0, "square": 2.0}


def test_a_suite_without_its_function_says_so_and_is_not_run(capsys):
    for name, function in (("stats", "token_stats"), ("head", "linear_logprobs")):
        if methods.has(function):
            continue
        assert name not in suites.registered()
        with pytest.raises(SystemExit):
            command.main([name])
        assert f"xlogprobs has no {function} yet" in capsys.readouterr().err


def test_an_unknown_suite_names_the_suites(capsys):
    with pytest.raises(SystemExit):
        command.main(["peaks"])
    assert "there is no suite 'peaks'; suites are reference, peers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("available", "reason"),
    [
        (peers.needs("trl.trainer.utils"), "trl is not installed: pip install 'xlogprobs[peers]'"),
        (peers.on_cuda("quack"), "its kernels are for CUDA alone"),
        (peers.needs("numpy", "no_such_name"), "numpy has no no_such_name in this version"),
        (peers.needs("numpy.no_such_module"), "numpy.no_such_module does not import: ModuleNotFoundError"),
        (peers.needs("numpy"), None),
    ],
)
def test_a_peer_says_why_it_cannot_run(available, reason):
    found = available("cpu")
    assert found is None if reason is None else found.startswith(reason)


def test_a_peer_that_fails_is_reported_and_a_failure_of_ours_raises(monkeypatch):
    def broken():
        raise RuntimeError("no kernel\nmore")

    table = {**methods.methods("forward", "numpy"), "broken": methods.forward(broken)}
    monkeypatch.setitem(methods.TABLES["forward"], "numpy", table)
    assert measured("forward", "numpy")["methods"]["broken"] == {"why_not": "RuntimeError: no kernel"}
    monkeypatch.setitem(table, methods.OURS, methods.forward(broken))
    with pytest.raises(RuntimeError, match="no kernel"):
        measured("forward", "numpy")


def test_a_library_that_lacks_the_device_says_so():
    assert measured("forward", "numpy", device="cuda")["why_not"] == "NumPy runs on the CPU alone"


def test_peak_memory_is_what_a_call_takes_above_its_inputs():
    taken = 64 << 20
    peak = resident_peak(lambda: np.ones(taken, np.uint8).sum())["peak"]
    assert taken * 0.95 < peak < taken * 1.2
    case = Case("forward", "numpy", (256,), 32768)
    textbook = measure.memory(case, methods.TEXTBOOK)
    assert 1.9 < textbook["share"] < 2.2
    assert measure.memory(case, methods.OURS)["share"] < 0.5


def document(name, what, **fields):
    case = measured(what, "numpy" if what != "reference" else "torch", series="rows")
    machine = command.machine([case])
    return {"suite": name, "device": "cpu", "quick": False, "machine": machine, "cases": [case], **fields}


def test_the_terminal_shows_figures_and_reasons():
    found = document("peers", "peers")
    found["cases"][0]["methods"]["scipy log_softmax, take"] = {"why_not": "scipy is not [here]"}
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(found, console)
    shown = console.export_text()
    assert "x limit" in shown
    assert "MB reserved" not in shown
    assert "not run: scipy log_softmax, take: scipy is not [here]" in shown


def test_the_reference_table_has_the_published_figures():
    needed("torch")
    case = measured("reference", "torch")
    names = list(methods.PUBLISHED["methods"])
    assert names == list(case["methods"])[1:-2]
    for name in names:
        case["methods"][name]["published"] = methods.PUBLISHED["methods"][name]
    shown = readme.reference({"cases": [case], "published": methods.PUBLISHED, "machine": command.machine([case])})
    assert "| 1.566 | 42 |" in shown
    assert "| 8.911 | 135 |" in shown


def test_slopes_have_a_line_a_method():
    slopes = [
        {"library": "numpy", "against": against, "method": methods.OURS, "slope": slope}
        for against, slope in (("rows", 0.996), ("vocab", 1.02))
    ]
    assert "| numpy | xlogprobs | 1.00 | 1.02 |" in readme.slopes({"slopes": slopes})
    assert "| numpy | xlogprobs |  | 1.02 |" in readme.slopes({"slopes": slopes[1:]})


def test_a_changed_table_is_found_and_written_anew(tmp_path, monkeypatch, capsys):
    (tmp_path / "cpu-peers.json").write_text(json.dumps(document("peers", "peers")))
    text = "# Title\n\n<!-- table: forward -->\nold\n<!-- end: forward -->\n\nafter\n"
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance.md").write_text(text)
    with pytest.raises(SystemExit, match="python -m bench --readme"):
        command.main(["--check-readme"])
    command.main(["--readme", "--check-readme"])
    checked = "README.md's tables are those of bench/results\ndocs/performance.md's tables are those of bench/results\n"
    assert capsys.readouterr().out == checked
    written = (tmp_path / "README.md").read_text()
    assert "| **numpy: xlogprobs** | 2 x 3 x 300 | float32 |" in written
    assert written.startswith("# Title\n\n")
    assert written.endswith("\n\nafter\n")
    (tmp_path / "README.md").write_text(written.replace("| float32 |", "| float64 |", 1))
    with pytest.raises(SystemExit, match="are not those"):
        command.main(["--check-readme"])
    command.main(["--readme"])
    (tmp_path / "docs" / "performance.md").write_text(text)
    with pytest.raises(SystemExit, match=r"docs/performance\.md's tables are not those"):
        command.main(["--check-readme"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no table", "no place marked for a table"),
        ("<!-- table: x -->\n<!-- end: x -->", "no table is called 'x'"),
        ("<!-- table: grad -->\n<!-- end: grad -->", "needs cpu-grad.json"),
        ("<!-- table: forward -->\n<!-- end: forward -->", "cpu-peers.json is from --quick"),
    ],
)
def test_a_table_that_cannot_be_made_says_why(tmp_path, text, reason):
    (tmp_path / "cpu-peers.json").write_text('{"quick": true}')
    with pytest.raises(SystemExit, match=reason):
        readme.filled(text, tmp_path)


def test_results_are_drawn_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    peers = document("peers", "peers")
    peers["cases"][0]["methods"][methods.OURS]["share"] = 0.5
    (tmp_path / "cpu-peers.json").write_text(json.dumps(peers))
    scaling = document("scaling", "forward")
    scaling["cases"].append({**scaling["cases"][0], "series": "vocab"})
    (tmp_path / "cpu-scaling.json").write_text(json.dumps(scaling))
    drawn = plots.draw(tmp_path, tmp_path / "plots")
    assert [path.name for path in drawn] == ["cpu-limit.svg", "cpu-memory.svg", "cpu-rows.svg", "cpu-vocab.svg"]
    first = [path.read_bytes() for path in drawn]
    assert all(text.startswith(b"<?xml") for text in first)
    assert [path.read_bytes() for path in plots.draw(tmp_path, tmp_path / "plots")] == first


def test_the_command_measures_in_processes_of_their_own_and_writes_json(tmp_path, monkeypatch, capsys):
    def one(library, device, quick):
        return [Case("forward", library, **TINY, device=device), Case("forward", library, (2,), 70, device=device)]

    suite = suites.Suite("peers", "", ("forward",), one)
    monkeypatch.setitem(suites.SUITES, "peers", suite)
    command.main(["peers", "--backend", "numpy", "--quick", "--repeats", "2", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "cpu-peers.json").read_text())
    assert found["quick"]
    assert found["machine"]["versions"]["numpy"] == np.__version__
    case, other = found["cases"]
    assert other["vocab"] == 70
    assert case["methods"][methods.OURS]["error_bounds"] <= 1
    assert "peak_mb" in case["methods"][methods.OURS]
    assert "peak_mb" not in case["methods"][methods.LIMIT]
    assert methods.OURS in capsys.readouterr().out


def test_inputs_are_the_same_each_time():
    case = Case("forward", "numpy", **TINY)
    first, second = (NumPy().inputs(case) for _ in range(2))
    assert np.array_equal(first.logits, second.logits)
    assert np.array_equal(first.ids, second.ids)
