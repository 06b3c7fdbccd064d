"""What is counted of realtime sessions; part of the server's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)
_SECONDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


class RealtimeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        r = registry
        self.sessions = Gauge(
            "stretto_realtime_sessions", "Realtime sessions that are open", registry=r
        )
        self.closed = Counter(
            "stretto_realtime_closed", "Realtime sessions ended, by reason", ["reason"], registry=r
        )
        self.responses = Counter(
            "stretto_realtime_responses",
            "Responses in realtime sessions, by how they ended",
            ["status"],
            registry=r,
        )
        self.errors = Counter(
            "stretto_realtime_errors", "Events answered with an error", ["code"], registry=r
        )
        self.barge_in = Counter(
            "stretto_barge_in", "Responses that speech or the client stopped", ["by"], registry=r
        )
        self.cancel = Histogram(
            "stretto_cancel_seconds",
            "From such a stop until the engine has let go",
            buckets=_SHORT,
            registry=r,
        )
        self.first_audio = Histogram(
            "stretto_speech_to_audio_seconds",
            "From the end of speech to the first sound",
            buckets=_SECONDS,
            registry=r,
        )
        self.speculations = Counter(
            "stretto_speculations",
            "Answers begun at a pause: kept, or dropped as speech went on",
            ["how"],
            registry=r,
        )
        self.transcriptions = Counter(
            "stretto_transcriptions",
            "Transcriptions of what was said, by how they ended",
            ["how"],
            registry=r,
        )
