"""The parity matrix: every backend, eager and compiled, against a float64 oracle and against every other backend.

A `Case` is a batch of logits (dtype, vocabulary, distribution, shape, transforms) and what is asked of it; a `Column`
is one way to compute that: log-probabilities, another statistic, or a gradient; a `Cell` says how far the column is
from the oracle and from the other columns, in units of the contract's bound. `measure` fills the matrix, `table` and
`to_json` report it. Only NumPy is needed to import this package.
"""

from xlogprobs.parity.columns import COLUMNS, PEERS, Column, torch_array
from xlogprobs.parity.distributions import DISTRIBUTIONS, DTYPES, REAL, REAL_VOCAB, VOCABS, Case, cases
from xlogprobs.parity.matrix import Cell, compare, measure
from xlogprobs.parity.oracle import (
    bound,
    difference,
    entropy,
    error,
    gradient,
    gradient_bound,
    identical,
    kl,
    lse,
    rank,
    reference,
    rounded,
    top_ids,
    ulp,
)
from xlogprobs.parity.quantities import GRADIENTS, QUANTITIES, Inputs, exact
from xlogprobs.parity.report import table, to_json

__all__ = [
    "COLUMNS",
    "DISTRIBUTIONS",
    "DTYPES",
    "GRADIENTS",
    "PEERS",
    "QUANTITIES",
    "REAL",
    "REAL_VOCAB",
    "VOCABS",
    "Case",
    "Cell",
    "Column",
    "Inputs",
    "bound",
    "cases",
    "compare",
    "difference",
    "entropy",
    "error",
    "exact",
    "gradient",
    "gradient_bound",
    "identical",
    "kl",
    "lse",
    "measure",
    "rank",
    "reference",
    "rounded",
    "table",
    "to_json",
    "top_ids",
    "torch_array",
    "ulp",
]
