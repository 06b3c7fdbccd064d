"""A request's timeline is made once, when somebody looks at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stretto.engine.timeline import MAX_SPANS, Timeline, thin
from stretto.messages.requests import Ended
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.types import RequestId

ENDED = Ended(RequestId("r"), "thinker", "stop", 0.5, (1.0, 1.25, 1.5))


class CountedReads(Mapping[str, Ended]):
    """The stages' last reports, and how often one was looked up."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, stage: str) -> Ended:
        self.reads += 1
        return {"thinker": ENDED}[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(("thinker",))

    def __len__(self) -> int:
        return 1


def test_a_timeline_is_made_when_somebody_looks_at_it() -> None:
    ended = CountedReads()
    timeline = Timeline(PIPELINE, 0.0, ended, [])
    assert ended.reads == 0
    assert [(s.start, s.stop) for s in timeline] == [(0.5, 1.0), (1.0, 1.25), (1.25, 1.5)]
    reads = ended.reads
    assert len(timeline) == 3
    assert [s.stop for s in timeline[1:]] == [1.25, 1.5]
    assert ended.reads == reads, "it is made once"


def test_packets_are_moments() -> None:
    timeline = Timeline(PIPELINE, 1.0, {}, [2.0, 3.5])
    assert [(s.lane, s.start, s.stop) for s in timeline] == [
        ("packets", 1.0, 1.0),
        ("packets", 2.5, 2.5),
    ]


def test_of_many_marks_every_nth_is_kept() -> None:
    assert thin([]) == []
    assert thin([1.0, 2.0]) == [1.0, 2.0]
    marks = [float(i) for i in range(2 * MAX_SPANS)]
    assert thin(marks) == [*marks[::2], marks[-1]]
