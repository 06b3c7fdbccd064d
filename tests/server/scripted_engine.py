"""An engine that says what a test wrote: for what the server does around an answer, whatever the
answer is.

Keeps the promises of `stretto.engine.protocol`: tests/engine/test_protocol.py tries them on this
engine and on the real one."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
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
from stretto.errors import Busy, Invalid
from stretto.family import ModelInfo, Transcription
from stretto.models.qwen3_omni.family import TRANSCRIPTION
from stretto.params import Params
from stretto.preprocess import build as work
from stretto.preprocess.pool.jobs import Conversation, Outlined, Windows
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.split import do_cut
from stretto.preprocess.pool.threads import Prompts
from stretto.preprocess.pool.worker import do_outline
from stretto.preprocess.response_items import Translation, chat_tools
from tests.server.scripted_session import Answers, Ask, Events, ScriptedSession


@dataclass(slots=True)
class Ledger:
    """Iterators given out, and what became of them."""

    opened: int = 0
    closed: int = 0
    finished: int = 0
    most: int = 0  # at once
    running: set[str] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, name: str) -> None:
        assert name not in self.running, "an id was used twice"
        self.opened += 1
        self.running.add(name)
        self.most = max(self.most, len(self.running))
        self.idle.clear()

    def close(self, name: str) -> None:
        self.closed += 1
        self.running.discard(name)
        if not self.running:
            self.idle.set()


def decoded(messages: Any, tools: Any = None) -> tuple[Any, Any]:
    """Messages and tools as plain data, however the server passed them on."""
    if not isinstance(messages, Conversation):
        return messages, list(tools) if tools else None
    given, declared, instructions = messages.parts()
    tools = work.decode(declared, "tools") if declared is not None else None
    plain = work.read_messages(given, messages.form, instructions, messages.recalled)
    if isinstance(plain, Translation):
        return plain.messages, chat_tools(tools)
    return work.recall(plain, messages.recalled), tools


@dataclass(slots=True)
class ScriptedEngine:
    """Says `pieces` and plays `packets`, in turn, or does what `script` says of what is asked;
    `gate`, if given, is awaited before each event.

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
    calls: list[dict[str, Any]] = field(default_factory=list)  # of `generate` and `speak`
    ledger: Ledger = field(default_factory=Ledger)
    numbers: Mapping[str, float] = field(default_factory=dict)
    closed: bool = False
    end: FinishReason = "stop"  # of the text
    audio_end: FinishReason = "stop"
    defaults: Params = field(default_factory=Params)
    live_text: bool = False
    transcription: Transcription | None = TRANSCRIPTION
    weights: str = ""
    script: Answers | None = None
    asks: list[Ask] = field(default_factory=list)  # of `respond`, of all sessions
    sessions: list[ScriptedSession] = field(default_factory=list)
    stages: Mapping[str, str] | None = None  # of `progress`, where they are not one
    trouble: str | None = None
    clip_error: Exception | None = None  # of `enrol`
    card: Mapping[str, Any] = field(default_factory=dict)  # of the model's info, what is otherwise

    @property
    def info(self) -> ModelInfo:
        names = ("Ethan", "Chelsie", "Aiden")
        info = ModelInfo(
            self.name, names, "Ethan", 24_000, 32768, defaults=self.defaults,
            live_text=self.live_text, transcription=self.transcription, weights=self.weights,
            voice_aliases={"nick": "Aiden"},
        )  # fmt: skip
        return replace(info, **self.card)

    @property
    def progress(self) -> Progress:
        stages = {"thinker": self.state} if self.stages is None else self.stages
        return Progress(self.state, stages, self.trouble)

    def metrics(self) -> Mapping[str, float]:
        return self.numbers

    async def drain(self, timeout: float) -> None:
        self.state = "draining"
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
        self, body: MemFile, long: tuple[str, ...], max_short_bytes: int, client: str = ""
    ) -> tuple[Outlined, MemFile]:
        if self.prompts is not None:
            return await self.prompts.outline(body, long, max_short_bytes, client)
        return do_outline(body.view(), long, max_short_bytes)

    async def cut(
        self, sound: MemFile, seconds: float, client: str = ""
    ) -> tuple[Windows, MemFile]:
        def cut_here() -> tuple[Windows, MemFile]:
            return do_cut(sound.view(), seconds)  # an argument would live until the thread goes on

        return await asyncio.to_thread(cut_here)

    # -- requests

    def check(self, given: Mapping[str, Any]) -> tuple[bool, Params]:
        """Whether there is to be sound, and the parameters; refuses what any engine does."""
        modalities, voice = given.get("modalities", ("text", "audio")), given.get("voice")
        if set(modalities) - {"text", "audio"} or not modalities:
            raise Invalid("modalities must be text and/or audio", "modalities")
        if voice is not None and voice.lower() not in map(str.lower, self.info.voices):
            raise Invalid(f"there is no voice {voice!r}", "voice")
        self._check_open()
        return "audio" in modalities, given.get("params") or self.defaults

    def _check_open(self) -> None:
        if self.state == "draining":
            raise Busy("the server is shutting down")

    def generate(
        self, messages: Sequence[Message] | Conversation, **given: Any
    ) -> AsyncIterator[Event]:
        spoken, params = self.check(given)
        plain: Any = ()
        if self.prompts is None:
            plain, tools = decoded(messages, given.get("tools"))
            self.calls.append({"messages": plain, **given, "tools": tools})
        events = self._script(spoken) if self.script is None else self.script(Ask(plain, given))
        return self._answer(events, spoken, params, given, messages)

    def speak(self, text: str | AsyncIterator[str], **given: Any) -> AsyncIterator[Event]:
        _, params = self.check({k: v for k, v in given.items() if k != "modalities"})
        self.calls.append({"text": text, **given})
        if not isinstance(text, str):
            return self._answer(self._live(text), True, params, given)
        asked = Ask([{"role": "user", "content": text}], given)
        sound = [e for e in self._script(True) if isinstance(e, AudioChunk)]
        events = sound if self.script is None else self.script(asked)
        return self._answer(events, True, params, given, text)

    async def enrol(self, clip: Conversation, *, owner: str = "") -> bytes:
        clip.close()
        self._check_open()
        if self.clip_error is not None:
            raise self.clip_error
        if not self.info.cloning:
            raise Invalid("this model has no voices but its own", "voice")
        return b"a voice"

    def session(self, *, owner: str = "", client: str = "") -> ScriptedSession:
        self._check_open()
        self.sessions.append(ScriptedSession(self, owner, client))
        return self.sessions[-1]

    # -- answers

    async def play(self, events: Events, spoken: bool) -> AsyncGenerator[Event]:
        """The events of a script, each when the gate lets it pass."""
        at = 0
        async for event in _each(events):
            if self.gate is not None:
                await self.gate(at)
            if at == self.fail_at:
                assert self.error is not None
                raise _again(self.error)
            at += 1
            if spoken or not isinstance(event, AudioChunk):
                await asyncio.sleep(0)
                yield event

    async def _answer(
        self, script: Events, spoken: bool, params: Params, given: Mapping[str, Any], talk: Any = ""
    ) -> AsyncIterator[Event]:
        name, tokens, frames, samples = str(given.get("request_id")), 0, 0, 0
        self.ledger.open(name)
        try:
            length = await self._prompt_length(talk)
            async with aclosing(self.play(script, spoken)) as events:
                async for event in events:
                    match event:
                        case TextDelta():
                            tokens += len(event.ids)
                        case AudioChunk():
                            frames += 1
                            samples += len(event.samples)
                    yield event
            usage = Usage(length, tokens, frames, samples)
            self.ledger.finished += 1
            yield Finished(
                self.end, self.audio_end if spoken else None, usage, params.seed or 0, self.timeline
            )
        finally:
            self.ledger.close(name)

    async def _prompt_length(self, talk: Any) -> int:
        if self.prompts is None:
            return 7
        if isinstance(talk, Conversation):
            return (await self.prompts.build(talk)).num_tokens
        return (await self.prompts.read(talk)).num_tokens

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

    async def _live(self, text: AsyncIterator[str]) -> AsyncIterator[Event]:
        count = 0
        async for _ in text:
            yield AudioChunk(1920 * count, np.full(1920, 0.25, np.float32))
            count += 1


def _again(error: Exception) -> Exception:
    """The same, without the frames in which it was raised before: they would stay with it."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


async def _each(events: Events) -> AsyncIterator[Event]:
    if isinstance(events, AsyncIterable):
        async for event in events:
            yield event
    else:
        for event in events:
            yield event
