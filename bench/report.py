"""The terminal's tables."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.case import shape_text
from bench.methods import LIMITS, is_ours


def show(document: dict[str, Any], console: Console) -> None:
    parts = dict.fromkeys(case["what"] for case in document["cases"])
    for what in parts:
        console.print(_table(document, [case for case in document["cases"] if case["what"] == what], what))
    if document.get("slopes"):
        console.print(_slopes(document["slopes"]))


def _table(document: dict[str, Any], cases: list[dict[str, Any]], what: str) -> Table:
    published = document.get("published") if what == "reference" else None
    small = what == "small"
    shown = Table(title=f"{document['suite']}: {what}", title_justify="left")
    for name in ("library", "logits", "dtype", "method"):
        shown.add_column(name, overflow="fold")
    for name in (
        "us" if small else "ms",
        "quartiles",
        "GB/s",
        "x limit",
        "x usual",
        "first s",
        "peak / logits",
        "MB above",
        "error",
        *(("gradient error",) if what == "grad" else ()),
        *((f"{published['device']}: ms", "MB above") if published else ()),
    ):
        shown.add_column(name, justify="right")
    for case in cases:
        label = (case["library"], shape_text(case), case["dtype"])
        if "why_not" in case:
            shown.add_row(*label, "", escape(case["why_not"]))
            continue
        for name, result in case["methods"].items():
            method = f"[bold]{name}[/bold]" if is_ours(name) else name
            if "why_not" in result:
                shown.add_row(*label, f"{method}\n[dim]not run: {escape(result['why_not'])}[/dim]")
                continue
            scale = 1e3 if small else 1
            low, high = result["quartiles"]
            row = [
                f"{result['ms'] * scale:.4g}",
                f"{low * scale:.3g}-{high * scale:.3g}",
                f"{result['gb_s']:.3g}",
                f"{result['x_limit']:.2f}",
                f"{result['x_usual']:.2f}" if "x_usual" in result else "",
                f"{result['first_s']:.2f}",
                f"{result['share']:.1%}" if "share" in result else "",
                f"{result['peak_mb']:.0f}" if "peak_mb" in result else "",
                f"{result['error']:.1e}" if "error" in result else "",
            ]
            if what == "grad":
                row.append(f"{result['gradient_error']:.1e}" if "gradient_error" in result else "")
            if published and name in published["methods"]:
                figures = published["methods"][name]
                row += [f"{figures['ms']:.3f}", f"{figures['peak_mb'] - published['logits_mb']:.0f}"]
            shown.add_row(*label, method, *row)
        shown.add_section()
    if any(name in LIMITS for case in cases for name in case.get("methods", {})):
        shown.caption = "x limit: the limit's time is taken in the same process, in turn with the methods"
    return shown


def _slopes(slopes: list[dict[str, Any]]) -> Table:
    shown = Table("library", "against", "method", title="slope of log time against log size", title_justify="left")
    shown.add_column("slope", justify="right")
    for line in slopes:
        shown.add_row(line["library"], line["against"], line["method"], f"{line['slope']:.3f}")
    return shown
