"""Measurements, in processes of their own: times and errors of a library's cases, or the peak memory of one method.

Machines drift by tens of percent within minutes, so only times of one case are compared: its methods take turns,
in another order in each repeat, limit included: a method that gave hundreds of megabytes back slows down
whichever comes after it. Memory is one method a process, since what another method left in the allocator's
hands would hide a part of it.
"""

import dataclasses
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.case import Case
from bench.libraries import LIBRARIES, Inputs, Library, host_dtype
from bench.methods import LIMITS, is_ours, methods, usual
from xlogprobs.parity import bound, gradient, gradient_bound, reference

RESULT = "result: "  # before a line of output, among what peers print
SAMPLE = 64  # rows on which the error is taken
SHORTEST = 2e-3  # seconds of one repeat: shorter calls are made several times
PAUSE = 0.02  # seconds before each: OpenMP's threads keep a core busy for milliseconds after the method before


def times(case: Case, repeats: int) -> dict[str, Any]:
    """The methods' milliseconds, errors and first call, or why they can't run."""
    library = LIBRARIES[case.library]
    described = case.described()
    if reason := library.why_not(case.device):
        return {**described, "why_not": reason}
    inputs = library.inputs(case)
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    loops: dict[str, int] = {}
    sampled: dict[str, Any] = {}
    table = methods(case.what, case.library)
    errors = Errors(case, library, inputs)
    for name, method in table.items():
        found[name] = {}
        try:
            if reason := method.available(case.device):
                found[name]["why_not"] = reason
                continue
            run = method.make(inputs)
            first, out = _timed(library, run, inputs)
            found[name]["first_s"] = round(first, 3)
            if name not in LIMITS and method.per_token:
                sampled[name] = errors.sample(out)
                found[name] |= errors.of(*sampled[name])
            del out
            warm, _ = _timed(library, run, inputs)
        except Exception as error:
            if name in LIMITS or is_ours(name):
                raise
            found[name] = {"why_not": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            continue
        calls[name], loops[name] = run, max(1, round(SHORTEST / warm))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    shuffle = random.Random(0)
    for _ in range(repeats):
        for name in shuffle.sample(list(calls), len(calls)):
            taken[name].append(_timed(library, calls[name], inputs, loops[name])[0])
    medians = {name: statistics.median(values) for name, values in taken.items()}
    compared = usual(case.what, case.library)
    for name, values in taken.items():
        beside = None if name in LIMITS else medians.get(compared)
        found[name] |= _figures(case, values, medians[next(iter(table))], beside)
        if name in sampled and compared in sampled:
            found[name]["to_usual"] = _digits(np.max(np.abs(sampled[name][0] - sampled[compared][0])))
    return {**described, "usual": compared, "device_name": library.device_name(case.device), "methods": found}


def _figures(case: Case, seconds: list[float], limit: float, compared: float | None) -> dict[str, Any]:
    median = statistics.median(seconds)
    figures = {
        "ms": _digits(median * 1e3),
        "quartiles": [_digits(q * 1e3) for q in statistics.quantiles(seconds, n=4, method="inclusive")[::2]],
        "gb_s": _digits(case.bytes_to_move / median / 1e9),
        "x_limit": _digits(median / limit),
    }
    if compared is not None:
        figures["x_usual"] = _digits(median / compared)
        if case.what == "small":
            figures["over_usual_us"] = _digits((median - compared) * 1e6)
    return figures


def _timed(library: Library, run: Callable[[], Any], inputs: Inputs, loops: int = 1) -> tuple[float, Any]:
    """Seconds a call, and the last result, which is freed after the clock has stopped."""
    inputs.restore()
    library.finish(inputs.ids)
    time.sleep(PAUSE)
    start = time.perf_counter()
    for _ in range(loops):
        out = library.finish(run())
    return (time.perf_counter() - start) / loops, out


def _digits(value: Any) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


class Errors:
    """Worst distances from float64 on a sample of the rows."""

    def __init__(self, case: Case, library: Library, inputs: Inputs) -> None:
        self.case, self.library = case, library
        self.rows = np.unique(np.linspace(0, case.rows - 1, SAMPLE).astype(int))
        self.ids = self._rows(inputs.ids, 1)[:, 0].astype(np.int64)
        if case.what == "head":
            hidden, weight = (library.numpy(part).astype(np.float64) for part in (inputs.hidden, inputs.weight))
            logits = hidden[self.rows] @ weight.T
        else:
            logits = self._rows(inputs.logits, case.vocab)
        self.exact = reference(logits, self.ids)
        if inputs.upstream is not None:
            upstream = self._rows(inputs.upstream, 1)[:, 0]
            self.gradient = gradient(logits, self.ids, upstream)
            self.gradient_bound = gradient_bound(self.gradient, upstream, 1.0, host_dtype(case.dtype))

    def _rows(self, array: Any, width: int) -> Any:
        flat = array.reshape(-1, width)
        return self.library.numpy(flat[self.rows])

    def sample(self, result: Any) -> tuple[Any, Any]:
        """Log-probabilities and, where there is one, the gradient of the sampled rows."""
        out, *rest = result if isinstance(result, tuple) else (result,)
        slope = self._rows(rest[0], self.case.vocab) if self.case.what == "grad" else None
        return self._rows(out, 1)[:, 0].astype(np.float64), slope

    def of(self, out: Any, slope: Any) -> dict[str, float]:
        """Absolute, and in units of the contract's bound, which a head's products are not held to."""
        apart = np.abs(out - self.exact)
        found = {"error": _digits(apart.max())}
        if self.case.what != "head":
            found["error_bounds"] = _digits((apart / bound(self.exact)).max())
        if slope is not None:
            apart = np.abs(slope - self.gradient)
            found["gradient_error"] = _digits(apart.max())
            found["gradient_error_bounds"] = _digits((apart / self.gradient_bound).max())
        return found


def memory(case: Case, name: str) -> dict[str, float]:
    """Peak bytes above the inputs in the second call, as megabytes and as a share of the logits."""
    library = LIBRARIES[case.library]
    inputs = library.inputs(case)
    run = methods(case.what, case.library)[name].make(inputs)
    library.finish(run())
    inputs.restore()
    found = library.peak(lambda: library.finish(run()), case.device)
    result = {f"{kind}_mb": round(value / 1e6, 2) for kind, value in found.items()}
    return {**result, "share": round(found["peak"] / case.logits_bytes, 4)}


def in_subprocess(
    function: str, cases: list[Case], argument: Any, environment: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Run ``times`` or ``memory`` of the cases one after the other, in a process of their own; results as they come."""
    given = json.dumps([function, [dataclasses.asdict(case) for case in cases], argument])
    command = [sys.executable, "-W", "ignore", "-m", "bench.measure", given]
    options: dict[str, Any] = {"env": environment, "cwd": Path(__file__).parents[1], "text": True}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, **options) as process,
    ):
        for line in process.stdout or ():
            if line.startswith(RESULT):
                yield json.loads(line.removeprefix(RESULT))
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"{function} of {cases[0]}, {argument} failed:\n{errors.read()[-2000:]}")


if __name__ == "__main__":
    kind, given, argument = json.loads(sys.argv[1])
    for fields in given:
        found = {"times": times, "memory": memory}[kind](Case(**{**fields, "shape": tuple(fields["shape"])}), argument)
        print(RESULT + json.dumps(found), flush=True)
