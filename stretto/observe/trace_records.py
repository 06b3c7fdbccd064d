"""What a trace says of a request that is over. The server makes a `TraceRecord` on the event loop
(`server/tracing.py`); `otlp.py` sends it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_STATE = 512  # characters of tracestate

Attributes = Mapping[str, str | int | float | bool | None]
"""None is left out."""


class TimedStep(Protocol):
    """A part of a request's timeline: a stage's step. Seconds from `StageTimes.since_ns` on."""

    @property
    def lane(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def stop(self) -> float: ...


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a request's span belongs. `sampled`: whether the caller's trace is kept; None: there is
    no caller who has said."""

    trace_id: int
    span_id: int  # of the request's own span
    parent_id: int | None = None
    sampled: bool | None = None
    state: str = ""  # tracestate, which is passed on as it came

    @classmethod
    def of(cls, traceparent: str, tracestate: str = "") -> TraceContext:
        """Of these headers; a trace of its own where they are absent or malformed."""
        known = _TRACEPARENT.fullmatch(traceparent)
        if known is None or known[1] == "ff" or (known[1] == "00" and known[5]):
            return cls(_id(128), _id(64))
        trace_id, parent_id = int(known[2], 16), int(known[3], 16)
        if not trace_id or not parent_id:
            return cls(_id(128), _id(64))
        state = tracestate if len(tracestate) <= _MAX_STATE else ""
        return cls(trace_id, _id(64), parent_id, bool(int(known[4], 16) & 1), state)

    def child(self) -> TraceContext:
        """Of something that is a part of this request."""
        return TraceContext(self.trace_id, _id(64), self.span_id, self.sampled, self.state)

    @property
    def trace(self) -> str:
        """The trace's id as it is written."""
        return f"{self.trace_id:032x}"


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What the stages did for one answer of a request."""

    since_ns: int  # of the wall clock
    steps: Sequence[TimedStep]


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """A request that is over. Times are nanoseconds of the wall clock."""

    context: TraceContext
    name: str
    start_ns: int
    stop_ns: int
    attributes: Attributes
    queued_ns: int = 0  # from the start on, in the admission queue
    stages: Sequence[StageTimes] = ()
    error: str = ""
    server: bool = True  # it came from outside


@dataclass(slots=True)
class _MergedSteps:
    """All steps of one kind of one stage: a span for each would be a thousand for a request."""

    start: float
    stop: float
    count: int = 1


def merge_steps(steps: Iterable[TimedStep]) -> dict[tuple[str, str], _MergedSteps]:
    """By lane and name, in order of their first."""
    merged: dict[tuple[str, str], _MergedSteps] = {}
    for step in steps:
        key = step.lane, step.name
        known = merged.get(key)
        if known is None:
            merged[key] = _MergedSteps(step.start, step.stop)
        else:
            known.start = min(known.start, step.start)
            known.stop = max(known.stop, step.stop)
            known.count += 1
    return merged


def _id(bits: int) -> int:
    return secrets.randbits(bits) or 1
