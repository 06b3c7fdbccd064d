"""A request's timeline from what its stages reported, and as a trace that Perfetto loads. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from stretto.orchestrator.api import TimelineSpan
from stretto.orchestrator.messages import Ended

MOST = 600
"""Outputs of one stage that get a span each; of more, every n-th does."""

FIRST = {"thinker": "prompt", "talker": "prompt", "code2wav": "first frame"}
NEXT = {"thinker": "token", "talker": "frame", "code2wav": "packet"}


def timeline(arrived: float, ended: Mapping[str, Ended], packets: Sequence[float]) -> tuple[TimelineSpan, ...]:
    """Spans in seconds from the request's arrival. A stage's output spans from the one before to itself."""
    spans: list[TimelineSpan] = []
    for stage, e in ended.items():
        if not e.marks:
            continue
        begun = thin([e.begun, *(c for c in e.chunks if c < e.marks[0]), e.marks[0]])
        spans += [TimelineSpan(stage, FIRST[stage], a - arrived, b - arrived) for a, b in pairwise(begun)]
        marks = thin(e.marks)
        spans += [TimelineSpan(stage, NEXT[stage], a - arrived, b - arrived) for a, b in pairwise(marks)]
    spans += [TimelineSpan("packets", "packet", t - arrived, t - arrived) for t in thin(packets)]
    return tuple(sorted(spans, key=lambda s: s.start))


def thin(marks: Sequence[float]) -> list[float]:
    step = -(-len(marks) // MOST) if marks else 1
    return [*marks[::step], marks[-1]] if (len(marks) - 1) % step else list(marks[::step])


def trace(requests: Iterable[tuple[str, Sequence[TimelineSpan]]]) -> dict[str, Any]:
    """Chrome trace events: one process per request, one thread per lane. Opens in ui.perfetto.dev."""
    lanes = ("thinker", "talker", "code2wav", "packets")
    events: list[dict[str, Any]] = []
    for pid, (name, spans) in enumerate(requests, start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for tid, lane in enumerate(lanes, start=1):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        for s in spans:
            tid = lanes.index(s.lane) + 1 if s.lane in lanes else len(lanes) + 1
            where = {"pid": pid, "tid": tid, "name": s.name, "cat": s.lane, "ts": 1e6 * s.start}
            events.append({**where, "ph": "X", "dur": max(1.0, 1e6 * (s.stop - s.start))})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
