"""Coordinate descent over a made-up step: what is kept, what is refused, and when it stops."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stretto.kernels.triton import tuning
from stretto.kernels.triton.descent import Descent, Pair, Table, TrialFailed, Tuned, chosen, spread
from stretto.kernels.triton.tuning import TuningQuestion

DEFAULT = {"BN": 16, "warps": 4}


class MadeUp:
    """A step of a few kernels whose costs are known: "two" is best with tiles as wide as those of
    "one", and "last" is asked for only while "cut" has no splits."""

    def __init__(self, noise: Sequence[float] = (0.0,)) -> None:
        self.noise = itertools.cycle(noise)
        self.broken: dict[int, str] = {}  # BN of "one" -> what a process that compiles says
        self.wrong: dict[int, float] = {}  # BN of "one" -> error
        self.pairs: list[Table] = []

    def questions(self, changes: Table) -> dict[str, TuningQuestion]:
        with tuning.instead(changes) as asked:
            tuning.config("one", (1,), DEFAULT)
            tuning.config("two", (1,), DEFAULT)
            if not tuning.config("cut", (1,), {"SPLITS": 0})["SPLITS"]:
                tuning.config("last", (1,), DEFAULT)
        return dict(asked)

    def precompile(self, tables: Sequence[Table]) -> list[str | None]:
        return [self.broken.get(t.get("one/1", DEFAULT)["BN"]) for t in tables]

    def error(self, changes: Table) -> float:
        return self.wrong.get(changes.get("one/1", DEFAULT)["BN"], 1e-3)

    def cost(self, changes: Table) -> float:
        asked = {name: a.found for name, a in self.questions(changes).items()}
        one, two = asked["one/1"]["BN"], asked["two/1"]["BN"]
        total = 100.0 + 4 * abs(math.log2(one / 64)) + abs(math.log2(two / one))
        return total + (
            2.0 + abs(asked["last/1"]["warps"] - 8)
            if "last/1" in asked
            else asked["cut/1"]["SPLITS"]
        )

    def pair(self, base: Table, changes: Table) -> Pair:
        if changes.get("one/1", DEFAULT)["BN"] == 2:
            raise TrialFailed("too small")
        self.pairs.append(changes)
        a, b = self.cost(base), self.cost(changes) + next(self.noise)
        return Pair(a, b, 1 - b / a)


CANDIDATES: dict[str, list[Tuned]] = {
    "one": [{"BN": n, "warps": 4} for n in (2, 16, 32, 64, 128)],
    "two": [{"BN": n, "warps": 4} for n in (16, 32, 64)],
    "cut": [{"SPLITS": n} for n in (1, 4)],
    "noisy": [{"BN": 32, "warps": 8}],
    "last": [{"BN": 16, "warps": n} for n in (4, 8)],
}


def descent(step: MadeUp, **options: Any) -> Descent:
    return Descent(
        step,
        candidates=lambda asked: CANDIDATES[asked.kernel],
        selects=options.get("selects", lambda name: True),
        late=options.get("late", lambda: False),
    )


def ignore(name: str, rows: list[dict[str, Any]]) -> None:
    pass


def test_every_kernel_is_tuned_beside_what_was_found_before() -> None:
    step = MadeUp()
    d = descent(step)
    names: list[str] = []
    assert d.round(lambda name, rows: names.append(name))
    # The product that was cut asks for no "last" any more; "two" follows the "one" that was found.
    assert names == ["one/1", "two/1", "cut/1"]
    assert d.changes == {
        "one/1": {"BN": 64, "warps": 4}, "two/1": {"BN": 64, "warps": 4}, "cut/1": {"SPLITS": 1},
    }  # fmt: skip
    assert d.before == {"one/1": DEFAULT, "two/1": DEFAULT, "cut/1": {"SPLITS": 0}}
    assert next(r["failed"] for r in d.rows if "failed" in r) == "too small"
    assert not d.round(ignore), "nothing is left to find"


def test_what_is_not_cut_is_tuned_too() -> None:
    d = descent(MadeUp(), selects=lambda name: not name.startswith("cut"))
    d.round(ignore)
    assert d.changes["last/1"]["warps"] == 8


def test_a_gain_that_does_not_come_back_is_not_kept() -> None:
    """The first of two measurements of each candidate is too good, the second is not."""
    step = MadeUp(noise=(0.0, -5.0, 5.0))  # the current one, the candidate, the candidate again
    d = descent(step)
    rows = d.tune("noisy/1", TuningQuestion("noisy", (1,), DEFAULT, DEFAULT))
    assert rows[1]["gain"] > 0.04
    assert rows[1]["again"] < 0
    assert d.changes == {}
    steady = descent(MadeUp(noise=(0.0, -5.0, -5.0)))
    steady.tune("noisy/1", TuningQuestion("noisy", (1,), DEFAULT, DEFAULT))
    assert steady.changes == {"noisy/1": {"BN": 32, "warps": 8}}


@pytest.mark.parametrize("error", [0.5, math.nan])
def test_wrong_and_impossible_candidates_are_never_timed(error: float) -> None:
    step = MadeUp()
    step.wrong[64] = error
    step.broken[32] = "out of shared memory"
    d = descent(step, selects=lambda name: name == "one/1")
    d.round(ignore)
    assert d.changes["one/1"]["BN"] == 128
    assert all(t.get("one/1", DEFAULT)["BN"] not in (32, 64) for t in step.pairs)
    said = {r["config"]["BN"]: r for r in d.rows}
    assert said[32]["failed"] == "out of shared memory"
    assert "refused" in said[64]
    assert "gain" not in said[64]


def test_the_current_one_is_measured_beside_itself_and_never_adopted() -> None:
    step = MadeUp(noise=(-5.0,))  # whatever comes second looks better
    d = descent(step, selects=lambda name: name == "cut/1")
    d.round(ignore)
    current = [r for r in d.rows if r["current"]]
    assert len(current) == 1
    assert current[0]["gain"] > 0.04
    assert "adopted" not in current[0]


def test_nothing_is_tried_beside_a_step_that_is_wrong_itself() -> None:
    step = MadeUp()
    step.wrong[16] = 0.5
    d = descent(step)
    d.round(ignore)
    assert d.changes == {}
    assert step.pairs == []
    assert {r["name"]: r["refused"] for r in d.rows} == dict.fromkeys(
        ("one/1", "two/1", "cut/1", "last/1"), 0.5
    )


def test_out_of_time_keeps_what_there_is() -> None:
    step = MadeUp()
    d = descent(
        step, late=lambda: len(step.pairs) >= 4
    )  # the current one, 32 and 64 (2 cannot), 128: all of "one"
    d.round(ignore)
    assert d.changes == {"one/1": {"BN": 64, "warps": 4}}
    assert {r["name"] for r in d.rows} == {"one/1"}


def test_choice_is_spread_over_every_parameter_and_has_the_nearest() -> None:
    product = [
        {"a": a, "b": b, "c": c}
        for a, b, c in itertools.product((1, 2, 4, 8), (1, 2, 4), (2, 4, 8))
    ]  # 36: a third of it must not be all of one c
    some = spread(product, 12)
    assert len({tuple(c.items()) for c in some}) == 12
    assert [c for c in product if c in some] == some
    for name in "abc":
        counts = [sum(c[name] == v for c in some) for v in {c[name] for c in product}]
        assert min(counts) >= 2, name
    assert spread(product[:5], 12) == product[:5]
    current = {"a": 4, "b": 2, "c": 4}
    few = chosen([c for c in product if c != current], current, 12)
    assert len({tuple(c.items()) for c in few}) == 12
    assert current | {"c": 8} in few
    assert current | {"a": 8} in few


def test_changes_stand_as_if_they_had_been_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.json"
    monkeypatch.setenv("STRETTO_TUNING", str(own))
    tuning.save(own, {"one/1": {"BN": 8, "apart": 1}})
    try:
        default = {"BN": 16, "apart": 0}
        assert tuning.config("one", (1,), default) == {"BN": 8, "apart": 1}
        with tuning.instead({"one/1": {"BN": 32}}) as asked:
            changed = tuning.config("one", (1,), default)
            tuning.config("two", [2, 3], {"BN": 1})
        assert changed == {"BN": 32, "apart": 0}, (
            "in the place of what the file has, not on top of it"
        )
        assert asked == {
            "one/1": TuningQuestion("one", (1,), default, changed),
            "two/2x3": TuningQuestion("two", (2, 3), {"BN": 1}, {"BN": 1}),
        }
        assert tuning.config("one", (1,), default) == {"BN": 8, "apart": 1}
        tuning.save(own, {"one/1": {"BN": 32}})
        assert tuning.config("one", (1,), default) == changed
        assert json.loads(own.read_text()) == {"one/1": {"BN": 32}}
    finally:
        monkeypatch.undo()
        tuning._table.cache_clear()
