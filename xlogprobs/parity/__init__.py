"""The parity matrix: every backend, eager and compiled, against a float64 oracle and against every other backend.

A `Case` is a batch of logits (dtype, vocabulary, distribution, shape, temperature) and what is asked of it; a `Column`
is one way to compute log-probabilities or their gradient; a `Cell` says how far the column is from the oracle and from
the other columns, in units of the contract's bound. `measure` fills the matrix, `table` and `to_json` report it. Only
NumPy is needed to import this package.
"""

from xlogprobs.parity.columns import COLUMNS, PEERS, Column, torch_array
from xlogprobs.parity.distributions import DISTRIBUTIONS, DTYPES, REAL, REAL_VOCAB, VOCABS, Case, cases
from xlogprobs.parity.matrix import Cell, compare, computed, expected, measure
from xlogprobs.parity.oracle import (
    bound,
    difference,
    error,
    gradient,
    gradient_bound,
    identical,
    reference,
    rounded,
    ulp,
)
from xlogprobs.parity.report import table, to_json

__all__ = [
    "COLUMNS",
    "DISTRIBUTIONS",
    "DTYPES",
    "PEERS",
    "REAL",
    "REAL_VOCAB",
    "VOCABS",
    "Case",
    "Cell",
    "Column",
    "bound",
    "cases",
    "compare",
    "computed",
    "difference",
    "error",
    "expected",
    "gradient",
    "gradient_bound",
    "identical",
    "measure",
    "reference",
    "rounded",
    "table",
    "to_json",
    "torch_array",
    "ulp",
]
