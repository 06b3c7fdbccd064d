"""Makes OpenTelemetry spans of trace records and exports them. Imported by `otlp.py` when traces
are on, and used in its thread only."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from stretto.observe.trace_records import StageTimes, TraceContext, TraceRecord, merge_steps

QUEUE = "queue"  # the span of the wait for a place


class _RequestIds(RandomIdGenerator):
    """The next span has the ids that its request got when it came."""

    def __init__(self) -> None:
        self.next: TraceContext | None = None

    def generate_trace_id(self) -> int:
        return self.next.trace_id if self.next is not None else super().generate_trace_id()

    def generate_span_id(self) -> int:
        context = self.next
        self.next = None
        return context.span_id if context is not None else super().generate_span_id()


class _Collector(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self.spans.append(span)


class SpanMaker:
    def __init__(self, url: str, resource: Mapping[str, str], timeout: float) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would log each batch
        self._ids = _RequestIds()
        self._made = _Collector()
        self._provider = TracerProvider(
            resource=Resource.create(dict(resource)),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._made)
        self._tracer = self._provider.get_tracer("stretto")
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=timeout)

    def send(self, records: Sequence[TraceRecord]) -> bool:
        """Whether the collector has taken them; those that are not sampled are not sent."""
        self._made.spans = []
        for record in records:
            self._make(record)
        if not self._made.spans:
            return True
        return self._exporter.export(self._made.spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _make(self, record: TraceRecord) -> None:
        attributes = {k: v for k, v in record.attributes.items() if v is not None}
        self._ids.next = record.context
        span = self._tracer.start_span(
            record.name,
            self._parent(record.context),
            SpanKind.SERVER if record.server else SpanKind.INTERNAL,
            attributes,
            start_time=record.start_ns,
        )
        self._ids.next = None
        within = set_span_in_context(span)
        if record.queued_ns:
            stop = record.start_ns + record.queued_ns
            self._tracer.start_span(QUEUE, within, start_time=record.start_ns).end(stop)
        for times in record.stages:
            self._make_stages(times, within)
        if record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(record.stop_ns)

    def _make_stages(self, times: StageTimes, within: Context) -> None:
        for (lane, name), steps in merge_steps(times.steps).items():
            span: Span = self._tracer.start_span(
                f"{lane} {name}",
                within,
                attributes={"stretto.stage": lane, "stretto.steps": steps.count},
                start_time=times.since_ns + round(steps.start * 1e9),
            )
            span.end(times.since_ns + round(steps.stop * 1e9))

    def _parent(self, context: TraceContext) -> Context:
        if context.parent_id is None:
            return Context()
        sampled = context.sampled
        if sampled is None:  # a part of a trace that began here
            root = self._provider.sampler.should_sample(None, context.trace_id, "")
            sampled = bool(root.decision.is_sampled())  # type: ignore[no-untyped-call]
        flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        state = TraceState.from_header([context.state]) if context.state else TraceState()
        parent = SpanContext(context.trace_id, context.parent_id, True, flags, state)
        return set_span_in_context(NonRecordingSpan(parent), Context())
