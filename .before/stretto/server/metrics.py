"""What the server counts, in Prometheus' text format. One set per app; written on the event loop only.

The engine's own numbers are added as they are: it knows its stages and links, we do not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stretto.server.exchange import Visit

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
_LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 4.0)
_NAME = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^\n]*\})?")


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        r = self._registry
        self.requests = Counter("stretto_requests", "Requests by route and status", ["route", "status"], registry=r)
        self.running = Gauge("stretto_num_requests_running", "Requests being answered", registry=r)
        self.seconds = Histogram(
            "stretto_request_duration_seconds", "From arrival to the last byte", ["route"], buckets=_LONG, registry=r
        )
        self.first_text = Histogram(
            "stretto_time_to_first_token_seconds", "From arrival to the first text", buckets=_SECONDS, registry=r
        )
        self.first_audio = Histogram(
            "stretto_time_to_first_audio_seconds", "From arrival to the first sound", buckets=_SECONDS, registry=r
        )
        self.rtf = Histogram(
            "stretto_audio_rtf", "Time to make speech over the time it plays", buckets=_RATIOS, registry=r
        )
        self.audio = Counter("stretto_audio_seconds", "Speech made", registry=r)
        self.tokens = Counter("stretto_generation_tokens", "Text tokens made", registry=r)
        self.underrun = Counter(
            "stretto_audio_underrun_seconds", "How long players that start at once would have waited", registry=r
        )
        self.smooth = Counter("stretto_audio_continuity_ok", "Spoken answers without such a wait", registry=r)
        self.gone = Counter("stretto_disconnects", "Clients that left before the end", registry=r)
        self.connections = Gauge("stretto_connections", "Open connections", registry=r)
        self.refused = Counter(
            "stretto_connections_refused", "Connections ended by the server, by reason", ["reason"], registry=r
        )

    def record(self, visit: Visit) -> None:
        """A request is over."""
        self.requests.labels(visit.route, str(visit.status)).inc()
        self.seconds.labels(visit.route).observe(visit.elapsed())
        if visit.first_text is not None:
            self.first_text.observe(visit.first_text)
            self.tokens.inc(visit.num_tokens)
        if visit.first_audio is not None and visit.rtf is not None:
            self.first_audio.observe(visit.first_audio)
            self.rtf.observe(visit.rtf)
            self.audio.inc(visit.audio_seconds)
            self.underrun.inc(visit.underrun)
            self.smooth.inc(0 if visit.underrun else 1)
        if visit.ended == "left":
            self.gone.inc()

    def render(self, running: int, engine: Mapping[str, float]) -> bytes:
        self.running.set(running)
        ours = generate_latest(self._registry)
        known = set(re.findall(rb"^# TYPE (\S+)", ours, re.M))
        return ours + "".join(_lines(engine, {k.decode() for k in known})).encode()


def _lines(values: Mapping[str, float], known: set[str]) -> Iterator[str]:
    """The engine's numbers, each name's together as the format demands; a name of ours is not said twice."""
    groups: dict[str, list[str]] = {}
    for key, value in values.items():
        match = _NAME.fullmatch(key)
        if match and match[1] not in known:
            groups.setdefault(match[1], []).append(f"{key} {_number(value)}\n")
    for name, lines in groups.items():
        yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n"
        yield from lines


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
