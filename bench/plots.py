"""`python -m bench --plots`: docs/plots/*.svg, drawn from the results that are there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.case import shape_text
from bench.methods import LIMITS, OURS, is_ours
from bench.readme import RESULTS, ROOT

PLOTS = ROOT / "docs" / "plots"
LINES = {"rows": "rows of 1024 logits", "vocab": "vocabulary"}


def draw(results: Path = RESULTS, folder: Path = PLOTS) -> list[Path]:
    """One figure for each bar chart and each scaling line of each device's results; the paths written."""
    written: list[Path] = []
    for source in sorted(results.glob("*-*.json")):
        document = json.loads(source.read_text())
        for name, make in FIGURES.get(document["suite"], {}).items():
            written.append(_saved(make(document), folder / f"{document['device']}-{name}.svg"))
    if not written:
        raise SystemExit(f"no results to draw in {results}: python -m bench --output bench/results")
    return written


def _saved(figure: Any, path: Path) -> Path:
    import matplotlib as mpl

    path.parent.mkdir(parents=True, exist_ok=True)
    # the same results give the same file
    with mpl.rc_context({"svg.hashsalt": "xlogprobs"}):
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    return path


def bars(key: str, title: str) -> Callable[[dict[str, Any]], Any]:
    """One group of bars a case, one panel a library."""

    def figure(document: dict[str, Any]) -> Any:
        from matplotlib.figure import Figure

        cases = [case for case in document["cases"] if case.get("methods") and case["what"] != "head"]
        libraries = list(dict.fromkeys(case["library"] for case in cases))
        drawn = Figure(figsize=(9, 2.6 * len(libraries)))
        for panel, library in zip(drawn.subplots(len(libraries), squeeze=False)[:, 0], libraries, strict=True):
            own = [case for case in cases if case["library"] == library]
            names = [name for name in own[0]["methods"] if any(key in case["methods"][name] for case in own)]
            names = [name for name in names if name not in LIMITS]
            for n, name in enumerate(names):
                height = 0.8 / len(names)
                values = [case["methods"][name].get(key, 0) for case in own]
                places = [place + n * height for place in range(len(own))]
                colour = "black" if name == OURS else "dimgray" if is_ours(name) else f"C{n}"
                shown = panel.barh(places, values, height, label=name, color=colour)
                panel.bar_label(shown, fmt="%.2g", padding=2, fontsize=7)
            labels = [f"{shape_text(case)}\n{case['dtype']}" for case in own]
            panel.set_yticks([place + 0.4 for place in range(len(own))], labels, fontsize=7)
            panel.invert_yaxis()
            panel.set_title(f"{library}: {title}", fontsize=9, loc="left")
            panel.legend(fontsize=7)
            panel.spines[["top", "right"]].set_visible(False)
        drawn.tight_layout()
        _signed(drawn, document)
        return drawn

    return figure


def lines(series: str) -> Callable[[dict[str, Any]], Any]:
    """Time against size on logarithmic axes, one panel a library."""

    def figure(document: dict[str, Any]) -> Any:
        from matplotlib.figure import Figure

        cases = [case for case in document["cases"] if case.get("methods") and case["series"] == series]
        libraries = list(dict.fromkeys(case["library"] for case in cases))
        drawn = Figure(figsize=(4 * len(libraries), 3.6))
        for panel, library in zip(drawn.subplots(1, len(libraries), squeeze=False)[0], libraries, strict=True):
            own = [case for case in cases if case["library"] == library]
            size = [case["shape"][0] if series == "rows" else case["vocab"] for case in own]
            for name in own[0]["methods"]:
                times = [case["methods"][name].get("ms") for case in own]
                style = {"color": "black", "linewidth": 2} if is_ours(name) else {}
                style |= {"linestyle": "--"} if name in LIMITS else {"marker": "."}
                panel.loglog(size, times, label=name, **style)
            panel.set_title(library, fontsize=9, loc="left")
            panel.set_xlabel(LINES[series], fontsize=8)
            panel.set_ylabel("ms", fontsize=8)
            panel.tick_params(labelsize=7)
            panel.legend(fontsize=7)
            panel.grid(alpha=0.3)
        drawn.tight_layout()
        _signed(drawn, document)
        return drawn

    return figure


def _signed(figure: Any, document: dict[str, Any]) -> None:
    machine = document["machine"]
    figure.text(0, -0.02, f"{machine['cores']} cores of {machine['device']}, {machine['date']}", fontsize=7)


FIGURES: dict[str, dict[str, Callable[[dict[str, Any]], Any]]] = {
    "peers": {
        "limit": bars("x_limit", "forward time, x of the read limit"),
        "memory": bars("share", "forward, peak memory above the inputs / logits"),
    },
    "grad": {
        "grad-limit": bars("x_limit", "forward and backward time, x of the read and write limit"),
        "grad-memory": bars("share", "forward and backward, peak memory above the inputs / logits"),
    },
    "scaling": {"rows": lines("rows"), "vocab": lines("vocab")},
}
