"""The terminal's tables: one for each kind of case in a suite's document. Columns without an entry are left out."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.case import shape_text
from bench.methods import is_ours

Cell = Callable[[dict[str, Any]], str]


def figure(key: str, style: str, scale: float = 1) -> Cell:
    """``result[key]`` in the given style; of a key with a dot, the entry of the inner dictionary."""

    def cell(result: dict[str, Any]) -> str:
        *outer, last = key.split(".")
        for name in outer:
            result = result.get(name, {})
        return format(result[last] * scale, style) if result.get(last) is not None else ""

    return cell


def show(document: dict[str, Any], console: Console) -> None:
    for what in dict.fromkeys(case["what"] for case in document["cases"]):
        cases = [case for case in document["cases"] if case["what"] == what]
        title = document["suite"] if what == document["suite"] else f"{document['suite']}: {what}"
        shown = table(cases, title, _columns(what, document.get("published", {}).get("device", "")))
        if shown.row_count:
            console.print(shown)
    for name, reason in absent(document["cases"]).items():
        console.print(f"not run: {escape(name)}: {escape(reason)}", highlight=False)
    if document.get("slopes"):
        console.print(_slopes(document["slopes"]))


def _columns(what: str, published_on: str) -> list[tuple[str, Cell]]:
    unit, scale = ("us", 1e3) if what == "small" else ("ms", 1)

    def spread(result: dict[str, Any]) -> str:
        low, high = result["quartiles"]
        return f"{low * scale:.4g}-{high * scale:.4g}"

    return [
        (unit, figure("ms", ".4g", scale)),
        ("quartiles", spread),
        ("GB/s", figure("gb_s", ".3g")),
        ("x limit", figure("x_limit", ".2f")),
        ("x usual", figure("x_usual", ".2f")),
        ("us over usual", figure("over_usual_us", ".0f")),
        ("first s", figure("first_s", ".2f")),
        ("peak / logits", figure("share", ".1%")),
        ("MB above", figure("peak_mb", ".0f")),
        ("MB reserved", figure("reserved_mb", ".0f")),
        ("error", figure("error", ".1e")),
        ("gradient error", figure("gradient_error", ".1e")),
        *((("from usual", figure("to_usual", ".1e")),) if published_on else ()),
        (f"{published_on}: ms", figure("published.ms", ".3f")),
        ("MB above", figure("published.mb_above", ".0f")),
        ("from usual", figure("published.to_usual", ".1e")),
    ]


def table(cases: list[dict[str, Any]], title: str, columns: list[tuple[str, Cell]]) -> Table:
    results = [result for case in cases for result in case.get("methods", {}).values() if "ms" in result]
    columns = [(name, cell) for name, cell in columns if any(map(cell, results))]
    shown = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    shown.add_column("", min_width=34)
    for name, _ in columns:
        shown.add_column(name, justify="right")
    for case in cases:
        if "why_not" in case:
            continue
        shown.add_row(f"[italic]{case['library']}, {shape_text(case)}, {case['dtype']}[/italic]")
        for name, result in case["methods"].items():
            if "ms" in result:
                method = f"[bold]{name}[/bold]" if is_ours(name) else name
                shown.add_row(f"  {method}", *(cell(result) for _, cell in columns))
        shown.add_section()
    return shown


def absent(cases: list[dict[str, Any]]) -> dict[str, str]:
    """Why a library or a method did not run, each named once."""
    found: dict[str, str] = {}
    for case in cases:
        if "why_not" in case:
            found[f"{case['library']} on {case['device']}"] = case["why_not"]
        found |= {name: result["why_not"] for name, result in case.get("methods", {}).items() if "why_not" in result}
    return found


def _slopes(slopes: list[dict[str, Any]]) -> Table:
    shown = Table("library", "against", "method", title="slope of log time against log size", title_justify="left")
    shown.add_column("slope", justify="right")
    for line in slopes:
        shown.add_row(line["library"], line["against"], line["method"], f"{line['slope']:.3f}")
    return shown
