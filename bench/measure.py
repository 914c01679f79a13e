"""One measurement: interleaved times of all methods of a library, or the peak memory of one method."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.methods import LIBRARIES


def times(library: str, rows: int, vocab: int, dtype: str, repeats: int) -> dict[str, Any]:
    """Median milliseconds and quartiles of each method, the methods taking turns, and the time of each first call."""
    chosen = LIBRARIES[library]
    inputs = chosen.inputs(rows, vocab, dtype)
    methods = chosen.methods()
    first, taken = {}, {name: [] for name in methods}
    for name, method in methods.items():
        first[name] = _timed(chosen, method, inputs)
        chosen.finish(method(*inputs))
    for _ in range(repeats):
        for name, method in methods.items():
            taken[name].append(_timed(chosen, method, inputs))
    return {
        name: {
            "ms": round(statistics.median(values) * 1e3, 3),
            "quartiles": [round(q * 1e3, 3) for q in statistics.quantiles(values, n=4)[::2]],
            "first_s": round(first[name], 3),
        }
        for name, values in taken.items()
    }


def _timed(library: Any, method: Any, inputs: Any) -> float:
    start = time.perf_counter()
    library.finish(method(*inputs))
    return time.perf_counter() - start


def memory(library: str, method: str, rows: int, vocab: int, dtype: str) -> dict[str, float]:
    """Peak bytes above the inputs in the second call, by the kernel's high-water mark, as a share of the logits."""
    chosen = LIBRARIES[library]
    inputs = chosen.inputs(rows, vocab, dtype)
    function = chosen.methods()[method]
    chosen.finish(function(*inputs))
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    chosen.finish(function(*inputs))
    above = _status("VmHWM") - before
    return {"peak_mb": round(above / 1e6, 2), "share": round(above / (inputs[0].nbytes), 4)}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def in_subprocess(function: str, *arguments: Any) -> dict[str, Any]:
    """Run ``times`` or ``memory`` in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.measure", json.dumps([function, *arguments])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{function}{arguments} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    name, *given = json.loads(sys.argv[1])
    print(json.dumps({"times": times, "memory": memory}[name](*given)))
