"""Makes a `TraceRecord` of a request, or of an answer in a realtime session, that is over. Called
on the event loop by the middleware and by realtime sessions where traces are on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.types import Scope

from stretto.engine.events import Finished
from stretto.observe.trace_records import Attributes, StageTimes, TraceContext, TraceRecord
from stretto.server.access_log import quoted_path
from stretto.server.request_log import RequestLog

MIN_QUEUED_S = 0.001  # less is no wait


def request_record(scope: Scope, request_log: RequestLog, context: TraceContext) -> TraceRecord:
    """The request is over now."""
    r = request_log
    method = str(scope.get("method", "WEBSOCKET"))
    attributes: Attributes = {
        "http.request.method": method if method != "WEBSOCKET" else "GET",
        "http.response.status_code": r.status or None,
        "url.path": quoted_path(scope["path"]),
        "stretto.route": r.route,
        "stretto.request_id": str(r.request_id),
        "stretto.client_request_id": r.client_id,
        "stretto.session": r.realtime_session or None,
        "stretto.key": r.owner or None,
        "stretto.ended": r.ended or None,
        "stretto.first_text_s": r.first_text,
        "stretto.first_audio_s": r.first_audio,
        "stretto.audio_s": r.audio_seconds if r.samples else None,
        "gen_ai.usage.input_tokens": r.prompt_tokens or None,
        "gen_ai.usage.output_tokens": r.num_tokens or None,
    }
    failed = r.status >= 500 or bool(r.error)
    return record_since(
        r.arrived,
        context,
        f"{method} {r.route}",
        attributes,
        queued=r.queued,
        finished=r.finished,
        error=(r.error or r.ended or str(r.status)) if failed else "",
    )


def record_since(
    arrived: float,
    context: TraceContext,
    name: str,
    attributes: Attributes,
    *,
    queued: float | None = None,
    finished: Sequence[Finished] = (),
    error: str = "",
    server: bool = True,
) -> TraceRecord:
    """Of something that arrived then, by `time.perf_counter()`, and is over now. On Linux that is
    the monotonic clock, by which the engine knows when a request came."""
    now_ns = time.time_ns()
    now = time.perf_counter()

    def wall(at: float) -> int:
        return now_ns - round((now - at) * 1e9)

    return TraceRecord(
        context=context,
        name=name,
        start_ns=wall(arrived),
        stop_ns=now_ns,
        attributes=attributes,
        queued_ns=round(queued * 1e9) if queued is not None and queued >= MIN_QUEUED_S else 0,
        stages=[StageTimes(wall(f.arrived), f.timeline) for f in finished if f.arrived],
        error=error,
        server=server,
    )
