"""The suites: which question each answers, and its cases. Those of one library share a process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.case import SIZES, Case
from bench.methods import TABLES, has

VOCABS = {"SmolLM2": 49152, "GPT-2": 50257, "Llama 3": 128256, "Qwen 3": 151936, "Gemma 3": 262208}
PACKED = 1 << 16  # tokens in the longest packed sequence
DTYPES = ("float32", "bfloat16")
LARGE = 1 << 23


@dataclass(frozen=True)
class Suite:
    name: str
    answers: str
    tables: tuple[str, ...]
    """Of `bench.methods.TABLES`, in which a library must stand to take part."""
    cases: Callable[[str, str, bool], list[Case]]
    """Of (library, device, quick)."""
    repeats: int = 9
    memory: bool = True
    """Whether the peak memory of each method is measured, in a process of its own."""
    needs: str | None = None
    """A function of xlogprobs that the suite measures."""

    def missing(self) -> str | None:
        return None if self.needs is None or has(self.needs) else f"xlogprobs has no {self.needs} yet"

    def takes(self, library: str) -> bool:
        return any(library in TABLES[table] for table in self.tables)


def _reference(library: str, device: str, quick: bool) -> list[Case]:
    return [Case("reference", library, (4, 64) if quick else (16, 1024), 32768, device=device)]


def _two_shapes(what: str) -> Callable[[str, str, bool], list[Case]]:
    """2048 x 32768 and 512 x 151936 on a CPU; an accelerator takes eight times the rows, so that starting a kernel
    does not count."""

    def cases(library: str, device: str, quick: bool) -> list[Case]:
        batch, tokens = (4, 32) if quick else (16 if device == "cpu" else 128, 128)
        shapes = (((batch, tokens), 32768), ((batch // 4, tokens), 151936))
        return [Case(what, library, shape, vocab, dtype, device) for shape, vocab in shapes for dtype in DTYPES]

    return cases


def _peers(library: str, device: str, quick: bool) -> list[Case]:
    head = _head(library, device, quick) if library in TABLES["head"] else []
    return _two_shapes("peers")(library, device, quick) + head


def _head(library: str, device: str, quick: bool) -> list[Case]:
    return [Case("head", library, (64 if quick else 256,), 49152, device=device, hidden=576)]


def _shapes(library: str, device: str, quick: bool) -> list[Case]:
    cases = []
    for name, vocab in VOCABS.items():
        for dtype in DTYPES if library != "numpy" else DTYPES[:1]:
            tokens = min(PACKED, _budget(device, quick) // (vocab * SIZES[dtype]))
            cases.append(Case("forward", library, (1, tokens), vocab, dtype, device, f"{name}, packed"))
        cases += [Case("small", library, (n,), vocab, "float32", device, f"{name}, evaluation") for n in (1, 8, 32)]
    return cases


def _scaling(library: str, device: str, quick: bool) -> list[Case]:
    """Rows of 1024 logits and vocabularies of 256 rows, closer together where the logits outgrow the caches; then
    small calls."""
    rows = [1, 4, 16, 64, 256, 1024, 4096, 8192, 16384, 32768, 65536]
    vocabs = [1000, 4000, 16000, 32768, 64000, 128256, 262208]
    if quick:
        rows, vocabs = rows[:5], vocabs[:3]
    return [
        *(Case("forward", library, (n,), 1024, device=device, series="rows") for n in rows),
        *(Case("forward", library, (256,), vocab, device=device, series="vocab") for vocab in vocabs),
        *(Case("small", library, (n,), v, device=device, series="small") for n, v in ((1, 1000), (8, 32000))),
    ]


def _budget(device: str, quick: bool) -> int:
    """Bytes of logits that a packed sequence is cut to: 256 MB on a CPU, 16 GB on an accelerator."""
    return 1 << (23 if quick else 28 if device == "cpu" else 34)


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "reference",
            "the benchmark this project began with, beside its published figures",
            ("reference",),
            _reference,
            repeats=5,
        ),
        Suite("peers", "what people use today, forward, and what fuses the head", ("peers",), _peers, repeats=5),
        Suite(
            "shapes",
            "real vocabularies, as packed for RL and as in evaluation",
            ("forward",),
            _shapes,
            repeats=5,
            memory=False,
        ),
        Suite("grad", "forward and backward", ("grad",), _two_shapes("grad"), repeats=5),
        Suite("stats", "every statistic in one read", ("stats",), _two_shapes("stats"), needs="token_stats"),
        Suite("head", "a linear head without its logits", ("head",), _head, needs="linear_logprobs"),
        Suite(
            "scaling",
            "time against rows and vocabulary, and what a small call costs",
            ("forward",),
            _scaling,
            memory=False,
        ),
    )
}


def registered() -> list[str]:
    return [name for name, suite in SUITES.items() if suite.missing() is None]


def slopes(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Slope of log time against log size for each line of the scaling suite: 1 is linear growth.

    Fitted over the points of at least `LARGE` logits, 32 MB: below, the fixed cost of a call shows, and the caches.
    """
    import numpy as np

    found = []
    lines = {(case["library"], case["series"]) for case in cases if case["series"] in ("rows", "vocab")}
    for library, series in sorted(lines):
        points = [case for case in cases if (case["library"], case["series"]) == (library, series)]
        size = [case["shape"][0] if series == "rows" else case["vocab"] for case in points]
        large = [case["shape"][0] * case["vocab"] >= LARGE for case in points]
        for method in points[0].get("methods", {}):
            times = [case["methods"][method].get("ms") for case in points]
            kept = [(n, ms) for n, ms, is_large in zip(size, times, large, strict=True) if is_large and ms]
            if len(kept) >= 2:
                slope = np.polyfit(*np.log(np.array(kept).T), 1)[0]
                found.append({"library": library, "against": series, "method": method, "slope": round(float(slope), 3)})
    return found
