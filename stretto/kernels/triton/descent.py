"""Coordinate descent over launch parameters: one kernel after the other, everything else as it
stands.

A `TrialStep` does the timing (`models.tune_steps`), so this module is arithmetic alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stretto.kernels.triton.tuning import TuningQuestion

Tuned = dict[str, int]
Table = dict[str, Tuned]
"""Parameters by kernel and shape, as the tuning file has them."""

LEAST_GAIN = 0.003  # of a step's time, and twice: less is noise
MOST_ERROR = 2e-2  # of the median row; tests allow one kernel half of it in bfloat16


@dataclass(frozen=True, slots=True)
class Pair:
    """A candidate's time beside the base's, measured in turns."""

    base_ms: float
    ms: float
    gain: float  # share of the base's time that the candidate saves


class TrialFailed(Exception):
    """A candidate that cannot be compiled or run here."""


class TrialStep(Protocol):
    def questions(self, changes: Table) -> dict[str, TuningQuestion]:
        """The parameters that a step asks for, in its order."""
        ...

    def precompile(self, tables: Sequence[Table]) -> list[str | None]:
        """Compile for all of these; what went wrong with each, if anything is known to."""
        ...

    def error(self, changes: Table) -> float:
        """How far the step's output is from what it was without changes. Raises TrialFailed."""
        ...

    def pair(self, base: Table, changes: Table) -> Pair:
        """Raises TrialFailed."""
        ...


def spread(found: Sequence[Tuned], most: int) -> list[Tuned]:
    """At most so many of them, from everywhere in the list, in their order. The stride has no
    divisor in common with the length, so that of a product of lists each value of each list gets
    its share."""
    count = len(found)
    if count <= most:
        return list(found)
    stride = round(count * 0.618)
    while math.gcd(stride, count) > 1:
        stride += 1
    return [found[i] for i in sorted(i * stride % count for i in range(most))]


def distance(a: Tuned, b: Tuned) -> float:
    """In doublings of parameters; one that is only in one of them counts as 0 in the other."""
    return sum(abs(math.log2((a.get(n, 0) + 1) / (b.get(n, 0) + 1))) for n in a.keys() | b.keys())


def chosen(found: Sequence[Tuned], current: Tuned, most: int) -> list[Tuned]:
    """At most so many of them: half are those nearest to the current one, the others come from
    everywhere."""
    if len(found) <= most:
        return list(found)
    near = sorted(found, key=lambda c: distance(c, current))[: most // 2]
    return near + spread([c for c in found if c not in near], most - len(near))


@dataclass(slots=True)
class Descent:
    step: TrialStep
    candidates: Callable[[TuningQuestion], list[Tuned]]
    selects: Callable[[str], bool]  # kernels, by name
    late: Callable[[], bool]  # no time for another measurement
    changes: Table = field(default_factory=dict)  # what was found to be better
    before: Table = field(default_factory=dict)  # what stood where something was tried
    rows: list[dict[str, Any]] = field(default_factory=list)  # all that was measured

    def round(self, after: Callable[[str, list[dict[str, Any]]], None]) -> bool:
        """Every kernel of the step once; `after` each is called with its rows. Did anything change?

        What the step asks for may change with what is found (a product not cut into parts is
        another kernel), so it is asked again each time."""
        done: set[str] = set()
        before = dict(self.changes)
        while not self.late():
            asked = self.step.questions(self.changes)
            name = next((n for n in asked if n not in done and self.selects(n)), None)
            if name is None:
                break
            done.add(name)
            rows = self.tune(name, asked[name])
            self.rows += rows
            after(name, rows)
        return self.changes != before

    def tune(self, name: str, asked: TuningQuestion) -> list[dict[str, Any]]:
        others = [c for c in self.candidates(asked) if asked.default | c != asked.found]
        if not others:
            return []
        self.before.setdefault(name, asked.found)
        tables = [self.changes | {name: c} for c in (asked.found, *others)]
        rows = []
        for table, why in zip(tables, self.step.precompile(tables), strict=True):
            if self.late():
                break
            row: dict[str, Any] = {
                "name": name,
                "config": table[name],
                "current": table is tables[0],
            }
            row |= {"failed": why} if why is not None else self.measure(table)
            rows.append(row)
            if row["current"] and "gain" not in row:
                break  # something is wrong that no candidate is to blame for
        self.adopt(name, rows)
        return rows

    def measure(self, table: Table) -> dict[str, Any]:
        try:
            error = self.step.error(table)
            if not error < MOST_ERROR:  # not a number: refused too
                return {"refused": error if math.isfinite(error) else None}
            pair = self.step.pair(self.changes, table)
        except TrialFailed as e:
            return {"failed": str(e)}
        return {"error": error, "base_ms": pair.base_ms, "ms": pair.ms, "gain": pair.gain}

    def adopt(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Take the best that is better when it is measured again, too."""
        better = [r for r in rows if not r["current"] and r.get("gain", 0.0) > LEAST_GAIN]
        for row in sorted(better, key=lambda r: -float(r["gain"])):
            table = self.changes | {name: row["config"]}
            try:
                row["again"] = self.step.pair(self.changes, table).gain
            except TrialFailed as e:
                row["failed"] = str(e)
                continue
            if row["again"] > LEAST_GAIN:
                row["adopted"] = True
                self.changes = table
                return
