"""The matrix as a table for a terminal and as JSON."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np

from xlogprobs.parity.columns import Column
from xlogprobs.parity.matrix import Cell


def table(cells: Sequence[Cell]) -> Any:
    """The matrix as a rich renderable: a row per distribution and dtype, a column per backend that ran here."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    ran = [column for column in dict.fromkeys(cell.column for cell in cells) if _any_ran(cells, column)]
    view = Table(
        title="Parity with the float64 oracle",
        caption="worst error in units of the bound, worst error in ulp of the result, and the share of results that are"
        " bit-identical to the rounded oracle, over all vocabularies, shapes and temperatures",
    )
    view.add_column("logits")
    for column in ran:
        view.add_column(f"{column} (peer)" if column.peer else str(column), justify="right")
    for name in dict.fromkeys(_row(cell) for cell in cells):
        row = [cell for cell in cells if _row(cell) == name]
        if any(cell.ran for cell in row):
            view.add_row(name, *(_summary([c for c in row if c.column == column]) for column in ran))
    notes = [f"{column}: {reason}" for column, reason in _not_run(cells).items()]
    bad = [cell for cell in cells if cell.status == "FAIL"]
    failures = [f"FAIL {c.column}, {c.case}: {c.detail or f'{c.worst:.3g} x bound, {c.apart:.3g} apart'}" for c in bad]
    kept = sum(cell.status == "ok" for cell in cells)
    notes += [*failures, f"{kept} cells within the bound of the oracle and of each other, {len(bad)} not"]
    return Group(view, *(Text(line) for line in notes))


def _row(cell: Cell) -> str:
    transforms = "".join(f" {transform}" for transform in cell.case.transforms)
    return f"{cell.case.title} {cell.case.dtype}{transforms}"


def _any_ran(cells: Sequence[Cell], column: Column) -> bool:
    return any(cell.ran for cell in cells if cell.column == column)


def _summary(cells: Sequence[Cell]) -> str:
    done = [cell for cell in cells if cell.ran]
    if not done:
        return "-"
    if any(cell.detail for cell in done):
        return "FAIL"
    failed = any(cell.status == "FAIL" for cell in done)
    worst, last_place = max(cell.worst for cell in done), max(cell.worst_ulp for cell in done)
    counts = [cell.results for cell in done]
    share = float(np.average([cell.identical for cell in done], weights=counts))
    return f"{'FAIL ' if failed else ''}{worst:.2g} {last_place:.2g}ulp {share:.0%}"


def _not_run(cells: Sequence[Cell]) -> dict[str, str]:
    """What was not run at all, and why: columns by name, cases that could not be made by distribution and dtype."""
    reasons: dict[str, str] = {}
    for cell in cells:
        if not _any_ran(cells, cell.column):
            reasons.setdefault(str(cell.column), cell.status)
        elif not cell.ran and cell.case.missing() == cell.status:
            reasons.setdefault(f"{cell.case.distribution} {cell.case.dtype}", cell.status)
    return reasons


def to_json(cells: Sequence[Cell]) -> str:
    """The cells as JSON, with the date, the device and the versions they were measured on; inf and NaN as strings."""
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _devices(),
        "versions": _versions(),
        "cells": [_plain(cell) for cell in cells],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def _plain(cell: Cell) -> dict[str, Any]:
    column = {name: getattr(cell.column, name) for name in ("backend", "execution", "device", "peer")}
    numbers = {name: _number(getattr(cell, name)) for name in ("worst", "worst_ulp", "identical", "apart")}
    return {**column, **asdict(cell.case), "status": cell.status, "detail": cell.detail, **numbers}


def _number(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


def _devices() -> dict[str, str]:
    devices = {"cpu": f"{platform.machine()} {platform.system()}"}
    if find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            devices["cuda"] = torch.cuda.get_device_name()
    return devices


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("xlogprobs", "numpy", "torch", "jax", "array-api-compat", "array-api-strict", "ml_dtypes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
