"""`python -m bench`: forward time and memory beside the read limit and what people use today."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import readme
from bench.measure import in_subprocess
from bench.methods import LIBRARIES, LIMIT, OURS

SHAPES = [(2048, 32768), (512, 151936), (1024, 50257)]
QUICK = [(256, 32768), (64, 151936)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--backend", choices=[*LIBRARIES], action="append", help="measure these alone")
    parser.add_argument("--quick", action="store_true", help="small shapes: a check that it runs, not a measurement")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, help="write the results as JSON, for example under bench/results/")
    parser.add_argument("--readme", action="store_true", help="only write the README's tables from bench/results/")
    parser.add_argument("--check-readme", action="store_true", help="only check that they are those")
    options = parser.parse_args()
    if options.readme:
        readme.write()
        return
    if options.check_readme:
        readme.check()
        return
    cases = [
        (library, rows, vocab, dtype)
        for library in options.backend or LIBRARIES
        for rows, vocab in (QUICK if options.quick else SHAPES)
        for dtype in ("float32", "bfloat16")
    ]
    rows = [_case(*case, options.repeats) for case in track(cases, description="measuring", transient=True)]
    Console(width=150).print(table(rows))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"machine": machine(), "forward": rows}, indent=1) + "\n")


def _case(library: str, rows: int, vocab: int, dtype: str, repeats: int) -> dict[str, Any]:
    taken = in_subprocess("times", library, rows, vocab, dtype, repeats)
    for name, result in taken.items():
        result["x_limit"] = round(result["ms"] / taken[LIMIT]["ms"], 2)
        result["x_baseline"] = round(result["ms"] / taken[LIBRARIES[library].baseline]["ms"], 3)
        if name != LIMIT:
            result |= in_subprocess("memory", library, name, rows, vocab, dtype)
    return {"library": library, "rows": rows, "vocab": vocab, "dtype": dtype, "methods": taken}


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("library", "shape", "dtype", "method", "ms", "x of the limit", "x of the baseline", "peak / logits")
    for case in rows:
        for name, result in case["methods"].items():
            shown.add_row(
                case["library"],
                f"{case['rows']} x {case['vocab']}",
                case["dtype"],
                f"[bold]{name}[/bold]" if name == OURS else name,
                f"{result['ms']:.1f}",
                f"{result['x_limit']:.2f}",
                f"{result['x_baseline']:.2f}",
                f"{result['share']:.2%}" if "share" in result else "",
                end_section=name == OURS,
            )
    return shown


def machine() -> dict[str, Any]:
    names = ("xlogprobs", "numpy", "torch", "jax", "optax")
    return {
        "date": datetime.date.today().isoformat(),
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


if __name__ == "__main__":
    main()
