"""When the stages of a request did what, as spans for people to look at. Made from what the stages
report when they end, by whoever looks at it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import overload

from stretto.engine.events import TimelineSpan
from stretto.family import PipelineSpec, StageSpec
from stretto.messages.requests import Ended

MAX_SPANS = 600
"""Outputs of one stage that get a span each; of more, every n-th does."""


class Timeline(Sequence[TimelineSpan]):
    """Spans in seconds from the request's arrival. They are made when somebody looks at them: few
    do, and it takes the event loop half a millisecond for ten seconds of speech."""

    def __init__(
        self,
        spec: PipelineSpec,
        arrived: float,
        ended: Mapping[str, Ended],
        packets: Sequence[float],
    ) -> None:
        """`ended`: the last report of each stage; `packets`: when each packet of sound came."""
        self._spec = spec
        self._arrived = arrived
        self._ended = ended
        self._packets = packets

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, at: int) -> TimelineSpan: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[TimelineSpan, ...]: ...
    def __getitem__(self, at: int | slice) -> TimelineSpan | tuple[TimelineSpan, ...]:
        return self._spans[at]

    @cached_property
    def _spans(self) -> tuple[TimelineSpan, ...]:
        spans: list[TimelineSpan] = []
        for stage in self._spec.stages:
            end = self._ended.get(stage.name)
            if end is not None and end.marks:
                spans += self._stage_spans(stage, end)
        for packet in thin(self._packets):
            spans += self._between("packets", "packet", [packet, packet])
        return tuple(sorted(spans, key=lambda span: span.start))

    def _stage_spans(self, stage: StageSpec, end: Ended) -> list[TimelineSpan]:
        """A stage's output spans from the one before to itself. A prompt whose media are encoded
        while its beginning is prefilled counts as being encoded."""
        spans: list[TimelineSpan] = []
        prefill = end.begun
        if end.begun < end.encoded_at < end.marks[0]:
            prefill = end.encoded_at
            spans += self._between(stage.name, "encode", [end.begun, prefill])
        chunks = [c for c in end.chunks if prefill < c < end.marks[0]]
        spans += self._between(stage.name, stage.first, thin([prefill, *chunks, end.marks[0]]))
        return spans + self._between(stage.name, stage.each, thin(end.marks))

    def _between(self, lane: str, name: str, times: Sequence[float]) -> list[TimelineSpan]:
        """A span from each of these times to the next."""
        return [
            TimelineSpan(lane, name, start - self._arrived, stop - self._arrived)
            for start, stop in pairwise(times)
        ]


def thin(marks: Sequence[float]) -> list[float]:
    """Every n-th of many marks, the first and the last included."""
    step = -(-len(marks) // MAX_SPANS) if marks else 1
    return [*marks[::step], marks[-1]] if (len(marks) - 1) % step else list(marks[::step])
