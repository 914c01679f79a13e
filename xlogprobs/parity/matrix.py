"""The matrix's cells: each column on each case, against the oracle and against the other columns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from xlogprobs.accurate import Array
from xlogprobs.parity import quantities
from xlogprobs.parity.columns import COLUMNS, PEERS, Column
from xlogprobs.parity.distributions import Case, cases
from xlogprobs.parity.oracle import difference, error, identical, rounded, rounding, ulp
from xlogprobs.parity.quantities import GRADIENTS, Inputs


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
    results: int = 0
    """How many numbers the column computed."""

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
    inputs = case.inputs()
    outputs: dict[Column, Array] = {}
    reasons: dict[Column, Cell] = {}
    for column in columns:
        if reason := unavailable[column] or column.lacks(case):
            reasons[column] = Cell(column, case, reason)
            continue
        try:
            outputs[column] = column.run(case.quantity, inputs)
        except Exception as failure:  # the matrix goes on; this cell shows what was raised
            reasons[column] = Cell(column, case, "FAIL", detail=f"{type(failure).__name__}: {failure}")
    exact = quantities.exact(case.quantity, inputs)
    return [reasons.get(column) or compare(column, case, inputs, exact, outputs) for column in columns]


def compare(column: Column, case: Case, inputs: Inputs, exact: Array, outputs: dict[Column, Array]) -> Cell:
    """The cell of ``column``, given the oracle's values and every column's output on this case."""
    out, wanted = outputs[column], np.dtype(case.result_dtype)
    if out.shape != exact.shape or (out.dtype != wanted and not out.dtype.kind == wanted.kind == "i"):
        wanted_text = f"expected {exact.shape} of {wanted}"
        return Cell(column, case, "FAIL", detail=f"the result is {out.shape} of {out.dtype}; {wanted_text}")
    unit = quantities.bound(case.quantity, exact, wanted, inputs)
    wrong = error(out, exact)
    others = [o for other, o in outputs.items() if other is not column and not other.peer and o.shape == out.shape]
    worst = float(np.max(wrong / unit, initial=0.0))
    between = unit + (rounding(exact, wanted) if case.quantity in GRADIENTS else 0.0)  # both are rounded
    apart = max((float(np.max(difference(out, other) / between, initial=0.0)) for other in others), default=0.0)
    return Cell(
        column,
        case,
        "peer" if column.peer else "ok" if max(worst, apart) <= 1 else "FAIL",
        worst,
        float(np.max(wrong / ulp(exact, out.dtype), initial=0.0)),
        float(np.mean(identical(out, rounded(exact, out.dtype)))),
        apart,
        results=out.size,
    )
