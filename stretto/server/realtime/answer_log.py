"""What is known of an answer in a realtime session, a response or a transcription, while it is made
(`AnswerLog`), and what the log, the metrics and the traces say of it in the end (`AnswerRecorder`).
On the event loop. Every answer is recorded once, when its task is over, even if it never ran."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from stretto.engine.events import Finished, Usage
from stretto.observe.otlp import TraceExporter
from stretto.observe.trace_records import Attributes
from stretto.server.access_log import Fields, milliseconds, write_line
from stretto.server.metrics import Metrics
from stretto.server.request_log import RequestLog, server_fault
from stretto.server.tracing import record_since

log = logging.getLogger("stretto.realtime")

Outcome = Literal["completed", "incomplete", "cancelled", "failed", "dropped"]
"""`dropped`: a speculative response that was never released to the client."""
CLOSED = "session_closed"


@dataclass(slots=True)
class AnswerLog:
    """Filled in by the answer's task."""

    kind: Literal["response", "transcription"]
    id: str  # a response's, or that of the item that is transcribed
    clock: Callable[[], float] = time.perf_counter
    arrived: float = field(init=False)  # on `clock`
    outcome: Outcome | None = None  # None: it goes on, or its task was cancelled
    ended: str = ""  # why
    error: str = ""  # what failed in the server, as text
    queued: float | None = None  # seconds in the queue; None: its turn has not come
    first_text: float | None = None
    first_audio: float | None = None
    speech_to_audio: float | None = None  # from the end of speech to the first sound
    speculative: bool = False
    num_tokens: int = 0  # of text, so far
    num_samples: int = 0  # of speech, so far
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0, 0))  # of the prompt, until the end
    sample_rate: int = 24_000
    finished: Finished | None = None  # the engine's last event

    def __post_init__(self) -> None:
        self.arrived = self.clock()

    def saw_text(self, tokens: int) -> None:
        self.num_tokens += tokens
        if self.first_text is None:
            self.first_text = self.elapsed()

    def saw_audio(self, samples: int) -> None:
        self.num_samples += samples
        if self.first_audio is None:
            self.first_audio = self.elapsed()

    def finish(self, event: Finished) -> None:
        self.finished = event
        self.usage = event.usage

    def end(self, outcome: Outcome, why: str) -> None:
        """The first call counts: a cancelled answer stays cancelled."""
        if self.outcome is None:
            self.outcome = outcome
            self.ended = why

    def fail(self, error: BaseException) -> None:
        self.end("failed", type(error).__name__)
        if isinstance(error, Exception):
            self.error = server_fault(error)

    def elapsed(self) -> float:
        return self.clock() - self.arrived

    @property
    def audio_seconds(self) -> float:
        return self.usage.samples / self.sample_rate


@dataclass(slots=True)
class AnswerRecorder:
    """Records the answers of one session; `connection` is the log of its WebSocket."""

    metrics: Metrics
    connection: RequestLog
    tracer: TraceExporter | None = None

    def record(self, answer: AnswerLog, task: asyncio.Task[None] | None) -> None:
        """The answer's task is over (None: it never had one)."""
        if task is not None and not task.cancelled() and (error := task.exception()) is not None:
            log.error("a %s failed unexpectedly", answer.kind, exc_info=error)
            answer.fail(error)
        answer.end("cancelled", CLOSED)
        if answer.finished is None:
            answer.usage = replace(answer.usage, text_tokens=answer.num_tokens)
        self._count(answer)
        level = logging.DEBUG if answer.outcome == "dropped" else logging.INFO
        write_line(level, lambda: self._fields(answer))
        self._trace(answer)

    def _count(self, answer: AnswerLog) -> None:
        realtime = self.metrics.realtime
        if answer.kind == "transcription":
            realtime.transcriptions.labels(answer.outcome).inc()
        elif answer.outcome != "dropped":
            realtime.responses.labels(answer.outcome).inc()
            if answer.speech_to_audio is not None:
                realtime.first_audio.observe(answer.speech_to_audio)
        self.metrics.record_answer(answer.usage, answer.audio_seconds, answer.queued)

    def _trace(self, answer: AnswerLog) -> None:
        if self.tracer is None or self.connection.trace is None:
            return
        failed = answer.outcome == "failed"
        self.tracer.put(
            record_since(
                answer.arrived,
                self.connection.trace.child(),
                f"realtime {answer.kind}",
                _attributes(answer),
                queued=answer.queued,
                finished=[answer.finished] if answer.finished is not None else [],
                error=(answer.error or answer.ended) if failed else "",
                server=False,
            )
        )

    def _fields(self, answer: AnswerLog) -> Fields:
        a = answer
        return {
            "kind": a.kind,
            "id": a.id,
            "session": self.connection.realtime_session or None,
            "connection": str(self.connection.request_id),
            "key": self.connection.owner or None,
            "outcome": a.outcome,
            "queued_ms": milliseconds(a.queued),
            "first_text_ms": milliseconds(a.first_text),
            "first_audio_ms": milliseconds(a.first_audio),
            "speech_to_audio_ms": milliseconds(a.speech_to_audio),
            "tokens": a.usage.text_tokens or None,
            "audio_s": round(a.audio_seconds, 2) if a.usage.samples else None,
            "speculative": a.speculative or None,
            "ended": a.ended,
            "error": a.error or None,
            "ms": milliseconds(a.elapsed()),
        }


def _attributes(answer: AnswerLog) -> Attributes:
    return {
        "stretto.answer_id": answer.id,
        "stretto.outcome": answer.outcome,
        "stretto.ended": answer.ended,
        "stretto.first_text_s": answer.first_text,
        "stretto.first_audio_s": answer.first_audio,
        "stretto.speech_to_audio_s": answer.speech_to_audio,
        "stretto.audio_s": answer.audio_seconds if answer.usage.samples else None,
        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens or None,
        "gen_ai.usage.output_tokens": answer.usage.text_tokens or None,
    }
