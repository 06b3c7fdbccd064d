"""An engine that says what it is told to: for what the server does around an answer, whatever the
answer is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.engine.events import (
    AudioChunk,
    EngineState,
    Event,
    Finished,
    FinishReason,
    Message,
    Progress,
    TextDelta,
    TimelineSpan,
    Usage,
)
from stretto.family import ModelInfo, Transcription
from stretto.models.qwen3_omni.family import TRANSCRIPTION
from stretto.params import Params
from stretto.preprocess.pool.jobs import Conversation, Outlined
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.threads import Prompts
from stretto.preprocess.pool.worker import do_outline
from tests.server.solo_engine import Ledger, decoded


@dataclass(slots=True)
class ScriptedEngine:
    """Says `pieces` and plays `packets`, in turn; `gate`, if given, is awaited before each event.

    With `prompts`, prompts are built for real before anything is said. With `live_text` a text is
    read while it is written: a packet for each piece, as it comes."""

    pieces: Sequence[str] = ("Hello", " there", ".")
    packets: Sequence[np.ndarray] = ()
    gate: Callable[[int], Any] | None = None
    prompts: Prompts | None = None
    fail_at: int | None = None  # the event at which `error` is raised
    error: Exception | None = None
    timeline: tuple[TimelineSpan, ...] = ()
    state: EngineState = "ready"
    name: str = "scripted"
    calls: list[dict[str, Any]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    numbers: Mapping[str, float] = field(default_factory=dict)
    closed: bool = False
    end: FinishReason = "stop"  # of the text
    audio_end: FinishReason = "stop"
    defaults: Params = field(default_factory=Params)
    live_text: bool = False
    transcription: Transcription | None = TRANSCRIPTION
    weights: str = ""

    @property
    def info(self) -> ModelInfo:
        names = ("Ethan", "Chelsie", "Aiden")
        return ModelInfo(
            self.name, names, "Ethan", 24_000, 32768, defaults=self.defaults,
            live_text=self.live_text, transcription=self.transcription, weights=self.weights,
            voice_aliases={"nick": "Aiden"},
        )  # fmt: skip

    @property
    def progress(self) -> Progress:
        return Progress(self.state, {"thinker": self.state})

    def metrics(self) -> Mapping[str, float]:
        return self.numbers

    async def drain(self, timeout: float) -> None:
        if self.ledger.running:
            try:
                async with asyncio.timeout(timeout):
                    await self.ledger.idle.wait()
            except TimeoutError:
                pass

    async def close(self) -> None:
        self.closed = True
        if self.prompts is not None:
            await self.prompts.close()

    async def outline(
        self, body: MemFile, long: tuple[str, ...], most: int, sender: str = ""
    ) -> tuple[Outlined, MemFile]:
        if self.prompts is not None:
            return await self.prompts.outline(body, long, most, sender)
        return do_outline(body.view(), long, most)

    def generate(
        self, messages: Sequence[Message] | Conversation, **given: Any
    ) -> AsyncIterator[Event]:
        if self.prompts is None:
            plain, tools = decoded(messages)
            self.calls.append({"messages": plain, **given, "tools": tools})
        return self._events(messages, "audio" in given["modalities"], given)

    def speak(self, text: str | AsyncIterator[str], **given: Any) -> AsyncIterator[Event]:
        self.calls.append({"text": text, **given})
        return self._events(text, True, given) if isinstance(text, str) else self._live(text, given)

    async def _live(
        self, text: AsyncIterator[str], given: Mapping[str, Any]
    ) -> AsyncIterator[Event]:
        name, count = str(given["request_id"]), 0
        self.ledger.open(name)
        try:
            async for _ in text:
                yield AudioChunk(1920 * count, np.full(1920, 0.25, np.float32))
                count += 1
            self.ledger.finished += 1
            yield Finished(
                "stop", "stop", Usage(7, count, count, 1920 * count), given["params"].seed or 0, ()
            )
        finally:
            self.ledger.close(name)

    async def _events(
        self, talk: Any, spoken: bool, given: Mapping[str, Any]
    ) -> AsyncIterator[Event]:
        name, params = str(given["request_id"]), given["params"]
        self.ledger.open(name)
        try:
            length = 7
            if self.prompts is not None:
                build = (
                    self.prompts.build(talk)
                    if isinstance(talk, Conversation)
                    else self.prompts.read(talk)
                )
                length = (await build).num_tokens
            events = self._script(spoken)
            for i, event in enumerate(events):
                if self.gate is not None:
                    await self.gate(i)
                if i == self.fail_at:
                    assert self.error is not None
                    raise self.error
                yield event
            samples = sum(len(p) for p in self.packets) if spoken else 0
            usage = Usage(length, len(self.pieces), len(self.packets) if spoken else 0, samples)
            self.ledger.finished += 1
            yield Finished(
                self.end, self.audio_end if spoken else None, usage, params.seed or 0, self.timeline
            )
        finally:
            self.ledger.close(name)

    def _script(self, spoken: bool) -> list[Event]:
        out: list[Event] = []
        at = 0
        packets = list(self.packets) if spoken else []
        for i in range(max(len(self.pieces), len(packets))):
            if i < len(self.pieces):
                out.append(TextDelta((i,), self.pieces[i]))
            if i < len(packets):
                out.append(AudioChunk(at, packets[i]))
                at += len(packets[i])
        return out
