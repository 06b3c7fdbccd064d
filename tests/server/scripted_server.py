"""The real server over the scripted engine, which answers as a test's `Script` says: for tests of
clients, of which the page is one.

The test changes the script while the server runs, and sees what was asked. `answers` are those of
spoken conversations, which a test makes event by event."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.engine.events import AudioChunk, Event, Progress, TextDelta, TimelineSpan
from stretto.errors import StageDead
from stretto.family import ModelInfo
from stretto.server.keys import Keys
from stretto.server.openai.error_body import Refused
from stretto.server.openai.voice_store import VoiceStore
from stretto.server.realtime.vad import Batcher
from tests.server.conftest import Running, serve
from tests.server.realtime.loudness_vad import LoudnessVad
from tests.server.scripted_engine import Ledger, ScriptedEngine
from tests.server.scripted_session import Ask, Float

READY = {"status": "ready", "stages": {"thinker": "ready", "talker": "ready", "code2wav": "ready"}}
CARD: dict[str, Any] = {
    "voices": ("chelsie", "ethan", "aiden"), "default_voice": "ethan",
    "input_modalities": ("text", "audio", "image", "video"),
    "stages": {"code2wav": "vocoder: makes the sound"},
}  # fmt: skip
RATE = 24000
ANSWER = (
    "In a fugue, the stretto is the moment when the voices stop waiting for one another. "
    "Each takes up the subject before the last has laid it down, and the music tightens without "
    "growing faster. "
    "This answer was made in the same way: while these words were still being chosen, they were "
    "already being spoken."
)


@dataclass
class Script:
    """What the server does next. Packets are sizes in frames of 80 ms; the first frame gives 1365
    samples."""

    health: dict[str, Any] = field(default_factory=lambda: dict(READY))
    text: str = ANSWER
    packets: tuple[int, ...] = (1, 2, 4, 4)
    pace: float = 0.0  # seconds between events of the stream
    refuse: tuple[int, dict[str, str], str] | None = None  # status, headers, message
    refusals: int = 1  # how often, before it answers
    refuse_from: int = 1  # the first request that is refused
    answers: int | None = None  # so many requests are answered, later ones wait for ever
    silent: bool = False  # text alone, whatever is asked for
    break_after: int | None = None  # events, then an error
    cut_after: int | None = None  # events, then the connection ends
    endless: bool = False  # goes on until the client leaves
    # where it waits for `go_on`: "words 0" and "packet 0" (before them), ..., "end"
    hold: tuple[str, ...] = ()
    timeline: bool = True
    spans: list[TimelineSpan] | None = None  # of the timeline; else those of three stages
    card: dict[str, Any] = field(default_factory=dict)  # of the model's info, beside `CARD`


def sound(start: int, samples: int) -> Float:
    """A calm chord that swells and fades: something a person can check by ear, continuous from
    packet to packet."""
    t = (start + np.arange(samples)) / RATE
    chord = sum(np.sin(2 * math.pi * f * t) for f in (220.0, 277.2, 329.6)) / 3
    wave = 0.3 * (0.6 + 0.4 * np.sin(2 * math.pi * 0.7 * t)) * chord
    return np.asarray(wave, np.float32)


def stage_spans(num_words: int, sizes: tuple[int, ...]) -> list[TimelineSpan]:
    """A timeline as the engine would tell it: stages that overlap."""
    rows = [("thinker", "prefill", 0.004, 0.018), ("talker", "prefill", 0.010, 0.021)]
    step = 0.0021
    rows += [
        ("thinker", "decode", 0.018 + i * step, 0.018 + i * step + 0.0016) for i in range(num_words)
    ]
    at, frame = 0.0235, 0
    for n, size in enumerate(sizes):
        rows.append(("thinker>talker", f"chunk {n}", at - 0.002, at - 0.0012))
        for _ in range(size):
            rows.append(("talker", f"frame {frame}", at, at + 0.0017))
            at, frame = at + 0.002, frame + 1
        rows.append(("talker>code2wav", f"chunk {n}", at, at + 0.0006))
        rows.append(("code2wav", f"packet {n}", at + 0.0007, at + 0.0021))
        rows.append(("packets", f"packet {n}", at + 0.0021, at + 0.0023))
    return [TimelineSpan(*row) for row in rows]


@dataclass(slots=True)
class _Engine(ScriptedEngine):
    """States and info are those of the script."""

    told: Script = field(default_factory=Script)

    @property
    def progress(self) -> Progress:
        health = self.told.health
        return Progress(health["status"], health.get("stages", {}), health.get("error"))

    @property
    def info(self) -> ModelInfo:
        self.card = {**CARD, **self.told.card}
        return ScriptedEngine.info.__get__(self)  # type: ignore[no-any-return]


class ScriptedServer(AbstractContextManager["ScriptedServer"]):
    def __init__(self, **settings: Any) -> None:
        self.engine = _Engine(name="tiny", script=self._answer)
        settings = {"drain_timeout": 1.0, "max_body_mb": 1.0, **settings}
        self.running: Running = serve(self.engine, **settings)
        self.changed = threading.Condition()  # a request came, or an answer of a conversation began
        self.reset()

    def __enter__(self) -> ScriptedServer:
        self.running.__enter__()
        self.service = self.running.server.service
        self.service.sessions.batcher = Batcher(LoudnessVad)
        self.url = self.running.url
        return self

    def __exit__(self, *error: object) -> None:
        self.running.__exit__(*error)

    def reset(self) -> None:
        """As good as new."""
        self.script = Script()
        self.engine.calls, self.engine.clip_error = [], None
        self.engine.ledger = Ledger()
        self.gate = asyncio.Semaphore(0)
        self.question: asyncio.Queue[str] = asyncio.Queue()  # what is written down of one, spoken
        self.answers: list[asyncio.Queue[Event | Exception | None]] = []
        if self.running.thread.is_alive():
            self.service.keys = Keys.of(())
            self.service.voices = VoiceStore()
            self.service.sessions.limit = self.service.config.realtime_sessions

    @property
    def script(self) -> Script:
        return self.engine.told

    @script.setter
    def script(self, script: Script) -> None:
        self.engine.told = script

    # -- what a test asks and does

    @property
    def requests(self) -> list[dict[str, Any]]:
        """What was asked of the engine, in writing."""
        return self.engine.calls

    def wait_for_requests(self, count: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: len(self.requests) >= count)

    def call(self, function: Any, *args: Any) -> None:
        """On the server's event loop, soon."""
        self.running.loop.call_soon_threadsafe(function, *args)

    def go_on(self) -> None:
        """Let an answer pass the next place where the script holds it. May be said before it is
        there."""
        self.call(self.gate.release)

    def wait_until_left(self) -> None:
        """Until no answer is being made, of which one was not finished."""
        self.running.do(self.engine.ledger.idle.wait())
        assert self.engine.ledger.closed > self.engine.ledger.finished

    def lock(self, key: str) -> None:
        """From now on it wants this key."""
        self.service.keys = Keys.of((key,))

    def cut_connections(self) -> None:
        """As a network does that breaks."""
        for connection in list(self.running.server.uvicorn.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    # -- answers in writing

    async def _answer(self, ask: Ask) -> AsyncIterator[Event]:
        if "request_id" not in ask.given:  # of a spoken conversation
            async for event in self._reply(ask):
                yield event
            return
        with self.changed:
            self.changed.notify_all()
        script, count = self.script, 0
        await self._refuse(script)
        async for event in self._events(ask, script):
            if script.break_after == count:
                raise StageDead("the talker stage died")
            if script.cut_after == count:
                self.cut_connections()
                await asyncio.Event().wait()
            yield event
            count += 1
            await asyncio.sleep(script.pace)

    async def _refuse(self, script: Script) -> None:
        number = len(self.requests)
        if script.refuse is not None and script.refusals > 0 and number >= script.refuse_from:
            script.refusals -= 1
            status, headers, message = script.refuse
            raise Refused(status, message, kind="rate_limit_error", headers=headers)
        if script.answers is not None and number > script.answers:
            await asyncio.Event().wait()

    async def _at(self, place: str) -> None:
        if place in self.script.hold:
            await self.gate.acquire()

    async def _events(self, ask: Ask, script: Script) -> AsyncIterator[Event]:
        written = "modalities" in ask.given
        words = script.text.split(" ") if written else []
        words = [w + " " for w in words[:-1]] + words[-1:]
        sizes = script.packets
        spans = script.spans or stage_spans(len(words), sizes)
        self.engine.timeline = tuple(spans) if script.timeline else ()
        start, said = 0, 0
        for n, size in enumerate(sizes):
            share = len(words) * (n + 1) // len(sizes)
            await self._at(f"words {n}")
            for i in range(said, share):
                yield TextDelta((i,), words[i])
            said = share
            await self._at(f"packet {n}")
            samples = size * 1920 - (555 if n == 0 else 0)
            if not script.silent:
                yield AudioChunk(start, sound(start, samples))
                start += samples
        while script.endless:
            yield AudioChunk(start, sound(start, 1920))
            start += 1920
            await asyncio.sleep(0.02)
        await self._at("end")

    # -- answers of spoken conversations

    async def _reply(self, ask: Ask) -> AsyncIterator[Event]:
        if "Transcribe the" in ask.texts[0]:
            yield TextDelta((0,), await self.question.get())
            return
        events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        with self.changed:
            self.answers.append(events)
            self.changed.notify_all()
        while (event := await events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    def tell(self, number: int, *events: Event | Exception | None) -> None:
        """The answer of this number goes on with these; None ends it."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.answers) > number)
        for event in events:
            self.call(self.answers[number].put_nowait, event)
