"""A request's timeline from what its stages reported. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import overload

from stretto.engine.events import TimelineSpan
from stretto.family import PipelineSpec
from stretto.messages.requests import Ended

MOST = 600
"""Outputs of one stage that get a span each; of more, every n-th does."""


class Timeline(Sequence[TimelineSpan]):
    """Made when somebody looks at it. Few do, and it takes the event loop half a millisecond for
    ten seconds of speech."""

    def __init__(
        self,
        spec: PipelineSpec,
        arrived: float,
        ended: Mapping[str, Ended],
        packets: Sequence[float],
    ) -> None:
        self._given = spec, arrived, ended, packets

    @cached_property
    def _spans(self) -> tuple[TimelineSpan, ...]:
        return timeline(*self._given)

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, at: int) -> TimelineSpan: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[TimelineSpan, ...]: ...
    def __getitem__(self, at: int | slice) -> TimelineSpan | tuple[TimelineSpan, ...]:
        return self._spans[at]


def timeline(
    spec: PipelineSpec, arrived: float, ended: Mapping[str, Ended], packets: Sequence[float]
) -> tuple[TimelineSpan, ...]:
    """Spans in seconds from the request's arrival. A stage's output spans from the one before to
    itself. A prompt whose media are encoded while its beginning is read counts as being encoded."""
    spans: list[TimelineSpan] = []
    for s in spec.stages:
        stage, e = s.name, ended.get(s.name)
        if e is None or not e.marks:
            continue
        read = e.begun
        if e.begun < e.encoded_at < e.marks[0]:
            read = e.encoded_at
            spans.append(TimelineSpan(stage, "encode", e.begun - arrived, read - arrived))
        begun = thin([read, *(c for c in e.chunks if read < c < e.marks[0]), e.marks[0]])
        spans += [
            TimelineSpan(stage, s.first, a - arrived, b - arrived) for a, b in pairwise(begun)
        ]
        marks = thin(e.marks)
        spans += [TimelineSpan(stage, s.each, a - arrived, b - arrived) for a, b in pairwise(marks)]
    spans += [TimelineSpan("packets", "packet", t - arrived, t - arrived) for t in thin(packets)]
    return tuple(sorted(spans, key=lambda span: span.start))


def thin(marks: Sequence[float]) -> list[float]:
    step = -(-len(marks) // MOST) if marks else 1
    return [*marks[::step], marks[-1]] if (len(marks) - 1) % step else list(marks[::step])
