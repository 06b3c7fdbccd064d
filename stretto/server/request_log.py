"""`RequestLog`: what the access log, the metrics and the traces will say about a request. The
middleware makes one when a request arrives and reads it when the request is over; routes fill it
in, on the event loop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from stretto.engine.events import AudioChunk, Event, Finished, TextDelta
from stretto.errors import Gone, StrettoError
from stretto.observe.trace_records import TraceContext
from stretto.types import RequestId

REQUEST_LOG = "stretto.request_log"  # where a RequestLog lies in an ASGI scope
MAX_ERROR = 300  # characters
OVERLOAD = 429  # from this status on it is not what the client sent that is wrong


def server_fault(error: Exception) -> str:
    """What an error says, unless it is about what the client sent: that may hold its words."""
    status = error.status if isinstance(error, StrettoError) else 500
    return (str(error) or type(error).__name__)[:MAX_ERROR] if status >= OVERLOAD else ""


def finish_reason(end: Finished) -> Literal["stop", "length"]:
    """`length` if text or speech was cut at a limit. The engine cancelling on its own is an
    error."""
    if "cancelled" in (end.text, end.audio):
        raise Gone("the engine cancelled the request")
    return "length" if "length" in (end.text, end.audio) else "stop"


@dataclass(slots=True)
class RequestLog:
    """What the log and the metrics will say about a request; filled in as it goes."""

    request_id: RequestId  # ours, and the engine's
    client_id: str  # X-Request-Id, the client's own or one like ours: for headers and logs only
    arrived: float  # time.perf_counter()
    route: str = "other"
    owner: str = ""  # which API key, never the key
    # X-Session-Id: its requests go where the one before went, as long as that is up
    session: str | None = None
    client: str = ""  # who takes turns with whom: the API key or, without keys, the address
    content_type: str = ""  # of a body
    status: int = 0
    ended: str = ""
    error: str = ""  # what the server failed with, in words
    realtime_session: str = ""  # of a WebSocket: the session's id, as its client knows it
    queued: float | None = None  # seconds in the queue; None: its turn has not come
    first_text: float | None = None
    first_audio: float | None = None
    samples: int = 0
    sample_rate: int = 24_000
    last_audio: float = 0.0
    underrun: float = 0.0
    num_tokens: int = 0
    last_text: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: list[Finished] = field(default_factory=list)  # the last events of its answers
    trace: TraceContext | None = None  # None: nothing is traced

    def fail(self, error: Exception) -> None:
        """It ends with this error."""
        self.ended = type(error).__name__
        self.error = server_fault(error)

    def elapsed(self) -> float:
        return time.perf_counter() - self.arrived

    def record(self, event: Event) -> None:
        """Note what an event of the answer says and when it came. Routes pass each event as soon as
        they have it."""
        match event:
            case TextDelta():
                self.last_text = self.elapsed()
                if self.first_text is None:
                    self.first_text = self.last_text
                self.num_tokens += len(event.ids)
            case AudioChunk():
                self._record_audio(len(event.samples))
            case Finished():
                self.prompt_tokens = event.usage.prompt_tokens
                self.cached_tokens = event.usage.cached_tokens
                self.finished.append(event)
                self.ended = finish_reason(event)

    def _record_audio(self, num_samples: int) -> None:
        """Keeps the clock of a player that starts with the first packet."""
        now = self.elapsed()
        if self.first_audio is None:
            self.first_audio = now
        else:
            # Dry since everything so far was played, waits included.
            dry = now - (self.first_audio + self.audio_seconds + self.underrun)
            self.underrun += max(0.0, dry)
        self.samples += num_samples
        self.last_audio = now

    @property
    def token_gap(self) -> float | None:
        """Mean time between two text tokens."""
        if self.first_text is None or self.num_tokens < 2:
            return None
        return (self.last_text - self.first_text) / (self.num_tokens - 1)

    @property
    def audio_seconds(self) -> float:
        return self.samples / self.sample_rate

    @property
    def rtf(self) -> float | None:
        return self.last_audio / self.audio_seconds if self.samples else None
