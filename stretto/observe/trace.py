"""Writes a trace file that Perfetto and chrome://tracing load: spans as complete events, in one
growing JSON array.

The engine writes what its hosts send, on the event loop. The array is left open while it grows,
which both readers accept."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from stretto.observe.recorder import TraceSpan

MAX_BYTES = 256 << 20  # of one file; after that, spans are counted and not written


class TraceEvents:
    """Spans as complete events. A process (a host, a request) and a lane in it get numbers, and are
    named by events of their own, when they first appear."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], tuple[int, int]] = {}
        self._processes: dict[str, int] = {}

    def of(self, process: str, spans: Iterable[TraceSpan]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for lane, name, start, stop in spans:
            pid, tid = self._place(process, lane, events)
            times = {"ts": start / 1e3, "dur": max(stop - start, 0) / 1e3}
            events.append({"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": lane, **times})
        return events

    def _place(self, process: str, lane: str, events: list[dict[str, Any]]) -> tuple[int, int]:
        if (process, lane) not in self._lanes:
            pid = self._processes.setdefault(process, len(self._processes) + 1)
            tid = 1 + sum(p == process for p, _ in self._lanes)
            self._lanes[process, lane] = pid, tid
            events.append(
                {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
            )
            events.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
            )
        return self._lanes[process, lane]


class TraceWriter:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"stretto-{os.getpid()}.json"
        self.dropped = 0
        self._file: IO[str] = self.path.open("w", encoding="utf-8")
        self._file.write("[")
        self._size = 1
        self._events = TraceEvents()

    def write(self, process: str, spans: Iterable[TraceSpan]) -> None:
        """Spans of one host (or of the server)."""
        events = self._events.of(process, spans)
        text = "".join(json.dumps(event) + ",\n" for event in events)
        if self._size + len(text) > MAX_BYTES:
            self.dropped += len(events)
            return
        self._size += len(text)
        self._file.write(text)
        self._file.flush()

    def close(self) -> None:
        self._file.write("{}]\n")
        self._file.close()
