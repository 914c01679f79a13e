"""The matrix's cells: each column on each case, against the oracle and against the other columns."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from xlogprobs.accurate import Array
from xlogprobs.parity.columns import COLUMNS, PEERS, Column
from xlogprobs.parity.distributions import Case, cases
from xlogprobs.parity.oracle import (
    bound,
    difference,
    error,
    gradient,
    gradient_bound,
    identical,
    reference,
    rounded,
    rounding,
    ulp,
)


@dataclass(frozen=True)
class Cell:
    """One column on one case. ``status`` is "ok", "FAIL", "peer" (bound by nothing), or why the cell was not run.

    ``worst`` is the largest error against the oracle in units of the bound, ``worst_ulp`` in units of the last place
    of the result's dtype, ``identical`` the share of results equal to the rounded oracle, ``apart`` the largest
    difference from any other column in units of the bound. ``detail`` says what failed.
    """

    column: Column
    case: Case
    status: str
    worst: float = np.nan
    worst_ulp: float = np.nan
    identical: float = np.nan
    apart: float = np.nan
    detail: str = ""

    @property
    def results(self) -> int:
        """How many numbers the column computed."""
        each = self.case.vocab if self.case.quantity == "gradient" else self.case.ids_per_position or 1
        return math.prod(self.case.shape) * each

    @property
    def ran(self) -> bool:
        return self.status in ("ok", "FAIL", "peer")


def measure(
    quick: bool = False,
    *,
    columns: Sequence[Column] = (*COLUMNS, *PEERS),
    rows: Iterable[Case] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Cell]:
    """Run every column on every case here and now; ``progress(done, all)`` is called after each case."""
    chosen = list(cases(quick) if rows is None else rows)
    unavailable = {column: column.available() for column in columns}
    cells: list[Cell] = []
    for done, case in enumerate(chosen, 1):
        cells += _measure_case(case, columns, unavailable)
        if progress:
            progress(done, len(chosen))
    return cells


def _measure_case(case: Case, columns: Sequence[Column], unavailable: dict[Column, str | None]) -> list[Cell]:
    if missing := case.missing():
        return [Cell(column, case, unavailable[column] or missing) for column in columns]
    logits, ids = case.arrays()
    exact = expected(case, logits, ids)
    outputs: dict[Column, Array] = {}
    reasons: dict[Column, Cell] = {}
    for column in columns:
        if reason := unavailable[column] or column.lacks(case):
            reasons[column] = Cell(column, case, reason)
            continue
        try:
            outputs[column] = computed(column, case, logits, ids)
        except Exception as failure:  # the matrix goes on; this cell shows what was raised
            reasons[column] = Cell(column, case, "FAIL", detail=f"{type(failure).__name__}: {failure}")
    return [reasons.get(column) or compare(column, case, exact, outputs) for column in columns]


def expected(case: Case, logits: Array, ids: Array) -> Array:
    """What the oracle says of the case, in float64."""
    if case.quantity == "gradient":
        return gradient(logits, ids, case.upstream(), temperature=case.temperature)
    return reference(logits, ids, temperature=case.temperature)


def computed(column: Column, case: Case, logits: Array, ids: Array) -> Array:
    """What the column makes of the case."""
    if case.quantity == "gradient":
        return column.gradient(logits, ids, case.upstream(), case.temperature)
    return column.run(logits, ids, case.temperature)


def compare(column: Column, case: Case, exact: Array, outputs: dict[Column, Array]) -> Cell:
    """The cell of ``column``, given the oracle's values and every column's output on this case."""
    out = outputs[column]
    if out.shape != exact.shape or out.dtype != case.result_dtype:
        wanted = f"expected {exact.shape} of {np.dtype(case.result_dtype)}"
        return Cell(column, case, "FAIL", detail=f"the result is {out.shape} of {out.dtype}; {wanted}")
    if case.quantity == "gradient":
        unit = gradient_bound(exact, case.upstream(), case.temperature, case.result_dtype)
    else:
        unit = bound(exact, case.result_dtype)
    wrong = error(out, exact)
    others = [o for other, o in outputs.items() if other is not column and not other.peer and o.shape == out.shape]
    worst = float(np.max(wrong / unit, initial=0.0))
    between = unit + (rounding(exact, case.result_dtype) if case.quantity == "gradient" else 0.0)  # both are rounded
    apart = max((float(np.max(difference(out, other) / between, initial=0.0)) for other in others), default=0.0)
    return Cell(
        column,
        case,
        "peer" if column.peer else "ok" if max(worst, apart) <= 1 else "FAIL",
        worst,
        float(np.max(wrong / ulp(exact, out.dtype), initial=0.0)),
        float(np.mean(identical(out, rounded(exact, out.dtype)))),
        apart,
    )
