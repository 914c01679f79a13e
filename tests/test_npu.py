"""Ascend NPU: the way a call runs is chosen by what torch_npu brings, and every way gives the right numbers.

No NPU is at hand: `npu_standin` registers a device of that name, in a process for each outfit of torch_npu.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torch.utils.backend_registration", reason="torch has no out-of-tree devices")
if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch registers no device from Python (2.10 does)", allow_module_level=True)

STANDIN = Path(__file__).parent / "npu_standin.py"
VOCAB = 2500  # three blocks, the last a short one
OUTFITS = {"compiler": "compiler,fused", "fused": "fused", "neither": "", "broken": "compiler,broken,fused"}
IGNORE = -100


def make_calls():
    """Each a rule of the contract; logits and ids lie on npu."""
    rng = torch.Generator().manual_seed(7)

    def normal(*shape, dtype=torch.float32):
        return (3 * torch.randn(*shape, generator=rng)).to(dtype)

    def ids(*shape, vocab=VOCAB):
        return torch.randint(vocab, shape, generator=rng)

    calls = {
        "one row": {"logits": normal(VOCAB), "ids": ids()},
        "rows": {"logits": normal(7, VOCAB), "ids": ids(7)},
        "batches of rows": {"logits": normal(2, 3, VOCAB), "ids": ids(2, 3)},
        "four dimensions": {"logits": normal(2, 1, 3, VOCAB), "ids": ids(2, 1, 3)},
        "many ids": {"logits": normal(2, 3, VOCAB), "ids": ids(2, 3, 4)},
        "repeated ids": {"logits": normal(3, VOCAB), "ids": torch.tensor([[5, 5, 9], [0, 0, 0], [1, 2, 1]])},
        "a vocabulary below the block": {"logits": normal(4, 7), "ids": ids(4, vocab=7)},
        "bfloat16": {"logits": normal(5, VOCAB, dtype=torch.bfloat16), "ids": ids(5)},
        "float16": {"logits": normal(5, VOCAB, dtype=torch.float16), "ids": ids(5)},
        "int32 ids": {"logits": normal(5, VOCAB), "ids": ids(5).int()},
        "a temperature": {"logits": normal(2, 3, VOCAB), "ids": ids(2, 3), "temperature": 0.7},
        "a temperature each": {
            "logits": normal(2, 3, VOCAB),
            "ids": ids(2, 3),
            "temperature": torch.linspace(0.3, 2, 6).reshape(2, 3),
        },
        "a float64 temperature each": {
            "logits": normal(2, 3, VOCAB),
            "ids": ids(2, 3),
            "temperature": np.linspace(0.3, 2, 6).reshape(2, 3),
        },
        "a common offset": {"logits": normal(5, VOCAB) + 1e4, "ids": ids(5)},
        "ignored ids": {
            "logits": normal(4, VOCAB).index_fill(0, torch.tensor([1]), float("nan")),
            "ids": torch.tensor([3, IGNORE, 5, IGNORE]),
            "ignore_index": IGNORE,
        },
        "invalid ids": {"logits": normal(4, VOCAB), "ids": torch.tensor([3, -1, VOCAB, VOCAB + 7])},
        "an id of -inf": {
            "logits": normal(3, VOCAB).index_fill(1, torch.tensor([4]), -float("inf")),
            "ids": torch.tensor([4, 5, 6]),
        },
        "rows without a distribution": {
            "logits": torch.stack([normal(VOCAB), *(torch.full((VOCAB,), float(v)) for v in ("-inf", "nan", "inf"))]),
            "ids": torch.tensor([1, 2, 3, 4]),
        },
        "an empty batch": {"logits": normal(2, 0, VOCAB), "ids": ids(2, 0)},
        "transposed": {"logits": normal(3, 2, VOCAB), "ids": ids(2, 3), "transpose": True},
        "under autocast": {"logits": normal(5, VOCAB), "ids": ids(5), "autocast": True},
        "more rows than the operator takes": {"logits": normal(200_001, 2), "ids": ids(200_001, vocab=2)},
    }
    for name, call in calls.items():
        if name != "rows without a distribution" and name != "invalid ids":
            call["upstream"] = torch.randn(call["ids"].shape, generator=rng)
    calls["readable ids outside the vocabulary"] = {"logits": normal(2, VOCAB), "ids": [1, VOCAB]}
    return calls


CALLS = make_calls()
VALUED = [name for name in CALLS if name != "readable ids outside the vocabulary"]


@pytest.fixture(scope="module")
def outfits(tmp_path_factory):
    """Every call on every outfit: how npu runs there, and the results."""
    folder = tmp_path_factory.mktemp("npu")
    torch.save(CALLS, folder / "calls.pt")
    found = {}

    def run(outfit):
        if outfit not in found:
            results = folder / f"{outfit}.pt"
            command = [sys.executable, STANDIN, OUTFITS[outfit], folder / "calls.pt", results]
            process = subprocess.run(command, capture_output=True, text=True)
            assert process.returncode == 0, process.stderr
            found[outfit] = torch.load(results, weights_only=False)
        return found[outfit]

    return run


def reference(call):
    """float64 log-probabilities and, where there is an upstream gradient, the logits' gradient."""
    logits = call["logits"].double().requires_grad_()
    ids = torch.as_tensor(call["ids"]).long()
    rows = logits.transpose(0, 1) if call.get("transpose") else logits
    one_id = ids.ndim == rows.ndim - 1
    temperature = torch.as_tensor(call.get("temperature", 1.0), dtype=torch.float64)
    ignored, invalid = ids == call.get("ignore_index", -(2**40)), (ids < 0) | (ids >= rows.shape[-1])
    keep = ~ignored if one_id else ~ignored.all(-1)
    scaled = torch.where(keep[..., None], rows, 0.0) / temperature[..., None]
    safe = ids.masked_fill(invalid, 0)
    out = torch.log_softmax(scaled, -1).gather(-1, safe[..., None] if one_id else safe)
    out = out[..., 0] if one_id else out
    out = out.masked_fill(invalid & ~ignored, float("nan")).masked_fill(ignored, 0.0)
    if "upstream" not in call:
        return out.detach(), None
    finite = torch.isfinite(out)
    out.backward(torch.where(finite, call["upstream"].double(), 0.0))
    assert logits.grad is not None
    return out.detach(), logits.grad


@pytest.mark.parametrize("outfit", OUTFITS)
@pytest.mark.parametrize("name", VALUED)
def test_every_way_agrees_with_float64(outfits, outfit, name):
    result = outfits(outfit)[1][name]
    expected, _ = reference(CALLS[name])
    assert (result["device"], result["out"].dtype) == ("npu", torch.float32)
    out = result["out"].double()
    assert out.shape == expected.shape
    finite = torch.isfinite(expected)
    torch.testing.assert_close(out[~finite], expected[~finite], rtol=0, atol=0, equal_nan=True)
    ulps = 2 if outfit in ("fused", "broken") else 1  # the operator's log-sum-exp is float32, rounded once more here
    bound = np.maximum(1e-6, ulps * np.spacing(np.abs(expected[finite].numpy().astype(np.float32))))
    error = (out - expected)[finite].abs().numpy()
    assert (error <= bound).all()


@pytest.mark.parametrize("outfit", OUTFITS)
@pytest.mark.parametrize("name", [name for name in CALLS if "upstream" in CALLS[name]])
def test_gradients_agree_with_float64_on_every_way(outfits, outfit, name):
    call = CALLS[name]
    if name == "an id of -inf":
        pytest.skip("an id of probability 0 has no gradient to compare with")
    result = outfits(outfit)[1][name]
    _, expected = reference(call)
    grad = result["grad"]
    assert grad.dtype == call["logits"].dtype
    rounding = 0.0 if grad.dtype == torch.float32 else torch.finfo(grad.dtype).eps / 2
    scale = 1 / torch.as_tensor(call.get("temperature", 1.0)).min().clamp_max(1)
    bound = 1e-6 * scale * max(1.0, call["upstream"].abs().max() if call["upstream"].numel() else 0.0)
    tiny = 0.0 if grad.dtype != torch.float16 else 2.0**-25
    assert ((grad.double() - expected).abs() <= bound + tiny + rounding * expected.abs()).all()


@pytest.mark.parametrize("outfit", OUTFITS)
def test_readable_ids_outside_the_vocabulary_are_refused(outfits, outfit):
    message = outfits(outfit)[1]["readable ids outside the vocabulary"]["error"]
    assert message.startswith(f"ids[1] is {VOCAB};")


def test_the_compiler_of_torch_npu_is_used_where_it_is(outfits):
    execution, results = outfits("compiler")
    assert execution == "torch.compile (inductor)"
    assert sum(result.get("calls", {}).get("graph runs", 0) for result in results.values()) >= 2 * len(VALUED) - 4
    assert not any("npu_cross_entropy_loss" in result.get("calls", {}) for result in results.values())


def test_one_graph_serves_every_number_of_rows(outfits):
    results = outfits("compiler")[1]
    compilations = {name: results[name]["calls"].get("compilations", 0) for name in VALUED}
    assert compilations["one row"] == 2
    for name in ("rows", "batches of rows", "four dimensions", "int32 ids", "a common offset", "transposed"):
        assert compilations[name] == 0, name


def test_without_a_compiler_the_fused_operator_runs_once_for_each_piece(outfits):
    execution, results = outfits("fused")
    assert execution == "torch_npu.npu_cross_entropy_loss"
    runs = {name: result.get("calls", {}).get("npu_cross_entropy_loss", 0) for name, result in results.items()}
    assert runs.pop("many ids") == 1
    assert runs.pop("repeated ids") == 1
    assert runs.pop("an empty batch") == 0
    assert runs.pop("transposed") == 2
    assert runs.pop("more rows than the operator takes") == 4
    assert runs.pop("readable ids outside the vocabulary") == 0
    assert set(runs.values()) == {1}


def test_with_neither_the_core_runs_eagerly(outfits):
    execution, results = outfits("neither")
    assert execution == "eager"
    for result in results.values():
        assert not {"npu_cross_entropy_loss", "compilations"} & set(result.get("calls", {}))


def test_a_compiler_that_fails_is_tried_once_and_the_fused_operator_takes_over(outfits):
    _, results = outfits("broken")
    first, *others = (result for result in results.values() if "calls" in result)
    assert first["calls"]["compilations"] == 1
    assert len(first["warnings"]) == 1
    assert "xlogprobs runs eagerly on npu: " in first["warnings"][0]
    assert not any(result["warnings"] or "compilations" in result["calls"] for result in others)
    assert sum("npu_cross_entropy_loss" in result["calls"] for result in others) == len(others) - 1


@pytest.mark.parametrize("outfit", OUTFITS)
def test_no_value_is_read_back_from_the_device(outfits, outfit):
    for name, result in outfits(outfit)[1].items():
        assert "read back" not in result.get("calls", {}), name
