"""`python -m bench`: where the time and memory go, beside the peers and the limit of the machine."""

import argparse
import concurrent.futures
import datetime
import importlib.metadata
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import plots, readme, report
from bench.case import Case
from bench.libraries import LIBRARIES
from bench.measure import in_subprocess
from bench.methods import LIMITS, PUBLISHED
from bench.suites import SUITES, Suite, registered, slopes

PACKAGES = (
    "xlogprobs", "numpy", "torch", "jax", "scipy", "optax", "trl", "cut-cross-entropy", "tokamax", "triton",
    "liger-kernel", "flash-attn", "quack-kernels", "torch-npu", "numba",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog="suites: " + "; ".join(f"{name} ({suite.answers})" for name, suite in SUITES.items()),
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all that there are")
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cpu")
    parser.add_argument("--backend", choices=[*LIBRARIES], action="append", help="measure these alone")
    parser.add_argument("--quick", action="store_true", help="small shapes: a check that it runs, not a measurement")
    parser.add_argument("--repeats", type=int, help="in place of each suite's own number")
    parser.add_argument("--output", type=Path, help="a folder for DEVICE-SUITE.json, for example bench/results")
    parser.add_argument("--plots", action="store_true", help="only draw docs/plots/ from bench/results/")
    parser.add_argument(
        "--readme", action="store_true", help="only write the tables of README and docs from bench/results/"
    )
    parser.add_argument("--check-readme", action="store_true", help="only check that they are those")
    options = parser.parse_args(arguments)
    if options.readme:
        readme.write()
    if options.check_readme:
        readme.check()
    if options.plots:
        for path in plots.draw():
            print(path)
    if options.readme or options.check_readme or options.plots:
        return
    console = Console(width=None if Console().is_terminal else 180)
    for name in options.suites:
        if name not in SUITES:
            parser.error(f"there is no suite {name!r}; suites are {', '.join(SUITES)}")
        if reason := SUITES[name].missing():
            parser.error(f"suite {name}: {reason}")
    with tempfile.TemporaryDirectory() as cache:
        for name in options.suites or registered():
            document = measured(SUITES[name], options, cache, console)
            report.show(document, console)
            if options.output and any("methods" in case for case in document["cases"]):
                options.output.mkdir(parents=True, exist_ok=True)
                path = options.output / f"{options.device}-{name}.json"
                path.write_text(json.dumps(document, indent=1) + "\n")
    if not options.suites:
        for name, suite in SUITES.items():
            if reason := suite.missing():
                console.print(f"suite {name}: {reason}")


def measured(suite: Suite, options: argparse.Namespace, cache: str, console: Console) -> dict[str, Any]:
    """The suite's document: the machine, and every case with its methods. ``cache`` is a folder for compiled code."""
    device, quick = options.device, options.quick
    groups = [suite.cases(name, device, quick) for name in options.backend or LIBRARIES if suite.takes(name)]
    environment = _environment(cache)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    cases: list[dict[str, Any]] = []
    with (
        Progress(*columns, console=console, transient=True) as progress,
        concurrent.futures.ThreadPoolExecutor(2 if device == "cpu" else 1) as pool,
    ):
        task = progress.add_task(suite.name, total=sum(map(len, groups)) * (2 if suite.memory else 1))
        for group in groups:
            found = []
            progress.update(task, description=f"{suite.name}: {group[0].library}, time")
            for result in in_subprocess("times", group, options.repeats or suite.repeats, environment):
                found.append(result)
                progress.advance(task)
            if suite.memory:
                progress.update(task, description=f"{suite.name}: {group[0].library}, memory")
                for case, result in zip(group, found, strict=True):
                    _add_memory(case, result.get("methods", {}), environment, pool)
                    progress.advance(task)
            cases += found
    document = {"suite": suite.name, "device": device, "quick": quick, "machine": machine(cases), "cases": cases}
    if suite.name == "reference":
        document["published"] = PUBLISHED
        for name, figures in PUBLISHED["methods"].items():
            for case in cases:
                case.get("methods", {}).get(name, {})["published"] = figures
    if suite.name == "scaling":
        document["slopes"] = slopes(cases)
    return document


def _add_memory(
    case: Case, found: dict[str, Any], environment: dict[str, str], pool: concurrent.futures.Executor
) -> None:
    """Nothing is timed meanwhile, so on a CPU two processes may run at once. There, glibc is to give freed arrays back
    at once: kept for the second call, they would not be seen in its peak."""
    environment = {**environment, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}

    def add(name: str) -> None:
        (measured,) = in_subprocess("memory", [case], name, environment)
        found[name] |= measured

    list(pool.map(add, [name for name in found if "ms" in found[name] and name not in LIMITS]))


def _environment(cache: str) -> dict[str, str]:
    """Compile caches that are empty when the run begins, so that a first call compiles; JAX takes device memory as it
    needs it, or its counters would show the whole device."""
    return {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TRITON_CACHE_DIR": f"{cache}/triton",
    }


def machine(cases: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "device": next((case["device_name"] for case in cases if "device_name" in case), "none that runs"),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
