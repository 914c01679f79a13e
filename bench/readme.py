"""Tables of the README and the docs, written from the committed results and checked in CI to be what those say."""

import json
import re
from pathlib import Path
from typing import Any

from bench.case import shape_text
from bench.methods import LIMITS, is_ours
from bench.report import Cell, absent, figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = ("README.md", "docs/performance.md")
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
PARITY_COLUMNS = {
    "NumPy": ("numpy", "eager"),
    "NumPy, kernels": ("numpy", "kernels"),
    "torch, kernels": ("torch", "kernels"),
    "array-api-strict": ("array-api-strict", "eager"),
    "torch eager": ("torch", "eager"),
    "torch.compile": ("torch", "compiled"),
    "jax.jit": ("jax", "user's jit"),
    "torch.log_softmax": ("torch log_softmax", "compiled"),
    "-cross_entropy, torch.compile": ("torch -cross_entropy", "compiled"),
}
Column = tuple[str, Cell]

MS: Column = ("ms", figure("ms", ".1f"))
X_LIMIT: Column = ("x of the limit", figure("x_limit", ".1f"))
X_USUAL: Column = ("x of the usual way", figure("x_usual", ".2f"))
SHARE: Column = ("peak memory / logits", figure("share", ".1%"))
ERROR: Column = ("worst error", figure("error", ".1e"))
GRADIENT_ERROR: Column = ("worst error of the gradient", figure("gradient_error", ".1e"))


def _timed(document: dict[str, Any], what: str, columns: list[Column]) -> str:
    """One line a method; then, in words, the peers that did not run, the machine and the versions."""
    lines = [
        "| | logits | dtype | " + " | ".join(title for title, _ in columns) + " |",
        "|-" * (3 + len(columns)) + "|",
    ]
    cases = [case for case in document["cases"] if case["what"] == what]
    for case in cases:
        for name, result in case.get("methods", {}).items():
            if "ms" in result and name not in LIMITS:
                bold = "**" if is_ours(name) else ""
                cells = [f"{bold}{case['library']}: {name}{bold}", shape_text(case), case["dtype"]]
                lines.append(f"| {' | '.join([*cells, *(cell(result) for _, cell in columns)])} |")
    if reasons := absent(cases):
        lines += ["", "Not run here: " + "; ".join(f"{name} ({reason})" for name, reason in reasons.items()) + "."]
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return "\n".join([*lines, "", f"{machine['cores']} cores of {machine['device']}, {machine['date']}; {versions}."])


def forward(document: dict[str, Any]) -> str:
    return _timed(document, "peers", [MS, X_LIMIT, X_USUAL, SHARE])


def head(document: dict[str, Any]) -> str:
    return _timed(document, "head", [MS, X_LIMIT, X_USUAL, SHARE, ERROR])


def grad(document: dict[str, Any]) -> str:
    return _timed(document, "grad", [MS, X_LIMIT, X_USUAL, SHARE, GRADIENT_ERROR])


def stats(document: dict[str, Any]) -> str:
    return _timed(
        document, "stats", [MS, X_LIMIT, ("x of the log-probabilities alone", figure("x_usual", ".2f")), SHARE]
    )


def shapes(document: dict[str, Any]) -> str:
    return _timed(document, "forward", [MS, X_LIMIT, X_USUAL, ERROR])


def small(document: dict[str, Any]) -> str:
    columns = [("us", figure("ms", ".0f", 1e3)), X_USUAL, ("us above the usual way", figure("over_usual_us", ".0f"))]
    return _timed(document, "small", columns)


def slopes(document: dict[str, Any]) -> str:
    lines = ["| library | method | against rows | against vocabulary |", "|-|-|-|-|"]
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in document["slopes"]:
        found.setdefault((line["library"], line["method"]), {})[line["against"]] = line["slope"]
    for (library, method), slope in found.items():
        texts = [f"{slope[against]:.2f}" if against in slope else "" for against in ("rows", "vocab")]
        lines.append(f"| {library} | {method} | {' | '.join(texts)} |")
    return "\n".join(lines)


def reference(document: dict[str, Any]) -> str:
    """Measured figures beside the published ones; memory above the logits in both."""
    device = document["published"]["device"]
    columns: list[Column] = [
        ("ms", figure("ms", ".0f")),
        X_LIMIT,
        X_USUAL,
        ("MB above the logits", figure("peak_mb", ".0f")),
        ERROR,
        (f"published, {device}: ms", figure("published.ms", ".3f")),
        ("MB above the logits", figure("published.mb_above", ".0f")),
    ]
    return _timed(document, "reference", columns)


def parity(document: dict[str, Any]) -> str:
    lines = ["| logits | " + " | ".join(PARITY_COLUMNS) + " |", "|-" * (1 + len(PARITY_COLUMNS)) + "|"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        rows.setdefault(_parity_row(cell), []).append(cell)
    for name, cells in rows.items():
        row = []
        for backend, execution in PARITY_COLUMNS.values():
            worst = [
                cell["worst"]
                for cell in cells
                if (cell["backend"], cell["execution"]) == (backend, execution)
                and cell["device"] == "cpu"
                and cell["status"] in ("ok", "FAIL", "peer")
            ]
            row.append(f"{max(map(float, worst)):.2g}" if worst else "")
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    ok = sum(cell["status"] == "ok" for cell in document["cells"])
    failed = sum(cell["status"] == "FAIL" for cell in document["cells"])
    missing = sorted({cell["status"] for cell in document["cells"] if cell["status"].startswith("not run here")})
    return "\n".join([*lines, "", f"{ok} cells within the bound, {failed} not; {'; '.join(missing)}."])


def _parity_row(cell: dict[str, Any]) -> str:
    """Log-probabilities and their gradients have a row a kind of logits or of transforms; the rest have two in all."""
    quantity, transforms = cell["quantity"], cell.get("transforms")
    if quantity not in ("logprob", "gradient"):
        return f"{quantity}{', transformed' if transforms else ''}"
    of = "" if quantity == "logprob" else f"{quantity}, "
    return f"{of}{', '.join(transforms) if transforms else cell['distribution']}"


TABLES = {
    "parity": ("parity.json", parity),
    "forward": ("cpu-peers.json", forward),
    "head": ("cpu-peers.json", head),
    "grad": ("cpu-grad.json", grad),
    "stats": ("cpu-stats.json", stats),
    "reference": ("cpu-reference.json", reference),
    "shapes": ("cpu-shapes.json", shapes),
    "evaluation": ("cpu-shapes.json", small),
    "small": ("cpu-scaling.json", small),
    "slopes": ("cpu-scaling.json", slopes),
}


def filled(text: str, results: Path) -> str:
    """``text`` with what stands between each ``<!-- table: NAME -->`` and ``<!-- end: NAME -->`` made anew."""

    def made(place: re.Match[str]) -> str:
        opening, name, end = place.groups()
        if name not in TABLES:
            raise SystemExit(f"no table is called {name!r}; tables are {', '.join(TABLES)}")
        source, make = TABLES[name]
        if not (results / source).exists():
            raise SystemExit(f"the table {name!r} needs {source}: python -m bench --output bench/results")
        document = json.loads((results / source).read_text())
        if document.get("quick"):
            raise SystemExit(f"{source} is from --quick, which measures nothing worth showing")
        return f"{opening}\n{make(document)}\n\n{end}"

    text, count = MARKED.subn(made, text)
    if not count:
        raise SystemExit("there is no place marked for a table")
    return text


def _pages() -> list[Path]:
    return [path for name in PAGES if (path := ROOT / name).exists()]


def write() -> None:
    for page in _pages():
        page.write_text(filled(page.read_text(), RESULTS))


def check() -> None:
    for page in _pages():
        name, text = page.relative_to(ROOT).as_posix(), page.read_text()
        if filled(text, RESULTS) != text:
            raise SystemExit(f"{name}'s tables are not those of bench/results: python -m bench --readme")
        print(f"{name}'s tables are those of bench/results")
