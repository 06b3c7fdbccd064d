"""Several things measured by turns, so that the machine's noise hits all of them alike, and their
ratios. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.harness.results import quantile

T = TypeVar("T")


def turns(things: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, thing), all things in each round. Each round begins with the next one, so that none
    always follows the same neighbour."""
    for number in range(rounds):
        for step in range(len(things)):
            yield number, things[(number + step) % len(things)]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two things measured in the same rounds: the median of the rounds' ratios, and their middle
    half."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, mine: Sequence[float], base: Sequence[float]) -> Ratio:
        each = [a / b for a, b in zip(mine, base, strict=True)]
        return cls(*(quantile(each, q) for q in (0.5, 0.25, 0.75)))

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"
