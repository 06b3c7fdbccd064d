"""An OpenTelemetry collector on a free port: takes OTLP over HTTP and decodes it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    name: str
    trace: str
    id: str
    parent: str
    start: int
    stop: int
    kind: int
    error: str
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """`status`: what it answers. `hold`: it answers no sooner than this is set."""

    url: str
    status: int = 200
    hold: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    received: queue.Queue[Span] = field(default_factory=queue.Queue)
    paths: set[str] = field(default_factory=set)
    headers: dict[str, str] = field(default_factory=dict)

    def spans(self, count: int) -> dict[str, Span]:
        """The next spans, by name."""
        found = [self.received.get() for _ in range(count)]
        return {s.name: s for s in found}


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def _spans(data: bytes) -> Iterator[Span]:
    for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
        for scope in resource.scope_spans:
            for s in scope.spans:
                yield Span(
                    s.name, s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex(),
                    s.start_time_unix_nano, s.end_time_unix_nano, s.kind, s.status.message,
                    _values(s.attributes), _values(resource.resource.attributes),
                )  # fmt: skip


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            it.paths.add(self.path)
            it.headers.update({k.lower(): v for k, v in self.headers.items()})
            it.asked.set()
            it.hold.wait()
            if it.status == 200:
                for span in _spans(data):
                    it.received.put(span)
            self.send_response(it.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    it = Collector(f"http://127.0.0.1:{server.server_port}")
    it.hold.set()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="collector")
    thread.start()
    try:
        yield it
    finally:
        it.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()
