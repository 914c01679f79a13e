"""The README's tables, written from the committed results and checked in CI to be what those say."""

import json
import re
from pathlib import Path
from typing import Any

from bench.methods import OURS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PARITY_COLUMNS = {
    "NumPy": ("numpy", "eager"),
    "array-api-strict": ("array-api-strict", "eager"),
    "torch eager": ("torch", "eager"),
    "torch.compile": ("torch", "compiled"),
    "jax.jit": ("jax", "user's jit"),
    "torch.log_softmax": ("torch log_softmax", "compiled"),
    "-cross_entropy, torch.compile": ("torch -cross_entropy", "compiled"),
}


def forward(document: dict[str, Any]) -> str:
    lines = [
        "| | logits | dtype | ms | x of the read limit | x of the usual way | peak memory / logits |",
        "|-" * 7 + "|",
    ]
    for case in document["forward"]:
        names = [name for name in case["methods"] if "share" in case["methods"][name]]
        for name in names:
            result = case["methods"][name]
            bold = "**" if name == OURS else ""
            lines.append(
                f"| {bold}{case['library']}: {name}{bold} | {case['rows']} x {case['vocab']} | {case['dtype']} "
                f"| {result['ms']:.1f} | {result['x_limit']:.1f} | {result['x_baseline']:.2f} | {result['share']:.1%} |"
            )
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return "\n".join(
        [*lines, "", f"{machine['cores']} cores of {machine['processor']}, {machine['date']}; {versions}."]
    )


def parity(document: dict[str, Any]) -> str:
    lines = ["| logits | " + " | ".join(PARITY_COLUMNS) + " |", "|-" * (1 + len(PARITY_COLUMNS)) + "|"]
    for name in dict.fromkeys((cell["quantity"], cell["distribution"]) for cell in document["cells"]):
        row = []
        for backend, execution in PARITY_COLUMNS.values():
            worst = [
                cell["worst"]
                for cell in document["cells"]
                if (cell["quantity"], cell["distribution"]) == name
                and (cell["backend"], cell["execution"]) == (backend, execution)
                and cell["device"] == "cpu"
                and cell["status"] in ("ok", "FAIL", "peer")
            ]
            row.append(f"{max(map(float, worst)):.2g}" if worst else "")
        of = "" if name[0] == "logprob" else f"{name[0]}, "
        lines.append(f"| {of}{name[1]} | " + " | ".join(row) + " |")
    ok = sum(cell["status"] == "ok" for cell in document["cells"])
    failed = sum(cell["status"] == "FAIL" for cell in document["cells"])
    missing = sorted({cell["status"] for cell in document["cells"] if cell["status"].startswith("not run here")})
    return "\n".join([*lines, "", f"{ok} cells within the bound, {failed} not; {'; '.join(missing)}."])


def filled(text: str) -> str:
    for name, source, make in (("parity", "parity.json", parity), ("forward", "cpu.json", forward)):
        table = make(json.loads((RESULTS / source).read_text()))
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no place marked for the table {name!r}")
        text = pattern.sub(lambda place, table=table: f"{place[1]}\n{table}\n\n{place[2]}", text)
    return text


def write() -> None:
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))


def check() -> None:
    text = (ROOT / "README.md").read_text()
    if filled(text) != text:
        raise SystemExit("README.md's tables are not those of bench/results: python -m bench --readme")
    print("README.md's tables are those of bench/results")
