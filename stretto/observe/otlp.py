"""Sends traces of requests to an OpenTelemetry collector: OTLP over HTTP, in protobuf.

The server hands over a record of each request that is over (`put`, on the event loop, which never
waits). A thread makes spans of the records and sends them. What the collector does not take in time
is dropped and counted. OpenTelemetry is imported when a `TraceExporter` is made, and configured by
its own variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and
others)."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

from stretto.errors import StrettoError
from stretto.observe.trace_records import TraceRecord

log = logging.getLogger("stretto.traces")

MAX_WAITING = 2048  # records
BATCH = 64  # records that are sent at once
BATCH_WAIT_S = 1.0  # for more of them
SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 3.0  # for what waits when the server ends
_PATH = "/v1/traces"
TraceOutcome = Literal["exported", "dropped", "failed"]


class TraceExporter:
    """`put` records, then `close`. Counts are written by the thread, but for `dropped`."""

    def __init__(self, endpoint: str, version: str) -> None:
        """Raises `StrettoError` where OpenTelemetry is not installed."""
        try:
            from stretto.observe.otlp_spans import SpanMaker
        except ImportError as e:
            raise StrettoError(
                f"--otlp-endpoint needs OpenTelemetry: pip install 'stretto[otel]' ({e})"
            ) from None
        self.endpoint = traces_url(endpoint)
        self._maker = SpanMaker(self.endpoint, _resource(version), SEND_TIMEOUT_S)
        self._waiting: deque[TraceRecord] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._works = True  # the last batch was taken
        self._counts: dict[TraceOutcome, int] = {"exported": 0, "dropped": 0, "failed": 0}
        self._thread = threading.Thread(target=self._run, name="stretto-traces", daemon=True)
        self._thread.start()

    def put(self, record: TraceRecord) -> None:
        with self._changed:
            if self._closing or len(self._waiting) >= MAX_WAITING:
                self._counts["dropped"] += 1
                return
            self._waiting.append(record)
            if len(self._waiting) in (1, BATCH):
                self._changed.notify()

    def metrics(self) -> dict[str, float]:
        return trace_metrics(self._counts)

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Send what waits, for at most so long, and then drop it. Waits: not on the event loop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            self._counts["dropped"] += len(self._waiting)
            self._waiting.clear()
        self._maker.close()

    def _run(self) -> None:
        while batch := self._wait_for_batch():
            self._send(batch)

    def _wait_for_batch(self) -> list[TraceRecord]:
        """None are left, and none will come: an empty one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            full = lambda: len(self._waiting) >= BATCH or self._closing  # noqa: E731
            self._changed.wait_for(full, BATCH_WAIT_S)
            return [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]

    def _send(self, batch: Sequence[TraceRecord]) -> None:
        try:
            works = self._maker.send(batch)
        except Exception:  # a bad record ends its batch, not the thread
            log.exception("traces could not be made")
            works = False
        self._counts["exported" if works else "failed"] += len(batch)
        if works != self._works:
            self._works = works
            words = "traces are sent to %s" if works else "%s takes no traces; they are dropped"
            log.log(logging.INFO if works else logging.WARNING, words, self.endpoint)


def trace_metrics(counts: Mapping[TraceOutcome, int] | None = None) -> dict[str, float]:
    """In Prometheus form; None: nothing is traced."""
    known = counts or {"exported": 0, "dropped": 0, "failed": 0}
    return {f'stretto_otlp_traces_total{{outcome="{k}"}}': float(v) for k, v in known.items()}


def traces_url(endpoint: str) -> str:
    """A collector's address, or that of its traces."""
    base = endpoint.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


def _resource(version: str) -> dict[str, str]:
    """What the operator has named in OpenTelemetry's variables stays."""
    named = "OTEL_SERVICE_NAME" in os.environ
    named = named or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {"service.version": version} | ({} if named else {"service.name": "stretto"})
