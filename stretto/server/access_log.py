"""The access log: one line for each request, and for each answer within a realtime session. Written
on the event loop by the middleware and by realtime sessions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from urllib.parse import quote

from starlette.types import Scope

from stretto.server.request_log import RequestLog

log = logging.getLogger("stretto.access")

Fields = Mapping[str, str | int | float | bool | None]
"""What a line says, in its order; None is left out."""


def write_line(level: int, fields: Callable[[], Fields]) -> None:
    """`fields` are made only if somebody wants lines of this level."""
    if log.isEnabledFor(level):
        stated = {name: value for name, value in fields().items() if value is not None}
        text = " ".join(f"{name}={_text(value)}" for name, value in stated.items())
        log.log(level, "%s", text, extra={"fields": stated})


def _text(value: object) -> str:
    """Only an error's words can hold blanks."""
    text = str(value)
    return json.dumps(text) if " " in text or '"' in text else text


def facts(scope: Scope, request_log: RequestLog) -> Fields:
    """What the line of a request says."""
    r = request_log
    return {
        "id": str(r.request_id),
        "client_id": None if r.client_id == r.request_id else r.client_id,
        "method": scope.get("method", "WEBSOCKET"),
        "path": quoted_path(scope["path"]),
        "session": r.realtime_session or None,
        "status": r.status,
        "key": r.owner or None,
        "trace": r.trace.trace if r.trace is not None else None,
        "queued_ms": milliseconds(r.queued),
        "first_text_ms": milliseconds(r.first_text),
        "first_audio_ms": milliseconds(r.first_audio),
        "tokens": r.num_tokens or None,
        "audio_s": None if r.rtf is None else round(r.audio_seconds, 2),
        "rtf": None if r.rtf is None else round(r.rtf, 3),
        "underrun_ms": milliseconds(r.underrun or None),
        "ended": r.ended or None,
        "error": r.error or None,
        "ms": milliseconds(r.elapsed()),
    }


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def quoted_path(path: str) -> str:
    """A path as in a URL, and not endless. It is a client's text: no line break or space of it may
    look like one of ours."""
    return quote(path[:200], errors="replace")
