"""A case: what is computed, by which library, on logits of which shape, dtype and device."""

import math
from dataclasses import dataclass
from typing import Any

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Case:
    """``what`` names the table of methods: forward, reference, grad, head, stats or small."""

    what: str
    library: str
    shape: tuple[int, ...]
    vocab: int
    dtype: str = "float32"
    device: str = "cpu"
    series: str = ""
    """Cases of a suite that belong to one line of a plot or one part of a table."""
    hidden: int = 0
    """Width of the hidden states, where a linear head makes the logits."""

    @property
    def rows(self) -> int:
        return math.prod(self.shape)

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * SIZES[self.dtype]

    @property
    def bytes_to_move(self) -> int:
        """What no method can avoid: the logits are read, a gradient is written, a head reads its two factors."""
        if self.what == "head":
            return (self.rows + self.vocab) * self.hidden * SIZES[self.dtype]
        return self.logits_bytes * (2 if self.what == "grad" else 1)

    def described(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape), "bytes": self.bytes_to_move}

    def __str__(self) -> str:
        return f"{self.library} {shape_text(vars(self))} {self.dtype}"


def shape_text(case: dict[str, Any]) -> str:
    return " x ".join(map(str, (*case["shape"], case["vocab"])))
