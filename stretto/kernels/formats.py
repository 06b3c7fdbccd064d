"""How matrices of few bits are stored, in memory and in checkpoints. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CodeKind = Literal["int4", "int8", "float8"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix [outputs, inputs] is stored: numbers of few bits, and scales that they are
    multiplied by."""

    kind: CodeKind
    # inputs that share a scale; 0: all of a row
    group: int
    # outputs that share one
    block_rows: int = 1
    # integers: without zero points
    symmetric: bool = True
    # of the scales as they are stored: a torch dtype's name
    scale_dtype: str = "float32"

    @property
    def per_row(self) -> bool:
        return self.group == 0

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    def __str__(self) -> str:
        if self.kind == "float8":
            blocks = f"blocks of {self.block_rows} x {self.group}"
            return "FP8, a scale per row" if self.per_row else f"FP8, {blocks}"
        zeros = "" if self.symmetric else ", with zero points"
        return f"{self.kind}, groups of {self.group}{zeros}"


FLOAT8_ROWS = WeightFormat("float8", 0)
"""What `--expert-weights float8` makes."""
