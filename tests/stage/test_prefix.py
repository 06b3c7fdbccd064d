"""Rows that differ are told apart in the prefix cache, rows that are the same are not."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stretto.models.qwen3_omni.bridge import NUM_OPENING
from stretto.models.qwen3_omni.pieces import runs_of
from stretto.models.qwen3_omni.stages.prefix import OPENING_ID, row_ids


@given(st.sets(st.integers(0, 60)))
def test_runs_are_the_places_and_never_touch(places: set[int]) -> None:
    runs = runs_of(sorted(places))
    assert [p for run in runs for p in range(run.start, run.stop)] == sorted(places)
    assert all(a.stop < b.start for a, b in pairwise(runs))


@dataclass(slots=True)
class Told:
    ids: tuple[int, ...]
    speaker: int = 3


@dataclass(slots=True)
class Given:
    prompt: Told
    text: list[int] = field(default_factory=list)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 9), st.integers(0, 9), st.data())
def test_rows_in_parts_are_the_rows(
    users: list[int], first: int, other: int, data: st.DataObject
) -> None:
    size = len(users) + NUM_OPENING
    cut = data.draw(st.integers(0, size - 1))
    given: Any = Given(Told(tuple(users)))
    before = row_ids(
        given, 0, cut
    )  # the first text token is not known yet, and only the last row has it
    given.text.append(first)
    whole = row_ids(given, 0, size)
    assert before + row_ids(given, cut, size) == whole
    assert whole[: len(users)] == users
    assert len(set(whole[len(users) :])) == NUM_OPENING
    assert min(whole[len(users) :]) >= OPENING_ID
    assert (row_ids(Given(Told(tuple(users)), [other]), 0, size) == whole) == (first == other)  # type: ignore[arg-type]
