"""The parity matrix: every backend, eager and compiled, against a float64 oracle and against every other backend.

A `Case` is a batch of logits (dtype, vocabulary, distribution, shape, temperature); a `Column` is one way to compute
its log-probabilities; a `Cell` says how far the column is from `reference` and from the other columns, in units of
`bound`. `measure` fills the matrix, `table` and `to_json` report it. Only NumPy is needed to import this package.
"""

from xlogprobs.parity.columns import COLUMNS, PEERS, Column, torch_array
from xlogprobs.parity.distributions import DISTRIBUTIONS, DTYPES, REAL, REAL_VOCAB, VOCABS, Case, cases
from xlogprobs.parity.matrix import Cell, compare, measure
from xlogprobs.parity.oracle import bound, difference, error, identical, reference, rounded, ulp
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
    "difference",
    "error",
    "identical",
    "measure",
    "reference",
    "rounded",
    "table",
    "to_json",
    "torch_array",
    "ulp",
]
