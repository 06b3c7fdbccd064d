"""An engine that says what it is told to: for what the server does around an answer, whatever the answer is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.orchestrator.api import (
    AudioChunk,
    EngineState,
    Event,
    Finished,
    Message,
    ModelInfo,
    Progress,
    TextDelta,
    TimelineSpan,
    Usage,
)
from stretto.prompt.build import PromptBuilder
from stretto.prompt.jobs import Conversation, Outlined
from stretto.prompt.spool import Spool
from stretto.prompt.worker import do_outline
from tests.server.solo_engine import Ledger, decoded


@dataclass(slots=True)
class ScriptedEngine:
    """Says `pieces` and plays `packets`, in turn; `gate`, if given, is awaited before each event.

    With a checkpoint's `builder`, prompts are built for real before anything is said."""

    pieces: Sequence[str] = ("Hello", " there", ".")
    packets: Sequence[np.ndarray] = ()
    gate: Callable[[int], Any] | None = None
    builder: PromptBuilder | None = None
    fail_at: int | None = None  # the event at which `error` is raised
    error: Exception | None = None
    timeline: tuple[TimelineSpan, ...] = ()
    state: EngineState = "ready"
    name: str = "scripted"
    calls: list[dict[str, Any]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    numbers: Mapping[str, float] = field(default_factory=dict)
    closed: bool = False

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(self.name, ("Ethan", "Chelsie", "Aiden"), "Ethan", 24_000, 32768)

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

    async def outline(self, body: Spool, long: tuple[str, ...], most: int, sender: str = "") -> tuple[Outlined, Spool]:
        return do_outline(body.view(), long, most)

    def generate(self, messages: Sequence[Message] | Conversation, **given: Any) -> AsyncIterator[Event]:
        plain, tools = decoded(messages)
        given["tools"] = tools
        self.calls.append({"messages": plain, **given})
        return self._events(plain, "audio" in given["modalities"], given)

    def speak(self, text: str, **given: Any) -> AsyncIterator[Event]:
        self.calls.append({"text": text, **given})
        return self._events([{"role": "user", "content": text}], True, given)

    async def _events(
        self, messages: Sequence[Message], spoken: bool, given: Mapping[str, Any]
    ) -> AsyncIterator[Event]:
        name, params = str(given["request_id"]), given["params"]
        self.ledger.open(name)
        try:
            length = 7
            if self.builder is not None:
                tools = given.get("tools")
                prompt = await asyncio.to_thread(self.builder.build, messages, list(tools) if tools else None)
                length = len(prompt.ids)
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
            yield Finished("stop", "stop" if spoken else None, usage, params.seed or 0, self.timeline)
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
